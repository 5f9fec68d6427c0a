// A NIC as a host holds it: keys, queue pairs, faults, start and stop; and the one that is a kernel.
#pragma once

#include <vector>

#include "softnic_model.cuh"
#include "softnic_queue.hpp"

// NOTES: while a NIC runs nothing may wait for the whole GPU (upload does) or load code: the NIC would have
// to end first. Programs load all code eagerly and run every kernel once before.
//
// Every wait on a queue is over by then, and a NIC that nobody stops ends by itself.
constexpr uint64_t kNicLifeNs = 20'000'000'000;

class Nic {
  public:
    explicit Nic(int device) : device(device) {
        CHECK_CUDA(cudaSetDevice(device));
        void* pointer = nullptr;
        CHECK_CUDA(cudaHostAlloc(&pointer, sizeof(softnic::Control),
                                 cudaHostAllocMapped | cudaHostAllocPortable));
        control_ = static_cast<softnic::Control*>(pointer);
        *control_ = {};
    }
    virtual ~Nic() = default;

    // Registers memory. `address` is what requests say, `mapped` where this GPU reaches it.
    void add_key(uint32_t key, uint64_t address, uint64_t num_bytes, const void* mapped,
                 uint32_t access = softnic::kAll) {
        keys_.push_back({address, num_bytes, reinterpret_cast<uint64_t>(mapped), key, access});
    }

    // A queue pair, and the memory where its adds leave old values. Its number here.
    uint32_t add_queue(SendQueue& queue) {
        sy_mlx5_qp& handle = queue.handle;
        handle.scratch_lkey = 0x10000 + handle.qpn;
        add_key(handle.scratch_lkey, handle.scratch, 8, reinterpret_cast<void*>(handle.scratch));
        softnic::Queue mine = {};
        mine.sq = handle.sq;
        mine.dbrec = handle.dbrec;
        mine.doorbell = handle.doorbell;
        mine.cq = handle.cq;
        mine.cq_dbrec = handle.cq_dbrec;
        mine.qpn = handle.qpn;
        mine.sq_depth = handle.sq_depth;
        mine.cq_depth = handle.cq_depth;
        mine.is_collapsed = queue.sizes.is_collapsed;
        mine.is_stalled_by = queues_.size() % 32;
        queues_.push_back(mine);
        return queues_.size() - 1;
    }

    // The request with this number since the start fails.
    void fail(uint32_t queue, uint64_t nth, uint32_t syndrome) {
        queues_[queue].fail_at = nth;
        queues_[queue].fail_syndrome = syndrome;
    }
    void stall(uint32_t mask) { *static_cast<volatile uint32_t*>(&control_->stalled) = mask; }

    // Everything that needs memory or waits for the GPU: before any NIC runs. With `is_fresh` all queue
    // pairs begin as after a reset, else where they were when the NIC was stopped.
    virtual void prepare(bool is_fresh = true) = 0;
    virtual void start() = 0;
    // Ends once everything that was announced is done.
    virtual softnic::Counts stop() = 0;

    const int device;

  protected:
    softnic::Control* control_;
    std::vector<softnic::Queue> queues_;
    std::vector<softnic::Key> keys_;
};

class NicKernel : public Nic {
  public:
    explicit NicKernel(int device) : Nic(device) {
        counts_ = device_alloc<softnic::Counts>(1);
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    }

    void prepare(bool is_fresh) override {
        CHECK_CUDA(cudaSetDevice(device));
        if (device_queues_ == nullptr) {
            device_queues_ = device_alloc<softnic::Queue>(queues_.size());
            device_keys_ = device_alloc<softnic::Key>(keys_.size());
            states_ = device_alloc<softnic::QueueState>(queues_.size());
            num_prepared_ = queues_.size();
        }
        CHECK(num_prepared_ == queues_.size(), "queue pairs were added after the first start");
        upload(device_queues_, queues_.data(), queues_.size() * sizeof(queues_[0]));
        upload(device_keys_, keys_.data(), keys_.size() * sizeof(keys_[0]));
        if (is_fresh)
            CHECK_CUDA(cudaMemset(states_, 0, queues_.size() * sizeof(softnic::QueueState)));
        to_device(counts_, softnic::Counts{});
        control_->stop = 0;
    }

    // With a block for every queue pair.
    void start() override {
        CHECK_CUDA(cudaSetDevice(device));
        const softnic::NicParams params = {
            device_queues_, states_, device_keys_, control_, counts_, kNicLifeNs,
            static_cast<uint32_t>(queues_.size()), static_cast<uint32_t>(keys_.size()), 1, 0};
        softnic::nic_kernel<<<static_cast<uint32_t>(queues_.size()), softnic::kNicThreads, 0,
                              stream_>>>(params);
        CHECK_CUDA(cudaGetLastError());
    }

    softnic::Counts stop() override {
        *static_cast<volatile uint32_t*>(&control_->stop) = 1;
        CHECK_CUDA(cudaSetDevice(device));
        CHECK_CUDA(cudaStreamSynchronize(stream_));
        return from_device(counts_);
    }

  private:
    softnic::Counts* counts_;
    softnic::Queue* device_queues_ = nullptr;
    softnic::Key* device_keys_ = nullptr;
    softnic::QueueState* states_ = nullptr;
    size_t num_prepared_ = 0;
    cudaStream_t stream_;
};
