/* A stand-in for libibverbs and libmlx5 that makes queues in ordinary memory and records its
 * input, so that the control path runs on hosts without a NIC. It is compiled against the
 * vendor's headers, which fixes every structure. It decodes the firmware's commands with a
 * second transcription of mlx5_ifc.h, field by field as bit structures, independent of the one
 * in Rust.
 * Not tested: whether a firmware accepts the commands. */
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The macros of verbs.h would bypass the functions that are defined here. */
#undef ibv_query_port
#undef ibv_reg_mr

#define u8 uint8_t

struct mlx5_ifc_path_bits {
    u8 fl[1], free_ar[1], r0[14], pkey_index[16];
    u8 plane[8], grh[1], mlid[7], rlid[16];
    u8 ack_timeout[5], r1[3], src_addr_index[8], r2[4], stat_rate[4], hop_limit[8];
    u8 r3[4], tclass[8], flow_label[20];
    u8 rgid[16 * 8];
    u8 r4[4], f_dscp[1], f_ecn[1], r5[1], f_eth_prio[1], ecn[2], dscp[6], udp_sport[16];
    u8 dei_cfi[1], eth_prio[3], sl[4], vhca_port_num[8], rmac_47_32[16];
    u8 rmac_31_0[32];
};

struct mlx5_ifc_context_bits {
    u8 state[4], lag[4], st[8], r0[3], pm_state[2], r1[1], credits[2], offload[4], padding[2],
        r2[2];
    u8 wq_signature[1], block_lb[1], atomic_like[1], latency[1], r3[1], drain[1], r4[2], pd[24];
    u8 mtu[3], log_msg_max[5], r5[1], log_rq_size[4], log_rq_stride[3], no_sq[1], log_sq_size[4],
        r6[6], rlky[1], ulp[4];
    u8 counter_set[8], uar_page[24];
    u8 send_dbr_mode[2], r7[1], full_handshake[1], cnak_reverse_sl[4], user_index[24];
    u8 r8[3], log_page_size[5], remote_qpn[24];
    struct mlx5_ifc_path_bits primary, secondary;
    u8 log_ack_req[4], r9[4], log_sra_max[3], r10[2], retry_count[3], rnr_retry[3], r11[1], fre[1],
        cur_rnr[3], cur_retry[3], r12[5];
    u8 r13[32];
    u8 r14[8], next_send_psn[24];
    u8 r15[8], cqn_snd[24];
    u8 r16[8], deth_sqpn[24];
    u8 r17[32];
    u8 r18[8], last_acked_psn[24];
    u8 r19[8], ssn[24];
    u8 r20[8], log_rra_max[3], r21[1], atomic_mode[4], rre[1], rwe[1], rae[1], r22[1],
        page_offset[6], r23[3], cd[3];
    u8 r24[3], min_rnr_nak[5], next_rcv_psn[24];
    u8 r25[8], xrcd[24];
    u8 r26[8], cqn_rcv[24];
    u8 dbr_addr[64];
    u8 q_key[32];
    u8 r27[5], rq_type[3], srqn[24];
    u8 r28[8], rmsn[24];
    u8 hw_sq[16], sw_sq[16];
    u8 hw_rq[32], sw_rq[32];
    u8 r29[32];
    u8 r30[15], cgs[1], cs_req[8], cs_res[8];
    u8 dc_access_key[64];
    u8 r31[3], dbr_umem_valid[1], r32[156];
    u8 dbr_umem_id[32];
};

struct mlx5_ifc_create_bits {
    u8 opcode[16], uid[16], r0[16], op_mod[16], r1[64], opt_param_mask[32], ece[32];
    struct mlx5_ifc_context_bits qpc;
    u8 wq_umem_offset[64], wq_umem_id[32], wq_umem_valid[1], r2[31];
};

struct mlx5_ifc_change_bits {
    u8 opcode[16], uid[16], r0[16], op_mod[16], r1[8], qpn[24], r2[32], opt_param_mask[32], ece[32];
    struct mlx5_ifc_context_bits qpc;
    u8 r3[128];
};

struct mlx5_ifc_ring_bits {
    u8 status[4], as_notify[1], r0[1], dbr_umem_valid[1], r1[1], cqe_sz[3], cc[1], r2[1],
        break_moderation[1], oi[1], period_mode[2], comp_en[1], mini[2], st[4], r3[8];
    u8 dbr_umem_id[32];
    u8 r4[20], page_offset[6], r5[6];
    u8 r6[3], log_cq_size[5], uar_page[24];
    u8 r7[4], period[12], max_count[16];
    u8 c_eqn[32];
    u8 r8[3], log_page_size[5], r9[24];
    u8 r10[7 * 32];
    u8 dbr_addr[64];
};

struct mlx5_ifc_create_ring_bits {
    u8 opcode[16], uid[16], r0[16], op_mod[16], r1[64];
    struct mlx5_ifc_ring_bits cqc;
    u8 cq_umem_offset[64], cq_umem_id[32], cq_umem_valid[1], r2[31];
};

