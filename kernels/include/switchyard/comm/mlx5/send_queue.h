// Posting by many warps on one queue.
//
//     reserve        an add gives each group of requests its blocks; it then waits until the former
//                    requests of these blocks are complete
//     write          every lane stores its request
//     take the turn  groups are published in the order of their reservation: the turn is a ticket
//                    lock whose ticket is the reservation itself
//     ring           whoever has the turn tells the NIC, unless a later group has reserved and so
//                    will, and not too many blocks or groups wait
//     pass the turn  to the group that reserved next
//
// A group may leave the doorbell to the next one although that one waits for room: the blocks that
// it waits for are at least three quarters of the queue back, and at most a quarter (`batch`) is
// ever left unposted.
//
// Every wait is bounded. A group that gives up leaves a hole that no other group can fill, so the
// queue goes out of service: all calls on it return immediately, with the reason, until the host
// has reset it.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "switchyard/comm/mlx5/cqe.h"
#include "switchyard/comm/mlx5/doorbell.h"
#include "switchyard/comm/mlx5/wqe.h"

namespace switchyard::comm::mlx5 {

using Status = uint32_t; // SY_MLX5_*

// Records the reason that ended a wait; the first record stays.
SY_DEVICE void record_expiry(uint32_t peer, const sy_mlx5_bound& bound, uint32_t tag,
                             uint32_t reason, uint64_t observed, uint64_t expected) {
    sy_error_word* error = bound.error;
    if (error == nullptr || atom_cas_acquire(&error->tag, SY_TAG_NONE, tag) != SY_TAG_NONE)
        return;
    error->peer = peer;
    error->reason = reason;
    error->observed = observed;
    error->expected = expected;
}

SY_DEVICE void record_expiry(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint32_t tag,
                             uint32_t reason, uint64_t observed, uint64_t expected) {
    record_expiry(qp.peer, bound, tag, reason, observed, expected);
}

// Result of a call on a queue that is out of service.
SY_DEVICE Status report_error(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint64_t error) {
    const uint32_t code = SY_MLX5_ERROR_CODE(error);
    if (code == SY_MLX5_COMPLETION)
        record_expiry(qp, bound, SY_TAG_MLX5_COMPLETION, SY_REASON_VALUE, error, 0);
    if (code == SY_MLX5_DESYNC && SY_MLX5_ERROR_OPCODE(error) != SY_MLX5_CQE_REQ)
        record_expiry(qp, bound, SY_TAG_MLX5_DESYNC, SY_REASON_VALUE, error, 0);
    else if (code == SY_MLX5_DESYNC)
        record_expiry(qp, bound, SY_TAG_MLX5_DESYNC, SY_REASON_VALUE,
                      ld_relaxed<Scope::kGpu>(&state_of(qp).completed),
                      ld_relaxed<Scope::kGpu>(&state_of(qp).posted));
    return code;
}

// The bound of one wait. It reads the clock and mapped memory once in several polls.
struct Patience {
    static constexpr uint32_t kPollsPerCheck = 32;
    uint64_t start_ns = 0;
    uint32_t num_polls = 0;

