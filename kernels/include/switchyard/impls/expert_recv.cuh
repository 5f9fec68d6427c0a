// expert_recv: takes the frames that are ready, checks every field, and sorts their entries by expert.
//
// One cluster of blocks: the decision which frames make up the batch is taken by one warp and must
// reach everybody, and a cluster's barrier and shared memory do that in a fraction of what a grid
// barrier through global memory costs. Only tables are touched; the payload stays in the slots.
//
// What a peer can write is read once into this server's memory before it is used as an index, and
// checked there: a client that changes its frame while it is being read harms its own answer only.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/stream.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_batch.cuh"
#include "switchyard/impls/expert_sort.cuh"
#include "switchyard/impls/frames.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

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

// Whether this block has found a client's frame bad. Barrier before. One warp, or each for itself.
__device__ __forceinline__ bool has_bad(const RecvShared& shared) {
    const uint32_t lane_idx = threadIdx.x & 31;
    return __any_sync(kFullWarp, (shared.row_code[lane_idx] | shared.entry_code[lane_idx]) != 0);
}

// Tells all blocks when this one has found a client's frame bad. What it found is seen by whoever has met
// this thread at the cluster's next barrier, even if that orders nothing itself.
__device__ __forceinline__ void tell_bad(RecvShared& shared) {
    __syncthreads();
    if (threadIdx.x >= 32 || !has_bad(shared))
        return;
    if (threadIdx.x < kRecvBlocks)
        ptx::red_or_shared_cluster(ptx::mapa_shared_cluster(&shared.any_bad, threadIdx.x), 1);
    ptx::fence_acq_rel_cluster();
}

// Where this block's entries of each expert begin in the lists. Returns the number of entries.
__device__ __forceinline__ uint32_t place_experts(RecvShared& shared,
                                                  const sy_expert_recv_params& params,
                                                  uint32_t rank) {
    const uint32_t thread_idx = threadIdx.x, lane_idx = thread_idx & 31;
    const uint32_t num_warps =
        min((params.num_local_experts + 31) / 32, uint32_t{kRecvThreads / 32});
    uint32_t carry = 0;
    for (uint32_t first = 0; first < params.num_local_experts; first += kRecvThreads) {
        const uint32_t expert = first + thread_idx;
        uint32_t total = 0, before = 0;
        if (expert < params.num_local_experts) {
#pragma unroll
            for (uint32_t other = 0; other < kRecvBlocks; ++other) {
                const uint32_t count = ptx::ld_shared_cluster(
                    ptx::mapa_shared_cluster(&shared.histogram[expert], other));
                total += count;
                before += other < rank ? count : 0;
            }
        }
        uint32_t upto = total;
        for (uint32_t delta = 1; delta < 32; delta <<= 1) {
            const uint32_t below = __shfl_up_sync(kFullWarp, upto, delta);
            upto += lane_idx >= delta ? below : 0;
        }
        if (lane_idx == 31)
            shared.group_sums[thread_idx / 32] = upto;
        __syncthreads();
        uint32_t earlier_warps = 0, all_warps = 0;
        for (uint32_t warp = 0; warp < num_warps; ++warp) {
            const uint32_t count = shared.group_sums[warp];
            earlier_warps += warp < thread_idx / 32 ? count : 0;
            all_warps += count;
        }
        if (expert < params.num_local_experts) {
            const uint32_t begin = carry + earlier_warps + upto - total;
            shared.base[expert] = begin + before;
            if (rank == 0)
                params.lists.expert_begin[expert] = begin;
        }
        carry += all_warps;
        __syncthreads();
    }
    if (rank == 0 && thread_idx == 0)
        params.lists.expert_begin[params.num_local_experts] = carry;
    return carry;
}

__device__ __forceinline__ void fill_lists(const RecvShared& shared,
                                           const sy_expert_recv_params& params,
                                           uint32_t first_thread, const RowEntries& kept) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    const auto place = [&](uint32_t row, uint32_t choice, uint32_t packed, uint32_t weight) {
        uint32_t position = SY_NO_EXPERT;
        if (packed != SY_NO_EXPERT) {
            position = shared.base[packed >> kRankBits] + (packed & ((1u << kRankBits) - 1));
            params.lists.list_row[position] = row;
            params.lists.list_weight[position] = __uint_as_float(weight);
        }
        params.lists.row_position[uint64_t{row} * geometry.top_k + choice] = position;
    };
    for (uint32_t row = first_thread; row < num_rows; row += kRecvStride) {
        const uint32_t client_idx = client_of_row(shared, params.num_clients, row);
        const uint32_t frame_row = row - shared.row_begin[client_idx];
        params.lists.row_source[row] = client_idx << SY_ROUTE_SHIFT | frame_row;
        const bool is_kept = row == first_thread;
        if (is_kept) {
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i)
                if (i < geometry.top_k)
                    place(row, i, kept.packed[i], kept.weight[i]);
        }
        const uint2* entries = reinterpret_cast<const uint2*>(
            layout::entries_at(geometry, frame_of(shared, params, client_idx), frame_row));
        for (uint32_t i = is_kept ? 8 : 0; i < geometry.top_k; ++i)
            place(row, i, params.lists.row_position[uint64_t{row} * geometry.top_k + i],
                  entries[i].y);
    }
}

