// Rows of a batch as expert_recv meets them: waited for, their entries checked and counted by expert.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_batch.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"

namespace switchyard::impls {

// Up to eight entries of a row, as copied from the slot. `packed` is the expert and, once counted,
// expert << kRankBits | rank.
struct RowEntries {
    uint32_t packed[8], weight[8];
};

__device__ __forceinline__ void load_entries(const RecvShared& shared,
                                             const sy_expert_recv_params& params,
                                             uint32_t client_idx, uint32_t row, uint32_t first,
                                             RowEntries& entries) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint2* source = reinterpret_cast<const uint2*>(layout::entries_at(
        geometry, frame_of(shared, params, client_idx), row - shared.row_begin[client_idx]));
    if (geometry.top_k == 8) {
#pragma unroll
        for (uint32_t i = 0; i < 8; i += 2) {
            const uint4 two = reinterpret_cast<const uint4*>(source)[i / 2];
            entries.packed[i] = two.x, entries.weight[i] = two.y;
            entries.packed[i + 1] = two.z, entries.weight[i + 1] = two.w;
        }
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const uint2 entry =
            first + i < geometry.top_k ? source[first + i] : make_uint2(SY_NO_EXPERT, 0);
        entries.packed[i] = entry.x;
        entries.weight[i] = entry.y;
    }
}

// Checks entries and counts them by expert. Returns SY_ERROR_* or 0.
// NOTES: a look-up, or an addition whose result is used, takes a hundred clocks: so all of them leave
// together, and entries that do not count add nothing to words that no two lanes share.
__device__ __forceinline__ uint32_t count_entries(RecvShared& shared,
                                                  const sy_expert_recv_params& params,
                                                  RowEntries& entries, uint32_t* num_entries) {
    const uint32_t lane_idx = threadIdx.x & 31;
    int32_t local[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
        local[i] = local_expert(shared, params, entries.packed[i]);
    uint32_t code = 0, counts = 0; // counts: entries that do, as a mask
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const bool is_used = entries.packed[i] != SY_NO_EXPERT;
        const bool is_finite = (entries.weight[i] & 0x7f800000u) != 0x7f800000u;
        const uint32_t wrong = local[i] < 0 ? static_cast<uint32_t>(-local[i])
                               : is_finite  ? 0
                                            : uint32_t{SY_ERROR_BAD_FRAME};
        *num_entries += is_used ? 1 : 0;
        code = max(code, is_used ? wrong : 0);
        counts |= is_used && wrong == 0 ? 1u << i : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const bool does = (counts >> i & 1) != 0;
        const uint32_t expert = does ? static_cast<uint32_t>(local[i]) : lane_idx;
        const uint32_t rank = atomicAdd(&shared.histogram[expert], does ? 1u : 0u);
        entries.packed[i] = does ? expert << kRankBits | rank : SY_NO_EXPERT;
    }
    return code;
}

// Before anything is counted. Barrier afterwards.
__device__ __forceinline__ void clear_counts(RecvShared& shared,
                                             const sy_expert_recv_params& params) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < params.num_local_experts; i += kRecvThreads)
        shared.histogram[i] = 0;
    if (threadIdx.x < sizeof(shared.row_used))
        shared.row_used[threadIdx.x] = 0;
    if (threadIdx.x < 32)
        shared.entry_code[threadIdx.x] = 0;
}

// Finite e4m3 codes times a larger scale would overflow.
constexpr float kMaxScale = 7.5955873e35f;

__device__ __forceinline__ bool is_good_scale(float scale) {
    return scale > 0.0f && scale <= kMaxScale; // NaN compares false
}

// Checks the entries of every row and counts them by expert. The first eight entries of a thread's
// first row are in `kept` and stay there; what they need later, others leave in row_position.
__device__ __forceinline__ void check_and_count(RecvShared& shared,
                                                const sy_expert_recv_params& params,
                                                uint32_t first_thread, RowEntries& kept) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    for (uint32_t row = first_thread; row < num_rows; row += kRecvStride) {
        const uint32_t client_idx = client_of_row(shared, params.num_clients, row);
        uint32_t num_entries = 0, code = 0;
        uint32_t first = 0;
        if (row == first_thread) {
            code = count_entries(shared, params, kept, &num_entries);
            first = 8;
        }
        for (; first < geometry.top_k; first += 8) {
            RowEntries entries;
            load_entries(shared, params, client_idx, row, first, entries);
            code = max(code, count_entries(shared, params, entries, &num_entries));
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i)
                if (first + i < geometry.top_k)
                    params.lists.row_position[uint64_t{row} * geometry.top_k + first + i] =
                        entries.packed[i];
        }
        if (num_entries == 0)
            code = max(code, uint32_t{SY_ERROR_BAD_FRAME});
        if (code != 0)
            atomicMax(&shared.entry_code[client_idx], code);
    }
}

// A header is followed by its rows at once; a client that stopped in between must not stop the others.
#if defined(SY_SIMT)
// A GPU in software takes turns on the processor with whoever writes them.
constexpr uint64_t kRowBoundNs = 500'000'000;
#else
constexpr uint64_t kRowBoundNs = 20'000'000;
#endif

