// Puts by the copy engine of a multiprocessor: one thread requests up to some kilobytes of the
// block's shared memory at a time. No thread holds the data in registers or waits at a store.
//
// The engine sees stores by the block's threads after `seal_bulk` by each of them and a block
// barrier. Put data comes before a signal of the putting thread (SYNC POINT publish) only when that
// thread has called `await_bulk`: the engine's writes are not in the order of the thread's own.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/ptx/bulk.cuh"

namespace switchyard::comm {

// Called by every thread that has written data to put, before a block barrier.
__device__ __forceinline__ void seal_bulk() { ptx::fence_proxy_async_shared(); }

// Puts `num_bytes` of shared memory into the window, by one thread. The offset, the source and `num_bytes`
// are multiples of 16.
__device__ __forceinline__ void put_bulk(const sy_link& link, uint64_t offset, const void* source,
                                         uint32_t num_bytes) {
    ptx::cp_async_bulk_to_global(link.window + offset, source, num_bytes);
    ptx::cp_async_bulk_commit_group();
}

// Until all that this thread has put may be overwritten where it came from.
__device__ __forceinline__ void await_bulk_source() { ptx::cp_async_bulk_wait_group_read<0>(); }

// Until all that this thread has put is where it belongs.
__device__ __forceinline__ void await_bulk() { ptx::cp_async_bulk_wait_group<0>(); }

} // namespace switchyard::comm
