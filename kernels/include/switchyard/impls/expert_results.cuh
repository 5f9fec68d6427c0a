// From the matrix units' sums to the stage's results: values on their way through shared memory.
//
// A warpgroup's values wait as bf16 in two halves of 64 values by 64 tokens: rows of 128 bytes, one
// per token, chunks of 16 bytes rotated by the row's number.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_walk.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/bulk.cuh"

namespace switchyard::impls {

constexpr uint32_t kHalfBytes = 64 * 128;
constexpr uint32_t kStagingBytes = 2 * kHalfBytes; // of a warpgroup

__device__ __forceinline__ float swiglu(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Offset of a chunk of eight values in a half.
__device__ __forceinline__ uint32_t staged_chunk(uint32_t token, uint32_t chunk) {
    return token * 128 + ((chunk ^ (token & 7)) * 16);
}

// Results of a warpgroup, as they stand, into panels of the activation.
template <uint32_t kTokens>
__device__ __forceinline__ void store_panels(const sy_expert_compute_params& params,
                                             uint32_t results, uint32_t row, uint32_t num_tokens,
                                             uint32_t panel, uint32_t num_halves) {
    constexpr uint32_t kRounds = (kTokens * 8 + 127) / 128;
    const Panels target(params.activation, params, params.inter * 2);
    const uint32_t thread_idx = threadIdx.x & 127;
    for (uint32_t half = 0; half < num_halves && panel + half < target.num_panels; ++half) {
        uint4* to = reinterpret_cast<uint4*>(target.at(panel + half, row));
        uint4 values[kRounds];
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            values[i] = ptx::ld_shared_v4(results + half * kHalfBytes +
                                          (thread_idx + i * 128) % (kTokens * 8) * 16);
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            if (thread_idx + i * 128 < num_tokens * 8)
                to[thread_idx + i * 128] = values[i];
    }
}

// 128 values of each token, a panel, quantised as requests are. Whole warps.
template <uint32_t kTokens, uint32_t kThreads>
__device__ __forceinline__ void
quantize_results(const sy_expert_compute_params& params, uint32_t results, uint32_t half_bytes,
                 uint32_t row, uint32_t num_tokens, uint32_t panel, uint32_t thread_idx) {
    const Panels target(params.activation, params, params.inter);
    const uint32_t chunk = thread_idx % 8;
#pragma unroll
    for (uint32_t first = 0; first < kTokens; first += kThreads / 8) {
        // Threads of no token repeat another's work: shuffles need them.
        const uint32_t token = first + thread_idx / 8, place = token % kTokens;
        const uint32_t from = results + chunk / 4 * half_bytes;
        uint4 values[2];
#pragma unroll
        for (uint32_t k = 0; k < 2; ++k)
            values[k] = ptx::ld_shared_v4(from + staged_chunk(place, chunk % 4 * 2 + k));
        const QuantizedChunk quantized = quantize_chunk(values);
        if (token < num_tokens && panel < target.num_panels) {
            *reinterpret_cast<uint4*>(target.chunk(panel, row + token, chunk)) = quantized.codes;
            if (chunk == 0)
                *target.scale(panel, row + token) = quantized.scale;
        }
    }
}

// 128 values of each token into its row of the output.
template <uint32_t kTokens>
__device__ __forceinline__ void store_rows(const sy_expert_compute_params& params, uint32_t results,
                                           uint32_t position, uint32_t num_tokens,
                                           uint32_t first_out) {
    constexpr uint32_t kRounds = kTokens / 8;
    const uint32_t num_outs = params.geometry.hidden;
    const uint32_t thread_idx = threadIdx.x & 127;
    const uint32_t first = thread_idx / 16, half = thread_idx / 8 % 2, chunk = thread_idx % 8;
    const uint32_t out = first_out + half * 64 + chunk * 8;
    const uint32_t from = results + half * kHalfBytes + staged_chunk(first, chunk);
    uint8_t* to = static_cast<uint8_t*>(params.expert_out) +
                  ((uint64_t{position} + first) * num_outs + out) * 2;
    uint4 values[kRounds];
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
        values[i] = ptx::ld_shared_v4(from + i * 8 * 128);
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
        if (first + i * 8 < num_tokens && out < num_outs)
            *reinterpret_cast<uint4*>(to + uint64_t{i} * 8 * num_outs * 2) = values[i];
}

} // namespace switchyard::impls
