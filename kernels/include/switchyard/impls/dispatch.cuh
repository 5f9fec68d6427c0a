// dispatch: tokens to the servers that hold their experts, in one kernel.
//
// Blocks 0 .. n-2 each own a run of consecutive tokens and send their values and scales. The row of a token
// in a server's frame is the number of earlier tokens that go there, which every block counts by itself
// from topk_idx: cheaper than any exchange between blocks, and the same on every run. The last block owns
// no token: it sends every token's entries, then the headers, and writes the handle.
//
// A flag per row tells the server what has arrived, and a word per frame that header and entries are
// there: their writer never reads, and nothing is shared.
//
// What the choices are worth, measured on 4 H200 with 128 tokens of 7168: a block per token instead of
// a warp, 1.4 to 3.5 times; one fence for two tokens instead of one for each, 2 us; beginning with
// different servers, 1 to 3 us; all loads of a token before its first store, 0.3 to 0.9 us at one token.
// Where every warp of 14 looks up what one could, an instruction costs seven clocks: sharing the look-ups
// by way of shared memory was worth 1 us.
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

// kHidden_ and kTopK_ may be 0: then the parameters' values hold at run time.
template <uint32_t kHidden_, uint32_t kTopK_, bool kFp8_, uint32_t kNumThreads_,
          uint32_t kWays_ = comm::kDirectOnly>
struct DispatchConfig {
    static constexpr uint32_t kWays = kWays_;
    // Building requests takes registers.
    static constexpr uint32_t kMinBlocks = kWays_ == comm::kDirectOnly ? 2 : 1;
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kTopK = kTopK_;
    static constexpr bool kFp8 = kFp8_;
    static constexpr uint32_t kNumThreads = kNumThreads_;
    static constexpr uint32_t kMaxTopK = kTopK_ != 0 ? kTopK_ : SY_MAX_DEVICE_TOP_K;
    // 16 values per thread cover a row: rows are loaded ahead, into registers.
    static constexpr bool kRowPerPass = kHidden_ == 16 * kNumThreads_;
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
    // Rows by warp and server in a round of the head block, by parity of the round.
    uint32_t warp_rows[2][32][SY_MAX_PEERS];
};

constexpr uint32_t kNoServer = 0xff;
constexpr uint32_t kManyServers = 0xfe;

// NOTES: every thread of a block looks several experts up, and 448 threads share four schedulers: each
// instruction here costs the block 7 clocks.
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
        // The next round's experts are on their way while this one's are counted.
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

// 16 consecutive values of a token per thread; with kFp8 two neighbouring chunks, else two apart.
template <class Config>
__device__ __forceinline__ void load_row(const sy_dispatch_params& params, uint32_t hidden,
                                         uint32_t token_idx, uint32_t unit_idx, uint4 (&values)[2]) {
    const uint8_t* row = static_cast<const uint8_t*>(params.hidden_states) +
                         static_cast<uint64_t>(token_idx) * hidden * 2;
    const uint32_t first = Config::kFp8 ? 2 * unit_idx : unit_idx;
    const uint32_t second = Config::kFp8 ? first + 1 : unit_idx + hidden / 16;
    values[0] = ptx::ld_nc_v4(row + first * 16);
    values[1] = ptx::ld_nc_v4(row + second * 16);
}

// What a thread sends of a token: codes and, in the first lane, the scales of its warp, or bf16 values.
template <bool kFp8> struct Unit;
template <> struct Unit<true> {
    uint4 codes, scales;
    float scale;
};
template <> struct Unit<false> {
    uint4 values[2];
};

template <class Config>
__device__ __forceinline__ Unit<Config::kFp8> make_unit(const uint4 (&values)[2]) {
    Unit<Config::kFp8> unit;
    if constexpr (Config::kFp8) {
        const QuantizedChunk chunk = quantize_chunk(values);
        const uint32_t scale = __float_as_uint(chunk.scale);
        unit.codes = chunk.codes;
        unit.scale = chunk.scale;
        // Small NVLink packets are dear, so the four scales of a warp leave as one store.
        unit.scales = {scale, __shfl_sync(kFullWarp, scale, 8), __shfl_sync(kFullWarp, scale, 16),
                       __shfl_sync(kFullWarp, scale, 24)};
    } else {
        unit.values[0] = values[0];
        unit.values[1] = values[1];
    }
    return unit;
}

