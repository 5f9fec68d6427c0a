//! The receiving end of one pair: puts arrivals into order, without any library.
//!
//! A write and a message behind it may arrive in any order, so a message counts the writes before
//! it. It waits here until that many have landed.
//!
//! Some networks do not order writes among each other. There each write names the first message
//! behind it, so that a later write is not counted in place of a late one.
//!
//! Messages and mails share one sequence, and the network does not order them either. A message
//! that arrives before an earlier mail waits here. A mail that arrives before an earlier message
//! waits in its cell.

use std::collections::VecDeque;

use thiserror::Error;

use super::message::{HEADER_BYTES, Header};

/// Arrivals from one peer.
#[derive(Debug, Default)]
pub struct Inbound {
    next_seq: u32,
    /// Landed writes that the next message may need.
    num_writes: u64,
    /// Writes that only later messages need, by the number of the first message that needs them,
    /// modulo the length. Empty if writes name no message.
    later: Box<[u32]>,
    /// Applied messages and counted writes, modulo 2³².
    num_done: u32,
    /// Messages in order that wait for writes.
    held: VecDeque<(Header, Box<[u8]>)>,
    /// Messages that arrived before an earlier mail.
    early: VecDeque<(Header, Box<[u8]>)>,
    /// Bytes of both queues.
    held_bytes: usize,
    /// Largest number of mails that may be missing before a message.
    max_missing: u32,
}

/// The peer, or the network between, broke the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum OrderError {
    #[error("message {found} came, expected {expected}: messages were lost")]
    Sequence { found: u32, expected: u32 },
    #[error("{bytes} bytes of messages wait for writes that do not come")]
    TooMuchHeld { bytes: usize },
    #[error("a write before message {found} came, expected one before {first} to {last}")]
    Write { found: u32, first: u32, last: u32 },
}

impl Inbound {
    /// Makes the state for a peer that may have `max_missing` mails under way.
    pub fn new(max_missing: u32) -> Self {
        Self { max_missing, ..Self::default() }
    }

    /// Makes the state for a peer whose writes name the message behind them. It has at most
    /// `window` messages and writes under way that are not [done](Self::num_done).
    pub fn with_window(window: u32) -> Self {
        let window = window as usize;
        let later = vec![0; (window + 1).next_power_of_two()].into();
        Self { later, held: VecDeque::with_capacity(window), ..Self::default() }
    }

    /// Sequence number of the next message or mail.
    pub const fn next_seq(&self) -> u32 {
        self.next_seq
    }

    /// Tells whether an arrival waits for an earlier one that is missing.
    pub fn has_gap(&self) -> bool {
        !self.early.is_empty()
    }

    /// Returns true if `message` may be applied now. Otherwise this keeps a copy for later. Call
    /// [`next_ready`](Self::next_ready) afterwards.
    ///
    /// # Errors
    /// [`OrderError`]; the peer must be treated as lost.
    #[inline]
    pub fn admit(&mut self, header: &Header, message: &[u8]) -> Result<bool, OrderError> {
        if header.action.is_unnumbered() {
            return Ok(true);
        }
        let expected = self.next_seq;
        if header.seq != expected {
            let newest = self.early.back().map_or(expected, |(early, _)| early.seq.wrapping_add(1));
            let num_missing = header.seq.wrapping_sub(expected);
            // This counts as if no early message had a gap of its own before it. That bound is
            // enough.
            let most = self.max_missing.saturating_add(self.early.len() as u32);
            let is_older = header.seq.wrapping_sub(newest) > most;
            if self.max_missing == 0 || num_missing > most || is_older {
                return Err(OrderError::Sequence { found: header.seq, expected });
            }
            self.keep(message.len())?;
            self.early.push_back((*header, message.into()));
            return Ok(false);
        }
        if header.writes <= self.num_writes && self.held.is_empty() {
            self.next_seq = expected.wrapping_add(1);
            self.advance();
            return Ok(true);
        }
        self.keep(message.len())?;
        self.next_seq = expected.wrapping_add(1);
        self.held.push_back((*header, message.into()));
        Ok(false)
    }

