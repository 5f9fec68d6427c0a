// Work requests that kernels post, carried out by the NIC kernel: every request once and in order, wraps,
// back-pressure, errors and what follows them, and whole layers over it, bit for bit as over stores.
//
//   softnic_test [--seed N] [--only NAME]
//
// Clients and servers are spread over the GPUs that there are: 2 -> 2 on four, 1 -> 1 on two, all on one.
#include <algorithm>
#include <cinttypes>
#include <string>

#include "process.hpp"
#include "softnic_world.hpp"
#include "switchyard/comm/ibgda.h"

namespace {

using namespace switchyard::comm;

uint64_t g_seed = 1;

constexpr uint64_t kRemoteBase = 0x700000000000;
constexpr uint32_t kLocalKey = 0x100, kRemoteKey = 0x200, kReadOnlyKey = 0x300;
constexpr uint64_t kDataBytes = 4 << 20;
constexpr uint64_t kWordAt = 2 << 20; // words behind the payload, in the target

enum class Job : uint32_t { kAdds, kPutFlags, kGets, kBadRkey, kBadLkey, kBadRange, kMisaligned, kNoRight };

struct JobParams {
    sy_mlx5_qp qp;
    sy_mlx5_bound bound;
    LocalBuffer local;
    uint64_t remote;
    Job job;
    uint32_t num_posts, num_bytes;
    uint32_t* status; // one per warp
};

// One warp per block posts on the same queue.
__global__ void __launch_bounds__(32) job_kernel(const __grid_constant__ JobParams p) {
    const uint32_t warp = blockIdx.x, lane_idx = threadIdx.x;
    const RemoteBuffer target{p.remote, kRemoteKey}, word{p.remote + kWordAt + warp * 8, kRemoteKey};
    Status status = SY_MLX5_OK;
    for (uint32_t i = 0; i < p.num_posts && status == SY_MLX5_OK; ++i) {
        switch (p.job) {
        case Job::kAdds: // 31 words of this warp are signalled, then its counter is added to
            status = mlx5::post<Scope::kSys, Warp>(
                p.qp, p.bound, 32, [&](uint32_t lane, const mlx5::Control& control) {
                    const RemoteBuffer mine{p.remote + kWordAt + (uint64_t{gridDim.x} + warp * 31 + lane) * 8,
                                            kRemoteKey};
                    return lane < 31 ? mlx5::make_write_inline(control, mine, i + 1, 8)
                                     : mlx5::make_fetch_add(control, {p.qp.scratch, p.qp.scratch_lkey},
                                                            word, 1);
                });
            break;
        case Job::kPutFlags:
            status = put_add_nbi_warp(p.qp, p.local, target, p.num_bytes, word, 1, p.bound);
            break;
        case Job::kGets:
            status = get_nbi_warp(p.qp, {p.local.address + kWordAt, p.local.lkey}, target, p.num_bytes,
                                  p.bound);
            if (lane_idx == 0 && status == SY_MLX5_OK)
                status = amo_nonfetch_add32(p.qp, word, 1, p.bound);
            if (lane_idx == 0 && status == SY_MLX5_OK)
                status = quiet_gets(p.qp, p.local, p.bound);
            status = __shfl_sync(0xffffffffu, status, 0);
            break;
        case Job::kBadRkey:
            status = put_nbi_warp(p.qp, p.local, {p.remote, 0x999}, 64, p.bound);
            break;
        case Job::kBadLkey:
            status = put_nbi_warp(p.qp, {p.local.address, 0x999}, target, 64, p.bound);
            break;
        case Job::kBadRange:
            status = put_nbi_warp(p.qp, p.local, {p.remote + kDataBytes - 32, kRemoteKey}, 64, p.bound);
            break;
        case Job::kNoRight:
            status = put_nbi_warp(p.qp, p.local, {p.remote, kReadOnlyKey}, 64, p.bound);
            break;
        case Job::kMisaligned:
            status = mlx5::post<Scope::kSys, Warp>(
                p.qp, p.bound, 1, [&](uint32_t, const mlx5::Control& control) {
                    return mlx5::make_fetch_add(control, {p.qp.scratch, p.qp.scratch_lkey},
                                                {p.remote + kWordAt + 4, kRemoteKey}, 1);
                });
            break;
        }
    }
    if (lane_idx == 0) {
        if (status == SY_MLX5_OK)
            status = quiet(p.qp, p.bound);
        p.status[warp] = status;
    }
}

// Waits for flags beside the posters and looks at what lies before each: count of wrong words.
__global__ void __launch_bounds__(256)
    watch_kernel(const uint64_t* flag, const uint64_t* payload, uint32_t num_words, uint64_t num_flags,
                 uint64_t pattern, uint64_t limit_ns, uint32_t* num_wrong) {
    __shared__ bool is_late;
    const uint64_t start_ns = now_ns();
    if (threadIdx.x == 0)
        is_late = false;
    for (uint64_t expected = 1; expected <= num_flags; ++expected) {
        __syncthreads();
        if (threadIdx.x == 0)
            while (ld_acquire<Scope::kSys>(flag) < expected && !is_late)
                is_late = now_ns() - start_ns > limit_ns;
        __syncthreads();
        if (is_late) {
            if (threadIdx.x == 0)
                atomicAdd(num_wrong, 1u << 30);
            return;
        }
        for (uint32_t i = threadIdx.x; i < num_words; i += blockDim.x)
            if (ld_relaxed<Scope::kSys>(payload + i) != pattern * (i + 1))
                atomicAdd(num_wrong, 1);
    }
}

// Who carries requests out, and where the queues are.
struct Backend {
    Where where;
    bool has_copy_engines;
    const char* name() const { return has_copy_engines ? "copy engines" : "kernel"; }
};
constexpr Backend kBackends[] = {
    {Where::kHost, false}, {Where::kDevice, false}, {Where::kHost, true}};

// A queue from GPU 0 to memory on the last GPU, a NIC, and a kernel that posts.
struct Rig {
    std::unique_ptr<Nic> owner;
    Nic& nic;
    uint8_t *source, *target;
    SendQueue queue;
    uint32_t number;
    uint32_t* status;
    sy_error_word* error;
    cudaStream_t stream;
    int target_gpu;

