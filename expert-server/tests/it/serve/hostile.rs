//! Clients that break the rules, on purpose or by their death. Other clients are not affected.

use std::time::{Duration, Instant};

use p2p_core::slot::{CONSUMED, PUBLISHED};
use p2p_core::{Endpoint, RemoteRange, SlotConfig, Transport};
use protocol::{ErrorCode, WireDtype};
use rand::RngExt;
use switchyard_expert_server::{DropReason, Limits};

use crate::common::{PATIENCE, Reference, Request, Rig, TestClient, closed, eventually, seeded};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 256 << 10, num_frames: 2 };

#[test]
fn mangled_frames_get_error_frames_and_disturb_no_other_client() {
    let mut rng = seeded();
    let reference = Reference::open();
    let limits = Limits { max_bad_frames: u32::MAX, ..Limits::default() };
    let rig = Rig::start(&reference, SLOT, limits, |_, _| true);
    let (mut good, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    let (mut hostile, _, _end) = rig.client(2, WireDtype::F8E4m3, WireDtype::Bf16);
    let mut num_refused = 0;
    for round in 0..400 {
        let num_tokens = rng.random_range(1..6);
        let request = Request::random(&mut rng, &reference.shape, num_tokens);
        let frame = hostile.channel.try_reserve().expect("sound").expect("credit");
        let (_, used_bytes) = hostile.write(&frame, &request);
        let mut view = hostile.channel.write_view(&frame);
        for _ in 0..rng.random_range(1..4) {
            // Mostly in the header and the tables.
            let end = if rng.random_range(0..3) > 0 { 256.min(used_bytes) } else { used_bytes };
            let (at, value): (usize, u8) = (rng.random_range(0..end), rng.random());
            view.put_bytes(at, &[value]).expect("within the frame");
        }
        hostile.channel.publish(frame, used_bytes).expect("published");
        let request = Request::random(&mut rng, &reference.shape, 2);
        good.round_trip(&request, &reference);
        num_refused += u32::from(!is_served(&mut hostile));
        assert_eq!(rig.metric("switchyard_server_links"), 2.0, "round {round}");
    }
    println!("{num_refused} of 400 mangled frames were refused");
    assert!(num_refused > 200);
    // The hostile client itself is served again once its frames are valid.
    let request = Request::random(&mut rng, &reference.shape, 3);
    hostile.round_trip(&request, &reference);
    rig.stop();
}

/// Takes the next answer and returns true if it is rows, by the kind at byte 38 of the header.
fn is_served<E: Transport>(client: &mut TestClient<E>) -> bool {
    eventually("an answer to every frame", || client.channel.has_frame());
    let frame = client.channel.try_next().expect("sound").expect("a frame");
    let mut kind = [0; 2];
    client.channel.view(&frame).copy_to(38, &mut kind).expect("a header");
    client.channel.release().expect("released");
    u16::from_le_bytes(kind) == protocol::abi::KIND_COMBINE
}

#[test]
fn a_frame_of_another_client_or_generation_is_refused() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
    let (mut client, channel) = rig.unattached(3, WireDtype::F32, WireDtype::F32);
    let mut expect = client.expected_by_server();
    expect.generation += 1;
    let (_, _end) = rig.data.attach(channel, expect);
    let request = Request::random(&mut rng, &reference.shape, 1);
    let sequence = client.send(&request);
    let (code, message) = client.receive(sequence, &request).rows.expect_err("refused");
    assert_eq!(code, ErrorCode::StaleChannel);
    assert!(message.contains("generation is 1, expected 2"), "{message}");
    rig.stop();
}

