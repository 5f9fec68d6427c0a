// Decoding of doorbells, requests and keys, shared by the NIC kernel (nic_kernel.cuh) and by the
// backend that drives copy engines (copy_nic.hpp), for GPUs and processors. The bytes are those
// that a ConnectX would read. A violation is recorded and takes the queue pair out of service.
//
// Syndromes and memory are those of the model in Rust (softnic/src); tests/gpu_nic
// compares the two over random requests. Gathers of several pieces, requests of more than one block and
// masked compare-and-swap are left to that model: no device function builds them.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/memory.h"

#if defined(__CUDACC__)
#define SOFTNIC_BOTH __host__ __device__ inline
#else
#define SOFTNIC_BOTH inline
#endif

namespace softnic {

enum Access : uint32_t {
    kLocalWrite = 1,
    kRemoteWrite = 2,
    kRemoteRead = 4,
    kRemoteAtomic = 8,
    kLocal = 16, // requests of this side may name it as their own
    kAll = 31
};

// Registered memory: `address` as requests name it, `mapped` as this side reaches it.
struct Key {
    uint64_t address, num_bytes, mapped;
    uint32_t key, access;
};

// Violation.what
enum : uint32_t {
    kNone = 0,
    kIndex = 1, // a request's index is not its place; found: the index
    kQueuePair = 2, // a request or doorbell names another queue pair; found: its number
    kStaleRecord = 3, // the doorbell record is behind the doorbell; found: the record
    kOverrun = 4, // more blocks posted and not reported complete than there are; found: how many
    kBackwards = 5, // the doorbell goes back; found: its end
    kMalformed = 6, // reserved bits, unknown opcodes, wrong lengths; found: opcode and segments
    kFullCq = 7, // a completion found no room; found: how many were given back
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
    uint32_t fail_syndrome;
    uint32_t control_bit; // its bit of the masks in Control
    // Number of doorbells since the start that are dropped.
    uint32_t num_dropped;
    uint32_t has_record; // 0: no doorbell record is read for requests
    // Destination of immediate data: the peer's doorbell record and ring of completions, or 0.
    uint64_t recv_dbrec, recv_cq;
    uint32_t recv_cq_depth, recv_qpn;
};

// A completion that is not written yet.
struct Held {
    uint64_t position;
    uint32_t opcode, syndrome, num_bytes, reserved;
};

// The part of an executed request that lands later: the bytes of a read, or the answer to an
// atomic.
struct Late {
    uint64_t position, local;
    uint64_t remote; // of a read; 0 for answers
    uint64_t answer;
    uint32_t num_bytes, reserved;
};

constexpr uint32_t kMostHeld = 16, kMostLate = 8;

// State of a queue pair in the NIC; zeroed when the pair is reset.
struct QueueState {
    uint64_t produced, executed, reported, num_requests, cq_index, num_received;
    uint64_t ignored; // the doorbell that was dropped last
    uint32_t num_dropped, is_error;
    // The adversary's.
    uint64_t random;
    uint32_t num_held, num_late;
    Held held[kMostHeld]; // in the order of their requests
    Late late[kMostLate];
};

// Mapped host memory: bits of queue pairs, set and cleared at any time.
struct Control {
    uint64_t stop; // all: ends once it has done the work announced before
    uint32_t stalled; // does nothing
    uint32_t dead; // its peer does not answer
};

struct Counts {
    uint64_t num_requests, num_bytes, num_violations;
    // How often the adversary put off a completion or an answer, and cut a write.
    uint64_t num_held, num_late, num_cut;
    uint64_t num_dropped; // doorbells
    Violation first;
};

// A request in numbers.
struct Request {
    uint32_t opcode, opmod, index, qpn, num_segments, flags;
    uint64_t remote;
    uint32_t rkey, lkey;
    uint64_t local;
    uint32_t imm; // as it stands in memory
    uint32_t num_bytes, is_inline, has_data;
    uint32_t data[7]; // inline
    uint64_t add, compare;
};

SOFTNIC_BOTH uint32_t swap(uint32_t value) {
    return value >> 24 | (value >> 8 & 0xff00) | (value << 8 & 0xff0000) | value << 24;
}

SOFTNIC_BOTH uint64_t swap64(uint32_t high, uint32_t low) {
    return static_cast<uint64_t>(swap(high)) << 32 | swap(low);
}

SOFTNIC_BOTH bool is_atomic(const Request& request) {
    return request.opcode == SY_MLX5_OPCODE_ATOMIC_FA ||
           request.opcode == SY_MLX5_OPCODE_ATOMIC_CS || request.opcode == SY_MLX5_OPCODE_MASKED_FA;
}

// Bytes that an atomic works on.
SOFTNIC_BOTH uint32_t width_of(const Request& request) {
    const bool is_narrow =
        request.opcode == SY_MLX5_OPCODE_MASKED_FA && request.opmod == SY_MLX5_OPMOD_MASKED_4;
    return is_narrow ? 4 : 8;
}

SOFTNIC_BOTH bool is_signalled(const Request& request) {
    return (request.flags & SY_MLX5_CE_MASK) >= SY_MLX5_CE_ALWAYS;
}

// Whether it waits for the answers to earlier reads and atomics.
SOFTNIC_BOTH bool is_fenced(const Request& request) {
    return (request.flags & SY_MLX5_FM_MASK) >= SY_MLX5_FM_FENCE;
}

// Blocks that a request takes, of `num_posted` that there are.
SOFTNIC_BOTH uint64_t num_blocks(const Request& request, uint64_t num_posted) {
    const uint64_t wanted = request.num_segments == 0 ? 1 : (request.num_segments + 3) / 4;
    return wanted < num_posted ? wanted : num_posted;
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
    request.imm = words[3];
    *out = request;
    // Bits that a request of ours never has: upper segment bits, signature, stream channel, low flags.
    if ((second & 0xc0) != 0 || third >> 8 != 0 || (request.flags & 0x11) != 0)
        return false;
    const bool is_masked = request.opcode == SY_MLX5_OPCODE_MASKED_FA;
    if (is_masked
            ? request.opmod != SY_MLX5_OPMOD_MASKED_4 && request.opmod != SY_MLX5_OPMOD_MASKED_8
            : request.opmod != 0)
        return false;
    // Some drivers fill nothing but the control segment of a NOP that claims two.
    if (request.opcode == SY_MLX5_OPCODE_NOP)
        return request.num_segments == 1 || request.num_segments == 2;
    const bool is_write =
        request.opcode == SY_MLX5_OPCODE_WRITE || request.opcode == SY_MLX5_OPCODE_WRITE_IMM;
    uint32_t at = 4; // the next segment's first word
    if (request.opcode != SY_MLX5_OPCODE_DUMP) {
        request.remote = swap64(words[4], words[5]);
        request.rkey = swap(words[6]);
        if (words[7] != 0)
            return false;
        at = 8;
    }
    if (is_atomic(request)) {
        const bool is_narrow = width_of(request) == 4;
        request.add = is_narrow ? swap(words[8]) : swap64(words[8], words[9]);
        request.compare = is_narrow ? swap(words[9]) : swap64(words[10], words[11]);
        if (is_narrow && (words[10] | words[11]) != 0)
            return false;
        at = 12;
    } else if (!is_write && request.opcode != SY_MLX5_OPCODE_READ &&
               request.opcode != SY_MLX5_OPCODE_DUMP) {
        return false;
    }
    if (at == 8 && request.num_segments == 2) { // no bytes, no segment for them
        *out = request;
        return true;
    }
    const uint32_t head = swap(words[at]);
    request.has_data = 1;
    request.num_bytes = head & ~SY_MLX5_INLINE_FLAG;
    request.is_inline = (head & SY_MLX5_INLINE_FLAG) != 0;
    uint32_t num_segments = at / 4 + 1;
    if (request.is_inline) {
        if (!is_write || request.num_bytes > SY_MLX5_MAX_INLINE_BYTES)
            return false;
        num_segments = at / 4 + (request.num_bytes + 4 + 15) / 16;
        for (uint32_t i = 0; i < 7; ++i)
            request.data[i] = words[9 + i];
    } else {
        request.lkey = swap(words[at + 1]);
        request.local = swap64(words[at + 2], words[at + 3]);
    }
    *out = request;
    return request.num_segments == num_segments;
}

// Address of `num_bytes` at `address` under `key`, 0 when the key does not allow the access.
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

// Whether the peer has a receive for immediate data; `posted` is the first word of its doorbell record.
SOFTNIC_BOTH bool has_receive(const QueueState& state, uint32_t posted) {
    return ((swap(posted) - static_cast<uint32_t>(state.num_received)) & 0xffff) != 0;
}

// Translates the addresses of a request. Checks own memory first, then whether the peer answers,
// then its memory. Returns a syndrome, or 0.
SOFTNIC_BOTH uint32_t resolve(const Request& request, const Key* keys, uint32_t num_keys,
                              bool is_dead, uint64_t* local, uint64_t* remote) {
    *local = *remote = 0;
    if (request.opcode == SY_MLX5_OPCODE_NOP)
        return 0;
    const bool is_dump = request.opcode == SY_MLX5_OPCODE_DUMP;
    const bool has_imm = request.opcode == SY_MLX5_OPCODE_WRITE_IMM;
    if (!is_dump && request.num_bytes > SY_MLX5_MAX_MESSAGE_BYTES)
        return SY_MLX5_SYNDROME_LOCAL_LENGTH;
    if (is_atomic(request) && request.num_bytes != width_of(request))
        return SY_MLX5_SYNDROME_LOCAL_LENGTH;
    const bool lands_here = request.opcode == SY_MLX5_OPCODE_READ || is_atomic(request);
    if (request.has_data && !request.is_inline) {
        *local = find(keys, num_keys, request.lkey, request.local, request.num_bytes,
                      lands_here ? kLocal | kLocalWrite : uint32_t{kLocal});
        if (*local == 0)
            return SY_MLX5_SYNDROME_LOCAL_PROTECTION;
    }
    if (is_dump)
        return 0;
    if (is_dead)
        return SY_MLX5_SYNDROME_RETRY_EXCEEDED;
    if (request.num_bytes == 0)
        return 0;
    if (is_atomic(request) && request.remote % request.num_bytes != 0)
        return SY_MLX5_SYNDROME_REMOTE_INVALID;
    const uint32_t access = request.opcode == SY_MLX5_OPCODE_WRITE || has_imm ? kRemoteWrite
                            : request.opcode == SY_MLX5_OPCODE_READ           ? kRemoteRead
                                                                              : kRemoteAtomic;
    *remote = find(keys, num_keys, request.rkey, request.remote, request.num_bytes, access);
    return *remote == 0 ? SY_MLX5_SYNDROME_REMOTE_ACCESS : 0;
}

// Result of a request.
struct Verdict {
    uint32_t syndrome; // 0: carried out
    bool is_refused; // by the peer; its queue pair is out of service then, too
    Violation violation;
    uint64_t local, remote;
};

// Checks the request at `position` as hardware would. `can_read` is the result of decode. `posted`
// is the first word of the peer's doorbell record, 0 where there is none.
SOFTNIC_BOTH Verdict judge(const Queue& queue, const QueueState& state, const Request& request,
                           bool can_read, uint64_t position, const Key* keys, uint32_t num_keys,
                           bool is_strict, bool is_dead, uint32_t posted) {
    Verdict verdict = {};
    if (state.is_error) {
        verdict.syndrome = SY_MLX5_SYNDROME_FLUSHED;
        return verdict;
    }
    if (queue.fail_syndrome != 0 && state.num_requests == queue.fail_at) {
        verdict.syndrome = queue.fail_syndrome;
        return verdict;
    }
    const bool is_elsewhere = request.index != (position & 0xffff);
    if (request.qpn != queue.qpn || !can_read || (is_strict && is_elsewhere)) {
        const uint32_t what = request.qpn != queue.qpn ? kQueuePair
                              : is_elsewhere           ? kIndex
                                                       : kMalformed;
        const uint32_t found = what == kQueuePair ? request.qpn
                               : what == kIndex   ? request.index
                                                  : request.opcode << 8 | request.num_segments;
        verdict.violation = {what, queue.qpn, position, found};
        verdict.syndrome = SY_MLX5_SYNDROME_LOCAL_QP_OP;
        return verdict;
    }
    verdict.syndrome = resolve(request, keys, num_keys, is_dead, &verdict.local, &verdict.remote);
    verdict.is_refused = verdict.syndrome == SY_MLX5_SYNDROME_REMOTE_ACCESS;
    if (verdict.syndrome == 0 && request.opcode == SY_MLX5_OPCODE_WRITE_IMM &&
        (queue.recv_cq == 0 || !has_receive(state, posted)))
        verdict.syndrome = SY_MLX5_SYNDROME_RNR_EXCEEDED;
    return verdict;
}

// Blocks that the record announces beyond those known, where that number is possible.
SOFTNIC_BOTH uint32_t announced(const Queue& queue, const QueueState& state, uint32_t record) {
    const uint32_t advance = (swap(record) - static_cast<uint32_t>(state.produced)) & 0xffff;
    return state.produced + advance - state.reported <= queue.sq_depth ? advance : 0;
}

// Takes the register's announcement. `record` is the send word of the doorbell record, read after
// the register, as hardware does that recovers from a lost doorbell. Returns the violation, if any.
SOFTNIC_BOTH Violation take_doorbell(const Queue& queue, QueueState& state, uint64_t word,
                                     uint32_t record, bool is_strict) {
    const uint32_t end = swap(static_cast<uint32_t>(word)) >> 8 & 0xffff;
    const uint32_t qpn = swap(static_cast<uint32_t>(word >> 32)) >> 8;
    const uint32_t advance = (end - static_cast<uint32_t>(state.produced)) & 0xffff;
    Violation violation = {};
    if (word == 0 || word == state.ignored || (advance == 0 && qpn == queue.qpn))
        return violation;
    if (state.num_dropped < queue.num_dropped) {
        ++state.num_dropped;
        state.ignored = word;
        return violation;
    }
    if (qpn != queue.qpn || advance > 1 << 15) {
        // A doorbell that stays wrong is noted once.
        if (!state.is_error)
            violation = {qpn != queue.qpn ? kQueuePair : kBackwards, queue.qpn, state.produced,
                         qpn != queue.qpn ? qpn : end};
        state.is_error = 1;
        // Requests that such a doorbell should have announced are in the record, if anywhere.
        // Taking them from there returns them flushed.
        if (queue.has_record)
            state.produced += announced(queue, state, record);
        return violation;
    }
    const uint32_t known = swap(record) & 0xffff;
    if (is_strict && queue.has_record && ((known - end) & 0xffff) > 1 << 15) {
        violation = {kStaleRecord, queue.qpn, state.produced, known};
        state.is_error = 1;
    }
    state.produced += advance;
    if (is_strict && state.produced - state.reported > queue.sq_depth) {
        violation = {kOverrun, queue.qpn, state.produced, state.produced - state.reported};
        state.is_error = 1;
    }
    return violation;
}

// The sum of a masked add: a set bit of `boundary` keeps its carry from the next bit.
SOFTNIC_BOTH uint64_t masked_sum(uint64_t word, uint64_t add, uint64_t boundary,
                                 uint32_t num_bits) {
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

// The word after an atomic, given the word before.
SOFTNIC_BOTH uint64_t changed(const Request& request, uint64_t before) {
    if (request.opcode == SY_MLX5_OPCODE_ATOMIC_FA)
        return before + request.add;
    if (request.opcode == SY_MLX5_OPCODE_ATOMIC_CS)
        return before == request.compare ? request.add : before;
    return masked_sum(before, request.add, request.compare, width_of(request) * 8);
}

// The bytes that land for the word before: narrow ones big-endian, wide ones in the processor's order.
SOFTNIC_BOTH uint64_t answer_of(const Request& request, uint64_t before) {
    return width_of(request) == 4 ? swap(static_cast<uint32_t>(before)) : before;
}

// The last word of a completion but one, and the last.
SOFTNIC_BOTH uint64_t tail_of(const Queue& queue, uint32_t opcode, uint64_t position,
                              uint64_t cq_index, bool is_error) {
    const uint32_t owner = !queue.is_collapsed && (cq_index & queue.cq_depth) != 0 ? 1 : 0;
    const uint32_t status = is_error ? SY_MLX5_CQE_REQ_ERROR : SY_MLX5_CQE_REQ;
    const uint32_t counter = static_cast<uint32_t>(position & 0xffff);
    const uint32_t last = counter >> 8 | (counter & 0xff) << 8 | (status << 4 | owner) << 24;
    return static_cast<uint64_t>(last) << 32 | swap(opcode << 24 | queue.qpn);
}

// The same of the peer's completion of a receive: with immediate data, or flushed.
SOFTNIC_BOTH uint64_t receive_tail_of(const Queue& queue, uint64_t num_received, bool is_error) {
    Queue ring = {};
    ring.cq_depth = queue.recv_cq_depth;
    ring.qpn = queue.recv_qpn;
    const uint64_t request = tail_of(ring, 0, num_received, num_received, false);
    const uint64_t status = is_error ? SY_MLX5_CQE_RESP_ERROR : SY_MLX5_CQE_RESP_WRITE_IMM;
    return request | status << 60;
}

} // namespace softnic
