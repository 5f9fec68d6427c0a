//! A clock that costs a few nanoseconds to read.

use std::time::{Duration, Instant};

/// Reads the processor's time stamp counter where it runs at one rate, and the system's clock
/// elsewhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    us_per_tick: f64,
    by_counter: bool,
    origin: Instant,
}

impl Clock {
    /// Takes 20 ms where there is a counter to be compared with the system's clock.
    pub(super) fn calibrated() -> Self {
        let origin = Instant::now();
        let mut clock = Self { us_per_tick: 1e-3, by_counter: counter_is_steady(), origin };
        if clock.by_counter {
            let (start, ticks) = (Instant::now(), clock.ticks());
            std::thread::sleep(Duration::from_millis(20));
            let (elapsed, ticks) = (start.elapsed(), clock.ticks() - ticks);
            clock.us_per_tick = elapsed.as_secs_f64() * 1e6 / ticks.max(1) as f64;
        }
        clock
    }

    #[inline]
    pub(super) fn ticks(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.by_counter {
            // SAFETY: every x86-64 processor has the instruction.
            return unsafe { std::arch::x86_64::_rdtsc() };
        }
        self.origin.elapsed().as_nanos() as u64
    }

    /// Microseconds between two readings.
    #[inline]
    pub(super) fn us_between(&self, from: u64, to: u64) -> f64 {
        to.saturating_sub(from) as f64 * self.us_per_tick
    }
}

/// The value that `fraction` of `samples` do not exceed. Sorts them; 0 for none.
pub(super) fn percentile(samples: &mut [f64], fraction: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let rank = (samples.len() as f64 * fraction).ceil() as usize;
    samples.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn counter_is_steady() -> bool {
    cfg!(target_arch = "x86_64")
        && std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| {
            text.lines().find(|line| line.starts_with("flags")).is_some_and(|flags| {
                flags.contains("constant_tsc") && flags.contains("nonstop_tsc")
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut samples, 0.5), 50.0);
        assert_eq!(percentile(&mut samples, 0.99), 99.0);
        assert_eq!(percentile(&mut [7.0], 0.99), 7.0);
        assert_eq!(percentile(&mut [], 0.5), 0.0);
    }

    #[test]
    fn the_clock_agrees_with_the_system() {
        let clock = Clock::calibrated();
        let (start, from) = (Instant::now(), clock.ticks());
        std::thread::sleep(Duration::from_millis(5));
        let (inside, outside) = (clock.us_between(from, clock.ticks()), start.elapsed());
        assert!(inside > 4000.0 && inside <= outside.as_secs_f64() * 1.1e6, "{inside} µs");
    }
}
