//! The message engine between engines of one process, over every fabric that needs nothing installed.
#![cfg(not(loom))]

#[path = "../../../tests/support/src/bounded.rs"]
mod bounded;
mod choice;
mod common;
mod device_memory;
mod exhausted;
mod fairness;
mod faults;
#[path = "../../../tests/support/src/held.rs"]
mod held;
mod hooked;
mod killed;
mod large;
mod pending_handshakes;
mod resets;
mod settings;
mod sharing;
#[path = "../../../tests/support/src/skip.rs"]
mod skip;
mod stuck;
mod tasks;
mod transfers;
