//! Tests of the verbs transport beyond the suite: faults, refusals, whole devices, counters, and foreign peers.
//! They need a device; `tests/rxe/` provides one.
#![cfg(feature = "rdma")]

mod common;
mod deaths;
mod device;
mod guessed_keys;
mod handshakes;
mod late;
mod perftest;
mod queue_pairs;
mod refusals;
mod signals;
mod stalls;

test_support::child_processes! { "peer" => deaths::peer_process }
