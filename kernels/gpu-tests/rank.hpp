// One process of a multi-GPU run: its GPU, its slots, and those of its peers, mapped by CUDA IPC.
#pragma once

#include <memory>
#include <vector>

#include "process.hpp"
#include "ranks.hpp"

constexpr uint32_t kMostRanks = 4;
// Layers take turns at inputs out of step with the two frames of a ring: with the same input in the same place
// rows of an earlier frame would be right ones, and a missing wait would not show.
constexpr uint32_t kNumInputs = 3;

struct Topology {
    const char* name;
    std::vector<uint32_t> clients, servers; // ranks
    bool is_colocated() const { return clients == servers; }
};

inline std::vector<Topology> topologies(uint32_t num_ranks) {
    if (num_ranks == 1)
        return {{"1r", {0}, {0}}};
    if (num_ranks == 2)
        return {{"2r", {0, 1}, {0, 1}}, {"1to1", {0}, {1}}};
    return {{"4r", {0, 1, 2, 3}, {0, 1, 2, 3}},
            {"2to2", {0, 1}, {2, 3}},
            {"1to3", {0}, {1, 2, 3}},
            {"3to1", {0, 1, 2}, {3}}};
}

inline int index_of(const std::vector<uint32_t>& ranks, uint32_t rank) {
    for (size_t i = 0; i < ranks.size(); ++i)
        if (ranks[i] == rank)
            return static_cast<int>(i);
    return -1;
}

// Slots of the largest size, allocated and exchanged once.
class Slots {
  public:
    Slots(Comrade& comrade, uint64_t request_bytes, uint64_t response_bytes)
        : request_bytes(sy_round_up(request_bytes, kSlotAlign)),
          response_bytes(sy_round_up(response_bytes, kSlotAlign)), num_ranks_(comrade.num_ranks) {
        struct Keys {
            cudaIpcMemHandle_t request[kMostRanks], response[kMostRanks];
        } keys = {};
        for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
            request[peer] = device_alloc<uint8_t>(this->request_bytes);
            response[peer] = device_alloc<uint8_t>(this->response_bytes);
            CHECK_CUDA(cudaIpcGetMemHandle(&keys.request[peer], request[peer]));
            CHECK_CUDA(cudaIpcGetMemHandle(&keys.response[peer], response[peer]));
        }
        const auto all = comrade.gather(&keys, sizeof(keys));
        for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
            if (peer == comrade.rank) {
                peer_request[peer] = request[peer];
                peer_response[peer] = response[peer];
                continue;
            }
            Keys theirs;
            memcpy(&theirs, all[peer].data(), sizeof(theirs));
            peer_request[peer] = open(theirs.request[comrade.rank]);
            peer_response[peer] = open(theirs.response[comrade.rank]);
        }
        CHECK_CUDA(cudaDeviceSynchronize());
        comrade.barrier();
    }
    // A page of counters per rank that every peer may add to: transport measurements need no more.
    void share_control(Comrade& comrade) {
        control = device_alloc<uint8_t>(kSlotAlign);
        cudaIpcMemHandle_t key;
        CHECK_CUDA(cudaIpcGetMemHandle(&key, control));
        const auto all = comrade.gather(&key, sizeof(key));
        for (uint32_t peer = 0; peer < num_ranks_; ++peer) {
            memcpy(&key, all[peer].data(), sizeof(key));
            peer_control[peer] = peer == comrade.rank ? control : open(key);
        }
    }
    // Closes the mappings of a peer's memory; a dead owner's memory stays taken until then.
    void close_peer(uint32_t peer) {
        CHECK_CUDA(cudaIpcCloseMemHandle(peer_request[peer]));
        CHECK_CUDA(cudaIpcCloseMemHandle(peer_response[peer]));
    }

    const uint64_t request_bytes, response_bytes;
    // In my memory, by the peer that writes them; and in the peers' memory, mine to write.
    uint8_t *request[kMostRanks], *response[kMostRanks];
    uint8_t *peer_request[kMostRanks], *peer_response[kMostRanks];
    uint8_t *control = nullptr, *peer_control[kMostRanks] = {};

  private:
    static uint8_t* open(const cudaIpcMemHandle_t& key) {
        void* pointer = nullptr;
        CHECK_CUDA(cudaIpcOpenMemHandle(&pointer, key, cudaIpcMemLazyEnablePeerAccess));
        return static_cast<uint8_t*>(pointer);
    }
    const uint32_t num_ranks_;
};

