// dispatch's tables of its tokens, and everything about them except their values: entries, routes,
// headers, handle.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// Rows of entries that a warp puts together before it sends them.
constexpr uint32_t kStagedRows = 8;

// kHidden_ and kTopK_ may be 0: then the parameters' values hold at run time.
template <uint32_t kHidden_, uint32_t kTopK_, bool kFp8_, uint32_t kNumThreads_,
          uint32_t kPaths_ = comm::kDirectOnly>
struct DispatchConfig {
    static constexpr uint32_t kPaths = kPaths_;
    // Building requests takes registers.
    static constexpr uint32_t kMinBlocks = kPaths_ == comm::kDirectOnly ? 2 : 1;
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kTopK = kTopK_;
    static constexpr bool kFp8 = kFp8_;
    static constexpr uint32_t kNumThreads = kNumThreads_;
    static constexpr uint32_t kMaxTopK = kTopK_ != 0 ? kTopK_ : SY_MAX_DEVICE_TOP_K;
    // 16 values per thread cover a row: rows are loaded ahead, into registers.
    static constexpr bool kRowPerPass = kHidden_ == 16 * kNumThreads_;
    // Entries go through shared memory, a warp's together.
    static constexpr bool kStages = kTopK_ != 0 && kTopK_ % 2 == 0;
    static constexpr uint32_t kStagedParts = kStagedRows * kTopK_ / 2;
    static_assert(kNumThreads_ % 32 == 0 && kNumThreads_ <= 1024, "whole warps");
    static_assert(kHidden_ % SY_SCALE_BLOCK == 0, "whole scale blocks");
};

struct DispatchShared {
    sy_replica_set replicas[SY_MAX_EXPERTS];
    // The server of an expert with one replica, kNoServer or kManyServers.
    uint8_t only_server[SY_MAX_EXPERTS];
    sy_server_peer servers[SY_MAX_PEERS];
    uint64_t frame_window[SY_MAX_PEERS];
    uint64_t frame_number[SY_MAX_PEERS];
    uint32_t frame_place[SY_MAX_PEERS];
    uint32_t rows_before[SY_MAX_PEERS];
    // Of up to 32 tokens of a data block: the servers of each, and the tokens of each server, as masks.
    uint32_t contacted;
    uint32_t servers_of[32];
    uint32_t start_of[32]; // server that is sent to first
    uint32_t tokens_of[SY_MAX_PEERS];
    // Rows by warp and server in a round of send_entries, by parity of the round.
    uint32_t warp_rows[2][32][SY_MAX_PEERS];
};

constexpr uint32_t kNoServer = 0xff;
constexpr uint32_t kManyServers = 0xfe;

// NOTES: every thread of a block looks several experts up, and 448 threads share four schedulers:
// each instruction here costs the block 7 clocks.
__device__ __forceinline__ uint8_t only_server(const sy_replica_set& set, uint32_t num_servers) {
    if (set.num_replicas > 1)
        return kManyServers;
    return set.num_replicas == 1 && set.server[0] < num_servers ? set.server[0] : kNoServer;
}

// Server that serves this (token, expert); kNoServer when masked, out of range or without replica.
__device__ __forceinline__ uint32_t pick_server(const DispatchShared& shared,
                                                const sy_dispatch_params& params,
                                                uint32_t token_idx, int32_t expert) {
    if (static_cast<uint32_t>(expert) >= params.num_experts)
        return kNoServer;
    const uint32_t only = shared.only_server[expert];
    if (only != kManyServers)
        return only;
    const sy_replica_set& set = shared.replicas[expert];
    const uint32_t num_replicas = min(uint32_t{set.num_replicas}, uint32_t{SY_MAX_REPLICAS});
    // Spreads the tokens of an expert evenly; a multiplication instead of a division keeps the code short.
    const uint32_t spread = (token_idx * 37 + static_cast<uint32_t>(expert)) & 0xff;
    const uint32_t server = set.server[spread * num_replicas >> 8];
    return server < params.num_servers ? server : kNoServer;
}

template <class Config>
__device__ __forceinline__ void load_experts(const sy_dispatch_params& params, uint32_t token_idx,
                                             int32_t (&experts)[Config::kMaxTopK]) {
    const uint32_t top_k = Config::kTopK != 0 ? Config::kTopK : params.geometry.top_k;
    const int32_t* source = params.topk_idx + static_cast<uint64_t>(token_idx) * top_k;
    if constexpr (Config::kTopK != 0 && Config::kTopK % 4 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < Config::kTopK / 4; ++i) {
            const int4 four = __ldg(reinterpret_cast<const int4*>(source) + i);
            experts[4 * i] = four.x, experts[4 * i + 1] = four.y;
            experts[4 * i + 2] = four.z, experts[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < Config::kMaxTopK; ++i)
            experts[i] = i < top_k ? __ldg(source + i) : -1;
    }
}

