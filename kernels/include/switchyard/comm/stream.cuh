// What a kernel has to do with the ones before and after it in its stream, when launched with PDL.
//
// Usually a kernel waits for the one before it before it touches anything that kernels write. With
// SY_LAUNCH_FLAG_AHEAD it works beside it instead, and joins it later: by then whatever it read must have
// been complete from the start. That is so when the kernel before it let it start only after its own wait, or
// started itself only after such a wait, and nothing it wrote since is read; what peers send is waited for by flags in any case. Joining before
// its end keeps the stream's order for all kernels that follow.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::comm {

__device__ __forceinline__ bool goes_ahead(uint32_t flags) {
    return (flags & SY_LAUNCH_FLAG_AHEAD) != 0;
}

__device__ __forceinline__ void let_next_start(uint32_t flags) {
    if ((flags & SY_LAUNCH_FLAG_EARLY) != 0)
        ptx::griddepcontrol_launch_dependents();
}

// First of all. `word` is any in the GPU's memory.
// NOTES: the wait also drops what this multiprocessor has cached of earlier kernels' memory; so does a load that
// acquires. A fence would, too, but it waits for all that other kernels on the multiprocessor have stored to peers
// by then, as long as they store.
__device__ __forceinline__ void follow(uint32_t flags, const uint64_t* word) {
    if (goes_ahead(flags))
        static_cast<void>(ptx::ld_acquire_sys(word));
    else
        ptx::griddepcontrol_wait();
}

// Once, by every thread, before the kernel's end.
__device__ __forceinline__ void join(uint32_t flags) {
    if (goes_ahead(flags))
        ptx::griddepcontrol_wait();
}

} // namespace switchyard::comm