    Rig(const Backend& backend, const QueueSizes& sizes, int num_gpus)
        : owner(make_nic(0, backend.has_copy_engines)), nic(*owner),
          source(device_alloc<uint8_t>(kDataBytes)), target(nullptr),
          queue(backend.where, sizes, 0x41, 5), number(nic.add_queue(queue)), target_gpu(num_gpus - 1) {
        CHECK_CUDA(cudaSetDevice(target_gpu));
        target = device_alloc<uint8_t>(kDataBytes);
        CHECK_CUDA(cudaSetDevice(0));
        status = device_alloc<uint32_t>(64);
        error = device_alloc<sy_error_word>(1);
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        nic.add_key(kLocalKey, reinterpret_cast<uint64_t>(source), kDataBytes, source);
        nic.add_key(kRemoteKey, kRemoteBase, kDataBytes, target);
        nic.add_key(kReadOnlyKey, kRemoteBase, kDataBytes, target, softnic::kRemoteRead);
        std::vector<uint64_t> words(kDataBytes / 8);
        for (size_t i = 0; i < words.size(); ++i)
            words[i] = g_seed * (i + 1);
        upload(source, words.data(), kDataBytes);
        clear();
    }
    ~Rig() {
        CHECK_CUDA(cudaFree(source));
        CHECK_CUDA(cudaFree(target));
    }
    void clear() {
        CHECK_CUDA(cudaSetDevice(target_gpu));
        CHECK_CUDA(cudaMemset(target, 0xff, kWordAt));
        CHECK_CUDA(cudaMemset(target + kWordAt, 0, kDataBytes - kWordAt));
        CHECK_CUDA(cudaDeviceSynchronize());
        CHECK_CUDA(cudaSetDevice(0));
        CHECK_CUDA(cudaMemset(error, 0, sizeof(sy_error_word)));
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    void begin() {
        queue.reset();
        nic.prepare();
        nic.start();
    }
    // Statuses of the warps, once all have ended.
    std::vector<uint32_t> post(Job job, uint32_t num_warps, uint32_t num_posts, uint32_t num_bytes = 64,
                               uint64_t timeout_ns = 3'000'000'000) {
        const JobParams params = {queue.handle,
                                  {error, nullptr, timeout_ns},
                                  {reinterpret_cast<uint64_t>(source), kLocalKey},
                                  kRemoteBase,
                                  job,
                                  num_posts,
                                  num_bytes,
                                  status};
        job_kernel<<<num_warps, 32, 0, stream>>>(params);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaStreamSynchronize(stream));
        std::vector<uint32_t> statuses(num_warps);
        CHECK_CUDA(cudaMemcpy(statuses.data(), status, num_warps * 4, cudaMemcpyDeviceToHost));
        return statuses;
    }
    std::vector<uint64_t> words(uint64_t offset, uint32_t count) const {
        std::vector<uint64_t> values(count);
        CHECK_CUDA(cudaMemcpy(values.data(), target + offset, count * 8, cudaMemcpyDeviceToHost));
        return values;
    }
    void expect_clean(const softnic::Counts& counts) const {
        CHECK(counts.num_violations == 0, "violation %u at block %" PRIu64 ": found %" PRIu64,
              counts.first.what, counts.first.position, counts.first.found);
    }
    void expect_all(const std::vector<uint32_t>& statuses, uint32_t expected) const {
        for (const uint32_t found : statuses)
            CHECK(found == expected, "status %u, expected %u; error tag %u observed %" PRIx64, found,
                  expected, from_device(error).tag, from_device(error).observed);
    }
};

// Three wraps of the 16-bit counters by many warps on one queue: every request once, the last word of each
// kind in its place.
void wraps(int num_gpus) {
    for (const Backend& backend : kBackends)
        for (const bool is_collapsed : {true, false})
            for (const uint32_t depth : {128u, 1024u, 32768u}) {
                // An add is a round trip of the host's there.
                if (backend.has_copy_engines && depth != 1024)
                    continue;
                QueueSizes sizes;
                sizes.sq_depth = depth;
                sizes.is_collapsed = is_collapsed;
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
                printf("{\"test\":\"wraps\",\"nic\":\"%s\",\"queues\":\"%s\",\"collapsed\":%d,\"depth\":%u,"
                       "\"requests\":%" PRIu64 ",\"us_per_request\":%.3f}\n",
                       backend.name(), name_of(backend.where), is_collapsed, depth, counts.num_requests,
                       us / static_cast<double>(expected));
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
                                               reinterpret_cast<uint64_t*>(rig.target), num_bytes / 8, 50,
                                               g_seed, 5'000'000'000, num_wrong);
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaSetDevice(0));
            const auto statuses = rig.post(Job::kPutFlags, 1, 50, num_bytes);
            CHECK_CUDA(cudaSetDevice(rig.target_gpu));
            CHECK_CUDA(cudaStreamSynchronize(watcher));
            const uint32_t wrong = from_device(num_wrong);
            CHECK_CUDA(cudaSetDevice(0));
            const auto gets = rig.post(Job::kGets, 1, 5, num_bytes);
            const softnic::Counts counts = rig.nic.stop();
            rig.expect_clean(counts);
            rig.expect_all(statuses, SY_MLX5_OK);
            rig.expect_all(gets, SY_MLX5_OK);
            CHECK(wrong == 0, "%u words were wrong behind their flag", wrong);
            std::vector<uint64_t> back(num_bytes / 8);
            CHECK_CUDA(cudaMemcpy(back.data(), rig.source + kWordAt, num_bytes, cudaMemcpyDeviceToHost));
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

// A stalled NIC: posters wait for room, give up in time and say so; once reset the queue works again.
void back_pressure(int num_gpus) {
    for (const Backend& backend : kBackends) {
        QueueSizes sizes;
        sizes.sq_depth = 128;
        Rig rig(backend, sizes, num_gpus);
        rig.nic.stall(1);
        rig.begin();
        const double start_s = now_s();
        const auto statuses = rig.post(Job::kAdds, 4, 10, 64, 20'000'000);
        const double ms = (now_s() - start_s) * 1e3;
        const sy_error_word error = from_device(rig.error);
        for (const uint32_t found : statuses)
            CHECK(found == SY_MLX5_TIMEOUT, "status %u, expected a time-out", found);
        // Whoever expires first is recorded, and may have waited for room, its turn or the end.
        CHECK(error.tag >= SY_TAG_MLX5_SLOT && error.tag <= SY_TAG_MLX5_QUIET && error.peer == 5 &&
                  error.reason == SY_REASON_TIMEOUT,
              "tag %u peer %u reason %u", error.tag, error.peer, error.reason);
        CHECK(ms < 5000, "%.1f ms", ms);
        rig.nic.stall(0);
        rig.nic.stop();
        // Stalled only for a while, nothing is lost.
        rig.clear();
        rig.begin();
        rig.nic.stall(1);
        const JobParams params = {rig.queue.handle,
                                  {rig.error, nullptr, 3'000'000'000},
                                  {reinterpret_cast<uint64_t>(rig.source), kLocalKey},
                                  kRemoteBase,
                                  Job::kAdds,
                                  20,
                                  64,
                                  rig.status};
        job_kernel<<<4, 32, 0, rig.stream>>>(params);
        CHECK_CUDA(cudaGetLastError());
        usleep(20000);
        CHECK(cudaStreamQuery(rig.stream) == cudaErrorNotReady, "posters did not wait for room");
        rig.nic.stall(0);
        CHECK_CUDA(cudaStreamSynchronize(rig.stream));
        rig.expect_clean(rig.nic.stop());
        for (const uint64_t sum : rig.words(kWordAt, 4))
            CHECK(sum == 20, "counter %" PRIu64 ", expected 20", sum);
        printf("{\"test\":\"back_pressure\",\"nic\":\"%s\",\"queues\":\"%s\","
               "\"gave_up_after_ms\":%.1f}\n",
               backend.name(), name_of(backend.where), ms);
    }
}

// Every way to fail is reported with its syndrome, and after a reset the queue works.
void errors(int num_gpus) {
    struct Case {
        Job job;
        uint32_t syndrome;
        bool is_injected;
    };
    const Case cases[] = {{Job::kBadRkey, SY_MLX5_SYNDROME_REMOTE_ACCESS, false},
                          {Job::kBadLkey, SY_MLX5_SYNDROME_LOCAL_PROTECTION, false},
                          {Job::kBadRange, SY_MLX5_SYNDROME_REMOTE_ACCESS, false},
                          {Job::kNoRight, SY_MLX5_SYNDROME_REMOTE_ACCESS, false},
                          {Job::kMisaligned, SY_MLX5_SYNDROME_REMOTE_INVALID, false},
                          {Job::kAdds, SY_MLX5_SYNDROME_RETRY_EXCEEDED, true},
                          {Job::kAdds, SY_MLX5_SYNDROME_RNR_EXCEEDED, true},
                          {Job::kAdds, SY_MLX5_SYNDROME_REMOTE_OP, true}};
    for (const Backend& backend : kBackends) {
        QueueSizes sizes;
        sizes.is_collapsed = false;
        Rig rig(backend, sizes, num_gpus);
        for (const Case& test : cases) {
            rig.clear();
            rig.nic.fail(rig.number, 40, test.is_injected ? test.syndrome : 0);
            rig.begin();
            const auto statuses = rig.post(test.job, 1, 4);
            rig.nic.stop();
            rig.expect_all(statuses, SY_MLX5_COMPLETION);
            const uint64_t word = rig.queue.state().error;
            const sy_error_word error = from_device(rig.error);
            CHECK(SY_MLX5_ERROR_SYNDROME(word) == test.syndrome && error.tag == SY_TAG_MLX5_COMPLETION &&
                      error.peer == 5 && error.observed == word,
                  "syndrome %02x, expected %02x; tag %u", SY_MLX5_ERROR_SYNDROME(word), test.syndrome,
                  error.tag);
            rig.nic.fail(rig.number, 0, 0);
            rig.clear();
            rig.begin();
            const auto after = rig.post(Job::kAdds, 2, 10);
            rig.expect_clean(rig.nic.stop());
            rig.expect_all(after, SY_MLX5_OK);
        }
    }
}

struct Cast {
    std::vector<int> clients, servers;
    std::string name;
};

// Who is where.
std::vector<Cast> casts(int num_gpus) {
    if (num_gpus >= 4)
        return {{{0, 1}, {2, 3}, "2to2"}, {{0}, {1, 2, 3}, "1to3"}};
    if (num_gpus >= 2)
        return {{{0}, {1}, "1to1"}};
    return {{{0, 0}, {0, 0}, "2to2 on one GPU"}};
}

std::vector<reference::Input> load(NicWorld& world, uint32_t num_tokens, uint64_t seed) {
    std::vector<reference::Input> inputs;
    for (uint32_t c = 0; c < world.clients.size(); ++c) {
        CHECK_CUDA(cudaSetDevice(world.client_gpus[c]));
        inputs.push_back(reference::make_input({num_tokens, world.geometry.hidden, world.geometry.top_k,
                                                world.placement.num_experts},
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
                    // Copies between GPUs that a host starts one by one take tenths of a second per layer.
                    const uint32_t num_rounds = backend.has_copy_engines ? 2 : 5;
                    const uint32_t num_layers = backend.has_copy_engines ? 1 : 4;
                    for (uint32_t round = 0; round < num_rounds; ++round) {
                        const uint32_t num_tokens = round == 1 ? 1 : round == 2 ? 37 : 128;
                        const auto inputs = load(world, num_tokens, g_seed * 100 + round);
                        // Stores by the kernels for any way too: they must run once before the NIC does.
                        world.connect(false);
                        for (auto& client : world.clients)
                            client->launch_flags = round % 2 == 0 ? SY_LAUNCH_FLAG_ANY_WAY : 0;
                        for (auto& server : world.servers)
                            server->launch_flags = round % 2 == 0 ? SY_LAUNCH_FLAG_ANY_WAY : 0;
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
                            const auto expected =
                                reference::identity_layer(inputs[c], world.placement,
                                                          world.servers.size(), dtype == SY_DTYPE_F8_E4M3);
                            CHECK(found == direct[c], "client %u differs from its layer over stores", c);
                            CHECK(memcmp(found.data(), expected.data(), expected.size() * 2) == 0,
                                  "client %u differs from the reference", c);
                        }
                    }
                    printf("{\"test\":\"layers\",\"shape\":\"%s\",\"dtype\":\"%s\",\"nic\":\"%s\","
                           "\"queues\":\"%s\",\"server\":\"%s\",\"requests\":%" PRIu64
                           ",\"us_over_stores\":%.1f,\"us_over_nic\":%.1f}\n",
                           cast.name.c_str(), dtype == SY_DTYPE_BF16 ? "bf16" : "fp8", backend.name(),
                           name_of(backend.where),
                           echoes ? "echo" : "lists", num_requests, us[0], us[1]);
                    fflush(stdout);
                }
            }
}

// A queue fails in the middle of a layer, or its NIC stands still: the client is out of the wait at once or
// within the bound, the error word says why, and a replica takes the tokens.
void failover(int num_gpus) {
    const std::vector<int> servers = num_gpus >= 4 ? std::vector<int>{2, 3}
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
        client.launch_flags = SY_LAUNCH_FLAG_ANY_WAY;
        for (auto& server : world.servers)
            server->launch_flags = SY_LAUNCH_FLAG_ANY_WAY;
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
            CHECK(error.tag >= SY_TAG_MLX5_SLOT && error.tag <= SY_TAG_MLX5_QUIET && error.peer == victim,
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
        CHECK_CUDA(cudaMemcpy(missing.data(), client.token_missing, 128 * 4, cudaMemcpyDeviceToHost));
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
    // Nor may what it does stand behind a kernel that waits for it.
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
    } tests[] = {{"wraps", wraps},   {"puts", puts_flags_and_gets}, {"back_pressure", back_pressure},
                 {"errors", errors}, {"layers", layers},            {"failover", failover}};
    for (const auto& test : tests) {
        if (!only.empty() && only != test.name)
            continue;
        const double start_s = now_s();
        test.run(num_gpus);
        fprintf(stderr, "softnic_test %s: all right, %.1f s\n", test.name, now_s() - start_s);
    }
    return 0;
}
