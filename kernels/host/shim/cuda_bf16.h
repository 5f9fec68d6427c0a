// The part of CUDA's header that the kernels use.
#pragma once

struct __nv_bfloat162 {
    uint16_t x, y;
};

inline uint16_t simt_to_bf16(float value) {
    const uint32_t bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {simt_to_bf16(low), simt_to_bf16(high)};
}
