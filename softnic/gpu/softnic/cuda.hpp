// The part of the CUDA runtime that the NICs of GPUs need. A call that fails ends the program: no
// request of a user depends on this code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

#define SOFTNIC_CUDA(call)                                                                         \
    do {                                                                                           \
        const cudaError_t error_ = (call);                                                         \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                          \
                    cudaGetErrorString(error_));                                                   \
            _Exit(2);                                                                              \
        }                                                                                          \
    } while (0)

#define SOFTNIC_CHECK(condition, what)                                                             \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, what);              \
            _Exit(1);                                                                              \
        }                                                                                          \
    } while (0)

namespace softnic {

// Device memory, zeroed. Freed with the process.
template <class T> T* allocate(size_t count) {
    void* pointer = nullptr;
    SOFTNIC_CUDA(cudaMalloc(&pointer, count * sizeof(T)));
    SOFTNIC_CUDA(cudaMemset(pointer, 0, count * sizeof(T)));
    return static_cast<T*>(pointer);
}

// Host memory that GPUs reach at the same address, zeroed. Freed with the process.
template <class T> T* allocate_mapped(size_t count) {
    void* pointer = nullptr;
    SOFTNIC_CUDA(
        cudaHostAlloc(&pointer, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable));
    uint8_t* bytes = static_cast<uint8_t*>(pointer);
    for (size_t i = 0; i < count * sizeof(T); ++i)
        bytes[i] = 0;
    return static_cast<T*>(pointer);
}

// NOTES: a copy from pageable memory may return before it has landed, and streams that do not wait for
// the default one would run ahead of it.
inline void store(void* pointer, const void* source, size_t num_bytes) {
    SOFTNIC_CUDA(cudaMemcpy(pointer, source, num_bytes, cudaMemcpyDefault));
    SOFTNIC_CUDA(cudaDeviceSynchronize());
}

template <class T> T load(const T* pointer) {
    T value;
    SOFTNIC_CUDA(cudaMemcpy(&value, pointer, sizeof(T), cudaMemcpyDefault));
    return value;
}

} // namespace softnic
