//! What cannot be done for a while, and is tried over and over, said in few lines.

use std::time::{Duration, Instant};

/// One such thing: to be told of every failure, and of every success.
#[derive(Debug, Default)]
pub struct Outage {
    said: Option<Instant>,
    /// Whether the end is to be said.
    is_open: bool,
    /// Failures that were not said.
    num_failures: u64,
}

impl Outage {
    /// Counts a failure at `now`. What is to be said: at the first and then once a minute at the most, the
    /// failures since the last time.
    pub fn failed(&mut self, now: Instant) -> Option<u64> {
        self.num_failures += 1;
        if self.said.is_some_and(|said| now.saturating_duration_since(said) < PAUSE) {
            return None;
        }
        (self.said, self.is_open) = (Some(now), true);
        Some(std::mem::take(&mut self.num_failures))
    }

    /// It could be done. What is to be said: once after failures that were said, how many came after them.
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
        // Where it comes and goes, it is still once a minute.
        for nth in 1300..1800 {
            assert_eq!((outage.failed(at(100 * nth)), outage.worked()), (None, None));
        }
        assert_eq!((outage.failed(at(180_000)), outage.worked()), (Some(501), Some(0)));
    }
}
