//! The expert server against an independent reference, over links within this process and over the
//! real handshake.

#[path = "../common/mod.rs"]
mod common;

mod fleet;
mod hostile;
mod lifecycle;
mod merge;
