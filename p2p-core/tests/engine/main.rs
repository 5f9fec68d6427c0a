//! The message engine between engines of one process, over every fabric that needs nothing installed.
#![cfg(not(loom))]

mod choice;
mod common;
mod faults;
mod killed;
mod large;
mod transfers;
