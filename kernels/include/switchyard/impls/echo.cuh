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

// Waits for this client's next frame and notes it for the block. One thread per client.
__device__ __forceinline__ void take_in_lockstep(AnswerShared& shared, const sy_echo_params& params,
                                                 uint32_t client_idx, FrameSeen& seen) {
    const sy_frame_geometry& geometry = params.geometry;
    const sy_client_peer& client = params.clients[client_idx];
    const uint64_t number = params.state->taken[client_idx] + 1;
    const uint32_t place = layout::ring_place(geometry, number);
    const uint64_t before = params.state->published[client_idx][place];
    seen = look_for_frame(geometry, client, number, place, before);
    if (!seen.is_ready) {
        const comm::WaitBound bound = {&params.state->error, params.abort_mask, nullptr,
                                       nullptr, nullptr, params.timeout_ns};
        const uint64_t start_ns = ptx::mov_globaltimer();
        for (uint32_t num_polls = 1; !seen.is_ready; ++num_polls) {
            seen = look_for_frame(geometry, client, number, place, before);
            if (num_polls % comm::kPollsPerCheck != 0 || seen.is_ready)
                continue;
            const bool aborted = comm::is_aborted(bound, client_idx);
            if (aborted || ptx::mov_globaltimer() - start_ns > params.timeout_ns) {
                comm::record_error(&params.state->error, SY_TAG_RECV_FRAME, client_idx,
                                   aborted ? SY_REASON_ABORT : SY_REASON_TIMEOUT,
                                   params.state->taken[client_idx], number);
                break;
            }
        }
    }
    const bool fits = seen.is_ready && seen.num_rows <= geometry.max_tokens;
    shared.number[client_idx] = number;
    shared.num_rows[client_idx] = fits ? seen.num_rows : 0;
    shared.request_frame[client_idx] = client.request + layout::request_frame(geometry, place);
    shared.response_window[client_idx] =
        client.response.window + layout::response_frame(geometry, place);
    if (fits)
        atomicMax(&shared.most_rows, seen.num_rows);
}

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, 2)
    echo_kernel(const __grid_constant__ sy_echo_params params) {
    __shared__ AnswerShared shared;
    if ((params.flags & SY_LAUNCH_FLAG_EARLY) != 0)
        ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    if (threadIdx.x == 0)
        shared.most_rows = 0;
    __syncthreads();
    FrameSeen seen = {};
    if (threadIdx.x < params.num_clients)
        take_in_lockstep(shared, params, threadIdx.x, seen);
    __syncthreads();

    // Every block has read the state once it arrives here: the last to arrive may advance it.
    bool is_last = false;
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0)
            is_last = ptx::atom_inc_relaxed_gpu(&params.state->arrivals, gridDim.x - 1) ==
                      gridDim.x - 1;
        is_last = __shfl_sync(kFullWarp, is_last, 0);
        const uint32_t client_idx = threadIdx.x;
        if (is_last && client_idx < params.num_clients && seen.is_ready) {
            const uint64_t number = shared.number[client_idx];
            const uint32_t place = layout::ring_place(params.geometry, number);
            params.state->taken[client_idx] = number;
            params.state->published[client_idx][place] = seen.published;
            if (seen.num_rows == 0)
                comm::signal(params.clients[client_idx].response,
                             layout::response_flag_at(layout::response_frame(params.geometry, place), 0),
                             number);
        }
    }
    answer_rows<Config>(shared, params.geometry, params.clients, params.num_clients,
                        [&](uint32_t client, uint32_t row, auto store) {
                            identity_row<Config>(params.geometry, shared.request_frame[client], row,
                                                 store);
                        });
}

} // namespace switchyard::impls
