//! The expert server against an independent reference: over links within this process, over the real
//! handshake, and on a GPU.

mod allocation;
mod attackers;
mod common;
mod device;
mod failpoints;
mod peers;
mod serve;
#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../../../p2p-core/tests/bootstrap/stand_in.rs"]
mod stand_in;

use test_support::allocations::CountingAllocator;

test_support::child_processes! {
    "client" => device::leaving::client,
    "dying-peer" => peers::dying_peer,
    "stopping-peer" => peers::stopping_peer,
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
