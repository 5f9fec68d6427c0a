//! Messages between the drivers of two sides: small puts and the flag behind them, in one piece.
//!
//! ```text
//! 0      4     8       16       24            32       40            44              48     50          56
//! | slot | seq | token | writes | value or id | credit | flag_offset | credit_offset | kind | num_parts | mails
//!
//! then parts: | offset u32 | bytes u32 | payload, padded to 8 |
//! ```
//!
//! All numbers are little-endian. The receiving side gave `slot` and `token` in the handshake; the
//! token is a secret of the pair.
//!
//! - `writes` counts the writes that were issued before the message.
//! - `credit` is the sum of all additions to one flag that were allowed to wait. It may come
//!   several times, or late, or not at all if a later one comes.
//! - `mails` counts the mails of the receiving side that the sender has read, modulo 2³².

use thiserror::Error;

/// Bytes before the parts.
pub const HEADER_BYTES: usize = 56;
/// Bytes of a part before its payload.
pub const PART_BYTES: usize = 8;

/// The receiver's action after it has put the parts in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// No action.
    Nothing,
    /// Adds to a flag.
    Add {
        /// Offset of the flag in bytes.
        offset: u32,
        /// Summand.
        value: u64,
    },
    /// Asks for an answer, which repeats the id.
    Answer {
        /// Number of the question.
        id: u64,
    },
    /// Answers a question.
    Answered {
        /// Number of the question.
        id: u64,
    },
    /// Carries only the credit.
    Credit,
    /// The sender is gone. After the writes that the message counts, nothing more comes.
    Farewell,
}

impl Action {
    /// Tells whether the driver sends this by itself, outside of the numbered order.
    pub const fn is_unnumbered(self) -> bool {
        matches!(self, Self::Answered { .. } | Self::Credit | Self::Farewell)
    }
}

/// The fixed part of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number of the receiving side's slot.
    pub slot: u32,
    /// Sequence number of the message.
    pub seq: u32,
    /// Secret of the pair.
    pub token: u64,
    /// Number of counted writes that were issued before the message.
    pub writes: u64,
    /// The action after the parts.
    pub action: Action,
    /// Additions to a flag that were allowed to wait.
    pub credit: Credit,
    /// Parts behind the header.
    pub num_parts: u16,
    /// Mails that the sender has read, modulo 2³².
    pub mails: u32,
}

/// The sum of additions to one flag. A `total` of 0 means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Credit {
    /// Offset of the flag in bytes.
    pub offset: u32,
    /// Sum since the connection was made.
    pub total: u64,
}

/// A message that cannot be valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MessageError {
    #[error("a message of {found} bytes, expected at least {HEADER_BYTES}")]
    Short { found: usize },
    #[error("a message of unknown kind {found}")]
    Kind { found: u16 },
    #[error("part {idx} of {num_parts} leaves the message")]
    Parts { idx: u16, num_parts: u16 },
    #[error("{num_bytes} bytes after the last part")]
    Trailing { num_bytes: usize },
    #[error("{len} bytes at offset {offset} leave the slot of {slot_bytes} bytes")]
    Range { offset: u32, len: usize, slot_bytes: usize },
    #[error("flag offset {offset} is not a multiple of 8")]
    Misaligned { offset: u32 },
}