// Row in the server's frame of the token in place `lane` of the chunk.
__device__ __forceinline__ uint32_t row_of(const DispatchShared& shared, uint32_t server,
                                           uint32_t lane) {
    return shared.rows_before[server] + __popc(shared.tokens_of[server] & ((1u << lane) - 1));
}

template <class Config>
__device__ __forceinline__ void
store_unit(const DispatchShared& shared, const sy_frame_geometry& geometry, uint32_t hidden,
           uint32_t lane_of_token, uint32_t unit_idx, bool is_active, const Unit<Config::kFp8>& unit) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const bool has_whole_warps =
        Config::kHidden != 0 ? Config::kHidden % 512 == 0
                             : hidden % 512 == 0 && geometry.scales_per_row % 4 == 0;
    if (!is_active)
        return;
    // Clients and blocks begin with different servers: else all would send to the first one at once.
    const uint32_t servers = shared.servers_of[lane_of_token];
    const uint32_t before_start = (1u << shared.start_of[lane_of_token]) - 1;
    uint32_t later = servers & before_start;
    for (uint32_t rest = servers & ~before_start; (rest | later) != 0; rest &= rest - 1) {
        if (rest == 0) {
            rest = later;
            later = 0;
        }
        const uint32_t server = __ffs(rest) - 1;
        const uint32_t row = row_of(shared, server, lane_of_token);
        const uint64_t frame = shared.frame_window[server];
        const uint64_t payload = layout::payload_at(geometry, frame, row);
        if constexpr (Config::kFp8) {
            ptx::st_weak_global_v4(payload + unit_idx * 16, unit.codes);
            const uint64_t scales = layout::scales_at(geometry, frame, row);
            if (has_whole_warps) {
                if (lane_idx == 0)
                    ptx::st_weak_global_v4(scales + unit_idx / 2, unit.scales);
            } else if (lane_idx % 8 == 0) {
                reinterpret_cast<float*>(scales)[unit_idx / 8] = unit.scale;
            }
        } else {
            ptx::st_weak_global_v4(payload + unit_idx * 16, unit.values[0]);
            ptx::st_weak_global_v4(payload + (unit_idx + hidden / 16) * 16, unit.values[1]);
        }
    }
}

// The flags of tokens `first_lane` and following of a chunk.
template <class Config>
__device__ __forceinline__ void publish_tokens(const DispatchShared& shared,
                                               const sy_dispatch_params& params,
                                               uint32_t first_lane, uint32_t num_lanes) {
    const sy_frame_geometry& geometry = params.geometry;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    comm::order_signals();
    const uint32_t here = (num_lanes == 32 ? ~0u : (1u << num_lanes) - 1) << first_lane;
    for (uint32_t server = 0; server < params.num_servers; ++server) {
        const uint32_t num_rows = __popc(shared.tokens_of[server] & here);
        if (num_rows == 0)
            continue;
        const uint32_t first = row_of(shared, server, first_lane);
        const uint64_t frame = layout::request_frame(geometry, shared.frame_place[server]);
        const comm::Piece pieces[] = {
            {layout::scales_at(geometry, frame, first),
             uint64_t{num_rows} * geometry.scales_per_row * sizeof(float)},
            {layout::payload_at(geometry, frame, first),
             uint64_t{num_rows} * geometry.row_stride_bytes}};
        comm::put_signals_warp<Config::kWays>(shared.servers[server].request, pieces,
                                              layout::request_flag_at(geometry, frame, first),
                                              num_rows, shared.frame_number[server]);
    }
}

// Tokens under one fence: it waits for the link to drain.
constexpr uint32_t kTokensPerFence = 32;
static_assert(32 % kTokensPerFence == 0, "a chunk has whole groups");

// Servers of the tokens `chunk` and following of a data block, a token per lane. Called by one warp, with a
// barrier before anybody uses them.
template <class Config>
__device__ __forceinline__ void map_chunk(DispatchShared& shared, const sy_dispatch_params& params,
                                          uint32_t chunk, uint32_t end,
                                          const int32_t (&experts)[Config::kMaxTopK]) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t mask = chunk + lane_idx < end
                              ? server_mask<Config>(shared, params, chunk + lane_idx, experts)
                              : 0;
    shared.servers_of[lane_idx] = mask;
    shared.start_of[lane_idx] =
        (chunk + lane_idx + static_cast<uint32_t>(params.client_id)) % params.num_servers;
    for (uint32_t server = 0; server < params.num_servers; ++server) {
        const uint32_t goes = __ballot_sync(kFullWarp, mask >> server & 1);
        if (lane_idx == 0)
            shared.tokens_of[server] = goes;
    }
}

