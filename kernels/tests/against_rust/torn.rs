//! Rows that arrive in part, late, or without a reader. Warps wait independently, so some have summed a row that
//! others give up. A row that was not taken looks like one of a later frame. Neither may affect results.

use std::collections::BTreeSet;
use std::mem::offset_of;

use half::bf16;
use kernels::abi::{
    ANSWER_HOLE, ClientState, CombineParams, DTYPE_BF16, DevicePtr, FLAG_ADD, FrameGeometry,
    Handle, NO_ROUTE, ROUTE_SHIFT, TAG_COMBINE_ROW, TAG_NONE,
};
use kernels::plan::KernelParams;
use protocol::convert::bf16_to_f32;
use rand::RngExt;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, World};

pub fn a_sum_has_the_parts_that_are_not_missing_and_no_others(runner: &Runner) {
    // By the kernels for few blocks and for many, and rows of one pass, of a part of a block, and of two passes.
    for (hidden, tokens, num_servers, is_few) in [
        (7168, 24, 2, true),
        (7168, 24, 3, true),
        (7168, 70, 3, false),
        (1024, 12, 3, false),
        (4096, 12, 3, false),
    ] {
        one_tears(runner, hidden, tokens, num_servers, is_few);
    }
}

fn one_tears(runner: &Runner, hidden: u32, tokens: u32, num_servers: usize, is_few: bool) {
    let mut rng = fresh();
    let geometry = FrameGeometry::new(hidden, 3, DTYPE_BF16, tokens, 2).expect("in range");
    let world = World::new(runner, &mut rng, geometry, 16, 1, num_servers);
    let mut params = world.combine_params(0);
    if !is_few && hidden == 7168 {
        params.num_blocks = 66; // two tokens for some
    }
    params.timeout_ns = 100_000; // nothing more comes
    assert_eq!(params.plan().is_few, is_few);
    world.poison();
    let mut input = Input::random(&mut rng, &geometry, 16, tokens);
    input.hidden_states.fill_with(|| bf16::from_f32(rng.random_range(-4.0..4.0)).to_bits());
    world.load(0, &input);
    // SAFETY: the world's memory is as large as its geometry says.
    unsafe {
        assert_eq!(runner.launch(&world.dispatch_params(0, 0)), 0);
        for server in 0..num_servers {
            assert_eq!(runner.launch(&world.recv_params(server, 1)), 0);
        }
    }
    let client = &world.clients[0];
    let handle: Handle = client.handle.one(0);
    let slot = &client.responses[1];
    let place = handle.frame_number[1] % u64::from(geometry.num_frames);
    let rows = place * geometry.response_frame_bytes + geometry.response_payload_offset;
    let stride = u64::from(geometry.response_stride_bytes);
    let num_values = (tokens * hidden) as usize;
    for flags in [0, FLAG_ADD] {
        for server in 0..num_servers {
            // SAFETY: as above.
            let status = unsafe { runner.launch(&world.send_params(server, DevicePtr::NULL)) };
            assert_eq!(status, 0);
        }
        // Words of some rows have not come: the last ones, or the first, or one in the midst. Warps lack each of
        // these for themselves.
        let mut torn = Vec::new();
        for row in 0..u64::from(handle.num_rows[1]) {
            let words = match rng.random_range(0..9) {
                _ if torn.len() == 4 => 0..0,
                0 => stride / 16 * 3..stride / 4,
                1 => 0..stride / 16,
                2 => stride / 8 + 7..stride / 8 + 8,
                _ => 0..0,
            };
            if !words.is_empty() {
                torn.push(row as usize);
            }
            let holes = vec![ANSWER_HOLE; words.clone().count()];
            slot.write(rows + row * stride + words.start * 4, &holes);
        }
        if torn.is_empty() {
            continue; // rare
        }
        let begin: Vec<u16> = match flags {
            FLAG_ADD => (0..num_values)
                .map(|_| bf16::from_f32(rng.random_range(-4.0..4.0)).to_bits())
                .collect(),
            _ => vec![u16::MAX; num_values],
        };
        client.out.write(0, &begin);
        // SAFETY: as above.
        assert_eq!(unsafe { runner.launch(&CombineParams { flags, ..params }) }, 0);

        let missing: Vec<u32> = client.token_missing.read(0, tokens.into());
        let out: Vec<u16> = client.out.read(0, num_values as u64);
        let (mut row_of_one, mut blocks, mut names_all) = (0, BTreeSet::new(), false);
        for (token, &lacks) in missing.iter().enumerate() {
            let servers = world.servers_of(&input, token as u32);
            let all = servers.iter().fold(0, |all, (server, _)| all | 1u32 << server);
            assert_eq!(lacks & !all, 0, "token {token} lacks what it never had");
            if all & 0b10 != 0 {
                let is_torn = torn.contains(&row_of_one);
                assert!(!is_torn || lacks & 0b10 != 0, "token {token}: half a row counts");
                row_of_one += 1;
                // The first of a block is torn for sure, and shows it if other servers have parts of it.
                if is_torn && blocks.insert(token as u32 % params.plan().num_blocks) {
                    names_all |= all != 0b10;
                }
            } else {
                assert_eq!(lacks, 0, "token {token}");
            }
            // Other servers' parts go only with a sum that begins at zero.
            assert!(
                matches!(lacks, 0 | 0b10) || (lacks == all && flags == 0),
                "token {token}: {lacks:#b}"
            );
            let mut sums = vec![0f32; hidden as usize];
            let at = token * hidden as usize..(token + 1) * hidden as usize;
            if flags == FLAG_ADD {
                bf16_to_f32(&begin[at.clone()], &mut sums);
            }
            for (server, places) in servers {
                if lacks >> server & 1 == 0 {
                    let weight = |place: &usize| input.topk_weights[token * 3 + place];
                    let weight = places.iter().map(weight).fold(0.0, |sum: f32, w| sum + w);
                    add(&mut sums, &input.hidden_states[at.clone()], weight);
                }
            }
            let expected: Vec<u16> =
                sums.iter().map(|sum| bf16::from_f32(*sum).to_bits()).collect();
            assert!(out[at] == expected, "token {token} without {lacks:#b}, flags {flags}");
        }
        let are_torn = missing.iter().any(|lacks| lacks.count_ones() > 1);
        assert!(are_torn || flags != 0 || !names_all, "no token: {missing:?}, rows {torn:?}");
        let state: ClientState = client.state.one(0);
        assert_eq!((state.error.peer, state.error.expected), (1, handle.frame_number[1]));
        assert_ne!(state.error.tag, TAG_NONE);
        assert_eq!(state.awaited, [0; 32], "nobody waits any more");
        // As the host does when a peer's place is used again.
        slot.fill(rows, u64::from(handle.num_rows[1]) * stride, u8::MAX);
        client.handle.write(offset_of!(Handle, missing) as u64, &[0u32]);
    }
}

