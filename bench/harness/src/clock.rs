//! The clocks that measurements read.
//!
//! [`Clock`] times intervals within a process, down to nanoseconds. [`monotonic_us`] gives times that all
//! processes of a host can compare. [`gpu`] converts times of a GPU's clock to times of the host.

pub mod gpu;

use std::time::{Duration, Instant};

/// A clock that costs a few nanoseconds to read.
///
/// It reads the processor's time stamp counter if that runs at one rate, and the system's clock otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    us_per_tick: f64,
    by_counter: bool,
    origin: Instant,
}

impl Clock {
    /// Compares the time stamp counter with the system's clock for 20 ms. Returns at once on a processor without
    /// a steady counter.
    #[must_use]
    pub fn calibrated() -> Self {
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

    /// Reads the clock. Only differences have a meaning: [`us_between`](Self::us_between).
    #[inline]
    #[must_use]
    pub fn ticks(&self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self.by_counter {
            // SAFETY: every x86-64 processor has the instruction.
            return unsafe { std::arch::x86_64::_rdtsc() };
        }
        self.origin.elapsed().as_nanos() as u64
    }

    /// Returns the microseconds between two readings, or 0 if `to` is the earlier one.
    #[inline]
    #[must_use]
    pub fn us_between(&self, from: u64, to: u64) -> f64 {
        to.saturating_sub(from) as f64 * self.us_per_tick
    }
}

/// Returns the time in microseconds by the clock that all processes of a host share.
#[must_use]
pub fn monotonic_us() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 * 1e-3
}

/// Returns a duration in microseconds.
#[inline]
#[must_use]
pub fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
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
    fn the_clock_agrees_with_the_system() {
        let clock = Clock::calibrated();
        let (start, from) = (Instant::now(), clock.ticks());
        std::thread::sleep(Duration::from_millis(5));
        let (inside, outside) = (clock.us_between(from, clock.ticks()), start.elapsed());
        assert!(inside > 4000.0 && inside <= us(outside) * 1.1, "{inside} µs");
    }
}
