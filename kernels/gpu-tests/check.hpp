// Checks that end the program with a line that names the expected value.
#pragma once

#include <cstdio>
#include <cstdlib>

#include <cuda_runtime.h>

#include "switchyard/launch.h"

#define CHECK_CUDA(call)                                                                           \
    do {                                                                                           \
        const cudaError_t error_ = (call);                                                         \
        if (error_ != cudaSuccess) {                                                               \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                          \
                    cudaGetErrorString(error_));                                                   \
            _Exit(2);                                                                              \
        }                                                                                          \
    } while (0)

#define CHECK_LAUNCH(call)                                                                         \
    do {                                                                                           \
        const int code_ = (call);                                                                  \
        if (code_ != SY_OK) {                                                                      \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, sy_launch_error(code_)); \
            _Exit(2);                                                                              \
        }                                                                                          \
    } while (0)

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fprintf(stderr, "\n");                                                                 \
            _Exit(1);                                                                              \
        }                                                                                          \
    } while (0)

// Device memory of `count` elements, zeroed. Freed with the process.
template <class T> T* device_alloc(size_t count) {
    void* pointer = nullptr;
    CHECK_CUDA(cudaMalloc(&pointer, count * sizeof(T)));
    CHECK_CUDA(cudaMemset(pointer, 0, count * sizeof(T)));
    return static_cast<T*>(pointer);
}

template <class T> T from_device(const T* pointer) {
    T value;
    CHECK_CUDA(cudaMemcpy(&value, pointer, sizeof(T), cudaMemcpyDeviceToHost));
    return value;
}

// NOTES: a copy from pageable memory may return before it has landed, and streams that do not wait for
// the default one would run ahead of it.
inline void upload(void* pointer, const void* source, size_t bytes) {
    CHECK_CUDA(cudaMemcpy(pointer, source, bytes, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
}

template <class T> void to_device(T* pointer, const T& value) {
    upload(pointer, &value, sizeof(T));
}
