//! The client against real expert servers over shared memory.

mod client_common;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use client_common::{
    Fleet, Request, difference, local_reference, metric, not_ready_because, poisoned, seeded,
};
use p2p_core::SlotConfig;
use protocol::{ModelShape, WireDtype};
use rand::RngExt;
use switchyard_attention_client::{ClientError, MoeClient};
use tokio::sync::watch;

/// Small enough that a hundred tokens take many frames.
const SMALL: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

fn forward(client: &MoeClient, request: &Request) -> Result<Vec<f32>, ClientError> {
    let mut out = poisoned(request.x.len());
    client.forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)?;
    Ok(out)
}

#[test]
fn random_shapes_agree_with_local_experts() {
    let mut rng = seeded("random_shapes_agree_with_local_experts");
    let fleet = Fleet::start(3, 2, SMALL);
    let client = fleet.builder().build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut local = fleet.local();
    for round in 0..40 {
        let num_tokens = match round % 4 {
            0 => rng.random_range(0..3),
            1 => rng.random_range(3..20),
            2 => rng.random_range(20..100),
            // Far more than all rings together hold.
            _ => rng.random_range(300..700),
        };
        let k = rng.random_range(1..=4);
        let request = Request::random(&mut rng, &fleet.model, num_tokens, k);
        let found = forward(&client, &request).unwrap();
        let worst = difference(&found, &local_reference(&request, &mut local));
        assert!(worst < 1e-5, "round {round}: {num_tokens} tokens differ by {worst}");
    }
    assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
    assert_eq!(metric(&client, "switchyard_client_failovers_total", None), 0.0);
}

#[test]
fn a_report_names_each_server_and_its_share() {
    let mut rng = seeded("a_report_names_each_server_and_its_share");
    let mut fleet = Fleet::start(3, 2, SMALL);
    let client = fleet.builder().build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let request = Request::random(&mut rng, &fleet.model, 100, 4);
    let num_pairs = request.idx.iter().filter(|&&expert| expert >= 0).count() as u64;
    let mut out = poisoned(request.x.len());
    let mut servers = Vec::new();
    let mut call = |servers: &mut Vec<_>| {
        let Request { layer, x, idx, weights, .. } = &request;
        let handle = client.dispatch(*layer, x, idx, weights).unwrap();
        client.combine_reported(handle, &mut out, Some(servers), &|| false).unwrap()
    };
    let timing = call(&mut servers);
    let mut names: Vec<_> = servers.iter().map(|server| server.name.to_string()).collect();
    names.sort_unstable();
    assert_eq!(names, ["server-0", "server-1", "server-2"]);
    assert_eq!(servers.len() as u32, timing.num_servers);
    assert_eq!(servers.iter().map(|server| server.num_frames).sum::<u32>(), timing.num_frames);
    assert_eq!(servers.iter().map(|server| server.answered_pairs).sum::<u64>(), num_pairs);
    for server in &servers {
        assert!(server.wait_ns > 0 && server.wait_ns >= server.compute_ns, "{server:?}");
        assert!(server.queue_ns <= timing.server_queue_ns, "{server:?}");
        assert!(server.compute_ns <= timing.server_compute_ns, "{server:?}");
        assert_eq!((server.failovers, server.resent_pairs), (0, 0));
    }
    // A server that is gone has no part, and nothing is left of the call before.
    fleet.stop(1);
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let timing = call(&mut servers);
    assert!(servers.iter().all(|server| &*server.name != "server-1"), "{servers:?}");
    assert_eq!(servers.len() as u32, timing.num_servers);
    // A call without tokens for experts contacts none.
    let handle = client.dispatch(request.layer, &[], &[], &[]).unwrap();
    client.combine_reported(handle, &mut [], Some(&mut servers), &|| false).unwrap();
    assert!(servers.is_empty());
}

