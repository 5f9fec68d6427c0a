// The launch itself, as all launchers do it.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "check.hpp"

namespace switchyard {

template <class Params>
[[nodiscard]] int launch(void (*kernel)(Params), const Params& params, const LaunchPlan& plan,
                         sy_stream stream) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(plan.num_blocks);
    config.blockDim = dim3(plan.num_threads);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = (params.flags & SY_LAUNCH_FLAG_PDL) != 0 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params) == cudaSuccess ? SY_OK : SY_LAUNCH_CUDA;
}

} // namespace switchyard
