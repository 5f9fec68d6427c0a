// expert_send: the experts' outputs of each token, weighted and summed in top-k order, to its client.
#pragma once

#include <cstdint>

#include "switchyard/comm/stamps.cuh"
#include "switchyard/comm/stream.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/answer.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// The experts' outputs of each token, weighted and summed in top-k order.
template <class Config> struct WeightedRows {
    const AnswerShared& shared;
    const sy_expert_send_params& params;

    static constexpr bool kLoadsAhead = false;

    template <class Store>
    __device__ __forceinline__ void make(uint32_t client, uint32_t row, Store store) const {
        const sy_frame_geometry& geometry = params.geometry;
        const uint32_t hidden = Config::kHidden != 0 ? Config::kHidden : geometry.hidden;
        const uint32_t batch_row = shared.row_begin[client] + row;
        const uint32_t* positions =
            params.lists.row_position + uint64_t{batch_row} * geometry.top_k;
        const uint8_t* outputs = static_cast<const uint8_t*>(params.expert_out);
        for (uint32_t chunk_idx = threadIdx.x; chunk_idx < hidden / 8;
             chunk_idx += Config::kNumThreads) {
            float sum[8] = {};
            for (uint32_t first = 0; first < geometry.top_k; first += 4) {
                uint4 parts[4];
                float weights[4];
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    const uint32_t position =
                        first + i < geometry.top_k ? positions[first + i] : SY_NO_EXPERT;
                    parts[i] = make_uint4(0, 0, 0, 0);
                    weights[i] = 0.0f;
                    if (position != SY_NO_EXPERT) {
                        weights[i] = params.lists.list_weight[position];
                        parts[i] = *reinterpret_cast<const uint4*>(
                            outputs + (uint64_t{position} * hidden + chunk_idx * 8) * 2);
                    }
                }
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i)
                    add_chunk<true>(sum, parts[i], weights[i]);
            }
            store(chunk_idx, round_chunk(sum));
        }
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocks)
    expert_send_kernel(const __grid_constant__ sy_expert_send_params params) {
    __shared__ AnswerShared shared;
    const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    if (is_first)
        comm::stamp(params.lists.stamps, SY_BATCH_SEND_START);
    layout::TableCopy<sy_client_peer, Config::kNumThreads, SY_MAX_PEERS> clients;
    clients.load(params.clients, params.num_clients);
    sy_client_peer client = {};
    if (threadIdx.x < params.num_clients)
        client = params.clients[threadIdx.x];
    // Before the wait: the kernel before this one let it start only after its own wait for earlier
    // kernels.
    comm::let_next_start(params.flags);
    ptx::griddepcontrol_wait();
    if (is_first)
        comm::stamp(params.lists.stamps, SY_BATCH_SEND_BEGIN);
    const sy_frame_geometry& geometry = params.geometry;
    const sy_batch* batch = params.lists.batch;
    const uint32_t client_idx = threadIdx.x;
    clients.store(shared.clients, params.num_clients);
    if (client_idx < 32) {
        uint32_t num_rows = 0;
        if (client_idx < params.num_clients) {
            // All loads leave together; the values of a client outside the batch are not used.
            const uint32_t clients = batch->clients;
            const uint64_t number = batch->frame_number[client_idx];
            const uint32_t begin = batch->row_begin[client_idx];
            const uint32_t end = batch->row_begin[client_idx + 1];
            const uint32_t place = layout::ring_place(geometry, number);
            num_rows = (clients >> client_idx & 1) != 0 ? end - begin : 0;
            shared.number[client_idx] = number;
            shared.row_begin[client_idx] = begin;
            shared.request_frame[client_idx] =
                client.request + layout::request_frame(geometry, place);
            shared.response_window[client_idx] =
                client.response.window + layout::response_frame(geometry, place);
        }
        shared.num_rows[client_idx] = num_rows;
        const uint32_t most = __reduce_max_sync(kFullWarp, num_rows);
        if (client_idx == 0)
            shared.most_rows = most;
    }
    __syncthreads();
    // Apart, so that neither holds the other's registers.
    if (params.expert_out != nullptr)
        answer_rows<Config>(shared, geometry, params.num_clients,
                            WeightedRows<Config>{shared, params});
    else
        answer_rows<Config>(shared, geometry, params.num_clients,
                            IdentityRows<Config>{shared, geometry});
    if (threadIdx.x == 0)
        comm::stamp_last(params.lists.stamps, SY_BATCH_SEND_END);
}

} // namespace switchyard::impls
