// combine: the servers' rows of each token, summed in ascending order of the servers.
//
// A server that does not answer within the bound, or whose death the host signals, or that refuses its
// frame, is left out and named in the handle; `token_missing` tells which parts a token lacks, so that the
// host re-sends those and nothing else.
//
// A row that a server stores by itself is there when none of its words is SY_ANSWER_HOLE any more (SYNC
// POINT row). So every thread waits for its own share of a row, with the very load that it needs, and makes
// holes of it again. Rows that come by a NIC or a proxy are waited for by their flags.
//
// NOTES: warps do not wait for each other from token to token: two ranks take a sixth longer with a barrier per
// token, at 4096 tokens. So when a server is given up, some warps may have summed a part that others lack.
// Such a torn token is left as zeros, and all of its parts are missing; where rows are added to what is there,
// all parts are waited for before any is summed.
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
    // Chunks of eight values of a row that a thread sums at a time. Two cover a row where its size is known.
    static constexpr uint32_t kChunks = kHidden_ != 0 ? 2 : 1;
    static_assert(kHidden_ == 0 || kHidden_ == 8 * kChunks * kNumThreads_, "one pass is a row");
    // Building requests takes registers.
    static constexpr uint32_t kMinBlocks = kWays_ == comm::kDirectOnly ? 2 : 1;
    static constexpr bool kIsFew = false;
};

constexpr uint32_t kNoToken = 0xffffffffu;

struct CombineShared {
    sy_server_peer servers[SY_MAX_PEERS];
    uint64_t number[SY_MAX_PEERS];
    uint64_t frame[SY_MAX_PEERS];
    uint32_t lost_before; // servers that an earlier kernel gave up, as a mask
    uint32_t stale; // servers of whose last frame in this place nobody took the answer, as a mask
    // Servers that a warp has given up, as a mask, and of each: the first token that a warp summed without it,
    // the first that all did that ever gave it up, and how many have.
    uint32_t lost;
    uint32_t first_without[SY_MAX_PEERS];
    uint32_t all_without[SY_MAX_PEERS];
    uint32_t num_without[SY_MAX_PEERS];
};

__device__ __forceinline__ uint32_t server_of(uint32_t route) { return route >> SY_ROUTE_SHIFT; }

__device__ __forceinline__ uint32_t row_of(uint32_t route) {
    return route & ((1u << SY_ROUTE_SHIFT) - 1);
}

__device__ __forceinline__ comm::WaitBound bound_of(const sy_combine_params& params,
                                                    const CombineShared& shared, uint32_t server) {
    const uint64_t control =
        shared.servers[server].response + params.geometry.response_control_offset;
    return {
        &params.state->error,
        params.abort_mask,
        &params.handle->missing,
        reinterpret_cast<const uint64_t*>(control + SY_WORD_PROGRESS),
        reinterpret_cast<const uint64_t*>(
            control + SY_WORD_STATUS(layout::ring_place(params.geometry, shared.number[server]))),
        params.timeout_ns};
}

// Later frames' combines do without the server, too.
__device__ __forceinline__ void note_lost_for_good(const sy_combine_params& params,
                                                   uint32_t server) {
    ptx::st_relaxed_sys(&params.state->lost[server], params.handle->sequence);
}

// A server that did not answer. One that refused the frame is noted as such; of any other the slot is of no use
// any more, since what it stores late would be taken for the answers of later frames.
__device__ __forceinline__ void note_missing(const sy_combine_params& params,
                                             const comm::WaitBound& bound, uint32_t server,
                                             uint64_t number) {
    if (ptx::ld_relaxed_sys(bound.status) >> SY_STATUS_SHIFT == number)
        ptx::red_or_relaxed_gpu(&params.handle->refused, 1u << server);
    else
        note_lost_for_good(params, server);
    ptx::red_or_relaxed_gpu(&params.handle->missing, 1u << server);
}

// A server that this warp does without from a token on, of which it may have summed a part of that server's
// row before. By one lane.
__device__ __forceinline__ void note_lost(CombineShared& shared, uint32_t server,
                                          uint32_t token_idx, bool has_begun) {
    atomicMin(&shared.first_without[server], token_idx);
    atomicMax(&shared.all_without[server], has_begun ? token_idx + 1 : token_idx);
    atomicAdd(&shared.num_without[server], 1u);
    atomicOr(&shared.lost, 1u << server);
}

