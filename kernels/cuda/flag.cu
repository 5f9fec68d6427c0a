// Flags of slots in GPU memory, moved by a host: one thread each, in stream order.
#include "switchyard/ptx/memory.cuh"

// SYNC POINT publish: adds after everything that the stream did before.
extern "C" __global__ void sy_flag_add(uint64_t* flag, uint64_t value) {
    switchyard::ptx::red_add_release_sys(flag, value);
}
