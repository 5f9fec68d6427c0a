//! Tests of the proxy: lanes, threads, relays, networks, and the programs that measure them.
#![cfg(not(loom))]

mod common;
mod hostile;
mod lanes;
#[path = "../../../../kernels/tests/against_rust/library.rs"]
#[allow(dead_code, reason = "the kernels' own tests use the rest")]
mod library;
mod link_calls;
mod network;
#[path = "../../../../tests/conformance/parties.rs"]
mod parties;
mod processes;
mod produce;
mod relay;
#[path = "../../../../tests/conformance/suite.rs"]
mod suite;
mod threads;

test_support::child_processes! {
    "peer" => network::child_process,
    "poster" => processes::poster,
    "proxy" => processes::proxy,
}
