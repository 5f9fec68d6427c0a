// Layers of a client and a server that are processes of their own: each has a NIC for its own queues, and maps
// the other's slot by CUDA IPC. The same layers over stores into that mapping give every bit.
#pragma once

#include <cinttypes>

#include "softnic_rig.hpp"

namespace {

// On one GPU the two processes share its time in slices, so a wait for the other may need many
// slices.
constexpr uint64_t kSharedGpuBoundNs = 6'000'000'000;

// This side's part of a layer: a client (rank 0) or a server, its slot, and the path to the
// other's.
struct Party {
    std::unique_ptr<Client> client;
    std::unique_ptr<Server> server;
    std::unique_ptr<Nic> nic;
    Path path;
    uint8_t* theirs = nullptr; // slot of the other side, as this GPU reaches it
    cudaStream_t stream;
    bool is_fresh = true;

    Party(Comrade& comrade, int gpu, const sy_frame_geometry& geometry,
          const sy_placement& placement, Where where)
        : nic(make_nic(gpu, false)) {
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        uint8_t* own = nullptr;
        if (comrade.rank == 0) {
            client = std::make_unique<Client>(geometry, geometry.max_tokens, placement.num_experts,
                                              kClientId);
            client->flags = SY_DISPATCH_FLAG_CONTACT_ALL;
            client->timeout_ns = kSharedGpuBoundNs;
            to_device(client->placement, placement);
            own = client->add_response_slot();
        } else {
            server = std::make_unique<Server>(geometry, geometry.max_tokens, 1, placement, 0);
            server->timeout_ns = kSharedGpuBoundNs;
            own = server->add_request_slot(kClientId);
        }
        cudaIpcMemHandle_t key;
        CHECK_CUDA(cudaIpcGetMemHandle(&key, own));
        const auto keys = comrade.gather(&key, sizeof(key));
        memcpy(&key, keys[1 - comrade.rank].data(), sizeof(key));
        void* mapped = nullptr;
        CHECK_CUDA(cudaIpcOpenMemHandle(&mapped, key, cudaIpcMemLazyEnablePeerAccess));
        theirs = static_cast<uint8_t*>(mapped);
        WorldSizes sizes;
        sizes.num_qps = 2;
        sizes.where = where;
        // Indices go around, and a row of bf16 takes two requests.
        sizes.queue.sq_depth = 128;
        sizes.queue.is_collapsed = false;
        sizes.queue.max_message_bytes = 8192;
        sizes.bound_ns = kSharedGpuBoundNs;
        path = make_path(*nic, sizes, 0, theirs,
                         client != nullptr ? geometry.slot_bytes : geometry.response_slot_bytes, 0,
                         error());
    }

    sy_error_word* error() const {
        return client != nullptr ? &client->state->error : &server->state->error;
    }

    // While both are idle.
    void connect(bool by_nic) {
        const sy_link link =
            by_nic ? path.link : sy_link{reinterpret_cast<uint64_t>(theirs), 0, SY_PATH_DIRECT, 0};
        if (client != nullptr) {
            client->servers[0].request = link;
            client->launch_flags = SY_LAUNCH_FLAG_ANY_PATH;
            // Data from a NIC stays there, and would announce an answer that is not there yet.
            if (!by_nic)
                client->poison(0);
            client->connect();
        } else {
            server->clients[0].response = link;
            server->launch_flags = SY_LAUNCH_FLAG_ANY_PATH;
            server->connect();
        }
    }

    // This side's kernels of a layer, to their end.
    void layer(bool echoes) {
        if (client != nullptr) {
            client->dispatch(stream);
            client->combine(stream);
        } else if (echoes) {
            server->echo(stream);
        } else {
            server->recv(stream);
            server->send(stream);
        }
        CHECK_CUDA(cudaStreamSynchronize(stream));
    }

    void start_nic() {
        nic->prepare(is_fresh);
        is_fresh = false;
        nic->start();
    }
    uint64_t stop_nic(uint32_t rank) {
        const softnic::Counts counts = nic->stop();
        CHECK(counts.num_violations == 0,
              "rank %u: violation %u of queue pair %u at block %" PRIu64 ": found %" PRIu64, rank,
              counts.first.what, counts.first.qpn, counts.first.position, counts.first.found);
        return counts.num_requests;
    }

    void expect_no_error(uint32_t rank, bool by_nic) const {
        const sy_error_word word = from_device(error());
        CHECK(word.tag == SY_TAG_NONE,
              "rank %u, %s: tag %u peer %u reason %u observed %" PRIx64 " expected %" PRIx64, rank,
              by_nic ? "by its NIC" : "by stores", word.tag, word.peer, word.reason, word.observed,
              word.expected);
    }

