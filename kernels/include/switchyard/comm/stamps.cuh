// Times of a kernel's steps, for timelines.
//
// Off by a null pointer, which is tested where a stamp would be: once per block and step.
#pragma once

#include <cstdint>

#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::comm {

// One thread.
__device__ __forceinline__ void stamp(uint64_t* stamps, uint32_t which) {
    if (stamps != nullptr)
        stamps[which] = ptx::mov_globaltimer();
}

// One thread of each block: the last block's time stays. Times only grow, so nothing is reset.
__device__ __forceinline__ void stamp_last(uint64_t* stamps, uint32_t which) {
    if (stamps != nullptr)
        ptx::red_max_relaxed_gpu(&stamps[which], ptx::mov_globaltimer());
}

// Record of a call, null without a trace.
__device__ __forceinline__ uint64_t* call_stamps(uint64_t* trace, uint32_t trace_len,
                                                 uint64_t sequence) {
    // By its lower half: a division of 64 bits takes registers that a kernel may not have.
    return trace == nullptr
               ? nullptr
               : trace + uint64_t{static_cast<uint32_t>(sequence) % trace_len * SY_CALL_STAMPS};
}

} // namespace switchyard::comm
