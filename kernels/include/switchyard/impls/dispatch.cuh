// dispatch: tokens to the servers that hold their experts, in one kernel.
//
// Blocks 0 .. n-2 each own a run of consecutive tokens and send their values and scales. The row of
// a token in a server's frame is the number of earlier tokens for that server. Every block counts
// it by itself from topk_idx: cheaper than any exchange between blocks, and the same on every run.
// The last block owns no token: it sends every token's entries, then the headers, and writes the
// handle. If that is too much for one round of the last block, each block sends the entries of its
// own tokens.
//
// A flag per row tells the server that the row has arrived, and a word per frame that header and
// entries have: their writer never reads, and nothing is shared.
//
// Measured gains of the choices, on 4 H200 with 128 tokens of 7168: a block per token instead of a
// warp, 1.4 to 3.5 times; one fence for two tokens instead of one for each, 2 us; beginning with
// different servers, 1 to 3 us; all loads of a token before its first store, 0.3 to 0.9 us at one
// token. Where every warp of 14 repeats a look-up that one could do, an instruction costs seven
// clocks: sharing the look-ups through shared memory gained 1 us.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/stamps.cuh"
#include "switchyard/comm/stream.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/dispatch_entries.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// 16 consecutive values of a token per thread; with kFp8 two neighbouring chunks, else two apart.
template <class Config>
__device__ __forceinline__ void load_row(const sy_dispatch_params& params, uint32_t hidden,
                                         uint32_t token_idx, uint32_t unit_idx,
                                         uint4 (&values)[2]) {
    const uint8_t* row = static_cast<const uint8_t*>(params.hidden_states) +
                         static_cast<uint64_t>(token_idx) * hidden * 2;
    const uint32_t first = Config::kFp8 ? 2 * unit_idx : unit_idx;
    const uint32_t second = Config::kFp8 ? first + 1 : unit_idx + hidden / 16;
    values[0] = ptx::ld_nc_v4(row + first * 16);
    values[1] = ptx::ld_nc_v4(row + second * 16);
}

// A thread's part of a token: codes and, in the first lane, the scales of its warp, or bf16 values.
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
__device__ __forceinline__ void store_unit(const DispatchShared& shared,
                                           const sy_frame_geometry& geometry, uint32_t hidden,
                                           uint32_t lane_of_token, uint32_t unit_idx,
                                           bool is_active, const Unit<Config::kFp8>& unit) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const bool has_whole_warps = Config::kHidden != 0
                                     ? Config::kHidden % 512 == 0
                                     : hidden % 512 == 0 && geometry.scales_per_row % 4 == 0;
    if (!is_active)
        return;
    // Clients and blocks begin with different servers: otherwise all would send to the first one
    // together.
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
        comm::put_signals_warp<Config::kPaths>(shared.servers[server].request, pieces,
                                               layout::request_flag_at(geometry, frame, first),
                                               num_rows, shared.frame_number[server]);
    }
}

// Tokens under one fence: it waits for the link to drain.
constexpr uint32_t kTokensPerFence = 32;
static_assert(32 % kTokensPerFence == 0, "a chunk has whole groups");

// Servers of the tokens `chunk` and following of a data block, a token per lane. Called by one
// warp, with a barrier before they are used.
template <class Config>
__device__ __forceinline__ void map_chunk(DispatchShared& shared, const sy_dispatch_params& params,
                                          uint32_t chunk, uint32_t end,
                                          const int32_t (&experts)[Config::kMaxTopK]) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t mask =
        chunk + lane_idx < end ? server_mask<Config>(shared, params, chunk + lane_idx, experts) : 0;
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
                // The next token is here, and the one after it under way, while this one is stored.
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

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    dispatch_kernel(const __grid_constant__ sy_dispatch_params params) {
    __shared__ DispatchShared shared;
    __shared__ uint4 staging[Config::kStages ? Config::kNumThreads / 32 * Config::kStagedParts : 1];
    const uint32_t thread_idx = threadIdx.x, lane_idx = thread_idx & 31;
    uint64_t start_ns = 0, begin_ns = 0;
    const bool is_traced = params.trace != nullptr && thread_idx == 0;
    if (is_traced)
        start_ns = ptx::mov_globaltimer();
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
    // Each thread reads only its own stores.
    for (uint32_t i = thread_idx; i < params.num_experts; i += Config::kNumThreads)
        shared.only_server[i] = only_server(shared.replicas[i], params.num_servers);
    __syncthreads();
    // NOTES: never ahead of the kernel that computes its input.
    ptx::griddepcontrol_wait();
    comm::let_next_start(params.flags);
    if (is_traced)
        begin_ns = ptx::mov_globaltimer();
    const uint32_t num_data_blocks = gridDim.x - 1;
    const bool is_head_block = blockIdx.x == num_data_blocks;
    uint4* staged = nullptr;
    if constexpr (Config::kStages)
        staged = staging + thread_idx / 32 * Config::kStagedParts;
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
    const bool is_spread = num_tokens > Config::kNumThreads;
    // Every block has read the sequence once it arrives: the last to arrive may advance it.
    const auto arrive = [&] {
        return thread_idx == 0 && ptx::atom_inc_relaxed_gpu(&params.state->arrivals,
                                                            num_data_blocks) == num_data_blocks;
    };
    bool is_last = false;
    if (is_head_block) {
        __syncthreads();
        if (is_traced) {
            uint64_t* stamps = comm::call_stamps(params.trace, params.trace_len, sequence);
            stamps[SY_CALL_DISPATCH_START] = start_ns;
            stamps[SY_CALL_DISPATCH_BEGIN] = begin_ns;
        }
        if (is_spread) {
            is_last = send_heads_only<Config>(shared, params, sequence, num_tokens, epoch);
        } else {
            is_last = arrive();
            send_heads<Config>(shared, params, sequence, num_tokens, epoch, experts, weights);
        }
        if (thread_idx == 0 && asked_tokens > params.capacity)
            comm::record_error(&params.state->error, SY_TAG_NUM_TOKENS, 0, SY_REASON_VALUE,
                               asked_tokens, params.capacity);
    } else {
        const uint32_t end = min(upto, num_tokens);
        if (is_mapper)
            map_chunk<Config>(shared, params, begin, end, own_experts);
        count_rows<Config>(shared, params, begin, num_tokens, experts);
        if (is_spread) {
            __syncthreads();
            is_last = send_share<Config>(shared, staged, params, begin, end);
            // Fetched twice rather than kept meanwhile.
            if constexpr (Config::kRowPerPass)
                if (begin < end)
                    load_row<Config>(params, Config::kHidden, begin, thread_idx, ahead);
        }
        Unit<Config::kFp8> unit = {};
        uint4 second[2] = {};
        if constexpr (Config::kRowPerPass) {
            if (begin + 1 < upto)
                load_row<Config>(params, Config::kHidden, begin + 1, thread_idx, second);
            unit = make_unit<Config>(ahead);
        }
        if (!is_spread) {
            __syncthreads();
            is_last = arrive();
        }
        send_tokens<Config>(shared, params, begin, end, unit, second);
    }
    if (is_last)
        params.state->sequence = sequence + 1;
    if (is_traced)
        comm::stamp_last(comm::call_stamps(params.trace, params.trace_len, sequence),
                         SY_CALL_DISPATCH_END);
}

} // namespace switchyard::impls