    /// Counts a write that landed.
    #[inline]
    pub const fn count_write(&mut self) {
        self.num_writes += 1;
        self.num_done = self.num_done.wrapping_add(1);
    }

    /// Counts a write that was issued before message `seq` and after the message before that one.
    ///
    /// # Errors
    /// [`OrderError::Write`] for a message outside the window.
    pub fn count_write_before(&mut self, seq: u32) -> Result<(), OrderError> {
        let first = self.front();
        let (ahead, len) = (seq.wrapping_sub(first) as usize, self.later.len());
        if ahead == 0 {
            self.count_write();
        } else if ahead < len {
            let later = &mut self.later[seq as usize % len];
            *later = later.saturating_add(1);
        } else {
            let last = first.wrapping_add(len as u32).wrapping_sub(1);
            return Err(OrderError::Write { found: seq, first, last });
        }
        Ok(())
    }

    /// Writes that have landed, except writes that only later messages need.
    pub const fn num_writes(&self) -> u64 {
        self.num_writes
    }

    /// Messages that were applied and writes that were counted so far, modulo 2³².
    pub const fn num_done(&self) -> u32 {
        self.num_done
    }

    /// Number of the next message to apply.
    fn front(&self) -> u32 {
        self.held.front().map_or(self.next_seq, |(header, _)| header.seq)
    }

    /// Notes that a message was applied. Writes that the next one needs count from now on.
    fn advance(&mut self) {
        self.num_done = self.num_done.wrapping_add(1);
        let (front, len) = (self.front() as usize, self.later.len());
        if let Some(later) = front.checked_rem(len).map(|idx| &mut self.later[idx]) {
            let num = std::mem::take(later);
            self.num_writes += u64::from(num);
            self.num_done = self.num_done.wrapping_add(num);
        }
    }

    /// Returns the next waiting message, once all earlier arrivals are here and its writes have
    /// landed.
    pub fn next_ready(&mut self) -> Option<(Header, Box<[u8]>)> {
        while let Some(early) = self.early.pop_front_if(|(header, _)| header.seq == self.next_seq) {
            self.next_seq = self.next_seq.wrapping_add(1);
            self.held.push_back(early);
        }
        let (header, _) = self.held.front()?;
        if header.writes > self.num_writes {
            return None;
        }
        let (header, message) = self.held.pop_front()?;
        self.held_bytes -= held_bytes_of(message.len());
        self.advance();
        Some((header, message))
    }

    fn keep(&mut self, len: usize) -> Result<(), OrderError> {
        let bytes = self.held_bytes + held_bytes_of(len);
        if bytes > MAX_HELD_BYTES {
            return Err(OrderError::TooMuchHeld { bytes });
        }
        self.held_bytes = bytes;
        Ok(())
    }
}

/// Bytes that a waiting message counts for. Its header is kept even if it has no other bytes.
fn held_bytes_of(len: usize) -> usize {
    len.max(HEADER_BYTES)
}

