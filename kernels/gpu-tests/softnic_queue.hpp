// Send queues as a host sets them up for posters on a GPU: in mapped host memory, as on a NIC that cannot
// reach the GPU's, or in GPU memory.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <sched.h>

#include "check.hpp"
#include "switchyard/comm/mlx5/queue.h"

enum class Where { kHost, kDevice };

inline const char* name_of(Where where) { return where == Where::kHost ? "host" : "device"; }

// Keeps this thread on processors near a GPU, so that host memory allocated from now on is near it, too.
// Returns the processors, or "any" where the system does not say which are.
inline std::string stay_near(int gpu) {
    char bus_id[32] = {};
    CHECK_CUDA(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), gpu));
    for (char& c : bus_id)
        c = static_cast<char>(tolower(c));
    FILE* file = fopen((std::string("/sys/bus/pci/devices/") + bus_id + "/local_cpulist").c_str(), "r");
    char list[256] = {};
    if (file == nullptr || fgets(list, sizeof(list), file) == nullptr) {
        if (file != nullptr)
            fclose(file);
        return "any";
    }
    fclose(file);
    list[strcspn(list, "\n")] = 0;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    for (const char* at = list; *at != 0;) {
        char* end = nullptr;
        const unsigned long first = strtoul(at, &end, 10);
        unsigned long last = first;
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu)
            CPU_SET(cpu, &cpus);
        at = *end == ',' ? end + 1 : end;
        if (end == at && *at != 0)
            break;
    }
    return sched_setaffinity(0, sizeof(cpus), &cpus) == 0 ? list : "any";
}

struct QueueSizes {
    uint32_t sq_depth = 1024;
    bool is_collapsed = true;
    uint32_t batch = 32;
    uint32_t max_message_bytes = SY_MLX5_MAX_MESSAGE_BYTES;
};

// A queue pair's memory: basic blocks, completions, doorbell records, doorbell register (a word that the
// model polls), and the posters' counts, which are in GPU memory always. Freed with the process.
class SendQueue {
  public:
    SendQueue(Where where, const QueueSizes& sizes, uint32_t qpn, uint32_t peer)
        : sizes(sizes), where(where) {
        const uint32_t cq_depth = sizes.is_collapsed ? 1 : sizes.sq_depth;
        cq_offset_ = uint64_t{sizes.sq_depth} * SY_MLX5_BLOCK_BYTES;
        dbrec_offset_ = cq_offset_ + uint64_t{cq_depth} * SY_MLX5_CQE_BYTES;
        num_bytes_ = (dbrec_offset_ + 4 * 128 + 4095) / 4096 * 4096;
        if (where == Where::kHost) {
            void* pointer = nullptr;
            CHECK_CUDA(cudaHostAlloc(&pointer, num_bytes_, cudaHostAllocMapped | cudaHostAllocPortable));
            memory = static_cast<uint8_t*>(pointer);
        } else {
            memory = device_alloc<uint8_t>(num_bytes_);
        }
        const uint64_t base = reinterpret_cast<uint64_t>(memory);
        // Counts and scratch on lines of their own.
        uint8_t* counts = device_alloc<uint8_t>(sizeof(sy_mlx5_queue_state) + 128);
        handle = {};
        handle.sq = base;
        handle.cq = base + cq_offset_;
        handle.dbrec = base + dbrec_offset_;
        handle.cq_dbrec = handle.dbrec + 128;
        handle.doorbell = handle.dbrec + 256;
        handle.state = reinterpret_cast<uint64_t>(counts);
        handle.scratch = handle.state + sizeof(sy_mlx5_queue_state);
        handle.qpn = qpn;
        handle.sq_depth = sizes.sq_depth;
        handle.cq_depth = cq_depth;
        handle.flags = sizes.is_collapsed ? SY_MLX5_CQ_COLLAPSED : 0;
        handle.batch = sizes.batch;
        handle.max_message_bytes = sizes.max_message_bytes;
        handle.peer = peer;
        const char* wrong = sy_mlx5_check_qp(&handle);
        CHECK(wrong == nullptr, "queue pair %u: %s", qpn, wrong);
        reset();
    }

    // What the host does before the queue is used, and after an error. Nobody may post meanwhile.
    void reset() {
        fill(0, 0, cq_offset_);
        fill(cq_offset_, SY_MLX5_CQE_FILL, dbrec_offset_ - cq_offset_);
        fill(dbrec_offset_, 0, num_bytes_ - dbrec_offset_);
        CHECK_CUDA(cudaMemset(reinterpret_cast<void*>(handle.state), 0, sizeof(sy_mlx5_queue_state)));
        CHECK_CUDA(cudaDeviceSynchronize());
    }

    sy_mlx5_queue_state state() const {
        return from_device(reinterpret_cast<const sy_mlx5_queue_state*>(handle.state));
    }

    const QueueSizes sizes;
    const Where where;
    sy_mlx5_qp handle;
    uint8_t* memory;

  private:
    void fill(uint64_t offset, int value, uint64_t num_bytes) {
        if (where == Where::kHost)
            memset(memory + offset, value, num_bytes);
        else
            CHECK_CUDA(cudaMemset(memory + offset, value, num_bytes));
    }
    uint64_t cq_offset_, dbrec_offset_, num_bytes_;
};

// The handles of several queues, where kernels find them.
inline sy_mlx5_qp* upload_handles(const std::vector<SendQueue>& queues) {
    std::vector<sy_mlx5_qp> handles;
    for (const SendQueue& queue : queues)
        handles.push_back(queue.handle);
    sy_mlx5_qp* table = device_alloc<sy_mlx5_qp>(handles.size());
    upload(table, handles.data(), handles.size() * sizeof(sy_mlx5_qp));
    return table;
}
