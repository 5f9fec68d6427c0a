// Puts, gets and adds that a kernel posts to a NIC by itself. The names are the same as over a
// proxy (proxy.h) and over any path (put_get.cuh). Fused kernels store into the peer's window, or
// its mirror, and name the stored range, see link.cuh.
//
// Order on one queue: a signal or an add is seen by the peer after everything that was put before
// it. A get may return while later puts already run; where that matters, quiet stands in between.
// Nothing is ordered across queues.
//
// Calls with `_warp` in their name are made by a whole warp, all others by one thread.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/owned_queue.h"
#include "switchyard/comm/mlx5/send_queue.h"

namespace switchyard::comm {

using mlx5::LocalBuffer;
using mlx5::OwnedQueue;
using mlx5::RemoteBuffer;
using mlx5::Status;

namespace detail {

SY_DEVICE LocalBuffer operator+(const LocalBuffer& buffer, uint64_t num_bytes) {
    return {buffer.address + num_bytes, buffer.lkey};
}

SY_DEVICE RemoteBuffer operator+(const RemoteBuffer& buffer, uint64_t num_bytes) {
    return {buffer.address + num_bytes, buffer.rkey};
}

SY_DEVICE LocalBuffer scratch_of(const sy_mlx5_qp& qp) { return {qp.scratch, qp.scratch_lkey}; }

// Beyond any memory that can be registered: a longer length is a difference that went below 0.
constexpr uint64_t kMaxMoveBytes = uint64_t{1} << 48;

// A queue that others may post on at the same time, as something to post on: so is an OwnedQueue.
template <Scope kScope, class Group> struct SharedQueue {
    const sy_mlx5_qp& qp;
    const sy_mlx5_bound& bound;

    template <class Build> SY_DEVICE Status post(uint32_t num_wqes, Build&& build) const {
        return mlx5::post<kScope, Group>(qp, bound, num_wqes, static_cast<Build&&>(build));
    }
};

// Moves `num_bytes` in as few requests as their largest size allows, and posts `num_more` further
// ones made by `more(idx, control)` in the same group as the last of them.
template <class Queue, class Make, class More>
SY_DEVICE Status move(Queue&& queue, const LocalBuffer& local, const RemoteBuffer& remote,
                      uint64_t num_bytes, Make&& make, uint32_t num_more, More&& more) {
    // NOTES: also keeps the sums below from wrapping, which would take a length of almost 2^64 for none:
    // nothing would be put, and the add behind it would say that it was.
    if (num_bytes > kMaxMoveBytes)
        return SY_MLX5_ARGUMENT;
    const uint64_t chunk_bytes = queue.qp.max_message_bytes;
    uint64_t begin = 0;
    do {
        // A 64-bit division would measurably slow a post; most lengths need none.
        const uint64_t num_left_bytes = num_bytes - begin;
        const uint64_t num_left = num_left_bytes > chunk_bytes
                                      ? (num_left_bytes + chunk_bytes - 1) / chunk_bytes
                                      : num_left_bytes != 0;
        // One lane per request.
        const uint32_t room = 32 - num_more;
        const uint32_t num_chunks = num_left < room ? static_cast<uint32_t>(num_left) : room;
        const bool is_last = num_left <= room;
        const uint32_t num_wqes = num_chunks + (is_last ? num_more : 0);
        if (num_wqes == 0)
            return SY_MLX5_OK;
        const Status status =
            queue.post(num_wqes, [&](uint32_t lane_idx, const mlx5::Control& control) {
                if (lane_idx >= num_chunks)
                    return more(lane_idx - num_chunks, control);
                const uint64_t offset = begin + lane_idx * chunk_bytes;
                const uint64_t left = num_bytes - offset;
                const uint32_t length =
                    static_cast<uint32_t>(left < chunk_bytes ? left : chunk_bytes);
                return make(control, local + offset, remote + offset, length);
            });
        if (status != SY_MLX5_OK)
            return status;
        begin += num_chunks * chunk_bytes;
    } while (begin < num_bytes);
    return SY_MLX5_OK;
}

struct MakeWrite {
    SY_DEVICE mlx5::Wqe operator()(const mlx5::Control& control, const LocalBuffer& local,
                                   const RemoteBuffer& remote, uint32_t num_bytes) const {
        return mlx5::make_write(control, local, remote, num_bytes);
    }
};

struct MakeRead {
    SY_DEVICE mlx5::Wqe operator()(const mlx5::Control& control, const LocalBuffer& local,
                                   const RemoteBuffer& remote, uint32_t num_bytes) const {
        return mlx5::make_read(control, local, remote, num_bytes);
    }
};

struct MakeNone {
    SY_DEVICE mlx5::Wqe operator()(uint32_t, const mlx5::Control& control) const {
        return mlx5::make_nop(control);
    }
};

template <class Queue>
SY_DEVICE Status put(Queue&& queue, const LocalBuffer& local, const RemoteBuffer& remote,
                     uint64_t num_bytes) {
    return move(queue, local, remote, num_bytes, MakeWrite{}, 0, MakeNone{});
}

template <class Queue>
SY_DEVICE Status get(Queue&& queue, const LocalBuffer& local, const RemoteBuffer& remote,
                     uint64_t num_bytes) {
    return move(queue, local, remote, num_bytes, MakeRead{}, 0, MakeNone{});
}

template <class Queue>
SY_DEVICE Status put_add(Queue&& queue, const LocalBuffer& local, const RemoteBuffer& remote,
                         uint64_t num_bytes, const RemoteBuffer& counter, uint64_t value) {
    if (counter.address % 8 != 0)
        return SY_MLX5_ARGUMENT;
    return move(queue, local, remote, num_bytes, MakeWrite{}, 1,
                [&](uint32_t, const mlx5::Control& control) {
                    return mlx5::make_fetch_add(control, scratch_of(queue.qp), counter, value);
                });
}

template <class Queue>
SY_DEVICE Status put_signal(Queue&& queue, const LocalBuffer& local, const RemoteBuffer& remote,
                            uint64_t num_bytes, const RemoteBuffer& word, uint64_t value) {
    if (word.address % 8 != 0)
        return SY_MLX5_ARGUMENT;
    return move(queue, local, remote, num_bytes, MakeWrite{}, 1,
                [&](uint32_t, const mlx5::Control& control) {
                    return mlx5::make_write_inline(control, word, value, 8);
                });
}

template <class Queue>
SY_DEVICE Status add(Queue&& queue, const RemoteBuffer& counter, uint64_t value) {
    if (counter.address % 8 != 0)
        return SY_MLX5_ARGUMENT;
    return queue.post(1, [&](uint32_t, const mlx5::Control& control) {
        return mlx5::make_fetch_add(control, scratch_of(queue.qp), counter, value);
    });
}

template <class Queue>
SY_DEVICE Status set(Queue&& queue, const RemoteBuffer& word, uint64_t value) {
    if (word.address % 8 != 0)
        return SY_MLX5_ARGUMENT;
    return queue.post(1, [&](uint32_t, const mlx5::Control& control) {
        return mlx5::make_write_inline(control, word, value, 8);
    });
}

} // namespace detail

// Starts a copy of local memory to the peer. The source may be reused after a quiet.
// NOTES: stores of other threads of the block into the source are covered if a barrier lies
// between.
template <Scope kScope = Scope::kSys, class Group = Warp>
SY_DEVICE Status put_nbi_warp(const sy_mlx5_qp& qp, const LocalBuffer& local,
                              const RemoteBuffer& remote, uint64_t num_bytes,
                              const sy_mlx5_bound& bound) {
    return detail::put(detail::SharedQueue<kScope, Group>{qp, bound}, local, remote, num_bytes);
}

// Starts a copy of the peer's memory to `local`, which is complete after a quiet.
template <Scope kScope = Scope::kSys, class Group = Warp>
SY_DEVICE Status get_nbi_warp(const sy_mlx5_qp& qp, const LocalBuffer& local,
                              const RemoteBuffer& remote, uint64_t num_bytes,
                              const sy_mlx5_bound& bound) {
    return detail::get(detail::SharedQueue<kScope, Group>{qp, bound}, local, remote, num_bytes);
}

// A put and an add to a 64-bit counter of the peer behind it, with one reservation and one
// doorbell.
template <Scope kScope = Scope::kSys, class Group = Warp>
SY_DEVICE Status put_add_nbi_warp(const sy_mlx5_qp& qp, const LocalBuffer& local,
                                  const RemoteBuffer& remote, uint64_t num_bytes,
                                  const RemoteBuffer& counter, uint64_t value,
                                  const sy_mlx5_bound& bound) {
    return detail::put_add(detail::SharedQueue<kScope, Group>{qp, bound}, local, remote, num_bytes,
                           counter, value);
}

// A put and a word of the peer that has one writer behind it, see signal, with one reservation and one
// doorbell.
template <Scope kScope = Scope::kSys, class Group = Warp>
SY_DEVICE Status put_signal_nbi_warp(const sy_mlx5_qp& qp, const LocalBuffer& local,
                                     const RemoteBuffer& remote, uint64_t num_bytes,
                                     const RemoteBuffer& word, uint64_t value,
                                     const sy_mlx5_bound& bound) {
    return detail::put_signal(detail::SharedQueue<kScope, Group>{qp, bound}, local, remote,
                              num_bytes, word, value);
}

// Adds to a 64-bit counter of the peer, after everything that was put on this queue before.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status amo_nonfetch_add(const sy_mlx5_qp& qp, const RemoteBuffer& counter, uint64_t value,
                                  const sy_mlx5_bound& bound) {
    return detail::add(detail::SharedQueue<kScope, Thread>{qp, bound}, counter, value);
}

