//! The receiving end of one pair: what arrived in which order, without any library.
//!
//! A provider promises nothing about the order of a write and a message behind it, so a message says
//! how many writes went before. It waits here until that many have landed. Nor is there an order between
//! messages and mails, which share one sequence: a message that came before a mail waits for it here,
//! and a mail that came before a message waits in its cell.

use std::collections::VecDeque;

use thiserror::Error;

use super::message::Header;

/// What arrived from one peer.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    next_seq: u32,
    num_writes: u64,
    /// In order, waiting for writes.
    held: VecDeque<(Header, Box<[u8]>)>,
    /// Ahead of mails.
    early: VecDeque<(Header, Box<[u8]>)>,
    /// Bytes of both.
    held_bytes: usize,
    /// Mails that may be missing before a message.
    max_missing: u32,
}

/// The peer, or the network between, broke the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(crate) enum OrderError {
    #[error("message {found} came, expected {expected}: messages were lost")]
    Sequence { found: u32, expected: u32 },
    #[error("{bytes} bytes of messages wait for writes that do not come")]
    TooMuchHeld { bytes: usize },
}

impl Inbound {
    /// From a peer that may have `max_missing` mails under way.
    pub(crate) fn new(max_missing: u32) -> Self {
        Self { max_missing, ..Self::default() }
    }

    /// Sequence number of the next message or mail.
    pub(crate) const fn next_seq(&self) -> u32 {
        self.next_seq
    }

    /// Whether something that came waits for something before it that has not come.
    pub(crate) fn has_gap(&self) -> bool {
        !self.early.is_empty()
    }

    /// Whether `message` may be put in place now; it is kept for later otherwise. Ask
    /// [`next_ready`](Self::next_ready) afterwards.
    #[inline]
    pub(crate) fn admit(&mut self, header: &Header, message: &[u8]) -> Result<bool, OrderError> {
        if header.then.is_unnumbered() {
            return Ok(true);
        }
        let expected = self.next_seq;
        if header.seq != expected {
            let newest = self.early.back().map_or(expected, |(early, _)| early.seq.wrapping_add(1));
            let num_missing = header.seq.wrapping_sub(expected);
            // Counted as if none of the early ones were behind a gap of its own, which is enough.
            let most = self.max_missing.saturating_add(self.early.len() as u32);
            let is_older = header.seq.wrapping_sub(newest) > most;
            if self.max_missing == 0 || num_missing > most || is_older {
                return Err(OrderError::Sequence { found: header.seq, expected });
            }
            self.keep(message.len())?;
            self.early.push_back((*header, message.into()));
            return Ok(false);
        }
        self.next_seq = expected.wrapping_add(1);
        if header.writes <= self.num_writes && self.held.is_empty() {
            return Ok(true);
        }
        self.keep(message.len())?;
        self.held.push_back((*header, message.into()));
        Ok(false)
    }

    /// A write landed.
    #[inline]
    pub(crate) const fn count_write(&mut self) {
        self.num_writes += 1;
    }

    /// Writes that have landed.
    pub(crate) const fn num_writes(&self) -> u64 {
        self.num_writes
    }

    /// The next message that was kept, once all before it has come and its writes have landed.
    pub(crate) fn next_ready(&mut self) -> Option<(Header, Box<[u8]>)> {
        while let Some(early) = self.early.pop_front_if(|(header, _)| header.seq == self.next_seq) {
            self.next_seq = self.next_seq.wrapping_add(1);
            self.held.push_back(early);
        }
        let (header, _) = self.held.front()?;
        if header.writes > self.num_writes {
            return None;
        }
        let (header, message) = self.held.pop_front()?;
        self.held_bytes -= message.len();
        Some((header, message))
    }

    const fn keep(&mut self, len: usize) -> Result<(), OrderError> {
        let bytes = self.held_bytes + len;
        if bytes > MAX_HELD_BYTES {
            return Err(OrderError::TooMuchHeld { bytes });
        }
        self.held_bytes = bytes;
        Ok(())
    }
}

const MAX_HELD_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::backend::counted::message::Then;

    fn header(seq: u32, writes: u64) -> Header {
        let (then, credit) = (Then::Nothing, Default::default());
        Header { slot: 0, seq, token: 0, writes, then, credit, num_parts: 0, mails: 0 }
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

    /// Messages and mails come in two orders of their own; together they must come out in the one in
    /// which they were sent, each once.
    #[test]
    fn messages_and_mails_get_into_one_order() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..300 {
            let (max_missing, first) = (rng.random_range(1..9), rng.random::<u32>());
            let mut inbound = Inbound { next_seq: first, ..Inbound::new(max_missing) };
            let (mut mails, mut messages) = (VecDeque::new(), VecDeque::new());
            let (mut sent, mut placed) = (first, first);
            let mut place = |header: Header| {
                assert_eq!(header.seq, placed, "seed {seed}");
                placed = placed.wrapping_add(1);
            };
            while sent.wrapping_sub(first) < 100 || !mails.is_empty() || !messages.is_empty() {
                match rng.random_range(0..4) {
                    0 if sent.wrapping_sub(first) < 100 => {
                        let is_mail = rng.random() && mails.len() < max_missing as usize;
                        let to = if is_mail { &mut mails } else { &mut messages };
                        to.push_back(header(sent, 0));
                        sent = sent.wrapping_add(1);
                    }
                    1 => {
                        if let Some(header) = messages.pop_front()
                            && inbound.admit(&header, b"x").unwrap()
                        {
                            place(header);
                        }
                    }
                    _ => {
                        let next_seq = inbound.next_seq();
                        if let Some(header) = mails.pop_front_if(|mail| mail.seq == next_seq) {
                            assert_eq!(inbound.admit(&header, b"x"), Ok(true));
                            place(header);
                        }
                    }
                }
                while let Some((header, _)) = inbound.next_ready() {
                    place(header);
                }
            }
            assert!(placed == sent && !inbound.has_gap(), "seed {seed}");
        }
    }

    #[test]
    fn more_missing_than_mails_can_be_is_a_loss() {
        let mut inbound = Inbound::new(4);
        assert_eq!(inbound.admit(&header(4, 0), b"x"), Ok(false));
        assert!(inbound.has_gap());
        let lost = OrderError::Sequence { found: 6, expected: 0 };
        assert_eq!(inbound.admit(&header(6, 0), b"x"), Err(lost));
        // One that is sent twice, or runs backwards.
        let twice = OrderError::Sequence { found: 4, expected: 0 };
        assert_eq!(inbound.admit(&header(4, 0), b"x"), Err(twice));
    }
}
