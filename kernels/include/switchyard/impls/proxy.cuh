// Kernels around the proxy: producers of commands for measurements, and the copy that a relay forwards
// with.
#pragma once

#include <cstdint>

#include "switchyard/comm/proxy.h"

namespace switchyard::impls {

// Batches whose posting time is remembered until they are over.
constexpr uint32_t kProxyPending = 64;

// Records the time by this GPU's clock each time the host has incremented a counter. A command
// carries the time to the host, which takes it out of the lane and does not execute it.
__device__ inline comm::proxy::Status proxy_tell_time(const sy_proxy_peer& peer,
                                                      const sy_proxy_lane& lane, uint64_t num) {
    const sy_proxy_lane_words* words = comm::at_address<const sy_proxy_lane_words>(lane.words);
    // Reserves all cells together: an answer that reserves its cell first would come later. The
    // host takes each before it increments, so that cells are free.
    const uint64_t base =
        comm::atom_add_relaxed(&comm::proxy::detail::state_of(lane).reserved, num);
    uint64_t silent_since = comm::now_ns();
    for (uint64_t i = base; i < base + num; ++i) {
        uint64_t completed = 0, error = 0;
        comm::proxy::detail::load_words(words, &completed, &error);
        while (completed <= i) {
            if (error != 0)
                return SY_PROXY_REFUSED;
            if (comm::now_ns() - silent_since > peer.timeout_ns)
                return SY_PROXY_TIMEOUT;
            comm::pause_poll();
            comm::proxy::detail::load_words(words, &completed, &error);
        }
        // NOTES: behind a branch on the loaded value, or the clock might be read before the load
        // has ended.
        silent_since = comm::now_ns();
        comm::proxy::detail::store(
            lane, i, comm::proxy::detail::make_word(peer, SY_PROXY_ADD, 0, silent_since));
    }
    return SY_PROXY_OK;
}

// One warp posts as fast as the budget lets it.
__device__ inline void proxy_produce(const sy_proxy_produce_params& params) {
    __shared__ uint64_t posted_at[kProxyPending];
    __shared__ uint64_t posted_end[kProxyPending];
    const sy_proxy_peer& first = params.peers[0];
    const sy_proxy_peer& peer = params.peers[blockIdx.x / first.num_lanes];
    const uint32_t lane_number = blockIdx.x % first.num_lanes;
    // NOTES: a copy, which stays in registers: each post's fence empties the nearest cache.
    const sy_proxy_lane lane = comm::proxy::detail::lane_of(peer, lane_number);
    const uint32_t lane_idx = threadIdx.x & 31;
    const uint64_t region = uint64_t{lane_number} * params.num_objects * params.object_bytes;
    uint32_t num_pending = 0, oldest = 0, num_samples = 0;
    comm::proxy::Status status = SY_PROXY_OK;
    // Commands of earlier launches.
    const uint64_t base =
        comm::ld_relaxed<comm::Scope::kGpu>(&comm::proxy::detail::state_of(lane).reserved);
    __syncwarp();
    const uint64_t start = comm::now_ns();
    uint64_t begin = 0;

    if ((params.flags & SY_PROXY_PRODUCE_READS) != 0) {
        // Lower bound of the time that a completion needs to reach a poster.
        const sy_proxy_lane_words* words = comm::at_address<const sy_proxy_lane_words>(lane.words);
        for (uint32_t i = 0; lane_idx == 0 && i < params.num_samples; ++i) {
            uint64_t completed = 0, error = 0;
            const uint64_t now = comm::now_ns();
            comm::proxy::detail::load_words(words, &completed, &error);
            // Depends on the loaded value, so that it comes behind the load.
            const uint64_t never = completed == ~uint64_t{0} ? 1 : 0;
            params.latency_ns[uint64_t{blockIdx.x} * params.num_samples + i] =
                comm::now_ns() + never - now;
        }
        if (lane_idx == 0)
            params.elapsed_ns[blockIdx.x] = comm::now_ns() - start, params.status[blockIdx.x] = 0;
        return;
    }

    if ((params.flags & SY_PROXY_PRODUCE_CLOCK) != 0) {
        if (lane_idx == 0) {
            params.status[blockIdx.x] = proxy_tell_time(peer, lane, params.num_commands);
            params.elapsed_ns[blockIdx.x] = comm::now_ns() - start;
        }
        return;
    }

    // Takes the end of batches down, as far as they are over.
    const auto look = [&](bool is_patient) {
        if (lane_idx != 0)
            return;
        const sy_proxy_lane_words* words = comm::at_address<const sy_proxy_lane_words>(lane.words);
        uint64_t last = 0, silent_since = comm::now_ns();
        for (;;) {
            uint64_t completed = 0, error = 0;
            comm::proxy::detail::load_words(words, &completed, &error);
            // NOTES: behind a branch on the loaded value, or the clock might be read before the
            // load has ended.
            if (completed != last)
                last = completed, silent_since = comm::now_ns();
            while (num_pending > 0 && posted_end[oldest] <= completed) {
                if (params.latency_ns != nullptr && num_samples < params.num_samples)
                    params.latency_ns[uint64_t{blockIdx.x} * params.num_samples + num_samples++] =
                        silent_since - posted_at[oldest];
                oldest = (oldest + 1) % kProxyPending;
                --num_pending;
            }
            // Independent of the length of a run: the bound counts the time without a completion.
            if (!is_patient || num_pending < kProxyPending || error != 0 ||
                comm::now_ns() - silent_since > peer.timeout_ns)
                break;
            comm::pause_poll();
        }
    };

    for (; begin < params.num_commands && status == SY_PROXY_OK; begin += params.batch) {
        const uint64_t object = begin % params.num_objects;
        if ((params.flags & SY_PROXY_PRODUCE_FILLS) != 0) {
            // The objects' last puts must be over before they are filled again.
            if (begin >= params.num_objects && lane_idx == 0)
                status = comm::proxy::detail::wait_completed(
                    peer, lane,
                    base + (begin - params.num_objects + params.batch) *
                               (params.counter_offset != 0 ? 2 : 1),
                    SY_TAG_PROXY_ROOM);
            status = __shfl_sync(0xffffffffu, status, 0);
            const uint32_t num_words = params.object_bytes / 8;
            for (uint32_t i = 0; i < params.batch; ++i) {
                uint64_t* words = reinterpret_cast<uint64_t*>(peer.mirror + region +
                                                              (object + i) * params.object_bytes);
                for (uint32_t word = lane_idx; word < num_words; word += 32)
                    words[word] = SY_PROXY_PATTERN(lane_number, begin + i, word);
            }
            __syncwarp();
        }
        // A poster's waits in `post` are not part of a batch's time.
        if ((params.flags & SY_PROXY_PRODUCE_ROUND_TRIP) == 0)
            look(true);
        const uint64_t now = comm::now_ns();
        uint64_t end = 0;
        const uint32_t per_object = params.counter_offset != 0 ? 2 : 1;
        const auto build = [&](uint32_t i) {
            if (per_object == 2 && i >= params.batch)
                return comm::proxy::detail::make_word(
                    peer, SY_PROXY_ADD, params.counter_offset + 8 * uint64_t{lane_number}, 1);
            const uint64_t offset = region + (object + i) * params.object_bytes;
            return params.opcode == SY_PROXY_PUT
                       ? comm::proxy::detail::make_move(peer, SY_PROXY_PUT, 0, offset, offset,
                                                        params.object_bytes)
                       : comm::proxy::detail::head(peer, SY_PROXY_NOP, 0);
        };
        const sy_proxy_command own = build(lane_idx);
        if (status == SY_PROXY_OK)
            status = comm::proxy::post(
                peer, lane, params.batch * per_object, [&](uint32_t) { return own; }, &end);
        if ((params.flags & SY_PROXY_PRODUCE_ROUND_TRIP) != 0) {
            if (lane_idx == 0 && status == SY_PROXY_OK) {
                status = comm::proxy::detail::wait_completed(peer, lane, end, SY_TAG_PROXY_ROOM);
                if (num_samples < params.num_samples)
                    params.latency_ns[uint64_t{blockIdx.x} * params.num_samples + num_samples++] =
                        (params.flags & SY_PROXY_PRODUCE_STAMPS) != 0 ? now : comm::now_ns() - now;
            }
            status = __shfl_sync(0xffffffffu, status, 0);
            continue;
        }
        if (lane_idx == 0 && num_pending < kProxyPending) {
            const uint32_t slot = (oldest + num_pending) % kProxyPending;
            posted_at[slot] = now;
            posted_end[slot] = end;
            ++num_pending;
        }
    }
    if (lane_idx == 0) {
        if (status == SY_PROXY_OK)
            status = comm::proxy::quiet(peer, lane_number);
        look(false);
        params.elapsed_ns[blockIdx.x] = comm::now_ns() - start;
        params.status[blockIdx.x] = status;
    }
}

// Entries by groups of blocks, 16 bytes at a time where both ends allow.
__device__ inline void peer_copy(const sy_peer_copy_params& params) {
    const sy_peer_copy_entry entry = params.entries[blockIdx.x / params.blocks_per_entry];
    const uint64_t part = blockIdx.x % params.blocks_per_entry;
    const uint64_t stride = uint64_t{params.blocks_per_entry} * SY_PEER_COPY_THREADS;
    const uint64_t first = part * SY_PEER_COPY_THREADS + threadIdx.x;
    uint64_t done = 0;
    if ((entry.source | entry.target) % 16 == 0) {
        const uint4* from = comm::at_address<const uint4>(entry.source);
        uint4* to = comm::at_address<uint4>(entry.target);
        const uint64_t num = entry.num_bytes / 16;
        uint64_t i = first;
        // Four loads under way at a time.
        for (; i + 3 * stride < num; i += 4 * stride) {
            const uint4 a = from[i], b = from[i + stride];
            const uint4 c = from[i + 2 * stride], d = from[i + 3 * stride];
            to[i] = a, to[i + stride] = b;
            to[i + 2 * stride] = c, to[i + 3 * stride] = d;
        }
        for (; i < num; i += stride)
            to[i] = from[i];
        done = num * 16;
    }
    const uint8_t* from = comm::at_address<const uint8_t>(entry.source);
    uint8_t* to = comm::at_address<uint8_t>(entry.target);
    for (uint64_t i = done + first; i < entry.num_bytes; i += stride)
        to[i] = from[i];
}

} // namespace switchyard::impls