// The same for a 32-bit counter.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status amo_nonfetch_add32(const sy_mlx5_qp& qp, const RemoteBuffer& counter,
                                    uint32_t value, const sy_mlx5_bound& bound) {
    if (counter.address % 4 != 0)
        return SY_MLX5_ARGUMENT;
    return mlx5::post<kScope, Thread>(qp, bound, 1, [&](uint32_t, const mlx5::Control& control) {
        return mlx5::make_masked_fetch_add4(control, detail::scratch_of(qp), counter, value, 0);
    });
}

// Adds to several fields of a 64-bit word of the peer at once. A set bit of `boundary` stops the
// carry of that bit, so each field wraps independently. Without a boundary it is amo_nonfetch_add.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status amo_nonfetch_add_fields(const sy_mlx5_qp& qp, const RemoteBuffer& word,
                                         uint64_t value, uint64_t boundary,
                                         const sy_mlx5_bound& bound) {
    if (word.address % 8 != 0)
        return SY_MLX5_ARGUMENT;
    return mlx5::post<kScope, Thread>(qp, bound, 1, [&](uint32_t, const mlx5::Control& control) {
        return mlx5::make_masked_fetch_add8(control, detail::scratch_of(qp), word, value, boundary);
    });
}

// Sets a word of the peer that has one writer, after everything that was put on this queue before.
// NOTES: the peer must not have registered the memory with relaxed ordering: then only adds are
// ordered behind puts.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status signal(const sy_mlx5_qp& qp, const RemoteBuffer& word, uint64_t value,
                        const sy_mlx5_bound& bound) {
    return detail::set(detail::SharedQueue<kScope, Thread>{qp, bound}, word, value);
}

