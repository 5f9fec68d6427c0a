// combine: the servers' rows of each token, summed in ascending order of the servers.
//
// A server that does not answer within the bound, or whose death the host signals, or that refuses its
// frame, is left out and named in the handle; `token_missing` tells which tokens lack which part, so
// that the host re-sends those and nothing else.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/stream.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

template <uint32_t kHidden_, uint32_t kNumThreads_, uint32_t kWays_ = comm::kDirectOnly>
struct CombineConfig {
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kNumThreads = kNumThreads_;
    static constexpr uint32_t kWays = kWays_;
    // Building requests takes registers.
    static constexpr uint32_t kMinBlocks = kWays_ == comm::kDirectOnly ? 2 : 1;
    static constexpr bool kIsFew = false;
};

// Most tokens of a block that are waited for together.
template <class Config> constexpr uint32_t kTokensTogether = Config::kIsFew ? 8 : 4;

template <class Config> struct CombineShared {
    sy_server_peer servers[SY_MAX_PEERS];
    uint64_t number[SY_MAX_PEERS];
    uint64_t frame[SY_MAX_PEERS];
    // By parity of the round, so that one barrier per token is enough.
    uint32_t missing[2];
    uint32_t routes[2][kTokensTogether<Config>][SY_MAX_DEVICE_TOP_K];
};

// Whether the server's answer to `row` is there. A server that refused the frame is noted as such.
template <class Config>
__device__ __forceinline__ bool await_row(const sy_combine_params& params,
                                          const CombineShared<Config>& shared, uint32_t server,
                                          uint32_t row, uint32_t tag) {
    constexpr uint32_t kWays = Config::kWays;
    const sy_frame_geometry& geometry = params.geometry;
    const uint64_t number = shared.number[server];
    const uint64_t control = shared.servers[server].response + geometry.response_control_offset;
    const uint64_t* status = reinterpret_cast<const uint64_t*>(
        control + SY_WORD_STATUS(layout::ring_place(geometry, number)));
    const comm::WaitBound bound = {&params.state->error,
                                   params.abort_mask,
                                   &params.handle->missing,
                                   reinterpret_cast<const uint64_t*>(control + SY_WORD_PROGRESS),
                                   status,
                                   params.timeout_ns};
    const uint64_t* flag =
        reinterpret_cast<const uint64_t*>(layout::response_flag_at(shared.frame[server], row));
    bool came;
    if constexpr (kWays == comm::kDirectOnly)
        came = comm::wait_until(flag, number, tag, server, bound);
    else
        came = comm::wait_until<kWays>(flag, number, tag, server, bound,
                                       &shared.servers[server].request);
    if (came)
        return true;
    if (ptx::ld_relaxed_sys(status) >> SY_STATUS_SHIFT == number)
        ptx::red_or_relaxed_gpu(&params.handle->refused, 1u << server);
    ptx::red_or_relaxed_gpu(&params.handle->missing, 1u << server);
    return false;
}

template <class Config>
__device__ __forceinline__ void
sum_token(const sy_combine_params& params, const CombineShared<Config>& shared,
          const uint32_t (&routes)[SY_MAX_DEVICE_TOP_K], uint32_t token_idx, uint32_t missing) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t hidden = Config::kHidden != 0 ? Config::kHidden : geometry.hidden;
    uint8_t* out = static_cast<uint8_t*>(params.out) + uint64_t{token_idx} * hidden * 2;
    // Chunks of a thread whose loads are under way together.
    constexpr uint32_t kChunks = Config::kHidden == 16 * Config::kNumThreads ? 2 : 1;
    for (uint32_t base = threadIdx.x; base < hidden / 8; base += kChunks * Config::kNumThreads) {
        float sum[kChunks][8] = {};
        if ((params.flags & SY_COMBINE_FLAG_ADD) != 0)
#pragma unroll
            for (uint32_t j = 0; j < kChunks; ++j)
                add_chunk<false>(sum[j],
                                 ptx::ld_weak_global_v4(reinterpret_cast<uint64_t>(out) +
                                                        (base + j * Config::kNumThreads) * 16));
        for (uint32_t first = 0; first < geometry.top_k; first += 4) {
            uint4 parts[4][kChunks];
            bool is_end = false;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t place = first + i;
                const uint32_t route = place < geometry.top_k ? routes[place] : SY_NO_ROUTE;
                const uint32_t server = route >> SY_ROUTE_SHIFT;
                is_end |= route == SY_NO_ROUTE;
#pragma unroll
                for (uint32_t j = 0; j < kChunks; ++j) {
                    parts[i][j] = make_uint4(0, 0, 0, 0);
                    if (route != SY_NO_ROUTE && (missing >> server & 1) == 0)
                        parts[i][j] = ptx::ld_weak_global_v4(
                            layout::response_row_at(geometry, shared.frame[server],
                                                    route & ((1u << SY_ROUTE_SHIFT) - 1)) +
                            (base + j * Config::kNumThreads) * 16);
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
#pragma unroll
                for (uint32_t j = 0; j < kChunks; ++j)
                    add_chunk<false>(sum[j], parts[i][j]);
            if (is_end)
                break;
        }
#pragma unroll
        for (uint32_t j = 0; j < kChunks; ++j)
            *reinterpret_cast<uint4*>(out + (base + j * Config::kNumThreads) * 16) =
                round_chunk(sum[j]);
    }
}

