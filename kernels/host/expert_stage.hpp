// The expert stage as plain loops, rounded where the kernels round: rows as they leave the slot,
// activations, outputs; under fp8 weights rows and activations are fp8 with a scale per 128 values. Sums are
// float, in an order of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"

namespace switchyard {

inline float bf16_to_float(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }

inline uint16_t float_to_bf16(float value) {
    return static_cast<uint16_t>(impls::float2_to_bf16x2(value, 0.0f));
}

// Value of each code.
inline const float* f8_values() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> made;
        for (uint32_t code = 0; code < 256; ++code)
            made[code] = simt_from_e4m3(code);
        return made;
    }();
    return values.data();
}

// Values as quantisation to fp8 leaves them, 128 to a scale.
inline void round_to_f8(std::vector<float>& values) {
    for (size_t first = 0; first < values.size(); first += SY_SCALE_BLOCK) {
        const size_t end = std::min<size_t>(first + SY_SCALE_BLOCK, values.size());
        float largest = 0;
        for (size_t i = first; i < end; ++i)
            largest = std::max(largest, std::fabs(values[i]));
        const float scale =
            largest == 0 ? 1.0f : std::max(largest / impls::kF8Max, __uint_as_float(0x00800000u));
        const float inverse = 1.0f / scale;
        for (size_t i = first; i < end; ++i) {
            const uint32_t code = __nv_cvt_float2_to_fp8x2(make_float2(values[i] * inverse, 0.0f),
                                                           __NV_SATFINITE, __NV_E4M3);
            values[i] = simt_from_e4m3(code & 0xffu) * scale;
        }
    }
}

// One row of a batch as the products read it.
inline std::vector<float> gather_row(const sy_expert_compute_params& params, uint32_t row) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t source = params.lists.row_source[row];
    const uint32_t client = source >> SY_ROUTE_SHIFT;
    const uint32_t frame_row = source & ((1u << SY_ROUTE_SHIFT) - 1);
    const uint64_t frame =
        params.clients[client].request +
        layout::request_frame(
            geometry, layout::ring_place(geometry, params.lists.batch->frame_number[client]));
    const uint64_t payload = layout::payload_at(geometry, frame, frame_row);
    const uint64_t scales = layout::scales_at(geometry, frame, frame_row);
    std::vector<float> values(geometry.hidden);
    const bool is_f8 = params.weights_dtype == SY_DTYPE_F8_E4M3;
    if (is_f8 && geometry.dtype == SY_DTYPE_F8_E4M3) {
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(payload);
        const float* factors = reinterpret_cast<const float*>(scales);
        for (uint32_t i = 0; i < geometry.hidden; ++i)
            values[i] = simt_from_e4m3(codes[i]) * factors[i / SY_SCALE_BLOCK];
        return values;
    }
    for (uint32_t chunk_idx = 0; chunk_idx < geometry.hidden / 8; ++chunk_idx) {
        uint4 bits;
        if (geometry.dtype == SY_DTYPE_F8_E4M3)
            bits = impls::weigh_chunk<true>(
                impls::load_slot_chunk<true>(payload, scales, chunk_idx), 1.0f);
        else
            bits = impls::load_slot_chunk<false>(payload, scales, chunk_idx).bits;
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
        for (uint32_t i = 0; i < 8; ++i)
            values[chunk_idx * 8 + i] =
                bf16_to_float(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
    }
    if (is_f8)
        round_to_f8(values);
    return values;
}

// Eight sums at a time, which the compiler turns into vector instructions.
inline float dot_bf16(const uint16_t* weights, const float* values, uint32_t depth) {
    float sums[8] = {};
    for (uint32_t at = 0; at < depth; at += 8)
        for (uint32_t i = 0; i < 8; ++i)
            sums[i] += bf16_to_float(weights[at + i]) * values[at + i];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
           ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// Matrix `matrix` of `num_rows` by `depth` among others of its size, bf16 or fp8.
struct StageMatrix {
    uint64_t values, scales;
    uint32_t dtype, num_rows, depth;
    uint64_t matrix;

    float dot(uint32_t row, const float* x) const {
        const uint64_t first = (matrix * num_rows + row) * depth;
        if (dtype == SY_DTYPE_BF16)
            return dot_bf16(reinterpret_cast<const uint16_t*>(values) + first, x, depth);
        const uint8_t* codes = reinterpret_cast<const uint8_t*>(values) + first;
        const uint32_t depth_blocks = (depth + SY_SCALE_BLOCK - 1) / SY_SCALE_BLOCK;
        const uint32_t row_blocks = (num_rows + SY_SCALE_BLOCK - 1) / SY_SCALE_BLOCK;
        const float* factors = reinterpret_cast<const float*>(scales) +
                               (matrix * row_blocks + row / SY_SCALE_BLOCK) * depth_blocks;
        const float* f8 = f8_values();
        float sum = 0;
        for (uint32_t block = 0; block < depth_blocks; ++block) {
            float part = 0;
            for (uint32_t k = block * SY_SCALE_BLOCK;
                 k < std::min(depth, (block + 1) * SY_SCALE_BLOCK); ++k)
                part += f8[codes[k]] * x[k];
            sum += part * factors[block];
        }
        return sum;
    }
};

inline void run_expert_stage(const sy_expert_compute_params& params) {
    const sy_batch& batch = *params.lists.batch;
    if (batch.num_rows == 0 || batch.layer >= params.num_layers)
        return;
    const uint32_t hidden = params.geometry.hidden, inter = params.inter;
    const sy_layer_weights& layer = params.layers[batch.layer];
    std::vector<std::vector<float>> rows(batch.num_rows);
    for (uint32_t row = 0; row < batch.num_rows; ++row)
        rows[row] = gather_row(params, row);
    std::vector<float> activation(inter);
    uint16_t* out = static_cast<uint16_t*>(params.expert_out);
    for (uint32_t expert = 0; expert < params.num_local_experts; ++expert) {
        const StageMatrix gate = {layer.gate_up, layer.gate_up_scale, params.weights_dtype, inter,
                                  hidden,        uint64_t{expert} * 2};
        const StageMatrix up = {layer.gate_up, layer.gate_up_scale,     params.weights_dtype, inter,
                                hidden,        uint64_t{expert} * 2 + 1};
        const StageMatrix down = {layer.down, layer.down_scale, params.weights_dtype, hidden, inter,
                                  expert};
        for (uint32_t position = params.lists.expert_begin[expert];
             position < params.lists.expert_begin[expert + 1]; ++position) {
            const float* row = rows[params.lists.list_row[position]].data();
            for (uint32_t i = 0; i < inter; ++i) {
                const float g = gate.dot(i, row), u = up.dot(i, row);
                activation[i] = bf16_to_float(float_to_bf16(g / (1.0f + std::exp(-g)) * u));
            }
            if (params.weights_dtype == SY_DTYPE_F8_E4M3)
                round_to_f8(activation);
            for (uint32_t i = 0; i < hidden; ++i)
                out[uint64_t{position} * hidden + i] =
                    float_to_bf16(down.dot(i, activation.data()));
        }
    }
}

} // namespace switchyard