// A put whose arrival the peer finds in its completion queue, with `imm`; it needs a posted
// receive.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status put_imm_nbi(const sy_mlx5_qp& qp, const LocalBuffer& local,
                             const RemoteBuffer& remote, uint32_t num_bytes, uint32_t imm,
                             const sy_mlx5_bound& bound) {
    if (num_bytes > qp.max_message_bytes)
        return SY_MLX5_ARGUMENT;
    return mlx5::post<kScope, Thread>(qp, bound, 1, [&](uint32_t, const mlx5::Control& control) {
        return mlx5::make_write_imm(control, local, remote, num_bytes, imm);
    });
}

// Waits until all earlier operations on the queue are complete: sources may be reused, the peer has
// the put data, and the got data is here.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status quiet(const sy_mlx5_qp& qp, const sy_mlx5_bound& bound) {
    return mlx5::quiet<kScope>(qp, bound);
}

// quiet for gets into memory to which the NIC's writes may still be under way when their completion
// is visible, as with GPU memory behind some root complexes: the NIC reads `local` behind those
// writes.
template <Scope kScope = Scope::kSys>
SY_DEVICE Status quiet_gets(const sy_mlx5_qp& qp, const LocalBuffer& local,
                            const sy_mlx5_bound& bound) {
    const Status status =
        mlx5::post<kScope, Thread>(qp, bound, 1, [&](uint32_t, mlx5::Control control) {
            control.flags |= SY_MLX5_FM_FENCE;
            return mlx5::make_dump(control, local, 1);
        });
    return status != SY_MLX5_OK ? status : mlx5::quiet<kScope>(qp, bound);
}

