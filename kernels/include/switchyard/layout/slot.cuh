// Addresses within slots, for kernels.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"

namespace switchyard::layout {

// A table of the host's on its path into shared memory: this thread's part. Loading first and
// storing later keeps the load's latency off the path of the code between. `kWords` per thread.
template <class T, uint32_t kNumThreads, uint32_t kMaxCount> struct TableCopy {
    static_assert(sizeof(T) % sizeof(uint64_t) == 0, "whole words");
    static constexpr uint32_t kWordsEach = sizeof(T) / sizeof(uint64_t);
    static constexpr uint32_t kPerThread = (kMaxCount * kWordsEach + kNumThreads - 1) / kNumThreads;
    uint64_t words[kPerThread];

    __device__ __forceinline__ void load(const T* table, uint32_t count) {
#pragma unroll
        for (uint32_t i = 0; i < kPerThread; ++i) {
            const uint32_t at = threadIdx.x + i * kNumThreads;
            if (at < count * kWordsEach)
                words[i] = reinterpret_cast<const uint64_t*>(table)[at];
        }
    }
    // Barrier afterwards.
    __device__ __forceinline__ void store(T* shared, uint32_t count) const {
#pragma unroll
        for (uint32_t i = 0; i < kPerThread; ++i) {
            const uint32_t at = threadIdx.x + i * kNumThreads;
            if (at < count * kWordsEach)
                reinterpret_cast<uint64_t*>(shared)[at] = words[i];
        }
    }
};

// Frames of a pair are numbered from 1; number n lies in ring place n % num_frames.
__device__ __forceinline__ uint32_t ring_place(const sy_frame_geometry& geometry, uint64_t number) {
    return static_cast<uint32_t>(number) & (geometry.num_frames - 1);
}

__device__ __forceinline__ uint64_t request_frame(const sy_frame_geometry& geometry,
                                                  uint32_t place) {
    return place * geometry.frame_bytes;
}

__device__ __forceinline__ uint64_t response_frame(const sy_frame_geometry& geometry,
                                                   uint32_t place) {
    return place * geometry.response_frame_bytes;
}

__device__ __forceinline__ uint64_t request_flag_at(const sy_frame_geometry& geometry,
                                                    uint64_t frame, uint32_t row) {
    return frame + geometry.flags_offset + static_cast<uint64_t>(row) * sizeof(uint64_t);
}

__device__ __forceinline__ uint64_t entries_at(const sy_frame_geometry& geometry, uint64_t frame,
                                               uint32_t row) {
    return frame + geometry.entries_offset +
           static_cast<uint64_t>(row) * geometry.top_k * sizeof(sy_entry);
}

__device__ __forceinline__ uint64_t scales_at(const sy_frame_geometry& geometry, uint64_t frame,
                                              uint32_t row) {
    return frame + geometry.scales_offset +
           static_cast<uint64_t>(row) * geometry.scales_per_row * sizeof(float);
}

__device__ __forceinline__ uint64_t payload_at(const sy_frame_geometry& geometry, uint64_t frame,
                                               uint32_t row) {
    return frame + geometry.payload_offset + static_cast<uint64_t>(row) * geometry.row_stride_bytes;
}

__device__ __forceinline__ uint64_t response_flag_at(uint64_t frame, uint32_t row) {
    return frame + static_cast<uint64_t>(row) * sizeof(uint64_t);
}

__device__ __forceinline__ uint64_t response_row_at(const sy_frame_geometry& geometry,
                                                    uint64_t frame, uint32_t row) {
    return frame + geometry.response_payload_offset +
           static_cast<uint64_t>(row) * geometry.response_stride_bytes;
}

__device__ __forceinline__ uint32_t* routes_of(sy_handle* handle) {
    return reinterpret_cast<uint32_t*>(handle + 1);
}

__device__ __forceinline__ const uint32_t* routes_of(const sy_handle* handle) {
    return reinterpret_cast<const uint32_t*>(handle + 1);
}

} // namespace switchyard::layout
