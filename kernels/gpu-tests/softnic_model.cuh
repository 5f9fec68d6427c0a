// A NIC as a kernel: blocks that poll the doorbells of send queues and carry out what stands in them, with
// loads and stores of the GPU, over NVLink where the peer's memory is on another one. The bytes are those
// that a ConnectX would read; what no correct driver does is noted and takes the queue pair out of
// service.
//
// The decoder is shared with the backend that drives copy engines from the host (softnic_copy.hpp).
// Writes with immediate data, gathers of several pieces and masked compare-and-swap are left to the model
// in Rust (p2p-core/softnic): fused kernels post none.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/memory.h"

#if defined(__CUDACC__)
#define SOFTNIC_BOTH __host__ __device__ inline
#define SOFTNIC_SHARED __shared__
#else
#define SOFTNIC_BOTH inline
#define SOFTNIC_SHARED static thread_local
#endif

namespace softnic {

enum Access : uint32_t { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRemoteAtomic = 8, kAll = 15 };

// Registered memory: `address` as requests name it, `mapped` as this side reaches it.
struct Key {
    uint64_t address, num_bytes, mapped;
    uint32_t key, access;
};

// Violation.what
enum : uint32_t {
    kNone = 0,
    kIndex = 1,       // a request's index is not its place; found: the index
    kQueuePair = 2,   // a request or doorbell names another queue pair; found: its number
    kStaleRecord = 3, // the doorbell record is behind the doorbell; found: the record
    kOverrun = 4,     // more blocks posted and not reported complete than there are; found: how many
    kBackwards = 5,   // the doorbell goes back; found: its end
    kMalformed = 6,   // reserved bits, unknown opcodes, wrong lengths; found: opcode and segments
    kFullCq = 7,      // a completion found no room
};

struct Violation {
    uint32_t what, qpn;
    uint64_t position, found;
};

// A queue pair as the NIC knows it.
struct Queue {
    uint64_t sq, dbrec, doorbell, cq, cq_dbrec;
    uint32_t qpn, sq_depth, cq_depth, is_collapsed;
    // Faults: the request with this number since the start fails, with this syndrome. 0: none.
    uint64_t fail_at;
    uint32_t fail_syndrome, is_stalled_by; // bit of Control.stalled
};

// What the NIC keeps of a queue pair; zeroed when it is reset.
struct QueueState {
    uint64_t produced, executed, reported, num_requests, cq_index;
    uint32_t is_error, reserved;
};

// Mapped host memory.
struct Control {
    uint32_t stop, stalled;
};

struct Counts {
    uint64_t num_requests, num_bytes, num_violations;
    Violation first;
};

// A request in numbers.
struct Request {
    uint32_t opcode, opmod, index, qpn, num_segments, flags;
    uint64_t remote;
    uint32_t rkey, lkey;
    uint64_t local;
    uint32_t num_bytes, is_inline;
    uint32_t data[7]; // inline
    uint64_t add, compare;
};

SOFTNIC_BOTH uint32_t swap(uint32_t value) {
    return value >> 24 | (value >> 8 & 0xff00) | (value << 8 & 0xff0000) | value << 24;
}

SOFTNIC_BOTH uint64_t swap64(uint32_t high, uint32_t low) {
    return static_cast<uint64_t>(swap(high)) << 32 | swap(low);
}

// Reads a block. False when no hardware could be expected to carry it out, or reserved bits are set.
SOFTNIC_BOTH bool decode(const uint32_t (&words)[16], Request* out) {
    Request request = {};
    const uint32_t first = swap(words[0]), second = swap(words[1]), third = swap(words[2]);
    request.opcode = first & 0xff;
    request.index = first >> 8 & 0xffff;
    request.opmod = first >> 24;
    request.qpn = second >> 8;
    request.num_segments = second & 0x3f;
    request.flags = third & 0xff;
    *out = request;
    // Bits that a request of ours never has: upper segment bits, signature, stream channel, low flags.
    if ((second & 0xc0) != 0 || third >> 8 != 0 || (request.flags & 0x11) != 0 || words[3] != 0)
        return false;
    const bool is_masked = request.opcode == SY_MLX5_OPCODE_MASKED_FA;
    if (is_masked ? request.opmod != SY_MLX5_OPMOD_MASKED_4 && request.opmod != SY_MLX5_OPMOD_MASKED_8
                  : request.opmod != 0)
        return false;
    if (request.opcode == SY_MLX5_OPCODE_NOP)
        return request.num_segments == 1;
    uint32_t at = 4; // the next segment's first word
    if (request.opcode != SY_MLX5_OPCODE_DUMP) {
        request.remote = swap64(words[4], words[5]);
        request.rkey = swap(words[6]);
        if (words[7] != 0)
            return false;
        at = 8;
    }
    if (request.opcode == SY_MLX5_OPCODE_ATOMIC_FA || request.opcode == SY_MLX5_OPCODE_ATOMIC_CS ||
        is_masked) {
        const bool is_narrow = is_masked && request.opmod == SY_MLX5_OPMOD_MASKED_4;
        request.add = is_narrow ? swap(words[8]) : swap64(words[8], words[9]);
        request.compare = is_narrow ? swap(words[9]) : swap64(words[10], words[11]);
        if (is_narrow && (words[10] | words[11]) != 0)
            return false;
        at = 12;
    } else if (request.opcode != SY_MLX5_OPCODE_WRITE && request.opcode != SY_MLX5_OPCODE_READ &&
               request.opcode != SY_MLX5_OPCODE_DUMP) {
        return false;
    }
    const uint32_t head = swap(words[at]);
    request.num_bytes = head & ~SY_MLX5_INLINE_FLAG;
    request.is_inline = (head & SY_MLX5_INLINE_FLAG) != 0;
    uint32_t num_segments = at / 4 + 1;
    if (request.is_inline) {
        if (request.opcode != SY_MLX5_OPCODE_WRITE || request.num_bytes > SY_MLX5_MAX_INLINE_BYTES)
            return false;
        num_segments = at / 4 + (request.num_bytes + 4 + 15) / 16;
        for (uint32_t i = 0; i < 7; ++i)
            request.data[i] = words[9 + i];
    } else {
        request.lkey = swap(words[at + 1]);
        request.local = swap64(words[at + 2], words[at + 3]);
    }
    *out = request;
    const uint32_t width =
        is_masked && request.opmod == SY_MLX5_OPMOD_MASKED_4 ? 4 : 8;
    if (at == 12 && request.num_bytes != width)
        return false;
    return request.num_segments == num_segments && request.num_bytes <= SY_MLX5_MAX_MESSAGE_BYTES;
}

// Where `num_bytes` at `address` under `key` are, 0 when the key does not allow it.
SOFTNIC_BOTH uint64_t find(const Key* keys, uint32_t num_keys, uint32_t key, uint64_t address,
                           uint64_t num_bytes, uint32_t access) {
    for (uint32_t i = 0; i < num_keys; ++i) {
        if (keys[i].key != key)
            continue;
        const uint64_t offset = address - keys[i].address;
        const bool is_inside = address >= keys[i].address && offset <= keys[i].num_bytes &&
                               num_bytes <= keys[i].num_bytes - offset;
        return is_inside && (keys[i].access & access) == access ? keys[i].mapped + offset : 0;
    }
    return 0;
}

SOFTNIC_BOTH bool is_atomic(const Request& request) {
    return request.opcode == SY_MLX5_OPCODE_ATOMIC_FA || request.opcode == SY_MLX5_OPCODE_ATOMIC_CS ||
           request.opcode == SY_MLX5_OPCODE_MASKED_FA;
}

// Looks the addresses of a request up. A syndrome, or 0.
SOFTNIC_BOTH uint32_t resolve(const Request& request, const Key* keys, uint32_t num_keys,
                              uint64_t* local, uint64_t* remote) {
    *local = *remote = 0;
    if (request.opcode == SY_MLX5_OPCODE_NOP)
        return 0;
    const bool lands_here = request.opcode == SY_MLX5_OPCODE_READ || is_atomic(request);
    if (!request.is_inline) {
        *local = find(keys, num_keys, request.lkey, request.local, request.num_bytes,
                      lands_here ? uint32_t{kLocalWrite} : 0);
        if (*local == 0)
            return SY_MLX5_SYNDROME_LOCAL_PROTECTION;
    }
    if (request.opcode == SY_MLX5_OPCODE_DUMP)
        return 0;
    if (is_atomic(request) && request.remote % request.num_bytes != 0)
        return SY_MLX5_SYNDROME_REMOTE_INVALID;
    const uint32_t access = request.opcode == SY_MLX5_OPCODE_WRITE  ? kRemoteWrite
                            : request.opcode == SY_MLX5_OPCODE_READ ? kRemoteRead
                                                                    : kRemoteAtomic;
    *remote = find(keys, num_keys, request.rkey, request.remote, request.num_bytes, access);
    return *remote == 0 ? SY_MLX5_SYNDROME_REMOTE_ACCESS : 0;
}

// The sum of a masked add: a set bit of `boundary` keeps its carry from the next bit.
SOFTNIC_BOTH uint64_t masked_sum(uint64_t word, uint64_t add, uint64_t boundary, uint32_t num_bits) {
    uint64_t sum = 0, carry = 0;
    for (uint32_t bit = 0; bit < num_bits; ++bit) {
        const uint64_t a = word >> bit & 1, b = add >> bit & 1;
        sum |= (a ^ b ^ carry) << bit;
        carry = (a & b) | (carry & (a ^ b));
        if ((boundary >> bit & 1) != 0)
            carry = 0;
    }
    return sum;
}

// The last word of a completion but one, and the last.
SOFTNIC_BOTH uint64_t tail_of(const Queue& queue, uint32_t opcode, uint64_t position, uint64_t cq_index,
                              bool is_error) {
    const uint32_t owner = !queue.is_collapsed && (cq_index & queue.cq_depth) != 0 ? 1 : 0;
    const uint32_t status = is_error ? SY_MLX5_CQE_REQ_ERROR : SY_MLX5_CQE_REQ;
    const uint32_t counter = static_cast<uint32_t>(position & 0xffff);
    const uint32_t last = counter >> 8 | (counter & 0xff) << 8 | (status << 4 | owner) << 24;
    return static_cast<uint64_t>(last) << 32 | swap(opcode << 24 | queue.qpn);
}

#if defined(__CUDACC__) || defined(SY_SIMT)

using namespace switchyard::comm;

struct NicParams {
    const Queue* queues;
    QueueState* states;
    const Key* keys;
    const Control* control;
    Counts* counts;
    uint64_t life_ns;
    uint32_t num_queues, num_keys, is_strict, reserved;
};

constexpr uint32_t kNicThreads = 256;
// Completions to one collapsed queue may replace each other unread, so so many requests share one.
constexpr uint32_t kMostPerCompletion = 16;

struct NicShared {
    Request request;
    uint32_t words[16];
    uint64_t local, remote;
    uint64_t produced, executed;
    uint32_t syndrome, must_stop, has_work;
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
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
#endif

__device__ inline void note(const NicParams& params, uint32_t what, uint32_t qpn, uint64_t position,
                            uint64_t found) {
    if (atomicAdd(reinterpret_cast<unsigned long long*>(&params.counts->num_violations), 1ull) == 0)
        params.counts->first = {what, qpn, position, found};
}

// Writes a completion. One thread. SYNC POINT completion: body first, then the 8 bytes that end with
// counter and owner.
__device__ inline void complete(const NicParams& params, const Queue& queue, QueueState& state,
                                uint32_t opcode, uint64_t position, uint32_t syndrome) {
    const uint64_t slot = queue.is_collapsed ? 0 : state.cq_index & (queue.cq_depth - 1);
    if (!queue.is_collapsed) {
        const uint32_t consumed = be32(ld_relaxed<Scope::kSys>(at_address<uint32_t>(queue.cq_dbrec)));
        if (((static_cast<uint32_t>(state.cq_index) - consumed) & 0xffffff) >= queue.cq_depth) {
            note(params, kFullCq, queue.qpn, position, consumed);
            state.is_error = 1;
            return;
        }
    }
    const uint64_t cqe = queue.cq + slot * SY_MLX5_CQE_BYTES;
    // Bytes 52 to 55: vendor's syndrome 0, then ours.
    st_relaxed<Scope::kSys>(at_address<uint32_t>(cqe) + 13, syndrome << 24);
    fence_acq_rel<Scope::kSys>();
    st_relaxed<Scope::kSys>(at_address<uint64_t>(cqe) + 7,
                            tail_of(queue, opcode, position, state.cq_index, syndrome != 0));
    ++state.cq_index;
    state.reported = position + 1;
}

// SYNC POINT doorbell: takes news of a queue. One thread.
__device__ inline void take_doorbell(const NicParams& params, const Queue& queue, QueueState& state) {
    const uint64_t word = ld_acquire<Scope::kSys>(at_address<uint64_t>(queue.doorbell));
    if (word == 0)
        return;
    const uint32_t end = be32(static_cast<uint32_t>(word)) >> 8 & 0xffff;
    const uint32_t qpn = be32(static_cast<uint32_t>(word >> 32)) >> 8;
    const uint32_t known = static_cast<uint32_t>(state.produced & 0xffff);
    const uint32_t advance = (end - known) & 0xffff;
    if (advance == 0)
        return;
    if (qpn != queue.qpn || advance > 1 << 15) {
        if (!state.is_error)
            note(params, qpn != queue.qpn ? kQueuePair : kBackwards, queue.qpn, state.produced,
                 qpn != queue.qpn ? qpn : end);
        state.is_error = 1;
        return;
    }
    // Read after the register, as hardware does that recovers from a lost doorbell.
    const uint32_t record =
        be32(ld_relaxed<Scope::kSys>(at_address<uint32_t>(queue.dbrec) + SY_MLX5_DBREC_SEND)) & 0xffff;
    if (params.is_strict && ((record - end) & 0xffff) > 1 << 15) {
        note(params, kStaleRecord, queue.qpn, state.produced, record);
        state.is_error = 1;
    }
    state.produced += advance;
    if (params.is_strict && state.produced - state.reported > queue.sq_depth) {
        note(params, kOverrun, queue.qpn, state.produced, state.produced - state.reported);
        state.is_error = 1;
    }
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

// Reads the request at `position` and looks at it as hardware would. One thread, after a block barrier.
__device__ inline void judge(const NicParams& params, NicShared& shared, const Queue& queue,
                             QueueState& state) {
    const uint64_t position = state.executed;
    const bool can_read = decode(shared.words, &shared.request);
    const Request& request = shared.request;
    uint32_t syndrome = 0;
    if (state.is_error)
        syndrome = SY_MLX5_SYNDROME_FLUSHED;
    else if (queue.fail_syndrome != 0 && state.num_requests == queue.fail_at)
        syndrome = queue.fail_syndrome;
    else if (request.qpn != queue.qpn || !can_read ||
             (params.is_strict && request.index != (position & 0xffff))) {
        const uint32_t what = request.qpn != queue.qpn                    ? kQueuePair
                              : request.index != (position & 0xffff) ? kIndex
                                                                          : kMalformed;
        note(params, what, queue.qpn, position,
             what == kQueuePair ? request.qpn
             : what == kIndex   ? request.index
                                : request.opcode << 8 | request.num_segments);
        syndrome = SY_MLX5_SYNDROME_LOCAL_QP_OP;
    } else {
        syndrome = resolve(request, params.keys, params.num_keys, &shared.local, &shared.remote);
    }
    shared.syndrome = syndrome;
    ++state.num_requests;
    atomicAdd(reinterpret_cast<unsigned long long*>(&params.counts->num_requests), 1ull);
    atomicAdd(reinterpret_cast<unsigned long long*>(&params.counts->num_bytes),
              static_cast<unsigned long long>(syndrome == 0 ? request.num_bytes : 0));
}

__device__ inline void run_atomic(const Request& request, uint64_t local, uint64_t remote) {
    if (request.opcode == SY_MLX5_OPCODE_ATOMIC_FA) {
        *at_address<uint64_t>(local) = atom_add_sys(at_address<uint64_t>(remote), request.add);
    } else if (request.opcode == SY_MLX5_OPCODE_ATOMIC_CS) {
        *at_address<uint64_t>(local) =
            atom_cas_sys(at_address<uint64_t>(remote), request.compare, request.add);
    } else if (request.num_bytes == 8) {
        uint64_t seen = *at_address<uint64_t>(remote), before;
        while ((before = atom_cas_sys(at_address<uint64_t>(remote), seen,
                                      masked_sum(seen, request.add, request.compare, 64))) != seen)
            seen = before;
        *at_address<uint64_t>(local) = seen;
    } else {
        uint32_t seen = *at_address<uint32_t>(remote), before;
        while ((before = atom_cas_sys(at_address<uint32_t>(remote), seen,
                                      static_cast<uint32_t>(masked_sum(
                                          seen, request.add, request.compare, 32)))) != seen)
            seen = before;
        // Narrow old values land big-endian.
        *at_address<uint32_t>(local) = swap(seen);
    }
}

// Carries out a request. All threads; what earlier requests stored is seen before anything of this one.
__device__ inline void execute(const NicShared& shared) {
    const Request& request = shared.request;
    switch (request.opcode) {
    case SY_MLX5_OPCODE_WRITE:
        // NOTES: each thread that stores must itself order what the others stored before the barrier.
        fence_acq_rel<Scope::kSys>();
        if (!request.is_inline)
            copy_by_block(shared.remote, shared.local, request.num_bytes);
        else if (shared.remote % 8 == 0 && request.num_bytes % 8 == 0 && threadIdx.x < request.num_bytes / 8)
            st_relaxed<Scope::kSys>(at_address<uint64_t>(shared.remote) + threadIdx.x,
                                    static_cast<uint64_t>(request.data[2 * threadIdx.x + 1]) << 32 |
                                        request.data[2 * threadIdx.x]);
        else if ((shared.remote % 8 != 0 || request.num_bytes % 8 != 0) && threadIdx.x < request.num_bytes)
            *at_address<uint8_t>(shared.remote + threadIdx.x) =
                static_cast<uint8_t>(request.data[threadIdx.x / 4] >> threadIdx.x % 4 * 8);
        break;
    case SY_MLX5_OPCODE_READ:
        fence_acq_rel<Scope::kSys>();
        copy_by_block(shared.local, shared.remote, request.num_bytes);
        break;
    case SY_MLX5_OPCODE_ATOMIC_FA:
    case SY_MLX5_OPCODE_ATOMIC_CS:
    case SY_MLX5_OPCODE_MASKED_FA:
        if (threadIdx.x == 0)
            run_atomic(request, shared.local, shared.remote);
        break;
    default: // NOP; DUMP reads and drops
        break;
    }
}

// A block per queue pair, and round again when there are more.
__global__ void __launch_bounds__(kNicThreads) nic_kernel(const __grid_constant__ NicParams params) {
    SOFTNIC_SHARED NicShared shared;
    const uint64_t start_ns = now_ns();
    for (uint32_t round = 1;; ++round) {
        bool is_idle = true;
        for (uint32_t i = blockIdx.x; i < params.num_queues; i += gridDim.x) {
            const Queue& queue = params.queues[i];
            QueueState& state = params.states[i];
            if (threadIdx.x == 0) {
                const bool is_stalled =
                    (ld_relaxed<Scope::kSys>(&params.control->stalled) >> queue.is_stalled_by & 1) != 0;
                if (!is_stalled)
                    take_doorbell(params, queue, state);
                shared.has_work = !is_stalled && state.executed < state.produced;
            }
            __syncthreads();
            while (shared.has_work) {
                is_idle = false;
                if (threadIdx.x < 16)
                    shared.words[threadIdx.x] = ld_relaxed<Scope::kSys>(
                        at_address<uint32_t>(queue.sq + (state.executed & (queue.sq_depth - 1)) *
                                                            SY_MLX5_BLOCK_BYTES) +
                        threadIdx.x);
                __syncthreads();
                if (threadIdx.x == 0)
                    judge(params, shared, queue, state);
                __syncthreads();
                if (shared.syndrome == 0)
                    execute(shared);
                __syncthreads();
                if (threadIdx.x == 0) {
                    const uint64_t position = state.executed++;
                    const bool is_error = shared.syndrome != 0;
                    const bool is_signalled =
                        (shared.request.flags & SY_MLX5_CE_MASK) == SY_MLX5_CE_ALWAYS;
                    const bool is_last = state.executed == state.produced;
                    const bool is_due = !queue.is_collapsed || is_last ||
                                        state.executed - state.reported >= kMostPerCompletion;
                    if (is_error)
                        state.is_error = 1;
                    if (is_error || (is_signalled && is_due))
                        complete(params, queue, state, shared.request.opcode, position,
                                 shared.syndrome);
                    shared.has_work = !is_last;
                }
                __syncthreads();
            }
            __syncthreads();
        }
        if (threadIdx.x == 0)
            shared.must_stop = (ld_relaxed<Scope::kSys>(&params.control->stop) != 0 && is_idle) ||
                               (round % 16 == 0 && now_ns() - start_ns > params.life_ns);
        __syncthreads();
        if (shared.must_stop)
            return;
#if defined(SY_SIMT)
        pause_poll();
#endif
    }
}

#endif

} // namespace softnic
