// Launcher of the expert stage.
#include "launch.cuh"

#include "switchyard/impls/expert_compute.cuh"

using namespace switchyard;

namespace {

// Kernels of more shared memory than the default ask for it once per device.
template <class Kernel> int allow_shared(Kernel kernel) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                impls::kGemmSharedBytes) == cudaSuccess
               ? SY_OK
               : SY_LAUNCH_CUDA;
}

template <class Kernel>
int launch_one(Kernel kernel, const sy_expert_compute_params& params, uint32_t shared_bytes,
               sy_stream stream) {
    const LaunchPlan size = plan(params);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size.num_blocks);
    config.blockDim = dim3(size.num_threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, params) == cudaSuccess ? SY_OK : SY_LAUNCH_CUDA;
}

} // namespace

extern "C" int sy_launch_expert_compute(const sy_expert_compute_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    const auto gather = params->geometry.dtype == SY_DTYPE_F8_E4M3
                            ? impls::expert_gather_kernel<true>
                            : impls::expert_gather_kernel<false>;
    if (const int code = allow_shared(impls::expert_gemm_kernel<true>); code != SY_OK)
        return code;
    if (const int code = allow_shared(impls::expert_gemm_kernel<false>); code != SY_OK)
        return code;
    if (const int code = launch_one(gather, *params, 0, stream); code != SY_OK)
        return code;
    if (const int code = launch_one(impls::expert_gemm_kernel<true>, *params,
                                    impls::kGemmSharedBytes, stream);
        code != SY_OK)
        return code;
    return launch_one(impls::expert_gemm_kernel<false>, *params, impls::kGemmSharedBytes, stream);
}
