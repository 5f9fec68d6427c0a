/* How the kernels of a layer start, and in how many blocks, by the layer's size. Services and the benchmark
 * of the kernels read the same table; kernels/src/starts.rs is the same in Rust. The choices are the fastest on
 * four H200s. */
#ifndef SWITCHYARD_STARTS_H
#define SWITCHYARD_STARTS_H

#include <stdint.h>

#include "switchyard/device_abi.h"

/* Starts of kernels: each lets more of them run beside one another than the one before it. */
enum {
    SY_START_AFTER = 0, /* each kernel after the one before */
    SY_START_DEPENDENT = 1, /* SY_LAUNCH_FLAG_PDL */
    SY_START_EARLY = 2, /* also SY_LAUNCH_FLAG_EARLY */
    SY_START_COMBINE_AHEAD = 3, /* also combine beside the server's kernel before it */
    SY_START_ALL_AHEAD = 4 /* also the server's first kernel beside dispatch */
};

/* A layer, as far as the choice depends on it. */
typedef struct sy_layer_size {
    uint32_t num_tokens; /* of a client, or rows of a server's batch */
    uint32_t num_clients;
    uint32_t num_servers;
    uint32_t is_colocated; /* each GPU has a client and a server, whose kernels are on one stream */
    uint32_t makes_lists; /* the server sorts entries by expert; else it echoes */
} sy_layer_size;

static inline sy_layer_size sy_make_layer_size(uint32_t num_tokens, uint32_t num_clients,
                                               uint32_t num_servers, uint32_t is_colocated,
                                               uint32_t makes_lists) {
    sy_layer_size size;
    size.num_tokens = num_tokens;
    size.num_clients = num_clients;
    size.num_servers = num_servers;
    size.is_colocated = is_colocated;
    size.makes_lists = makes_lists;
    return size;
}

/* The choice. Blocks: 0 = the launcher's. */
typedef struct sy_starts {
    uint32_t start;
    uint32_t dispatch_blocks;
    uint32_t answer_blocks;
    uint32_t combine_blocks;
} sy_starts;

/* Tokens from which each column of the table below holds, and to which the last one does. */
#define SY_RUN_COLUMNS 6
static const uint32_t sy_run_from[SY_RUN_COLUMNS] = {24, 48, 96, 160, 224, 384};
#define SY_RUN_END UINT32_C(1024)

/* Tokens that a block of dispatch sends one after the other, by number of tokens; 0: the launcher chooses. Header
 * and entries of a frame leave by one block, which has its share of the link only: with fewer blocks beside it
 * a server that makes lists begins sooner. */
typedef struct sy_runs {
    uint32_t num_clients, num_servers, is_colocated;
    uint32_t of[SY_RUN_COLUMNS];
} sy_runs;
#define SY_NUM_RUNS 6
static const sy_runs sy_run_table[SY_NUM_RUNS] = {
    {4, 4, 1, {0, 6, 9, 14, 14, 14}},  {2, 2, 1, {0, 0, 4, 8, 10, 14}},
    {2, 2, 0, {0, 6, 8, 12, 14, 14}},  {1, 3, 0, {4, 6, 10, 14, 8, 8}},
    {3, 1, 0, {4, 8, 12, 14, 14, 14}}, {1, 1, 0, {0, 0, 8, 8, 10, 14}},
};

/* One block per multiprocessor, which leaves room for one of another kernel. Where clients and servers have GPUs of
 * their own, two of the same kernel are slower than one. */
#define SY_BLOCKS_BESIDE UINT32_C(132)
/* Blocks that answer, few enough for combine's to find room beside them. */
#define SY_ANSWERS_BESIDE UINT32_C(64)

static inline uint32_t sy_start_for(sy_layer_size size) {
    /* With lists, 4,096 tokens gain 1 to 3 % where each kernel starts after the one before. With 1,024 it
     * hardly matters, and services lose 2 % with 2,048. */
    if (!size.is_colocated)
        return size.makes_lists && size.num_tokens >= 4096 ? SY_START_AFTER : SY_START_EARLY;
    return !size.makes_lists && size.num_tokens > 256 && size.num_tokens <= 2048
               ? SY_START_COMBINE_AHEAD
               : SY_START_ALL_AHEAD;
}

/* Tokens of a block of dispatch, 0 where the launcher chooses. */
static inline uint32_t sy_run_for(sy_layer_size size) {
    if (!size.makes_lists || size.num_tokens < sy_run_from[0] || size.num_tokens >= SY_RUN_END)
        return 0;
    uint32_t column = 0;
    while (column + 1 < SY_RUN_COLUMNS && size.num_tokens >= sy_run_from[column + 1])
        ++column;
    for (uint32_t i = 0; i < SY_NUM_RUNS; ++i) {
        const sy_runs* runs = &sy_run_table[i];
        if (runs->num_clients == size.num_clients && runs->num_servers == size.num_servers &&
            runs->is_colocated == size.is_colocated)
            return runs->of[column];
    }
    return 0;
}

/* The choice for a layer of this size. */
static inline sy_starts sy_starts_for(sy_layer_size size) {
    sy_starts starts;
    const uint32_t run = sy_run_for(size);
    const uint32_t beside = size.num_tokens > 128 ? SY_BLOCKS_BESIDE : 0;
    const uint32_t answers_few = size.is_colocated && !size.makes_lists &&
                                 size.num_tokens > 48 && size.num_tokens <= 128;
    starts.start = sy_start_for(size);
    starts.dispatch_blocks = run == 0 ? 0 : (size.num_tokens + run - 1) / run;
    starts.answer_blocks = answers_few ? SY_ANSWERS_BESIDE : beside;
    starts.combine_blocks = beside;
    return starts;
}

/* SY_LAUNCH_FLAG_* of a start, for every kernel. */
static inline uint32_t sy_flags_of_start(uint32_t start) {
    return start == SY_START_AFTER       ? 0
           : start == SY_START_DEPENDENT ? SY_LAUNCH_FLAG_PDL
                                         : SY_LAUNCH_FLAG_PDL | SY_LAUNCH_FLAG_EARLY;
}

/* Rows for which a server records graphs, besides its most. */
#define SY_NUM_BUCKETS 8
static const uint32_t sy_buckets[SY_NUM_BUCKETS] = {8, 32, 64, 128, 256, 512, 2048, 8192};

#endif /* SWITCHYARD_STARTS_H */
