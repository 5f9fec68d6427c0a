// Approximations in hardware. One instruction each.
#pragma once

namespace switchyard::ptx {

// 2^x to two units in the last place; 0 for results that are not normal.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x to one unit in the last place; 0 for results that are not normal.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

} // namespace switchyard::ptx