    // OK to poll on, or the reason that ends the wait; that also takes the queue out of service.
    SY_DEVICE Status check(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint32_t tag,
                           uint64_t observed, uint64_t expected) {
        const uint64_t error = queue_error(qp);
        if (error != 0)
            return report_error(qp, bound, error);
        if (++num_polls % kPollsPerCheck != 0)
            return SY_MLX5_OK;
        pause_poll();
        const uint64_t now = now_ns();
        if (start_ns == 0)
            start_ns = now;
        Status status = SY_MLX5_OK;
        if (bound.abort_mask != nullptr && qp.peer < 32 &&
            (ld_relaxed<Scope::kSys>(bound.abort_mask) >> qp.peer & 1) != 0)
            status = SY_MLX5_ABORTED;
        else if (now - start_ns > bound.timeout_ns)
            status = SY_MLX5_TIMEOUT;
        if (status == SY_MLX5_OK)
            return status;
        record_expiry(qp, bound, tag,
                      status == SY_MLX5_ABORTED ? SY_REASON_ABORT : SY_REASON_TIMEOUT, observed,
                      expected);
        fail_queue(qp, status);
        return status;
    }
};

// Waits until all blocks before `end` are complete.
template <Scope kScope>
SY_DEVICE Status wait_completed(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint32_t tag,
                                uint64_t end) {
    Patience patience;
    uint64_t completed = ld_acquire<Scope::kGpu>(&state_of(qp).completed);
    while (completed < end) {
        completed = poll<kScope>(qp);
        if (completed >= end)
            break;
        const Status status = patience.check(qp, bound, tag, completed, end);
        if (status != SY_MLX5_OK)
            return status;
    }
    return SY_MLX5_OK;
}

// Whether a group has from 1 block to a quarter of the queue: a larger one would wait for blocks
// that it has not posted itself. A warp's always has, since no queue is shorter than
// SY_MLX5_MIN_DEPTH: where the compiler knows that, it removes the check.
SY_DEVICE bool is_group(const sy_mlx5_qp& qp, uint32_t num_blocks) {
    return num_blocks - 1 < SY_MLX5_MIN_DEPTH / 4 || num_blocks - 1 < qp.sq_depth / 4;
}

// Gives the caller `num_blocks` blocks from `*base` on, once they are free: at most a quarter of
// the queue at a time, or nothing and SY_MLX5_ARGUMENT. `*is_alone`: no earlier poster has
// unpublished blocks.
template <Scope kScope>
SY_DEVICE Status reserve(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint32_t num_blocks,
                         uint64_t* base, bool* is_alone) {
    if (!is_group(qp, num_blocks))
        return SY_MLX5_ARGUMENT;
    // Requests three words together: one after the other they would take half of a post's time. A
    // reservation on a queue that is out of service does no harm.
    const uint64_t error = queue_error(qp);
    *base = atom_add_relaxed(&state_of(qp).reserved, num_blocks);
    const uint64_t turn = ld_relaxed<Scope::kGpu>(&state_of(qp).published);
    if (error != 0)
        return report_error(qp, bound, error);
    *is_alone = turn == *base;
    const uint64_t end = *base + num_blocks;
    // NOTES: without this wait a block is overwritten while the NIC may still read it.
    if (end > qp.sq_depth)
        return wait_completed<kScope>(qp, bound, SY_TAG_MLX5_SLOT, end - qp.sq_depth);
    return SY_MLX5_OK;
}

// SYNC POINT send-turn: acquires the blocks of earlier groups and the stores of their holders.
SY_DEVICE uint64_t load_turn(const sy_mlx5_qp& qp) {
    const uint64_t* turn = &state_of(qp).published;
    return (qp.flags & SY_MLX5_ONE_BLOCK) != 0 ? ld_acquire<Scope::kCta>(turn)
                                               : ld_acquire<Scope::kGpu>(turn);
}

// SYNC POINT send-turn: passes the turn on.
SY_DEVICE void pass_turn(const sy_mlx5_qp& qp, uint64_t end) {
    uint64_t* turn = &state_of(qp).published;
    if ((qp.flags & SY_MLX5_ONE_BLOCK) != 0)
        st_release<Scope::kCta>(turn, end);
    else
        st_release<Scope::kGpu>(turn, end);
}

// Most groups of a size that leave the doorbell to those behind them: each waits for its turn, and the
// first request waits for all of them.
constexpr uint32_t kMostUnannouncedGroups = 16;

// Whether a group reaches a multiple of the largest power of two that exceeds neither `batch`
// blocks nor the same number of groups of its size. One poster rings there, whatever sizes the
// groups have, so fewer blocks than `batch` ever wait.
SY_DEVICE bool is_due(const sy_mlx5_qp& qp, uint64_t base, uint32_t num_blocks) {
    const uint32_t most = kMostUnannouncedGroups * num_blocks;
    const uint32_t step = floor_power_of_two(most < qp.batch ? most : qp.batch);
    return (base & (step - 1)) + num_blocks >= step;
}

// Publishes the written blocks from `base` on, in the order of reservation, and ensures that they
// are announced to the NIC.
template <Scope kScope>
SY_DEVICE Status publish(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint64_t base,
                         uint32_t num_blocks, bool is_alone) {
    sy_mlx5_queue_state& state = state_of(qp);
    const uint64_t end = base + num_blocks;
    // NOTES: who saw its turn with a relaxed load takes it over by the doorbell's first fence, and so
    // must ring.
    bool rings = is_alone;
    if (!is_alone) {
        // Asked for while others have their turns: it only grows.
        const uint64_t reserved = ld_relaxed<Scope::kGpu>(&state.reserved);
        const bool must_ring = is_due(qp, base, num_blocks);
        Patience patience;
        for (uint64_t turn = 0; (turn = load_turn(qp)) != base;) {
            const Status status = patience.check(qp, bound, SY_TAG_MLX5_TURN, turn, base);
            if (status != SY_MLX5_OK)
                return status;
        }
        rings = must_ring || (reserved == end && ld_relaxed<Scope::kGpu>(&state.reserved) == end);
    }
    if (rings) {
        // NOTES: before the doorbell, because is_plausible relies on it.
        red_max_relaxed(&state.posted, end);
        ring_doorbell<kScope>(qp, end);
    }
    pass_turn(qp, end);
    return SY_MLX5_OK;
}

// Whether a builder's requests may be none, see CheckedWqe.
template <class Build>
constexpr bool kIsChecked =
    std::is_same_v<decltype(std::declval<Build>()(uint32_t{}, std::declval<const Control&>())),
                   CheckedWqe>;

// Stores the request that a lane builds. Takes the queue out of service where that is no request:
// others may have reserved behind it.
template <Scope kScope, class Build>
SY_DEVICE void store_built(const sy_mlx5_qp& qp, uint64_t index, uint32_t lane_idx,
                           const Control& control, Build&& build) {
    const auto wqe = build(lane_idx, control);
    if constexpr (kIsChecked<Build>)
        if (!wqe.is_good)
            fail_queue(qp, SY_MLX5_ARGUMENT);
    store_wqe<kScope>(qp, index, wqe);
}

// Posts `num_wqes` requests, from 1 to a quarter of the queue, and no more than a warp has lanes;
// `build(lane, control)` gives the request of a lane. Only the last one asks for a completion, which in a
// reliable connection stands for all before it.
template <Scope kScope, class Group, class Build>
SY_DEVICE Status post(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound, uint32_t num_wqes,
                      Build&& build) {
    if (num_wqes > Group::kMostRequests)
        return SY_MLX5_ARGUMENT;
    uint64_t base = 0;
    bool is_alone = false;
    const Status reserved = static_cast<Status>(Group::leader(
        [&] { return uint64_t{reserve<kScope>(qp, bound, num_wqes, &base, &is_alone)}; }));
    if (reserved != SY_MLX5_OK)
        return reserved;
    base = Group::leader([&] { return base; });
    Group::each_lane(num_wqes, [&](uint32_t lane_idx) {
        const uint64_t index = base + lane_idx;
        const bool is_last = lane_idx + 1 == num_wqes;
        const uint32_t flags = is_last ? SY_MLX5_CE_ALWAYS : SY_MLX5_CE_ERROR_ONLY;
        const Control control{qp.qpn, static_cast<uint32_t>(index & 0xffff), flags};
        store_built<kScope>(qp, index, lane_idx, control, build);
    });
    if constexpr (kIsChecked<Build>) {
        const uint64_t error = Group::leader([&] { return queue_error(qp); });
        if (error != 0)
            return static_cast<Status>(
                Group::leader([&] { return uint64_t{report_error(qp, bound, error)}; }));
    }
    return static_cast<Status>(Group::leader(
        [&] { return uint64_t{publish<kScope>(qp, bound, base, num_wqes, is_alone)}; }));
}

// Waits until everything that was published on the queue before is complete.
template <Scope kScope> SY_DEVICE Status quiet(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound) {
    const uint64_t end = ld_acquire<Scope::kGpu>(&state_of(qp).published);
    const Status status = wait_completed<kScope>(qp, bound, SY_TAG_MLX5_QUIET, end);
    if (status != SY_MLX5_OK)
        return status;
    // Nothing may be left, and still the queue be out of service.
    const uint64_t error = queue_error(qp);
    return error != 0 ? report_error(qp, bound, error) : SY_MLX5_OK;
}

// Whether a quiet would return immediately and without an error.
template <Scope kScope> SY_DEVICE bool is_quiet(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound) {
    const uint64_t end = ld_acquire<Scope::kGpu>(&state_of(qp).published);
    const bool is_done =
        ld_acquire<Scope::kGpu>(&state_of(qp).completed) >= end || poll<kScope>(qp) >= end;
    const uint64_t error = queue_error(qp);
    if (error != 0)
        report_error(qp, bound, error);
    return is_done && error == 0;
}

} // namespace switchyard::comm::mlx5
