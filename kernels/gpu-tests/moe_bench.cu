// dispatch + combine between processes, one per GPU: checked bit for bit against the host reference, then
// timed by the GPU's clock over replayed graphs. Prints one JSON line per case. With one rank a client and a
// server are one process, and nothing goes over a link.
//
//   moe_bench [--ranks N] [--set check|table|sizes|least|lists|short|sms|few|partition|tune]
//             [--shape 4r|2to2|...] [--limit SECONDS] [--seed N]
//
// A layer's time is the distance between the starts of two consecutive dispatches in one graph. A
// case's time is the median over all of them, 200 at least, of the slowest client. The requested
// choice of a case is -1 and 0 blocks where shape and size choose; "started" is the actual choice,
// 0 blocks where the launcher chooses. "sms" is the number of multiprocessors that all kernels
// share, 0 where they have the whole GPU.
#include <map>
#include <string>

#include "moe_cases.hpp"
#include "partition.hpp"
#include "rank.hpp"

namespace {

constexpr uint32_t kHidden = 7168, kTopK = 8, kExperts = 256, kMostTokens = 4096, kMostLayers = 8;
constexpr uint32_t kTraceLen = 4096;

struct Result {
    double median_us, p10_us, p90_us, mean_us;
    uint64_t num_samples; // of a client
    uint64_t num_wrong;
    uint64_t bytes_sent;
    uint64_t request_row_bytes, response_row_bytes;
    uint32_t rows[kMostRanks]; // of this client, by server
    uint32_t error_tag, error_peer;
};

__global__ void count_wrong(const uint4* out, const uint4* expected, size_t count,
                            uint64_t* num_wrong) {
    uint64_t wrong = 0;
    for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
         i += size_t{gridDim.x} * blockDim.x) {
        const uint4 a = out[i], b = expected[i];
        wrong += a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }
    if (wrong != 0)
        atomicAdd(reinterpret_cast<unsigned long long*>(num_wrong), wrong);
}

// Work of the host that would take most of a run's time: kept for the cases that follow.
struct InputCache {
    std::vector<reference::Input> inputs;
    uint32_t num_tokens = 0;
    bool zipf = false;
    // Of these inputs, a server count and a type.
    std::vector<std::vector<uint16_t>> expected;
    uint32_t num_servers = 0;
    bool fp8 = false;
};