impl Header {
    /// Writes the header to the first [`HEADER_BYTES`] of `out`.
    #[inline]
    pub fn encode(&self, out: &mut [u8; HEADER_BYTES]) {
        let (kind, value, offset) = match self.action {
            Action::Nothing => (KIND_NOTHING, 0, 0),
            Action::Add { offset, value } => (KIND_ADD, value, offset),
            Action::Answer { id } => (KIND_ANSWER, id, 0),
            Action::Answered { id } => (KIND_ANSWERED, id, 0),
            Action::Credit => (KIND_CREDIT, 0, 0),
            Action::Farewell => (KIND_FAREWELL, 0, 0),
        };
        out[0..4].copy_from_slice(&self.slot.to_le_bytes());
        out[4..8].copy_from_slice(&self.seq.to_le_bytes());
        out[8..16].copy_from_slice(&self.token.to_le_bytes());
        out[16..24].copy_from_slice(&self.writes.to_le_bytes());
        out[24..32].copy_from_slice(&value.to_le_bytes());
        out[32..40].copy_from_slice(&self.credit.total.to_le_bytes());
        out[40..44].copy_from_slice(&offset.to_le_bytes());
        out[44..48].copy_from_slice(&self.credit.offset.to_le_bytes());
        out[48..50].copy_from_slice(&kind.to_le_bytes());
        out[50..52].copy_from_slice(&self.num_parts.to_le_bytes());
        out[52..56].copy_from_slice(&self.mails.to_le_bytes());
    }

    /// Reads the header of `message`.
    #[inline]
    pub fn decode(message: &[u8]) -> Result<Self, MessageError> {
        let head = message
            .first_chunk::<HEADER_BYTES>()
            .ok_or(MessageError::Short { found: message.len() })?;
        let (value, offset) = (u64_at(head, 24), u32_at(head, 40));
        let action = match u16_at(head, 48) {
            KIND_NOTHING => Action::Nothing,
            KIND_ADD => Action::Add { offset, value },
            KIND_ANSWER => Action::Answer { id: value },
            KIND_ANSWERED => Action::Answered { id: value },
            KIND_CREDIT => Action::Credit,
            KIND_FAREWELL => Action::Farewell,
            found => return Err(MessageError::Kind { found }),
        };
        Ok(Self {
            slot: u32_at(head, 0),
            seq: u32_at(head, 4),
            token: u64_at(head, 8),
            writes: u64_at(head, 16),
            action,
            credit: Credit { offset: u32_at(head, 44), total: u64_at(head, 32) },
            num_parts: u16_at(head, 50),
            mails: u32_at(head, 52),
        })
    }

    /// Checks all parts and flags of `message` against a slot of `slot_bytes`, then passes each
    /// part to `place`. If any check fails, no part is placed.
    #[inline]
    pub fn for_each_part(
        &self,
        message: &[u8],
        slot_bytes: usize,
        mut place: impl FnMut(usize, &[u8]),
    ) -> Result<(), MessageError> {
        let num_parts = self.num_parts;
        let mut rest = message.get(HEADER_BYTES..).unwrap_or_default();
        for idx in 0..num_parts {
            let (offset, payload, behind) =
                split_part(rest).ok_or(MessageError::Parts { idx, num_parts })?;
            rest = behind;
            check_range(offset, payload.len(), slot_bytes)?;
        }
        if !rest.is_empty() {
            return Err(MessageError::Trailing { num_bytes: rest.len() });
        }
        if let Action::Add { offset, .. } = self.action {
            check_flag(offset, slot_bytes)?;
        }
        if self.credit.total > 0 {
            check_flag(self.credit.offset, slot_bytes)?;
        }
        let mut rest = message.get(HEADER_BYTES..).unwrap_or_default();
        for _ in 0..num_parts {
            let Some((offset, payload, behind)) = split_part(rest) else { break };
            rest = behind;
            place(offset as usize, payload);
        }
        Ok(())
    }
}

/// Bytes that a part with a payload of `len` bytes takes in a message.
pub const fn part_bytes(len: usize) -> usize {
    PART_BYTES + len.next_multiple_of(8)
}

