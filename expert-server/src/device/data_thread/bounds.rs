//! Bounds on the duration of a batch.
//!
//! All waits in kernels have bounds. A wait for the path to a client over a network has the bound of the
//! network, or one that an operator sets. A batch may wait for several paths in sequence. A client that takes
//! no data must not look like a lost GPU. So all waits for paths are ended long before the GPU counts as
//! lost.

use std::time::{Duration, Instant};

use kernels::gpu::GpuError;

use super::DataThread;
use crate::device::client::Client;
use crate::device::context::PRODUCT_WAIT_NS;
use crate::error::DataError;
use crate::metrics::DropReason;

/// The reaction to a batch that is in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Wait,
    AbortRemote,
    Lost,
}

/// The reaction to a batch that began `age` ago.
fn judge(age: Duration) -> Verdict {
    match age {
        age if age > BATCH_LIMIT => Verdict::Lost,
        age if age > PATHS_LIMIT => Verdict::AbortRemote,
        _ => Verdict::Wait,
    }
}

/// Age of the batch that computes. All batches are on one stream, so it began at its launch, or at the end of the
/// batch before it.
fn age_of(
    launched: impl Iterator<Item = Instant>,
    last_ended: Instant,
    now: Instant,
) -> Option<Duration> {
    let begun = launched.min()?.max(last_ended);
    Some(now.saturating_duration_since(begun))
}

impl DataThread {
    /// Checks the age of the batch in flight. Clients over a network are aborted first; a batch that does not end
    /// even then means that the GPU is lost.
    pub(super) fn check_bound(&mut self, now: Instant) -> Result<(), DataError> {
        if self.stopped_at.is_some_and(|at| now.saturating_duration_since(at) > STOP_GRACE) {
            self.abort_remote(DropReason::Shutdown);
        }
        let launched = self.chains.iter().filter_map(|chain| chain.launched_at);
        match age_of(launched, self.last_ended, now).map_or(Verdict::Wait, judge) {
            Verdict::Wait => {}
            // The process may have been stopped, not the GPU: batches may have ended since the last poll.
            _ if self.collect_ended()? => return Ok(()),
            Verdict::AbortRemote => self.abort_paths(),
            Verdict::Lost => return Err(GpuError::Deadline { what: "a batch" }.into()),
        }
        // Fails if a kernel failed.
        self.stream.is_done()?;
        Ok(())
    }

    /// Closes the links of all clients over a network, so that kernels wait for none of them.
    fn abort_paths(&mut self) {
        for client in self.clients.iter_mut() {
            if client.slots.is_remote() && !client.is_closing() {
                tracing::warn!(link = %client.id, client = client.expect.client_id, limit = ?PATHS_LIMIT, "a batch does not end: dropping a client over a network, which it may wait for");
            }
        }
        self.abort_remote(DropReason::Transport);
    }

    /// Closes the links of clients over a network, and ends the kernels' waits for them.
    fn abort_remote(&mut self, reason: DropReason) {
        self.clients
            .iter_mut()
            .filter(|client| client.slots.is_remote())
            .for_each(|client| client.close_with(reason));
        self.aborts.abort_closing(&self.clients);
    }

    /// Closes the links whose paths are out of service, and ends the kernels' waits for all closing links.
    pub(super) fn check_paths(&mut self) {
        self.clients.iter_mut().for_each(Client::check_path);
        self.aborts.abort_closing(&self.clients);
    }
}

/// Age of a batch at which all clients over a network are dropped. In docs/explanation/failure.md.
const PATHS_LIMIT: Duration = Duration::from_secs(15);
/// Time after a stop command for the batches in flight to end and their answers to be sent. It is much longer
/// than a batch, and shorter than the wait of the caller that stops the server.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// Age of a batch at which the GPU counts as lost. A GPU in order is always faster.
pub(super) const BATCH_LIMIT: Duration = Duration::from_secs(30);

// A path that fails by its own limit names its client, so it must fail first.
const _: () = assert!(proxy::device::WAIT_LIMIT.as_millis() * 3 / 2 < PATHS_LIMIT.as_millis());
// A kernel that traps reports the wait in which it trapped, so it must trap before clients are dropped.
const _: () = assert!((PRODUCT_WAIT_NS as u128) < PATHS_LIMIT.as_nanos());
// Kernels notice an abort within milliseconds.
const _: () = assert!(PATHS_LIMIT.as_millis() + 10_000 < BATCH_LIMIT.as_millis());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_clients_are_aborted_long_before_the_gpu_counts_as_lost() {
        let second = Duration::from_secs(1);
        assert_eq!(judge(Duration::ZERO), Verdict::Wait);
        // If one path fails by its own limit, only its client is dropped.
        assert_eq!(judge(proxy::device::WAIT_LIMIT + second), Verdict::Wait);
        assert_eq!(judge(PATHS_LIMIT + second), Verdict::AbortRemote);
        assert_eq!(judge(BATCH_LIMIT), Verdict::AbortRemote);
        assert_eq!(judge(BATCH_LIMIT + second), Verdict::Lost);
    }

    #[test]
    fn a_batch_begins_at_the_end_of_the_one_before_it() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let age = |launched: &[u64], last_ended, now| {
            age_of(launched.iter().map(|s| at(*s)), at(last_ended), at(now))
        };
        assert_eq!(age(&[], 0, 100), None);
        assert_eq!(age(&[10], 3, 12), Some(Duration::from_secs(2)));
        // Queued behind a batch that took 20 seconds.
        assert_eq!(age(&[10], 30, 31), Some(Duration::from_secs(1)));
        // Of two batches, the one that was launched first computes.
        assert_eq!(age(&[10, 14], 3, 16), Some(Duration::from_secs(6)));
    }
}
