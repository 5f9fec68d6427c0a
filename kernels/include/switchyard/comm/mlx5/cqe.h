// Completions: their decoding, and the number of blocks that they complete.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/memory.h"

namespace switchyard::comm::mlx5 {

// The last word of a completion. It alone shows whether the completion exists.
struct CqeTail {
    uint32_t word; // as it stands in memory: counter (big-endian), signature, op_own

    SY_DEVICE uint32_t opcode() const { return word >> 28; }
    SY_DEVICE uint32_t owner() const { return word >> 24 & 1; }
    SY_DEVICE uint32_t counter() const { return (word & 0xff) << 8 | (word >> 8 & 0xff); }
    SY_DEVICE bool is_error() const {
        return opcode() == SY_MLX5_CQE_REQ_ERROR || opcode() == SY_MLX5_CQE_RESP_ERROR;
    }
    // Whether its counter is an index of this send queue, and not one of receives.
    SY_DEVICE bool is_request() const { return opcode() == SY_MLX5_CQE_REQ; }
};

SY_DEVICE const uint32_t* cqe_at(const sy_mlx5_qp& qp, uint64_t index) {
    return at_address<const uint32_t>(qp.cq + (index & (qp.cq_depth - 1)) * SY_MLX5_CQE_BYTES);
}

template <Scope kScope> SY_DEVICE CqeTail load_tail(const uint32_t* cqe) {
    return CqeTail{ld_relaxed<kScope>(cqe + 15)};
}

// The 64-bit count behind the 16 bits that a completion has: the smallest one from `known` on.
// NOTES: correct only if `known` was loaded before the completion was, and is itself a count that
// some completion gave. Then the true count is not below it. It may be 65,536 or more above if this
// thread slept in between; the result is then too small by a multiple of that, which delays and
// never lies. With a completion older than `known` the count would jump by almost 65,536, and
// blocks that the NIC still needs would be overwritten.
SY_DEVICE uint64_t completed_after(uint64_t known, uint32_t counter) {
    return known + static_cast<uint16_t>(counter + 1 - static_cast<uint32_t>(known));
}

// The error word of a queue for the error completion at `cqe`.
template <Scope kScope> SY_DEVICE uint64_t error_of(const uint32_t* cqe, CqeTail tail) {
    const uint32_t status = ld_relaxed<kScope>(cqe + 13); // bytes 52..55
    const uint32_t opcode = ld_relaxed<kScope>(cqe + 14) & 0xff;
    return static_cast<uint64_t>(SY_MLX5_COMPLETION) | static_cast<uint64_t>(status >> 24) << 8 |
           static_cast<uint64_t>(status >> 16 & 0xff) << 16 | static_cast<uint64_t>(opcode) << 24 |
           static_cast<uint64_t>(tail.counter()) << 32;
}

SY_DEVICE sy_mlx5_queue_state& state_of(const sy_mlx5_qp& qp) {
    return *at_address<sy_mlx5_queue_state>(qp.state);
}

// Takes the queue out of service; the first reason stays.
SY_DEVICE void fail_queue(const sy_mlx5_qp& qp, uint64_t error) {
    if (atom_cas_relaxed(&state_of(qp).error, 0, error) == 0 && qp.host_error != 0)
        st_relaxed<Scope::kSys>(at_address<uint64_t>(qp.host_error), error);
}

// 0 while the queue is in service.
SY_DEVICE uint64_t queue_error(const sy_mlx5_qp& qp) {
    return ld_relaxed<Scope::kGpu>(&state_of(qp).error);
}

// A NIC cannot have completed a request that was never announced to it.
// NOTES: `posted` is stored before the doorbell, so a reader that sees the completion sees it.
SY_DEVICE bool is_plausible(const sy_mlx5_qp& qp, uint64_t completed) {
    if (completed <= ld_relaxed<Scope::kGpu>(&state_of(qp).posted))
        return true;
    fail_queue(qp, SY_MLX5_DESYNC);
    return false;
}

// The error word of a queue whose completions are not its own.
SY_DEVICE uint64_t foreign(CqeTail tail) {
    return static_cast<uint64_t>(SY_MLX5_DESYNC) | static_cast<uint64_t>(tail.opcode()) << 24 |
           static_cast<uint64_t>(tail.counter()) << 32;
}

// SYNC POINT completion: pairs with the NIC's store of the last bytes of a completion.
//
// Entry 0 always holds the newest completion. The flush of a later request may have overwritten an
// error. Its syndrome is then SY_MLX5_SYNDROME_FLUSHED.
template <Scope kScope> SY_DEVICE uint64_t poll_collapsed(const sy_mlx5_qp& qp) {
    sy_mlx5_queue_state& state = state_of(qp);
    const uint64_t known = ld_acquire<Scope::kGpu>(&state.completed);
    const uint32_t* cqe = cqe_at(qp, 0);
    const CqeTail tail = load_tail<kScope>(cqe);
    if (tail.opcode() == SY_MLX5_CQE_INVALID)
        return known;
    if (tail.is_error()) {
        fence_acq_rel<kScope>();
        fail_queue(qp, error_of<kScope>(cqe, tail));
        return known;
    }
    if (!tail.is_request()) {
        fail_queue(qp, foreign(tail));
        return known;
    }
    const uint64_t completed = completed_after(known, tail.counter());
    if (completed == known)
        return known;
    fence_acq_rel<kScope>();
    if (!is_plausible(qp, completed))
        return known;
    red_max_release(&state.completed, completed);
    return completed;
}

// One thread at a time consumes entries in order; others continue with the known count.
template <Scope kScope> SY_DEVICE uint64_t poll_ring(const sy_mlx5_qp& qp) {
    sy_mlx5_queue_state& state = state_of(qp);
    if (atom_cas_acquire(&state.poll_lock, 0, 1) != 0)
        return ld_acquire<Scope::kGpu>(&state.completed);
    const uint64_t begin = ld_relaxed<Scope::kGpu>(&state.cq_index);
    const uint64_t known = ld_relaxed<Scope::kGpu>(&state.completed);
    uint64_t index = begin;
    uint64_t completed = known;
    while (index - begin < qp.cq_depth) {
        const uint32_t* cqe = cqe_at(qp, index);
        const CqeTail tail = load_tail<kScope>(cqe);
        // The owner bit flips with every round of the ring.
        const uint32_t owner = (index & qp.cq_depth) != 0 ? 1 : 0;
        if (tail.opcode() == SY_MLX5_CQE_INVALID || tail.owner() != owner)
            break;
        if (tail.is_error()) {
            fence_acq_rel<kScope>();
            fail_queue(qp, error_of<kScope>(cqe, tail));
            break;
        }
        if (!tail.is_request()) {
            fail_queue(qp, foreign(tail));
            break;
        }
        completed = completed_after(completed, tail.counter());
        ++index;
    }
    if (index != begin) {
        // NOTES: keeps the reads of the entries ahead of giving them back to the NIC.
        fence_acq_rel<kScope>();
        if (is_plausible(qp, completed)) {
            st_relaxed<kScope>(at_address<uint32_t>(qp.cq_dbrec) + SY_MLX5_CQ_DBREC_CONSUMER,
                               be32(static_cast<uint32_t>(index & 0xffffff)));
            st_relaxed<Scope::kGpu>(&state.cq_index, index);
            st_release<Scope::kGpu>(&state.completed, completed);
        } else {
            completed = known;
        }
    }
    st_release<Scope::kGpu>(&state.poll_lock, 0u);
    return completed;
}

// Polls the completion queue. Returns the number of blocks known to be complete. Errors are in
// queue_error.
template <Scope kScope> SY_DEVICE uint64_t poll(const sy_mlx5_qp& qp) {
    return (qp.flags & SY_MLX5_CQ_COLLAPSED) != 0 ? poll_collapsed<kScope>(qp)
                                                  : poll_ring<kScope>(qp);
}

} // namespace switchyard::comm::mlx5
