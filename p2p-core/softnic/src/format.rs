//! mlx5 work requests, completions and doorbells: what [`kernels/include/switchyard/comm/mlx5`] builds
//! and reads in C++, said again in Rust. Everything wider than a byte is big-endian in memory.
//!
//! [`kernels/include/switchyard/comm/mlx5`]: https://github.com/switchyard-moe/switchyard/tree/main/kernels/include/switchyard/comm/mlx5

use thiserror::Error;

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
/// What completion queues are filled with before use.
pub const CQE_FILL: u8 = 0xff;
/// Most inline bytes of a request of one block.
pub const MAX_INLINE_BYTES: usize = 28;

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
const SE: u8 = 0x02;
const INLINE: u32 = 1 << 31;
const OPMOD_MASKED_4: u8 = 0x08;
const OPMOD_MASKED_8: u8 = 0x09;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Syndrome {
    /// A length beyond what the queue or the peer takes.
    LocalLength = 0x01,
    /// The request makes no sense to the NIC.
    LocalQpOp = 0x02,
    /// A local key, range or permission.
    LocalProtection = 0x04,
    /// Not executed: the queue had failed before.
    Flushed = 0x05,
    /// A memory window.
    MemoryWindowBind = 0x06,
    /// The peer's answer makes no sense.
    BadResponse = 0x10,
    /// Local memory could not be written.
    LocalAccess = 0x11,
    /// The peer's NIC does not take such a request.
    RemoteInvalid = 0x12,
    /// A remote key, range or permission.
    RemoteAccess = 0x13,
    /// The peer's NIC could not do it.
    RemoteOp = 0x14,
    /// Nobody answers.
    RetryExceeded = 0x15,
    /// The peer has posted no receive.
    RnrExceeded = 0x16,
    /// The peer gave up.
    RemoteAborted = 0x22,
}

impl Syndrome {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::LocalLength,
        Self::LocalQpOp,
        Self::LocalProtection,
        Self::Flushed,
        Self::MemoryWindowBind,
        Self::BadResponse,
        Self::LocalAccess,
        Self::RemoteInvalid,
        Self::RemoteAccess,
        Self::RemoteOp,
        Self::RetryExceeded,
        Self::RnrExceeded,
        Self::RemoteAborted,
    ];

    /// The syndrome with this code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|syndrome| *syndrome as u8 == code)
    }
}

/// Local memory of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Local {
    /// First byte.
    pub address: u64,
    /// Local key.
    pub lkey: u32,
    /// Bytes.
    pub num_bytes: u32,
}

/// The peer's memory of a request; the length is that of the local part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// First byte, in the peer's address space.
    pub address: u64,
    /// Remote key.
    pub rkey: u32,
}

/// Where a write's bytes come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Out of memory, one piece after the other.
    Gather(Vec<Local>),
    /// Out of the request.
    Inline(Vec<u8>),
}

