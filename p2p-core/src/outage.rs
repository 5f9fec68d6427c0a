//! Limits the log lines about an operation that fails for a while and is retried over and over.

use std::time::{Duration, Instant};

/// The failures of one such operation. Report every failure and every success of it.
#[derive(Debug, Default)]
pub struct Outage {
    said: Option<Instant>,
    /// A failure was logged since the last success.
    is_open: bool,
    /// Failures that were not logged.
    num_failures: u64,
}

impl Outage {
    /// Counts a failure at `now`. Returns the number of failures since the last log line if it is
    /// time for another: at the first failure, and then at most once a minute.
    pub fn failed(&mut self, now: Instant) -> Option<u64> {
        self.num_failures += 1;
        if self.said.is_some_and(|said| now.saturating_duration_since(said) < PAUSE) {
            return None;
        }
        (self.said, self.is_open) = (Some(now), true);
        Some(std::mem::take(&mut self.num_failures))
    }

    /// Notes a success. After a logged failure this returns, once, the number of failures since
    /// that log line.
    pub fn worked(&mut self) -> Option<u64> {
        if !std::mem::take(&mut self.is_open) {
            return None;
        }
        Some(std::mem::take(&mut self.num_failures))
    }
}

const PAUSE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_said_once_a_minute_and_their_end_once() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(outage.worked(), None);
        let said: Vec<_> = (0..1300).filter_map(|nth| outage.failed(at(100 * nth))).collect();
        assert_eq!(said, [1, 600, 600], "130 s of failures, ten a second");
        assert_eq!((outage.worked(), outage.worked()), (Some(99), None));
        // Even if failures and successes alternate, a line is logged at most once a minute.
        for nth in 1300..1800 {
            assert_eq!((outage.failed(at(100 * nth)), outage.worked()), (None, None));
        }
        assert_eq!((outage.failed(at(180_000)), outage.worked()), (Some(501), Some(0)));
    }
}
