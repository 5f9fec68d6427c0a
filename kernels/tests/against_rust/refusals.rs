//! Refusals of a server: every field of a header, entries and scales, against a judgement in Rust.

use bytemuck::bytes_of_mut;
use kernels::abi::{
    DEVICE_ABI_VERSION, DEVICE_FRAME_MAGIC, DTYPE_F8_E4M3, FrameGeometry, Handle, ServerState,
};
use protocol::ErrorCode;
use protocol::abi::{Entry, FrameHeader, KIND_DISPATCH};
use protocol::convert::MAX_SCALE;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use crate::fresh;
use crate::layer::check_batch;
use crate::runner::Runner;
use crate::world::{GENERATION, Input, NUM_LAYERS, World};

const MIN_EPOCH: u64 = 5;

pub fn headers_with_one_wrong_field_are_refused_for_it(runner: &Runner) {
    let mut rng = fresh();
    let world = world_of(runner, &mut rng, 256, 3, 6);
    let mut seen = std::collections::BTreeSet::new();
    // Every word of the header once, and some headers without a fault.
    for number in 1..=40u64 {
        send(runner, &mut rng, &world);
        let slot = &world.servers[0].requests[0];
        let frame = number % 2 * world.geometry.frame_bytes;
        let mut header: FrameHeader = slot.one(frame);
        if let Some(bytes) = bytes_of_mut(&mut header).chunks_mut(4).nth(number as usize - 1) {
            if rng.random() {
                bytes[rng.random_range(0..4)] ^= 1 << rng.random_range(0..8);
            } else {
                rng.fill_bytes(bytes);
            }
        }
        slot.write(frame, &[header]);
        let rows = world.clients[0].handle.one::<Handle>(0).num_rows[0];
        let code = judge(&world.geometry, &header, world.clients[0].id, rows);
        expect(runner, &world, number, code);
        seen.insert(code.map(ErrorCode::to_u32));
    }
    assert!(seen.len() >= 3, "only {seen:?} came up");
}

pub fn wrong_entries_and_scales_are_refused(runner: &Runner) {
    let mut rng = fresh();
    // One entry of each thread that makes lists, two and four of a row, four of several rows, and lists by all
    // blocks. A lane checks one part of a row's scales, two, or more than two in several rounds.
    let shapes = [
        (256, 3, 6),
        (2688, 8, 100),
        (5120, 3, 20),
        (256, 4, 450),
        (256, 8, 450),
        (256, 7, 450),
        (256, 4, 1300),
    ];
    for (hidden, top_k, tokens) in shapes {
        println!("hidden {hidden}, top-k {top_k}, {tokens} tokens");
        let world = world_of(runner, &mut rng, hidden, top_k, tokens);
        // One fault of each kind, of small frames three.
        refuse_wrong_entries(runner, &mut rng, &world, if tokens > 100 { 8 } else { 24 });
    }
}

