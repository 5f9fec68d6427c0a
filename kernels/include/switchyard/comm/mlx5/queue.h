/* A send queue as its posters see it, for C11, C++17 and CUDA. The host fills a sy_mlx5_qp when
 * the queue pair is connected. Posters share it and change only the words behind `state` and
 * `host_error`. */
#ifndef SWITCHYARD_COMM_MLX5_QUEUE_H
#define SWITCHYARD_COMM_MLX5_QUEUE_H

#include "switchyard/comm/mlx5/format.h"
#include "switchyard/device_abi.h"

/* sy_mlx5_qp.flags */
/* The NIC writes every completion to entry 0, over the one before. */
#define SY_MLX5_CQ_COLLAPSED UINT32_C(1)
/* Concurrent posters are of one thread block: turns are passed within the block, which saves
 * each post a fence of the GPU. Kernels that post one after the other are ordered by their
 * stream, and need nothing more. */
#define SY_MLX5_ONE_BLOCK UINT32_C(2)
/* The NIC goes by the doorbell register alone and reads no record of requests (`send_dbr_mode` 1), which
 * spares each doorbell a fence of the system. The queue pair was made so, and `doorbell` is the register
 * that does not lose any. */
#define SY_MLX5_NO_RECORD UINT32_C(4)

/* Result of a call on a queue. Every value except OK and ARGUMENT means that the queue is out of
 * service until the host has reset it. After ARGUMENT nothing was posted. Fused kernels, whose
 * calls return nothing, take the queue out of service for ARGUMENT, too. So does a post that has
 * reserved blocks for an invalid request. */
#define SY_MLX5_OK 0
#define SY_MLX5_TIMEOUT 1 /* a wait reached its bound */
#define SY_MLX5_ABORTED 2 /* the host set the peer's bit in the abort mask */
#define SY_MLX5_COMPLETION 3 /* the NIC completed a work request with an error */
#define SY_MLX5_DESYNC 4 /* the NIC completed a request that was never posted here */
#define SY_MLX5_ARGUMENT 5 /* too long for the queue, misaligned, outside of the peer's slot, or */
/* a queue to oneself on which others have blocks that are not published */

/* sy_mlx5_queue_state.error: the first error that took the queue out of service, 0 while there
 * is none. The fields after the code are those of the error completion. */
#define SY_MLX5_ERROR_CODE(word) ((uint32_t)((word) & 0xff))
#define SY_MLX5_ERROR_SYNDROME(word) ((uint32_t)((word) >> 8 & 0xff))
#define SY_MLX5_ERROR_VENDOR(word) ((uint32_t)((word) >> 16 & 0xff))
#define SY_MLX5_ERROR_OPCODE(word) ((uint32_t)((word) >> 24 & 0xff))
#define SY_MLX5_ERROR_COUNTER(word) ((uint32_t)((word) >> 32 & 0xffff))

/* sy_error_word.tag of waits on a queue */
#define SY_TAG_MLX5_SLOT 32 /* room in the send queue; observed: completed blocks */
#define SY_TAG_MLX5_TURN 33 /* earlier reservations; observed: published blocks */
#define SY_TAG_MLX5_QUIET 34 /* completions; observed: completed blocks */
#define SY_TAG_MLX5_COMPLETION 35 /* observed: sy_mlx5_queue_state.error */
#define SY_TAG_MLX5_DESYNC 36 /* observed: blocks said to be complete; expected: posted ones; or */
/* observed: sy_mlx5_queue_state.error, with an opcode that is no request's */
#define SY_TAG_MLX5_ARGUMENT 37 /* observed: offset outside of the peer's slot; expected: length */
#define SY_TAG_MLX5_RECEIVE 38 /* immediate data; observed: receives used; expected: one more */

/* All counts are of basic blocks since the queue was reset. Each word stands on a line of its own,
 * since different warps write them at the same time. */
typedef struct sy_mlx5_queue_state {
    uint64_t reserved; /* blocks given to a poster */
    uint8_t pad0[120];
    uint64_t
        published; /* blocks written, in the order of their reservation: selects the next poster */
    uint64_t posted; /* blocks announced to the NIC; written by the poster whose turn it is */
    uint8_t pad1[112];
    uint64_t completed; /* blocks known to be complete */
    uint8_t pad2[120];
    uint64_t cq_index; /* completions consumed; ordinary completion queues only */
    uint32_t poll_lock; /* ordinary completion queues only */
    uint8_t pad3[116];
    uint64_t error;
    /* Beside a word that posters read: it changes every two microseconds at most. */
    uint64_t
        polled_at; /* time of the last poll of completions by a thread that waits for something else */
    uint8_t pad4[112];
} sy_mlx5_queue_state;

typedef struct sy_mlx5_qp {
    uint64_t sq; /* address of the first basic block */
    uint64_t dbrec; /* address of the queue pair's doorbell record */
    uint64_t doorbell; /* address of the doorbell register */
    uint64_t cq; /* address of the first completion, filled with SY_MLX5_CQE_FILL */
    uint64_t cq_dbrec; /* address of the completion queue's doorbell record */
    uint64_t state; /* address of a sy_mlx5_queue_state, zeroed */
    uint64_t scratch; /* address of 8 bytes where the old values of adds land unread */
    uint64_t
        host_error; /* 0, or address of a word of host memory that gets `error` of the state, too */
    uint32_t scratch_lkey;
    uint32_t qpn;
    uint32_t sq_depth; /* basic blocks, a power of two */
    uint32_t cq_depth; /* completions, a power of two; 1 if collapsed */
    uint32_t flags;
    uint32_t batch; /* the doorbell rings at the latest when this number of blocks waits for it */
    uint32_t max_message_bytes;
    uint32_t peer; /* for error words */
} sy_mlx5_qp;

