/* Structures that a host passes to the GPU data path: parameters, states and device frames, for
 * C11, C++17 and CUDA.
 * Many thread blocks fill a device frame together, and none sees the data of the others. So
 * unlike the frames of abi.h its sections stand at fixed offsets that depend on the geometry
 * only, and it carries no checksum over them (NVLink and RDMA links check their own). The header
 * is the same sy_frame_header. Every change here must raise SY_DEVICE_ABI_VERSION;
 * kernels/src/abi.rs is the same in Rust. */
#ifndef SWITCHYARD_DEVICE_ABI_H
#define SWITCHYARD_DEVICE_ABI_H

#include "switchyard/abi.h"

#define SY_DEVICE_ABI_VERSION UINT32_C(6)
/* "SYDF" as a little-endian word: sy_frame_header.magic of a device frame. */
#define SY_DEVICE_FRAME_MAGIC UINT32_C(0x46445953)

#define SY_MAX_PEERS 32    /* one bit per peer in a 32-bit mask */
#define SY_MAX_FRAMES 8    /* per slot: limit of the words in the control tail */
#define SY_MAX_EXPERTS 1024
#define SY_MAX_DEVICE_TOP_K 16
#define SY_MAX_REPLICAS 7
#define SY_MAX_FRAME_TOKENS (UINT32_C(1) << 20)
#define SY_P2P_THREADS 512 /* of the transport measurements */
#ifndef SY_RECV_BLOCKS
#define SY_RECV_BLOCKS 8     /* of expert_recv: one cluster */
#endif
#define SY_RECV_THREADS 1024 /* of each of them */
#define SY_TILE_WEIGHTS UINT32_C(256) /* rows of weights in a tile of the expert stage */
#define SY_MOST_PARTS UINT32_C(4) /* into which a tile of few tokens is divided */
#define SY_TILE_ARRIVALS UINT32_C(256) /* words of sy_expert_compute_params.tile_arrivals */
#define SY_COMPUTE_THREADS 256  /* of the expert stage's first kernel */
#define SY_PRODUCT_THREADS 384  /* of the other two */
#define SY_PRODUCT_SHARED_BYTES 231680 /* of those, dynamic */
#define SY_RANK_BITS 22      /* entries of one expert in a batch, as a power of two */
#define SY_NO_EXPERT UINT32_C(0xffffffff)
#define SY_NO_ROUTE UINT32_C(0xffffffff)
/* Word of an answer's row that has not come, where rows are stored by the server itself. No two bf16 values that a
 * conversion made are this, since its NaN is another one. */
#define SY_ANSWER_HOLE UINT32_C(0xffffffff)
/* A route is peer << SY_ROUTE_SHIFT | row. */
#define SY_ROUTE_SHIFT 24

/* Words of the control tail that the device path adds to those of abi.h, one line per frame. */
/* The header word of a frame is number << SY_ANNOUNCE_SHIFT | rows, set after the header and
 * every entry: a server makes its lists while the rows are under way. */
#define SY_WORD_HEADER(frame) (2048 + (frame) * SY_CONTROL_STRIDE)
#define SY_WORD_STATUS(frame) (3072 + (frame) * SY_CONTROL_STRIDE)
#define SY_ANNOUNCE_SHIFT 24
/* The status word of a refused frame is number << SY_STATUS_SHIFT | SY_ERROR_* of abi.h. */
#define SY_STATUS_SHIFT 16

/* Launchers return 0 or one of these; none is returned after a kernel was launched. */
#define SY_OK 0
#define SY_LAUNCH_VERSION 1 /* params.version is another build's */
#define SY_LAUNCH_NULL 2 /* a pointer that must be set is null */
#define SY_LAUNCH_ALIGNMENT 3 /* a pointer is not aligned to 16 bytes */
#define SY_LAUNCH_HIDDEN 4 /* hidden is 0, not a multiple of 128, or too large */
#define SY_LAUNCH_TOP_K 5 /* top_k is 0 or above SY_MAX_DEVICE_TOP_K */
#define SY_LAUNCH_DTYPE 6 /* dtype is neither bf16 nor fp8-e4m3 */
#define SY_LAUNCH_PEERS 7 /* more peers than SY_MAX_PEERS, or none */
#define SY_LAUNCH_EXPERTS 8 /* more experts than SY_MAX_EXPERTS, or none */
#define SY_LAUNCH_TOKENS 9 /* capacity is 0 or beyond the geometry's max_tokens */
#define SY_LAUNCH_GEOMETRY 10 /* the geometry is not the one sy_make_geometry gives */
#define SY_LAUNCH_PATH 11 /* a link's path is not compiled in */
#define SY_LAUNCH_BOUND 12 /* timeout_ns is 0: every wait has a bound */
#define SY_LAUNCH_INTER 14 /* inter is 0, not a multiple of 64, or too large */
#define SY_LAUNCH_CUDA 13 /* the driver refused the launch: ask cudaGetLastError */

