// expert_recv: takes the frames that are ready, checks every field, and sorts their entries by expert.
//
// One cluster of blocks. One warp decides which frames make up the batch, and the decision must
// reach every block. A cluster's barrier and shared memory do that in a fraction of the time of a
// grid barrier through global memory. Only tables are accessed; the payload stays in the slots.
//
// Data that a peer can write is copied once into this server's memory before it is used as an
// index, and checked there: a client that changes its frame while it is being read harms its own
// answer only.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/stamps.cuh"
#include "switchyard/comm/stream.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_batch.cuh"
#include "switchyard/impls/expert_rows.cuh"
#include "switchyard/impls/expert_sort.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

// Whether this block has found a client's frame bad. Barrier before. One warp, or each for itself.
__device__ __forceinline__ bool has_bad(const RecvShared& shared) {
    const uint32_t lane_idx = threadIdx.x & 31;
    return __any_sync(kFullWarp, (shared.row_code[lane_idx] | shared.entry_code[lane_idx]) != 0);
}

// Tells all blocks that this one has found a client's frame bad. Threads behind the cluster's next
// barrier see the finding, even if that barrier orders nothing itself.
__device__ __forceinline__ void tell_bad(RecvShared& shared) {
    __syncthreads();
    if (threadIdx.x >= 32 || !has_bad(shared))
        return;
    if (threadIdx.x < kRecvBlocks)
        ptx::red_or_shared_cluster(ptx::mapa_shared_cluster(&shared.any_bad, threadIdx.x), 1);
    ptx::fence_acq_rel_cluster();
}

// Start of this block's entries of each expert in the lists. Returns the number of entries.
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
    // All threads must see the codes before anything is counted again, and every warp must have
    // searched for them.
    if (is_alone)
        __syncthreads();
    else
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
template <uint32_t kPaths>
__device__ __forceinline__ void find_batch(RecvShared& shared, const sy_expert_recv_params& params,
                                           uint64_t gather) {
    const uint32_t wanted = min(params.min_ready, params.num_clients);
    // The host may change it meanwhile, and all lanes must decide alike.
    gather = __shfl_sync(kFullWarp, gather, 0);
    const sy_gather whom = {static_cast<uint32_t>(gather), static_cast<uint32_t>(gather >> 32)};
    const Arrivals seen = await_headers<kPaths>(shared, params, whom, wanted);
    if (threadIdx.x == 0)
        comm::stamp(params.lists.stamps, SY_BATCH_RECV_SEEN);
    choose_batch<kPaths>(shared, params, seen, wanted);
    __syncwarp();
    if (kPaths != comm::kDirectOnly && threadIdx.x == 0)
        ptx::st_release_cta_shared(&shared.has_chosen, 1);
    number_rows(shared, params);
}

// Reads the first block's choice. Called by all threads of another block.
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

// Sends this block's findings in rows to the first block.
__device__ __forceinline__ void hand_in_codes(RecvShared& shared) {
    __syncthreads();
    const uint32_t code = threadIdx.x < 32 ? shared.row_code[threadIdx.x] : 0;
    if (code != 0)
        ptx::red_max_shared_cluster(ptx::mapa_shared_cluster(&shared.row_code[threadIdx.x], 0),
                                    code);
    // Threads behind the cluster's next barrier see it, even if that barrier orders nothing itself.
    if (threadIdx.x < 32 && __any_sync(kFullWarp, code != 0))
        ptx::fence_acq_rel_cluster();
}

// Tells all blocks' threads that wait ahead that the batch is chosen. One warp of the first block.
__device__ __forceinline__ void end_waits(RecvShared& shared) {
    const uint32_t rank = threadIdx.x & 31;
    if (rank < kRecvBlocks)
        ptx::red_or_shared_cluster(ptx::mapa_shared_cluster(&shared.is_over, rank), 1);
    __syncwarp();
}

