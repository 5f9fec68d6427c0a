// The path to a peer. Fused kernels store outgoing data through `window_at(link)` and then name the
// stored range. The path decides whether a store goes straight to the peer or into a mirror that a
// NIC reads. So a further path needs no change in a fused kernel.
//
// The set of calls over every path: put_nbi_warp, get_nbi_warp and quiet (put_get.cuh),
// amo_nonfetch_add and signal (here), wait_until (wait.cuh). The others here are those of fused
// kernels, which fill the window themselves.
//
// Order: the peer sees a signal or an add only after everything that the same block stored and
// named before it (SYNC POINT publish/accept, see docs/explanation/memory-model.md). Paths with several lanes
// keep that order by using a block's index as its lane.
//
// `kPaths` lists the paths that a kernel is compiled for. With kDirectOnly nothing but the stores is
// left.
#pragma once

#include <cstdint>

#include "switchyard/comm/ibgda_link.h"
#include "switchyard/comm/proxy_link.h"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::comm {

constexpr uint32_t kDirectOnly = 1u << SY_PATH_DIRECT;
constexpr uint32_t kAnyWay = kDirectOnly | 1u << SY_PATH_IBGDA | 1u << SY_PATH_PROXY;

template <uint32_t kPaths> __device__ __forceinline__ bool is_direct(const sy_link& link) {
    return kPaths == kDirectOnly || link.path == SY_PATH_DIRECT;
}

// NOTES: the proxy's calls are out of line, since they share kernels with code that builds
// requests, and registers are scarce there.
namespace by_proxy {

__device__ __noinline__ inline void add(const sy_link& link, uint64_t offset, uint64_t value) {
    proxy::add(link, blockIdx.x, offset, value);
}
__device__ __noinline__ inline void set(const sy_link& link, uint64_t offset, uint64_t value) {
    proxy::set(link, blockIdx.x, offset, value);
}
__device__ __noinline__ inline void put_set(const sy_link& link, uint64_t offset,
                                            uint64_t num_bytes, uint64_t word_offset,
                                            uint64_t value) {
    proxy::put_set(link, blockIdx.x, offset, num_bytes, word_offset, value);
}
template <uint32_t kNumSends>
__device__ __noinline__ void send(const sy_link& link, const proxy::Send (&sends)[kNumSends]) {
    proxy::send<Warp>(link, blockIdx.x, sends);
}
__device__ __noinline__ inline void put_rows_warp(const sy_link& link, bool has_row,
                                                  uint64_t row_offset, uint64_t row_bytes,
                                                  uint64_t word_offset, uint64_t value) {
    proxy::put_rows_warp(link, blockIdx.x, has_row, row_offset, row_bytes, word_offset, value);
}
__device__ __noinline__ inline void quiet(const sy_link& link) { proxy::quiet(link); }
__device__ __noinline__ inline uint32_t find_busy(const sy_link& link, uint32_t first) {
    return proxy::find_busy(link, first);
}
__device__ __noinline__ inline bool has_failed(const sy_link& link) {
    return proxy::has_failed(link, blockIdx.x);
}

} // namespace by_proxy

// An add or a signal over any path but the direct one.
__device__ __forceinline__ void post_add(const sy_link& link, uint64_t offset, uint64_t value) {
    if (link.path == SY_PATH_PROXY)
        by_proxy::add(link, offset, value);
    else
        ibgda::add(link, blockIdx.x, offset, value);
}

__device__ __forceinline__ void post_set(const sy_link& link, uint64_t offset, uint64_t value) {
    if (link.path == SY_PATH_PROXY)
        by_proxy::set(link, offset, value);
    else
        ibgda::set(link, blockIdx.x, offset, value);
}

template <class T> __device__ __forceinline__ T* window_at(const sy_link& link, uint64_t offset) {
    return reinterpret_cast<T*>(link.window + offset);
}

// SYNC POINT publish: adds to a counter in the peer's slot, after everything stored before.
// NOTES: the stores of the block's other threads are covered if a block barrier lies between.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void amo_nonfetch_add(const sy_link& link, uint64_t offset,
                                                 uint64_t value) {
    if (is_direct<kPaths>(link))
        ptx::red_add_release_sys(window_at<uint64_t>(link, offset), value);
    else
        post_add(link, offset, value);
}

// Adds to a counter that needs no order: its value alone is the message.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void add_relaxed(const sy_link& link, uint64_t offset, uint64_t value) {
    if (is_direct<kPaths>(link))
        ptx::red_add_relaxed_sys(window_at<uint64_t>(link, offset), value);
    else
        post_add(link, offset, value);
}

// SYNC POINT publish: sets a word that has one writer, after everything named before.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void signal(const sy_link& link, uint64_t offset, uint64_t value) {
    if (is_direct<kPaths>(link))
        ptx::st_release_sys(window_at<uint64_t>(link, offset), value);
    else
        post_set(link, offset, value);
}

// SYNC POINT publish for several words at once: relaxed signals of this warp after it are visible
// after everything that the block stored before (and a barrier made known to this warp).
__device__ __forceinline__ void order_signals() { ptx::fence_acq_rel_sys(); }