// Poisons a slot except for words that must start as zero.
inline void reset_request_slot(const sy_frame_geometry& geometry, uint8_t* slot) {
    CHECK_CUDA(cudaMemset(slot, 0xff, geometry.control_offset));
    for (uint32_t i = 0; i < geometry.num_frames; ++i)
        CHECK_CUDA(cudaMemset(slot + i * geometry.frame_bytes + geometry.flags_offset, 0,
                              geometry.entries_offset - geometry.flags_offset));
    CHECK_CUDA(cudaMemset(slot + geometry.control_offset, 0, SY_CONTROL_BYTES));
}

inline void reset_response_slot(const sy_frame_geometry& geometry, uint8_t* slot) {
    CHECK_CUDA(cudaMemset(slot, 0xff, geometry.response_control_offset));
    for (uint32_t i = 0; i < geometry.num_frames; ++i)
        CHECK_CUDA(cudaMemset(slot + i * geometry.response_frame_bytes, 0,
                              geometry.response_payload_offset));
    CHECK_CUDA(cudaMemset(slot + geometry.response_control_offset, 0, SY_CONTROL_BYTES));
}

// Buffers of a rank, for the largest run; each run uses a part.
struct Buffers {
    uint16_t *hidden_states[kNumInputs], *outs, *expected[kNumInputs];
    int32_t* topk_idx[kNumInputs];
    float* topk_weights[kNumInputs];
    uint32_t *num_tokens, *token_missing;
    sy_placement* placement;
    sy_client_state* client_state;
    uint8_t* handles[SY_MAX_FRAMES];
    uint64_t *trace, *min_epoch, *num_wrong;
    sy_server_state* server_state;
    uint8_t* lists;
    sy_server_peer* servers;
    sy_client_peer* clients;
    int16_t* local_expert;

    Buffers(uint32_t most_tokens, uint32_t hidden, uint32_t top_k, uint32_t num_outs,
            uint32_t trace_len) {
        for (uint32_t i = 0; i < kNumInputs; ++i) {
            hidden_states[i] = device_alloc<uint16_t>(size_t{most_tokens} * hidden);
            expected[i] = device_alloc<uint16_t>(size_t{most_tokens} * hidden);
            topk_idx[i] = device_alloc<int32_t>(size_t{most_tokens} * top_k);
            topk_weights[i] = device_alloc<float>(size_t{most_tokens} * top_k);
        }
        outs = device_alloc<uint16_t>(size_t{num_outs} * most_tokens * hidden);
        num_tokens = device_alloc<uint32_t>(4);
        token_missing = device_alloc<uint32_t>(most_tokens);
        placement = device_alloc<sy_placement>(1);
        client_state = device_alloc<sy_client_state>(1);
        for (auto& handle : handles)
            handle = device_alloc<uint8_t>(sizeof(sy_handle) + size_t{most_tokens} * top_k * 4);
        trace = device_alloc<uint64_t>(uint64_t{trace_len} * SY_CALL_STAMPS);
        min_epoch = device_alloc<uint64_t>(1);
        num_wrong = device_alloc<uint64_t>(1);
        server_state = device_alloc<sy_server_state>(1);
        lists = device_alloc<uint8_t>(size_t{most_tokens} * kMostRanks * (top_k * 12 + 4) + 65536);
        servers = device_alloc<sy_server_peer>(SY_MAX_PEERS);
        clients = device_alloc<sy_client_peer>(SY_MAX_PEERS);
        local_expert = device_alloc<int16_t>(size_t{kNumLayers} * SY_MAX_EXPERTS);
    }
};

// Client and server of this rank in a topology, with everything reset. Null where it has no such role.
struct Roles {
    std::unique_ptr<Client> client;
    std::unique_ptr<Server> server;
};

