//! Counts the requests sent to a peer if flags travel as messages.

use crate::rdma::messages::ReceiveError;

/// Counters of the messages and counted writes sent to a peer.
#[derive(Debug)]
pub(super) struct SentCounters {
    /// Maximum number under way, and the number that consumed a receive of the peer, modulo 2³².
    pub(super) window: u32,
    num_taking: u32,
    pub(super) next_seq: u32,
    pub(super) num_writes: u64,
    /// Number of questions asked.
    pub(super) num_asked: u64,
    /// True if a message followed the last question.
    pub(super) is_open: bool,
    /// True if reads may be under way on queue pairs other than the first.
    pub(super) has_spread_reads: bool,
}

impl SentCounters {
    /// Counters for a peer with a window of this size.
    pub(super) const fn new(window: u32) -> Self {
        Self {
            window,
            num_taking: 0,
            next_seq: 0,
            num_writes: 0,
            num_asked: 0,
            is_open: false,
            has_spread_reads: false,
        }
    }

    pub(super) const fn count_write(&mut self) {
        self.num_writes += 1;
        self.num_taking = self.num_taking.wrapping_add(1);
    }

    pub(super) const fn count_message(&mut self) {
        self.next_seq = self.next_seq.wrapping_add(1);
        self.num_taking = self.num_taking.wrapping_add(1);
        self.is_open = true;
    }

    /// Counts a question, sent as the last of all messages.
    pub(super) const fn count_question(&mut self) {
        self.num_asked += 1;
        self.is_open = false;
    }

    /// Remaining room in the window, given that the peer reports `taken` receives.
    pub(super) fn room(&self, taken: u32) -> Result<u32, ReceiveError> {
        let (window, under_way) = (self.window, self.num_taking.wrapping_sub(taken));
        window.checked_sub(under_way).ok_or(ReceiveError::Taken { under_way, window })
    }

    /// True if the peer, which reports answers up to `found`, has answered all questions.
    pub(super) const fn is_answered(&self, found: u64) -> Result<bool, ReceiveError> {
        if found > self.num_asked {
            return Err(ReceiveError::Answer { found, asked: self.num_asked });
        }
        Ok(found == self.num_asked)
    }

    /// True if a message may be unexecuted by a peer that has answered the questions up to `answered`. After a wait
    /// for an answer is abandoned, earlier messages remain open.
    pub(super) const fn has_open(&self, answered: u64) -> bool {
        self.is_open || answered < self.num_asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_claims_more_than_went_to_it_is_found_out() {
        let mut sent = SentCounters::new(6);
        assert_eq!(sent.room(0), Ok(6));
        (0..4).for_each(|_| sent.count_message());
        sent.count_write();
        assert_eq!((sent.room(0), sent.room(3), sent.room(5)), (Ok(1), Ok(4), Ok(6)));
        for taken in [6, 100, 1 << 31] {
            let under_way = 5u32.wrapping_sub(taken);
            assert_eq!(sent.room(taken), Err(ReceiveError::Taken { under_way, window: 6 }));
        }
        assert_eq!(sent.is_answered(0), Ok(true));
        sent.count_question();
        assert_eq!((sent.is_answered(0), sent.is_answered(1)), (Ok(false), Ok(true)));
        assert_eq!(sent.is_answered(2), Err(ReceiveError::Answer { found: 2, asked: 1 }));
    }

    #[test]
    fn messages_stay_open_until_a_question_behind_them_is_answered() {
        let mut sent = SentCounters::new(6);
        assert!(!sent.has_open(0));
        sent.count_message();
        assert!(sent.has_open(0));
        sent.count_message();
        sent.count_question();
        assert!(sent.has_open(0), "nobody has answered");
        assert!(!sent.has_open(1));
        sent.count_message();
        assert!(sent.has_open(1));
    }
}
