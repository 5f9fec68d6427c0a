// Puts, gets and adds that a kernel hands to a thread of the host, for NICs that it cannot drive by
// itself. The names are the same as over a NIC (ibgda.h) and over any path (put_get.cuh). Fused
// kernels store into the peer's window, or its mirror, and name the stored range, see link.cuh.
//
// Order on one lane: the peer sees a signal or an add after all earlier puts. Puts have no order
// among each other. Nothing is ordered across lanes.
//
// A whole warp makes calls with `_warp` in their name; one thread makes all others. Stores of other
// threads of the block are covered if a barrier lies between.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/memory.h"
#include "switchyard/comm/proxy_layout.h"

namespace switchyard::comm::proxy {

using Status = uint32_t; // SY_PROXY_*

namespace detail {

// Two words with one store, and with one load.
#if defined(__CUDACC__)
SY_DEVICE void store_command(sy_proxy_command* cell, const sy_proxy_command& command) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(cell), "l"(command.first),
                 "l"(command.second)
                 : "memory");
}
SY_DEVICE void load_words(const sy_proxy_lane_words* words, uint64_t* completed, uint64_t* error) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(*completed), "=l"(*error)
                 : "l"(words)
                 : "memory");
}
#else
SY_DEVICE void store_command(sy_proxy_command* cell, const sy_proxy_command& command) {
    // In this order a reader may find the first half alone, and must not take it for a command.
    __atomic_store_n(&cell->first, command.first, __ATOMIC_RELAXED);
    __atomic_store_n(&cell->second, command.second, __ATOMIC_RELAXED);
}
SY_DEVICE void load_words(const sy_proxy_lane_words* words, uint64_t* completed, uint64_t* error) {
    *completed = __atomic_load_n(&words->completed, __ATOMIC_RELAXED);
    *error = __atomic_load_n(&words->error, __ATOMIC_RELAXED);
}
#endif

SY_DEVICE const sy_proxy_lane& lane_of(const sy_proxy_peer& peer, uint32_t lane) {
    return at_address<const sy_proxy_lane>(peer.lanes)[lane % peer.num_lanes];
}

SY_DEVICE sy_proxy_lane_state& state_of(const sy_proxy_lane& lane) {
    return *at_address<sy_proxy_lane_state>(lane.state);
}

SY_DEVICE bool is_inside(const sy_proxy_peer& peer, uint64_t offset, uint64_t num_bytes) {
    return offset <= peer.slot_bytes && num_bytes <= peer.slot_bytes - offset;
}

SY_DEVICE sy_proxy_command head(const sy_proxy_peer& peer, uint32_t opcode, uint64_t offset) {
    return {offset << SY_PROXY_OFFSET_SHIFT |
                static_cast<uint64_t>(peer.window) << SY_PROXY_WINDOW_SHIFT |
                static_cast<uint64_t>(opcode) << SY_PROXY_OPCODE_SHIFT,
            0};
}

SY_DEVICE sy_proxy_command make_move(const sy_proxy_peer& peer, uint32_t opcode, uint32_t source,
                                     uint64_t source_offset, uint64_t offset, uint32_t num_bytes) {
    sy_proxy_command command = head(peer, opcode, offset);
    command.first |= static_cast<uint64_t>(source) << SY_PROXY_SOURCE_SHIFT;
    command.second = source_offset << 32 | static_cast<uint64_t>(num_bytes) << 1;
    return command;
}

SY_DEVICE sy_proxy_command make_word(const sy_proxy_peer& peer, uint32_t opcode, uint64_t offset,
                                     uint64_t value) {
    sy_proxy_command command = head(peer, opcode, offset);
    command.first |= value >> 63 << SY_PROXY_VALUE_SHIFT;
    command.second = value << 1;
    return command;
}

// The first reason stays; later ones are dropped.
SY_DEVICE void record(const sy_proxy_peer& peer, uint32_t tag, uint32_t reason, uint64_t observed,
                      uint64_t expected) {
    if (peer.error == 0)
        return;
    sy_error_word* error = at_address<sy_error_word>(peer.error);
    if (atom_cas_acquire(&error->tag, SY_TAG_NONE, tag) != SY_TAG_NONE)
        return;
    error->peer = peer.peer;
    error->reason = reason;
    error->observed = observed;
    error->expected = expected;
}

SY_DEVICE Status fail(const sy_proxy_lane& lane, Status status) {
    atom_cas_relaxed(&state_of(lane).error, 0, status);
    return status;
}

