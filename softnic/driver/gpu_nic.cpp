// The NICs of GPUs, on a processor, for tests in Rust: the kernel as fibres of a thread, and the thread that
// drives copy engines over streams of the host (shim/cuda_runtime.h).
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "simt.hpp"

#include "softnic/copy_nic.hpp"

namespace {

using softnic::Counts;
using softnic::Nic;

// As `Backend` in gpu_nic.rs.
Nic* make(uint32_t backend) {
    if (backend == 0)
        return new softnic::NicKernel(0);
    return new softnic::CopyNic(0);
}

} // namespace

// The process frees everything when it ends, except memory that stands for GPU memory, which is
// never freed.
extern "C" {

Nic* sy_gpu_nic_open(uint32_t backend, uint64_t seed) {
    Nic* nic = make(backend);
    nic->set_adversary(seed);
    return nic;
}

void sy_gpu_nic_close(Nic* nic) { delete nic; }

void sy_gpu_nic_add_key(Nic* nic, uint32_t key, uint64_t address, uint64_t num_bytes,
                        uint64_t mapped, uint32_t access) {
    nic->add_key(key, address, num_bytes, reinterpret_cast<const void*>(mapped), access);
}

uint32_t sy_gpu_nic_add_queue(Nic* nic, const sy_mlx5_qp* handle) {
    return nic->add_queue(*handle);
}

void sy_gpu_nic_set_receiver(Nic* nic, uint32_t queue, const sy_mlx5_qp* peer) {
    nic->set_receiver(queue, *peer);
}

void sy_gpu_nic_fail(Nic* nic, uint32_t queue, uint64_t nth, uint32_t syndrome) {
    nic->fail(queue, nth, syndrome);
}

void sy_gpu_nic_drop_doorbells(Nic* nic, uint32_t queue, uint32_t num) {
    nic->drop_doorbells(queue, num);
}

void sy_gpu_nic_stall(Nic* nic, uint32_t mask) { nic->stall(mask); }

void sy_gpu_nic_set_dead(Nic* nic, uint32_t mask) { nic->set_dead(mask); }

void sy_gpu_nic_start(Nic* nic, uint32_t is_fresh) {
    nic->prepare(is_fresh != 0);
    nic->start();
}

void sy_gpu_nic_stop(Nic* nic, Counts* counts) { *counts = nic->stop(); }
}
