// echo: a server of identity experts in one kernel, for measuring the transport.
#pragma once

#include <cstdint>

#include "switchyard/comm/stream.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/answer.cuh"
#include "switchyard/impls/frames.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// True when the wait for a client must end.
__device__ __noinline__ inline bool must_give_up(const sy_echo_params& params, uint32_t client_idx,
                                                 uint64_t* start_ns) {
    const comm::WaitBound bound = {
        &params.state->error, params.abort_mask, nullptr, nullptr, nullptr, params.timeout_ns};
    return comm::is_aborted(bound, client_idx) || comm::elapsed_ns(start_ns) > params.timeout_ns;
}

// Leaves in the error word why frame `number` was given up, with the number that stands where it was waited
// for: in its header word or, once that has come, the least of its rows' flags.
// NOTES: after the wait, and read once more. While a warp waits, registers are scarce.
__device__ __noinline__ inline void record_given_up(const sy_echo_params& params,
                                                    uint32_t client_idx, uint64_t number) {
    const FrameAt frame = frame_at(params.geometry, params.clients[client_idx], number);
    uint64_t observed = announced_number(frame);
    if (observed == number) {
        const uint32_t num_rows = announced_rows(frame);
        if (num_rows > params.capacity)
            return; // it came, but cannot be
#pragma unroll 1
        for (uint32_t row = 0; row < num_rows; ++row)
            observed =
                min(observed, ptx::ld_relaxed_sys(reinterpret_cast<const uint64_t*>(
                                  layout::request_flag_at(params.geometry, frame.address, row))));
    }
    const comm::WaitBound bound = {
        &params.state->error, params.abort_mask, nullptr, nullptr, nullptr, params.timeout_ns};
    comm::record_error(&params.state->error, SY_TAG_RECV_FRAME, client_idx,
                       comm::is_aborted(bound, client_idx) ? SY_REASON_ABORT : SY_REASON_TIMEOUT,
                       observed, number);
}

// Rows whose flags one load of a warp covers, and loads of a warp that are under way together.
constexpr uint32_t kRowsPerLoad = 64;
constexpr uint32_t kMostLoads = 4;
// Pause between two polls of a warp that polls one run.
constexpr uint32_t kShortPauseNs = 50;

// Pause between two polls of a warp that polls several. Every block reads the flags of every row.
// With shorter pauses the reads take memory time from arriving data: 5 us of 70 with 256 tokens.
__device__ __forceinline__ uint32_t pause_ns(uint32_t num_runs) {
    return min(num_runs * 60, 4000u);
}

// With this few tokens a warp without rows to poll joins the earlier kernel and lets the next
// kernel start, since a start takes a microsecond. With more, combine would only poll while rows
// are still to come.
constexpr uint32_t kTokensEarly = 128;

__device__ __forceinline__ bool lets_early(const sy_echo_params& params) {
    return comm::goes_ahead(params.flags) && params.capacity <= kTokensEarly;
}

// Waits for every client's header word, which covers the entries. One warp, a lane per client.
__device__ __forceinline__ void await_heads(AnswerShared& shared, const sy_echo_params& params) {
    const uint32_t client_idx = threadIdx.x & 31;
    if (client_idx >= params.num_clients)
        return;
    const FrameAt frame =
        frame_at(params.geometry, shared.clients[client_idx], shared.number[client_idx]);
    uint64_t start_ns = 0;
    uint32_t num_rows;
    for (uint32_t num_polls = 1; (num_rows = accepted_rows(frame)) == kRowsUnknown; ++num_polls)
        if (num_polls % comm::kPollsPerCheck == 0 && must_give_up(params, client_idx, &start_ns))
            break;
    const bool fits = num_rows <= params.capacity;
    shared.num_rows[client_idx] = fits ? num_rows : 0;
    if (fits)
        atomicMax(&shared.most_rows, num_rows);
    else
        atomicOr(&shared.given_up, 1u << client_idx);
}

// Waits until all rows of `kLoads` runs of rows are there, or known not to exist. One warp.
template <uint32_t kLoads, class Config>
__device__ __forceinline__ void await_runs(AnswerShared& shared, const sy_echo_params& params,
                                           uint32_t first_run, uint32_t num_runs) {
    constexpr uint32_t kStride = Config::kNumThreads / 32 - 1;
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t lane_idx = threadIdx.x & 31;
    FrameAt frames[kLoads];
    uint32_t clients[kLoads], rows[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t run = min(first_run + i * kStride, num_runs - 1);
        clients[i] = run % params.num_clients;
        rows[i] = run / params.num_clients * kRowsPerLoad + lane_idx * 2;
        frames[i] = frame_at(geometry, shared.clients[clients[i]], shared.number[clients[i]]);
    }
    uint64_t start_ns = 0;
    uint32_t pending = 0; // runs
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i)
        pending |= first_run + i * kStride < num_runs ? 1u << i : 0;
    for (uint32_t num_polls = 1;; ++num_polls) {
        // All loads of a poll leave together: an acquiring one stands last, and several are ordered by a
        // fence after the last poll.
        uint64_t words[kLoads];
        ptx::U64Pair flags[kLoads];
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i)
            if ((pending >> i & 1) != 0)
                words[i] = ptx::ld_relaxed_sys(frames[i].header_word);
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            if ((pending >> i & 1) == 0)
                continue;
            const uint64_t at = layout::request_flag_at(geometry, frames[i].address, rows[i]);
            flags[i] = kLoads == 1 ? ptx::ld_acquire_sys_v2(at) : ptx::ld_relaxed_sys_v2(at);
        }
        uint32_t late = 0; // clients, as a mask
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            if ((pending >> i & 1) == 0)
                continue;
            const uint32_t num_rows = rows_said(frames[i], words[i]);
            // A count that cannot be is refused by await_heads.
            const uint32_t limit = min(num_rows, params.capacity);
            const bool waits = num_rows == kRowsUnknown ||
                               (rows[i] < limit && flags[i].first < frames[i].number) ||
                               (rows[i] + 1 < limit && flags[i].second < frames[i].number);
            if (__any_sync(kFullWarp, waits))
                late |= 1u << clients[i];
            else
                pending &= ~(1u << i);
        }
        if (late == 0)
            break;
        __nanosleep(kLoads == 1 ? kShortPauseNs : pause_ns(num_runs));
        if (num_polls % comm::kPollsPerCheck != 0)
            continue;
        const uint32_t client_idx = __ffs(late) - 1;
        const bool gives_up = lane_idx == 0 && must_give_up(params, client_idx, &start_ns);
        if (__any_sync(kFullWarp, gives_up)) {
            if (lane_idx == 0)
                atomicOr(&shared.given_up, late);
            break;
        }
    }
    if (kLoads != 1)
        ptx::fence_acq_rel_sys();
}