// Whether the flag of the server's answer to `row` is there.
template <class Config>
__device__ __forceinline__ bool await_flag(const sy_combine_params& params,
                                           const CombineShared& shared, uint32_t server,
                                           uint32_t row, uint32_t tag) {
    constexpr uint32_t kWays = Config::kWays;
    const uint64_t number = shared.number[server];
    const comm::WaitBound bound = bound_of(params, shared, server);
    const uint64_t* flag =
        reinterpret_cast<const uint64_t*>(layout::response_flag_at(shared.frame[server], row));
    bool came;
    if constexpr (kWays == comm::kDirectOnly)
        came = comm::wait_until(flag, number, tag, server, bound);
    else
        came = comm::wait_until<kWays>(flag, number, tag, server, bound,
                                       &shared.servers[server].request);
    if (!came)
        note_missing(params, bound, server, number);
    return came;
}

// Whether the server's rows themselves tell that they are there: answers go the way that requests go.
template <class Config>
__device__ __forceinline__ bool tells_by_rows(const CombineShared& shared, uint32_t server) {
    return comm::is_direct<Config::kWays>(shared.servers[server].request);
}

// Waits for a token's rows that have flags, a lane for each route. Returns the servers that this warp does
// without.
template <class Config>
__device__ __forceinline__ uint32_t await_flags(const sy_combine_params& params,
                                                CombineShared& shared, uint32_t route,
                                                uint32_t token_idx, uint32_t lost) {
    const uint32_t server = server_of(route);
    uint32_t mine = 0;
    if (route != SY_NO_ROUTE && (lost >> server & 1) == 0 &&
        !tells_by_rows<Config>(shared, server) &&
        !await_flag<Config>(params, shared, server, row_of(route), SY_TAG_COMBINE_ROW)) {
        note_lost(shared, server, token_idx, false);
        mine = 1u << server;
    }
    __syncwarp();
    return lost | __reduce_or_sync(kFullWarp, mine);
}

__device__ __forceinline__ bool has_hole(const uint4& words) {
    return words.x == SY_ANSWER_HOLE || words.y == SY_ANSWER_HOLE || words.z == SY_ANSWER_HOLE ||
           words.w == SY_ANSWER_HOLE;
}

// Polls of a row's words before, or between two looks at, what else may end the wait, and the pause between
// two polls.
constexpr uint32_t kQuickPolls = 64;
constexpr uint32_t kRowPauseNs = 20;

// A thread's place in a row.
struct RowPlace {
    uint32_t chunk_idx; // of its first chunk
    bool is_inside; // the last threads may have none, in the last of several passes

    __device__ __forceinline__ uint64_t address(const sy_combine_params& params,
                                                const CombineShared& shared, uint32_t route) const {
        return layout::response_row_at(params.geometry, shared.frame[server_of(route)],
                                       row_of(route)) +
               chunk_idx * 16;
    }
};

template <class Config> constexpr uint32_t kChunkStride = Config::kNumThreads * 16; // bytes

// Whether this thread's share of the row at `address` has holes. SYNC POINT row.
template <class Config> __device__ __forceinline__ bool is_late(uint64_t address) {
    bool late = false;
#pragma unroll
    for (uint32_t j = 0; j < Config::kChunks; ++j)
        late |= has_hole(ptx::ld_relaxed_sys_v4(address + j * kChunkStride<Config>));
    return late;
}

// Leaves holes for the next frame in this place of the ring.
template <class Config> __device__ __forceinline__ void store_holes(uint64_t address) {
    const uint4 holes = make_uint4(SY_ANSWER_HOLE, SY_ANSWER_HOLE, SY_ANSWER_HOLE, SY_ANSWER_HOLE);
#pragma unroll
    for (uint32_t j = 0; j < Config::kChunks; ++j)
        ptx::st_relaxed_sys_v4(address + j * kChunkStride<Config>, holes);
}