typedef struct sy_mlx5_bound {
    sy_error_word* error; /* null, or where the first expired wait is recorded */
    const uint32_t* abort_mask; /* null, or mapped host memory: bit `peer` ends every wait */
    uint64_t timeout_ns; /* of a single wait */
} sy_mlx5_bound;

/* A peer's slot and the queues to it. Blocks of a kernel choose a queue by their index, so that
 * a block's puts and the flag after them use the same queue. */
typedef struct sy_ibgda_peer {
    const sy_mlx5_qp* qps;
    uint64_t mirror; /* local copy of the slot, where kernels store data before they put it */
    uint64_t remote; /* address of the slot at the peer */
    uint64_t slot_bytes;
    uint32_t lkey; /* of the mirror */
    uint32_t rkey; /* of the slot */
    uint32_t num_qps;
    uint32_t reserved;
    sy_mlx5_bound bound;
} sy_ibgda_peer;

/* Name of the error in a queue, or null. The host calls it before it hands the queue out. */
static inline const char* sy_mlx5_check_qp(const sy_mlx5_qp* qp) {
    const int is_collapsed = (qp->flags & SY_MLX5_CQ_COLLAPSED) != 0;
    if ((qp->flags & ~(SY_MLX5_CQ_COLLAPSED | SY_MLX5_ONE_BLOCK | SY_MLX5_NO_RECORD)) != 0)
        return "flags has unknown bits";
    if (qp->sq_depth < SY_MLX5_MIN_DEPTH || qp->sq_depth > SY_MLX5_MAX_DEPTH)
        return "sq_depth is not from 128 to 32768";
    if ((qp->sq_depth & (qp->sq_depth - 1)) != 0)
        return "sq_depth is not a power of two";
    if (is_collapsed ? qp->cq_depth != 1
                     : qp->cq_depth < qp->sq_depth || (qp->cq_depth & (qp->cq_depth - 1)) != 0)
        return "cq_depth is neither 1 and collapsed nor a power of two of at least sq_depth";
    if (qp->sq == 0 || qp->sq % SY_MLX5_BLOCK_BYTES != 0)
        return "sq is null or not aligned to 64 bytes";
    if (qp->cq == 0 || qp->cq % SY_MLX5_CQE_BYTES != 0)
        return "cq is null or not aligned to 64 bytes";
    if (qp->dbrec == 0 || qp->dbrec % 8 != 0 || qp->doorbell == 0 || qp->doorbell % 8 != 0)
        return "dbrec or doorbell is null or not aligned to 8 bytes";
    if (!is_collapsed && (qp->cq_dbrec == 0 || qp->cq_dbrec % 8 != 0))
        return "cq_dbrec is null or not aligned to 8 bytes";
    if (qp->state == 0 || qp->state % 8 != 0 || qp->scratch % 8 != 0)
        return "state is null, or state or scratch is not aligned to 8 bytes";
    if (qp->host_error % 8 != 0)
        return "host_error is not aligned to 8 bytes";
    if (qp->batch == 0 || qp->batch > qp->sq_depth / 4)
        return "batch is 0 or beyond a quarter of sq_depth";
    if (qp->max_message_bytes == 0 || qp->max_message_bytes > SY_MLX5_MAX_MESSAGE_BYTES)
        return "max_message_bytes is 0 or beyond 1 GiB";
    if (qp->qpn == 0 || qp->qpn > 0xffffff)
        return "qpn is 0 or has more than 24 bits";
    return 0;
}

/* Name of the error in a peer, or null: blocks of kernels divide by its number of queues, and
 * read its table of them. The host calls it before it hands the peer out, and sy_mlx5_check_qp
 * for each of its queues. */
static inline const char* sy_ibgda_check_peer(const sy_ibgda_peer* peer) {
    const uintptr_t qps = (uintptr_t)peer->qps;
    if (peer->num_qps == 0)
        return "num_qps is 0";
    if (qps == 0 || qps % 8 != 0)
        return "qps is null or not aligned to 8 bytes";
    if (peer->mirror == 0 || peer->mirror % 64 != 0)
        return "mirror is null or not aligned to 64 bytes";
    if (peer->remote == 0 || peer->remote % 64 != 0)
        return "remote is null or not aligned to 64 bytes";
    if (peer->slot_bytes == 0)
        return "slot_bytes is 0";
    if (peer->slot_bytes > UINT64_MAX - peer->remote ||
        peer->slot_bytes > UINT64_MAX - peer->mirror)
        return "slot_bytes reaches beyond the last address";
    return 0;
}

SY_STATIC_ASSERT(sizeof(sy_mlx5_queue_state) == 640, "size of sy_mlx5_queue_state");
SY_STATIC_ASSERT(offsetof(sy_mlx5_queue_state, completed) == 256, "completed");
SY_STATIC_ASSERT(offsetof(sy_mlx5_queue_state, error) == 512, "error");
SY_STATIC_ASSERT(offsetof(sy_mlx5_queue_state, polled_at) == 520, "polled_at");
SY_STATIC_ASSERT(sizeof(sy_mlx5_qp) == 96, "size of sy_mlx5_qp");
SY_STATIC_ASSERT(offsetof(sy_mlx5_qp, qpn) == 68, "qpn of sy_mlx5_qp");
SY_STATIC_ASSERT(offsetof(sy_mlx5_qp, host_error) == 56, "host_error of sy_mlx5_qp");
SY_STATIC_ASSERT(sizeof(sy_mlx5_bound) == 24, "size of sy_mlx5_bound");
SY_STATIC_ASSERT(sizeof(sy_ibgda_peer) == 72, "size of sy_ibgda_peer");

#endif /* SWITCHYARD_COMM_MLX5_QUEUE_H */
