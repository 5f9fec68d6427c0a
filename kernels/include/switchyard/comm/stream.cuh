// Obligations of a kernel towards the ones before and after it in its stream, when launched with
// PDL.
//
// Usually a kernel waits for the one before it before it accesses anything that kernels write. With
// SY_LAUNCH_FLAG_AHEAD it works beside it instead, and joins it later: everything that it read
// until then must have been complete from the start. Two cases guarantee that. Either the kernel
// before it let it start only after its own wait or join. Or that kernel started itself only after
// such a wait, and nothing it wrote since is read. Data from peers is waited for by flags in any
// case. Joining before its end keeps the stream's order for all kernels that follow.
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

// First of all.
// NOTES: the wait also drops this multiprocessor's cached lines of earlier kernels' memory; so does
// a fence that acquires. One that also releases waits until all stores to peers by other kernels on
// the multiprocessor have arrived there, which may take most of a layer.
__device__ __forceinline__ void follow(uint32_t flags) {
    if (goes_ahead(flags))
        ptx::fence_acquire_sys();
    else
        ptx::griddepcontrol_wait();
}

// By every thread before the kernel's end. A second call costs nothing.
__device__ __forceinline__ void join(uint32_t flags) {
    if (goes_ahead(flags))
        ptx::griddepcontrol_wait();
}

} // namespace switchyard::comm
