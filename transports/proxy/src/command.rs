//! Commands: their bits, and their possible errors.
//!
//! A kernel writes the cells of a lane, but other code that reaches the memory may write them, too. A cell is
//! copied once and decoded from the copy. Every field is checked here or against the peer's limits before the
//! command is executed.

use thiserror::Error;

use crate::abi::{
    MAX_BYTES, OFFSET_SHIFT, OPCODE_SHIFT, RawCommand, SOURCE_SHIFT, VALUE_SHIFT, WINDOW_SHIFT,
};

/// Operation of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Source memory to the peer.
    Put = 1,
    /// The peer's memory to source memory.
    Get = 2,
    /// Adds to a 64-bit word of the peer, after all earlier puts.
    Add = 3,
    /// Sets a 64-bit word of the peer that only this side writes, likewise.
    Signal = 4,
    /// Is over when all earlier operations have reached the peer's memory.
    Quiet = 5,
    /// Orders all earlier operations before all later ones.
    Fence = 6,
    /// Wakes the thread that sleeps on the word.
    Wake = 7,
    /// Does nothing, in its turn.
    Nop = 8,
}

impl Opcode {
    const fn of(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Put,
            2 => Self::Get,
            3 => Self::Add,
            4 => Self::Signal,
            5 => Self::Quiet,
            6 => Self::Fence,
            7 => Self::Wake,
            8 => Self::Nop,
            _ => return None,
        })
    }
}

/// A command, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// The operation.
    pub opcode: Opcode,
    /// Target at the peer: 0 is its slot.
    pub window: u8,
    /// Region of this side that is read or written.
    pub source: u16,
    /// Offset at the peer, bytes.
    pub offset: u32,
    /// Bytes of a put or get.
    pub num_bytes: u32,
    /// Offset in the source, bytes.
    pub source_offset: u32,
    /// Value of an add or signal.
    pub value: u64,
}

/// Error of a command. The codes are `SY_PROXY_ERROR_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum BadCommand {
    /// No such opcode.
    #[error("opcode {opcode} is unknown: expected 1 to 8")]
    Opcode { opcode: u8 },
    /// No such window.
    #[error("window {window} is unknown: the peer has {num_windows}")]
    Window {
        window: u8,
        /// Windows of the peer.
        num_windows: usize,
    },
    /// No such source.
    #[error("source {source_idx} is unknown: {num_sources} are registered")]
    Source { source_idx: u16, num_sources: usize },
    /// Beyond the peer's memory.
    #[error("{num_bytes} bytes at offset {offset} leave the peer's window of {window_bytes} bytes")]
    RemoteRange {
        offset: u32,
        num_bytes: u32,
        /// Bytes of the window.
        window_bytes: u64,
    },
    /// Beyond the source.
    #[error(
        "{num_bytes} bytes at offset {offset} leave source {source_idx} of {source_bytes} bytes"
    )]
    SourceRange {
        /// Name of the field.
        source_idx: u16,
        offset: u32,
        num_bytes: u32,
        /// Bytes of the source.
        source_bytes: u64,
    },
    /// A word that is not aligned.
    #[error("the word at offset {offset} is not aligned to 8 bytes")]
    Misaligned { offset: u32 },
    /// A command of another lap.
    #[error(
        "the cell holds lap {found}, expected {expected} or the one before: written out of turn, or over an unread command"
    )]
    Lap { found: u8, expected: u8 },
    /// Bits that must be zero.
    #[error("bits that must be 0 are set: {first:#018x}, {second:#018x}")]
    Reserved { first: u64, second: u64 },
    /// The window does not support the operation.
    #[error("window {window} does not take {opcode:?}")]
    Unsupported {
        /// Name of the field.
        window: u8,
        opcode: Opcode,
    },
}

impl BadCommand {
    /// `SY_PROXY_ERROR_*`
    #[must_use]
    pub const fn code(&self) -> u8 {
        match self {
            Self::Opcode { .. } => 1,
            Self::Window { .. } => 2,
            Self::Source { .. } => 3,
            Self::RemoteRange { .. } => 4,
            Self::SourceRange { .. } => 5,
            Self::Misaligned { .. } => 6,
            Self::Lap { .. } => 7,
            Self::Reserved { .. } => 8,
            Self::Unsupported { .. } => 9,
        }
    }
}

/// The transport refused a command, or the peer is gone.
pub const ERROR_POST: u8 = 10;
/// A command was not over within the limit.
pub const ERROR_STALLED: u8 = 11;
/// The peer or the proxy was closed.
pub const ERROR_CLOSED: u8 = 12;

/// `sy_proxy_lane_words.error`
#[must_use]
pub const fn error_word(code: u8, opcode: u8, index: u64) -> u64 {
    code as u64 | (opcode as u64) << 8 | index << 16
}

/// Lap of the command with this number, in a ring of `1 << depth_shift` cells. Zeroed memory is lap 0.
#[inline]
#[must_use]
pub const fn lap_of(index: u64, depth_shift: u32) -> u8 {
    ((index >> depth_shift) + 1) as u8
}

/// Content of a cell when the command of lap `lap` is due there.
#[inline]
pub fn decode_cell(raw: RawCommand, lap: u8) -> Result<Option<Command>, BadCommand> {
    let found = raw.first as u8;
    if found != lap {
        // The last content is of the lap before.
        return if found == lap.wrapping_sub(1) {
            Ok(None)
        } else {
            Err(BadCommand::Lap { found, expected: lap })
        };
    }
    if (raw.second ^ u64::from(lap)) & 1 != 0 {
        // The other half is still under way.
        return Ok(None);
    }
    Command::decode(raw).map(Some)
}

