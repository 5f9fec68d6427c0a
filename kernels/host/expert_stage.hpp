// The expert stage as plain loops, rounded to bf16 where the kernels round: rows as they leave the slot,
// activations, outputs. Sums are float, in an order of their own.
#pragma once

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

// bf16 values of one row of a batch.
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
    for (uint32_t chunk_idx = 0; chunk_idx < geometry.hidden / 8; ++chunk_idx) {
        uint4 bits;
        if (geometry.dtype == SY_DTYPE_F8_E4M3)
            bits = impls::weigh_chunk<true>(impls::load_slot_chunk<true>(payload, scales, chunk_idx),
                                            1.0f);
        else
            bits = impls::load_slot_chunk<false>(payload, scales, chunk_idx).bits;
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
        for (uint32_t i = 0; i < 8; ++i)
            values[chunk_idx * 8 + i] =
                bf16_to_float(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
    }
    return values;
}

// Eight sums at a time, which the compiler turns into vector instructions.
inline float dot_bf16(const uint16_t* weights, const float* values, uint32_t depth) {
    float sums[8] = {};
    for (uint32_t at = 0; at < depth; at += 8)
        for (uint32_t i = 0; i < 8; ++i)
            sums[i] += bf16_to_float(weights[at + i]) * values[at + i];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

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
        const uint64_t matrix = uint64_t{expert} * inter * hidden;
        const uint16_t* gate = reinterpret_cast<const uint16_t*>(layer.gate_up) + 2 * matrix;
        const uint16_t* up = gate + uint64_t{inter} * hidden;
        const uint16_t* down = reinterpret_cast<const uint16_t*>(layer.down) + matrix;
        for (uint32_t position = params.lists.expert_begin[expert];
             position < params.lists.expert_begin[expert + 1]; ++position) {
            const float* row = rows[params.lists.list_row[position]].data();
            for (uint32_t i = 0; i < inter; ++i) {
                const float g = dot_bf16(gate + uint64_t{i} * hidden, row, hidden);
                const float u = dot_bf16(up + uint64_t{i} * hidden, row, hidden);
                activation[i] = bf16_to_float(float_to_bf16(g / (1.0f + std::exp(-g)) * u));
            }
            for (uint32_t i = 0; i < hidden; ++i)
                out[uint64_t{position} * hidden + i] = float_to_bf16(
                    dot_bf16(down + uint64_t{i} * inter, activation.data(), inter));
        }
    }
}

} // namespace switchyard
