// A client's view of a server that dies or freezes under load. One client, two servers that
// replicate each other, each its own process.
//
//   fault_test [--limit SECONDS] [--seed N]
//
// kill: the parent kills a server in the middle of a layer. The client's host thread sees its socket close
// and sets a word in mapped memory; combine leaves, names the server and the tokens that lack its part;
// those alone go to the survivor. freeze: the server's process is stopped; combine leaves after its bound.
#include <atomic>
#include <string>
#include <thread>

#include <sys/mman.h>

#include "rank.hpp"

namespace {

constexpr uint32_t kHidden = 7168, kTopK = 8, kExperts = 64, kTokens = 128;
constexpr uint32_t kVictim = 1; // server index; its rank is 2

// Words that all processes see.
struct Board {
    std::atomic<uint32_t> is_over;
    std::atomic<uint32_t> is_loaded;
    std::atomic<uint64_t> struck_at_ns;
};

uint64_t now_ns() { return static_cast<uint64_t>(now_s() * 1e9); }

void serve(Server& server, Board& board, cudaStream_t stream) {
    server.min_ready = 1;
    server.timeout_ns = 500'000;
    while (board.is_over.load() == 0) {
        server.recv(stream);
        server.send(stream);
        CHECK_CUDA(cudaStreamSynchronize(stream));
    }
    const sy_error_word error = from_device(&server.state->error);
    CHECK(error.tag == SY_TAG_NONE, "server: tag %u observed %" PRIu64, error.tag, error.observed);
}

// Values of `out` that differ from the reference, for the tokens that `is_mine` picks.
uint64_t wrong_values(const uint16_t* out, const std::vector<uint16_t>& expected,
                      const std::function<bool(uint32_t)>& is_mine) {
    std::vector<uint16_t> found(expected.size());
    CHECK_CUDA(cudaMemcpy(found.data(), out, found.size() * 2, cudaMemcpyDeviceToHost));
    uint64_t wrong = 0;
    for (size_t i = 0; i < found.size(); ++i)
        wrong += is_mine(static_cast<uint32_t>(i / kHidden)) && found[i] != expected[i];
    return wrong;
}

int attend(Client& client, Slots& slots, Buffers& buffers, Board& board,
           const sy_placement& placement, const int* liveness, bool freezes, uint64_t seed,
           cudaStream_t stream) {
    uint32_t* abort_mask;
    CHECK_CUDA(cudaHostAlloc(&abort_mask, 4, cudaHostAllocMapped));
    *abort_mask = 0;
    void* mapped;
    CHECK_CUDA(cudaHostGetDevicePointer(&mapped, abort_mask, 0));
    client.abort_mask = static_cast<const uint32_t*>(mapped);
    client.timeout_ns = freezes ? 50'000'000 : 10'000'000'000;
    std::atomic<bool> is_done{false};
    // Moved to a high descriptor: a dying process closes its files last to first.
    std::thread watch([&] {
        pollfd polls[2] = {{liveness[0], POLLIN, 0}, {liveness[1], POLLIN, 0}};
        while (!is_done.load()) {
            poll(polls, 2, 20);
            for (uint32_t s = 0; s < 2; ++s)
                if ((polls[s].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
                    __atomic_fetch_or(abort_mask, 1u << s, __ATOMIC_SEQ_CST);
                    polls[s].fd = -1;
                }
        }
    });
    const reference::Input input =
        reference::make_input({kTokens, kHidden, kTopK, kExperts}, seed, false, false);
    const auto expected = reference::identity_layer(input, placement, 2, true);
    client.hidden_states = buffers.hidden_states[0];
    client.topk_idx = buffers.topk_idx[0];
    client.topk_weights = buffers.topk_weights[0];
    client.out = buffers.outs;
    const auto load = [&](const std::vector<int32_t>& topk_idx) {
        upload(client.hidden_states, input.hidden_states.data(), input.hidden_states.size() * 2);
        upload(client.topk_idx, topk_idx.data(), topk_idx.size() * 4);
        upload(client.topk_weights, input.topk_weights.data(), input.topk_weights.size() * 4);
        to_device(client.num_tokens, kTokens);
    };
    load(input.topk_idx);
    uint64_t num_layers = 0, wrong = 0;
    sy_handle handle = {};
    double before_us = 0;
    const double start = now_s();
    while (true) {
        CHECK_CUDA(cudaMemsetAsync(client.out, 0xff, size_t{kTokens} * kHidden * 2, stream));
        client.dispatch(stream);
        client.combine(stream);
        CHECK_CUDA(cudaStreamSynchronize(stream));
        const uint64_t left_at_ns = now_ns();
        CHECK(now_s() - start < 20, "the server lives on after %" PRIu64 " layers", num_layers);
        handle = from_device(client.handles[0]);
        if (handle.missing != 0) {
            const sy_error_word error = from_device(&client.state->error);
            const double stall_ms =
                static_cast<double>(left_at_ns - board.struck_at_ns.load()) * 1e-6;
            CHECK(handle.missing == 1u << kVictim && error.peer == kVictim &&
                      error.tag == SY_TAG_COMBINE_ROW &&
                      error.reason == (freezes ? SY_REASON_TIMEOUT : SY_REASON_ABORT),
                  "missing %x, tag %u peer %u reason %u", handle.missing, error.tag, error.peer,
                  error.reason);
            printf("{\"test\":\"%s\",\"layers_before\":%" PRIu64
                   ",\"us_per_layer\":%.1f,\"combine_left_after_ms\":%.2f",
                   freezes ? "freeze" : "kill", num_layers, before_us, stall_ms);
            break;
        }
        if (num_layers % 64 == 0)
            wrong += wrong_values(client.out, expected, [](uint32_t) { return true; });
        if (++num_layers == 200)
            board.is_loaded.store(1);
        before_us = (now_s() - start) * 1e6 / static_cast<double>(num_layers);
    }
    // Only the tokens that lack a part go again, to the survivor; the others' rows stand.
    std::vector<uint32_t> missing(kTokens);
    CHECK_CUDA(
        cudaMemcpy(missing.data(), client.token_missing, kTokens * 4, cudaMemcpyDeviceToHost));
    wrong +=
        wrong_values(client.out, expected, [&](uint32_t token) { return missing[token] == 0; });
    sy_placement survivor = placement;
    for (uint32_t expert = 0; expert < kExperts; ++expert)
        survivor.experts[expert] = {1, {1 - kVictim}};
    survivor.epoch = 2;
    to_device(client.placement, survivor);
    to_device(&client.state->error, sy_error_word{});
    std::vector<int32_t> again = input.topk_idx;
    uint32_t num_again = 0;
    for (uint32_t token = 0; token < kTokens; ++token) {
        num_again += missing[token] != 0;
        if (missing[token] == 0)
            std::fill_n(again.begin() + token * kTopK, kTopK, -1);
    }
    load(again);
    client.out = buffers.outs + size_t{kTokens} * kHidden;
    client.dispatch(stream);
    client.combine(stream);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    const auto alone = reference::identity_layer(input, survivor, 2, true);
    wrong += wrong_values(client.out, alone, [&](uint32_t token) { return missing[token] != 0; });
    CHECK(from_device(client.handles[0]).missing == 0, "the survivor did not answer");
    printf(",\"tokens_sent_again\":%u", num_again);
    if (!freezes)
        slots.close_peer(2);
    // And on with one server.
    load(input.topk_idx);
    const double second = now_s();
    for (int i = 0; i < 500; ++i) {
        client.dispatch(stream);
        client.combine(stream);
        CHECK_CUDA(cudaStreamSynchronize(stream));
    }
    printf(",\"us_per_layer_alone\":%.1f", (now_s() - second) * 1e6 / 500);
    wrong += wrong_values(client.out, alone, [](uint32_t) { return true; });
    const sy_error_word error = from_device(&client.state->error);
    CHECK(error.tag == SY_TAG_NONE, "tag %u", error.tag);
    printf(",\"wrong\":%" PRIu64 "}\n", wrong);
    is_done.store(true);
    watch.join();
    board.is_over.store(1);
    return wrong == 0 ? 0 : 1;
}

int run(bool freezes, double limit_s, uint64_t seed) {
    Board* board = static_cast<Board*>(
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    // The client's end and the server's end of a connection per server.
    int ends[2][2];
    for (auto& pair : ends)
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    const Topology topology = {"1to2", {0}, {1, 2}};
    const auto body = [&](Comrade& comrade) {
        const int mine = comrade.rank == 0 ? -1 : static_cast<int>(comrade.rank) - 1;
        int liveness[2] = {-1, -1};
        for (int s = 0; s < 2; ++s) {
            if (mine == -1)
                liveness[s] = fcntl(ends[s][0], F_DUPFD, 700);
            else if (mine == s)
                fcntl(ends[s][1], F_DUPFD, 700);
            close(ends[s][0]);
            close(ends[s][1]);
        }
        select_gpu(comrade.rank);
        sy_frame_geometry geometry;
        CHECK_LAUNCH(sy_make_geometry(kHidden, kTopK, SY_DTYPE_F8_E4M3, kTokens, 2, &geometry));
        Slots slots(comrade, geometry.slot_bytes, geometry.response_slot_bytes);
        Buffers buffers(kTokens, kHidden, kTopK, 2, 16);
        cudaStream_t stream;
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        const sy_placement placement = reference::make_placement(kExperts, 2, 1, 1);
        Roles roles = make_roles(comrade, topology, slots, buffers, geometry, kTokens, placement);
        if (roles.server != nullptr) {
            serve(*roles.server, *board, stream);
            return 0;
        }
        return attend(*roles.client, slots, buffers, *board, placement, liveness, freezes, seed,
                      stream);
    };
    std::thread striker;
    const auto on_gather = [&](uint32_t count, const std::vector<pid_t>& pids) {
        if (count != 0)
            return;
        for (auto& pair : ends) {
            close(pair[0]);
            close(pair[1]);
        }
        const pid_t victim = pids[1 + kVictim];
        striker = std::thread([board, victim, freezes] {
            for (int i = 0; i < 30000 && board->is_loaded.load() == 0; ++i)
                usleep(1000);
            usleep(50000 + static_cast<unsigned>(getpid()) % 1000);
            board->struck_at_ns.store(now_ns());
            kill(victim, freezes ? SIGSTOP : SIGKILL);
            // A frozen process is ended once the test is over.
            for (int i = 0; freezes && i < 30000 && board->is_over.load() == 0; ++i)
                usleep(1000);
            kill(victim, SIGKILL);
        });
    };
    const int code = run_ranks(3, limit_s, 1 + kVictim, body, on_gather);
    board->is_loaded.store(1);
    board->is_over.store(1);
    if (striker.joinable())
        striker.join();
    munmap(board, sizeof(Board));
    return code;
}

} // namespace

int main(int argc, char** argv) {
    double limit_s = 30;
    uint64_t seed = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (std::string(argv[i]) == "--limit")
            limit_s = atof(argv[i + 1]);
        else if (std::string(argv[i]) == "--seed")
            seed = strtoull(argv[i + 1], nullptr, 10);
        else
            CHECK(false, "unknown argument %s", argv[i]);
    }
    int result = 0;
    for (const bool freezes : {false, true}) {
        const int code = run(freezes, limit_s, seed + freezes);
        fprintf(stderr, "fault_test %s: %s\n", freezes ? "freeze" : "kill",
                code == 0 ? "all right" : "FAILED");
        result = result != 0 ? result : code;
    }
    return result;
}