inline Roles make_roles(Comrade& comrade, const Topology& topology, Slots& slots, Buffers& buffers,
                        const sy_frame_geometry& geometry, uint32_t capacity,
                        const sy_placement& placement) {
    Roles roles;
    const int client_idx = index_of(topology.clients, comrade.rank);
    const int server_idx = index_of(topology.servers, comrade.rank);
    CHECK(geometry.slot_bytes <= slots.request_bytes &&
              geometry.response_slot_bytes <= slots.response_bytes,
          "slots of %" PRIu64 " and %" PRIu64 " bytes", geometry.slot_bytes,
          geometry.response_slot_bytes);
    if (client_idx >= 0) {
        roles.client = std::make_unique<Client>();
        Client& client = *roles.client;
        client.geometry = geometry;
        client.capacity = capacity;
        client.num_experts = placement.num_experts;
        client.client_id = 100 + client_idx;
        client.num_servers = topology.servers.size();
        client.num_tokens = buffers.num_tokens;
        client.token_missing = buffers.token_missing;
        client.placement = buffers.placement;
        client.state = buffers.client_state;
        for (uint32_t i = 0; i < geometry.num_frames; ++i)
            client.handles.push_back(reinterpret_cast<sy_handle*>(buffers.handles[i]));
        for (uint32_t s = 0; s < client.num_servers; ++s) {
            const uint32_t rank = topology.servers[s];
            reset_response_slot(geometry, slots.response[rank]);
            client.servers[s] = {
                {reinterpret_cast<uint64_t>(slots.peer_request[rank]), 0, SY_PATH_DIRECT, 0},
                reinterpret_cast<uint64_t>(slots.response[rank]),
                1,
                0};
        }
        client.table = buffers.servers;
        client.connect();
        to_device(buffers.placement, placement);
        CHECK_CUDA(cudaMemset(buffers.client_state, 0, sizeof(sy_client_state)));
    }
    if (server_idx >= 0) {
        roles.server = std::make_unique<Server>();
        Server& server = *roles.server;
        server.geometry = geometry;
        server.capacity = capacity;
        server.num_experts = placement.num_experts;
        server.num_clients = topology.clients.size();
        server.state = buffers.server_state;
        server.min_epoch = buffers.min_epoch;
        server.local_expert = buffers.local_expert;
        std::vector<int16_t> local(placement.num_experts, -1);
        for (uint32_t expert = 0; expert < placement.num_experts; ++expert)
            for (uint32_t i = 0; i < placement.experts[expert].num_replicas; ++i)
                if (placement.experts[expert].server[i] == server_idx)
                    local[expert] = static_cast<int16_t>(server.num_local_experts++);
        for (uint32_t layer = 0; layer < kNumLayers; ++layer)
            upload(buffers.local_expert + layer * local.size(), local.data(), local.size() * 2);
        sy_expert_lists_at(reinterpret_cast<uint64_t>(buffers.lists), &geometry,
                           server.num_local_experts, geometry.max_tokens * server.num_clients,
                           &server.lists);
        server.min_ready = server.num_clients;
        for (uint32_t c = 0; c < server.num_clients; ++c) {
            const uint32_t rank = topology.clients[c];
            reset_request_slot(geometry, slots.request[rank]);
            server.clients[c] = {
                reinterpret_cast<uint64_t>(slots.request[rank]),
                {reinterpret_cast<uint64_t>(slots.peer_response[rank]), 0, SY_PATH_DIRECT, 0},
                100 + c,
                1,
                0};
        }
        server.table = buffers.clients;
        server.connect();
        CHECK_CUDA(cudaMemset(buffers.server_state, 0, sizeof(sy_server_state)));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    comrade.barrier(); // no rank stores before all have reset
    return roles;
}

inline int select_gpu(uint32_t rank) {
    int num_gpus = 0;
    CHECK_CUDA(cudaGetDeviceCount(&num_gpus));
    CHECK(num_gpus > 0, "no GPU");
    CHECK_CUDA(cudaSetDevice(static_cast<int>(rank) % num_gpus));
    return num_gpus;
}
