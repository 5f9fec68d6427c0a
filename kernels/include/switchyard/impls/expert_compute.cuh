// The expert stage: for every entry of a batch down(silu(gate(x)) * up(x)), in three kernels: rows out of
// the slots, gate and up with SwiGLU, down. Counts are the device's; experts without entries cost nothing.
//
// Few tokens per expert are the common case, where time is the reading of the weights. So the matrix
// units take weights as rows (16) and tokens as columns (8): one token fills an eighth of what it loads
// into, not a sixteenth or a 64th, and a weight is read once for up to 128 tokens. Blocks are persistent;
// neighbouring blocks take neighbouring token tiles of the same weights, which then come out of L2.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/mma.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

constexpr uint32_t kGatherThreads = SY_COMPUTE_THREADS;

// Rows of the batch, widened to bf16, one after the other.
template <bool kFp8>
__global__ void __launch_bounds__(kGatherThreads)
    expert_gather_kernel(const __grid_constant__ sy_expert_compute_params params) {
    ptx::griddepcontrol_wait();
    const sy_frame_geometry& geometry = params.geometry;
    const sy_batch* batch = params.lists.batch;
    const uint32_t num_rows = batch->num_rows;
    for (uint32_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
        const uint32_t source = params.lists.row_source[row];
        const uint32_t client = source >> SY_ROUTE_SHIFT;
        const uint32_t frame_row = source & ((1u << SY_ROUTE_SHIFT) - 1);
        const uint64_t frame =
            params.clients[client].request +
            layout::request_frame(geometry,
                                  layout::ring_place(geometry, batch->frame_number[client]));
        const uint64_t payload = layout::payload_at(geometry, frame, frame_row);
        const uint64_t scales = layout::scales_at(geometry, frame, frame_row);
        uint4* target = static_cast<uint4*>(params.rows) + uint64_t{row} * (geometry.hidden / 8);
        for (uint32_t i = threadIdx.x; i < geometry.hidden / 8; i += kGatherThreads)
            target[i] = kFp8 ? weigh_chunk<kFp8>(load_slot_chunk<kFp8>(payload, scales, i), 1.0f)
                             : load_slot_chunk<kFp8>(payload, scales, i).bits;
    }
}

constexpr uint32_t kGemmThreads = SY_COMPUTE_THREADS;
constexpr uint32_t kTileTokens = 128;
constexpr uint32_t kTileWeights = 128; // rows of weights
constexpr uint32_t kTileDepth = 64;    // values; 128 bytes, one row of banks
constexpr uint32_t kGemmStages = 3;
constexpr uint32_t kWeightBytes = kTileWeights * kTileDepth * 2;
constexpr uint32_t kStageBytes = kWeightBytes + kTileTokens * kTileDepth * 2;
constexpr uint32_t kGemmSharedBytes = kGemmStages * kStageBytes;
static_assert(kGemmSharedBytes == SY_COMPUTE_SHARED_BYTES, "what launchers ask for");
// Rows of the tile of results, padded so that columns lie on different banks.
constexpr uint32_t kResultStride = kTileWeights + 8;
static_assert(kTileTokens * kResultStride * 2 <= kGemmSharedBytes, "results fit where operands were");

// Offset of 16-byte chunk `chunk` of a tile's row; rows are rotated against bank conflicts.
__device__ __forceinline__ uint32_t tile_offset(uint32_t row, uint32_t chunk) {
    return row * (kTileDepth * 2) + ((chunk ^ (row & 7)) * 16);
}

struct GemmTile {
    uint32_t expert, first_position, num_tokens, first_out;
};

// Tiles before each expert.
struct GemmSchedule {
    uint32_t upto[SY_MAX_EXPERTS + 1];
};

__device__ __forceinline__ void make_schedule(GemmSchedule& schedule,
                                              const sy_expert_compute_params& params,
                                              uint32_t tiles_per_column) {
    // One warp, 32 experts a step.
    if (threadIdx.x < 32) {
        const uint32_t lane_idx = threadIdx.x;
        uint32_t carry = 0;
        for (uint32_t first = 0; first < params.num_local_experts; first += 32) {
            const uint32_t expert = first + lane_idx;
            uint32_t upto = 0;
            if (expert < params.num_local_experts) {
                const uint32_t count =
                    params.lists.expert_begin[expert + 1] - params.lists.expert_begin[expert];
                upto = (count + kTileTokens - 1) / kTileTokens * tiles_per_column;
            }
            for (uint32_t delta = 1; delta < 32; delta <<= 1) {
                const uint32_t below = __shfl_up_sync(kFullWarp, upto, delta);
                upto += lane_idx >= delta ? below : 0;
            }
            if (expert < params.num_local_experts)
                schedule.upto[expert + 1] = carry + upto;
            carry += __shfl_sync(kFullWarp, upto, 31);
        }
        if (lane_idx == 0)
            schedule.upto[0] = 0;
    }
    __syncthreads();
}

