// The part of the CUDA runtime that the NICs of GPUs use, for a processor. Memory is the host's.
// Copies on a stream are made one by one, when a caller queries the stream or waits for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;

struct sy_host_copy {
    void* to;
    const void* from;
    size_t num_bytes;
};
struct sy_host_stream {
    std::deque<sy_host_copy> copies;
    uint64_t num_done = 0;

    // Makes up to `num` copies; each must be visible before the next.
    void run(uint64_t num) {
        for (; num != 0 && !copies.empty(); --num, copies.pop_front(), ++num_done) {
            sy_host_copy& copy = copies.front();
            // Aligned words of 8 bytes are never torn.
            const uintptr_t all = reinterpret_cast<uintptr_t>(copy.to) |
                                  reinterpret_cast<uintptr_t>(copy.from) | copy.num_bytes;
            if (all % 8 != 0)
                memcpy(copy.to, copy.from, copy.num_bytes);
            else
                for (size_t i = 0; i < copy.num_bytes / 8; ++i)
                    __atomic_store_n(static_cast<uint64_t*>(copy.to) + i,
                                     static_cast<const uint64_t*>(copy.from)[i], __ATOMIC_RELAXED);
            __atomic_thread_fence(__ATOMIC_SEQ_CST);
        }
    }
};
struct sy_host_event {
    sy_host_stream* stream = nullptr;
    uint64_t end = 0;
};
using cudaStream_t = sy_host_stream*;
using cudaEvent_t = sy_host_event*;

inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "not ready";
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMalloc(void** pointer, size_t num_bytes) {
    *pointer = aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
    return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** pointer, size_t num_bytes, unsigned) {
    return cudaMalloc(pointer, num_bytes);
}
inline cudaError_t cudaMemset(void* pointer, int value, size_t num_bytes) {
    memset(pointer, value, num_bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind) {
    memcpy(to, from, num_bytes);
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new sy_host_stream;
    return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new sy_host_event;
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
    stream->copies.push_back({to, from, num_bytes});
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->stream = stream;
    event->end = stream->num_done + stream->copies.size();
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (event->stream->num_done < event->end)
        event->stream->run(2);
    return event->stream->num_done < event->end ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    stream->run(UINT64_MAX);
    return cudaSuccess;
}
