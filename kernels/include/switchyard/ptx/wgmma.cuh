// Products of a warpgroup: m64, operands in shared memory, sums in registers. One instruction each.
//
// NOTES: registers of a product under way must not be accessed before wgmma_wait. Both operands are
// "K-major": rows of 128 bytes, rotated as the copy engine's 128-byte swizzle does, in groups of
// eight rows.
#pragma once

#include <cstdint>

namespace switchyard::ptx {

// The lower half of a descriptor of shared memory at `address`, a multiple of 1024 plus 32 bytes
// per step of depth. `wgmma_operand(a + b)` is `wgmma_operand(a) + b / 16`. The upper half is the
// same for all: 128-byte swizzle, 1024 bytes between groups of rows.
__device__ __forceinline__ uint32_t wgmma_operand(uint32_t address) {
    return 1u << 16 | address >> 4;
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// sum = a b^T, added to `sum` when `adds`. a: 64 rows, b: kColumns rows, 32 bytes deep: 16 values of bf16,
// 32 of fp8.
template <bool kFp8, uint32_t kColumns> struct Wgmma;

#define SY_SUM4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SY_SUM16(i) SY_SUM4(i), SY_SUM4(i + 4), SY_SUM4(i + 8), SY_SUM4(i + 12)
#define SY_SUM64(i) SY_SUM16(i), SY_SUM16(i + 16), SY_SUM16(i + 32), SY_SUM16(i + 48)

template <> struct Wgmma<false, 8> {
    __device__ static __forceinline__ void run(float (&sum)[4], uint32_t a, uint32_t b, bool adds) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %6, 0;\n"
                     "mov.b64 a, {%4, 0x40000040};\nmov.b64 b, {%5, 0x40000040};\n"
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3"
                     "}, a, b, p, 1, 1, 0, 0;\n}"
                     : SY_SUM4(0)
                     : "r"(a), "r"(b), "r"(static_cast<int>(adds))
                     : "memory");
    }
};

template <> struct Wgmma<false, 16> {
    __device__ static __forceinline__ void run(float (&sum)[8], uint32_t a, uint32_t b, bool adds) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %10, 0;\n"
                     "mov.b64 a, {%8, 0x40000040};\nmov.b64 b, {%9, 0x40000040};\n"
                     "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7"
                     "}, a, b, p, 1, 1, 0, 0;\n}"
                     : SY_SUM4(0), SY_SUM4(4)
                     : "r"(a), "r"(b), "r"(static_cast<int>(adds))
                     : "memory");
    }
};

template <> struct Wgmma<false, 32> {
    __device__ static __forceinline__ void run(float (&sum)[16], uint32_t a, uint32_t b,
                                               bool adds) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\n"
                     "mov.b64 a, {%16, 0x40000040};\nmov.b64 b, {%17, 0x40000040};\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                     "}, a, b, p, 1, 1, 0, 0;\n}"
                     : SY_SUM16(0)
                     : "r"(a), "r"(b), "r"(static_cast<int>(adds))
                     : "memory");
    }
};

template <> struct Wgmma<false, 64> {
    __device__ static __forceinline__ void run(float (&sum)[32], uint32_t a, uint32_t b,
                                               bool adds) {
        asm volatile(
            "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\n"
            "mov.b64 a, {%32, 0x40000040};\nmov.b64 b, {%33, 0x40000040};\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, a, b, p, 1, 1, 0, 0;\n}"
            : SY_SUM16(0), SY_SUM16(16)
            : "r"(a), "r"(b), "r"(static_cast<int>(adds))
            : "memory");
    }
};

template <> struct Wgmma<false, 256> {
    __device__ static __forceinline__ void run(float (&sum)[128], uint32_t a, uint32_t b,
                                               bool adds) {
        asm volatile(
            "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %130, 0;\n"
            "mov.b64 a, {%128, 0x40000040};\nmov.b64 b, {%129, 0x40000040};\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
            "}, a, b, p, 1, 1, 0, 0;\n}"
            : SY_SUM64(0), SY_SUM64(64)
            : "r"(a), "r"(b), "r"(static_cast<int>(adds))
            : "memory");
    }
};

template <> struct Wgmma<true, 8> {
    __device__ static __forceinline__ void run(float (&sum)[4], uint32_t a, uint32_t b, bool adds) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %6, 0;\n"
                     "mov.b64 a, {%4, 0x40000040};\nmov.b64 b, {%5, 0x40000040};\n"
                     "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
                     "%0, %1, %2, %3"
                     "}, a, b, p, 1, 1;\n}"
                     : SY_SUM4(0)
                     : "r"(a), "r"(b), "r"(static_cast<int>(adds))
                     : "memory");
    }
};

template <> struct Wgmma<true, 16> {
    __device__ static __forceinline__ void run(float (&sum)[8], uint32_t a, uint32_t b, bool adds) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %10, 0;\n"
                     "mov.b64 a, {%8, 0x40000040};\nmov.b64 b, {%9, 0x40000040};\n"
                     "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7"
                     "}, a, b, p, 1, 1;\n}"
                     : SY_SUM4(0), SY_SUM4(4)
                     : "r"(a), "r"(b), "r"(static_cast<int>(adds))
                     : "memory");
    }
};

template <> struct Wgmma<true, 32> {
    __device__ static __forceinline__ void run(float (&sum)[16], uint32_t a, uint32_t b,
                                               bool adds) {
        asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %18, 0;\n"
                     "mov.b64 a, {%16, 0x40000040};\nmov.b64 b, {%17, 0x40000040};\n"
                     "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                     "}, a, b, p, 1, 1;\n}"
                     : SY_SUM16(0)
                     : "r"(a), "r"(b), "r"(static_cast<int>(adds))
                     : "memory");
    }
};

template <> struct Wgmma<true, 64> {
    __device__ static __forceinline__ void run(float (&sum)[32], uint32_t a, uint32_t b,
                                               bool adds) {
        asm volatile(
            "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\n"
            "mov.b64 a, {%32, 0x40000040};\nmov.b64 b, {%33, 0x40000040};\n"
            "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, a, b, p, 1, 1;\n}"
            : SY_SUM16(0), SY_SUM16(16)
            : "r"(a), "r"(b), "r"(static_cast<int>(adds))
            : "memory");
    }
};

template <> struct Wgmma<true, 128> {
    __device__ static __forceinline__ void run(float (&sum)[64], uint32_t a, uint32_t b,
                                               bool adds) {
        asm volatile(
            "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\n"
            "mov.b64 a, {%64, 0x40000040};\nmov.b64 b, {%65, 0x40000040};\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, a, b, p, 1, 1;\n}"
            : SY_SUM64(0)
            : "r"(a), "r"(b), "r"(static_cast<int>(adds))
            : "memory");
    }
};

#undef SY_SUM64
#undef SY_SUM16
#undef SY_SUM4

} // namespace switchyard::ptx
