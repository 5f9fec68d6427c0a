//! mlx5 work requests, completions and doorbells, in the format that [`kernels/include/switchyard/comm/mlx5`]
//! builds and reads in C++. Everything wider than a byte is big-endian in memory.
//!
//! [`kernels/include/switchyard/comm/mlx5`]: https://github.com/switchyard-moe/switchyard/tree/main/kernels/include/switchyard/comm/mlx5

mod completion;
mod operation;
mod request;

pub use self::completion::{Cqe, CqeKind, Syndrome};
pub use self::operation::{Atomic, Local, Operation, Remote, Source};
pub use self::request::{BadWqe, Head, Wqe};

/// Bytes of a basic block, the unit in which send queues are counted.
pub const BLOCK_BYTES: usize = 64;
/// Bytes of a segment, the unit in which requests are counted.
pub const SEGMENT_BYTES: usize = 16;
/// Bytes of a completion.
pub const CQE_BYTES: usize = 64;
/// Least and most blocks of a send queue.
pub const DEPTHS: std::ops::RangeInclusive<u32> = 128..=32768;
/// Most bytes of one message.
pub const MAX_MESSAGE_BYTES: u32 = 1 << 30;
/// Byte that completion queues are filled with before use.
pub const CQE_FILL: u8 = 0xff;
/// Most inline bytes of a request of one block.
pub const MAX_INLINE_BYTES: usize = 28;

/// Bytes of a receive that takes no bytes: one data segment, which ends the list.
pub const RECEIVE_BYTES: usize = SEGMENT_BYTES;

/// A receive for immediate data, at the length of a segment.
#[must_use]
pub fn empty_receive() -> [u8; RECEIVE_BYTES] {
    let mut bytes = [0; RECEIVE_BYTES];
    bytes[4..8].copy_from_slice(&INVALID_LKEY.to_be_bytes());
    bytes
}

/// Local key of the segment that ends a list.
const INVALID_LKEY: u32 = 0x100;

/// Codes of work requests.
pub mod opcode {
    #![allow(missing_docs, reason = "the names are those of the format")]
    pub const NOP: u8 = 0x00;
    pub const WRITE: u8 = 0x08;
    pub const WRITE_IMM: u8 = 0x09;
    pub const READ: u8 = 0x10;
    pub const ATOMIC_CS: u8 = 0x11;
    pub const ATOMIC_FA: u8 = 0x12;
    pub const MASKED_CS: u8 = 0x14;
    pub const MASKED_FA: u8 = 0x15;
    pub const DUMP: u8 = 0x23;
}

/// Fence modes: bits 7:5 of `fm_ce_se`.
pub const FM_MASK: u8 = 0xe0;
/// Waits for earlier READs and atomics.
pub const FM_FENCE: u8 = 0x40;
/// Completion modes: bits 3:2 of `fm_ce_se`.
pub const CE_MASK: u8 = 0x0c;
/// A completion in any case.
pub const CE_ALWAYS: u8 = 0x08;

/// The doorbell register's word for "all blocks before `end` are written".
#[must_use]
pub fn doorbell_word(qpn: u32, end: u64) -> u64 {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&(((end & 0xffff) as u32) << 8).to_be_bytes());
    bytes[4..].copy_from_slice(&(qpn << 8).to_be_bytes());
    u64::from_ne_bytes(bytes)
}

/// Queue pair and end that a doorbell word stands for. Drivers write either the end and no segments,
/// or the start of the last request and its segments: both are understood.
#[must_use]
pub fn decode_doorbell(word: u64) -> (u32, u16) {
    let bytes = word.to_ne_bytes();
    let (first, second) = (be32(&bytes[..4]), be32(&bytes[4..]));
    let num_blocks = (second & 0x3f).div_ceil(4) as u16;
    (second >> 8, ((first >> 8) as u16).wrapping_add(num_blocks))
}

fn be32(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).fold(0, |value, byte| value << 8 | u32::from(*byte))
}

fn be64(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).fold(0, |value, byte| value << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_doorbell_spellings_mean_the_same() {
        assert_eq!(doorbell_word(0x1a7, 0x51235).to_ne_bytes(), [0, 0x12, 0x35, 0, 0, 1, 0xa7, 0]);
        assert_eq!(decode_doorbell(doorbell_word(0x1a7, 0x1235)), (0x1a7, 0x1235));
        let last = [0, 0x12, 0x34, 8, 0, 1, 0xa7, 3];
        assert_eq!(decode_doorbell(u64::from_ne_bytes(last)), (0x1a7, 0x1235));
        let two_blocks = [0, 0xff, 0xff, 8, 0, 1, 0xa7, 5];
        assert_eq!(decode_doorbell(u64::from_ne_bytes(two_blocks)), (0x1a7, 1));
    }
}