#[test]
fn a_client_that_sends_nothing_but_garbage_is_dropped() {
    let reference = Reference::open();
    let limits = Limits { max_bad_frames: 5, ..Limits::default() };
    let rig = Rig::start(&reference, SLOT, limits, |_, _| true);
    let (mut client, _, end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    eventually("the link", || rig.metric("switchyard_server_links") == 1.0);
    for _ in 0..6 {
        let frame = client.channel.try_reserve().expect("sound").expect("credit");
        client.channel.publish(frame, 64).expect("published");
        // The last frame may get no answer, because it closes the link.
        let is_over = || rig.metric("switchyard_server_links") == 0.0;
        eventually("an answer or the end", || client.channel.has_frame() || is_over());
        if client.channel.has_frame() {
            is_served(&mut client);
        }
    }
    let ended = closed(end);
    assert_eq!(ended.reason, DropReason::BadFrames);
    rig.stop();
}

#[test]
fn impossible_flags_end_that_link_alone() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
    let (mut good, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    for (word, value) in
        [(PUBLISHED, 3), (PUBLISHED, u64::MAX), (PUBLISHED, 1 << 40), (CONSUMED, 7)]
    {
        let (mut hostile, _, end) = rig.client(2, WireDtype::F32, WireDtype::F32);
        let offset = hostile.channel.layout().control_offset(word);
        let dst = RemoteRange { key: hostile.channel.remote_key(), offset, len: 8 };
        hostile.channel.endpoint_mut().add_flag(dst, value).expect("a flag");
        let request = Request::random(&mut rng, &reference.shape, 1);
        // The server reads credits only when the ring of answers looks full.
        for _ in 0..if word == CONSUMED { SLOT.num_frames + 1 } else { 0 } {
            hostile.send(&request);
        }
        let ended = closed(end);
        assert_eq!(ended.reason, DropReason::Desync, "flag at {word} plus {value}");
        good.round_trip(&request, &reference);
    }
    rig.stop();
}

#[test]
fn a_client_that_takes_no_answers_blocks_no_other_client_and_is_dropped() {
    let mut rng = seeded();
    let reference = Reference::open();
    let limits = Limits { credit_timeout: Duration::from_millis(300), ..Limits::default() };
    let rig = Rig::start(&reference, SLOT, limits, |_, _| true);
    let (mut good, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    let (mut greedy, _, mut end) = rig.client(2, WireDtype::F32, WireDtype::F32);
    let mut num_sent = 0;
    let deadline = Instant::now() + PATIENCE;
    let ended = loop {
        assert!(Instant::now() < deadline, "a client that takes no answers is kept");
        let request = Request::random(&mut rng, &reference.shape, 2);
        num_sent += u32::from(greedy.try_send(&request).is_some());
        good.round_trip(&request, &reference);
        if let Ok(ended) = end.try_recv() {
            break ended;
        }
    };
    assert_eq!(ended.reason, DropReason::NoCredit);
    // Two answers in the ring, two in the backlog, two requests in the ring: there is no more room.
    assert!(num_sent <= 6, "{num_sent} frames were taken from a client that takes no answers");
    assert_eq!(rig.metric("switchyard_server_backlog_frames"), 0.0);
    rig.stop();
}

#[test]
fn a_slow_client_gets_every_answer_in_order_when_it_wakes_up() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
    let (mut slow, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    for _ in 0..20 {
        let mut sent = Vec::new();
        for _ in 0..6 {
            let mut request = Request::random(&mut rng, &reference.shape, 2);
            if sent.len() == 2 {
                // An error frame keeps its position in the order of answers.
                request.routes[0][0].0 = reference.shape.num_experts;
            }
            eventually("credit", || match slow.try_send(&request) {
                Some(sequence) => {
                    sent.push((sequence, request.clone()));
                    true
                }
                None => false,
            });
        }
        for (at, (sequence, request)) in sent.iter().enumerate() {
            let reply = slow.receive(*sequence, request);
            match reply.rows {
                Ok(rows) => reference.check(request, WireDtype::F32, WireDtype::F32, &rows),
                Err((code, _)) => assert_eq!((at, code), (2, ErrorCode::UnknownExpert)),
            }
        }
    }
    rig.stop();
}

#[test]
fn a_client_that_vanishes_in_mid_write_costs_its_slot_and_nothing_else() {
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(&reference, SLOT, Limits::default(), |_, _| true);
    let (mut good, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    for round in 0..30 {
        let (mut dying, id, end) = rig.client(100 + round, WireDtype::F32, WireDtype::F32);
        let request = Request::random(&mut rng, &reference.shape, 8);
        match round % 3 {
            // The payload is half written and not published.
            0 => {
                let frame = dying.channel.try_reserve().expect("sound").expect("credit");
                dying.channel.write_view(&frame).put_bytes(0, &[0xa5; 2000]).expect("in range");
            }
            // The frame is published, and the answer is never taken.
            1 => drop(dying.send(&request)),
            // Both frames are published, and the second is still being written.
            _ => {
                dying.send(&request);
                let frame = dying.channel.try_reserve().expect("sound").expect("credit");
                dying.write(&frame, &request);
                dying.channel.publish(frame, 100).expect("published");
            }
        }
        drop(dying);
        rig.data.detach(id);
        good.round_trip(&Request::random(&mut rng, &reference.shape, 2), &reference);
        let ended = closed(end);
        assert_eq!(ended.reason, DropReason::PeerClosed);
    }
    assert_eq!(rig.metric("switchyard_server_links"), 1.0);
    assert_eq!(rig.metric("switchyard_server_links_dropped_total{reason=\"peer_closed\"}"), 30.0);
    rig.stop();
}
