// The calls of a link one after the other, over any path: a kernel for tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "switchyard/comm/put_get.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"

namespace switchyard::impls {

// `LinkCallsParams` of kernels/src/link_calls.rs says the same in Rust.
struct LinkCallsParams {
    sy_link link;
    const void* source; // of the put
    void* back; // where the same bytes are got to
    uint64_t offset, num_bytes; // of the put and of the get
    uint64_t word_offset, counter_offset;
    uint64_t value;
    const uint64_t* echo; // of this side: a word that is waited for before the get, or null
    sy_error_word* error;
    uint64_t timeout_ns;
    uint32_t* good; // [3]: quiet, wait_until, quiet_gets
};

static_assert(sizeof(LinkCallsParams) == 112, "size of LinkCallsParams");
static_assert(offsetof(LinkCallsParams, good) == 104, "good of LinkCallsParams");

// One block of one warp: puts, adds and signals behind it, waits, and gets the put bytes.
template <uint32_t kPaths>
__device__ __forceinline__ void link_calls(const LinkCallsParams& params) {
    const sy_link& link = params.link;
    comm::put_nbi_warp<kPaths>(link, params.offset, params.source, params.num_bytes);
    // The last lane signals, so that it is behind the puts of the others.
    if (threadIdx.x == 31) {
        comm::amo_nonfetch_add<kPaths>(link, params.counter_offset, params.value);
        comm::signal<kPaths>(link, params.word_offset, params.value);
        params.good[0] = comm::quiet<kPaths>(link);
        const comm::WaitBound bound = {params.error, nullptr, nullptr,
                                       nullptr,      nullptr, params.timeout_ns};
        params.good[1] =
            params.echo == nullptr ||
            comm::wait_until<kPaths>(params.echo, params.value, SY_TAG_P2P, 0, bound, &link);
    }
    __syncwarp();
    comm::get_nbi_warp<kPaths>(link, params.offset, params.back, params.num_bytes);
    if (threadIdx.x == 0)
        params.good[2] = comm::quiet_gets<kPaths>(link, params.back);
}

template <uint32_t kPaths>
__global__ void __launch_bounds__(32)
    link_calls_kernel(const __grid_constant__ LinkCallsParams params) {
    link_calls<kPaths>(params);
}

} // namespace switchyard::impls
