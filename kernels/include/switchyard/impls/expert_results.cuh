// From the matrix units' sums to the stage's results.
//
// Rows of weights lie in a tile in an order (layout/geometry.h) that gives each thread neighbouring
// results of a token. With tokens as the matrix units' rows they go out of the registers as they
// are. With tokens as columns they wait in shared memory: as bf16, in halves of 64 rows of weights,
// 128 bytes per token, chunks of 16 bytes rotated by the token's number, in the order of the tile.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_walk.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/bulk.cuh"
#include "switchyard/ptx/math.cuh"

namespace switchyard::impls {

constexpr uint32_t kHalfBytes = 64 * 128;
constexpr uint32_t kStagingBytes = 2 * kHalfBytes; // of a warpgroup

__device__ __forceinline__ float swiglu(float gate, float up) {
    constexpr float kLog2E = 1.4426950408889634f;
    return gate * ptx::rcp_approx_ftz(1.0f + ptx::ex2_approx_ftz(gate * -kLog2E)) * up;
}

// Offset of a chunk of eight values in a half.
__device__ __forceinline__ uint32_t staged_chunk(uint32_t token, uint32_t chunk) {
    return token * 128 + ((chunk ^ (token & 7)) * 16);
}

// Where value `out` of a half waits.
template <bool kGateUp>
__device__ __forceinline__ uint32_t staged_value(uint32_t token, uint32_t out) {
    const uint32_t chunk = kGateUp ? out % 16 / 2 : out / 32 * 4 + out % 8 / 2;
    const uint32_t quarter = kGateUp ? out / 16 : out / 8 % 4;
    return staged_chunk(token, chunk) + quarter * 4 + out % 2 * 2;
}

// Neighbouring results: a pair out of each of `kPairs` chunks.
template <uint32_t kPairs>
__device__ __forceinline__ void load_staged(uint32_t (&pairs)[kPairs], uint32_t half,
                                            uint32_t token, uint32_t first_chunk,
                                            uint32_t quarter) {
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i)
        pairs[i] = ptx::ld_shared_u32(half + staged_chunk(token, first_chunk + i) + quarter * 4);
}

// Results of a warpgroup, as they stand, into panels of the activation.
template <uint32_t kTokens>
__device__ __forceinline__ void store_panels(const sy_expert_compute_params& params,
                                             uint32_t results, uint32_t row, uint32_t num_tokens,
                                             uint32_t panel, uint32_t num_halves) {
    constexpr uint32_t kRounds = (kTokens + 15) / 16;
    const Panels target(params.activation, params, params.inter * 2);
    const uint32_t thread_idx = threadIdx.x & 127, first = thread_idx / 8, chunk = thread_idx % 8;
    for (uint32_t half = 0; half < num_halves && panel + half < target.num_panels; ++half) {
        uint32_t values[kRounds][4];
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            load_staged(values[i], results + half * kHalfBytes, (first + i * 16) % kTokens,
                        chunk % 2 * 4, chunk / 2);
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            if (first + i * 16 < num_tokens)
                *reinterpret_cast<uint4*>(target.chunk(panel + half, row + first + i * 16, chunk)) =
                    make_uint4(values[i][0], values[i][1], values[i][2], values[i][3]);
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
        uint32_t values[8];
        load_staged(values, results + chunk / 4 * half_bytes, place, 0, chunk % 4);
        const QuantizedWords<8> quantized = quantize_words(values);
        if (token < num_tokens && panel < target.num_panels) {
            *reinterpret_cast<uint4*>(target.chunk(panel, row + token, chunk)) = make_uint4(
                quantized.codes[0], quantized.codes[1], quantized.codes[2], quantized.codes[3]);
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
    uint8_t* to = static_cast<uint8_t*>(params.expert_out) +
                  ((uint64_t{position} + first) * num_outs + out) * 2;
    uint32_t values[kRounds][4];
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
        load_staged(values[i], results + half * kHalfBytes, first + i * 8, chunk / 4 * 4,
                    chunk % 4);
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
        if (first + i * 8 < num_tokens && out < num_outs)
            *reinterpret_cast<uint4*>(to + uint64_t{i} * 8 * num_outs * 2) =
                make_uint4(values[i][0], values[i][1], values[i][2], values[i][3]);
}

// One of the two tokens that a thread has in a tile with tokens as rows: SwiGLU of its sums, 32 of
// 128 values, into panels of the activation. `side`: 0 or 1. Whole warps.
template <bool kFp8>
__device__ __forceinline__ void store_activation(const sy_expert_compute_params& params,
                                                 const float (&sum)[128], uint32_t side,
                                                 uint32_t row, bool is_token, uint32_t column) {
    const Panels target(params.activation, params, params.inter * (kFp8 ? 1 : 2));
    const uint32_t quarter = threadIdx.x & 3;
    uint32_t words[16];
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        const float* s = &sum[i * 8 + side * 2];
        words[i] = float2_to_bf16x2(swiglu(s[0], s[4]), swiglu(s[1], s[5]));
    }
    if constexpr (kFp8) {
        const QuantizedWords<16> quantized = quantize_words(words);
        if (is_token) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t* codes = &quantized.codes[half * 4];
                *reinterpret_cast<uint4*>(target.chunk(column, row, half * 4 + quarter)) =
                    make_uint4(codes[0], codes[1], codes[2], codes[3]);
            }
            if (quarter == 0)
                *target.scale(column, row) = quantized.scale;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t panel = column * 2 + i / 2;
            if (is_token && panel < target.num_panels)
                *reinterpret_cast<uint4*>(target.chunk(panel, row, quarter * 2 + i % 2)) =
                    make_uint4(words[i * 4], words[i * 4 + 1], words[i * 4 + 2], words[i * 4 + 3]);
        }
    }
}

// The same of the second product: 64 of 256 values, into the token's row of the output.
__device__ __forceinline__ void store_output(const sy_expert_compute_params& params,
                                             const float (&sum)[128], uint32_t side,
                                             uint32_t position, uint32_t column) {
    const uint32_t num_outs = params.geometry.hidden;
    const uint32_t first_out = column * kTileWeights + (threadIdx.x & 3) * 8;
    uint8_t* to =
        static_cast<uint8_t*>(params.expert_out) + (uint64_t{position} * num_outs + first_out) * 2;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const float* s = &sum[i * 16 + side * 2];
        if (i < 4 || first_out + 128 < num_outs)
            *reinterpret_cast<uint4*>(to + i * 64) =
                make_uint4(float2_to_bf16x2(s[0], s[1]), float2_to_bf16x2(s[4], s[5]),
                           float2_to_bf16x2(s[8], s[9]), float2_to_bf16x2(s[12], s[13]));
    }
}

} // namespace switchyard::impls
