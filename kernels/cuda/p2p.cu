// Launchers of the transport measurements.
#include "launch.cuh"
#include "p2p_check.hpp"

#include "switchyard/impls/p2p.cuh"

using namespace switchyard;

namespace {

int launch_p2p(void (*kernel)(sy_p2p_params), const sy_p2p_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check_p2p(*params); code != SY_OK)
        return code;
    return launch(kernel, *params, plan_p2p(*params), stream);
}

} // namespace

extern "C" int sy_launch_pingpong(const sy_p2p_params* params, sy_stream stream) {
    return launch_p2p(impls::pingpong_kernel, params, stream);
}

extern "C" int sy_launch_stream(const sy_p2p_params* params, sy_stream stream) {
    return launch_p2p(impls::stream_kernel, params, stream);
}