// Waits until all rows of all clients are there, as expert arithmetic on whole batches would need. The last
// warp waits for headers, the others for rows.
template <class Config>
__device__ __forceinline__ void take_in_lockstep(AnswerShared& shared,
                                                 const sy_echo_params& params) {
    constexpr uint32_t kNumWarps = Config::kNumThreads / 32 - 1;
    const uint32_t num_runs =
        (params.capacity + kRowsPerLoad - 1) / kRowsPerLoad * params.num_clients;
    const uint32_t warp_idx = threadIdx.x / 32;
    if (warp_idx == kNumWarps) {
        await_heads(shared, params);
        __syncwarp();
        if (lets_early(params)) {
            comm::join(params.flags);
            comm::let_next_start(params.flags);
        }
    } else if (num_runs <= kNumWarps) {
        if (warp_idx < num_runs)
            await_runs<1, Config>(shared, params, warp_idx, num_runs);
    } else {
        for (uint32_t run = warp_idx; run < num_runs; run += kNumWarps * kMostLoads)
            await_runs<kMostLoads, Config>(shared, params, run, num_runs);
    }
    __syncthreads();
    const uint32_t given_up = shared.given_up;
    if (given_up != 0) {
        if (threadIdx.x < params.num_clients && (given_up >> threadIdx.x & 1) != 0) {
            record_given_up(params, threadIdx.x, shared.number[threadIdx.x]);
            shared.num_rows[threadIdx.x] = 0;
        }
        __syncthreads();
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    echo_kernel(const __grid_constant__ sy_echo_params params) {
    __shared__ AnswerShared shared;
    layout::TableCopy<sy_client_peer, Config::kNumThreads, SY_MAX_PEERS> clients;
    clients.load(params.clients, params.num_clients);
    sy_client_peer client = {};
    if (threadIdx.x < params.num_clients)
        client = params.clients[threadIdx.x];
    comm::follow(params.flags);
    if (!comm::goes_ahead(params.flags))
        comm::let_next_start(params.flags);
    clients.store(shared.clients, params.num_clients);
    if (threadIdx.x == 0)
        shared.most_rows = shared.given_up = 0;
    if (threadIdx.x < params.num_clients) {
        const uint64_t number = params.state->taken[threadIdx.x] + 1;
        const uint32_t place = layout::ring_place(params.geometry, number);
        shared.number[threadIdx.x] = number;
        shared.request_frame[threadIdx.x] =
            client.request + layout::request_frame(params.geometry, place);
        shared.response_window[threadIdx.x] =
            client.response.window + layout::response_frame(params.geometry, place);
    }
    __syncthreads();
    take_in_lockstep<Config>(shared, params);
    // A kernel that goes ahead of this one may rely on the kernels before it.
    comm::join(params.flags);
    if (comm::goes_ahead(params.flags) && !lets_early(params))
        comm::let_next_start(params.flags);

    // Every block has read the state once it arrives here: the last to arrive may advance it. The
    // answer to the arrival is not waited for until the rows are sent.
    uint32_t arrival = 0;
    if (threadIdx.x == 0)
        arrival = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, gridDim.x - 1);
    if (blockIdx.x == 0 && threadIdx.x < params.num_clients && shared.num_rows[threadIdx.x] == 0 &&
        (shared.given_up >> threadIdx.x & 1) == 0)
        comm::signal<Config::kPaths>(
            shared.clients[threadIdx.x].response,
            layout::response_flag_at(
                layout::response_frame(
                    params.geometry,
                    layout::ring_place(params.geometry, shared.number[threadIdx.x])),
                0),
            shared.number[threadIdx.x]);
    if constexpr (Config::kPaths != comm::kDirectOnly) {
        // Answers are stored over those of an earlier frame, which a NIC may still have to read.
        if (threadIdx.x < params.num_clients)
            comm::await_reuse<Config::kPaths>(shared.clients[threadIdx.x].response);
        __syncthreads();
    }
    answer_rows<Config>(shared, params.geometry, params.num_clients,
                        IdentityRows<Config>{shared, params.geometry});
    if (threadIdx.x == 0 && arrival == gridDim.x - 1)
        for (uint32_t client_idx = 0; client_idx < params.num_clients; ++client_idx)
            if ((shared.given_up >> client_idx & 1) == 0)
                params.state->taken[client_idx] = shared.number[client_idx];
}

} // namespace switchyard::impls
