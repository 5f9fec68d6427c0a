//! Right answers: every wire type, every layer, many clients at once, in order.

use p2p_core::SlotConfig;
use protocol::{ErrorCode, WireDtype};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_expert_server::Limits;

use crate::common::{Reference, Request, Rig, eventually, reference_format, seeded};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 1 << 20, num_frames: 2 };

#[test]
fn every_pair_of_wire_types_answers_like_the_naive_reference() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
    for dtype in WireDtype::ALL {
        for response_dtype in WireDtype::ALL {
            let (mut client, _, _end) = rig.client(7, dtype, response_dtype);
            for num_tokens in [1, 2, rng.random_range(3..20)] {
                let request = Request::random(&mut rng, &reference.shape, num_tokens);
                client.round_trip(&request, &reference);
            }
        }
    }
    rig.stop();
}

#[test]
fn packed_weights_answer_like_the_naive_reference() {
    let mut rng = seeded();
    for name in ["ct-int4-asym", "ct-mxfp4", "gptq-int4", "awq-g32", "ct-fp8-channel"] {
        let reference = Reference::of(&reference_format(name));
        let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
        let (mut client, _, _end) = rig.client(7, WireDtype::F32, WireDtype::F32);
        for num_tokens in [1, 2, 17] {
            let request = Request::random(&mut rng, &reference.shape, num_tokens);
            client.round_trip(&request, &reference);
        }
        rig.stop();
    }
}

#[test]
fn frames_of_a_layer_are_merged_across_clients_and_answers_stay_right_and_in_order() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
    // Timing decides whether frames share a batch, but within so many rounds some do.
    let merged_clients = |rig: &Rig| {
        let (sum, count) =
            ("switchyard_server_batch_clients_sum", "switchyard_server_batch_clients_count");
        rig.metric(sum) - rig.metric(count)
    };
    let mut rounds = 0;
    while merged_clients(&rig) < 4.0 || rounds < 10 {
        rounds += 1;
        assert!(rounds < 500, "frames never met in one batch");
        let mut clients: Vec<_> =
            (0..4).map(|id| rig.unattached(id, WireDtype::F32, WireDtype::F32)).collect();
        let layer = rng.random_range(0..reference.shape.num_layers);
        let sent: Vec<_> = clients
            .iter_mut()
            .map(|(client, _)| {
                // Two frames each, mostly of the same layer, sometimes with another layer in between.
                [0, 1].map(|_| {
                    let num_tokens = rng.random_range(1..12);
                    let mut request = Request::random(&mut rng, &reference.shape, num_tokens);
                    if rng.random_range(0..4) > 0 {
                        request.layer = layer;
                    }
                    let sequence = client.try_send(&request).expect("a fresh ring has credit");
                    (sequence, request)
                })
            })
            .collect();
        let (mut clients, channels): (Vec<_>, Vec<_>) = clients.into_iter().unzip();
        let ends: Vec<_> = clients
            .iter()
            .zip(channels)
            .map(|(client, channel)| rig.data.attach(channel, client.expected_by_server()))
            .collect();
        for (client, frames) in clients.iter_mut().zip(&sent) {
            for (sequence, request) in frames {
                let reply = client.receive(*sequence, request);
                let rows = reply.rows.expect("rows");
                reference.check(request, WireDtype::F32, WireDtype::F32, &rows);
            }
        }
        for (id, _end) in ends {
            rig.data.detach(id);
        }
    }
    rig.stop();
}

#[test]
fn concurrent_clients_with_frames_in_flight_wrap_their_rings_thousands_of_times() {
    let mut rng = seeded();
    let reference = Reference::open();
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 3 };
    let rig = Rig::start(&reference, slot, Limits::default(), |_, _| true);
    let seeds: Vec<u64> = (0..3).map(|_| rng.random()).collect();
    std::thread::scope(|scope| {
        for (id, seed) in seeds.into_iter().enumerate() {
            let (rig, reference) = (&rig, &reference);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(seed);
                let (mut client, _, _end) = rig.client(id as u64, WireDtype::Bf16, WireDtype::F32);
                let mut in_flight = std::collections::VecDeque::new();
                for _ in 0..1500 {
                    let num_tokens = rng.random_range(1..4);
                    let request = Request::random(&mut rng, &reference.shape, num_tokens);
                    in_flight.push_back((client.send(&request), request));
                    // Up to three frames in flight: the client fills the next ones while one is computed.
                    while in_flight.len() >= 3
                        || (in_flight.len() > 1 && rng.random_range(0..3) == 0)
                    {
                        let (sequence, request) = in_flight.pop_front().expect("in flight");
                        let rows = client.receive(sequence, &request).rows.expect("rows");
                        reference.check(&request, WireDtype::Bf16, WireDtype::F32, &rows);
                    }
                }
                for (sequence, request) in in_flight {
                    let rows = client.receive(sequence, &request).rows.expect("rows");
                    reference.check(&request, WireDtype::Bf16, WireDtype::F32, &rows);
                }
            });
        }
    });
    assert_eq!(rig.metric("switchyard_server_frames_total{direction=\"in\"}"), 4500.0);
    assert_eq!(rig.metric("switchyard_server_frames_total{direction=\"out\"}"), 4500.0);
    rig.stop();
}

