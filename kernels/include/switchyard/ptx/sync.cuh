// Time, dependent launches and clusters. One instruction each.
#pragma once

#include <cstdint>

namespace switchyard::ptx {

__device__ __forceinline__ uint64_t mov_globaltimer() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// Waits until the kernel before this one has ended and its stores are visible. Nothing without PDL.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// threadIdx.x % 32, but read again wherever it is asked for, so that no register keeps it.
__device__ __forceinline__ uint32_t mov_laneid() {
    uint32_t lane_idx;
    asm volatile("mov.u32 %0, %laneid;" : "=r"(lane_idx));
    return lane_idx;
}

__device__ __forceinline__ uint32_t mov_cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Barrier of kNumThreads of the block's threads, whole warps; kId is 1 to 15, and __syncthreads is 0.
template <uint32_t kId, uint32_t kNumThreads> __device__ __forceinline__ void bar_sync() {
    static_assert(kId != 0 && kId < 16 && kNumThreads % 32 == 0, "a barrier of whole warps");
    asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kNumThreads) : "memory");
}

// Orders nothing, and so waits for nothing that was stored before.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait_acquire() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address, in the cluster's shared window, of `address` in the block of rank `rank`.
__device__ __forceinline__ uint32_t mapa_shared_cluster(const void* address, uint32_t rank) {
    const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    return remote;
}

__device__ __forceinline__ uint32_t ld_shared_cluster(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint32_t ld_relaxed_cluster_shared(const uint32_t* address) {
    const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
    uint32_t value;
    asm volatile("ld.relaxed.cluster.shared::cta.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(local)
                 : "memory");
    return value;
}

__device__ __forceinline__ void fence_acq_rel_cluster() {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

__device__ __forceinline__ void red_or_shared_cluster(uint32_t address, uint32_t value) {
    asm volatile("red.relaxed.cluster.shared::cluster.or.b32 [%0], %1;" ::"r"(address), "r"(value)
                 : "memory");
}

__device__ __forceinline__ void red_max_shared_cluster(uint32_t address, uint32_t value) {
    asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(address), "r"(value)
                 : "memory");
}

} // namespace switchyard::ptx
