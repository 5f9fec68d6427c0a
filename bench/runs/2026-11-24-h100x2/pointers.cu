#include <chrono>
#include <cstdio>
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
int main() {
    void* p;
    cudaMalloc(&p, 1 << 20);
    void* h = dlopen("libcuda.so.1", RTLD_NOW);
    auto one =
        (CUresult (*)(void*, CUpointer_attribute, CUdeviceptr))dlsym(h, "cuPointerGetAttribute");
    auto many = (CUresult (*)(unsigned, CUpointer_attribute*, void**, CUdeviceptr))dlsym(
        h, "cuPointerGetAttributes");
    CUdeviceptr a = (CUdeviceptr)p;
    for (int round = 0; round < 3; ++round) {
        const int n = 10000;
        unsigned long long v[3];
        auto t0 = std::chrono::steady_clock::now();
        for (int i = 0; i < n; ++i) {
            one(&v[0], CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a + (i & 1) * 4096);
            one(&v[1], CU_POINTER_ATTRIBUTE_IS_MANAGED, a + (i & 1) * 4096);
            one(&v[2], CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, a + (i & 1) * 4096);
        }
        auto t1 = std::chrono::steady_clock::now();
        CUpointer_attribute w[3] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
        void* d[3] = {&v[0], &v[1], &v[2]};
        for (int i = 0; i < n; ++i)
            many(3, w, d, a + (i & 1) * 4096);
        auto t2 = std::chrono::steady_clock::now();
        for (int i = 0; i < n; ++i)
            many(3, w, d, 0x1234000);
        auto t3 = std::chrono::steady_clock::now();
        v[0] = v[1] = v[2] = 0;
        CUresult r = many(3, w, d, 0x1234000);
        auto us = [](auto x, auto y) {
            return std::chrono::duration<double, std::micro>(y - x).count();
        };
        printf(
            "three single %.3f us, one of three %.3f us, unknown %.3f us (result %d kind %llu)\n",
            us(t0, t1) / n, us(t1, t2) / n, us(t2, t3) / n, (int)r, v[0]);
    }
}
