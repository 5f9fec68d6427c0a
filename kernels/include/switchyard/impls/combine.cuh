// combine: the servers' rows of each token, summed in ascending order of the servers.
//
// A server is left out and named in the handle if it does not answer within the bound, if the host
// signals its death, or if it refuses its frame. `token_missing` lists the parts that a token
// lacks, so that the host re-sends exactly those.
//
// A row that a server stores by itself is there when none of its words is SY_ANSWER_HOLE any more (SYNC
// POINT row). So every thread waits for its own share of a row, with the very load that it needs, and makes
// holes of it again. Rows that come by a NIC or a proxy are waited for by their flags.
//
// NOTES: warps do not wait for each other from token to token: two ranks take a sixth longer with a
// barrier per token, at 4096 tokens. So when a server is given up, some warps may have summed a
// part that others lack. Such a torn token is left as zeros, and all of its parts are missing.
// Where rows are added to existing values, all parts are waited for before any is summed.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/stamps.cuh"
#include "switchyard/comm/stream.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/combine_few.cuh"
#include "switchyard/impls/combine_parts.cuh"
#include "switchyard/impls/combine_token.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// Servers without which a token cannot be summed in all warps, as a mask.
__device__ __forceinline__ uint32_t lost_by(const CombineShared& shared, uint32_t token_idx) {
    uint32_t lost = 0;
    for (uint32_t rest = shared.lost; rest != 0; rest &= rest - 1) {
        const uint32_t server = __ffs(rest) - 1;
        lost |= token_idx >= shared.first_without[server] ? 1u << server : 0;
    }
    return lost;
}

// Sums a block's tokens. A warp has its share of each, and a lane a route of the token at hand.
template <class Config, Pass kPass>
__device__ __forceinline__ void take_tokens(const sy_combine_params& params, CombineShared& shared,
                                            uint32_t num_tokens, uint32_t routes) {
    const uint32_t hidden = Config::kHidden != 0 ? Config::kHidden : params.geometry.hidden;
    const uint32_t num_chunks = hidden / 8, top_k = params.geometry.top_k;
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t* all_routes = layout::routes_of(params.handle);
    uint32_t lost = shared.lost_before;
    for (uint32_t token_idx = blockIdx.x; token_idx < num_tokens; token_idx += gridDim.x) {
        const uint32_t next_idx = token_idx + gridDim.x;
        const uint32_t next_routes = lane_idx < top_k && next_idx < num_tokens
                                         ? all_routes[uint64_t{next_idx} * top_k + lane_idx]
                                         : SY_NO_ROUTE;
        const uint32_t num_parts = __popc(__ballot_sync(kFullWarp, routes != SY_NO_ROUTE));
        if constexpr (kPass == Pass::kAdd)
            lost = shared.lost == 0 ? 0 : lost_by(shared, token_idx);
        else if constexpr (Config::kPaths != comm::kDirectOnly)
            lost = await_flags<Config>(params, shared, routes, token_idx, lost);
        if (kPass != Pass::kAwait && threadIdx.x == 0 && params.token_missing != nullptr)
            params.token_missing[token_idx] = 0;
        const uint64_t row =
            reinterpret_cast<uint64_t>(params.out) + uint64_t{token_idx} * num_chunks * 16;
        // One pass where the hidden size is known.
        const uint32_t passes_end = Config::kHidden != 0 ? 1 : num_chunks;
        for (uint32_t base = 0; base < passes_end; base += Config::kNumThreads) {
            const RowPlace place{base + threadIdx.x,
                                 Config::kHidden != 0 || base + threadIdx.x < num_chunks};
            const uint64_t out = row + place.chunk_idx * 16;
            float sum[Config::kChunks][8];
            lost = sum_token<Config, kPass>(params, shared, routes, num_parts, place, token_idx,
                                            lost, out, sum);
            if constexpr (kPass != Pass::kAwait)
                store_sum<Config>(out, place, sum);
        }
        routes = next_routes;
    }
}

// The same, added to existing values. A kernel of its own, because it is rare.
template <class Config>
__device__ __noinline__ void add_tokens(const sy_combine_params& params, CombineShared& shared,
                                        uint32_t num_tokens, uint32_t routes) {
    take_tokens<Config, Pass::kAwait>(params, shared, num_tokens, routes);
    __syncthreads();
    take_tokens<Config, Pass::kAdd>(params, shared, num_tokens, routes);
}

