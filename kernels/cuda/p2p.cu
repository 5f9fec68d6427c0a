// Launchers of the transport measurements.
#include "launch.cuh"

#include "switchyard/impls/p2p.cuh"

using namespace switchyard;

namespace {

int check(const sy_p2p_params* params, uint32_t num_blocks) {
    if (params == nullptr || params->counters == nullptr || params->elapsed_ns == nullptr ||
        params->error == nullptr)
        return SY_LAUNCH_NULL;
    if (params->num_peers == 0 || params->num_peers > SY_MAX_PEERS ||
        num_blocks < params->num_peers)
        return SY_LAUNCH_PEERS;
    if (params->timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params->num_bytes == 0 || params->num_bytes % (params->num_bytes < 16 ? 4 : 16) != 0)
        return SY_LAUNCH_ALIGNMENT;
    for (uint32_t i = 0; i < params->num_peers; ++i)
        if (const int code = check_link(params->links[i]); code != SY_OK)
            return code;
    return SY_OK;
}

} // namespace

extern "C" int sy_launch_pingpong(const sy_p2p_params* params, uint32_t num_blocks,
                                  sy_stream stream) {
    if (const int code = check(params, num_blocks); code != SY_OK)
        return code;
    return launch(impls::pingpong_kernel, *params, {num_blocks, impls::kP2pThreads, false}, stream);
}

extern "C" int sy_launch_stream(const sy_p2p_params* params, uint32_t num_blocks,
                                sy_stream stream) {
    if (const int code = check(params, num_blocks); code != SY_OK)
        return code;
    return launch(impls::stream_kernel, *params, {num_blocks, impls::kP2pThreads, false}, stream);
}