// Waits for a warp's share of a row. False when its server is given up.
// NOTES: rows that came are holes again soon, so the host could not tell by looking at them who keeps a kernel
// waiting. Hence the count of those that wait.
template <class Config>
__device__ __forceinline__ bool await_share(const sy_combine_params& params, CombineShared& shared,
                                            uint32_t route, const RowPlace& place) {
    const uint32_t server = server_of(route);
    const bool is_first_lane = (threadIdx.x & 31) == 0;
    const uint64_t number = shared.number[server];
    const uint64_t address = place.address(params, shared, route);
    const comm::WaitBound bound = bound_of(params, shared, server);
    comm::Patience patience = comm::begin_patience(bound);
    // What the place had last, as a flag would say.
    const uint64_t observed =
        number > params.geometry.num_frames ? number - params.geometry.num_frames : 0;
    if (is_first_lane)
        ptx::red_add_relaxed_gpu(&params.state->awaited[server], 1u);
    bool came = false, has_ended = false;
    for (uint32_t num_polls = 0; !has_ended; ++num_polls) {
        came = !__any_sync(kFullWarp, place.is_inside && is_late<Config>(address));
        if (came)
            break;
        __nanosleep(kRowPauseNs);
        if (num_polls % kQuickPolls != 0)
            continue;
        if (is_first_lane)
            has_ended = comm::has_ended<comm::kDirectOnly>(bound, SY_TAG_COMBINE_ROW, server,
                                                           observed, number, patience);
        has_ended = __any_sync(kFullWarp, has_ended);
    }
    if (is_first_lane) {
        ptx::red_add_relaxed_gpu(&params.state->awaited[server], 0u - 1u);
        if (!came)
            note_missing(params, bound, server, number);
    }
    return came;
}

// Waits for a warp's shares of a token's parts. Returns the servers that it does without.
template <class Config>
__device__ __noinline__ uint32_t await_parts(const sy_combine_params& params, CombineShared& shared,
                                             uint32_t routes, RowPlace place, uint32_t token_idx,
                                             uint32_t lost) {
    for (uint32_t i = 0; i < params.geometry.top_k; ++i) {
        const uint32_t route = __shfl_sync(kFullWarp, routes, static_cast<int>(i));
        const uint32_t server = server_of(route);
        if (route == SY_NO_ROUTE)
            break;
        if ((lost >> server & 1) != 0 || !tells_by_rows<Config>(shared, server) ||
            await_share<Config>(params, shared, route, place))
            continue;
        lost |= 1u << server;
        if ((threadIdx.x & 31) == 0)
            note_lost(shared, server, token_idx, place.chunk_idx >= Config::kNumThreads);
    }
    return lost;
}

// A thread's shares of some parts of a token. Those of parts that do not exist, or that the warp does without,
// are zeros.
template <class Config, uint32_t kParts, bool kKeepsAddresses = true> struct Shares {
    static constexpr uint32_t kChunks = Config::kChunks, kStride = kChunkStride<Config>;
    uint4 bits[kParts][kChunks];
    uint64_t addresses[kKeepsAddresses ? kParts : 1]; // 0 of such parts

    // Parts from place `first` on of the token whose routes the warp's lanes have. SYNC POINT row: words without
    // holes are there.
    __device__ __forceinline__ void load(const sy_combine_params& params,
                                         const CombineShared& shared, uint32_t routes,
                                         uint32_t first, const RowPlace& place, uint32_t lost) {
#pragma unroll
        for (uint32_t i = 0; i < kParts; ++i) {
            const uint32_t route = __shfl_sync(kFullWarp, routes, static_cast<int>(first + i));
            uint64_t begin = 0;
            if (route != SY_NO_ROUTE && (lost >> server_of(route) & 1) == 0 && place.is_inside)
                begin = place.address(params, shared, route);
            if constexpr (kKeepsAddresses)
                addresses[i] = begin;
#pragma unroll
            for (uint32_t j = 0; j < kChunks; ++j) {
                bits[i][j] = make_uint4(0, 0, 0, 0);
                if (begin != 0)
                    bits[i][j] = ptx::ld_relaxed_sys_v4(begin + j * kStride);
            }
        }
    }

    // Whether all are there after a while, in the whole warp. Parts that have flags have no holes that matter.
    __device__ __forceinline__ bool poll(const sy_combine_params& params,
                                         const CombineShared& shared, uint32_t routes,
                                         uint32_t first, const RowPlace& place) {
        for (uint32_t num_polls = 0;; ++num_polls) {
            uint32_t late = 0;
#pragma unroll
            for (uint32_t i = 0; i < kParts; ++i) {
                bool is_late = false;
#pragma unroll
                for (uint32_t j = 0; j < kChunks; ++j)
                    is_late |= has_hole(bits[i][j]);
                if constexpr (Config::kWays != comm::kDirectOnly) {
                    const uint32_t route =
                        __shfl_sync(kFullWarp, routes, static_cast<int>(first + i));
                    if (route != SY_NO_ROUTE)
                        is_late = is_late && tells_by_rows<Config>(shared, server_of(route));
                }
                late |= is_late ? 1u << i : 0;
            }
            if (!__any_sync(kFullWarp, late != 0))
                return true;
            if (num_polls == kQuickPolls)
                return false;
            __nanosleep(kRowPauseNs);
#pragma unroll
            for (uint32_t i = 0; i < kParts; ++i) {
                uint64_t begin;
                if constexpr (kKeepsAddresses) {
                    begin = addresses[i];
                } else {
                    const uint32_t route =
                        __shfl_sync(kFullWarp, routes, static_cast<int>(first + i));
                    begin = route != SY_NO_ROUTE ? place.address(params, shared, route) : 0;
                }
                if ((late >> i & 1) != 0)
#pragma unroll
                    for (uint32_t j = 0; j < kChunks; ++j)
                        bits[i][j] = ptx::ld_relaxed_sys_v4(begin + j * kStride);
            }
        }
    }

    __device__ __forceinline__ void add_to(float (&sum)[kChunks][8]) const {
#pragma unroll
        for (uint32_t i = 0; i < kParts; ++i)
#pragma unroll
            for (uint32_t j = 0; j < kChunks; ++j)
                add_chunk<false>(sum[j], bits[i][j]);
    }

    __device__ __forceinline__ void clear(const CombineShared& shared, uint32_t routes,
                                          uint32_t first) const {
#pragma unroll
        for (uint32_t i = 0; i < kParts; ++i) {
            bool clears = addresses[i] != 0;
            if constexpr (Config::kWays != comm::kDirectOnly) {
                const uint32_t route = __shfl_sync(kFullWarp, routes, static_cast<int>(first + i));
                clears = clears && tells_by_rows<Config>(shared, server_of(route));
            }
            if (clears)
                store_holes<Config>(addresses[i]);
        }
    }
};

