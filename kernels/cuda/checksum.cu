// The checksum of memory that src/gpu/checksum.rs defines.
#include <cstdint>

namespace {

struct Range {
    uint64_t from, words;
};

struct Checksum {
    Range ranges[4];
    uint64_t to;
};
static_assert(sizeof(Checksum) == 72);

__device__ uint64_t mix(uint64_t x, uint64_t first, uint64_t second) {
    x = (x ^ (x >> 30)) * first;
    x = (x ^ (x >> 27)) * second;
    return x ^ (x >> 31);
}

__device__ uint64_t sum_of_warp(uint64_t value) {
    for (uint32_t step = 16; step > 0; step /= 2)
        value += __shfl_down_sync(0xffffffff, value, step);
    return value;
}

} // namespace

// A word per thread and turn. The sums have no order, so the number of blocks does not change them.
extern "C" __global__ void sy_checksum(const __grid_constant__ Checksum params) {
    const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
    const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    uint64_t sums[2] = {0, 0}, begin = 0;
    for (const Range& range : params.ranges) {
        const auto* words = reinterpret_cast<const uint32_t*>(range.from);
#pragma unroll 4
        for (uint64_t at = first; at < range.words; at += stride) {
            const uint64_t x = words[at] + (begin + at + 1) * 0x9e3779b97f4a7c15;
            sums[0] += mix(x, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb);
            sums[1] += mix(x, 0xff51afd7ed558ccd, 0xc4ceb9fe1a85ec53);
        }
        begin += range.words;
    }
    auto* to = reinterpret_cast<unsigned long long*>(params.to);
    for (uint32_t idx = 0; idx < 2; ++idx) {
        const uint64_t sum = sum_of_warp(sums[idx]);
        if (threadIdx.x % 32 == 0)
            atomicAdd(&to[idx], static_cast<unsigned long long>(sum));
    }
}
