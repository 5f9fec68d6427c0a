// The host's version of ptx/memory.cuh. Loads that a thread may poll with let the other threads
// run.
#pragma once

#include <cstdint>

namespace switchyard::ptx {

template <class T> T load_and_yield(const T* address) {
    const T value = __atomic_load_n(address, __ATOMIC_SEQ_CST);
    simt::yield_polling();
    return value;
}

inline uint64_t ld_acquire_sys(const uint64_t* address) { return load_and_yield(address); }
inline uint64_t ld_relaxed_sys(const uint64_t* address) { return load_and_yield(address); }
inline uint32_t ld_relaxed_sys(const uint32_t* address) { return load_and_yield(address); }

inline uint32_t ld_acquire_cta_shared(const uint32_t* address) { return load_and_yield(address); }
inline void st_release_cta_shared(uint32_t* address, uint32_t value) {
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}

struct U64Pair {
    uint64_t first, second;
};
inline U64Pair ld_relaxed_sys_v2(uint64_t address) {
    const uint64_t* pair = reinterpret_cast<const uint64_t*>(address);
    return {load_and_yield(pair), load_and_yield(pair + 1)};
}
inline U64Pair ld_acquire_sys_v2(uint64_t address) { return ld_relaxed_sys_v2(address); }

inline void st_release_sys(uint64_t* address, uint64_t value) {
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}
inline void st_relaxed_sys(uint64_t* address, uint64_t value) {
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);
}
inline void red_add_release_sys(uint64_t* address, uint64_t value) {
    __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline void red_add_relaxed_sys(uint64_t* address, uint64_t value) {
    __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline void red_max_relaxed_gpu(uint64_t* address, uint64_t value) {
    uint64_t before = __atomic_load_n(address, __ATOMIC_SEQ_CST);
    while (before < value && !__atomic_compare_exchange_n(address, &before, value, false,
                                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}
inline void red_or_relaxed_gpu(uint32_t* address, uint32_t value) {
    __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);
}
inline void red_add_relaxed_gpu(uint32_t* address, uint32_t value) {
    __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}

inline uint32_t atom_inc_relaxed_gpu(uint32_t* address, uint32_t last) {
    uint32_t before = __atomic_load_n(address, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(address, &before, before >= last ? 0 : before + 1, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
    return before;
}

inline uint32_t atom_cas_relaxed_gpu(uint32_t* address, uint32_t expected, uint32_t desired) {
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_SEQ_CST,
                                __ATOMIC_SEQ_CST);
    return expected;
}

inline void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void fence_acquire_sys() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }

// Words of slots that kernels on other threads store at the same time.
inline uint4 ld_relaxed_sys_v4(uint64_t address) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(address);
    const auto word = [words](int i) { return __atomic_load_n(words + i, __ATOMIC_SEQ_CST); };
    return {word(0), word(1), word(2), word(3)};
}
inline void st_relaxed_sys_v4(uint64_t address, const uint4& value) {
    uint32_t* words = reinterpret_cast<uint32_t*>(address);
    const uint32_t values[4] = {value.x, value.y, value.z, value.w};
    for (int i = 0; i < 4; ++i)
        __atomic_store_n(words + i, values[i], __ATOMIC_SEQ_CST);
}

template <class T> T load_at(uint64_t address) {
    T value;
    memcpy(&value, reinterpret_cast<const void*>(address), sizeof(T));
    return value;
}

inline void st_weak_global_v4(uint64_t address, const uint4& value) {
    *reinterpret_cast<uint4*>(address) = value;
}
inline void st_weak_global_v2(uint64_t address, const uint2& value) {
    *reinterpret_cast<uint2*>(address) = value;
}
inline uint4 ld_weak_global_v4(uint64_t address) { return load_at<uint4>(address); }
inline uint2 ld_weak_global_v2(uint64_t address) { return load_at<uint2>(address); }
inline float ld_weak_global_f32(uint64_t address) { return load_at<float>(address); }
inline uint4 ld_nc_v4(const void* address) {
    return load_at<uint4>(reinterpret_cast<uint64_t>(address));
}

} // namespace switchyard::ptx
