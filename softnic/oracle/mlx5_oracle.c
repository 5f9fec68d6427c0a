/* What the vendor's header makes of work requests and completions, for tests/it/oracle.rs.
 *
 * Reads one question per line from stdin and answers each with one line:
 *
 * wqe KIND QPN INDEX FLAGS LKEY LOCAL REMOTE RKEY NUM_BYTES VALUE BOUNDARY HEX: 64 bytes in hex
 *
 * cqe HEX: opcode owner qpn wqe_opcode counter imm num_bytes syndrome vendor
 *
 * receive: 16 bytes in hex, a receive that takes no bytes
 *
 * doorbell QPN END: the 8 bytes of the doorbell register and the 8 of the doorbell record when all
 * blocks before END are written, in hex
 *
 * value NAME: a constant of the header
 *
 * Numbers are hexadecimal. Kinds are numbered as in driver/src/lib.rs.
 */
#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/mlx5dv.h>

struct question {
    unsigned kind, qpn, index, flags, lkey, rkey, num_bytes;
    uint64_t local, remote, value, boundary;
    uint8_t bytes[64];
};

static void unhex(const char* text, uint8_t* bytes, size_t capacity) {
    unsigned byte;
    for (size_t i = 0; i < capacity && sscanf(text + 2 * i, "%2x", &byte) == 1; ++i)
        bytes[i] = (uint8_t)byte;
}

static void print_hex(const void* bytes, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; ++i)
        printf("%02x", ((const uint8_t*)bytes)[i]);
}

static void set_control(void* wqe, const struct question* q, uint8_t opcode, uint8_t opmod,
                        uint8_t num_segments, uint32_t imm) {
    mlx5dv_set_ctrl_seg(wqe, (uint16_t)q->index, opcode, opmod, q->qpn, (uint8_t)q->flags,
                        num_segments, 0, imm);
}

static void set_remote(uint8_t* wqe, const struct question* q) {
    struct mlx5_wqe_raddr_seg* segment = (void*)(wqe + sizeof(struct mlx5_wqe_ctrl_seg));
    segment->raddr = htobe64(q->remote);
    segment->rkey = htobe32(q->rkey);
    segment->reserved = 0;
}

static void set_data(uint8_t* segment, const struct question* q, uint32_t num_bytes) {
    mlx5dv_set_data_seg((void*)segment, num_bytes, q->lkey, (uintptr_t)q->local);
}

static void set_inline(uint8_t* segment, const void* bytes, uint32_t num_bytes) {
    struct mlx5_wqe_inl_data_seg* head = (void*)segment;
    head->byte_count = htobe32(num_bytes | MLX5_INLINE_SEG);
    memcpy(head + 1, bytes, num_bytes);
}

static void answer_wqe(const struct question* q) {
    uint8_t wqe[64] = {0};
    uint8_t* const third = wqe + 32;
    uint64_t word;
    uint32_t half;
    switch (q->kind) {
    case 0:
        set_control(wqe, q, MLX5_OPCODE_NOP, 0, 1, 0);
        break;
    case 1: /* DUMP has no name in the header. */
        set_control(wqe, q, 0x23, 0, 2, 0);
        set_data(wqe + 16, q, q->num_bytes);
        break;
    case 2:
        set_control(wqe, q, MLX5_OPCODE_RDMA_WRITE, 0, 3, 0);
        set_remote(wqe, q);
        set_data(third, q, q->num_bytes);
        break;
    case 3: /* The value as this processor has it in memory. */
        set_control(wqe, q, MLX5_OPCODE_RDMA_WRITE, 0, 3, 0);
        set_remote(wqe, q);
        word = q->value;
        set_inline(third, &word, q->num_bytes);
        break;
    case 4:
    case 10: /* The bytes are the words. */
        set_control(wqe, q, MLX5_OPCODE_RDMA_WRITE, 0, (uint8_t)(2 + (4 + q->num_bytes + 15) / 16),
                    0);
        set_remote(wqe, q);
        set_inline(third, q->bytes, q->num_bytes);
        break;
    case 5:
        set_control(wqe, q, MLX5_OPCODE_RDMA_WRITE_IMM, 0, q->num_bytes != 0 ? 3 : 2,
                    htobe32((uint32_t)q->value));
        set_remote(wqe, q);
        if (q->num_bytes != 0)
            set_data(third, q, q->num_bytes);
        break;
    case 6:
        set_control(wqe, q, MLX5_OPCODE_RDMA_READ, 0, 3, 0);
        set_remote(wqe, q);
        set_data(third, q, q->num_bytes);
        break;
    case 7:
        set_control(wqe, q, MLX5_OPCODE_ATOMIC_FA, 0, 4, 0);
        set_remote(wqe, q);
        ((struct mlx5_wqe_atomic_seg*)third)->swap_add = htobe64(q->value);
        set_data(wqe + 48, q, 8);
        break;
    /* Operands of masked atomics have no structure in the header: for them this is a second
     * transcription of the format and not the vendor's. */
    case 8:
        set_control(wqe, q, MLX5_OPCODE_ATOMIC_MASKED_FA, 8, 4, 0);
        set_remote(wqe, q);
        half = htobe32((uint32_t)q->value);
        memcpy(third, &half, 4);
        half = htobe32((uint32_t)q->boundary);
        memcpy(third + 4, &half, 4);
        set_data(wqe + 48, q, 4);
        break;
    case 9:
        set_control(wqe, q, MLX5_OPCODE_ATOMIC_MASKED_FA, 9, 4, 0);
        set_remote(wqe, q);
        word = htobe64(q->value);
        memcpy(third, &word, 8);
        word = htobe64(q->boundary);
        memcpy(third + 8, &word, 8);
        set_data(wqe + 48, q, 8);
        break;
    default:
        puts("unknown kind");
        return;
    }
    print_hex(wqe, sizeof(wqe));
    putchar('\n');
}

