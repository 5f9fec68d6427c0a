// Launchers of the server's kernels: expert_recv, expert_send, echo.
#include "launch.cuh"

#include "switchyard/impls/echo.cuh"
#include "switchyard/impls/expert_recv.cuh"
#include "switchyard/impls/expert_send.cuh"

using namespace switchyard;

namespace {

template <bool kFp8, uint32_t kPaths>
int launch_echo(const sy_echo_params& params, sy_stream stream) {
    const LaunchPlan size = plan(params);
    if (size.is_tuned)
        return launch(
            impls::echo_kernel<impls::AnswerConfig<kTunedHidden, kFp8, kTunedThreads, kPaths>>,
            params, size, stream);
    return launch(impls::echo_kernel<impls::AnswerConfig<0, kFp8, kGenericThreads, kPaths>>, params,
                  size, stream);
}

template <bool kFp8, uint32_t kPaths>
int launch_send(const sy_expert_send_params& params, sy_stream stream) {
    const LaunchPlan size = plan(params);
    if (size.is_tuned)
        return launch(impls::expert_send_kernel<
                          impls::AnswerConfig<kTunedHidden, kFp8, kTunedThreads, kPaths>>,
                      params, size, stream);
    return launch(impls::expert_send_kernel<impls::AnswerConfig<0, kFp8, kGenericThreads, kPaths>>,
                  params, size, stream);
}

} // namespace

extern "C" int sy_launch_expert_recv(const sy_expert_recv_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return launch(takes_any_path(params->flags) ? impls::expert_recv_kernel<comm::kAnyWay>
                                                : impls::expert_recv_kernel<comm::kDirectOnly>,
                  *params, plan(*params), stream);
}

extern "C" int sy_launch_expert_send(const sy_expert_send_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    const bool is_fp8 = params->geometry.dtype == SY_DTYPE_F8_E4M3;
    if (takes_any_path(params->flags))
        return is_fp8 ? launch_send<true, comm::kAnyWay>(*params, stream)
                      : launch_send<false, comm::kAnyWay>(*params, stream);
    return is_fp8 ? launch_send<true, comm::kDirectOnly>(*params, stream)
                  : launch_send<false, comm::kDirectOnly>(*params, stream);
}

extern "C" int sy_launch_echo(const sy_echo_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    const bool is_fp8 = params->geometry.dtype == SY_DTYPE_F8_E4M3;
    if (takes_any_path(params->flags))
        return is_fp8 ? launch_echo<true, comm::kAnyWay>(*params, stream)
                      : launch_echo<false, comm::kAnyWay>(*params, stream);
    return is_fp8 ? launch_echo<true, comm::kDirectOnly>(*params, stream)
                  : launch_echo<false, comm::kDirectOnly>(*params, stream);
}

extern "C" int sy_check_servers(const sy_server_peer* servers, uint32_t num_servers) {
    return check_servers(servers, num_servers);
}

extern "C" int sy_check_clients(const sy_client_peer* clients, uint32_t num_clients) {
    return check_clients(clients, num_clients);
}

extern "C" const char* sy_launch_error(int code) {
    switch (code) {
    case SY_OK:
        return "ok";
    case SY_LAUNCH_VERSION:
        return "parameters of another version: rebuild host and kernels together";
    case SY_LAUNCH_NULL:
        return "a required pointer is null";
    case SY_LAUNCH_ALIGNMENT:
        return "a pointer is not aligned to 16 bytes";
    case SY_LAUNCH_HIDDEN:
        return "hidden size: expected a positive multiple of 128, at most 1048576";
    case SY_LAUNCH_TOP_K:
        return "top_k: expected 1 to 16";
    case SY_LAUNCH_DTYPE:
        return "dtype: expected bf16 or fp8-e4m3";
    case SY_LAUNCH_PEERS:
        return "number of peers: expected 1 to 32";
    case SY_LAUNCH_EXPERTS:
        return "number of experts: expected 1 to 1024";
    case SY_LAUNCH_TOKENS:
        return "token capacity: expected at least 1 and at most the capacity of frames and lists";
    case SY_LAUNCH_GEOMETRY:
        return "frame geometry: expected what sy_make_geometry computes";
    case SY_LAUNCH_PATH:
        return "link: an unknown path to a peer";
    case SY_LAUNCH_BOUND:
        return "timeout_ns is 0: every wait has a bound";
    case SY_LAUNCH_INTER:
        return "intermediate size: expected a positive multiple of 64, at most 1048576";
    case SY_LAUNCH_CUDA:
        return "the CUDA driver refused the launch";
    default:
        return "unknown code";
    }
}
