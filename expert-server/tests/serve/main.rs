//! The expert server against an independent reference, over links within this process and over the
//! real handshake.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../p2p-core/tests/bootstrap/stand_in.rs"]
mod stand_in;

mod fleet;
mod hostile;
mod lifecycle;
mod merge;