fn refuse_wrong_entries(runner: &Runner, rng: &mut StdRng, world: &World, most: u64) {
    let g = world.geometry;
    for number in 1..=most {
        send(runner, rng, world);
        let slot = &world.servers[0].requests[0];
        let frame = number % 2 * g.frame_bytes;
        let rows = world.clients[0].handle.one::<Handle>(0).num_rows[0];
        let row = u64::from(rng.random_range(0..rows));
        let row_at = frame + g.entries_offset + row * u64::from(g.top_k) * 8;
        let mut entry_at = row_at + u64::from(rng.random_range(0..g.top_k)) * 8;
        let scale =
            row * u64::from(g.scales_per_row) + rng.random_range(0..g.scales_per_row.into());
        let scale_at = frame + g.scales_offset + scale * 4;
        let mut entry: Entry = slot.one(entry_at);
        let code = match number % 8 {
            0 => None,
            1 => {
                entry.expert = world.placement.num_experts + rng.random_range(0..100);
                Some(ErrorCode::UnknownExpert)
            }
            2 => {
                let foreign = world.servers[0].local_expert.iter().position(|local| *local < 0);
                entry.expert = foreign.expect("the other server's") as u32;
                Some(ErrorCode::NotMyExpert)
            }
            3 => {
                entry = Entry { expert: 0, weight: f32::NAN };
                entry.expert = mine(world);
                Some(ErrorCode::BadFrame)
            }
            4 => {
                entry = Entry { expert: mine(world), weight: f32::NEG_INFINITY };
                Some(ErrorCode::BadFrame)
            }
            5 => {
                slot.write(scale_at, &[f32::NAN]);
                Some(ErrorCode::BadFrame)
            }
            6 => {
                slot.write(scale_at, &[f32::from_bits(MAX_SCALE.to_bits() + 1)]);
                Some(ErrorCode::BadFrame)
            }
            _ => {
                let empty = Entry { expert: kernels::abi::NO_EXPERT, weight: 0.0 };
                slot.write(row_at, &vec![empty; g.top_k as usize]);
                (entry_at, entry) = (row_at, empty);
                Some(ErrorCode::BadFrame)
            }
        };
        slot.write(entry_at, &[entry]);
        expect(runner, world, number, code);
    }
}

/// Of two clients in a batch one sends something wrong: the other is alone in the lists then.
pub fn who_is_refused_leaves_the_lists_of_others_right(runner: &Runner) {
    let mut rng = fresh();
    for (top_k, tokens) in [(3, 6), (8, 60), (6, 150), (8, 200), (5, 250), (4, 520)] {
        let geometry = FrameGeometry::new(256, top_k, DTYPE_F8_E4M3, tokens, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, 12, 2, 1);
        for number in 1..=6u64 {
            world.poison();
            let layer = rng.random_range(0..NUM_LAYERS);
            let mut inputs: Vec<_> =
                (0..2).map(|_| Input::random(&mut rng, &geometry, 12, tokens)).collect();
            for (client, input) in inputs.iter().enumerate() {
                world.load(client, input);
                // SAFETY: the world's memory is as large as its geometry says.
                assert_eq!(unsafe { runner.launch(&world.dispatch_params(client, layer)) }, 0);
            }
            let bad = rng.random_range(0..2usize);
            let slot = &world.servers[0].requests[bad];
            let frame = number % 2 * geometry.frame_bytes;
            let rows = world.clients[bad].handle.one::<Handle>(0).num_rows[0];
            let row = u64::from(rng.random_range(0..rows));
            if rng.random() {
                let place = row * u64::from(top_k) + rng.random_range(0..top_k.into());
                let wrong = Entry { expert: mine(&world), weight: f32::INFINITY };
                slot.write(frame + geometry.entries_offset + place * 8, &[wrong]);
            } else {
                let place = row * u64::from(geometry.scales_per_row);
                slot.write(frame + geometry.scales_offset + place * 4, &[-1.0f32]);
            }
            // SAFETY: as above.
            assert_eq!(unsafe { runner.launch(&world.recv_params(0, 2)) }, 0);
            let batch: kernels::abi::Batch = world.servers[0].list_memory.one(0);
            assert_eq!(batch.clients, 1 << (1 - bad), "top-k {top_k}, {tokens} tokens, {number}");
            inputs[bad].num_tokens = 0;
            check_batch(&world, 0, &inputs, layer);
        }
    }
}

fn mine(world: &World) -> u32 {
    let local = &world.servers[0].local_expert;
    local.iter().position(|local| *local >= 0).expect("an expert of its own") as u32
}

