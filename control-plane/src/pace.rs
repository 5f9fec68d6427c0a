//! Spreads costly rebuilds of the placement over time, so that they leave the fleet's lock to heartbeats. Sans-I/O.

use std::time::Duration;

/// Decides when the placement may be rebuilt again. A rebuild that cost little is followed by no pause, so a small
/// fleet learns of every change at once. A costly one is followed by a pause in proportion, and the changes of the
/// pause share one rebuild.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Time before which no rebuild is due.
    next: Duration,
}

impl Pace {
    pub(crate) fn is_due(&self, now: Duration) -> bool {
        now >= self.next
    }

    /// Notes a rebuild that has ended. `computing` is its processor time, and `num_bytes` are sent to all watchers
    /// together from then on.
    pub(crate) fn note(&mut self, ended: Duration, computing: Duration, num_bytes: usize) {
        let sending = Duration::from_nanos(num_bytes as u64 / BYTES_PER_NS);
        let cost = computing * COMPUTING_PAUSE + sending;
        self.next = if cost < FREE { ended } else { ended + cost.min(MAX_PAUSE) };
    }
}

/// Pause after a rebuild in its length. Rebuilds under the lock then take a fifth of the time at most.
const COMPUTING_PAUSE: u32 = 4;
/// Rate at which tables are sent.
const BYTES_PER_NS: u64 = 1;
/// Rebuilds that cost less are never delayed.
const FREE: Duration = Duration::from_millis(8);
/// Longest pause.
const MAX_PAUSE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn cheap_rebuilds_are_never_delayed_and_costly_ones_share_the_time() {
        let mut pace = Pace::default();
        assert!(pace.is_due(Duration::ZERO));
        for _ in 0..100 {
            pace.note(ms(7), ms(1), 3_000_000);
            assert!(pace.is_due(ms(7)));
        }
        pace.note(ms(10), ms(5), 100_000_000);
        assert!(!pace.is_due(ms(129)) && pace.is_due(ms(130)));
        pace.note(ms(200), ms(400), 0);
        assert!(!pace.is_due(ms(699)) && pace.is_due(ms(700)), "a pause is bounded");
    }

    /// With a change in every millisecond, costly rebuilds take a fifth of the time.
    #[test]
    fn many_changes_share_few_rebuilds() {
        let mut pace = Pace::default();
        let (cost, mut now, mut num_rebuilds) = (ms(10), Duration::ZERO, 0);
        while now < Duration::from_secs(10) {
            if pace.is_due(now) {
                now += cost;
                num_rebuilds += 1;
                pace.note(now, cost, 0);
            }
            now += ms(1);
        }
        assert!((190..=200).contains(&num_rebuilds), "{num_rebuilds}");
    }
}
