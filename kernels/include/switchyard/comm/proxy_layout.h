/* Commands from kernels to the threads that post for them, for C11, C++17 and CUDA.
 * transports/proxy/src/abi.rs is the same in Rust. Every change here must raise
 * SY_PROXY_VERSION.
 * A lane is a ring of commands in page-locked host memory. A poster writes a whole command with
 * one store of 16 bytes. The thread at the other end finds it by the lap number inside, so there
 * is no head to move and nothing to reset. Commands of a lane are executed in their order. */
#ifndef SWITCHYARD_COMM_PROXY_LAYOUT_H
#define SWITCHYARD_COMM_PROXY_LAYOUT_H

#include "switchyard/device_abi.h"

#define SY_PROXY_VERSION UINT32_C(3)

#define SY_PROXY_MIN_DEPTH 16
#define SY_PROXY_MAX_DEPTH 65536
#define SY_PROXY_MAX_LANES 256 /* of a peer */

/* Opcodes. 0 is none, so that zeroed memory holds no command. */
#define SY_PROXY_PUT 1    /* source memory to the peer */
#define SY_PROXY_GET 2    /* the peer's memory to source memory */
#define SY_PROXY_ADD 3    /* adds to a 64-bit word of the peer, after all earlier puts */
#define SY_PROXY_SIGNAL 4 /* sets a 64-bit word of the peer that only this side writes, likewise */
#define SY_PROXY_QUIET 5 /* is complete when everything before it has reached the peer's memory */
#define SY_PROXY_FENCE 6 /* orders everything before ahead of everything after */
#define SY_PROXY_WAKE 7 /* wakes the thread that sleeps on the word at the offset */
#define SY_PROXY_NOP 8 /* nothing, in its turn */

/* First word of a command:
 *   0..8    lap, counted from 1, modulo 256
 *   8..12   opcode
 *   12      highest bit of the value of ADD and SIGNAL
 *   13..24  source: 0 is the mirror, others are regions that the host has registered
 *   24..32  window: 0 is the peer's slot, k the memory of GPU k - 1 behind the peer
 *   32..64  offset at the peer, bytes
 * Second word:
 *   0       lowest bit of the lap, so that half a command is seen to be half
 *   PUT, GET: 1..32 bytes, 32..64 offset in the source; ADD, SIGNAL: 1..64 value; else 0 */
#define SY_PROXY_OPCODE_SHIFT 8
#define SY_PROXY_VALUE_SHIFT 12
#define SY_PROXY_SOURCE_SHIFT 13
#define SY_PROXY_WINDOW_SHIFT 24
#define SY_PROXY_OFFSET_SHIFT 32
#define SY_PROXY_MAX_SOURCES 2048
#define SY_PROXY_MAX_WINDOWS 256
#define SY_PROXY_MAX_BYTES UINT32_C(0x7fffffff) /* of one PUT or GET */
#define SY_PROXY_MAX_SLOT_BYTES (UINT64_C(1) << 32)

typedef struct sy_proxy_command {
    uint64_t first;
    uint64_t second;
} sy_proxy_command;

/* The thread's report to the posters. In page-locked host memory. */
typedef struct sy_proxy_lane_words {
    uint64_t completed; /* commands that are over: their cells and sources may be used again */
    uint64_t error; /* 0, or why the lane is out of service: SY_PROXY_ERROR_* below */
    uint8_t pad[112];
} sy_proxy_lane_words;

/* Shared state of posters. In memory of the GPU, zeroed. */
typedef struct sy_proxy_lane_state {
    uint64_t reserved; /* commands given to a poster */
    uint64_t asked; /* number behind the last QUIET that was posted without waiting for it */
    uint8_t pad0[112];
    uint64_t seen; /* `completed` as the last poster read it */
    uint8_t pad1[120];
    uint64_t error; /* 0, or the status that took the lane out of service at this end */
    uint64_t
        polled_at; /* time of the last read of the words by a poster that waits for something else */
    uint8_t pad2[112];
} sy_proxy_lane_state;

typedef struct sy_proxy_lane {
    uint64_t commands; /* address of the ring, aligned to 16 bytes */
    uint64_t words; /* address of sy_proxy_lane_words */
    uint64_t state; /* address of sy_proxy_lane_state */
    uint32_t depth_shift; /* the ring has 1 << depth_shift cells */
    uint32_t budget; /* commands in flight at most, not beyond the depth */
} sy_proxy_lane;

/* A peer's slot and the lanes to it: sy_link.context of a link whose path is SY_PATH_PROXY.
 * Blocks of a kernel choose a lane by their index, so that a block's puts and the flag after
 * them use the same lane. */
typedef struct sy_proxy_peer {
    uint64_t lanes; /* address of sy_proxy_lane[num_lanes] */
    uint64_t mirror; /* local copy of the slot, where kernels store data before they put it */
    uint64_t slot_bytes; /* also of the mirror */
    uint64_t error; /* 0, or address of a sy_error_word for the first expired wait */
    uint64_t abort_mask; /* 0, or address of a word in mapped memory: bit `peer` ends every wait */
    uint64_t timeout_ns; /* of a single wait */
    uint32_t num_lanes;
    uint32_t window;
    uint32_t peer; /* for error words and the abort mask */
    uint32_t version;
} sy_proxy_peer;

