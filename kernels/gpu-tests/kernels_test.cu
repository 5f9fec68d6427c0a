// The fused kernels against the host reference, on one GPU: every client and server of a test lives in
// this process and runs in stream order. Fresh random input each time, poisoned slots and outputs.
//
//   kernels_test [--seed N] [--quick] [--only NAME]      --quick: small shapes, for compute-sanitizer
#include <chrono>
#include <cinttypes>
#include <memory>
#include <string>

#include "link_calls_test.hpp"
#include "ranks.hpp"

namespace {

uint64_t g_seed = 1;
bool g_quick = false;

struct World {
    sy_frame_geometry geometry;
    sy_placement placement;
    std::vector<std::unique_ptr<Client>> clients;
    std::vector<std::unique_ptr<Server>> servers;
    cudaStream_t stream;
    uint32_t capacity, num_frames;
    uint64_t round = 0;

    World(uint32_t hidden, uint32_t top_k, uint32_t dtype, uint32_t num_experts,
          uint32_t num_clients, uint32_t num_servers, uint32_t capacity,
          uint32_t replicate_every = 0, uint32_t num_frames = 2)
        : capacity(capacity), num_frames(num_frames) {
        CHECK_LAUNCH(sy_make_geometry(hidden, top_k, dtype, capacity, num_frames, &geometry));
        placement = reference::make_placement(num_experts, num_servers, replicate_every, 7);
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        for (uint32_t c = 0; c < num_clients; ++c) {
            clients.push_back(std::make_unique<Client>(geometry, capacity, num_experts, 100 + c));
            to_device(clients[c]->placement, placement);
        }
        for (uint32_t s = 0; s < num_servers; ++s)
            servers.push_back(
                std::make_unique<Server>(geometry, capacity, num_clients, placement, s));
        for (uint32_t c = 0; c < num_clients; ++c)
            for (uint32_t s = 0; s < num_servers; ++s) {
                uint8_t* request = servers[s]->add_request_slot(100 + c);
                uint8_t* response = clients[c]->add_response_slot();
                clients[c]->servers[s].request = {reinterpret_cast<uint64_t>(request), 0,
                                                  SY_PATH_DIRECT, 0};
                servers[s]->clients[c].response = {reinterpret_cast<uint64_t>(response), 0,
                                                   SY_PATH_DIRECT, 0};
            }
        for (auto& client : clients)
            client->connect();
        for (auto& server : servers)
            server->connect();
    }
    ~World() {
        CHECK_CUDA(cudaStreamSynchronize(stream));
        CHECK_CUDA(cudaStreamDestroy(stream));
        for (auto& client : clients) {
            for (uint32_t s = 0; s < client->num_servers; ++s)
                CHECK_CUDA(cudaFree(reinterpret_cast<void*>(client->servers[s].response)));
            for (void* pointer :
                 {static_cast<void*>(client->hidden_states), static_cast<void*>(client->out),
                  static_cast<void*>(client->topk_idx)})
                CHECK_CUDA(cudaFree(pointer));
        }
        for (auto& server : servers)
            for (uint32_t c = 0; c < server->num_clients; ++c)
                CHECK_CUDA(cudaFree(reinterpret_cast<void*>(server->clients[c].request)));
    }
    bool fp8() const { return geometry.dtype == SY_DTYPE_F8_E4M3; }
    void poison() {
        for (auto& client : clients)
            for (uint32_t s = 0; s < client->num_servers; ++s)
                client->poison(s);
        for (auto& server : servers)
            for (uint32_t c = 0; c < server->num_clients; ++c)
                server->poison(c);
    }
    std::vector<reference::Input> load(uint32_t num_tokens, bool zipf) {
        std::vector<reference::Input> inputs;
        for (uint32_t c = 0; c < clients.size(); ++c) {
            // Clients differ in size, too.
            const uint32_t tokens = num_tokens > c ? num_tokens - c : num_tokens;
            inputs.push_back(reference::make_input(
                {tokens, geometry.hidden, geometry.top_k, placement.num_experts},
                g_seed * 1000003 + ++round * 64 + c, zipf, true));
            clients[c]->load(inputs[c]);
        }
        CHECK_CUDA(cudaDeviceSynchronize());
        return inputs;
    }
};

void expect_no_error(const sy_error_word& error, const char* who, uint32_t index) {
    CHECK(error.tag == SY_TAG_NONE,
          "%s %u: tag %u peer %u reason %u observed %" PRIu64 " expected %" PRIu64, who, index,
          error.tag, error.peer, error.reason, error.observed, error.expected);
}

void expect_layer(const World& world, uint32_t c, const reference::Input& input,
                  const std::vector<uint16_t>& expected) {
    const Client& client = *world.clients[c];
    std::vector<uint16_t> out(size_t{world.capacity} * world.geometry.hidden);
    CHECK_CUDA(cudaMemcpy(out.data(), client.out, out.size() * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < out.size(); ++i) {
        const uint16_t want = i < expected.size() ? expected[i] : 0xffff;
        CHECK(out[i] == want, "client %u token %zu value %zu: %04x, expected %04x (%u tokens)", c,
              i / world.geometry.hidden, i % world.geometry.hidden, out[i], want,
              input.shape.num_tokens);
    }
    expect_no_error(from_device(&client.state->error), "client", c);
    const sy_handle handle = from_device(client.handles[0]);
    CHECK(handle.missing == 0 && handle.refused == 0, "missing %x refused %x", handle.missing,
          handle.refused);
    std::vector<uint32_t> missing(world.capacity);
    CHECK_CUDA(cudaMemcpy(missing.data(), client.token_missing, missing.size() * 4,
                          cudaMemcpyDeviceToHost));
    for (uint32_t token = 0; token < input.shape.num_tokens; ++token)
        CHECK(missing[token] == 0, "token %u misses %x", token, missing[token]);
}

void expect_identity_layer(const World& world, const std::vector<reference::Input>& inputs) {
    for (uint32_t c = 0; c < world.clients.size(); ++c)
        expect_layer(world, c, inputs[c],
                     reference::identity_layer(inputs[c], world.placement, world.servers.size(),
                                               world.fp8()));
    for (uint32_t s = 0; s < world.servers.size(); ++s)
        expect_no_error(from_device(&world.servers[s]->state->error), "server", s);
}

// The lists of a server's last batch hold every entry of every client once, by expert.
void expect_lists(const World& world, const std::vector<reference::Input>& inputs, uint32_t s) {
    const Server& server = *world.servers[s];
    const sy_batch batch = from_device(server.lists.batch);
    std::vector<uint32_t> begin(server.num_local_experts + 1), list_row(batch.num_entries + 1),
        source(batch.num_rows + 1), position(size_t{batch.num_rows} * world.geometry.top_k + 1);
    std::vector<float> weight(batch.num_entries + 1);
    std::vector<int16_t> local(server.num_experts);
    const auto fetch = [](void* to, const void* from, size_t bytes) {
        CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
    };
    fetch(begin.data(), server.lists.expert_begin, begin.size() * 4);
    fetch(list_row.data(), server.lists.list_row, size_t{batch.num_entries} * 4);
    fetch(weight.data(), server.lists.list_weight, size_t{batch.num_entries} * 4);
    fetch(source.data(), server.lists.row_source, size_t{batch.num_rows} * 4);
    fetch(position.data(), server.lists.row_position,
          size_t{batch.num_rows} * world.geometry.top_k * 4);
    fetch(local.data(), server.local_expert, local.size() * 2);
    CHECK(begin[0] == 0 && begin.back() == batch.num_entries, "%u entries, lists end at %u",
          batch.num_entries, begin.back());
    std::vector<bool> is_filled(batch.num_entries, false);
    uint32_t row = 0, num_entries = 0;
    for (uint32_t c = 0; c < inputs.size(); ++c) {
        CHECK(batch.row_begin[c] == row, "rows of client %u begin at %u, expected %u", c,
              batch.row_begin[c], row);
        uint32_t frame_row = 0;
        const reference::Input& input = inputs[c];
        for (uint32_t token = 0; token < input.shape.num_tokens; ++token) {
            bool goes = false;
            for (uint32_t i = 0; i < input.shape.top_k; ++i) {
                const int32_t expert = input.topk_idx[token * input.shape.top_k + i];
                if (reference::pick_server(world.placement, token, expert) != static_cast<int>(s))
                    continue;
                goes = true;
                CHECK(row < batch.num_rows, "%u rows, expected more", batch.num_rows);
                const uint32_t at = position[size_t{row} * input.shape.top_k + i];
                CHECK(at < batch.num_entries && !is_filled[at], "row %u choice %u at %u", row, i,
                      at);
                is_filled[at] = true;
                ++num_entries;
                CHECK(at >= begin[local[expert]] && at < begin[local[expert] + 1],
                      "entry of expert %d at %u, its list is %u..%u", local[expert], at,
                      begin[local[expert]], begin[local[expert] + 1]);
                CHECK(list_row[at] == row, "list_row %u, expected %u", list_row[at], row);
                CHECK(weight[at] == input.topk_weights[token * input.shape.top_k + i], "weight %g",
                      weight[at]);
            }
            if (goes) {
                CHECK(source[row] == (c << SY_ROUTE_SHIFT | frame_row), "source %x", source[row]);
                ++row, ++frame_row;
            }
        }
    }
    CHECK(row == batch.num_rows && num_entries == batch.num_entries,
          "%u rows %u entries, found %u %u", row, num_entries, batch.num_rows, batch.num_entries);
}

void run_layer(const World& world, bool echo, uint32_t handle = 0) {
    for (auto& client : world.clients)
        client->dispatch(world.stream, handle);
    for (auto& server : world.servers) {
        if (echo) {
            server->echo(world.stream);
        } else {
            server->recv(world.stream);
            server->send(world.stream);
        }
    }
    for (auto& client : world.clients)
        client->combine(world.stream, handle);
}

struct LayerCase {
    uint32_t hidden, top_k, num_experts, num_clients, num_servers, capacity, replicate_every;
    uint32_t num_blocks = 0;
};

void match_the_reference(const std::vector<LayerCase>& cases) {
    for (const LayerCase& test : cases)
        for (const uint32_t dtype : {SY_DTYPE_F8_E4M3, SY_DTYPE_BF16})
            for (const bool echo : {false, true}) {
                World world(test.hidden, test.top_k, dtype, test.num_experts, test.num_clients,
                            test.num_servers, test.capacity, test.replicate_every);
                for (auto& client : world.clients) {
                    client->flags = echo ? SY_DISPATCH_FLAG_CONTACT_ALL : 0;
                    client->dispatch_blocks = client->combine_blocks = test.num_blocks;
                }
                for (auto& server : world.servers) {
                    server->answer_blocks = test.num_blocks;
                    // Without CONTACT_ALL a client may have nothing to say.
                    server->min_ready = 1;
                    server->timeout_ns = echo ? 2'000'000'000 : 20'000'000;
                }
                const std::vector<uint32_t> sizes = {test.capacity, 0u, 1u, test.capacity / 2,
                                                     test.capacity - 1};
                for (const uint32_t num_tokens : sizes) {
                    world.poison();
                    const auto inputs = world.load(num_tokens, num_tokens % 2 == 1);
                    run_layer(world, echo);
                    CHECK_CUDA(cudaStreamSynchronize(world.stream));
                    expect_identity_layer(world, inputs);
                    if (!echo && num_tokens != 0)
                        for (uint32_t s = 0; s < world.servers.size(); ++s)
                            if (from_device(world.servers[s]->lists.batch).num_rows != 0)
                                expect_lists(world, inputs, s);
                }
            }
}

void layers_match_the_reference() {
    if (g_quick)
        match_the_reference(
            {{7168, 8, 64, 2, 2, 4, 3}, {384, 6, 60, 2, 3, 35, 0}, {128, 4, 8, 2, 2, 270, 0, 5}});
    else
        match_the_reference({{7168, 8, 256, 4, 4, 160, 0},
                             {7168, 8, 256, 1, 3, 130, 3},
                             {7168, 8, 256, 3, 1, 33, 0},
                             {2048, 8, 128, 2, 2, 64, 2},
                             {1152, 6, 60, 2, 3, 40, 0},
                             {512, 1, 8, 1, 2, 300, 0},
                             {256, 16, 1024, 2, 4, 50, 5},
                             {128, 2, 4, 1, 1, 9, 0}});
}

// More tokens than one block sends entries for, and few blocks that have many each: code of its own where the hidden
// size is 7168.
void many_tokens_of_few_blocks_match_the_reference() {
    if (g_quick)
        match_the_reference({{7168, 8, 64, 1, 2, 450, 0, 24}});
    else
        match_the_reference({{7168, 8, 256, 2, 2, 600, 0},
                             {7168, 8, 256, 1, 3, 500, 3, 24},
                             {256, 16, 1024, 2, 4, 700, 5, 7}});
}

// Expert outputs are random rows in list order: expert_send must weigh and sum the right ones.
void expert_outputs_are_weighted_and_summed() {
    World world(g_quick ? 512 : 7168, 8, SY_DTYPE_F8_E4M3, 64, 2, 2, 40);
    for (int round = 0; round < 3; ++round) {
        world.poison();
        const auto inputs = world.load(39, false);
        for (auto& client : world.clients)
            client->dispatch(world.stream);
        const uint32_t hidden = world.geometry.hidden, top_k = world.geometry.top_k;
        std::vector<std::vector<float>> sums(inputs.size());
        std::vector<std::vector<uint16_t>> outputs;
        for (uint32_t c = 0; c < inputs.size(); ++c)
            sums[c].assign(size_t{inputs[c].shape.num_tokens} * hidden, 0.0f);
        for (uint32_t s = 0; s < world.servers.size(); ++s) {
            Server& server = *world.servers[s];
            server.recv(world.stream);
            CHECK_CUDA(cudaStreamSynchronize(world.stream));
            expect_lists(world, inputs, s);
            const sy_batch batch = from_device(server.lists.batch);
            std::vector<uint16_t> rows(size_t{batch.num_entries} * hidden);
            reference::Random random(g_seed * 77 + round * 2 + s);
            for (auto& value : rows)
                value = reference::to_bf16(random.unit() * 4 - 2);
            uint16_t* expert_out = device_alloc<uint16_t>(rows.size());
            upload(expert_out, rows.data(), rows.size() * 2);
            server.expert_out = expert_out;
            server.send(world.stream);
            CHECK_CUDA(cudaStreamSynchronize(world.stream));
            CHECK_CUDA(cudaFree(expert_out));
            std::vector<uint32_t> position(size_t{batch.num_rows} * top_k);
            CHECK_CUDA(cudaMemcpy(position.data(), server.lists.row_position, position.size() * 4,
                                  cudaMemcpyDeviceToHost));
            uint32_t row = 0;
            for (uint32_t c = 0; c < inputs.size(); ++c)
                for (uint32_t token = 0; token < inputs[c].shape.num_tokens; ++token) {
                    std::vector<float> part(hidden, 0.0f);
                    bool goes = false;
                    for (uint32_t i = 0; i < top_k; ++i) {
                        if (reference::pick_server(world.placement, token,
                                                   inputs[c].topk_idx[token * top_k + i]) !=
                            static_cast<int>(s))
                            continue;
                        goes = true;
                        const uint16_t* y =
                            &rows[size_t{position[size_t{row} * top_k + i]} * hidden];
                        const float weight = inputs[c].topk_weights[token * top_k + i];
                        for (uint32_t k = 0; k < hidden; ++k) {
                            const float product = reference::from_bf16(y[k]) * weight;
                            part[k] += product;
                        }
                    }
                    if (goes) {
                        ++row;
                        for (uint32_t k = 0; k < hidden; ++k)
                            sums[c][size_t{token} * hidden + k] +=
                                reference::from_bf16(reference::to_bf16(part[k]));
                    }
                }
        }
        for (uint32_t c = 0; c < inputs.size(); ++c) {
            world.clients[c]->combine(world.stream);
            CHECK_CUDA(cudaStreamSynchronize(world.stream));
            std::vector<uint16_t> expected;
            for (const float sum : sums[c])
                expected.push_back(reference::to_bf16(sum));
            expect_layer(world, c, inputs[c], expected);
        }
    }
}

// Two frames of a pair are under way together, and the ring wraps many times.
void two_frames_in_flight_keep_apart() {
    World world(512, 4, SY_DTYPE_F8_E4M3, 16, 2, 2, 24);
    for (auto& client : world.clients)
        client->flags = SY_DISPATCH_FLAG_CONTACT_ALL;
    for (int round = 0; round < 6; ++round) {
        const auto first = world.load(23, false);
        for (auto& client : world.clients)
            client->dispatch(world.stream, 0);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        const auto second = world.load(17, true);
        for (auto& client : world.clients)
            client->dispatch(world.stream, 1);
        for (int frame = 0; frame < 2; ++frame)
            for (auto& server : world.servers)
                server->echo(world.stream);
        for (auto& client : world.clients)
            client->combine(world.stream, 1);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        expect_identity_layer(world, second);
        for (auto& client : world.clients) {
            CHECK_CUDA(cudaMemset(client->out, 0xff, size_t{world.capacity} * 512 * 2));
            client->combine(world.stream, 0);
        }
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        expect_identity_layer(world, first);
    }
}

void a_captured_graph_replays_with_new_inputs() {
    World world(g_quick ? 512 : 7168, 8, SY_DTYPE_F8_E4M3, 256, 2, 2, 32);
    for (auto& client : world.clients)
        client->flags = SY_DISPATCH_FLAG_CONTACT_ALL;
    for (auto& server : world.servers)
        server->min_ready = 2;
    for (const bool pdl : {false, true}) {
        for (auto& client : world.clients)
            client->launch_flags = pdl ? SY_LAUNCH_FLAG_PDL | SY_LAUNCH_FLAG_EARLY : 0;
        for (auto& server : world.servers)
            server->launch_flags = pdl ? SY_LAUNCH_FLAG_PDL | SY_LAUNCH_FLAG_EARLY : 0;
        cudaGraph_t graph;
        cudaGraphExec_t replay;
        CHECK_CUDA(cudaStreamBeginCapture(world.stream, cudaStreamCaptureModeThreadLocal));
        run_layer(world, false);
        CHECK_CUDA(cudaStreamEndCapture(world.stream, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
        for (int round = 0; round < (g_quick ? 2 : 10); ++round) {
            world.poison();
            const auto inputs = world.load(round * 3 % 33, round % 2 == 0);
            CHECK_CUDA(cudaGraphLaunch(replay, world.stream));
            CHECK_CUDA(cudaStreamSynchronize(world.stream));
            expect_identity_layer(world, inputs);
        }
        CHECK_CUDA(cudaGraphExecDestroy(replay));
        CHECK_CUDA(cudaGraphDestroy(graph));
    }
}

// Layers of a client and a server in one stream. Each kernel works beside the one before it.
void kernels_that_go_ahead_keep_the_order() {
    constexpr uint32_t kEarly = SY_LAUNCH_FLAG_PDL | SY_LAUNCH_FLAG_EARLY;
    struct Size {
        uint32_t capacity, combine_blocks;
    };
    // Combine lets the next dispatch start immediately with up to 64 blocks.
    for (const Size size : {Size{1, 0}, {64, 0}, {128, 0}, {128, 24}, {600, 0}})
        for (const bool echo : {false, true}) {
            const uint32_t capacity = size.capacity;
            World world(g_quick ? 512 : 7168, 8, SY_DTYPE_F8_E4M3, 256, 1, 1, capacity);
            Client& client = *world.clients[0];
            Server& server = *world.servers[0];
            client.flags = SY_DISPATCH_FLAG_CONTACT_ALL;
            client.launch_flags = server.launch_flags = kEarly;
            client.combine_flags = server.take_flags = SY_LAUNCH_FLAG_AHEAD;
            client.combine_blocks = size.combine_blocks;
            cudaGraph_t graph;
            cudaGraphExec_t replay;
            CHECK_CUDA(cudaStreamBeginCapture(world.stream, cudaStreamCaptureModeThreadLocal));
            for (uint32_t layer = 0; layer < 4; ++layer)
                run_layer(world, echo, layer % 2);
            CHECK_CUDA(cudaStreamEndCapture(world.stream, &graph));
            CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
            for (uint32_t round = 0; round < (g_quick ? 2 : 6); ++round) {
                world.poison();
                const auto inputs =
                    world.load(capacity - round % 2 * (capacity / 2), round % 2 == 0);
                for (uint32_t i = 0; i < 3; ++i)
                    CHECK_CUDA(cudaGraphLaunch(replay, world.stream));
                CHECK_CUDA(cudaStreamSynchronize(world.stream));
                expect_identity_layer(world, inputs);
            }
            CHECK_CUDA(cudaGraphExecDestroy(replay));
            CHECK_CUDA(cudaGraphDestroy(graph));
        }
}

void only_frames_of_one_layer_are_merged() {
    World world(256, 2, SY_DTYPE_BF16, 8, 3, 1, 16);
    const auto inputs = world.load(16, false);
    for (uint32_t c = 0; c < 3; ++c) {
        world.clients[c]->layer = c == 1 ? 5 : 3;
        world.clients[c]->dispatch(world.stream);
    }
    Server& server = *world.servers[0];
    uint32_t seen = 0;
    for (int batch_idx = 0; batch_idx < 2; ++batch_idx) {
        server.recv(world.stream);
        server.send(world.stream);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        const sy_batch batch = from_device(server.lists.batch);
        CHECK((batch.layer == 3 && batch.clients == 5u) ||
                  (batch.layer == 5 && batch.clients == 2u),
              "layer %u clients %x", batch.layer, batch.clients);
        seen |= batch.clients;
    }
    CHECK(seen == 7, "clients %x", seen);
    server.timeout_ns = 1'000'000;
    server.recv(world.stream);
    server.send(world.stream);
    CHECK_CUDA(cudaStreamSynchronize(world.stream));
    CHECK(from_device(server.lists.batch).clients == 0, "an idle server made a batch");
    for (auto& client : world.clients)
        client->combine(world.stream);
    CHECK_CUDA(cudaStreamSynchronize(world.stream));
    expect_identity_layer(world, inputs);
}

// Every field of a frame is checked; a bad frame is refused, and the other client does not notice.
void bad_frames_are_refused() {
    const auto header_field = [](size_t offset, auto value) {
        return [=](uint8_t* frame, const sy_frame_geometry&) {
            upload(frame + offset, &value, sizeof(value));
        };
    };
    const auto entry = [](uint32_t expert, float weight) {
        return [=](uint8_t* frame, const sy_frame_geometry& geometry) {
            // Some row's entry that applies.
            std::vector<sy_entry> entries(size_t{8} * geometry.top_k);
            CHECK_CUDA(cudaMemcpy(entries.data(), frame + geometry.entries_offset,
                                  entries.size() * 8, cudaMemcpyDeviceToHost));
            for (size_t i = entries.size(); i-- > 0;)
                if (entries[i].expert != SY_NO_EXPERT) {
                    const sy_entry bad = {expert == 0 ? entries[i].expert : expert, weight};
                    upload(frame + geometry.entries_offset + i * 8, &bad, 8);
                    return;
                }
            CHECK(false, "no entry");
        };
    };
    const auto scale = [](float value) {
        return [=](uint8_t* frame, const sy_frame_geometry& geometry) {
            upload(frame + geometry.scales_offset + 20, &value, 4);
        };
    };
    const auto no_entries = [](uint8_t* frame, const sy_frame_geometry& geometry) {
        CHECK_CUDA(cudaMemset(frame + geometry.entries_offset, 0xff, geometry.top_k * 8));
    };
    struct Case {
        const char* name;
        uint32_t code;
        std::function<void(uint8_t*, const sy_frame_geometry&)> tamper;
    };
    std::vector<Case> cases = {
        {"magic", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, magic), 1u)},
        {"version", SY_ERROR_VERSION,
         header_field(offsetof(sy_frame_header, version), uint16_t{9})},
        {"kind", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, kind), uint16_t{2})},
        {"dtype", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, dtype), uint16_t{3})},
        {"response dtype", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, response_dtype), uint16_t{1})},
        {"epoch", SY_ERROR_STALE_EPOCH,
         header_field(offsetof(sy_frame_header, epoch), uint64_t{1})},
        {"client", SY_ERROR_STALE_CHANNEL,
         header_field(offsetof(sy_frame_header, client_id), uint64_t{1})},
        {"generation", SY_ERROR_STALE_CHANNEL,
         header_field(offsetof(sy_frame_header, generation), 9u)},
        {"layer", SY_ERROR_WRONG_LAYER, header_field(offsetof(sy_frame_header, layer), 61u)},
        {"flags", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, flags), 1u)},
        {"num_tokens", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, num_tokens), 3u)},
        {"num_entries", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, num_entries), ~0u)},
        {"hidden", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, hidden), 128u)},
        {"frame_idx", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, frame_idx), 1u)},
        {"num_frames", SY_ERROR_BAD_FRAME, header_field(offsetof(sy_frame_header, num_frames), 2u)},
        {"stride", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, row_stride_bytes), ~0u)},
        {"entries_offset", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, entries_offset), ~0u)},
        {"scales_offset", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, scales_offset), 0u)},
        {"payload_offset", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, payload_offset), ~0u)},
        {"total_bytes", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, total_bytes), ~uint64_t{0})},
        {"reserved", SY_ERROR_BAD_FRAME,
         header_field(offsetof(sy_frame_header, reserved) + 12, 1u)},
        {"expert out of range", SY_ERROR_UNKNOWN_EXPERT, entry(64, 0.5f)},
        {"huge expert", SY_ERROR_UNKNOWN_EXPERT, entry(0xfffffffeu, 0.5f)},
        {"another server's expert", SY_ERROR_NOT_MY_EXPERT, entry(63, 0.5f)},
        {"NaN weight", SY_ERROR_BAD_FRAME, entry(0, NAN)},
        {"infinite weight", SY_ERROR_BAD_FRAME, entry(0, INFINITY)},
        {"row without entries", SY_ERROR_BAD_FRAME, no_entries},
        {"NaN scale", SY_ERROR_BAD_FRAME, scale(NAN)},
        {"infinite scale", SY_ERROR_BAD_FRAME, scale(INFINITY)},
        {"zero scale", SY_ERROR_BAD_FRAME, scale(0.0f)},
        {"negative scale", SY_ERROR_BAD_FRAME, scale(-1.0f)}};
    World world(1024, 4, SY_DTYPE_F8_E4M3, 64, 2, 2, 24);
    for (auto& server : world.servers) {
        to_device(server->min_epoch, uint64_t{7});
        server->min_ready = 2;
    }
    for (const Case& test : cases) {
        world.poison();
        const auto inputs = world.load(24, false);
        for (auto& client : world.clients)
            client->dispatch(world.stream);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        const sy_handle sent = from_device(world.clients[0]->handles[0]);
        Server& victim = *world.servers[0];
        test.tamper(reinterpret_cast<uint8_t*>(victim.clients[0].request) +
                        sent.frame_number[0] % world.num_frames * world.geometry.frame_bytes,
                    world.geometry);
        for (auto& server : world.servers) {
            server->recv(world.stream);
            server->send(world.stream);
        }
        const auto start = std::chrono::steady_clock::now();
        for (auto& client : world.clients)
            client->combine(world.stream);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        const auto elapsed = std::chrono::steady_clock::now() - start;
        CHECK(elapsed < std::chrono::seconds(1), "%s: the refusal was not heard of", test.name);
        const sy_error_word error = from_device(&victim.state->error);
        CHECK(error.tag == SY_TAG_BAD_FRAME && error.peer == 0 && error.observed == test.code &&
                  error.expected == sent.frame_number[0],
              "%s: tag %u peer %u code %" PRIu64 ", expected code %u", test.name, error.tag,
              error.peer, error.observed, test.code);
        const sy_batch batch = from_device(victim.lists.batch);
        CHECK(batch.clients == 2u, "%s: batch of clients %x", test.name, batch.clients);
        const sy_handle handle = from_device(world.clients[0]->handles[0]);
        CHECK(handle.refused == 1 && handle.missing == 1, "%s: refused %x missing %x", test.name,
              handle.refused, handle.missing);
        CHECK(from_device(&world.clients[0]->state->error).tag == SY_TAG_REFUSED, "%s", test.name);
        expect_layer(world, 1, inputs[1],
                     reference::identity_layer(inputs[1], world.placement, 2, true));
        // The tokens of the refused frame are named, and no others.
        std::vector<uint32_t> missing(24);
        CHECK_CUDA(cudaMemcpy(missing.data(), world.clients[0]->token_missing, 24 * 4,
                              cudaMemcpyDeviceToHost));
        for (uint32_t token = 0; token < 24; ++token) {
            bool goes = false;
            for (uint32_t i = 0; i < 4; ++i)
                goes |= reference::pick_server(world.placement, token,
                                               inputs[0].topk_idx[token * 4 + i]) == 0;
            CHECK(missing[token] == (goes ? 1u : 0u), "%s: token %u misses %x", test.name, token,
                  missing[token]);
        }
        to_device(&victim.state->error, sy_error_word{});
        to_device(&world.clients[0]->state->error, sy_error_word{});
    }
    // After all that a good frame passes.
    world.poison();
    const auto inputs = world.load(24, false);
    run_layer(world, false);
    CHECK_CUDA(cudaStreamSynchronize(world.stream));
    expect_identity_layer(world, inputs);
}

