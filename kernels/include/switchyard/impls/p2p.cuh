// Transport measurements: put + flag there and back, and puts in one direction.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

constexpr uint32_t kP2pThreads = 512;

// This block's share of a message, in 16-byte units; messages under 16 bytes are one 4-byte store.
__device__ __forceinline__ void put_share(const sy_link& link, uint64_t num_bytes, uint32_t share,
                                          uint32_t num_shares, uint32_t value) {
    if (num_bytes < 16) {
        if (share == 0 && threadIdx.x < num_bytes / 4)
            *(comm::window_at<uint32_t>(link, 0) + threadIdx.x) = value;
        return;
    }
    uint4* target = comm::window_at<uint4>(link, 0);
    const uint4 data = make_uint4(value, value, value, value);
    const uint64_t num_units = num_bytes / 16;
#pragma unroll 8
    for (uint64_t i = uint64_t{share} * kP2pThreads + threadIdx.x; i < num_units;
         i += uint64_t{num_shares} * kP2pThreads)
        target[i] = data;
}

__device__ __forceinline__ void await_counter(const sy_p2p_params& params, uint32_t peer,
                                              uint64_t expected) {
    if (threadIdx.x == 0) {
        const comm::WaitBound bound = {params.error, nullptr, nullptr, nullptr, nullptr,
                                       params.timeout_ns};
        comm::wait_until(params.counters + peer * (SY_CONTROL_STRIDE / sizeof(uint64_t)), expected,
                         SY_TAG_P2P, peer, bound);
    }
    __syncthreads();
}

// Every block answers every block, so counters grow by the number of blocks per turn.
__global__ void __launch_bounds__(kP2pThreads)
    pingpong_kernel(const __grid_constant__ sy_p2p_params params) {
    const uint64_t start_ns = ptx::mov_globaltimer();
    for (uint32_t turn = 1; turn <= params.num_turns; ++turn) {
        if (!params.begins)
            await_counter(params, 0, uint64_t{turn} * gridDim.x);
        put_share(params.links[0], params.num_bytes, blockIdx.x, gridDim.x, turn);
        __syncthreads();
        if (threadIdx.x == 0)
            comm::amo_nonfetch_add(params.links[0], params.counter_offset[0], 1);
        if (params.begins)
            await_counter(params, 0, uint64_t{turn} * gridDim.x);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *params.elapsed_ns = ptx::mov_globaltimer() - start_ns;
}

// A sender puts its message to every receiver, turn after turn, and waits for their answers once.
__global__ void __launch_bounds__(kP2pThreads)
    stream_kernel(const __grid_constant__ sy_p2p_params params) {
    const uint64_t start_ns = ptx::mov_globaltimer();
    const uint32_t blocks_per_peer = gridDim.x / params.num_peers;
    const uint32_t peer = blockIdx.x % params.num_peers, share = blockIdx.x / params.num_peers;
    if (!params.begins) {
        if (share == 0) {
            await_counter(params, peer, params.expected);
            if (threadIdx.x == 0)
                comm::amo_nonfetch_add(params.links[peer], params.counter_offset[peer], 1);
        }
        return;
    }
    if (share < blocks_per_peer) {
        for (uint32_t turn = 1; turn <= params.num_turns; ++turn)
            put_share(params.links[peer], params.num_bytes, share, blocks_per_peer, turn);
        __syncthreads();
        if (threadIdx.x == 0)
            comm::amo_nonfetch_add(params.links[peer], params.counter_offset[peer], 1);
    }
    if (blockIdx.x == 0) {
        for (uint32_t i = 0; i < params.num_peers; ++i)
            await_counter(params, i, 1);
        if (threadIdx.x == 0)
            *params.elapsed_ns = ptx::mov_globaltimer() - start_ns;
    }
}

} // namespace switchyard::impls
