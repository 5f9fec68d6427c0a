// Work requests that kernels post, executed by the NIC kernel and by copy engines: every request
// once and in order, wraps, back-pressure, errors and their consequences, lost doorbells, dead
// peers, disorder, NICs of two processes, and whole layers, bit for bit as over stores. Also queues
// of one owner, with a doorbell record and without, and the calls of links.
//
//   softnic_test [--seed N] [--only NAME]
//
// Clients and servers are spread over the GPUs that there are, two of each on every host: on four GPUs with
// one for each, on two with a client and a server on each, on one all together.
// `--only processes`, which needs two GPUs, and `--only process_layers`, for which one is enough, are included by
// nothing else.
#include <algorithm>
#include <cinttypes>
#include <string>

#include "softnic_faults.hpp"
#include "softnic_layers.hpp"
#include "softnic_links.hpp"
#include "softnic_owner.hpp"
#include "softnic_receives.hpp"
#include "softnic_rig.hpp"

namespace {

// Three wraps of the 16-bit counters by many warps on one queue: every request once, the last word of each
// kind in its place.
void wrap(const Backend& backend, const QueueSizes& sizes, int num_gpus) {
    Rig rig(backend, sizes, num_gpus);
    rig.begin();
    const uint32_t num_warps = 8, num_posts = 3 * 65536 / 32 / num_warps + 3;
    const double start_s = now_s();
    const auto statuses = rig.post(Job::kAdds, num_warps, num_posts);
    const double us = (now_s() - start_s) * 1e6;
    const softnic::Counts counts = rig.nic.stop();
    rig.expect_clean(counts);
    rig.expect_all(statuses, SY_MLX5_OK);
    const uint64_t expected = uint64_t{num_warps} * num_posts * 32;
    CHECK(counts.num_requests == expected, "%" PRIu64 " requests, expected %" PRIu64,
          counts.num_requests, expected);
    for (const uint64_t sum : rig.words(kWordAt, num_warps))
        CHECK(sum == num_posts, "counter %" PRIu64 ", expected %u", sum, num_posts);
    for (const uint64_t word : rig.words(kWordAt + num_warps * 8, num_warps * 31))
        CHECK(word == num_posts, "word %" PRIu64 ", expected %u", word, num_posts);
    printf("{\"test\":\"wraps\",\"nic\":\"%s\",\"queues\":\"%s\",\"collapsed\":%d,\"one_block\":%d,"
           "\"depth\":%u,\"requests\":%" PRIu64 ",\"us_per_request\":%.3f}\n",
           backend.name(), name_of(backend.where), sizes.is_collapsed, sizes.is_of_one_block,
           sizes.sq_depth, counts.num_requests, us / static_cast<double>(expected));
}

void wraps(int num_gpus) {
    for (const Backend& backend : kBackends)
        for (const bool is_collapsed : {true, false})
            for (const bool is_of_one_block : {false, true})
                for (const uint32_t depth : {128u, 1024u, 32768u}) {
                    // The depth is the same to warps of one block.
                    if (depth != 1024 && is_of_one_block)
                        continue;
                    QueueSizes sizes;
                    sizes.sq_depth = depth;
                    sizes.is_collapsed = is_collapsed;
                    sizes.is_of_one_block = is_of_one_block;
                    wrap(backend, sizes, num_gpus);
                }
}

// Immediate data reaches the peer's ring in order, behind the written bytes, and a peer without a
// receive is an error.
void immediate(int num_gpus) {
    for (const Backend& backend : kBackends) {
        constexpr uint32_t kNumReceives = 20;
        QueueSizes sizes;
        sizes.sq_depth = 128;
        sizes.is_collapsed = false;
        Rig rig(backend, sizes, num_gpus);
        CHECK_CUDA(cudaSetDevice(0));
        SendQueue peer(backend.where, sizes, 0x61, 0);
        rig.nic.set_receiver(rig.number, peer);
        // As the peer's host does when it posts receives.
        peer.store_word(peer.handle.dbrec, __builtin_bswap32(kNumReceives));
        rig.begin();
        const auto statuses = rig.post(Job::kImmediate, 1, kNumReceives, 4104);
        const auto refused = rig.post(Job::kImmediate, 1, 1, 4104);
        rig.expect_clean(rig.nic.stop());
        rig.expect_all(statuses, SY_MLX5_OK);
        rig.expect_all(refused, SY_MLX5_COMPLETION);
        const uint32_t syndrome = SY_MLX5_ERROR_SYNDROME(rig.queue.state().error);
        CHECK(syndrome == SY_MLX5_SYNDROME_RNR_EXCEEDED, "syndrome %02x", syndrome);
        for (uint32_t i = 0; i < kNumReceives; ++i) {
            uint32_t words[16];
            peer.load_bytes(peer.handle.cq + i * SY_MLX5_CQE_BYTES, words, sizeof(words));
            // Every other one carries no bytes.
            const uint32_t num_bytes = i % 2 == 0 ? 4104 : 0;
            CHECK(__builtin_bswap32(words[9]) == 1000 + i &&
                      __builtin_bswap32(words[11]) == num_bytes &&
                      __builtin_bswap32(words[14]) == 0x61 &&
                      words[15] == (SY_MLX5_CQE_RESP_WRITE_IMM << 28 | i << 8),
                  "completion %u: %08x %08x %08x %08x", i, words[9], words[11], words[14],
                  words[15]);
        }
        const auto found = rig.words(0, 4104 / 8);
        for (size_t i = 0; i < found.size(); ++i)
            CHECK(found[i] == g_seed * (i + 1), "word %zu was written wrong", i);
        printf("{\"test\":\"immediate\",\"nic\":\"%s\",\"queues\":\"%s\",\"receives\":%u}\n",
               backend.name(), name_of(backend.where), kNumReceives);
    }
}

// The flag is never seen before the payload, and everything arrives; gets bring it back.
void puts_flags_and_gets(int num_gpus) {
    for (const Backend& backend : kBackends)
        for (const uint32_t num_bytes : {64u, 4104u, 14336u, 1u << 20}) {
            Rig rig(backend, QueueSizes{}, num_gpus);
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            uint32_t* num_wrong = device_alloc<uint32_t>(1);
            cudaStream_t watcher;
            CHECK_CUDA(cudaStreamCreateWithFlags(&watcher, cudaStreamNonBlocking));
            CHECK_CUDA(cudaSetDevice(0));
            rig.begin();
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            watch_kernel<<<1, 256, 0, watcher>>>(reinterpret_cast<uint64_t*>(rig.target + kWordAt),
                                                 reinterpret_cast<uint64_t*>(rig.target),
                                                 num_bytes / 8, 50, g_seed, 5'000'000'000,
                                                 num_wrong);
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaSetDevice(0));
            const auto statuses = rig.post(Job::kPutFlags, 1, 50, num_bytes);
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            CHECK_CUDA(cudaStreamSynchronize(watcher));
            const uint32_t wrong = from_device(num_wrong);
            CHECK_CUDA(cudaSetDevice(0));
            const auto gets = rig.post(Job::kGets, 1, 5, num_bytes);
            const auto fields = rig.post(Job::kFields, 4, 25);
            const softnic::Counts counts = rig.nic.stop();
            rig.expect_clean(counts);
            rig.expect_all(statuses, SY_MLX5_OK);
            rig.expect_all(gets, SY_MLX5_OK);
            rig.expect_all(fields, SY_MLX5_OK);
            for (uint32_t field = 0; field < 4; ++field) {
                const uint64_t sum = rig.words(kFieldsAt, 1)[0] >> field * 16 & 0xffff;
                const uint64_t expected = 100 * (kFieldAdds >> field * 16 & 0xffff) & 0xffff;
                CHECK(sum == expected, "field %u is %" PRIu64 ", expected %" PRIu64, field, sum,
                      expected);
            }
            CHECK(wrong == 0, "%u words were wrong behind their flag", wrong);
            std::vector<uint64_t> back(num_bytes / 8);
            CHECK_CUDA(
                cudaMemcpy(back.data(), rig.source + kWordAt, num_bytes, cudaMemcpyDeviceToHost));
            for (size_t i = 0; i < back.size(); ++i)
                CHECK(back[i] == g_seed * (i + 1), "word %zu was got wrong", i);
            // 50 adds of 64 bits and 5 of 32 to the same word.
            CHECK(rig.words(kWordAt, 1)[0] == 55, "counter %" PRIu64, rig.words(kWordAt, 1)[0]);
            CHECK_CUDA(cudaStreamDestroy(watcher));
            printf("{\"test\":\"puts\",\"nic\":\"%s\",\"queues\":\"%s\",\"bytes\":%u,"
                   "\"words_wrong_behind_flags\":%u}\n",
                   backend.name(), name_of(backend.where), num_bytes, wrong);
        }
}

