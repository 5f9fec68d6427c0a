// The products of so few tokens that there are fewer tiles than multiprocessors.
//
// Then a block multiplies a half or a quarter of a tile, so that more multiprocessors read weights,
// and has one such part at most. A stage has as many bytes of weights as with whole tiles: fewer
// rows, and two or four panels of each. Every value is summed up in the same order as in a whole
// tile, so that a token's bits do not depend on the batch.
#pragma once

#include <cstdint>

#include "switchyard/impls/expert_gemm.cuh"

namespace switchyard::impls {

// Tokens of a part, the matrix units' fewest columns.
constexpr uint32_t kPartTokens = 8;
constexpr uint32_t kPartTokenBytes = kPartTokens * kPanelBytes;
// Scales of weights stand behind those of the tokens.
constexpr uint32_t kPartWeightScalesAt = SY_MOST_PARTS * kPartTokens * sizeof(float);
static_assert(kPartWeightScalesAt + SY_MOST_PARTS * 8 <= kScaleBytes, "scales of a stage");
static_assert(SY_MOST_PARTS * kPartTokenBytes <= kTileTokens * kPanelBytes, "tokens of a stage");

// Into how many parts the tiles of a batch are divided: 4, 2 or 1. The same in all blocks.
template <bool kFp8, bool kGateUp>
__device__ __forceinline__ uint32_t num_parts(const sy_expert_compute_params& params) {
    constexpr uint32_t kValues = kPanelBytes / (kFp8 ? 1 : 2);
    constexpr uint32_t kOuts = kGateUp ? kTileWeights / 2 : kTileWeights;
    const uint32_t hidden = params.geometry.hidden;
    const uint32_t depth = kGateUp ? hidden : params.inter;
    const uint32_t num_columns = ((kGateUp ? params.inter : hidden) + kOuts - 1) / kOuts;
    // Parts of a scale's block of results meet in the output's memory, each block at a word.
    if (kFp8 && kGateUp &&
        (params.tile_arrivals == nullptr || params.inter > hidden ||
         gridDim.x > 2 * SY_TILE_ARRIVALS))
        return 1;
    // Entries may all be of different experts.
    const uint32_t num_tiles = params.lists.batch->num_entries * num_columns;
    const uint32_t num_panels = (depth + kValues - 1) / kValues;
#pragma unroll
    for (uint32_t parts = SY_MOST_PARTS; parts > 1; parts /= 2)
        if (num_panels % parts == 0 && uint64_t{num_tiles} * parts <= gridDim.x)
            return parts;
    return 1;
}

template <bool kFp8, bool kGateUp, bool kDirect, uint32_t kParts>
struct GemmParts : Gemm<kFp8, kGateUp, kDirect> {
    using Whole = Gemm<kFp8, kGateUp, kDirect>;
    using Whole::layer;
    using Whole::num_outs;
    using Whole::params;
    using Whole::ring;
    using Whole::tokens;

    static constexpr uint32_t kBlocks = 4 / kParts; // of 64 rows of weights
    static constexpr uint32_t kBlockBytes = kWeightBytes / 4;

    ExpertTile tile;
    uint32_t part;
    bool has_tile;

    // Whole warps.
    __device__ __forceinline__ GemmParts(const sy_expert_compute_params& params, uint32_t shared)
        : Whole(params, shared) {
        ExpertWalk<kPartTokens> parts(params, num_columns() * kParts);
        has_tile = parts.seek(blockIdx.x, tile);
        part = tile.column % kParts;
        tile.column /= kParts;
    }

    // One warp.
    __device__ __forceinline__ void fetch() {
        const uint32_t lane_idx = threadIdx.x & 31, num_steps = tokens.num_panels / kParts;
        const uint32_t num_begun = begin_first(lane_idx == 0, num_steps);
        Whole::wait_kernel_before();
        Whole::stamp_begin();
        if (!has_tile || lane_idx >= Whole::kFetchingLanes)
            return;
        const uint64_t scale = kFp8 ? Whole::weight_scale(tile, lane_idx) : 0;
        for (uint32_t step = 0; step < num_steps; ++step, ring.next()) {
            if (step >= num_begun)
                Whole::wait_empty(ring);
            if (lane_idx == 0) {
                if (step >= num_begun)
                    begin_stage(ring, step);
#pragma unroll
                for (uint32_t i = 0; i < kParts; ++i) {
                    const uint32_t panel = step * kParts + i;
                    ptx::cp_async_bulk_to_shared(ring.tokens() + i * kPartTokenBytes,
                                                 tokens.at(panel, tile.row), kPartTokenBytes,
                                                 ring.full());
                    if constexpr (kFp8)
                        ptx::cp_async_bulk_to_shared(
                            ring.scales() + i * kPartTokens * uint32_t{sizeof(float)},
                            tokens.scale(panel, tile.row), kPartTokens * uint32_t{sizeof(float)},
                            ring.full());
                }
            }
            if constexpr (kFp8) {
#pragma unroll
                for (uint32_t i = 0; i < kParts; ++i)
                    ptx::cp_async_ca_4(ring.scales() + kPartWeightScalesAt + i * 8 + lane_idx * 4,
                                       scale + (step * kParts + i) * sizeof(float));
                ptx::cp_async_mbarrier_arrive_noinc(ring.full());
            }
        }
        wait_multiplied();
    }

