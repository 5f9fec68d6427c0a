// A NIC as a kernel. Its blocks poll the doorbells of send queues and execute the requests with
// loads and stores of the GPU, over NVLink where the peer's memory is on another GPU. Compiled by a
// host compiler behind simt.hpp, its threads are fibres, which is how CI runs it.
#pragma once

#include "softnic/adversary.hpp"
#include "softnic/model.hpp"

#if defined(__CUDACC__) || defined(SY_SIMT)

namespace softnic {

using namespace switchyard::comm;

struct NicParams {
    const Queue* queues;
    QueueState* states;
    const Key* keys;
    const Control* control;
    Counts* counts;
    uint64_t life_ns;
    uint64_t seed; // of the adversary, 0 for none
    uint32_t num_queues, num_keys, is_strict, reserved;
};

#if defined(SY_SIMT)
// A fibre costs a switch at every barrier.
constexpr uint32_t kNicThreads = 32;
#define SOFTNIC_SHARED static thread_local
#else
constexpr uint32_t kNicThreads = 256;
#define SOFTNIC_SHARED __shared__
#endif
// Requests that share a completion in a collapsed queue.
constexpr uint32_t kMostPerCompletion = 16;
// The adversary serves at most this number of requests of a queue before it turns to another.
constexpr uint32_t kMostAtOnce = 8;

struct NicShared {
    Request request;
    uint32_t words[16];
    uint64_t local, remote;
    Cut pieces;
    uint64_t landed_before; // requests before it have landed whole
    uint32_t syndrome, is_refused, must_stop, has_work, budget;
    uint32_t is_late, num_reports, is_busy;
};

#if defined(__CUDACC__)
__device__ __forceinline__ uint64_t atom_add_sys(uint64_t* address, uint64_t value) {
    uint64_t before;
    asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(address), "l"(value)
                 : "memory");
    return before;
}
__device__ __forceinline__ uint64_t atom_cas_sys(uint64_t* address, uint64_t expected,
                                                 uint64_t desired) {
    uint64_t before;
    asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(address), "l"(expected), "l"(desired)
                 : "memory");
    return before;
}
__device__ __forceinline__ uint32_t atom_cas_sys(uint32_t* address, uint32_t expected,
                                                 uint32_t desired) {
    uint32_t before;
    asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(before)
                 : "l"(address), "r"(expected), "r"(desired)
                 : "memory");
    return before;
}
#else
inline uint64_t atom_add_sys(uint64_t* address, uint64_t value) {
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
template <class T> T atom_cas_sys(T* address, T expected, T desired) {
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
    return expected;
}
#endif

__device__ inline void count(uint64_t* word, uint64_t num) {
    atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(num));
}

__device__ inline void note(const NicParams& params, const Violation& violation) {
    if (violation.what == kNone)
        return;
    if (atomicAdd(reinterpret_cast<unsigned long long*>(&params.counts->num_violations), 1ull) == 0)
        params.counts->first = violation;
}

// Writes a completion. One thread. SYNC POINT completion: body first, then the 8 bytes that end with
// counter and owner.
__device__ inline void complete(const NicParams& params, const Queue& queue, QueueState& state,
                                const Held& held) {
    const uint64_t slot = queue.is_collapsed ? 0 : state.cq_index & (queue.cq_depth - 1);
    if (!queue.is_collapsed) {
        const uint32_t consumed =
            be32(ld_relaxed<Scope::kSys>(at_address<uint32_t>(queue.cq_dbrec)));
        if (((static_cast<uint32_t>(state.cq_index) - consumed) & 0xffffff) >= queue.cq_depth) {
            note(params, {kFullCq, queue.qpn, held.position, consumed});
            state.is_error = 1;
            return;
        }
    }
    uint32_t* cqe = at_address<uint32_t>(queue.cq + slot * SY_MLX5_CQE_BYTES);
    st_relaxed<Scope::kSys>(cqe + 11, be32(held.num_bytes));
    // Bytes 52 to 55: vendor's syndrome 0, then ours.
    st_relaxed<Scope::kSys>(cqe + 13, held.syndrome << 24);
    fence_acq_rel<Scope::kSys>();
    st_relaxed<Scope::kSys>(
        reinterpret_cast<uint64_t*>(cqe) + 7,
        tail_of(queue, held.opcode, held.position, state.cq_index, held.syndrome != 0));
    ++state.cq_index;
    state.reported = held.position + 1;
}

