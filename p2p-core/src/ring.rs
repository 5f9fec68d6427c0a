//! The arithmetic of a frame ring, without memory and transports.
//!
//! Both cursors work on monotonic counters from flags that a *peer* advances, so every value is
//! checked. A counter that runs backwards or beyond the possible range is a [`Desync`], and the
//! peer is at fault.

use thiserror::Error;

/// A peer's counter holds a value that no correct peer can produce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("flag `{flag}` reads {found}, expected {low} to {high}: the peer broke the ring protocol")]
#[allow(missing_docs, reason = "the message explains the fields")]
pub struct Desync {
    pub flag: &'static str,
    pub found: u64,
    /// Smallest possible value.
    pub low: u64,
    /// Largest possible value.
    pub high: u64,
}

/// The writing end: finds the next frame, and whether there is credit for it.
#[derive(Debug, Clone)]
pub struct TxCursor {
    num_frames: u64,
    published: u64,
    consumed_seen: u64,
}

impl TxCursor {
    /// Cursor of a fresh ring with `num_frames` frames.
    #[must_use]
    pub const fn new(num_frames: usize) -> Self {
        Self::starting_at(num_frames, 0)
    }

    /// Cursor of a ring through which `seq` frames have gone, all of them consumed.
    #[must_use]
    pub const fn starting_at(num_frames: usize, seq: u64) -> Self {
        Self { num_frames: num_frames as u64, published: seq, consumed_seen: seq }
    }

    /// Sequence number of the next frame to fill.
    #[must_use]
    pub const fn next_seq(&self) -> u64 {
        self.published
    }

    /// Frames published and not yet consumed by the peer, by the last known counter.
    #[must_use]
    pub const fn in_flight(&self) -> u64 {
        self.published - self.consumed_seen
    }

    /// Tells whether a frame is free by the last known counter of the peer. Reading the counter
    /// again costs a cache miss, so it is only worthwhile if this returns false.
    #[must_use]
    pub const fn has_spare(&self) -> bool {
        self.in_flight() < self.num_frames
    }

    /// Last known value of the peer's `consumed` counter.
    #[must_use]
    pub const fn consumed_seen(&self) -> u64 {
        self.consumed_seen
    }

    /// Takes in the peer's `consumed` counter. Returns true if a frame is free.
    ///
    /// # Errors
    /// [`Desync`] if the counter went backwards or passed the published frames.
    pub fn has_credit(&mut self, consumed: u64) -> Result<bool, Desync> {
        if consumed < self.consumed_seen || consumed > self.published {
            return Err(Desync {
                flag: "consumed",
                found: consumed,
                low: self.consumed_seen,
                high: self.published,
            });
        }
        self.consumed_seen = consumed;
        Ok(self.has_spare())
    }

    /// Counts one frame as published.
    pub const fn advance(&mut self) {
        self.published += 1;
    }
}

/// The reading end: finds the next frame, and counts the taken ones.
#[derive(Debug, Clone)]
pub struct RxCursor {
    num_frames: u64,
    published_seen: u64,
    taken: u64,
    released: u64,
}

impl RxCursor {
    /// Cursor of a fresh ring with `num_frames` frames.
    #[must_use]
    pub const fn new(num_frames: usize) -> Self {
        Self::starting_at(num_frames, 0)
    }

    /// Cursor of a ring through which `seq` frames have come, all of them released.
    #[must_use]
    pub const fn starting_at(num_frames: usize, seq: u64) -> Self {
        Self { num_frames: num_frames as u64, published_seen: seq, taken: seq, released: seq }
    }

    /// Frames taken so far.
    #[must_use]
    pub const fn taken(&self) -> u64 {
        self.taken
    }

    /// Frames taken and not yet released.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.taken - self.released
    }

    /// Takes in the peer's `published` counter. Returns the sequence number of the next frame, if
    /// there is one, and counts it as taken.
    ///
    /// # Errors
    /// [`Desync`] if the counter went backwards or the peer published without credit.
    pub fn take(&mut self, published: u64) -> Result<Option<u64>, Desync> {
        let high = self.released.saturating_add(self.num_frames);
        if published < self.published_seen || published > high {
            return Err(Desync {
                flag: "published",
                found: published,
                low: self.published_seen,
                high,
            });
        }
        self.published_seen = published;
        if self.taken == published {
            return Ok(None);
        }
        let seq = self.taken;
        self.taken += 1;
        Ok(Some(seq))
    }

    /// Counts the oldest taken frame as released. Returns false if none is taken.
    #[must_use]
    pub const fn release(&mut self) -> bool {
        if self.released == self.taken {
            return false;
        }
        self.released += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_never_overruns_and_a_reader_never_underruns() {
        let (mut tx, mut rx) = (TxCursor::new(2), RxCursor::new(2));
        let mut consumed = 0;
        for round in 0..10u64 {
            assert!(tx.has_credit(consumed).unwrap());
            tx.advance();
            assert!(tx.has_credit(consumed).unwrap());
            tx.advance();
            assert!(!tx.has_credit(consumed).unwrap());
            let published = tx.next_seq();
            assert_eq!(rx.take(published).unwrap(), Some(round * 2));
            assert_eq!(rx.take(published).unwrap(), Some(round * 2 + 1));
            assert_eq!(rx.take(published).unwrap(), None);
            assert!(rx.release() && rx.release() && !rx.release());
            consumed += 2;
        }
    }

    #[test]
    fn a_desynchronised_peer_stays_desynchronised_at_the_end_of_the_range() {
        let mut rx = RxCursor::starting_at(4, u64::MAX - 2);
        assert_eq!(rx.take(u64::MAX).unwrap(), Some(u64::MAX - 2));
        assert!(rx.take(0).is_err());
        let mut tx = TxCursor::starting_at(4, 1 << 63);
        assert!(tx.has_credit(1 << 63).unwrap());
        assert!(tx.has_credit(0).is_err() && tx.has_credit(u64::MAX).is_err());
    }

    #[test]
    fn impossible_counters_are_reported_and_leave_the_cursor_alone() {
        let mut tx = TxCursor::new(2);
        assert!(tx.has_credit(1).is_err());
        tx.advance();
        assert!(tx.has_credit(1).unwrap());
        assert!(tx.has_credit(0).is_err());
        let mut rx = RxCursor::new(2);
        assert!(rx.take(3).is_err());
        assert!(rx.take(u64::MAX).is_err());
        assert_eq!(rx.take(2).unwrap(), Some(0));
        assert!(rx.take(1).is_err());
        assert_eq!(rx.take(2).unwrap(), Some(1));
    }
}