// After a server was given up: names the parts that tokens lack, and zeroes torn tokens. Called by
// all threads behind a barrier.
template <class Config>
__device__ __noinline__ void settle(const sy_combine_params& params, const CombineShared& shared,
                                    uint32_t num_tokens, bool adds) {
    const uint32_t top_k = params.geometry.top_k, num_chunks = params.geometry.hidden / 8;
    // Warps that have shares of a row.
    const uint32_t num_warps = min(Config::kNumThreads, num_chunks + 31) / 32;
    const uint32_t* all_routes = layout::routes_of(params.handle);
    for (uint32_t token_idx = blockIdx.x; token_idx < num_tokens; token_idx += gridDim.x) {
        uint32_t servers = 0, lacks = 0;
        bool is_torn = false;
        for (uint32_t i = 0; i < top_k; ++i) {
            const uint32_t route = all_routes[uint64_t{token_idx} * top_k + i];
            if (route == SY_NO_ROUTE)
                break;
            const uint32_t server = server_of(route);
            servers |= 1u << server;
            if ((shared.lost >> server & 1) == 0 || token_idx < shared.first_without[server])
                continue;
            lacks |= 1u << server;
            is_torn |=
                shared.num_without[server] < num_warps || token_idx < shared.all_without[server];
        }
        is_torn &= !adds;
        if (threadIdx.x == 0 && params.token_missing != nullptr)
            params.token_missing[token_idx] = is_torn ? servers : lacks;
        if (is_torn)
            for (uint32_t chunk_idx = threadIdx.x; chunk_idx < num_chunks;
                 chunk_idx += Config::kNumThreads)
                ptx::st_weak_global_v4(reinterpret_cast<uint64_t>(params.out) +
                                           (uint64_t{token_idx} * num_chunks + chunk_idx) * 16,
                                       make_uint4(0, 0, 0, 0));
    }
}

// Whether the frame that combine took last from this place of the ring is not the one before
// `number`: then rows of another frame lie there that were never summed. A frame that is summed
// again had its own rows there.
template <class Config>
__device__ __forceinline__ bool is_stale(const sy_combine_params& params,
                                         const CombineShared& shared, uint32_t server,
                                         uint64_t summed) {
    const uint64_t number = shared.number[server], num_frames = params.geometry.num_frames;
    return (params.handle->contacted >> server & 1) != 0 &&
           (shared.lost_before >> server & 1) == 0 && tells_by_rows<Config>(shared, server) &&
           summed != number && summed != (number > num_frames ? number - num_frames : 0);
}

// Records a server whose rows are not taken, and the reason.
__device__ __forceinline__ void note_given_up(const sy_combine_params& params,
                                              const CombineShared& shared, uint32_t server,
                                              uint32_t reason, uint64_t observed) {
    if (blockIdx.x != 0)
        return;
    comm::record_error(&params.state->error, SY_TAG_COMBINE_ROW, server, reason, observed,
                       shared.number[server]);
    ptx::red_or_relaxed_gpu(&params.handle->missing, 1u << server);
}

