// Announcement of new requests to the NIC.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/memory.h"

namespace switchyard::comm::mlx5 {

// The word for the doorbell register: be32(end << 8) and be32(qpn << 8) in this order in memory.
SY_DEVICE uint64_t doorbell_word(uint32_t qpn, uint64_t end) {
    const uint32_t first = be32(static_cast<uint32_t>(end & 0xffff) << 8);
    return static_cast<uint64_t>(be32(qpn << 8)) << 32 | first;
}

// The word for the send half of the doorbell record.
SY_DEVICE uint32_t dbrec_word(uint64_t end) { return be32(static_cast<uint32_t>(end & 0xffff)); }

// Announces all blocks before `end` to the NIC. Called by one thread at a time per queue.
//
// SYNC POINT doorbell: pairs with the NIC's reads of the register, the record and the queue.
// NOTES: the order is blocks, record, register. The first fence also covers blocks of other warps,
// which this thread acquired with its turn. Without the second one the NIC may read a record older
// than the doorbell, which it does when it recovers from a lost one. Where it reads no record, none
// can be older.
template <Scope kScope> SY_DEVICE void ring_doorbell(const sy_mlx5_qp& qp, uint64_t end) {
    fence_acq_rel<kScope>();
    if ((qp.flags & SY_MLX5_NO_RECORD) == 0) {
        st_relaxed<kScope>(at_address<uint32_t>(qp.dbrec) + SY_MLX5_DBREC_SEND, dbrec_word(end));
        fence_acq_rel<kScope>();
    }
    st_mmio(at_address<uint64_t>(qp.doorbell), doorbell_word(qp.qpn, end));
}

} // namespace switchyard::comm::mlx5
