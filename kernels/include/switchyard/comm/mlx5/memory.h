// Accesses to queues and to the words that posters share, with their scope as a template argument,
// and the definition of a warp. Compiled by nvcc these are PTX instructions. Compiled by a host
// compiler they are atomics of the processor, so that tests run the same protocol. There one thread
// stands for a whole warp, except in kernels that run on the host (SY_SIMT), which have 32 of their
// own.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/queue.h"

#if defined(__CUDACC__)
#define SY_DEVICE __device__ __forceinline__
#define SY_DEVICE_COLD __device__ __noinline__
#else
#include <sched.h>
#include <time.h>
#define SY_DEVICE inline
#define SY_DEVICE_COLD
#endif

namespace switchyard::comm {

// Observers: other warps of the block, of this GPU, or also processors, NICs and other GPUs.
enum class Scope { kCta, kGpu, kSys };

template <class T> SY_DEVICE T* at_address(uint64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

#if defined(__CUDACC__)

// One instruction each, in both scopes.
#define SY_LOAD(name, op, type, suffix, reg)                                                       \
    template <Scope kScope> SY_DEVICE type name(const type* address) {                             \
        type value;                                                                                \
        if constexpr (kScope == Scope::kSys)                                                       \
            asm volatile(op ".sys.global." suffix " %0, [%1];"                                     \
                         : "=" reg(value)                                                          \
                         : "l"(address)                                                            \
                         : "memory");                                                              \
        else if constexpr (kScope == Scope::kCta)                                                  \
            asm volatile(op ".cta.global." suffix " %0, [%1];"                                     \
                         : "=" reg(value)                                                          \
                         : "l"(address)                                                            \
                         : "memory");                                                              \
        else                                                                                       \
            asm volatile(op ".gpu.global." suffix " %0, [%1];"                                     \
                         : "=" reg(value)                                                          \
                         : "l"(address)                                                            \
                         : "memory");                                                              \
        return value;                                                                              \
    }
#define SY_STORE(name, op, type, suffix, reg)                                                      \
    template <Scope kScope> SY_DEVICE void name(type* address, type value) {                       \
        if constexpr (kScope == Scope::kSys)                                                       \
            asm volatile(op ".sys.global." suffix " [%0], %1;" ::"l"(address), reg(value)          \
                         : "memory");                                                              \
        else if constexpr (kScope == Scope::kCta)                                                  \
            asm volatile(op ".cta.global." suffix " [%0], %1;" ::"l"(address), reg(value)          \
                         : "memory");                                                              \
        else                                                                                       \
            asm volatile(op ".gpu.global." suffix " [%0], %1;" ::"l"(address), reg(value)          \
                         : "memory");                                                              \
    }

SY_LOAD(ld_relaxed, "ld.relaxed", uint32_t, "u32", "r")
SY_LOAD(ld_relaxed, "ld.relaxed", uint64_t, "u64", "l")
SY_LOAD(ld_acquire, "ld.acquire", uint64_t, "u64", "l")
SY_STORE(st_relaxed, "st.relaxed", uint32_t, "u32", "r")
SY_STORE(st_relaxed, "st.relaxed", uint64_t, "u64", "l")
SY_STORE(st_release, "st.release", uint32_t, "u32", "r")
SY_STORE(st_release, "st.release", uint64_t, "u64", "l")
#undef SY_LOAD
#undef SY_STORE

template <Scope kScope> SY_DEVICE void fence_acq_rel() {
    static_assert(kScope != Scope::kCta, "what a NIC or another block sees needs more");
    if constexpr (kScope == Scope::kSys)
        asm volatile("fence.acq_rel.sys;" ::: "memory");
    else
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

template <Scope kScope>
SY_DEVICE void st_relaxed_v4(uint32_t* address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    if constexpr (kScope == Scope::kSys)
        asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a),
                     "r"(b), "r"(c), "r"(d)
                     : "memory");
    else
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(a),
                     "r"(b), "r"(c), "r"(d)
                     : "memory");
}

