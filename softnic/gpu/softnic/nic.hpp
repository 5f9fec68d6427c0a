// A NIC as its host uses it: keys, queue pairs, faults, start and stop; and the NIC that is a
// kernel.
//
// A NIC carries out the queues of its own process. Peers' memory is wherever `add_key` says it is mapped:
// at the same address within a process, and where CUDA IPC mapped it between processes.
#pragma once

#include <vector>

#include "softnic/cuda.hpp"
#include "softnic/nic_kernel.cuh"
#include "softnic/queue.hpp"

namespace softnic {

// NOTES: while a NIC runs nothing may wait for the whole GPU (`store` does) or load code: the NIC would have
// to end first. Programs load all code eagerly and run every kernel once before.
//
// Every wait on a queue is over by then. A NIC that is not stopped ends by itself after this time.
// A processor is shared with other work, so its limit is longer.
#if defined(__CUDACC__)
constexpr uint64_t kNicLifeNs = 20'000'000'000;
#else
constexpr uint64_t kNicLifeNs = 600'000'000'000;
#endif

class Nic {
  public:
    explicit Nic(int device) : device(device) {
        SOFTNIC_CUDA(cudaSetDevice(device));
        control_ = allocate_mapped<Control>(1);
    }
    virtual ~Nic() = default;

    // Registers memory. `address` is the address in requests, `mapped` the address at which this
    // GPU reaches the memory.
    void add_key(uint32_t key, uint64_t address, uint64_t num_bytes, const void* mapped,
                 uint32_t access = kAll) {
        keys_.push_back({address, num_bytes, reinterpret_cast<uint64_t>(mapped), key, access});
    }

    // A queue pair, and the memory where its adds leave old values. Its number here.
    uint32_t add_queue(SendQueue& queue) {
        queue.handle.scratch_lkey = 0x10000 + queue.handle.qpn;
        add_key(queue.handle.scratch_lkey, queue.handle.scratch, 8,
                reinterpret_cast<void*>(queue.handle.scratch));
        return add_queue(queue.handle);
    }
    uint32_t add_queue(const sy_mlx5_qp& handle) {
        Queue mine = {};
        mine.sq = handle.sq;
        mine.dbrec = handle.dbrec;
        mine.doorbell = handle.doorbell;
        mine.cq = handle.cq;
        mine.cq_dbrec = handle.cq_dbrec;
        mine.qpn = handle.qpn;
        mine.sq_depth = handle.sq_depth;
        mine.cq_depth = handle.cq_depth;
        mine.is_collapsed = (handle.flags & SY_MLX5_CQ_COLLAPSED) != 0;
        mine.has_record = (handle.flags & SY_MLX5_NO_RECORD) == 0;
        mine.control_bit = queues_.size() % 32;
        queues_.push_back(mine);
        return queues_.size() - 1;
    }

    // Sets the destination of a queue's immediate data: a ring with no other writer of completions.
    void set_receiver(uint32_t queue, const SendQueue& peer) {
        SOFTNIC_CHECK(!peer.sizes.is_collapsed, "receives need a ring of completions");
        set_receiver(queue, peer.handle);
    }
    void set_receiver(uint32_t queue, const sy_mlx5_qp& peer) {
        queues_[queue].recv_dbrec = peer.dbrec;
        queues_[queue].recv_cq = peer.cq;
        queues_[queue].recv_cq_depth = peer.cq_depth;
        queues_[queue].recv_qpn = peer.qpn;
    }

    // Faults that `prepare` hands over.
    //
    // The request with this number since the start fails.
    void fail(uint32_t queue, uint64_t nth, uint32_t syndrome) {
        queues_[queue].fail_at = nth;
        queues_[queue].fail_syndrome = syndrome;
    }
    // Drops this number of doorbells from the start. The next doorbell announces their requests,
    // too.
    void drop_doorbells(uint32_t queue, uint32_t num) { queues_[queue].num_dropped = num; }