impl Source {
    /// Bytes in all.
    #[must_use]
    pub fn num_bytes(&self) -> u64 {
        match self {
            Self::Gather(pieces) => pieces.iter().map(|piece| u64::from(piece.num_bytes)).sum(),
            Self::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// What an atomic does with a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Atomic {
    /// Adds to 8 bytes.
    Add8(u64),
    /// Adds to 4 bytes; a set bit of the second ends the carry behind it.
    MaskedAdd4(u32, u32),
    /// Adds to 8 bytes; likewise.
    MaskedAdd8(u64, u64),
    /// Stores `swap` over 8 bytes that are `compare`.
    Swap8 {
        /// New value.
        swap: u64,
        /// Expected value.
        compare: u64,
    },
    /// The same under masks.
    MaskedSwap8 {
        /// New value.
        swap: u64,
        /// Expected value.
        compare: u64,
        /// Bits to store.
        swap_mask: u64,
        /// Bits to compare.
        compare_mask: u64,
    },
}

impl Atomic {
    /// Bytes of the word.
    #[must_use]
    pub const fn num_bytes(self) -> u32 {
        if matches!(self, Self::MaskedAdd4(..)) { 4 } else { 8 }
    }

    /// The word after, given the word before.
    #[must_use]
    pub const fn apply(self, word: u64) -> u64 {
        // Without carries across marked bits: those are added without carry, the others with it.
        const fn add(word: u64, value: u64, boundary: u64) -> u64 {
            (word & !boundary).wrapping_add(value & !boundary) ^ ((word ^ value) & boundary)
        }
        match self {
            Self::Add8(value) => word.wrapping_add(value),
            Self::MaskedAdd4(value, boundary) => {
                add(word, value as u64, boundary as u64) & 0xffff_ffff
            }
            Self::MaskedAdd8(value, boundary) => add(word, value, boundary),
            Self::Swap8 { swap, compare } => {
                if word == compare {
                    swap
                } else {
                    word
                }
            }
            Self::MaskedSwap8 { swap, compare, swap_mask, compare_mask } => {
                if (word ^ compare) & compare_mask == 0 {
                    (word & !swap_mask) | (swap & swap_mask)
                } else {
                    word
                }
            }
        }
    }
}

/// What a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Nothing.
    Nop,
    /// Reads local memory and discards it.
    Dump(Local),
    /// Copies to the peer.
    Write(Remote, Source),
    /// Copies to the peer, and puts a completion into its queue.
    WriteImm(Remote, Source, u32),
    /// Copies from the peer.
    Read(Remote, Vec<Local>),
    /// Changes a word of the peer; its old value lands locally.
    Atomic(Remote, Atomic, Local),
}

/// A work request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wqe {
    /// Queue pair.
    pub qpn: u32,
    /// Index of its first block, modulo 65,536.
    pub index: u16,
    /// Fence mode, completion mode, solicited.
    pub flags: u8,
    /// What it asks for.
    pub operation: Operation,
}

impl Wqe {
    /// Whether a successful one gives a completion.
    #[must_use]
    pub const fn is_signalled(&self) -> bool {
        self.flags & CE_MASK >= CE_ALWAYS
    }

    /// Whether it waits for earlier READs and atomics.
    #[must_use]
    pub const fn is_fenced(&self) -> bool {
        self.flags & FM_MASK >= FM_FENCE
    }

    /// Its bytes, in whole blocks.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(2 * BLOCK_BYTES);
        let (code, opmod, imm) = match &self.operation {
            Operation::Nop => (opcode::NOP, 0, 0),
            Operation::Dump(local) => {
                put_data(&mut body, local);
                (opcode::DUMP, 0, 0)
            }
            Operation::Write(remote, source) => {
                put_remote(&mut body, remote);
                put_source(&mut body, source);
                (opcode::WRITE, 0, 0)
            }
            Operation::WriteImm(remote, source, imm) => {
                put_remote(&mut body, remote);
                put_source(&mut body, source);
                (opcode::WRITE_IMM, 0, *imm)
            }
            Operation::Read(remote, pieces) => {
                put_remote(&mut body, remote);
                pieces.iter().for_each(|piece| put_data(&mut body, piece));
                (opcode::READ, 0, 0)
            }
            Operation::Atomic(remote, atomic, local) => {
                put_remote(&mut body, remote);
                let codes = put_atomic(&mut body, *atomic);
                put_data(&mut body, local);
                (codes.0, codes.1, 0)
            }
        };
        let num_segments = 1 + body.len().div_ceil(SEGMENT_BYTES);
        let mut bytes = Vec::with_capacity(num_segments.div_ceil(4) * BLOCK_BYTES);
        let head = u32::from(opmod) << 24 | u32::from(self.index) << 8 | u32::from(code);
        bytes.extend(head.to_be_bytes());
        bytes.extend((self.qpn << 8 | num_segments as u32).to_be_bytes());
        bytes.extend([0, 0, 0, self.flags]);
        bytes.extend(imm.to_be_bytes());
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        bytes
    }

    /// Reads a request from its segments. `bytes` are as many as [`Head::num_segments`] says.
    ///
    /// # Errors
    /// [`BadWqe`].
    pub fn decode(bytes: &[u8]) -> Result<Self, BadWqe> {
        let head =
            Head::decode(bytes).ok_or(BadWqe::Segments { found: bytes.len() as u32 / 16 })?;
        if bytes.len() != head.num_segments as usize * SEGMENT_BYTES {
            return Err(BadWqe::Segments { found: head.num_segments });
        }
        head.check()?;
        let body = &bytes[SEGMENT_BYTES..];
        let segments = |wanted: usize| {
            if body.len() == wanted * SEGMENT_BYTES {
                Ok(())
            } else {
                Err(BadWqe::Segments { found: head.num_segments })
            }
        };
        let operation = match head.opcode {
            // Some drivers fill nothing but the control segment of a NOP that claims two.
            opcode::NOP if head.num_segments <= 2 => Operation::Nop,
            opcode::DUMP => {
                segments(1)?;
                Operation::Dump(get_data(&body[..16])?)
            }
            opcode::WRITE => Operation::Write(get_remote(body)?, get_source(body)?),
            opcode::WRITE_IMM => {
                Operation::WriteImm(get_remote(body)?, get_source(body)?, head.imm)
            }
            opcode::READ => match get_source(body)? {
                Source::Gather(pieces) => Operation::Read(get_remote(body)?, pieces),
                Source::Inline(_) => return Err(BadWqe::InlineRead),
            },
            opcode::ATOMIC_FA => {
                segments(3)?;
                get_atomic(body, Atomic::Add8(be64(&body[16..24])))?
            }
            opcode::ATOMIC_CS => {
                segments(3)?;
                let (swap, compare) = (be64(&body[16..24]), be64(&body[24..32]));
                get_atomic(body, Atomic::Swap8 { swap, compare })?
            }
            opcode::MASKED_FA if head.opmod == OPMOD_MASKED_4 => {
                segments(3)?;
                if body[24..32] != [0; 8] {
                    return Err(BadWqe::Reserved { field: "bytes 8 to 15 of the atomic segment" });
                }
                get_atomic(body, Atomic::MaskedAdd4(be32(&body[16..20]), be32(&body[20..24])))?
            }
            opcode::MASKED_FA => {
                segments(3)?;
                get_atomic(body, Atomic::MaskedAdd8(be64(&body[16..24]), be64(&body[24..32])))?
            }
            opcode::MASKED_CS if head.opmod == OPMOD_MASKED_8 => {
                segments(4)?;
                let atomic = Atomic::MaskedSwap8 {
                    swap: be64(&body[16..24]),
                    compare: be64(&body[24..32]),
                    swap_mask: be64(&body[32..40]),
                    compare_mask: be64(&body[40..48]),
                };
                get_atomic(body, atomic)?
            }
            opcode => return Err(BadWqe::Opcode { opcode, opmod: head.opmod }),
        };
        Ok(Self { qpn: head.qpn, index: head.index, flags: head.flags, operation })
    }
}