_Static_assert(sizeof(struct mlx5_ifc_path_bits) == 0x160, "bits of a path");
_Static_assert(sizeof(struct mlx5_ifc_context_bits) == 0x740, "bits of a context");
_Static_assert(sizeof(struct mlx5_ifc_ring_bits) == 0x200, "bits of a completion context");

/* Settings and records of a test. */
struct mock {
    int32_t num_live; /* objects that were made and not given back */
    int32_t num_failures; /* how many calls succeed before `fail_code` is returned; -1: all */
    int32_t fail_code;
    uint32_t has_devx, has_dma_buf, has_peer_memory, port_state, link_layer, sq_stride, cqe_version,
        atomic_operations, firmware_status;
    /* has_peer_memory: 1, or 2 for registrations but not for queues */
    uint32_t last_error; /* line of the first error in the input, 0 if none */
    uint32_t num_relaxed; /* registrations with relaxed ordering */
    uint32_t num_exposed; /* registrations that a peer may use */
    uint32_t atomic_cap, max_reads; /* of the device, as ibv_query_device says */
    uint32_t sq_skip; /* bytes from a block's boundary to where queues of verbs begin */
    uint32_t has_vector; /* whether address handles have an address vector */
    uint32_t part_id, num_ports; /* ports beyond the first are down */
    uint32_t max_blocks, log_max_blocks; /* as ibv_query_device and the firmware say */
    uint32_t rq_stride; /* bytes from receive to receive of verbs */
    uint32_t has_caps_2, has_no_record; /* as the firmware says */
};
struct mock sy_mock = {.num_failures = -1,
                       .has_devx = 1,
                       .has_dma_buf = 1,
                       .has_peer_memory = 1,
                       .port_state = 4,
                       .link_layer = 2,
                       .sq_stride = 64,
                       .cqe_version = 1,
                       .atomic_operations = 15,
                       .atomic_cap = 1,
                       .max_reads = 16,
                       .has_vector = 1,
                       .part_id = 0x1021,
                       .num_ports = 1,
                       .max_blocks = 32768,
                       .log_max_blocks = 15,
                       .rq_stride = 16,
                       .has_caps_2 = 1,
                       .has_no_record = 1};

/* A queue pair as the last transition left it. */
struct mock_queue {
    uint32_t qpn, state, remote_qpn, mtu, depth, is_collapsed, dbrec_umem, umem, port, lid, timeout,
        retries, hop_limit, udp_port, traffic_class, service_level, gid_idx, rnr_retries,
        first_sent, first_expected;
    uint64_t sq, dbrec, cq, cq_dbrec, doorbell;
    uint8_t gid[16], mac[8];
    /* Receives; without any, all of this is 0. `num_receives` is the record's value when the
     * queue pair became ready to receive, `num_completions` the number written of them so far. */
    uint64_t rq, recv_cq, recv_cq_dbrec, num_completions;
    uint32_t rq_depth, rq_stride, recv_cq_depth, num_receives;
    uint32_t send_dbr_mode, reserved;
};

enum { MAX = 64 };
static struct mock_queue queues[MAX];
static uint32_t num_queues;
static struct {
    uint64_t address;
} umems[MAX];
static uint32_t num_umems;
static struct {
    uint64_t cq, cq_dbrec;
    uint32_t is_collapsed, depth;
} rings[MAX];
static uint32_t num_rings;
static uint64_t last_page;

/* As libmlx5 keeps them: doorbell records of all queues in common pages, 64 bytes each, and registers of
 * all queues in one page of verbs and one of DevX. */
enum { PAGE = 4096, RECORD_WORDS = 16 };
static uint32_t records[2 * MAX][RECORD_WORDS] __attribute__((aligned(4096)));
static uint8_t is_record_taken[2 * MAX];
static uint64_t registers[2][PAGE / 8] __attribute__((aligned(4096)));

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition) && sy_mock.last_error == 0)                                               \
            sy_mock.last_error = __LINE__;                                                         \
    } while (0)

static int fails(void) {
    if (sy_mock.num_failures < 0)
        return 0;
    if (sy_mock.num_failures-- > 0)
        return 0;
    errno = sy_mock.fail_code;
    return 1;
}

static void* make(size_t bytes) {
    void* made = fails() ? NULL : calloc(1, bytes);
    if (made)
        sy_mock.num_live++;
    return made;
}

static int give(void* made) {
    EXPECT(made != NULL);
    free(made);
    sy_mock.num_live--;
    return 0;
}

static uint32_t* take_record(void) {
    for (uint32_t i = 0; i < 2 * MAX; i++)
        if (!is_record_taken[i]) {
            is_record_taken[i] = 1;
            memset(records[i], 0, sizeof records[i]);
            return records[i];
        }
    EXPECT(0);
    abort();
}
static void give_record(uint32_t* record) {
    const size_t i = (size_t)(record - records[0]) / RECORD_WORDS;
    EXPECT(i < 2 * MAX && is_record_taken[i]);
    is_record_taken[i] = 0;
}

