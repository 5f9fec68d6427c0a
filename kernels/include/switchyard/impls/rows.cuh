// Arithmetic on rows: quantisation, widening, weighted rows. The host reference and
// protocol/src/convert.rs compute the same bits.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// A kernel for launches of few blocks, which have many tokens each: the wait of a block between two
// tokens determines the time. Registers suffice, since there are more multiprocessors than blocks.
template <class Config> struct FewBlocks : Config {
    static constexpr bool kIsFew = true;
    static constexpr uint32_t kMinBlocks = 1;
};

constexpr float kF8Max = 448.0f;
constexpr uint32_t kFullWarp = 0xffffffffu;

__device__ __forceinline__ float2 bf16x2_to_float2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ uint32_t float2_to_bf16x2(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof(bits));
    return bits;
}

// Largest of two pairs of bf16 magnitudes. Magnitudes order like integers.
__device__ __forceinline__ uint32_t max_u16x2(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

// value / 448, rounded to nearest, for bf16 values with a normal quotient. A product with the
// reciprocal is off by one unit at most, and its remainder is exact.
__device__ __forceinline__ float divide_by_f8_max(float value) {
    constexpr float kReciprocal = 1.0f / kF8Max;
    const float quotient = __fmul_rn(value, kReciprocal);
    return __fmaf_rn(__fmaf_rn(-quotient, kF8Max, value), kReciprocal, quotient);
}

template <uint32_t kWords> struct QuantizedWords {
    uint32_t codes[kWords / 2]; // e4m3 values
    float scale; // of the 128 values that neighbouring lanes hold
};

// Quantises pairs of bf16 values, 128 values over neighbouring lanes. Called by whole warps.
template <uint32_t kWords>
__device__ __forceinline__ QuantizedWords<kWords> quantize_words(uint32_t (&words)[kWords]) {
    uint32_t largest2 = words[0] & 0x7fff7fffu;
#pragma unroll
    for (uint32_t i = 1; i < kWords; ++i)
        largest2 = max_u16x2(largest2, words[i] & 0x7fff7fffu);
    uint32_t largest = max(largest2 & 0xffffu, largest2 >> 16);
    if (__any_sync(kFullWarp, largest >= 0x7f80u)) {
        // NaN and infinity take no part in the scale and become the code of NaN.
        largest = 0;
#pragma unroll
        for (uint32_t i = 0; i < kWords; ++i) {
            const uint32_t low = words[i] & 0x7fffu, high = words[i] >> 16 & 0x7fffu;
            if (low >= 0x7f80u)
                words[i] |= 0x7fffu;
            else
                largest = max(largest, low);
            if (high >= 0x7f80u)
                words[i] |= 0x7fff0000u;
            else
                largest = max(largest, high);
        }
    }
#pragma unroll
    for (uint32_t delta = 1; delta < 64 / kWords; delta <<= 1)
        largest = max(largest, __shfl_xor_sync(kFullWarp, largest, delta));
    QuantizedWords<kWords> quantized;
    // A block of zeros has scale 1; the smallest scale keeps its reciprocal finite.
    quantized.scale = largest == 0 ? 1.0f
                                   : fmaxf(divide_by_f8_max(__uint_as_float(largest << 16)),
                                           __uint_as_float(0x00800000u));
    const float inverse = __frcp_rn(quantized.scale);
#pragma unroll
    for (uint32_t i = 0; i < kWords / 2; ++i) {
        const float2 a = bf16x2_to_float2(words[2 * i]), b = bf16x2_to_float2(words[2 * i + 1]);
        const uint32_t low =
            __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(a.x, inverse), __fmul_rn(a.y, inverse)),
                                     __NV_SATFINITE, __NV_E4M3);
        const uint32_t high =
            __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(b.x, inverse), __fmul_rn(b.y, inverse)),
                                     __NV_SATFINITE, __NV_E4M3);
        quantized.codes[i] = low | high << 16;
    }
    return quantized;
}

struct QuantizedChunk {
    uint4 codes; // 16 e4m3 values
    float scale; // of the 128 values that eight neighbouring lanes hold
};

// Quantises 16 bf16 values per lane. Called by whole warps; eight neighbouring lanes share a scale.
__device__ __forceinline__ QuantizedChunk quantize_chunk(const uint4 (&values)[2]) {
    uint32_t words[8] = {values[0].x, values[0].y, values[0].z, values[0].w,
                         values[1].x, values[1].y, values[1].z, values[1].w};
    const QuantizedWords<8> quantized = quantize_words(words);
    return {
        make_uint4(quantized.codes[0], quantized.codes[1], quantized.codes[2], quantized.codes[3]),
        quantized.scale};
}

// Eight values of a row as they lie in a slot, and the scale that goes with them.
template <bool kFp8> struct SlotChunk {
    uint4 bits; // fp8: x and y only
    float scale;
};

template <bool kFp8>
__device__ __forceinline__ SlotChunk<kFp8> load_slot_chunk(uint64_t row, uint64_t scales,
                                                           uint32_t chunk_idx) {
    SlotChunk<kFp8> chunk;
    if (kFp8) {
        const uint2 bits = ptx::ld_weak_global_v2(row + chunk_idx * 8);
        chunk.bits = make_uint4(bits.x, bits.y, 0, 0);
        chunk.scale = ptx::ld_weak_global_f32(scales + (chunk_idx >> 4) * sizeof(float));
    } else {
        chunk.bits = ptx::ld_weak_global_v4(row + chunk_idx * 16);
        chunk.scale = 1.0f;
    }
    return chunk;
}

// Values 2 * pair_idx and 2 * pair_idx + 1 of a chunk.
template <bool kFp8>
__device__ __forceinline__ float2 slot_pair(const SlotChunk<kFp8>& chunk, int pair_idx) {
    const uint32_t words[4] = {chunk.bits.x, chunk.bits.y, chunk.bits.z, chunk.bits.w};
    if (!kFp8)
        return bf16x2_to_float2(words[pair_idx]);
    const uint32_t both = words[pair_idx >> 1] >> (pair_idx & 1) * 16 & 0xffffu;
    const __half2_raw half_pair =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(both), __NV_E4M3);
    const float2 value = __half22float2(__half2(half_pair));
    return make_float2(__fmul_rn(value.x, chunk.scale), __fmul_rn(value.y, chunk.scale));
}

// bf16 of chunk times weight.
template <bool kFp8>
__device__ __forceinline__ uint4 weigh_chunk(const SlotChunk<kFp8>& chunk, float weight) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 value = slot_pair<kFp8>(chunk, i);
        words[i] = float2_to_bf16x2(__fmul_rn(value.x, weight), __fmul_rn(value.y, weight));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Adds eight bf16 values to `sum`, each times `weight` rounded apart when weighted.
template <bool kWeighted>
__device__ __forceinline__ void add_chunk(float (&sum)[8], const uint4& bits, float weight = 1.0f) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 value = bf16x2_to_float2(words[i]);
        sum[2 * i] = __fadd_rn(sum[2 * i], kWeighted ? __fmul_rn(value.x, weight) : value.x);
        sum[2 * i + 1] =
            __fadd_rn(sum[2 * i + 1], kWeighted ? __fmul_rn(value.y, weight) : value.y);
    }
}

__device__ __forceinline__ uint4 round_chunk(const float (&sum)[8]) {
    return make_uint4(float2_to_bf16x2(sum[0], sum[1]), float2_to_bf16x2(sum[2], sum[3]),
                      float2_to_bf16x2(sum[4], sum[5]), float2_to_bf16x2(sum[6], sum[7]));
}

} // namespace switchyard::impls
