//! What can be wrong with a frame, and the codes that travel in error frames.

use std::fmt;

use thiserror::Error;

/// A frame that must not be used. The frame is the peer's, so none of this is a local bug unless the
/// variant says so.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame memory cannot even hold a header.
    #[error("frame of {found} bytes, expected at least {expected} bytes for the header")]
    TooSmall {
        /// Bytes of the frame memory.
        found: usize,
        /// Bytes needed.
        expected: usize,
    },
    /// Not a frame of this protocol.
    #[error("frame magic is {found:#010x}, expected {expected:#010x}")]
    Magic {
        /// Value in the header.
        found: u32,
        /// The protocol's value.
        expected: u32,
    },
    /// A layout that this build does not speak.
    #[error("frame version is {found}, expected {expected}; update the older peer")]
    Version {
        /// Value in the header.
        found: u16,
        /// The version of this build.
        expected: u16,
    },
    /// A kind of frame that does not belong here.
    #[error("frame kind is {found}, expected {expected}")]
    Kind {
        /// Value in the header.
        found: u16,
        /// Kinds accepted, in words.
        expected: &'static str,
    },
    /// A sound frame of another client, channel, request or part: drop it and count it.
    #[error("stale frame: {field} is {found}, expected {expected}")]
    Stale {
        /// Field that differs.
        field: &'static str,
        /// Value in the header.
        found: u64,
        /// Value expected.
        expected: u64,
    },
    /// A number outside its range.
    #[error("frame field {field} is {found}, expected {min} to {max}")]
    Field {
        /// Field that is out of range.
        field: &'static str,
        /// Value in the header.
        found: u64,
        /// Smallest value accepted.
        min: u64,
        /// Largest value accepted.
        max: u64,
    },
    /// The layer is not one of the model's.
    #[error("frame is for layer {found}, expected one below {num_layers}")]
    Layer {
        /// Value in the header.
        found: u32,
        /// Layers of the model.
        num_layers: u32,
    },
    /// A section begins off its alignment.
    #[error("frame section {section} begins at byte {offset}, expected a multiple of {align}")]
    Alignment {
        /// Section.
        section: &'static str,
        /// Where it begins.
        offset: u64,
        /// Alignment required.
        align: u64,
    },
    /// A section overlaps the one before or leaves the frame.
    #[error("frame section {section} takes bytes {begin} to {end}, expected within {min} to {max}")]
    Section {
        /// Section.
        section: &'static str,
        /// First byte.
        begin: u64,
        /// Byte behind the last.
        end: u64,
        /// First byte it may take.
        min: u64,
        /// Byte behind the last it may take.
        max: u64,
    },
    /// The token table does not cover the entry table in order.
    #[error(
        "token {token} has entries {entry_begin} plus {entry_count}, expected to begin at {expected_begin} with 1 to {max_count} entries"
    )]
    TokenEntries {
        /// Row of the token table.
        token: u32,
        /// Value in the table.
        entry_begin: u32,
        /// Value in the table.
        entry_count: u32,
        /// Where the token before ended.
        expected_begin: u32,
        /// Most entries a token may have here.
        max_count: u32,
    },
    /// The token table leaves entries over.
    #[error("tokens use {found} entries, expected all {expected}")]
    UnusedEntries {
        /// Entries that tokens use.
        found: u32,
        /// Entries in the table.
        expected: u32,
    },
    /// The model has no such expert.
    #[error("entry {entry} names expert {found}, expected one below {num_experts}")]
    Expert {
        /// Row of the entry table.
        entry: u32,
        /// Value in the table.
        found: u32,
        /// Experts of a layer.
        num_experts: u32,
    },
    /// A weight that is NaN or infinite.
    #[error("entry {entry} has weight {found}, expected a finite number")]
    Weight {
        /// Row of the entry table.
        entry: u32,
        /// Value in the table.
        found: f32,
    },
    /// A scale that is not finite, not positive, or too large for finite values.
    #[error("scale {block} of row {row} is {found}, expected above 0 and at most {max}")]
    Scale {
        /// Row.
        row: u32,
        /// Block of 128 values within the row.
        block: u32,
        /// Value in the table.
        found: f32,
        /// Largest scale.
        max: f32,
    },
    /// Header or tables were changed on the way.
    #[error("frame header and tables have checksum {found:#010x}, expected {expected:#010x}")]
    HeaderChecksum {
        /// Checksum of what arrived.
        found: u32,
        /// Checksum in the header.
        expected: u32,
    },
    /// Rows or error body were changed on the way.
    #[error("frame payload has checksum {found:#010x}, expected {expected:#010x}")]
    PayloadChecksum {
        /// Checksum of what arrived.
        found: u32,
        /// Checksum in the header.
        expected: u32,
    },
    /// An error frame whose message is not UTF-8.
    #[error("error frame message is not UTF-8 at byte {at}")]
    ErrorMessage {
        /// First bad byte.
        at: usize,
    },
    /// Rows of a frame with a payload checksum were asked for out of order. A local bug.
    #[error("rows {start}..{end} of {num_rows} read out of turn, expected to go on at row {next}")]
    RowOrder {
        /// First row asked for.
        start: usize,
        /// Row behind the last.
        end: usize,
        /// Rows of the frame.
        num_rows: usize,
        /// Row that comes next.
        next: usize,
    },
    /// The buffer for rows has the wrong length. A local bug.
    #[error("row buffer holds {found} values, expected {expected}")]
    RowBuffer {
        /// Values given.
        found: usize,
        /// Values needed.
        expected: usize,
    },
}