// Waits until `end` commands are over. A read of mapped memory takes microseconds, so polls are
// few.
SY_DEVICE Status wait_completed(const sy_proxy_peer& peer, const sy_proxy_lane& lane, uint64_t end,
                                uint32_t tag) {
    sy_proxy_lane_state& state = state_of(lane);
    if (ld_acquire<Scope::kGpu>(&state.seen) >= end)
        return SY_PROXY_OK;
    const sy_proxy_lane_words* words = at_address<const sy_proxy_lane_words>(lane.words);
    uint64_t start_ns = 0;
    for (uint32_t num_polls = 1;; ++num_polls) {
        uint64_t completed = 0, error = 0;
        load_words(words, &completed, &error);
        if (completed >= end) {
            // SYNC POINT recycled: the proxy thread's work before its report comes before the
            // following code. So does everything that the thread had seen, including the
            // reservation of the commands that it reports.
            fence_acq_rel<Scope::kSys>();
            const uint64_t reserved = ld_relaxed<Scope::kGpu>(&state.reserved);
            if (completed > reserved) {
                record(peer, SY_TAG_PROXY_DESYNC, SY_REASON_VALUE, completed, reserved);
                return fail(lane, SY_PROXY_DESYNC);
            }
            red_max_release(&state.seen, completed);
            return SY_PROXY_OK;
        }
        if (error != 0) {
            record(peer, SY_TAG_PROXY_LANE, SY_REASON_VALUE, error, 0);
            return fail(lane, SY_PROXY_REFUSED);
        }
        // Another poster on the lane may have found a newer value, or a reason to give up.
        if (ld_acquire<Scope::kGpu>(&state.seen) >= end)
            return SY_PROXY_OK;
        const uint64_t given_up = ld_relaxed<Scope::kGpu>(&state.error);
        if (given_up != 0)
            return static_cast<Status>(given_up);
        pause_poll();
        if (num_polls % 8 != 0)
            continue;
        const uint64_t now = now_ns();
        if (start_ns == 0)
            start_ns = now;
        const bool is_aborted =
            peer.abort_mask != 0 && peer.peer < 32 &&
            (ld_relaxed<Scope::kSys>(at_address<const uint32_t>(peer.abort_mask)) >> peer.peer &
             1) != 0;
        if (is_aborted || now - start_ns > peer.timeout_ns) {
            record(peer, tag, is_aborted ? SY_REASON_ABORT : SY_REASON_TIMEOUT, completed, end);
            return fail(lane, is_aborted ? SY_PROXY_ABORTED : SY_PROXY_TIMEOUT);
        }
    }
}

// Cells from `base` on, which are the caller's if the lane is in service and once they are free.
struct Reservation {
    uint64_t error, base, seen;
};

// Cells of a lane that is out of service are counted, too, and belong to no poster.
// NOTES: nothing here uses the requested values, so that all loads, and the fence behind them, are
// under way together. That fence turns the known count of finished commands into an acquire.
SY_DEVICE void reserve(const sy_proxy_lane& lane, uint32_t num_commands, Reservation* reserved) {
    sy_proxy_lane_state& state = state_of(lane);
    reserved->error = ld_relaxed<Scope::kGpu>(&state.error);
    reserved->base = atom_add_relaxed(&state.reserved, num_commands);
    reserved->seen = ld_relaxed<Scope::kGpu>(&state.seen);
}

// Waits until the cells are free and the budget allows.
SY_DEVICE Status wait_room(const sy_proxy_peer& peer, const sy_proxy_lane& lane,
                           uint32_t num_commands, const Reservation& reserved) {
    if (reserved.error != 0)
        return static_cast<Status>(reserved.error);
    const uint64_t end = reserved.base + num_commands;
    // NOTES: without this wait the command overwrites a cell that the thread has not read.
    if (end > lane.budget && reserved.seen < end - lane.budget)
        return wait_completed(peer, lane, end - lane.budget, SY_TAG_PROXY_ROOM);
    return SY_PROXY_OK;
}

// Behind the fence of the SYNC POINT command.
SY_DEVICE void store(const sy_proxy_lane& lane, uint64_t index, sy_proxy_command command) {
    const uint64_t lap = (index >> lane.depth_shift) + 1;
    command.first |= lap & 0xff;
    command.second |= lap & 1;
    const uint64_t cell = index & ((uint64_t{1} << lane.depth_shift) - 1);
    store_command(at_address<sy_proxy_command>(lane.commands) + cell, command);
}

} // namespace detail