/// The control segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Code.
    pub opcode: u8,
    /// Modifier.
    pub opmod: u8,
    /// Index of the first block.
    pub index: u16,
    /// Queue pair.
    pub qpn: u32,
    /// Segments, this one included.
    pub num_segments: u32,
    /// Fence mode, completion mode, solicited.
    pub flags: u8,
    /// Immediate data.
    pub imm: u32,
    reserved_bits: bool,
}

impl Head {
    /// The control segment at the start of `bytes`. `None` if they are fewer than 16.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..SEGMENT_BYTES)?;
        let (first, second) = (be32(&bytes[0..4]), be32(&bytes[4..8]));
        Some(Self {
            opcode: first as u8,
            opmod: (first >> 24) as u8,
            index: (first >> 8) as u16,
            qpn: second >> 8,
            num_segments: second & 0x3f,
            flags: bytes[11],
            imm: be32(&bytes[12..16]),
            // Signature and stream channel are unused here; DS has 6 bits.
            reserved_bits: bytes[8..11] != [0; 3]
                || second & 0xc0 != 0
                || bytes[11] & !(FM_MASK | CE_MASK | SE) != 0,
        })
    }

    /// Blocks that the request takes.
    #[must_use]
    pub const fn num_blocks(&self) -> u32 {
        self.num_segments.div_ceil(4)
    }

    fn check(&self) -> Result<(), BadWqe> {
        if self.reserved_bits {
            return Err(BadWqe::Reserved { field: "the control segment" });
        }
        let is_masked = matches!(self.opcode, opcode::MASKED_FA | opcode::MASKED_CS);
        let is_known = if is_masked {
            matches!(self.opmod, OPMOD_MASKED_4 | OPMOD_MASKED_8)
        } else {
            self.opmod == 0
        };
        if is_known {
            Ok(())
        } else {
            Err(BadWqe::Opcode { opcode: self.opcode, opmod: self.opmod })
        }
    }
}

