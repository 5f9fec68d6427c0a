//! A peer that writes while its frame is decoded can damage only its own rows.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::guarded::Guarded;
use crate::common::{Answer, MEMORY_BYTES, Request, fresh_rng, reseal};
use rand::RngExt;
use rand::rngs::StdRng;
use switchyard_protocol::{
    DispatchScratch, Response, ResponseScratch, WireDtype, decode_dispatch, decode_response,
};

/// Decodes repeatedly, at least `MIN_ROUNDS` times, while a thread overwrites the memory with one frame
/// after another, sometimes with a random word in between.
fn with_late_writer(rng: &mut StdRng, frames: &[Vec<u8>], mut decode: impl FnMut(&Guarded, usize)) {
    let len = frames.iter().map(Vec::len).max().expect("frames").next_multiple_of(8);
    let mut memory = Guarded::new(MEMORY_BYTES);
    memory.write(len).put_bytes(0, &frames[0]).expect("fits");
    // The writer writes atomic words, so only the reader's copies race. In a real system the writer is
    // another process, so the race is outside of Rust's memory model.
    let words = memory.tail(len).as_ptr().expose_provenance();
    let num_words = len / 8;
    let stop = AtomicBool::new(false);
    let noise: Vec<(usize, u64)> =
        (0..4096).map(|_| (rng.random_range(0..num_words.min(64)), rng.random())).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let base = std::ptr::with_exposed_provenance::<AtomicU64>(words);
            let store = |word: usize, value: u64| {
                // SAFETY: `len` bytes from `base` are mapped until the scope ends, and 8-aligned.
                unsafe { (*base.add(word)).store(value, Ordering::Relaxed) };
            };
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let frame = &frames[round % frames.len()];
                for (word, bytes) in frame.chunks(8).enumerate() {
                    let mut value = [0; 8];
                    value[..bytes.len()].copy_from_slice(bytes);
                    store(word, u64::from_ne_bytes(value));
                }
                let (word, value) = noise[round % noise.len()];
                if round % 3 == 0 {
                    store(word, value);
                }
                round += 1;
            }
        });
        let begin = Instant::now();
        let mut rounds = 0;
        while rounds < MIN_ROUNDS || begin.elapsed() < Duration::from_millis(500) {
            decode(&memory, len);
            rounds += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_dispatch_frame_that_changes_while_it_is_read_harms_no_other_data() {
    let mut rng = fresh_rng();
    for dtype in WireDtype::ALL {
        let request = Request::random(&mut rng, 136, dtype, false, 8);
        let sound = request.frame();
        // Frames with one hostile value each and valid checksums.
        let mut frames = vec![sound.clone(), Request { ..request.clone() }.frame()];
        for field in 0..4 {
            let mut hostile = sound.clone();
            reseal(&mut hostile, |header| match field {
                0 => header.num_tokens = u32::MAX,
                1 => header.num_entries = 1 << 30,
                2 => header.payload_offset = u32::MAX - 127,
                _ => header.entries_offset = header.tokens_offset,
            });
            frames.push(hostile);
        }
        let (mut sound_frames, mut refused) = (0u64, 0u64);
        let mut scratch = DispatchScratch::default();
        let mut out = Vec::new();
        with_late_writer(&mut rng, &frames, |memory, len| {
            let Ok(mut dispatch) = decode_dispatch(memory.read(len), &request.expect, &mut scratch)
            else {
                refused += 1;
                return;
            };
            sound_frames += 1;
            let num_tokens = dispatch.num_tokens();
            assert_eq!(num_tokens, request.tokens.len());
            for token in 0..num_tokens {
                for entry in dispatch.entries_of(token) {
                    assert!(entry.expert < request.expect.num_experts);
                    assert!(entry.weight.is_finite());
                }
            }
            out.resize(num_tokens * 136, 0.0);
            dispatch.read_rows_f32(0..num_tokens, &mut out).expect("no checksum to fail");
        });
        println!("{dtype}: {sound_frames} sound, {refused} refused");
    }
}

#[test]
fn a_response_frame_that_changes_while_it_is_read_harms_no_other_data() {
    let mut rng = fresh_rng();
    for dtype in WireDtype::ALL {
        let answer = Answer::random(&mut rng, 136, dtype, true, 5);
        let sound = answer.frame();
        let mut frames = vec![sound.clone()];
        for field in 0..3 {
            let mut hostile = sound.clone();
            reseal(&mut hostile, |header| match field {
                0 => header.num_tokens = 1 << 31,
                1 => header.row_stride_bytes = u32::MAX - 15,
                _ => header.kind = switchyard_protocol::abi::KIND_ERROR,
            });
            frames.push(hostile);
        }
        // With a checksum, rows that are read without an error are the rows that were sent.
        let expected: Vec<u32> = answer
            .rows
            .chunks(136)
            .flat_map(|row| crate::common::through_wire(dtype, row))
            .map(f32::to_bits)
            .collect();
        let (mut sound_frames, mut refused) = (0u64, 0u64);
        let mut scratch = ResponseScratch::default();
        let mut out = vec![0f32; answer.rows.len()];
        with_late_writer(&mut rng, &frames, |memory, len| {
            let rows = match decode_response(memory.read(len), &answer.expect, &mut scratch) {
                Ok(Response::Rows(rows)) => Some(rows),
                _ => None,
            };
            match rows.map(|mut rows| rows.read_rows_f32(0..5, &mut out)) {
                Some(Ok(())) => {
                    sound_frames += 1;
                    assert!(out.iter().map(|x| x.to_bits()).eq(expected.iter().copied()));
                }
                _ => refused += 1,
            }
        });
        println!("{dtype}: {sound_frames} sound, {refused} refused");
    }
}

const MIN_ROUNDS: usize = 2000;
