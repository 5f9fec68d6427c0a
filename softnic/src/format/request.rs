//! Work requests: a control segment, and the segments that their operation needs.

use thiserror::Error;

use super::{
    Atomic, BLOCK_BYTES, CE_ALWAYS, CE_MASK, FM_FENCE, FM_MASK, Local, Operation, Remote,
    SEGMENT_BYTES, Source, be32, be64, opcode,
};

/// A work request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wqe {
    /// Queue pair.
    pub qpn: u32,
    /// Index of its first block, modulo 65,536.
    pub index: u16,
    /// Fence mode, completion mode, solicited.
    pub flags: u8,
    /// The operation.
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
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum BadWqe {
    /// Unknown code.
    #[error("opcode {opcode:#04x} with modifier {opmod:#04x} is unknown")]
    Opcode { opcode: u8, opmod: u8 },
    /// A number of segments that the code cannot have.
    #[error("{found} segments do not fit its opcode")]
    Segments { found: u32 },
    /// Reserved bits are set.
    #[error("reserved bits are set in {field}")]
    Reserved {
        /// Segment or field that holds the bits.
        field: &'static str,
    },
    /// A READ cannot be inline.
    #[error("a READ has inline data")]
    InlineRead,
    /// Inline data longer than its segments.
    #[error("{found} inline bytes do not fit the request's {room}")]
    InlineLength { found: u32, room: usize },
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

/// Reads the segments that follow the address segment of a read or write.
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

const SE: u8 = 0x02;
const INLINE: u32 = 1 << 31;
const OPMOD_MASKED_4: u8 = 0x08;
const OPMOD_MASKED_8: u8 = 0x09;