template <class Config>
__device__ __forceinline__ void load_weights(const sy_dispatch_params& params, uint32_t token_idx,
                                             float (&weights)[Config::kMaxTopK]) {
    const uint32_t top_k = Config::kTopK != 0 ? Config::kTopK : params.geometry.top_k;
    const float* source = params.topk_weights + static_cast<uint64_t>(token_idx) * top_k;
    if constexpr (Config::kTopK != 0 && Config::kTopK % 4 == 0) {
#pragma unroll
        for (uint32_t i = 0; i < Config::kTopK / 4; ++i) {
            const float4 four = __ldg(reinterpret_cast<const float4*>(source) + i);
            weights[4 * i] = four.x, weights[4 * i + 1] = four.y;
            weights[4 * i + 2] = four.z, weights[4 * i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < Config::kMaxTopK; ++i)
            weights[i] = i < top_k ? __ldg(source + i) : 0.0f;
    }
}

template <class Config>
__device__ __forceinline__ uint32_t server_mask(const DispatchShared& shared,
                                                const sy_dispatch_params& params,
                                                uint32_t token_idx,
                                                const int32_t (&experts)[Config::kMaxTopK]) {
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t i = 0; i < Config::kMaxTopK; ++i) {
        const uint32_t server = pick_server(shared, params, token_idx, experts[i]);
        if (server != kNoServer)
            mask |= 1u << server;
    }
    return mask;
}

// Counts, for every server, the tokens before `limit` that go there, into shared.rows_before.
template <class Config>
__device__ __forceinline__ void count_rows(DispatchShared& shared, const sy_dispatch_params& params,
                                           uint32_t limit, uint32_t num_tokens,
                                           int32_t (&experts)[Config::kMaxTopK]) {
    const uint32_t lane_idx = threadIdx.x & 31;
    uint32_t count = 0;
    limit = min(limit, num_tokens);
    for (uint32_t base = threadIdx.x - lane_idx; base < limit; base += Config::kNumThreads) {
        const uint32_t token_idx = base + lane_idx;
        const uint32_t mask =
            token_idx < limit ? server_mask<Config>(shared, params, token_idx, experts) : 0;
        // The next round's experts are under way while this one's are counted.
        if (token_idx + Config::kNumThreads < limit)
            load_experts<Config>(params, token_idx + Config::kNumThreads, experts);
        for (uint32_t server = 0; server < params.num_servers; ++server) {
            const uint32_t goes = __ballot_sync(kFullWarp, mask >> server & 1);
            if (lane_idx == server)
                count += __popc(goes);
        }
    }
    if (lane_idx < params.num_servers && count != 0)
        atomicAdd(&shared.rows_before[lane_idx], count);
}

// Entries of the warp's tokens for one server, which lie one behind the other there: whole lines
// travel in a third of the packets of a row per lane. `all` are the lanes whose tokens go to that
// server.
template <class Config, class MakePair>
__device__ __forceinline__ void send_staged(uint4* staged, uint64_t entries, uint32_t all,
                                            MakePair make_pair) {
    constexpr uint32_t kParts = Config::kTopK / 2; // of a row, 16 bytes each
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t num_rows = __popc(all), rank = __popc(all & ((1u << lane_idx) - 1));
    for (uint32_t first = 0; first < num_rows; first += kStagedRows) {
        if ((all >> lane_idx & 1) != 0 && rank - first < kStagedRows) {
#pragma unroll
            for (uint32_t i = 0; i < kParts; ++i) {
                const uint2 a = make_pair(2 * i), b = make_pair(2 * i + 1);
                staged[(rank - first) * kParts + i] = {a.x, a.y, b.x, b.y};
            }
        }
        __syncwarp();
        const uint32_t num_parts = min(num_rows - first, kStagedRows) * kParts;
        for (uint32_t part = lane_idx; part < num_parts; part += 32)
            ptx::st_weak_global_v4(entries + (first * kParts + part) * sizeof(uint4), staged[part]);
        __syncwarp();
    }
}

