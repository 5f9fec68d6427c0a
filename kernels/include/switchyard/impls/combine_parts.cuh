// The waits and sums of combine: a thread's shares of the parts of a token, and the records of
// servers that are given up.
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

template <uint32_t kHidden_, uint32_t kNumThreads_, uint32_t kPaths_ = comm::kDirectOnly>
struct CombineConfig {
    static constexpr uint32_t kHidden = kHidden_;
    static constexpr uint32_t kNumThreads = kNumThreads_;
    static constexpr uint32_t kPaths = kPaths_;
    // Chunks of eight values of a row that a thread sums at a time. Two cover a row where its size
    // is known.
    static constexpr uint32_t kChunks = kHidden_ != 0 ? 2 : 1;
    static_assert(kHidden_ == 0 || kHidden_ == 8 * kChunks * kNumThreads_, "one pass is a row");
    // Building requests takes registers.
    static constexpr uint32_t kMinBlocks = kPaths_ == comm::kDirectOnly ? 2 : 1;
    static constexpr bool kIsFew = false;
};

constexpr uint32_t kNoToken = 0xffffffffu;
// Pause between two checks whether a path is quiet, which may read the host's memory.
constexpr uint32_t kPathPauseNs = 200;

struct CombineShared {
    sy_server_peer servers[SY_MAX_PEERS];
    uint64_t number[SY_MAX_PEERS];
    uint64_t frame[SY_MAX_PEERS];
    uint32_t lost_before; // servers that an earlier kernel gave up, as a mask
    uint32_t stale; // servers whose last answer in this place was not taken, as a mask
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
        params.timeout_ns,
        &params.state->mask_cache,
        &params.handle->sequence};
}

// Later frames' combines do without the server, too.
__device__ __forceinline__ void note_lost_for_good(const sy_combine_params& params,
                                                   uint32_t server) {
    ptx::st_relaxed_sys(&params.state->lost[server], params.handle->sequence);
}

// Waits until no named range of a server is still to be read. A server that stops after its last
// row is given up like one that leaves a row out, though for later frames only: its path would not
// report for seconds that reading has stopped. Any block may have given it up before. A failure of
// the path itself is left to the path's own wait, which records the cause.
template <class Config>
__device__ __forceinline__ void await_path(const sy_combine_params& params,
                                           const CombineShared& shared, uint32_t server) {
    const sy_link& link = shared.servers[server].request;
    const uint64_t* lost = &params.state->lost[server];
    if (comm::tells_reuse<Config::kPaths>(link)) {
        comm::WaitBound bound = bound_of(params, shared, server);
        bound.progress = nullptr; // it has answered
        comm::Patience patience = comm::begin_patience(bound);
        for (uint32_t busy = 0; ptx::ld_relaxed_sys(lost) == 0;) {
            if (comm::is_reusable(link, busy))
                return;
            if (comm::has_failed<Config::kPaths>(link) || comm::is_aborted(bound, server))
                break;
            if (comm::is_silent(bound, patience)) {
                comm::record_error(&params.state->error, SY_TAG_COMBINE_PATH, server,
                                   SY_REASON_TIMEOUT, busy, shared.number[server]);
                note_lost_for_good(params, server);
                ptx::red_or_relaxed_gpu(&params.handle->missing, 1u << server);
                return;
            }
            __nanosleep(kPathPauseNs);
        }
    }
    if (ptx::ld_relaxed_sys(lost) == 0)
        comm::await_reuse<Config::kPaths>(link);
}

// A server that did not answer. If it refused the frame, that is recorded. The slot of any other is
// unusable from now on, since its late stores would be taken for the answers of later frames.
__device__ __forceinline__ void note_missing(const sy_combine_params& params,
                                             const comm::WaitBound& bound, uint32_t server,
                                             uint64_t number) {
    if (ptx::ld_relaxed_sys(bound.status) >> SY_STATUS_SHIFT == number)
        ptx::red_or_relaxed_gpu(&params.handle->refused, 1u << server);
    else
        note_lost_for_good(params, server);
    ptx::red_or_relaxed_gpu(&params.handle->missing, 1u << server);
}

// Excludes a server for this warp from a token on; the warp may have summed a part of that server's
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
    constexpr uint32_t kPaths = Config::kPaths;
    const uint64_t number = shared.number[server];
    const comm::WaitBound bound = bound_of(params, shared, server);
    const uint64_t* flag =
        reinterpret_cast<const uint64_t*>(layout::response_flag_at(shared.frame[server], row));
    bool came;
    if constexpr (kPaths == comm::kDirectOnly)
        came = comm::wait_until(flag, number, tag, server, bound);
    else
        came = comm::wait_until<kPaths>(flag, number, tag, server, bound,
                                        &shared.servers[server].request);
    if (!came)
        note_missing(params, bound, server, number);
    return came;
}

// Whether the server's rows themselves show that they have arrived: answers use the same path as
// requests.
template <class Config>
__device__ __forceinline__ bool tells_by_rows(const CombineShared& shared, uint32_t server) {
    return comm::is_direct<Config::kPaths>(shared.servers[server].request);
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

// Polls of a row's words before the first check of the other conditions that may end the wait, which is most of the
// experts of a few tokens, and between two such checks; and the pause between two polls.
#if defined(SY_SIMT)
constexpr uint32_t kFirstPolls = 64;
#else
constexpr uint32_t kFirstPolls = 256;
#endif
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
// NOTES: rows that arrived are holes again soon, so the host could not see in them which server
// delays a kernel. Hence the count of waiting warps.
template <class Config>
__device__ __forceinline__ bool await_share(const sy_combine_params& params, CombineShared& shared,
                                            uint32_t route, const RowPlace& place) {
    const uint32_t server = server_of(route);
    const bool is_first_lane = (threadIdx.x & 31) == 0;
    const uint64_t number = shared.number[server];
    const uint64_t address = place.address(params, shared, route);
    const comm::WaitBound bound = bound_of(params, shared, server);
    comm::Patience patience = comm::begin_patience(bound);
    // The last frame number of the place, like a flag.
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

// A thread's shares of some parts of a token. Those of parts that do not exist, or that the warp
// excludes, are zeros.
template <class Config, uint32_t kParts, bool kKeepsAddresses = true> struct Shares {
    static constexpr uint32_t kChunks = Config::kChunks, kStride = kChunkStride<Config>;
    uint4 bits[kParts][kChunks];
    uint64_t addresses[kKeepsAddresses ? kParts : 1]; // 0 of such parts

    // Parts from place `first` on of the token whose routes the warp's lanes have. SYNC POINT row:
    // words without holes have arrived.
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
                if constexpr (Config::kPaths != comm::kDirectOnly) {
                    const uint32_t route =
                        __shfl_sync(kFullWarp, routes, static_cast<int>(first + i));
                    if (route != SY_NO_ROUTE)
                        is_late = is_late && tells_by_rows<Config>(shared, server_of(route));
                }
                late |= is_late ? 1u << i : 0;
            }
            if (!__any_sync(kFullWarp, late != 0))
                return true;
            if (num_polls == kFirstPolls)
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
            if constexpr (Config::kPaths != comm::kDirectOnly) {
                const uint32_t route = __shfl_sync(kFullWarp, routes, static_cast<int>(first + i));
                clears = clears && tells_by_rows<Config>(shared, server_of(route));
            }
            if (clears)
                store_holes<Config>(addresses[i]);
        }
    }
};

} // namespace switchyard::impls
