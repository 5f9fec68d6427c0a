//! Late answers of a server: after some of them the client prefers other replicas for a time, which doubles as long as
//! the server is late again after it.

use std::time::Duration;

/// Late answers of one server.
#[derive(Debug, Default)]
pub(super) struct Lateness {
    num_late: u32,
    /// Calls in a row that the server answered in time.
    num_timely: u32,
    /// The last time for which other replicas were preferred; zero if there was none lately.
    pause: Duration,
}

impl Lateness {
    /// The server was late. Returns the time for which to prefer other replicas, if it is time to.
    pub(super) fn late(&mut self) -> Option<Duration> {
        (self.num_timely, self.num_late) = (0, self.num_late + 1);
        // A single late answer means little, unless the server was late before the last pause, too.
        if self.num_late < FEW_LATE && self.pause.is_zero() {
            return None;
        }
        self.num_late = 0;
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        Some(self.pause)
    }

    /// Returns true if the server was late, and has not recovered since.
    pub(super) fn is_late(&self) -> bool {
        self.num_late > 0 || !self.pause.is_zero()
    }

    /// The server answered a call in time.
    pub(super) fn timely(&mut self) {
        self.num_timely += 1;
        if self.num_timely >= MANY_TIMELY {
            *self = Self::default();
        }
    }
}

/// Late answers after which other replicas come first.
const FEW_LATE: u32 = 3;
/// Timely answers in a row after which a server has recovered.
const MANY_TIMELY: u32 = 16;
/// Times for which other replicas come first.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_stays_late_is_asked_less_and_less_until_it_recovers() {
        let mut lateness = Lateness::default();
        assert!(!lateness.is_late());
        let mut pauses = Vec::new();
        for _ in 0..12 {
            pauses.extend(lateness.late());
            // Few timely answers are no recovery.
            (0..MANY_TIMELY - 1).for_each(|_| lateness.timely());
            assert!(lateness.is_late());
        }
        assert_eq!(pauses.len(), 12 - (FEW_LATE as usize - 1), "{pauses:?}");
        assert_eq!(pauses[0], FIRST_PAUSE);
        assert!(pauses.windows(2).all(|pair| pair[1] == (pair[0] * 2).min(LONGEST_PAUSE)));
        assert_eq!(pauses.last(), Some(&LONGEST_PAUSE));
        (0..MANY_TIMELY).for_each(|_| lateness.timely());
        assert!(!lateness.is_late());
        let again: Vec<_> = (0..FEW_LATE).filter_map(|_| lateness.late()).collect();
        assert_eq!(again, [FIRST_PAUSE], "as at the beginning");
    }
}