/// One client, two servers; the second is never run.
fn world_of(runner: &Runner, rng: &mut StdRng, hidden: u32, top_k: u32, tokens: u32) -> World {
    loop {
        let geometry =
            FrameGeometry::new(hidden, top_k, DTYPE_F8_E4M3, tokens, 2).expect("in range");
        let world = World::new(runner, rng, geometry, 12, 1, 2);
        world.servers[0].min_epoch.write(0, &[MIN_EPOCH]);
        let num_mine = world.servers[0].local_expert.iter().filter(|local| **local >= 0).count();
        if (2..12).contains(&num_mine) {
            return world;
        }
    }
}

/// Dispatches tokens. Some go to the first server.
fn send(runner: &Runner, rng: &mut StdRng, world: &World) {
    let input = loop {
        let input = Input::random(rng, &world.geometry, 12, world.capacity);
        let goes = |token| world.servers_of(&input, token).iter().any(|(server, _)| *server == 0);
        if (0..world.capacity).any(goes) {
            break input;
        }
    };
    world.poison();
    world.load(0, &input);
    // SAFETY: the world's memory is as large as its geometry says.
    assert_eq!(unsafe { runner.launch(&world.dispatch_params(0, 1)) }, 0);
}

/// Runs the server and expects it to take frame `number`, or to refuse it with `code`.
fn expect(runner: &Runner, world: &World, number: u64, code: Option<ErrorCode>) {
    let before: ServerState = world.servers[0].state.one(0);
    // SAFETY: as above.
    assert_eq!(unsafe { runner.launch(&world.recv_params(0, 1)) }, 0);
    let after: ServerState = world.servers[0].state.one(0);
    assert_eq!(after.taken[0], number, "a refused frame is taken, too");
    let batch: kernels::abi::Batch = world.servers[0].list_memory.one(0);
    assert_eq!(batch.clients, u32::from(code.is_none()), "frame {number}, expected {code:?}");
    assert_eq!(after.num_refused - before.num_refused, u64::from(code.is_some()));
    let g = &world.geometry;
    let status: u64 =
        world.clients[0].responses[0].one(g.response_control_offset + 3072 + number % 2 * 128);
    if let Some(code) = code {
        assert_eq!(status, number << 16 | u64::from(code.to_u32()));
    } else {
        assert_ne!(status >> 16, number);
    }
}

/// The wire format's judgement of a header.
fn judge(g: &FrameGeometry, h: &FrameHeader, client_id: u64, rows: u32) -> Option<ErrorCode> {
    if h.magic != DEVICE_FRAME_MAGIC || h.kind != KIND_DISPATCH {
        return Some(ErrorCode::BadFrame);
    }
    if u32::from(h.version) != DEVICE_ABI_VERSION {
        return Some(ErrorCode::Version);
    }
    if (h.client_id, h.generation) != (client_id, GENERATION) {
        return Some(ErrorCode::StaleChannel);
    }
    if h.epoch < MIN_EPOCH {
        return Some(ErrorCode::StaleEpoch);
    }
    if h.layer >= NUM_LAYERS {
        return Some(ErrorCode::WrongLayer);
    }
    // Each remaining field has one right value. Sequence, epoch and layer do not affect the layout.
    let right = FrameHeader {
        epoch: h.epoch,
        client_id,
        sequence: h.sequence,
        generation: GENERATION,
        layer: h.layer,
        magic: DEVICE_FRAME_MAGIC,
        version: DEVICE_ABI_VERSION as u16,
        kind: KIND_DISPATCH,
        dtype: g.dtype as u16,
        response_dtype: kernels::abi::DTYPE_BF16 as u16,
        num_tokens: rows,
        num_entries: rows * g.top_k,
        hidden: g.hidden,
        num_frames: 1,
        row_stride_bytes: g.row_stride_bytes,
        entries_offset: g.entries_offset as u32,
        scales_offset: g.scales_offset as u32,
        payload_offset: g.payload_offset as u32,
        total_bytes: g.payload_offset + u64::from(rows * g.row_stride_bytes),
        ..bytemuck::Zeroable::zeroed()
    };
    (*h != right).then_some(ErrorCode::BadFrame)
}