/* How stores reach a peer. Fixed when the peer connects. */
#define SY_PATH_DIRECT 1 /* the peer's slot is mapped here: NVLink or the same GPU */
#define SY_PATH_IBGDA                                                                              \
    2 /* stores go to a local mirror of the slot, the kernel posts work requests */
#define SY_PATH_PROXY 3 /* stores go to a local mirror, the kernel posts commands to a CPU thread */

/* sy_error_word.tag: the wait, or the check, that failed */
#define SY_TAG_NONE 0
#define SY_TAG_RECV_FRAME                                                                          \
    1 /* a client's frame; observed: number in its header word or a row's flag */
#define SY_TAG_COMBINE_ROW 2 /* a server's answer to a token */
#define SY_TAG_COMBINE_EMPTY 3 /* a server's answer to a frame without tokens */
#define SY_TAG_NO_REPLICA 4 /* observed: expert without a live replica */
#define SY_TAG_BAD_EXPERT 5 /* observed: topk_idx out of range; expected: num_experts */
#define SY_TAG_NUM_TOKENS 6 /* observed: tokens asked for; expected: capacity */
#define SY_TAG_BAD_FRAME 7 /* observed: SY_ERROR_* | field << 16; expected: frame number */
#define SY_TAG_P2P 8 /* a peer's flag in a transport measurement */
#define SY_TAG_REFUSED 9 /* a server answered with an error status; observed: its status word */
#define SY_TAG_PATH 10 /* observed: path of a link that the launch did not declare */
#define SY_TAG_RECV_PATH                                                                           \
    11 /* a client's frame, for the path back; observed: clients whose path is quiet, as a mask */
#define SY_TAG_COMBINE_PATH                                                                        \
    12 /* the path to a server, until it has read a frame; observed: a lane or queue that has not */
#define SY_TAG_PRODUCT                                                                             \
    13 /* an expert product's own copies and products; peer: its thread block; observed: the stage
        * that was not emptied; expected: the parity of its phase */

/* sy_error_word.reason */
#define SY_REASON_TIMEOUT 1
#define SY_REASON_ABORT                                                                            \
    2 /* the host set the peer's bit in the abort mask, or the path to it failed */
#define SY_REASON_VALUE 3

/* sy_dispatch_params.flags and others */
/* With PDL a kernel may start while the one before it in the stream ends. It waits for that one
 * before it accesses anything that kernels write. It may immediately read the tables that the
 * host writes (placement, peers, local_expert). */
#define SY_LAUNCH_FLAG_PDL UINT32_C(1) /* programmatic dependent launch */
#define SY_LAUNCH_FLAG_EARLY UINT32_C(2) /* with PDL: let dependent kernels start immediately */
/* With PDL, for combine, echo and expert_recv: work beside the kernel before this one in the
 * stream, and join it later. Two conditions must hold: that kernel writes nothing that this one
 * reads, and, with EARLY, it lets others start only once the kernels before it are over. In one
 * graph that is so for combine behind echo or expert_send, and for echo or expert_recv behind
 * dispatch. */
#define SY_LAUNCH_FLAG_AHEAD UINT32_C(32)
/* With PDL, for expert_recv: lets the next kernel start when a batch is chosen. */
#define SY_RECV_FLAG_CHOSEN UINT32_C(64)
#define SY_LAUNCH_FLAG_ANY_PATH UINT32_C(8) /* some link of the table is not direct */
#define SY_DISPATCH_FLAG_CONTACT_ALL                                                               \
    UINT32_C(4) /* send empty frames too: lockstep servers need them */