/* Receives as the hardware reads them, when it begins to. */
static void look_at_receives(struct mock_queue* queue) {
    const uint32_t record = be32toh(((const uint32_t*)queue->dbrec)[MLX5_RCV_DBR]);
    EXPECT(record <= queue->rq_depth && record <= queue->recv_cq_depth);
    EXPECT((record == 0) == (queue->rq == 0));
    queue->num_receives = record;
    struct mlx5_wqe_data_seg last;
    mlx5dv_set_data_seg(&last, 0, MLX5_INVALID_LKEY, 0);
    for (uint32_t i = 0; i < queue->rq_depth; i++)
        EXPECT(memcmp((const void*)(queue->rq + (uint64_t)i * queue->rq_stride), &last,
                      sizeof last) == 0);
}

/* Writes a completion of a receive behind the last one, as a NIC does: its owner bit is that of the round.
 * With a syndrome it is an error. */
int sy_mock_complete(uint32_t qpn, uint32_t named_qpn, uint32_t opcode, uint32_t counter,
                     uint32_t imm, uint32_t num_bytes, uint32_t syndrome) {
    for (uint32_t i = 0; i < num_queues && i < MAX; i++) {
        struct mock_queue* queue = &queues[i];
        if (queue->qpn != qpn || queue->recv_cq == 0)
            continue;
        const uint64_t index = queue->num_completions++;
        struct mlx5_cqe64* cqe =
            (struct mlx5_cqe64*)queue->recv_cq + (index & (queue->recv_cq_depth - 1));
        const uint8_t owner = (index & queue->recv_cq_depth) != 0;
        memset(cqe, 0, sizeof *cqe - 1);
        cqe->imm_inval_pkey = htobe32(imm);
        cqe->byte_cnt = htobe32(num_bytes);
        if (opcode == MLX5_CQE_RESP_ERR) {
            ((struct mlx5_err_cqe*)cqe)->syndrome = (uint8_t)syndrome;
            ((struct mlx5_err_cqe*)cqe)->vendor_err_synd = 0x59;
        }
        cqe->sop_drop_qpn = htobe32(named_qpn);
        cqe->wqe_counter = htobe16((uint16_t)counter);
        __atomic_store_n(&cqe->op_own, (uint8_t)(opcode << 4 | owner), __ATOMIC_RELEASE);
        return 0;
    }
    return ENOENT;
}

int sy_mock_queue(uint32_t qpn, struct mock_queue* out) {
    for (uint32_t i = 0; i < num_queues && i < MAX; i++)
        if (queues[i].qpn == qpn) {
            *out = queues[i];
            return 0;
        }
    return ENOENT;
}

static struct ibv_device devices[2] = {{.name = "other_0"}, {.name = "mlx5_7"}};

struct ibv_device** ibv_get_device_list(int* num) {
    struct ibv_device** list = make(3 * sizeof *list);
    if (!list)
        return NULL;
    list[0] = &devices[0];
    list[1] = &devices[1];
    *num = 2;
    return list;
}
void ibv_free_device_list(struct ibv_device** list) { give(list); }
const char* ibv_get_device_name(struct ibv_device* device) { return device->name; }
bool mlx5dv_is_supported(struct ibv_device* device) { return device == &devices[1]; }
struct ibv_context* ibv_open_device(struct ibv_device* device) {
    struct ibv_context* context = make(sizeof *context);
    if (context)
        context->device = device;
    return context;
}
struct ibv_context* mlx5dv_open_device(struct ibv_device* device,
                                       struct mlx5dv_context_attr* attr) {
    EXPECT(attr->comp_mask == 0);
    if (!sy_mock.has_devx && (attr->flags & MLX5DV_CONTEXT_FLAGS_DEVX)) {
        errno = EPERM;
        return NULL;
    }
    return ibv_open_device(device);
}
int ibv_close_device(struct ibv_context* context) { return give(context); }