    // Four warps, with rows out of the slots.
    __device__ __forceinline__ void fetch_direct() {
        const SlotRows rows = {params};
        const uint32_t thread_idx = threadIdx.x, num_steps = tokens.num_panels / kParts;
        const uint32_t num_begun = begin_first(thread_idx == 0, num_steps);
        Whole::wait_kernel_before();
        Whole::stamp_begin();
        if (!has_tile)
            return;
        // This thread's part of every step: a chunk of one row, in every second panel; and a scale.
        const uint32_t token = thread_idx / 8 % kPartTokens, chunk = thread_idx % 8;
        const uint32_t offset =
            thread_idx / 64 * kPartTokenBytes + token * kPanelBytes + (chunk ^ token) * 16;
        const auto position = [&](uint32_t of) {
            return tile.position + min(of, tile.num_tokens - 1);
        };
        const uint64_t source =
            rows.payload(position(token)) + thread_idx / 64 * kPanelBytes + chunk * 16;
        uint64_t scale = 0, of_weights = 0;
        if (kFp8) {
            scale = rows.scales(position(thread_idx % kPartTokens)) +
                    thread_idx / kPartTokens * sizeof(float);
            of_weights = Whole::weight_scale(tile, thread_idx & 1) +
                         (thread_idx - kScaleThreads) / 2 * sizeof(float);
        }
        for (uint32_t step = 0; step < num_steps; ++step, ring.next()) {
            Whole::wait_empty(ring);
            if (thread_idx == 0 && step >= num_begun)
                begin_stage(ring, step);
            if (token < tile.num_tokens)
#pragma unroll
                for (uint32_t i = 0; i < kParts; i += 2)
                    ptx::cp_async_cg_16(ring.tokens() + offset + i * kPartTokenBytes,
                                        source + (step * kParts + i) * kPanelBytes);
            if (kFp8 && thread_idx < kParts * kPartTokens)
                ptx::cp_async_ca_4(ring.scales() + thread_idx * 4,
                                   scale + step * kParts * sizeof(float));
            if (kFp8 && thread_idx - kScaleThreads < kParts * 2)
                ptx::cp_async_ca_4(ring.scales() + kPartWeightScalesAt +
                                       (thread_idx - kScaleThreads) * 4,
                                   of_weights + step * kParts * sizeof(float));
            ptx::cp_async_mbarrier_arrive_noinc(ring.full());
        }
        wait_multiplied();
    }

