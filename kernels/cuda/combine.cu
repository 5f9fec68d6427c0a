// Launcher of combine.
#include "launch.cuh"

#include "switchyard/impls/combine.cuh"

using namespace switchyard;

namespace {

template <uint32_t kPaths> int launch_for(const sy_combine_params& params, sy_stream stream) {
    const LaunchPlan size = plan(params);
    if constexpr (kPaths == comm::kDirectOnly)
        if (size.is_few)
            return launch(
                impls::combine_kernel<
                    impls::FewBlocks<impls::CombineConfig<kTunedHidden, kTunedThreads, kPaths>>>,
                params, size, stream);
    if (size.is_tuned)
        return launch(
            impls::combine_kernel<impls::CombineConfig<kTunedHidden, kTunedThreads, kPaths>>,
            params, size, stream);
    return launch(impls::combine_kernel<impls::CombineConfig<0, kGenericThreads, kPaths>>, params,
                  size, stream);
}

} // namespace

extern "C" int sy_launch_combine(const sy_combine_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return takes_any_path(params->flags) ? launch_for<comm::kAnyWay>(*params, stream)
                                         : launch_for<comm::kDirectOnly>(*params, stream);
}