impl Command {
    /// A command with all other fields 0.
    #[must_use]
    pub const fn new(opcode: Opcode) -> Self {
        Self { opcode, window: 0, source: 0, offset: 0, num_bytes: 0, source_offset: 0, value: 0 }
    }

    /// A put or get.
    #[must_use]
    pub const fn transfer(
        opcode: Opcode,
        offset: u32,
        source: u16,
        source_offset: u32,
        num_bytes: u32,
    ) -> Self {
        Self { source, offset, num_bytes, source_offset, ..Self::new(opcode) }
    }

    /// An add, signal or wake.
    #[must_use]
    pub const fn word(opcode: Opcode, offset: u32, value: u64) -> Self {
        Self { offset, value, ..Self::new(opcode) }
    }

    /// Bits of the command, for the given lap.
    #[inline]
    #[must_use]
    pub fn encode(&self, lap: u8) -> RawCommand {
        let lap = u64::from(lap);
        let first = lap
            | (self.opcode as u64) << OPCODE_SHIFT
            | u64::from(self.source) << SOURCE_SHIFT
            | u64::from(self.window) << WINDOW_SHIFT
            | u64::from(self.offset) << OFFSET_SHIFT;
        match self.opcode {
            Opcode::Put | Opcode::Get => RawCommand {
                first,
                second: lap & 1
                    | u64::from(self.num_bytes & MAX_BYTES) << 1
                    | u64::from(self.source_offset) << 32,
            },
            Opcode::Add | Opcode::Signal => RawCommand {
                first: first | self.value >> 63 << VALUE_SHIFT,
                second: lap & 1 | self.value << 1,
            },
            _ => RawCommand { first, second: lap & 1 },
        }
    }

    /// The fields of a command whose lap was checked.
    #[inline]
    fn decode(raw: RawCommand) -> Result<Self, BadCommand> {
        let RawCommand { first, second } = raw;
        let code = (first >> OPCODE_SHIFT & 0xf) as u8;
        let opcode = Opcode::of(code).ok_or(BadCommand::Opcode { opcode: code })?;
        let mut command = Self::new(opcode);
        command.source = (first >> SOURCE_SHIFT & 0x7ff) as u16;
        command.window = (first >> WINDOW_SHIFT) as u8;
        command.offset = (first >> OFFSET_SHIFT) as u32;
        let high = first >> VALUE_SHIFT & 1;
        let is_clean = match opcode {
            Opcode::Put | Opcode::Get => {
                command.num_bytes = (second >> 1) as u32 & MAX_BYTES;
                command.source_offset = (second >> 32) as u32;
                high == 0
            }
            Opcode::Add | Opcode::Signal => {
                command.value = second >> 1 | high << 63;
                command.source == 0
            }
            Opcode::Wake => high == 0 && command.source == 0 && second >> 1 == 0,
            Opcode::Quiet | Opcode::Fence | Opcode::Nop => {
                high == 0 && command.source == 0 && second >> 1 == 0 && command.offset == 0
            }
        };
        if is_clean { Ok(command) } else { Err(BadCommand::Reserved { first, second }) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn commands() -> impl Strategy<Value = Command> {
        let fields =
            (1u8..=8, any::<u8>(), 0u16..2048, any::<u32>(), any::<[u32; 2]>(), any::<u64>());
        fields.prop_map(|(opcode, window, source, offset, [bytes, source_offset], value)| {
            let opcode = Opcode::of(opcode).unwrap();
            let base = Command { window, ..Command::new(opcode) };
            match opcode {
                Opcode::Put | Opcode::Get => {
                    Command { source, offset, num_bytes: bytes & MAX_BYTES, source_offset, ..base }
                }
                Opcode::Add | Opcode::Signal => Command { offset, value, ..base },
                Opcode::Wake => Command { offset, ..base },
                Opcode::Quiet | Opcode::Fence | Opcode::Nop => base,
            }
        })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(command in commands(), lap: u8) {
            prop_assert_eq!(decode_cell(command.encode(lap), lap), Ok(Some(command)));
            // Half of a command beside half of the lap before is no command, whichever half it is.
            let before = Command::word(Opcode::Add, 8, u64::MAX).encode(lap.wrapping_sub(1));
            let new = command.encode(lap);
            let halves = [
                RawCommand { first: new.first, ..before },
                RawCommand { second: new.second, ..before },
            ];
            for half in halves {
                prop_assert_eq!(decode_cell(half, lap), Ok(None));
            }
        }

        #[test]
        fn any_bits_are_a_command_or_named(first: u64, second: u64, lap: u8) {
            let raw = RawCommand { first: first & !0xff | u64::from(lap), second };
            match decode_cell(raw, lap) {
                Ok(Some(command)) => prop_assert_eq!(command.encode(lap), raw),
                Ok(None) => prop_assert_ne!((second ^ u64::from(lap)) & 1, 0),
                Err(error) => {
                    prop_assert!((1..=9).contains(&error.code()));
                    prop_assert!(!error.to_string().is_empty());
                }
            }
        }
    }

    #[test]
    fn zeroed_memory_holds_no_command() {
        assert_eq!(decode_cell(RawCommand::default(), lap_of(0, 4)), Ok(None));
        assert_eq!(lap_of(15, 4), 1);
        assert_eq!(lap_of(16, 4), 2);
        assert_eq!(lap_of(255 * 16, 4), 0);
        let error = decode_cell(RawCommand { first: 5, second: 1 }, 3);
        assert_eq!(error, Err(BadCommand::Lap { found: 5, expected: 3 }));
    }
}
