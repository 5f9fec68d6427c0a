//! Many peers, and peers that die, over every transport. Every test counts resources of its process, so it needs a
//! process of its own. cargo-nextest provides one.

mod deaths;
mod engine;
mod peers;
mod storm;
mod support;

test_support::child_processes! { "victim" => deaths::victim }
