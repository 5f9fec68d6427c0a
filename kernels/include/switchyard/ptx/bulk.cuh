// The copy engine, and its barriers in shared memory. One instruction each.
#pragma once

#include <cstdint>

namespace switchyard::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* address) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t num_arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals)
                 : "memory");
}

// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

// Whether the phase of this parity is complete; sleeps for a while when it is not.
__device__ __forceinline__ bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t is_complete;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is_complete)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return is_complete != 0;
}

// Copies 16 bytes to shared memory, as the processor's threads store: the matrix units see it after
// a fence_proxy_async.
__device__ __forceinline__ void cp_async_cg_16(uint32_t target, uint64_t source) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
                 : "memory");
}

__device__ __forceinline__ void cp_async_ca_4(uint32_t target, uint64_t source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Arrives when all of this thread's cp_async so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// `num_bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_to_shared(uint32_t target, const void* source,
                                                        uint32_t num_bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(source), "r"(num_bytes), "r"(barrier)
                 : "memory");
}

// From shared memory of this block, for the group that this thread commits next. `num_bytes` and both
// addresses are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_to_global(uint64_t target, const void* source,
                                                        uint32_t num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(shared_address(source)), "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all but the last kMost groups that this thread has committed are where they belong, as seen by this
// thread.
template <uint32_t kMost> __device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kMost) : "memory");
}

// Until those groups have been read from shared memory.
template <uint32_t kMost> __device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kMost) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d(uint32_t target, const void* map,
                                                        uint32_t barrier, uint32_t x, uint32_t y,
                                                        uint32_t z, uint32_t u, uint32_t v) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
                 : "memory");
}

// Before copies of this thread by a map in global memory that others, also the host, may have written since this
// multiprocessor read it last.
__device__ __forceinline__ void fence_proxy_tensormap_acquire_sys(const void* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Between ordinary stores and the copy engine's reads, in both directions and all memory spaces.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The same for shared memory of this block.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <uint32_t kRegisters> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier of `num_threads` threads, other than barrier 0.
__device__ __forceinline__ void bar_sync(uint32_t barrier_idx, uint32_t num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// Counts this warp at such a barrier, and does not wait there.
__device__ __forceinline__ void bar_arrive(uint32_t barrier_idx, uint32_t num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// Two 8 by 8 matrices of 16-bit values. Lane l names row l % 8 of matrix l / 8 (lanes below 16).
__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t first,
                                                  uint32_t second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                 "r"(first), "r"(second)
                 : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, const uint4& value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void st_shared_u16(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value))
                 : "memory");
}

__device__ __forceinline__ float2 ld_shared_f32x2(uint32_t address) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

} // namespace switchyard::ptx
