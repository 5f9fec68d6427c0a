// echo: a server of identity experts in one kernel, for measuring the transport.
#pragma once

#include <cstdint>

#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/answer.cuh"
#include "switchyard/impls/frames.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// True when the wait for a client must end; leaves the reason in the error word.
__device__ __noinline__ inline bool must_give_up(const sy_echo_params& params, uint32_t client_idx,
                                                 uint64_t* start_ns, uint64_t number) {
    const comm::WaitBound bound = {&params.state->error, params.abort_mask, nullptr, nullptr,
                                   nullptr, params.timeout_ns};
    const bool aborted = comm::is_aborted(bound, client_idx);
    if (!aborted && comm::elapsed_ns(start_ns) <= params.timeout_ns)
        return false;
    comm::record_error(&params.state->error, SY_TAG_RECV_FRAME, client_idx,
                       aborted ? SY_REASON_ABORT : SY_REASON_TIMEOUT, number - 1, number);
    return true;
}

// Between two polls of a thread.
constexpr uint32_t kPollPauseNs = 100;

// Waits until all rows of all clients are there, as expert arithmetic on whole batches would need.
template <class Config>
__device__ __forceinline__ void take_in_lockstep(AnswerShared& shared,
                                                 const sy_echo_params& params) {
    const sy_frame_geometry& geometry = params.geometry;
    // A thread per row that a client may have sent. It waits for the row's flag, or for the announcement
    // that there is no such row.
    for (uint32_t unit = threadIdx.x; unit < params.capacity * params.num_clients;
         unit += Config::kNumThreads) {
        const uint32_t client_idx = unit % params.num_clients, row = unit / params.num_clients;
        const FrameAt frame =
            frame_at(geometry, shared.clients[client_idx], shared.number[client_idx]);
        const bool is_first = row == 0;
        uint64_t start_ns = 0;
        uint32_t num_rows = kRowsUnknown;
        for (uint32_t num_polls = 1;; ++num_polls) {
            const bool arrived = row_arrived(geometry, frame, row);
            // One thread per block asks for the number of rows, the others ask it.
            if (is_first)
                num_rows = announced_rows(frame);
            else if (!arrived)
                num_rows = *const_cast<volatile uint32_t*>(&shared.num_rows[client_idx]);
            if (is_first && num_rows != kRowsUnknown)
                *const_cast<volatile uint32_t*>(&shared.num_rows[client_idx]) = num_rows;
            // The first row's thread also needs the number of rows.
            if (is_first ? num_rows != kRowsUnknown && (arrived || num_rows == 0)
                         : arrived || row >= num_rows)
                break;
            __nanosleep(kPollPauseNs);
            if (num_polls % comm::kPollsPerCheck == 0 &&
                must_give_up(params, client_idx, &start_ns, frame.number)) {
                atomicOr(&shared.given_up, 1u << client_idx);
                break;
            }
        }
        if (is_first) {
            const bool fits = num_rows <= params.capacity;
            shared.num_rows[client_idx] = fits ? num_rows : 0;
            if (!fits)
                atomicOr(&shared.given_up, 1u << client_idx);
            else
                atomicMax(&shared.most_rows, num_rows);
        }
    }
    __syncthreads();
    if (threadIdx.x < params.num_clients && (shared.given_up >> threadIdx.x & 1) != 0)
        shared.num_rows[threadIdx.x] = 0;
    if (shared.given_up != 0)
        __syncthreads();
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
    ptx::griddepcontrol_wait();
    if ((params.flags & SY_LAUNCH_FLAG_EARLY) != 0)
        ptx::griddepcontrol_launch_dependents();
    clients.store(shared.clients, params.num_clients);
    if (threadIdx.x == 0)
        shared.most_rows = shared.given_up = 0;
    if (threadIdx.x < params.num_clients) {
        const uint64_t number = params.state->taken[threadIdx.x] + 1;
        const uint32_t place = layout::ring_place(params.geometry, number);
        shared.number[threadIdx.x] = number;
        shared.num_rows[threadIdx.x] = kRowsUnknown;
        shared.request_frame[threadIdx.x] =
            client.request + layout::request_frame(params.geometry, place);
        shared.response_window[threadIdx.x] =
            client.response.window + layout::response_frame(params.geometry, place);
    }
    __syncthreads();
    take_in_lockstep<Config>(shared, params);

    // Every block has read the state once it arrives here: the last to arrive may advance it. The
    // answer to the arrival is not waited for until the rows are sent.
    uint32_t arrival = 0;
    if (threadIdx.x == 0)
        arrival = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, gridDim.x - 1);
    if (blockIdx.x == 0 && threadIdx.x < params.num_clients && shared.num_rows[threadIdx.x] == 0 &&
        (shared.given_up >> threadIdx.x & 1) == 0)
        comm::signal<Config::kWays>(
            shared.clients[threadIdx.x].response,
            layout::response_flag_at(
                layout::response_frame(
                    params.geometry,
                    layout::ring_place(params.geometry, shared.number[threadIdx.x])),
                0),
            shared.number[threadIdx.x]);
    if constexpr (Config::kWays != comm::kDirectOnly) {
        // Answers are stored over those of an earlier frame, which a NIC may still have to read.
        if (threadIdx.x < params.num_clients)
            comm::await_reuse<Config::kWays>(shared.clients[threadIdx.x].response);
        __syncthreads();
    }
    answer_rows<Config>(shared, params.geometry, params.num_clients,
                        [&](uint32_t client, uint32_t row, auto store) {
                            identity_row<Config>(params.geometry, shared.request_frame[client], row,
                                                 store);
                        });
    if (threadIdx.x == 0 && arrival == gridDim.x - 1)
        for (uint32_t client_idx = 0; client_idx < params.num_clients; ++client_idx)
            if ((shared.given_up >> client_idx & 1) == 0)
                params.state->taken[client_idx] = shared.number[client_idx];
}

} // namespace switchyard::impls
