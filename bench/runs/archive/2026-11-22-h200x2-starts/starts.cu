// Two senders on GPU 0, one receiver on GPU 1; the second sender is launched late.
#include "switchyard/impls/p2p.cuh"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <vector>
using namespace switchyard;
#define OK(x)                                                                                      \
    do {                                                                                           \
        cudaError_t e = (x);                                                                       \
        if (e != cudaSuccess) {                                                                    \
            printf("%s: %s\n", #x, cudaGetErrorString(e));                                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
constexpr uint64_t kBytes = 8 << 20;
constexpr uint32_t kBlocks = 16, kTurns = 50;
int main() {
    int n = 0;
    OK(cudaGetDeviceCount(&n));
    if (n < 2) {
        printf("needs 2 GPUs\n");
        return 3;
    }
    uint8_t* slot[3];
    uint8_t* result[3];
    for (int g = 0; g < 2; ++g) {
        OK(cudaSetDevice(g));
        OK(cudaDeviceEnablePeerAccess(1 - g, 0));
    }
    auto gpu = [](int party) { return party == 2 ? 1 : 0; };
    for (int p = 0; p < 3; ++p) {
        OK(cudaSetDevice(gpu(p)));
        OK(cudaMalloc(&slot[p], 2 * kBytes + 4096));
        OK(cudaMalloc(&result[p], 512));
    }
    cudaStream_t stream[3];
    for (int p = 0; p < 3; ++p) {
        OK(cudaSetDevice(gpu(p)));
        OK(cudaStreamCreateWithFlags(&stream[p], cudaStreamNonBlocking));
    }
    auto run = [&](std::vector<int> senders, int late_us) {
        for (int p = 0; p < 3; ++p) {
            OK(cudaSetDevice(gpu(p)));
            OK(cudaMemset(slot[p] + 2 * kBytes, 0, 4096));
            OK(cudaMemset(result[p], 0, 512));
            OK(cudaDeviceSynchronize());
        }
        auto params_of = [&](int p) {
            std::vector<int> peers = p == 2 ? senders : std::vector<int>{2};
            static sy_p2p_params q;
            memset(&q, 0, sizeof(q));
            q.version = SY_DEVICE_ABI_VERSION;
            q.num_peers = peers.size();
            q.blocks_per_peer = kBlocks;
            q.num_turns = kTurns;
            q.begins = p != 2;
            q.num_bytes = kBytes;
            q.timeout_ns = 3'000'000'000ull;
            q.elapsed_ns = (uint64_t*)result[p];
            q.error = (sy_error_word*)(result[p] + 256);
            for (size_t i = 0; i < peers.size(); ++i) {
                uint32_t line =
                    p == 2 ? 0 : std::find(senders.begin(), senders.end(), p) - senders.begin();
                q.counters[i] = (uint64_t)(slot[p] + 2 * kBytes + 128 * i);
                uint64_t window = (uint64_t)(slot[peers[i]] + kBytes * line);
                q.counter_offset[i] = (uint64_t)(slot[peers[i]] + 2 * kBytes + 128 * line) - window;
                q.links[i] = {window, 0, SY_WAY_DIRECT, 0};
            }
            return q;
        };
        auto launch = [&](int p) {
            OK(cudaSetDevice(gpu(p)));
            sy_p2p_params q = params_of(p);
            impls::stream_kernel<<<q.num_peers * kBlocks, impls::kP2pThreads, 0, stream[p]>>>(q);
            OK(cudaGetLastError());
        };
        launch(2);
        for (size_t i = 0; i < senders.size(); ++i) {
            if (i)
                usleep(late_us);
            launch(senders[i]);
        }
        double most = 0;
        for (int p : senders) {
            OK(cudaSetDevice(0));
            OK(cudaStreamSynchronize(stream[p]));
            uint64_t ns;
            OK(cudaMemcpy(&ns, result[p], 8, cudaMemcpyDeviceToHost));
            uint32_t tag;
            OK(cudaMemcpy(&tag, result[p] + 256, 4, cudaMemcpyDeviceToHost));
            if (tag)
                printf("error tag %u\n", tag);
            most = std::max(most, double(ns));
        }
        OK(cudaSetDevice(1));
        OK(cudaStreamSynchronize(stream[2]));
        return double(kBytes) * kTurns * senders.size() / most;
    };
    run({0}, 0);
    for (int repeat = 0; repeat < 3; ++repeat) {
        double one = run({0}, 0), two = run({0, 1}, 0), late = run({0, 1}, 600),
               later = run({0, 1}, 5000);
        printf(
            "{\"one_sender_gb_per_s\": %.1f, \"two\": %.1f, \"two_second_0.6_ms_late\": %.1f, \"two_second_5_ms_late\": %.1f}\n",
            one, two, late, later);
    }
}