#[test]
fn a_client_is_not_ready_once_the_only_replica_has_ended() {
    let mut fleet = Fleet::start(2, 1, SMALL);
    let client = fleet.builder().build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    fleet.stop(1);
    // At once: the client's own thread may not have seen the end yet.
    let error = client.wait_ready(Duration::ZERO).unwrap_err();
    assert!(matches!(error, ClientError::NoReplica { .. }), "{error}");
}

#[test]
fn a_lone_caller_gets_the_same_bits_every_time() {
    let mut rng = seeded("a_lone_caller_gets_the_same_bits_every_time");
    let fleet = Fleet::start(4, 2, SMALL);
    // On a busy machine a server may look slow.
    let client = fleet.builder().hedge_budget(0.0).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let request = Request::random(&mut rng, &fleet.model, 200, 4);
    let first = forward(&client, &request).unwrap();
    for _ in 0..10 {
        let again = forward(&client, &request).unwrap();
        assert!(first.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn every_wire_dtype_is_as_exact_as_its_bits() {
    let mut rng = seeded("every_wire_dtype_is_as_exact_as_its_bits");
    let fleet = Fleet::start(2, 1, SlotConfig { slot_bytes: 1 << 20, num_frames: 2 });
    let mut local = fleet.local();
    for dtype in WireDtype::ALL {
        for response_dtype in WireDtype::ALL {
            let client =
                fleet.builder().wire_dtype(dtype).response_dtype(response_dtype).build().unwrap();
            client.wait_ready(Duration::from_secs(20)).unwrap();
            let request = Request::random(&mut rng, &fleet.model, 33, 4);
            let found = forward(&client, &request).unwrap();
            let worst = difference(&found, &local_reference(&request, &mut local));
            let allowed = error_of(dtype) + error_of(response_dtype);
            assert!(worst < allowed, "{dtype} out, {response_dtype} back: {worst} of {allowed}");
        }
    }
}

/// Several roundings of the type, relative to the largest value of a tensor.
fn error_of(dtype: WireDtype) -> f32 {
    match dtype {
        WireDtype::F32 => 1e-5,
        WireDtype::F16 => 4e-3,
        WireDtype::Bf16 => 3e-2,
        _ => 2e-1,
    }
}

#[test]
fn nothing_to_do_gives_zeros_without_traffic() {
    let mut rng = seeded("nothing_to_do_gives_zeros_without_traffic");
    let fleet = Fleet::start(1, 1, SMALL);
    let client = fleet.builder().build().unwrap();
    let mut request = Request::random(&mut rng, &fleet.model, 5, 4);
    request.idx.fill(-1);
    // The weight of a masked entry is not looked at.
    request.weights.fill(f32::NAN);
    assert!(forward(&client, &request).unwrap().iter().all(|&v| v == 0.0));
    client.forward(request.layer, &[], &[], &[], &mut []).unwrap();
    assert_eq!(metric(&client, "switchyard_client_frames_total", None), 0.0);
    assert_eq!(metric(&client, "switchyard_client_lanes", None), 0.0);
}

#[test]
fn wrong_arguments_are_named() {
    let mut rng = seeded("wrong_arguments_are_named");
    let fleet = Fleet::start(1, 1, SMALL);
    let client = fleet.builder().build().unwrap();
    let good = Request::random(&mut rng, &fleet.model, 3, 2);
    let fails = |change: &dyn Fn(&mut Request), parts: &[&str]| {
        let mut request = good.clone();
        request.idx.fill(0);
        change(&mut request);
        let error = forward(&client, &request).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    };
    fails(&|r| r.layer = 77, &["layer 77", "0, 1, 2, 3"]);
    fails(&|r| r.idx[3] = 16, &["token 1", "is 16", "0 to 15"]);
    fails(&|r| r.idx[4] = -2, &["token 2", "is -2"]);
    fails(&|r| r.weights[0] = f32::INFINITY, &["token 0", "inf"]);
    fails(&|r| r.x.truncate(100), &["x has 100 values", "256"]);
    fails(&|r| r.idx.truncate(5), &["topk_weights has 6"]);
    fails(&|r| r.idx.extend([0; 12]), &["topk_weights"]);
    let handle = client.dispatch(0, &good.x, &good.idx, &good.weights).unwrap();
    let error = client.combine(handle, &mut [0.0; 3]).unwrap_err().to_string();
    assert!(error.contains("out has 3 values, expected 768"), "{error}");
    // The lane of the abandoned call is as good as new.
    forward(&client, &good).unwrap();
}

#[test]
fn many_threads_call_at_once_and_overlap_layers() {
    let mut rng = seeded("many_threads_call_at_once_and_overlap_layers");
    let fleet = Arc::new(Fleet::start(2, 2, SMALL));
    let lanes = NonZeroUsize::new(4).unwrap();
    let client = fleet.builder().max_lanes(lanes).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let threads: Vec<_> = (0..6)
        .map(|thread| {
            let (client, fleet) = (client.clone(), Arc::clone(&fleet));
            let requests: Vec<Request> = (0..6)
                .map(|_| {
                    let num_tokens = rng.random_range(1..60);
                    Request::random(&mut rng, &fleet.model, num_tokens, 4)
                })
                .collect();
            std::thread::spawn(move || {
                let mut local = fleet.local();
                for pair in requests.chunks(2) {
                    let check = |request: &Request, found: &[f32], local: &mut _| {
                        let worst = difference(found, &local_reference(request, local));
                        assert!(worst < 1e-5, "thread {thread}: {worst}");
                    };
                    if thread < 2 {
                        // Double batching: two layers under way, combined in the other order.
                        let [a, b] = pair else { unreachable!() };
                        let first = client.dispatch(a.layer, &a.x, &a.idx, &a.weights).unwrap();
                        let second = client.dispatch(b.layer, &b.x, &b.idx, &b.weights).unwrap();
                        let mut out = poisoned(b.x.len());
                        client.combine(second, &mut out).unwrap();
                        check(b, &out, &mut local);
                        let mut out = poisoned(a.x.len());
                        client.combine(first, &mut out).unwrap();
                        check(a, &out, &mut local);
                    } else {
                        for request in pair {
                            check(request, &forward(&client, request).unwrap(), &mut local);
                        }
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(metric(&client, "switchyard_client_lanes", None) <= 4.0);
    assert_eq!(metric(&client, "switchyard_client_lanes_busy", None), 0.0);
}

#[test]
fn too_many_handles_are_an_error_and_dropped_ones_come_back() {
    let mut rng = seeded("too_many_handles_are_an_error_and_dropped_ones_come_back");
    let fleet = Fleet::start(1, 1, SMALL);
    let builder = fleet.builder().max_lanes(NonZeroUsize::new(2).unwrap());
    let client = builder.replica_wait(Duration::from_millis(500)).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut local = fleet.local();
    // More than the rings hold, so that dropped calls leave answers behind.
    let request = Request::random(&mut rng, &fleet.model, 300, 4);
    for _ in 0..3 {
        let dispatch =
            || client.dispatch(request.layer, &request.x, &request.idx, &request.weights);
        let (first, second) = (dispatch().unwrap(), dispatch().unwrap());
        let error = dispatch().unwrap_err();
        assert!(matches!(error, ClientError::LanesExhausted { max_lanes: 2, .. }), "{error}");
        drop(first);
        let worst = difference(
            &forward(&client, &request).unwrap(),
            &local_reference(&request, &mut local),
        );
        assert!(worst < 1e-5, "{worst}");
        drop(second);
    }
    let abandoned = metric(&client, "switchyard_client_abandoned_requests_total", None);
    // A call whose lane was still connecting had nothing outstanding yet.
    assert!((1.0..=6.0).contains(&abandoned), "{abandoned}");
}

#[test]
fn a_server_that_goes_costs_no_request() {
    let mut rng = seeded("a_server_that_goes_costs_no_request");
    let mut fleet = Fleet::start(3, 2, SMALL);
    let client = fleet.builder().build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut local = fleet.local();
    for round in 0..12 {
        let request = Request::random(&mut rng, &fleet.model, 120, 4);
        let handle = client.dispatch(request.layer, &request.x, &request.idx, &request.weights);
        if round == 4 {
            fleet.stop(1);
        }
        let mut out = poisoned(request.x.len());
        client.combine(handle.unwrap(), &mut out).unwrap();
        let worst = difference(&out, &local_reference(&request, &mut local));
        assert!(worst < 1e-5, "round {round}: {worst}");
    }
    fleet.stop(2);
    let mut request = Request::random(&mut rng, &fleet.model, 4, 4);
    request.idx.fill(1);
    let brief = fleet.builder().replica_wait(Duration::from_millis(100)).build().unwrap();
    let error = forward(&brief, &request).unwrap_err();
    let text = error.to_string();
    let named = format!("expert 1 of layer {}", request.layer);
    assert!(text.contains(&named) && text.contains("server-1"), "{text}");
}

#[test]
fn a_placement_that_changes_is_followed() {
    let mut rng = seeded("a_placement_that_changes_is_followed");
    let fleet = Fleet::start(2, 2, SMALL);
    let with = |epoch, server: u32| {
        let mut table = fleet.table.clone();
        table.epoch = epoch;
        table.servers = vec![table.servers[server as usize].clone()];
        table.layers.iter_mut().flat_map(|l| &mut l.replicas).for_each(|r| *r = vec![0]);
        Arc::new(table)
    };
    let (tables, receiver) = watch::channel(with(1, 0));
    let client = fleet.builder().placement_watch(receiver).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut local = fleet.local();
    let links = |server: usize| fleet.servers[server].as_ref().unwrap().num_links();
    for epoch in 2..6 {
        let request = Request::random(&mut rng, &fleet.model, 50, 4);
        let worst = difference(
            &forward(&client, &request).unwrap(),
            &local_reference(&request, &mut local),
        );
        assert!(worst < 1e-5, "epoch {epoch}: {worst}");
        tables.send_replace(with(epoch, (epoch % 2) as u32 ^ 1));
        let until = Instant::now() + Duration::from_secs(20);
        while client.epoch() != epoch {
            assert!(Instant::now() < until, "epoch {epoch} does not arrive");
            std::thread::yield_now();
        }
    }
    // The server that left gets its memory back although no call is made.
    let until = Instant::now() + Duration::from_secs(20);
    while links(1) != 0 {
        assert!(Instant::now() < until, "links stay open");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(metric(&client, "switchyard_client_failovers_total", None), 0.0);
}

#[test]
fn another_model_is_refused_in_words() {
    let fleet = Fleet::start(1, 1, SMALL);
    let mut model = fleet.model.clone();
    model.shape.fingerprint[0] ^= 1;
    let mut table = fleet.table.clone();
    let error = MoeClient::builder(model.clone()).placement(table.clone()).slot(SMALL).build();
    assert!(error.unwrap_err().to_string().contains("the placement is for another model"));
    // A placement that lies: the servers themselves say no.
    table.model = Some(model.descriptor());
    let client = MoeClient::builder(model).placement(table).slot(SMALL).build().unwrap();
    not_ready_because(&client, &["fingerprint"]);
    // A client without experts of its own takes any weights, but no other sizes.
    let mut model = fleet.model.clone();
    model.shape.fingerprint = ModelShape::UNKNOWN_FINGERPRINT;
    let table = fleet.table.clone();
    let client =
        MoeClient::builder(model.clone()).placement(table.clone()).slot(SMALL).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    model.shape.hidden += 1;
    let error = MoeClient::builder(model).placement(table).slot(SMALL).build().unwrap_err();
    assert!(error.to_string().contains("hidden size"), "{error}");
    let slot = SlotConfig { slot_bytes: 128 << 10, num_frames: 2 };
    let client = fleet.builder().slot(slot).build().unwrap();
    not_ready_because(&client, &["65536", "131072"]);
}
