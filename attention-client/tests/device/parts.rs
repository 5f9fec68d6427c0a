//! Batches larger than a frame.

use protocol::WireDtype;
use rand::RngExt;
use switchyard_attention_client::DeviceError;

use crate::client_common::{Request, seeded};
use crate::rig::{Fleet, Tensors, check, forward};

#[test]
fn a_batch_larger_than_a_frame_goes_in_parts() {
    let mut rng = seeded("a_batch_larger_than_a_frame_goes_in_parts");
    for dtype in [WireDtype::Bf16, WireDtype::F8E4m3] {
        let Some(fleet) = Fleet::start(2, 2, dtype) else { return };
        let mut client = fleet.client();
        let most = client.max_tokens();
        assert_eq!(fleet.model.shape.top_k % 4, 0, "otherwise parts are a little smaller");
        let capacity = 3 * most + 5;
        let (tensors, mut local) = (Tensors::with_capacity(&client, capacity), fleet.local());
        let stream = client.gpu().stream().expect("stream");
        let any = rng.random_range(0..=capacity);
        for num_tokens in [capacity, 2 * most, most + 1, most, 1, 0, any] {
            let request = Request::random(&mut rng, &fleet.model, num_tokens as usize, 4);
            let input = tensors.load(&request);
            // SAFETY: the tensors have these sizes and outlive the call.
            let timing = unsafe { client.forward(&stream, request.layer, &input, tensors.out()) };
            let timing = timing.expect("all parts");
            check(&request, &tensors.read(request.num_tokens), &mut local, dtype);
            let (parts, servers) = (num_tokens.div_ceil(most), fleet.servers.len() as u32);
            assert!(timing.num_frames <= parts * servers, "{timing:?}");
            assert!(parts < 2 || timing.num_frames >= parts - 1, "{timing:?}");
            // Rows behind the last token are as they were: poison.
            let behind = tensors.read(capacity as usize);
            let behind = &behind[request.x.len()..];
            assert!(behind.iter().all(|value| value.is_nan()), "rows that do not count are kept");
        }
        let input = tensors.input();
        tensors.write(&tensors.num_tokens, &[capacity + 1]);
        // SAFETY: as above.
        let error = unsafe { client.forward(&stream, 0, &input, tensors.out()) }.unwrap_err();
        let is_named = |e: &DeviceError| matches!(e, DeviceError::Tokens { found, .. } if *found == u64::from(capacity) + 1);
        assert!(is_named(&error), "{error}");
        // Only a part at a time can be recorded.
        let mut refused = None;
        let graph = stream.capture(|stream| {
            // SAFETY: as above.
            refused = unsafe { client.forward(stream, 0, &input, tensors.out()) }.err();
            Ok(())
        });
        drop(graph);
        assert!(matches!(refused, Some(DeviceError::Capacity { .. })), "{refused:?}");
    }
}

/// Of the frames that slots have, one is taken.
#[test]
fn a_batch_in_parts_leaves_a_call_of_the_callers_own_outstanding() {
    let mut rng = seeded("a_batch_in_parts_leaves_a_call_of_the_callers_own_outstanding");
    let dtype = WireDtype::Bf16;
    let Some(fleet) = Fleet::start(2, 2, dtype) else { return };
    let mut client = fleet.client();
    let capacity = 3 * client.max_tokens();
    let (tensors, mut local) = (Tensors::with_capacity(&client, capacity), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let own_tensors = Tensors::new(&client);
    let own = Request::random(&mut rng, &fleet.model, 20, 4);
    let input = own_tensors.load(&own);
    // SAFETY: the tensors have these sizes and outlive the call.
    let pending = unsafe {
        let handle = client.dispatch(&stream, own.layer, &input).expect("dispatch");
        client.combine(&stream, handle, own_tensors.out()).expect("combine")
    };
    let request = Request::random(&mut rng, &fleet.model, capacity as usize, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
    client.finish(&stream, pending).expect("finish");
    check(&own, &own_tensors.read(own.num_tokens), &mut local, dtype);
}
