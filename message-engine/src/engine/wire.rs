//! Frames on the connection between two engines, after the handshake.
//!
//! Little-endian. Every frame is a header of 16 bytes and a body; specified in `docs/reference/wire-format.md`,
//! "Message engine".

use thiserror::Error;

use crate::credit::{Credit, Demand};
use crate::fabric::{RemoteSegment, WireRegion};

/// Bytes of a frame's header.
pub(super) const HEADER_BYTES: usize = 16;
/// Longest body of a frame.
pub(super) const MAX_BODY_BYTES: usize = 64 << 10;

/// A frame that no correct peer sends.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The kind is unknown.
    #[error("frame of unknown kind {kind}")]
    Kind {
        /// Kind found.
        kind: u8,
    },
    /// The body is longer than the limit.
    #[error("frame of kind {kind} with {bytes} bytes, at most {MAX_BODY_BYTES} are allowed")]
    Oversized {
        /// Kind of the frame.
        kind: u8,
        /// Bytes found.
        bytes: u32,
    },
    /// The body's length does not fit the kind.
    #[error("frame of kind {kind} with {bytes} bytes, expected {expected}")]
    Length {
        /// Kind of the frame.
        kind: u8,
        /// Bytes found.
        bytes: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// Reserved bytes are not zero.
    #[error("frame of kind {kind} with reserved bytes that are not zero")]
    Reserved {
        /// Kind of the frame.
        kind: u8,
    },
    /// A field has an impossible value, or the frame is impossible in this state.
    #[error("{what}: found {found}, expected {expected}")]
    Value {
        /// Name of the field.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Expected value or limit.
        expected: u64,
    },
    /// A counter of the credit protocol is impossible.
    #[error(transparent)]
    Credit(#[from] crate::credit::CreditError),
}

/// Outcome of an announced message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Written,
    Withdrawn,
    Failed,
}

/// Reason for which an announced message is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The buffer is too short for it.
    TooShort,
    /// The fabric cannot open the buffer to the sender.
    NotOpened,
}

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame<'a> {
    /// Part of a notification of `total` bytes. The parts of one follow each other.
    Notify { total: u64, part: &'a [u8] },
    /// Bytes of notifications that may have been sent, and how many notifications have arrived.
    NotifyCredit { granted: u64, arrived: u64 },
    /// A whole message.
    Eager { seq: u64, payload: &'a [u8] },
    /// Freed cost of eager messages, and the number that have arrived.
    EagerCredit { freed: u64, arrived: u64 },
    /// The sender has a message of `bytes` bytes.
    Announce { seq: u64, bytes: u64 },
    /// The receiver's buffer for the message.
    Grant { seq: u64, target: RemoteSegment },
    /// The message cannot be written, with the reason. The buffer has `capacity` bytes.
    Refuse { seq: u64, capacity: u64, why: Refusal },
    /// The message is written, or will not be.
    Finish { seq: u64, outcome: Outcome },
    /// The message will not be sent. If it was granted already, a finish answers the grant.
    Withdraw { seq: u64 },
    /// See [`crate::credit`].
    Demand(Demand),
    /// See [`crate::credit`].
    Credit(Credit),
    /// Scheduled and unscheduled bytes that have arrived.
    Arrived { scheduled: u64, unscheduled: u64 },
    /// The sender closes the connection.
    Goodbye,
}

/// A checked header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    kind: u8,
    number: u64,
    pub(super) body_bytes: usize,
}

impl Header {
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let kind = bytes[0];
        if !(NOTIFY..=GOODBYE).contains(&kind) {
            return Err(FrameError::Kind { kind });
        }
        if bytes[1..4] != [0; 3] {
            return Err(FrameError::Reserved { kind });
        }
        let body_bytes = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        if body_bytes as usize > MAX_BODY_BYTES {
            return Err(FrameError::Oversized { kind, bytes: body_bytes });
        }
        Ok(Self { kind, number: word(bytes, 8), body_bytes: body_bytes as usize })
    }
}

