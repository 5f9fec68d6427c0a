// Launchers of the server's kernels: expert_recv, expert_send, echo.
#include "launch.cuh"

#include "switchyard/impls/echo.cuh"
#include "switchyard/impls/expert_recv.cuh"
#include "switchyard/impls/expert_send.cuh"

using namespace switchyard;

namespace {

int check_lists(const sy_expert_lists& lists) {
    if (lists.batch == nullptr || lists.expert_begin == nullptr || lists.list_row == nullptr ||
        lists.list_weight == nullptr || lists.row_source == nullptr ||
        lists.row_position == nullptr)
        return SY_LAUNCH_NULL;
    return lists.max_rows != 0 ? SY_OK : SY_LAUNCH_TOKENS;
}

int check(const sy_expert_recv_params& params) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (const int code = check_geometry(params.geometry); code != SY_OK)
        return code;
    if (const int code = check_table(params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_lists(params.lists); code != SY_OK)
        return code;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params.min_ready == 0)
        return SY_LAUNCH_PEERS;
    // The lists must hold any one client's frame, and ranks within an expert must fit their bits.
    if (params.lists.max_rows < params.geometry.max_tokens ||
        uint64_t{params.lists.max_rows} * params.geometry.top_k >= 1u << impls::kRankBits)
        return SY_LAUNCH_TOKENS;
    if (params.num_experts == 0 || params.num_experts > SY_MAX_EXPERTS ||
        params.num_local_experts == 0 || params.num_local_experts > params.num_experts)
        return SY_LAUNCH_EXPERTS;
    return params.state != nullptr && params.local_expert != nullptr ? SY_OK : SY_LAUNCH_NULL;
}

int check(const sy_expert_send_params& params) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (const int code = check_geometry(params.geometry); code != SY_OK)
        return code;
    if (const int code = check_table(params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_lists(params.lists); code != SY_OK)
        return code;
    if (params.max_rows == 0 || params.max_rows > params.lists.max_rows)
        return SY_LAUNCH_TOKENS;
    return is_aligned(params.expert_out) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

int check(const sy_echo_params& params) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (const int code = check_geometry(params.geometry); code != SY_OK)
        return code;
    if (const int code = check_table(params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_capacity(params.geometry, params.capacity); code != SY_OK)
        return code;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    return params.state != nullptr ? SY_OK : SY_LAUNCH_NULL;
}

template <bool kFp8> int launch_echo(const sy_echo_params& params, sy_stream stream) {
    const uint64_t num_units = uint64_t{params.capacity} * params.num_clients;
    const uint32_t num_blocks = choose_blocks(params.num_blocks, num_units, 1024);
    if (params.geometry.hidden == 7168)
        return launch(impls::echo_kernel<impls::AnswerConfig<7168, kFp8, 448>>, params, num_blocks,
                      448, stream);
    return launch(impls::echo_kernel<impls::AnswerConfig<0, kFp8, kGenericThreads>>, params,
                  num_blocks, kGenericThreads, stream);
}

template <bool kFp8> int launch_send(const sy_expert_send_params& params, sy_stream stream) {
    const uint32_t num_blocks = choose_blocks(params.num_blocks, params.max_rows, 1024);
    if (params.geometry.hidden == 7168)
        return launch(impls::expert_send_kernel<impls::AnswerConfig<7168, kFp8, 448>>, params,
                      num_blocks, 448, stream);
    return launch(impls::expert_send_kernel<impls::AnswerConfig<0, kFp8, kGenericThreads>>, params,
                  num_blocks, kGenericThreads, stream);
}

} // namespace

extern "C" int sy_launch_expert_recv(const sy_expert_recv_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return launch(impls::expert_recv_kernel, *params, impls::kRecvBlocks, impls::kRecvThreads,
                  stream);
}

extern "C" int sy_launch_expert_send(const sy_expert_send_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return params->geometry.dtype == SY_DTYPE_F8_E4M3 ? launch_send<true>(*params, stream)
                                                      : launch_send<false>(*params, stream);
}

extern "C" int sy_launch_echo(const sy_echo_params* params, sy_stream stream) {
    if (params == nullptr)
        return SY_LAUNCH_NULL;
    if (const int code = check(*params); code != SY_OK)
        return code;
    return params->geometry.dtype == SY_DTYPE_F8_E4M3 ? launch_echo<true>(*params, stream)
                                                      : launch_echo<false>(*params, stream);
}

extern "C" int sy_check_servers(const sy_server_peer* servers, uint32_t num_servers) {
    if (servers == nullptr)
        return SY_LAUNCH_NULL;
    if (num_servers == 0 || num_servers > SY_MAX_PEERS)
        return SY_LAUNCH_PEERS;
    for (uint32_t i = 0; i < num_servers; ++i) {
        if (const int code = check_link(servers[i].request); code != SY_OK)
            return code;
        if (servers[i].response == 0)
            return SY_LAUNCH_NULL;
        if (servers[i].response % 16 != 0)
            return SY_LAUNCH_ALIGNMENT;
    }
    return SY_OK;
}

extern "C" int sy_check_clients(const sy_client_peer* clients, uint32_t num_clients) {
    if (clients == nullptr)
        return SY_LAUNCH_NULL;
    if (num_clients == 0 || num_clients > SY_MAX_PEERS)
        return SY_LAUNCH_PEERS;
    for (uint32_t i = 0; i < num_clients; ++i) {
        if (const int code = check_link(clients[i].response); code != SY_OK)
            return code;
        if (clients[i].request == 0)
            return SY_LAUNCH_NULL;
        if (clients[i].request % 16 != 0)
            return SY_LAUNCH_ALIGNMENT;
    }
    return SY_OK;
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
        return "token capacity: expected at least 1 and at most what frames and lists hold";
    case SY_LAUNCH_GEOMETRY:
        return "frame geometry: expected what sy_make_geometry computes";
    case SY_LAUNCH_WAY:
        return "link: this build reaches peers by direct stores only";
    case SY_LAUNCH_BOUND:
        return "timeout_ns is 0: every wait has a bound";
    case SY_LAUNCH_CUDA:
        return "the CUDA driver refused the launch";
    default:
        return "unknown code";
    }
}
