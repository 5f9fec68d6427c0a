/* Layout of the sections of device frames. Computed once on the host and handed to every kernel. */
#ifndef SWITCHYARD_LAYOUT_GEOMETRY_H
#define SWITCHYARD_LAYOUT_GEOMETRY_H

#include "switchyard/device_abi.h"

static inline uint64_t sy_round_up(uint64_t value, uint64_t align) {
    return (value + align - 1) / align * align;
}

/* Geometry of slots of `num_frames` frames of up to `max_tokens` tokens. Returns SY_OK or the
 * SY_LAUNCH_* code that names the value out of range. */
static inline int sy_make_geometry(uint32_t hidden, uint32_t top_k, uint32_t dtype,
                                   uint32_t max_tokens, uint32_t num_frames,
                                   sy_frame_geometry* out) {
    if (hidden == 0 || hidden % SY_SCALE_BLOCK != 0 || hidden > SY_MAX_HIDDEN)
        return SY_LAUNCH_HIDDEN;
    if (top_k == 0 || top_k > SY_MAX_DEVICE_TOP_K)
        return SY_LAUNCH_TOP_K;
    if (dtype != SY_DTYPE_BF16 && dtype != SY_DTYPE_F8_E4M3)
        return SY_LAUNCH_DTYPE;
    if (max_tokens == 0 || max_tokens > SY_MAX_FRAME_TOKENS)
        return SY_LAUNCH_TOKENS;
    if (num_frames == 0 || num_frames > SY_MAX_FRAMES || (num_frames & (num_frames - 1)) != 0)
        return SY_LAUNCH_GEOMETRY;
    sy_frame_geometry g;
    g.hidden = hidden;
    g.top_k = top_k;
    g.dtype = dtype;
    g.num_frames = num_frames;
    g.max_tokens = max_tokens;
    g.row_stride_bytes = dtype == SY_DTYPE_BF16 ? hidden * 2 : hidden;
    g.scales_per_row = dtype == SY_DTYPE_BF16 ? 0 : hidden / SY_SCALE_BLOCK;
    g.response_stride_bytes = hidden * 2;
    g.flags_offset = sizeof(sy_frame_header);
    g.entries_offset =
        sy_round_up(g.flags_offset + (uint64_t)max_tokens * sizeof(uint64_t), SY_PAYLOAD_ALIGN);
    g.scales_offset = sy_round_up(
        g.entries_offset + (uint64_t)max_tokens * top_k * sizeof(sy_entry), SY_PAYLOAD_ALIGN);
    g.payload_offset =
        sy_round_up(g.scales_offset + (uint64_t)max_tokens * g.scales_per_row * sizeof(float),
                    SY_PAYLOAD_ALIGN);
    g.frame_bytes = sy_round_up(g.payload_offset + (uint64_t)max_tokens * g.row_stride_bytes, 4096);
    g.control_offset = g.frame_bytes * num_frames;
    g.slot_bytes = g.control_offset + SY_CONTROL_BYTES;
    g.response_flags_offset = 0;
    g.response_payload_offset =
        sy_round_up((uint64_t)max_tokens * sizeof(uint64_t), SY_PAYLOAD_ALIGN);
    g.response_frame_bytes = sy_round_up(
        g.response_payload_offset + (uint64_t)max_tokens * g.response_stride_bytes, 4096);
    g.response_control_offset = g.response_frame_bytes * num_frames;
    g.response_slot_bytes = g.response_control_offset + SY_CONTROL_BYTES;
    *out = g;
    return SY_OK;
}

/* Most tokens per frame of a slot of `slot_bytes`, such that request and answer both fit; 0 if none. */
static inline uint32_t sy_tokens_for_slot(uint32_t hidden, uint32_t top_k, uint32_t dtype,
                                          uint32_t num_frames, uint64_t slot_bytes) {
    uint32_t fits = 0, too_many = SY_MAX_FRAME_TOKENS + 1;
    while (too_many - fits > 1) {
        uint32_t middle = fits + (too_many - fits) / 2;
        sy_frame_geometry g;
        if (sy_make_geometry(hidden, top_k, dtype, middle, num_frames, &g) != SY_OK)
            return 0;
        if (g.slot_bytes <= slot_bytes && g.response_slot_bytes <= slot_bytes)
            fits = middle;
        else
            too_many = middle;
    }
    return fits;
}

/* Bytes of a handle with its routes. */
static inline uint64_t sy_handle_bytes(const sy_frame_geometry* geometry) {
    return sizeof(sy_handle) + (uint64_t)geometry->max_tokens * geometry->top_k * sizeof(uint32_t);
}