// The register of a device, which must see exactly one store of this width.
SY_DEVICE void st_mmio(uint64_t* address, uint64_t value) {
    asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

SY_DEVICE uint64_t atom_add_relaxed(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(address), "l"(value)
                 : "memory");
    return before;
}

SY_DEVICE void red_max_release(uint64_t* address, uint64_t value) {
    asm volatile("red.release.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

SY_DEVICE void red_max_relaxed(uint64_t* address, uint64_t value) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

SY_DEVICE uint32_t atom_cas_acquire(uint32_t* address, uint32_t expected, uint32_t desired) {
    uint32_t before;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return before;
}

SY_DEVICE uint64_t atom_cas_relaxed(uint64_t* address, uint64_t expected, uint64_t desired) {
    uint64_t before;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(desired)
                 : "memory");
    return before;
}

SY_DEVICE uint64_t now_ns() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

SY_DEVICE void pause_poll() {}
SY_DEVICE uint32_t be32(uint32_t value) { return __byte_perm(value, 0, 0x0123); }
SY_DEVICE uint32_t floor_power_of_two(uint32_t value) { return 0x80000000u >> __clz(value); }

#else // a host compiler

template <Scope> SY_DEVICE uint32_t ld_relaxed(const uint32_t* address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}

template <Scope> SY_DEVICE uint64_t ld_relaxed(const uint64_t* address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}

template <Scope> SY_DEVICE uint64_t ld_acquire(const uint64_t* address) {
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

template <Scope> SY_DEVICE void st_relaxed(uint32_t* address, uint32_t value) {
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

template <Scope> SY_DEVICE void st_relaxed(uint64_t* address, uint64_t value) {
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

template <Scope> SY_DEVICE void st_release(uint32_t* address, uint32_t value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

template <Scope> SY_DEVICE void st_release(uint64_t* address, uint64_t value) {
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
}

template <Scope> SY_DEVICE void fence_acq_rel() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

template <Scope>
SY_DEVICE void st_relaxed_v4(uint32_t* address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint64_t* pairs = reinterpret_cast<uint64_t*>(address);
    __atomic_store_n(pairs, static_cast<uint64_t>(b) << 32 | a, __ATOMIC_RELAXED);
    __atomic_store_n(pairs + 1, static_cast<uint64_t>(d) << 32 | c, __ATOMIC_RELAXED);
}

// NOTES: libmlx5 maps doorbell registers write-combining. There a store may pass those before it,
// and may stay in the processor for an unlimited time, unless a fence stands on either side.
SY_DEVICE void fence_write_combining() {
#if defined(__x86_64__)
    asm volatile("sfence" ::: "memory");
#elif defined(__aarch64__)
    asm volatile("dsb st" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

SY_DEVICE void st_mmio(uint64_t* address, uint64_t value) {
    fence_write_combining();
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
    fence_write_combining();
}

SY_DEVICE uint64_t atom_add_relaxed(uint64_t* address, uint64_t value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

SY_DEVICE void red_max_release(uint64_t* address, uint64_t value) {
    uint64_t seen = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (seen < value && !__atomic_compare_exchange_n(address, &seen, value, true,
                                                        __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
    }
}

SY_DEVICE void red_max_relaxed(uint64_t* address, uint64_t value) {
    red_max_release(address, value);
}

SY_DEVICE uint32_t atom_cas_acquire(uint32_t* address, uint32_t expected, uint32_t desired) {
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQUIRE,
                                __ATOMIC_RELAXED);
    return expected;
}

SY_DEVICE uint64_t atom_cas_relaxed(uint64_t* address, uint64_t expected, uint64_t desired) {
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}

SY_DEVICE uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// Threads that stand for warps may be more than the processor has cores.
SY_DEVICE void pause_poll() {
    sched_yield();
#if defined(SY_SIMT)
    simt::yield();
#endif
}

SY_DEVICE uint32_t be32(uint32_t value) { return __builtin_bswap32(value); }
SY_DEVICE uint32_t floor_power_of_two(uint32_t value) {
    return 0x80000000u >> __builtin_clz(value);
}

#endif

// Chooses one poller among all threads that wait for something else and must check whether their
// path still works. Returns whether it is the caller's turn. `polled_at` is the time of the last poll,
// in units of 2 microseconds, and begins as 0.
// NOTES: a read of the host's memory takes a microsecond, and combine waits in two thousand warps.
// When each polled for itself, requests queued behind their reads: layers took up to a hundred
// times as long.
SY_DEVICE bool takes_poll_turn(uint64_t* polled_at) {
    const uint64_t now = now_ns() >> 11;
    const uint64_t last = ld_relaxed<Scope::kGpu>(polled_at);
    // A thread that was delayed since it read the clock does not poll either. A clock that was set
    // back two seconds counts again.
    constexpr uint64_t kMostLate = 1 << 20;
    return last - now > kMostLate && atom_cas_relaxed(polled_at, last, now) == last;
}

#if defined(__CUDACC__) || defined(SY_SIMT)

// The 32 lanes of this warp.
struct Warp {
    // Requests of a group. A lane builds each.
    static constexpr uint32_t kMostRequests = 32;

    template <class F> SY_DEVICE static void each_lane(uint32_t num_lanes, F&& lane) {
        const uint32_t lane_idx = threadIdx.x & 31;
        if (lane_idx < num_lanes)
            lane(lane_idx);
        __syncwarp();
    }

    // Lane 0 does it. Its fences, and later ones of the other lanes, cover the earlier stores of
    // all lanes.
    template <class F> SY_DEVICE static void lead(F&& compute) {
        __syncwarp();
        if ((threadIdx.x & 31) == 0)
            compute();
    }

    // A value that lane 0 computes, for all lanes.
    // NOTES: a shuffle orders no memory. The barrier before it passes on the data that lane 0 has
    // acquired, and collects the stores of the lanes for the one that announces them next.
    template <class F> SY_DEVICE static uint64_t leader(F&& compute) {
        uint64_t value = 0;
        if ((threadIdx.x & 31) == 0)
            value = compute();
        __syncwarp();
        return __shfl_sync(0xffffffffu, value, 0);
    }
};

// The lane of the `nth` of the first `num` bits of `lanes`, which are taken away.
SY_DEVICE uint32_t take_lanes(uint32_t* lanes, uint32_t num, uint32_t nth) {
    uint32_t lane = 0;
    for (uint32_t i = 0; i < num; ++i, *lanes &= *lanes - 1)
        if (i == nth)
            lane = __ffs(*lanes) - 1;
    return lane;
}

#else

struct Warp {
    static constexpr uint32_t kMostRequests = UINT32_MAX;

    template <class F> SY_DEVICE static void each_lane(uint32_t num_lanes, F&& lane) {
        for (uint32_t lane_idx = 0; lane_idx < num_lanes; ++lane_idx)
            lane(lane_idx);
    }

    template <class F> SY_DEVICE static void lead(F&& compute) { compute(); }

    template <class F> SY_DEVICE static uint64_t leader(F&& compute) { return compute(); }
};

#endif

// A single thread that posts by itself.
struct Thread {
    static constexpr uint32_t kMostRequests = UINT32_MAX;

    template <class F> SY_DEVICE static void each_lane(uint32_t num_lanes, F&& lane) {
        for (uint32_t lane_idx = 0; lane_idx < num_lanes; ++lane_idx)
            lane(lane_idx);
    }

    template <class F> SY_DEVICE static void lead(F&& compute) { compute(); }

    template <class F> SY_DEVICE static uint64_t leader(F&& compute) { return compute(); }
};

} // namespace switchyard::comm
