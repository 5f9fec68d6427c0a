/* Work requests, completions and doorbells of mlx5 queues as the hardware reads and writes them,
 * for C11, C++17 and CUDA.
 * All fields wider than a byte are big-endian in memory; the builders of wqe.h swap them.
 * docs/reference/mlx5.md names the sources, and a test compares every byte with the vendor's own header. */
#ifndef SWITCHYARD_COMM_MLX5_FORMAT_H
#define SWITCHYARD_COMM_MLX5_FORMAT_H

#include "switchyard/abi.h"

/* A send queue is a ring of basic blocks; segments are counted in units of 16 bytes. */
#define SY_MLX5_BLOCK_BYTES 64
#define SY_MLX5_SEGMENT_BYTES 16
#define SY_MLX5_CQE_BYTES 64
/* Hardware counts blocks with 16 bits, so half of them is the most that may be outstanding. */
#define SY_MLX5_MIN_DEPTH 128
#define SY_MLX5_MAX_DEPTH 32768
#define SY_MLX5_MAX_MESSAGE_BYTES (UINT32_C(1) << 30)
/* A receive queue is a ring of lists of data segments. Ours have room for one, which ends the list:
 * a write with immediate data uses a receive up and brings it no bytes. */
#define SY_MLX5_RECEIVE_BYTES 16
#define SY_MLX5_MAX_RECEIVES 32768
/* sy_mlx5_data_seg.lkey of the segment that ends a list, with no bytes and address 0 */
#define SY_MLX5_INVALID_LKEY UINT32_C(0x100)

/* sy_mlx5_ctrl_seg.opmod_idx_opcode, bits 7:0 */
#define SY_MLX5_OPCODE_NOP 0x00
#define SY_MLX5_OPCODE_WRITE 0x08
#define SY_MLX5_OPCODE_WRITE_IMM 0x09
#define SY_MLX5_OPCODE_READ 0x10
#define SY_MLX5_OPCODE_ATOMIC_CS 0x11
#define SY_MLX5_OPCODE_ATOMIC_FA 0x12
#define SY_MLX5_OPCODE_MASKED_CS 0x14
#define SY_MLX5_OPCODE_MASKED_FA 0x15
#define SY_MLX5_OPCODE_DUMP 0x23
/* Modifier of the masked atomics, bits 31:24: how wide the operand is. */
#define SY_MLX5_OPMOD_MASKED_4 0x08
#define SY_MLX5_OPMOD_MASKED_8 0x09

/* sy_mlx5_ctrl_seg.fm_ce_se */
#define SY_MLX5_CE_ERROR_ONLY 0x00
#define SY_MLX5_CE_ALWAYS 0x08
#define SY_MLX5_CE_MASK 0x0c
#define SY_MLX5_SE 0x02
#define SY_MLX5_FM_NONE 0x00
#define SY_MLX5_FM_SMALL_FENCE 0x20
#define SY_MLX5_FM_FENCE 0x40 /* waits for earlier READs and atomics of the queue */
#define SY_MLX5_FM_STRONG_ORDER 0x60
#define SY_MLX5_FM_FENCE_AND_SMALL 0x80
#define SY_MLX5_FM_MASK 0xe0

#define SY_MLX5_INLINE_FLAG UINT32_C(0x80000000)
/* The rest of one block after control, address and the inline length. */
#define SY_MLX5_MAX_INLINE_BYTES 28

/* sy_mlx5_cqe.op_own, bits 7:4 */
#define SY_MLX5_CQE_REQ 0x0
#define SY_MLX5_CQE_RESP_WRITE_IMM 0x1
#define SY_MLX5_CQE_REQ_ERROR 0xd
#define SY_MLX5_CQE_RESP_ERROR 0xe
#define SY_MLX5_CQE_INVALID 0xf
/* Byte that a completion queue is filled with before its first use. */
#define SY_MLX5_CQE_FILL 0xff

/* sy_mlx5_error_cqe.syndrome */
#define SY_MLX5_SYNDROME_LOCAL_LENGTH 0x01
#define SY_MLX5_SYNDROME_LOCAL_QP_OP 0x02
#define SY_MLX5_SYNDROME_LOCAL_PROTECTION 0x04
#define SY_MLX5_SYNDROME_FLUSHED 0x05
#define SY_MLX5_SYNDROME_MW_BIND 0x06
#define SY_MLX5_SYNDROME_BAD_RESPONSE 0x10
#define SY_MLX5_SYNDROME_LOCAL_ACCESS 0x11
#define SY_MLX5_SYNDROME_REMOTE_INVALID 0x12
#define SY_MLX5_SYNDROME_REMOTE_ACCESS 0x13
#define SY_MLX5_SYNDROME_REMOTE_OP 0x14
#define SY_MLX5_SYNDROME_RETRY_EXCEEDED 0x15
#define SY_MLX5_SYNDROME_RNR_EXCEEDED 0x16
#define SY_MLX5_SYNDROME_REMOTE_ABORTED 0x22

