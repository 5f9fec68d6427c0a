// From the matrix units' sums to the stage's results.
//
// Rows of weights lie in a tile in an order (layout/geometry.h) that gives each thread neighbouring
// results of a token. With tokens as the matrix units' rows the registers are stored directly. With
// tokens as columns they are staged in shared memory: as bf16, in halves of 64 rows of weights, 128
// bytes per token, chunks of 16 bytes rotated by the token's number, in the order of the tile.
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

// Staging address of value `out` of a half.
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

// 128 values of each token, a panel, quantised like requests. Whole warps.
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

// Results of a tile with tokens as the matrix units' rows, which wait for their stores until the next tile's first
// products run. A thread has two tokens of it, `my_row` and the eighth after it.
template <bool kGateUp, bool kFp8> struct HeldResults;

// SwiGLU of the sums, 32 of 128 values of a token, for panels of the activation. Whole warps.
template <bool kFp8> struct HeldResults<true, kFp8> {
    static constexpr uint32_t kWords = kFp8 ? 8 : 16;
    uint32_t words[2][kWords];
    float scale[2];
    uint32_t row, num_tokens = 0, column;

    __device__ __forceinline__ void take(const float (&sum)[128], uint32_t first_row, uint32_t,
                                         uint32_t tokens, uint32_t tile_column) {
#pragma unroll
        for (uint32_t side = 0; side < 2; ++side) {
            uint32_t values[16];
#pragma unroll
            for (uint32_t i = 0; i < 16; ++i) {
                const float* s = &sum[i * 8 + side * 2];
                values[i] = float2_to_bf16x2(swiglu(s[0], s[4]), swiglu(s[1], s[5]));
            }
            if constexpr (kFp8) {
                const QuantizedWords<16> quantized = quantize_words(values);
#pragma unroll
                for (uint32_t i = 0; i < kWords; ++i)
                    words[side][i] = quantized.codes[i];
                scale[side] = quantized.scale;
            } else {
#pragma unroll
                for (uint32_t i = 0; i < kWords; ++i)
                    words[side][i] = values[i];
            }
        }
        row = first_row;
        num_tokens = tokens;
        column = tile_column;
    }

    // Nothing when nothing waits.
    template <uint32_t kSide>
    __device__ __forceinline__ void store(const sy_expert_compute_params& params,
                                          uint32_t my_row) const {
        const Panels target(params.activation, params, params.inter * (kFp8 ? 1 : 2));
        const uint32_t quarter = threadIdx.x & 3, token = my_row + kSide * 8;
        if (token >= num_tokens)
            return;
#pragma unroll
        for (uint32_t i = 0; i < kWords / 4; ++i) {
            const uint32_t* word = &words[kSide][i * 4];
            const uint32_t panel = kFp8 ? column : column * 2 + i / 2;
            const uint32_t chunk = kFp8 ? i * 4 + quarter : quarter * 2 + i % 2;
            if (kFp8 || panel < target.num_panels)
                *reinterpret_cast<uint4*>(target.chunk(panel, row + token, chunk)) =
                    make_uint4(word[0], word[1], word[2], word[3]);
        }
        if (kFp8 && quarter == 0)
            *target.scale(column, row + token) = scale[kSide];
    }
};

// Results of the second product, 64 of 256 values of a token, for its row of the output.
template <bool kFp8> struct HeldResults<false, kFp8> {
    uint32_t words[64];
    uint32_t position, num_tokens = 0, column;

    __device__ __forceinline__ void take(const float (&sum)[128], uint32_t, uint32_t at,
                                         uint32_t tokens, uint32_t tile_column) {
#pragma unroll
        for (uint32_t chunk = 0; chunk < 16; ++chunk) {
            const float* s = &sum[chunk % 8 * 16 + chunk / 8 * 2];
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k)
                words[chunk * 4 + k] = float2_to_bf16x2(s[k * 4], s[k * 4 + 1]);
        }
        position = at;
        num_tokens = tokens;
        column = tile_column;
    }

    // Nothing when nothing waits.
    template <uint32_t kSide>
    __device__ __forceinline__ void store(const sy_expert_compute_params& params,
                                          uint32_t my_row) const {
        const uint32_t num_outs = params.geometry.hidden, token = my_row + kSide * 8;
        const uint32_t first_out = column * kTileWeights + (threadIdx.x & 3) * 8;
        uint8_t* to = static_cast<uint8_t*>(params.expert_out) +
                      (uint64_t{position + token} * num_outs + first_out) * 2;
        if (token < num_tokens) {
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) {
                const uint32_t* word = &words[(kSide * 8 + i) * 4];
                if (i < 4 || first_out + 128 < num_outs)
                    *reinterpret_cast<uint4*>(to + i * 64) =
                        make_uint4(word[0], word[1], word[2], word[3]);
            }
        }
    }
};

} // namespace switchyard::impls