static void answer_cqe(uint8_t* bytes) {
    struct mlx5_cqe64* cqe = (void*)bytes;
    const struct mlx5_err_cqe* error = (void*)bytes;
    const uint32_t opcode_qpn = be32toh(cqe->sop_drop_qpn);
    printf("%x %x %x %x %x %x %x %x %x\n", mlx5dv_get_cqe_opcode(cqe), mlx5dv_get_cqe_owner(cqe),
           opcode_qpn & 0xffffff, opcode_qpn >> 24, be16toh(cqe->wqe_counter),
           be32toh(cqe->imm_inval_pkey), be32toh(cqe->byte_cnt), error->syndrome,
           error->vendor_err_synd);
}

/* One segment that ends the list immediately. */
static void answer_receive(void) {
    struct mlx5_wqe_data_seg last;
    mlx5dv_set_data_seg(&last, 0, MLX5_INVALID_LKEY, 0);
    print_hex(&last, sizeof(last));
    putchar('\n');
}

/* The register gets the first two words of a control segment, here of one without a request: an index
 * and a queue pair. The record gets the index in its word for sends. */
static void answer_doorbell(unsigned qpn, unsigned end) {
    struct mlx5_wqe_ctrl_seg control;
    uint32_t record[2] = {0, 0};
    mlx5dv_set_ctrl_seg(&control, (uint16_t)end, 0, 0, qpn, 0, 0, 0, 0);
    record[MLX5_SND_DBR] = htobe32((uint16_t)end);
    print_hex(&control, 8);
    putchar(' ');
    print_hex(record, sizeof(record));
    putchar('\n');
}

#define CONSTANT(name) {#name, (uint32_t)(name)}
static const struct {
    const char* name;
    uint32_t value;
} constants[] = {
    CONSTANT(MLX5_OPCODE_NOP),
    CONSTANT(MLX5_OPCODE_RDMA_WRITE),
    CONSTANT(MLX5_OPCODE_RDMA_WRITE_IMM),
    CONSTANT(MLX5_OPCODE_RDMA_READ),
    CONSTANT(MLX5_OPCODE_ATOMIC_CS),
    CONSTANT(MLX5_OPCODE_ATOMIC_FA),
    CONSTANT(MLX5_OPCODE_ATOMIC_MASKED_CS),
    CONSTANT(MLX5_OPCODE_ATOMIC_MASKED_FA),
    CONSTANT(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_LOCAL_PROT_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_WR_FLUSH_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_MW_BIND_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_BAD_RESP_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_REMOTE_OP_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR),
    CONSTANT(MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR),
    CONSTANT(MLX5_SND_DBR),
    CONSTANT(MLX5_RCV_DBR),
    CONSTANT(MLX5_SEND_WQE_BB),
    CONSTANT(MLX5_WQE_CTRL_CQ_UPDATE),
    CONSTANT(MLX5_CQE_RESP_WR_IMM),
    CONSTANT(MLX5_CQE_RESP_ERR),
    CONSTANT(MLX5_CQE_REQ_ERR),
};

static void answer_value(const char* name) {
    for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); ++i)
        if (strcmp(constants[i].name, name) == 0) {
            printf("%x\n", constants[i].value);
            return;
        }
    puts("unknown constant");
}

int main(void) {
    char line[1024], text[256];
    while (fgets(line, sizeof(line), stdin) != NULL) {
        struct question q;
        memset(&q, 0, sizeof(q));
        if (sscanf(line,
                   "wqe %x %x %x %x %x %" SCNx64 " %" SCNx64 " %x %x %" SCNx64 " %" SCNx64 " %255s",
                   &q.kind, &q.qpn, &q.index, &q.flags, &q.lkey, &q.local, &q.remote, &q.rkey,
                   &q.num_bytes, &q.value, &q.boundary, text) == 12) {
            unhex(text, q.bytes, sizeof(q.bytes));
            answer_wqe(&q);
        } else if (sscanf(line, "cqe %255s", text) == 1) {
            unhex(text, q.bytes, sizeof(q.bytes));
            answer_cqe(q.bytes);
        } else if (sscanf(line, "doorbell %x %x", &q.qpn, &q.index) == 2) {
            answer_doorbell(q.qpn, q.index);
        } else if (strncmp(line, "receive", 7) == 0) {
            answer_receive();
        } else if (sscanf(line, "value %255s", text) == 1) {
            answer_value(text);
        } else {
            puts("unknown question");
        }
    }
    return 0;
}