impl<'a> Frame<'a> {
    /// Decodes a frame.
    pub(super) fn decode(header: Header, body: &'a [u8]) -> Result<Self, FrameError> {
        let Header { kind, number, .. } = header;
        let expected = match kind {
            NOTIFY | EAGER => body.len(),
            WITHDRAW | GOODBYE => 0,
            GRANT => 32,
            REFUSE => 16,
            _ => 8,
        };
        if body.len() != expected {
            return Err(FrameError::Length { kind, bytes: body.len(), expected });
        }
        let second =
            if matches!(kind, NOTIFY | EAGER) || body.is_empty() { 0 } else { word(body, 0) };
        Ok(match kind {
            NOTIFY => Self::Notify { total: number, part: body },
            NOTIFY_CREDIT => Self::NotifyCredit { granted: number, arrived: second },
            EAGER => Self::Eager { seq: number, payload: body },
            EAGER_CREDIT => Self::EagerCredit { freed: number, arrived: second },
            ANNOUNCE => Self::Announce { seq: number, bytes: second },
            GRANT => {
                let region =
                    WireRegion { address: second, bytes: word(body, 8), key: word(body, 16) };
                Self::Grant {
                    seq: number,
                    target: RemoteSegment { region, offset: word(body, 24) },
                }
            }
            REFUSE => {
                let why = match word(body, 8) {
                    0 => Refusal::TooShort,
                    1 => Refusal::NotOpened,
                    found => {
                        let what = "reason of a refusal";
                        return Err(FrameError::Value { what, found, expected: 1 });
                    }
                };
                Self::Refuse { seq: number, capacity: second, why }
            }
            FINISH => {
                let outcome = match second {
                    0 => Outcome::Written,
                    1 => Outcome::Withdrawn,
                    2 => Outcome::Failed,
                    found => {
                        let what = "outcome of a message";
                        return Err(FrameError::Value { what, found, expected: 2 });
                    }
                };
                Self::Finish { seq: number, outcome }
            }
            WITHDRAW => Self::Withdraw { seq: number },
            DEMAND => Self::Demand(Demand { announced: number, withdrawn: second }),
            CREDIT => Self::Credit(Credit { granted: number, unscheduled: second }),
            ARRIVED => Self::Arrived { scheduled: number, unscheduled: second },
            _ => Self::Goodbye,
        })
    }

    /// Appends the frame to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let mut words = [0; 4];
        let (kind, number, body): (u8, u64, &[u8]) = match *self {
            Self::Notify { total, part } => (NOTIFY, total, part),
            Self::Eager { seq, payload } => (EAGER, seq, payload),
            Self::Withdraw { seq } => (WITHDRAW, seq, &[]),
            Self::Goodbye => (GOODBYE, 0, &[]),
            _ => {
                let (kind, number) = self.fixed(&mut words);
                let mut body = [0; 32];
                for (place, word) in body.chunks_exact_mut(8).zip(words) {
                    place.copy_from_slice(&word.to_le_bytes());
                }
                let len = match kind {
                    GRANT => 32,
                    REFUSE => 16,
                    _ => 8,
                };
                put_header(out, kind, number, len);
                out.extend_from_slice(&body[..len]);
                return;
            }
        };
        put_header(out, kind, number, body.len());
        out.extend_from_slice(body);
    }

    /// Kind, number and words of a frame whose body has a fixed length.
    fn fixed(&self, words: &mut [u64; 4]) -> (u8, u64) {
        let (kind, number, second) = match *self {
            Self::NotifyCredit { granted, arrived } => (NOTIFY_CREDIT, granted, arrived),
            Self::EagerCredit { freed, arrived } => (EAGER_CREDIT, freed, arrived),
            Self::Announce { seq, bytes } => (ANNOUNCE, seq, bytes),
            Self::Grant { seq, target: RemoteSegment { region, offset } } => {
                *words = [region.address, region.bytes, region.key, offset];
                return (GRANT, seq);
            }
            Self::Refuse { seq, capacity, why } => {
                words[1] = why as u64;
                (REFUSE, seq, capacity)
            }
            Self::Finish { seq, outcome } => (FINISH, seq, outcome as u64),
            Self::Demand(Demand { announced, withdrawn }) => (DEMAND, announced, withdrawn),
            Self::Credit(Credit { granted, unscheduled }) => (CREDIT, granted, unscheduled),
            Self::Arrived { scheduled, unscheduled } => (ARRIVED, scheduled, unscheduled),
            Self::Notify { .. } | Self::Eager { .. } | Self::Withdraw { .. } | Self::Goodbye => {
                (GOODBYE, 0, 0)
            }
        };
        words[0] = second;
        (kind, number)
    }
}

/// Appends the header of an eager frame. The caller appends the body of `bytes` bytes.
pub(super) fn put_eager_header(out: &mut Vec<u8>, seq: u64, bytes: usize) {
    put_header(out, EAGER, seq, bytes);
}

