//! The limit on the rate at which peers read weights of this server.

use std::time::{Duration, Instant};

/// Admits amounts of bytes so that their rate stays within a limit. Knows no clock.
#[derive(Debug)]
pub(super) struct RateLimit {
    bytes_per_s: u64,
    /// Time at which all admitted bytes have passed at the limit's rate.
    busy_until: Option<Instant>,
}

impl RateLimit {
    pub(super) const fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, busy_until: None }
    }

    /// Admits `bytes` at `now`. Up to any time it has admitted at most what the limit allows since the first call, and
    /// one amount more.
    ///
    /// # Errors
    /// The time after which to try again.
    pub(super) fn admit(&mut self, bytes: u64, now: Instant) -> Result<(), Duration> {
        let begin = self.busy_until.unwrap_or(now);
        if begin > now {
            return Err(begin - now);
        }
        let seconds = bytes as f64 / self.bytes_per_s.max(1) as f64;
        let length = Duration::try_from_secs_f64(seconds).unwrap_or(MAX_LENGTH).min(MAX_LENGTH);
        self.busy_until = Some(now + length);
        Ok(())
    }
}

/// Keeps sums of times in range.
const MAX_LENGTH: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn the_rate_stays_within_the_limit_and_close_to_it() {
        let seed = rand::random::<u64>();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let (start, bytes_per_s) = (Instant::now(), rng.random_range(1_000..1_000_000));
        let largest = bytes_per_s / 4;
        let (mut limit, mut sum, mut at) = (RateLimit::new(bytes_per_s), 0, start);
        while at < start + Duration::from_secs(60) {
            let bytes = rng.random_range(1..=largest);
            match limit.admit(bytes, at) {
                Ok(()) => sum += bytes,
                Err(pause) => at += pause.max(Duration::from_nanos(1)),
            }
            let allowed = bytes_per_s as f64 * (at - start).as_secs_f64();
            assert!(sum as f64 <= allowed + largest as f64 + 1.0, "{sum} after {allowed}");
        }
        assert!(sum as f64 >= bytes_per_s as f64 * 60.0 * 0.99, "{sum}");
    }

    #[test]
    fn idle_time_gives_no_credit() {
        let (start, mut limit) = (Instant::now(), RateLimit::new(100));
        assert_eq!(limit.admit(100, start), Ok(()));
        assert_eq!(limit.admit(1, start), Err(Duration::from_secs(1)));
        let late = start + Duration::from_secs(50);
        assert_eq!(limit.admit(200, late), Ok(()));
        assert_eq!(limit.admit(1, late), Err(Duration::from_secs(2)));
        assert_eq!(limit.admit(u64::MAX, late + Duration::from_secs(2)), Ok(()));
    }
}
