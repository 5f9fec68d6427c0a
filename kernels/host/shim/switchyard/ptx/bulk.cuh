// The host's version of the part of ptx/bulk.cuh that copies from a block to peers need: a copy is
// done when it is requested.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace switchyard::ptx {

inline void cp_async_bulk_to_global(uint64_t target, const void* source, uint32_t num_bytes) {
    if ((target | reinterpret_cast<uint64_t>(source) | num_bytes) % 16 != 0)
        abort();
    memcpy(reinterpret_cast<void*>(target), source, num_bytes);
}
inline void cp_async_bulk_commit_group() {}
template <uint32_t kMost> void cp_async_bulk_wait_group() {}
template <uint32_t kMost> void cp_async_bulk_wait_group_read() {}
inline void fence_proxy_async_shared() {}

} // namespace switchyard::ptx