typedef struct sy_mlx5_ctrl_seg {
    uint32_t opmod_idx_opcode; /* opmod << 24 | index << 8 | opcode */
    uint32_t qpn_ds; /* queue pair << 8 | segments, control included */
    uint8_t signature;
    uint8_t stream_channel[2];
    uint8_t fm_ce_se;
    uint32_t imm;
} sy_mlx5_ctrl_seg;

typedef struct sy_mlx5_raddr_seg {
    uint64_t raddr;
    uint32_t rkey;
    uint32_t reserved;
} sy_mlx5_raddr_seg;

typedef struct sy_mlx5_data_seg {
    uint32_t byte_count;
    uint32_t lkey;
    uint64_t addr;
} sy_mlx5_data_seg;

typedef struct sy_mlx5_atomic_seg {
    uint64_t swap_add;
    uint64_t compare;
} sy_mlx5_atomic_seg;

/* A set bit of `boundary` keeps the carry of that bit from the next one. */
typedef struct sy_mlx5_masked_fa4_seg {
    uint32_t add;
    uint32_t boundary;
    uint64_t reserved;
} sy_mlx5_masked_fa4_seg;

typedef struct sy_mlx5_masked_fa8_seg {
    uint64_t add;
    uint64_t boundary;
} sy_mlx5_masked_fa8_seg;

typedef struct sy_mlx5_cqe {
    uint8_t reserved0[32];
    uint32_t user_index;
    uint32_t imm;
    uint8_t reserved1[4];
    uint32_t byte_count;
    uint64_t timestamp;
    uint32_t opcode_qpn; /* opcode of the work request << 24 | queue pair */
    uint16_t wqe_counter; /* index of the work request's first block, or of the receive */
    uint8_t signature;
    uint8_t op_own;
} sy_mlx5_cqe;

typedef struct sy_mlx5_error_cqe {
    uint8_t reserved0[54];
    uint8_t vendor_syndrome;
    uint8_t syndrome;
    uint32_t opcode_qpn;
    uint16_t wqe_counter;
    uint8_t signature;
    uint8_t op_own;
} sy_mlx5_error_cqe;

/* Doorbell records: two words each. */
#define SY_MLX5_DBREC_RECEIVE 0
#define SY_MLX5_DBREC_SEND 1
#define SY_MLX5_CQ_DBREC_CONSUMER 0

SY_STATIC_ASSERT(sizeof(sy_mlx5_ctrl_seg) == 16, "size of sy_mlx5_ctrl_seg");
SY_STATIC_ASSERT(offsetof(sy_mlx5_ctrl_seg, fm_ce_se) == 11, "fm_ce_se of sy_mlx5_ctrl_seg");
SY_STATIC_ASSERT(sizeof(sy_mlx5_raddr_seg) == 16, "size of sy_mlx5_raddr_seg");
SY_STATIC_ASSERT(sizeof(sy_mlx5_data_seg) == 16, "size of sy_mlx5_data_seg");
SY_STATIC_ASSERT(sizeof(sy_mlx5_atomic_seg) == 16, "size of sy_mlx5_atomic_seg");
SY_STATIC_ASSERT(sizeof(sy_mlx5_masked_fa4_seg) == 16, "size of sy_mlx5_masked_fa4_seg");
SY_STATIC_ASSERT(sizeof(sy_mlx5_masked_fa8_seg) == 16, "size of sy_mlx5_masked_fa8_seg");
SY_STATIC_ASSERT(sizeof(sy_mlx5_cqe) == SY_MLX5_CQE_BYTES, "size of sy_mlx5_cqe");
SY_STATIC_ASSERT(offsetof(sy_mlx5_cqe, user_index) == 32, "user_index of sy_mlx5_cqe");
SY_STATIC_ASSERT(offsetof(sy_mlx5_cqe, imm) == 36, "imm of sy_mlx5_cqe");
SY_STATIC_ASSERT(offsetof(sy_mlx5_cqe, byte_count) == 44, "byte_count of sy_mlx5_cqe");
SY_STATIC_ASSERT(offsetof(sy_mlx5_cqe, wqe_counter) == 60, "wqe_counter of sy_mlx5_cqe");
SY_STATIC_ASSERT(sizeof(sy_mlx5_error_cqe) == SY_MLX5_CQE_BYTES, "size of sy_mlx5_error_cqe");
SY_STATIC_ASSERT(offsetof(sy_mlx5_error_cqe, syndrome) == 55, "syndrome of sy_mlx5_error_cqe");
SY_STATIC_ASSERT(offsetof(sy_mlx5_error_cqe, op_own) == 63, "op_own of sy_mlx5_error_cqe");

#endif /* SWITCHYARD_COMM_MLX5_FORMAT_H */