const MAX_HELD_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;
    use crate::counted::message::Action;

    fn header(seq: u32, writes: u64) -> Header {
        let (action, credit) = (Action::Nothing, Default::default());
        Header { slot: 0, seq, token: 0, writes, action, credit, num_parts: 0, mails: 0 }
    }

    #[test]
    fn a_message_waits_for_its_writes_and_later_messages_wait_behind_it() {
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
        let answer = Header { action: Action::Answered { id: 3 }, ..header(77, 0) };
        assert_eq!(inbound.admit(&answer, b""), Ok(true));
        assert_eq!(inbound.admit(&header(0, 0), b""), Ok(true));
        let lost = OrderError::Sequence { found: 2, expected: 1 };
        assert_eq!(inbound.admit(&header(2, 0), b""), Err(lost));
    }

    #[test]
    fn waiting_messages_are_bounded() {
        let mut inbound = Inbound::default();
        let message = vec![0; 16 << 10];
        let refused = (0..1000).find_map(|seq| inbound.admit(&header(seq, 1), &message).err());
        assert!(matches!(refused, Some(OrderError::TooMuchHeld { .. })), "{refused:?}");
    }

    /// Writes and messages overtake each other at random. A message must come out exactly when its
    /// writes have landed, and in order.
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
            // Messages keep their order among themselves; writes may go anywhere.
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

    /// Several queues of writes, each in an order of its own, and messages. A message must come out
    /// in order, and as soon as the very writes issued before it have landed. An equal number of
    /// other writes is not enough.
    #[test]
    fn a_later_write_never_replaces_a_late_one() {
        let seed = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..300 {
            let (window, num_queues) = (rng.random_range(2..20), rng.random_range(1..5));
            let first = rng.random::<u32>();
            let mut inbound = Inbound { next_seq: first, ..Inbound::with_window(window) };
            let mut queues = vec![VecDeque::new(); num_queues];
            let mut messages = VecDeque::new();
            // For each message the number of writes before it; for each write whether it has
            // landed.
            let (mut needed, mut landed) = (Vec::new(), Vec::new());
            let (mut num_issued, mut placed) = (0u32, 0);
            let mut place = |header: Header, landed: &[bool], needed: &[usize]| {
                assert_eq!(header.seq, first.wrapping_add(placed as u32), "seed {seed}");
                assert!(landed[..needed[placed]].iter().all(|landed| *landed), "seed {seed}");
                placed += 1;
            };
            for step in 0.. {
                let is_full = num_issued.wrapping_sub(inbound.num_done()) >= window;
                let next = first.wrapping_add(needed.len() as u32);
                match rng.random_range(0..4) {
                    0 if step < 400 && !is_full => {
                        queues[rng.random_range(0..num_queues)].push_back((landed.len(), next));
                        landed.push(false);
                        num_issued += 1;
                    }
                    1 if step < 400 && !is_full => {
                        messages.push_back(header(next, landed.len() as u64));
                        needed.push(landed.len());
                        num_issued += 1;
                    }
                    2 => {
                        if let Some(header) = messages.pop_front()
                            && inbound.admit(&header, &[]).unwrap()
                        {
                            place(header, &landed, &needed);
                        }
                    }
                    _ => {
                        if let Some((write, seq)) =
                            queues[rng.random_range(0..num_queues)].pop_front()
                        {
                            landed[write] = true;
                            inbound.count_write_before(seq).unwrap();
                        }
                    }
                }
                while let Some((header, _)) = inbound.next_ready() {
                    place(header, &landed, &needed);
                }
                if step >= 400 && messages.is_empty() && queues.iter().all(VecDeque::is_empty) {
                    break;
                }
            }
            assert_eq!(placed, needed.len(), "seed {seed}");
            assert_eq!(inbound.num_done(), num_issued, "seed {seed}");
        }
    }

    #[test]
    fn writes_of_messages_that_cannot_be_are_refused() {
        let mut inbound = Inbound::with_window(6);
        assert_eq!(inbound.admit(&header(0, 0), b""), Ok(true));
        assert_eq!(inbound.count_write_before(8), Ok(()));
        for found in [0, 9, 1 << 31, u32::MAX] {
            let refused = Err(OrderError::Write { found, first: 1, last: 8 });
            assert_eq!(inbound.count_write_before(found), refused);
        }
    }

    /// Messages and mails come in two orders of their own. Together they must come out once each,
    /// in the order in which they were sent.
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
        // The message was sent twice, or the sequence runs backwards.
        let twice = OrderError::Sequence { found: 4, expected: 0 };
        assert_eq!(inbound.admit(&header(4, 0), b"x"), Err(twice));
    }
}
