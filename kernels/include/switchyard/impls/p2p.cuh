// Transport measurements: put + flag there and back, and puts in one direction.
#pragma once

#include <cstdint>

#include "switchyard/comm/bulk.cuh"
#include "switchyard/comm/link.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

constexpr uint32_t kP2pThreads = SY_P2P_THREADS;

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

constexpr uint32_t kBulkBytes = 16 << 10;

// The same by bulk copies, which take turns among the blocks.
__device__ __forceinline__ void put_share_bulk(const sy_link& link, uint64_t num_bytes,
                                               uint32_t share, uint32_t num_shares,
                                               uint32_t value) {
    __shared__ uint4 tile[kBulkBytes / sizeof(uint4)];
    if (threadIdx.x == 0)
        comm::await_bulk_source();
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < kBulkBytes / sizeof(uint4); i += kP2pThreads)
        tile[i] = make_uint4(value, value, value, value);
    comm::seal_bulk();
    __syncthreads();
    if (threadIdx.x == 0)
        for (uint64_t at = uint64_t{share} * kBulkBytes; at < num_bytes;
             at += uint64_t{num_shares} * kBulkBytes)
            comm::put_bulk(link, at, tile,
                           static_cast<uint32_t>(min(num_bytes - at, uint64_t{kBulkBytes})));
}

__device__ __forceinline__ bool puts_bulk(const sy_p2p_params& params) {
    return (params.flags & SY_P2P_FLAG_BULK) != 0 && params.num_bytes >= 16;
}

__device__ __forceinline__ void put_message(const sy_p2p_params& params, const sy_link& link,
                                            uint32_t share, uint32_t num_shares, uint32_t value) {
    if (puts_bulk(params))
        put_share_bulk(link, params.num_bytes, share, num_shares, value);
    else
        put_share(link, params.num_bytes, share, num_shares, value);
}

// A block's work for its peer. Blocks alternate among the peers, so that every link is busy.
struct P2pShare {
    uint32_t peer, share, num_shares;
};

__device__ __forceinline__ P2pShare share_of_block(const sy_p2p_params& params) {
    return {blockIdx.x % params.num_peers, blockIdx.x / params.num_peers, params.blocks_per_peer};
}

// False, in all threads, when the counters of the peers from `first` to before `last` did not all get there
// in time.
__device__ __forceinline__ bool await_counters(const sy_p2p_params& params, uint32_t first,
                                               uint32_t last, uint64_t expected) {
    __shared__ bool came;
    if (threadIdx.x == 0) {
        const comm::WaitBound bound = {params.error, nullptr, nullptr,
                                       nullptr,      nullptr, params.timeout_ns};
        bool all_came = true;
        for (uint32_t peer = first; all_came && peer < last; ++peer)
            all_came = comm::wait_until(reinterpret_cast<const uint64_t*>(params.counters[peer]),
                                        expected, SY_TAG_P2P, peer, bound);
        came = all_came;
    }
    __syncthreads();
    return came;
}
__device__ __forceinline__ bool await_counter(const sy_p2p_params& params, uint32_t peer,
                                              uint64_t expected) {
    return await_counters(params, peer, peer + 1, expected);
}

// Everything that the block has put, then the peer's counter.
__device__ __forceinline__ void count_up(const sy_p2p_params& params, uint32_t peer) {
    __syncthreads();
    if (threadIdx.x == 0) {
        // This is the thread that has put.
        if (puts_bulk(params))
            comm::await_bulk();
        comm::amo_nonfetch_add(params.links[peer], params.counter_offset[peer], 1);
    }
}

// A message there and one back, turn after turn, with every peer for itself. One turn more than asked, and
// before the clock starts: the peer's kernel may begin later.
__global__ void __launch_bounds__(kP2pThreads)
    pingpong_kernel(const __grid_constant__ sy_p2p_params params) {
    const P2pShare my = share_of_block(params);
    const sy_link& link = params.links[my.peer];
    uint64_t start_ns = 0;
    for (uint32_t turn = 0; turn <= params.num_turns; ++turn) {
        const uint64_t expected = (uint64_t{turn} + 1) * my.num_shares;
        if (turn == 1)
            start_ns = ptx::mov_globaltimer();
        if (!params.begins && !await_counter(params, my.peer, expected))
            return;
        put_message(params, link, my.share, my.num_shares, turn + 1);
        count_up(params, my.peer);
        if (params.begins && !await_counter(params, my.peer, expected))
            return;
    }
    if (my.share == 0 && threadIdx.x == 0)
        params.elapsed_ns[my.peer] = ptx::mov_globaltimer() - start_ns;
}

// A sender puts its message to every receiver, turn after turn, and waits for their answers once.
//
// All begin together: a receiver gives its word when every sender has reported to it, and a sender
// begins when it has every receiver's. A sender that began alone would find the links empty, and
// the slowest sender's time would not be that of all the bytes.
__global__ void __launch_bounds__(kP2pThreads)
    stream_kernel(const __grid_constant__ sy_p2p_params params) {
    const P2pShare my = share_of_block(params);
    if (!params.begins) {
        if (my.share != 0 || !await_counters(params, 0, params.num_peers, 1))
            return;
        count_up(params, my.peer);
        if (await_counter(params, my.peer, 1 + my.num_shares))
            count_up(params, my.peer);
        return;
    }
    // The first block reports for all, so that no block waits for one that has not begun.
    for (uint32_t peer = 0; blockIdx.x == 0 && peer < params.num_peers; ++peer)
        count_up(params, peer);
    if (!await_counters(params, 0, params.num_peers, 1))
        return;
    const uint64_t start_ns = ptx::mov_globaltimer();
    for (uint32_t turn = 1; turn <= params.num_turns; ++turn)
        put_message(params, params.links[my.peer], my.share, my.num_shares, turn);
    count_up(params, my.peer);
    if (my.share == 0 && await_counter(params, my.peer, 2) && threadIdx.x == 0)
        params.elapsed_ns[my.peer] = ptx::mov_globaltimer() - start_ns;
}

} // namespace switchyard::impls
