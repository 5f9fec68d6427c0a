//! The count of a client's late frames: frames whose rows did not arrive in time.

use std::time::{Duration, Instant};

/// Late frames of a client that are not forgiven yet.
///
/// A congested path may delay some frames, but each late frame delays the batch of all clients. So a late
/// frame is forgiven only if another frame has arrived in time, and at most one per [`FORGIVE_PERIOD`]. The
/// bound on the rate is necessary because frames are cheap: a client could otherwise buy any number of late
/// frames with frames that arrive in time.
#[derive(Debug)]
pub(super) struct LateFrames {
    num: u32,
    /// Frames in time since the last late frame was forgiven.
    num_in_time: u64,
    /// Begin of the current period.
    since: Instant,
}

impl LateFrames {
    pub(super) const fn new(now: Instant) -> Self {
        Self { num: 0, num_in_time: 0, since: now }
    }

    /// Counts frames in time and late frames, and returns the number of late frames that are not forgiven.
    pub(super) fn count(&mut self, num_in_time: u64, num_late: u32, now: Instant) -> u32 {
        self.num_in_time = self.num_in_time.saturating_add(num_in_time);
        if self.num > 0 {
            let elapsed = now.saturating_duration_since(self.since);
            let num_periods = (elapsed.as_nanos() / FORGIVE_PERIOD.as_nanos()) as u32;
            let most = u32::try_from(self.num_in_time).unwrap_or(u32::MAX);
            let forgiven = num_periods.min(most).min(self.num);
            if forgiven > 0 {
                self.num -= forgiven;
                // Time that forgave no frame is not saved for later.
                self.since += FORGIVE_PERIOD * num_periods;
                self.num_in_time = 0;
            }
        }
        if self.num == 0 {
            (self.since, self.num_in_time) = (now, 0);
        }
        self.num = self.num.saturating_add(num_late);
        self.num
    }
}

/// The server drops a client at this number of late frames that are not forgiven. In docs/explanation/failure.md.
pub(super) const MAX_LATE_FRAMES: u32 = 8;
/// Period in which one late frame is forgiven, if another frame has arrived in time. A late frame costs a batch
/// 20 ms, so a client at the limit costs the others one part in 500. In docs/explanation/failure.md.
const FORGIVE_PERIOD: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_frames_add_up_whatever_arrives_in_between() {
        let begin = Instant::now();
        let mut late = LateFrames::new(begin);
        for turn in 1..=MAX_LATE_FRAMES {
            let at = begin + Duration::from_millis(20) * turn;
            assert_eq!(late.count(1000, 1, at), turn);
            assert_eq!(late.count(1000, 0, at), turn);
        }
        let mut at_once = LateFrames::new(begin);
        assert_eq!(at_once.count(0, MAX_LATE_FRAMES, begin), MAX_LATE_FRAMES);
    }

    #[test]
    fn late_frames_are_forgiven_with_time_and_for_frames_in_time() {
        let begin = Instant::now();
        let after = |periods: f64| begin + FORGIVE_PERIOD.mul_f64(periods);
        let mut late = LateFrames::new(begin);
        assert_eq!(late.count(0, 5, begin), 5);
        // Time alone forgives nothing.
        assert_eq!(late.count(0, 1, after(50.0)), 6);
        // One frame in time forgives one late frame, however much time has passed.
        assert_eq!(late.count(1, 0, after(60.0)), 5);
        let mut late = LateFrames::new(begin);
        assert_eq!(late.count(0, 4, begin), 4);
        // Many frames in time forgive no more than the time allows.
        assert_eq!(late.count(1000, 0, after(0.9)), 4);
        assert_eq!(late.count(0, 0, after(1.1)), 3);
        // Calls in between do not extend a period.
        assert_eq!(late.count(1000, 0, after(1.9)), 3);
        assert_eq!(late.count(0, 0, after(2.1)), 2);
        assert_eq!(late.count(1000, 0, after(9.0)), 0);
        // Time without late frames is not saved for later.
        assert_eq!(late.count(1000, 7, after(90.0)), 7);
    }
}