__device__ __forceinline__ GemmTile tile_at(const GemmSchedule& schedule,
                                            const sy_expert_compute_params& params,
                                            uint32_t tile_idx, uint32_t outs_per_tile) {
    uint32_t low = 0, high = params.num_local_experts;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (schedule.upto[middle] <= tile_idx)
            low = middle;
        else
            high = middle;
    }
    const uint32_t begin = params.lists.expert_begin[low];
    const uint32_t count = params.lists.expert_begin[low + 1] - begin;
    const uint32_t num_token_tiles = (count + kTileTokens - 1) / kTileTokens;
    const uint32_t within = tile_idx - schedule.upto[low];
    const uint32_t token_tile = within % num_token_tiles;
    const uint32_t first = token_tile * kTileTokens;
    return {low, begin + first, min(count - first, kTileTokens),
            within / num_token_tiles * outs_per_tile};
}

// Gate and up: 64 rows of each make a tile of weights, and 64 outputs. Down: 128 rows, 128 outputs.
template <bool kGateUp> struct GemmShape {
    static constexpr uint32_t kOuts = kGateUp ? kTileWeights / 2 : kTileWeights;
};

template <bool kGateUp>
__global__ void __launch_bounds__(kGemmThreads, 2)
    expert_gemm_kernel(const __grid_constant__ sy_expert_compute_params params) {
    extern __shared__ __align__(1024) uint8_t tiles[];
    __shared__ GemmSchedule schedule;
    __shared__ const uint8_t* token_row[kTileTokens];
    constexpr uint32_t kOuts = GemmShape<kGateUp>::kOuts;
    const uint32_t hidden = params.geometry.hidden, inter = params.inter;
    const uint32_t depth = kGateUp ? hidden : inter, num_outs = kGateUp ? inter : hidden;
    const uint32_t thread_idx = threadIdx.x, lane_idx = thread_idx & 31, warp_idx = thread_idx / 32;
    ptx::griddepcontrol_wait();
    make_schedule(schedule, params, num_outs / kOuts);
    const uint32_t num_tiles = schedule.upto[params.num_local_experts];
    if (num_tiles == 0 || params.lists.batch->layer >= params.num_layers)
        return;
    const sy_layer_weights& layer = params.layers[params.lists.batch->layer];
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(kGateUp ? layer.gate_up : layer.down);
    const uint8_t* sources = static_cast<const uint8_t*>(kGateUp ? params.rows : params.activation);
    uint8_t* results = static_cast<uint8_t*>(kGateUp ? params.activation : params.expert_out);
    const uint32_t shared_base = ptx::shared_address(tiles);
    const uint64_t row_bytes = uint64_t{depth} * 2;
    const uint32_t num_steps = depth / kTileDepth;

    // This thread's part of each copy: one chunk of every 32nd row.
    const uint32_t copy_chunk = thread_idx & 7, copy_row = thread_idx / 8;
    // This warp's part of the product: two times 16 rows of weights, 64 tokens.
    const uint32_t part = warp_idx & 3, token_base = warp_idx / 4 * 64;
    const uint32_t a_row[2] = {kGateUp ? part * 16 : part * 32,
                               kGateUp ? 64 + part * 16 : part * 32 + 16};

    for (uint32_t tile_idx = blockIdx.x; tile_idx < num_tiles; tile_idx += gridDim.x) {
        const GemmTile tile = tile_at(schedule, params, tile_idx, kOuts);
        __syncthreads(); // results of the tile before have left shared memory
        if (thread_idx < kTileTokens) {
            const uint32_t position =
                tile.first_position + min(thread_idx, tile.num_tokens - 1);
            const uint32_t source = kGateUp ? params.lists.list_row[position] : position;
            token_row[thread_idx] = sources + source * row_bytes;
        }
        __syncthreads();
        const uint8_t* expert =
            weights + uint64_t{tile.expert} * num_outs * (kGateUp ? 2 : 1) * row_bytes;
        const auto load = [&](uint32_t step) {
            const uint32_t stage = shared_base + step % kGemmStages * kStageBytes;
            const uint64_t at = uint64_t{step} * (kTileDepth * 2) + copy_chunk * 16;
#pragma unroll
            for (uint32_t i = 0; i < kTileWeights / 32; ++i) {
                const uint32_t row = copy_row + i * 32;
                // The second half of a tile is rows of up.
                const uint32_t out = tile.first_out + (kGateUp ? row & 63 : row) +
                                     (kGateUp && row >= 64 ? num_outs : 0);
                ptx::cp_async_cg_16(stage + tile_offset(row, copy_chunk),
                                    expert + out * row_bytes + at, true);
            }
#pragma unroll
            for (uint32_t i = 0; i < kTileTokens / 32; ++i) {
                const uint32_t row = copy_row + i * 32;
                if (i * 32 < tile.num_tokens)
                    ptx::cp_async_cg_16(stage + kWeightBytes + tile_offset(row, copy_chunk),
                                        token_row[row] + at, row < tile.num_tokens);
            }
        };
        float sum[2][8][4] = {};
        const uint32_t my_tokens =
            tile.num_tokens > token_base ? min(tile.num_tokens - token_base, 64u) : 0;
        const uint32_t num_pairs = (my_tokens + 15) / 16; // of eight tokens each
#pragma unroll
        for (uint32_t step = 0; step < kGemmStages - 1; ++step) {
            if (step < num_steps)
                load(step);
            ptx::cp_async_commit();
        }
        for (uint32_t step = 0; step < num_steps; ++step) {
            ptx::cp_async_wait<kGemmStages - 2>();
            __syncthreads();
            if (step + kGemmStages - 1 < num_steps)
                load(step + kGemmStages - 1);
            ptx::cp_async_commit();
            const uint32_t stage = shared_base + step % kGemmStages * kStageBytes;
            if (num_pairs == 0)
                continue;
#pragma unroll
            for (uint32_t k = 0; k < kTileDepth / 16; ++k) {
                uint32_t a[2][4];
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i)
                    ptx::ldmatrix_x4(a[i], stage + tile_offset(a_row[i] + (lane_idx & 15),
                                                               k * 2 + (lane_idx >> 4)));
#pragma unroll
                for (uint32_t pair = 0; pair < 4; ++pair) {
                    if (pair >= num_pairs)
                        break;
                    uint32_t b[4];
                    const uint32_t token =
                        token_base + pair * 16 + (lane_idx & 7) + (lane_idx >> 4) * 8;
                    ptx::ldmatrix_x4(b, stage + kWeightBytes +
                                            tile_offset(token, k * 2 + (lane_idx >> 3 & 1)));
#pragma unroll
                    for (uint32_t i = 0; i < 2; ++i) {
                        ptx::mma_m16n8k16_bf16(sum[i][pair * 2], a[i], b[0], b[1]);
                        ptx::mma_m16n8k16_bf16(sum[i][pair * 2 + 1], a[i], b[2], b[3]);
                    }
                }
            }
        }
        ptx::cp_async_wait<0>();
        __syncthreads();
        // Results go through shared memory, so that a token's values leave side by side.
        __nv_bfloat16* staged = reinterpret_cast<__nv_bfloat16*>(tiles);
        const uint32_t out_row = lane_idx / 4, token_col = lane_idx % 4 * 2;
#pragma unroll
        for (uint32_t group = 0; group < 8; ++group) {
            if (group / 2 >= num_pairs)
                break;
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t token = token_base + group * 8 + token_col + (j & 1);
                const uint32_t row = out_row + (j >> 1) * 8;
                if constexpr (kGateUp) {
                    const float gate = sum[0][group][j], up = sum[1][group][j];
                    const float value = gate / (1.0f + __expf(-gate)) * up;
                    staged[token * kResultStride + part * 16 + row] = __float2bfloat16_rn(value);
                } else {
#pragma unroll
                    for (uint32_t i = 0; i < 2; ++i)
                        staged[token * kResultStride + part * 32 + i * 16 + row] =
                            __float2bfloat16_rn(sum[i][group][j]);
                }
            }
        }
        __syncthreads();
        constexpr uint32_t kChunks = kOuts / 8;
        for (uint32_t i = thread_idx; i < tile.num_tokens * kChunks; i += kGemmThreads) {
            const uint32_t token = i / kChunks, chunk = i % kChunks;
            const uint64_t at =
                (uint64_t{tile.first_position} + token) * num_outs + tile.first_out + chunk * 8;
            *reinterpret_cast<uint4*>(results + at * 2) =
                *reinterpret_cast<const uint4*>(&staged[token * kResultStride + chunk * 8]);
        }
    }
}

} // namespace switchyard::impls