#define SY_COMBINE_FLAG_ADD                                                                        \
    UINT32_C(16) /* a sum begins with the value in `out`: tokens that were sent again */
#define SY_P2P_FLAG_BULK                                                                           \
    UINT32_C(64) /* messages of 16 bytes and more leave shared memory by bulk copies */

/* First error of a peer's kernels. `tag` is claimed by compare-and-swap; the host clears it. */
typedef struct sy_error_word {
    uint32_t tag;
    uint32_t peer;
    uint32_t reason;
    uint32_t reserved;
    uint64_t observed;
    uint64_t expected;
} sy_error_word;

/* Sections of a slot's frames. Made by sy_make_geometry (layout/geometry.h), never by hand. */
typedef struct sy_frame_geometry {
    uint32_t hidden;
    uint32_t top_k;
    uint32_t dtype; /* of requests; answers are bf16 */
    uint32_t num_frames; /* a power of two */
    uint32_t max_tokens; /* rows per frame */
    uint32_t row_stride_bytes;
    uint32_t scales_per_row;
    uint32_t response_stride_bytes;
    uint64_t flags_offset; /* [max_tokens] uint64_t: frame number, one per row */
    uint64_t entries_offset; /* [max_tokens][top_k] sy_entry, SY_NO_EXPERT where unused */
    uint64_t scales_offset; /* [max_tokens][scales_per_row] float */
    uint64_t payload_offset; /* [max_tokens] rows */
    uint64_t frame_bytes;
    uint64_t slot_bytes; /* num_frames frames and the control tail */
    uint64_t control_offset;
    /* [max_tokens] uint64_t: frame number, one per row; over direct links the first only, of an empty frame */
    uint64_t response_flags_offset;
    uint64_t
        response_payload_offset; /* [max_tokens] rows; of a direct link SY_ANSWER_HOLE between frames */
    uint64_t response_frame_bytes;
    uint64_t response_slot_bytes;
    uint64_t response_control_offset;
} sy_frame_geometry;

/* A path to a peer's slot. Kernels store through `window`, then name the stored range. */
typedef struct sy_link {
    uint64_t window;
    uint64_t context; /* of the path; 0 for direct stores */
    uint32_t path;
    uint32_t reserved;
} sy_link;

/* Replicas of an expert: server indices. */
typedef struct sy_replica_set {
    uint8_t num_replicas;
    uint8_t server[SY_MAX_REPLICAS];
} sy_replica_set;

/* Placement table in device memory; the host replaces it between launches. */
typedef struct sy_placement {
    uint64_t epoch;
    uint32_t num_experts;
    uint32_t reserved;
    sy_replica_set experts[SY_MAX_EXPERTS];
} sy_placement;

/* A server as its client's kernels see it. */
typedef struct sy_server_peer {
    sy_link request;
    uint64_t response; /* address of this server's response slot in the client's memory */
    uint32_t generation;
    uint32_t reserved;
} sy_server_peer;

/* A client as its server's kernels see it. */
typedef struct sy_client_peer {
    uint64_t request; /* address of this client's request slot in the server's memory */
    sy_link response;
    uint64_t client_id;
    uint32_t generation;
    uint32_t reserved;
} sy_client_peer;

/* Shared cache of a mask in the host's memory. One of the waiting warps refreshes it from time
 * to time. */
typedef struct sy_mask_cache {
    uint32_t read_at; /* time of the last refresh, by the GPU's clock in steps of 2048 ns */
    uint32_t reserved;
    uint64_t mask; /* sequence of the dispatch << 32 | mask */
} sy_mask_cache;

/* Device memory of a client, zeroed once. Only kernels write it. */
typedef struct sy_client_state {
    uint64_t sequence; /* dispatches so far */
    uint32_t arrivals; /* blocks that have read `sequence`; wraps to 0 */
    uint32_t reserved;
    uint64_t posted[2][SY_MAX_PEERS]; /* frames sent to each server, by parity of the sequence */
    uint32_t awaited[SY_MAX_PEERS]; /* warps that wait long for a row that each server stores */
    /* Not 0 for a server that was given up without a refusal: the sequence of the dispatch. Data
     * in its slot, and data that comes late, is not taken for answers to later dispatches until
     * the host sets another slot, and zeros here, in `posted` and in `summed`. */
    uint64_t lost[SY_MAX_PEERS];
    uint64_t summed[SY_MAX_PEERS]
                   [SY_MAX_FRAMES]; /* last frame that combine took, by server and place */
    sy_mask_cache mask_cache; /* of combines, at their abort mask */
    sy_error_word error;
} sy_client_state;

