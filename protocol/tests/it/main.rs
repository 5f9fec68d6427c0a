//! Frames and hellos: against independent references, with damage, and with a peer that keeps writing.

mod abi_header;
mod allocations;
mod common;
mod convert;
mod hello;
mod late_writer;
mod mutation;
mod refused;
mod round_trip;
