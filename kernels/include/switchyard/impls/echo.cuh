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
                                                 uint64_t start_ns, uint64_t number) {
    const comm::WaitBound bound = {&params.state->error, params.abort_mask, nullptr, nullptr,
                                   nullptr, params.timeout_ns};
    const bool aborted = comm::is_aborted(bound, client_idx);
    if (!aborted && ptx::mov_globaltimer() - start_ns <= params.timeout_ns)
        return false;
    comm::record_error(&params.state->error, SY_TAG_RECV_FRAME, client_idx,
                       aborted ? SY_REASON_ABORT : SY_REASON_TIMEOUT, number - 1, number);
    return true;
}

// Waits until all rows of all clients are there, as expert arithmetic on whole batches would need.
template <class Config>
__device__ __forceinline__ void take_in_lockstep(AnswerShared& shared,
                                                 const sy_echo_params& params) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint64_t start_ns = ptx::mov_globaltimer();
    if (threadIdx.x < params.num_clients) {
        const uint32_t client_idx = threadIdx.x;
        const FrameAt frame = frame_at(geometry, shared.clients[client_idx],
                                       params.state->taken[client_idx] + 1);
        uint32_t num_rows = announced_rows(frame);
        for (uint32_t num_polls = 1; num_rows == kRowsUnknown; ++num_polls) {
            if (num_polls % comm::kPollsPerCheck == 0 &&
                must_give_up(params, client_idx, start_ns, frame.number))
                break;
            num_rows = announced_rows(frame);
        }
        if (num_rows > geometry.max_tokens) {
            atomicOr(&shared.given_up, 1u << client_idx);
            num_rows = 0;
        }
        shared.number[client_idx] = frame.number;
        shared.num_rows[client_idx] = num_rows;
        shared.request_frame[client_idx] = frame.address;
        shared.response_window[client_idx] =
            shared.clients[client_idx].response.window +
            layout::response_frame(geometry, layout::ring_place(geometry, frame.number));
        atomicMax(&shared.most_rows, num_rows);
    }
    __syncthreads();
    const uint32_t num_units = shared.most_rows * params.num_clients;
    for (uint32_t unit = threadIdx.x; unit < num_units; unit += Config::kNumThreads) {
        const uint32_t client_idx = unit % params.num_clients, row = unit / params.num_clients;
        if (row >= shared.num_rows[client_idx])
            continue;
        const FrameAt frame = {shared.number[client_idx], shared.request_frame[client_idx], nullptr,
                               nullptr};
        for (uint32_t num_polls = 1; !row_arrived(geometry, frame, row); ++num_polls)
            if (num_polls % comm::kPollsPerCheck == 0 &&
                must_give_up(params, client_idx, start_ns, frame.number)) {
                atomicOr(&shared.given_up, 1u << client_idx);
                break;
            }
    }
    __syncthreads();
    if (threadIdx.x < params.num_clients && (shared.given_up >> threadIdx.x & 1) != 0)
        shared.num_rows[threadIdx.x] = 0;
    __syncthreads();
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 2)
    echo_kernel(const __grid_constant__ sy_echo_params params) {
    __shared__ AnswerShared shared;
    if (threadIdx.x == 0)
        shared.most_rows = shared.given_up = 0;
    layout::copy_table(shared.clients, params.clients, params.num_clients, Config::kNumThreads);
    __syncthreads();
    ptx::griddepcontrol_wait();
    if ((params.flags & SY_LAUNCH_FLAG_EARLY) != 0)
        ptx::griddepcontrol_launch_dependents();
    take_in_lockstep<Config>(shared, params);

    // Every block has read the state once it arrives here: the last to arrive may advance it. The
    // answer to the arrival is not waited for until the rows are sent.
    uint32_t arrival = 0;
    if (threadIdx.x == 0)
        arrival = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, gridDim.x - 1);
    if (blockIdx.x == 0 && threadIdx.x < params.num_clients && shared.num_rows[threadIdx.x] == 0 &&
        (shared.given_up >> threadIdx.x & 1) == 0)
        comm::signal(shared.clients[threadIdx.x].response,
                     layout::response_flag_at(
                         layout::response_frame(
                             params.geometry,
                             layout::ring_place(params.geometry, shared.number[threadIdx.x])),
                         0),
                     shared.number[threadIdx.x]);
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