/// Appends the head of a part to `out`; the caller appends the payload and pads it.
pub fn push_part_head(out: &mut Vec<u8>, offset: u32, len: u32) {
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Merges `newer` into `message`, which still waits, if both only add to the same flag. Otherwise
/// returns false and changes nothing.
pub fn merge_add(message: &mut [u8], newer: &Header) -> bool {
    let Ok(header) = Header::decode(message) else { return false };
    let (Action::Add { offset, value }, Action::Add { offset: same, value: more }) =
        (header.action, newer.action)
    else {
        return false;
    };
    if same != offset || header.writes != newer.writes || newer.num_parts > 0 {
        return false;
    }
    let action = Action::Add { offset, value: value.wrapping_add(more) };
    let merged = Header { action, credit: newer.credit, mails: newer.mails, ..header };
    if let Some(head) = message.first_chunk_mut() {
        merged.encode(head);
    }
    true
}

#[inline]
fn split_part(rest: &[u8]) -> Option<(u32, &[u8], &[u8])> {
    let head = rest.first_chunk::<PART_BYTES>()?;
    let offset = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
    let len = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
    let rest = &rest[PART_BYTES..];
    // At most 4 GiB and 7 bytes: no overflow.
    let (padded, behind) = rest.split_at_checked(len.next_multiple_of(8))?;
    Some((offset, &padded[..len], behind))
}

fn check_flag(offset: u32, slot_bytes: usize) -> Result<(), MessageError> {
    check_range(offset, 8, slot_bytes)?;
    if !offset.is_multiple_of(8) {
        return Err(MessageError::Misaligned { offset });
    }
    Ok(())
}

fn check_range(offset: u32, len: usize, slot_bytes: usize) -> Result<(), MessageError> {
    if offset as usize + len > slot_bytes {
        return Err(MessageError::Range { offset, len, slot_bytes });
    }
    Ok(())
}

#[inline]
fn u16_at(head: &[u8; HEADER_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([head[at], head[at + 1]])
}

#[inline]
fn u32_at(head: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&head[at..at + 4]);
    u32::from_le_bytes(bytes)
}

#[inline]
fn u64_at(head: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&head[at..at + 8]);
    u64::from_le_bytes(bytes)
}