void a_silent_server_is_named_within_the_bound() {
    World world(1024, 4, SY_DTYPE_F8_E4M3, 64, 1, 2, 24);
    Client& client = *world.clients[0];
    uint32_t* abort_mask;
    CHECK_CUDA(cudaHostAlloc(&abort_mask, 4, cudaHostAllocMapped));
    CHECK_CUDA(cudaHostGetDevicePointer(const_cast<uint32_t**>(&client.abort_mask), abort_mask, 0));
    for (const bool abort : {false, true}) {
        world.poison();
        const auto inputs = world.load(24, false);
        client.dispatch(world.stream);
        world.servers[1]->recv(world.stream);
        world.servers[1]->send(world.stream);
        *abort_mask = abort ? 1 : 0;
        client.timeout_ns = abort ? 20'000'000'000 : 50'000'000;
        const auto start = std::chrono::steady_clock::now();
        client.combine(world.stream);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        CHECK(abort ? seconds < 5 : seconds >= 0.05, "%s after %.3f s", abort ? "abort" : "timeout",
              seconds);
        const sy_error_word error = from_device(&client.state->error);
        const sy_handle handle = from_device(client.handles[0]);
        CHECK(error.tag == SY_TAG_COMBINE_ROW && error.peer == 0 &&
                  error.reason == (abort ? SY_REASON_ABORT : SY_REASON_TIMEOUT) &&
                  error.expected == handle.frame_number[0],
              "tag %u peer %u reason %u", error.tag, error.peer, error.reason);
        CHECK(handle.missing == 1 && handle.refused == 0, "missing %x", handle.missing);
        to_device(&client.state->error, sy_error_word{});
        // The late answer still lands, and the sum is whole. Parts summed before must be sent
        // again.
        *abort_mask = 0;
        client.timeout_ns = 2'000'000'000;
        world.servers[0]->recv(world.stream);
        world.servers[0]->send(world.stream);
        world.servers[1]->send(world.stream);
        CHECK_CUDA(cudaMemset(client.out, 0xff, size_t{24} * 1024 * 2));
        to_device(&client.handles[0]->missing, 0u);
        client.combine(world.stream);
        CHECK_CUDA(cudaStreamSynchronize(world.stream));
        expect_identity_layer(world, inputs);
        // As by a host that begins anew with the server.
        to_device(&client.state->lost[0], uint64_t{0});
    }
}

