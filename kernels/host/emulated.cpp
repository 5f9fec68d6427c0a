// Launches of a GPU in software: the kernels of kernels.cpp, and the expert stage as plain loops,
// because the matrix units have no stand-in. build.rs compiles it with the feature `emulated`. Only
// names that begin with sy_emulated_ are visible outside this file.
#include "kernels.cpp"
#include "p2p_check.hpp"

#include "switchyard/impls/p2p.cuh"

#include "expert_stage.hpp"

namespace {

// Threads are fibres, so a block's main cost is its start. Hence few blocks, but enough to divide
// tokens among them and to require agreement between blocks.
constexpr uint32_t kMostBlocks = 4;

template <class Params> int launch_small(const void* bytes) {
    Params params;
    memcpy(&params, bytes, sizeof(params));
    if constexpr (!std::is_same_v<Params, sy_expert_recv_params>)
        if (params.num_blocks == 0 || params.num_blocks > kMostBlocks)
            params.num_blocks = kMostBlocks;
    return launch(params);
}

// Blocks run one after the other, so that both sides of a pair must have one each.
int launch_p2p(void (*kernel)(sy_p2p_params), const void* bytes) {
    sy_p2p_params params;
    memcpy(&params, bytes, sizeof(params));
    if (const int code = check_p2p(params); code != SY_OK)
        return code;
    params.blocks_per_peer = 1;
    const LaunchPlan size = plan_p2p(params);
    simt::run(kernel, params, size.num_blocks, size.num_threads, false);
    return SY_OK;
}

} // namespace

// Runs a kernel to its end on the calling thread. 0, or SY_LAUNCH_*; -1 when there is none of this name.
extern "C" int sy_emulated_launch(const char* name, const void* params) {
    const auto is = [name](const char* kernel) { return strcmp(name, kernel) == 0; };
    if (is("dispatch"))
        return launch_small<sy_dispatch_params>(params);
    if (is("combine"))
        return launch_small<sy_combine_params>(params);
    if (is("expert_recv"))
        return launch_small<sy_expert_recv_params>(params);
    if (is("expert_send"))
        return launch_small<sy_expert_send_params>(params);
    if (is("echo"))
        return launch_small<sy_echo_params>(params);
    if (is("pingpong"))
        return launch_p2p(impls::pingpong_kernel, params);
    if (is("stream"))
        return launch_p2p(impls::stream_kernel, params);
    if (is("expert_compute")) {
        sy_expert_compute_params stage;
        memcpy(&stage, params, sizeof(stage));
        if (const int code = check(stage); code != SY_OK)
            return code;
        run_expert_stage(stage);
        return SY_OK;
    }
    return -1;
}
