//! The expert server against an independent reference: over links within this process, over the real
//! handshake, and on a GPU.

mod allocation;
mod common;
#[path = "../../../tests/support/src/counting.rs"]
mod counting;
#[path = "../../../tests/support/src/descriptors.rs"]
mod descriptors;
mod device;
mod failpoints;
#[path = "../../../tests/support/src/own_process.rs"]
mod own_process;
mod serve;
#[path = "../../../tests/support/src/skip.rs"]
mod skip;
#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../../../p2p-core/tests/bootstrap/stand_in.rs"]
mod stand_in;
