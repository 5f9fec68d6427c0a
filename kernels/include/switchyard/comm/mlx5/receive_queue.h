/* The receives of a queue pair as readers of immediate data see them, for C11, C++17 and CUDA.
 * The host fills a sy_mlx5_rq when the queue pair is made, and writes and posts the receives
 * when it is connected. All are equal and never change: a reader that takes one posts it again
 * by counting it. */
#ifndef SWITCHYARD_COMM_MLX5_RECEIVE_QUEUE_H
#define SWITCHYARD_COMM_MLX5_RECEIVE_QUEUE_H

#include "switchyard/comm/mlx5/queue.h"

/* Shared state of readers. One of them takes at a time. */
typedef struct sy_mlx5_rq_state {
    uint64_t cq_index; /* completions consumed since the completion queue was made */
    uint64_t taken; /* receives used and taken since the queue pair was reset */
    uint32_t lock;
    uint32_t reserved;
    uint64_t error; /* as in sy_mlx5_queue_state; its counter is that of the receive */
    uint8_t pad[96];
} sy_mlx5_rq_state;

typedef struct sy_mlx5_rq {
    uint64_t dbrec; /* address of the queue pair's doorbell record */
    uint64_t cq; /* address of the first completion of receives, which has no other use */
    uint64_t cq_dbrec; /* address of that completion queue's doorbell record */
    uint64_t state; /* address of a sy_mlx5_rq_state */
    uint32_t qpn;
    uint32_t cq_depth; /* completions, a power of two */
    uint32_t num_receives; /* posted at any time, at most as many as there are completions */
    uint32_t peer; /* for error words */
} sy_mlx5_rq;

/* Name of the error in receives, or null. The host calls it before it hands them out. */
static inline const char* sy_mlx5_check_rq(const sy_mlx5_rq* rq) {
    if (rq->num_receives == 0 || rq->num_receives > SY_MLX5_MAX_RECEIVES)
        return "num_receives is not from 1 to 32768";
    if (rq->cq_depth < rq->num_receives || rq->cq_depth > UINT32_C(1) << 22 ||
        (rq->cq_depth & (rq->cq_depth - 1)) != 0)
        return "cq_depth is not a power of two from num_receives to 4194304";
    if (rq->cq == 0 || rq->cq % SY_MLX5_CQE_BYTES != 0)
        return "cq is null or not aligned to 64 bytes";
    if (rq->dbrec == 0 || rq->dbrec % 8 != 0 || rq->cq_dbrec == 0 || rq->cq_dbrec % 8 != 0)
        return "dbrec or cq_dbrec is null or not aligned to 8 bytes";
    if (rq->state == 0 || rq->state % 8 != 0)
        return "state is null or not aligned to 8 bytes";
    if (rq->qpn == 0 || rq->qpn > 0xffffff)
        return "qpn is 0 or has more than 24 bits";
    return 0;
}

SY_STATIC_ASSERT(sizeof(sy_mlx5_rq_state) == 128, "size of sy_mlx5_rq_state");
SY_STATIC_ASSERT(offsetof(sy_mlx5_rq_state, taken) == 8, "taken");
SY_STATIC_ASSERT(offsetof(sy_mlx5_rq_state, lock) == 16, "lock");
SY_STATIC_ASSERT(offsetof(sy_mlx5_rq_state, error) == 24, "error");
SY_STATIC_ASSERT(sizeof(sy_mlx5_rq) == 48, "size of sy_mlx5_rq");
SY_STATIC_ASSERT(offsetof(sy_mlx5_rq, qpn) == 32, "qpn of sy_mlx5_rq");

#endif /* SWITCHYARD_COMM_MLX5_RECEIVE_QUEUE_H */