/// A request that the NIC cannot execute.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BadWqe {
    /// Unknown code.
    #[error("opcode {opcode:#04x} with modifier {opmod:#04x} is unknown")]
    Opcode {
        /// Code.
        opcode: u8,
        /// Modifier.
        opmod: u8,
    },
    /// A number of segments that the code cannot have.
    #[error("{found} segments are not what its opcode has")]
    Segments {
        /// Found.
        found: u32,
    },
    /// Reserved bits are set.
    #[error("reserved bits are set in {field}")]
    Reserved {
        /// Where.
        field: &'static str,
    },
    /// A READ cannot be inline.
    #[error("a READ has inline data")]
    InlineRead,
    /// Inline data longer than its segments.
    #[error("{found} inline bytes do not fit the request's {room}")]
    InlineLength {
        /// Found.
        found: u32,
        /// Bytes there.
        room: usize,
    },
}

/// A completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cqe {
    /// Success, or why not.
    pub status: Result<CqeKind, Syndrome>,
    /// Queue pair.
    pub qpn: u32,
    /// Code of the request; 0 in a receive completion.
    pub opcode: u8,
    /// Index of the request's first block, or of the receive.
    pub counter: u16,
    /// Bytes moved.
    pub num_bytes: u32,
}

/// Kinds of successful completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CqeKind {
    /// Of a posted request.
    Request,
    /// Of a write that a peer sent with this immediate data.
    WriteImm(u32),
}

impl Cqe {
    /// Its bytes, with the given owner bit.
    #[must_use]
    pub fn encode(&self, owner: bool) -> [u8; CQE_BYTES] {
        let mut bytes = [0; CQE_BYTES];
        let code = match self.status {
            Ok(CqeKind::Request) => 0x0,
            Ok(CqeKind::WriteImm(imm)) => {
                bytes[36..40].copy_from_slice(&imm.to_be_bytes());
                0x1
            }
            Err(syndrome) => {
                bytes[55] = syndrome as u8;
                0xd
            }
        };
        if self.status.is_ok() {
            bytes[44..48].copy_from_slice(&self.num_bytes.to_be_bytes());
        }
        let opcode_qpn = u32::from(self.opcode) << 24 | self.qpn;
        bytes[56..60].copy_from_slice(&opcode_qpn.to_be_bytes());
        bytes[60..62].copy_from_slice(&self.counter.to_be_bytes());
        bytes[63] = code << 4 | u8::from(owner);
        bytes
    }

    /// The completion in `bytes`, and its owner bit. `None` if there is none, or of an unknown kind.
    #[must_use]
    pub fn decode(bytes: &[u8; CQE_BYTES]) -> Option<(Self, bool)> {
        let status = match bytes[63] >> 4 {
            0x0 => Ok(CqeKind::Request),
            0x1 => Ok(CqeKind::WriteImm(be32(&bytes[36..40]))),
            0xd | 0xe => Err(Syndrome::from_code(bytes[55])?),
            _ => return None,
        };
        let opcode_qpn = be32(&bytes[56..60]);
        let cqe = Self {
            status,
            qpn: opcode_qpn & 0xff_ffff,
            opcode: (opcode_qpn >> 24) as u8,
            counter: u16::from_be_bytes([bytes[60], bytes[61]]),
            num_bytes: if status.is_ok() { be32(&bytes[44..48]) } else { 0 },
        };
        Some((cqe, bytes[63] & 1 != 0))
    }
}

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

fn put_remote(body: &mut Vec<u8>, remote: &Remote) {
    body.extend(remote.address.to_be_bytes());
    body.extend(remote.rkey.to_be_bytes());
    body.extend([0; 4]);
}

fn put_data(body: &mut Vec<u8>, local: &Local) {
    body.extend((local.num_bytes & !INLINE).to_be_bytes());
    body.extend(local.lkey.to_be_bytes());
    body.extend(local.address.to_be_bytes());
}

fn put_source(body: &mut Vec<u8>, source: &Source) {
    match source {
        Source::Gather(pieces) => pieces.iter().for_each(|piece| put_data(body, piece)),
        Source::Inline(bytes) => {
            body.extend((bytes.len() as u32 | INLINE).to_be_bytes());
            body.extend(bytes);
            body.resize(body.len().next_multiple_of(SEGMENT_BYTES), 0);
        }
    }
}

