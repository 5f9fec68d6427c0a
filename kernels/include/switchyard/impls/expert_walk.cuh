// Maps a piece of the expert stage's work to its expert, from counts that only the device knows;
// and the addresses of the stage's rows and of its operands.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"

namespace switchyard::impls {

constexpr uint32_t kPanelBytes = 128; // of a row in a panel
constexpr uint32_t kTileTokens = 128;
constexpr uint32_t kTileWeights = SY_TILE_WEIGHTS;

// Operands lie in panels: 128 bytes of every row, row after row, chunks of 16 bytes rotated by the
// row's number as the matrix units read them. So the part of a tile that a step multiplies is one
// run of bytes. Rows are entries by expert; each expert begins at a multiple of eight.
struct Panels {
    uint8_t* base;
    uint64_t panel_bytes;
    uint32_t num_rows, num_panels;

    __device__ __forceinline__ Panels(void* base, const sy_expert_compute_params& params,
                                      uint32_t row_bytes)
        : base(static_cast<uint8_t*>(base)),
          num_rows((params.lists.max_rows * params.geometry.top_k + 7) / 8 * 8 +
                   8 * params.num_local_experts),
          num_panels((row_bytes + kPanelBytes - 1) / kPanelBytes) {
        panel_bytes = uint64_t{num_rows} * kPanelBytes;
    }
    __device__ __forceinline__ uint8_t* at(uint32_t panel, uint32_t row) const {
        return base + panel * panel_bytes + uint64_t{row} * kPanelBytes;
    }
    // Chunk `chunk` of 16 bytes of a row.
    __device__ __forceinline__ uint8_t* chunk(uint32_t panel, uint32_t row, uint32_t chunk) const {
        return at(panel, row) + ((chunk ^ (row & 7)) * 16);
    }
    // Scales of fp8 rows stand behind the panels, one column per panel.
    __device__ __forceinline__ float* scale(uint32_t panel, uint32_t row) const {
        return reinterpret_cast<float*>(base + num_panels * panel_bytes) +
               uint64_t{panel} * num_rows + row;
    }
};

struct ExpertTile {
    uint32_t expert, position, row, num_tokens, column;
};

// Tiles in order: experts, columns of an expert, groups of kTokens tokens. Every warp walks by
// itself, each lane with an expert of the 32 around the present tile.
template <uint32_t kTokens> struct ExpertWalk {
    const uint32_t* expert_begin;
    uint32_t num_experts, num_columns;
    uint32_t first = 0;            // expert of lane 0
    uint32_t position, count;      // of the lane's expert
    uint32_t row, rows_upto, upto; // its first row; rows and tiles up to its end

    __device__ __forceinline__ ExpertWalk(const sy_expert_compute_params& params,
                                          uint32_t num_columns)
        : expert_begin(params.lists.expert_begin), num_experts(params.num_local_experts),
          num_columns(num_columns) {
        load(0, 0);
    }

    // False behind the last tile. `tile_idx` must not fall from call to call.
    __device__ __forceinline__ bool seek(uint32_t tile_idx, ExpertTile& tile) {
        for (;;) {
            const uint32_t last = __shfl_sync(kFullWarp, upto, 31);
            if (tile_idx < last)
                break;
            if (first + 32 >= num_experts)
                return false;
            first += 32;
            load(last, __shfl_sync(kFullWarp, rows_upto, 31));
        }
        const uint32_t lane = __ffs(__ballot_sync(kFullWarp, upto > tile_idx)) - 1;
        const uint32_t tokens = __shfl_sync(kFullWarp, count, lane);
        const uint32_t end = __shfl_sync(kFullWarp, upto, lane);
        const uint32_t num_groups = (tokens + kTokens - 1) / kTokens;
        const uint32_t within = tile_idx - (end - num_groups * num_columns);
        const uint32_t group = within % num_groups;
        tile.expert = first + lane;
        tile.column = within / num_groups;
        tile.position = __shfl_sync(kFullWarp, position, lane) + group * kTokens;
        tile.row = __shfl_sync(kFullWarp, row, lane) + group * kTokens;
        tile.num_tokens = min(tokens - group * kTokens, kTokens);
        return true;
    }

  private:
    __device__ __forceinline__ void load(uint32_t tiles_before, uint32_t rows_before) {
        const uint32_t lane_idx = threadIdx.x & 31, expert = first + lane_idx;
        const bool is_one = expert < num_experts;
        position = is_one ? expert_begin[expert] : 0;
        count = is_one ? expert_begin[expert + 1] - position : 0;
        const uint32_t rows = (count + 7) / 8 * 8;
        upto = (count + kTokens - 1) / kTokens * num_columns;
        rows_upto = rows;
#pragma unroll
        for (uint32_t delta = 1; delta < 32; delta <<= 1) {
            const uint32_t tiles_below = __shfl_up_sync(kFullWarp, upto, delta);
            const uint32_t rows_below = __shfl_up_sync(kFullWarp, rows_upto, delta);
            upto += lane_idx >= delta ? tiles_below : 0;
            rows_upto += lane_idx >= delta ? rows_below : 0;
        }
        upto += tiles_before;
        rows_upto += rows_before;
        row = rows_upto - rows;
    }
};

// Entries of the lists, row by row, out of the clients' slots.
struct SlotRows {
    const sy_expert_compute_params& params;

    // Address of an entry's row in a section of its frame.
    __device__ __forceinline__ uint64_t at(uint32_t position, uint64_t section,
                                           uint32_t stride_bytes) const {
        const sy_frame_geometry& geometry = params.geometry;
        const uint32_t source = params.lists.row_source[params.lists.list_row[position]];
        const uint32_t client = source >> SY_ROUTE_SHIFT;
        const uint32_t frame_row = source & ((1u << SY_ROUTE_SHIFT) - 1);
        const uint64_t number = params.lists.batch->frame_number[client];
        return params.clients[client].request +
               layout::request_frame(geometry, layout::ring_place(geometry, number)) + section +
               uint64_t{frame_row} * stride_bytes;
    }
    __device__ __forceinline__ uint64_t payload(uint32_t position) const {
        return at(position, params.geometry.payload_offset, params.geometry.row_stride_bytes);
    }
    __device__ __forceinline__ uint64_t scales(uint32_t position) const {
        return at(position, params.geometry.scales_offset,
                  params.geometry.scales_per_row * uint32_t{sizeof(float)});
    }
};

} // namespace switchyard::impls