void a_missing_replica_is_an_error_and_not_a_wait() {
    World world(256, 2, SY_DTYPE_BF16, 8, 1, 2, 16);
    const auto inputs = world.load(16, false);
    sy_placement placement = world.placement;
    uint32_t expert = 0; // the chosen one
    for (const int32_t chosen : inputs[0].topk_idx)
        expert = chosen >= 0 ? static_cast<uint32_t>(chosen) : expert;
    placement.experts[expert].num_replicas = 0;
    to_device(world.clients[0]->placement, placement);
    run_layer(world, false);
    CHECK_CUDA(cudaStreamSynchronize(world.stream));
    const sy_error_word error = from_device(&world.clients[0]->state->error);
    CHECK(error.tag == SY_TAG_NO_REPLICA && error.observed == expert, "tag %u expert %" PRIu64,
          error.tag, error.observed);
    to_device(&world.clients[0]->state->error, sy_error_word{});
    expect_layer(world, 0, inputs[0], reference::identity_layer(inputs[0], placement, 2, false));
}

void bad_parameters_are_refused_before_a_launch() {
    World world(256, 2, SY_DTYPE_BF16, 8, 1, 1, 16);
    const Client& client = *world.clients[0];
    const auto expect = [&](int code, const std::function<void(sy_dispatch_params&)>& change) {
        sy_dispatch_params params = client.dispatch_params(0);
        change(params);
        const int found = sy_launch_dispatch(&params, world.stream);
        CHECK(found == code, "%s, expected %s", sy_launch_error(found), sy_launch_error(code));
    };
    expect(SY_LAUNCH_VERSION, [](auto& params) { params.version = 99; });
    expect(SY_LAUNCH_HIDDEN, [](auto& params) { params.geometry.hidden = 200; });
    expect(SY_LAUNCH_TOP_K, [](auto& params) { params.geometry.top_k = 17; });
    expect(SY_LAUNCH_DTYPE, [](auto& params) { params.geometry.dtype = SY_DTYPE_F32; });
    expect(SY_LAUNCH_GEOMETRY, [](auto& params) { params.geometry.payload_offset += 128; });
    expect(SY_LAUNCH_TOKENS, [](auto& params) { params.capacity = 17; });
    expect(SY_LAUNCH_NULL, [](auto& params) { params.topk_idx = nullptr; });
    expect(SY_LAUNCH_ALIGNMENT, [](auto& params) {
        params.hidden_states = static_cast<const uint8_t*>(params.hidden_states) + 2;
    });
    expect(SY_LAUNCH_PEERS, [](auto& params) { params.num_servers = 0; });
    expect(SY_LAUNCH_PEERS, [](auto& params) { params.num_servers = 33; });
    expect(SY_LAUNCH_EXPERTS, [](auto& params) { params.num_experts = 1025; });
    expect(SY_LAUNCH_NULL, [](auto& params) { params.servers = nullptr; });
    sy_server_peer server = client.servers[0];
    server.request.path = 99;
    CHECK(sy_check_servers(&server, 1) == SY_LAUNCH_PATH, "a way that is not built in");
    server = client.servers[0];
    server.request.window = 0;
    CHECK(sy_check_servers(&server, 1) == SY_LAUNCH_NULL, "null window");
    server = client.servers[0];
    server.response += 8;
    CHECK(sy_check_servers(&server, 1) == SY_LAUNCH_ALIGNMENT, "response slot");
    sy_combine_params combine = client.combine_params(0);
    combine.timeout_ns = 0;
    CHECK(sy_launch_combine(&combine, world.stream) == SY_LAUNCH_BOUND, "no bound");
    CHECK(sy_launch_combine(nullptr, world.stream) == SY_LAUNCH_NULL, "null");
    sy_expert_recv_params recv = world.servers[0]->recv_params();
    recv.lists.max_rows = 1;
    CHECK(sy_launch_expert_recv(&recv, world.stream) == SY_LAUNCH_TOKENS, "lists too small");
    CHECK_CUDA(cudaStreamSynchronize(world.stream));
}

} // namespace

