// The rows of a batch in expert_recv: waits for them, checks their entries and counts them by
// expert.
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
// NOTES: a look-up, or an addition whose result is used, takes a hundred clocks: so all of them
// leave together. Entries that do not count add nothing, to words that no two lanes share.
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
// first row stay in `kept`. Positions that later steps need are in row_position for the others.
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

// Rows follow a header immediately; a client that stopped in between must not stop the others.
#if defined(SY_SIMT)
// A GPU in software shares the processor with the threads that write them.
constexpr uint64_t kRowBoundNs = 500'000'000;
#else
constexpr uint64_t kRowBoundNs = 20'000'000;
#endif

// Rows that a warp waits for together: those of its groups of lanes in this many rounds.
template <uint32_t kRounds> struct RowWait {
    uint32_t client_idx[kRounds];
    uint32_t row[kRounds];
    uint64_t number[kRounds]; // 0: no row
};

// Whether all scales of a row are good, by this lane's share of them. kRowLanes neighbouring lanes per row.
__device__ __forceinline__ bool has_good_scales(const sy_frame_geometry& geometry, uint64_t frame,
                                                uint32_t row) {
    const uint32_t part_idx = threadIdx.x % kRowLanes;
    const uint64_t at = layout::scales_at(geometry, frame, row);
    const bool by_four = geometry.scales_per_row % 4 == 0;
    const uint32_t num_parts = by_four ? geometry.scales_per_row / 4 : geometry.scales_per_row;
    const auto load = [&](uint32_t part) {
        float4 four = {1.0f, 1.0f, 1.0f, 1.0f};
        if (by_four)
            four = reinterpret_cast<const float4*>(at)[part];
        else
            four.x = reinterpret_cast<const float*>(at)[part];
        return four;
    };
    const auto is_good = [](const float4& four) {
        return is_good_scale(four.x) && is_good_scale(four.y) && is_good_scale(four.z) &&
               is_good_scale(four.w);
    };
    bool are_good = true;
    // Two loads leave together. Without a second part, the first one is read again.
    for (uint32_t part = part_idx; part < num_parts; part += 2 * kRowLanes) {
        const float4 first = load(part);
        const float4 second = load(part + kRowLanes < num_parts ? part + kRowLanes : part);
        are_good &= is_good(first) && is_good(second);
    }
    return are_good;
}

// Rows that the blocks behind the first wait for before they know whether they are of the batch: one per group of
// lanes, clients in turns.
constexpr uint32_t kRowsAhead = (kRecvBlocks - 1) * kRecvThreads / kRowLanes;
// Pause between two polls for such a row: reads of the host's memory delay the first block's reads.
template <uint32_t kPaths>
constexpr uint32_t kAheadPauseNs = kPaths == comm::kDirectOnly ? 20 : 1000;
// How many there are at most, tens of milliseconds: then a block waits for the first one without looking.
#if defined(SY_SIMT)
// Polls take the processor's time from the senders.
constexpr uint32_t kLooksAhead = 3;
#else
constexpr uint32_t kLooksAhead = 1 << 16;
#endif

__device__ __forceinline__ bool is_row_ahead(const sy_expert_recv_params& params,
                                             uint32_t client_idx, uint32_t row) {
    return row * params.num_clients + client_idx < kRowsAhead;
}

// The row of these lanes. Neighbours go to different blocks.
__device__ __forceinline__ uint32_t ahead_idx(uint32_t rank) {
    constexpr uint32_t kGroups = 32 / kRowLanes;
    return (threadIdx.x / 32 * (kRecvBlocks - 1) + rank - 1) * kGroups +
           threadIdx.x / kRowLanes % kGroups;
}

// Polls for a row of the frame that a client sends next, until it arrives or the batch is chosen.
// One warp, kRowLanes of it per row.
// NOTES: the findings lie in shared memory until they are needed, since registers are scarce
// meanwhile.
template <uint32_t kPaths>
__device__ __forceinline__ void await_row_ahead(RecvShared& shared,
                                                const sy_expert_recv_params& params, uint32_t idx) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t client_idx = idx % params.num_clients, row = idx / params.num_clients;
    // The first block may advance it for a frame that it refuses; the rows of that frame are not
    // needed then.
    const uint64_t number = params.state->taken[client_idx] + 1;
    const uint64_t frame = shared.clients[client_idx].request +
                           layout::request_frame(geometry, layout::ring_place(geometry, number));
    const uint64_t* flag =
        reinterpret_cast<const uint64_t*>(layout::request_flag_at(geometry, frame, row));
    const bool is_row = row < geometry.max_tokens;
    bool is_there = false;
    for (uint32_t num_looks = 0; num_looks < kLooksAhead; ++num_looks) {
        if (is_row && !is_there)
            is_there = ptx::ld_acquire_sys(flag) >= number;
        if (__all_sync(kFullWarp, is_there || !is_row))
            break;
        // By an atomic that changes nothing: the first block sets it by one meanwhile.
        if (__any_sync(kFullWarp, lane_idx == 0 && atomicOr(&shared.is_over, 0u) != 0))
            break;
        __nanosleep(kAheadPauseNs<kPaths>);
    }
    const uint32_t group = ((1u << kRowLanes) - 1) << lane_idx / kRowLanes * kRowLanes;
    // Lanes may see it one after the other, and each has a share of the scales.
    is_there = (__ballot_sync(kFullWarp, is_there) & group) == group;
    const bool is_bad = is_there && !has_good_scales(geometry, frame, row);
    const bool has_bad = (__ballot_sync(kFullWarp, is_bad) & group) != 0;
    if (lane_idx % kRowLanes == 0)
        shared.row_ahead[threadIdx.x / kRowLanes] = !is_there ? kRowAway
                                                    : has_bad ? kRowBad
                                                              : kRowGood;
    __syncwarp();
}

