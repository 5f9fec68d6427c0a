// The products of the expert stage without the matrix units of compute capability 9.0a, for GPUs
// that came later: a warp per output, in f32. Right, and slow.
#pragma once

#include <cstdint>

#include <cuda_fp8.h>

#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_results.cuh"
#include "switchyard/impls/expert_walk.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/bulk.cuh"

namespace switchyard::impls {

template <bool kFp8> __device__ __forceinline__ float plain_value(const uint8_t* address) {
    if constexpr (kFp8)
        return __half2float(__half(__nv_cvt_fp8_to_halfraw(*address, __NV_E4M3)));
    else
        return __uint_as_float(uint32_t{*reinterpret_cast<const uint16_t*>(address)} << 16);
}

template <bool kFp8, bool kGateUp, bool kDirect> struct PlainOperands {
    static constexpr uint32_t kValueBytes = kFp8 ? 1 : 2;
    static constexpr uint32_t kPanelValues = kPanelBytes / kValueBytes;

    const sy_expert_compute_params& params;
    const sy_layer_weights& layer;
    Panels panels;
    uint32_t depth, num_outs;

    __device__ __forceinline__ explicit PlainOperands(const sy_expert_compute_params& params)
        : params(params), layer(params.layers[params.lists.batch->layer]),
          panels(kGateUp ? params.rows : params.activation, params,
                 (kGateUp ? params.geometry.hidden : params.inter) * kValueBytes),
          depth(kGateUp ? params.geometry.hidden : params.inter),
          num_outs(kGateUp ? params.inter : params.geometry.hidden) {}

    __device__ __forceinline__ float weight(uint64_t matrix, uint32_t row, uint32_t k) const {
        const uint8_t* values =
            reinterpret_cast<const uint8_t*>(kGateUp ? layer.gate_up : layer.down);
        const float value =
            plain_value<kFp8>(values + ((matrix * num_outs + row) * depth + k) * kValueBytes);
        if constexpr (!kFp8)
            return value;
        const uint32_t num_blocks = (num_outs + SY_SCALE_BLOCK - 1) / SY_SCALE_BLOCK;
        const uint64_t scale =
            (matrix * num_blocks + row / SY_SCALE_BLOCK) * panels.num_panels + k / SY_SCALE_BLOCK;
        return value * reinterpret_cast<const float*>(kGateUp ? layer.gate_up_scale
                                                              : layer.down_scale)[scale];
    }

    __device__ __forceinline__ float token(uint32_t position, uint32_t row, uint32_t k) const {
        if constexpr (kDirect) {
            const SlotRows rows = {params};
            const float value = plain_value<kFp8>(
                reinterpret_cast<const uint8_t*>(rows.payload(position)) + k * kValueBytes);
            return kFp8 ? value * reinterpret_cast<const float*>(
                                      rows.scales(position))[k / SY_SCALE_BLOCK]
                        : value;
        }
        const uint32_t panel = k / kPanelValues, at = k % kPanelValues * kValueBytes;
        const float value = plain_value<kFp8>(panels.chunk(panel, row, at / 16) + at % 16);
        return kFp8 ? value * *panels.scale(panel, row) : value;
    }
};

// All threads. `staging`: shared memory for the results of two warpgroups.
template <bool kFp8, bool kGateUp, bool kDirect>
__device__ __forceinline__ void multiply_plain(const sy_expert_compute_params& params,
                                               uint32_t staging) {
    constexpr uint32_t kTokens = 8, kParts = kGateUp ? 2 : 1;
    constexpr uint32_t kOuts = kTileWeights / kParts;
    const PlainOperands<kFp8, kGateUp, kDirect> operands(params);
    const uint32_t lane_idx = threadIdx.x & 31;
    ExpertWalk<kTokens> tiles(params, (operands.num_outs + kOuts - 1) / kOuts);
    ExpertTile tile;
    for (uint32_t i = blockIdx.x; tiles.seek(i, tile); i += gridDim.x) {
        for (uint32_t out = threadIdx.x / 32; out < kOuts; out += blockDim.x / 32) {
            const uint32_t row = tile.column * kOuts + out;
            float sums[kParts][kTokens] = {};
            for (uint32_t k = lane_idx; k < operands.depth && row < operands.num_outs; k += 32)
#pragma unroll
                for (uint32_t part = 0; part < kParts; ++part) {
                    const float weight =
                        operands.weight(uint64_t{tile.expert} * kParts + part, row, k);
                    for (uint32_t t = 0; t < tile.num_tokens; ++t)
                        sums[part][t] +=
                            weight * operands.token(tile.position + t, tile.row + t, k);
                }
#pragma unroll
            for (uint32_t t = 0; t < kTokens; ++t) {
#pragma unroll
                for (uint32_t part = 0; part < kParts; ++part)
                    for (uint32_t delta = 16; delta != 0; delta >>= 1)
                        sums[part][t] += __shfl_xor_sync(kFullWarp, sums[part][t], delta);
                const float value = kGateUp ? swiglu(sums[0][t], sums[kParts - 1][t]) : sums[0][t];
                if (lane_idx == 0)
                    ptx::st_shared_u16(staging + out / 64 * kHalfBytes +
                                           staged_value<kGateUp>(t, out % 64),
                                       float2_to_bf16x2(value, 0.0f));
            }
        }
        __syncthreads();
        if (threadIdx.x < 128) {
            if constexpr (!kGateUp) {
                for (uint32_t half = 0; half < 2; ++half)
                    store_rows<kTokens>(params, staging + half * kStagingBytes, tile.position,
                                        tile.num_tokens, tile.column * kOuts + half * 128);
            } else if constexpr (kFp8) {
                quantize_results<kTokens, 128>(params, staging, kHalfBytes, tile.row,
                                               tile.num_tokens, tile.column, threadIdx.x);
            } else {
                store_panels<kTokens>(params, staging, tile.row, tile.num_tokens, tile.column * 2,
                                      2);
            }
        }
        __syncthreads();
    }
}

} // namespace switchyard::impls