// Posts `num_commands` (at most 32, and not beyond the budget); `build(lane_idx)` gives the command of a
// lane of the warp. `*end` is the number of the command behind the last one.
template <class Group = Warp, class Build>
SY_DEVICE Status post(const sy_proxy_peer& peer, const sy_proxy_lane& of_lane,
                      uint32_t num_commands, Build&& build, uint64_t* end = nullptr) {
    // NOTES: loaded here, like the data that callers build commands of: the fence empties the
    // nearest cache.
    const sy_proxy_lane lane = of_lane;
    if (num_commands > lane.budget)
        return SY_PROXY_ARGUMENT;
    detail::Reservation reserved = {};
    Group::lead([&] { detail::reserve(lane, num_commands, &reserved); });
    // SYNC POINT command: a command becomes visible after everything that the poster stored, or
    // knew of, before.
    // NOTES: by every lane that stores a command; together they cost as much as one. A wait for room has a fence of
    // its own.
    Group::each_lane(num_commands, [](uint32_t) { fence_acq_rel<Scope::kSys>(); });
    const Status status = static_cast<Status>(Group::leader(
        [&] { return uint64_t{detail::wait_room(peer, lane, num_commands, reserved)}; }));
    if (status != SY_PROXY_OK)
        return status;
    const uint64_t base = Group::leader([&] { return reserved.base; });
    Group::each_lane(num_commands, [&](uint32_t lane_idx) {
        detail::store(lane, base + lane_idx, build(lane_idx));
    });
    if (end != nullptr)
        *end = base + num_commands;
    return SY_PROXY_OK;
}

// Starts a copy of a registered region to the peer. `source` 0 is the mirror.
template <class Group = Warp>
SY_DEVICE Status put_from_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                                   uint32_t source, uint64_t source_offset, uint64_t num_bytes) {
    if (!detail::is_inside(peer, offset, num_bytes) || num_bytes > SY_PROXY_MAX_BYTES ||
        source >= SY_PROXY_MAX_SOURCES || source_offset > UINT32_MAX)
        return SY_PROXY_ARGUMENT;
    const sy_proxy_command put = detail::make_move(peer, SY_PROXY_PUT, source, source_offset,
                                                   offset, static_cast<uint32_t>(num_bytes));
    return post<Group>(peer, detail::lane_of(peer, lane), 1, [&](uint32_t) { return put; });
}

// Puts the bytes stored at `offset` of the mirror.
template <class Group = Warp>
SY_DEVICE Status put_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                              uint64_t num_bytes) {
    return put_from_nbi_warp<Group>(peer, lane, offset, 0, offset, num_bytes);
}

namespace detail {

template <class Group>
SY_DEVICE Status put_word_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                                   uint64_t num_bytes, uint32_t opcode, uint64_t word_offset,
                                   uint64_t value) {
    if (!is_inside(peer, offset, num_bytes) || num_bytes > SY_PROXY_MAX_BYTES ||
        !is_inside(peer, word_offset, 8) || word_offset % 8 != 0)
        return SY_PROXY_ARGUMENT;
    const sy_proxy_command put =
        make_move(peer, SY_PROXY_PUT, 0, offset, offset, static_cast<uint32_t>(num_bytes));
    const sy_proxy_command word = make_word(peer, opcode, word_offset, value);
    return post<Group>(peer, lane_of(peer, lane), 2,
                       [&](uint32_t lane_idx) { return lane_idx == 0 ? put : word; });
}

SY_DEVICE Status post_word(const sy_proxy_peer& peer, uint32_t lane, uint32_t opcode,
                           uint64_t offset, uint64_t value) {
    if (!is_inside(peer, offset, 8) || offset % 8 != 0)
        return SY_PROXY_ARGUMENT;
    const sy_proxy_command word = make_word(peer, opcode, offset, value);
    return post<Thread>(peer, lane_of(peer, lane), 1, [&](uint32_t) { return word; });
}

} // namespace detail

// A put, and an add to a counter of the peer behind it.
template <class Group = Warp>
SY_DEVICE Status put_add_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                                  uint64_t num_bytes, uint64_t counter_offset, uint64_t value) {
    return detail::put_word_nbi_warp<Group>(peer, lane, offset, num_bytes, SY_PROXY_ADD,
                                            counter_offset, value);
}

// A put, and the setting of a word of the peer behind it.
template <class Group = Warp>
SY_DEVICE Status put_signal_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                                     uint64_t num_bytes, uint64_t word_offset, uint64_t value) {
    return detail::put_word_nbi_warp<Group>(peer, lane, offset, num_bytes, SY_PROXY_SIGNAL,
                                            word_offset, value);
}

// Starts a copy of the peer's slot to a registered region, which is complete after a quiet. `source` 0 is
// the mirror.
template <class Group = Warp>
SY_DEVICE Status get_to_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                                 uint32_t source, uint64_t source_offset, uint64_t num_bytes) {
    if (!detail::is_inside(peer, offset, num_bytes) || num_bytes > SY_PROXY_MAX_BYTES ||
        source >= SY_PROXY_MAX_SOURCES || source_offset > UINT32_MAX)
        return SY_PROXY_ARGUMENT;
    const sy_proxy_command get = detail::make_move(peer, SY_PROXY_GET, source, source_offset,
                                                   offset, static_cast<uint32_t>(num_bytes));
    return post<Group>(peer, detail::lane_of(peer, lane), 1, [&](uint32_t) { return get; });
}

