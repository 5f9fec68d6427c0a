// Immediate data of a peer's writes, taken out of the completions of receives.
//
// A reader that takes one has everything that the peer put before on the same queue, including the
// bytes of that very write. Threads of one kernel at a time, or the host, take; they may alternate.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/receive_queue.h"
#include "switchyard/comm/mlx5/send_queue.h"

namespace switchyard::comm {

// Content of a completion that a write with immediate data caused.
struct Immediate {
    uint32_t qpn; // of the queue pair that it came to
    uint32_t imm; // the number that the peer gave
    uint32_t num_bytes; // that it wrote before
};

namespace mlx5 {

SY_DEVICE sy_mlx5_rq_state& state_of(const sy_mlx5_rq& rq) {
    return *at_address<sy_mlx5_rq_state>(rq.state);
}

// The next completion, consumed and its receive posted again. The caller holds the lock.
//
// SYNC POINT completion: pairs with the NIC's store of the last bytes of a completion.
// SYNC POINT receive: pairs with the NIC's reads of both records.
template <Scope kScope>
SY_DEVICE bool take_completion(const sy_mlx5_rq& rq, sy_mlx5_rq_state& state, Immediate* taken) {
    const uint64_t index = ld_relaxed<Scope::kGpu>(&state.cq_index);
    const uint64_t number = ld_relaxed<Scope::kGpu>(&state.taken);
    const uint32_t* cqe =
        at_address<const uint32_t>(rq.cq + (index & (rq.cq_depth - 1)) * SY_MLX5_CQE_BYTES);
    const CqeTail tail = load_tail<kScope>(cqe);
    // The owner bit flips with every round of the ring.
    const uint32_t owner = (index & rq.cq_depth) != 0 ? 1 : 0;
    if (tail.opcode() == SY_MLX5_CQE_INVALID || tail.owner() != owner)
        return false;
    // NOTES: the entry's other words, and the peer's put data, are read behind this.
    fence_acq_rel<kScope>();
    if (tail.is_error()) {
        st_relaxed<Scope::kGpu>(&state.error, error_of<kScope>(cqe, tail));
        return false;
    }
    const uint32_t qpn = be32(ld_relaxed<kScope>(cqe + 14)) & 0xffffff;
    // Receives are used in the order in which they were posted.
    if (tail.opcode() != SY_MLX5_CQE_RESP_WRITE_IMM || qpn != rq.qpn ||
        tail.counter() != (number & 0xffff)) {
        st_relaxed<Scope::kGpu>(&state.error, foreign(tail));
        return false;
    }
    *taken = {qpn, be32(ld_relaxed<kScope>(cqe + 9)), be32(ld_relaxed<kScope>(cqe + 11))};
    // NOTES: keeps the reads of the entry ahead of giving it back to the NIC.
    fence_acq_rel<kScope>();
    st_relaxed<kScope>(at_address<uint32_t>(rq.cq_dbrec) + SY_MLX5_CQ_DBREC_CONSUMER,
                       be32(static_cast<uint32_t>((index + 1) & 0xffffff)));
    // NOTES: room for a completion comes before the receive that may need it: in the other order
    // the NIC could find its queue full.
    fence_acq_rel<kScope>();
    st_relaxed<kScope>(at_address<uint32_t>(rq.dbrec) + SY_MLX5_DBREC_RECEIVE,
                       be32(static_cast<uint32_t>((number + 1 + rq.num_receives) & 0xffff)));
    st_relaxed<Scope::kGpu>(&state.cq_index, index + 1);
    st_relaxed<Scope::kGpu>(&state.taken, number + 1);
    return true;
}

} // namespace mlx5

// Takes the next immediate data, if there is any. Also without any while another thread takes, or
// when the queue is out of service (see receive_error).
template <Scope kScope = Scope::kSys>
SY_DEVICE bool try_receive(const sy_mlx5_rq& rq, Immediate* taken) {
    sy_mlx5_rq_state& state = mlx5::state_of(rq);
    if (atom_cas_acquire(&state.lock, 0, 1) != 0)
        return false;
    const bool has_any = ld_relaxed<Scope::kGpu>(&state.error) == 0 &&
                         mlx5::take_completion<kScope>(rq, state, taken);
    st_release<Scope::kGpu>(&state.lock, 0u);
    return has_any;
}

// 0 while the queue is in service, else SY_MLX5_COMPLETION or SY_MLX5_DESYNC and its fields.
SY_DEVICE uint64_t receive_error(const sy_mlx5_rq& rq) {
    return ld_relaxed<Scope::kGpu>(&mlx5::state_of(rq).error);
}

// Waits for immediate data. A time-out or an abort loses nothing: the next call goes on.
template <Scope kScope = Scope::kSys>
SY_DEVICE mlx5::Status receive_imm(const sy_mlx5_rq& rq, const sy_mlx5_bound& bound,
                                   Immediate* taken) {
    uint64_t start_ns = 0;
    for (uint32_t num_polls = 1; !try_receive<kScope>(rq, taken); ++num_polls) {
        const uint64_t error = receive_error(rq);
        if (error != 0) {
            const uint32_t code = SY_MLX5_ERROR_CODE(error);
            mlx5::record_expiry(rq.peer, bound,
                                code == SY_MLX5_COMPLETION ? SY_TAG_MLX5_COMPLETION
                                                           : SY_TAG_MLX5_DESYNC,
                                SY_REASON_VALUE, error, 0);
            return code;
        }
        if (num_polls % mlx5::Patience::kPollsPerCheck != 0)
            continue;
        pause_poll();
        const uint64_t now = now_ns();
        if (start_ns == 0)
            start_ns = now;
        mlx5::Status status = SY_MLX5_OK;
        if (bound.abort_mask != nullptr && rq.peer < 32 &&
            (ld_relaxed<Scope::kSys>(bound.abort_mask) >> rq.peer & 1) != 0)
            status = SY_MLX5_ABORTED;
        else if (now - start_ns > bound.timeout_ns)
            status = SY_MLX5_TIMEOUT;
        if (status == SY_MLX5_OK)
            continue;
        const uint64_t number = ld_relaxed<Scope::kGpu>(&mlx5::state_of(rq).taken);
        mlx5::record_expiry(rq.peer, bound, SY_TAG_MLX5_RECEIVE,
                            status == SY_MLX5_ABORTED ? SY_REASON_ABORT : SY_REASON_TIMEOUT, number,
                            number + 1);
        return status;
    }
    return SY_MLX5_OK;
}

} // namespace switchyard::comm