// Blocks meet three times: when the shared state is cleared, when the batch is known, and when all
// is done, after which no block reads another's shared memory: a block that leaves takes it along.
// While the first block polls for a batch, the others wait for the rows that clients send next:
// mostly these are its rows. For a small batch the first block makes the lists alone, and the
// others report their findings in the rows. It arrives at the third meeting while it makes them, so
// that no block has to wait there for another. For a batch so small that half of the first block
// waits for the rows, too, the others have nothing to report.
//
// NOTES: an arrival that releases waits for earlier stores, and a store to a client takes a
// microsecond. So arrivals are relaxed, except where others need the stores.
template <uint32_t kPaths>
__global__ void __cluster_dims__(kRecvBlocks, 1, 1) __launch_bounds__(kRecvThreads, 1)
    expert_recv_kernel(const __grid_constant__ sy_expert_recv_params params) {
    __shared__ RecvShared shared;
    const uint32_t thread_idx = threadIdx.x, warp_idx = thread_idx / 32;
    const uint32_t rank = ptx::mov_cluster_ctarank();
    if (rank == 0 && thread_idx == 0)
        comm::stamp(params.lists.stamps, SY_BATCH_RECV_START);
    // Asked for early: it may lie in the host's memory, a microsecond away.
    uint64_t gather = 0;
    if (params.gather != nullptr && rank == 0 && thread_idx < 32)
        gather = ptx::ld_relaxed_sys(reinterpret_cast<const uint64_t*>(params.gather));
    clear_counts(shared, params);
    if (thread_idx < 32)
        shared.row_code[thread_idx] = shared.bad_code[thread_idx] = 0;
    if (thread_idx == 0) {
        shared.any_bad = shared.is_over = 0;
        shared.inverse_top_k = inverse_of(params.geometry.top_k);
    }
    if (kPaths != comm::kDirectOnly && thread_idx == 0)
        shared.quiet = shared.has_chosen = 0;
    if (rank == 0 && thread_idx == kRecvThreads - 1)
        make_good_head(shared.good_head, params.geometry);
    layout::TableCopy<sy_client_peer, kRecvThreads, SY_MAX_PEERS> clients;
    clients.load(params.clients, params.num_clients);
    clients.store(shared.clients, params.num_clients);
    __syncthreads();
    // First meeting: the first block writes to words that others have cleared.
    if (rank == 0)
        ptx::barrier_cluster_arrive_relaxed();
    else
        ptx::barrier_cluster_arrive_release();
    comm::follow(params.flags);
    // Kernels that start behind this one may rely on the kernels before it. So a warp of the last
    // block signals that when it has joined. It does so before it polls for the rest of its rows,
    // because the next kernel takes a microsecond to start.
    const auto says_late = [&] {
        return comm::goes_ahead(params.flags) && rank == kRecvBlocks - 1;
    };
    if (!says_late())
        comm::let_next_start(params.flags);
    if (rank == 0) {
        ptx::barrier_cluster_wait_acquire();
        if (warp_idx == 0)
            find_batch<kPaths>(shared, params, gather);
        else if (kPaths != comm::kDirectOnly && warp_idx == 1)
            watch_paths<kPaths>(shared, params);
        __syncthreads();
        if (thread_idx == 0)
            comm::stamp(params.lists.stamps, SY_BATCH_RECV_CHOSEN);
        // Second meeting. One warp's release is the block's, after its barrier.
        if (warp_idx == 1) {
            end_waits(shared);
            ptx::barrier_cluster_arrive_release();
        } else {
            ptx::barrier_cluster_arrive_relaxed();
        }
    } else {
        ptx::barrier_cluster_wait_acquire();
        await_row_ahead<kPaths>(shared, params, ahead_idx(rank));
        __syncwarp();
        ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait_acquire();
        copy_snapshot(shared, params);
#if defined(SY_SIMT)
        // A GPU polls for rows until it is told to stop; the few polls here would not show that.
        if (shared.is_over == 0)
            abort();
#endif
    }
    // Its blocks fill multiprocessors: not while there is nothing to do.
    if ((params.flags & SY_RECV_FLAG_CHOSEN) != 0)
        ptx::griddepcontrol_launch_dependents();
    if (rank == kRecvBlocks - 1 && warp_idx == 0)
        note_batch<kPaths>(shared, params);
    // NOTES: read again where it is needed, rather than kept in a register.
    const auto rows_in_all = [&] {
        return ptx::ld_relaxed_cluster_shared(&shared.snapshot.num_rows_in_all);
    };
    const auto is_alone = [&] { return rows_in_all() <= kRowsAlone; };
    const bool is_small = is_small_batch(rows_in_all(), params.geometry.top_k);
    // NOTES: for a larger batch no warp signals before the end, since combine, which starts behind
    // the next kernel, would only poll for answers meanwhile.
    if (is_small && says_late() && warp_idx == kRecvThreads / 32 - 1) {
        comm::join(params.flags);
        comm::let_next_start(params.flags);
    }
    if (rank == 0 && !is_small)
        ptx::barrier_cluster_wait_acquire();
    // Repeats without the clients whose frames prove bad, which is rare.
    for (bool is_second = false;; is_second = true) {
        if (!is_small) {
            sort_rows(shared, params, rank);
        } else if (rank == 0) {
            // The second meeting is over by then.
            const auto meet = [is_second] {
                if (is_second)
                    return;
                ptx::barrier_cluster_wait_acquire();
                ptx::barrier_cluster_arrive_relaxed();
            };
            const uint32_t num_entries = rows_in_all() * params.geometry.top_k;
            if (is_alone()) {
                if (thread_idx < kListThreads)
                    sort_entries<1, true, kListThreads>(shared, params, meet);
                else
                    meet();
            } else if (num_entries <= kRecvThreads) {
                sort_entries<1, true, kRecvThreads>(shared, params, meet);
            } else if (num_entries <= 2 * kRecvThreads && params.geometry.top_k % 2 == 0) {
                sort_entries<2, true, kRecvThreads>(shared, params, meet);
            } else if (params.geometry.top_k % kMostEach == 0) {
                sort_entries<kMostEach, true, kRecvThreads>(shared, params, meet);
            } else {
                sort_entries<kMostEach, false, kRecvThreads>(shared, params, meet);
            }
        }
        if (rank == 0 && thread_idx == 0)
            comm::stamp(params.lists.stamps, SY_BATCH_RECV_LISTED);
        const bool waits =
            is_alone() ? rank == 0 && thread_idx >= kListThreads : rank != 0 || kRecvBlocks == 1;
        if (!is_second && waits) {
            RowWait<1> wait = {};
            if (is_alone())
                wait =
                    rows_from<1>(shared, params, (warp_idx - kListThreads / 32) * (32 / kRowLanes),
                                 kRowsAlone, false);
            else if (kRecvBlocks > 1)
                wait = rest_of_ahead(shared, params, ahead_idx(rank));
            if (__any_sync(kFullWarp, wait.number[0] != 0))
                take_rows(shared, params, wait);
            if (!is_alone())
                await_rest(shared, params, rank);
        }
        if (is_small && rank != 0) {
            if (!is_alone())
                hand_in_codes(shared);
            ptx::barrier_cluster_arrive_relaxed();
            ptx::barrier_cluster_wait_acquire();
            break;
        }
        if (is_small) {
            if (!is_second)
                ptx::barrier_cluster_wait_acquire();
            __syncthreads();
            if (is_second || !has_bad(shared))
                break;
        } else {
            if (!is_second)
                tell_bad(shared);
            ptx::barrier_cluster_arrive_relaxed();
            ptx::barrier_cluster_wait_acquire();
            if (is_second || shared.any_bad == 0)
                break;
        }
        drop_bad_clients(shared, params, is_small);
    }
    if (rank == 0 && thread_idx < params.num_clients && shared.bad_code[thread_idx] != 0) {
        const uint32_t client_idx = ptx::mov_laneid();
        refuse<kPaths>(shared, params, client_idx, shared.snapshot.number[client_idx],
                       shared.bad_code[client_idx]);
        atomicAdd(reinterpret_cast<unsigned long long*>(&params.state->num_refused), 1ull);
    }
    if (rank == 0 && thread_idx == 0)
        params.lists.batch->received_ns = ptx::mov_globaltimer();
    if (thread_idx == 0)
        comm::stamp_last(params.lists.stamps, SY_BATCH_RECV_END);
    comm::join(params.flags);
}

} // namespace switchyard::impls
