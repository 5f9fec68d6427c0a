//! Outputs, orders of calls, and what callers drop.

use protocol::WireDtype;
use rand::RngExt;
use switchyard_attention_client::DeviceError;

use crate::client_common::{Request, seeded};
use crate::rig::{Fleet, Tensors, check, forward};

fn agree(test: &str, dtype: WireDtype) {
    let mut rng = seeded(test);
    let Some(fleet) = Fleet::start(3, 2, dtype) else { return };
    let mut client = fleet.client();
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    for round in 0..12 {
        let num_tokens = match round % 4 {
            0 => 1,
            1 => client.max_tokens() as usize,
            2 => rng.random_range(0..3),
            _ => rng.random_range(2..client.max_tokens() as usize),
        };
        let k = rng.random_range(1..=4);
        let request = Request::random(&mut rng, &fleet.model, num_tokens, k);
        let timing = forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
        assert_eq!((timing.failovers, timing.resent_pairs, timing.missing_pairs), (0, 0, 0));
        assert!(timing.num_servers <= 3);
    }
}

#[test]
fn outputs_with_fp8_requests_agree_with_the_processor() {
    agree("outputs_with_fp8_requests_agree_with_the_processor", WireDtype::F8E4m3);
}

#[test]
fn outputs_with_bf16_requests_agree_with_the_processor() {
    agree("outputs_with_bf16_requests_agree_with_the_processor", WireDtype::Bf16);
}

#[test]
fn a_lone_caller_gets_the_same_bits_every_time() {
    let mut rng = seeded("a_lone_caller_gets_the_same_bits_every_time");
    let Some(fleet) = Fleet::start(3, 2, WireDtype::F8E4m3) else { return };
    let mut client = fleet.client();
    let tensors = Tensors::new(&client);
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 20, 4);
    let mut first = Vec::new();
    for _ in 0..5 {
        let input = tensors.load(&request);
        // SAFETY: the tensors have these sizes and outlive the call.
        unsafe { client.forward(&stream, request.layer, &input, tensors.out()) }.expect("call");
        let out: Vec<u32> = tensors.read(20).into_iter().map(f32::to_bits).collect();
        if first.is_empty() {
            first.clone_from(&out);
        }
        assert_eq!(out, first);
    }
}

#[test]
fn two_calls_overlap_and_keep_their_order() {
    let mut rng = seeded("two_calls_overlap_and_keep_their_order");
    let dtype = WireDtype::Bf16;
    let Some(fleet) = Fleet::start(2, 1, dtype) else { return };
    let mut client = fleet.client();
    let all = [Tensors::new(&client), Tensors::new(&client), Tensors::new(&client)];
    let mut local = fleet.local();
    let stream = client.gpu().stream().expect("stream");
    for _ in 0..4 {
        let requests: Vec<Request> =
            (0..3).map(|_| Request::random(&mut rng, &fleet.model, 8, 4)).collect();
        let inputs: Vec<_> =
            all.iter().zip(&requests).map(|(tensors, request)| tensors.load(request)).collect();
        // SAFETY: the tensors have these sizes and outlive the calls.
        unsafe {
            let first = client.dispatch(&stream, requests[0].layer, &inputs[0]).expect("first");
            let second = client.dispatch(&stream, requests[1].layer, &inputs[1]).expect("second");
            // Slots have two frames.
            let error = client.dispatch(&stream, requests[2].layer, &inputs[2]).unwrap_err();
            assert!(matches!(error, DeviceError::Outstanding { num_frames: 2 }), "{error}");
            let first = client.combine(&stream, first, all[0].out()).expect("first");
            let second = client.combine(&stream, second, all[1].out()).expect("second");
            client.finish(&stream, second).expect("second");
            client.finish(&stream, first).expect("first");
        }
        for (tensors, request) in all.iter().zip(&requests).take(2) {
            check(request, &tensors.read(8), &mut local, dtype);
        }
    }
    // Out of order: refused, and the call is given up; the next one takes care of its frames.
    let request = Request::random(&mut rng, &fleet.model, 8, 4);
    let input = all[0].load(&request);
    // SAFETY: as above.
    unsafe {
        let first = client.dispatch(&stream, request.layer, &input).expect("first");
        let second = client.dispatch(&stream, request.layer, &input).expect("second");
        let error = client.combine(&stream, second, all[0].out()).unwrap_err();
        assert!(matches!(error, DeviceError::Order { .. }), "{error}");
        drop(first);
    }
    for _ in 0..5 {
        forward(&mut client, &stream, &all[0], &request, &mut local, dtype);
    }
    let abandoned = client.registry().gather();
    let abandoned = abandoned
        .iter()
        .find(|family| family.name() == "switchyard_client_abandoned_requests_total")
        .expect("metric");
    assert_eq!(abandoned.get_metric()[0].get_counter().get_value(), 2.0);
}

#[test]
fn two_clients_share_servers() {
    let mut rng = seeded("two_clients_share_servers");
    let dtype = WireDtype::F8E4m3;
    let Some(fleet) = Fleet::start(2, 2, dtype) else { return };
    let jobs: Vec<_> = (0..2)
        .map(|_| {
            let requests: Vec<Request> = (0..8)
                .map(|_| {
                    let num_tokens = rng.random_range(1..20);
                    Request::random(&mut rng, &fleet.model, num_tokens, 4)
                })
                .collect();
            (fleet.client(), fleet.local(), requests)
        })
        .collect();
    std::thread::scope(|scope| {
        for (mut client, mut local, requests) in jobs {
            scope.spawn(move || {
                let tensors = Tensors::new(&client);
                let stream = client.gpu().stream().expect("stream");
                for request in &requests {
                    forward(&mut client, &stream, &tensors, request, &mut local, dtype);
                }
            });
        }
    });
}

#[test]
fn a_client_that_is_dropped_leaves_its_kernels_what_they_use() {
    let mut rng = seeded("a_client_that_is_dropped_leaves_its_kernels_what_they_use");
    let dtype = WireDtype::Bf16;
    let Some(fleet) = Fleet::start(1, 1, dtype) else { return };
    let mut client = fleet.client();
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 10, 4);
    let input = tensors.load(&request);
    let (release, held) = std::sync::mpsc::channel::<()>();
    let hold = move || {
        let _ = held.recv_timeout(std::time::Duration::from_secs(20));
    };
    stream.then(hold).expect("then");
    // SAFETY: the tensors have these sizes and outlive the kernels, which are waited for.
    unsafe {
        let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
        drop(client.combine(&stream, handle, tensors.out()).expect("combine"));
    }
    drop(client);
    // Only now do its kernels begin.
    release.send(()).expect("held");
    stream.wait(crate::rig::soon()).expect("kernels");
    let mut client = fleet.client();
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
}
