// Launcher of combine.
#include "launch.cuh"

#include "switchyard/impls/combine.cuh"

using namespace switchyard;

namespace {

int check(const sy_combine_params& params) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (const int code = check_geometry(params.geometry); code != SY_OK)
        return code;
    if (const int code = check_table(params.servers, params.num_servers); code != SY_OK)
        return code;
    if (const int code = check_capacity(params.geometry, params.capacity); code != SY_OK)
        return code;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params.handle == nullptr || params.state == nullptr || params.out == nullptr)
        return SY_LAUNCH_NULL;
    return is_aligned(params.out) && is_aligned(params.handle) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

} // namespace

extern "C" int sy_launch_combine(const sy_combine_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    const uint32_t num_blocks = choose_blocks(params->num_blocks, params->capacity, 512);
    if (params->geometry.hidden == 7168)
        return launch(impls::combine_kernel<impls::CombineConfig<7168, 448>>, *params, num_blocks,
                      448, stream);
    return launch(impls::combine_kernel<impls::CombineConfig<0, kGenericThreads>>, *params,
                  num_blocks, kGenericThreads, stream);
}