/* Result of a call. Numbers that SY_MLX5_* has, too, mean the same there. After every value
 * except OK and ARGUMENT the lane is out of service until the host has connected again. Fused
 * kernels, whose calls return nothing, take the lane out of service for ARGUMENT, too. */
#define SY_PROXY_OK 0
#define SY_PROXY_TIMEOUT 1 /* a wait reached its bound */
#define SY_PROXY_ABORTED 2 /* the host set the peer's bit in the abort mask */
#define SY_PROXY_REFUSED 3 /* the thread took the lane out of service; its word says why */
#define SY_PROXY_DESYNC 4 /* the thread completed a command that was never posted */
#define SY_PROXY_ARGUMENT 5 /* misaligned, too long, or outside of the slot: nothing was posted */

/* sy_proxy_lane_words.error: the code, the opcode found, and the command's number (its lowest 48
 * bits). */
#define SY_PROXY_ERROR_CODE(word) ((uint32_t)((word) & 0xff))
#define SY_PROXY_ERROR_OPCODE(word) ((uint32_t)((word) >> 8 & 0xff))
#define SY_PROXY_ERROR_INDEX(word) ((uint64_t)(word) >> 16)
#define SY_PROXY_ERROR_OPCODE_UNKNOWN 1
#define SY_PROXY_ERROR_WINDOW_UNKNOWN 2
#define SY_PROXY_ERROR_SOURCE_UNKNOWN 3
#define SY_PROXY_ERROR_REMOTE_RANGE 4
#define SY_PROXY_ERROR_SOURCE_RANGE 5
#define SY_PROXY_ERROR_MISALIGNED 6
#define SY_PROXY_ERROR_LAP 7 /* a command of another lap: written out of turn or over another */
#define SY_PROXY_ERROR_RESERVED 8 /* bits that must be 0 are not */
#define SY_PROXY_ERROR_UNSUPPORTED 9 /* the window does not know this operation */
#define SY_PROXY_ERROR_POST 10 /* the transport refused it, or the peer is gone */
#define SY_PROXY_ERROR_STALLED 11 /* not over within the thread's limit */
#define SY_PROXY_ERROR_CLOSED 12 /* the host has closed the peer, or the proxy */

/* sy_error_word.tag of waits on a lane */
#define SY_TAG_PROXY_ROOM 48 /* room in the lane; observed: completed commands */
#define SY_TAG_PROXY_QUIET 49 /* completions; observed: completed commands */
#define SY_TAG_PROXY_LANE 50 /* observed: sy_proxy_lane_words.error */
#define SY_TAG_PROXY_DESYNC 51 /* observed: commands said to be complete; expected: posted ones */
#define SY_TAG_PROXY_ARGUMENT 52 /* a call out of the slot; observed: offset; expected: bytes */

/* Name of the error in a lane, or null. The host calls it before it hands the lane out. */
static inline const char* sy_proxy_check_lane(const sy_proxy_lane* lane) {
    if (lane->depth_shift < 4 || lane->depth_shift > 16)
        return "depth is not a power of two from 16 to 65536";
    if (lane->budget < 2 || lane->budget > UINT32_C(1) << lane->depth_shift)
        return "budget is below 2, a put and its flag, or beyond the depth";
    if (lane->commands == 0 || lane->commands % 16 != 0)
        return "commands is null or not aligned to 16 bytes";
    if (lane->words == 0 || lane->words % 16 != 0 || lane->state == 0 || lane->state % 8 != 0)
        return "words or state is null or not aligned";
    return 0;
}

/* Name of the error in a peer, or null: blocks of kernels divide by its number of lanes, and
 * commands have 32 bits for an offset and 8 for a window. The host calls it before it hands the
 * peer out, and sy_proxy_check_lane for each of its lanes. */
static inline const char* sy_proxy_check_peer(const sy_proxy_peer* peer) {
    if (peer->version != SY_PROXY_VERSION)
        return "version is not SY_PROXY_VERSION";
    if (peer->num_lanes == 0 || peer->num_lanes > SY_PROXY_MAX_LANES)
        return "num_lanes is not from 1 to 256";
    if (peer->lanes == 0 || peer->lanes % 8 != 0)
        return "lanes is null or not aligned to 8 bytes";
    if (peer->mirror == 0 || peer->mirror % 16 != 0)
        return "mirror is null or not aligned to 16 bytes";
    if (peer->slot_bytes == 0 || peer->slot_bytes > SY_PROXY_MAX_SLOT_BYTES)
        return "slot_bytes is 0 or beyond 4 GiB";
    if (peer->window >= SY_PROXY_MAX_WINDOWS)
        return "window is not below 256";
    if (peer->error % 8 != 0 || peer->abort_mask % 4 != 0)
        return "error is not aligned to 8 bytes, or abort_mask not to 4";
    return 0;
}