// Entries and routes of this thread's token. `first` is, in lane s, the row of the warp's first token at
// server s; `staged` the warp's part of shared memory.
template <class Config, bool kStages>
__device__ __forceinline__ void
store_entries(const DispatchShared& shared, uint4* staged, const sy_dispatch_params& params,
              uint32_t top_k, uint32_t token_idx, uint32_t mask, uint32_t first, bool is_token,
              const int32_t (&experts)[Config::kMaxTopK], const float (&weights)[Config::kMaxTopK],
              const uint32_t (&picked)[Config::kMaxTopK]) {
    const uint32_t lane_idx = threadIdx.x & 31;
#pragma unroll
    for (uint32_t i = 0; i < Config::kMaxTopK; ++i)
        if (is_token && i < top_k && experts[i] != -1 && picked[i] == kNoServer) {
            const bool in_range = static_cast<uint32_t>(experts[i]) < params.num_experts;
            comm::record_error(&params.state->error,
                               in_range ? SY_TAG_NO_REPLICA : SY_TAG_BAD_EXPERT, 0, SY_REASON_VALUE,
                               static_cast<uint32_t>(experts[i]), params.num_experts);
        }
    uint32_t* routes = layout::routes_of(params.handle) + uint64_t{token_idx} * top_k;
    uint32_t place = 0;
    for (uint32_t server = 0; server < params.num_servers; ++server) {
        const bool goes = (mask >> server & 1) != 0;
        const uint32_t all = __ballot_sync(kFullWarp, goes);
        const uint32_t first_row = __shfl_sync(kFullWarp, first, server);
        const uint32_t row = first_row + __popc(all & ((1u << lane_idx) - 1));
        if (goes)
            routes[place++] = server << SY_ROUTE_SHIFT | row;
        const auto pair = [&](uint32_t i) {
            const bool applies = picked[i] == server;
            return make_uint2(applies ? static_cast<uint32_t>(experts[i]) : SY_NO_EXPERT,
                              applies ? __float_as_uint(weights[i]) : 0u);
        };
        const uint64_t frame = shared.frame_window[server];
        const uint64_t entries = layout::entries_at(params.geometry, frame, row);
        if constexpr (kStages) {
            send_staged<Config>(staged, layout::entries_at(params.geometry, frame, first_row), all,
                                pair);
        } else if constexpr (Config::kTopK != 0 && Config::kTopK % 2 == 0) {
            if (!goes)
                continue;
#pragma unroll
            for (uint32_t i = 0; i < Config::kTopK; i += 2) {
                const uint2 a = pair(i), b = pair(i + 1);
                ptx::st_weak_global_v4(entries + i * sizeof(sy_entry), {a.x, a.y, b.x, b.y});
            }
        } else if (goes) {
#pragma unroll
            for (uint32_t i = 0; i < Config::kMaxTopK; ++i)
                if (i < top_k)
                    ptx::st_weak_global_v2(entries + i * sizeof(sy_entry), pair(i));
        }
    }
    if (is_token)
        for (; place < top_k; ++place)
            routes[place] = SY_NO_ROUTE;
}

