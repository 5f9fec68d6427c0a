// The part of CUDA's header that the kernels use. Values are converted through float, which holds
// them exactly.
#pragma once

using __nv_fp8x2_storage_t = uint16_t;
enum { __NV_SATFINITE, __NV_E4M3 };

struct __half2_raw {
    float x, y;
};
struct __half2 {
    float x, y;
    explicit __half2(const __half2_raw& raw) : x(raw.x), y(raw.y) {}
};

inline float simt_from_e4m3(uint32_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = (code & 0x7f) == 0x7f ? NAN
                            : exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// Nearest by halving the distance to it: apart from every other conversion in this project.
inline uint32_t simt_to_e4m3(float value) {
    if (std::isnan(value))
        return 0x7f;
    const uint32_t sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = std::fabs(value);
    if (magnitude >= 448.0f)
        return sign | 0x7e;
    uint32_t low = 0, high = 0x7e;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        (simt_from_e4m3(middle) <= magnitude ? low : high) = middle;
    }
    const float below = magnitude - simt_from_e4m3(low), above = simt_from_e4m3(high) - magnitude;
    return sign | (above < below || (above == below && low % 2 == 1) ? high : low);
}

inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 values, int, int) {
    return static_cast<__nv_fp8x2_storage_t>(simt_to_e4m3(values.x) | simt_to_e4m3(values.y) << 8);
}

inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t codes, int) {
    return {simt_from_e4m3(codes & 0xffu), simt_from_e4m3(uint32_t{codes} >> 8)};
}

inline float2 __half22float2(const __half2& values) { return {values.x, values.y}; }