// The lists of a batch of any size, by all blocks. Neighbouring rows go to different blocks.
__device__ __forceinline__ void sort_rows(RecvShared& shared, const sy_expert_recv_params& params,
                                          uint32_t rank) {
    const uint32_t first_thread = threadIdx.x * kRecvBlocks + rank;
    RowEntries kept;
    if (first_thread < shared.row_begin[SY_MAX_PEERS])
        load_entries(shared, params, client_of_row(shared, params.num_clients, first_thread),
                     first_thread, 0, kept);
    const int16_t* table = local_experts(shared, params);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < params.num_experts; i += kRecvThreads)
        shared.local_expert[i] = table[i];
    __syncthreads();
    check_and_count(shared, params, first_thread, kept);
    cluster_barrier();
    const uint32_t num_entries = place_experts(shared, params, rank);
    __syncthreads();
    fill_lists(shared, params, first_thread, kept);
    if (rank == 0 && threadIdx.x < 32)
        write_batch(shared, params, num_entries);
}

// Takes clients with a code out of the batch: with one in any block, or in this one when it is alone.
// Called by all blocks that have to do with the batch.
__device__ __forceinline__ void
drop_bad_clients(RecvShared& shared, const sy_expert_recv_params& params, bool is_alone) {
    const uint32_t lane_idx = threadIdx.x;
    uint32_t code = 0;
    if (lane_idx < 32 && is_alone)
        code = max(shared.row_code[lane_idx], shared.entry_code[lane_idx]);
    else if (lane_idx < 32)
        for (uint32_t other = 0; other < kRecvBlocks; ++other)
            code = max(code, max(ptx::ld_shared_cluster(
                                     ptx::mapa_shared_cluster(&shared.row_code[lane_idx], other)),
                                 ptx::ld_shared_cluster(ptx::mapa_shared_cluster(
                                     &shared.entry_code[lane_idx], other))));
    // Codes must be known to all before anything is counted again.
    if (!is_alone)
        cluster_barrier();
    if (lane_idx < 32) {
        shared.bad_code[lane_idx] = code;
        __syncwarp();
        number_rows(shared, params);
    }
    clear_counts(shared, params);
    __syncthreads();
}

// Waits for a good batch. One warp of the first block.
template <uint32_t kWays>
__device__ __forceinline__ void find_batch(RecvShared& shared, const sy_expert_recv_params& params,
                                           uint64_t gather) {
    const uint32_t wanted = min(params.min_ready, params.num_clients);
    const sy_gather whom = {static_cast<uint32_t>(gather), static_cast<uint32_t>(gather >> 32)};
    const Arrivals seen = await_headers<kWays>(shared, params, whom, wanted);
    choose_batch<kWays>(shared, params, seen, wanted);
    __syncwarp();
    if (kWays != comm::kDirectOnly && threadIdx.x == 0)
        ptx::st_release_cta_shared(&shared.has_chosen, 1);
    number_rows(shared, params);
}

// What the first block has chosen. Called by all of another.
__device__ __forceinline__ void copy_snapshot(RecvShared& shared,
                                              const sy_expert_recv_params& params) {
    constexpr uint32_t kSnapshotWords = sizeof(RecvSnapshot) / sizeof(uint32_t);
    static_assert(kSnapshotWords <= kRecvThreads, "a thread per word");
    if (threadIdx.x < kSnapshotWords) {
        uint32_t* mine = reinterpret_cast<uint32_t*>(&shared.snapshot) + threadIdx.x;
        *mine = ptx::ld_shared_cluster(ptx::mapa_shared_cluster(mine, 0));
    }
    __syncthreads();
    if (threadIdx.x < 32)
        number_rows(shared, params);
    __syncthreads();
}

