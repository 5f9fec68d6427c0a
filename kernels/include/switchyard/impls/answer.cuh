// Writing answers: rows into the clients' response slots.
//
// A row that the kernel itself stores needs no flag: the client keeps its slot full of words that
// no answer contains, and waits until none of them is left in the row. That saves a fence, which is
// a round trip over the link, and lets a client sum its first tokens while later ones are under
// way. Over other paths a flag per row follows the row. Flags are frame numbers, so none is ever
// reset.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// kHidden_ may be 0: then the geometry's value holds at run time.
template <uint32_t kHidden_, bool kFp8_, uint32_t kNumThreads_,
          uint32_t kPaths_ = comm::kDirectOnly>
struct AnswerConfig {
    static constexpr uint32_t kPaths = kPaths_;
    // Building requests takes registers.
    static constexpr uint32_t kMinBlocks = kPaths_ == comm::kDirectOnly ? 2 : 1;
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr bool kFp8 = kFp8_;
    static constexpr uint32_t kNumThreads = kNumThreads_;
    // Two chunks of eight values per thread cover a row.
    static constexpr bool kRowPerPass = kHidden_ == 16 * kNumThreads_;
};

// Rows of several rounds are named together, the more the longer the run.
__device__ __forceinline__ uint32_t rows_per_naming(uint32_t num_units, uint32_t num_blocks) {
    const uint32_t quarter = num_units / num_blocks / 4;
    return min(max(quarter, 4u), 16u);
}

struct AnswerShared {
    sy_client_peer clients[SY_MAX_PEERS];
    uint64_t request_frame[SY_MAX_PEERS]; // address here
    uint64_t response_window[SY_MAX_PEERS];
    uint64_t number[SY_MAX_PEERS];
    uint32_t num_rows[SY_MAX_PEERS];
    uint32_t row_begin[SY_MAX_PEERS]; // of the client in the batch
    uint32_t most_rows;
    uint32_t given_up; // clients whose frame did not come, as a mask
};

// Client of a unit. Clients alternate, so that every link is busy from the start. The order shifts
// from round to round, so that no block serves one client only.
__device__ __forceinline__ uint32_t client_of_unit(uint32_t unit, uint32_t num_clients,
                                                   uint32_t num_blocks) {
    const uint32_t row = unit / num_clients;
    return (unit % num_clients + row * num_clients / num_blocks) % num_clients;
}

// Names the range that the block has stored, for links that need it. One warp after a barrier: the
// rows of a client together.
template <class Config>
__device__ __forceinline__ void
name_rows(const AnswerShared& shared, const sy_frame_geometry& geometry, uint32_t num_clients,
          uint32_t num_blocks, uint32_t first_unit, uint32_t num_pending) {
    const uint32_t unit = first_unit + threadIdx.x * num_blocks;
    const uint32_t client = client_of_unit(unit, num_clients, num_blocks);
    const uint32_t row = unit / num_clients;
    const bool has_row = threadIdx.x < num_pending && row < shared.num_rows[client];
    for (uint32_t to = 0; to < num_clients; ++to) {
        if (comm::is_direct<Config::kPaths>(shared.clients[to].response))
            continue;
        const bool is_mine = has_row && client == to;
        if (!__any_sync(kFullWarp, is_mine))
            continue;
        const uint64_t frame =
            layout::response_frame(geometry, layout::ring_place(geometry, shared.number[to]));
        comm::put_rows_warp<Config::kPaths>(
            shared.clients[to].response, is_mine, layout::response_row_at(geometry, frame, row),
            geometry.response_stride_bytes, layout::response_flag_at(frame, row),
            shared.number[to]);
    }
}

// From this number of rows per block on, the next row is loaded while one is stored. With fewer
// rows the first one matters, and the preload would delay it: 0.5 us at two.
constexpr uint32_t kRowsInLine = 8;

// Answers by `rows`: `rows.make(client, row, store)` computes a row and hands its chunks to
// `store(chunk_idx, bits)`. Rows that can be loaded ahead have `load(client, row)` and
// `finish(loaded, client, row, store)` for its two halves.
template <class Config, class Rows>
__device__ __forceinline__ void answer_rows(const AnswerShared& shared,
                                            const sy_frame_geometry& geometry, uint32_t num_clients,
                                            const Rows& rows) {
    const uint32_t num_blocks = gridDim.x;
    const uint32_t num_units = shared.most_rows * num_clients;
    const uint32_t most_pending = rows_per_naming(num_units, num_blocks);
    uint32_t num_pending = 0, first_pending = blockIdx.x;
    const auto store_to = [&](uint32_t client, uint32_t row) {
        const uint64_t target =
            layout::response_row_at(geometry, shared.response_window[client], row);
        // SYNC POINT row: each word shows by itself that it has arrived.
        return [target](uint32_t chunk_idx, const uint4& bits) {
            ptx::st_relaxed_sys_v4(target + chunk_idx * 16, bits);
        };
    };
    const auto name_if_due = [&](uint32_t unit) {
        if constexpr (Config::kPaths != comm::kDirectOnly) {
            if (++num_pending == most_pending || unit + num_blocks >= num_units) {
                __syncthreads();
                if (threadIdx.x < 32)
                    name_rows<Config>(shared, geometry, num_clients, num_blocks, first_pending,
                                      num_pending);
                num_pending = 0;
                first_pending = unit + num_blocks;
            }
        }
    };
    if constexpr (Rows::kLoadsAhead) {
        if (num_units >= kRowsInLine * num_blocks) {
            typename Rows::Loaded next;
            uint32_t next_client = client_of_unit(blockIdx.x, num_clients, num_blocks);
            uint32_t next_row = blockIdx.x / num_clients;
            if (next_row < shared.num_rows[next_client])
                next = rows.load(next_client, next_row);
            for (uint32_t unit = blockIdx.x; unit < num_units; unit += num_blocks) {
                const typename Rows::Loaded loaded = next;
                const uint32_t client = next_client, row = next_row, following = unit + num_blocks;
                next_client = client_of_unit(following, num_clients, num_blocks);
                next_row = following / num_clients;
                if (following < num_units && next_row < shared.num_rows[next_client])
                    next = rows.load(next_client, next_row);
                if (row < shared.num_rows[client])
                    rows.finish(loaded, client, row, store_to(client, row));
                name_if_due(unit);
            }
            return;
        }
    }
    for (uint32_t unit = blockIdx.x; unit < num_units; unit += num_blocks) {
        const uint32_t client = client_of_unit(unit, num_clients, num_blocks);
        const uint32_t row = unit / num_clients;
        if (row < shared.num_rows[client])
            rows.make(client, row, store_to(client, row));
        name_if_due(unit);
    }
}