/* Head of a handle: the message from a dispatch to its combine. Routes follow it:
 * [max_tokens][top_k] uint32_t, ascending by server, SY_NO_ROUTE at the end. */
typedef struct sy_handle {
    uint64_t sequence;
    uint32_t num_tokens;
    uint32_t contacted; /* servers, as a mask */
    uint32_t missing; /* servers that did not answer in time, as a mask; written by combine */
    uint32_t refused; /* servers that refused the frame, as a mask; written by combine */
    uint64_t frame_number[SY_MAX_PEERS];
    uint32_t num_rows[SY_MAX_PEERS];
} sy_handle;

/* Device memory of a server, zeroed once. Only kernels write it. */
typedef struct sy_server_state {
    uint32_t arrivals;
    uint32_t
        last_clients; /* mask of clients in the last batch, 0 after a wait in which none came */
    uint64_t taken[SY_MAX_PEERS]; /* frames taken from each client */
    uint64_t num_refused;
    uint64_t num_batches;
    uint32_t next_client; /* start of the search for a layer: no layer starves */
    uint32_t reserved2;
    sy_error_word error;
    /* Status words of refused frames, by client and place; the host clears them with `taken`. */
    uint64_t refusals[SY_MAX_PEERS][SY_MAX_FRAMES];
} sy_server_state;

/* Head of a batch: the message from expert_recv to the expert stage and expert_send. */
typedef struct sy_batch {
    uint32_t num_rows;
    uint32_t num_entries;
    uint32_t layer;
    uint32_t clients; /* mask of clients in the batch */
    uint64_t frame_number[SY_MAX_PEERS];
    uint32_t row_begin[SY_MAX_PEERS + 1]; /* rows of client c: row_begin[c]..row_begin[c + 1] */
    uint32_t expected; /* mask of clients that were waited for, see sy_gather */
    uint32_t waited_ns[SY_MAX_PEERS]; /* from the first sight of a client's frame to the choice */
    uint64_t received_ns; /* end of the reception, by the GPU's global timer */
} sy_batch;

/* Clients that a batch waits for, in memory that the host writes between two runs of a recorded
 * launch: those of `clients` that were in the last batch, because a client that was just
 * answered may soon return. The wait ends `within_ns` after the kernel's begin, which is about
 * the end of that batch, if any client has a frame then. With SY_GATHER_NONE in `within_ns` the batch takes what is
 * there and does not wait at all: the host wants all batches to end. */
#define SY_GATHER_NONE UINT32_MAX
typedef struct sy_gather {
    uint32_t clients; /* mask */
    uint32_t within_ns;
} sy_gather;

/* Times of a call's kernels, ns of the GPU's global timer. A begin is the first block's, an end the last one's. */
enum {
    SY_CALL_DISPATCH_START = 0, /* before the wait for the kernel before */
    SY_CALL_DISPATCH_BEGIN = 1, /* behind it */
    SY_CALL_DISPATCH_END = 2,
    SY_CALL_COMBINE_BEGIN = 3,
    SY_CALL_COMBINE_END = 4,
    SY_CALL_STAMPS = 8
};

/* Times of a batch's kernels, likewise. */
enum {
    SY_BATCH_RECV_START = 0,
    SY_BATCH_RECV_SEEN = 1, /* headers are there */
    SY_BATCH_RECV_CHOSEN = 2,
    SY_BATCH_RECV_LISTED = 3, /* lists are made */
    SY_BATCH_RECV_END = 4,
    SY_BATCH_GATHER_START = 5,
    SY_BATCH_GATHER_END = 6,
    SY_BATCH_UP_START = 7,
    SY_BATCH_UP_BEGIN = 8, /* behind the kernel before */
    SY_BATCH_UP_END = 9,
    SY_BATCH_DOWN_START = 10,
    SY_BATCH_DOWN_BEGIN = 11,
    SY_BATCH_DOWN_END = 12,
    SY_BATCH_SEND_START = 13,
    SY_BATCH_SEND_BEGIN = 14,
    SY_BATCH_SEND_END = 15,
    SY_BATCH_STAMPS = 16
};
/* Room for them, from the head of the batch. */
#define SY_STAMPS_OFFSET UINT64_C(576)