// Payload, scales and flags of a run of tokens. `unit` is the first token's, `ahead` the second one's; the
// first chunk is mapped.
template <class Config>
__device__ __forceinline__ void
send_tokens(DispatchShared& shared, const sy_dispatch_params& params, uint32_t begin, uint32_t end,
            Unit<Config::kFp8> unit, uint4 (&ahead)[2]) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t hidden = Config::kHidden != 0 ? Config::kHidden : geometry.hidden;
    const uint32_t thread_idx = threadIdx.x, lane_idx = thread_idx & 31;
    for (uint32_t chunk = begin; chunk < end; chunk += 32) {
        if (chunk != begin) {
            __syncthreads();
            if (thread_idx < 32) {
                if (thread_idx < params.num_servers)
                    shared.rows_before[thread_idx] += __popc(shared.tokens_of[thread_idx]);
                __syncwarp();
                int32_t experts[Config::kMaxTopK];
                if (chunk + lane_idx < end)
                    load_experts<Config>(params, chunk + lane_idx, experts);
                map_chunk<Config>(shared, params, chunk, end, experts);
            }
            __syncthreads();
        }
        const uint32_t num_lanes = min(end - chunk, 32u);
        for (uint32_t lane = 0; lane < num_lanes; ++lane) {
            const uint32_t token_idx = chunk + lane;
            if constexpr (Config::kRowPerPass) {
                // The next token is here, and the one after it on its way, while this one is stored.
                const uint4 next[2] = {ahead[0], ahead[1]};
                if (token_idx + 2 < end)
                    load_row<Config>(params, hidden, token_idx + 2, thread_idx, ahead);
                store_unit<Config>(shared, geometry, hidden, lane, thread_idx, true, unit);
                if (token_idx + 1 < end)
                    unit = make_unit<Config>(next);
            } else {
                for (uint32_t base = thread_idx - lane_idx; base < hidden / 16;
                     base += Config::kNumThreads) {
                    const uint32_t unit_idx = base + lane_idx;
                    const bool is_active = unit_idx < hidden / 16;
                    uint4 values[2] = {};
                    if (is_active)
                        load_row<Config>(params, hidden, token_idx, unit_idx, values);
                    store_unit<Config>(shared, geometry, hidden, lane, unit_idx, is_active,
                                       make_unit<Config>(values));
                }
            }
            if (lane + 1 == num_lanes || (lane + 1) % kTokensPerFence == 0) {
                const uint32_t first_lane = lane / kTokensPerFence * kTokensPerFence;
                publish_tokens<Config>(shared, params, first_lane, lane + 1 - first_lane);
            }
        }
    }
}