// Eight entries of a row, and the sum of the weights of those that apply.
__device__ __forceinline__ void load_pairs(uint64_t entries, uint4 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = ptx::ld_weak_global_v4(entries + i * sizeof(uint4));
}

__device__ __forceinline__ float sum_pairs(const uint4 (&pairs)[4]) {
    float weight = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (pairs[i].x != SY_NO_EXPERT)
            weight = __fadd_rn(weight, __uint_as_float(pairs[i].y));
        if (pairs[i].z != SY_NO_EXPERT)
            weight = __fadd_rn(weight, __uint_as_float(pairs[i].w));
    }
    return weight;
}

// The same for any number.
__device__ __forceinline__ float sum_entries(uint64_t entries, uint32_t top_k) {
    float weight = 0.0f;
    for (uint32_t i = 0; i < top_k; ++i) {
        const uint2 entry = ptx::ld_weak_global_v2(entries + i * sizeof(sy_entry));
        if (entry.x != SY_NO_EXPERT)
            weight = __fadd_rn(weight, __uint_as_float(entry.y));
    }
    return weight;
}

// Row of identity experts: the token itself times the sum of its weights here.
template <class Config, class Store>
__device__ __forceinline__ void identity_row(const sy_frame_geometry& geometry, uint64_t frame,
                                             uint32_t row, Store store) {
    constexpr bool kFp8 = Config::kFp8;
    const uint32_t hidden = Config::kHidden != 0 ? Config::kHidden : geometry.hidden;
    const uint64_t payload = layout::payload_at(geometry, frame, row);
    const uint64_t scales = layout::scales_at(geometry, frame, row);
    const uint64_t entries = layout::entries_at(geometry, frame, row);
    // All loads before the first use.
    SlotChunk<kFp8> first, second;
    if constexpr (Config::kRowPerPass) {
        first = load_slot_chunk<kFp8>(payload, scales, threadIdx.x);
        second = load_slot_chunk<kFp8>(payload, scales, threadIdx.x + Config::kNumThreads);
    }
    float weight;
    if (geometry.top_k == 8) {
        uint4 pairs[4];
        load_pairs(entries, pairs);
        weight = sum_pairs(pairs);
    } else {
        weight = sum_entries(entries, geometry.top_k);
    }
    if constexpr (Config::kRowPerPass) {
        store(threadIdx.x, weigh_chunk<kFp8>(first, weight));
        store(threadIdx.x + Config::kNumThreads, weigh_chunk<kFp8>(second, weight));
    } else {
        for (uint32_t i = threadIdx.x; i < hidden / 8; i += Config::kNumThreads)
            store(i, weigh_chunk<kFp8>(load_slot_chunk<kFp8>(payload, scales, i), weight));
    }
}

// Rows of identity experts.
template <class Config> struct IdentityRows {
    // NOTES: only with stores: over other paths a kernel uses nearly all registers of a
    // multiprocessor, and copies that it waits for need some, too.
    static constexpr bool kLoadsAhead = Config::kRowPerPass && Config::kPaths == comm::kDirectOnly;
    static constexpr bool kFp8 = Config::kFp8;
    const AnswerShared& shared;
    const sy_frame_geometry& geometry;

    struct Loaded {
        SlotChunk<kFp8> first, second;
        uint4 pairs[4]; // entries, where top_k is 8
    };

    template <class Store>
    __device__ __forceinline__ void make(uint32_t client, uint32_t row, Store store) const {
        identity_row<Config>(geometry, shared.request_frame[client], row, store);
    }

    __device__ __forceinline__ Loaded load(uint32_t client, uint32_t row) const {
        const uint64_t frame = shared.request_frame[client];
        const uint64_t payload = layout::payload_at(geometry, frame, row);
        const uint64_t scales = layout::scales_at(geometry, frame, row);
        Loaded loaded;
        loaded.first = load_slot_chunk<kFp8>(payload, scales, threadIdx.x);
        loaded.second = load_slot_chunk<kFp8>(payload, scales, threadIdx.x + Config::kNumThreads);
        if (geometry.top_k == 8)
            load_pairs(layout::entries_at(geometry, frame, row), loaded.pairs);
        return loaded;
    }

    template <class Store>
    __device__ __forceinline__ void finish(const Loaded& loaded, uint32_t client, uint32_t row,
                                           Store store) const {
        const float weight =
            geometry.top_k == 8
                ? sum_pairs(loaded.pairs)
                : sum_entries(layout::entries_at(geometry, shared.request_frame[client], row),
                              geometry.top_k);
        store(threadIdx.x, weigh_chunk<kFp8>(loaded.first, weight));
        store(threadIdx.x + Config::kNumThreads, weigh_chunk<kFp8>(loaded.second, weight));
    }
};

} // namespace switchyard::impls