// Kinds of failures and every syndrome are reported as such, with ordinary and with collapsed
// completions, and after a reset the queue works.
void errors(int num_gpus) {
    struct Case {
        Job job;
        uint32_t syndrome;
        bool is_injected;
    };
    std::vector<Case> cases = {{Job::kBadRkey, SY_MLX5_SYNDROME_REMOTE_ACCESS, false},
                               {Job::kBadLkey, SY_MLX5_SYNDROME_LOCAL_PROTECTION, false},
                               {Job::kBadRange, SY_MLX5_SYNDROME_REMOTE_ACCESS, false},
                               {Job::kNoRight, SY_MLX5_SYNDROME_REMOTE_ACCESS, false},
                               {Job::kMisaligned, SY_MLX5_SYNDROME_REMOTE_INVALID, false}};
    for (const uint32_t syndrome :
         {SY_MLX5_SYNDROME_LOCAL_LENGTH, SY_MLX5_SYNDROME_LOCAL_QP_OP,
          SY_MLX5_SYNDROME_LOCAL_PROTECTION, SY_MLX5_SYNDROME_FLUSHED, SY_MLX5_SYNDROME_MW_BIND,
          SY_MLX5_SYNDROME_BAD_RESPONSE, SY_MLX5_SYNDROME_LOCAL_ACCESS,
          SY_MLX5_SYNDROME_REMOTE_INVALID, SY_MLX5_SYNDROME_REMOTE_ACCESS,
          SY_MLX5_SYNDROME_REMOTE_OP, SY_MLX5_SYNDROME_RETRY_EXCEEDED,
          SY_MLX5_SYNDROME_RNR_EXCEEDED, SY_MLX5_SYNDROME_REMOTE_ABORTED})
        cases.push_back({Job::kAdds, syndrome, true});
    for (const Backend& backend : kBackends)
        for (const bool is_collapsed : {false, true}) {
            QueueSizes sizes;
            sizes.is_collapsed = is_collapsed;
            Rig rig(backend, sizes, num_gpus);
            // Collapsed completions keep the cause only of a request that none follows: flushes come over it.
            const uint32_t num_posts = is_collapsed ? 1 : 4, victim = is_collapsed ? 31 : 40;
            for (const Case& test : cases) {
                rig.clear();
                rig.nic.fail(rig.number, victim, test.is_injected ? test.syndrome : 0);
                rig.begin();
                const auto statuses = rig.post(test.job, 1, num_posts);
                rig.nic.stop();
                rig.expect_all(statuses, SY_MLX5_COMPLETION);
                const uint64_t word = rig.queue.state().error;
                const sy_error_word error = from_device(rig.error);
                CHECK(SY_MLX5_ERROR_SYNDROME(word) == test.syndrome &&
                          SY_MLX5_ERROR_COUNTER(word) == (test.is_injected ? victim : 0) &&
                          error.tag == SY_TAG_MLX5_COMPLETION && error.peer == 5 &&
                          error.observed == word,
                      "syndrome %02x of request %u, expected %02x; tag %u",
                      SY_MLX5_ERROR_SYNDROME(word), SY_MLX5_ERROR_COUNTER(word), test.syndrome,
                      error.tag);
                rig.nic.fail(rig.number, 0, 0);
                rig.clear();
                rig.begin();
                const auto after = rig.post(Job::kAdds, 2, 10);
                rig.expect_clean(rig.nic.stop());
                rig.expect_all(after, SY_MLX5_OK);
            }
            printf("{\"test\":\"errors\",\"nic\":\"%s\",\"queues\":\"%s\",\"collapsed\":%d,"
                   "\"ways_to_fail\":%zu}\n",
                   backend.name(), name_of(backend.where), is_collapsed, cases.size());
        }
}