int ibv_query_port(struct ibv_context* context, uint8_t port,
                   struct _compat_ibv_port_attr* compat) {
    struct ibv_port_attr* attr = (struct ibv_port_attr*)compat;
    EXPECT(context->device == &devices[1]);
    if (port == 0 || port > sy_mock.num_ports)
        return EINVAL;
    memset(attr, 0, sizeof *attr);
    attr->state = port == 1 ? sy_mock.port_state : IBV_PORT_DOWN;
    attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = 4;
    attr->lid = 0x21;
    attr->link_layer = sy_mock.link_layer;
    return fails() ? sy_mock.fail_code : 0;
}
int ibv_query_device(struct ibv_context* context, struct ibv_device_attr* attr) {
    EXPECT(context->device == &devices[1]);
    memset(attr, 0, sizeof *attr);
    attr->atomic_cap = sy_mock.atomic_cap == 0 ? IBV_ATOMIC_NONE : IBV_ATOMIC_HCA;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = (int)sy_mock.max_reads;
    strcpy(attr->fw_ver, "28.39.1002");
    attr->vendor_part_id = sy_mock.part_id;
    attr->max_qp_wr = (int)sy_mock.max_blocks;
    attr->phys_port_cnt = (uint8_t)sy_mock.num_ports;
    return fails() ? sy_mock.fail_code : 0;
}
int ibv_query_gid(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid) {
    (void)context;
    memset(gid, 0, sizeof *gid);
    if (port != 1 || index > 3)
        return -1;
    if (index < 2) {
        gid->raw[0] = 0xfe;
        gid->raw[1] = 0x80;
    } else {
        gid->raw[10] = gid->raw[11] = 0xff;
        gid->raw[12] = 10;
    }
    gid->raw[15] = (uint8_t)(index + 1);
    return 0;
}
struct ibv_pd* ibv_alloc_pd(struct ibv_context* context) {
    struct ibv_pd* pd = make(sizeof *pd);
    if (pd)
        pd->context = context;
    return pd;
}
int ibv_dealloc_pd(struct ibv_pd* pd) { return give(pd); }

static struct ibv_mr* register_memory(struct ibv_pd* pd, void* addr, size_t length, int access) {
    static uint32_t next_key = 0x100;
    struct ibv_mr* mr = make(sizeof *mr);
    if (!mr)
        return NULL;
    sy_mock.num_relaxed += (access & IBV_ACCESS_RELAXED_ORDERING) != 0;
    EXPECT(access == IBV_ACCESS_LOCAL_WRITE ||
           access == (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                      IBV_ACCESS_REMOTE_ATOMIC));
    sy_mock.num_exposed += access != IBV_ACCESS_LOCAL_WRITE;
    *mr = (struct ibv_mr){pd->context, pd, addr, length, 0, next_key, next_key + 1};
    next_key += 2;
    return mr;
}
struct ibv_mr* ibv_reg_mr(struct ibv_pd* pd, void* addr, size_t length, int access) {
    /* Addresses of the far half stand for a GPU's. */
    if ((uintptr_t)addr >> 47 && !sy_mock.has_peer_memory) {
        errno = EFAULT;
        return NULL;
    }
    return register_memory(pd, addr, length, access);
}
struct ibv_mr* ibv_reg_dmabuf_mr(struct ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova,
                                 int fd, int access) {
    if (!sy_mock.has_dma_buf || fd < 0) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    /* Memory of the tests; they register parts of it. */
    EXPECT(offset == 4096 + (iova - (UINT64_C(1) << 60)));
    return register_memory(pd, (void*)(uintptr_t)iova, length, access);
}
int ibv_dereg_mr(struct ibv_mr* mr) { return give(mr); }

struct ring {
    struct ibv_cq cq;
    uint32_t entries;
    void* buffer;
    uint32_t* dbrec;
};
struct pair {
    struct ibv_qp qp;
    uint32_t depth, index, rq_depth, rq_bytes;
    void* buffer;
    uint32_t* dbrec;
    uint64_t* reg;
};

static uint32_t power_of_two(uint32_t value) {
    uint32_t power = 1;
    while (power < value)
        power *= 2;
    return power;
}

