// Launcher of dispatch.
#include "launch.cuh"

#include "switchyard/impls/dispatch.cuh"

using namespace switchyard;

namespace {

int check(const sy_dispatch_params& params) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (const int code = check_geometry(params.geometry); code != SY_OK)
        return code;
    if (const int code = check_table(params.servers, params.num_servers); code != SY_OK)
        return code;
    if (const int code = check_capacity(params.geometry, params.capacity); code != SY_OK)
        return code;
    if (params.num_experts == 0 || params.num_experts > SY_MAX_EXPERTS)
        return SY_LAUNCH_EXPERTS;
    if (params.hidden_states == nullptr || params.topk_idx == nullptr ||
        params.topk_weights == nullptr || params.num_tokens == nullptr ||
        params.placement == nullptr || params.state == nullptr || params.handle == nullptr)
        return SY_LAUNCH_NULL;
    if (!is_aligned(params.hidden_states) || !is_aligned(params.topk_idx) ||
        !is_aligned(params.topk_weights) || !is_aligned(params.placement) ||
        !is_aligned(params.state) || !is_aligned(params.handle))
        return SY_LAUNCH_ALIGNMENT;
    if (params.trace != nullptr && params.trace_len == 0)
        return SY_LAUNCH_NULL;
    return SY_OK;
}

template <bool kFp8> int launch_for(const sy_dispatch_params& params, sy_stream stream) {
    // One more block writes headers.
    const uint32_t data_blocks = choose_blocks(params.num_blocks, params.capacity, 1024);
    const uint32_t run = (params.capacity + data_blocks - 1) / data_blocks;
    const uint32_t num_blocks = (params.capacity + run - 1) / run + 1;
    if (params.geometry.hidden == 7168 && params.geometry.top_k == 8)
        return launch(impls::dispatch_kernel<impls::DispatchConfig<7168, 8, kFp8, 448>>, params,
                      num_blocks, 448, stream);
    return launch(impls::dispatch_kernel<impls::DispatchConfig<0, 0, kFp8, kGenericThreads>>,
                  params, num_blocks, kGenericThreads, stream);
}

} // namespace

extern "C" int sy_launch_dispatch(const sy_dispatch_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return params->geometry.dtype == SY_DTYPE_F8_E4M3 ? launch_for<true>(*params, stream)
                                                      : launch_for<false>(*params, stream);
}