// Entries and routes of this thread's token. `first` is, in lane s, the row of the warp's first token at
// server s.
template <class Config>
__device__ __forceinline__ void
store_entries(const DispatchShared& shared, const sy_dispatch_params& params, uint32_t top_k,
              uint32_t token_idx, uint32_t mask, uint32_t first, bool is_token,
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
        if (!goes)
            continue;
        const uint32_t row = first_row + __popc(all & ((1u << lane_idx) - 1));
        routes[place++] = server << SY_ROUTE_SHIFT | row;
        const uint64_t entries = layout::entries_at(params.geometry, shared.frame_window[server], row);
        const auto pair = [&](uint32_t i) {
            const bool applies = picked[i] == server;
            return make_uint2(applies ? static_cast<uint32_t>(experts[i]) : SY_NO_EXPERT,
                              applies ? __float_as_uint(weights[i]) : 0u);
        };
        if constexpr (Config::kTopK != 0 && Config::kTopK % 2 == 0) {
#pragma unroll
            for (uint32_t i = 0; i < Config::kTopK; i += 2) {
                const uint2 a = pair(i), b = pair(i + 1);
                ptx::st_weak_global_v4(entries + i * sizeof(sy_entry), {a.x, a.y, b.x, b.y});
            }
        } else {
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
                                           uint32_t num_tokens, uint64_t epoch, uint32_t num_rows) {
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
    const uint32_t way = shared.servers[server].request.way;
    if (Config::kWays == comm::kDirectOnly && way != SY_WAY_DIRECT)
        comm::record_error(&params.state->error, SY_TAG_WAY, server, SY_REASON_VALUE, way,
                           SY_WAY_DIRECT);
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

// Everything about the tokens but their values: entries, routes, headers, handle. `experts` and `weights`
// are this thread's token's of the first round.
template <class Config>
__device__ __forceinline__ void
send_heads(DispatchShared& shared, const sy_dispatch_params& params, uint64_t sequence,
           uint32_t num_tokens, uint64_t epoch, int32_t (&experts)[Config::kMaxTopK],
           float (&weights)[Config::kMaxTopK]) {
    constexpr uint32_t kNumWarps = Config::kNumThreads / 32;
    const uint32_t top_k = Config::kTopK != 0 ? Config::kTopK : params.geometry.top_k;
    const uint32_t lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x / 32;
    uint32_t before = 0; // rows at server `lane_idx` of earlier rounds
    uint32_t parity = 0;
    for (uint32_t base = 0; base < num_tokens; base += Config::kNumThreads, parity ^= 1) {
        const uint32_t token_idx = base + threadIdx.x;
        const bool is_token = token_idx < num_tokens;
        if (base != 0 && is_token) {
            load_experts<Config>(params, token_idx, experts);
            load_weights<Config>(params, token_idx, weights);
        }
        const bool has_tokens = base + warp_idx * 32 < num_tokens;
        uint32_t picked[Config::kMaxTopK];
        uint32_t mask = 0, count = 0;
        if (has_tokens) {
#pragma unroll
            for (uint32_t i = 0; i < Config::kMaxTopK; ++i) {
                picked[i] = is_token ? pick_server(shared, params, token_idx, experts[i]) : kNoServer;
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
            store_entries<Config>(shared, params, top_k, token_idx, mask, first, is_token, experts,
                                  weights, picked);
    }
    // The last warp has the fewest tokens.
    if (warp_idx == kNumWarps - 1) {
        const uint32_t contacted =
            write_heads<Config>(shared, params, sequence, num_tokens, epoch, before);
        if (lane_idx == 0)
            shared.contacted = contacted;
    }
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    const uint32_t contacted = shared.contacted;
    // SYNC POINT publish: the header word covers the header and every entry.
    comm::order_signals();
    const sy_frame_geometry& geometry = params.geometry;
    for (uint32_t server = 0; server < params.num_servers; ++server) {
        const uint32_t num_rows = __shfl_sync(kFullWarp, before, server);
        if ((contacted >> server & 1) == 0)
            continue;
        const uint32_t place = shared.frame_place[server];
        const uint64_t frame = layout::request_frame(geometry, place);
        const comm::Piece pieces[] = {
            {frame, sizeof(sy_frame_header)},
            {layout::entries_at(geometry, frame, 0), uint64_t{num_rows} * top_k * sizeof(sy_entry)}};
        comm::put_signals_warp<Config::kWays>(
            shared.servers[server].request, pieces, geometry.control_offset + SY_WORD_HEADER(place),
            1, shared.frame_number[server] << SY_ANNOUNCE_SHIFT | num_rows);
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    dispatch_kernel(const __grid_constant__ sy_dispatch_params params) {
    __shared__ DispatchShared shared;
    const uint32_t thread_idx = threadIdx.x, lane_idx = thread_idx & 31;
    // Tables are the host's: no kernel that this launch may overlap writes them.
    layout::TableCopy<sy_replica_set, Config::kNumThreads, Config::kNumThreads> replicas;
    layout::TableCopy<sy_server_peer, Config::kNumThreads, SY_MAX_PEERS> servers;
    replicas.load(params.placement->experts, min(params.num_experts, Config::kNumThreads));
    servers.load(params.servers, params.num_servers);
    const uint64_t epoch = params.placement->epoch;
    uint64_t window = 0;
    if (thread_idx < params.num_servers)
        window = params.servers[thread_idx].request.window;
    replicas.store(shared.replicas, min(params.num_experts, Config::kNumThreads));
    for (uint32_t i = Config::kNumThreads + thread_idx; i < params.num_experts;
         i += Config::kNumThreads)
        shared.replicas[i] = params.placement->experts[i];
    servers.store(shared.servers, params.num_servers);
    if (thread_idx < SY_MAX_PEERS)
        shared.rows_before[thread_idx] = 0;
    // Each thread looks at what it stored itself.
    for (uint32_t i = thread_idx; i < params.num_experts; i += Config::kNumThreads)
        shared.only_server[i] = only_server(shared.replicas[i], params.num_servers);
    __syncthreads();
    ptx::griddepcontrol_wait();
    if ((params.flags & SY_LAUNCH_FLAG_EARLY) != 0)
        ptx::griddepcontrol_launch_dependents();
    uint64_t start_ns = 0;
    if (blockIdx.x == gridDim.x - 1 && thread_idx == 0 && params.trace != nullptr)
        start_ns = ptx::mov_globaltimer();
    const uint32_t num_data_blocks = gridDim.x - 1;
    const bool is_head_block = blockIdx.x == num_data_blocks;
    const uint32_t run = (params.capacity + num_data_blocks - 1) / num_data_blocks;
    const uint32_t begin = is_head_block ? params.capacity : min(blockIdx.x * run, params.capacity);
    const uint32_t upto = min(begin + run, params.capacity);

    // All first loads leave together; none depends on another.
    uint4 ahead[2] = {};
    if constexpr (Config::kRowPerPass)
        if (begin < upto)
            load_row<Config>(params, Config::kHidden, begin, thread_idx, ahead);
    int32_t experts[Config::kMaxTopK], own_experts[Config::kMaxTopK];
    float weights[Config::kMaxTopK];
    if (thread_idx < begin)
        load_experts<Config>(params, thread_idx, experts);
    if (is_head_block && thread_idx < params.capacity)
        load_weights<Config>(params, thread_idx, weights);
    // The last warp maps the block's own tokens; the first ones count earlier blocks'.
    const bool is_mapper = thread_idx / 32 == Config::kNumThreads / 32 - 1;
    if (is_mapper && begin + lane_idx < upto)
        load_experts<Config>(params, begin + lane_idx, own_experts);
    const uint64_t sequence = params.state->sequence;
    const uint32_t asked_tokens = *params.num_tokens;
    if (thread_idx < params.num_servers) {
        const uint64_t even = params.state->posted[0][thread_idx];
        const uint64_t odd = params.state->posted[1][thread_idx];
        const uint64_t number = ((sequence & 1) != 0 ? odd : even) + 1;
        const uint32_t place = layout::ring_place(params.geometry, number);
        shared.frame_number[thread_idx] = number;
        shared.frame_place[thread_idx] = place;
        shared.frame_window[thread_idx] = window + layout::request_frame(params.geometry, place);
    }
    const uint32_t num_tokens = min(asked_tokens, params.capacity);
    bool is_last = false;
    if (is_head_block) {
        __syncthreads();
        // Every block has read the sequence once it arrives here: the last to arrive may advance it.
        if (thread_idx == 0)
            is_last = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, num_data_blocks) ==
                      num_data_blocks;
        if (thread_idx == 0 && params.trace != nullptr)
            params.trace[sequence % params.trace_len] = start_ns;
        send_heads<Config>(shared, params, sequence, num_tokens, epoch, experts, weights);
        if (thread_idx == 0 && asked_tokens > params.capacity)
            comm::record_error(&params.state->error, SY_TAG_NUM_TOKENS, 0, SY_REASON_VALUE,
                               asked_tokens, params.capacity);
    } else {
        const uint32_t end = min(upto, num_tokens);
        if (is_mapper)
            map_chunk<Config>(shared, params, begin, end, own_experts);
        count_rows<Config>(shared, params, begin, num_tokens, experts);
        Unit<Config::kFp8> unit = {};
        uint4 second[2] = {};
        if constexpr (Config::kRowPerPass) {
            if (begin + 1 < upto)
                load_row<Config>(params, Config::kHidden, begin + 1, thread_idx, second);
            unit = make_unit<Config>(ahead);
        }
        __syncthreads();
        if (thread_idx == 0)
            is_last = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, num_data_blocks) ==
                      num_data_blocks;
        send_tokens<Config>(shared, params, begin, end, unit, second);
    }
    if (is_last)
        params.state->sequence = sequence + 1;
}

} // namespace switchyard::impls