// Sets a word that needs no order: its value alone is the message, or order_signals came before.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void signal_relaxed(const sy_link& link, uint64_t offset,
                                               uint64_t value) {
    if (is_direct<kPaths>(link))
        ptx::st_relaxed_sys(window_at<uint64_t>(link, offset), value);
    else
        post_set(link, offset, value);
}

// SYNC POINT publish: names `num_bytes` at `offset`, which this thread stored, and sets a word behind them.
template <uint32_t kPaths = kDirectOnly>
__device__ __forceinline__ void put_signal(const sy_link& link, uint64_t offset, uint64_t num_bytes,
                                           uint64_t word_offset, uint64_t value) {
    if (is_direct<kPaths>(link))
        ptx::st_release_sys(window_at<uint64_t>(link, word_offset), value);
    else if (link.path == SY_PATH_PROXY)
        by_proxy::put_set(link, offset, num_bytes, word_offset, value);
    else
        ibgda::put_set(link, blockIdx.x, offset, num_bytes, word_offset, value);
}

// A part of the window.
struct Piece {
    uint64_t offset, num_bytes;
};

// Names the range that this block has stored, and sets `num_words` consecutive words to `value`
// behind it. Called by a whole warp after a block barrier and order_signals.
template <uint32_t kPaths = kDirectOnly, uint32_t kNumPieces>
__device__ __forceinline__ void
put_signals_warp(const sy_link& link, const Piece (&pieces)[kNumPieces], uint64_t words_offset,
                 uint32_t num_words, uint64_t value) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const bool direct = is_direct<kPaths>(link);
    const bool by_words = link.path == SY_PATH_PROXY || num_words <= ibgda::kMaxInlineWords;
    if (direct || !by_words)
        for (uint32_t i = lane_idx; i < num_words; i += 32)
            ptx::st_relaxed_sys(window_at<uint64_t>(link, words_offset) + i, value);
    if (direct || num_words == 0)
        return;
    __syncwarp();
    // A NIC takes a short run of words in the request itself and a long one from the mirror; a proxy always
    // takes them one by one.
    const auto list = [&](auto& sends) {
#pragma unroll
        for (uint32_t i = 0; i < kNumPieces; ++i)
            sends[i] = {pieces[i].offset, pieces[i].num_bytes, 0, false};
        sends[kNumPieces] = {words_offset, uint64_t{num_words} * sizeof(uint64_t), value, by_words};
    };
    if (link.path == SY_PATH_PROXY) {
        proxy::Send sends[kNumPieces + 1];
        list(sends);
        by_proxy::send(link, sends);
    } else {
        ibgda::Send sends[kNumPieces + 1];
        list(sends);
        ibgda::send<Warp>(link, blockIdx.x, sends);
    }
}

// Names `num_rows` rows of `row_bytes`, scattered over the window, and sets a word behind each. A lane
// with `has_row` gives one row. Called by a whole warp, after a block barrier, when kPaths has more than
// direct stores.
template <uint32_t kPaths>
__device__ __forceinline__ void put_rows_warp(const sy_link& link, bool has_row,
                                              uint64_t row_offset, uint64_t row_bytes,
                                              uint64_t word_offset, uint64_t value) {
    if (is_direct<kPaths>(link)) {
        if (has_row)
            ptx::st_release_sys(window_at<uint64_t>(link, word_offset), value);
    } else if (link.path == SY_PATH_PROXY) {
        by_proxy::put_rows_warp(link, has_row, row_offset, row_bytes, word_offset, value);
    } else {
        ibgda::put_rows_warp(link, blockIdx.x, has_row, row_offset, row_bytes, word_offset, value);
    }
}

// Returns when everything named before, by any block, has reached the peer's memory and the window
// may be overwritten. Direct stores need no such wait: nothing is read later.
template <uint32_t kPaths> __device__ __forceinline__ void await_reuse(const sy_link& link) {
    if (is_direct<kPaths>(link))
        return;
    if (link.path == SY_PATH_PROXY)
        by_proxy::quiet(link);
    else
        ibgda::quiet(link);
}

// Whether is_reusable must be called: with direct stores nothing is read later.
template <uint32_t kPaths> __device__ __forceinline__ bool tells_reuse(const sy_link& link) {
    return !is_direct<kPaths>(link);
}

// Whether await_reuse would return immediately, for a caller that can do other work meanwhile.
// `busy` begins as 0 and is for the next call. No block may name a range for the peer until this
// has returned true.
__device__ __forceinline__ bool is_reusable(const sy_link& link, uint32_t& busy) {
    static_assert(proxy::kNoneBusy == ibgda::kNoneBusy, "one number");
    busy =
        link.path == SY_PATH_PROXY ? by_proxy::find_busy(link, busy) : ibgda::find_busy(link, busy);
    return busy == ibgda::kNoneBusy;
}

// Whether the path to the peer is out of service. Some paths record the failure in an error word; a
// wait that ends for it records the failure in its own. From time to time the call polls
// completions, otherwise it reads a few words of this GPU's memory. So waits call it once in
// several polls.
template <uint32_t kPaths> __device__ __forceinline__ bool has_failed(const sy_link& link) {
    if (is_direct<kPaths>(link))
        return false;
    return link.path == SY_PATH_PROXY ? by_proxy::has_failed(link) : ibgda::has_failed(link);
}

} // namespace switchyard::comm
