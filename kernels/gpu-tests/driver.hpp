// Functions of the driver, which nothing here is linked with.
#pragma once

#include <cuda_runtime.h>

#include "check.hpp"

// `version` is the CUDA in which the function got its present form, 1000 * major + 10 * minor.
template <class Function> Function driver_function(const char* name, unsigned int version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK_CUDA(
        cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found));
    CHECK(found == cudaDriverEntryPointSuccess, "the driver has no %s", name);
    return reinterpret_cast<Function>(function);
}