int main(int argc, char** argv) {
    std::string only;
    for (int i = 1; i < argc; ++i) {
        if (std::string(argv[i]) == "--only" && i + 1 < argc)
            only = argv[++i];
        else if (std::string(argv[i]) == "--quick")
            g_quick = true;
        else if (std::string(argv[i]) == "--seed" && i + 1 < argc)
            g_seed = strtoull(argv[++i], nullptr, 10);
        else
            CHECK(false, "unknown argument %s", argv[i]);
    }
    printf("seed %" PRIu64 "\n", g_seed);
    const std::pair<const char*, void (*)()> tests[] = {
        {"bad_parameters_are_refused_before_a_launch", bad_parameters_are_refused_before_a_launch},
        {"bytes_go_to_a_slot_and_back", [] { bytes_go_to_a_slot_and_back(g_seed); }},
        {"layers_match_the_reference", layers_match_the_reference},
        {"many_tokens_of_few_blocks_match_the_reference",
         many_tokens_of_few_blocks_match_the_reference},
        {"expert_outputs_are_weighted_and_summed", expert_outputs_are_weighted_and_summed},
        {"two_frames_in_flight_keep_apart", two_frames_in_flight_keep_apart},
        {"a_captured_graph_replays_with_new_inputs", a_captured_graph_replays_with_new_inputs},
        {"kernels_that_go_ahead_keep_the_order", kernels_that_go_ahead_keep_the_order},
        {"only_frames_of_one_layer_are_merged", only_frames_of_one_layer_are_merged},
        {"bad_frames_are_refused", bad_frames_are_refused},
        {"a_silent_server_is_named_within_the_bound", a_silent_server_is_named_within_the_bound},
        {"a_missing_replica_is_an_error_and_not_a_wait",
         a_missing_replica_is_an_error_and_not_a_wait}};
    for (const auto& [name, test] : tests) {
        if (!only.empty() && only != name)
            continue;
        const auto start = std::chrono::steady_clock::now();
        test();
        printf("ok %-48s %.2f s\n", name,
               std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        fflush(stdout);
    }
    printf("all passed\n");
}
