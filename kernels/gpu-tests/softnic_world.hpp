// Clients and servers on the GPUs of this process, joined by stores or by NICs.
#pragma once

#include <cinttypes>
#include <memory>

#include "ranks.hpp"
#include "softnic/copy_nic.hpp"

using softnic::CopyNic;
using softnic::Nic;
using softnic::NicKernel;
using softnic::QueueSizes;
using softnic::SendQueue;
using softnic::Where;

// One path from a sender to a slot on another GPU: a mirror, queues, and the handle of the two.
struct Path {
    std::vector<SendQueue> queues;
    std::vector<uint32_t> numbers; // in the sender's NIC
    uint8_t* mirror;
    sy_link link;
};

struct WorldSizes {
    uint32_t num_qps = 4;
    QueueSizes queue;
    Where where = Where::kHost;
    bool has_copy_engines = false; // instead of the NIC kernel; queues in host memory
    uint64_t bound_ns = 2'000'000'000;
    // Rights of peers to a slot: fused kernels read nothing of it.
    uint32_t access = softnic::kRemoteWrite | softnic::kRemoteAtomic;
};

inline std::unique_ptr<Nic> make_nic(int gpu, bool has_copy_engines) {
    if (has_copy_engines)
        return std::make_unique<CopyNic>(gpu);
    return std::make_unique<NicKernel>(gpu);
}

// A path of the current GPU, which is the NIC's, to `slot` as that GPU reaches it. Keys, addresses
// and queue pairs are those of the path's number `path_idx`, which no other path of this NIC has.
inline Path make_path(Nic& nic, const WorldSizes& sizes, uint32_t path_idx, uint8_t* slot,
                      uint64_t slot_bytes, uint32_t peer_idx, sy_error_word* error) {
    Path path = {};
    path.mirror = device_alloc<uint8_t>(sy_round_up(slot_bytes, kSlotAlign));
    // Nothing of the mirror may arrive that was not stored there.
    CHECK_CUDA(cudaMemset(path.mirror, 0xee, slot_bytes));
    const uint32_t lkey = 0x100 + 2 * path_idx, rkey = lkey + 1;
    // Addresses at the peer are the peer's: nothing here may take them for its own.
    const uint64_t remote = 0x500000000000 + (uint64_t{path_idx} << 36);
    nic.add_key(lkey, reinterpret_cast<uint64_t>(path.mirror), slot_bytes, path.mirror);
    nic.add_key(rkey, remote, slot_bytes, slot, sizes.access);
    for (uint32_t i = 0; i < sizes.num_qps; ++i) {
        path.queues.emplace_back(sizes.where, sizes.queue, 0x40 + path_idx * sizes.num_qps + i,
                                 peer_idx);
        path.numbers.push_back(nic.add_queue(path.queues.back()));
    }
    sy_ibgda_peer peer = {};
    peer.qps = softnic::upload_handles(path.queues);
    peer.mirror = reinterpret_cast<uint64_t>(path.mirror);
    peer.remote = remote;
    peer.slot_bytes = slot_bytes;
    peer.lkey = lkey;
    peer.rkey = rkey;
    peer.num_qps = sizes.num_qps;
    peer.bound = {error, nullptr, sizes.bound_ns};
    sy_ibgda_peer* handle = device_alloc<sy_ibgda_peer>(1);
    to_device(handle, peer);
    path.link = {peer.mirror, reinterpret_cast<uint64_t>(handle), SY_PATH_IBGDA, 0};
    return path;
}