// What a warp does with its tokens.
enum class Pass {
    kSum, // waits for each and sums it
    kAwait, // waits only, and notes what does not come
    kAdd, // adds what kAwait found in all warps to what is there
};

// Parts of a token whose loads are under way together: most tokens have no more between two ranks.
constexpr uint32_t kPartsTogether = 2;
// The same of tokens that have more than that.
constexpr uint32_t kMostParts = 4;
static_assert(SY_MAX_DEVICE_TOP_K + kMostParts - 1 <= 32, "there is a lane for each place");

// Adds shares of parts from place `first` on that are loaded. False when one does not come for a while.
template <class Config, Pass kPass, class SomeShares>
__device__ __forceinline__ bool take_parts(const sy_combine_params& params,
                                           const CombineShared& shared, uint32_t routes,
                                           uint32_t first, const RowPlace& place,
                                           SomeShares& shares, float (&sum)[Config::kChunks][8]) {
    if (kPass != Pass::kAdd && !shares.poll(params, shared, routes, first, place))
        return false;
    if constexpr (kPass != Pass::kAwait)
        shares.add_to(sum);
    return true;
}

// The same, and they are holes again then.
template <class Config, Pass kPass, uint32_t kParts>
__device__ __forceinline__ bool
take_all_parts(const sy_combine_params& params, const CombineShared& shared, uint32_t routes,
               const RowPlace& place, Shares<Config, kParts>& shares,
               float (&sum)[Config::kChunks][8]) {
    if (kPass != Pass::kAdd && !shares.poll(params, shared, routes, 0, place))
        return false;
    if constexpr (kPass != Pass::kAwait) {
        shares.clear(shared, routes, 0);
        shares.add_to(sum);
    }
    return true;
}

// take_parts for all that a token has from place `first` on.
template <class Config, Pass kPass>
__device__ __forceinline__ bool take_rest(const sy_combine_params& params,
                                          const CombineShared& shared, uint32_t routes,
                                          uint32_t num_parts, uint32_t first, const RowPlace& place,
                                          uint32_t lost, float (&sum)[Config::kChunks][8]) {
    for (; first < num_parts; first += kMostParts) {
        Shares<Config, kMostParts, false> shares;
        shares.load(params, shared, routes, first, place, lost);
        if (!take_parts<Config, kPass>(params, shared, routes, first, place, shares, sum))
            return false;
    }
    return true;
}

// Leaves holes where a token's parts were.
template <class Config>
__device__ __forceinline__ void
clear_parts(const sy_combine_params& params, const CombineShared& shared, uint32_t routes,
            uint32_t num_parts, const RowPlace& place, uint32_t lost) {
    for (uint32_t i = 0; i < num_parts; ++i) {
        const uint32_t route = __shfl_sync(kFullWarp, routes, static_cast<int>(i));
        const uint32_t server = server_of(route);
        if ((lost >> server & 1) == 0 && tells_by_rows<Config>(shared, server) && place.is_inside)
            store_holes<Config>(place.address(params, shared, route));
    }
}