struct Cast {
    std::vector<int> clients, servers;
    std::string name;
};

// Placement of ranks on GPUs. A GPU's kernels run in order, all dispatches before the first that
// waits for them, so that none waits for one that stands behind it.
std::vector<Cast> casts(int num_gpus) {
    if (num_gpus >= 4)
        return {{{0, 1}, {2, 3}, "2to2"}, {{0}, {1, 2, 3}, "1to3"}};
    if (num_gpus >= 2)
        return {{{0}, {1}, "1to1"}, {{0, 1}, {0, 1}, "2to2 on two GPUs"}};
    return {{{0, 0}, {0, 0}, "2to2 on one GPU"}};
}

std::vector<reference::Input> load(NicWorld& world, uint32_t num_tokens, uint64_t seed) {
    std::vector<reference::Input> inputs;
    for (uint32_t c = 0; c < world.clients.size(); ++c) {
        CHECK_CUDA(cudaSetDevice(world.client_gpus[c]));
        inputs.push_back(reference::make_input(
            {num_tokens, world.geometry.hidden, world.geometry.top_k, world.placement.num_experts},
            seed * 64 + c, false, true));
        world.clients[c]->load(inputs[c]);
    }
    return inputs;
}

// Layers over the NICs are those over stores, bit for bit.
void layers(int num_gpus) {
    for (const Cast& cast : casts(num_gpus))
        for (const uint32_t dtype : {SY_DTYPE_F8_E4M3, SY_DTYPE_BF16})
            for (const Backend& backend : kBackends) {
                sy_frame_geometry geometry;
                CHECK_LAUNCH(sy_make_geometry(7168, 8, dtype, 128, 2, &geometry));
                WorldSizes sizes;
                sizes.where = backend.where;
                sizes.has_copy_engines = backend.has_copy_engines;
                NicWorld world(geometry, 64, cast.clients, cast.servers, sizes);
                for (const bool echoes : {false, true}) {
                    uint64_t num_requests = 0;
                    double us[2] = {0, 0};
                    std::vector<std::vector<uint16_t>> direct;
                    // Copies between GPUs that a host starts one by one take long.
                    const uint32_t num_rounds = backend.has_copy_engines ? 2 : 5;
                    const uint32_t num_layers = backend.has_copy_engines ? 1 : 4;
                    for (uint32_t round = 0; round < num_rounds; ++round) {
                        const uint32_t num_tokens = round == 1 ? 1 : round == 2 ? 37 : 128;
                        const auto inputs = load(world, num_tokens, g_seed * 100 + round);
                        // Stores by the kernels for any path, too: they must run once before the
                        // NIC does.
                        world.connect(false);
                        for (auto& client : world.clients)
                            client->launch_flags = round % 2 == 0 ? SY_LAUNCH_FLAG_ANY_PATH : 0;
                        for (auto& server : world.servers)
                            server->launch_flags = round % 2 == 0 ? SY_LAUNCH_FLAG_ANY_PATH : 0;
                        for (int i = 0; i < 2; ++i) {
                            const double start_s = now_s();
                            world.layer(echoes);
                            world.wait();
                            us[0] = (now_s() - start_s) * 1e6;
                        }
                        world.expect_no_errors();
                        direct.clear();
                        for (uint32_t c = 0; c < world.clients.size(); ++c) {
                            direct.push_back(world.out(c));
                            CHECK_CUDA(cudaSetDevice(world.client_gpus[c]));
                            world.clients[c]->load(inputs[c]);
                        }
                        world.connect(true);
                        world.start_nics(round == 0 && !echoes);
                        for (uint32_t i = 0; i < num_layers; ++i) {
                            const double start_s = now_s();
                            world.layer(echoes);
                            world.wait();
                            us[1] = (now_s() - start_s) * 1e6;
                        }
                        num_requests += world.stop_nics();
                        world.expect_no_errors();
                        for (uint32_t c = 0; c < world.clients.size(); ++c) {
                            const auto found = world.out(c);
                            const auto expected = reference::identity_layer(
                                inputs[c], world.placement, world.servers.size(),
                                dtype == SY_DTYPE_F8_E4M3);
                            CHECK(found == direct[c],
                                  "client %u differs from its layer over stores", c);
                            CHECK(memcmp(found.data(), expected.data(), expected.size() * 2) == 0,
                                  "client %u differs from the reference", c);
                        }
                    }
                    printf("{\"test\":\"layers\",\"shape\":\"%s\",\"dtype\":\"%s\",\"nic\":\"%s\","
                           "\"queues\":\"%s\",\"server\":\"%s\",\"requests\":%" PRIu64
                           ",\"us_over_stores\":%.1f,\"us_over_nic\":%.1f}\n",
                           cast.name.c_str(), dtype == SY_DTYPE_BF16 ? "bf16" : "fp8",
                           backend.name(), name_of(backend.where), echoes ? "echo" : "lists",
                           num_requests, us[0], us[1]);
                    fflush(stdout);
                }
            }
}

