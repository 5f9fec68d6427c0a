// What one kernel for both products could gain: gate and up on some multiprocessors beside down on the others,
// against one behind the other. The two are independent here: down reads what an earlier run left, which is what
// a kernel for both would have without ever waiting for it. One JSON line per variant. README.md has the command.
#define main expert_test_main
#include "expert_test.cu"
#undef main
#include "compute.cu"

#include <chrono>

#include <unistd.h>

extern "C" const char* sy_launch_error(int) { return "refused"; }

namespace {

constexpr uint32_t kBlocks = 132; // one per multiprocessor
constexpr double kTurnUs = 12000;
constexpr int kTurns = 40, kSingles = 25;
constexpr uint32_t kPauseUs = 15000;

struct Variant {
    std::string name;
    cudaGraphExec_t executable;
    std::vector<double> steady_us, single_us;
};

class Bench {
  public:
    Bench(const char* model, uint32_t hidden, uint32_t inter, uint32_t num_experts, uint32_t tokens)
        : model_(model), tokens_(tokens), num_rows_(std::max(tokens, num_experts * tokens / 8)),
          stage_({hidden, inter, SY_DTYPE_F8_E4M3, SY_DTYPE_F8_E4M3, num_rows_, 16,
                  std::vector<uint32_t>(num_experts, tokens)},
                 5) {
        fill_f8<<<1024, 256>>>(reinterpret_cast<uint32_t*>(stage_.slot + stage_.payload()),
                               uint64_t{num_rows_} * hidden / 4, 3);
        fill_f32<<<64, 256>>>(reinterpret_cast<float*>(stage_.slot + stage_.scales()),
                              uint64_t{num_rows_} * blocks_of(hidden), 4, 0.01f);
        CHECK_CUDA(cudaDeviceSynchronize());
        for (cudaStream_t* stream : {&stream_, &beside_})
            CHECK_CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
        for (cudaEvent_t* event : {&fork_, &join_, &begin_, &end_})
            CHECK_CUDA(cudaEventCreate(event));
        CHECK_LAUNCH(sy_launch_expert_compute(&stage_.params, stream_));
        CHECK_CUDA(cudaStreamSynchronize(stream_));
    }

    void run() {
        const auto gate_up = impls::expert_gemm_kernel<true, true, true>;
        const auto down = impls::expert_gemm_kernel<true, false, false>;
        add("sequence", [&] { CHECK_LAUNCH(sy_launch_expert_compute(&stage_.params, stream_)); });
        add("gate_up", [&] { launch(gate_up, kBlocks, stream_); });
        add("down", [&] { launch(down, kBlocks, stream_); });
        for (const uint32_t blocks : {80u, 84u, 88u, 90u, 92u, 96u})
            add("gate_up on " + std::to_string(blocks), [&] {
                CHECK_CUDA(cudaEventRecord(fork_, stream_));
                CHECK_CUDA(cudaStreamWaitEvent(beside_, fork_, 0));
                launch(gate_up, blocks, stream_);
                launch(down, kBlocks - blocks, beside_);
                CHECK_CUDA(cudaEventRecord(join_, beside_));
                CHECK_CUDA(cudaStreamWaitEvent(stream_, join_, 0));
            });
        const int per_turn = std::max(1, static_cast<int>(kTurnUs / measure(variants_[0], 20)));
        const auto begin = std::chrono::steady_clock::now();
        while (std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(500))
            measure(variants_[0], per_turn);
        for (int turn = 0; turn < kTurns; ++turn)
            for (Variant& variant : variants_)
                variant.steady_us.push_back(measure(variant, per_turn));
        for (int turn = 0; turn < kSingles; ++turn)
            for (Variant& variant : variants_) {
                usleep(kPauseUs);
                measure(variant, 1);
                variant.single_us.push_back(measure(variant, 1));
            }
        for (Variant& variant : variants_)
            print(variant);
    }

  private:
    template <class Kernel> void launch(Kernel kernel, uint32_t num_blocks, cudaStream_t stream) {
        sy_expert_compute_params params = stage_.params;
        params.num_blocks = num_blocks;
        CHECK_LAUNCH(launch_one(kernel, params, plan_products(params), impls::kGemmSharedBytes,
                                false, stream));
    }

    template <class Enqueue> void add(const std::string& name, Enqueue&& enqueue) {
        Variant variant = {name, nullptr, {}, {}};
        cudaGraph_t graph;
        CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        enqueue();
        CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&variant.executable, graph, 0));
        variants_.push_back(variant);
    }

    // Mean of a few replays in a row, in µs.
    double measure(const Variant& variant, int num_replays) {
        CHECK_CUDA(cudaEventRecord(begin_, stream_));
        for (int i = 0; i < num_replays; ++i)
            CHECK_CUDA(cudaGraphLaunch(variant.executable, stream_));
        CHECK_CUDA(cudaEventRecord(end_, stream_));
        CHECK_CUDA(cudaEventSynchronize(end_));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
        return ms * 1e3 / num_replays;
    }

    void print(Variant& variant) {
        printf("{\"model\":\"%s\",\"tokens\":%u,\"variant\":\"%s\"", model_, tokens_,
               variant.name.c_str());
        const auto quantiles = [](const char* name, std::vector<double>& times) {
            std::sort(times.begin(), times.end());
            const auto at = [&](double part) {
                return times[static_cast<size_t>(part * static_cast<double>(times.size() - 1))];
            };
            printf(",\"%s_us\":%.1f,\"%s_p10\":%.1f,\"%s_p90\":%.1f", name, at(0.5), name, at(0.1),
                   name, at(0.9));
        };
        quantiles("steady", variant.steady_us);
        quantiles("single", variant.single_us);
        printf("}\n");
        fflush(stdout);
    }

    const char* model_;
    uint32_t tokens_, num_rows_;
    Stage stage_;
    cudaStream_t stream_, beside_;
    cudaEvent_t fork_, join_, begin_, end_;
    std::vector<Variant> variants_;
};

} // namespace

int main() {
    for (const uint32_t tokens : {128u, 256u, 1024u}) {
        Bench("qwen3-30b-a3b", 2048, 768, 128, tokens).run();
        Bench("deepseek-v3", 7168, 2048, 32, tokens).run();
    }
}
