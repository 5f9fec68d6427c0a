//! Limits the log lines that strangers can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A budget of log lines, shared by all threads of one log statement: [`BURST`] lines in each
/// [`PERIOD`]. Metrics count what is not logged.
#[derive(Debug, Default)]
pub struct LogLimit {
    window: Mutex<Window>,
}

#[derive(Debug, Default)]
struct Window {
    since: Option<Instant>,
    num_lines: u32,
    num_suppressed: u64,
}

impl LogLimit {
    /// Makes an unused budget.
    #[must_use]
    pub const fn new() -> Self {
        let window = Window { since: None, num_lines: 0, num_suppressed: 0 };
        Self { window: Mutex::new(window) }
    }

    /// Takes one line out of the budget. Returns the number of lines suppressed since the last one
    /// that was allowed, or `None` if this line must not be logged. Holds a lock for a few
    /// nanoseconds, so this is not for data paths.
    pub fn allow(&self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&self, now: Instant) -> Option<u64> {
        // No code that holds the lock can leave the window half changed.
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        if window.since.is_none_or(|since| now.saturating_duration_since(since) >= PERIOD) {
            (window.since, window.num_lines) = (Some(now), 0);
        }
        if window.num_lines == BURST {
            window.num_suppressed += 1;
            return None;
        }
        window.num_lines += 1;
        Some(std::mem::take(&mut window.num_suppressed))
    }
}

/// Lines in one period.
pub const BURST: u32 = 10;
/// Length of a period.
pub const PERIOD: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_gets_its_burst_in_each_period_and_the_rest_is_counted() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        // 1,000 events in each of 25 seconds.
        let allowed: Vec<_> = (0..25_000)
            .filter_map(|nth| limit.allow_at(start + Duration::from_millis(nth)))
            .collect();
        assert_eq!(allowed.len(), 30, "three periods have begun");
        assert_eq!((allowed[0], allowed[10], allowed[20]), (0, 9_990, 9_990));
        assert_eq!(allowed.iter().sum::<u64>(), 2 * 9_990);
        assert_eq!(limit.allow_at(start + Duration::from_secs(60)), Some(4_990));
    }
}
