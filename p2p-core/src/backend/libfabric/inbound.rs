//! The receiving end of one pair: what arrived in which order, without any library.
//!
//! A provider promises nothing about the order of a write and a message behind it, so a message says
//! how many writes went before. It waits here until that many have landed.

use std::collections::VecDeque;

use thiserror::Error;

use super::message::Header;

/// What arrived from one peer.
#[derive(Debug, Default)]
pub(super) struct Inbound {
    next_seq: u32,
    num_writes: u64,
    held: VecDeque<(Header, Box<[u8]>)>,
    held_bytes: usize,
}

/// The peer, or the network between, broke the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(super) enum OrderError {
    #[error("message {found} came, expected {expected}: messages were lost")]
    Sequence { found: u32, expected: u32 },
    #[error("{bytes} bytes of messages wait for writes that do not come")]
    TooMuchHeld { bytes: usize },
}

impl Inbound {
    /// Whether `message` may be put in place now; it is kept for later otherwise.
    #[inline]
    pub(super) fn admit(&mut self, header: &Header, message: &[u8]) -> Result<bool, OrderError> {
        if header.then.is_unnumbered() {
            return Ok(true);
        }
        let expected = self.next_seq;
        if header.seq != expected {
            return Err(OrderError::Sequence { found: header.seq, expected });
        }
        self.next_seq = expected.wrapping_add(1);
        if header.writes <= self.num_writes && self.held.is_empty() {
            return Ok(true);
        }
        let bytes = self.held_bytes + message.len();
        if bytes > MAX_HELD_BYTES {
            return Err(OrderError::TooMuchHeld { bytes });
        }
        self.held_bytes = bytes;
        self.held.push_back((*header, message.into()));
        Ok(false)
    }

    /// A write landed.
    #[inline]
    pub(super) const fn count_write(&mut self) {
        self.num_writes += 1;
    }

    /// Writes that have landed.
    pub(super) const fn num_writes(&self) -> u64 {
        self.num_writes
    }

    /// The next message whose writes have all landed.
    pub(super) fn next_ready(&mut self) -> Option<(Header, Box<[u8]>)> {
        let (header, _) = self.held.front()?;
        if header.writes > self.num_writes {
            return None;
        }
        let (header, message) = self.held.pop_front()?;
        self.held_bytes -= message.len();
        Some((header, message))
    }
}

const MAX_HELD_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::backend::libfabric::message::Then;

    fn header(seq: u32, writes: u64) -> Header {
        let (then, credit) = (Then::Nothing, Default::default());
        Header { slot: 0, seq, token: 0, writes, then, credit, num_parts: 0 }
    }

    #[test]
    fn a_message_waits_for_its_writes_and_those_behind_wait_with_it() {
        let mut inbound = Inbound::default();
        assert_eq!(inbound.admit(&header(0, 0), b"a"), Ok(true));
        assert_eq!(inbound.admit(&header(1, 2), b"b"), Ok(false));
        assert_eq!(inbound.admit(&header(2, 2), b"c"), Ok(false));
        inbound.count_write();
        assert!(inbound.next_ready().is_none());
        inbound.count_write();
        assert_eq!(inbound.next_ready().unwrap().1.as_ref(), b"b");
        assert_eq!(inbound.next_ready().unwrap().1.as_ref(), b"c");
        assert!(inbound.next_ready().is_none());
        assert_eq!(inbound.admit(&header(3, 2), b"d"), Ok(true));
    }

    #[test]
    fn a_lost_message_is_noticed_and_answers_are_not_numbered() {
        let mut inbound = Inbound::default();
        let answer = Header { then: Then::Answered { id: 3 }, ..header(77, 0) };
        assert_eq!(inbound.admit(&answer, b""), Ok(true));
        assert_eq!(inbound.admit(&header(0, 0), b""), Ok(true));
        let lost = OrderError::Sequence { found: 2, expected: 1 };
        assert_eq!(inbound.admit(&header(2, 0), b""), Err(lost));
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut inbound = Inbound::default();
        let message = vec![0; 16 << 10];
        let refused = (0..1000).find_map(|seq| inbound.admit(&header(seq, 1), &message).err());
        assert!(matches!(refused, Some(OrderError::TooMuchHeld { .. })), "{refused:?}");
    }

    /// Writes overtake and are overtaken at random; a message must come out exactly when its writes
    /// have landed, and in order.
    #[test]
    fn any_order_of_writes_and_messages_is_put_right() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..200 {
            let mut events = Vec::new();
            let (mut writes, mut seq) = (0u64, 0u32);
            for _ in 0..40 {
                if rng.random() {
                    writes += 1;
                    events.push(None);
                } else {
                    events.push(Some(header(seq, writes)));
                    seq += 1;
                }
            }
            // Messages keep their order among themselves, writes may go anywhere.
            let mut places: Vec<usize> = (0..events.len()).collect();
            places.shuffle(&mut rng);
            let mut messages = events.iter().flatten().copied().collect::<Vec<_>>().into_iter();
            let (mut landed, mut next, mut inbound) = (0u64, 0u32, Inbound::default());
            let mut place = |header: Header, landed: u64| {
                assert!(header.writes <= landed && header.seq == next, "seed {seed}");
                next += 1;
            };
            for at in places {
                if events[at].is_none() {
                    landed += 1;
                    inbound.count_write();
                } else if let Some(header) = messages.next()
                    && inbound.admit(&header, b"x").unwrap()
                {
                    place(header, landed);
                }
                while let Some((header, _)) = inbound.next_ready() {
                    place(header, landed);
                }
            }
            assert_eq!(next, seq, "seed {seed}");
        }
    }
}
