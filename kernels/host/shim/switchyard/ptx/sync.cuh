// The host's version of ptx/sync.cuh. Every read of the clock advances the time, so that bounds
// expire alike on every run. With SIMT_REAL_CLOCK the time is the real one.
#pragma once

#include <cstdint>
#include <ctime>

namespace switchyard::ptx {

#if defined(SIMT_REAL_CLOCK)
inline uint64_t mov_globaltimer() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
#else
constexpr uint64_t kNsPerLook = 1000;

inline uint64_t mov_globaltimer() { return simt::clock_ns.fetch_add(kNsPerLook) + kNsPerLook; }
#endif
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline uint32_t mov_laneid() { return threadIdx.x & 31; }
inline uint32_t mov_cluster_ctarank() { return simt::block->rank; }
template <uint32_t kId, uint32_t kNumThreads> void bar_sync() {
    simt::block->has_moved = true;
    simt::meet(simt::block->named_barriers[kId], kNumThreads);
}
inline void barrier_cluster_arrive_relaxed() {}
inline void barrier_cluster_arrive_release() {}
inline void barrier_cluster_wait_acquire() {
    simt::meet(simt::block->cluster->barrier, simt::block->cluster->num_threads);
}

// Shared memory of a cluster's blocks lies equally far from their markers.
constexpr int64_t kMiddle = 1 << 27;

inline uint32_t mapa_shared_cluster(const void* address, uint32_t rank) {
    const int64_t distance = static_cast<const char*>(address) - &simt::marker;
    if (distance <= -kMiddle || distance >= kMiddle)
        abort();
    return rank << 28 | static_cast<uint32_t>(distance + kMiddle);
}

inline uint32_t* in_cluster(uint32_t address) {
    char* marker = simt::block->cluster->marker[address >> 28];
    return reinterpret_cast<uint32_t*>(marker +
                                       (static_cast<int64_t>(address & 0xfffffffu) - kMiddle));
}

inline uint32_t ld_shared_cluster(uint32_t address) {
    return __atomic_load_n(in_cluster(address), __ATOMIC_SEQ_CST);
}
inline uint32_t ld_relaxed_cluster_shared(const uint32_t* address) {
    const uint32_t value = __atomic_load_n(address, __ATOMIC_SEQ_CST);
    simt::yield_polling();
    return value;
}
inline void fence_acq_rel_cluster() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void red_or_shared_cluster(uint32_t address, uint32_t value) {
    __atomic_fetch_or(in_cluster(address), value, __ATOMIC_SEQ_CST);
}
inline void red_max_shared_cluster(uint32_t address, uint32_t value) {
    uint32_t before = __atomic_load_n(in_cluster(address), __ATOMIC_SEQ_CST);
    while (before < value &&
           !__atomic_compare_exchange_n(in_cluster(address), &before, value, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

} // namespace switchyard::ptx
