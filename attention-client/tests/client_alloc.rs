//! After warm-up a call allocates nothing on the caller's thread.

mod client_common;

use std::time::Duration;

use client_common::{Fleet, Request, poisoned, seeded};
use p2p_core::SlotConfig;
use test_support::allocations::{CountingAllocator, THREAD_ALLOCATIONS};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_call_allocates_nothing_after_warm_up() {
    let mut rng = seeded("a_call_allocates_nothing_after_warm_up");
    // Many frames per call, and many servers.
    let fleet = Fleet::start(3, 2, SlotConfig { slot_bytes: 64 << 10, num_frames: 2 });
    let client = fleet.builder().build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let requests: Vec<_> = [1, 7, 64, 300]
        .into_iter()
        .flat_map(|num_tokens| [num_tokens; 3])
        .map(|num_tokens| Request::random(&mut rng, &fleet.model, num_tokens, 4))
        .collect();
    let mut outs: Vec<_> = requests.iter().map(|request| poisoned(request.x.len())).collect();
    let mut round = || {
        for (request, out) in requests.iter().zip(&mut outs) {
            client.forward(request.layer, &request.x, &request.idx, &request.weights, out).unwrap();
        }
    };
    for _ in 0..3 {
        round();
    }
    let before = THREAD_ALLOCATIONS.get();
    for _ in 0..5 {
        round();
    }
    assert_eq!(THREAD_ALLOCATIONS.get() - before, 0, "allocations in 60 calls");
}
