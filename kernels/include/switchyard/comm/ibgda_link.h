// Links over IBGDA: turns the ranges that link.cuh names into work requests. `link.context` is the
// address of a sy_ibgda_peer and `link.window` that of its mirror.
//
// All words that a block sets go through the queue that its puts went through, behind them. Failures
// take the queue out of service and stand in the error word; calls return nothing, and waits ask
// has_failed.
#pragma once

#include <cstdint>

#include "switchyard/comm/ibgda.h"
#include "switchyard/device_abi.h"

namespace switchyard::comm::ibgda {

// Queues of fused kernels may lie in host memory, and a processor or another GPU may be the NIC.
constexpr Scope kScope = Scope::kSys;

// Words that fit one request besides its head.
constexpr uint32_t kMaxInlineWords = SY_MLX5_MAX_INLINE_BYTES / sizeof(uint64_t);

// One of a list of things to send in order: a part of the mirror, or words that all get `value`.
struct Send {
    uint64_t offset, num_bytes, value;
    bool is_words;
};

SY_DEVICE const sy_ibgda_peer& peer_of(const sy_link& link) {
    return *at_address<const sy_ibgda_peer>(link.context);
}

namespace detail {

SY_DEVICE uint32_t num_requests(const Send& send, uint32_t max_bytes) {
    if (send.num_bytes == 0)
        return 0;
    return send.is_words ? 1 : static_cast<uint32_t>((send.num_bytes + max_bytes - 1) / max_bytes);
}

// Request `idx` of those of a `send`.
SY_DEVICE mlx5::Wqe make_request(const sy_ibgda_peer& peer, uint32_t max_bytes, const Send& send,
                                 uint32_t idx, const mlx5::Control& control) {
    const uint64_t at = send.offset + uint64_t{idx} * max_bytes;
    const RemoteBuffer remote{peer.remote + at, peer.rkey};
    if (send.is_words)
        return mlx5::make_write_inline_words(control, remote, send.value,
                                             static_cast<uint32_t>(send.num_bytes / 8));
    const uint64_t left = send.offset + send.num_bytes - at;
    return mlx5::make_write(control, LocalBuffer{peer.mirror + at, peer.lkey}, remote,
                            static_cast<uint32_t>(left < max_bytes ? left : max_bytes));
}

SY_DEVICE bool is_good(const sy_ibgda_peer& peer, const Send& send) {
    return peer::is_inside(peer, send.offset, send.num_bytes) &&
           (!send.is_words || (send.offset % 8 == 0 && send.num_bytes % 8 == 0 &&
                               send.num_bytes / 8 <= kMaxInlineWords));
}

SY_DEVICE void refuse(const sy_ibgda_peer& peer, const sy_mlx5_qp& qp, const Send& send) {
    mlx5::record_expiry(qp, peer.bound, SY_TAG_MLX5_ARGUMENT, SY_REASON_VALUE, send.offset,
                        send.num_bytes);
    mlx5::fail_queue(qp, SY_MLX5_ARGUMENT);
}

} // namespace detail

// Sends a list in order, with one reservation and one doorbell if it has no more than 32 requests.
template <class Group, uint32_t kNumSends>
SY_DEVICE_COLD void send(const sy_link& link, uint32_t lane, const Send (&sends)[kNumSends]) {
    const sy_ibgda_peer& peer = peer_of(link);
    const sy_mlx5_qp& qp = peer::queue_of(peer, lane);
    const uint32_t max_bytes = qp.max_message_bytes;
    uint32_t num_upto[kNumSends]; // requests of this and all earlier ones
    uint32_t num = 0;
    for (uint32_t i = 0; i < kNumSends; ++i) {
        if (!detail::is_good(peer, sends[i]))
            return detail::refuse(peer, qp, sends[i]);
        num_upto[i] = num += detail::num_requests(sends[i], max_bytes);
    }
    for (uint32_t first = 0; first < num; first += 32) {
        const uint32_t num_now = num - first < 32 ? num - first : 32;
        const Status status = mlx5::post<kScope, Group>(
            qp, peer.bound, num_now, [&](uint32_t lane_idx, const mlx5::Control& control) {
                const uint32_t at = first + lane_idx;
                uint32_t i = 0;
                while (at >= num_upto[i])
                    ++i;
                return detail::make_request(peer, max_bytes, sends[i],
                                            at - (i == 0 ? 0 : num_upto[i - 1]), control);
            });
        if (status != SY_MLX5_OK)
            return;
    }
}

SY_DEVICE void set(const sy_link& link, uint32_t lane, uint64_t offset, uint64_t value) {
    const sy_ibgda_peer& peer = peer_of(link);
    if (peer::signal<kScope>(peer, lane, offset, value) == SY_MLX5_ARGUMENT)
        detail::refuse(peer, peer::queue_of(peer, lane),
                       Send{offset, sizeof(uint64_t), value, true});
}

SY_DEVICE void put_set(const sy_link& link, uint32_t lane, uint64_t offset, uint64_t num_bytes,
                       uint64_t word_offset, uint64_t value) {
    const Send sends[2] = {{offset, num_bytes, 0, false},
                           {word_offset, sizeof(uint64_t), value, true}};
    send<Thread>(link, lane, sends);
}

SY_DEVICE_COLD inline void add(const sy_link& link, uint32_t lane, uint64_t offset,
                               uint64_t value) {
    const sy_ibgda_peer& peer = peer_of(link);
    if (peer::amo_nonfetch_add<kScope>(peer, lane, offset, value) == SY_MLX5_ARGUMENT)
        detail::refuse(peer, peer::queue_of(peer, lane),
                       Send{offset, sizeof(uint64_t), value, true});
}

#if defined(__CUDACC__) || defined(SY_SIMT)

// Rows of the lanes that have one, at most 16 at a time: 32 requests.
SY_DEVICE_COLD inline void put_rows_warp(const sy_link& link, uint32_t lane, bool has_row,
                                         uint64_t row_offset, uint64_t row_bytes,
                                         uint64_t word_offset, uint64_t value) {
    const sy_ibgda_peer& peer = peer_of(link);
    const sy_mlx5_qp& qp = peer::queue_of(peer, lane);
    uint32_t rest = __ballot_sync(0xffffffffu, has_row);
    if (row_bytes > qp.max_message_bytes) {
        // Rare: a list of its own for every row.
        for (; rest != 0; rest &= rest - 1) {
            const uint32_t from = __ffs(rest) - 1;
            const Send sends[2] = {
                {__shfl_sync(0xffffffffu, row_offset, from), row_bytes, 0, false},
                {__shfl_sync(0xffffffffu, word_offset, from), sizeof(uint64_t), value, true}};
            send<Warp>(link, lane, sends);
        }
        return;
    }
    while (rest != 0) {
        const uint32_t num_rows = __popc(rest) < 16 ? __popc(rest) : 16;
        // Lanes 2 n and 2 n + 1 build the requests of the n-th row.
        const uint32_t my_row = (threadIdx.x & 31) / 2;
        const uint32_t from = take_lanes(&rest, num_rows, my_row);
        const Send sends[2] = {
            {__shfl_sync(0xffffffffu, row_offset, from), row_bytes, 0, false},
            {__shfl_sync(0xffffffffu, word_offset, from), sizeof(uint64_t), value, true}};
        const bool is_good = my_row >= num_rows ||
                             (detail::is_good(peer, sends[0]) && detail::is_good(peer, sends[1]));
        if (!__all_sync(0xffffffffu, is_good)) {
            if (!is_good)
                detail::refuse(peer, qp, sends[0]);
            return;
        }
        const Status status = mlx5::post<kScope, Warp>(
            qp, peer.bound, 2 * num_rows, [&](uint32_t lane_idx, const mlx5::Control& control) {
                return detail::make_request(peer, qp.max_message_bytes, sends[lane_idx % 2], 0,
                                            control);
            });
        if (status != SY_MLX5_OK)
            return;
    }
}

#endif

// Puts from the mirror, or gets into it, from `source_offset` on.
template <bool kIsPut>
SY_DEVICE_COLD void move_warp(const sy_link& link, uint32_t lane, uint64_t offset,
                              uint64_t source_offset, uint64_t num_bytes) {
    const sy_ibgda_peer& peer = peer_of(link);
    const sy_mlx5_qp& qp = peer::queue_of(peer, lane);
    const LocalBuffer local{peer.mirror + source_offset, peer.lkey};
    const RemoteBuffer remote{peer.remote + offset, peer.rkey};
    if (kIsPut)
        comm::put_nbi_warp<kScope, Warp>(qp, local, remote, num_bytes, peer.bound);
    else
        comm::get_nbi_warp<kScope, Warp>(qp, local, remote, num_bytes, peer.bound);
}

// Waits until a lane's got data is in memory: `local` is an address that a get wrote to.
SY_DEVICE_COLD inline void await_gets(const sy_link& link, uint32_t lane, uint64_t local) {
    const sy_ibgda_peer& peer = peer_of(link);
    comm::quiet_gets<kScope>(peer::queue_of(peer, lane), LocalBuffer{local, peer.lkey}, peer.bound);
}

// Waits for all queues of the peer, up to the first that fails: a NIC that is gone costs one bound, not
// one for every queue.
SY_DEVICE_COLD inline void quiet(const sy_link& link) {
    const sy_ibgda_peer& peer = peer_of(link);
    for (uint32_t i = 0; i < peer.num_qps; ++i)
        if (comm::quiet<kScope>(peer.qps[i], peer.bound) != SY_MLX5_OK)
            return;
}

// Result of find_busy: a quiet would return immediately.
constexpr uint32_t kNoneBusy = 0xffffffffu;

// The first queue from `first` on with incomplete work, or kNoneBusy. A caller that polls
// repeatedly begins with that queue.
SY_DEVICE_COLD inline uint32_t find_busy(const sy_link& link, uint32_t first) {
    const sy_ibgda_peer& peer = peer_of(link);
    for (uint32_t i = first; i < peer.num_qps; ++i)
        if (!mlx5::is_quiet<kScope>(peer.qps[i], peer.bound))
            return i;
    return kNoneBusy;
}

// Polls completions if no other caller has polled just now. Errors that others found are in the
// queue's error word.
SY_DEVICE_COLD inline bool has_failed(const sy_link& link) {
    const sy_ibgda_peer& peer = peer_of(link);
    for (uint32_t i = 0; i < peer.num_qps; ++i) {
        const sy_mlx5_qp& qp = peer.qps[i];
        if (takes_poll_turn(&mlx5::state_of(qp).polled_at))
            mlx5::poll<kScope>(qp);
        if (const uint64_t error = mlx5::queue_error(qp); error != 0) {
            mlx5::report_error(qp, peer.bound, error);
            return true;
        }
    }
    return false;
}

} // namespace switchyard::comm::ibgda
