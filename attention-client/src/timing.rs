//! Times and counts of one call.

use std::sync::Arc;
use std::time::Instant;

/// Times and counts of one call. Times are nanoseconds of the caller's monotonic clock, or of a server's where the
/// server reports them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerTiming {
    /// Choosing replicas, grouping, writing and publishing frames, until `dispatch` returned.
    pub dispatch_ns: u64,
    /// In `combine`: waiting for answers, retries included.
    pub wait_ns: u64,
    /// In `combine`: copying answers out of the slots and summing them.
    pub combine_ns: u64,
    /// Longest time that an answered frame waited in its server's queue, as the servers report it.
    pub server_queue_ns: u64,
    /// Longest time that a server computed an answered frame, as the servers report it.
    pub server_compute_ns: u64,
    /// Time lost to failures: from the last sign of life of each failed server until its unanswered tokens were
    /// resent, summed over the failures. 0 without failures.
    pub stall_ns: u64,
    /// Frames published.
    pub num_frames: u32,
    /// Servers contacted.
    pub num_servers: u32,
    /// Links that failed with tokens of this call unanswered.
    pub failovers: u32,
    /// Frames sent because the answer to another frame was late. Not resends: both answers were possible.
    pub hedges: u32,
    /// Of these, frames whose answer came first and counts.
    pub hedges_won: u32,
    /// (token, expert) pairs resent.
    pub resent_pairs: u64,
    /// (token, expert) pairs left out for want of a live replica.
    pub missing_pairs: u64,
}

impl LayerTiming {
    /// Adds a later part of the same batch. Times of the client and counts are sums. Times of servers and the number of
    /// servers are the larger ones.
    pub fn add_part(&mut self, part: &Self) {
        self.dispatch_ns += part.dispatch_ns;
        self.wait_ns += part.wait_ns;
        self.combine_ns += part.combine_ns;
        self.stall_ns += part.stall_ns;
        self.server_queue_ns = self.server_queue_ns.max(part.server_queue_ns);
        self.server_compute_ns = self.server_compute_ns.max(part.server_compute_ns);
        self.num_servers = self.num_servers.max(part.num_servers);
        self.num_frames += part.num_frames;
        self.failovers += part.failovers;
        self.hedges += part.hedges;
        self.hedges_won += part.hedges_won;
        self.resent_pairs += part.resent_pairs;
        self.missing_pairs += part.missing_pairs;
    }

    /// Time inside the client's calls: dispatch, wait and combine.
    #[must_use]
    pub const fn total_ns(&self) -> u64 {
        self.dispatch_ns + self.wait_ns + self.combine_ns
    }
}

/// The part of one server in a call. Times are nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerTiming {
    /// Name of the server. A server that restarted during the call has two parts.
    pub name: Arc<str>,
    /// Frames published to it.
    pub num_frames: u32,
    /// (token, expert) pairs that it answered.
    pub answered_pairs: u64,
    /// (token, expert) pairs that were sent to it and then resent, because it failed or refused.
    pub resent_pairs: u64,
    /// Links to it that failed with tokens of this call unanswered.
    pub failovers: u32,
    /// Longest time from publishing a frame until its answer was read. Answers are read in `combine`.
    pub wait_ns: u64,
    /// Longest time that an answered frame waited in the server's queue, as the server reports it.
    pub queue_ns: u64,
    /// Longest time that the server computed an answered frame, as the server reports it.
    pub compute_ns: u64,
}

impl ServerTiming {
    pub(crate) const fn new(name: Arc<str>) -> Self {
        Self {
            name,
            num_frames: 0,
            answered_pairs: 0,
            resent_pairs: 0,
            failovers: 0,
            wait_ns: 0,
            queue_ns: 0,
            compute_ns: 0,
        }
    }
}

/// A finished call, for an observer.
#[derive(Debug, Clone, Copy)]
pub struct LayerReport {
    /// MoE layer.
    pub layer: u32,
    /// Tokens of the call.
    pub num_tokens: usize,
    /// Epoch of the placement at the call's last dispatch or retry.
    pub epoch: u64,
    /// Times and counts of the call.
    pub timing: LayerTiming,
}

/// Nanoseconds since `start`.
pub(crate) fn elapsed_ns(start: Instant) -> u64 {
    start.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
}
