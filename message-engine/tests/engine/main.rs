//! The message engine between engines of one process, over every fabric that needs nothing installed.
#![cfg(not(loom))]

mod allocations;
mod choice;
mod common;
mod device_memory;
mod direct;
mod exhausted;
mod fairness;
mod faults;
mod hooked;
mod killed;
mod large;
mod pending_handshakes;
mod resets;
mod secure;
mod settings;
mod sharing;
mod stuck;
mod tasks;
mod transfers;

#[global_allocator]
static ALLOCATOR: test_support::allocations::CountingAllocator =
    test_support::allocations::CountingAllocator;

test_support::child_processes! {
    "victim" => killed::victim,
    "exhausted" => exhausted::engine_without_descriptors,
}