// Hands immediate data to the peer, behind the written bytes. One thread, after a block barrier.
__device__ inline void deliver(const Queue& queue, QueueState& state, const Request& request) {
    const uint64_t cqe =
        queue.recv_cq + (state.num_received & (queue.recv_cq_depth - 1)) * SY_MLX5_CQE_BYTES;
    st_relaxed<Scope::kSys>(at_address<uint32_t>(cqe) + 9, request.imm);
    st_relaxed<Scope::kSys>(at_address<uint32_t>(cqe) + 11, be32(request.num_bytes));
    fence_acq_rel<Scope::kSys>();
    st_relaxed<Scope::kSys>(at_address<uint64_t>(cqe) + 7,
                            receive_tail_of(queue, state.num_received, false));
    ++state.num_received;
}

// Completes the peer's posted receives as flushed. One thread.
__device__ inline void flush_receives(const Queue& queue, QueueState& state) {
    if (queue.recv_cq == 0)
        return;
    const uint32_t posted = ld_relaxed<Scope::kSys>(at_address<uint32_t>(queue.recv_dbrec));
    // More than there is room for is a matter of the record.
    for (uint32_t i = 0; i < queue.recv_cq_depth && has_receive(state, posted); ++i) {
        const uint64_t cqe =
            queue.recv_cq + (state.num_received & (queue.recv_cq_depth - 1)) * SY_MLX5_CQE_BYTES;
        st_relaxed<Scope::kSys>(at_address<uint32_t>(cqe) + 13,
                                uint32_t{SY_MLX5_SYNDROME_FLUSHED} << 24);
        fence_acq_rel<Scope::kSys>();
        st_relaxed<Scope::kSys>(at_address<uint64_t>(cqe) + 7,
                                receive_tail_of(queue, state.num_received, true));
        ++state.num_received;
    }
}

// SYNC POINT doorbell: takes news of a queue. One thread.
__device__ inline void look_at_doorbell(const NicParams& params, const Queue& queue,
                                        QueueState& state) {
    const uint64_t word = ld_acquire<Scope::kSys>(at_address<uint64_t>(queue.doorbell));
    const uint32_t record =
        ld_relaxed<Scope::kSys>(at_address<uint32_t>(queue.dbrec) + SY_MLX5_DBREC_SEND);
    const uint32_t num_dropped = state.num_dropped;
    note(params, take_doorbell(queue, state, word, record, params.is_strict != 0));
    if (state.num_dropped != num_dropped)
        count(&params.counts->num_dropped, 1);
}

// Copies by a whole block. Aligned words of 8 bytes are never torn.
__device__ inline void copy_by_block(uint64_t to, uint64_t from, uint64_t num_bytes) {
    const uint64_t all = to | from | num_bytes;
    if (all % 16 == 0) {
        for (uint64_t i = threadIdx.x; i < num_bytes / 16; i += kNicThreads)
            *at_address<uint4>(to + i * 16) = *at_address<const uint4>(from + i * 16);
    } else if (all % 8 == 0) {
        for (uint64_t i = threadIdx.x; i < num_bytes / 8; i += kNicThreads)
            *at_address<uint64_t>(to + i * 8) = *at_address<const uint64_t>(from + i * 8);
    } else {
        for (uint64_t i = threadIdx.x; i < num_bytes; i += kNicThreads)
            *at_address<uint8_t>(to + i) = *at_address<const uint8_t>(from + i);
    }
}

