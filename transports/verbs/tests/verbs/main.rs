//! What the verbs transport does beyond the suite: faults, refusals, whole devices, counters, and peers
//! that are not ours. Runs where there is a device; `tests/rxe/` provides one.
#![cfg(feature = "rdma")]

mod common;
mod deaths;
mod device;
mod handshakes;
mod lanes;
mod late;
mod perftest;
mod refusals;
mod signals;
#[path = "../../../../tests/support/src/skip.rs"]
mod skip;
mod stalls;
