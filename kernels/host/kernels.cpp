// The launchers, with the kernels run on the host: for tests on hosts without a GPU. Pointers in the
// parameters are host addresses.
#include "check.hpp"

#include "switchyard/impls/combine.cuh"
#include "switchyard/impls/dispatch.cuh"
#include "switchyard/impls/echo.cuh"
#include "switchyard/impls/expert_recv.cuh"
#include "switchyard/impls/expert_send.cuh"
#include "switchyard/impls/link_calls.cuh"

using namespace switchyard;

namespace {

template <bool kFp8, uint32_t kPaths>
void run(const sy_dispatch_params& params, const LaunchPlan& size) {
    const auto kernel =
        size.is_tuned
            ? impls::dispatch_kernel<
                  impls::DispatchConfig<kTunedHidden, kTunedTopK, kFp8, kTunedThreads, kPaths>>
            : impls::dispatch_kernel<impls::DispatchConfig<0, 0, kFp8, kGenericThreads, kPaths>>;
    simt::run(kernel, params, size.num_blocks, size.num_threads, false);
}

template <bool kFp8, uint32_t kPaths>
void run(const sy_combine_params& params, const LaunchPlan& size) {
    if constexpr (kPaths == comm::kDirectOnly)
        if (size.is_few) {
            simt::run(
                impls::combine_kernel<
                    impls::FewBlocks<impls::CombineConfig<kTunedHidden, kTunedThreads, kPaths>>>,
                params, size.num_blocks, size.num_threads, false);
            return;
        }
    const auto kernel =
        size.is_tuned
            ? impls::combine_kernel<impls::CombineConfig<kTunedHidden, kTunedThreads, kPaths>>
            : impls::combine_kernel<impls::CombineConfig<0, kGenericThreads, kPaths>>;
    simt::run(kernel, params, size.num_blocks, size.num_threads, false);
}

template <bool kFp8, uint32_t kPaths>
void run(const sy_expert_recv_params& params, const LaunchPlan& size) {
    simt::run(impls::expert_recv_kernel<kPaths>, params, size.num_blocks, size.num_threads, true);
}

template <bool kFp8, uint32_t kPaths>
void run(const sy_expert_send_params& params, const LaunchPlan& size) {
    const auto kernel =
        size.is_tuned
            ? impls::expert_send_kernel<
                  impls::AnswerConfig<kTunedHidden, kFp8, kTunedThreads, kPaths>>
            : impls::expert_send_kernel<impls::AnswerConfig<0, kFp8, kGenericThreads, kPaths>>;
    simt::run(kernel, params, size.num_blocks, size.num_threads, false);
}

template <bool kFp8, uint32_t kPaths>
void run(const sy_echo_params& params, const LaunchPlan& size) {
    const auto kernel =
        size.is_tuned
            ? impls::echo_kernel<impls::AnswerConfig<kTunedHidden, kFp8, kTunedThreads, kPaths>>
            : impls::echo_kernel<impls::AnswerConfig<0, kFp8, kGenericThreads, kPaths>>;
    simt::run(kernel, params, size.num_blocks, size.num_threads, false);
}

template <class Params> int launch(const Params& params) {
    if (const int code = check(params); code != SY_OK)
        return code;
    const bool is_fp8 = params.geometry.dtype == SY_DTYPE_F8_E4M3;
    if (takes_any_path(params.flags))
        is_fp8 ? run<true, comm::kAnyWay>(params, plan(params))
               : run<false, comm::kAnyWay>(params, plan(params));
    else
        is_fp8 ? run<true, comm::kDirectOnly>(params, plan(params))
               : run<false, comm::kDirectOnly>(params, plan(params));
    return SY_OK;
}

// Blocks, threads, whether the kernel is tuned, and whether it is for few blocks; zeros when the parameters
// cannot be used.
template <class Params> int plan_of(const Params& params, uint32_t out[4]) {
    const int code = check(params);
    const LaunchPlan size = code == SY_OK ? plan(params) : LaunchPlan{};
    out[0] = size.num_blocks;
    out[1] = size.num_threads;
    out[2] = size.is_tuned;
    out[3] = size.is_few;
    return code;
}

} // namespace

#define SY_HOST(op)                                                                                \
    extern "C" int sy_host_##op(const sy_##op##_params* params) { return launch(*params); }        \
    extern "C" int sy_host_plan_##op(const sy_##op##_params* params, uint32_t out[4]) {            \
        return plan_of(*params, out);                                                              \
    }

SY_HOST(dispatch)
SY_HOST(combine)
SY_HOST(expert_recv)
SY_HOST(expert_send)
SY_HOST(echo)

// The calls of a link, by a kernel for direct stores alone or for any path.
extern "C" void sy_host_link_calls(const impls::LinkCallsParams* params, uint32_t any_path) {
    const auto kernel = any_path != 0 ? impls::link_calls_kernel<comm::kAnyWay>
                                      : impls::link_calls_kernel<comm::kDirectOnly>;
    simt::run(kernel, *params, 1, 32, false);
}

// The matrix units have no stand-in here.
extern "C" int sy_host_plan_expert_compute(const sy_expert_compute_params* params,
                                           uint32_t out[4]) {
    return plan_of(*params, out);
}

extern "C" int sy_host_geometry(const uint32_t in[5], sy_frame_geometry* out) {
    return sy_make_geometry(in[0], in[1], in[2], in[3], in[4], out);
}

extern "C" uint32_t sy_host_tokens_for_slot(const uint32_t in[4], uint64_t slot_bytes) {
    return sy_tokens_for_slot(in[0], in[1], in[2], in[3], slot_bytes);
}

extern "C" uint64_t sy_host_lists(uint64_t base, const sy_frame_geometry* geometry,
                                  uint32_t num_local_experts, uint32_t max_rows,
                                  sy_expert_lists* out) {
    return sy_expert_lists_at(base, geometry, num_local_experts, max_rows, out);
}

extern "C" int sy_host_check_servers(const sy_server_peer* servers, uint32_t num_servers) {
    return check_servers(servers, num_servers);
}

extern "C" int sy_host_check_clients(const sy_client_peer* clients, uint32_t num_clients) {
    return check_clients(clients, num_clients);
}
