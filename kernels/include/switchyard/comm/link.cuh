// The way to a peer. Fused kernels store what they send through `window_of(link)` and then name what
// they stored; whether that goes straight to the peer or into a mirror that a NIC reads is the way's
// business, so a further way needs no change in a fused kernel.
//
// Order: a signal or an add is seen by the peer only after everything that the same block stored
// and named before it (SYNC POINT publish/accept, see docs/memory-model.md).
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::comm {

template <class T>
__device__ __forceinline__ T* window_at(const sy_link& link, uint64_t offset) {
    return reinterpret_cast<T*>(link.window + offset);
}

// Hands over `num_bytes` that this block has stored at `offset` of the window. Called by a whole warp.
__device__ __forceinline__ void put_nbi_warp(const sy_link& link, uint64_t offset,
                                             uint64_t num_bytes) {
    // Direct stores are on their way already; every other way is refused by the launchers.
    (void)link, (void)offset, (void)num_bytes;
}

// Copies `num_bytes` (a multiple of 16, both ends aligned) from local memory into the slot.
__device__ __forceinline__ void put_nbi_warp(const sy_link& link, uint64_t offset,
                                             const void* source, uint64_t num_bytes) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint4* from = static_cast<const uint4*>(source);
    uint4* to = window_at<uint4>(link, offset);
    for (uint64_t i = lane_idx; i < num_bytes / 16; i += 32)
        to[i] = from[i];
}

// SYNC POINT publish: adds to a counter in the peer's slot, after everything stored before.
// NOTES: the stores of the block's other threads are covered if a block barrier lies between.
__device__ __forceinline__ void amo_nonfetch_add(const sy_link& link, uint64_t offset,
                                                 uint64_t value) {
    ptx::red_add_release_sys(window_at<uint64_t>(link, offset), value);
}

// SYNC POINT publish: sets a word that has one writer, after everything stored before.
__device__ __forceinline__ void signal(const sy_link& link, uint64_t offset, uint64_t value) {
    ptx::st_release_sys(window_at<uint64_t>(link, offset), value);
}

// SYNC POINT publish for several words at once: what this warp signals relaxed after it is seen after
// everything that the block stored before (and a barrier made known to this warp).
__device__ __forceinline__ void order_signals() { ptx::fence_acq_rel_sys(); }

// Sets a word that says everything itself and so needs no order, or after order_signals.
__device__ __forceinline__ void signal_relaxed(const sy_link& link, uint64_t offset,
                                               uint64_t value) {
    ptx::st_relaxed_sys(window_at<uint64_t>(link, offset), value);
}

// Returns when everything sent before has reached the peer's memory.
__device__ __forceinline__ void quiet(const sy_link& link) {
    (void)link;
    ptx::fence_acq_rel_sys();
}

} // namespace switchyard::comm