const KIND_NOTHING: u16 = 1;
const KIND_ADD: u16 = 2;
const KIND_ANSWER: u16 = 3;
const KIND_ANSWERED: u16 = 4;
const KIND_FAREWELL: u16 = 5;
const KIND_CREDIT: u16 = 6;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, RngExt, SeedableRng};

    use super::*;

    fn random_message(rng: &mut StdRng, slot_bytes: usize) -> (Header, Vec<(usize, Vec<u8>)>) {
        let parts: Vec<_> = (0..rng.random_range(0..4))
            .map(|_| {
                let mut payload = vec![0; rng.random_range(0..40)];
                rng.fill_bytes(&mut payload);
                (rng.random_range(0..slot_bytes - payload.len()), payload)
            })
            .collect();
        let action = match rng.random_range(0..6) {
            0 => Action::Nothing,
            1 => {
                let offset = rng.random_range(0..slot_bytes as u32 / 8) * 8;
                Action::Add { offset, value: rng.random() }
            }
            2 => Action::Answer { id: rng.random() },
            3 => Action::Answered { id: rng.random() },
            4 => Action::Credit,
            _ => Action::Farewell,
        };
        let header = Header {
            slot: rng.random(),
            seq: rng.random(),
            token: rng.random(),
            writes: rng.random(),
            action,
            credit: Credit { offset: rng.random_range(0..8) * 8, total: rng.random() },
            num_parts: parts.len() as u16,
            mails: rng.random(),
        };
        (header, parts)
    }

    fn encode(header: &Header, parts: &[(usize, Vec<u8>)]) -> Vec<u8> {
        let mut head = [0; HEADER_BYTES];
        header.encode(&mut head);
        let mut out = head.to_vec();
        for (offset, payload) in parts {
            push_part_head(&mut out, *offset as u32, payload.len() as u32);
            out.extend(payload);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        let parts_bytes: usize = parts.iter().map(|(_, p)| part_bytes(p.len())).sum();
        assert_eq!(out.len(), HEADER_BYTES + parts_bytes);
        out
    }

    #[test]
    fn messages_survive_the_wire() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..500 {
            let (header, parts) = random_message(&mut rng, 4096);
            let bytes = encode(&header, &parts);
            assert_eq!(Header::decode(&bytes), Ok(header));
            let mut found = Vec::new();
            header
                .for_each_part(&bytes, 4096, |offset, payload| {
                    found.push((offset, payload.to_vec()));
                })
                .unwrap();
            assert_eq!(found, parts, "seed {seed}");
        }
    }

    #[test]
    fn a_bad_part_or_flag_places_nothing() {
        let good = (16usize, vec![1u8; 8]);
        let credit = Credit::default();
        let header = |action, num_parts| Header {
            slot: 0,
            seq: 0,
            token: 0,
            writes: 0,
            action,
            credit,
            num_parts,
            mails: 0,
        };
        let add = |offset| Action::Add { offset, value: 1 };
        for (action, parts, bytes_cut) in [
            (add(4096), vec![good.clone()], 0),
            (add(u32::MAX - 7), vec![good.clone()], 0),
            (add(12), vec![good.clone()], 0),
            (Action::Nothing, vec![good.clone(), (4095, vec![0; 2])], 0),
            (Action::Nothing, vec![good.clone(), (u32::MAX as usize, vec![0; 2])], 0),
            (Action::Nothing, vec![good.clone(), good.clone()], 8),
            (Action::Nothing, vec![good.clone(), good], 1),
        ] {
            let header = header(action, parts.len() as u16);
            let mut bytes = encode(&header, &parts);
            bytes.truncate(bytes.len() - bytes_cut);
            let result = header.for_each_part(&bytes, 4096, |_, _| panic!("placed"));
            assert!(result.is_err(), "{action:?} {bytes_cut}");
        }
        let mut bytes = encode(&header(Action::Nothing, 0), &[]);
        bytes.push(0);
        let result = header(Action::Nothing, 0).for_each_part(&bytes, 4096, |_, _| {});
        assert_eq!(result, Err(MessageError::Trailing { num_bytes: 1 }));
    }

    #[test]
    fn mutated_messages_never_leave_the_slot() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..50_000 {
            let (header, parts) = random_message(&mut rng, 4096);
            let mut bytes = encode(&header, &parts);
            for _ in 0..rng.random_range(1..4) {
                let at = rng.random_range(0..bytes.len());
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff, rng.random()][rng.random_range(0..6)];
            }
            bytes.truncate(rng.random_range(bytes.len() / 2..=bytes.len()));
            if let Ok(header) = Header::decode(&bytes) {
                let _ = header.for_each_part(&bytes, 4096, |offset, payload| {
                    assert!(offset + payload.len() <= 4096);
                });
            }
        }
    }

    #[test]
    fn only_an_addition_to_the_same_flag_is_merged() {
        let header = |action, writes, total| {
            let credit = Credit { offset: 128, total };
            Header { slot: 0, seq: 0, token: 0, writes, action, credit, num_parts: 0, mails: 0 }
        };
        let add = |offset, value| Action::Add { offset, value };
        let mut message = encode(&header(add(64, 5), 7, 1), &[]);
        let unchanged = message.clone();
        for other in [
            header(add(72, 1), 7, 9),
            header(add(64, 1), 8, 9),
            header(Action::Answer { id: 1 }, 7, 9),
            Header { num_parts: 1, ..header(add(64, 1), 7, 9) },
        ] {
            assert!(!merge_add(&mut message, &other) && message == unchanged, "{other:?}");
        }
        assert!(merge_add(&mut message, &header(add(64, 3), 7, 4)));
        assert_eq!(Header::decode(&message).unwrap(), header(add(64, 8), 7, 4));
    }

    #[test]
    fn a_credit_beyond_the_slot_is_bad() {
        for (offset, is_good) in [(4088, true), (4096, false), (4, false), (u32::MAX, false)] {
            let credit = Credit { offset, total: 1 };
            let header = Header {
                slot: 0,
                seq: 0,
                token: 0,
                writes: 0,
                action: Action::Credit,
                credit,
                num_parts: 0,
                mails: 0,
            };
            let message = encode(&header, &[]);
            assert_eq!(
                header.for_each_part(&message, 4096, |_, _| {}).is_ok(),
                is_good,
                "{offset}"
            );
        }
    }
}