// The row that these lanes have waited for ahead, if it belongs to the batch and had not arrived
// yet. Records its error.
__device__ __forceinline__ RowWait<1>
rest_of_ahead(RecvShared& shared, const sy_expert_recv_params& params, uint32_t idx) {
    const uint32_t client_idx = idx % params.num_clients, row = idx / params.num_clients;
    const bool is_in = row < shared.snapshot.num_rows[client_idx];
    const uint8_t found = shared.row_ahead[threadIdx.x / kRowLanes];
    if (is_in && found == kRowBad)
        atomicMax(&shared.row_code[client_idx], uint32_t{SY_ERROR_BAD_FRAME});
    return {
        {client_idx}, {row}, {is_in && found == kRowAway ? shared.snapshot.number[client_idx] : 0}};
}

// Rows of the batch from `first_row` on, except those that are waited for ahead where
// `skips_ahead`. One warp; kRowLanes per row.
template <uint32_t kRounds>
__device__ __forceinline__ RowWait<kRounds>
rows_from(const RecvShared& shared, const sy_expert_recv_params& params, uint32_t first_row,
          uint32_t stride, bool skips_ahead) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    RowWait<kRounds> wait;
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
        const uint32_t row = first_row + lane_idx / kRowLanes + i * stride;
        const bool is_row = row < num_rows;
        const uint32_t client_idx = client_of_row(shared, params.num_clients, is_row ? row : 0);
        wait.client_idx[i] = client_idx;
        wait.row[i] = is_row ? row - shared.row_begin[client_idx] : 0;
        const bool is_ours =
            is_row && !(skips_ahead && is_row_ahead(params, client_idx, wait.row[i]));
        wait.number[i] = is_ours ? shared.snapshot.number[client_idx] : 0;
    }
    return wait;
}

// Waits for rows and checks their scales. One warp; kRowLanes per row.
template <uint32_t kRounds>
__device__ __forceinline__ void take_rows(RecvShared& shared, const sy_expert_recv_params& params,
                                          RowWait<kRounds>& wait) {
    const sy_frame_geometry& geometry = params.geometry;
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
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) {
        const uint64_t frame = frame_of(shared, params, wait.client_idx[i]);
        if (wait.number[i] != 0 && !has_good_scales(geometry, frame, wait.row[i]))
            atomicMax(&shared.row_code[wait.client_idx[i]], uint32_t{SY_ERROR_BAD_FRAME});
    }
}

constexpr uint32_t kMostRounds = 2;

// Waits for the rows of the batch that were not waited for ahead, together with the other waiting
// blocks: those behind the first, or the only one. One warp; kRowLanes per row.
__device__ __forceinline__ void await_rest(RecvShared& shared, const sy_expert_recv_params& params,
                                           uint32_t rank) {
    constexpr uint32_t kNumBlocks = kRecvBlocks > 1 ? kRecvBlocks - 1 : 1;
    constexpr uint32_t kStride = kNumBlocks * kRecvThreads / kRowLanes;
    const uint32_t lane_idx = threadIdx.x & 31, num_clients = params.num_clients;
    const uint32_t num_ahead = (kRowsAhead + num_clients - 1 - lane_idx) / num_clients;
    const bool has_more = lane_idx < num_clients && shared.snapshot.num_rows[lane_idx] > num_ahead;
    if (!__any_sync(kFullWarp, has_more))
        return;
    // The first of them. All before it are of clients that have no more.
    const uint32_t mine = has_more ? shared.row_begin[lane_idx] + num_ahead : UINT32_MAX;
    const uint32_t begin = ~__reduce_max_sync(kFullWarp, ~mine);
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    // Neighbouring rows go to different blocks.
    const uint32_t block_idx = kRecvBlocks > 1 ? rank - 1 : 0;
    for (uint32_t row = begin + (threadIdx.x / 32 * kNumBlocks + block_idx) * (32 / kRowLanes);
         row < num_rows; row += kStride * kMostRounds) {
        RowWait<kMostRounds> wait = rows_from<kMostRounds>(shared, params, row, kStride, true);
        take_rows(shared, params, wait);
    }
}

} // namespace switchyard::impls
