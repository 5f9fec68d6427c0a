//! Errors of a frame, and the codes sent in error frames.

use std::fmt;

use thiserror::Error;

/// Reason to refuse a frame. The peer wrote the frame, so this is a fault of the peer unless the variant
/// says that it is a local bug.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum FrameError {
    /// The frame memory is smaller than a header.
    #[error("frame of {found} bytes, expected at least {expected} bytes for the header")]
    TooSmall { found: usize, expected: usize },
    /// Not a frame of this protocol.
    #[error("frame magic is {found:#010x}, expected {expected:#010x}")]
    Magic { found: u32, expected: u32 },
    /// A layout version that this build does not support.
    #[error("frame version is {found}, expected {expected}; update the older peer")]
    Version { found: u16, expected: u16 },
    /// A kind of frame that the receiver does not expect.
    #[error("frame kind is {found}, expected {expected}")]
    Kind { found: u16, expected: &'static str },
    /// A valid frame of another client, channel, request or part. Drop it and count it.
    #[error("stale frame: {field} is {found}, expected {expected}")]
    Stale { field: &'static str, found: u64, expected: u64 },
    /// A number outside its range.
    #[error("frame field {field} is {found}, expected {min} to {max}")]
    Field { field: &'static str, found: u64, min: u64, max: u64 },
    /// The model has no such layer.
    #[error("frame is for layer {found}, expected one below {num_layers}")]
    Layer { found: u32, num_layers: u32 },
    /// A section is not aligned.
    #[error("frame section {section} begins at byte {offset}, expected a multiple of {align}")]
    Alignment { section: &'static str, offset: u64, align: u64 },
    /// A section overlaps the one before or leaves the frame.
    #[error("frame section {section} takes bytes {begin} to {end}, expected within {min} to {max}")]
    Section { section: &'static str, begin: u64, end: u64, min: u64, max: u64 },
    /// The token table does not cover the entry table in order.
    #[error(
        "token {token} has entries {entry_begin} plus {entry_count}, expected to begin at {expected_begin} with 1 to {max_count} entries"
    )]
    TokenEntries {
        token: u32,
        entry_begin: u32,
        entry_count: u32,
        expected_begin: u32,
        max_count: u32,
    },
    /// The token table does not use all entries.
    #[error("tokens use {found} entries, expected all {expected}")]
    UnusedEntries { found: u32, expected: u32 },
    /// The model has no such expert.
    #[error("entry {entry} names expert {found}, expected one below {num_experts}")]
    Expert { entry: u32, found: u32, num_experts: u32 },
    /// A weight that is NaN or infinite.
    #[error("entry {entry} has weight {found}, expected a finite number")]
    Weight { entry: u32, found: f32 },
    /// A scale that is not finite, not positive, or too large for finite values.
    #[error("scale {block} of row {row} is {found}, expected above 0 and at most {max}")]
    Scale { row: u32, block: u32, found: f32, max: f32 },
    /// Header or tables do not match their checksum.
    #[error("frame header and tables have checksum {found:#010x}, expected {expected:#010x}")]
    HeaderChecksum { found: u32, expected: u32 },
    /// Rows or error body do not match their checksum.
    #[error("frame payload has checksum {found:#010x}, expected {expected:#010x}")]
    PayloadChecksum { found: u32, expected: u32 },
    /// An error frame whose message is not UTF-8.
    #[error("error frame message is not UTF-8 at byte {at}")]
    ErrorMessage { at: usize },
    /// Rows of a frame with a payload checksum were read out of order. A local bug.
    #[error("rows {start}..{end} of {num_rows} read out of order, expected row {next} next")]
    RowOrder { start: usize, end: usize, num_rows: usize, next: usize },
    /// The buffer for rows has the wrong length. A local bug.
    #[error("row buffer holds {found} values, expected {expected}")]
    RowBuffer { found: usize, expected: usize },
}

impl FrameError {
    /// The code to send in the error frame.
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

    /// Returns true for a valid frame of an old channel, request or part. Drop it and count it.
    #[must_use]
    pub const fn is_stale(&self) -> bool {
        matches!(self, Self::Stale { .. })
    }
}

/// Stable code of an error frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorCode {
    /// The frame failed a check. A resend fails again.
    BadFrame,
    /// The model has no such expert. A resend fails again.
    UnknownExpert,
    /// The model has no such MoE layer. A resend fails again.
    WrongLayer,
    /// This server does not hold the expert: the sender's placement is out of date.
    NotMyExpert,
    /// The sender's placement epoch is too old.
    StaleEpoch,
    /// Client or generation do not match this channel.
    StaleChannel,
    /// The server is overloaded. Another replica may accept the frame.
    Overloaded,
    /// The server drains. Use another replica.
    ShuttingDown,
    /// The server failed for a reason other than the frame.
    Internal,
    /// The peers use different versions of the layout.
    Version,
    /// A code that this build does not know.
    Other(u32),
}

impl ErrorCode {
    /// Every code of this build: all but [`Self::Other`].
    pub const KNOWN: [Self; 10] = [
        Self::BadFrame,
        Self::UnknownExpert,
        Self::WrongLayer,
        Self::NotMyExpert,
        Self::StaleEpoch,
        Self::StaleChannel,
        Self::Overloaded,
        Self::ShuttingDown,
        Self::Internal,
        Self::Version,
    ];

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

    /// Name for metrics and logs, out of a fixed set.
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

    /// Returns true if the same tokens may succeed on another replica, or on this server with a newer
    /// placement.
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
                assert!(ErrorCode::KNOWN.contains(&code), "{} is not known", code.name());
            }
        }
        assert_eq!(names.len(), ErrorCode::KNOWN.len());
        assert_eq!(ErrorCode::from_u32(u32::MAX).to_u32(), u32::MAX);
    }
}
