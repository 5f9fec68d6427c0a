//! What the benchmarks share: stand-ins for a transport, the check of the payload, figures.

pub mod gpu;
pub mod gpu_clock;
mod lines;
pub mod local;
pub mod output;
mod post;
#[cfg(feature = "cuda")]
pub mod relay;
pub mod remote;

use std::time::Duration;

pub use post::{BenchEndpoint, Checks, Posts};

/// Figures of latencies.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct Latency {
    /// Microseconds.
    pub mean_us: f64,
    /// Microseconds.
    pub p50_us: f64,
    /// Microseconds.
    pub p90_us: f64,
    /// Microseconds.
    pub p99_us: f64,
    /// Microseconds.
    pub max_us: f64,
}

impl Latency {
    /// Of samples in nanoseconds, in any order.
    #[must_use]
    pub fn of(mut samples: Vec<u64>) -> Option<Self> {
        if samples.is_empty() {
            return None;
        }
        samples.sort_unstable();
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |part: f64| us(samples[((samples.len() - 1) as f64 * part) as usize]);
        let sum: u64 = samples.iter().sum();
        Some(Self {
            mean_us: sum as f64 / samples.len() as f64 / 1e3,
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            max_us: at(1.0),
        })
    }
}

/// Processor time of this process's threads whose name begins with `prefix`, and their number.
#[must_use]
pub fn thread_time(prefix: &str) -> (Duration, usize) {
    let mut total = Duration::ZERO;
    let mut num = 0;
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if !read("comm").starts_with(prefix) {
            continue;
        }
        // Nanoseconds on a processor come first.
        let text = read("schedstat");
        let ns = text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
        total += Duration::from_nanos(ns);
        num += 1;
    }
    (total, num)
}

/// Word `word_idx` of object `number` of a lane: `SY_PROXY_PATTERN`.
#[must_use]
pub const fn pattern(lane: u64, number: u64, word_idx: u64) -> u64 {
    number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (lane << 40 | word_idx).wrapping_mul(0xd134_2543_de82_ef95)
}
