// Launcher of combine.
#include "launch.cuh"

#include "switchyard/impls/combine.cuh"

using namespace switchyard;

extern "C" int sy_launch_combine(const sy_combine_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    const LaunchPlan size = plan(*params);
    if (size.is_tuned)
        return launch(
            impls::combine_kernel<impls::CombineConfig<kTunedHidden, kTunedThreads>>, *params,
            size, stream);
    return launch(impls::combine_kernel<impls::CombineConfig<0, kGenericThreads>>, *params, size,
                  stream);
}
