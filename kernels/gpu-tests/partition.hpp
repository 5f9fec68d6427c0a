// Streams whose kernels run on some of a GPU's multiprocessors only.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include "check.hpp"
#include "driver.hpp"

// A green context of `num_sms` multiprocessors of a device, and a stream in it. A GPU of compute capability 9.0
// gives multiples of eight.
class Partition {
  public:
    Partition(int device, uint32_t num_sms) {
        CUdevResource all, some;
        check(driver_function<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource", 12040)(
                  device, &all, CU_DEV_RESOURCE_TYPE_SM),
              "cuDeviceGetDevResource");
        unsigned int num_groups = 1;
        check(driver_function<decltype(&cuDevSmResourceSplitByCount)>(
                  "cuDevSmResourceSplitByCount", 12040)(&some, &num_groups, &all, nullptr, 0,
                                                        num_sms),
              "cuDevSmResourceSplitByCount");
        CHECK(num_groups == 1 && some.sm.smCount == num_sms,
              "asked for %u multiprocessors, the driver gives %u", num_sms, some.sm.smCount);
        CUdevResourceDesc description;
        check(driver_function<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc",
                                                                    12040)(&description, &some, 1),
              "cuDevResourceGenerateDesc");
        check(driver_function<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate", 12040)(
                  &context_, description, device, CU_GREEN_CTX_DEFAULT_STREAM),
              "cuGreenCtxCreate");
        check(driver_function<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", 12050)(
                  &stream_, context_, CU_STREAM_NON_BLOCKING, 0),
              "cuGreenCtxStreamCreate");
    }
    Partition(const Partition&) = delete;
    Partition& operator=(const Partition&) = delete;
    ~Partition() {
        CHECK_CUDA(cudaStreamDestroy(stream_));
        check(driver_function<decltype(&cuGreenCtxDestroy)>("cuGreenCtxDestroy", 12040)(context_),
              "cuGreenCtxDestroy");
    }

    cudaStream_t stream() const { return stream_; }

  private:
    static void check(CUresult result, const char* call) {
        CHECK(result == CUDA_SUCCESS, "%s: error %d", call, static_cast<int>(result));
    }

    CUgreenCtx context_ = nullptr;
    cudaStream_t stream_ = nullptr;
};