// Adds all parts of a token. False when one does not come for a while; none has become holes then.
// NOTES: when rows come fast, a multiprocessor is busy with these instructions, so there are as many of them as
// a token has parts.
template <class Config, Pass kPass>
__device__ __forceinline__ bool take_token(const sy_combine_params& params,
                                           const CombineShared& shared, uint32_t routes,
                                           uint32_t num_parts, const RowPlace& place, uint32_t lost,
                                           float (&sum)[Config::kChunks][8]) {
    if (num_parts == 1) {
        Shares<Config, 1> shares;
        shares.load(params, shared, routes, 0, place, lost);
        return take_all_parts<Config, kPass>(params, shared, routes, place, shares, sum);
    }
    if (num_parts == kPartsTogether) {
        Shares<Config, kPartsTogether> shares;
        shares.load(params, shared, routes, 0, place, lost);
        return take_all_parts<Config, kPass>(params, shared, routes, place, shares, sum);
    }
    if (!take_rest<Config, kPass>(params, shared, routes, num_parts, 0, place, lost, sum))
        return false;
    if constexpr (kPass != Pass::kAwait)
        clear_parts<Config>(params, shared, routes, num_parts, place, lost);
    return true;
}

// What a sum begins with.
template <class Config, Pass kPass>
__device__ __forceinline__ void begin_sum(uint64_t out, const RowPlace& place,
                                          float (&sum)[Config::kChunks][8]) {
#pragma unroll
    for (uint32_t j = 0; j < Config::kChunks; ++j) {
#pragma unroll
        for (uint32_t k = 0; k < 8; ++k)
            sum[j][k] = 0.0f;
        if (kPass == Pass::kAdd && place.is_inside)
            add_chunk<false>(sum[j], ptx::ld_weak_global_v4(out + j * kChunkStride<Config>));
    }
}

template <class Config>
__device__ __forceinline__ void store_sum(uint64_t out, const RowPlace& place,
                                          const float (&sum)[Config::kChunks][8]) {
    if (place.is_inside)
#pragma unroll
        for (uint32_t j = 0; j < Config::kChunks; ++j)
            ptx::st_weak_global_v4(out + j * kChunkStride<Config>, round_chunk(sum[j]));
}

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
    // The first parts of the token behind the one that is summed.
    Shares<Config, kPartsTogether> ahead;
    if constexpr (Config::kIsFew && kPass == Pass::kSum)
        if (blockIdx.x < num_tokens)
            ahead.load(params, shared, routes, 0, {threadIdx.x, true}, 0);
    for (uint32_t token_idx = blockIdx.x; token_idx < num_tokens; token_idx += gridDim.x) {
        const uint32_t next_idx = token_idx + gridDim.x;
        const uint32_t next_routes = lane_idx < top_k && next_idx < num_tokens
                                         ? all_routes[uint64_t{next_idx} * top_k + lane_idx]
                                         : SY_NO_ROUTE;
        const uint32_t num_parts = __popc(__ballot_sync(kFullWarp, routes != SY_NO_ROUTE));
        if constexpr (kPass == Pass::kAdd)
            lost = shared.lost == 0 ? 0 : lost_by(shared, token_idx);
        else if constexpr (Config::kWays != comm::kDirectOnly)
            lost = await_flags<Config>(params, shared, routes, token_idx, lost);
        if (kPass != Pass::kAwait && threadIdx.x == 0 && params.token_missing != nullptr)
            params.token_missing[token_idx] = 0;
        const uint64_t row =
            reinterpret_cast<uint64_t>(params.out) + uint64_t{token_idx} * num_chunks * 16;
        if constexpr (Config::kHidden != 0) {
            const RowPlace place{threadIdx.x, true};
            const uint64_t out = row + threadIdx.x * 16;
            float sum[Config::kChunks][8];
            begin_sum<Config, kPass>(out, place, sum);
            bool is_done = false;
            if constexpr (Config::kIsFew && kPass == Pass::kSum) {
                Shares<Config, kPartsTogether> shares = ahead;
                ahead.load(params, shared, next_routes, 0, place, 0);
                // What came of a server that was given up meanwhile counts as lost.
                if (lost == 0 && num_parts <= kPartsTogether)
                    is_done =
                        take_all_parts<Config, kPass>(params, shared, routes, place, shares, sum);
                else if (lost == 0)
                    is_done =
                        take_parts<Config, kPass>(params, shared, routes, 0, place, shares, sum) &&
                        take_rest<Config, kPass>(params, shared, routes, num_parts, kPartsTogether,
                                                 place, 0, sum);
                if (is_done && num_parts > kPartsTogether)
                    clear_parts<Config>(params, shared, routes, num_parts, place, 0);
                if (!is_done)
                    begin_sum<Config, kPass>(out, place, sum);
            }
            while (!is_done && !take_token<Config, kPass>(params, shared, routes, num_parts, place,
                                                          lost, sum)) {
                lost = await_parts<Config>(params, shared, routes, place, token_idx, lost);
                begin_sum<Config, kPass>(out, place, sum);
            }
            if constexpr (kPass != Pass::kAwait)
                store_sum<Config>(out, place, sum);
        } else {
            for (uint32_t base = 0; base < num_chunks; base += Config::kNumThreads) {
                const RowPlace place{base + threadIdx.x, base + threadIdx.x < num_chunks};
                const uint64_t out = row + place.chunk_idx * 16;
                float sum[Config::kChunks][8];
                begin_sum<Config, kPass>(out, place, sum);
                while (!take_token<Config, kPass>(params, shared, routes, num_parts, place, lost,
                                                  sum)) {
                    lost = await_parts<Config>(params, shared, routes, place, token_idx, lost);
                    begin_sum<Config, kPass>(out, place, sum);
                }
                if constexpr (kPass != Pass::kAwait)
                    store_sum<Config>(out, place, sum);
            }
        }
        routes = next_routes;
    }
}