/* Bytes of the lists for up to `max_rows` rows, and the lists at `base` (aligned to 256). */
static inline uint64_t sy_expert_lists_at(uint64_t base, const sy_frame_geometry* geometry,
                                          uint32_t num_local_experts, uint32_t max_rows,
                                          sy_expert_lists* out) {
    const uint64_t max_entries = (uint64_t)max_rows * geometry->top_k;
    uint64_t at = base;
    out->batch = (sy_batch*)at;
    out->stamps = NULL; /* a timeline puts them at SY_STAMPS_OFFSET behind the batch */
    at = sy_round_up(at + SY_STAMPS_OFFSET + SY_BATCH_STAMPS * sizeof(uint64_t), 256);
    out->expert_begin = (uint32_t*)at;
    at = sy_round_up(at + ((uint64_t)num_local_experts + 1) * sizeof(uint32_t), 256);
    out->list_row = (uint32_t*)at;
    at = sy_round_up(at + max_entries * sizeof(uint32_t), 256);
    out->list_weight = (float*)at;
    at = sy_round_up(at + max_entries * sizeof(float), 256);
    out->row_source = (uint32_t*)at;
    at = sy_round_up(at + (uint64_t)max_rows * sizeof(uint32_t), 256);
    out->row_position = (uint32_t*)at;
    at = sy_round_up(at + max_entries * sizeof(uint32_t), 256);
    out->max_rows = max_rows;
    out->usual_rows = 0;
    return at - base;
}

/* Bytes of one of the expert stage's scratch buffers. Its rows have `row_values` values of the
 * weights' type: hidden for sy_expert_compute_params.rows, inter for .activation. */
static inline uint64_t sy_expert_scratch_bytes(const sy_frame_geometry* geometry,
                                               uint32_t num_local_experts, uint32_t max_rows,
                                               uint32_t weights_dtype, uint32_t row_values) {
    /* Rows by expert, each expert's beginning at a multiple of eight; 128-byte panels and their scales. */
    const uint64_t num_rows =
        sy_round_up((uint64_t)max_rows * geometry->top_k, 8) + 8 * (uint64_t)num_local_experts;
    if (weights_dtype == SY_DTYPE_F8_E4M3)
        return sy_round_up(row_values, 128) / 128 * num_rows * (128 + sizeof(float));
    return sy_round_up(row_values, 64) / 64 * num_rows * 128;
}

/* A matrix as the copy engine reads it: boxes of `extent`, values innermost, both in values; `strides` in
 * bytes, of every dimension but the first. */
typedef struct sy_map_shape {
    uint32_t rank;
    uint32_t extent[5];
    uint64_t dims[5];
    uint64_t strides[4];
} sy_map_shape;

/* Both maps put rows into a tile in the order that leaves a thread of the matrix units with neighbouring
 * results: row 8 j + 2 q + e of a group, in the tile, is row 16 q + 2 j + e (down: 8 q + 2 j + e) of the
 * matrix. The second dimension is all rows: its coordinate says where a group begins. */

/* Gate and up: a box is a quarter of a tile, half a group of 64 rows of gate and of as many of up, by eight in
 * turn. */
static inline sy_map_shape sy_gate_up_map(uint32_t hidden, uint32_t inter,
                                          uint32_t num_local_experts, uint32_t dtype) {
    const uint64_t row = hidden * (uint64_t)(dtype == SY_DTYPE_F8_E4M3 ? 1 : 2);
    const sy_map_shape map = {
        5,
        {dtype == SY_DTYPE_F8_E4M3 ? UINT32_C(128) : UINT32_C(64), 2, 4, 2, 4},
        {hidden, inter * (uint64_t)2 * num_local_experts, 4, 2, 8},
        {row, row * 16, row * inter, row * 2}};
    return map;
}

/* Down: a box is a quarter of a tile, two groups of 32 rows. */
static inline sy_map_shape sy_down_map(uint32_t hidden, uint32_t inter, uint32_t num_local_experts,
                                       uint32_t dtype) {
    const uint64_t row = inter * (uint64_t)(dtype == SY_DTYPE_F8_E4M3 ? 1 : 2);
    const uint64_t num_groups = hidden / 32 * (uint64_t)num_local_experts;
    const sy_map_shape map = {
        5,
        {dtype == SY_DTYPE_F8_E4M3 ? UINT32_C(128) : UINT32_C(64), 2, 4, 4, SY_TILE_WEIGHTS / 32 / SY_MOST_PARTS},
        {inter, 2, 4, 4, num_groups},
        {row, row * 8, row * 2, row * 32}};
    return map;
}

#endif /* SWITCHYARD_LAYOUT_GEOMETRY_H */
