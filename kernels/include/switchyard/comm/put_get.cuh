// Copies to a peer and back, over any path: with link.cuh and wait.cuh the whole set of calls.
//
// Offsets are within the peer's slot. The permitted `local` depends on the path:
//
//            put_nbi_warp                                get_nbi_warp
//   direct   any memory of this GPU, shared one too.     any memory of this GPU, shared one too.
//            Its own place in the window: it is there,   Its own place in the window: it is there,
//            nothing is done.                            nothing is done.
//   IBGDA,   any memory, shared one too: it is stored    the mirror, which is all that a NIC may write
//   proxy    into the mirror at `offset` first. In the   here. Anything else is refused.
//            mirror: nothing is copied.
//
// A copy of no bytes needs no memory: `local` is not checked then, and `offset` must only be within
// the slot or at its end.
//
// So code for all paths gets into `window_at(link, offset)`, waits with quiet_gets and reads there:
// that is the mirror, or the peer's memory itself. Over direct stores a read then returns the
// peer's bytes of that moment.
//
// Until a quiet, or await_reuse, no thread writes a part of the mirror that is the source of a put
// or the target of a get. Over a path that posts, two errors take the path out of service, as in
// all calls that return nothing: a copy that leaves the slot, and one into memory that is no
// mirror. has_failed then returns true. Over direct stores nothing is checked: the caller stays
// within the slot. Stores of other lanes at `local` are behind a __syncwarp by the caller.
//
// NOTES: a put is not ordered behind earlier gets, so a get is waited for before its target becomes
// the source of a put.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::comm {

namespace detail {

// By a warp, 16 bytes at a time where both ends allow.
__device__ __forceinline__ void copy_warp(uint64_t to, uint64_t from, uint64_t num_bytes) {
    const uint32_t lane_idx = threadIdx.x & 31;
    uint64_t done = 0;
    if ((to | from) % sizeof(uint4) == 0) {
        const uint64_t num_units = num_bytes / sizeof(uint4);
        const uint4* source = at_address<const uint4>(from);
        uint4* target = at_address<uint4>(to);
#pragma unroll 4
        for (uint64_t i = lane_idx; i < num_units; i += 32)
            target[i] = source[i];
        done = num_units * sizeof(uint4);
    }
    const uint8_t* source = at_address<const uint8_t>(from);
    uint8_t* target = at_address<uint8_t>(to);
    for (uint64_t i = done + lane_idx; i < num_bytes; i += 32)
        target[i] = source[i];
}

__device__ __forceinline__ uint64_t slot_bytes_of(const sy_link& link) {
    return link.path == SY_PATH_PROXY ? proxy::peer_of(link).slot_bytes
                                      : ibgda::peer_of(link).slot_bytes;
}

__device__ __forceinline__ bool is_within(uint64_t offset, uint64_t num_bytes, uint64_t most) {
    return offset <= most && num_bytes <= most - offset;
}

__device__ __forceinline__ void refuse_move(const sy_link& link, uint64_t offset,
                                            uint64_t num_bytes) {
    if (link.path == SY_PATH_PROXY)
        proxy::detail::refuse(proxy::peer_of(link), blockIdx.x, offset, num_bytes);
    else
        ibgda::detail::refuse(ibgda::peer_of(link),
                              peer::queue_of(ibgda::peer_of(link), blockIdx.x),
                              ibgda::Send{offset, num_bytes, 0, false});
}

// Puts or gets over a path that posts. Lanes of the warp agree on all arguments.
template <bool kIsPut>
__device__ __noinline__ void move_posted(const sy_link& link, uint64_t offset, uint64_t local,
                                         uint64_t num_bytes) {
    const uint64_t slot_bytes = slot_bytes_of(link);
    uint64_t source_offset = local - link.window;
    const bool is_in_mirror =
        local >= link.window && is_within(source_offset, num_bytes, slot_bytes);
    if (!is_within(offset, num_bytes, slot_bytes))
        return refuse_move(link, offset, num_bytes);
    if (num_bytes == 0)
        return;
    if (!kIsPut && !is_in_mirror)
        return refuse_move(link, offset, num_bytes);
    if (kIsPut && !is_in_mirror) {
        copy_warp(link.window + offset, local, num_bytes);
        source_offset = offset;
    }
    // The stores of all lanes come before the request of one.
    __syncwarp();
    if (link.path == SY_PATH_PROXY)
        proxy::move_warp<kIsPut>(link, blockIdx.x, offset, source_offset, num_bytes);
    else
        ibgda::move_warp<kIsPut>(link, blockIdx.x, offset, source_offset, num_bytes);
}

template <uint32_t kPaths, bool kIsPut>
__device__ __forceinline__ void move_warp(const sy_link& link, uint64_t offset, uint64_t local,
                                          uint64_t num_bytes) {
    const uint64_t there = link.window + offset;
    if (!is_direct<kPaths>(link)) {
        move_posted<kIsPut>(link, offset, local, num_bytes);
        return;
    }
    if (local != there)
        copy_warp(kIsPut ? there : local, kIsPut ? local : there, num_bytes);
    __syncwarp();
}

} // namespace detail

// Starts a copy of `num_bytes` at `local` to the peer's slot. The peer sees it before any later
// signal or add of this warp, by any of its lanes, and before those of its block behind a barrier
// (SYNC POINT publish). A source outside of the mirror may be written again immediately.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void put_nbi_warp(const sy_link& link, uint64_t offset,
                                             const void* local, uint64_t num_bytes) {
    detail::move_warp<kPaths, true>(link, offset, reinterpret_cast<uint64_t>(local), num_bytes);
}

// Starts a copy of `num_bytes` of the peer's slot to `local`: of the data that the peer had
// published when that was accepted (wait_until). It is there after quiet_gets.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void get_nbi_warp(const sy_link& link, uint64_t offset, void* local,
                                             uint64_t num_bytes) {
    detail::move_warp<kPaths, false>(link, offset, reinterpret_cast<uint64_t>(local), num_bytes);
}

// Returns, in the calling thread, when all earlier puts, signals and adds over this link are in the
// peer's memory. Over paths that post, those of any block count. Over direct stores, those of this
// thread count, and those whose stores a barrier made known to it. False when the path is out of
// service.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ bool quiet(const sy_link& link) {
    if (is_direct<kPaths>(link)) {
        ptx::fence_acq_rel_sys();
        return true;
    }
    await_reuse<kPaths>(link);
    return !has_failed<kPaths>(link);
}

// quiet, and this block's got data is here. One thread calls it, and a barrier makes it known to
// others. `local` is an address that a get wrote to. Any address but a byte of the mirror stands
// for gets of no bytes, behind which there is nothing to read.
// NOTES: a NIC's writes to GPU memory may be under way when their completion is visible, so that
// over IBGDA the NIC reads `local` behind them. A proxy's thread has seen the completion, so
// nothing more is needed there.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ bool quiet_gets(const sy_link& link, const void* local) {
    const uint64_t address = reinterpret_cast<uint64_t>(local);
    if (!is_direct<kPaths>(link) && link.path == SY_PATH_IBGDA && address >= link.window &&
        detail::is_within(address - link.window, 1, detail::slot_bytes_of(link)))
        ibgda::await_gets(link, blockIdx.x, address);
    return quiet<kPaths>(link);
}

} // namespace switchyard::comm
