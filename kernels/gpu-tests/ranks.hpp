// A client and a server as a host program holds them: device memory, parameters, launches.
#pragma once

#include <cstdint>
#include <vector>

#include "check.hpp"
#include "reference.hpp"
#include "switchyard/launch.h"
#include "switchyard/layout/geometry.h"

constexpr uint32_t kNumLayers = 61;
constexpr uint64_t kSlotAlign = 2 << 20; // so that every slot is an allocation of its own

struct Client {
    sy_frame_geometry geometry;
    uint32_t capacity, num_experts, num_servers = 0;
    uint64_t client_id;
    uint16_t *hidden_states, *out;
    int32_t* topk_idx;
    float* topk_weights;
    uint32_t *num_tokens, *token_missing;
    sy_placement* placement;
    sy_client_state* state;
    std::vector<sy_handle*> handles;
    uint64_t* trace = nullptr;
    uint32_t trace_len = 0;
    const uint32_t* abort_mask = nullptr;
    uint64_t timeout_ns = 2'000'000'000;
    uint32_t flags = 0, launch_flags = 0, combine_flags = 0, layer = 0;
    uint32_t dispatch_blocks = 0, combine_blocks = 0;
    sy_server_peer servers[SY_MAX_PEERS] = {};
    sy_server_peer* table = nullptr;

    Client() = default;
    Client(const sy_frame_geometry& geometry, uint32_t capacity, uint32_t num_experts, uint64_t id)
        : geometry(geometry), capacity(capacity), num_experts(num_experts), client_id(id) {
        hidden_states = device_alloc<uint16_t>(size_t{capacity} * geometry.hidden);
        out = device_alloc<uint16_t>(size_t{capacity} * geometry.hidden);
        topk_idx = device_alloc<int32_t>(size_t{capacity} * geometry.top_k);
        topk_weights = device_alloc<float>(size_t{capacity} * geometry.top_k);
        num_tokens = device_alloc<uint32_t>(1);
        token_missing = device_alloc<uint32_t>(capacity);
        placement = device_alloc<sy_placement>(1);
        state = device_alloc<sy_client_state>(1);
        for (uint32_t i = 0; i < geometry.num_frames; ++i)
            handles.push_back(
                reinterpret_cast<sy_handle*>(device_alloc<uint8_t>(sy_handle_bytes(&geometry))));
    }

    // Response slots live here, one per server. Only flags and control words start as zero.
    uint8_t* add_response_slot() {
        const uint64_t bytes = sy_round_up(geometry.response_slot_bytes, kSlotAlign);
        uint8_t* slot = device_alloc<uint8_t>(bytes);
        servers[num_servers].response = reinterpret_cast<uint64_t>(slot);
        servers[num_servers].generation = 1;
        poison(num_servers++);
        return slot;
    }

    void poison(uint32_t server) {
        uint8_t* slot = reinterpret_cast<uint8_t*>(servers[server].response);
        for (uint32_t i = 0; i < geometry.num_frames; ++i)
            CHECK_CUDA(cudaMemset(
                slot + i * geometry.response_frame_bytes + geometry.response_payload_offset, 0xff,
                geometry.response_frame_bytes - geometry.response_payload_offset));
    }

    // Fills inputs; memory behind the tokens is poison.
    void load(const reference::Input& input) {
        const size_t row = size_t{geometry.hidden} * 2;
        CHECK_CUDA(cudaMemset(hidden_states, 0xff, capacity * row));
        CHECK_CUDA(cudaMemset(topk_idx, 0x7f, size_t{capacity} * geometry.top_k * 4));
        CHECK_CUDA(cudaMemset(out, 0xff, capacity * row));
        CHECK_CUDA(cudaMemset(token_missing, 0xff, capacity * 4));
        upload(hidden_states, input.hidden_states.data(), input.hidden_states.size() * 2);
        upload(topk_idx, input.topk_idx.data(), input.topk_idx.size() * 4);
        upload(topk_weights, input.topk_weights.data(), input.topk_weights.size() * 4);
        to_device(num_tokens, input.shape.num_tokens);
    }

    // To be called once the peers are known.
    void connect() {
        CHECK_LAUNCH(sy_check_servers(servers, num_servers));
        if (table == nullptr)
            table = device_alloc<sy_server_peer>(SY_MAX_PEERS);
        upload(table, servers, sizeof(servers));
    }

    sy_dispatch_params dispatch_params(uint32_t handle_idx) const {
        sy_dispatch_params params = {};
        params.version = SY_DEVICE_ABI_VERSION;
        params.flags = flags | launch_flags;
        params.geometry = geometry;
        params.hidden_states = hidden_states;
        params.topk_idx = topk_idx;
        params.topk_weights = topk_weights;
        params.num_tokens = num_tokens;
        params.placement = placement;
        params.state = state;
        params.handle = handles[handle_idx];
        params.trace = trace;
        params.trace_len = trace_len;
        params.client_id = client_id;
        params.capacity = capacity;
        params.layer = layer;
        params.num_experts = num_experts;
        params.num_servers = num_servers;
        params.num_blocks = dispatch_blocks;
        params.servers = table;
        return params;
    }

    sy_combine_params combine_params(uint32_t handle_idx) const {
        sy_combine_params params = {};
        params.version = SY_DEVICE_ABI_VERSION;
        params.flags = launch_flags | combine_flags;
        params.geometry = geometry;
        params.handle = handles[handle_idx];
        params.state = state;
        params.out = out;
        params.token_missing = token_missing;
        params.abort_mask = abort_mask;
        params.timeout_ns = timeout_ns;
        params.capacity = capacity;
        params.num_servers = num_servers;
        params.num_blocks = combine_blocks;
        params.trace = trace;
        params.trace_len = trace_len;
        params.servers = table;
        return params;
    }