typedef struct sy_dispatch_params {
    uint32_t version;
    uint32_t flags;
    sy_frame_geometry geometry;
    const void* hidden_states; /* bf16 [capacity, hidden] */
    const int32_t* topk_idx; /* [capacity, top_k], -1 = masked */
    const float* topk_weights; /* [capacity, top_k] */
    const uint32_t* num_tokens; /* one word in device memory, at most capacity */
    const sy_placement* placement;
    sy_client_state* state;
    sy_handle* handle;
    uint64_t* trace; /* null, or [trace_len][SY_CALL_STAMPS] times by sequence, see SY_CALL_* */
    uint64_t client_id;
    uint32_t trace_len;
    uint32_t capacity;
    uint32_t layer;
    uint32_t num_experts;
    uint32_t num_servers;
    uint32_t num_blocks; /* 0: chosen by size */
    const sy_server_peer* servers; /* device memory, [num_servers], written by the host */
} sy_dispatch_params;

typedef struct sy_combine_params {
    uint32_t version;
    uint32_t flags;
    sy_frame_geometry geometry;
    sy_handle* handle;
    sy_client_state* state;
    void* out; /* bf16 [capacity, hidden] */
    /* null, or [capacity]: mask of servers whose part is missing; all servers of a token that is
     * left as zeros */
    uint32_t* token_missing;
    const uint32_t* abort_mask; /* null, or mapped host memory: bit s = server s is dead */
    uint64_t timeout_ns; /* of silence */
    uint32_t capacity;
    uint32_t num_servers;
    uint32_t num_blocks;
    uint32_t trace_len;
    const sy_server_peer* servers; /* device memory, [num_servers], written by the host */
    uint64_t* trace; /* as of the dispatch */
} sy_combine_params;

/* Output of expert_recv for the batch: device memory, sized by sy_expert_lists_bytes. */
typedef struct sy_expert_lists {
    sy_batch* batch;
    uint32_t* expert_begin; /* [num_local_experts + 1] positions in the expert-major lists */
    uint32_t* list_row; /* [max_entries] row of the batch */
    float* list_weight; /* [max_entries] */
    uint32_t* row_source; /* [max_rows] client << SY_ROUTE_SHIFT | row of its frame */
    /* [max_rows][top_k] position in the lists, SY_NO_EXPERT where unused; aligned to 16 bytes */
    uint32_t* row_position;
    uint32_t max_rows;
    uint32_t usual_rows; /* for the choice of blocks; 0: max_rows */
    uint64_t* stamps; /* null, or [SY_BATCH_STAMPS] times of the batch, see SY_BATCH_* */
} sy_expert_lists;

typedef struct sy_expert_recv_params {
    uint32_t version;
    uint32_t flags;
    sy_frame_geometry geometry;
    sy_server_state* state;
    sy_expert_lists lists;
    /* [num_layers][num_experts] index among this server's experts of the layer, -1 = not here */
    const int16_t* local_expert;
    const uint32_t* abort_mask;
    const uint64_t* min_epoch; /* null, or device memory: frames of older epochs are refused */
    uint64_t timeout_ns;
    uint32_t min_ready; /* ends the wait when this number of clients have a frame; 1 = any */
    uint32_t num_experts;
    uint32_t num_local_experts;
    uint32_t num_layers;
    uint32_t num_clients;
    uint32_t
        gather_ns; /* once a client has a frame, how long to wait for min_ready; 0: as for the first */
    const sy_gather* gather; /* null, or 16-byte aligned: whom to wait for beyond min_ready */
    const sy_client_peer* clients; /* device memory, [num_clients], written by the host */
} sy_expert_recv_params;

