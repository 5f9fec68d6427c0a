//! What one call cost.

/// Where the time of one call went. Times are nanoseconds of the caller's monotonic clock, unless
/// they are a server's own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerTiming {
    /// Choosing replicas, grouping, writing and publishing frames, until `dispatch` returned.
    pub dispatch_ns: u64,
    /// In `combine`: waiting for answers, re-sending included.
    pub wait_ns: u64,
    /// In `combine`: copying answers out of the slots and summing them.
    pub combine_ns: u64,
    /// Longest time that an answered frame waited in its server before it was computed, as the
    /// servers report it.
    pub server_queue_ns: u64,
    /// Longest time that a server computed an answered frame, as the servers report it.
    pub server_compute_ns: u64,
    /// What failures cost this call: from the last sign of life of each failed server until its
    /// unanswered tokens were sent elsewhere, summed over the failures. 0 without failures.
    pub stall_ns: u64,
    /// Frames published.
    pub num_frames: u32,
    /// Servers contacted.
    pub num_servers: u32,
    /// Links that failed with tokens of this call unanswered.
    pub failovers: u32,
    /// (token, expert) pairs sent again.
    pub resent_pairs: u64,
    /// (token, expert) pairs left out for want of a live replica.
    pub missing_pairs: u64,
}

impl LayerTiming {
    /// Time inside the client's calls: dispatch, wait and combine.
    #[must_use]
    pub const fn total_ns(&self) -> u64 {
        self.dispatch_ns + self.wait_ns + self.combine_ns
    }
}

/// A finished call, as an observer sees it.
#[derive(Debug, Clone, Copy)]
pub struct LayerReport {
    /// MoE layer.
    pub layer: u32,
    /// Tokens of the call.
    pub num_tokens: usize,
    /// Epoch of the placement that the tokens were sent by last.
    pub epoch: u64,
    /// Where the time went.
    pub timing: LayerTiming,
}