    // Two warpgroups, 0 and 1. With quarters the second one has no rows.
    __device__ __forceinline__ void multiply(uint32_t group_idx) {
        if (!has_tile)
            return;
        const bool has_block = group_idx < kBlocks;
        const uint32_t num_steps = tokens.num_panels / kParts;
        float sum[4] = {};
        if (!has_block) {
            for (uint32_t step = 0; step < num_steps; ++step, ring.next()) {
                wait_full_phase(ring.full(), ring.phase);
                Whole::release(ring.empty());
            }
        } else if constexpr (kFp8) {
            const uint32_t lane_idx = threadIdx.x & 31;
            // Of down: the half of the tile.
            const bool takes_second = !kGateUp && block(group_idx) >= 2;
            for (uint32_t step = 0; step < num_steps; ++step, ring.next()) {
                float products[kParts][4];
                Whole::wait_full();
                ptx::wgmma_fence();
#pragma unroll
                for (uint32_t i = 0; i < kParts; ++i)
                    multiply_panel(products[i], group_idx, i, false);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
#pragma unroll
                for (uint32_t i = 0; i < kParts; ++i) {
                    const float2 of_weights =
                        ptx::ld_shared_f32x2(ring.scales() + kPartWeightScalesAt + i * 8);
                    const float2 token = ptx::ld_shared_f32x2(
                        ring.scales() + i * kPartTokens * uint32_t{sizeof(float)} +
                        lane_idx % 4 * 8);
                    const float first = takes_second ? of_weights.y : of_weights.x;
                    const float second = kGateUp ? of_weights.y : first;
                    const float scale[4] = {first * token.x, first * token.y, second * token.x,
                                            second * token.y};
#pragma unroll
                    for (uint32_t k = 0; k < 4; ++k)
                        sum[k] += products[i][k] * scale[k];
                }
                // As with whole tiles: scales are copied over next.
                __syncwarp();
                Whole::release(ring.empty());
            }
        } else {
            uint32_t before = 0;
            for (uint32_t step = 0; step < num_steps; ++step, ring.next()) {
                Whole::wait_full();
                ptx::wgmma_fence();
#pragma unroll
                for (uint32_t i = 0; i < kParts; ++i)
                    multiply_panel(sum, group_idx, i, step != 0 || i != 0);
                ptx::wgmma_commit();
                ptx::wgmma_wait<1>();
                if (step != 0)
                    Whole::release(before);
                before = ring.empty();
            }
            ptx::wgmma_wait<0>();
            Whole::release(before);
        }
        if (has_block)
            store(sum, group_idx);
        if constexpr (kFp8 && kGateUp)
            quantize();
    }

  private:
    __device__ __forceinline__ uint32_t num_columns() const {
        return (num_outs + Whole::kOuts - 1) / Whole::kOuts;
    }
    // A warpgroup's block of the tile's four.
    __device__ __forceinline__ uint32_t block(uint32_t group_idx) const {
        return part * kBlocks + group_idx;
    }

    // Weights do not depend on the kernel before: the first come while it ends.
    __device__ __forceinline__ uint32_t begin_first(bool is_one, uint32_t num_steps) {
        const uint32_t num_begun = min(num_steps, kGemmStages);
        StageRing first = ring;
        if (has_tile && is_one)
#pragma unroll 1
            for (uint32_t step = 0; step < num_begun; ++step, first.next())
                begin_stage(first, step);
        return num_begun;
    }

    __device__ __forceinline__ void begin_stage(const StageRing& stage, uint32_t step) const {
        constexpr uint32_t kTokenBytes =
            kDirect ? 0 : kPartTokenBytes + (kFp8 ? kPartTokens * uint32_t{sizeof(float)} : 0);
        ptx::mbarrier_arrive_expect_tx(stage.full(), kWeightBytes + kParts * kTokenBytes);
#pragma unroll
        for (uint32_t i = 0; i < kParts; ++i)
#pragma unroll
            for (uint32_t k = 0; k < kBlocks; ++k)
                Whole::fetch_block(stage.weights() + (i * kBlocks + k) * kBlockBytes, stage.full(),
                                   tile, step * kParts + i, part * kBlocks + k);
    }

    // The multiplying warpgroups have no bound of their own.
    __device__ __forceinline__ void wait_multiplied() {
#pragma unroll 1
        for (uint32_t i = 0; i < kGemmStages; ++i, ring.next())
            Whole::wait_empty(ring);
    }

    __device__ __forceinline__ void multiply_panel(float (&sum)[4], uint32_t group_idx,
                                                   uint32_t panel, bool adds) const {
        const uint32_t weights = ptx::wgmma_operand(
            ring.weights() + (panel * kBlocks + group_idx % kBlocks) * kBlockBytes);
        const uint32_t columns = ptx::wgmma_operand(ring.tokens() + panel * kPartTokenBytes);
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k)
            ptx::Wgmma<kFp8, kPartTokens>::run(sum, weights + k * 2, columns + k * 2,
                                               adds || k != 0);
    }

