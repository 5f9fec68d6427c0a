// Loads, stores and reductions with their order and scope in the name. One instruction each.
#pragma once

#include <cstdint>

namespace switchyard::ptx {

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_relaxed_sys(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Words of shared memory, among the warps of a block.
__device__ __forceinline__ uint32_t ld_acquire_cta_shared(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address)))
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_release_cta_shared(uint32_t* address, uint32_t value) {
    asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(address))),
                 "r"(value)
                 : "memory");
}

struct U64Pair {
    uint64_t first, second;
};

__device__ __forceinline__ U64Pair ld_acquire_sys_v2(uint64_t address) {
    U64Pair pair;
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.first), "=l"(pair.second)
                 : "l"(address)
                 : "memory");
    return pair;
}

__device__ __forceinline__ U64Pair ld_relaxed_sys_v2(uint64_t address) {
    U64Pair pair;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.first), "=l"(pair.second)
                 : "l"(address)
                 : "memory");
    return pair;
}

__device__ __forceinline__ void st_release_sys(uint64_t* address, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(uint64_t* address, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void red_add_release_sys(uint64_t* address, uint64_t value) {
    asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void red_add_relaxed_sys(uint64_t* address, uint64_t value) {
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void red_max_relaxed_gpu(uint64_t* address, uint64_t value) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void red_or_relaxed_gpu(uint32_t* address, uint32_t value) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void red_add_relaxed_gpu(uint32_t* address, uint32_t value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Counts from 0 to `last` and then wraps, so that the counter needs no reset.
__device__ __forceinline__ uint32_t atom_inc_relaxed_gpu(uint32_t* address, uint32_t last) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(address), "r"(last)
                 : "memory");
    return before;
}

__device__ __forceinline__ uint32_t atom_cas_relaxed_gpu(uint32_t* address, uint32_t expected,
                                                         uint32_t desired) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return before;
}

__device__ __forceinline__ void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Waits for no store.
__device__ __forceinline__ void fence_acquire_sys() {
    asm volatile("fence.acquire.sys;" ::: "memory");
}

// Four words, each by itself: no order among them.
__device__ __forceinline__ uint4 ld_relaxed_sys_v4(uint64_t address) {
    uint4 value;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_relaxed_sys_v4(uint64_t address, const uint4& value) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                 "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

// Slots are known by number, and the compiler would have to take their addresses for generic ones.
__device__ __forceinline__ void st_weak_global_v4(uint64_t address, const uint4& value) {
    asm volatile("st.weak.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ void st_weak_global_v2(uint64_t address, const uint2& value) {
    asm volatile("st.weak.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(value.x), "r"(value.y)
                 : "memory");
}

__device__ __forceinline__ uint4 ld_weak_global_v4(uint64_t address) {
    uint4 value;
    asm volatile("ld.weak.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint2 ld_weak_global_v2(uint64_t address) {
    uint2 value;
    asm volatile("ld.weak.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "l"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ float ld_weak_global_f32(uint64_t address) {
    float value;
    asm volatile("ld.weak.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
}

// NOTES: for data that no one writes while the kernel runs, never for slots. No "memory" clobber, so
// that the compiler may hoist the load.
__device__ __forceinline__ uint4 ld_nc_v4(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

} // namespace switchyard::ptx