// The same on a queue that the caller's warp, or thread, has to itself (owned_queue.h): all lanes make each
// call. A post takes a quarter to a third less than on a shared queue (docs/explanation/ibgda.md).
template <Scope kScope, class Group>
SY_DEVICE Status put_nbi(OwnedQueue<kScope, Group>& queue, const LocalBuffer& local,
                         const RemoteBuffer& remote, uint64_t num_bytes) {
    return detail::put(queue, local, remote, num_bytes);
}

template <Scope kScope, class Group>
SY_DEVICE Status get_nbi(OwnedQueue<kScope, Group>& queue, const LocalBuffer& local,
                         const RemoteBuffer& remote, uint64_t num_bytes) {
    return detail::get(queue, local, remote, num_bytes);
}

template <Scope kScope, class Group>
SY_DEVICE Status put_add_nbi(OwnedQueue<kScope, Group>& queue, const LocalBuffer& local,
                             const RemoteBuffer& remote, uint64_t num_bytes,
                             const RemoteBuffer& counter, uint64_t value) {
    return detail::put_add(queue, local, remote, num_bytes, counter, value);
}

template <Scope kScope, class Group>
SY_DEVICE Status put_signal_nbi(OwnedQueue<kScope, Group>& queue, const LocalBuffer& local,
                                const RemoteBuffer& remote, uint64_t num_bytes,
                                const RemoteBuffer& word, uint64_t value) {
    return detail::put_signal(queue, local, remote, num_bytes, word, value);
}

template <Scope kScope, class Group>
SY_DEVICE Status amo_nonfetch_add(OwnedQueue<kScope, Group>& queue, const RemoteBuffer& counter,
                                  uint64_t value) {
    return detail::add(queue, counter, value);
}

template <Scope kScope, class Group>
SY_DEVICE Status signal(OwnedQueue<kScope, Group>& queue, const RemoteBuffer& word,
                        uint64_t value) {
    return detail::set(queue, word, value);
}

template <Scope kScope, class Group> SY_DEVICE Status quiet(OwnedQueue<kScope, Group>& queue) {
    return queue.quiet();
}

// The same towards a peer's slot. `lane` selects the queue: a block's index.
namespace peer {

SY_DEVICE const sy_mlx5_qp& queue_of(const sy_ibgda_peer& peer, uint32_t lane) {
    return peer.qps[lane % peer.num_qps];
}

SY_DEVICE bool is_inside(const sy_ibgda_peer& peer, uint64_t offset, uint64_t num_bytes) {
    return offset <= peer.slot_bytes && num_bytes <= peer.slot_bytes - offset;
}

// Puts the bytes stored at `offset` of the mirror.
template <Scope kScope = Scope::kSys, class Group = Warp>
SY_DEVICE Status put_nbi_warp(const sy_ibgda_peer& peer, uint32_t lane, uint64_t offset,
                              uint64_t num_bytes) {
    if (!is_inside(peer, offset, num_bytes))
        return SY_MLX5_ARGUMENT;
    return comm::put_nbi_warp<kScope, Group>(
        queue_of(peer, lane), LocalBuffer{peer.mirror + offset, peer.lkey},
        RemoteBuffer{peer.remote + offset, peer.rkey}, num_bytes, peer.bound);
}

template <Scope kScope = Scope::kSys>
SY_DEVICE Status amo_nonfetch_add(const sy_ibgda_peer& peer, uint32_t lane, uint64_t offset,
                                  uint64_t value) {
    if (!is_inside(peer, offset, 8))
        return SY_MLX5_ARGUMENT;
    return comm::amo_nonfetch_add<kScope>(
        queue_of(peer, lane), RemoteBuffer{peer.remote + offset, peer.rkey}, value, peer.bound);
}

template <Scope kScope = Scope::kSys>
SY_DEVICE Status signal(const sy_ibgda_peer& peer, uint32_t lane, uint64_t offset, uint64_t value) {
    if (!is_inside(peer, offset, 8))
        return SY_MLX5_ARGUMENT;
    return comm::signal<kScope>(queue_of(peer, lane), RemoteBuffer{peer.remote + offset, peer.rkey},
                                value, peer.bound);
}

template <Scope kScope = Scope::kSys>
SY_DEVICE Status quiet(const sy_ibgda_peer& peer, uint32_t lane) {
    return comm::quiet<kScope>(queue_of(peer, lane), peer.bound);
}

} // namespace peer

} // namespace switchyard::comm
