// Posts on the queues of a link as kernels do, on this machine's processor.
#include "switchyard/comm/ibgda.h"

using namespace switchyard::comm;

// On every queue in turn, `num` times: puts its piece of the mirror and sets its flag behind it to
// the number of the put. Returns the status that ended it, or SY_MLX5_OK once all is complete.
extern "C" uint32_t sy_post_on_every_queue(const sy_ibgda_peer* peer, uint64_t piece_bytes,
                                           uint64_t flags_offset, uint64_t num) {
    for (uint64_t i = 1; i <= num; ++i)
        for (uint32_t lane = 0; lane < peer->num_qps; ++lane) {
            const uint64_t offset = lane * piece_bytes;
            const Status status = put_signal_nbi_warp(
                peer->qps[lane], {peer->mirror + offset, peer->lkey},
                {peer->remote + offset, peer->rkey}, piece_bytes,
                {peer->remote + flags_offset + lane * 8, peer->rkey}, i, peer->bound);
            if (status != SY_MLX5_OK)
                return status;
        }
    for (uint32_t lane = 0; lane < peer->num_qps; ++lane) {
        const Status status = quiet(peer->qps[lane], peer->bound);
        if (status != SY_MLX5_OK)
            return status;
    }
    return SY_MLX5_OK;
}