impl FrameError {
    /// The code to answer with.
    #[must_use]
    pub const fn code(&self) -> ErrorCode {
        match self {
            Self::Expert { .. } => ErrorCode::UnknownExpert,
            Self::Layer { .. } => ErrorCode::WrongLayer,
            Self::Stale { .. } => ErrorCode::StaleChannel,
            Self::Version { .. } => ErrorCode::Version,
            Self::RowOrder { .. } | Self::RowBuffer { .. } => ErrorCode::Internal,
            _ => ErrorCode::BadFrame,
        }
    }

    /// Whether the frame is sound but belongs to something that is over: to be dropped and counted.
    #[must_use]
    pub const fn is_stale(&self) -> bool {
        matches!(self, Self::Stale { .. })
    }
}

/// Stable code of an error frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// The frame failed a check. Sending it again cannot help.
    BadFrame,
    /// The model has no such expert. Sending it again cannot help.
    UnknownExpert,
    /// The model has no such MoE layer. Sending it again cannot help.
    WrongLayer,
    /// This server does not hold the expert: the sender's placement is out of date.
    NotMyExpert,
    /// The sender's placement epoch is too old.
    StaleEpoch,
    /// Client or generation do not belong to this channel.
    StaleChannel,
    /// The server has too much to do; another replica may not.
    Overloaded,
    /// The server drains; another replica takes over.
    ShuttingDown,
    /// The server failed through no fault of the frame.
    Internal,
    /// The peers speak different versions of the layout.
    Version,
    /// A code that this build does not know.
    Other(u32),
}

impl ErrorCode {
    /// Number on the wire.
    #[must_use]
    pub const fn to_u32(self) -> u32 {
        match self {
            Self::BadFrame => 1,
            Self::UnknownExpert => 2,
            Self::WrongLayer => 3,
            Self::NotMyExpert => 4,
            Self::StaleEpoch => 5,
            Self::StaleChannel => 6,
            Self::Overloaded => 7,
            Self::ShuttingDown => 8,
            Self::Internal => 9,
            Self::Version => 10,
            Self::Other(code) => code,
        }
    }

    /// The code with this number.
    #[must_use]
    pub const fn from_u32(code: u32) -> Self {
        match code {
            1 => Self::BadFrame,
            2 => Self::UnknownExpert,
            3 => Self::WrongLayer,
            4 => Self::NotMyExpert,
            5 => Self::StaleEpoch,
            6 => Self::StaleChannel,
            7 => Self::Overloaded,
            8 => Self::ShuttingDown,
            9 => Self::Internal,
            10 => Self::Version,
            code => Self::Other(code),
        }
    }

    /// Name for metrics and logs; a bounded set.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::BadFrame => "bad_frame",
            Self::UnknownExpert => "unknown_expert",
            Self::WrongLayer => "wrong_layer",
            Self::NotMyExpert => "not_my_expert",
            Self::StaleEpoch => "stale_epoch",
            Self::StaleChannel => "stale_channel",
            Self::Overloaded => "overloaded",
            Self::ShuttingDown => "shutting_down",
            Self::Internal => "internal",
            Self::Version => "version",
            Self::Other(_) => "other",
        }
    }

    /// Whether the same tokens may succeed on another replica, or here with a newer placement.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        match self {
            Self::NotMyExpert
            | Self::StaleEpoch
            | Self::StaleChannel
            | Self::Overloaded
            | Self::ShuttingDown
            | Self::Internal
            | Self::Version
            | Self::Other(_) => true,
            Self::BadFrame | Self::UnknownExpert | Self::WrongLayer => false,
        }
    }
}

impl From<u32> for ErrorCode {
    fn from(code: u32) -> Self {
        Self::from_u32(code)
    }
}

impl From<ErrorCode> for u32 {
    fn from(code: ErrorCode) -> Self {
        code.to_u32()
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(code) => write!(f, "code {code}"),
            known => f.pad(known.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_have_names_of_their_own() {
        let mut names = std::collections::BTreeSet::new();
        for number in 0..1000 {
            let code = ErrorCode::from_u32(number);
            assert_eq!(code.to_u32(), number);
            if !matches!(code, ErrorCode::Other(_)) {
                assert!(names.insert(code.name()), "{} twice", code.name());
            }
        }
        assert_eq!(names.len(), 10);
        assert_eq!(ErrorCode::from_u32(u32::MAX).to_u32(), u32::MAX);
    }
}