// Headers, handle and the next parity of `posted`: one lane per server. Servers with a frame, as a mask.
template <class Config>
__device__ __forceinline__ uint32_t write_heads(const DispatchShared& shared,
                                                const sy_dispatch_params& params, uint64_t sequence,
                                                uint32_t num_tokens, uint64_t epoch,
                                                uint32_t num_rows) {
    const uint32_t server = threadIdx.x & 31;
    const sy_frame_geometry& geometry = params.geometry;
    const bool is_server = server < params.num_servers;
    const bool contacts =
        is_server && (num_rows != 0 || (params.flags & SY_DISPATCH_FLAG_CONTACT_ALL) != 0);
    const uint32_t contacted = __ballot_sync(kFullWarp, contacts);
    if (server == 0) {
        params.handle->sequence = sequence + 1;
        params.handle->num_tokens = num_tokens;
        params.handle->contacted = contacted;
        params.handle->missing = 0;
        params.handle->refused = 0;
    }
    if (!is_server)
        return contacted;
    const uint64_t number = shared.frame_number[server];
    params.handle->frame_number[server] = number;
    params.handle->num_rows[server] = num_rows;
    params.state->posted[(sequence + 1) & 1][server] = contacts ? number : number - 1;
    if (!contacts)
        return contacted;
    const uint32_t path = shared.servers[server].request.path;
    if (Config::kPaths == comm::kDirectOnly && path != SY_PATH_DIRECT)
        comm::record_error(&params.state->error, SY_TAG_PATH, server, SY_REASON_VALUE, path,
                           SY_PATH_DIRECT);
    sy_frame_header header = {};
    header.epoch = epoch;
    header.client_id = params.client_id;
    header.sequence = sequence + 1;
    header.generation = shared.servers[server].generation;
    header.layer = params.layer;
    header.magic = SY_DEVICE_FRAME_MAGIC;
    header.version = SY_DEVICE_ABI_VERSION;
    header.kind = SY_KIND_DISPATCH;
    header.dtype = static_cast<uint16_t>(geometry.dtype);
    header.response_dtype = SY_DTYPE_BF16;
    header.num_tokens = num_rows;
    header.num_entries = num_rows * geometry.top_k;
    header.hidden = geometry.hidden;
    header.num_frames = 1;
    header.row_stride_bytes = geometry.row_stride_bytes;
    header.entries_offset = static_cast<uint32_t>(geometry.entries_offset);
    header.scales_offset = static_cast<uint32_t>(geometry.scales_offset);
    header.payload_offset = static_cast<uint32_t>(geometry.payload_offset);
    header.total_bytes = geometry.payload_offset + uint64_t{num_rows} * geometry.row_stride_bytes;
    uint4 words[sizeof(header) / sizeof(uint4)];
    memcpy(words, &header, sizeof(header));
#pragma unroll
    for (uint32_t i = 0; i < sizeof(header) / sizeof(uint4); ++i)
        ptx::st_weak_global_v4(shared.frame_window[server] + i * sizeof(uint4), words[i]);
    return contacted;
}

// Entries and routes of a run of tokens. `before` is, in lane s, the row of the first one at server s;
// returned is that of the first token behind the run. `experts` and `weights` are those of this thread's
// token of the first round.
template <class Config, bool kStages>
__device__ __forceinline__ uint32_t send_entries(DispatchShared& shared, uint4* staged,
                                                 const sy_dispatch_params& params, uint32_t begin,
                                                 uint32_t end, uint32_t before,
                                                 int32_t (&experts)[Config::kMaxTopK],
                                                 float (&weights)[Config::kMaxTopK]) {
    constexpr uint32_t kNumWarps = Config::kNumThreads / 32;
    const uint32_t top_k = Config::kTopK != 0 ? Config::kTopK : params.geometry.top_k;
    const uint32_t lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x / 32;
    uint32_t parity = 0;
    for (uint32_t base = begin; base < end; base += Config::kNumThreads, parity ^= 1) {
        const uint32_t token_idx = base + threadIdx.x;
        const bool is_token = token_idx < end;
        if (base != begin && is_token) {
            load_experts<Config>(params, token_idx, experts);
            load_weights<Config>(params, token_idx, weights);
        }
        const bool has_tokens = base + warp_idx * 32 < end;
        uint32_t picked[Config::kMaxTopK];
        uint32_t mask = 0, count = 0;
        if (has_tokens) {
#pragma unroll
            for (uint32_t i = 0; i < Config::kMaxTopK; ++i) {
                picked[i] =
                    is_token ? pick_server(shared, params, token_idx, experts[i]) : kNoServer;
                mask |= picked[i] != kNoServer ? 1u << picked[i] : 0;
            }
            for (uint32_t server = 0; server < params.num_servers; ++server) {
                const uint32_t goes = __ballot_sync(kFullWarp, mask >> server & 1);
                if (lane_idx == server)
                    count = __popc(goes);
            }
        }
        shared.warp_rows[parity][warp_idx][lane_idx] = count;
        __syncthreads();
        uint32_t first = before;
        if (lane_idx < params.num_servers) {
#pragma unroll
            for (uint32_t warp = 0; warp < kNumWarps; ++warp) {
                const uint32_t rows = shared.warp_rows[parity][warp][lane_idx];
                first += warp < warp_idx ? rows : 0;
                before += rows;
            }
        }
        if (has_tokens)
            store_entries<Config, kStages>(shared, staged, params, top_k, token_idx, mask, first,
                                           is_token, experts, weights, picked);
    }
    return before;
}