// A combine that goes ahead lets the next dispatch start immediately if it has at most this number
// of blocks: then half a GPU is free for dispatch's. With more, only at its end: two blocks of
// dispatch would share a multiprocessor, and dispatch takes as long as its slowest block.
constexpr uint32_t kBlocksApart = 64;

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    combine_kernel(const __grid_constant__ sy_combine_params params) {
    __shared__ CombineShared shared;
    const uint32_t thread_idx = threadIdx.x, lane_idx = threadIdx.x & 31;
    const sy_frame_geometry& geometry = params.geometry;
    layout::TableCopy<sy_server_peer, Config::kNumThreads, SY_MAX_PEERS> servers;
    servers.load(params.servers, params.num_servers);
    uint64_t response = 0;
    if (thread_idx < params.num_servers)
        response = params.servers[thread_idx].response;
    const bool is_ahead = comm::goes_ahead(params.flags);
    const bool lets_at_once = !is_ahead || gridDim.x <= kBlocksApart;
    comm::follow(params.flags);
    if (lets_at_once)
        comm::let_next_start(params.flags);
    // All first loads leave together, this block's first routes among them. Those of a token that
    // does not exist read words of the handle, too; their values are not used.
    uint32_t routes = SY_NO_ROUTE;
    if (lane_idx < geometry.top_k && blockIdx.x < params.capacity)
        routes = layout::routes_of(params.handle)[blockIdx.x * geometry.top_k + lane_idx];
    const uint32_t num_tokens = min(params.handle->num_tokens, params.capacity);
    servers.store(shared.servers, params.num_servers);
    if (blockIdx.x == 0 && thread_idx == 0 && params.trace != nullptr)
        comm::stamp(comm::call_stamps(params.trace, params.trace_len, params.handle->sequence - 1),
                    SY_CALL_COMBINE_BEGIN);
    const bool adds = (params.flags & SY_COMBINE_FLAG_ADD) != 0;
    uint64_t summed = 0; // the last frame that combine took from this place of the ring
    if (thread_idx < 32) {
        bool was_lost = false;
        if (thread_idx < params.num_servers) {
            const uint64_t number = params.handle->frame_number[thread_idx];
            const uint32_t place = layout::ring_place(geometry, number);
            const uint64_t lost = params.state->lost[thread_idx];
            was_lost = lost != 0 && lost != params.handle->sequence &&
                       (params.handle->contacted >> thread_idx & 1) != 0;
            summed = params.state->summed[thread_idx][place];
            shared.number[thread_idx] = number;
            shared.frame[thread_idx] = response + layout::response_frame(geometry, place);
            shared.first_without[thread_idx] = was_lost ? 0 : kNoToken;
            shared.all_without[thread_idx] = 0;
            shared.num_without[thread_idx] = was_lost ? Config::kNumThreads : 0;
        }
        const uint32_t lost = __ballot_sync(kFullWarp, was_lost);
        if (thread_idx == 0) {
            shared.lost = shared.lost_before = lost;
            shared.stale = 0;
        }
        if (was_lost)
            note_given_up(params, shared, thread_idx, SY_REASON_ABORT, 0);
    }
    __syncthreads();
    // Late enough for a sum that begins at zero.
    const auto give_up_stale = [&]() {
        if (thread_idx < params.num_servers &&
            is_stale<Config>(params, shared, thread_idx, summed)) {
            atomicOr(&shared.stale, 1u << thread_idx);
            // Some warps may have summed the existing values, in any token.
            atomicMin(&shared.first_without[thread_idx], 0u);
            atomicMax(&shared.all_without[thread_idx], kNoToken);
            atomicOr(&shared.lost, 1u << thread_idx);
            note_given_up(params, shared, thread_idx, SY_REASON_VALUE, summed);
            note_lost_for_good(params, thread_idx);
        }
    };
    if (adds) {
        give_up_stale();
        add_tokens<Config>(params, shared, num_tokens, routes);
    } else {
        if constexpr (Config::kIsFew)
            sum_few<Config>(params, shared, num_tokens, routes);
        else
            take_tokens<Config, Pass::kSum>(params, shared, num_tokens, routes);
        give_up_stale();
    }
    __syncthreads();
    if (shared.lost != 0)
        settle<Config>(params, shared, num_tokens, adds);
    // Other blocks may still have to see that a frame is stale.
    if (blockIdx.x == 0 && thread_idx < params.num_servers &&
        ((params.handle->contacted & ~shared.stale) >> thread_idx & 1) != 0)
        params.state->summed[thread_idx][layout::ring_place(geometry, shared.number[thread_idx])] =
            shared.number[thread_idx];
    // Empty frames are answered too, so that a ring place is never filled again too early.
    if (blockIdx.x == 0 && thread_idx < params.num_servers &&
        (params.handle->contacted >> thread_idx & 1) != 0 &&
        params.handle->num_rows[thread_idx] == 0)
        await_flag<Config>(params, shared, thread_idx, 0, SY_TAG_COMBINE_EMPTY);
    // The next frame in this place of the ring overwrites data that a NIC may still have to read. A
    // server that was given up may get torn frames; its answers are not read.
    if (Config::kPaths != comm::kDirectOnly && blockIdx.x == 0 && thread_idx < params.num_servers &&
        (params.handle->contacted >> thread_idx & 1) != 0)
        await_path<Config>(params, shared, thread_idx);
    if (thread_idx == 0 && params.trace != nullptr)
        comm::stamp_last(
            comm::call_stamps(params.trace, params.trace_len, params.handle->sequence - 1),
            SY_CALL_COMBINE_END);
    if (!lets_at_once)
        comm::let_next_start(params.flags);
    comm::join(params.flags);
}

} // namespace switchyard::impls
