// The lists of a batch whose entries one block holds in registers: a thread has an entry, or up to
// four. Neighbours are best, since values common to a row are looked up once.
//
// The cost is the number of sequential instructions and of barriers, not of threads: a barrier
// costs some fifty clocks, an access to shared memory thirty, one to the GPU's memory three
// hundred. So loads that do not depend on each other leave together, and a thread does little.
#pragma once

#include <cstdint>

#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_batch.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// One block handles a batch of up to this number of rows alone: half of its warps make the lists,
// the others wait for the rows meanwhile.
constexpr uint32_t kListThreads = kRecvThreads / 2;
constexpr uint32_t kRowsAlone = kListThreads / SY_MAX_DEVICE_TOP_K; // an entry per thread
static_assert(kRowsAlone <= (kRecvThreads - kListThreads) / kRowLanes, "lanes for every row");
// One block makes the lists of a batch of up to this number of rows, and kStagedEntries entries.
constexpr uint32_t kRowsSmall = RecvShared::kRowsSmall;
constexpr uint32_t kMostEach = kStagedEntries / kRecvThreads;
static_assert(kMostEach == 4 && kStagedEntries % kRecvThreads == 0, "four entries for each thread");

__device__ __forceinline__ bool is_small_batch(uint32_t num_rows, uint32_t top_k) {
    return num_rows <= kRowsSmall && num_rows * top_k <= kStagedEntries;
}

// idx / top_k for idx < kStagedEntries is idx * inverse_of(top_k) >> kInverseShift: the product is too large by
// less than idx / 2^16 < 1 / top_k.
constexpr uint32_t kInverseShift = 16;
static_assert(kStagedEntries * SY_MAX_DEVICE_TOP_K <= 1u << kInverseShift, "quotients are exact");

__device__ __forceinline__ uint32_t inverse_of(uint32_t top_k) {
    return (1u << kInverseShift) / top_k + 1;
}

// Barrier of the threads that make the lists: the block's first ones.
template <uint32_t kThreads> __device__ __forceinline__ void sync_list_threads() {
    if constexpr (kThreads == kRecvThreads)
        __syncthreads();
    else
        ptx::bar_sync<1, kThreads>();
}

