//! What only a GPU shows: graphs, and that pointers are known before anything is launched.

use std::time::{Duration, Instant};

use kernels::abi::{DTYPE_F8_E4M3, DevicePtr, FrameGeometry, Handle};
use kernels::gpu::GpuError;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, World};

#[test]
fn a_layer_replays_from_a_graph() {
    let Some(runner) = Runner::gpu() else { return };
    let Runner::Gpu(gpu) = &runner else { return };
    let mut rng = fresh();
    let geometry = FrameGeometry::new(7168, 8, DTYPE_F8_E4M3, 64, 2).expect("in range");
    let world = World::new(&runner, &mut rng, geometry, 64, 1, 1);
    let input = Input::random(&mut rng, &geometry, 64, 64);
    world.load(0, &input);
    let stream = gpu.stream().expect("stream");
    // SAFETY: the world's memory is as large as its geometry says and outlives the stream's work.
    let (dispatch, recv, send, combine) = unsafe {
        (
            gpu.prepare(world.dispatch_params(0, 3)).expect("dispatch"),
            gpu.prepare(world.recv_params(0, 1)).expect("recv"),
            gpu.prepare(world.send_params(0, DevicePtr::NULL)).expect("send"),
            gpu.prepare(world.combine_params(0)).expect("combine"),
        )
    };
    let graph = stream
        .capture(|stream| {
            stream.launch(&dispatch)?;
            stream.launch(&recv)?;
            stream.launch(&send)?;
            stream.launch(&combine)
        })
        .expect("capture");
    for replay in 1..=20u64 {
        stream.replay(&graph).expect("replay");
        stream.wait(Instant::now() + Duration::from_secs(20)).expect("layer");
        let handle: Handle = world.clients[0].handle.one(0);
        assert_eq!((handle.sequence, handle.missing, handle.refused), (replay, 0, 0));
        crate::layer::check_output(&world, 0, &input);
    }
}

#[test]
fn pointers_that_the_driver_does_not_know_are_refused() {
    let Some(runner) = Runner::gpu() else { return };
    let Runner::Gpu(gpu) = &runner else { return };
    let geometry = FrameGeometry::new(256, 4, DTYPE_F8_E4M3, 8, 2).expect("in range");
    let world = World::new(&runner, &mut fresh(), geometry, 16, 1, 1);
    let unknown = vec![0u128; 64];
    let mut params = world.dispatch_params(0, 0);
    params.topk_weights = DevicePtr(unknown.as_ptr() as u64);
    // SAFETY: refused before anything is launched.
    let error = unsafe { gpu.prepare(params) }.unwrap_err();
    assert!(matches!(error, GpuError::Unregistered { pointer: "topk_weights", .. }), "{error}");
    params.topk_weights = DevicePtr::NULL;
    // SAFETY: as above.
    let error = unsafe { gpu.prepare(params) }.unwrap_err();
    assert!(error.to_string().starts_with("dispatch: a required pointer is null"), "{error}");
}