fn put_atomic(body: &mut Vec<u8>, atomic: Atomic) -> (u8, u8) {
    match atomic {
        Atomic::Add8(value) => {
            body.extend(value.to_be_bytes());
            body.extend([0; 8]);
            (opcode::ATOMIC_FA, 0)
        }
        Atomic::MaskedAdd4(value, boundary) => {
            body.extend(value.to_be_bytes());
            body.extend(boundary.to_be_bytes());
            body.extend([0; 8]);
            (opcode::MASKED_FA, OPMOD_MASKED_4)
        }
        Atomic::MaskedAdd8(value, boundary) => {
            body.extend(value.to_be_bytes());
            body.extend(boundary.to_be_bytes());
            (opcode::MASKED_FA, OPMOD_MASKED_8)
        }
        Atomic::Swap8 { swap, compare } => {
            body.extend(swap.to_be_bytes());
            body.extend(compare.to_be_bytes());
            (opcode::ATOMIC_CS, 0)
        }
        Atomic::MaskedSwap8 { swap, compare, swap_mask, compare_mask } => {
            for word in [swap, compare, swap_mask, compare_mask] {
                body.extend(word.to_be_bytes());
            }
            (opcode::MASKED_CS, OPMOD_MASKED_8)
        }
    }
}

fn get_remote(body: &[u8]) -> Result<Remote, BadWqe> {
    let segment = body.get(..16).ok_or(BadWqe::Segments { found: 1 })?;
    if segment[12..16] != [0; 4] {
        return Err(BadWqe::Reserved { field: "the address segment" });
    }
    Ok(Remote { address: be64(&segment[..8]), rkey: be32(&segment[8..12]) })
}

fn get_data(segment: &[u8]) -> Result<Local, BadWqe> {
    let num_bytes = be32(&segment[..4]);
    if num_bytes & INLINE != 0 {
        return Err(BadWqe::Reserved { field: "the byte count" });
    }
    Ok(Local { num_bytes, lkey: be32(&segment[4..8]), address: be64(&segment[8..16]) })
}

/// What follows the address segment of a read or write.
fn get_source(body: &[u8]) -> Result<Source, BadWqe> {
    let rest = body.get(16..).ok_or(BadWqe::Segments { found: 1 })?;
    if rest.len() >= 16 && be32(&rest[..4]) & INLINE != 0 {
        let found = be32(&rest[..4]) & !INLINE;
        let room = rest.len() - 4;
        return match rest[4..].get(..found as usize) {
            // The data must also need all its segments.
            Some(bytes) if found as usize + 16 > room => Ok(Source::Inline(bytes.to_vec())),
            _ => Err(BadWqe::InlineLength { found, room }),
        };
    }
    rest.chunks(16).map(get_data).collect::<Result<_, _>>().map(Source::Gather)
}

fn get_atomic(body: &[u8], atomic: Atomic) -> Result<Operation, BadWqe> {
    let local = get_data(&body[body.len() - 16..])?;
    Ok(Operation::Atomic(get_remote(body)?, atomic, local))
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
    fn carries_stop_at_boundaries() {
        // Against an addition field by field.
        let seed = rand::random::<u64>();
        println!("seed {seed}");
        let mut rng: rand::rngs::SmallRng = rand::SeedableRng::seed_from_u64(seed);
        use rand::RngExt;
        for _ in 0..2000 {
            let (word, value): (u64, u64) = (rng.random(), rng.random());
            let boundary = rng.random::<u64>() & rng.random::<u64>() & rng.random::<u64>();
            let (mut expected, mut carry) = (0u64, 0u64);
            for bit in 0..64 {
                let sum = (word >> bit & 1) + (value >> bit & 1) + carry;
                expected |= (sum & 1) << bit;
                carry = if boundary >> bit & 1 != 0 { 0 } else { sum >> 1 };
            }
            assert_eq!(Atomic::MaskedAdd8(value, boundary).apply(word), expected);
            let narrow = Atomic::MaskedAdd4(value as u32, boundary as u32);
            assert_eq!(narrow.apply(word & 0xffff_ffff), expected & 0xffff_ffff);
        }
        assert_eq!(Atomic::MaskedAdd8(0b1010, u64::MAX).apply(0b0110), 0b1100);
    }

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