class NicWorld {
  public:
    // GPU of each client and server.
    NicWorld(const sy_frame_geometry& geometry, uint32_t num_experts, std::vector<int> client_gpus,
             std::vector<int> server_gpus, const WorldSizes& sizes)
        : geometry(geometry), client_gpus(client_gpus), server_gpus(server_gpus), sizes_(sizes) {
        const uint32_t num_clients = client_gpus.size(), num_servers = server_gpus.size();
        placement = reference::make_placement(num_experts, num_servers, 0, 7);
        int num_gpus = 0;
        CHECK_CUDA(cudaGetDeviceCount(&num_gpus));
        streams_.resize(num_gpus);
        for (int gpu = 0; gpu < num_gpus; ++gpu) {
            CHECK_CUDA(cudaSetDevice(gpu));
            CHECK_CUDA(cudaStreamCreateWithFlags(&streams_[gpu], cudaStreamNonBlocking));
            for (int other = 0; other < num_gpus; ++other)
                if (other != gpu) {
                    const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
                    CHECK(code == cudaSuccess || code == cudaErrorPeerAccessAlreadyEnabled,
                          "GPU %d does not reach GPU %d: %s", gpu, other, cudaGetErrorString(code));
                    cudaGetLastError();
                }
            nics.push_back(nullptr);
        }
        for (uint32_t c = 0; c < num_clients; ++c) {
            nic_of(client_gpus[c]);
            clients.push_back(
                std::make_unique<Client>(geometry, geometry.max_tokens, num_experts, 100 + c));
            to_device(clients[c]->placement, placement);
        }
        for (uint32_t s = 0; s < num_servers; ++s) {
            nic_of(server_gpus[s]);
            servers.push_back(
                std::make_unique<Server>(geometry, geometry.max_tokens, num_clients, placement, s));
            servers[s]->min_ready = num_clients;
        }
        requests.resize(num_clients);
        responses.resize(num_servers);
        for (uint32_t c = 0; c < num_clients; ++c)
            for (uint32_t s = 0; s < num_servers; ++s) {
                CHECK_CUDA(cudaSetDevice(server_gpus[s]));
                uint8_t* request = servers[s]->add_request_slot(100 + c);
                CHECK_CUDA(cudaSetDevice(client_gpus[c]));
                uint8_t* response = clients[c]->add_response_slot();
                requests[c].push_back(make_path(client_gpus[c], request, geometry.slot_bytes, s,
                                                &clients[c]->state->error));
                responses[s].push_back(make_path(server_gpus[s], response,
                                                 geometry.response_slot_bytes, c,
                                                 &servers[s]->state->error));
            }
        for (auto& client : clients)
            client->flags = SY_DISPATCH_FLAG_CONTACT_ALL;
    }

    // Joins all ranks by stores, or by the NICs.
    void connect(bool by_nic) {
        for (uint32_t c = 0; c < clients.size(); ++c) {
            CHECK_CUDA(cudaSetDevice(client_gpus[c]));
            for (uint32_t s = 0; s < servers.size(); ++s) {
                clients[c]->servers[s].request =
                    by_nic ? requests[c][s].link : direct(servers[s]->clients[c].request);
                // Data from a NIC stays there, and would announce an answer that is not there yet.
                if (!by_nic)
                    clients[c]->poison(s);
            }
            clients[c]->launch_flags = by_nic ? SY_LAUNCH_FLAG_ANY_PATH : 0;
            clients[c]->connect();
        }
        for (uint32_t s = 0; s < servers.size(); ++s) {
            CHECK_CUDA(cudaSetDevice(server_gpus[s]));
            for (uint32_t c = 0; c < clients.size(); ++c)
                servers[s]->clients[c].response =
                    by_nic ? responses[s][c].link : direct(clients[c]->servers[s].response);
            servers[s]->launch_flags = by_nic ? SY_LAUNCH_FLAG_ANY_PATH : 0;
            servers[s]->connect();
        }
    }

    void start_nics(bool is_fresh) {
        for (auto& nic : nics)
            if (nic != nullptr)
                nic->prepare(is_fresh);
        for (auto& nic : nics)
            if (nic != nullptr)
                nic->start();
    }

    // As after an error: the host resets every queue pair.
    void reset_queues() {
        for (auto* paths : {&requests, &responses})
            for (size_t i = 0; i < paths->size(); ++i) {
                CHECK_CUDA(cudaSetDevice(paths == &requests ? client_gpus[i] : server_gpus[i]));
                for (Path& path : (*paths)[i])
                    for (SendQueue& queue : path.queues)
                        queue.reset();
            }
    }

