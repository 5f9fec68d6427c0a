//! The clock of leases: monotonic, and virtual in tests.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A monotonic clock.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Time since a fixed origin. Never goes backwards.
    fn now(&self) -> Duration;
}

/// The operating system's monotonic clock. Jumps of the wall clock do not affect it.
#[derive(Debug)]
pub struct MonotonicClock {
    origin: Instant,
}

impl MonotonicClock {
    /// A clock whose origin is now.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// Measures the processor time of the calling thread, which other processes do not lengthen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    started: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { started: Self::thread_time() }
    }

    /// Processor time since the start. The caller is on the thread that started the stopwatch.
    pub(crate) fn elapsed(self) -> Duration {
        Self::thread_time().saturating_sub(self.started)
    }

    fn thread_time() -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::try_from(time).unwrap_or_default()
    }
}

/// A clock that only [`advance`](Self::advance) moves, for tests.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// A clock at its origin.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
