//! The expert server against an independent reference, over links within this process and over the
//! real handshake.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../tests/support/src/descriptors.rs"]
mod descriptors;
#[allow(dead_code, reason = "networks do more for other tests")]
#[path = "../../../p2p-core/tests/bootstrap/stand_in.rs"]
mod stand_in;

mod fleet;
mod hostile;
mod lifecycle;
mod merge;