// Parts of a token that are on their way while the token before it is summed. More are rare, and cost
// registers.
constexpr uint32_t kPartsAhead = 2;

template <class Config>
__device__ __forceinline__ void load_part(const sy_combine_params& params,
                                          const CombineShared<Config>& shared, uint32_t route,
                                          uint32_t missing, uint4 (&part)[2]) {
    const uint32_t server = route >> SY_ROUTE_SHIFT;
    const bool has_part = route != SY_NO_ROUTE && (missing >> server & 1) == 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        part[i] = make_uint4(0, 0, 0, 0);
        if (has_part)
            part[i] = ptx::ld_weak_global_v4(
                layout::response_row_at(params.geometry, shared.frame[server],
                                        route & ((1u << SY_ROUTE_SHIFT) - 1)) +
                (threadIdx.x + i * Config::kNumThreads) * 16);
    }
}

// sum_token for `num_tokens` tokens of a block, the first of them `first`: the next one's parts are loaded
// while one is summed.
template <class Config>
__device__ __forceinline__ void
sum_tokens(const sy_combine_params& params, const CombineShared<Config>& shared,
           const uint32_t (&routes)[kTokensTogether<Config>][SY_MAX_DEVICE_TOP_K], uint32_t first,
           uint32_t num_tokens, uint32_t missing) {
    static_assert(Config::kHidden == 16 * Config::kNumThreads, "two chunks per thread are a row");
    static_assert(kPartsAhead <= SY_MAX_DEVICE_TOP_K,
                  "there is a route for each, or the word for none");
    uint4 ahead[kPartsAhead][2];
    const auto load_ahead = [&](uint32_t token) {
#pragma unroll
        for (uint32_t i = 0; i < kPartsAhead; ++i)
            load_part<Config>(params, shared, routes[token][i], missing, ahead[i]);
    };
    load_ahead(0);
    for (uint32_t token = 0; token < num_tokens; ++token) {
        uint4 parts[kPartsAhead][2];
#pragma unroll
        for (uint32_t i = 0; i < kPartsAhead; ++i)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j)
                parts[i][j] = ahead[i][j];
        if (token + 1 < num_tokens)
            load_ahead(token + 1);
        uint8_t* out = static_cast<uint8_t*>(params.out) +
                       uint64_t{first + token * gridDim.x} * Config::kHidden * 2 + threadIdx.x * 16;
        constexpr uint32_t kChunkStride = Config::kNumThreads * 16; // bytes
        float sum[2][8] = {};
        if ((params.flags & SY_COMBINE_FLAG_ADD) != 0)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j)
                add_chunk<false>(sum[j], ptx::ld_weak_global_v4(reinterpret_cast<uint64_t>(out) +
                                                                j * kChunkStride));
#pragma unroll
        for (uint32_t i = 0; i < kPartsAhead; ++i)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j)
                add_chunk<false>(sum[j], parts[i][j]);
        for (uint32_t place = kPartsAhead; place < params.geometry.top_k; ++place) {
            if (routes[token][place] == SY_NO_ROUTE)
                break;
            load_part<Config>(params, shared, routes[token][place], missing, parts[0]);
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j)
                add_chunk<false>(sum[j], parts[0][j]);
        }
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j)
            *reinterpret_cast<uint4*>(out + j * kChunkStride) = round_chunk(sum[j]);
    }
}

// Tokens of a block that are waited for together: one, as long as blocks have few, so that sums begin
// early.
template <class Config>
__device__ __forceinline__ uint32_t tokens_per_wait(const sy_combine_params& params) {
    uint32_t num_together = 1;
    const auto is_worth = [&](uint32_t num) {
        return Config::kIsFew ? params.capacity > (num - 1) * gridDim.x
                              : params.capacity >= 2 * num * gridDim.x;
    };
    while (num_together < kTokensTogether<Config> && is_worth(num_together + 1))
        ++num_together;
    return num_together;
}

// Waits for the parts of up to kTokensTogether tokens, a thread for each. Routes that begin as `route`.
template <class Config>
__device__ __forceinline__ void await_tokens(const sy_combine_params& params,
                                             CombineShared<Config>& shared, uint32_t parity,
                                             uint32_t route) {
    const uint32_t thread_idx = threadIdx.x;
    if (thread_idx >= kTokensTogether<Config> * SY_MAX_DEVICE_TOP_K)
        return;
    shared.routes[parity][thread_idx / SY_MAX_DEVICE_TOP_K][thread_idx % SY_MAX_DEVICE_TOP_K] =
        route;
    if (route == SY_NO_ROUTE)
        return;
    const uint32_t server = route >> SY_ROUTE_SHIFT;
    const bool came = await_row<Config>(params, shared, server,
                                        route & ((1u << SY_ROUTE_SHIFT) - 1), SY_TAG_COMBINE_ROW);
    if (!came)
        atomicOr(&shared.missing[parity], 1u << server);
}

