// The batch of expert_recv: the state that its blocks share, and the frames that it takes.
#pragma once

#include <cstdint>

#include "switchyard/comm/link.cuh"
#include "switchyard/comm/wait.cuh"
#include "switchyard/device_abi.h"
#include "switchyard/impls/expert_head.cuh"
#include "switchyard/impls/frames.cuh"
#include "switchyard/impls/rows.cuh"
#include "switchyard/layout/slot.cuh"
#include "switchyard/ptx/memory.cuh"
#include "switchyard/ptx/sync.cuh"

namespace switchyard::impls {

constexpr uint32_t kRecvBlocks = SY_RECV_BLOCKS;
constexpr uint32_t kRecvThreads = SY_RECV_THREADS; // a warp per client waits for its frame
static_assert(kRecvThreads / 32 == SY_MAX_PEERS, "a warp per client");
constexpr uint32_t kRecvStride = kRecvBlocks * kRecvThreads;
// Between two phases an entry is expert << kRankBits | rank within the block.
constexpr uint32_t kRankBits = SY_RANK_BITS;
static_assert(SY_MAX_EXPERTS <= 1u << (32 - kRankBits), "experts fit");

// Lanes that wait for a row: few enough that the blocks behind the first have such a group for every row of a small
// batch, where clients send equally many.
constexpr uint32_t kRowLanes = 8;

// State of a row that was waited for ahead.
enum RowAhead : uint8_t { kRowAway, kRowGood, kRowBad };

struct RecvSnapshot {
    uint64_t number[SY_MAX_PEERS];
    uint32_t taken; // clients, as a mask
    uint32_t expected;
    uint32_t layer;
    uint32_t next_client;
    uint32_t num_rows_in_all;
    uint32_t waited_ns[SY_MAX_PEERS];
    uint32_t num_rows[SY_MAX_PEERS];
    uint32_t place[SY_MAX_PEERS];
};

// Entries that a block makes into lists in its shared memory first: scattered stores to memory pass at one
// per clock.
constexpr uint32_t kStagedEntries = 4096;

struct RecvShared {
    // Largest number of rows of a batch whose lists one block makes.
    static constexpr uint32_t kRowsSmall = 512;