    static constexpr uint64_t kClientId = 100;
};

// Layers of one geometry, by stores and by the NICs. Both processes call it alike.
void layers_of_a_party(Comrade& comrade, Party& party, const sy_frame_geometry& geometry,
                       const sy_placement& placement, const Backend& backend, bool echoes) {
    const bool is_fp8 = geometry.dtype == SY_DTYPE_F8_E4M3;
    constexpr uint32_t kNumTokens[] = {16, 1, 7}, kNumRepeats = 3;
    uint64_t num_requests = 0;
    double us[2] = {0, 0};
    for (const uint32_t num_tokens : kNumTokens) {
        reference::Input input;
        if (party.client != nullptr)
            input = reference::make_input(
                {num_tokens, geometry.hidden, geometry.top_k, placement.num_experts},
                g_seed * 64 + num_tokens, false, true);
        std::vector<uint16_t> outs[2];
        for (const bool by_nic : {false, true}) {
            if (party.client != nullptr)
                party.client->load(input);
            party.connect(by_nic);
            if (by_nic)
                party.start_nic();
            comrade.barrier();
            for (uint32_t i = 0; i < kNumRepeats; ++i) {
                const double start_s = now_s();
                party.layer(echoes);
                us[by_nic] = (now_s() - start_s) * 1e6;
            }
            // No data of the other side is under way to this one any more.
            comrade.barrier();
            if (by_nic)
                num_requests += party.stop_nic(comrade.rank);
            comrade.barrier();
            party.expect_no_error(comrade.rank, by_nic);
            if (party.client == nullptr)
                continue;
            outs[by_nic].resize(size_t{geometry.max_tokens} * geometry.hidden);
            CHECK_CUDA(cudaMemcpy(outs[by_nic].data(), party.client->out, outs[by_nic].size() * 2,
                                  cudaMemcpyDeviceToHost));
        }
        if (party.client == nullptr)
            continue;
        const auto expected = reference::identity_layer(input, placement, 1, is_fp8);
        CHECK(outs[1] == outs[0], "%u tokens differ from the layer over stores", num_tokens);
        CHECK(memcmp(outs[1].data(), expected.data(), expected.size() * 2) == 0,
              "%u tokens differ from the reference", num_tokens);
    }
    CHECK(num_requests != 0, "rank %u: its NIC carried nothing out", comrade.rank);
    if (comrade.rank == 0)
        printf("{\"test\":\"process_layers\",\"dtype\":\"%s\",\"nic\":\"%s\",\"queues\":\"%s\","
               "\"server\":\"%s\",\"requests\":%" PRIu64
               ",\"us_over_stores\":%.1f,\"us_over_nic\":%.1f}\n",
               is_fp8 ? "fp8" : "bf16", backend.name(), name_of(backend.where),
               echoes ? "echo" : "lists", num_requests, us[0], us[1]);
}

int one_party(Comrade& comrade, const Backend& backend) {
    int num_gpus = 0;
    CHECK_CUDA(cudaGetDeviceCount(&num_gpus));
    const int gpu = comrade.rank == 0 ? 0 : num_gpus - 1;
    CHECK_CUDA(cudaSetDevice(gpu));
    const sy_placement placement = reference::make_placement(16, 1, 0, 7);
    for (const uint32_t dtype : {SY_DTYPE_F8_E4M3, SY_DTYPE_BF16}) {
        sy_frame_geometry geometry;
        CHECK_LAUNCH(sy_make_geometry(7168, 8, dtype, 16, 2, &geometry));
        Party party(comrade, gpu, geometry, placement, backend.where);
        for (const bool echoes : {false, true})
            layers_of_a_party(comrade, party, geometry, placement, backend, echoes);
        // The owner of the memory must stay until here.
        CHECK_CUDA(cudaIpcCloseMemHandle(party.theirs));
        comrade.barrier();
    }
    return 0;
}

// Before this process uses CUDA. True when all went well. One GPU is enough.
bool process_layers() {
    for (const Backend& backend : kBackends) {
        // The copy engines' thread shows nothing of processes that NIC kernels do not.
        if (backend.has_copy_engines)
            continue;
        const int code =
            run_ranks(2, 90, -1, [&](Comrade& comrade) { return one_party(comrade, backend); });
        if (code != 0) {
            fprintf(stderr, "process_layers, queues in %s memory: exit code %d\n",
                    name_of(backend.where), code);
            return false;
        }
    }
    return true;
}

} // namespace