    // Results of a block, by a warpgroup: 32 of each token behind gate and up, 64 behind down.
    __device__ __forceinline__ void store(const float (&sum)[4], uint32_t group_idx) {
        const uint32_t lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x / 32 & 3;
        const uint32_t thread_idx = threadIdx.x & 127;
        const uint32_t results = Whole::staging(group_idx);
        const uint32_t half = block(group_idx) / 2, in_half = block(group_idx) % 2;
        const uint32_t to = lane_idx & 7, which = lane_idx >> 3 & 1;
        if constexpr (kGateUp) {
            const uint32_t values =
                float2_to_bf16x2(swiglu(sum[0], sum[2]), swiglu(sum[1], sum[3]));
            // Nothing reads the second half.
            ptx::stmatrix_x2_trans(results + staged_chunk(to, which * 4 + warp_idx), values,
                                   values);
        } else {
            ptx::stmatrix_x2_trans(results + staged_chunk(to, warp_idx * 2 + which),
                                   float2_to_bf16x2(sum[0], sum[1]),
                                   float2_to_bf16x2(sum[2], sum[3]));
        }
        ptx::bar_sync(1 + group_idx, 128);
        // Chunks of eight values. Behind gate and up a block has every second one of its half.
        constexpr uint32_t kChunks = kGateUp ? 4 : 8;
        const uint32_t token = thread_idx / kChunks, idx = thread_idx % kChunks;
        if (token >= tile.num_tokens || thread_idx >= kPartTokens * kChunks)
            return;
        uint32_t words[4];
        load_staged(words, results, token, kGateUp ? 0 : idx / 4 * 4, idx % 4);
        const uint4 bits = make_uint4(words[0], words[1], words[2], words[3]);
        const uint32_t chunk = kGateUp ? idx * 2 + in_half : idx;
        if constexpr (kGateUp && !kFp8) {
            const Panels target(params.activation, params, params.inter * 2);
            const uint32_t panel = tile.column * 2 + half;
            if (panel < target.num_panels)
                *reinterpret_cast<uint4*>(target.chunk(panel, tile.row + token, chunk)) = bits;
        } else {
            const uint32_t out =
                tile.column * Whole::kOuts + (kGateUp ? half : block(group_idx)) * 64 + chunk * 8;
            if (out < num_outs)
                *reinterpret_cast<uint4*>(result(token, out)) = bits;
        }
    }

    // Address of a value of the output, or of the first product's results before they are
    // quantised: the output's memory is free then.
    __device__ __forceinline__ uint8_t* result(uint32_t token, uint32_t out) const {
        return static_cast<uint8_t*>(params.expert_out) +
               (uint64_t{tile.position + token} * num_outs + out) * 2;
    }

    // Whether this block is the last of a tile's to arrive at a word; it then sees the results of the
    // others. The word is zero again behind the last. Both warpgroups.
    // NOTES: the barriers carry thread 128's fences to all threads of the block, so that one thread
    // releases and acquires for all.
    __device__ __forceinline__ bool is_last(uint32_t word) const {
        ptx::bar_sync(3, 256);
        const uint32_t shared_word = ring.shared + kTilesAt;
        if (threadIdx.x == 128) {
            // SYNC POINT tile-done: release and acquire at the word of the tile.
            ptx::fence_acq_rel_gpu();
            const uint32_t before =
                ptx::atom_inc_relaxed_gpu(params.tile_arrivals + word, kParts - 1);
            ptx::fence_acq_rel_gpu();
            ptx::st_shared_v4(shared_word, make_uint4(before, 0, 0, 0));
        }
        ptx::bar_sync(3, 256);
        return ptx::ld_shared_u32(shared_word) == kParts - 1;
    }

    // The block that brings the last part of 128 values quantises them. Both warpgroups.
    __device__ __forceinline__ void quantize() {
        const uint32_t thread_idx = threadIdx.x - 128;
        if (!is_last(tile.row / kPartTokens * num_columns() + tile.column) ||
            thread_idx >= kPartTokens * 8)
            return;
        const uint32_t token = thread_idx / 8, chunk = thread_idx % 8;
        const uint32_t out = tile.column * Whole::kOuts + chunk * 16;
        uint4 values[2] = {};
        if (token < tile.num_tokens) {
            const uint64_t from = reinterpret_cast<uint64_t>(result(token, out));
            // The number of values is a multiple of 64.
            if (out < num_outs) {
                values[0] = ptx::ld_weak_global_v4(from);
                values[1] = ptx::ld_weak_global_v4(from + 16);
            }
        }
        const QuantizedChunk quantized = quantize_chunk(values);
        if (token >= tile.num_tokens)
            return;
        const Panels target(params.activation, params, params.inter);
        *reinterpret_cast<uint4*>(target.chunk(tile.column, tile.row + token, chunk)) =
            quantized.codes;
        if (chunk == 0)
            *target.scale(tile.column, tile.row + token) = quantized.scale;
    }
};

} // namespace switchyard::impls