Result run_case(Comrade& comrade, Slots& slots, Buffers& buffers, const Case& test, uint64_t seed,
                InputCache& cache, cudaStream_t stream) {
    const Topology& topology = test.topology;
    const uint32_t num_servers = topology.servers.size();
    const uint32_t num_layers = test.num_tokens > 512 ? 4 : kMostLayers;
    sy_frame_geometry geometry;
    CHECK_LAUNCH(sy_make_geometry(kHidden, kTopK, test.fp8 ? SY_DTYPE_F8_E4M3 : SY_DTYPE_BF16,
                                  test.num_tokens, 2, &geometry));
    const sy_placement placement = reference::make_placement(kExperts, num_servers, 0, 1);
    Result result = {};

    const bool is_client = index_of(topology.clients, comrade.rank) >= 0;
    if (is_client) {
        if (cache.num_tokens != test.num_tokens || cache.zipf != test.zipf ||
            cache.inputs.empty()) {
            cache.inputs.clear();
            for (uint32_t i = 0; i < kNumInputs; ++i)
                cache.inputs.push_back(reference::make_input(
                    {test.num_tokens, kHidden, kTopK, kExperts},
                    seed * 4096 + test.num_tokens * 16 + comrade.rank * kNumInputs + i, test.zipf,
                    false));
            cache.num_tokens = test.num_tokens;
            cache.zipf = test.zipf;
            cache.expected.clear();
        }
        if (cache.num_servers != num_servers || cache.fp8 != test.fp8 || cache.expected.empty()) {
            cache.expected.clear();
            for (const reference::Input& input : cache.inputs)
                cache.expected.push_back(
                    reference::identity_layer(input, placement, num_servers, test.fp8));
            cache.num_servers = num_servers;
            cache.fp8 = test.fp8;
        }
        for (uint32_t i = 0; i < kNumInputs; ++i) {
            const reference::Input& input = cache.inputs[i];
            upload(buffers.hidden_states[i], input.hidden_states.data(),
                   input.hidden_states.size() * 2);
            upload(buffers.topk_idx[i], input.topk_idx.data(), input.topk_idx.size() * 4);
            upload(buffers.topk_weights[i], input.topk_weights.data(),
                   input.topk_weights.size() * 4);
            upload(buffers.expected[i], cache.expected[i].data(), cache.expected[i].size() * 2);
        }
        to_device(buffers.num_tokens, test.num_tokens);
        const auto rows = reference::rows_per_server(cache.inputs[0], placement, num_servers);
        // A request's row has a flag; the words of an answer show by themselves that they have
        // arrived.
        result.request_row_bytes = geometry.row_stride_bytes + geometry.scales_per_row * 4 +
                                   kTopK * sizeof(sy_entry) + sizeof(uint64_t);
        result.response_row_bytes = geometry.response_stride_bytes;
        for (uint32_t s = 0; s < num_servers; ++s) {
            result.bytes_sent += rows[s] * (result.request_row_bytes + result.response_row_bytes);
            result.rows[s] = rows[s];
        }
        CHECK_CUDA(
            cudaMemset(buffers.outs, 0xff, size_t{num_layers} * test.num_tokens * kHidden * 2));
    }
    to_device(buffers.num_wrong, uint64_t{0});
    Roles roles =
        make_roles(comrade, topology, slots, buffers, geometry, test.num_tokens, placement);
    if (roles.client != nullptr) {
        roles.client->flags = SY_DISPATCH_FLAG_CONTACT_ALL;
        roles.client->launch_flags = pdl_flags(test);
        roles.client->trace = buffers.trace;
        roles.client->trace_len = kTraceLen;
        roles.client->dispatch_blocks = dispatch_blocks_of(test);
        roles.client->combine_blocks = combine_blocks_of(test);
        roles.client->timeout_ns = 3'000'000'000;
    }
    if (roles.server != nullptr) {
        roles.server->launch_flags = pdl_flags(test);
        roles.server->answer_blocks = answer_blocks_of(test);
        roles.server->timeout_ns = 3'000'000'000;
    }
    if (roles.client != nullptr && roles.server != nullptr) {
        roles.client->combine_flags = pdl_of(test) >= 3 ? SY_LAUNCH_FLAG_AHEAD : 0;
        roles.server->take_flags = pdl_of(test) >= 4 ? SY_LAUNCH_FLAG_AHEAD : 0;
    }

    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t layer = 0; layer < num_layers; ++layer) {
        if (roles.client != nullptr) {
            Client& client = *roles.client;
            const uint32_t input = layer % kNumInputs;
            client.hidden_states = buffers.hidden_states[input];
            client.topk_idx = buffers.topk_idx[input];
            client.topk_weights = buffers.topk_weights[input];
            client.out = buffers.outs + size_t{layer} * test.num_tokens * kHidden;
            client.dispatch(stream, layer & 1);
        }
        if (roles.server != nullptr) {
            if (std::string(test.server) == "echo") {
                roles.server->echo(stream);
            } else {
                roles.server->recv(stream);
                roles.server->send(stream);
            }
        }
        if (roles.client != nullptr)
            roles.client->combine(stream, layer & 1);
    }
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    comrade.barrier();

    const auto check = [&] {
        if (roles.client == nullptr)
            return;
        for (uint32_t layer = 0; layer < num_layers; ++layer) {
            const size_t values = size_t{test.num_tokens} * kHidden;
            count_wrong<<<264, 256, 0, stream>>>(
                reinterpret_cast<const uint4*>(buffers.outs + layer * values),
                reinterpret_cast<const uint4*>(buffers.expected[layer % kNumInputs]), values / 8,
                buffers.num_wrong);
            CHECK_CUDA(cudaGetLastError());
        }
        CHECK_CUDA(cudaMemsetAsync(buffers.outs, 0xff,
                                   size_t{num_layers} * test.num_tokens * kHidden * 2, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
    };
    CHECK_CUDA(cudaGraphLaunch(replay, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    check();
    // A case that went wrong is not timed: every expired wait would cost its bound.
    uint32_t tag = roles.client != nullptr ? from_device(&buffers.client_state->error.tag) : 0;
    if (roles.server != nullptr)
        tag |= from_device(&buffers.server_state->error.tag);
    for (const auto& bytes : comrade.gather(&tag, sizeof(tag))) {
        memcpy(&tag, bytes.data(), sizeof(tag));
        result.error_tag = std::max(result.error_tag, tag);
    }
    if (result.error_tag != SY_TAG_NONE) {
        CHECK_CUDA(cudaGraphExecDestroy(replay));
        CHECK_CUDA(cudaGraphDestroy(graph));
        return result;
    }
    for (int i = 0; i < 3; ++i)
        CHECK_CUDA(cudaGraphLaunch(replay, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    comrade.barrier();
    const uint64_t first =
        roles.client != nullptr ? from_device(&buffers.client_state->sequence) : 0;
    const uint32_t num_replays = std::min(test.num_replays, kTraceLen / num_layers);
    const double start = now_s();
    for (uint32_t i = 0; i < num_replays; ++i)
        CHECK_CUDA(cudaGraphLaunch(replay, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    result.mean_us = (now_s() - start) * 1e6 / (num_replays * num_layers);
    check();
    CHECK_CUDA(cudaGraphExecDestroy(replay));
    CHECK_CUDA(cudaGraphDestroy(graph));
    if (roles.client != nullptr) {
        std::vector<uint64_t> trace(kTraceLen * SY_CALL_STAMPS);
        CHECK_CUDA(
            cudaMemcpy(trace.data(), buffers.trace, trace.size() * 8, cudaMemcpyDeviceToHost));
        const auto began_ns = [&](uint64_t sequence) {
            return trace[sequence % kTraceLen * SY_CALL_STAMPS + SY_CALL_DISPATCH_BEGIN];
        };
        std::vector<double> layers_us;
        for (uint32_t i = 0; i + 1 < num_replays * num_layers; ++i)
            if (i % num_layers != num_layers - 1)
                layers_us.push_back(
                    static_cast<double>(began_ns(first + i + 1) - began_ns(first + i)) * 1e-3);
        std::sort(layers_us.begin(), layers_us.end());
        result.num_samples = layers_us.size();
        result.median_us = layers_us[layers_us.size() / 2];
        result.p10_us = layers_us[layers_us.size() / 10];
        result.p90_us = layers_us[layers_us.size() * 9 / 10];
        result.num_wrong = from_device(buffers.num_wrong);
        const sy_error_word error = from_device(&buffers.client_state->error);
        result.error_tag = error.tag;
        result.error_peer = error.peer;
    }
    if (roles.server != nullptr) {
        const sy_error_word error = from_device(&buffers.server_state->error);
        if (error.tag != SY_TAG_NONE) {
            result.error_tag = error.tag;
            result.error_peer = error.peer;
        }
    }
    return result;
}

// Bytes over the busiest direction of a GPU's link, requests and then answers: no layer can be faster.
uint64_t link_bytes(const Topology& topology, const std::vector<Result>& results) {
    uint64_t out[kMostRanks] = {}, in[kMostRanks] = {}, out_back[kMostRanks] = {},
             in_back[kMostRanks] = {};
    for (const uint32_t client : topology.clients)
        for (size_t s = 0; s < topology.servers.size(); ++s) {
            const uint32_t server = topology.servers[s];
            if (server == client)
                continue;
            const uint64_t request = results[client].rows[s] * results[client].request_row_bytes;
            const uint64_t response = results[client].rows[s] * results[client].response_row_bytes;
            out[client] += request, in[server] += request;
            out_back[server] += response, in_back[client] += response;
        }
    uint64_t most = 0, most_back = 0;
    for (uint32_t rank = 0; rank < kMostRanks; ++rank) {
        most = std::max({most, out[rank], in[rank]});
        most_back = std::max({most_back, out_back[rank], in_back[rank]});
    }
    return most + most_back;
}

int run_rank(Comrade& comrade, const std::string& set, const std::string& shape, uint64_t seed) {
    select_gpu(comrade.rank);
    sy_frame_geometry bf16;
    CHECK_LAUNCH(sy_make_geometry(kHidden, kTopK, SY_DTYPE_BF16, kMostTokens, 2, &bf16));
    Slots slots(comrade, bf16.slot_bytes, bf16.response_slot_bytes);
    Buffers buffers(kMostTokens, kHidden, kTopK, kMostLayers, kTraceLen);
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int device;
    CHECK_CUDA(cudaGetDevice(&device));
    std::map<uint32_t, Partition> partitions;
    InputCache cache;
    int num_bad = 0;
    for (const Case& test : cases_of(set, shape, comrade.num_ranks)) {
        cudaStream_t used = stream;
        if (test.num_sms != 0)
            used =
                partitions.try_emplace(test.num_sms, device, test.num_sms).first->second.stream();
        const Result mine = run_case(comrade, slots, buffers, test, seed, cache, used);
        const auto all = comrade.gather(&mine, sizeof(mine));
        Result worst = {};
        std::vector<Result> results(comrade.num_ranks);
        for (uint32_t rank = 0; rank < comrade.num_ranks; ++rank) {
            Result one;
            memcpy(&one, all[rank].data(), sizeof(one));
            results[rank] = one;
            worst.median_us = std::max(worst.median_us, one.median_us);
            worst.p10_us = std::max(worst.p10_us, one.p10_us);
            worst.p90_us = std::max(worst.p90_us, one.p90_us);
            worst.mean_us = std::max(worst.mean_us, one.mean_us);
            worst.num_samples = std::max(worst.num_samples, one.num_samples);
            worst.num_wrong += one.num_wrong;
            worst.bytes_sent += one.bytes_sent;
            if (one.error_tag != SY_TAG_NONE)
                worst.error_tag = one.error_tag, worst.error_peer = one.error_peer;
        }
        const bool is_bad = worst.num_wrong != 0 || worst.error_tag != SY_TAG_NONE;
        num_bad += is_bad;
        if (comrade.rank == 0) {
            printf(
                "{\"bench\":\"moe\",\"shape\":\"%s\",\"tokens\":%u,\"dtype\":\"%s\",\"routing\":\"%s\","
                "\"server\":\"%s\",\"pdl\":%d,\"blocks\":[%u,%u,%u],"
                "\"started\":{\"pdl\":%d,\"blocks\":[%u,%u,%u]},\"sms\":%u,"
                "\"samples\":%" PRIu64
                ",\"median_us\":%.2f,\"p10_us\":%.2f,\"p90_us\":%.2f,\"mean_us\":%.2f,"
                "\"bytes\":%" PRIu64 ",\"link_bytes\":%" PRIu64 ",\"wrong\":%" PRIu64
                ",\"error\":[%u,%u]}\n",
                test.topology.name, test.num_tokens, test.fp8 ? "fp8" : "bf16",
                test.zipf ? "zipf" : "uniform", test.server, test.pdl, test.dispatch_blocks,
                test.answer_blocks, test.combine_blocks, pdl_of(test), dispatch_blocks_of(test),
                answer_blocks_of(test), combine_blocks_of(test), test.num_sms,
                worst.num_samples, worst.median_us, worst.p10_us, worst.p90_us, worst.mean_us,
                worst.bytes_sent, link_bytes(test.topology, results), worst.num_wrong,
                worst.error_tag, worst.error_peer);
            fflush(stdout);
        }
        if (num_bad > 3)
            break; // all ranks see the same counts and stop together
    }
    return num_bad == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
    uint32_t num_ranks = 4;
    uint64_t seed = 1;
    double limit_s = 300;
    std::string set = "check", shape;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        if (name == "--ranks")
            num_ranks = static_cast<uint32_t>(atoi(argv[i + 1]));
        else if (name == "--set")
            set = argv[i + 1];
        else if (name == "--shape")
            shape = argv[i + 1];
        else if (name == "--limit")
            limit_s = atof(argv[i + 1]);
        else if (name == "--seed")
            seed = strtoull(argv[i + 1], nullptr, 10);
        else
            CHECK(false, "unknown argument %s", argv[i]);
    }
    CHECK(num_ranks == 1 || num_ranks == 2 || num_ranks == 4, "--ranks %u: expected 1, 2 or 4",
          num_ranks);
    const int code = run_ranks(num_ranks, limit_s, -1, [&](Comrade& comrade) {
        return run_rank(comrade, set, shape, seed);
    });
    fprintf(stderr, "moe_bench --set %s: %s\n", set.c_str(),
            code == 0     ? "all right"
            : code == 124 ? "time is up"
                          : "FAILED");
    return code;
}
