//! The data thread allocates nothing once its buffers have grown. The counting allocator counts for the whole
//! process, so the test runs alone, with a client that allocates nothing either.

use std::sync::atomic::Ordering;

use p2p_core::SlotConfig;
use protocol::{
    CombineExpect, DispatchMeta, Entry, FrameId, Response, ResponseScratch, TokenRef, WireDtype,
    decode_response, encode_dispatch,
};
use switchyard_expert_server::Limits;
use test_support::allocations::PROCESS_ALLOCATIONS;
use test_support::own_process::is_alone;

use crate::common::{Reference, Rig};

#[test]
fn the_data_thread_allocates_nothing_after_its_first_rounds() {
    if !is_alone("allocation::the_data_thread_allocates_nothing_after_its_first_rounds") {
        return;
    }
    let reference = Reference::open();
    let slot = SlotConfig { slot_bytes: 1 << 20, num_frames: 2 };
    let rig = Rig::start(&reference, slot, Limits::default(), |_, _| true);
    let (mut client, _, _end) = rig.client(1, WireDtype::F8E4m3, WireDtype::Bf16);
    let hidden = reference.shape.hidden as usize;
    let (max_tokens, num_layers) = (24usize, reference.shape.num_layers);
    let x: Vec<f32> = (0..max_tokens * hidden).map(|i| (i % 17) as f32 - 8.0).collect();
    let entries: Vec<Entry> =
        (0..max_tokens * 4).map(|i| Entry { expert: (i * 7 % 16) as u32, weight: 0.25 }).collect();
    let tokens: Vec<TokenRef> = (0..max_tokens as u32)
        .map(|token| TokenRef { token, entry_begin: token * 4, entry_count: 4 })
        .collect();
    let mut out = vec![0f32; max_tokens * hidden];
    let mut scratch = ResponseScratch::default();
    let mut round = |sequence: u64| {
        let num_tokens = 1 + sequence as usize * 5 % max_tokens;
        let id = FrameId {
            epoch: 1,
            client_id: 1,
            generation: 1,
            sequence,
            layer: sequence as u32 % num_layers,
            frame_idx: 0,
            num_frames: 1,
        };
        let meta = DispatchMeta {
            id,
            hidden,
            dtype: WireDtype::F8E4m3,
            response_dtype: WireDtype::Bf16,
            payload_checksum: true,
        };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let in_time = || assert!(std::time::Instant::now() < deadline, "no answer from the server");
        let frame = loop {
            if let Some(frame) = client.channel.try_reserve().expect("sound") {
                break frame;
            }
            in_time();
            std::thread::yield_now();
        };
        let mut view = client.channel.write_view(&frame);
        let tokens = &tokens[..num_tokens];
        let used_bytes = encode_dispatch(&mut view, &meta, &x, tokens, &entries).expect("it fits");
        client.channel.publish(frame, used_bytes).expect("published");
        while !client.channel.has_frame() {
            in_time();
            // The server sleeps in some rounds and spins in others.
            if sequence.is_multiple_of(3) {
                std::thread::sleep(std::time::Duration::from_micros(200));
            } else {
                std::thread::yield_now();
            }
        }
        let frame = client.channel.try_next().expect("sound").expect("a frame");
        let expect = CombineExpect {
            client_id: 1,
            generation: 1,
            sequence,
            layer: id.layer,
            frame_idx: 0,
            num_tokens,
            hidden,
            dtype: WireDtype::Bf16,
        };
        let view = client.channel.view(&frame);
        match decode_response(view, &expect, &mut scratch).expect("sound") {
            Response::Rows(mut rows) => {
                rows.read_rows_f32(0..num_tokens, &mut out[..num_tokens * hidden]).expect("rows");
            }
            Response::Error(error) => panic!("{error}"),
        }
        client.channel.release().expect("released");
    };
    (0..200).for_each(&mut round);
    let before = PROCESS_ALLOCATIONS.load(Ordering::Relaxed);
    (200..1200).for_each(&mut round);
    let allocations = PROCESS_ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(allocations, 0, "allocations in 1000 rounds after the warm-up");
    rig.stop();
}