    void dispatch(sy_stream stream, uint32_t handle_idx = 0) const {
        const sy_dispatch_params params = dispatch_params(handle_idx);
        CHECK_LAUNCH(sy_launch_dispatch(&params, stream));
    }

    void combine(sy_stream stream, uint32_t handle_idx = 0) const {
        const sy_combine_params params = combine_params(handle_idx);
        CHECK_LAUNCH(sy_launch_combine(&params, stream));
    }
};

struct Server {
    sy_frame_geometry geometry;
    uint32_t capacity, num_experts, num_local_experts = 0, num_clients = 0;
    sy_server_state* state;
    sy_expert_lists lists;
    int16_t* local_expert;
    uint64_t* min_epoch;
    const uint32_t* abort_mask = nullptr;
    uint64_t timeout_ns = 2'000'000'000;
    uint32_t launch_flags = 0, take_flags = 0, min_ready = 1;
    uint32_t answer_blocks = 0;
    const uint16_t* expert_out = nullptr;
    sy_client_peer clients[SY_MAX_PEERS] = {};
    sy_client_peer* table = nullptr;

    Server() = default;
    Server(const sy_frame_geometry& geometry, uint32_t capacity, uint32_t most_clients,
           const sy_placement& placement, uint32_t my_index)
        : geometry(geometry), capacity(capacity), num_experts(placement.num_experts) {
        state = device_alloc<sy_server_state>(1);
        min_epoch = device_alloc<uint64_t>(1);
        std::vector<int16_t> local(num_experts, -1);
        for (uint32_t expert = 0; expert < num_experts; ++expert)
            for (uint32_t i = 0; i < placement.experts[expert].num_replicas; ++i)
                if (placement.experts[expert].server[i] == my_index)
                    local[expert] = static_cast<int16_t>(num_local_experts++);
        // The same experts in every layer.
        local_expert = device_alloc<int16_t>(size_t{kNumLayers} * num_experts);
        for (uint32_t layer = 0; layer < kNumLayers; ++layer)
            upload(local_expert + size_t{layer} * num_experts, local.data(), num_experts * 2);
        const uint32_t max_rows = geometry.max_tokens * most_clients;
        const uint64_t bytes =
            sy_expert_lists_at(0, &geometry, num_local_experts, max_rows, &lists);
        sy_expert_lists_at(reinterpret_cast<uint64_t>(device_alloc<uint8_t>(bytes)), &geometry,
                           num_local_experts, max_rows, &lists);
    }

    // Request slots live here, one per client. Only flags and control words start as zero.
    uint8_t* add_request_slot(uint64_t client_id) {
        uint8_t* slot = device_alloc<uint8_t>(sy_round_up(geometry.slot_bytes, kSlotAlign));
        clients[num_clients].request = reinterpret_cast<uint64_t>(slot);
        clients[num_clients].client_id = client_id;
        clients[num_clients].generation = 1;
        poison(num_clients++);
        return slot;
    }

    void poison(uint32_t client) {
        uint8_t* slot = reinterpret_cast<uint8_t*>(clients[client].request);
        for (uint32_t i = 0; i < geometry.num_frames; ++i) {
            uint8_t* frame = slot + i * geometry.frame_bytes;
            CHECK_CUDA(cudaMemset(frame, 0xff, geometry.flags_offset));
            CHECK_CUDA(cudaMemset(frame + geometry.entries_offset, 0xff,
                                  geometry.frame_bytes - geometry.entries_offset));
        }
    }

    // To be called once the peers are known.
    void connect() {
        CHECK_LAUNCH(sy_check_clients(clients, num_clients));
        if (table == nullptr)
            table = device_alloc<sy_client_peer>(SY_MAX_PEERS);
        upload(table, clients, sizeof(clients));
    }

    void echo(sy_stream stream) const {
        sy_echo_params params = {};
        params.version = SY_DEVICE_ABI_VERSION;
        params.flags = launch_flags | take_flags;
        params.geometry = geometry;
        params.state = state;
        params.abort_mask = abort_mask;
        params.timeout_ns = timeout_ns;
        params.capacity = capacity;
        params.num_clients = num_clients;
        params.num_blocks = answer_blocks;
        params.clients = table;
        CHECK_LAUNCH(sy_launch_echo(&params, stream));
    }

    sy_expert_recv_params recv_params() const {
        sy_expert_recv_params params = {};
        params.version = SY_DEVICE_ABI_VERSION;
        params.flags = launch_flags | take_flags;
        params.geometry = geometry;
        params.state = state;
        params.lists = lists;
        params.local_expert = local_expert;
        params.abort_mask = abort_mask;
        params.min_epoch = min_epoch;
        params.timeout_ns = timeout_ns;
        params.min_ready = min_ready;
        params.num_experts = num_experts;
        params.num_local_experts = num_local_experts;
        params.num_layers = kNumLayers;
        params.num_clients = num_clients;
        params.clients = table;
        return params;
    }

    void recv(sy_stream stream) const {
        const sy_expert_recv_params params = recv_params();
        CHECK_LAUNCH(sy_launch_expert_recv(&params, stream));
    }

    void send(sy_stream stream) const {
        sy_expert_send_params params = {};
        params.version = SY_DEVICE_ABI_VERSION;
        params.flags = launch_flags;
        params.geometry = geometry;
        params.lists = lists;
        params.expert_out = expert_out;
        params.max_rows = std::min(capacity * num_clients, lists.max_rows);
        params.num_clients = num_clients;
        params.num_blocks = answer_blocks;
        params.clients = table;
        CHECK_LAUNCH(sy_launch_expert_send(&params, stream));
    }
};