typedef struct sy_expert_send_params {
    uint32_t version;
    uint32_t flags;
    sy_frame_geometry geometry;
    sy_expert_lists lists;
    const void* expert_out; /* bf16 [num_entries, hidden] in list order; null = identity experts */
    uint32_t max_rows; /* bound of this launch, for the choice of blocks */
    uint32_t num_clients;
    uint32_t num_blocks;
    uint32_t reserved;
    const sy_client_peer* clients; /* device memory, [num_clients], written by the host */
} sy_expert_send_params;

/* Matrices of a layer's experts on this server, in device memory. Rows are contiguous. The copy
 * engine reads them by the maps: sy_describe_layer fills them in. */
typedef struct sy_layer_weights {
    uint64_t gate_up; /* [num_local_experts, 2, inter, hidden]: gate, then up */
    uint64_t down; /* [num_local_experts, hidden, inter] */
    uint64_t gate_up_scale; /* fp8: f32 [num_local_experts, 2, ceil(inter / 128), hidden / 128] */
    uint64_t down_scale; /* fp8: f32 [num_local_experts, hidden / 128, ceil(inter / 128)] */
    uint32_t dtype; /* SY_DTYPE_BF16 or SY_DTYPE_F8_E4M3 */
    uint32_t reserved[7];
    uint64_t gate_up_map[16];
    uint64_t down_map[16];
} sy_layer_weights;

/* The expert stage between expert_recv and expert_send: down(silu(gate(x)) * up(x)) of every entry. */
typedef struct sy_expert_compute_params {
    uint32_t version;
    uint32_t flags;
    sy_frame_geometry geometry;
    sy_expert_lists lists;
    void* rows; /* scratch: bf16 [lists.max_rows, hidden] */
    void* activation; /* scratch: bf16 [lists.max_rows * top_k, inter] */
    void* expert_out; /* bf16 [lists.max_rows * top_k, hidden], in list order */
    const sy_layer_weights* layers; /* device memory, [num_layers], written by the host */
    uint32_t inter; /* intermediate size, a multiple of 64 */
    uint32_t num_local_experts;
    uint32_t num_layers;
    uint32_t num_clients;
    uint32_t num_blocks; /* of each kernel; 0: two per multiprocessor */
    uint32_t weights_dtype; /* SY_DTYPE_BF16 or SY_DTYPE_F8_E4M3: of every layer */
    /* Bound of a thread block's waits for its own copies and products. It expires only if the
     * GPU or its parameters are broken: the kernel then traps, so that nothing behind it in the
     * stream runs. */
    uint64_t timeout_ns;
    /* null, or mapped host memory, which outlives a context that is lost: why a kernel trapped */
    sy_error_word* trapped;
    const sy_client_peer* clients; /* device memory, [num_clients], written by the host */
    /* null, or device memory of SY_TILE_ARRIVALS words, zeroed once: with weights of fp8, the first
     * product of few tokens divides its tiles only with it */
    uint32_t* tile_arrivals;
} sy_expert_compute_params;

/* expert_recv, identity experts and expert_send in one kernel without lists or validation, for
 * clients in lockstep: the cost of the transport alone. */
typedef struct sy_echo_params {
    uint32_t version;
    uint32_t flags;
    sy_frame_geometry geometry;
    sy_server_state* state;
    const uint32_t* abort_mask;
    uint64_t timeout_ns;
    uint32_t capacity; /* most tokens per client, for the choice of blocks */
    uint32_t num_clients;
    uint32_t num_blocks;
    uint32_t reserved;
    const sy_client_peer* clients; /* device memory, [num_clients], written by the host */
} sy_echo_params;

/* Transport measurements between processes. Every pair of peers uses as many blocks on both sides. */
typedef struct sy_p2p_params {
    uint32_t version;
    uint32_t flags;
    uint32_t num_peers;
    uint32_t blocks_per_peer;
    uint32_t num_turns;
    uint32_t begins; /* 1: sends first; 0: answers */
    uint64_t num_bytes; /* 4, 8, or a multiple of 16 */
    uint64_t timeout_ns;
    uint64_t* elapsed_ns; /* [num_peers] */
    sy_error_word* error;
    uint64_t counters[SY_MAX_PEERS]; /* addresses of mine, one per peer, 0 at the start */
    uint64_t counter_offset[SY_MAX_PEERS]; /* of my counter in the peer's window */
    sy_link links[SY_MAX_PEERS];
} sy_p2p_params;

