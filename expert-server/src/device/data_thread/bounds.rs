//! How long a batch may take.
//!
//! All waits in kernels have bounds, but those for the way to a client over a network are the network's, or an
//! operator's, and a batch may meet several one after the other. A client that takes nothing must not look like
//! a GPU that is lost: long before, the waits for all ways are ended, which leaves the GPU alone.

use std::time::{Duration, Instant};

use super::Engine;
use crate::cpu::DataError;
use crate::device::context::PRODUCT_WAIT_NS;
use crate::device::client_table::Seat;
use crate::metrics::DropReason;
use kernels::gpu::GpuError;

/// What is to be done about a batch that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Wait,
    EndWays,
    Lost,
}

/// Of a batch that began `age` ago.
fn judge(age: Duration) -> Verdict {
    match age {
        age if age > BATCH_LIMIT => Verdict::Lost,
        age if age > WAYS_LIMIT => Verdict::EndWays,
        _ => Verdict::Wait,
    }
}

/// How long the batch that is computed has been under way: all are on one stream, so it began when it was
/// launched, or when the one before it ended.
fn age_of(
    launched: impl Iterator<Item = Instant>,
    last_ended: Instant,
    now: Instant,
) -> Option<Duration> {
    let begun = launched.min()?.max(last_ended);
    Some(now.saturating_duration_since(begun))
}

impl Engine {
    /// A batch that does not end means that the GPU is lost, if it is not for clients over a network.
    pub(super) fn check_bound(&mut self, now: Instant) -> Result<(), DataError> {
        if self.stopped_at.is_some_and(|at| now.saturating_duration_since(at) > STOP_GRACE) {
            self.give_up_remote(DropReason::Shutdown);
        }
        let launched = self.contexts.iter().filter_map(|context| context.launched_at);
        match age_of(launched, self.last_ended, now).map_or(Verdict::Wait, judge) {
            Verdict::Wait => {}
            // A process that stood still, and not the GPU: batches may have ended since this looked last.
            _ if self.harvest_ended()? => return Ok(()),
            Verdict::EndWays => self.end_ways(),
            Verdict::Lost => return Err(GpuError::Deadline { what: "a batch" }.into()),
        }
        // A kernel that failed shows here.
        self.stream.is_done()?;
        Ok(())
    }

    /// Ends the links of all clients over a network, so that kernels wait for none of them.
    fn end_ways(&mut self) {
        for seat in self.seats.iter_mut() {
            if seat.is_remote() && seat.doom().is_none() {
                tracing::warn!(link = %seat.id, client = seat.expect.client_id, limit = ?WAYS_LIMIT, "a batch does not end: dropping a client over a network, which it may wait for");
            }
        }
        self.give_up_remote(DropReason::Transport);
    }

    /// Ends these links for a reason, if they have no other, and kernels' waits for them.
    fn give_up_remote(&mut self, reason: DropReason) {
        self.seats
            .iter_mut()
            .filter(|seat| seat.is_remote())
            .for_each(|seat| seat.end_with(reason));
        self.board.give_up_doomed(&self.seats);
    }

    /// Ends the links of clients to which the way is out of service, and kernels' waits for whoever is to go.
    pub(super) fn check_ways(&mut self) {
        self.seats.iter_mut().for_each(Seat::check_way);
        self.board.give_up_doomed(&self.seats);
    }
}

/// What kernels wait for in a batch belongs to clients over a network until then. In docs/operations.md.
const WAYS_LIMIT: Duration = Duration::from_secs(15);
/// Time for the batches under way to end, and their answers to go, when the server is told to stop: much longer than
/// a batch, and short of what whoever stops it waits.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// Nothing that a GPU in order does takes as long.
pub(super) const BATCH_LIMIT: Duration = Duration::from_secs(30);

// A way that fails by its own limit names the client to blame, so it must have time to.
const _: () = assert!(proxy::device::WAIT_LIMIT.as_millis() * 3 / 2 < WAYS_LIMIT.as_millis());
// A kernel that gives the GPU up says what it waited for, before anybody else is blamed.
const _: () = assert!((PRODUCT_WAIT_NS as u128) < WAYS_LIMIT.as_nanos());
// What is ended is noticed by kernels within milliseconds.
const _: () = assert!(WAYS_LIMIT.as_millis() + 10_000 < BATCH_LIMIT.as_millis());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_ended_long_before_the_gpu_counts_as_lost() {
        let second = Duration::from_secs(1);
        assert_eq!(judge(Duration::ZERO), Verdict::Wait);
        // A client whose way ends by its own limit is the only one that is dropped.
        assert_eq!(judge(proxy::device::WAIT_LIMIT + second), Verdict::Wait);
        assert_eq!(judge(WAYS_LIMIT + second), Verdict::EndWays);
        assert_eq!(judge(BATCH_LIMIT), Verdict::EndWays);
        assert_eq!(judge(BATCH_LIMIT + second), Verdict::Lost);
    }

    #[test]
    fn a_batch_begins_where_the_one_before_it_ends() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let age = |launched: &[u64], last_ended, now| {
            age_of(launched.iter().map(|s| at(*s)), at(last_ended), at(now))
        };
        assert_eq!(age(&[], 0, 100), None);
        assert_eq!(age(&[10], 3, 12), Some(Duration::from_secs(2)));
        // Queued behind one that took 20 seconds.
        assert_eq!(age(&[10], 30, 31), Some(Duration::from_secs(1)));
        // Of two the one that was launched first is computed.
        assert_eq!(age(&[10, 14], 3, 16), Some(Duration::from_secs(6)));
    }
}
