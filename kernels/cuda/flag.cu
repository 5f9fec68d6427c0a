// Small tasks of the host that a GPU does in stream order: moving flags of slots in GPU memory, and
// small messages to the host.
#include "switchyard/ptx/memory.cuh"

// SYNC POINT publish: adds after everything that the stream did before.
extern "C" __global__ void sy_flag_add(uint64_t* flag, uint64_t value) {
    switchyard::ptx::red_add_release_sys(flag, value);
}

// Two pieces of memory to the host, in words of four bytes, by one block: less for the next kernel in the stream to
// wait for than two copies by the copy engine.
// SYNC POINT told: one store writes the first eight bytes of the second piece, after all else.
extern "C" __global__ void sy_tell_host(uint32_t* first_to, const uint32_t* first,
                                        uint64_t first_words, uint32_t* last_to,
                                        const uint32_t* last, uint64_t last_words) {
    for (uint64_t i = threadIdx.x; i < first_words; i += blockDim.x)
        first_to[i] = first[i];
    for (uint64_t i = threadIdx.x + 2; i < last_words; i += blockDim.x)
        last_to[i] = last[i];
    __syncthreads();
    if (threadIdx.x == 0)
        switchyard::ptx::st_release_sys(reinterpret_cast<uint64_t*>(last_to),
                                        *reinterpret_cast<const uint64_t*>(last));
}