// Reads the request and decides about it. One thread, after a block barrier.
__device__ inline void decide(const NicParams& params, NicShared& shared, const Queue& queue,
                              QueueState& state) {
    const bool can_read = decode(shared.words, &shared.request);
    const Request& request = shared.request;
    const bool is_dead =
        (ld_relaxed<Scope::kSys>(&params.control->dead) >> queue.control_bit & 1) != 0;
    const uint32_t posted =
        queue.recv_cq == 0 ? 0 : ld_relaxed<Scope::kSys>(at_address<uint32_t>(queue.recv_dbrec));
    const Verdict verdict = judge(queue, state, request, can_read, state.executed, params.keys,
                                  params.num_keys, params.is_strict != 0, is_dead, posted);
    note(params, verdict.violation);
    shared.syndrome = verdict.syndrome;
    shared.is_refused = verdict.is_refused;
    shared.local = verdict.local;
    shared.remote = verdict.remote;
    ++state.num_requests;
    count(&params.counts->num_requests, 1);
    count(&params.counts->num_bytes, verdict.syndrome == 0 ? request.num_bytes : 0);
    shared.is_late = 0;
    shared.landed_before = 0;
    if (params.seed == 0 || verdict.syndrome != 0)
        return;
    shared.landed_before = is_fenced(request) ? state.executed : 0;
    const bool has_answer = request.opcode == SY_MLX5_OPCODE_READ || is_atomic(request);
    if (has_answer && request.num_bytes != 0 && state.num_late < kMostLate &&
        draw(&state.random, 3) != 0) {
        shared.is_late = 1;
        count(&params.counts->num_late, 1);
    }
    if (!has_answer && !request.is_inline && request.num_bytes != 0) {
        shared.pieces = cut(&state.random, shared.remote, request.num_bytes);
        count(&params.counts->num_cut, shared.pieces.num_pieces > 1);
    }
}

// The word before. One thread.
__device__ inline uint64_t run_atomic(const Request& request, uint64_t remote) {
    if (request.opcode == SY_MLX5_OPCODE_ATOMIC_FA)
        return atom_add_sys(at_address<uint64_t>(remote), request.add);
    if (request.opcode == SY_MLX5_OPCODE_ATOMIC_CS)
        return atom_cas_sys(at_address<uint64_t>(remote), request.compare, request.add);
    if (width_of(request) == 8) {
        uint64_t seen = *at_address<uint64_t>(remote), before;
        while ((before = atom_cas_sys(at_address<uint64_t>(remote), seen,
                                      changed(request, seen))) != seen)
            seen = before;
        return seen;
    }
    uint32_t seen = *at_address<uint32_t>(remote), before;
    while ((before = atom_cas_sys(at_address<uint32_t>(remote), seen,
                                  static_cast<uint32_t>(changed(request, seen)))) != seen)
        seen = before;
    return seen;
}

// Stores the answer to an atomic, which needs no alignment. One thread.
__device__ inline void store_answer(uint64_t local, uint64_t answer, uint32_t num_bytes) {
    if (num_bytes == 8 && local % 8 == 0)
        *at_address<uint64_t>(local) = answer;
    else if (num_bytes == 4 && local % 4 == 0)
        *at_address<uint32_t>(local) = static_cast<uint32_t>(answer);
    else
        for (uint32_t i = 0; i < num_bytes; ++i)
            *at_address<uint8_t>(local + i) = static_cast<uint8_t>(answer >> i * 8);
}

// Stores the bytes that a request carries. All threads.
__device__ inline void store_inline(const Request& request, uint64_t remote) {
    if (remote % 8 == 0 && request.num_bytes % 8 == 0) {
        if (threadIdx.x < request.num_bytes / 8)
            st_relaxed<Scope::kSys>(at_address<uint64_t>(remote) + threadIdx.x,
                                    static_cast<uint64_t>(request.data[2 * threadIdx.x + 1]) << 32 |
                                        request.data[2 * threadIdx.x]);
    } else if (threadIdx.x < request.num_bytes) {
        *at_address<uint8_t>(remote + threadIdx.x) =
            static_cast<uint8_t>(request.data[threadIdx.x / 4] >> threadIdx.x % 4 * 8);
    }
}

// Write of the adversary: piece by piece, each visible before the next, with a pause between some.
__device__ inline void copy_in_pieces(const NicShared& shared) {
    for (uint32_t i = 0; i <= shared.pieces.mask; ++i) {
        uint32_t at;
        const uint32_t num_bytes = piece(shared.pieces, shared.request.num_bytes, i, &at);
        if (num_bytes == 0)
            continue;
        fence_acq_rel<Scope::kSys>();
        copy_by_block(shared.remote + at, shared.local + at, num_bytes);
        if (threadIdx.x == 0 && i % 4 == 0) {
            const uint64_t start_ns = now_ns();
            while (now_ns() - start_ns < 500) {
            }
        }
        __syncthreads();
    }
}

