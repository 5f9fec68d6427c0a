// The expert stage against double precision on the host, and its speed.
//
//   expert_test [--seed N]                        correctness, small shapes
//   expert_test --few [--dtype bf16|fp8] [--seed N]   the same, of tiles in parts only, without the
//                                                 bits of whole tiles
//   expert_test --expire [--seed N]               copies that never complete
//   expert_test --bench [--bf16-rate TFLOP/s] [--fp8-rate TFLOP/s] [--dtype bf16|fp8] [--tokens N]
//                                                 one JSON line per model, type and tokens per
//                                                 expert
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_bf16.h>

#include "driver.hpp"
#include "ranks.hpp"

namespace {

__device__ uint32_t mix(uint64_t i, uint32_t seed) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u ^ seed ^ static_cast<uint32_t>(i >> 32);
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}

__global__ void fill_bf16(uint32_t* words, uint64_t count, uint32_t seed, float magnitude) {
    for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
         i += uint64_t{gridDim.x} * blockDim.x) {
        const uint32_t x = mix(i, seed);
        const float low = (static_cast<float>(x & 0xffff) / 32768.0f - 1.0f) * magnitude;
        const float high = (static_cast<float>(x >> 16) / 32768.0f - 1.0f) * magnitude;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&words[i], &pair, 4);
    }
}

// Any e4m3 codes but those of NaN.
__global__ void fill_f8(uint32_t* words, uint64_t count, uint32_t seed) {
    for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
         i += uint64_t{gridDim.x} * blockDim.x) {
        uint32_t x = mix(i, seed);
        for (uint32_t byte = 0; byte < 4; ++byte)
            if ((x >> byte * 8 & 0x7f) == 0x7f)
                x &= ~(0x7fu << byte * 8);
        words[i] = x;
    }
}

__global__ void fill_f32(float* values, uint64_t count, uint32_t seed, float most) {
    for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
         i += uint64_t{gridDim.x} * blockDim.x)
        values[i] = most * (0.5f + static_cast<float>(mix(i, seed) >> 8) / 33554432.0f);
}

uint32_t blocks_of(uint32_t values) { return (values + 127) / 128; }

struct Case {
    uint32_t hidden, inter, rows_dtype, weights_dtype, num_rows, top_k;
    std::vector<uint32_t> counts;
};

// Weights, lists and a client's frame on the device.
struct Stage {
    sy_frame_geometry geometry;
    sy_expert_compute_params params = {};
    uint8_t *slot, *lists, *gate_up, *down;
    float *gate_up_scale = nullptr, *down_scale = nullptr;
    sy_layer_weights* layers;
    sy_client_peer* table;
    uint32_t num_entries = 0;
    uint64_t gate_up_values, down_values, rows_bytes, activation_bytes;
    std::vector<uint32_t> expert_begin, list_row;

