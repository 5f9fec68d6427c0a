// Work requests of one basic block each, built in registers and stored segment by segment.
#pragma once

#include <cstdint>

#include "switchyard/comm/mlx5/memory.h"

namespace switchyard::comm::mlx5 {

// The words of a block as they stand in memory. One block per request keeps the index that a
// completion names, which is that of the first block, next to the index of the following request.
struct Wqe {
    uint32_t words[16];
    uint32_t num_segments;
};

// A request that may be none: then it is a NOP, and post publishes nothing of the group that it belongs to.
struct CheckedWqe : Wqe {
    bool is_good;
};

// Fields of the control segment besides the opcode.
struct Control {
    uint32_t qpn;
    uint32_t index; // of the request in the queue; 16 bits are used
    uint32_t flags; // SY_MLX5_CE_* | SY_MLX5_FM_*
};

struct LocalBuffer {
    uint64_t address;
    uint32_t lkey;
};

struct RemoteBuffer {
    uint64_t address;
    uint32_t rkey;
};

SY_DEVICE void set_control(Wqe& wqe, const Control& control, uint32_t opcode, uint32_t opmod,
                           uint32_t num_segments, uint32_t imm) {
    wqe.num_segments = num_segments;
    wqe.words[0] = be32(opmod << 24 | (control.index & 0xffff) << 8 | opcode);
    wqe.words[1] = be32(control.qpn << 8 | num_segments);
    // Signature and stream channel are 0; fm_ce_se is the last byte in memory.
    wqe.words[2] = be32(control.flags);
    wqe.words[3] = be32(imm);
}

SY_DEVICE void set_words(Wqe& wqe, uint32_t segment, uint32_t a, uint32_t b, uint32_t c,
                         uint32_t d) {
    wqe.words[segment * 4] = be32(a);
    wqe.words[segment * 4 + 1] = be32(b);
    wqe.words[segment * 4 + 2] = be32(c);
    wqe.words[segment * 4 + 3] = be32(d);
}

SY_DEVICE uint32_t high(uint64_t value) { return static_cast<uint32_t>(value >> 32); }
SY_DEVICE uint32_t low(uint64_t value) { return static_cast<uint32_t>(value); }

SY_DEVICE void set_remote(Wqe& wqe, const RemoteBuffer& remote) {
    set_words(wqe, 1, high(remote.address), low(remote.address), remote.rkey, 0);
}

SY_DEVICE void set_data(Wqe& wqe, uint32_t segment, const LocalBuffer& local, uint32_t num_bytes) {
    set_words(wqe, segment, num_bytes & ~SY_MLX5_INLINE_FLAG, local.lkey, high(local.address),
              low(local.address));
}

SY_DEVICE Wqe make_nop(const Control& control) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_NOP, 0, 1, 0);
    return wqe;
}

// Reads local memory and discards it: completes after earlier writes of the NIC to it have landed.
SY_DEVICE Wqe make_dump(const Control& control, const LocalBuffer& local, uint32_t num_bytes) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_DUMP, 0, 2, 0);
    set_data(wqe, 1, local, num_bytes);
    return wqe;
}

SY_DEVICE Wqe make_write(const Control& control, const LocalBuffer& local,
                         const RemoteBuffer& remote, uint32_t num_bytes) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_WRITE, 0, 3, 0);
    set_remote(wqe, remote);
    set_data(wqe, 2, local, num_bytes);
    return wqe;
}

SY_DEVICE Wqe make_read(const Control& control, const LocalBuffer& local,
                        const RemoteBuffer& remote, uint32_t num_bytes) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_READ, 0, 3, 0);
    set_remote(wqe, remote);
    set_data(wqe, 2, local, num_bytes);
    return wqe;
}

// `imm` arrives at the peer as the same number: it travels big-endian, as the peer's completion has
// it.
SY_DEVICE Wqe make_write_imm(const Control& control, const LocalBuffer& local,
                             const RemoteBuffer& remote, uint32_t num_bytes, uint32_t imm) {
    Wqe wqe;
    // A write without bytes has no data segment.
    set_control(wqe, control, SY_MLX5_OPCODE_WRITE_IMM, 0, num_bytes != 0 ? 3 : 2, imm);
    set_remote(wqe, remote);
    if (num_bytes != 0)
        set_data(wqe, 2, local, num_bytes);
    return wqe;
}

// 4 or 8 bytes, nothing else, out of registers, as they shall stand in the peer's memory.
SY_DEVICE Wqe make_write_inline(const Control& control, const RemoteBuffer& remote, uint64_t value,
                                uint32_t num_bytes) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_WRITE, 0, 3, 0);
    set_remote(wqe, remote);
    wqe.words[8] = be32(num_bytes | SY_MLX5_INLINE_FLAG);
    wqe.words[9] = low(value);
    wqe.words[10] = num_bytes == 8 ? high(value) : 0;
    wqe.words[11] = 0;
    return wqe;
}