#[test]
fn a_batch_limit_of_one_token_still_serves_frames_of_any_size() {
    let mut rng = seeded();
    let reference = Reference::open();
    let limits = Limits { max_batch_tokens: 1, max_batch_entries: 1, ..Limits::default() };
    let rig = Rig::start(&reference, SLOT, limits, |_, _| true);
    let (mut client, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    for num_tokens in [1, 50, client.geometry.max_tokens()] {
        let request = Request::random(&mut rng, &reference.shape, num_tokens);
        client.round_trip(&request, &reference);
    }
    rig.stop();
}

#[test]
fn an_expert_that_is_elsewhere_is_named_and_other_frames_of_the_batch_are_served() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig =
        Rig::start(&reference, SLOT, Limits::default(), |layer, expert| (layer, expert) != (2, 5));
    let (mut client, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    let hidden = reference.shape.hidden as usize;
    let at =
        |layer, expert| Request { layer, x: vec![0.5; hidden], routes: vec![vec![(expert, 1.0)]] };
    let (held, missing) = (at(2, 4), at(2, 5));
    // In one batch most of the time, and always in order.
    for _ in 0..20 {
        let (first, second) = (client.send(&held), client.send(&missing));
        let rows = client.receive(first, &held).rows.expect("rows");
        reference.check(&held, WireDtype::F32, WireDtype::F32, &rows);
        let (code, message) = client.receive(second, &missing).rows.expect_err("not held");
        assert_eq!(code, ErrorCode::NotMyExpert);
        assert!(message.contains("layer 2") && message.contains("expert 5"), "{message}");
    }
    // A stale placement is not an attack, so the link stays open.
    assert_eq!(rig.metric("switchyard_server_bad_frames_total{code=\"not_my_expert\"}"), 20.0);
    let elsewhere = Request::random(&mut rng, &reference.shape, 1);
    let elsewhere = Request { layer: 0, ..elsewhere };
    client.round_trip(&elsewhere, &reference);
    rig.stop();
}

#[test]
fn a_long_computation_shows_progress_to_its_client_and_to_those_that_queue() {
    let mut rng = seeded();
    let reference = Reference::open();
    let slot = SlotConfig { slot_bytes: 20 << 20, num_frames: 2 };
    let rig = Rig::start(&reference, slot, Limits::default(), |_, _| true);
    let (mut long, _, _end) = rig.client(1, WireDtype::Bf16, WireDtype::Bf16);
    let (mut short, _, _end) = rig.client(2, WireDtype::F32, WireDtype::F32);
    let num_tokens = long.geometry.max_tokens();
    let prefill = Request::random(&mut rng, &reference.shape, num_tokens);
    let decode = Request::random(&mut rng, &reference.shape, 1);
    let before = [long.channel.peer_activity(), short.channel.peer_activity()];
    let sequence = long.send(&prefill);
    // The credit has come back, so the computation of the batch begins.
    eventually("the frame's credit", || long.channel.peer_activity() > before[0]);
    // A frame that arrives near the end of the batch has nothing to wait for.
    let came_early = !long.channel.has_frame();
    let waited = std::time::Instant::now();
    short.round_trip(&decode, &reference);
    let waited_ms = waited.elapsed().as_millis();
    let reply = long.receive(sequence, &prefill);
    // One publish and one credit each; all other kicks are progress.
    let progress = [long.channel.peer_activity(), short.channel.peer_activity()];
    let progress = [progress[0] - before[0] - 2, progress[1] - before[1] - 2];
    let compute_ms = reply.times.compute_ns / 1_000_000;
    println!(
        "{num_tokens} tokens computed in {compute_ms} ms, progress {}; queued for {waited_ms} ms, progress {}",
        progress[0], progress[1]
    );
    assert!(compute_ms < 4 || progress[0] >= 1, "silent for {compute_ms} ms");
    let had_to_wait = came_early && compute_ms >= 20 && waited_ms >= 50;
    assert!(!had_to_wait || progress[1] >= 1, "silent for {waited_ms} ms");
    rig.stop();
}
