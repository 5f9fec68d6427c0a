// Links over the proxy: turns the ranges that link.cuh names into commands. `link.context` is the
// address of a sy_proxy_peer and `link.window` that of its mirror.
//
// All words that a block sets go through the lane that its puts went through, behind them, and each by a
// command of its own: puts have no order among each other, so no flag may travel in one. Failures take
// the lane out of service and stand in the error word; calls return nothing, and waits ask has_failed.
#pragma once

#include <cstdint>

#include "switchyard/comm/proxy.h"
#include "switchyard/device_abi.h"

namespace switchyard::comm::proxy {

// One of a list of things to send in order: a part of the mirror, or words that all get `value`.
struct Send {
    uint64_t offset, num_bytes, value;
    bool is_words;
};

SY_DEVICE const sy_proxy_peer& peer_of(const sy_link& link) {
    return *at_address<const sy_proxy_peer>(link.context);
}

namespace detail {

SY_DEVICE uint32_t num_commands(const Send& send) {
    if (send.is_words)
        return static_cast<uint32_t>(send.num_bytes / 8);
    return send.num_bytes == 0 ? 0 : 1;
}

SY_DEVICE sy_proxy_command make_command(const sy_proxy_peer& peer, const Send& send, uint32_t idx) {
    if (send.is_words)
        return make_word(peer, SY_PROXY_SIGNAL, send.offset + 8 * uint64_t{idx}, send.value);
    return make_move(peer, SY_PROXY_PUT, 0, send.offset, send.offset,
                     static_cast<uint32_t>(send.num_bytes));
}

SY_DEVICE bool is_good(const sy_proxy_peer& peer, const Send& send) {
    return is_inside(peer, send.offset, send.num_bytes) && send.num_bytes <= SY_PROXY_MAX_BYTES &&
           (!send.is_words || (send.offset % 8 == 0 && send.num_bytes % 8 == 0));
}

// An invalid call also takes the lane out of service: its caller has no other means to learn of it.
SY_DEVICE void refuse(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                      uint64_t num_bytes) {
    record(peer, SY_TAG_PROXY_ARGUMENT, SY_REASON_VALUE, offset, num_bytes);
    fail(lane_of(peer, lane), SY_PROXY_ARGUMENT);
}

} // namespace detail

// Sends a list in order, 32 commands at a time.
template <class Group, uint32_t kNumSends>
SY_DEVICE void send(const sy_link& link, uint32_t lane, const Send (&sends)[kNumSends]) {
    const sy_proxy_peer& peer = peer_of(link);
    const sy_proxy_lane& to = detail::lane_of(peer, lane);
    uint32_t num_upto[kNumSends]; // commands of this and all earlier ones
    uint32_t num = 0;
    for (uint32_t i = 0; i < kNumSends; ++i) {
        if (!detail::is_good(peer, sends[i]))
            return detail::refuse(peer, lane, sends[i].offset, sends[i].num_bytes);
        num_upto[i] = num += detail::num_commands(sends[i]);
    }
    const uint32_t most = to.budget < 32 ? to.budget : 32;
    for (uint32_t first = 0; first < num; first += most) {
        const uint32_t num_now = num - first < most ? num - first : most;
        const Status status = post<Group>(peer, to, num_now, [&](uint32_t lane_idx) {
            const uint32_t at = first + lane_idx;
            uint32_t i = 0;
            while (at >= num_upto[i])
                ++i;
            return detail::make_command(peer, sends[i], at - (i == 0 ? 0 : num_upto[i - 1]));
        });
        if (status != SY_PROXY_OK)
            return;
    }
}

SY_DEVICE void set(const sy_link& link, uint32_t lane, uint64_t offset, uint64_t value) {
    const sy_proxy_peer& peer = peer_of(link);
    if (signal(peer, lane, offset, value) == SY_PROXY_ARGUMENT)
        detail::refuse(peer, lane, offset, sizeof(uint64_t));
}

SY_DEVICE void put_set(const sy_link& link, uint32_t lane, uint64_t offset, uint64_t num_bytes,
                       uint64_t word_offset, uint64_t value) {
    const sy_proxy_peer& peer = peer_of(link);
    if (put_signal_nbi_warp<Thread>(peer, lane, offset, num_bytes, word_offset, value) ==
        SY_PROXY_ARGUMENT)
        detail::refuse(peer, lane, offset, num_bytes);
}

SY_DEVICE void add(const sy_link& link, uint32_t lane, uint64_t offset, uint64_t value) {
    const sy_proxy_peer& peer = peer_of(link);
    if (amo_nonfetch_add(peer, lane, offset, value) == SY_PROXY_ARGUMENT)
        detail::refuse(peer, lane, offset, sizeof(uint64_t));
}

#if defined(__CUDACC__) || defined(SY_SIMT)

// Rows of the lanes that have one, at most 16 at a time: 32 commands.
SY_DEVICE void put_rows_warp(const sy_link& link, uint32_t lane, bool has_row, uint64_t row_offset,
                             uint64_t row_bytes, uint64_t word_offset, uint64_t value) {
    const sy_proxy_peer& peer = peer_of(link);
    const sy_proxy_lane& to = detail::lane_of(peer, lane);
    const uint32_t most = to.budget < 32 ? to.budget / 2 : 16;
    uint32_t rest = __ballot_sync(0xffffffffu, has_row);
    while (rest != 0) {
        const uint32_t num_rest = __popc(rest);
        const uint32_t num_rows = num_rest < most ? num_rest : most;
        // Lanes 2 n and 2 n + 1 write the commands of the n-th row.
        const uint32_t my_row = (threadIdx.x & 31) / 2;
        const uint32_t from = take_lanes(&rest, num_rows, my_row);
        const Send sends[2] = {
            {__shfl_sync(0xffffffffu, row_offset, from), row_bytes, 0, false},
            {__shfl_sync(0xffffffffu, word_offset, from), sizeof(uint64_t), value, true}};
        const bool is_good = my_row >= num_rows ||
                             (detail::is_good(peer, sends[0]) && detail::is_good(peer, sends[1]));
        if (!__all_sync(0xffffffffu, is_good)) {
            if (!is_good)
                detail::refuse(peer, lane, sends[0].offset, row_bytes);
            return;
        }
        const Status status = post<Warp>(peer, to, 2 * num_rows, [&](uint32_t lane_idx) {
            return detail::make_command(peer, sends[lane_idx % 2], 0);
        });
        if (status != SY_PROXY_OK)
            return;
    }
}

#endif

// Of one command; a longer move takes several.
constexpr uint64_t kMaxMoveBytes = uint64_t{1} << 30;

// Puts from the mirror, or gets into it, from `source_offset` on.
template <bool kIsPut>
SY_DEVICE void move_warp(const sy_link& link, uint32_t lane, uint64_t offset,
                         uint64_t source_offset, uint64_t num_bytes) {
    const sy_proxy_peer& peer = peer_of(link);
    for (uint64_t begin = 0; begin < num_bytes; begin += kMaxMoveBytes) {
        const uint64_t left = num_bytes - begin;
        const uint64_t now = left < kMaxMoveBytes ? left : kMaxMoveBytes;
        const Status status =
            kIsPut ? put_from_nbi_warp(peer, lane, offset + begin, 0, source_offset + begin, now)
                   : get_to_nbi_warp(peer, lane, offset + begin, 0, source_offset + begin, now);
        if (status == SY_PROXY_ARGUMENT)
            detail::refuse(peer, lane, offset, num_bytes);
        if (status != SY_PROXY_OK)
            return;
    }
}

// Waits for all lanes of the peer that were ever used, up to the first that fails: a thread that is gone
// costs one bound, not one for every lane.
SY_DEVICE void quiet(const sy_link& link) {
    const sy_proxy_peer& peer = peer_of(link);
    for (uint32_t lane = 0; lane < peer.num_lanes; ++lane) {
        if (ld_relaxed<Scope::kGpu>(&detail::state_of(detail::lane_of(peer, lane)).reserved) != 0 &&
            quiet(peer, lane) != SY_PROXY_OK)
            return;
    }
}

// Result of find_busy: a quiet would return immediately.
constexpr uint32_t kNoneBusy = 0xffffffffu;

// The first lane from `first` on with incomplete work, or kNoneBusy. A caller that polls repeatedly
// begins with that lane. No poster uses the peer meanwhile.
SY_DEVICE uint32_t find_busy(const sy_link& link, uint32_t first) {
    const sy_proxy_peer& peer = peer_of(link);
    uint32_t busy = kNoneBusy;
    // All lanes, so that the answers of all are under way together.
    for (uint32_t lane = first; lane < peer.num_lanes; ++lane)
        if (!is_quiet(peer, lane) && busy == kNoneBusy)
            busy = lane;
    return busy;
}

// Reads the words of one lane, a different one per block, if no other caller has read them just
// now. Errors that others found are in the lane's error word.
SY_DEVICE bool has_failed(const sy_link& link, uint32_t lane) {
    const sy_proxy_peer& peer = peer_of(link);
    if (failure(peer) != SY_PROXY_OK)
        return true;
    const sy_proxy_lane& looked_at = detail::lane_of(peer, lane);
    if (!takes_poll_turn(&detail::state_of(looked_at).polled_at))
        return false;
    uint64_t completed = 0, error = 0;
    detail::load_words(at_address<const sy_proxy_lane_words>(looked_at.words), &completed, &error);
    if (error == 0)
        return false;
    detail::record(peer, SY_TAG_PROXY_LANE, SY_REASON_VALUE, error, 0);
    detail::fail(looked_at, SY_PROXY_REFUSED);
    return true;
}

} // namespace switchyard::comm::proxy