SY_STATIC_ASSERT(sizeof(void*) == 8, "the device path is 64-bit");
SY_STATIC_ASSERT(sizeof(sy_error_word) == 32, "size of sy_error_word");
SY_STATIC_ASSERT(sizeof(sy_frame_geometry) == 128, "size of sy_frame_geometry");
SY_STATIC_ASSERT(sizeof(sy_link) == 24, "size of sy_link");
SY_STATIC_ASSERT(sizeof(sy_replica_set) == 8, "one 8-byte load per expert");
SY_STATIC_ASSERT(offsetof(sy_placement, experts) == 16, "experts of sy_placement");
SY_STATIC_ASSERT(sizeof(sy_server_peer) == 40, "size of sy_server_peer");
SY_STATIC_ASSERT(sizeof(sy_client_peer) == 48, "size of sy_client_peer");
SY_STATIC_ASSERT(sizeof(sy_handle) == 408, "size of sy_handle");
SY_STATIC_ASSERT(offsetof(sy_handle, frame_number) == 24, "frame_number of sy_handle");
SY_STATIC_ASSERT(sizeof(sy_batch) == 544, "size of sy_batch");
SY_STATIC_ASSERT(sizeof(sy_batch) <= SY_STAMPS_OFFSET, "stamps behind the batch");
SY_STATIC_ASSERT(sizeof(sy_gather) == 8, "size of sy_gather");
SY_STATIC_ASSERT(SY_WORD_HEADER(0) > SY_WORD_WAITING, "words of abi.h stay free");
SY_STATIC_ASSERT(SY_WORD_STATUS(SY_MAX_FRAMES - 1) < SY_CONTROL_BYTES, "words fit the tail");
SY_STATIC_ASSERT(SY_MAX_FRAME_TOKENS <= (UINT32_C(1) << SY_ROUTE_SHIFT), "rows fit a route");
/* Parameters stay small for any number of peers: their tables are in memory. */
SY_STATIC_ASSERT(sizeof(sy_placement) == 8208, "size of sy_placement");
SY_STATIC_ASSERT(sizeof(sy_client_state) == 3008, "size of sy_client_state");
SY_STATIC_ASSERT(sizeof(sy_server_state) == 2368, "size of sy_server_state");
SY_STATIC_ASSERT(sizeof(sy_expert_lists) == 64, "size of sy_expert_lists");
SY_STATIC_ASSERT(sizeof(sy_dispatch_params) == 240, "size of sy_dispatch_params");
SY_STATIC_ASSERT(sizeof(sy_combine_params) == 216, "size of sy_combine_params");
SY_STATIC_ASSERT(sizeof(sy_expert_recv_params) == 280, "size of sy_expert_recv_params");
SY_STATIC_ASSERT(sizeof(sy_expert_send_params) == 232, "size of sy_expert_send_params");
SY_STATIC_ASSERT(sizeof(sy_layer_weights) == 320, "size of sy_layer_weights");
SY_STATIC_ASSERT(sizeof(sy_expert_compute_params) == 288, "size of sy_expert_compute_params");
SY_STATIC_ASSERT(offsetof(sy_expert_compute_params, clients) == 272,
                 "clients of sy_expert_compute_params");
SY_STATIC_ASSERT(sizeof(sy_echo_params) == 184, "size of sy_echo_params");
SY_STATIC_ASSERT(sizeof(sy_p2p_params) == 1336, "size of sy_p2p_params");
SY_STATIC_ASSERT(offsetof(sy_dispatch_params, servers) == 232, "servers of sy_dispatch_params");
SY_STATIC_ASSERT(offsetof(sy_combine_params, servers) == 200, "servers of sy_combine_params");
SY_STATIC_ASSERT(offsetof(sy_expert_recv_params, clients) == 272,
                 "clients of sy_expert_recv_params");
SY_STATIC_ASSERT(offsetof(sy_expert_send_params, clients) == 224,
                 "clients of sy_expert_send_params");
SY_STATIC_ASSERT(offsetof(sy_echo_params, clients) == 176, "clients of sy_echo_params");

#endif /* SWITCHYARD_DEVICE_ABI_H */