    // Faults at any time, by masks of queue pairs.
    //
    // They do nothing.
    void stall(uint32_t mask) { __atomic_store_n(&control_->stalled, mask, __ATOMIC_RELEASE); }
    // Makes these peers silent: requests to them fail as when retries are exceeded.
    void set_dead(uint32_t mask) { __atomic_store_n(&control_->dead, mask, __ATOMIC_RELEASE); }

    // Delays, splits and reorders operations within the rules, from the next fresh start on; 0
    // turns that off.
    void set_adversary(uint64_t seed) { seed_ = seed; }

    // Everything that needs memory or waits for the GPU: before any NIC runs. With `is_fresh` all queue
    // pairs begin as after a reset, else where they were when the NIC was stopped.
    virtual void prepare(bool is_fresh = true) = 0;
    virtual void start() = 0;
    // Ends once everything that was announced is done.
    virtual Counts stop() = 0;

    const int device;

  protected:
    Control* control_;
    std::vector<Queue> queues_;
    std::vector<Key> keys_;
    uint64_t seed_ = 0;
};

#if defined(__CUDACC__)
// A stream of its own to run in.
class KernelRun {
  public:
    KernelRun() { SOFTNIC_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    // With a block for every queue pair.
    void start(const NicParams& params) {
        nic_kernel<<<params.num_queues, kNicThreads, 0, stream_>>>(params);
        SOFTNIC_CUDA(cudaGetLastError());
    }
    void wait() { SOFTNIC_CUDA(cudaStreamSynchronize(stream_)); }

  private:
    cudaStream_t stream_;
};
#else
// A thread of the processor. Its block serves all queue pairs.
class KernelRun {
  public:
    ~KernelRun() { wait(); }
    void start(const NicParams& params) {
        thread_ = std::thread([params] { simt::run(nic_kernel, params, 1, kNicThreads, false); });
    }
    void wait() {
        if (thread_.joinable())
            thread_.join();
    }

  private:
    std::thread thread_;
};
#endif

class NicKernel : public Nic {
  public:
    explicit NicKernel(int device) : Nic(device), counts_(allocate<Counts>(1)) {}
    ~NicKernel() override { __atomic_store_n(&control_->stop, uint64_t{1}, __ATOMIC_RELEASE); }

    void prepare(bool is_fresh) override {
        SOFTNIC_CUDA(cudaSetDevice(device));
        if (device_queues_ == nullptr) {
            device_queues_ = allocate<Queue>(queues_.size());
            device_keys_ = allocate<Key>(keys_.size());
            states_ = allocate<QueueState>(queues_.size());
            num_queues_ = queues_.size();
            num_keys_ = keys_.size();
        }
        SOFTNIC_CHECK(num_queues_ == queues_.size() && num_keys_ == keys_.size(),
                      "queue pairs or keys were added after the first start");
        store(device_queues_, queues_.data(), queues_.size() * sizeof(queues_[0]));
        store(device_keys_, keys_.data(), keys_.size() * sizeof(keys_[0]));
        if (is_fresh)
            SOFTNIC_CUDA(cudaMemset(states_, 0, queues_.size() * sizeof(QueueState)));
        const Counts none = {};
        store(counts_, &none, sizeof(none));
        __atomic_store_n(&control_->stop, uint64_t{0}, __ATOMIC_RELEASE);
    }

    void start() override {
        SOFTNIC_CUDA(cudaSetDevice(device));
        run_.start({device_queues_, states_, device_keys_, control_, counts_, kNicLifeNs, seed_,
                    static_cast<uint32_t>(queues_.size()), static_cast<uint32_t>(keys_.size()), 1,
                    0});
    }

    Counts stop() override {
        __atomic_store_n(&control_->stop, uint64_t{1}, __ATOMIC_RELEASE);
        SOFTNIC_CUDA(cudaSetDevice(device));
        run_.wait();
        return load(counts_);
    }

  private:
    Counts* counts_;
    Queue* device_queues_ = nullptr;
    Key* device_keys_ = nullptr;
    QueueState* states_ = nullptr;
    size_t num_queues_ = 0, num_keys_ = 0;
    KernelRun run_;
};

} // namespace softnic
