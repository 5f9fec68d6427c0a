// put + flag between processes: one-way time by size, bandwidth for every split of the GPUs into
// senders and receivers, and both by number of blocks with stores and with bulk copies. Prints one
// JSON line per case.
//
//   p2p_bench [--ranks N] [--limit SECONDS]
#include <string>

#include "rank.hpp"

namespace {

constexpr uint64_t kMostBytes = 64 << 20;
constexpr uint64_t kMostPut = 8 << 20;
// Launches of a median, each of many turns. A number of blocks is chosen by a few of them; the comparison of
// stores with bulk copies reads every message back, and has less time.
constexpr int kLaunches = 201, kLaunchesToChoose = 5, kLaunchesToCompare = 51;

struct Measured {
    double elapsed_us;
    uint32_t error_tag;
};

Measured run(Comrade& comrade, Slots& slots, const std::vector<uint32_t>& senders,
             const std::vector<uint32_t>& receivers, uint64_t num_bytes, uint32_t num_turns,
             uint32_t num_blocks, bool streams, cudaStream_t stream, uint64_t* elapsed_ns,
             sy_error_word* error, uint32_t flags = 0) {
    const int sender_idx = index_of(senders, comrade.rank);
    const int receiver_idx = index_of(receivers, comrade.rank);
    CHECK_CUDA(cudaMemset(slots.control, 0, SY_CONTROL_BYTES));
    to_device(error, sy_error_word{});
    CHECK_CUDA(cudaDeviceSynchronize());
    comrade.barrier();
    Measured measured = {};
    if (sender_idx >= 0 || receiver_idx >= 0) {
        const std::vector<uint32_t>& peers = sender_idx >= 0 ? receivers : senders;
        const uint32_t my_line = sender_idx >= 0 ? sender_idx : receiver_idx;
        sy_p2p_params params = {};
        params.version = SY_DEVICE_ABI_VERSION;
        params.flags = flags;
        params.num_peers = peers.size();
        // Pairs use as many blocks on both sides, whatever the number of a side's peers.
        params.blocks_per_peer = num_blocks / receivers.size();
        params.num_turns = num_turns;
        params.begins = sender_idx >= 0;
        params.num_bytes = num_bytes;
        params.timeout_ns = 3'000'000'000;
        params.elapsed_ns = elapsed_ns;
        params.error = error;
        for (uint32_t i = 0; i < peers.size(); ++i) {
            params.counters[i] = reinterpret_cast<uint64_t>(slots.control) + i * SY_CONTROL_STRIDE;
            // Payload goes to my request slot there; the counter's address relative to it wraps round.
            params.links[i] = {reinterpret_cast<uint64_t>(slots.peer_request[peers[i]]), 0,
                               SY_PATH_DIRECT, 0};
            const uint64_t peer_counters =
                reinterpret_cast<uint64_t>(slots.peer_control[peers[i]]) +
                my_line * SY_CONTROL_STRIDE;
            params.counter_offset[i] = peer_counters - params.links[i].window;
        }
        CHECK_CUDA(cudaMemset(elapsed_ns, 0, peers.size() * sizeof(uint64_t)));
        CHECK_CUDA(cudaDeviceSynchronize());
        CHECK_LAUNCH(streams ? sy_launch_stream(&params, stream)
                             : sy_launch_pingpong(&params, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        for (size_t i = 0; sender_idx >= 0 && i < peers.size(); ++i)
            measured.elapsed_us = std::max(measured.elapsed_us,
                                           static_cast<double>(from_device(elapsed_ns + i)) * 1e-3);
        measured.error_tag = from_device(error).tag;
    }
    const auto all = comrade.gather(&measured, sizeof(measured));
    for (const auto& bytes : all) {
        Measured one;
        memcpy(&one, bytes.data(), sizeof(one));
        measured.elapsed_us = std::max(measured.elapsed_us, one.elapsed_us);
        measured.error_tag = std::max(measured.error_tag, one.error_tag);
    }
    return measured;
}

// Whether every word of the slot's first `num_bytes` is `value`.
bool holds(const void* slot, uint64_t num_bytes, uint32_t value) {
    std::vector<uint32_t> words(num_bytes / sizeof(uint32_t));
    CHECK_CUDA(cudaMemcpy(words.data(), slot, num_bytes, cudaMemcpyDeviceToHost));
    return std::all_of(words.begin(), words.end(), [&](uint32_t word) { return word == value; });
}

// Times of launches, sorted. One that fails is the last: each failure costs the bound of a wait.
struct Launches {
    std::vector<double> us;
    uint32_t error_tag = 0;

    template <class Launch> Launches(int num_launches, const Launch& launch) {
        for (int i = 0; i < num_launches && error_tag == 0; ++i) {
            const Measured measured = launch();
            us.push_back(measured.elapsed_us);
            error_tag = measured.error_tag;
        }
        std::sort(us.begin(), us.end());
    }
    double median_us() const { return us[us.size() / 2]; }
};

// From GPU 0 to GPU 1: stores and bulk copies alternate. The last message of each launch is checked
// at its destination.
int compare_bulk(Comrade& comrade, Slots& slots, cudaStream_t stream, uint64_t* elapsed_ns,
                 sy_error_word* error) {
    struct Case {
        bool streams;
        uint64_t num_bytes;
        uint32_t num_turns;
        std::vector<uint32_t> blocks;
    };
    const std::vector<Case> cases = {{false, 7168, 400, {1}},
                                     {false, 14336, 400, {1}},
                                     {false, 64 << 10, 400, {1, 4}},
                                     {false, 1 << 20, 200, {8, 24, 64}},
                                     {true, 8 << 20, 50, {1, 2, 4, 8, 16, 24, 32, 66, 132}}};
    int num_bad = 0;
    for (const Case& one : cases)
        for (const uint32_t num_blocks : one.blocks) {
            double us[2];
            int num_wrong = 0; // messages, at the receiver
            for (const bool bulk : {false, true}) {
                const Launches launches(kLaunchesToCompare, [&] {
                    if (comrade.rank == 1)
                        CHECK_CUDA(cudaMemset(slots.request[0], 0xff, one.num_bytes));
                    const Measured measured =
                        run(comrade, slots, {0}, {1}, one.num_bytes, one.num_turns, num_blocks,
                            one.streams, stream, elapsed_ns, error, bulk ? SY_P2P_FLAG_BULK : 0);
                    const uint32_t last = one.num_turns + (one.streams ? 0 : 1);
                    const bool is_right =
                        comrade.rank != 1 || holds(slots.request[0], one.num_bytes, last);
                    num_wrong += measured.error_tag != 0 || !is_right;
                    return measured;
                });
                us[bulk] = launches.median_us() / (one.streams ? 1.0 : 2.0) / one.num_turns;
            }
            for (const auto& bytes : comrade.gather(&num_wrong, sizeof(num_wrong))) {
                int theirs;
                memcpy(&theirs, bytes.data(), sizeof(theirs));
                num_wrong = std::max(num_wrong, theirs);
            }
            num_bad += num_wrong;
            if (comrade.rank == 0) {
                printf("{\"bench\":\"put_bulk\",\"what\":\"%s\",\"bytes\":%" PRIu64
                       ",\"blocks\":%u,\"store_us\":%.3f,\"bulk_us\":%.3f,"
                       "\"store_gb_per_s\":%.1f,\"bulk_gb_per_s\":%.1f,\"bad\":%d}\n",
                       one.streams ? "stream" : "put_flag", one.num_bytes, num_blocks, us[0], us[1],
                       static_cast<double>(one.num_bytes) / us[0] * 1e-3,
                       static_cast<double>(one.num_bytes) / us[1] * 1e-3, num_wrong);
                fflush(stdout);
            }
        }
    return num_bad;
}

int run_rank(Comrade& comrade) {
    select_gpu(comrade.rank);
    Slots slots(comrade, kMostBytes, kMostBytes);
    slots.share_control(comrade);
    cudaStream_t stream;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    uint64_t* elapsed_ns = device_alloc<uint64_t>(SY_MAX_PEERS);
    sy_error_word* error = device_alloc<sy_error_word>(1);
    int num_bad = 0;
    // Kernels are loaded before anything is timed.
    for (const bool streams : {false, true})
        run(comrade, slots, {0}, {1}, 4096, 10, 1, streams, stream, elapsed_ns, error);
    // In steps of four, the last one of two.
    for (uint64_t num_bytes = 4; num_bytes <= kMostPut;
         num_bytes *= num_bytes * 4 > kMostPut ? 2 : 4) {
        const uint32_t num_turns = num_bytes > 1 << 20 ? 100 : 400;
        const auto launch = [&](int num_launches, uint32_t num_blocks) {
            return Launches(num_launches, [&] {
                return run(comrade, slots, {0}, {1}, num_bytes, num_turns, num_blocks, false,
                           stream, elapsed_ns, error);
            });
        };
        double best_us = 1e9;
        uint32_t best_blocks = 1, error_tag = 0;
        for (const uint32_t num_blocks : {1u, 4u, 16u, 32u, 64u}) {
            if (num_bytes < num_blocks * 4096ull && num_blocks != 1)
                continue;
            const Launches launches = launch(kLaunchesToChoose, num_blocks);
            error_tag = std::max(error_tag, launches.error_tag);
            if (launches.median_us() < best_us)
                best_us = launches.median_us(), best_blocks = num_blocks;
        }
        // Separate launches: the least of several medians tends to be one that came out too small.
        const Launches launches = launch(error_tag == 0 ? kLaunches : 1, best_blocks);
        error_tag = std::max(error_tag, launches.error_tag);
        const double one_way_us = launches.median_us() / (2.0 * num_turns);
        num_bad += error_tag != 0;
        if (comrade.rank == 0) {
            printf("{\"bench\":\"put_flag\",\"shape\":\"1to1\",\"bytes\":%" PRIu64
                   ",\"blocks\":%u,\"launches\":%zu,\"one_way_us\":%.3f,\"gb_per_s\":%.1f,"
                   "\"error\":%u}\n",
                   num_bytes, best_blocks, launches.us.size(), one_way_us,
                   static_cast<double>(num_bytes) / one_way_us * 1e-3, error_tag);
            fflush(stdout);
        }
    }
    std::vector<std::pair<std::vector<uint32_t>, std::vector<uint32_t>>> splits = {{{0}, {1}}};
    if (comrade.num_ranks == 4)
        splits = {{{0}, {1}},    {{0}, {1, 2}},    {{0}, {1, 2, 3}},
                  {{0, 1}, {2}}, {{0, 1}, {2, 3}}, {{0, 1, 2}, {3}}};
    for (const auto& split : splits)
        for (const uint64_t num_bytes : {4ull, 64ull << 10, 1ull << 20, 8ull << 20}) {
            const std::vector<uint32_t>&senders = split.first, &receivers = split.second;
            // Small messages: latency of put + flag + acknowledgement; large ones: bandwidth.
            const uint32_t num_turns = num_bytes == 4 ? 1 : num_bytes > 1 << 20 ? 50 : 200;
            const uint32_t blocks = num_bytes == 4 ? static_cast<uint32_t>(receivers.size())
                                                   : 66 / static_cast<uint32_t>(receivers.size()) *
                                                         static_cast<uint32_t>(receivers.size());
            const Launches launches(kLaunches, [&] {
                return run(comrade, slots, senders, receivers, num_bytes, num_turns, blocks, true,
                           stream, elapsed_ns, error);
            });
            const double us = launches.median_us();
            const double total = static_cast<double>(num_bytes) * num_turns *
                                 static_cast<double>(senders.size() * receivers.size());
            num_bad += launches.error_tag != 0;
            if (comrade.rank == 0) {
                printf("{\"bench\":\"put_bw\",\"shape\":\"%zuto%zu\",\"bytes\":%" PRIu64
                       ",\"turns\":%u,\"launches\":%zu,\"us\":%.2f,\"gb_per_s_per_link\":%.1f,"
                       "\"error\":%u}\n",
                       senders.size(), receivers.size(), num_bytes, num_turns, launches.us.size(),
                       us,
                       total / us * 1e-3 /
                           static_cast<double>(std::min(senders.size(), receivers.size())),
                       launches.error_tag);
                fflush(stdout);
            }
        }
    num_bad += compare_bulk(comrade, slots, stream, elapsed_ns, error);
    return num_bad == 0 ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
    uint32_t num_ranks = 4;
    double limit_s = 60;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i];
        if (name == "--ranks")
            num_ranks = static_cast<uint32_t>(atoi(argv[i + 1]));
        else if (name == "--limit")
            limit_s = atof(argv[i + 1]);
        else
            CHECK(false, "unknown argument %s", argv[i]);
    }
    CHECK(num_ranks == 2 || num_ranks == 4, "--ranks %u: expected 2 or 4", num_ranks);
    const int code =
        run_ranks(num_ranks, limit_s, -1, [](Comrade& comrade) { return run_rank(comrade); });
    fprintf(stderr, "p2p_bench: %s\n", code == 0 ? "all right" : "FAILED");
    return code;
}