fn put_header(out: &mut Vec<u8>, kind: u8, number: u64, body_bytes: usize) {
    out.extend_from_slice(&[kind, 0, 0, 0]);
    out.extend_from_slice(&(body_bytes as u32).to_le_bytes());
    out.extend_from_slice(&number.to_le_bytes());
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

const NOTIFY: u8 = 1;
const NOTIFY_CREDIT: u8 = 2;
const EAGER: u8 = 3;
const EAGER_CREDIT: u8 = 4;
const ANNOUNCE: u8 = 5;
const GRANT: u8 = 6;
const REFUSE: u8 = 7;
const FINISH: u8 = 8;
const WITHDRAW: u8 = 9;
const DEMAND: u8 = 10;
const CREDIT: u8 = 11;
const ARRIVED: u8 = 12;
const GOODBYE: u8 = 13;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frames() -> impl Strategy<Value = Frame<'static>> {
        let word = any::<u64>;
        prop_oneof![
            (word(), 0..MAX_BODY_BYTES)
                .prop_map(|(total, len)| Frame::Notify { total, part: &PATTERN[..len] }),
            (word(), word())
                .prop_map(|(granted, arrived)| Frame::NotifyCredit { granted, arrived }),
            (word(), 0..MAX_BODY_BYTES)
                .prop_map(|(seq, len)| Frame::Eager { seq, payload: &PATTERN[..len] }),
            (word(), word()).prop_map(|(freed, arrived)| Frame::EagerCredit { freed, arrived }),
            (word(), word()).prop_map(|(seq, bytes)| Frame::Announce { seq, bytes }),
            (word(), word(), word(), word(), word()).prop_map(
                |(seq, address, bytes, key, offset)| {
                    let region = WireRegion { address, bytes, key };
                    Frame::Grant { seq, target: RemoteSegment { region, offset } }
                }
            ),
            (word(), word(), any::<bool>()).prop_map(|(seq, capacity, is_too_short)| {
                let why = if is_too_short { Refusal::TooShort } else { Refusal::NotOpened };
                Frame::Refuse { seq, capacity, why }
            }),
            (word(), 0..3u8).prop_map(|(seq, outcome)| {
                let outcomes = [Outcome::Written, Outcome::Withdrawn, Outcome::Failed];
                Frame::Finish { seq, outcome: outcomes[outcome as usize] }
            }),
            word().prop_map(|seq| Frame::Withdraw { seq }),
            (word(), word())
                .prop_map(|(announced, withdrawn)| Frame::Demand(Demand { announced, withdrawn })),
            (word(), word())
                .prop_map(|(granted, unscheduled)| Frame::Credit(Credit { granted, unscheduled })),
            (word(), word())
                .prop_map(|(scheduled, unscheduled)| Frame::Arrived { scheduled, unscheduled }),
            Just(Frame::Goodbye),
        ]
    }

    proptest! {
        #[test]
        fn encoded_values_are_decoded_unchanged(frame in frames()) {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            let (head, body) = bytes.split_first_chunk().unwrap();
            let header = Header::decode(head).unwrap();
            prop_assert_eq!(header.body_bytes, body.len());
            prop_assert_eq!(Frame::decode(header, body).unwrap(), frame);
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            head: [u8; HEADER_BYTES],
            body in prop::collection::vec(any::<u8>(), 0..100),
        ) {
            if let Ok(header) = Header::decode(&head) {
                let _ = Frame::decode(header, &body);
            }
        }
    }

    #[test]
    fn malformed_frames_are_named() {
        assert_eq!(Header::decode(&[0; 16]), Err(FrameError::Kind { kind: 0 }));
        let mut head = [0; 16];
        (head[0], head[6]) = (EAGER, 2);
        assert!(matches!(Header::decode(&head), Err(FrameError::Oversized { .. })));
        head[2] = 1;
        assert!(matches!(Header::decode(&head), Err(FrameError::Reserved { .. })));
        let header = Header { kind: GRANT, number: 0, body_bytes: 31 };
        assert!(matches!(Frame::decode(header, &[0; 31]), Err(FrameError::Length { .. })));
        let header = Header { kind: FINISH, number: 0, body_bytes: 8 };
        assert!(matches!(Frame::decode(header, &[9; 8]), Err(FrameError::Value { .. })));
        let header = Header { kind: REFUSE, number: 0, body_bytes: 16 };
        let (mut body, what) = ([0; 16], "reason of a refusal");
        body[8] = 2;
        let unknown = Err(FrameError::Value { what, found: 2, expected: 1 });
        assert_eq!(Frame::decode(header, &body), unknown);
        let without = Header { body_bytes: 8, ..header };
        assert!(matches!(Frame::decode(without, &body[..8]), Err(FrameError::Length { .. })));
    }

    static PATTERN: [u8; MAX_BODY_BYTES] = [0x5a; MAX_BODY_BYTES];
}