// Says to the servers in `contacted` that their header and entries are there: `num_rows` of lane s to
// server s. One warp, after order_signals.
template <class Config>
__device__ __forceinline__ void announce(const DispatchShared& shared,
                                         const sy_dispatch_params& params, uint32_t contacted,
                                         uint32_t num_rows) {
    const sy_frame_geometry& geometry = params.geometry;
    for (uint32_t server = 0; server < params.num_servers; ++server) {
        const uint32_t rows = __shfl_sync(kFullWarp, num_rows, server);
        if ((contacted >> server & 1) == 0)
            continue;
        const uint32_t place = shared.frame_place[server];
        const uint64_t frame = layout::request_frame(geometry, place);
        const comm::Piece pieces[] = {{frame, sizeof(sy_frame_header)},
                                      {layout::entries_at(geometry, frame, 0),
                                       uint64_t{rows} * geometry.top_k * sizeof(sy_entry)}};
        comm::put_signals_warp<Config::kPaths>(
            shared.servers[server].request, pieces, geometry.control_offset + SY_WORD_HEADER(place),
            1, shared.frame_number[server] << SY_ANNOUNCE_SHIFT | rows);
    }
}

// Everything about the tokens but their values, by one block: entries, routes, headers, handle.
template <class Config>
__device__ __forceinline__ void send_heads(DispatchShared& shared, const sy_dispatch_params& params,
                                           uint64_t sequence, uint32_t num_tokens, uint64_t epoch,
                                           int32_t (&experts)[Config::kMaxTopK],
                                           float (&weights)[Config::kMaxTopK]) {
    const uint32_t num_rows =
        send_entries<Config, false>(shared, nullptr, params, 0, num_tokens, 0, experts, weights);
    // The last warp has the fewest tokens.
    if (threadIdx.x / 32 == Config::kNumThreads / 32 - 1) {
        const uint32_t contacted =
            write_heads<Config>(shared, params, sequence, num_tokens, epoch, num_rows);
        if (threadIdx.x % 32 == 0)
            shared.contacted = contacted;
    }
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    // SYNC POINT publish: the header word covers the header and every entry.
    comm::order_signals();
    announce<Config>(shared, params, shared.contacted, num_rows);
}

// Where every block sends entries or, the last one, headers: the block that arrives last announces
// them to the servers. True in the one thread that may advance the sequence.
template <class Config>
__device__ __forceinline__ bool announce_together(const DispatchShared& shared,
                                                  const sy_dispatch_params& params) {
    const uint32_t lane_idx = threadIdx.x & 31;
    __syncthreads();
    if (threadIdx.x >= 32)
        return false;
    // SYNC POINT publish: a block's entries come before its arrival, all arrivals before the words.
    comm::order_signals();
    uint32_t arrival = 0;
    if (lane_idx == 0)
        arrival = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, gridDim.x - 1);
    if (__shfl_sync(kFullWarp, arrival, 0) != gridDim.x - 1)
        return false;
    __syncwarp();
    comm::order_signals();
    const uint32_t num_rows = lane_idx < params.num_servers ? params.handle->num_rows[lane_idx] : 0;
    announce<Config>(shared, params, params.handle->contacted, num_rows);
    return lane_idx == 0;
}

// The share of a block in the entries when every block sends those of its own tokens.
// NOTES: out of line, since it needs more registers than the path for few tokens.
template <class Config>
__device__ __noinline__ bool send_share(DispatchShared& shared, uint4* staged,
                                        const sy_dispatch_params& params, uint32_t begin,
                                        uint32_t end) {
    const uint32_t lane_idx = threadIdx.x & 31;
    int32_t experts[Config::kMaxTopK];
    float weights[Config::kMaxTopK];
    if (begin + threadIdx.x < end) {
        load_experts<Config>(params, begin + threadIdx.x, experts);
        load_weights<Config>(params, begin + threadIdx.x, weights);
    }
    const uint32_t before = lane_idx < params.num_servers ? shared.rows_before[lane_idx] : 0;
    send_entries<Config, Config::kStages>(shared, staged, params, begin, end, before, experts,
                                          weights);
    return announce_together<Config>(shared, params);
}

// The share of the last block then: the parts that a frame has once.
template <class Config>
__device__ __noinline__ bool send_heads_only(DispatchShared& shared,
                                             const sy_dispatch_params& params, uint64_t sequence,
                                             uint32_t num_tokens, uint64_t epoch) {
    int32_t experts[Config::kMaxTopK];
    if (threadIdx.x < num_tokens)
        load_experts<Config>(params, threadIdx.x, experts);
    count_rows<Config>(shared, params, num_tokens, num_tokens, experts);
    __syncthreads();
    if (threadIdx.x < 32)
        write_heads<Config>(shared, params, sequence, num_tokens, epoch,
                            shared.rows_before[threadIdx.x]);
    return announce_together<Config>(shared, params);
}

} // namespace switchyard::impls
