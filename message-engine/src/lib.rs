//! Messages, one-sided reads and writes, and notifications between processes, over any fabric.
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | connections, transfers, notifications, registered memory |
//! | [`fabric`] | one-sided operations by completion: the contract, and the fabrics `tcp` and `cma` |
//! | [`credit`] | receiver-driven credits against incast |
//!
//! The crate knows nothing about slots, models or HTTP.

pub mod credit;
pub mod engine;
pub mod fabric;

pub use engine::*;

#[cfg(test)]
test_support::child_processes! { "cma-peer" => fabric::cma::tests::peer_process }