// Servers without which a token is incomplete, as a mask.
template <class Config>
__device__ __forceinline__ uint32_t lacks_of(const CombineShared<Config>& shared, uint32_t parity,
                                             uint32_t place, uint32_t missing) {
    uint32_t lacks = 0;
    if (missing != 0)
        for (uint32_t i = 0; i < SY_MAX_DEVICE_TOP_K; ++i) {
            const uint32_t route = shared.routes[parity][place][i];
            if (route != SY_NO_ROUTE)
                lacks |= missing & 1u << (route >> SY_ROUTE_SHIFT);
        }
    return lacks;
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    combine_kernel(const __grid_constant__ sy_combine_params params) {
    __shared__ CombineShared<Config> shared;
    const uint32_t thread_idx = threadIdx.x;
    const sy_frame_geometry& geometry = params.geometry;
    layout::TableCopy<sy_server_peer, Config::kNumThreads, SY_MAX_PEERS> servers;
    servers.load(params.servers, params.num_servers);
    uint64_t response = 0;
    if (thread_idx < params.num_servers)
        response = params.servers[thread_idx].response;
    const uint32_t num_together = tokens_per_wait<Config>(params);
    const bool is_ahead = comm::goes_ahead(params.flags);
    comm::follow(params.flags);
    if (!is_ahead)
        comm::let_next_start(params.flags);
    // All first loads leave together, this block's first routes among them.
    const uint32_t* routes = layout::routes_of(params.handle);
    const uint32_t place = thread_idx / SY_MAX_DEVICE_TOP_K,
                   choice = thread_idx % SY_MAX_DEVICE_TOP_K;
    const auto route_of = [&](uint32_t token_idx, uint32_t num_together, uint32_t limit) {
        const uint32_t mine = token_idx + place * gridDim.x;
        return place < num_together && choice < geometry.top_k && mine < limit
                   ? routes[uint64_t{mine} * geometry.top_k + choice]
                   : SY_NO_ROUTE;
    };
    uint32_t route = route_of(blockIdx.x, 1, params.capacity);
    const uint32_t num_tokens = min(params.handle->num_tokens, params.capacity);
    servers.store(shared.servers, params.num_servers);
    if (thread_idx < 2)
        shared.missing[thread_idx] = 0;
    if (thread_idx < params.num_servers) {
        const uint64_t number = params.handle->frame_number[thread_idx];
        shared.number[thread_idx] = number;
        shared.frame[thread_idx] =
            response + layout::response_frame(geometry, layout::ring_place(geometry, number));
    }
    __syncthreads();
    const uint32_t stride = num_together * gridDim.x;
    uint32_t parity = 0;
    for (uint32_t first = blockIdx.x; first < num_tokens; first += stride, parity ^= 1) {
        if (num_together != 1 || first != blockIdx.x)
            route = route_of(first, num_together, num_tokens);
        await_tokens<Config>(params, shared, parity, route);
        __syncthreads();
        const uint32_t missing = shared.missing[parity];
        const uint32_t token_idx = first + thread_idx * gridDim.x;
        if (thread_idx < num_together && token_idx < num_tokens && params.token_missing != nullptr)
            params.token_missing[token_idx] = lacks_of(shared, parity, thread_idx, missing);
        // A server given up stays given up for the tokens that follow.
        if (thread_idx == 0 && missing != 0)
            atomicOr(&shared.missing[parity ^ 1], missing);
        if constexpr (Config::kIsFew) {
            sum_tokens<Config>(params, shared, shared.routes[parity], first,
                               min(num_together, (num_tokens - first + gridDim.x - 1) / gridDim.x),
                               missing);
            continue;
        }
        for (uint32_t i = 0; i < num_together && first + i * gridDim.x < num_tokens; ++i)
            sum_token<Config>(params, shared, shared.routes[parity][i], first + i * gridDim.x,
                              missing);
    }
    // Empty frames are answered too, so that a ring place is never filled again too early.
    if (blockIdx.x == 0 && thread_idx < params.num_servers &&
        (params.handle->contacted >> thread_idx & 1) != 0 &&
        params.handle->num_rows[thread_idx] == 0)
        await_row<Config>(params, shared, thread_idx, 0, SY_TAG_COMBINE_EMPTY);
    // The next frame in this place of the ring is stored over what a NIC may still have to read.
    if (Config::kWays != comm::kDirectOnly && blockIdx.x == 0 && thread_idx < params.num_servers &&
        (params.handle->contacted >> thread_idx & 1) != 0)
        comm::await_reuse<Config::kWays>(shared.servers[thread_idx].request);
    // NOTES: not before: blocks of the next dispatch would settle beside those that are at work still, two on
    // a multiprocessor, and a dispatch takes as long as its slowest block.
    if (is_ahead)
        comm::let_next_start(params.flags);
    comm::join(params.flags);
}

} // namespace switchyard::impls
