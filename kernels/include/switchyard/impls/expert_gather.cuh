// First kernel of the expert stage where requests are not of the weights' type: rows out of the
// slots, one per entry, into panels, in the type of the weights. (Rows of that type need no copy:
// see expert_gemm.cuh.)
#pragma once

#include <cstdint>

#include "switchyard/comm/stamps.cuh"
#include "switchyard/impls/expert_walk.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

constexpr uint32_t kGatherThreads = SY_COMPUTE_THREADS;

// kFp8Rows: from fp8 to bf16, else from bf16 to fp8.
template <bool kFp8Rows>
__global__ void __launch_bounds__(kGatherThreads)
    expert_gather_kernel(const __grid_constant__ sy_expert_compute_params params) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        comm::stamp(params.lists.stamps, SY_BATCH_GATHER_START);
    const uint32_t hidden = params.geometry.hidden;
    const Panels panels(params.rows, params, hidden * (kFp8Rows ? 2 : 1));
    const SlotRows rows = {params};
    ExpertWalk<1> walk(params, 1);
    ExpertTile entry;
    for (uint32_t i = blockIdx.x; walk.seek(i, entry); i += gridDim.x) {
        const uint64_t payload = rows.payload(entry.position);
        if constexpr (kFp8Rows) {
            const uint64_t scales = rows.scales(entry.position);
            for (uint32_t c = threadIdx.x; c < hidden / 8; c += kGatherThreads)
                *reinterpret_cast<uint4*>(panels.chunk(c / 8, entry.row, c % 8)) =
                    weigh_chunk<true>(load_slot_chunk<true>(payload, scales, c), 1.0f);
        } else {
            // Whole warps: eight lanes share a scale.
            for (uint32_t first = threadIdx.x & ~31u; first < hidden / 16;
                 first += kGatherThreads) {
                const uint32_t c = first + (threadIdx.x & 31);
                const bool is_one = c < hidden / 16;
                uint4 values[2] = {};
                if (is_one) {
                    values[0] = ptx::ld_weak_global_v4(payload + c * 32);
                    values[1] = ptx::ld_weak_global_v4(payload + c * 32 + 16);
                }
                const QuantizedChunk chunk = quantize_chunk(values);
                if (is_one) {
                    *reinterpret_cast<uint4*>(panels.chunk(c / 8, entry.row, c % 8)) = chunk.codes;
                    if (c % 8 == 0)
                        *panels.scale(c / 8, entry.row) = chunk.scale;
                }
            }
        }
    }
    if (threadIdx.x == 0)
        comm::stamp_last(params.lists.stamps, SY_BATCH_GATHER_END);
}

} // namespace switchyard::impls