// Checks entries, counts them by expert and makes the lists. Called by the first kThreads threads,
// and `meet` by each of them between its barriers. A thread has kEach entries of the batch. Where
// kIsOneRow they are neighbours of one row (top_k must be a multiple of kEach); otherwise those at
// i * kThreads + thread_idx.
template <uint32_t kEach, bool kIsOneRow, uint32_t kThreads, class Meet>
__device__ __forceinline__ void sort_entries(RecvShared& shared,
                                             const sy_expert_recv_params& params, Meet meet) {
    const sy_expert_lists& lists = params.lists;
    const uint32_t top_k = params.geometry.top_k, num_local = params.num_local_experts;
    const uint32_t thread_idx = threadIdx.x, lane_idx = thread_idx & 31;
    const uint32_t num_rows = shared.row_begin[SY_MAX_PEERS];
    const uint32_t limit = num_rows * top_k, inverse = shared.inverse_top_k;
    const auto at = [&](uint32_t i) {
        return kIsOneRow ? thread_idx * kEach + i : thread_idx + i * kThreads;
    };
    const auto row_of = [&](uint32_t i) {
        return at(kIsOneRow ? 0 : i) * inverse >> kInverseShift;
    };
    uint2 entries[kEach];
    uint32_t clients[kIsOneRow ? 1 : kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
        entries[i] = make_uint2(SY_NO_EXPERT, 0);
#pragma unroll
    for (uint32_t i = 0; i < (kIsOneRow ? 1 : kEach); ++i) {
        clients[i] = 0;
        if (at(i) >= limit)
            continue;
        clients[i] = client_of_row(shared, params.num_clients, row_of(i));
        const uint64_t source = shared.entries[clients[i]] + uint64_t{at(i)} * sizeof(uint2);
        if constexpr (kIsOneRow && kEach > 1) {
#pragma unroll
            for (uint32_t j = 0; j < kEach; j += 2) {
                const uint4 two = ptx::ld_weak_global_v4(source + j * sizeof(uint2));
                entries[j] = make_uint2(two.x, two.y);
                entries[j + 1] = make_uint2(two.z, two.w);
            }
        } else {
            entries[i] = ptx::ld_weak_global_v2(source);
        }
    }
    const auto client_of = [&](uint32_t i) { return clients[kIsOneRow ? 0 : i]; };
    const int16_t* table = local_experts(shared, params);
#pragma unroll 1
    for (uint32_t i = thread_idx; i < params.num_experts; i += kThreads)
        shared.local_expert[i] = table[i];
    sync_list_threads<kThreads>();

    // All look-ups leave together, and then all additions.
    int32_t local[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i)
        local[i] = local_expert(shared, params, entries[i].x);
    uint32_t packed[kEach]; // expert << kRankBits | rank within the expert
    bool is_row_used = false; // where all are of one row
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        const bool is_used = entries[i].x != SY_NO_EXPERT;
        const bool is_finite = (entries[i].y & 0x7f800000u) != 0x7f800000u;
        const bool counts = is_used && local[i] >= 0 && is_finite;
        packed[i] = SY_NO_EXPERT;
        if (counts)
            packed[i] = static_cast<uint32_t>(local[i]) << kRankBits |
                        atomicAdd(&shared.histogram[local[i]], 1u);
        is_row_used |= is_used;
        if (!kIsOneRow && is_used)
            shared.row_used[row_of(i)] = 1;
        if (is_used && !counts)
            atomicMax(&shared.entry_code[client_of(i)], local[i] < 0
                                                            ? static_cast<uint32_t>(-local[i])
                                                            : uint32_t{SY_ERROR_BAD_FRAME});
    }
    if (kIsOneRow && is_row_used)
        shared.row_used[row_of(0)] = 1;
    sync_list_threads<kThreads>();
    meet();

    // Experts in groups of 32, a lane each: where an expert begins in its group, and how long the group is.
#pragma unroll 1
    for (uint32_t expert = thread_idx; expert < (num_local + 31) / 32 * 32; expert += kThreads) {
        const uint32_t count = expert < num_local ? shared.histogram[expert] : 0;
        uint32_t upto = count;
#pragma unroll
        for (uint32_t delta = 1; delta < 32; delta <<= 1) {
            const uint32_t below = __shfl_up_sync(kFullWarp, upto, delta);
            upto += lane_idx >= delta ? below : 0;
        }
        shared.base[expert] = upto - count;
        if (lane_idx == 31)
            shared.group_sums[expert / 32] = upto;
    }
#pragma unroll 1
    for (uint32_t row = thread_idx; row < num_rows; row += kThreads)
        if (shared.row_used[row] == 0)
            atomicMax(&shared.entry_code[client_of_row(shared, params.num_clients, row)],
                      uint32_t{SY_ERROR_BAD_FRAME});
    sync_list_threads<kThreads>();

    // Start of the groups, by lane: every warp computes it, which saves a barrier.
    const uint32_t num_groups = (num_local + 31) / 32;
    const uint32_t group_sum = lane_idx < num_groups ? shared.group_sums[lane_idx] : 0;
    uint32_t groups_upto = group_sum;
#pragma unroll 1
    for (uint32_t delta = 1; delta < num_groups; delta <<= 1) {
        const uint32_t below = __shfl_up_sync(kFullWarp, groups_upto, delta);
        groups_upto += lane_idx >= delta ? below : 0;
    }
    const uint32_t group_begin = groups_upto - group_sum;
    const uint32_t num_entries = __shfl_sync(kFullWarp, groups_upto, num_groups - 1);
    uint32_t positions[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        const bool counts = packed[i] != SY_NO_EXPERT;
        const uint32_t expert = counts ? packed[i] >> kRankBits : 0;
        const uint32_t position = shared.base[expert] +
                                  __shfl_sync(kFullWarp, group_begin, expert / 32) +
                                  (packed[i] & ((1u << kRankBits) - 1));
        positions[i] = counts ? position : SY_NO_EXPERT;
        if (counts)
            shared.staged[position] = make_uint2(row_of(i), entries[i].y);
    }
    if constexpr (kIsOneRow && kEach == 4) {
        if (at(0) < limit)
            reinterpret_cast<uint4*>(lists.row_position)[thread_idx] =
                make_uint4(positions[0], positions[1], positions[2], positions[3]);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < kEach; ++i)
            if (at(i) < limit)
                lists.row_position[at(i)] = positions[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < (kIsOneRow ? 1 : kEach); ++i) {
        const uint32_t row = row_of(i), client_idx = client_of(i);
        if (at(i) < limit && at(i) == row * top_k)
            lists.row_source[row] =
                client_idx << SY_ROUTE_SHIFT | (row - shared.row_begin[client_idx]);
    }
    sync_list_threads<kThreads>();
#pragma unroll 1
    for (uint32_t i = thread_idx; i < num_entries; i += kThreads) {
        const uint2 entry = shared.staged[i];
        lists.list_row[i] = entry.x;
        lists.list_weight[i] = __uint_as_float(entry.y);
    }
#pragma unroll 1
    for (uint32_t expert = thread_idx; expert < num_groups * 32; expert += kThreads) {
        const uint32_t begin = __shfl_sync(kFullWarp, group_begin, expert / 32);
        if (expert < num_local)
            lists.expert_begin[expert] = shared.base[expert] + begin;
    }
    // The last of these warps has the least to do.
    if (thread_idx / 32 == kThreads / 32 - 1) {
        write_batch(shared, params, num_entries);
        if (lane_idx == 0)
            lists.expert_begin[num_local] = num_entries;
    }
}

} // namespace switchyard::impls