fn add(sums: &mut [f32], values: &[u16], weight: f32) {
    let mut wide = vec![0f32; values.len()];
    bf16_to_f32(values, &mut wide);
    for (sum, value) in sums.iter_mut().zip(wide) {
        let mut part = [0f32];
        bf16_to_f32(&[bf16::from_f32(value * weight).to_bits()], &mut part);
        *sum += part[0];
    }
}

/// Answers of a server after it was given up, and answers that were never summed, are no answers to later frames.
pub fn answers_of_other_frames_do_not_count(runner: &Runner) {
    for (hidden, tokens) in [(7168, 24), (7168, 70), (1024, 12)] {
        for is_late in [true, false] {
            takes_nothing_of_other_frames(runner, hidden, tokens, is_late);
        }
    }
}

fn takes_nothing_of_other_frames(runner: &Runner, hidden: u32, tokens: u32, is_late: bool) {
    let mut rng = fresh();
    let geometry = FrameGeometry::new(hidden, 3, DTYPE_BF16, tokens, 2).expect("in range");
    let world = World::new(runner, &mut rng, geometry, 16, 1, 2);
    world.poison();
    let client = &world.clients[0];
    let handle = || -> Handle { client.handle.one(0) };
    let dispatch = || {
        // SAFETY: the world's memory is as large as its geometry says.
        assert_eq!(unsafe { runner.launch(&world.dispatch_params(0, 0)) }, 0);
    };
    let answer = |server| {
        // SAFETY: as above.
        unsafe {
            assert_eq!(runner.launch(&world.recv_params(server, 1)), 0);
            assert_eq!(runner.launch(&world.send_params(server, DevicePtr::NULL)), 0);
        }
    };
    let combine = || {
        let params = CombineParams { timeout_ns: 100_000, ..world.combine_params(0) };
        // SAFETY: as above.
        assert_eq!(unsafe { runner.launch(&params) }, 0);
    };
    for frame in 1..=4u64 {
        if frame == 4 {
            world.begin_anew(0, 1);
        }
        let mut input = Input::random(&mut rng, &geometry, 16, tokens);
        input.hidden_states.fill_with(|| bf16::from_f32(rng.random_range(-4.0..4.0)).to_bits());
        world.load(0, &input);
        dispatch();
        assert_eq!(handle().frame_number[1], frame);
        answer(0);
        match (frame, is_late) {
            // Given up, and answered then.
            (1, true) => {
                combine();
                assert_eq!(handle().missing, 0b10);
                answer(1);
                continue;
            }
            // Answered, but not summed.
            (1, false) => {
                answer(1);
                client.handle.write(offset_of!(Handle, missing) as u64, &[0u32]);
                // The other server's is summed, as if it alone had been asked.
                let contacted = handle().contacted;
                client.handle.write(offset_of!(Handle, contacted) as u64, &[contacted & 1]);
                let routes = size_of::<Handle>() as u64;
                let all: Vec<u32> = client.handle.read(routes, u64::from(tokens * 3));
                let of_one = |route: u32| route != NO_ROUTE && route >> ROUTE_SHIFT == 1;
                let only = |route: &u32| if of_one(*route) { NO_ROUTE } else { *route };
                client.handle.write(routes, &all.iter().map(only).collect::<Vec<u32>>());
                combine();
                client.handle.write(routes, &all);
                assert_eq!(handle().missing, 0);
                continue;
            }
            // In the other place of the ring, or after the new beginning, in time.
            (2 | 4, _) => answer(1),
            // Not at all: the existing answer is of the first frame.
            _ => {}
        }
        combine();
        let error = client.state.one::<ClientState>(0).error;
        let is_whole = frame == 4 || (frame, is_late) == (2, false);
        assert_eq!(handle().missing, if is_whole { 0 } else { 0b10 }, "frame {frame}");
        let expected = if is_whole { (TAG_NONE, 0) } else { (TAG_COMBINE_ROW, 1) };
        assert_eq!((error.tag, error.peer), expected, "frame {frame}");
        let missing: Vec<u32> = client.token_missing.read(0, tokens.into());
        let out: Vec<u16> = client.out.read(0, u64::from(tokens * hidden));
        for (token, &lacks) in missing.iter().enumerate() {
            let servers = world.servers_of(&input, token as u32);
            let goes = servers.iter().any(|(server, _)| *server == 1);
            assert_eq!(
                lacks & 0b10 != 0,
                goes && !is_whole,
                "frame {frame} token {token}: {lacks:#b}"
            );
            let at = token * hidden as usize..(token + 1) * hidden as usize;
            let mut sums = vec![0f32; hidden as usize];
            for (_, places) in servers.iter().filter(|(server, _)| lacks >> server & 1 == 0) {
                let weight = |place: &usize| input.topk_weights[token * 3 + place];
                let weight = places.iter().map(weight).fold(0.0, |sum: f32, w| sum + w);
                add(&mut sums, &input.hidden_states[at.clone()], weight);
            }
            let expected: Vec<u16> =
                sums.iter().map(|sum| bf16::from_f32(*sum).to_bits()).collect();
            assert!(out[at] == expected, "frame {frame} token {token} without {lacks:#b}");
        }
    }
}