/* Benchmarks' producers: one warp per block, block b on lane b % peer.num_lanes of peer
 * b / peer.num_lanes. */
typedef struct sy_proxy_produce_params {
    uint32_t version; /* SY_PROXY_VERSION */
    uint32_t num_blocks;
    const sy_proxy_peer* peers; /* device memory */
    uint64_t* latency_ns; /* [num_blocks][num_samples]: from posting a batch to its end; null if
                           * num_samples is 0 */
    uint64_t* elapsed_ns; /* [num_blocks] */
    uint32_t* status; /* [num_blocks]: SY_PROXY_* */
    uint64_t num_commands; /* of each block, a multiple of `batch` */
    uint32_t batch; /* commands posted together: 1 to 32 */
    uint32_t opcode; /* SY_PROXY_PUT or SY_PROXY_NOP */
    uint32_t object_bytes; /* of a put, a multiple of 16 */
    uint32_t num_objects; /* of each lane in mirror and slot, a multiple of `batch` */
    uint32_t flags; /* SY_PROXY_PRODUCE_* */
    uint32_t num_samples;
    uint64_t
        counter_offset; /* per lane 8 bytes from here on are added to, once per object; 0: none */
} sy_proxy_produce_params;

#define SY_PROXY_PRODUCE_FILLS UINT32_C(1) /* every object is filled anew, for checks */
#define SY_PROXY_PRODUCE_ROUND_TRIP UINT32_C(2) /* each batch is over before the next */
#define SY_PROXY_PRODUCE_READS                                                                     \
    UINT32_C(4) /* samples are reads of the lane's words; nothing is posted */
#define SY_PROXY_PRODUCE_STAMPS                                                                    \
    UINT32_C(8) /* samples are when, by this GPU's clock, each batch began to be pushed */
#define SY_PROXY_PRODUCE_CLOCK                                                                     \
    UINT32_C(16) /* nothing is put: each change of the lane's count is answered with the time */

/* Bytes of one relayed put. */
typedef struct sy_peer_copy_entry {
    uint64_t source;
    uint64_t target;
    uint64_t num_bytes;
} sy_peer_copy_entry;

typedef struct sy_peer_copy_params {
    uint32_t version; /* SY_PROXY_VERSION */
    uint32_t num_entries;
    const sy_peer_copy_entry* entries; /* device memory, or page-locked memory of the host */
    uint32_t blocks_per_entry;
    uint32_t reserved;
} sy_peer_copy_params;

#define SY_PROXY_PRODUCE_THREADS 32
#define SY_PEER_COPY_THREADS 512
#define SY_PEER_COPY_MAX_ENTRIES 4096

/* Word `word_idx` of object `number` of a lane, as producers fill it and checks expect it. */
#define SY_PROXY_PATTERN(lane, number, word_idx)                                                   \
    ((((uint64_t)(number) + 1) * UINT64_C(0x9e3779b97f4a7c15)) ^                                   \
     (((uint64_t)(lane) << 40 | (word_idx)) * UINT64_C(0xd1342543de82ef95)))

SY_STATIC_ASSERT(sizeof(sy_proxy_produce_params) == 80, "size of sy_proxy_produce_params");
SY_STATIC_ASSERT(sizeof(sy_peer_copy_params) == 24, "size of sy_peer_copy_params");
SY_STATIC_ASSERT(sizeof(sy_peer_copy_entry) == 24, "size of sy_peer_copy_entry");
SY_STATIC_ASSERT(sizeof(sy_proxy_command) == 16, "size of sy_proxy_command");
SY_STATIC_ASSERT(sizeof(sy_proxy_lane_words) == 128, "size of sy_proxy_lane_words");
SY_STATIC_ASSERT(sizeof(sy_proxy_lane_state) == 384, "size of sy_proxy_lane_state");
SY_STATIC_ASSERT(offsetof(sy_proxy_lane_state, seen) == 128, "seen of sy_proxy_lane_state");
SY_STATIC_ASSERT(offsetof(sy_proxy_lane_state, error) == 256, "error of sy_proxy_lane_state");
SY_STATIC_ASSERT(offsetof(sy_proxy_lane_state, polled_at) == 264,
                 "polled_at of sy_proxy_lane_state");
SY_STATIC_ASSERT(sizeof(sy_proxy_lane) == 32, "size of sy_proxy_lane");
SY_STATIC_ASSERT(offsetof(sy_proxy_lane, budget) == 28, "budget of sy_proxy_lane");
SY_STATIC_ASSERT(sizeof(sy_proxy_peer) == 64, "size of sy_proxy_peer");
SY_STATIC_ASSERT(offsetof(sy_proxy_peer, num_lanes) == 48, "num_lanes of sy_proxy_peer");

#endif /* SWITCHYARD_COMM_PROXY_LAYOUT_H */
