//! After warm-up a call allocates nothing on the caller's thread.

mod client_common;

use std::num::NonZeroUsize;
use std::time::Duration;

use client_common::{Fleet, Request, difference, local_reference, metric, poisoned, seeded};
use p2p_core::SlotConfig;
use rand::rngs::StdRng;
use telemetry::{Recorder, Sampler};
use test_support::allocations::{CountingAllocator, THREAD_ALLOCATIONS};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn a_call_allocates_nothing_after_warm_up() {
    let mut rng = seeded("a_call_allocates_nothing_after_warm_up");
    calls_allocate_nothing(&mut rng, None);
}

/// The ring is full after some calls, and then drops what comes.
#[test]
fn a_traced_call_allocates_nothing_after_warm_up() {
    let mut rng = seeded("a_traced_call_allocates_nothing_after_warm_up");
    let recorder = Recorder::new(Sampler::new(1.0).unwrap(), 500);
    calls_allocate_nothing(&mut rng, Some(recorder.clone()));
    assert!(recorder.take().is_some() && recorder.num_dropped() > 0);
}

fn calls_allocate_nothing(rng: &mut StdRng, recorder: Option<Recorder>) {
    // Many frames per call, and many servers.
    let fleet = Fleet::start(3, 2, SlotConfig { slot_bytes: 64 << 10, num_frames: 2 });
    // A hedge may grow buffers.
    let mut builder = fleet.builder().hedge_budget(0.0);
    if let Some(recorder) = recorder {
        builder = builder.recorder(recorder);
    }
    let client = builder.build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let requests: Vec<_> = [1, 7, 64, 300]
        .into_iter()
        .flat_map(|num_tokens| [num_tokens; 3])
        .map(|num_tokens| Request::random(rng, &fleet.model, num_tokens, 4))
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

#[test]
fn after_warm_up_not_even_the_first_calls_allocate() {
    let mut rng = seeded("after_warm_up_not_even_the_first_calls_allocate");
    let fleet = Fleet::start(3, 2, SlotConfig { slot_bytes: 64 << 10, num_frames: 2 });
    // A hedge may grow buffers.
    let client = fleet.builder().hedge_budget(0.0).build().unwrap();
    client.warm_up(300, 2, Duration::from_secs(20)).unwrap();
    assert_eq!(metric(&client, "switchyard_client_lanes", None), 2.0);
    let calls = metric(&client, "switchyard_client_requests_total", None);
    assert_eq!(calls, 4.0, "two lanes, and two frames in a slot");
    let requests: Vec<_> = [300, 1, 64, 299, 7, 300]
        .map(|num_tokens| Request::random(&mut rng, &fleet.model, num_tokens, 4))
        .into();
    let mut outs: Vec<_> = requests.iter().map(|request| poisoned(request.x.len())).collect();
    let mut servers = Vec::with_capacity(3);
    let before = THREAD_ALLOCATIONS.get();
    for (pair, outs) in requests.chunks_exact(2).zip(outs.chunks_exact_mut(2)) {
        let handles = [&pair[0], &pair[1]].map(|Request { layer, x, idx, weights, .. }| {
            client.dispatch(*layer, x, idx, weights).unwrap()
        });
        for (handle, out) in handles.into_iter().zip(outs) {
            client.combine_reported(handle, out, Some(&mut servers), &|| false).unwrap();
        }
    }
    assert_eq!(THREAD_ALLOCATIONS.get() - before, 0, "allocations in the first calls");
    let mut local = fleet.local();
    for (request, out) in requests.iter().zip(&outs) {
        assert!(difference(out, &local_reference(request, &mut local)) < 1e-5);
    }
}

#[test]
fn a_warm_up_beyond_the_lanes_is_refused() {
    let fleet = Fleet::start(1, 1, SlotConfig::default());
    let lanes = NonZeroUsize::new(2).unwrap();
    let client = fleet.builder().hedge_budget(0.0).max_lanes(lanes).build().unwrap();
    for num_calls in [0, 3] {
        let error = client.warm_up(1, num_calls, Duration::from_secs(20)).unwrap_err();
        assert!(error.to_string().contains("1 to 2"), "{error}");
    }
    client.warm_up(0, 2, Duration::from_secs(20)).unwrap();
}
