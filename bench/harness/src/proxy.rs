//! Commands from kernels or from threads of this host, through the threads of a proxy.
//!
//! Modules for the programs `benchmark_local`, `benchmark_remote` and `benchmark_relay`, and what they share: endpoints
//! in place of a transport, the payload, and output.

pub mod gpu;
pub mod local;
pub mod output;
mod post;
#[cfg(feature = "relay")]
pub mod relay;
pub mod remote;

use std::time::Duration;

pub use post::{BenchEndpoint, Checks, Posts};

/// Returns the processor time of this process's threads whose names begin with `prefix`, and their number.
#[must_use]
pub fn thread_time(prefix: &str) -> (Duration, usize) {
    let mut total = Duration::ZERO;
    let mut num = 0;
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if !read("comm").starts_with(prefix) {
            continue;
        }
        // The first word is the time on a processor in nanoseconds.
        let text = read("schedstat");
        let ns = text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
        total += Duration::from_nanos(ns);
        num += 1;
    }
    (total, num)
}

/// Returns word `word_idx` of object `number` of a lane, as `SY_PROXY_PATTERN` does in C++.
#[must_use]
pub const fn pattern(lane: u64, number: u64, word_idx: u64) -> u64 {
    number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (lane << 40 | word_idx).wrapping_mul(0xd134_2543_de82_ef95)
}