// Executes a request. All threads. Stores of earlier requests are visible before any effect of this
// one.
__device__ inline void execute(const NicParams& params, const NicShared& shared,
                               QueueState& state) {
    const Request& request = shared.request;
    switch (request.opcode) {
    case SY_MLX5_OPCODE_WRITE:
    case SY_MLX5_OPCODE_WRITE_IMM:
        if (request.num_bytes == 0)
            break;
        // NOTES: each thread that stores must itself order the other threads' stores from before
        // the barrier.
        fence_acq_rel<Scope::kSys>();
        if (request.is_inline)
            store_inline(request, shared.remote);
        else if (params.seed == 0)
            copy_by_block(shared.remote, shared.local, request.num_bytes);
        else
            copy_in_pieces(shared);
        break;
    case SY_MLX5_OPCODE_READ:
        fence_acq_rel<Scope::kSys>();
        if (!shared.is_late)
            copy_by_block(shared.local, shared.remote, request.num_bytes);
        else if (threadIdx.x == 0)
            state.late[state.num_late++] = {
                state.executed, shared.local, shared.remote, 0, request.num_bytes, 0};
        break;
    case SY_MLX5_OPCODE_ATOMIC_FA:
    case SY_MLX5_OPCODE_ATOMIC_CS:
    case SY_MLX5_OPCODE_MASKED_FA:
        if (threadIdx.x == 0) {
            const uint64_t answer = answer_of(request, run_atomic(request, shared.remote));
            if (!shared.is_late)
                store_answer(shared.local, answer, request.num_bytes);
            else
                state.late[state.num_late++] = {state.executed, shared.local,      0,
                                                answer,         request.num_bytes, 0};
        }
        break;
    default: // NOP; DUMP reads and drops
        break;
    }
}

// Lands the deferred effects of requests before `end`, the last first. All threads.
__device__ inline void land(QueueState& state, uint64_t end) {
    const uint32_t num_late = state.num_late;
    for (uint32_t i = num_late; i-- > 0;) {
        const Late& late = state.late[i];
        if (late.position >= end)
            continue;
        if (late.remote != 0)
            copy_by_block(late.local, late.remote, late.num_bytes);
        else if (threadIdx.x == 0)
            store_answer(late.local, late.answer, late.num_bytes);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t num_left = 0;
        for (uint32_t i = 0; i < num_late; ++i)
            if (state.late[i].position >= end)
                state.late[num_left++] = state.late[i];
        state.num_late = num_left;
    }
    __syncthreads();
}

// Writes the first `num` completions that are held back. All threads.
__device__ inline void report(const NicParams& params, const Queue& queue, QueueState& state,
                              uint32_t num) {
    if (num == 0)
        return;
    land(state, state.held[num - 1].position + 1);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < num; ++i)
            complete(params, queue, state, state.held[i]);
        for (uint32_t i = num; i < state.num_held; ++i)
            state.held[i - num] = state.held[i];
        state.num_held -= num;
    }
    __syncthreads();
}

// Finishes an executed request. One thread.
__device__ inline void finish(const NicParams& params, NicShared& shared, const Queue& queue,
                              QueueState& state) {
    const Request& request = shared.request;
    const uint64_t position = state.executed;
    state.executed += num_blocks(request, state.produced - position);
    const bool is_error = shared.syndrome != 0, is_last = state.executed == state.produced;
    if (is_error)
        state.is_error = 1;
    if (shared.is_refused)
        flush_receives(queue, state);
    else if (!is_error && request.opcode == SY_MLX5_OPCODE_WRITE_IMM)
        deliver(queue, state, request);
    const Held held = {position, request.opcode, shared.syndrome, is_error ? 0 : request.num_bytes,
                       0};
    shared.num_reports = 0;
    if (params.seed != 0) {
        if (is_error || is_signalled(request))
            state.held[state.num_held++] = held;
        // Room for one more, in any case.
        if (state.num_held == kMostHeld)
            shared.num_reports = 1 + draw(&state.random, kMostHeld);
    } else if (is_error || !queue.is_collapsed) {
        if (is_error || is_signalled(request))
            complete(params, queue, state, held);
        state.num_held = 0;
    } else {
        // Completions to one entry replace each other unread, so a few requests share one.
        if (is_signalled(request)) {
            state.held[0] = held;
            state.num_held = 1;
        }
        if (state.num_held != 0 &&
            (is_last || state.executed - state.reported >= kMostPerCompletion)) {
            complete(params, queue, state, state.held[0]);
            state.num_held = 0;
        }
    }
    shared.has_work = !is_last && --shared.budget != 0;
}