struct ibv_cq* ibv_create_cq(struct ibv_context* context, int cqe, void* cq_context,
                             struct ibv_comp_channel* channel, int vector) {
    struct ring* ring = make(sizeof *ring);
    EXPECT(cq_context == NULL && channel == NULL && vector == 0);
    if (!ring)
        return NULL;
    ring->cq.context = context;
    ring->entries = power_of_two((uint32_t)cqe + 1);
    ring->buffer = aligned_alloc(4096, 64 * (size_t)ring->entries);
    memset(ring->buffer, 0xf1, 64 * (size_t)ring->entries);
    ring->dbrec = take_record();
    return &ring->cq;
}
int ibv_destroy_cq(struct ibv_cq* cq) {
    struct ring* ring = (struct ring*)cq;
    free(ring->buffer);
    give_record(ring->dbrec);
    return give(ring);
}
struct ibv_qp* ibv_create_qp(struct ibv_pd* pd, struct ibv_qp_init_attr* init) {
    struct pair* pair = make(sizeof *pair);
    EXPECT(init->qp_type == IBV_QPT_RC && init->sq_sig_all == 0 && init->srq == NULL);
    EXPECT(init->cap.max_send_sge == 1 && init->cap.max_inline_data == 28);
    EXPECT(init->cap.max_recv_sge == 1 && init->cap.max_recv_wr >= 1);
    EXPECT(init->send_cq && init->recv_cq);
    const struct ring* recv = (const struct ring*)init->recv_cq;
    const int has_receives = init->send_cq != init->recv_cq;
    EXPECT(has_receives ? recv->entries >= init->cap.max_recv_wr : init->cap.max_recv_wr == 1);
    if (!pair)
        return NULL;
    pair->qp.context = pd->context;
    pair->qp.pd = pd;
    pair->qp.send_cq = init->send_cq;
    pair->qp.recv_cq = init->recv_cq;
    /* As libmlx5: receives in front, a block of them at least. */
    pair->rq_depth = power_of_two(init->cap.max_recv_wr);
    if (pair->rq_depth < 4)
        pair->rq_depth = 4;
    pair->rq_bytes = pair->rq_depth * sy_mock.rq_stride;
    /* As libmlx5: 192 bytes for any operation of a reliable connection, and room for the inline
     * bytes, in whole blocks. */
    pair->depth = power_of_two(init->cap.max_send_wr * ((192 + 32 + 63) / 64));
    pair->index = num_queues++ % MAX;
    pair->qp.qp_num = 0x1a0 + pair->index;
    pair->buffer = aligned_alloc(4096, 64 * (size_t)pair->depth + pair->rq_bytes + 4096);
    memset(pair->buffer, 0xa5, pair->rq_bytes);
    pair->dbrec = take_record();
    pair->reg = &registers[0][0x800 / 8 + pair->index % 2 * 0x20];
    queues[pair->index] =
        (struct mock_queue){.qpn = pair->qp.qp_num,
                            .depth = pair->depth,
                            .sq = (uint64_t)pair->buffer + pair->rq_bytes + sy_mock.sq_skip,
                            .dbrec = (uint64_t)pair->dbrec,
                            .doorbell = (uint64_t)pair->reg};
    if (has_receives) {
        struct mock_queue* queue = &queues[pair->index];
        queue->rq = (uint64_t)pair->buffer;
        queue->rq_depth = pair->rq_depth;
        queue->rq_stride = sy_mock.rq_stride;
        queue->recv_cq = (uint64_t)recv->buffer;
        queue->recv_cq_dbrec = (uint64_t)recv->dbrec;
        queue->recv_cq_depth = recv->entries;
    }
    return &pair->qp;
}
int ibv_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attr, int mask) {
    struct mock_queue* queue = &queues[((struct pair*)qp)->index];
    if (fails())
        return sy_mock.fail_code;
    EXPECT(mask & IBV_QP_STATE);
    switch (attr->qp_state) {
    case IBV_QPS_RESET: {
        struct pair* pair = (struct pair*)qp;
        EXPECT(mask == IBV_QP_STATE);
        /* As libmlx5: records of the queue pair to 0, and the completion queue cleaned by a count of its
         * own. */
        pair->dbrec[0] = pair->dbrec[1] = 0;
        ((struct ring*)qp->send_cq)->dbrec[0] = 0xefcdab00;
        ((struct ring*)qp->recv_cq)->dbrec[0] = 0xefcdab00;
        queue->state = 0;
        break;
    }
    case IBV_QPS_INIT:
        EXPECT(queue->state == 0);
        EXPECT(mask == (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
        EXPECT(attr->qp_access_flags ==
               (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC));
        queue->port = attr->port_num;
        queue->state = 1;
        break;
    case IBV_QPS_RTR:
        EXPECT(queue->state == 1);
        EXPECT(mask == (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                        IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
        EXPECT(attr->max_dest_rd_atomic == 16 && attr->rq_psn >> 24 == 0);
        look_at_receives(queue);
        queue->first_expected = attr->rq_psn;
        EXPECT(attr->ah_attr.is_global == (sy_mock.link_layer == IBV_LINK_LAYER_ETHERNET));
        queue->remote_qpn = attr->dest_qp_num;
        queue->mtu = attr->path_mtu;
        queue->lid = attr->ah_attr.dlid;
        queue->hop_limit = attr->ah_attr.grh.hop_limit;
        queue->traffic_class = attr->ah_attr.grh.traffic_class;
        queue->service_level = attr->ah_attr.sl;
        queue->gid_idx = attr->ah_attr.grh.sgid_index;
        memcpy(queue->gid, attr->ah_attr.grh.dgid.raw, 16);
        queue->state = 2;
        break;
    case IBV_QPS_RTS:
        EXPECT(queue->state == 2);
        EXPECT(mask == (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
        EXPECT(attr->max_rd_atomic == 16 && attr->sq_psn >> 24 == 0);
        queue->first_sent = attr->sq_psn;
        queue->rnr_retries = attr->rnr_retry;
        queue->timeout = attr->timeout;
        queue->retries = attr->retry_cnt;
        queue->state = 3;
        break;
    default:
        EXPECT(0);
    }
    return 0;
}
int ibv_destroy_qp(struct ibv_qp* qp) {
    struct pair* pair = (struct pair*)qp;
    free(pair->buffer);
    give_record(pair->dbrec);
    return give(pair);
}

struct handle {
    struct ibv_ah ah;
    struct mlx5_wqe_av av;
};
struct ibv_ah* ibv_create_ah(struct ibv_pd* pd, struct ibv_ah_attr* attr) {
    struct handle* handle = make(sizeof *handle);
    (void)pd;
    if (!handle)
        return NULL;
    memcpy(handle->av.rmac, "\x02\xaa\xbb\xcc\xdd", 5);
    handle->av.rmac[5] = attr->grh.dgid.raw[15];
    return &handle->ah;
}
int ibv_destroy_ah(struct ibv_ah* ah) { return give(ah); }

int mlx5dv_init_obj(struct mlx5dv_obj* obj, uint64_t type) {
    if (fails())
        return sy_mock.fail_code;
    if (type & MLX5DV_OBJ_PD)
        obj->pd.out->pdn = 0x5d;
    if (type & MLX5DV_OBJ_AH)
        obj->ah.out->av = sy_mock.has_vector ? &((struct handle*)obj->ah.in)->av : NULL;
    if (type & MLX5DV_OBJ_QP) {
        struct pair* pair = (struct pair*)obj->qp.in;
        struct mlx5dv_qp* out = obj->qp.out;
        out->dbrec = pair->dbrec;
        out->rq.buf = pair->buffer;
        out->rq.wqe_cnt = pair->rq_depth;
        out->rq.stride = sy_mock.rq_stride;
        out->sq.buf = (char*)pair->buffer + pair->rq_bytes + sy_mock.sq_skip;
        out->sq.wqe_cnt = pair->depth;
        out->sq.stride = sy_mock.sq_stride;
        out->bf.reg = pair->reg;
        out->bf.size = 256;
    }
    if (type & MLX5DV_OBJ_CQ) {
        struct ring* ring = (struct ring*)obj->cq.in;
        struct mlx5dv_cq* out = obj->cq.out;
        out->buf = ring->buffer;
        out->dbrec = ring->dbrec;
        out->cqe_cnt = ring->entries;
        out->cqe_size = 64;
    }
    return 0;
}

#define GET(type, in, field) _devx_get(in, __devx_bit_off(type, field), __devx_bit_sz(type, field))
#define GET64(type, in, field) _devx_get64(in, __devx_bit_off(type, field))

static int refuse(void* out) {
    ((uint8_t*)out)[0] = (uint8_t)sy_mock.firmware_status;
    ((uint8_t*)out)[7] = 0x77;
    errno = EREMOTEIO;
    return EREMOTEIO;
}

int mlx5dv_devx_general_cmd(struct ibv_context* context, const void* in, size_t inlen, void* out,
                            size_t outlen) {
    const uint8_t* bytes = in;
    uint8_t* answer = out;
    (void)context;
    EXPECT(inlen == 16 && outlen == 16 + 4096 && bytes[0] == 1 && bytes[1] == 0);
    memset(out, 0, outlen);
    if (sy_mock.firmware_status)
        return refuse(out);
    switch (bytes[6] << 8 | bytes[7]) {
    case 0 << 1 | 1:
        answer[16 + 0x1f8 / 8] = (uint8_t)sy_mock.cqe_version; /* its low four bits */
        answer[16 + 0x88 / 8] = (uint8_t)sy_mock.log_max_blocks;
        answer[16 + 0x26b / 8] = 8;
        answer[16 + 0x20 / 8] = (uint8_t)(sy_mock.has_caps_2 << 7);
        break;
    case 0x20 << 1 | 1:
        EXPECT(sy_mock.has_caps_2);
        /* Beside it is the same file for processors within the NIC. */
        answer[16 + 0x2e0 / 8] = sy_mock.has_no_record ? 0x40 : 0x80;
        break;
    case 3 << 1 | 1:
        answer[16 + 0x98 / 8] = (uint8_t)sy_mock.atomic_operations;
        answer[16 + 0xb8 / 8] = 0x0c;
        break;
    default:
        EXPECT(0);
    }
    return 0;
}

struct mlx5dv_devx_umem* mlx5dv_devx_umem_reg(struct ibv_context* context, void* addr, size_t size,
                                              uint32_t access) {
    (void)context;
    /* Addresses of the far half stand for a GPU's. */
    if ((uintptr_t)addr >> 47 && sy_mock.has_peer_memory != 1) {
        errno = EFAULT;
        return NULL;
    }
    struct mlx5dv_devx_umem* umem = make(sizeof *umem);
    EXPECT((uintptr_t)addr % 65536 == 0 && size > 0 && access == IBV_ACCESS_LOCAL_WRITE);
    if (!umem)
        return NULL;
    umem->umem_id = 0x40 + num_umems % MAX;
    umems[num_umems++ % MAX].address = (uint64_t)addr;
    return umem;
}
struct mlx5dv_devx_umem* mlx5dv_devx_umem_reg_ex(struct ibv_context* context,
                                                 struct mlx5dv_devx_umem_in* in) {
    EXPECT(in->comp_mask == MLX5DV_UMEM_MASK_DMABUF && in->dmabuf_fd >= 0);
    (void)context;
    errno = EOPNOTSUPP;
    return NULL;
}
int mlx5dv_devx_umem_dereg(struct mlx5dv_devx_umem* umem) { return give(umem); }

struct mlx5dv_devx_uar* mlx5dv_devx_alloc_uar(struct ibv_context* context, uint32_t flags) {
    (void)context;
    /* As Debian's 44.0: no dedicated registers. */
    if (flags != MLX5DV_UAR_ALLOC_TYPE_NC && flags != MLX5DV_UAR_ALLOC_TYPE_BF) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    struct mlx5dv_devx_uar* uar = make(sizeof *uar);
    if (!uar)
        return NULL;
    uar->base_addr = registers[1];
    uar->reg_addr = (char*)uar->base_addr + 0x800;
    uar->page_id = 0x3a;
    last_page = (uint64_t)uar->base_addr;
    return uar;
}
void mlx5dv_devx_free_uar(struct mlx5dv_devx_uar* uar) { give(uar); }
int mlx5dv_devx_query_eqn(struct ibv_context* context, uint32_t vector, uint32_t* eqn) {
    (void)context;
    EXPECT(vector == 0);
    *eqn = 0x0e;
    return fails() ? sy_mock.fail_code : 0;
}

static uint64_t address_of(uint32_t umem_id) {
    EXPECT(umem_id >= 0x40 && umem_id < 0x40 + MAX);
    return umems[umem_id % MAX].address;
}

struct mlx5dv_devx_obj* mlx5dv_devx_obj_create(struct ibv_context* context, const void* in,
                                               size_t inlen, void* out, size_t outlen) {
    (void)context;
    EXPECT(inlen == 272 && outlen == 16);
    memset(out, 0, outlen);
    if (sy_mock.firmware_status) {
        refuse(out);
        return NULL;
    }
    uint32_t* object = make(8);
    if (!object)
        return NULL;
    uint32_t number = 0;
    const uint32_t opcode = GET(create, in, opcode);
    if (opcode == 0x400) {
        EXPECT(GET(create_ring, in, cqc.dbr_umem_valid) == 1);
        EXPECT(GET(create_ring, in, cqc.cqe_sz) == 0 && GET(create_ring, in, cq_umem_valid) == 1);
        EXPECT(GET(create_ring, in, cqc.oi) == GET(create_ring, in, cqc.cc));
        EXPECT(GET(create_ring, in, cqc.uar_page) == 0x3a);
        EXPECT(GET(create_ring, in, cqc.c_eqn) == 0x0e);
        EXPECT(GET(create_ring, in, cqc.status) == 0 && GET(create_ring, in, cqc.st) == 0);
        number = num_rings++ % MAX;
        rings[number].cq =
            address_of(GET(create_ring, in, cq_umem_id)) + GET64(create_ring, in, cq_umem_offset);
        rings[number].cq_dbrec = address_of(GET(create_ring, in, cqc.dbr_umem_id)) +
                                 GET64(create_ring, in, cqc.dbr_addr);
        rings[number].is_collapsed = GET(create_ring, in, cqc.cc);
        rings[number].depth = 1u << GET(create_ring, in, cqc.log_cq_size);
        number += 0xc00;
    } else if (opcode == 0x500) {
        EXPECT(GET(create, in, qpc.st) == 0 && GET(create, in, qpc.pm_state) == 3);
        EXPECT(GET(create, in, qpc.pd) == 0x5d && GET(create, in, qpc.uar_page) == 0x3a);
        EXPECT(GET(create, in, qpc.no_sq) == 0 && GET(create, in, qpc.log_rq_stride) == 0);
        EXPECT(GET(create, in, qpc.full_handshake) == 0 && GET(create, in, qpc.user_index) == 0);
        const uint32_t send_dbr_mode = GET(create, in, qpc.send_dbr_mode);
        EXPECT(send_dbr_mode == 0 || (send_dbr_mode == 1 && sy_mock.has_no_record));
        EXPECT(GET(create, in, qpc.cs_req) == 0 && GET(create, in, qpc.cs_res) == 0);
        EXPECT(GET(create, in, qpc.dbr_umem_valid) == 1 && GET(create, in, wq_umem_valid) == 1);
        const uint32_t cqn = GET(create, in, qpc.cqn_snd);
        const uint32_t recv_cqn = GET(create, in, qpc.cqn_rcv);
        EXPECT(cqn >= 0xc00 && cqn < 0xc00 + MAX);
        EXPECT(recv_cqn >= 0xc00 && recv_cqn < 0xc00 + MAX);
        /* A receive queue of its own, or none. */
        const int has_receives = GET(create, in, qpc.rq_type) == 0;
        EXPECT(has_receives || GET(create, in, qpc.rq_type) == 3);
        EXPECT(has_receives ? recv_cqn != cqn && !rings[recv_cqn % MAX].is_collapsed
                            : recv_cqn == cqn && GET(create, in, qpc.log_rq_size) == 0);
        const uint64_t begin =
            address_of(GET(create, in, wq_umem_id)) + GET64(create, in, wq_umem_offset);
        const uint32_t rq_depth = has_receives ? 1u << GET(create, in, qpc.log_rq_size) : 0;
        const uint32_t index = num_queues++ % MAX;
        object[0] = index;
        number = 0x1a0 + index;
        queues[index] = (struct mock_queue){
            .qpn = number,
            .depth = 1u << GET(create, in, qpc.log_sq_size),
            .is_collapsed = rings[cqn % MAX].is_collapsed,
            .sq = begin + 16 * (uint64_t)rq_depth,
            .dbrec = address_of(GET(create, in, qpc.dbr_umem_id)) + GET64(create, in, qpc.dbr_addr),
            .cq = rings[cqn % MAX].cq,
            .cq_dbrec = rings[cqn % MAX].cq_dbrec,
            .doorbell = last_page + (send_dbr_mode == 1 ? 0x600 : 0x800),
            .send_dbr_mode = send_dbr_mode};
        if (has_receives) {
            queues[index].rq = begin;
            queues[index].rq_depth = rq_depth;
            queues[index].rq_stride = 16;
            queues[index].recv_cq = rings[recv_cqn % MAX].cq;
            queues[index].recv_cq_dbrec = rings[recv_cqn % MAX].cq_dbrec;
            queues[index].recv_cq_depth = rings[recv_cqn % MAX].depth;
            EXPECT(queues[index].recv_cq % 4096 == 0);
        }
        EXPECT(queues[index].sq % 64 == 0 && queues[index].cq % 4096 == 0);
        EXPECT(rings[cqn % MAX].depth == queues[index].depth);
    } else {
        EXPECT(0);
    }
    ((uint8_t*)out)[9] = (uint8_t)(number >> 16);
    ((uint8_t*)out)[10] = (uint8_t)(number >> 8);
    ((uint8_t*)out)[11] = (uint8_t)number;
    return (struct mlx5dv_devx_obj*)object;
}
int mlx5dv_devx_obj_modify(struct mlx5dv_devx_obj* obj, const void* in, size_t inlen, void* out,
                           size_t outlen) {
    struct mock_queue* queue = &queues[*(uint32_t*)obj];
    const uint32_t opcode = GET(change, in, opcode);
    EXPECT(inlen == (opcode == 0x50a ? 16 : 272) && outlen == 16);
    EXPECT(GET(change, in, qpn) == queue->qpn);
    memset(out, 0, outlen);
    if (sy_mock.firmware_status)
        return refuse(out);
    if (opcode == 0x50a) {
        queue->state = 0;
    } else if (opcode == 0x502) {
        EXPECT(queue->state == 0 && GET(change, in, qpc.pm_state) == 3);
        EXPECT(GET(change, in, qpc.rre) && GET(change, in, qpc.rwe) && GET(change, in, qpc.rae));
        EXPECT(GET(change, in, qpc.atomic_mode) == 3);
        queue->port = GET(change, in, qpc.primary.vhca_port_num);
        queue->state = 1;
    } else if (opcode == 0x503) {
        EXPECT(queue->state == 1 && GET(change, in, qpc.log_msg_max) == 30);
        look_at_receives(queue);
        EXPECT(GET(change, in, qpc.log_rra_max) == 4 && GET(change, in, qpc.min_rnr_nak) == 12);
        EXPECT(GET(change, in, qpc.primary.vhca_port_num) == queue->port);
        queue->first_expected = GET(change, in, qpc.next_rcv_psn);
        queue->remote_qpn = GET(change, in, qpc.remote_qpn);
        queue->mtu = GET(change, in, qpc.mtu);
        queue->lid = GET(change, in, qpc.primary.rlid);
        queue->hop_limit = GET(change, in, qpc.primary.hop_limit);
        queue->udp_port = GET(change, in, qpc.primary.udp_sport);
        queue->traffic_class =
            GET(change, in, qpc.primary.dscp) << 2 | GET(change, in, qpc.primary.ecn);
        queue->service_level = sy_mock.link_layer == IBV_LINK_LAYER_ETHERNET
                                   ? GET(change, in, qpc.primary.eth_prio)
                                   : GET(change, in, qpc.primary.sl);
        queue->gid_idx = GET(change, in, qpc.primary.src_addr_index);
        memcpy(queue->gid, (const char*)in + __devx_bit_off(change, qpc.primary.rgid) / 8, 16);
        memcpy(queue->mac, (const char*)in + __devx_bit_off(change, qpc.primary.rmac_47_32) / 8, 6);
        queue->state = 2;
    } else if (opcode == 0x504) {
        EXPECT(queue->state == 2 && GET(change, in, qpc.log_sra_max) == 4);
        queue->first_sent = GET(change, in, qpc.next_send_psn);
        queue->rnr_retries = GET(change, in, qpc.rnr_retry);
        queue->timeout = GET(change, in, qpc.primary.ack_timeout);
        queue->retries = GET(change, in, qpc.retry_count);
        queue->state = 3;
    } else {
        EXPECT(0);
    }
    return 0;
}
int mlx5dv_devx_obj_destroy(struct mlx5dv_devx_obj* obj) { return give(obj); }
