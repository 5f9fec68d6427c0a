// First kernel of the expert stage: rows out of the slots, one per entry, into panels, in the type of the
// weights. fp8 stays fp8 under fp8 weights.
#pragma once

#include <cstdint>

#include "switchyard/impls/expert_walk.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

constexpr uint32_t kGatherThreads = SY_COMPUTE_THREADS;

template <bool kFp8Rows, bool kFp8Weights>
__global__ void __launch_bounds__(kGatherThreads)
    expert_gather_kernel(const __grid_constant__ sy_expert_compute_params params) {
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const sy_frame_geometry& geometry = params.geometry;
    const sy_batch* batch = params.lists.batch;
    const Panels panels(params.rows, params, geometry.hidden * (kFp8Weights ? 1 : 2));
    ExpertWalk<1, false> walk(params, 1);
    ExpertTile entry;
    for (uint32_t i = blockIdx.x; walk.seek(i, 0, entry); i += gridDim.x) {
        const uint32_t source = params.lists.row_source[params.lists.list_row[entry.position]];
        const uint32_t client = source >> SY_ROUTE_SHIFT;
        const uint32_t frame_row = source & ((1u << SY_ROUTE_SHIFT) - 1);
        const uint64_t frame =
            params.clients[client].request +
            layout::request_frame(geometry,
                                  layout::ring_place(geometry, batch->frame_number[client]));
        const uint64_t payload = layout::payload_at(geometry, frame, frame_row);
        const uint64_t scales = layout::scales_at(geometry, frame, frame_row);
        const uint32_t row = entry.row;
        if constexpr (!kFp8Weights) {
            for (uint32_t c = threadIdx.x; c < geometry.hidden / 8; c += kGatherThreads) {
                const SlotChunk<kFp8Rows> chunk =
                    load_slot_chunk<kFp8Rows>(payload, scales, c);
                *reinterpret_cast<uint4*>(panels.chunk(c / 8, row, c % 8)) =
                    kFp8Rows ? weigh_chunk<kFp8Rows>(chunk, 1.0f) : chunk.bits;
            }
        } else if constexpr (kFp8Rows) {
            for (uint32_t c = threadIdx.x; c < geometry.hidden / 16; c += kGatherThreads) {
                *reinterpret_cast<uint4*>(panels.chunk(c / 8, row, c % 8)) =
                    ptx::ld_weak_global_v4(payload + c * 16);
                if (c % 8 == 0)
                    *panels.scale(c / 8, row) = ptx::ld_weak_global_f32(scales + c / 8 * 4);
            }
        } else {
            // Whole warps: eight lanes share a scale.
            for (uint32_t first = threadIdx.x & ~31u; first < geometry.hidden / 16;
                 first += kGatherThreads) {
                const uint32_t c = first + (threadIdx.x & 31);
                const bool is_one = c < geometry.hidden / 16;
                uint4 values[2] = {};
                if (is_one) {
                    values[0] = ptx::ld_weak_global_v4(payload + c * 32);
                    values[1] = ptx::ld_weak_global_v4(payload + c * 32 + 16);
                }
                const QuantizedChunk chunk = quantize_chunk(values);
                if (is_one) {
                    *reinterpret_cast<uint4*>(panels.chunk(c / 8, row, c % 8)) = chunk.codes;
                    if (c % 8 == 0)
                        *panels.scale(c / 8, row) = chunk.scale;
                }
            }
        }
    }
}

} // namespace switchyard::impls
