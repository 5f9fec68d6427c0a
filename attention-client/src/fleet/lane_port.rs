//! A lane as the control side knows it: its events, and the gate of its start.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use p2p_core::{Kicker, WaitSet};

/// A lane as the control side knows it.
#[derive(Debug, Clone)]
pub(crate) struct LanePort {
    pub id: usize,
    pub client_id: u64,
    pub events: Arc<LaneEvents>,
    pub gate: Arc<Gate>,
}

/// Opens once every server of a new lane was tried.
#[derive(Debug)]
pub(crate) struct Gate {
    missing: AtomicIsize,
}

impl Gate {
    /// A gate that opens after [`expect`](Self::expect) and as many calls of [`arrive`](Self::arrive) as it said, in
    /// any order.
    pub fn closed() -> Self {
        Self { missing: AtomicIsize::new(isize::MAX / 2) }
    }

    pub fn expect(&self, num_servers: usize) {
        self.missing.fetch_add(num_servers as isize - isize::MAX / 2, Ordering::Release);
    }

    pub fn arrive(&self) {
        self.missing.fetch_sub(1, Ordering::Release);
    }

    /// Blocks on `wait` until the gate is open, for `limit` at most, or until `cancelled` returns true.
    pub fn wait_open(
        &self,
        wait: &WaitSet,
        limit: Duration,
        cancelled: &dyn Fn() -> bool,
    ) -> std::io::Result<()> {
        let until = Instant::now() + limit;
        while !self.is_open() && !cancelled() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait.block(left.min(GATE_POLL))?;
        }
        Ok(())
    }

    fn is_open(&self) -> bool {
        self.missing.load(Ordering::Acquire) <= 0
    }
}

/// Counts events of the control side that a lane must look at, and wakes the lane.
#[derive(Debug)]
pub(crate) struct LaneEvents {
    count: AtomicU64,
    kicker: Kicker,
}

impl LaneEvents {
    pub fn new(kicker: Kicker) -> Self {
        Self { count: AtomicU64::new(0), kicker }
    }

    /// Counts an event and wakes the lane. Everything stored before is visible to a lane that sees the count.
    pub fn notify(&self) {
        self.count.fetch_add(1, Ordering::Release);
        self.kicker.kick();
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }
}

/// How often a waiter checks a gate on its own, in case a wake-up is lost.
const GATE_POLL: Duration = Duration::from_millis(20);
