// Checks and sizes of launchers: whether parameters can be used, and the size of the launch. Plain
// C++ without CUDA, so that hosts without a toolkit compile it too. kernels/src/check.rs and
// plan.rs are the same in Rust, and a test compares them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "switchyard/launch.h"
#include "switchyard/layout/geometry.h"

namespace switchyard {

[[nodiscard]] inline bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

[[nodiscard]] inline int check_geometry(const sy_frame_geometry& geometry) {
    sy_frame_geometry expected;
    const int code = sy_make_geometry(geometry.hidden, geometry.top_k, geometry.dtype,
                                      geometry.max_tokens, geometry.num_frames, &expected);
    if (code != SY_OK)
        return code;
    const bool is_same = geometry.row_stride_bytes == expected.row_stride_bytes &&
                         geometry.scales_per_row == expected.scales_per_row &&
                         geometry.response_stride_bytes == expected.response_stride_bytes &&
                         geometry.flags_offset == expected.flags_offset &&
                         geometry.entries_offset == expected.entries_offset &&
                         geometry.scales_offset == expected.scales_offset &&
                         geometry.payload_offset == expected.payload_offset &&
                         geometry.frame_bytes == expected.frame_bytes &&
                         geometry.slot_bytes == expected.slot_bytes &&
                         geometry.control_offset == expected.control_offset &&
                         geometry.response_flags_offset == expected.response_flags_offset &&
                         geometry.response_payload_offset == expected.response_payload_offset &&
                         geometry.response_frame_bytes == expected.response_frame_bytes &&
                         geometry.response_slot_bytes == expected.response_slot_bytes &&
                         geometry.response_control_offset == expected.response_control_offset;
    // Offsets in a header are 32 bits.
    return is_same && geometry.payload_offset <= UINT32_MAX ? SY_OK : SY_LAUNCH_GEOMETRY;
}

[[nodiscard]] inline int check_link(const sy_link& link) {
    if (link.path != SY_PATH_DIRECT && link.path != SY_PATH_IBGDA && link.path != SY_PATH_PROXY)
        return SY_LAUNCH_PATH;
    if (link.window == 0 || (link.path != SY_PATH_DIRECT && link.context == 0))
        return SY_LAUNCH_NULL;
    if (link.path != SY_PATH_DIRECT && link.context % 8 != 0)
        return SY_LAUNCH_ALIGNMENT;
    return link.window % 16 == 0 ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check_table(const void* table, uint32_t num_peers) {
    if (num_peers == 0 || num_peers > SY_MAX_PEERS)
        return SY_LAUNCH_PEERS;
    if (table == nullptr)
        return SY_LAUNCH_NULL;
    return is_aligned(table) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check_capacity(const sy_frame_geometry& geometry, uint32_t capacity) {
    return capacity != 0 && capacity <= geometry.max_tokens ? SY_OK : SY_LAUNCH_TOKENS;
}

[[nodiscard]] inline int check_lists(const sy_expert_lists& lists) {
    if (lists.batch == nullptr || lists.expert_begin == nullptr || lists.list_row == nullptr ||
        lists.list_weight == nullptr || lists.row_source == nullptr ||
        lists.row_position == nullptr)
        return SY_LAUNCH_NULL;
    if (!is_aligned(lists.row_position))
        return SY_LAUNCH_ALIGNMENT;
    return lists.max_rows != 0 ? SY_OK : SY_LAUNCH_TOKENS;
}

// Version, geometry and table: the parameters that all fused kernels have.
template <class Params>
[[nodiscard]] int check_common(const Params& params, const void* table, uint32_t num_peers) {
    if (params.version != SY_DEVICE_ABI_VERSION)
        return SY_LAUNCH_VERSION;
    if (const int code = check_geometry(params.geometry); code != SY_OK)
        return code;
    return check_table(table, num_peers);
}

[[nodiscard]] inline int check(const sy_dispatch_params& params) {
    if (const int code = check_common(params, params.servers, params.num_servers); code != SY_OK)
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

[[nodiscard]] inline int check(const sy_combine_params& params) {
    if (const int code = check_common(params, params.servers, params.num_servers); code != SY_OK)
        return code;
    if (const int code = check_capacity(params.geometry, params.capacity); code != SY_OK)
        return code;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params.handle == nullptr || params.state == nullptr || params.out == nullptr ||
        (params.trace != nullptr && params.trace_len == 0))
        return SY_LAUNCH_NULL;
    return is_aligned(params.out) && is_aligned(params.handle) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check(const sy_expert_recv_params& params) {
    if (const int code = check_common(params, params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_lists(params.lists); code != SY_OK)
        return code;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params.min_ready == 0)
        return SY_LAUNCH_PEERS;
    // The lists must hold any one client's frame, and ranks within an expert must fit their bits.
    if (params.lists.max_rows < params.geometry.max_tokens ||
        uint64_t{params.lists.max_rows} * params.geometry.top_k >= 1u << SY_RANK_BITS)
        return SY_LAUNCH_TOKENS;
    if (params.num_experts == 0 || params.num_experts > SY_MAX_EXPERTS ||
        params.num_local_experts == 0 || params.num_local_experts > params.num_experts)
        return SY_LAUNCH_EXPERTS;
    if (params.state == nullptr || params.local_expert == nullptr)
        return SY_LAUNCH_NULL;
    return is_aligned(params.gather) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check(const sy_expert_send_params& params) {
    if (const int code = check_common(params, params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_lists(params.lists); code != SY_OK)
        return code;
    if (params.max_rows == 0 || params.max_rows > params.lists.max_rows)
        return SY_LAUNCH_TOKENS;
    return is_aligned(params.expert_out) ? SY_OK : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check(const sy_expert_compute_params& params) {
    if (const int code = check_common(params, params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_lists(params.lists); code != SY_OK)
        return code;
    if (params.weights_dtype != SY_DTYPE_BF16 && params.weights_dtype != SY_DTYPE_F8_E4M3)
        return SY_LAUNCH_DTYPE;
    if (params.inter == 0 || params.inter % 64 != 0 || params.inter > SY_MAX_HIDDEN)
        return SY_LAUNCH_INTER;
    if (params.num_local_experts == 0 || params.num_local_experts > SY_MAX_EXPERTS)
        return SY_LAUNCH_EXPERTS;
    if (uint64_t{params.lists.max_rows} * params.geometry.top_k >= 1u << SY_RANK_BITS)
        return SY_LAUNCH_TOKENS;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    if (params.rows == nullptr || params.activation == nullptr || params.expert_out == nullptr ||
        params.layers == nullptr || params.num_layers == 0)
        return SY_LAUNCH_NULL;
    // The copy engine wants its maps at multiples of 64, and they stand in the table of layers.
    return is_aligned(params.rows) && is_aligned(params.activation) &&
                   is_aligned(params.expert_out) &&
                   reinterpret_cast<uintptr_t>(params.layers) % 64 == 0
               ? SY_OK
               : SY_LAUNCH_ALIGNMENT;
}

[[nodiscard]] inline int check(const sy_echo_params& params) {
    if (const int code = check_common(params, params.clients, params.num_clients); code != SY_OK)
        return code;
    if (const int code = check_capacity(params.geometry, params.capacity); code != SY_OK)
        return code;
    if (params.timeout_ns == 0)
        return SY_LAUNCH_BOUND;
    return params.state != nullptr ? SY_OK : SY_LAUNCH_NULL;
}

[[nodiscard]] inline bool takes_any_path(uint32_t flags) {
    return (flags & SY_LAUNCH_FLAG_ANY_PATH) != 0;
}

[[nodiscard]] inline int check_servers(const sy_server_peer* servers, uint32_t num_servers) {
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

[[nodiscard]] inline int check_clients(const sy_client_peer* clients, uint32_t num_clients) {
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

// Size of a launch. `is_tuned`: compiled for this hidden size (and top_k), else for any. `is_few`: for few blocks
// that have many tokens each.
struct LaunchPlan {
    uint32_t num_blocks, num_threads;
    bool is_tuned;
    bool is_few = false;
};

// Threads of the kernels whose hidden size is only known at run time, and of those for 7168.
constexpr uint32_t kGenericThreads = 256;
// Of an H100 SXM or H200, which sizes were chosen on. On a GPU with fewer of them blocks run in turns,
// and num_blocks says otherwise.
constexpr uint32_t kMultiprocessors = 132;
constexpr uint32_t kTunedHidden = 7168, kTunedTopK = 8, kTunedThreads = 448;

// From this number of tokens on, a block of dispatch takes two or more.
constexpr uint32_t kTokensInPairs = 96;

// Blocks for `num_units` of work: one each as long as every multiprocessor has at most one, then two
// per multiprocessor.
[[nodiscard]] inline uint32_t choose_blocks(uint32_t asked, uint64_t num_units,
                                            uint64_t units_for_two) {
    const uint32_t most =
        asked != 0 ? asked : (num_units >= units_for_two ? 2 * kMultiprocessors : kMultiprocessors);
    return static_cast<uint32_t>(num_units < most ? (num_units == 0 ? 1 : num_units) : most);
}

[[nodiscard]] inline LaunchPlan plan_for(bool is_tuned, uint32_t num_blocks) {
    return {num_blocks, is_tuned ? kTunedThreads : kGenericThreads, is_tuned};
}

// Fewer blocks than a GPU has multiprocessors, so that something else may run there.
constexpr uint32_t kMostFewBlocks = 64;

[[nodiscard]] inline LaunchPlan plan(const sy_dispatch_params& params) {
    // One more block writes headers.
    // One token each for few; from there on two share a fence, and one block per multiprocessor is enough.
    const uint32_t units =
        params.capacity < kTokensInPairs ? params.capacity : (params.capacity + 1) / 2;
    const uint32_t data_blocks = choose_blocks(params.num_blocks, units, UINT64_MAX);
    const uint32_t run = (params.capacity + data_blocks - 1) / data_blocks;
    return plan_for(params.geometry.hidden == kTunedHidden && params.geometry.top_k == kTunedTopK,
                    (params.capacity + run - 1) / run + 1);
}

[[nodiscard]] inline LaunchPlan plan(const sy_combine_params& params) {
    const uint32_t num_blocks = choose_blocks(params.num_blocks, params.capacity, 512);
    LaunchPlan plan = plan_for(params.geometry.hidden == kTunedHidden, num_blocks);
    // Where links are direct and each block has two tokens at least.
    plan.is_few = plan.is_tuned && (params.flags & SY_LAUNCH_FLAG_ANY_PATH) == 0 &&
                  num_blocks <= kMostFewBlocks && params.capacity >= uint64_t{2} * num_blocks;
    return plan;
}

[[nodiscard]] inline LaunchPlan plan(const sy_expert_recv_params&) {
    return {SY_RECV_BLOCKS, SY_RECV_THREADS, false};
}

[[nodiscard]] inline LaunchPlan plan(const sy_expert_send_params& params) {
    const uint32_t num_blocks = choose_blocks(params.num_blocks, params.max_rows, 1024);
    return plan_for(params.geometry.hidden == kTunedHidden, num_blocks);
}

// Size for the kernels that multiply, which fill a multiprocessor's shared memory.
[[nodiscard]] inline LaunchPlan plan_products(const sy_expert_compute_params& params) {
    return {params.num_blocks != 0 ? params.num_blocks : kMultiprocessors, SY_PRODUCT_THREADS,
            false};
}

// Size for the stage's first kernel. Requests of another type than the weights' are converted
// before.
[[nodiscard]] inline LaunchPlan plan(const sy_expert_compute_params& params) {
    if (params.geometry.dtype == params.weights_dtype)
        return plan_products(params);
    // One block for an entry, up to eight for a multiprocessor.
    const uint64_t rows =
        params.lists.usual_rows != 0 ? params.lists.usual_rows : params.lists.max_rows;
    const uint64_t entries = std::max(rows * params.geometry.top_k, uint64_t{1});
    const uint32_t most = params.num_blocks != 0 ? params.num_blocks : 8 * kMultiprocessors;
    return {static_cast<uint32_t>(std::min(entries, uint64_t{most})), SY_COMPUTE_THREADS, false};
}

[[nodiscard]] inline LaunchPlan plan(const sy_p2p_params& params) {
    return {params.num_peers * params.blocks_per_peer, SY_P2P_THREADS, false};
}

[[nodiscard]] inline LaunchPlan plan(const sy_echo_params& params) {
    const uint64_t num_units = uint64_t{params.capacity} * params.num_clients;
    const uint32_t num_blocks = choose_blocks(params.num_blocks, num_units, 1024);
    return plan_for(params.geometry.hidden == kTunedHidden, num_blocks);
}

} // namespace switchyard
