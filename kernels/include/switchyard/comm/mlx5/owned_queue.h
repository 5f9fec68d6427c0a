// Posting by a warp or a thread that has a queue to itself for as long as its kernel runs.
//
// A sole poster needs no reservation and no turn: it counts privately, writes its requests, and
// tells the NIC. Other code reads the counts: `quiet`, pollers, and posters after this kernel. The
// owner stores them before each doorbell, by plain stores that the doorbell's fence covers. So the
// queue may be shared again as soon as the kernel is over, and after a kernel that dies a reset
// repairs everything.
//
// Meanwhile no other code may post on the queue. All may poll it, and wait for it to be quiet.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/send_queue.h"

namespace switchyard::comm::mlx5 {

// Announces the blocks before `end` to the NIC and to readers of the counts. The owner is the only
// caller.
// NOTES: `posted` before the doorbell, because is_plausible relies on it. `published` passes no
// turn to another poster, so it orders nothing here.
template <Scope kScope> SY_DEVICE void announce(const sy_mlx5_qp& qp, uint64_t end) {
    sy_mlx5_queue_state& state = state_of(qp);
    st_relaxed<Scope::kGpu>(&state.reserved, end);
    st_relaxed<Scope::kGpu>(&state.posted, end);
    st_relaxed<Scope::kGpu>(&state.published, end);
    ring_doorbell<kScope>(qp, end);
}

// `Group` is the poster: a Warp, all of whose lanes make every call, or a Thread.
template <Scope kScope, class Group = Warp> class OwnedQueue {
  public:
    // A queue with unpublished blocks of another poster has no owner: every call then returns
    // SY_MLX5_ARGUMENT.
    SY_DEVICE OwnedQueue(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound) : qp(qp), bound(bound) {
        Group::leader([&] {
            sy_mlx5_queue_state& state = state_of(qp);
            next_ = ld_relaxed<Scope::kGpu>(&state.reserved);
            is_foreign_ = ld_acquire<Scope::kGpu>(&state.published) != next_;
            // The first call finds no room on a queue that is not its own.
            room_end_ = is_foreign_ ? 0 : ld_acquire<Scope::kGpu>(&state.completed) + qp.sq_depth;
            error_ = queue_error(qp);
            return uint64_t{0};
        });
    }

    // Posts `num_wqes` requests, from 1 to a quarter of the queue, and no more than a warp has lanes, or none
    // and SY_MLX5_ARGUMENT; `build(lane, control)` gives the request of a lane. Only the last one asks for a
    // completion. That the queue went out of service is said by the next call but one at the latest.
    template <class Build> SY_DEVICE Status post(uint32_t num_wqes, Build&& build) {
        if (num_wqes > Group::kMostRequests)
            return SY_MLX5_ARGUMENT;
        const uint64_t base = Group::leader([&] { return begin(num_wqes); });
        if (base == kNone)
            return status();
        Group::each_lane(num_wqes, [&](uint32_t lane_idx) {
            const uint64_t index = base + lane_idx;
            const bool is_last = lane_idx + 1 == num_wqes;
            const uint32_t flags = is_last ? SY_MLX5_CE_ALWAYS : SY_MLX5_CE_ERROR_ONLY;
            const Control control{qp.qpn, static_cast<uint32_t>(index & 0xffff), flags};
            store_built<kScope>(qp, index, lane_idx, control, build);
        });
        if constexpr (kIsChecked<Build>) {
            // Nothing of the group was announced.
            const uint64_t error = Group::leader([&] { return error_ = queue_error(qp); });
            if (error != 0)
                return static_cast<Status>(
                    Group::leader([&] { return uint64_t{report_error(qp, bound, error)}; }));
        }
        Group::each_lane(1, [&](uint32_t) {
            next_ = base + num_wqes;
            // Requested now, and read by the next call, so that its latency is hidden.
            error_ = queue_error(qp);
            announce<kScope>(qp, next_);
        });
        return SY_MLX5_OK;
    }

    // Waits until everything that was posted is complete.
    SY_DEVICE Status quiet() {
        return static_cast<Status>(Group::leader([&] { return uint64_t{wait_quiet()}; }));
    }

    const sy_mlx5_qp& qp;
    const sy_mlx5_bound& bound;

  private:
    static constexpr uint64_t kNone = UINT64_MAX;

    // The leader does the following, and the state is the leader's.

    // The first of the requested number of free blocks, or kNone; then `status_` has the reason.
    SY_DEVICE uint64_t begin(uint32_t num_blocks) {
        if (!is_group(qp, num_blocks)) {
            status_ = SY_MLX5_ARGUMENT;
            return kNone;
        }
        const uint64_t end = next_ + num_blocks;
        if (error_ != 0 || end > room_end_) {
            status_ = is_foreign_ ? Status{SY_MLX5_ARGUMENT}
                      : error_ != 0
                          ? report_error(qp, bound, error_)
                          : wait_completed<kScope>(qp, bound, SY_TAG_MLX5_SLOT, end - qp.sq_depth);
            if (status_ != SY_MLX5_OK)
                return kNone;
            room_end_ = ld_acquire<Scope::kGpu>(&state_of(qp).completed) + qp.sq_depth;
        }
        return next_;
    }

    SY_DEVICE Status wait_quiet() {
        if (is_foreign_)
            return SY_MLX5_ARGUMENT;
        const Status status = wait_completed<kScope>(qp, bound, SY_TAG_MLX5_QUIET, next_);
        if (status != SY_MLX5_OK)
            return status;
        error_ = queue_error(qp);
        return error_ != 0 ? report_error(qp, bound, error_) : Status{SY_MLX5_OK};
    }

    SY_DEVICE Status status() const {
        return static_cast<Status>(Group::leader([&] { return uint64_t{status_}; }));
    }

    uint64_t next_ = 0;
    uint64_t room_end_ = 0; // blocks before it are free
    uint64_t error_ = 0;
    bool is_foreign_ = false;
    Status status_ = SY_MLX5_OK;
};

} // namespace switchyard::comm::mlx5
