//! After warm-up a call on a GPU allocates nothing on the caller's thread.

mod client_common;
#[path = "device/rig.rs"]
#[allow(dead_code, reason = "this binary uses a part")]
mod rig;

use client_common::{Request, seeded};
use kernels::gpu::DeviceName;
use protocol::WireDtype;
use rig::{Fleet, Tensors, check, soon};
use test_support::allocations::{CountingAllocator, THREAD_ALLOCATIONS};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn calls_and_replays_on_a_gpu_allocate_nothing_after_warm_up() {
    let mut rng = seeded("calls_and_replays_on_a_gpu_allocate_nothing_after_warm_up");
    let dtype = WireDtype::F8E4m3;
    let Some(fleet) = Fleet::start(3, 2, dtype) else { return };
    let mut client = fleet.client();
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let large = Tensors::with_capacity(&client, 2 * client.max_tokens() + 3);
    let stream = client.gpu().stream().expect("stream");
    let [request, in_parts] = [&tensors, &large]
        .map(|tensors| tensors.input().capacity)
        .map(|tokens| Request::random(&mut rng, &fleet.model, tokens as usize, 4));
    let (input, large_input) = (tensors.load(&request), large.load(&in_parts));
    let layer = request.layer;
    let graph = stream.capture(|stream| {
        // SAFETY: the tensors have these sizes and outlive the graph.
        let recorded = unsafe {
            client
                .dispatch(stream, layer, &input)
                .and_then(|handle| client.combine(stream, handle, tensors.out()))
        };
        drop(recorded.expect("recorded"));
        Ok(())
    });
    let graph = graph.expect("a graph");
    // A GPU in software takes a launch into a queue of its own, in one allocation.
    let is_emulated = matches!(client.gpu().name(), DeviceName::Emulated(_));
    let count = |what: &str, launches: u64, call: &mut dyn FnMut()| {
        (0..3).for_each(|_| call());
        let before = THREAD_ALLOCATIONS.get();
        (0..CALLS).for_each(|_| call());
        let expected = if is_emulated { CALLS as u64 * launches } else { 0 };
        assert_eq!(THREAD_ALLOCATIONS.get() - before, expected, "{what}");
    };
    count("replays", 0, &mut || {
        client.replay(&stream, &graph).expect("replayed");
    });
    // SAFETY: the tensors have these sizes and outlive the calls.
    count("calls", 2, &mut || unsafe {
        client.forward(&stream, layer, &input, tensors.out()).expect("a call");
    });
    // SAFETY: as above.
    count("calls in three parts", 6, &mut || unsafe {
        let out = large.out();
        client.forward(&stream, in_parts.layer, &large_input, out).expect("a call");
    });
    stream.wait(soon()).expect("idle");
    check(&request, &tensors.read(request.num_tokens), &mut local, dtype);
    check(&in_parts, &large.read(in_parts.num_tokens), &mut local, dtype);
}

const CALLS: usize = 20;