// Serves a queue once. All threads. Returns whether work is under way or left.
__device__ inline bool serve(const NicParams& params, NicShared& shared, const Queue& queue,
                             QueueState& state, uint32_t index) {
    if (threadIdx.x == 0) {
        if (params.seed != 0 && state.random == 0)
            state.random = start_random(params.seed, index);
        const bool is_stalled =
            (ld_relaxed<Scope::kSys>(&params.control->stalled) >> queue.control_bit & 1) != 0;
        const bool is_passed_over = params.seed != 0 && draw(&state.random, 4) == 0;
        if (!is_stalled && !is_passed_over)
            look_at_doorbell(params, queue, state);
        shared.budget = params.seed != 0 ? 1 + draw(&state.random, kMostAtOnce) : ~0u;
        shared.has_work = !is_stalled && !is_passed_over && state.executed < state.produced;
        shared.is_busy = !is_stalled && (is_passed_over || shared.has_work);
        shared.num_reports = is_stalled ? ~0u : 0;
    }
    __syncthreads();
    const bool is_stalled = shared.num_reports != 0;
    while (shared.has_work) {
        if (threadIdx.x < 16)
            shared.words[threadIdx.x] = ld_relaxed<Scope::kSys>(
                at_address<uint32_t>(queue.sq + (state.executed & (queue.sq_depth - 1)) *
                                                    SY_MLX5_BLOCK_BYTES) +
                threadIdx.x);
        __syncthreads();
        if (threadIdx.x == 0)
            decide(params, shared, queue, state);
        __syncthreads();
        if (shared.landed_before != 0)
            land(state, shared.landed_before);
        if (shared.syndrome == 0)
            execute(params, shared, state);
        __syncthreads();
        if (threadIdx.x == 0)
            finish(params, shared, queue, state);
        __syncthreads();
        report(params, queue, state, shared.num_reports);
    }
    if (params.seed != 0 && !is_stalled) {
        __syncthreads();
        if (threadIdx.x == 0) {
            shared.num_reports = draw(&state.random, state.num_held + 1);
            count(&params.counts->num_held, shared.num_reports < state.num_held);
            // Effects that no completion waits for must land eventually, too.
            shared.landed_before = draw(&state.random, 2) == 0 ? state.executed : 0;
        }
        __syncthreads();
        report(params, queue, state, shared.num_reports);
        if (shared.landed_before != 0)
            land(state, shared.landed_before);
        if (threadIdx.x == 0)
            shared.is_busy |=
                (state.num_held | state.num_late) != 0 || state.executed < state.produced;
    }
    __syncthreads();
    const bool is_busy = shared.is_busy;
    __syncthreads();
    return is_busy;
}

// A block per queue pair, and round again when there are more.
//
// NOTES: within 48 registers a block finds room beside kernels that wait for it.
__global__ void __launch_bounds__(kNicThreads, 5)
    nic_kernel(const __grid_constant__ NicParams params) {
    SOFTNIC_SHARED NicShared shared;
    const uint64_t start_ns = now_ns();
    for (uint32_t round = 1;; ++round) {
        // Read before the doorbells: the round that follows sees every doorbell rung before the
        // stop order.
        if (threadIdx.x == 0)
            shared.must_stop =
                static_cast<uint32_t>(ld_acquire<Scope::kSys>(&params.control->stop) != 0);
        __syncthreads();
        const bool must_stop = shared.must_stop != 0;
        bool is_idle = true;
        for (uint32_t i = blockIdx.x; i < params.num_queues; i += gridDim.x)
            is_idle &= !serve(params, shared, params.queues[i], params.states[i], i);
        __syncthreads();
        if (threadIdx.x == 0)
            shared.must_stop = round % 16 == 0 && now_ns() - start_ns > params.life_ns;
        __syncthreads();
        if (shared.must_stop || (must_stop && is_idle))
            return;
        __syncthreads();
#if defined(SY_SIMT)
        // Not while there is work: who leaves a busy processor may wait long.
        if (threadIdx.x == 0 && is_idle)
            pause_poll();
#endif
    }
}

} // namespace softnic

#endif
