// Send queues as a host sets them up for posters on a GPU: in mapped host memory, as on a NIC that cannot
// reach the GPU's, or in GPU memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "softnic/cuda.hpp"
#include "switchyard/comm/mlx5/queue.h"

namespace softnic {

enum class Where { kHost, kDevice };

inline const char* name_of(Where where) { return where == Where::kHost ? "host" : "device"; }

struct QueueSizes {
    uint32_t sq_depth = 1024;
    bool is_collapsed = true;
    bool is_of_one_block = false;
    bool has_record = true; // false: the NIC goes by the doorbell register alone
    uint32_t batch = 128;
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
            memory = allocate_mapped<uint8_t>(num_bytes_);
        } else {
            memory = allocate<uint8_t>(num_bytes_);
        }
        const uint64_t base = reinterpret_cast<uint64_t>(memory);
        // Counts and scratch on lines of their own.
        uint8_t* counts = allocate<uint8_t>(sizeof(sy_mlx5_queue_state) + 128);
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
        handle.flags = (sizes.is_collapsed ? SY_MLX5_CQ_COLLAPSED : 0) |
                       (sizes.is_of_one_block ? SY_MLX5_ONE_BLOCK : 0) |
                       (sizes.has_record ? 0 : SY_MLX5_NO_RECORD);
        handle.batch = std::min(sizes.batch, sizes.sq_depth / 4);
        handle.max_message_bytes = sizes.max_message_bytes;
        handle.peer = peer;
        const char* wrong = sy_mlx5_check_qp(&handle);
        SOFTNIC_CHECK(wrong == nullptr, wrong);
        reset();
    }

    // Prepares the queue for its first use, and again after an error. No thread may post meanwhile.
    void reset() {
        fill(0, 0, cq_offset_);
        fill(cq_offset_, SY_MLX5_CQE_FILL, dbrec_offset_ - cq_offset_);
        fill(dbrec_offset_, 0, num_bytes_ - dbrec_offset_);
        SOFTNIC_CUDA(
            cudaMemset(reinterpret_cast<void*>(handle.state), 0, sizeof(sy_mlx5_queue_state)));
        SOFTNIC_CUDA(cudaDeviceSynchronize());
    }

    // A word of the queue's memory, while no other thread stores there.
    void store_word(uint64_t address, uint32_t value) {
        if (where == Where::kHost)
            __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
        else
            store(reinterpret_cast<uint32_t*>(address), &value, sizeof(value));
    }
    void load_bytes(uint64_t address, void* to, uint64_t num_bytes) const {
        SOFTNIC_CUDA(
            cudaMemcpy(to, reinterpret_cast<const void*>(address), num_bytes, cudaMemcpyDefault));
    }

    sy_mlx5_queue_state state() const {
        return load(reinterpret_cast<const sy_mlx5_queue_state*>(handle.state));
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
            SOFTNIC_CUDA(cudaMemset(memory + offset, value, num_bytes));
    }
    uint64_t cq_offset_, dbrec_offset_, num_bytes_;
};

// The handles of several queues, where kernels find them.
inline sy_mlx5_qp* upload_handles(const std::vector<SendQueue>& queues) {
    std::vector<sy_mlx5_qp> handles;
    for (const SendQueue& queue : queues)
        handles.push_back(queue.handle);
    sy_mlx5_qp* table = allocate<sy_mlx5_qp>(handles.size());
    store(table, handles.data(), handles.size() * sizeof(sy_mlx5_qp));
    return table;
}

} // namespace softnic
