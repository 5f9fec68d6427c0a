// The expert stage against double precision on the host, and its speed.
//
//   expert_test [--seed N]       correctness, small shapes
//   expert_test --bench          one JSON line per model and number of tokens per expert
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <string>

#include <cuda_bf16.h>

#include "ranks.hpp"

namespace {

__global__ void fill_bf16(uint32_t* words, uint64_t count, uint32_t seed, float magnitude) {
    for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
         i += uint64_t{gridDim.x} * blockDim.x) {
        uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed ^ static_cast<uint32_t>(i >> 32);
        x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
        const float low = (static_cast<float>(x & 0xffff) / 32768.0f - 1.0f) * magnitude;
        const float high = (static_cast<float>(x >> 16) / 32768.0f - 1.0f) * magnitude;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&words[i], &pair, 4);
    }
}

// Weights, lists and a client's frame on the device.
struct Stage {
    sy_frame_geometry geometry;
    sy_expert_compute_params params = {};
    uint8_t *slot, *lists;
    uint16_t *gate_up, *down;
    uint32_t num_entries = 0;
    std::vector<uint32_t> expert_begin, list_row;

    // Expert e gets counts[e] entries of random rows.
    Stage(uint32_t hidden, uint32_t inter, uint32_t dtype, uint32_t num_rows, uint32_t top_k,
          const std::vector<uint32_t>& counts, uint64_t seed) {
        CHECK_LAUNCH(sy_make_geometry(hidden, top_k, dtype, num_rows, 2, &geometry));
        const uint32_t num_experts = counts.size();
        reference::Random random(seed);
        expert_begin.push_back(0);
        for (const uint32_t count : counts) {
            for (uint32_t i = 0; i < count; ++i)
                list_row.push_back(random.below(num_rows));
            expert_begin.push_back(list_row.size());
        }
        num_entries = list_row.size();
        CHECK(num_entries <= num_rows * top_k, "%u entries of %u rows", num_entries, num_rows);
        sy_expert_lists at;
        const uint64_t bytes = sy_expert_lists_at(0, &geometry, num_experts, num_rows, &at);
        lists = device_alloc<uint8_t>(bytes);
        sy_expert_lists_at(reinterpret_cast<uint64_t>(lists), &geometry, num_experts, num_rows, &at);
        sy_batch batch = {};
        batch.num_rows = num_rows;
        batch.num_entries = num_entries;
        batch.layer = 1;
        batch.clients = 1;
        batch.frame_number[0] = 1;
        to_device(at.batch, batch);
        std::vector<uint32_t> row_source(num_rows);
        for (uint32_t row = 0; row < num_rows; ++row)
            row_source[row] = row;
        upload(at.expert_begin, expert_begin.data(), expert_begin.size() * 4);
        upload(at.list_row, list_row.data(), list_row.size() * 4);
        upload(at.row_source, row_source.data(), row_source.size() * 4);
        slot = device_alloc<uint8_t>(geometry.slot_bytes);
        gate_up = device_alloc<uint16_t>(uint64_t{num_experts} * 2 * inter * hidden);
        down = device_alloc<uint16_t>(uint64_t{num_experts} * inter * hidden);
        const uint32_t words = static_cast<uint32_t>(seed);
        fill_bf16<<<1024, 256>>>(reinterpret_cast<uint32_t*>(gate_up),
                                 uint64_t{num_experts} * inter * hidden, words,
                                 3.0f / std::sqrt(static_cast<float>(hidden)));
        fill_bf16<<<1024, 256>>>(reinterpret_cast<uint32_t*>(down),
                                 uint64_t{num_experts} * inter * hidden / 2, words + 1,
                                 3.0f / std::sqrt(static_cast<float>(inter)));
        sy_client_peer peer = {};
        peer.request = reinterpret_cast<uint64_t>(slot);
        sy_client_peer* table = device_alloc<sy_client_peer>(1);
        to_device(table, peer);
        sy_layer_weights weights[2] = {{1, 1},
                                       {reinterpret_cast<uint64_t>(gate_up),
                                        reinterpret_cast<uint64_t>(down)}};
        sy_layer_weights* layers = device_alloc<sy_layer_weights>(2);
        upload(layers, weights, sizeof(weights));
        params.version = SY_DEVICE_ABI_VERSION;
        params.geometry = geometry;
        params.lists = at;
        params.rows = device_alloc<uint16_t>(uint64_t{num_rows} * hidden);
        params.activation = device_alloc<uint16_t>(uint64_t{num_rows} * top_k * inter);
        params.expert_out = device_alloc<uint16_t>(uint64_t{num_rows} * top_k * hidden);
        params.layers = layers;
        params.inter = inter;
        params.num_local_experts = num_experts;
        params.num_layers = 2;
        params.num_clients = 1;
        params.clients = table;
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    ~Stage() {
        for (void* pointer : {static_cast<void*>(slot), static_cast<void*>(lists),
                              static_cast<void*>(gate_up), static_cast<void*>(down), params.rows,
                              params.activation, params.expert_out})
            CHECK_CUDA(cudaFree(pointer));
    }
    uint64_t payload() const { return geometry.frame_bytes + geometry.payload_offset; }
    uint64_t scales() const { return geometry.frame_bytes + geometry.scales_offset; }
};

template <class T> std::vector<T> download(const void* pointer, size_t count) {
    std::vector<T> out(count);
    CHECK_CUDA(cudaMemcpy(out.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
}

void check(uint32_t hidden, uint32_t inter, uint32_t dtype, uint32_t num_rows, uint32_t top_k,
           const std::vector<uint32_t>& counts, uint64_t seed) {
    Stage stage(hidden, inter, dtype, num_rows, top_k, counts, seed);
    const bool fp8 = dtype == SY_DTYPE_F8_E4M3;
    reference::Random random(seed + 7);
    std::vector<double> rows(size_t{num_rows} * hidden);
    std::vector<uint8_t> payload(size_t{num_rows} * stage.geometry.row_stride_bytes);
    std::vector<float> scales(size_t{num_rows} * stage.geometry.scales_per_row);
    for (float& scale : scales)
        scale = 0.001f + random.unit() * 0.01f;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (fp8) {
            payload[i] = static_cast<uint8_t>(random.below(256));
            if ((payload[i] & 0x7f) == 0x7f)
                payload[i] = 0;
            const float scale = scales[i / hidden * stage.geometry.scales_per_row + i % hidden / 128];
            rows[i] = reference::from_bf16(
                reference::to_bf16(reference::from_e4m3(payload[i]) * scale));
        } else {
            const uint16_t bits = reference::to_bf16(random.unit() * 2 - 1);
            memcpy(&payload[i * 2], &bits, 2);
            rows[i] = reference::from_bf16(bits);
        }
    }
    upload(stage.slot + stage.payload(), payload.data(), payload.size());
    if (fp8)
        upload(stage.slot + stage.scales(), scales.data(), scales.size() * 4);
    CHECK_CUDA(cudaMemset(stage.params.rows, 0xff, size_t{num_rows} * hidden * 2));
    CHECK_CUDA(cudaMemset(stage.params.activation, 0xff, size_t{num_rows} * top_k * inter * 2));
    CHECK_CUDA(cudaMemset(stage.params.expert_out, 0xff, size_t{num_rows} * top_k * hidden * 2));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_LAUNCH(sy_launch_expert_compute(&stage.params, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    const auto gate_up = download<uint16_t>(stage.gate_up, counts.size() * 2 * inter * hidden);
    const auto down = download<uint16_t>(stage.down, counts.size() * inter * hidden);
    const auto out = download<uint16_t>(stage.params.expert_out, size_t{num_rows} * top_k * hidden);
    std::vector<double> off(counts.size()), norm(counts.size());
    reference::parallel(counts.size(), [&](uint32_t expert) {
        std::vector<double> act(inter);
        for (uint32_t at = stage.expert_begin[expert]; at < stage.expert_begin[expert + 1]; ++at) {
            const double* row = &rows[size_t{stage.list_row[at]} * hidden];
            for (uint32_t i = 0; i < inter; ++i) {
                const uint16_t* gate = &gate_up[(size_t{expert} * 2 * inter + i) * hidden];
                const uint16_t* up = gate + size_t{inter} * hidden;
                double g = 0, u = 0;
                for (uint32_t k = 0; k < hidden; ++k) {
                    g += row[k] * reference::from_bf16(gate[k]);
                    u += row[k] * reference::from_bf16(up[k]);
                }
                act[i] = g / (1 + std::exp(-g)) * u;
            }
            for (uint32_t o = 0; o < hidden; ++o) {
                double want = 0;
                for (uint32_t i = 0; i < inter; ++i)
                    want += act[i] *
                            reference::from_bf16(down[(size_t{expert} * hidden + o) * inter + i]);
                const double found = reference::from_bf16(out[size_t{at} * hidden + o]);
                CHECK(std::isfinite(found), "entry %u value %u", at, o);
                off[expert] += (found - want) * (found - want);
                norm[expert] += want * want;
            }
        }
    });
    double worst = 0;
    for (size_t expert = 0; expert < counts.size(); ++expert)
        if (norm[expert] > 0)
            worst = std::max(worst, std::sqrt(off[expert] / norm[expert]));
    // Rounding of activations and results to bf16, each up to 2^-9.
    CHECK(worst < 5e-3, "hidden %u inter %u: off by %g", hidden, inter, worst);
    for (size_t i = size_t{stage.num_entries} * hidden; i < out.size(); ++i)
        CHECK(out[i] == 0xffff, "value %zu behind the last entry was written", i);
    printf("ok hidden %u inter %u %s: %u entries of %zu experts, off by %.2e\n", hidden, inter,
           fp8 ? "fp8" : "bf16", stage.num_entries, counts.size(), worst);
}

double copy_rate() {
    const size_t bytes = size_t{2} << 30;
    uint8_t *from = device_alloc<uint8_t>(bytes), *to = device_alloc<uint8_t>(bytes);
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    float best = 1e9f;
    for (int i = 0; i < 8; ++i) {
        CHECK_CUDA(cudaEventRecord(begin));
        CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice));
        CHECK_CUDA(cudaEventRecord(end));
        CHECK_CUDA(cudaEventSynchronize(end));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
        best = std::min(best, ms);
    }
    CHECK_CUDA(cudaFree(from));
    CHECK_CUDA(cudaFree(to));
    return 2.0 * static_cast<double>(bytes) / (best * 1e-3);
}

// Dense bf16 products of a library on this GPU, measured apart (8192 cubed, random data).
constexpr double kDenseRate = 790e12;

void bench(const char* model, uint32_t hidden, uint32_t inter, uint32_t num_experts,
           double bytes_per_s) {
    for (const uint32_t tokens : {1u, 4u, 16u, 64u, 256u, 1024u}) {
        const uint32_t num_rows = std::max(tokens, num_experts * tokens / 8);
        const std::vector<uint32_t> counts(num_experts, tokens);
        Stage stage(hidden, inter, SY_DTYPE_BF16, num_rows, 16, counts, 5);
        fill_bf16<<<1024, 256>>>(reinterpret_cast<uint32_t*>(stage.slot + stage.payload()),
                                 uint64_t{num_rows} * hidden / 2, 3, 1.0f);
        cudaStream_t stream;
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK_CUDA(cudaDeviceSynchronize());
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK_LAUNCH(sy_launch_expert_compute(&stage.params, stream));
        CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK_LAUNCH(sy_launch_expert_compute(&stage.params, stream));
        CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
        CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
        cudaEvent_t begin, end;
        CHECK_CUDA(cudaEventCreate(&begin));
        CHECK_CUDA(cudaEventCreate(&end));
        std::vector<float> times;
        for (int i = 0; i < 25; ++i) {
            CHECK_CUDA(cudaEventRecord(begin, stream));
            CHECK_CUDA(cudaGraphLaunch(executable, stream));
            CHECK_CUDA(cudaEventRecord(end, stream));
            CHECK_CUDA(cudaEventSynchronize(end));
            float ms;
            CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
            if (i >= 4)
                times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        const double seconds = times[times.size() / 2] * 1e-3;
        const double entries = static_cast<double>(num_experts) * tokens;
        const double flops = entries * 6.0 * hidden * inter;
        const double bytes = num_experts * 6.0 * hidden * inter + num_rows * 2.0 * hidden +
                             entries * 2.0 * hidden;
        const double floor_s = std::max(bytes / bytes_per_s, flops / kDenseRate);
        printf("{\"bench\":\"expert_compute\",\"model\":\"%s\",\"experts\":%u,\"tokens_per_expert\":%u,"
               "\"us\":%.1f,\"p10_us\":%.1f,\"p90_us\":%.1f,\"tb_per_s\":%.2f,\"tflop_per_s\":%.0f,"
               "\"floor_us\":%.1f,\"ratio\":%.2f}\n",
               model, num_experts, tokens, seconds * 1e6, times[times.size() / 10] * 1e3,
               times[times.size() * 9 / 10] * 1e3, bytes / seconds * 1e-12, flops / seconds * 1e-12,
               floor_s * 1e6, seconds / floor_s);
        fflush(stdout);
        CHECK_CUDA(cudaGraphExecDestroy(executable));
        CHECK_CUDA(cudaGraphDestroy(graph));
        CHECK_CUDA(cudaStreamDestroy(stream));
    }
}

} // namespace

int main(int argc, char** argv) {
    uint64_t seed = 1;
    bool is_bench = false;
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--bench")
            is_bench = true;
        else if (arg == "--seed" && i + 1 < argc)
            seed = strtoull(argv[++i], nullptr, 10);
    }
    if (is_bench) {
        const double rate = copy_rate();
        printf("{\"bench\":\"copy\",\"tb_per_s\":%.2f}\n", rate * 1e-12);
        bench("deepseek-v3", 7168, 2048, 32, rate);
        bench("qwen3-30b-a3b", 2048, 768, 128, rate);
        return 0;
    }
    for (const uint32_t dtype : {SY_DTYPE_BF16, SY_DTYPE_F8_E4M3}) {
        check(256, 128, dtype, 100, 8, {1, 0, 7, 8, 9, 130, 16, 300}, seed);
        check(512, 192, dtype, 64, 4, {0, 0, 33, 0, 128, 1}, seed + 1);
        check(1152, 64, dtype, 200, 2, {257, 0, 15}, seed + 2);
    }
    Stage bad(256, 128, SY_DTYPE_BF16, 8, 2, {3}, seed);
    sy_expert_compute_params params = bad.params;
    params.inter = 100;
    CHECK(sy_launch_expert_compute(&params, nullptr) == SY_LAUNCH_INTER, "inter of 100");
    params = bad.params;
    params.rows = nullptr;
    CHECK(sy_launch_expert_compute(&params, nullptr) == SY_LAUNCH_NULL, "no rows");
    printf("expert_test: all ok\n");
    return 0;
}