    // Requests carried out. Ends the program when a queue was used wrongly.
    uint64_t stop_nics() {
        uint64_t num_requests = 0;
        for (auto& nic : nics)
            if (nic != nullptr) {
                const softnic::Counts counts = nic->stop();
                CHECK(counts.num_violations == 0,
                      "the NIC of GPU %d: violation %u of queue pair %u at block %" PRIu64
                      ": found %" PRIu64,
                      nic->device, counts.first.what, counts.first.qpn, counts.first.position,
                      counts.first.found);
                num_requests += counts.num_requests;
            }
        return num_requests;
    }

    void dispatch(uint32_t c) {
        CHECK_CUDA(cudaSetDevice(client_gpus[c]));
        clients[c]->dispatch(streams_[client_gpus[c]]);
    }
    void serve(uint32_t s, bool echoes) {
        CHECK_CUDA(cudaSetDevice(server_gpus[s]));
        const cudaStream_t stream = streams_[server_gpus[s]];
        if (echoes)
            return servers[s]->echo(stream);
        servers[s]->recv(stream);
        servers[s]->send(stream);
    }
    void combine(uint32_t c) {
        CHECK_CUDA(cudaSetDevice(client_gpus[c]));
        clients[c]->combine(streams_[client_gpus[c]]);
    }
    // One layer of all; with one GPU in stream order.
    void layer(bool echoes) {
        for (uint32_t c = 0; c < clients.size(); ++c)
            dispatch(c);
        for (uint32_t s = 0; s < servers.size(); ++s)
            serve(s, echoes);
        for (uint32_t c = 0; c < clients.size(); ++c)
            combine(c);
    }
    void wait() {
        for (size_t gpu = 0; gpu < streams_.size(); ++gpu) {
            CHECK_CUDA(cudaSetDevice(static_cast<int>(gpu)));
            CHECK_CUDA(cudaStreamSynchronize(streams_[gpu]));
        }
    }
    std::vector<uint16_t> out(uint32_t c) const {
        std::vector<uint16_t> values(size_t{geometry.max_tokens} * geometry.hidden);
        CHECK_CUDA(
            cudaMemcpy(values.data(), clients[c]->out, values.size() * 2, cudaMemcpyDeviceToHost));
        return values;
    }
    void expect_no_errors() const {
        for (auto& client : clients)
            expect_none(from_device(&client->state->error), "client");
        for (auto& server : servers)
            expect_none(from_device(&server->state->error), "server");
    }
    const sy_frame_geometry geometry;
    const std::vector<int> client_gpus, server_gpus;
    sy_placement placement;
    std::vector<std::unique_ptr<Client>> clients;
    std::vector<std::unique_ptr<Server>> servers;
    std::vector<std::unique_ptr<Nic>> nics; // by GPU, null where there is none
    std::vector<std::vector<Path>> requests; // [client][server]
    std::vector<std::vector<Path>> responses; // [server][client]

  private:
    static sy_link direct(uint64_t slot) { return {slot, 0, SY_PATH_DIRECT, 0}; }
    static void expect_none(const sy_error_word& error, const char* who) {
        CHECK(error.tag == SY_TAG_NONE,
              "%s: tag %u peer %u reason %u observed %" PRIx64 " expected %" PRIx64, who, error.tag,
              error.peer, error.reason, error.observed, error.expected);
    }
    Nic& nic_of(int gpu) {
        CHECK_CUDA(cudaSetDevice(gpu));
        if (nics[gpu] == nullptr)
            nics[gpu] = make_nic(gpu, sizes_.has_copy_engines);
        return *nics[gpu];
    }
    Path make_path(int gpu, uint8_t* slot, uint64_t slot_bytes, uint32_t peer_idx,
                   sy_error_word* error) {
        return ::make_path(nic_of(gpu), sizes_, num_paths_++, slot, slot_bytes, peer_idx, error);
    }
    const WorldSizes sizes_;
    std::vector<cudaStream_t> streams_;
    uint32_t num_paths_ = 0;
};