// The same, added to what is there. Apart, because it is rare.
template <class Config>
__device__ __noinline__ void add_tokens(const sy_combine_params& params, CombineShared& shared,
                                        uint32_t num_tokens, uint32_t routes) {
    take_tokens<Config, Pass::kAwait>(params, shared, num_tokens, routes);
    __syncthreads();
    take_tokens<Config, Pass::kAdd>(params, shared, num_tokens, routes);
}

// After a server was given up: names the parts that tokens lack, and leaves zeros of those that are torn. Called
// by all threads behind a barrier.
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

// Whether the frame that combine took last from this place of the ring is not the one before `number`: then rows
// of another frame lie there that nobody has summed. A frame that is summed again had its own rows there.
template <class Config>
__device__ __forceinline__ bool is_stale(const sy_combine_params& params,
                                         const CombineShared& shared, uint32_t server,
                                         uint64_t summed) {
    const uint64_t number = shared.number[server], num_frames = params.geometry.num_frames;
    return (params.handle->contacted >> server & 1) != 0 &&
           (shared.lost_before >> server & 1) == 0 && tells_by_rows<Config>(shared, server) &&
           summed != number && summed != (number > num_frames ? number - num_frames : 0);
}

// Notes a server whose rows are not taken, and why.
__device__ __forceinline__ void note_given_up(const sy_combine_params& params,
                                              const CombineShared& shared, uint32_t server,
                                              uint32_t reason, uint64_t observed) {
    if (blockIdx.x != 0)
        return;
    comm::record_error(&params.state->error, SY_TAG_COMBINE_ROW, server, reason, observed,
                       shared.number[server]);
    ptx::red_or_relaxed_gpu(&params.handle->missing, 1u << server);
}

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
    comm::follow(params.flags);
    if (!is_ahead)
        comm::let_next_start(params.flags);
    // All first loads leave together, this block's first routes among them. Those of a token that does not
    // exist are words of the handle all the same, and of no consequence.
    uint32_t routes = SY_NO_ROUTE;
    if (lane_idx < geometry.top_k && blockIdx.x < params.capacity)
        routes = layout::routes_of(params.handle)[blockIdx.x * geometry.top_k + lane_idx];
    const uint32_t num_tokens = min(params.handle->num_tokens, params.capacity);
    servers.store(shared.servers, params.num_servers);
    const bool adds = (params.flags & SY_COMBINE_FLAG_ADD) != 0;
    uint64_t summed = 0; // what combine took last from this place of the ring
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
    // Of a sum that begins at zero this is in time afterwards.
    const auto give_up_stale = [&]() {
        if (thread_idx < params.num_servers &&
            is_stale<Config>(params, shared, thread_idx, summed)) {
            atomicOr(&shared.stale, 1u << thread_idx);
            // Some warps may have summed what lay there, in any token.
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