// What a warp waits for together: the rows of its two halves in this many rounds.
template <uint32_t kRounds> struct RowWait {
    uint32_t client_idx[kRounds];
    uint32_t row[kRounds];
    uint64_t number[kRounds]; // 0: no row
};

// Waits for rows and checks their scales. One warp; half a warp per row.
template <uint32_t kRounds>
__device__ __forceinline__ void take_rows(RecvShared& shared, const sy_expert_recv_params& params,
                                          uint32_t first_row, uint32_t stride) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t lane_idx = threadIdx.x & 31, part_idx = lane_idx & 15;
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    RowWait<kRounds> wait;
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
        const uint32_t row = first_row + (lane_idx >> 4) + i * stride;
        const bool is_row = row < num_rows;
        const uint32_t client_idx = client_of_row(shared, params.num_clients, is_row ? row : 0);
        wait.client_idx[i] = client_idx;
        wait.row[i] = is_row ? row - shared.row_begin[client_idx] : 0;
        wait.number[i] = is_row ? shared.snapshot.number[client_idx] : 0;
    }
    uint64_t start_ns = 0;
    for (uint32_t num_polls = 1;; ++num_polls) {
        uint64_t flags[kRounds];
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i) {
            const uint64_t* flag = reinterpret_cast<const uint64_t*>(layout::request_flag_at(
                geometry, frame_of(shared, params, wait.client_idx[i]), wait.row[i]));
            flags[i] = kRounds == 1 ? ptx::ld_acquire_sys(flag) : ptx::ld_relaxed_sys(flag);
        }
        uint32_t late = 0; // clients, as a mask
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            late |= flags[i] < wait.number[i] ? 1u << wait.client_idx[i] : 0;
        if (!__any_sync(kFullWarp, late != 0))
            break;
        if (num_polls % comm::kPollsPerCheck != 0)
            continue;
        const comm::WaitBound bound = {
            &params.state->error, params.abort_mask, nullptr, nullptr, nullptr, params.timeout_ns};
        const uint32_t client_idx = late != 0 ? __ffs(late) - 1 : 0;
        const bool is_aborted = late != 0 && comm::is_aborted(bound, client_idx);
        const bool has_expired = comm::elapsed_ns(&start_ns) > max(params.timeout_ns, kRowBoundNs);
        if (late != 0 && (is_aborted || has_expired)) {
            uint64_t observed = 0;
#pragma unroll
            for (uint32_t i = 0; i < kRounds; ++i)
                if (wait.client_idx[i] == client_idx && flags[i] < wait.number[i])
                    observed = flags[i];
            comm::record_error(&params.state->error, SY_TAG_RECV_FRAME, client_idx,
                               is_aborted ? SY_REASON_ABORT : SY_REASON_TIMEOUT, observed,
                               shared.snapshot.number[client_idx]);
            atomicMax(&shared.row_code[client_idx], uint32_t{SY_ERROR_INTERNAL});
        }
        // The client is out of the batch; its other rows need not be waited for.
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            if (wait.number[i] != 0 && atomicMax(&shared.row_code[wait.client_idx[i]], 0u) != 0)
                wait.number[i] = 0;
    }
    if (kRounds != 1)
        ptx::fence_acq_rel_sys();
    const bool by_four = geometry.scales_per_row % 4 == 0;
    const uint32_t num_parts = by_four ? geometry.scales_per_row / 4 : geometry.scales_per_row;
    bool is_good[kRounds];
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
        is_good[i] = true;
    for (uint32_t part = part_idx; part < num_parts; part += 16) {
        float4 four[kRounds];
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i) {
            four[i] = {1.0f, 1.0f, 1.0f, 1.0f};
            const uint64_t at = layout::scales_at(
                geometry, frame_of(shared, params, wait.client_idx[i]), wait.row[i]);
            if (wait.number[i] == 0)
                continue;
            if (by_four)
                four[i] = reinterpret_cast<const float4*>(at)[part];
            else
                four[i].x = reinterpret_cast<const float*>(at)[part];
        }
#pragma unroll
        for (uint32_t i = 0; i < kRounds; ++i)
            is_good[i] &= is_good_scale(four[i].x) && is_good_scale(four[i].y) &&
                          is_good_scale(four[i].z) && is_good_scale(four[i].w);
    }
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i)
        if (!is_good[i])
            atomicMax(&shared.row_code[wait.client_idx[i]], uint32_t{SY_ERROR_BAD_FRAME});
}

constexpr uint32_t kMostRounds = 2;

// Waits for rows of the batch and checks their scales. This warp takes two from `first` on, a row per half,
// and two more at every `stride`.
__device__ __forceinline__ void await_rows(RecvShared& shared, const sy_expert_recv_params& params,
                                           uint32_t first, uint32_t stride) {
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    if (num_rows <= stride) {
        if (first < num_rows)
            take_rows<1>(shared, params, first, stride);
    } else {
        for (uint32_t row = first; row < num_rows; row += stride * kMostRounds)
            take_rows<kMostRounds>(shared, params, row, stride);
    }
}

} // namespace switchyard::impls
