// Small tasks of the host that a GPU does in stream order: moving flags of slots in GPU memory, small messages to the
// host, and conversions of a caller's matrices.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

// SYNC POINT publish: adds after everything that the stream did before.
extern "C" __global__ void sy_flag_add(uint64_t* flag, uint64_t value) {
    switchyard::ptx::red_add_release_sys(flag, value);
}

// Two pieces of memory to the host, in words of four bytes, by one block: less for the next kernel in the stream to
// wait for than two copies by the copy engine.
// SYNC POINT told: one store writes the first eight bytes of the second piece, after all else. Behind it comes, where
// `began_to` is not null, the time at which this kernel began.
extern "C" __global__ void sy_tell_host(uint32_t* first_to, const uint32_t* first,
                                        uint64_t first_words, uint32_t* last_to,
                                        const uint32_t* last, uint64_t last_words,
                                        uint64_t* began_to) {
    switchyard::ptx::griddepcontrol_launch_dependents();
    switchyard::ptx::griddepcontrol_wait();
    const uint64_t began_ns = switchyard::ptx::mov_globaltimer();
    for (uint64_t i = threadIdx.x; i < first_words; i += blockDim.x)
        first_to[i] = first[i];
    for (uint64_t i = threadIdx.x + 2; i < last_words; i += blockDim.x)
        last_to[i] = last[i];
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    switchyard::ptx::st_release_sys(reinterpret_cast<uint64_t*>(last_to),
                                    *reinterpret_cast<const uint64_t*>(last));
    if (began_to != nullptr)
        switchyard::ptx::st_release_sys(began_to, began_ns);
}

namespace {

// Element types of `Conversion`, as in src/gpu/convert.rs.
enum : uint32_t { kF32, kF16, kBf16, kI32, kI64 };

struct Conversion {
    uint64_t to, from;
    uint32_t rows, from_cols, to_cols;
    // The source's type in the low half, the target's in the high one.
    uint32_t types;
};
static_assert(sizeof(Conversion) == 32);

struct Conversions {
    Conversion pieces[3];
    uint64_t num;
};
static_assert(sizeof(Conversions) == 104);

__device__ float load_float(uint64_t from, uint64_t at, uint32_t type) {
    if (type == kF32)
        return reinterpret_cast<const float*>(from)[at];
    if (type == kF16)
        return __half2float(reinterpret_cast<const __half*>(from)[at]);
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(from)[at]);
}

__device__ void store_float(uint64_t to, uint64_t at, uint32_t type, float value) {
    if (type == kF32)
        reinterpret_cast<float*>(to)[at] = value;
    else if (type == kF16)
        reinterpret_cast<__half*>(to)[at] = __float2half_rn(value);
    else
        reinterpret_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(value);
}

// A number beyond 32 bits becomes the nearest one within them, which is no expert either.
__device__ int32_t load_index(uint64_t from, uint64_t at, uint32_t type) {
    if (type == kI32)
        return reinterpret_cast<const int32_t*>(from)[at];
    const int64_t wide = reinterpret_cast<const int64_t*>(from)[at];
    return static_cast<int32_t>(max(min(wide, int64_t{INT32_MAX}), int64_t{INT32_MIN}));
}

} // namespace

// One matrix after the other, an element per thread and turn. Columns beyond the source's hold -1, or 0 for floats.
extern "C" __global__ void sy_convert(const __grid_constant__ Conversions params) {
    const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
    const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (uint64_t piece = 0; piece < params.num; ++piece) {
        const Conversion& it = params.pieces[piece];
        const uint32_t from_type = it.types & 0xffff, to_type = it.types >> 16;
        const uint64_t num_elements = uint64_t{it.rows} * it.to_cols;
        for (uint64_t at = first; at < num_elements; at += stride) {
            const uint64_t row = at / it.to_cols, col = at % it.to_cols;
            const bool is_padding = col >= it.from_cols;
            const uint64_t source = row * it.from_cols + col;
            if (to_type == kI32)
                reinterpret_cast<int32_t*>(it.to)[at] =
                    is_padding ? -1 : load_index(it.from, source, from_type);
            else
                store_float(it.to, at, to_type,
                            is_padding ? 0.0f : load_float(it.from, source, from_type));
        }
    }
}