    RecvSnapshot snapshot;
    // SY_ERROR_* of a client's frame: found in its entries, found in its rows, and known to all blocks.
    uint32_t entry_code[SY_MAX_PEERS];
    uint32_t row_code[SY_MAX_PEERS];
    uint32_t bad_code[SY_MAX_PEERS];
    uint32_t any_bad; // a code in any block
    uint32_t is_over; // the wait for a batch, as the first block reports it to the others
    uint32_t inverse_top_k; // see inverse_of
    uint32_t row_begin[SY_MAX_PEERS + 1];
    uint64_t entries[SY_MAX_PEERS]; // address of the client's, less those before them in the batch
    sy_client_peer clients[SY_MAX_PEERS];
    GoodHead good_head;
    uint32_t histogram[SY_MAX_EXPERTS];
    int16_t local_expert[SY_MAX_EXPERTS];
    uint32_t base[SY_MAX_EXPERTS];
    uint32_t group_sums[SY_MAX_EXPERTS / 32]; // entries of 32 experts each, or of as many threads
    uint8_t row_used[kRowsSmall]; // whether the row has an entry
    uint8_t row_ahead[kRecvThreads / kRowLanes]; // RowAhead of each group of lanes
    uint2 staged[kStagedEntries]; // row and weight, by position
    // For kernels over any path, and last, so that the others have the same layout with and without
    // it.
    uint32_t quiet; // clients whose answers may be stored, as a mask
    uint32_t has_chosen; // a batch
};

__device__ __forceinline__ void cluster_barrier() {
    ptx::barrier_cluster_arrive_release();
    ptx::barrier_cluster_wait_acquire();
}

// Tells a client that its frame is refused. Its combine sees the status while it waits.
template <uint32_t kPaths>
__device__ __forceinline__ void refuse(const RecvShared& shared,
                                       const sy_expert_recv_params& params, uint32_t client_idx,
                                       uint64_t number, uint32_t code) {
    const uint32_t place = layout::ring_place(params.geometry, number);
    const uint64_t word = number << SY_STATUS_SHIFT | code;
    comm::signal_relaxed<kPaths>(shared.clients[client_idx].response,
                                 params.geometry.response_control_offset + SY_WORD_STATUS(place),
                                 word);
    // The data there belongs to the client. The host counts by this.
    params.state->refusals[client_idx][place] = word;
    comm::record_error(&params.state->error, SY_TAG_BAD_FRAME, client_idx, SY_REASON_VALUE, code,
                       number);
}

// Tells a client that its frame is in work, because its deadline counts silence. For an empty
// frame, that is the answer.
template <uint32_t kPaths>
__device__ __forceinline__ void tell_taken(const sy_expert_recv_params& params,
                                           const sy_client_peer& client, uint64_t number,
                                           uint32_t num_rows) {
    const sy_frame_geometry& geometry = params.geometry;
    comm::add_relaxed<kPaths>(client.response, geometry.response_control_offset + SY_WORD_PROGRESS,
                              1);
    if (num_rows == 0)
        comm::signal<kPaths>(
            client.response,
            layout::response_flag_at(
                layout::response_frame(geometry, layout::ring_place(geometry, number)), 0),
            number);
}

// Result of one poll of the clients, by lane.
struct Arrivals {
    uint64_t number;
    uint64_t frame; // address
    uint64_t min_epoch;
    uint64_t seen_ns; // when the frame was seen first; 0 where others did not keep it waiting
    uint32_t expected; // clients that were waited for, as a mask
    uint32_t start; // client where the search for a layer begins
    uint32_t num_rows; // kRowsUnknown before the header is there
    bool is_dead;
    bool can_answer; // the path back is quiet
};

// Pause between two polls of completions, which may lie in the host's memory.
constexpr uint32_t kLookPauseNs = 200;

// Checks which clients' paths are quiet, until all are or the batch is chosen. One warp, a lane per
// client.
// NOTES: answers overwrite those to an earlier frame, which a NIC may still have to read. A client
// whose NIC acknowledges nothing, or which takes nothing from a proxy, would block the whole batch
// for as long as such a wait lasts, and could do so again. So its frame counts as one that has not
// come. A warp of its own does this, since the warp that polls for headers has neither registers
// nor time for such calls.
template <uint32_t kPaths>
__device__ __forceinline__ void watch_paths(RecvShared& shared,
                                            const sy_expert_recv_params& params) {
    const uint32_t client_idx = threadIdx.x & 31;
    const sy_link& link = shared.clients[client_idx].response;
    bool is_quiet = client_idx >= params.num_clients || !comm::tells_reuse<kPaths>(link);
    uint32_t busy = 0;
    for (;;) {
        if (!is_quiet)
            is_quiet = comm::is_reusable(link, busy);
        const uint32_t quiet = __ballot_sync(kFullWarp, is_quiet);
        if (client_idx == 0)
            ptx::st_release_cta_shared(&shared.quiet, quiet);
        // Lanes may see it one after the other, and leave together.
        const bool is_over = ptx::ld_acquire_cta_shared(&shared.has_chosen) != 0;
        if (quiet == kFullWarp || __any_sync(kFullWarp, is_over))
            return;
        __nanosleep(kLookPauseNs);
    }
}

// Waits until `wanted` clients, and all that `gather` names, have a header or are known to be dead.
// One warp, a lane per client. Frames of clients whose path is not quiet have not come yet: see
// watch_paths.
template <uint32_t kPaths>
__device__ __forceinline__ Arrivals await_headers(const RecvShared& shared,
                                                  const sy_expert_recv_params& params,
                                                  sy_gather gather, uint32_t wanted) {
    const uint64_t timeout_ns = gather.within_ns == SY_GATHER_NONE ? 0 : params.timeout_ns;
    const uint32_t client_idx = threadIdx.x;
    const bool is_client = client_idx < params.num_clients;
    const comm::WaitBound bound = {
        &params.state->error, params.abort_mask, nullptr, nullptr, nullptr, params.timeout_ns};
    const uint32_t all = 0xffffffffu >> (32 - params.num_clients);
    Arrivals seen = {0,
                     0,
                     0,
                     0,
                     params.state->last_clients & gather.clients & all,
                     params.state->next_client,
                     kRowsUnknown,
                     false,
                     false};
    if (is_client)
        seen.number = params.state->taken[client_idx] + 1;
    if (params.min_epoch != nullptr)
        seen.min_epoch = *params.min_epoch;
    const FrameAt frame =
        frame_at(params.geometry, shared.clients[is_client ? client_idx : 0], seen.number);
    seen.frame = frame.address;
    uint64_t start_ns = 0, first_ns = 0, begin_ns = 0;
    seen.can_answer = !is_client || !comm::tells_reuse<kPaths>(shared.clients[client_idx].response);
    for (uint32_t num_polls = 1;; ++num_polls) {
        const bool was_ready = seen.num_rows != kRowsUnknown;
        if (!seen.can_answer)
            seen.can_answer = (ptx::ld_acquire_cta_shared(&shared.quiet) >> client_idx & 1) != 0;
        if (is_client && !was_ready && seen.can_answer)
            seen.num_rows = accepted_rows(frame);
        const bool is_ready = seen.num_rows != kRowsUnknown;
        const uint32_t settled = __ballot_sync(kFullWarp, is_ready || seen.is_dead);
        const bool is_awaited =
            (seen.expected & ~settled) != 0 &&
            !__any_sync(kFullWarp, comm::elapsed_ns(&begin_ns) > gather.within_ns);
        if (__popc(settled) >= wanted && !is_awaited)
            return seen;
        // The first client waits for the others for a limited time only.
        if (params.gather_ns != 0 && __any_sync(kFullWarp, seen.num_rows != kRowsUnknown) &&
            __any_sync(kFullWarp, comm::elapsed_ns(&first_ns) > params.gather_ns))
            return seen;
        if (is_ready && !was_ready)
            seen.seen_ns = ptx::mov_globaltimer();
        if (num_polls % comm::kPollsPerCheck != 0)
            continue;
        seen.is_dead = is_client && comm::is_aborted(bound, client_idx);
        if (__any_sync(kFullWarp, comm::elapsed_ns(&start_ns) > timeout_ns))
            return seen;
    }
}

// Records why a client's frame is not in the batch, which waited for it.
template <uint32_t kPaths>
__device__ __forceinline__ void
note_late(const RecvShared& shared, const sy_expert_recv_params& params, const Arrivals& seen) {
    const uint32_t client_idx = threadIdx.x & 31;
    const uint64_t announced =
        announced_number(frame_at(params.geometry, shared.clients[client_idx], seen.number));
    uint32_t tag = SY_TAG_RECV_FRAME;
    // A frame that has come since is none that the wait saw.
    uint64_t observed = announced - (announced == seen.number ? 1 : 0), expected = seen.number;
    if (kPaths != comm::kDirectOnly && announced == seen.number && !seen.can_answer) {
        tag = SY_TAG_RECV_PATH;
        const uint32_t me = 1u << client_idx, all = 0xffffffffu >> (32 - params.num_clients);
        observed = ptx::ld_acquire_cta_shared(&shared.quiet) & all & ~me;
        expected = observed | me;
    }
    comm::record_error(&params.state->error, tag, client_idx,
                       seen.is_dead ? SY_REASON_ABORT : SY_REASON_TIMEOUT, observed, expected);
}

// Chooses the batch among the frames that are there. One warp, a lane per client.
template <uint32_t kPaths>
__device__ __forceinline__ void choose_batch(RecvShared& shared,
                                             const sy_expert_recv_params& params,
                                             const Arrivals& seen, uint32_t wanted) {
    const sy_frame_geometry& geometry = params.geometry;
    const uint32_t lane_idx = threadIdx.x;
    const bool is_client = lane_idx < params.num_clients;
    const bool is_ready = seen.num_rows != kRowsUnknown;
    // First of all, for it is loads that everything else waits for.
    uint32_t layer = 0, code = 0;
    const uint32_t ready = __ballot_sync(kFullWarp, is_ready);
    __syncwarp();
    uint32_t good = good_at_sight(shared.good_head, shared.clients, params, ready, seen.frame,
                                  seen.min_epoch, seen.num_rows, &layer);
    const uint64_t number = seen.number;
    const uint32_t place = layout::ring_place(geometry, number);
    // An idle server is no error. With min_ready above 1 and no time to gather, the caller expected
    // that number of clients. Then the dead clients are to blame, or all that did not come in time.
    const uint32_t num_ready = __popc(ready);
    const uint32_t num_settled = __popc(__ballot_sync(kFullWarp, is_ready || seen.is_dead));
    if (is_client && !is_ready && wanted > 1 && params.gather_ns == 0 && num_ready < wanted &&
        (seen.is_dead || num_settled < wanted))
        note_late<kPaths>(shared, params, seen);

    if (good != ready) {
        if (is_ready && (good >> lane_idx & 1) == 0)
            code = check_header(params, shared.clients[lane_idx], seen.frame, seen.min_epoch,
                                seen.num_rows, &layer);
        good = __ballot_sync(kFullWarp, is_ready && code == 0);
    }
    // The first good client from `start` on sets the layer; the others of that layer join.
    const uint32_t from_start = good & ~((1u << seen.start) - 1);
    const uint32_t leader = good == 0 ? 0 : __ffs(from_start != 0 ? from_start : good) - 1;
    const uint32_t batch_layer = __shfl_sync(kFullWarp, layer, leader);
    const bool joins = (good >> lane_idx & 1) != 0 && layer == batch_layer;
    // As many clients as the lists have room for, the leader first; the rest stay for the next batch.
    uint32_t most_upto = __reduce_add_sync(kFullWarp, joins ? seen.num_rows : 0);
    bool is_taken = joins;
    if (most_upto > params.lists.max_rows) {
        const uint32_t rank = (lane_idx - leader) & 31;
        const uint32_t sum = joins ? seen.num_rows : 0;
        uint32_t rows_upto = 0;
#pragma unroll 1
        for (uint32_t other = 0; other < params.num_clients; ++other) {
            const uint32_t rows = __shfl_sync(kFullWarp, sum, other);
            if (((other - leader) & 31) <= rank)
                rows_upto += rows;
        }
        is_taken = joins && rows_upto <= params.lists.max_rows;
        most_upto = __reduce_max_sync(kFullWarp, is_taken ? rows_upto : 0);
    }
    const uint32_t taken = __ballot_sync(kFullWarp, is_taken);
    shared.snapshot.num_rows[lane_idx] = is_taken ? seen.num_rows : 0;
    shared.snapshot.place[lane_idx] = place;
    shared.snapshot.number[lane_idx] = number;
    if (lane_idx == 0) {
        shared.snapshot.taken = taken;
        shared.snapshot.num_rows_in_all = most_upto;
        shared.snapshot.expected = seen.expected;
        shared.snapshot.layer = taken != 0 ? batch_layer : 0;
        shared.snapshot.next_client = leader + 1 == params.num_clients ? 0 : leader + 1;
    }
    uint64_t waited_ns = 0;
    if (is_taken && seen.seen_ns != 0)
        waited_ns = ptx::mov_globaltimer() - seen.seen_ns;
    shared.snapshot.waited_ns[lane_idx] =
        static_cast<uint32_t>(min(waited_ns, uint64_t{0xffffffffu}));
    if (code != 0) {
        params.state->taken[lane_idx] = number;
        refuse<kPaths>(shared, params, lane_idx, number, code);
        atomicAdd(reinterpret_cast<unsigned long long*>(&params.state->num_refused), 1ull);
    }
}

// Records the chosen batch, here and with the clients. One warp, a lane per client.
// NOTES: a cluster's barrier waits for earlier stores, and a store to a client takes a microsecond:
// so this comes behind the barrier, and the block that makes lists does not do it.
template <uint32_t kPaths>
__device__ __forceinline__ void note_batch(const RecvShared& shared,
                                           const sy_expert_recv_params& params) {
    const uint32_t lane_idx = threadIdx.x;
    const RecvSnapshot& snapshot = shared.snapshot;
    if (lane_idx == 0) {
        params.state->last_clients = snapshot.taken;
        if (snapshot.taken != 0) {
            params.state->next_client = snapshot.next_client;
            params.state->num_batches += 1;
        }
    }
    if ((snapshot.taken >> lane_idx & 1) == 0)
        return;
    params.state->taken[lane_idx] = snapshot.number[lane_idx];
    tell_taken<kPaths>(params, shared.clients[lane_idx], snapshot.number[lane_idx],
                       snapshot.num_rows[lane_idx]);
}

__device__ __forceinline__ uint32_t client_of_row(const RecvShared& shared, uint32_t num_clients,
                                                  uint32_t row) {
    uint32_t client_idx = 0;
#pragma unroll 1
    for (uint32_t i = 1; i < num_clients; ++i)
        client_idx += row >= shared.row_begin[i] ? 1 : 0;
    return client_idx;
}

__device__ __forceinline__ uint64_t frame_of(const RecvShared& shared,
                                             const sy_expert_recv_params& params,
                                             uint32_t client_idx) {
    return shared.clients[client_idx].request +
           layout::request_frame(params.geometry, shared.snapshot.place[client_idx]);
}

// Rows of the clients without a bad code, one after the other. One warp.
__device__ __forceinline__ void number_rows(RecvShared& shared,
                                            const sy_expert_recv_params& params) {
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint32_t num_rows =
        shared.bad_code[lane_idx] == 0 ? shared.snapshot.num_rows[lane_idx] : 0;
    uint32_t upto = num_rows;
#pragma unroll 1
    for (uint32_t delta = 1; delta < params.num_clients; delta <<= 1) {
        const uint32_t below = __shfl_up_sync(kFullWarp, upto, delta);
        if (lane_idx >= delta)
            upto += below;
    }
    // Lanes past the last client have the last one's sum by then, or take it from there.
    upto = __shfl_sync(kFullWarp, upto, min(lane_idx, params.num_clients - 1));
    shared.row_begin[lane_idx + 1] = upto;
    if (lane_idx == 0)
        shared.row_begin[0] = 0;
    if (lane_idx < params.num_clients)
        shared.entries[lane_idx] =
            layout::entries_at(params.geometry, frame_of(shared, params, lane_idx), 0) -
            uint64_t{upto - num_rows} * params.geometry.top_k * sizeof(sy_entry);
}

// Local experts of the batch's layer. The layer was checked; without a batch it is 0.
__device__ __forceinline__ const int16_t* local_experts(const RecvShared& shared,
                                                        const sy_expert_recv_params& params) {
    return params.local_expert + uint64_t{shared.snapshot.layer} * params.num_experts;
}

// Local index of an expert; negative SY_ERROR_* when it is none of this server's.
__device__ __forceinline__ int32_t local_expert(const RecvShared& shared,
                                                const sy_expert_recv_params& params,
                                                uint32_t expert) {
    const bool is_known = expert < params.num_experts;
    const int32_t local = shared.local_expert[is_known ? expert : 0];
    const bool is_mine = local >= 0 && static_cast<uint32_t>(local) < params.num_local_experts;
    return !is_known ? -SY_ERROR_UNKNOWN_EXPERT : is_mine ? local : -SY_ERROR_NOT_MY_EXPERT;
}

// One warp.
__device__ __forceinline__ void
write_batch(const RecvShared& shared, const sy_expert_recv_params& params, uint32_t num_entries) {
    const uint32_t lane_idx = threadIdx.x & 31;
    sy_batch* batch = params.lists.batch;
    const bool is_in =
        (shared.snapshot.taken >> lane_idx & 1) != 0 && shared.bad_code[lane_idx] == 0;
    if (is_in)
        batch->frame_number[lane_idx] = shared.snapshot.number[lane_idx];
    batch->row_begin[lane_idx + 1] = shared.row_begin[lane_idx + 1];
    batch->waited_ns[lane_idx] = shared.snapshot.waited_ns[lane_idx];
    const uint32_t clients = __ballot_sync(kFullWarp, is_in);
    if (lane_idx == 0) {
        batch->row_begin[0] = 0;
        batch->num_rows = shared.row_begin[SY_MAX_PEERS];
        batch->num_entries = num_entries;
        batch->layer = shared.snapshot.layer;
        batch->clients = clients;
        batch->expected = shared.snapshot.expected;
    }
}

} // namespace switchyard::impls
