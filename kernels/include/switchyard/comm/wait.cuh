// Waits. Each is bounded. One that expires leaves tag, peer, observed and expected in the error
// word and returns false. The host can end a wait immediately by setting the peer's bit in the
// abort mask.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::comm {

// Parameters of a wait besides the word that it polls.
struct WaitBound {
    sy_error_word* error;
    const uint32_t* abort_mask; // mapped host memory, or null
    const uint32_t* given_up; // mask of peers that another block has given up, or null
    const uint64_t* progress; // the peer moves it while it works, or null
    const uint64_t* status; // a refusal ends the wait when it names `expected`, or null
    uint64_t timeout_ns;
    // The waiters' shared copy of the mask and its dispatch, for places where very many wait
    // together; or null: then each reads the mask itself.
    sy_mask_cache* cache = nullptr;
    const uint64_t* sequence = nullptr;
};

// Records the first error; later ones are dropped.
__device__ __noinline__ inline void record_error(sy_error_word* error, uint32_t tag, uint32_t peer,
                                                 uint32_t reason, uint64_t observed,
                                                 uint64_t expected) {
    if (ptx::atom_cas_relaxed_gpu(&error->tag, SY_TAG_NONE, tag) != SY_TAG_NONE)
        return;
    error->peer = peer;
    error->reason = reason;
    error->observed = observed;
    error->expected = expected;
}

// The abort mask, as one of the waiters read it within the last two microseconds or so. A value
// from an earlier dispatch is not used: another server may have taken the place of its server.
// NOTES: a combine has two thousand warps, and the host's memory is a microsecond away. Layers through the service were
// late by up to a millisecond when each asked for itself, which is the supposed reason.
__device__ __forceinline__ uint32_t shared_mask(const uint32_t* abort_mask, sy_mask_cache* cache,
                                                const uint64_t* sequence) {
    const uint64_t dispatch = ptx::ld_relaxed_sys(sequence);
    const auto now = static_cast<uint32_t>(ptx::mov_globaltimer() >> 11);
    const uint32_t read_at = ptx::ld_relaxed_sys(&cache->read_at);
    if (read_at != now && ptx::atom_cas_relaxed_gpu(&cache->read_at, read_at, now) == read_at) {
        const uint32_t mask = ptx::ld_relaxed_sys(abort_mask);
        ptx::st_relaxed_sys(&cache->mask, dispatch << 32 | mask);
        return mask;
    }
    const uint64_t found = ptx::ld_relaxed_sys(&cache->mask);
    return found >> 32 == static_cast<uint32_t>(dispatch) ? static_cast<uint32_t>(found) : 0;
}

__device__ __forceinline__ bool is_aborted(const WaitBound& bound, uint32_t peer) {
    if (bound.abort_mask == nullptr)
        return false;
    const uint32_t mask = bound.cache != nullptr
                              ? shared_mask(bound.abort_mask, bound.cache, bound.sequence)
                              : ptx::ld_relaxed_sys(bound.abort_mask);
    return (mask >> peer & 1) != 0;
}

// Mapped host memory is microseconds away, so it is read once in several polls.
constexpr uint32_t kPollsPerCheck = 32;

// Nanoseconds since the first call with the same `*start_ns`, which begins as 0.
// Waits read the timer from their first check on and never before: most end sooner.
__device__ __forceinline__ uint64_t elapsed_ns(uint64_t* start_ns) {
    const uint64_t now_ns = ptx::mov_globaltimer();
    if (*start_ns == 0)
        *start_ns = now_ns;
    return now_ns - *start_ns;
}

// State of a wait between two checks of its bound.
struct Patience {
    uint64_t start_ns, last_progress;
    uint32_t num_moves; // of the progress word
};

__device__ __forceinline__ Patience begin_patience(const WaitBound& bound) {
    return {0, bound.progress != nullptr ? ptx::ld_relaxed_sys(bound.progress) : 0, 0};
}

// So often a wait believes a peer that says it is at work: nothing that a peer can write keeps a kernel for ever. A
// server says so once per millisecond, and the host's limit on work comes long before.
#if defined(SY_SIMT)
constexpr uint32_t kMaxMoves = 1 << 9;
#else
constexpr uint32_t kMaxMoves = 1 << 20;
#endif

// Whether the peer has been silent for as long as the bound allows. A peer that moves its progress
// word is at work.
__device__ __forceinline__ bool is_silent(const WaitBound& bound, Patience& patience) {
    if (bound.progress != nullptr) {
        const uint64_t seen = ptx::ld_relaxed_sys(bound.progress);
        if (seen != patience.last_progress && patience.num_moves < kMaxMoves) {
            patience.last_progress = seen;
            patience.start_ns = 0;
            ++patience.num_moves;
        }
    }
    return elapsed_ns(&patience.start_ns) > bound.timeout_ns;
}

// Whether a wait must end without the expected value. The reason is then in the error word, unless
// another block has given the peer up and recorded its own reason.
template <uint32_t kPaths, class... Links>
__device__ __forceinline__ bool has_ended(const WaitBound& bound, uint32_t tag, uint32_t peer,
                                          uint64_t observed, uint64_t expected, Patience& patience,
                                          const Links*... links) {
    if (is_aborted(bound, peer)) {
        record_error(bound.error, tag, peer, SY_REASON_ABORT, observed, expected);
        return true;
    }
    if (bound.given_up != nullptr && (ptx::ld_relaxed_sys(bound.given_up) >> peer & 1) != 0)
        return true;
    if ((has_failed<kPaths>(*links) || ...)) {
        // The failure may have been recorded already; then that record stays.
        record_error(bound.error, tag, peer, SY_REASON_ABORT, observed, expected);
        return true;
    }
    if (bound.status != nullptr) {
        const uint64_t status = ptx::ld_relaxed_sys(bound.status);
        if (status >> SY_STATUS_SHIFT == expected) {
            record_error(bound.error, SY_TAG_REFUSED, peer, SY_REASON_VALUE, status, expected);
            return true;
        }
    }
    if (is_silent(bound, patience)) {
        record_error(bound.error, tag, peer, SY_REASON_TIMEOUT, observed, expected);
        return true;
    }
    return false;
}

template <uint32_t kPaths, class... Links>
__device__ __noinline__ bool wait_until_slow(const uint64_t* word, uint64_t expected, uint32_t tag,
                                             uint32_t peer, WaitBound bound,
                                             const Links*... links) {
    Patience patience = begin_patience(bound);
    for (uint32_t num_polls = 1;; ++num_polls) {
        const uint64_t observed = ptx::ld_acquire_sys(word);
        if (observed >= expected)
            return true;
        if (num_polls % kPollsPerCheck == 0 &&
            has_ended<kPaths>(bound, tag, peer, observed, expected, patience, links...))
            return false;
    }
}

// SYNC POINT accept: true once `*word >= expected`; the peer's earlier stores are then visible to
// this thread, and to its block after a barrier.
//
// The expected data may depend on earlier data over a certain path: when that path fails, the wait
// ends.
template <uint32_t kPaths = kDirectOnly, class... Links>
__device__ __forceinline__ bool wait_until(const uint64_t* word, uint64_t expected, uint32_t tag,
                                           uint32_t peer, const WaitBound& bound,
                                           const Links*... links) {
    if (ptx::ld_acquire_sys(word) >= expected)
        return true;
    return wait_until_slow<kPaths>(word, expected, tag, peer, bound, links...);
}

} // namespace switchyard::comm