// A queue fails in the middle of a layer, or its NIC stops. The client ends its wait immediately or
// within the bound, the error word has the cause, and a replica takes the tokens.
void failover(int num_gpus) {
    const std::vector<int> servers = num_gpus >= 4   ? std::vector<int>{2, 3}
                                     : num_gpus >= 2 ? std::vector<int>{0, 1}
                                                     : std::vector<int>{0, 0};
    for (const bool stalls : {false, true}) {
        sy_frame_geometry geometry;
        CHECK_LAUNCH(sy_make_geometry(7168, 8, SY_DTYPE_F8_E4M3, 128, 2, &geometry));
        WorldSizes sizes;
        sizes.num_qps = 2;
        sizes.queue.sq_depth = 128;
        sizes.queue.is_collapsed = false;
        sizes.bound_ns = 30'000'000;
        // In pieces of 1 KiB the rows of a dispatch never fit the queue of a NIC that stands still.
        if (stalls)
            sizes.queue.max_message_bytes = 1024;
        NicWorld world(geometry, 64, {0}, servers, sizes);
        Client& client = *world.clients[0];
        const reference::Input input = load(world, 128, g_seed * 7 + stalls)[0];
        // Once over stores by the same kernels, so that all code is there.
        world.connect(false);
        client.launch_flags = SY_LAUNCH_FLAG_ANY_PATH;
        for (auto& server : world.servers)
            server->launch_flags = SY_LAUNCH_FLAG_ANY_PATH;
        world.layer(false);
        world.wait();
        world.expect_no_errors();
        client.load(input);
        world.connect(true);
        for (auto& server : world.servers)
            server->timeout_ns = 100'000'000;
        const uint32_t victim = 1;
        const uint32_t number = world.requests[0][victim].numbers[0];
        if (!stalls)
            world.nics[0]->fail(number, 20, SY_MLX5_SYNDROME_RETRY_EXCEEDED);
        world.start_nics(true);
        if (stalls)
            world.nics[0]->stall(1u << number % 32);
        const double start_s = now_s();
        world.dispatch(0);
        world.serve(0, false);
        world.combine(0);
        CHECK_CUDA(cudaSetDevice(0));
        world.wait();
        const double ms = (now_s() - start_s) * 1e3;
        world.nics[0]->stall(0);
        const sy_handle handle = from_device(client.handles[0]);
        const sy_error_word error = from_device(&client.state->error);
        CHECK(handle.missing == 1u << victim && handle.refused == 0, "missing %x refused %x",
              handle.missing, handle.refused);
        if (stalls)
            CHECK(error.tag >= SY_TAG_MLX5_SLOT && error.tag <= SY_TAG_MLX5_QUIET &&
                      error.peer == victim,
                  "tag %u peer %u", error.tag, error.peer);
        else
            CHECK(error.tag == SY_TAG_MLX5_COMPLETION && error.peer == victim &&
                      SY_MLX5_ERROR_SYNDROME(error.observed) == SY_MLX5_SYNDROME_RETRY_EXCEEDED,
                  "tag %u peer %u observed %" PRIx64, error.tag, error.peer, error.observed);
        CHECK(client.timeout_ns > 1'000'000'000 && ms < 1000, "the wait took %.1f ms", ms);
        const auto first = world.out(0);
        world.stop_nics();

        // Only tokens that lack a part go again, to the replica.
        std::vector<uint32_t> missing(128);
        CHECK_CUDA(
            cudaMemcpy(missing.data(), client.token_missing, 128 * 4, cudaMemcpyDeviceToHost));
        reference::Input again = input;
        uint32_t num_again = 0;
        for (uint32_t token = 0; token < 128; ++token) {
            num_again += missing[token] != 0;
            if (missing[token] == 0)
                std::fill_n(again.topk_idx.begin() + token * 8, 8, -1);
        }
        CHECK(num_again != 0, "no token lacks a part");
        sy_placement survivor = world.placement;
        for (uint32_t expert = 0; expert < 64; ++expert)
            survivor.experts[expert] = {1, {0}};
        client.load(again);
        to_device(client.placement, survivor);
        to_device(&client.state->error, sy_error_word{});
        client.flags = 0;
        // The survivor has all experts now.
        std::vector<int16_t> local(64);
        for (uint32_t expert = 0; expert < 64; ++expert)
            local[expert] = static_cast<int16_t>(expert);
        CHECK_CUDA(cudaSetDevice(servers[0]));
        Server& server = *world.servers[0];
        upload(server.local_expert, local.data(), local.size() * 2);
        server.num_local_experts = 64;
        uint8_t* lists = device_alloc<uint8_t>(
            sy_expert_lists_at(0, &geometry, 64, geometry.max_tokens, &server.lists));
        sy_expert_lists_at(reinterpret_cast<uint64_t>(lists), &geometry, 64, geometry.max_tokens,
                           &server.lists);
        world.nics[0]->fail(number, 0, 0);
        world.start_nics(false);
        world.dispatch(0);
        world.serve(0, false);
        world.combine(0);
        world.wait();
        world.stop_nics();
        world.expect_no_errors();
        CHECK(from_device(client.handles[0]).missing == 0, "the replica did not answer");
        const auto second = world.out(0);
        const auto whole = reference::identity_layer(input, world.placement, 2, true);
        const auto alone = reference::identity_layer(input, survivor, 1, true);
        for (uint32_t token = 0; token < 128; ++token) {
            const auto& found = missing[token] == 0 ? first : second;
            const auto& expected = missing[token] == 0 ? whole : alone;
            CHECK(memcmp(&found[token * 7168], &expected[token * 7168], 7168 * 2) == 0,
                  "token %u is wrong", token);
        }
        printf("{\"test\":\"failover\",\"cause\":\"%s\",\"combine_left_after_ms\":%.2f,"
               "\"tokens_sent_again\":%u}\n",
               stalls ? "stalled NIC" : "retries exceeded", ms, num_again);
        fflush(stdout);
    }
}

} // namespace

