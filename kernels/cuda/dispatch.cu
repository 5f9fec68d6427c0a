// Launcher of dispatch.
#include "launch.cuh"

#include "switchyard/impls/dispatch.cuh"

using namespace switchyard;

namespace {

template <bool kFp8, uint32_t kPaths>
int launch_for(const sy_dispatch_params& params, sy_stream stream) {
    const LaunchPlan size = plan(params);
    if (size.is_tuned)
        return launch(
            impls::dispatch_kernel<
                impls::DispatchConfig<kTunedHidden, kTunedTopK, kFp8, kTunedThreads, kPaths>>,
            params, size, stream);
    return launch(
        impls::dispatch_kernel<impls::DispatchConfig<0, 0, kFp8, kGenericThreads, kPaths>>, params,
        size, stream);
}

} // namespace

extern "C" int sy_launch_dispatch(const sy_dispatch_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    const bool is_fp8 = params->geometry.dtype == SY_DTYPE_F8_E4M3;
    if (takes_any_path(params->flags))
        return is_fp8 ? launch_for<true, comm::kAnyWay>(*params, stream)
                      : launch_for<false, comm::kAnyWay>(*params, stream);
    return is_fp8 ? launch_for<true, comm::kDirectOnly>(*params, stream)
                  : launch_for<false, comm::kDirectOnly>(*params, stream);
}