// Blocks meet once when the batch is known and once when all is done, where nobody looks into another's
// shared memory any more: a block that leaves takes it along. Of a small batch the first block makes the
// lists, so it does not wait at the first meeting but just before it comes to the second, and of one so
// small that it waits for the rows, too, the others leave at once.
//
// NOTES: an arrival that releases waits for what was stored before, and a store to a client takes a
// microsecond. So arrivals are relaxed but where others need what was stored.
template <uint32_t kWays>
__global__ void __cluster_dims__(kRecvBlocks, 1, 1) __launch_bounds__(kRecvThreads, 1)
    expert_recv_kernel(const __grid_constant__ sy_expert_recv_params params) {
    __shared__ RecvShared shared;
    const uint32_t thread_idx = threadIdx.x, warp_idx = thread_idx / 32;
    const uint32_t rank = ptx::mov_cluster_ctarank();
    // Asked for early: it may lie in the host's memory, a microsecond away.
    uint64_t gather = 0;
    if (params.gather != nullptr && rank == 0 && thread_idx < 32)
        gather = ptx::ld_relaxed_sys(reinterpret_cast<const uint64_t*>(params.gather));
    clear_counts(shared, params);
    if (thread_idx < 32)
        shared.row_code[thread_idx] = shared.bad_code[thread_idx] = 0;
    if (thread_idx == 0)
        shared.any_bad = 0, shared.inverse_top_k = inverse_of(params.geometry.top_k);
    if (kWays != comm::kDirectOnly && thread_idx == 0)
        shared.quiet = shared.has_chosen = 0;
    layout::TableCopy<sy_client_peer, kRecvThreads, SY_MAX_PEERS> clients;
    clients.load(params.clients, params.num_clients);
    clients.store(shared.clients, params.num_clients);
    __syncthreads();
    comm::follow(params.flags);
    comm::let_next_start(params.flags);
    if (rank == 0) {
        if (warp_idx == 0)
            find_batch<kWays>(shared, params, gather);
        else if (kWays != comm::kDirectOnly && warp_idx == 1)
            watch_ways<kWays>(shared, params);
        __syncthreads();
        // One warp's release is the block's, after its barrier.
        if (warp_idx == kRecvThreads / 32 - 1)
            ptx::barrier_cluster_arrive_release();
        else
            ptx::barrier_cluster_arrive_relaxed();
    } else {
        // With what is cleared above, which the first block may add to.
        ptx::barrier_cluster_arrive_release();
        ptx::barrier_cluster_wait_acquire();
        copy_snapshot(shared, params);
    }
    if (rank == kRecvBlocks - 1 && warp_idx == 0)
        note_batch<kWays>(shared, params);
    const uint32_t num_rows = shared.snapshot.num_rows_in_all;
    const bool is_alone = num_rows <= kRowsAlone;
    const bool is_small = is_small_batch(num_rows, params.geometry.top_k);
    if (rank == 0 && !is_small)
        ptx::barrier_cluster_wait_acquire();
    // Once more without the clients whose frames prove bad, which is rare.
    for (bool is_second = false;; is_second = true) {
        if (!is_small)
            sort_rows(shared, params, rank);
        else if (rank == 0 && !is_alone)
            sort_entries<kStagedEntries / kRecvThreads, kRecvThreads>(shared, params);
        else if (rank == 0 && thread_idx < kListThreads)
            sort_entries<1, kListThreads>(shared, params);
        if (!is_second) {
            // Neighbouring rows go to different blocks.
            const uint32_t skipped = is_small && kRecvBlocks > 1 ? 1 : 0;
            const uint32_t num_waiters = is_alone ? 1 : kRecvBlocks - skipped;
            const uint32_t waiter_warp =
                is_alone ? warp_idx - kListThreads / 32 : warp_idx * num_waiters + rank - skipped;
            const bool waits = is_alone ? rank == 0 && thread_idx >= kListThreads : rank >= skipped;
            if (waits)
                await_rows(shared, params, waiter_warp * 2,
                           is_alone ? kRowsAlone : num_waiters * kRecvThreads / 16);
        }
        if (is_alone) {
            if (!is_second) {
                if (rank == 0)
                    ptx::barrier_cluster_wait_acquire();
                ptx::barrier_cluster_arrive_relaxed();
            }
            __syncthreads();
            const bool is_bad = has_bad(shared);
            if (!is_second)
                ptx::barrier_cluster_wait_acquire();
            if (is_second || !is_bad)
                break;
        } else {
            if (!is_second) {
                if (rank == 0 && is_small)
                    ptx::barrier_cluster_wait_acquire();
                tell_bad(shared);
            }
            ptx::barrier_cluster_arrive_relaxed();
            ptx::barrier_cluster_wait_acquire();
            if (is_second || shared.any_bad == 0)
                break;
        }
        drop_bad_clients(shared, params, is_alone);
    }
    if (rank == 0 && thread_idx < params.num_clients && shared.bad_code[thread_idx] != 0) {
        refuse<kWays>(shared, params, thread_idx, shared.snapshot.number[thread_idx],
                      shared.bad_code[thread_idx]);
        atomicAdd(reinterpret_cast<unsigned long long*>(&params.state->num_refused), 1ull);
    }
    comm::join(params.flags);
}

} // namespace switchyard::impls