int main(int argc, char** argv) {
    // A NIC that runs leaves no moment for loading code.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    // Its work must not stand behind a kernel that waits for it either.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    std::string only;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (std::string(argv[i]) == "--seed")
            g_seed = strtoull(argv[i + 1], nullptr, 10);
        else if (std::string(argv[i]) == "--only")
            only = argv[i + 1];
        else
            CHECK(false, "unknown argument %s", argv[i]);
    }
    // Processes are forked, so CUDA must not have started here.
    if (only == "processes")
        return processes() ? 0 : 1;
    if (only == "process_layers")
        return process_layers() ? 0 : 1;
    int num_gpus = 0;
    CHECK_CUDA(cudaGetDeviceCount(&num_gpus));
    CHECK(num_gpus > 0, "no GPU");
    for (int gpu = 0; gpu < num_gpus; ++gpu) {
        CHECK_CUDA(cudaSetDevice(gpu));
        for (int other = 0; other < num_gpus; ++other)
            if (other != gpu)
                CHECK_CUDA(cudaDeviceEnablePeerAccess(other, 0));
    }
    CHECK_CUDA(cudaSetDevice(0));
    const struct {
        const char* name;
        void (*run)(int);
    } tests[] = {{"wraps", wraps},
                 {"owner", owner},
                 {"puts", puts_flags_and_gets},
                 {"link_calls", link_calls},
                 {"immediate", immediate},
                 {"receives", receives},
                 {"back_pressure", back_pressure},
                 {"errors", errors},
                 {"lost_doorbells", lost_doorbells},
                 {"dead_peer", dead_peer},
                 {"adversary", adversary},
                 {"layers", layers},
                 {"failover", failover}};
    for (const auto& test : tests) {
        if (!only.empty() && only != test.name)
            continue;
        const double start_s = now_s();
        test.run(num_gpus);
        fprintf(stderr, "softnic_test %s: all right, %.1f s\n", test.name, now_s() - start_s);
    }
    return 0;
}
