//! Experts without a live replica.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::WireDtype;
use rand::RngExt;
use switchyard_attention_client::{ClientError, DeviceError, OnMissingExpert};
use tokio::sync::watch;

use crate::client_common::{Request, seeded};
use crate::rig::{Fleet, Tensors, builder, check, forward};

const DTYPE: WireDtype = WireDtype::Bf16;
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn an_expert_without_a_replica_is_named() {
    let mut rng = seeded("an_expert_without_a_replica_is_named");
    let Some(mut fleet) = Fleet::start(2, 1, DTYPE) else { return };
    let mut client = fleet.connect(fleet.builder().replica_wait(SHORT));
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    fleet.stop(1);
    let mut request = Request::random(&mut rng, &fleet.model, 12, 4);
    request.idx[5] = 7;
    let input = tensors.load(&request);
    // SAFETY: the tensors have these sizes and outlive the call.
    let error = unsafe { client.forward(&stream, request.layer, &input, tensors.out()) };
    match error.unwrap_err() {
        DeviceError::Client(ClientError::NoReplica { layer, expert, .. }) => {
            assert_eq!((layer, expert % 2), (request.layer, 1));
        }
        other => panic!("{other}"),
    }
    // Experts with a replica are served.
    request.idx.iter_mut().filter(|expert| **expert >= 0).for_each(|expert| *expert &= !1);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
}

#[test]
fn experts_without_a_replica_are_left_out_and_the_others_scaled() {
    let mut rng = seeded("experts_without_a_replica_are_left_out_and_the_others_scaled");
    let Some(mut fleet) = Fleet::start(2, 1, DTYPE) else { return };
    let policy = OnMissingExpert::DropAndRenormalise;
    let (tables, watched) = watch::channel(Arc::new(fleet.table(1)));
    let settings = builder(&fleet.model).placement_watch(watched).replica_wait(SHORT);
    let mut client = fleet.connect(settings.on_missing_expert(policy));
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &fleet.model, 12, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
    fleet.stop(1);
    // The first call waits for a replica, the next ones do not.
    for _ in 0..4 {
        let mut request = Request::random(&mut rng, &fleet.model, 12, 4);
        request.weights.iter_mut().for_each(|weight| *weight = rng.random_range(0.1..1.0));
        let input = tensors.load(&request);
        // SAFETY: the tensors have these sizes and outlive the call.
        let timing = unsafe {
            client.forward(&stream, request.layer, &input, tensors.out()).expect("forward")
        };
        let is_gone = |expert: i32| expert >= 0 && expert % 2 == 1;
        let num_gone = request.idx.iter().filter(|&&expert| is_gone(expert)).count();
        assert_eq!(timing.missing_pairs, num_gone as u64, "{timing:?}");
        for (idx, weights) in request.idx.chunks_mut(4).zip(request.weights.chunks_mut(4)) {
            let sum = |idx: &[i32], weights: &[f32]| -> f32 {
                idx.iter().zip(weights).filter(|(e, _)| **e >= 0).map(|(_, w)| w).sum()
            };
            let total = sum(idx, weights);
            idx.iter_mut().filter(|expert| is_gone(**expert)).for_each(|expert| *expert = -1);
            let left = sum(idx, weights);
            if left > 0.0 {
                weights.iter_mut().for_each(|weight| *weight *= total / left);
            }
        }
        check(&request, &tensors.read(12), &mut local, DTYPE);
    }
    // To leave experts out, the client reads the tensors. So errors in them show early, and the call is over then.
    for _ in 0..5 {
        let mut request = Request::random(&mut rng, &fleet.model, 12, 4);
        request.idx[3] = client.model().shape.num_experts as i32;
        let input = tensors.load(&request);
        // SAFETY: as above.
        let error = unsafe { client.dispatch(&stream, request.layer, &input).unwrap_err() };
        let is_expert =
            |e: &DeviceError| matches!(e, DeviceError::Client(ClientError::ExpertIndex { .. }));
        assert!(is_expert(&error), "{error}");
    }
    // Once there is a replica again, nothing is left out.
    let successor = fleet.start_server(1);
    fleet.addrs[1] = successor.data_addr().to_string();
    tables.send(Arc::new(fleet.table(2))).expect("watched");
    let limit = Instant::now() + Duration::from_secs(60);
    loop {
        let request = Request::random(&mut rng, &fleet.model, 12, 4);
        let input = tensors.load(&request);
        // SAFETY: as above.
        let timing = unsafe {
            client.forward(&stream, request.layer, &input, tensors.out()).expect("forward")
        };
        if timing.missing_pairs == 0 && client.epoch() == 2 {
            check(&request, &tensors.read(12), &mut local, DTYPE);
            break;
        }
        assert!(Instant::now() < limit, "the successor is not used");
    }
}