    // Expert e gets counts[e] entries of random rows.
    Stage(const Case& c, uint64_t seed) {
        CHECK_LAUNCH(sy_make_geometry(c.hidden, c.top_k, c.rows_dtype, c.num_rows, 2, &geometry));
        const uint32_t num_experts = c.counts.size();
        reference::Random random(seed);
        expert_begin.push_back(0);
        for (const uint32_t count : c.counts) {
            for (uint32_t i = 0; i < count; ++i)
                list_row.push_back(random.below(c.num_rows));
            expert_begin.push_back(list_row.size());
        }
        num_entries = list_row.size();
        CHECK(num_entries <= c.num_rows * c.top_k, "%u entries of %u rows", num_entries,
              c.num_rows);
        sy_expert_lists at;
        const uint64_t bytes = sy_expert_lists_at(0, &geometry, num_experts, c.num_rows, &at);
        lists = device_alloc<uint8_t>(bytes);
        sy_expert_lists_at(reinterpret_cast<uint64_t>(lists), &geometry, num_experts, c.num_rows,
                           &at);
        sy_batch batch = {};
        batch.num_rows = c.num_rows;
        batch.num_entries = num_entries;
        batch.layer = 1;
        batch.clients = 1;
        batch.frame_number[0] = 1;
        to_device(at.batch, batch);
        std::vector<uint32_t> row_source(c.num_rows);
        for (uint32_t row = 0; row < c.num_rows; ++row)
            row_source[row] = row;
        upload(at.expert_begin, expert_begin.data(), expert_begin.size() * 4);
        if (num_entries != 0)
            upload(at.list_row, list_row.data(), list_row.size() * 4);
        upload(at.row_source, row_source.data(), row_source.size() * 4);
        slot = device_alloc<uint8_t>(geometry.slot_bytes);
        make_weights(c, seed);
        sy_client_peer peer = {};
        peer.request = reinterpret_cast<uint64_t>(slot);
        table = device_alloc<sy_client_peer>(1);
        to_device(table, peer);
        const auto scratch = [&](uint32_t values) {
            return sy_expert_scratch_bytes(&geometry, num_experts, c.num_rows, c.weights_dtype,
                                           values);
        };
        rows_bytes = scratch(c.hidden);
        activation_bytes = scratch(c.inter);
        params.version = SY_DEVICE_ABI_VERSION;
        params.geometry = geometry;
        params.lists = at;
        params.rows = device_alloc<uint8_t>(rows_bytes);
        params.activation = device_alloc<uint8_t>(activation_bytes);
        params.expert_out = device_alloc<uint16_t>(uint64_t{c.num_rows} * c.top_k * c.hidden);
        params.layers = layers;
        params.inter = c.inter;
        params.num_local_experts = num_experts;
        params.num_layers = 2;
        params.num_clients = 1;
        params.weights_dtype = c.weights_dtype;
        params.timeout_ns = 10'000'000'000;
        params.clients = table;
        params.tile_arrivals = device_alloc<uint32_t>(SY_TILE_ARRIVALS);
        CHECK_CUDA(cudaMemset(params.tile_arrivals, 0, SY_TILE_ARRIVALS * sizeof(uint32_t)));
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    ~Stage() {
        for (void* pointer :
             {static_cast<void*>(slot), static_cast<void*>(lists), static_cast<void*>(gate_up),
              static_cast<void*>(down), static_cast<void*>(gate_up_scale),
              static_cast<void*>(down_scale), static_cast<void*>(layers), static_cast<void*>(table),
              static_cast<void*>(params.tile_arrivals), params.rows, params.activation,
              params.expert_out})
            CHECK_CUDA(cudaFree(pointer));
    }
    Stage(const Stage&) = delete;
    Stage& operator=(const Stage&) = delete;

    uint64_t payload() const { return geometry.frame_bytes + geometry.payload_offset; }
    uint64_t scales() const { return geometry.frame_bytes + geometry.scales_offset; }

  private:
    // Values of about 3 / sqrt(depth), so that results stay near 1.
    void make_weights(const Case& c, uint64_t seed) {
        const bool fp8 = c.weights_dtype == SY_DTYPE_F8_E4M3;
        const uint32_t value_bytes = fp8 ? 1 : 2, words = static_cast<uint32_t>(seed);
        const uint64_t num_experts = c.counts.size();
        gate_up_values = num_experts * 2 * c.inter * c.hidden;
        down_values = num_experts * c.inter * c.hidden;
        gate_up = device_alloc<uint8_t>(gate_up_values * value_bytes);
        down = device_alloc<uint8_t>(down_values * value_bytes);
        const float gate_up_size = 3.0f / std::sqrt(static_cast<float>(c.hidden));
        const float down_size = 3.0f / std::sqrt(static_cast<float>(c.inter));
        if (fp8) {
            fill_f8<<<1024, 256>>>(reinterpret_cast<uint32_t*>(gate_up), gate_up_values / 4, words);
            fill_f8<<<1024, 256>>>(reinterpret_cast<uint32_t*>(down), down_values / 4, words + 1);
            const uint64_t up_scales = num_experts * 2 * blocks_of(c.inter) * blocks_of(c.hidden);
            gate_up_scale = device_alloc<float>(up_scales);
            down_scale = device_alloc<float>(up_scales / 2);
            // Codes at random are about 100 large.
            fill_f32<<<64, 256>>>(gate_up_scale, up_scales, words + 2, gate_up_size / 100);
            fill_f32<<<64, 256>>>(down_scale, up_scales / 2, words + 3, down_size / 100);
        } else {
            fill_bf16<<<1024, 256>>>(reinterpret_cast<uint32_t*>(gate_up), gate_up_values / 2,
                                     words, gate_up_size);
            fill_bf16<<<1024, 256>>>(reinterpret_cast<uint32_t*>(down), down_values / 2, words + 1,
                                     down_size);
        }
        CHECK_CUDA(cudaDeviceSynchronize());
        sy_layer_weights weights[2] = {};
        weights[1].gate_up = reinterpret_cast<uint64_t>(gate_up);
        weights[1].down = reinterpret_cast<uint64_t>(down);
        weights[1].gate_up_scale = reinterpret_cast<uint64_t>(gate_up_scale);
        weights[1].down_scale = reinterpret_cast<uint64_t>(down_scale);
        weights[1].dtype = c.weights_dtype;
        CHECK_LAUNCH(sy_describe_layer(&weights[1], c.hidden, c.inter, c.counts.size()));
        layers = device_alloc<sy_layer_weights>(2);
        upload(layers, weights, sizeof(weights));
    }
};

template <class T> std::vector<T> download(const void* pointer, size_t count) {
    std::vector<T> out(count);
    CHECK_CUDA(cudaMemcpy(out.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
}

// A matrix per expert in double precision.
struct Matrices {
    uint32_t num_rows, depth;
    std::vector<float> values;
    const float* row(uint64_t matrix, uint32_t row_idx) const {
        return &values[(matrix * num_rows + row_idx) * depth];
    }
};

Matrices read_matrices(const uint8_t* values, const float* scales, uint32_t num_matrices,
                       uint32_t num_rows, uint32_t depth) {
    Matrices out = {num_rows, depth, std::vector<float>(size_t{num_matrices} * num_rows * depth)};
    if (scales == nullptr) {
        const auto bits = download<uint16_t>(values, out.values.size());
        for (size_t i = 0; i < bits.size(); ++i)
            out.values[i] = reference::from_bf16(bits[i]);
        return out;
    }
    const uint32_t row_blocks = blocks_of(num_rows), depth_blocks = blocks_of(depth);
    const auto codes = download<uint8_t>(values, out.values.size());
    const auto factors = download<float>(scales, size_t{num_matrices} * row_blocks * depth_blocks);
    reference::parallel(num_matrices, [&](uint32_t matrix) {
        for (uint32_t r = 0; r < num_rows; ++r)
            for (uint32_t k = 0; k < depth; ++k) {
                const size_t i = (size_t{matrix} * num_rows + r) * depth + k;
                // Exact: the product of four and 24 bits would not be, so it is made where it is
                // used.
                out.values[i] =
                    reference::from_e4m3(codes[i]) *
                    factors[(size_t{matrix} * row_blocks + r / 128) * depth_blocks + k / 128];
            }
    });
    return out;
}

// One row, 128 values by 128, as quantised fp8 would hold it.
void quantize_row(std::vector<double>& row) {
    for (size_t first = 0; first < row.size(); first += 128) {
        const size_t end = std::min(first + 128, row.size());
        float largest = 0;
        for (size_t i = first; i < end; ++i) {
            row[i] = reference::from_bf16(reference::to_bf16(static_cast<float>(row[i])));
            largest = std::max(largest, std::fabs(static_cast<float>(row[i])));
        }
        const float scale = largest == 0 ? 1.0f : largest / 448.0f;
        for (size_t i = first; i < end; ++i)
            row[i] = double{reference::from_e4m3(
                         reference::to_e4m3(static_cast<float>(row[i]) * (1.0f / scale)))} *
                     scale;
    }
}

// Activations as the first product left them, read back from their panels (impls/expert_walk.cuh).
struct Activations {
    std::vector<uint8_t> bytes;
    uint64_t num_rows, num_panels;
    bool fp8;

    Activations(const Stage& stage, const Case& c)
        : bytes(download<uint8_t>(stage.params.activation, stage.activation_bytes)),
          num_rows((uint64_t{c.num_rows} * c.top_k + 7) / 8 * 8 + 8 * c.counts.size()),
          fp8(c.weights_dtype == SY_DTYPE_F8_E4M3) {
        num_panels = (c.inter + values_per_panel() - 1) / values_per_panel();
    }
    uint32_t values_per_panel() const { return fp8 ? 128 : 64; }
    double value(uint64_t row, uint32_t i) const {
        const uint64_t found = bits(row, i);
        if (!fp8)
            return reference::from_bf16(static_cast<uint16_t>(found));
        const uint32_t scale_bits = static_cast<uint32_t>(found >> 32);
        float scale;
        memcpy(&scale, &scale_bits, 4);
        return double{reference::from_e4m3(static_cast<uint8_t>(found))} * scale;
    }
    // The value as it is stored: bf16, or a code with the bits of its scale above.
    uint64_t bits(uint64_t row, uint32_t i) const {
        const uint64_t panel = i / values_per_panel();
        const uint32_t at = i % values_per_panel() * (fp8 ? 1 : 2);
        const uint8_t* chunk =
            &bytes[(panel * num_rows + row) * 128 + ((at / 16) ^ (row & 7)) * 16 + at % 16];
        if (!fp8) {
            uint16_t bf16;
            memcpy(&bf16, chunk, 2);
            return bf16;
        }
        uint32_t scale;
        memcpy(&scale, &bytes[num_panels * num_rows * 128 + (panel * num_rows + row) * 4], 4);
        return uint64_t{scale} << 32 | *chunk;
    }
};

// Largest permitted difference between results and expected values, relative to the latter.
struct Error {
    double off = 0, norm = 0;
    void add(double found, double want) {
        off += (found - want) * (found - want);
        norm += want * want;
    }
    double relative() const { return std::sqrt(off / std::max(norm, 1e-30)); }
};

// Cases that were further off than they may be.
int num_bad = 0;
// Whether results are compared with those of whole tiles, bit by bit.
bool compares_tiles = true;

// Both products of a stage, into poisoned memory.
void compute(const Stage& stage, const sy_expert_compute_params& params, size_t num_out) {
    CHECK_CUDA(cudaMemset(stage.params.rows, 0xff, stage.rows_bytes));
    CHECK_CUDA(cudaMemset(stage.params.activation, 0xff, stage.activation_bytes));
    CHECK_CUDA(cudaMemset(stage.params.expert_out, 0xff, num_out * 2));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_LAUNCH(sy_launch_expert_compute(&params, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
}

// Computes the products again, and compares their bits with `out` and `activations`: without parts
// of the first product that meet in memory, and by one block, which has whole tiles only. A value
// is summed up in the same order either way.
void compare_with_whole_tiles(const Stage& stage, const Case& c,
                              const std::vector<uint64_t>& first_row,
                              const std::vector<uint16_t>& out, const Activations& activations) {
    sy_expert_compute_params meets_nowhere = stage.params, one_block = stage.params;
    meets_nowhere.tile_arrivals = nullptr;
    one_block.num_blocks = 1;
    for (const sy_expert_compute_params* params : {&meets_nowhere, &one_block}) {
        const char* way = params == &one_block ? "one block" : "no words for arrivals";
        compute(stage, *params, out.size());
        const auto whole_out = download<uint16_t>(stage.params.expert_out, out.size());
        const Activations whole(stage, c);
        for (uint32_t expert = 0; expert < c.counts.size(); ++expert)
            for (uint32_t entry = 0; entry < c.counts[expert]; ++entry)
                for (uint32_t i = 0; i < c.inter; ++i) {
                    const uint64_t row = first_row[expert] + entry;
                    CHECK(whole.bits(row, i) == activations.bits(row, i),
                          "%s: expert %u entry %u of %u, value %u of the first product is "
                          "%" PRIx64 ", in parts %" PRIx64,
                          way, expert, entry, c.counts[expert], i, whole.bits(row, i),
                          activations.bits(row, i));
                }
        for (size_t i = 0; i < out.size(); ++i)
            CHECK(whole_out[i] == out[i], "%s: value %zu of entry %zu is %04x, in parts %04x", way,
                  i % c.hidden, i / c.hidden, whole_out[i], out[i]);
    }
}

void check(const Case& c, uint64_t seed) {
    Stage stage(c, seed);
    const bool fp8_rows = c.rows_dtype == SY_DTYPE_F8_E4M3;
    const bool fp8 = c.weights_dtype == SY_DTYPE_F8_E4M3;
    reference::Random random(seed + 7);
    std::vector<std::vector<double>> rows(c.num_rows, std::vector<double>(c.hidden));
    std::vector<uint8_t> payload(size_t{c.num_rows} * stage.geometry.row_stride_bytes);
    std::vector<float> scales(size_t{c.num_rows} * stage.geometry.scales_per_row);
    for (float& scale : scales)
        scale = 0.001f + random.unit() * 0.01f;
    for (uint32_t r = 0; r < c.num_rows; ++r) {
        for (uint32_t k = 0; k < c.hidden; ++k) {
            const size_t i = size_t{r} * c.hidden + k;
            if (fp8_rows) {
                payload[i] = static_cast<uint8_t>(random.below(256));
                if ((payload[i] & 0x7f) == 0x7f)
                    payload[i] = 0;
                const float scale = scales[size_t{r} * stage.geometry.scales_per_row + k / 128];
                const float value = reference::from_e4m3(payload[i]) * scale;
                rows[r][k] = fp8 ? double{reference::from_e4m3(payload[i])} * scale
                                 : reference::from_bf16(reference::to_bf16(value));
            } else {
                const uint16_t bits = reference::to_bf16(random.unit() * 2 - 1);
                memcpy(&payload[i * 2], &bits, 2);
                rows[r][k] = reference::from_bf16(bits);
            }
        }
        if (fp8 && !fp8_rows)
            quantize_row(rows[r]);
    }
    upload(stage.slot + stage.payload(), payload.data(), payload.size());
    if (fp8_rows)
        upload(stage.slot + stage.scales(), scales.data(), scales.size() * 4);
    const size_t num_out = size_t{c.num_rows} * c.top_k * c.hidden;
    compute(stage, stage.params, num_out);
    const uint32_t num_experts = c.counts.size();
    const Matrices gate_up =
        read_matrices(stage.gate_up, stage.gate_up_scale, num_experts * 2, c.inter, c.hidden);
    const Matrices down =
        read_matrices(stage.down, stage.down_scale, num_experts, c.hidden, c.inter);
    const auto out = download<uint16_t>(stage.params.expert_out, num_out);
    const Activations activations(stage, c);
    // Each product separately: the second is compared with the product of the first's actual
    // results.
    std::vector<Error> first(stage.num_entries), second(stage.num_entries);
    std::vector<uint64_t> first_row = {0};
    for (const uint32_t count : c.counts)
        first_row.push_back(first_row.back() + (count + 7) / 8 * 8);
    reference::parallel(num_experts, [&](uint32_t expert) {
        std::vector<double> act(c.inter);
        for (uint32_t at = stage.expert_begin[expert]; at < stage.expert_begin[expert + 1]; ++at) {
            const double* row = rows[stage.list_row[at]].data();
            for (uint32_t i = 0; i < c.inter; ++i) {
                const float* gate = gate_up.row(uint64_t{expert} * 2, i);
                const float* up = gate_up.row(uint64_t{expert} * 2 + 1, i);
                double g = 0, u = 0;
                for (uint32_t k = 0; k < c.hidden; ++k) {
                    g += row[k] * gate[k];
                    u += row[k] * up[k];
                }
                act[i] = activations.value(first_row[expert] + at - stage.expert_begin[expert], i);
                first[at].add(act[i], g / (1 + std::exp(-g)) * u);
            }
            for (uint32_t o = 0; o < c.hidden; ++o) {
                const float* weights = down.row(expert, o);
                double want = 0;
                for (uint32_t i = 0; i < c.inter; ++i)
                    want += act[i] * weights[i];
                const double found = reference::from_bf16(out[size_t{at} * c.hidden + o]);
                CHECK(std::isfinite(found), "expert %u entry %u of %u value %u", expert,
                      at - stage.expert_begin[expert], c.counts[expert], o);
                second[at].add(found, want);
            }
        }
    });
    double worst[2] = {};
    for (uint32_t i = 0; i < stage.num_entries; ++i) {
        worst[0] = std::max(worst[0], first[i].relative());
        worst[1] = std::max(worst[1], second[i].relative());
    }
    // Of an entry, as a part of its length. bf16: results are rounded, each up to 2^-9 of itself.
    // fp8: the first's are rounded to e4m3, up to 2^-4; and sums of 32 products keep 14 bits in the
    // matrix units.
    const double bounds[2] = {fp8 ? 4e-2 : 5e-3, fp8 ? 8e-3 : 3e-3};
    printf("%s hidden %u inter %u rows %s weights %s: %u entries of %zu experts, off by %.2e and "
           "%.2e\n",
           worst[0] < bounds[0] && worst[1] < bounds[1] ? "ok" : "BAD", c.hidden, c.inter,
           fp8_rows ? "fp8" : "bf16", fp8 ? "fp8" : "bf16", stage.num_entries, c.counts.size(),
           worst[0], worst[1]);
    fflush(stdout);
    num_bad += !(worst[0] < bounds[0] && worst[1] < bounds[1]);
    for (size_t i = size_t{stage.num_entries} * c.hidden; i < out.size(); ++i)
        CHECK(out[i] == 0xffff, "value %zu behind the last entry was written", i);
    if (compares_tiles)
        compare_with_whole_tiles(stage, c, first_row, out, activations);
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

constexpr int kBenchReplays = 200; // a case's time is their median

struct Rates {
    double bytes_per_s, bf16_flops, fp8_flops;
    uint32_t num_blocks = 0;
};

void bench(const char* model, uint32_t hidden, uint32_t inter, uint32_t num_experts, uint32_t dtype,
           const Rates& rates, const std::vector<uint32_t>& sizes) {
    const bool fp8 = dtype == SY_DTYPE_F8_E4M3;
    for (const uint32_t tokens : sizes) {
        const uint32_t num_rows = std::max(tokens, num_experts * tokens / 8);
        Stage stage(
            {hidden, inter, dtype, dtype, num_rows, 16, std::vector<uint32_t>(num_experts, tokens)},
            5);
        stage.params.num_blocks = rates.num_blocks;
        if (fp8) {
            fill_f8<<<1024, 256>>>(reinterpret_cast<uint32_t*>(stage.slot + stage.payload()),
                                   uint64_t{num_rows} * hidden / 4, 3);
            fill_f32<<<64, 256>>>(reinterpret_cast<float*>(stage.slot + stage.scales()),
                                  uint64_t{num_rows} * blocks_of(hidden), 4, 0.01f);
        } else {
            fill_bf16<<<1024, 256>>>(reinterpret_cast<uint32_t*>(stage.slot + stage.payload()),
                                     uint64_t{num_rows} * hidden / 2, 3, 1.0f);
        }
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
        for (int i = 0; i < 4 + kBenchReplays; ++i) {
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
        const double value_bytes = fp8 ? 1.0 : 2.0;
        const double entries = static_cast<double>(num_experts) * tokens;
        const double flops = entries * 6.0 * hidden * inter;
        const double bytes = num_experts * 3.0 * value_bytes * hidden * inter +
                             num_rows * value_bytes * hidden + entries * 2.0 * hidden;
        const double by_bytes = bytes / rates.bytes_per_s;
        const double by_flops = flops / (fp8 ? rates.fp8_flops : rates.bf16_flops);
        const double floor_s = std::max(by_bytes, by_flops);
        printf("{\"bench\":\"expert_compute\",\"model\":\"%s\",\"dtype\":\"%s\",\"experts\":%u,"
               "\"tokens_per_expert\":%u,\"us\":%.1f,\"p10_us\":%.1f,\"p90_us\":%.1f,"
               "\"tb_per_s\":%.2f,\"tflop_per_s\":%.0f,\"floor_us\":%.1f,\"floor\":\"%s\","
               "\"ratio\":%.2f}\n",
               model, fp8 ? "fp8" : "bf16", num_experts, tokens, seconds * 1e6,
               times[times.size() / 10] * 1e3, times[times.size() * 9 / 10] * 1e3,
               bytes / seconds * 1e-12, flops / seconds * 1e-12, floor_s * 1e6,
               by_bytes > by_flops ? "bytes" : "operations", seconds / floor_s);
        fflush(stdout);
        CHECK_CUDA(cudaGraphExecDestroy(executable));
        CHECK_CUDA(cudaGraphDestroy(graph));
        CHECK_CUDA(cudaStreamDestroy(stream));
    }
}

// Fewer tiles than multiprocessors: in halves and in quarters, of both products and of one; the last
// tile is half a one; an expert of two groups of eight entries.
void few(uint32_t rows, uint32_t weights, uint64_t seed) {
    check({2048, 768, rows, weights, 1, 8, {1, 0, 1, 1, 1, 1, 1, 1, 1}}, seed + 7);
    check({2048, 768, rows, weights, 2, 8, {0, 2, 0, 1}}, seed + 8);
    check({1024, 576, rows, weights, 4, 8, {3, 1}}, seed + 9);
    check({512, 512, rows, weights, 8, 8, {0, 9, 0, 1}}, seed + 10);
    check({3072, 1024, rows, weights, 3, 2, {1, 0, 2}}, seed + 11);
    check({384, 128, rows, weights, 2, 4, {1, 2}}, seed + 12);
    // Parts that meet in memory need room there.
    check({256, 512, rows, weights, 2, 4, {1, 2}}, seed + 13);
}

void correctness(uint64_t seed) {
    constexpr uint32_t kBf16 = SY_DTYPE_BF16, kFp8 = SY_DTYPE_F8_E4M3;
    for (const uint32_t weights : {kBf16, kFp8})
        for (const uint32_t rows : {kBf16, kFp8}) {
            check({256, 128, rows, weights, 100, 8, {1, 0, 7, 8, 9, 130, 16, 300}}, seed);
            check({512, 192, rows, weights, 64, 4, {0, 0, 33, 0, 128, 1}}, seed + 1);
            check({1152, 64, rows, weights, 200, 2, {257, 0, 15}}, seed + 2);
            check({128, 256, rows, weights, 500, 4, {0, 1, 7, 63, 65, 129, 1000, 64, 24}},
                  seed + 3);
            check({384, 320, rows, weights, 120, 8, {0, 0, 0, 700, 0}}, seed + 4);
            std::vector<uint32_t> scattered(70);
            for (uint32_t i = 0; i < scattered.size(); ++i)
                scattered[i] = i % 3 == 0 ? 0 : i * 7 % 41;
            check({128, 64, rows, weights, 400, 8, scattered}, seed + 5);
            check({256, 128, rows, weights, 16, 2, {0, 0, 0}}, seed + 6);
            few(rows, weights, seed);
        }
}

void refusals(uint64_t seed) {
    Stage bad({256, 128, SY_DTYPE_BF16, SY_DTYPE_BF16, 8, 2, {3}}, seed);
    sy_expert_compute_params params = bad.params;
    params.inter = 100;
    CHECK(sy_launch_expert_compute(&params, nullptr) == SY_LAUNCH_INTER, "inter of 100");
    params = bad.params;
    params.rows = nullptr;
    CHECK(sy_launch_expert_compute(&params, nullptr) == SY_LAUNCH_NULL, "no rows");
    params = bad.params;
    params.timeout_ns = 0;
    CHECK(sy_launch_expert_compute(&params, nullptr) == SY_LAUNCH_BOUND, "no bound");
}

// Boxes of half the bytes that a stage waits for, so that no stage is ever full.
void halve_boxes(Stage& stage, const Case& c) {
    const auto encode =
        driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
    auto shape = sy_gate_up_map(c.hidden, c.inter, c.counts.size(), c.weights_dtype);
    shape.extent[shape.rank - 1] /= 2;
    const uint32_t element_strides[5] = {1, 1, 1, 1, 1};
    alignas(64) CUtensorMap map;
    const CUresult result =
        encode(&map,
               c.weights_dtype == SY_DTYPE_F8_E4M3 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
               shape.rank, stage.gate_up, shape.dims, shape.strides, shape.extent, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled: %d", result);
    upload(stage.layers[1].gate_up_map, &map, sizeof(map));
}

// Copies that never complete end the kernel with a trap, which says where it waited.
void expire(uint32_t rows_dtype, uint32_t weights_dtype, bool is_few, uint64_t seed) {
    const Case many = {256, 128, rows_dtype, weights_dtype, 100, 8, {3, 0, 130}};
    const Case few = {512, 128, rows_dtype, weights_dtype, 4, 8, {3, 0, 1}}; // in parts
    const Case c = is_few ? few : many;
    Stage stage(c, seed);
    halve_boxes(stage, c);
    sy_error_word* trapped;
    CHECK_CUDA(cudaHostAlloc(&trapped, sizeof(*trapped), cudaHostAllocMapped));
    *trapped = {};
    stage.params.timeout_ns = 100'000'000;
    stage.params.trapped = trapped;
    CHECK_LAUNCH(sy_launch_expert_compute(&stage.params, nullptr));
    const cudaError_t error = cudaDeviceSynchronize();
    CHECK(error == cudaErrorLaunchFailure, "%s", cudaGetErrorString(error));
    const volatile sy_error_word& word = *trapped;
    CHECK(word.tag == SY_TAG_PRODUCT && word.reason == SY_REASON_TIMEOUT && word.reserved == 0,
          "tag %u, reason %u", word.tag, word.reason);
    CHECK(word.observed < 4 && word.expected < 2, "stage %" PRIu64 ", parity %" PRIu64,
          word.observed, word.expected);
    printf("rows %u, weights %u, %s tokens: block %u gave stage %" PRIu64 " up\n", rows_dtype,
           weights_dtype, is_few ? "few" : "many", word.peer, word.observed);
    // The context is lost, and nothing of it can be freed.
    fflush(stdout);
    _Exit(0);
}

// Each in a process of its own, which must be born before this one knows the driver.
void expiries(uint64_t seed) {
    for (const uint32_t weights : {SY_DTYPE_BF16, SY_DTYPE_F8_E4M3})
        for (const auto& [rows, is_few] :
             {std::pair{SY_DTYPE_BF16, false}, std::pair{SY_DTYPE_BF16, true},
              std::pair{SY_DTYPE_F8_E4M3, false}, std::pair{SY_DTYPE_F8_E4M3, true}}) {
            const pid_t child = fork();
            if (child == 0)
                expire(rows, weights, is_few, seed);
            int status = 0;
            CHECK(child > 0 && waitpid(child, &status, 0) == child, "no child");
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rows %u, weights %u: status %#x",
                  rows, weights, status);
        }
}

} // namespace

int main(int argc, char** argv) {
    uint64_t seed = 1;
    bool is_bench = false, expires = false, is_few = false;
    std::vector<uint32_t> sizes = {1, 4, 16, 64, 256, 1024};
    std::vector<uint32_t> dtypes = {SY_DTYPE_BF16, SY_DTYPE_F8_E4M3};
    // Dense products of 8192 cubed by a library, measured apart; a run that measures them says so.
    Rates rates = {0, 790e12, 1400e12};
    for (int i = 1; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--bench")
            is_bench = true;
        else if (arg == "--expire")
            expires = true;
        else if (arg == "--few")
            is_few = true;
        else if (arg == "--seed" && i + 1 < argc)
            seed = strtoull(argv[++i], nullptr, 10);
        else if (arg == "--bf16-rate" && i + 1 < argc)
            rates.bf16_flops = strtod(argv[++i], nullptr) * 1e12;
        else if (arg == "--fp8-rate" && i + 1 < argc)
            rates.fp8_flops = strtod(argv[++i], nullptr) * 1e12;
        else if (arg == "--tokens" && i + 1 < argc)
            sizes = {static_cast<uint32_t>(strtoul(argv[++i], nullptr, 10))};
        else if (arg == "--blocks" && i + 1 < argc)
            rates.num_blocks = static_cast<uint32_t>(strtoul(argv[++i], nullptr, 10));
        else if (arg == "--dtype" && i + 1 < argc)
            dtypes.assign(1, std::string(argv[++i]) == "fp8" ? SY_DTYPE_F8_E4M3 : SY_DTYPE_BF16);
    }
    if (is_bench) {
        rates.bytes_per_s = copy_rate();
        printf("{\"bench\":\"copy\",\"tb_per_s\":%.2f}\n", rates.bytes_per_s * 1e-12);
        for (const uint32_t dtype : dtypes) {
            bench("deepseek-v3", 7168, 2048, 32, dtype, rates, sizes);
            bench("qwen3-30b-a3b", 2048, 768, 128, dtype, rates, sizes);
        }
        return 0;
    }
    printf("expert_test: seed %" PRIu64 "\n", seed);
    fflush(stdout);
    if (expires) {
        expiries(seed);
        printf("expert_test: all ok\n");
        return 0;
    }
    if (is_few) {
        compares_tiles = false;
        for (const uint32_t weights : dtypes)
            for (const uint32_t rows : {SY_DTYPE_BF16, SY_DTYPE_F8_E4M3})
                few(rows, weights, seed);
    } else {
        correctness(seed);
        refusals(seed);
    }
    CHECK(num_bad == 0, "%d cases are off", num_bad);
    printf("expert_test: all ok\n");
    return 0;
}
