// The kernel of the expert stage's products.
#pragma once

#include <cstdint>

#include "switchyard/comm/stamps.cuh"
#include "switchyard/impls/expert_gemm.cuh"
#include "switchyard/impls/expert_gemm_parts.cuh"
#include "switchyard/impls/expert_plain.cuh"

namespace switchyard::impls {

// The warpgroup that fetches.
template <bool kDirect, class Multiplier>
__device__ __forceinline__ void fetch_with(Multiplier multiplier) {
    if constexpr (kDirect)
        multiplier.fetch_direct();
    else if (threadIdx.x < 32)
        multiplier.fetch();
}

template <bool kFp8, bool kGateUp, bool kDirect>
__global__ void __launch_bounds__(kGemmThreads, 1)
    expert_gemm_kernel(const __grid_constant__ sy_expert_compute_params params) {
    extern __shared__ __align__(1024) uint8_t shared_memory[];
    const uint32_t shared = ptx::shared_address(shared_memory);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using Whole = Gemm<kFp8, kGateUp, kDirect>;
    using Halves = GemmParts<kFp8, kGateUp, kDirect, 2>;
    using Quarters = GemmParts<kFp8, kGateUp, kDirect, 4>;
    static_assert(SY_MOST_PARTS == 4, "parts of a tile");
    if (threadIdx.x == 0) {
        if (blockIdx.x == 0)
            comm::stamp(params.lists.stamps, kGateUp ? SY_BATCH_UP_START : SY_BATCH_DOWN_START);
        for (uint32_t stage = 0; stage < kGemmStages; ++stage) {
            ptx::mbarrier_init(shared + kFullAt + stage * 8, Whole::kArrivals);
            ptx::mbarrier_init(shared + kEmptyAt + stage * 8, 8);
        }
        ptx::fence_mbarrier_init();
    }
    // NOTES: counts and layer were there before the kernel before this one began, except behind the
    // reception.
    if (kDirect)
        ptx::griddepcontrol_wait();
    const uint32_t layer_idx = params.lists.batch->layer;
    // NOTES: the host rewrites maps in place when experts are loaded, and a multiprocessor's cached
    // copies of the old ones name memory that is freed then. The order of kernels in a stream does
    // not cover it (CUDA C++ Programming Guide, tensor maps in global memory: a fence in each block
    // before their first use). It stands before the barrier: behind it, the compiler's code for the
    // rest was up to 10 % slower.
    if (threadIdx.x == 0 && layer_idx < params.num_layers) {
        const sy_layer_weights& layer = params.layers[layer_idx];
        ptx::fence_proxy_tensormap_acquire_sys(kGateUp ? layer.gate_up_map : layer.down_map);
    }
    __syncthreads();
    if (layer_idx >= params.num_layers) {
        ptx::griddepcontrol_wait();
        return;
    }
    const uint32_t parts = num_parts<kFp8, kGateUp>(params);
    if (threadIdx.x < 128) {
        ptx::setmaxnreg_dec<56>();
        if (parts == 1)
            fetch_with<kDirect>(Whole(params, shared));
        else if (parts == 2)
            fetch_with<kDirect>(Halves(params, shared));
        else
            fetch_with<kDirect>(Quarters(params, shared));
    } else {
        ptx::setmaxnreg_inc<224>();
        // From one lane, so that the compiler knows it to be the same in all.
        const uint32_t group_idx = __shfl_sync(kFullWarp, threadIdx.x / 128 - 1, 0);
        if (parts == 1)
            Whole(params, shared).multiply(group_idx);
        else if (parts == 2)
            Halves(params, shared).multiply(group_idx);
        else
            Quarters(params, shared).multiply(group_idx);
        if (threadIdx.x == 128)
            comm::stamp_last(params.lists.stamps, kGateUp ? SY_BATCH_UP_END : SY_BATCH_DOWN_END);
    }
#else
    ptx::griddepcontrol_wait();
    if (params.lists.batch->layer < params.num_layers)
        multiply_plain<kFp8, kGateUp, kDirect>(params, shared + kStagingAt);
#endif
}

} // namespace switchyard::impls
