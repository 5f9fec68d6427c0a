// The products of the expert stage: gate and up with SwiGLU, then down. Counts are the device's;
// experts without entries cost nothing.
//
// A tile is 256 rows of weights by up to 128 tokens. A warpgroup fetches weights by tensor maps. It
// fetches tokens out of the slots, where requests are of the weights' type, or out of panels. Two
// warpgroups multiply. Up to 64 tokens the weights are the matrix units' rows and the tokens their
// columns. So few tokens take few columns, and reading the weights determines the time. From 65
// tokens on it is the other way round: each warpgroup has 64 tokens and all 256 rows of weights.
//
// Rows of gate and up alternate in a tile, eight of one and eight of the other, so that a thread
// holds both values of an output. They lie in an order that gives it neighbouring outputs.
//
// fp8: the matrix units add up 128 values, the products of their sums with both scales are added in
// f32.
#pragma once

#include <cstdint>

#include "switchyard/comm/stamps.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_plain.cuh"
#include "switchyard/impls/expert_results.cuh"
#include "switchyard/impls/expert_walk.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/bulk.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"
#include "switchyard/ptx/wgmma.cuh"

namespace switchyard::impls {

constexpr uint32_t kGemmThreads = SY_PRODUCT_THREADS; // a warpgroup that fetches, two that multiply
constexpr uint32_t kGemmStages = 4;
constexpr uint32_t kWeightBytes = kTileWeights * kPanelBytes;
constexpr uint32_t kStageBytes = kWeightBytes + kTileTokens * kPanelBytes;
constexpr uint32_t kTokenScaleBytes = kTileTokens * sizeof(float);
constexpr uint32_t kScaleBytes = kTokenScaleBytes + 16; // with two scales of weights

constexpr uint32_t kTurnBarrier = 4; // and the next
// The first of two fetching threads; their warp issues no tensor copies.
constexpr uint32_t kScaleThreads = 96;

// Tiles under way: no more than stages, one at each end, rounded up.
constexpr uint32_t kTileSlots = 8;

// Offsets in shared memory.
constexpr uint32_t kStagingAt = kGemmStages * kStageBytes;
constexpr uint32_t kScalesAt = kStagingAt + 2 * kStagingBytes;
constexpr uint32_t kFullAt = kScalesAt + kGemmStages * kScaleBytes;
constexpr uint32_t kEmptyAt = kFullAt + kGemmStages * 8;
constexpr uint32_t kTilesAt = kEmptyAt + kGemmStages * 8;
constexpr uint32_t kGemmSharedBytes = kTilesAt + kTileSlots * 16;
static_assert(kGemmSharedBytes == SY_PRODUCT_SHARED_BYTES, "what launchers ask for");

using ProductWalk = ExpertWalk<kTileTokens>;

// Time in units of about half a millisecond: a register less than in nanoseconds.
constexpr uint32_t kCoarseShift = 19;
// At the host's memory, a microsecond or so each.
constexpr uint32_t kMostLooks = 4096;
__device__ __forceinline__ uint32_t coarse_time() {
    return static_cast<uint32_t>(ptx::mov_globaltimer() >> kCoarseShift);
}

// A stage is full. The wait ends even in a failure, because a stuck stage ends its block: the
// fetching threads wait until all stages have been multiplied, with a bound.
// NOTES: a bound here, too, had the compiler keep sums in memory.
__device__ __forceinline__ void wait_full_phase(uint32_t barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// Place in the ring of stages.
struct StageRing {
    uint32_t shared, stage = 0, phase = 0;

    __device__ __forceinline__ uint32_t full() const { return shared + kFullAt + stage * 8; }
    __device__ __forceinline__ uint32_t empty() const { return shared + kEmptyAt + stage * 8; }
    __device__ __forceinline__ uint32_t weights() const { return shared + stage * kStageBytes; }
    __device__ __forceinline__ uint32_t tokens() const { return weights() + kWeightBytes; }
    __device__ __forceinline__ uint32_t scales() const {
        return shared + kScalesAt + stage * kScaleBytes;
    }
    __device__ __forceinline__ uint32_t weight_scales() const {
        return scales() + kTokenScaleBytes;
    }
    __device__ __forceinline__ void next() {
        if (++stage == kGemmStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Tile data for the warpgroups that multiply.
struct FetchedTile {
    uint32_t num_tokens, position, row, column;
};

// kDirect: rows come straight out of the slots, being of the weights' type.
template <bool kFp8, bool kGateUp, bool kDirect> struct Gemm {
    using Held = HeldResults<kGateUp, kFp8>;

    static constexpr uint32_t kValueBytes = kFp8 ? 1 : 2;
    static constexpr uint32_t kPanelValues = kPanelBytes / kValueBytes;
    // Where one warp fetches: a lane that announces bytes, and also copies a scale of weights.
    static constexpr uint32_t kFetchingLanes = kFp8 ? 2 : 1;
    // Arrivals at a stage: one with the number of bytes, one of each thread that copies.
    static constexpr uint32_t kArrivals = 1 + (kDirect ? 128 : kFp8 ? 2 : 0);
    static constexpr uint32_t kOuts = kGateUp ? kTileWeights / 2 : kTileWeights;

    const sy_expert_compute_params& params;
    const sy_layer_weights& layer;
    Panels tokens;
    uint32_t num_outs;
    StageRing ring;

    __device__ __forceinline__ Gemm(const sy_expert_compute_params& params, uint32_t shared)
        : params(params), layer(params.layers[params.lists.batch->layer]),
          tokens(kGateUp ? params.rows : params.activation, params,
                 (kGateUp ? params.geometry.hidden : params.inter) * kValueBytes),
          num_outs(kGateUp ? params.inter : params.geometry.hidden), ring{shared} {}

    __device__ __forceinline__ ProductWalk walk() const {
        return ProductWalk(params, (num_outs + kOuts - 1) / kOuts);
    }

    // One warp.
    __device__ __forceinline__ void fetch() {
        ProductWalk tiles = walk();
        ExpertTile tile;
        const uint32_t lane_idx = threadIdx.x & 31;
        // Weights do not depend on the kernel before: the first come while it ends.
        uint32_t num_begun = 0, slot = 0;
        if (tiles.seek(blockIdx.x, tile)) {
            num_begun = min(tokens.num_panels, kGemmStages);
            StageRing first = ring;
            if (lane_idx == 0)
                for (uint32_t panel = 0; panel < num_begun; ++panel, first.next())
                    begin_stage(first, tile, slot, panel);
        }
        wait_kernel_before();
        stamp_begin();
        for (; tiles.seek(blockIdx.x + slot * gridDim.x, tile); ++slot) {
            if (lane_idx < kFetchingLanes) {
                const uint32_t num_rows = (tile.num_tokens + 7) / 8 * 8;
                uint64_t scale = kFp8 ? weight_scale(tile, lane_idx) : 0;
                for (uint32_t panel = 0; panel < tokens.num_panels; ++panel, ring.next()) {
                    if (panel >= num_begun)
                        wait_empty(ring);
                    if (lane_idx == 0) {
                        if (panel >= num_begun)
                            begin_stage(ring, tile, slot, panel);
                        ptx::cp_async_bulk_to_shared(ring.tokens(), tokens.at(panel, tile.row),
                                                     num_rows * kPanelBytes, ring.full());
                        if constexpr (kFp8)
                            ptx::cp_async_bulk_to_shared(ring.scales(),
                                                         tokens.scale(panel, tile.row),
                                                         num_rows * sizeof(float), ring.full());
                    }
                    if constexpr (kFp8) {
                        ptx::cp_async_ca_4(ring.weight_scales() + lane_idx * 4, scale);
                        scale += 4;
                        ptx::cp_async_mbarrier_arrive_noinc(ring.full());
                    }
                }
            }
            num_begun = 0;
            __syncwarp();
        }
        if (lane_idx < kFetchingLanes)
            finish(slot, kFp8);
    }

    // Four warps, with rows out of the slots.
    __device__ __forceinline__ void fetch_direct() {
        const SlotRows rows = {params};
        wait_kernel_before();
        stamp_begin();
        ProductWalk tiles = walk();
        ExpertTile tile;
        // This thread's part of every step: one chunk of every 16th row, and a scale.
        const uint32_t thread_idx = threadIdx.x, first = thread_idx / 8, chunk = thread_idx % 8;
        const uint32_t offset = first * kPanelBytes + ((chunk ^ (first & 7)) * 16);
        // The first weights leave before the addresses of rows are known, which take three loads.
        uint32_t slot = 0;
        for (; tiles.seek(blockIdx.x + slot * gridDim.x, tile); ++slot) {
            if (thread_idx == 0 && slot == 0) {
                StageRing first_stage = ring;
#pragma unroll 1
                for (uint32_t panel = 0; panel < min(tokens.num_panels, kGemmStages);
                     ++panel, first_stage.next())
                    begin_stage(first_stage, tile, 0, panel);
            }
            uint64_t source[kTileTokens / 16], scale = 0, of_weights = 0;
#pragma unroll
            for (uint32_t k = 0; k < kTileTokens / 16; ++k) {
                // NOTES: four at a time. With all eight under way together registers do not
                // suffice.
                if (k == kTileTokens / 32)
                    asm volatile("" ::: "memory");
                source[k] = rows.payload(tile.position + min(first + k * 16, tile.num_tokens - 1)) +
                            chunk * 16;
            }
            if (kFp8) {
                scale = rows.scales(tile.position + min(thread_idx, tile.num_tokens - 1));
                of_weights = weight_scale(tile, thread_idx & 1);
            }
            for (uint32_t panel = 0; panel < tokens.num_panels; ++panel, ring.next()) {
                wait_empty(ring);
                if (thread_idx == 0 && (slot != 0 || panel >= kGemmStages))
                    begin_stage(ring, tile, slot, panel);
#pragma unroll
                for (uint32_t k = 0; k < kTileTokens / 16; ++k)
                    if (first + k * 16 < tile.num_tokens)
                        ptx::cp_async_cg_16(ring.tokens() + offset + k * 16 * kPanelBytes,
                                            source[k] + panel * kPanelBytes);
                if (kFp8 && thread_idx < tile.num_tokens)
                    ptx::cp_async_ca_4(ring.scales() + thread_idx * 4, scale + panel * 4);
                if (kFp8 && thread_idx / 2 == kScaleThreads / 2)
                    ptx::cp_async_ca_4(ring.weight_scales() + thread_idx % 2 * 4,
                                       of_weights + panel * 4);
                ptx::cp_async_mbarrier_arrive_noinc(ring.full());
            }
        }
        finish(slot, true);
    }

    // Two warpgroups, 0 and 1.
    __device__ __forceinline__ void multiply(uint32_t group_idx) {
        // With fp8 they take turns at the matrix units: one adds while the other multiplies.
        if (kFp8 && group_idx == 1)
            ptx::bar_arrive(kTurnBarrier, 256);
        for (uint32_t slot = 0;; ++slot) {
            const FetchedTile tile = next_tile(slot);
            if (tile.num_tokens == 0)
                break;
            if (tile.num_tokens > 64)
                slot = many_tokens(tile, group_idx, slot);
            else if (tile.num_tokens > 32)
                few_tokens<64>(tile, group_idx);
            else if (tile.num_tokens > 16)
                few_tokens<32>(tile, group_idx);
            else if (tile.num_tokens > 8)
                few_tokens<16>(tile, group_idx);
            else
                few_tokens<8>(tile, group_idx);
        }
    }

  protected:
    // Known with the first stage of it.
    __device__ __forceinline__ FetchedTile next_tile(uint32_t slot) const {
        wait_full_phase(ring.full(), ring.phase);
        const uint4 published = ptx::ld_shared_v4(tile_slot(slot));
        return {published.x, published.y, published.z, published.w};
    }

    // A stage has arrived. The matrix units see data that threads copied after a fence.
    // NOTES: threads read scales that other threads copied without a fence. Both are accesses of
    // the generic proxy, and the copies are over when `full` is: their arrival at it is triggered
    // by their completion, and each reader waits for the phase itself, with acquire.
    // docs/explanation/gpu-experts.md describes racecheck's report of it.
    __device__ __forceinline__ void wait_full() const {
        wait_full_phase(ring.full(), ring.phase);
        if (kDirect)
            ptx::fence_proxy_async_shared();
    }

    __device__ __forceinline__ static void wait_kernel_before() {
        ptx::griddepcontrol_wait();
        ptx::griddepcontrol_launch_dependents();
        // Its stores are ordinary ones, and the copy engine reads them.
        ptx::fence_proxy_async();
    }

    __device__ __forceinline__ void stamp_begin() const {
        if (blockIdx.x == 0 && threadIdx.x == 0)
            comm::stamp(params.lists.stamps, kGateUp ? SY_BATCH_UP_BEGIN : SY_BATCH_DOWN_BEGIN);
    }

    // Announces the content of a stage, with the first of a tile the tile, and fetches the weights.
    __device__ __forceinline__ void begin_stage(const StageRing& stage, const ExpertTile& tile,
                                                uint32_t slot, uint32_t panel) const {
        const uint32_t num_rows = kDirect ? 0 : (tile.num_tokens + 7) / 8 * 8;
        if (panel == 0)
            ptx::st_shared_v4(tile_slot(slot),
                              make_uint4(tile.num_tokens, tile.position, tile.row, tile.column));
        ptx::mbarrier_arrive_expect_tx(
            stage.full(),
            kWeightBytes + num_rows * (kPanelBytes + (kFp8 ? uint32_t{sizeof(float)} : 0)));
        fetch_weights(stage, tile, panel);
    }

    // A stage has been multiplied. Only a broken GPU, or a broken descriptor of its copies,
    // prevents that. Then all results of this kernel are unusable: it ends with a trap, and the
    // answers are never sent.
    __device__ __forceinline__ void wait_empty(const StageRing& stage) const {
        if (ptx::mbarrier_try_wait_parity(stage.empty(), stage.phase ^ 1))
            return;
        const uint32_t begin = coarse_time();
        do {
            if (uint64_t{coarse_time() - begin} << kCoarseShift > params.timeout_ns)
                give_up(stage);
        } while (!ptx::mbarrier_try_wait_parity(stage.empty(), stage.phase ^ 1));
    }

    // Does not return. The compiler must know that, so that it keeps no state for code behind the
    // call.
    // NOTES: inline, though rare: around a call the compiler makes products wait for one another.
    __device__ __forceinline__ void give_up(const StageRing& stage) const {
        sy_error_word* trapped = params.trapped;
        if (trapped != nullptr) {
            if (ptx::atom_cas_relaxed_gpu(&trapped->tag, SY_TAG_NONE, SY_TAG_PRODUCT) ==
                SY_TAG_NONE) {
                trapped->peer = blockIdx.x;
                trapped->observed = stage.stage;
                trapped->expected = stage.phase ^ 1;
                ptx::fence_acq_rel_sys();
                trapped->reason = SY_REASON_TIMEOUT;
                ptx::fence_acq_rel_sys();
            } else {
                // A trap of this thread must not come before the words of the first are written,
                // even where that thread is of the same warp: each poll lets others of the warp
                // run.
                for (uint32_t i = 0; i < kMostLooks && ptx::ld_relaxed_sys(&trapped->reason) == 0;
                     ++i) {
                }
            }
        }
        __trap();
    }

    // Behind the last tile comes one without tokens. All threads that fetch.
    __device__ __forceinline__ void finish(uint32_t slot, bool is_copying) {
        wait_empty(ring);
        if (threadIdx.x == 0) {
            ptx::st_shared_v4(tile_slot(slot), make_uint4(0, 0, 0, 0));
            ptx::mbarrier_arrive(ring.full());
        }
        if (is_copying)
            ptx::mbarrier_arrive(ring.full());
        // Multiplying warpgroups have no bound of their own.
#pragma unroll 1
        for (uint32_t i = 1; i < kGemmStages; ++i) {
            ring.next();
            wait_empty(ring);
        }
    }

    __device__ __forceinline__ uint32_t tile_slot(uint32_t slot) const {
        return ring.shared + kTilesAt + slot % kTileSlots * 16;
    }

    // A tile's weights of one step.
    __device__ __forceinline__ void fetch_weights(const StageRing& stage, const ExpertTile& tile,
                                                  uint32_t panel) const {
#pragma unroll
        for (uint32_t block = 0; block < 4; ++block)
            fetch_block(stage.weights() + block * (kWeightBytes / 4), stage.full(), tile, panel,
                        block);
    }

    // A panel of 64 of a tile's rows of weights: of the first to the fourth block.
    __device__ __forceinline__ void fetch_block(uint32_t target, uint32_t full,
                                                const ExpertTile& tile, uint32_t panel,
                                                uint32_t block) const {
        const uint32_t x = panel * kPanelValues;
        if constexpr (kGateUp) {
            const uint32_t first_row = tile.expert * 2 * num_outs;
            const uint32_t out = tile.column * kOuts + block / 2 * 64;
            // Data behind all rows arrives as zeros.
            // NOTES: the limit is behind every place that a layer's memory can have: there may be
            // more places than experts are counted for, and the memory of the others was never
            // written.
            const uint32_t row = out < num_outs ? first_row + out : SY_MAX_EXPERTS * 2 * num_outs;
            ptx::cp_async_bulk_tensor_5d(target, layer.gate_up_map, full, x, row, 0, 0,
                                         block % 2 * 4);
        } else {
            ptx::cp_async_bulk_tensor_5d(
                target, layer.down_map, full, x, 0, 0, 0,
                (tile.expert * num_outs + tile.column * kOuts) / 32 + block * 2);
        }
    }

    // Start of the scales of a tile's weights: gate's and up's, or those of both halves of a tile
    // of down.
    __device__ __forceinline__ uint64_t weight_scale(const ExpertTile& tile, uint32_t which) const {
        const uint32_t num_blocks = (num_outs + SY_SCALE_BLOCK - 1) / SY_SCALE_BLOCK;
        const uint64_t matrix = kGateUp ? uint64_t{tile.expert} * 2 + which : tile.expert;
        const uint32_t block = kGateUp ? tile.column : tile.column * 2 + which;
        return (kGateUp ? layer.gate_up_scale : layer.down_scale) +
               (matrix * num_blocks + min(block, num_blocks - 1)) * tokens.num_panels *
                   sizeof(float);
    }

    // One arrival of each warp that multiplies.
    __device__ __forceinline__ void release(uint32_t empty) const {
        if ((threadIdx.x & 31) == 0)
            ptx::mbarrier_arrive(empty);
    }

    __device__ __forceinline__ uint32_t staging(uint32_t group_idx) const {
        return ring.shared + kStagingAt + group_idx * kStagingBytes;
    }

    // Weights are the rows: 128 of them, in two blocks, for this warpgroup.
    template <uint32_t kColumns>
    __device__ __forceinline__ void few_tokens(const FetchedTile& tile, uint32_t group_idx) {
        const uint32_t lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x / 32 & 3;
        float sum[2][kColumns / 2] = {};
        if constexpr (kFp8) {
            for (uint32_t panel = 0; panel < tokens.num_panels; ++panel, ring.next()) {
                float part[2][kColumns / 2];
                wait_full();
                multiply_few<kColumns>(part, group_idx, false);
                ptx::wgmma_wait<0>();
                const uint32_t scales = ring.scales() + lane_idx % 4 * 8;
                const float2 of_weights = ptx::ld_shared_f32x2(ring.weight_scales());
                const float first = kGateUp || group_idx == 0 ? of_weights.x : of_weights.y;
                const float second = kGateUp || group_idx == 1 ? of_weights.y : of_weights.x;
#pragma unroll
                for (uint32_t j = 0; j < kColumns / 8; ++j) {
                    const float2 token = ptx::ld_shared_f32x2(scales + j * 32);
                    const float scale[4] = {first * token.x, first * token.y, second * token.x,
                                            second * token.y};
#pragma unroll
                    for (uint32_t block = 0; block < 2; ++block)
#pragma unroll
                        for (uint32_t k = 0; k < 4; ++k)
                            sum[block][j * 4 + k] += part[block][j * 4 + k] * scale[k];
                }
                // One lane arrives, and its release orders its own reads only: scales are copied over next.
                // With many tokens, and without scales, instructions of the whole warp lie in between.
                __syncwarp();
                release(ring.empty());
            }
        } else {
            uint32_t before = 0;
            for (uint32_t panel = 0; panel < tokens.num_panels; ++panel, ring.next()) {
                wait_full();
                multiply_few<kColumns>(sum, group_idx, panel != 0);
                ptx::wgmma_wait<1>();
                if (panel != 0)
                    release(before);
                before = ring.empty();
            }
            ptx::wgmma_wait<0>();
            release(before);
        }
        // Columns are tokens; stored transposed, eight values of a token side by side.
        const uint32_t results = staging(group_idx);
#pragma unroll
        for (uint32_t j = 0; j < kColumns / 8; ++j) {
            const uint32_t token = j * 8 + (lane_idx & 7), which = lane_idx >> 3 & 1;
            if constexpr (kGateUp) {
                uint32_t values[2];
#pragma unroll
                for (uint32_t block = 0; block < 2; ++block) {
                    const float* s = &sum[block][j * 4];
                    values[block] = float2_to_bf16x2(swiglu(s[0], s[2]), swiglu(s[1], s[3]));
                }
                ptx::stmatrix_x2_trans(results + staged_chunk(token, which * 4 + warp_idx),
                                       values[0], values[1]);
            } else {
#pragma unroll
                for (uint32_t block = 0; block < 2; ++block) {
                    const float* s = &sum[block][j * 4];
                    ptx::stmatrix_x2_trans(
                        results + block * kHalfBytes + staged_chunk(token, warp_idx * 2 + which),
                        float2_to_bf16x2(s[0], s[1]), float2_to_bf16x2(s[2], s[3]));
                }
            }
        }
        if constexpr (kGateUp && kFp8) {
            // A scale is of 128 values, which both warpgroups have.
            ptx::bar_sync(3, 256);
            quantize_results<kColumns, 256>(params, staging(0), kStagingBytes, tile.row,
                                            tile.num_tokens, tile.column,
                                            group_idx * 128 + (threadIdx.x & 127));
            ptx::bar_sync(3, 256);
        } else {
            ptx::bar_sync(1 + group_idx, 128);
            if constexpr (kGateUp)
                store_panels<kColumns>(params, results, tile.row, tile.num_tokens,
                                       tile.column * 2 + group_idx, 1);
            else
                store_rows<kColumns>(params, results, tile.position, tile.num_tokens,
                                     tile.column * kOuts + group_idx * 128);
            ptx::bar_sync(1 + group_idx, 128);
        }
    }

    template <uint32_t kColumns>
    __device__ __forceinline__ void multiply_few(float (&sum)[2][kColumns / 2], uint32_t group_idx,
                                                 bool adds) const {
        const uint32_t weights =
            ptx::wgmma_operand(ring.weights() + group_idx * (kWeightBytes / 2));
        const uint32_t columns = ptx::wgmma_operand(ring.tokens());
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k)
#pragma unroll
            for (uint32_t block = 0; block < 2; ++block)
                ptx::Wgmma<kFp8, kColumns>::run(
                    sum[block], weights + (block * (kWeightBytes / 4) + k * 32) / 16,
                    columns + k * 2, adds || k != 0);
        ptx::wgmma_commit();
    }

    // The products of one step of bf16, begun.
    __device__ __forceinline__ void begin_step(float (&sum)[128], uint32_t group_idx,
                                               bool adds) const {
        wait_full();
        const uint32_t rows = ptx::wgmma_operand(ring.tokens() + group_idx * (64 * kPanelBytes));
        const uint32_t weights = ptx::wgmma_operand(ring.weights());
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k)
            ptx::Wgmma<false, 256>::run(sum, rows + k * 2, weights + k * 2, adds || k != 0);
        ptx::wgmma_commit();
    }

    // One step of fp8: the first of a tile, with the kept state of the tile before, or another
    // step.
    template <bool kFirst>
    __device__ __forceinline__ void add_step(float (&sum)[128], uint32_t group_idx, uint32_t my_row,
                                             const Held& held) {
        wait_full();
        const uint32_t rows = ptx::wgmma_operand(ring.tokens() + group_idx * (64 * kPanelBytes));
        const uint32_t weights = ptx::wgmma_operand(ring.weights());
        // Scales of this thread's two tokens, times the two scales of weights. Read before the
        // turn: behind the first product, the compiler lets the others wait for them.
        const float low = ptx::ld_shared_f32(ring.scales() + my_row * 4);
        const float high = ptx::ld_shared_f32(ring.scales() + my_row * 4 + 32);
        const float2 of_weights = ptx::ld_shared_f32x2(ring.weight_scales());
        const float scale[2][2] = {{low * of_weights.x, low * of_weights.y},
                                   {high * of_weights.x, high * of_weights.y}};
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            float part[64];
            ptx::bar_sync(kTurnBarrier + group_idx, 256);
            ptx::wgmma_fence();
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k) {
                ptx::Wgmma<true, 128>::run(part, rows + k * 2,
                                           weights + (half * (kWeightBytes / 2) + k * 32) / 16,
                                           k != 0);
                if (k == 2)
                    ptx::wgmma_commit();
            }
            ptx::wgmma_commit();
            // The other's turn begins with the last of these products.
            ptx::wgmma_wait<1>();
            ptx::bar_arrive(kTurnBarrier + 1 - group_idx, 256);
            if constexpr (kFirst) {
                if (half == 0)
                    held.template store<0>(params, my_row);
                else
                    held.template store<1>(params, my_row);
            }
            ptx::wgmma_wait<0>();
            if (half == 1)
                release(ring.empty());
#pragma unroll
            for (uint32_t j = 0; j < 16; ++j) {
                const uint32_t which = kGateUp ? j % 2 : half;
#pragma unroll
                for (uint32_t k = 0; k < 4; ++k) {
                    const uint32_t i = j * 4 + k;
                    const float by = scale[k / 2][which];
                    sum[half * 64 + i] = kFirst ? part[i] * by : sum[half * 64 + i] + part[i] * by;
                }
            }
        }
        ring.next();
    }

    // Tokens are the rows: 64 of them for this warpgroup. Goes on with the next tile when that has many tokens, too,
    // since its first products run while the results of the one before go out. Returns the last one's number.
    __device__ __forceinline__ uint32_t many_tokens(FetchedTile tile, uint32_t group_idx,
                                                    uint32_t slot) {
        const uint32_t lane_idx = threadIdx.x & 31, warp_idx = threadIdx.x / 32 & 3;
        const uint32_t my_row = group_idx * 64 + warp_idx * 16 + lane_idx / 4;
        Held held;
        for (;;) {
            float sum[128];
            if constexpr (kFp8) {
                add_step<true>(sum, group_idx, my_row, held);
                for (uint32_t panel = 1; panel < tokens.num_panels; ++panel)
                    add_step<false>(sum, group_idx, my_row, held);
            } else {
                begin_step(sum, group_idx, false);
                held.template store<0>(params, my_row);
                held.template store<1>(params, my_row);
                uint32_t before = ring.empty();
                ring.next();
                for (uint32_t panel = 1; panel < tokens.num_panels; ++panel, ring.next()) {
                    begin_step(sum, group_idx, true);
                    ptx::wgmma_wait<1>();
                    release(before);
                    before = ring.empty();
                }
                ptx::wgmma_wait<0>();
                release(before);
            }
            held.take(sum, tile.row, tile.position, tile.num_tokens, tile.column);
            tile = next_tile(slot + 1);
            if (tile.num_tokens <= 64) { // or none
                held.template store<0>(params, my_row);
                held.template store<1>(params, my_row);
                return slot;
            }
            ++slot;
        }
    }
};

} // namespace switchyard::impls