// The same to the mirror, at the same offset.
template <class Group = Warp>
SY_DEVICE Status get_nbi_warp(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                              uint64_t num_bytes) {
    return get_to_nbi_warp<Group>(peer, lane, offset, 0, offset, num_bytes);
}

// Adds to a counter of the peer, after everything that was put on this lane before.
SY_DEVICE Status amo_nonfetch_add(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset,
                                  uint64_t value) {
    return detail::post_word(peer, lane, SY_PROXY_ADD, offset, value);
}

// Sets a word of the peer that has one writer, after everything that was put on this lane before.
// NOTES: all signals and adds to a word go through lanes of this peer, and no put covers it: the
// thread keeps the last value, because not every transport can store a word at once.
SY_DEVICE Status signal(const sy_proxy_peer& peer, uint32_t lane, uint64_t offset, uint64_t value) {
    return detail::post_word(peer, lane, SY_PROXY_SIGNAL, offset, value);
}

// Waits until all earlier operations on the lane are complete: sources may be reused, the peer has
// the put data, and the got data is here.
SY_DEVICE Status quiet(const sy_proxy_peer& peer, uint32_t lane) {
    const sy_proxy_lane& to = detail::lane_of(peer, lane);
    uint64_t end = 0;
    const Status status = post<Thread>(
        peer, to, 1, [&](uint32_t) { return detail::head(peer, SY_PROXY_QUIET, 0); }, &end);
    return status != SY_PROXY_OK ? status
                                 : detail::wait_completed(peer, to, end, SY_TAG_PROXY_QUIET);
}

// Whether all earlier operations on the lane are complete, as after quiet. For a caller that polls
// repeatedly and does other work meanwhile: posts one QUIET for all posted commands, and does not
// wait. A lane that is out of service is never quiet.
// NOTES: no other poster uses the lane meanwhile; otherwise it might take the room that is found
// here, and this call would wait.
SY_DEVICE bool is_quiet(const sy_proxy_peer& peer, uint32_t lane) {
    const sy_proxy_lane& to = detail::lane_of(peer, lane);
    sy_proxy_lane_state& state = detail::state_of(to);
    const uint64_t posted = ld_relaxed<Scope::kGpu>(&state.reserved);
    if (posted == 0)
        return true;
    if (ld_relaxed<Scope::kGpu>(&state.error) != 0)
        return false;
    const bool has_asked = ld_relaxed<Scope::kGpu>(&state.asked) == posted;
    uint64_t seen = ld_acquire<Scope::kGpu>(&state.seen);
    if (has_asked && seen >= posted)
        return true;
    if (has_asked || posted - seen >= to.budget) {
        uint64_t completed = 0, error = 0;
        detail::load_words(at_address<const sy_proxy_lane_words>(to.words), &completed, &error);
        if (error != 0) {
            detail::record(peer, SY_TAG_PROXY_LANE, SY_REASON_VALUE, error, 0);
            detail::fail(to, SY_PROXY_REFUSED);
            return false;
        }
        if (completed > posted) {
            detail::record(peer, SY_TAG_PROXY_DESYNC, SY_REASON_VALUE, completed, posted);
            detail::fail(to, SY_PROXY_DESYNC);
            return false;
        }
        if (completed > seen) {
            // SYNC POINT recycled: as in wait_completed.
            fence_acq_rel<Scope::kSys>();
            red_max_release(&state.seen, completed);
            seen = completed;
        }
    }
    if (has_asked || posted - seen >= to.budget)
        return has_asked && seen >= posted;
    uint64_t end = 0;
    const Status status = post<Thread>(
        peer, to, 1, [&](uint32_t) { return detail::head(peer, SY_PROXY_QUIET, 0); }, &end);
    if (status == SY_PROXY_OK)
        st_relaxed<Scope::kGpu>(&state.asked, end);
    return false;
}

// State of the path to this peer: 0, or a SY_PROXY_* status if it is out of service. Checks this
// end only, and does not wait.
SY_DEVICE Status failure(const sy_proxy_peer& peer) {
    for (uint32_t lane = 0; lane < peer.num_lanes; ++lane) {
        const uint64_t error =
            ld_relaxed<Scope::kGpu>(&detail::state_of(detail::lane_of(peer, lane)).error);
        if (error != 0)
            return static_cast<Status>(error);
    }
    return SY_PROXY_OK;
}

} // namespace switchyard::comm::proxy