// `num_words` consecutive words of 8 bytes, at most 3, that all get `value`.
SY_DEVICE Wqe make_write_inline_words(const Control& control, const RemoteBuffer& remote,
                                      uint64_t value, uint32_t num_words) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_WRITE, 0, num_words > 1 ? 4 : 3, 0);
    set_remote(wqe, remote);
    wqe.words[8] = be32(num_words * 8 | SY_MLX5_INLINE_FLAG);
    for (uint32_t word = 0; word < 6; ++word)
        wqe.words[9 + word] = word / 2 < num_words ? (word % 2 == 0 ? low(value) : high(value)) : 0;
    wqe.words[15] = 0;
    return wqe;
}

// Bytes out of memory. More than SY_MLX5_MAX_INLINE_BYTES fit no block.
SY_DEVICE CheckedWqe make_write_inline_bytes(const Control& control, const RemoteBuffer& remote,
                                             const uint8_t* bytes, uint32_t num_bytes) {
    CheckedWqe wqe;
    wqe.is_good = num_bytes <= SY_MLX5_MAX_INLINE_BYTES;
    if (!wqe.is_good) {
        set_control(wqe, control, SY_MLX5_OPCODE_NOP, 0, 1, 0);
        return wqe;
    }
    const uint32_t num_segments = num_bytes <= 12 ? 3 : 4;
    set_control(wqe, control, SY_MLX5_OPCODE_WRITE, 0, num_segments, 0);
    set_remote(wqe, remote);
    wqe.words[8] = be32(num_bytes | SY_MLX5_INLINE_FLAG);
    for (uint32_t word = 0; word < 7; ++word) {
        uint32_t value = 0;
        for (uint32_t byte = 0; byte < 4; ++byte)
            if (word * 4 + byte < num_bytes)
                value |= static_cast<uint32_t>(bytes[word * 4 + byte]) << byte * 8;
        wqe.words[9 + word] = value;
    }
    return wqe;
}

// The same of an array whose size the compiler checks.
template <uint32_t kNumBytes>
SY_DEVICE Wqe make_write_inline_bytes(const Control& control, const RemoteBuffer& remote,
                                      const uint8_t (&bytes)[kNumBytes]) {
    static_assert(kNumBytes <= SY_MLX5_MAX_INLINE_BYTES, "more bytes than fit a block");
    return make_write_inline_bytes(control, remote, bytes, kNumBytes);
}

// Adds to a 64-bit word of the peer; its old value lands at `local`.
SY_DEVICE Wqe make_fetch_add(const Control& control, const LocalBuffer& local,
                             const RemoteBuffer& remote, uint64_t value) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_ATOMIC_FA, 0, 4, 0);
    set_remote(wqe, remote);
    set_words(wqe, 2, high(value), low(value), 0, 0);
    set_data(wqe, 3, local, 8);
    return wqe;
}

// Adds to a 32-bit word of the peer. A set bit of `boundary` ends the carry behind that bit.
// NOTES: the old value lands big-endian at `local`.
SY_DEVICE Wqe make_masked_fetch_add4(const Control& control, const LocalBuffer& local,
                                     const RemoteBuffer& remote, uint32_t value,
                                     uint32_t boundary) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_MASKED_FA, SY_MLX5_OPMOD_MASKED_4, 4, 0);
    set_remote(wqe, remote);
    set_words(wqe, 2, value, boundary, 0, 0);
    set_data(wqe, 3, local, 4);
    return wqe;
}

SY_DEVICE Wqe make_masked_fetch_add8(const Control& control, const LocalBuffer& local,
                                     const RemoteBuffer& remote, uint64_t value,
                                     uint64_t boundary) {
    Wqe wqe;
    set_control(wqe, control, SY_MLX5_OPCODE_MASKED_FA, SY_MLX5_OPMOD_MASKED_8, 4, 0);
    set_remote(wqe, remote);
    set_words(wqe, 2, high(value), low(value), high(boundary), low(boundary));
    set_data(wqe, 3, local, 8);
    return wqe;
}

SY_DEVICE uint32_t* block_of(const sy_mlx5_qp& qp, uint64_t index) {
    return at_address<uint32_t>(qp.sq + (index & (qp.sq_depth - 1)) * SY_MLX5_BLOCK_BYTES);
}

// Stores the segments that the request has; the NIC reads no others.
template <Scope kScope>
SY_DEVICE void store_wqe(const sy_mlx5_qp& qp, uint64_t index, const Wqe& wqe) {
    uint32_t* block = block_of(qp, index);
    const uint32_t* words = wqe.words;
    st_relaxed_v4<kScope>(block, words[0], words[1], words[2], words[3]);
    if (wqe.num_segments > 1)
        st_relaxed_v4<kScope>(block + 4, words[4], words[5], words[6], words[7]);
    if (wqe.num_segments > 2)
        st_relaxed_v4<kScope>(block + 8, words[8], words[9], words[10], words[11]);
    if (wqe.num_segments > 3)
        st_relaxed_v4<kScope>(block + 12, words[12], words[13], words[14], words[15]);
}

} // namespace switchyard::comm::mlx5
