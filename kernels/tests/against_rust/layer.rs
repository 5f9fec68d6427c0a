//! Whole layers: every byte of the frames, the expert-major lists, and the sums.

use std::collections::BTreeSet;

use bytemuck::Zeroable;
use kernels::abi::{
    ANSWER_HOLE, Batch, ClientState, DEVICE_ABI_VERSION, DEVICE_FRAME_MAGIC, DTYPE_BF16,
    DTYPE_F8_E4M3, DevicePtr, FrameGeometry, Handle, NO_EXPERT, NO_ROUTE, ServerState, TAG_NONE,
};
use kernels::geometry::route;
use kernels::plan::KernelParams;
use protocol::abi::{Entry, FrameHeader, KIND_DISPATCH};
use protocol::convert::{bf16_to_f32, f8_to_f32, f32_to_bf16, f32_to_f8};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{GENERATION, Input, Memory, NUM_LAYERS, POISON, World};

pub fn layers_with_fp8_requests(runner: &Runner) {
    run(runner, DTYPE_F8_E4M3);
}

pub fn layers_with_bf16_requests(runner: &Runner) {
    run(runner, DTYPE_BF16);
}

fn run(runner: &Runner, dtype: u32) {
    let mut rng = fresh();
    // Hidden size, top-k, tokens, experts, clients, servers; the last two run the tuned kernels, and the last one
    // those for few blocks; the first has more tokens than one block sends entries for. Before them are, with one
    // server, two and four entries of a row for each thread that makes lists, four of several rows, and more rows
    // than are polled for ahead.
    let shapes = [
        (128, 4, 290, 16, 2, 2),
        (256, 4, 40, 24, 3, 2),
        (640, 3, 9, 7, 1, 3),
        (1280, 10, 20, 32, 2, 1),
        (128, 6, 150, 16, 2, 1),
        (128, 8, 200, 16, 2, 1),
        (128, 5, 250, 24, 2, 1),
        (128, 4, 520, 16, 2, 1),
        (7168, 8, 5, 64, 2, 3),
        (7168, 8, 70, 64, 2, 3),
    ];
    for (hidden, top_k, tokens, num_experts, num_clients, num_servers) in shapes {
        println!("hidden {hidden}, top-k {top_k}, {num_clients} clients, {num_servers} servers");
        let geometry = FrameGeometry::new(hidden, top_k, dtype, tokens, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, num_experts, num_clients, num_servers);
        let is_few = tokens == 70;
        assert_eq!(world.combine_params(0).plan().is_few, is_few);
        let mut numbers = vec![vec![0u64; num_servers]; num_clients];
        for round in 0..4 {
            layer(runner, &mut rng, &world, &mut numbers, round);
        }
    }
}

fn layer(runner: &Runner, rng: &mut StdRng, world: &World, numbers: &mut [Vec<u64>], round: u64) {
    world.poison();
    let layer = rng.random_range(0..NUM_LAYERS);
    let mut inputs = Vec::new();
    for (client, numbers) in numbers.iter_mut().enumerate() {
        let num_tokens = match round {
            // A server that waits for the others only must not blame who had nothing to send.
            1 if client == 0 => 0,
            2 => world.capacity,
            _ => rng.random_range(0..=world.capacity),
        };
        let input = Input::random(rng, &world.geometry, world.placement.num_experts, num_tokens);
        world.load(client, &input);
        // SAFETY: the world's memory is as large as its geometry says.
        assert_eq!(unsafe { runner.launch(&world.dispatch_params(client, layer)) }, 0);
        check_frames(world, client, &input, numbers, layer, round);
        inputs.push(input);
    }
    let contacted: Vec<u32> = (0..world.servers.len())
        .map(|server| {
            (0..inputs.len()).filter(|client| num_rows(world, *client, server) > 0).count() as u32
        })
        .collect();
    for (server, num_ready) in contacted.into_iter().enumerate() {
        if num_ready == 0 {
            continue;
        }
        // SAFETY: as above.
        assert_eq!(unsafe { runner.launch(&world.recv_params(server, num_ready)) }, 0);
        check_batch(world, server, &inputs, layer);
        // SAFETY: as above; null stands for identity experts.
        assert_eq!(unsafe { runner.launch(&world.send_params(server, DevicePtr::NULL)) }, 0);
        let state: ServerState = world.servers[server].state.one(0);
        assert_eq!((state.error.tag, state.num_refused), (TAG_NONE, 0));
    }
    for (client, input) in inputs.iter().enumerate() {
        // SAFETY: as above.
        assert_eq!(unsafe { runner.launch(&world.combine_params(client)) }, 0);
        check_output(world, client, input);
    }
}

pub fn echo_answers_as_recv_and_send_do(runner: &Runner) {
    let mut rng = fresh();
    let shapes = [(384, 5, 12), (7168, 8, 40)];
    for (dtype, (hidden, top_k, most_tokens)) in
        [DTYPE_BF16, DTYPE_F8_E4M3].into_iter().flat_map(|dtype| shapes.map(|shape| (dtype, shape)))
    {
        let geometry = FrameGeometry::new(hidden, top_k, dtype, most_tokens, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, 16, 2, 2);
        for _ in 0..3 {
            world.poison();
            let mut inputs = Vec::new();
            for client in 0..2 {
                let tokens = rng.random_range(1..=most_tokens);
                inputs.push(Input::random(&mut rng, &geometry, 16, tokens));
                world.load(client, &inputs[client]);
                let mut params = world.dispatch_params(client, 1);
                params.flags = kernels::abi::FLAG_CONTACT_ALL;
                // SAFETY: the world's memory is as large as its geometry says.
                assert_eq!(unsafe { runner.launch(&params) }, 0);
            }
            for server in 0..2 {
                // SAFETY: as above.
                assert_eq!(unsafe { runner.launch(&world.echo_params(server)) }, 0);
            }
            for (client, input) in inputs.iter().enumerate() {
                // SAFETY: as above.
                assert_eq!(unsafe { runner.launch(&world.combine_params(client)) }, 0);
                check_output(&world, client, input);
            }
        }
    }
}

pub fn expert_outputs_are_weighted_and_summed_in_order(runner: &Runner) {
    let mut rng = fresh();
    let geometry = FrameGeometry::new(256, 6, DTYPE_BF16, 16, 2).expect("in range");
    let world = World::new(runner, &mut rng, geometry, 20, 1, 1);
    let input = Input::random(&mut rng, &geometry, 20, 16);
    world.poison();
    world.load(0, &input);
    // SAFETY: the world's memory is as large as its geometry says.
    unsafe {
        assert_eq!(runner.launch(&world.dispatch_params(0, 0)), 0);
        assert_eq!(runner.launch(&world.recv_params(0, 1)), 0);
    }
    let server = &world.servers[0];
    let batch: Batch = server.list_memory.one(0);
    let outputs: Vec<u16> = (0..batch.num_entries * 256)
        .map(|_| half::bf16::from_f32(rng.random_range(-4.0..4.0)).to_bits())
        .collect();
    let memory = Memory::of(runner, &outputs);
    // SAFETY: as above; one row of outputs per entry.
    unsafe {
        assert_eq!(runner.launch(&world.send_params(0, memory.address())), 0);
        assert_eq!(runner.launch(&world.combine_params(0)), 0);
    }
    let at = |ptr: DevicePtr| ptr.0 - server.list_memory.address().0;
    let positions: Vec<u32> =
        server.list_memory.read(at(server.lists.row_position), u64::from(batch.num_rows) * 6);
    let weights: Vec<f32> =
        server.list_memory.read(at(server.lists.list_weight), batch.num_entries.into());
    let out: Vec<u16> = world.clients[0].out.read(0, 16 * 256);
    let mut row = 0;
    for token in 0..16 {
        let goes = !world.servers_of(&input, token).is_empty();
        for value in 0..256 {
            let mut sum = 0f32;
            for position in &positions[row * 6..row * 6 + 6] {
                if goes && *position != NO_EXPERT {
                    let mut wide = [0f32];
                    bf16_to_f32(&[outputs[*position as usize * 256 + value]], &mut wide);
                    sum += wide[0] * weights[*position as usize];
                }
            }
            let found = out[token as usize * 256 + value];
            // The row is rounded once by the server, and again, without effect, by the client.
            assert_eq!(found, narrow(sum), "token {token} value {value}");
        }
        row += usize::from(goes);
    }
}

pub fn a_server_that_does_not_answer_is_left_out_and_named(runner: &Runner) {
    // The second one by the kernels for few blocks.
    for (hidden, top_k, tokens) in [(128, 4, 8), (7168, 2, 24)] {
        one_of_two_answers(runner, hidden, top_k, tokens);
    }
}

fn one_of_two_answers(runner: &Runner, hidden: u32, top_k: u32, tokens: u32) {
    let mut rng = fresh();
    let geometry = FrameGeometry::new(hidden, top_k, DTYPE_F8_E4M3, tokens, 2).expect("in range");
    let world = World::new(runner, &mut rng, geometry, 16, 1, 2);
    assert_eq!(world.combine_params(0).plan().is_few, hidden == 7168);
    world.poison();
    let mut input = Input::random(&mut rng, &geometry, 16, tokens);
    input.hidden_states.fill_with(|| half::bf16::from_f32(rng.random_range(-4.0..4.0)).to_bits());
    world.load(0, &input);
    // SAFETY: the world's memory is as large as its geometry says.
    unsafe {
        assert_eq!(runner.launch(&world.dispatch_params(0, 0)), 0);
        assert_eq!(runner.launch(&world.recv_params(0, 1)), 0);
        assert_eq!(runner.launch(&world.send_params(0, DevicePtr::NULL)), 0);
        assert_eq!(runner.launch(&world.combine_params(0)), 0);
    }
    let handle: Handle = world.clients[0].handle.one(0);
    assert_eq!((handle.missing, handle.refused), (0b10, 0));
    let missing: Vec<u32> = world.clients[0].token_missing.read(0, tokens.into());
    for token in 0..tokens {
        let waits = world.servers_of(&input, token).iter().any(|(server, _)| *server == 1);
        assert_eq!(missing[token as usize], if waits { 0b10 } else { 0 }, "token {token}");
    }
    // Parts that the other server has not written are poison, and no part of a sum.
    let sums: Vec<u16> = world.clients[0].out.read(0, u64::from(tokens * hidden));
    assert!(sums.iter().all(|bits| !half::bf16::from_bits(*bits).is_nan()));
    let state: ClientState = world.clients[0].state.one(0);
    assert_eq!((state.error.peer, state.error.expected), (1, 1));
}

fn num_rows(world: &World, client: usize, server: usize) -> u32 {
    let handle: Handle = world.clients[client].handle.one(0);
    handle.num_rows[server]
}

fn check_frames(
    world: &World,
    client_idx: usize,
    input: &Input,
    numbers: &mut [u64],
    layer: u32,
    round: u64,
) {
    let (g, client) = (&world.geometry, &world.clients[client_idx]);
    let (top_k, hidden) = (g.top_k as usize, g.hidden as usize);
    let routes: Vec<u32> =
        client.handle.read(size_of::<Handle>() as u64, u64::from(input.num_tokens * g.top_k));
    let handle: Handle = client.handle.one(0);
    let mut contacted = 0;
    for (server_idx, number) in numbers.iter_mut().enumerate() {
        let tokens: Vec<(u32, Vec<usize>)> = (0..input.num_tokens)
            .filter_map(|token| {
                let servers = world.servers_of(input, token);
                let here = servers.into_iter().find(|(server, _)| *server == server_idx as u32)?;
                Some((token, here.1))
            })
            .collect();
        if tokens.is_empty() {
            assert_eq!(handle.num_rows[server_idx], 0);
            continue;
        }
        *number += 1;
        contacted |= 1 << server_idx;
        let slot = &world.servers[server_idx].requests[client_idx];
        let frame = *number % u64::from(g.num_frames) * g.frame_bytes;
        let rows = tokens.len() as u32;
        assert_eq!((handle.num_rows[server_idx], handle.frame_number[server_idx]), (rows, *number));
        check_head(world, client_idx, server_idx, *number, rows, (layer, round));
        let flags: Vec<u64> = slot.read(frame + g.flags_offset, g.max_tokens.into());
        let entries: Vec<Entry> =
            slot.read(frame + g.entries_offset, u64::from(g.max_tokens) * u64::from(g.top_k));
        for (row, (token, places)) in tokens.iter().enumerate() {
            let first = *token as usize * top_k;
            assert_eq!(flags[row], *number, "flag of row {row}");
            for place in 0..top_k {
                let entry = entries[row * top_k + place];
                let (expert, weight) = match places.contains(&place) {
                    true => {
                        (input.topk_idx[first + place] as u32, input.topk_weights[first + place])
                    }
                    false => (NO_EXPERT, 0.0),
                };
                assert_eq!((entry.expert, entry.weight.to_bits()), (expert, weight.to_bits()));
            }
            assert!(routes[first..first + top_k].contains(&route(server_idx as u32, row as u32)));
            let source = &input.hidden_states[*token as usize * hidden..][..hidden];
            check_row(world, slot, frame, row as u64, source);
        }
        assert!(flags[tokens.len()..].iter().all(|flag| flag != number));
        let beyond = &entries[tokens.len() * top_k..];
        assert!(beyond.iter().all(|e| e.expert == NO_EXPERT && e.weight.to_bits() == u32::MAX));
        let end = frame + g.payload_offset + u64::from(rows * g.row_stride_bytes);
        let rest: Vec<u8> = slot.read(end, frame + g.frame_bytes - end);
        assert!(rest.iter().all(|byte| *byte == POISON), "bytes behind the last row");
    }
    assert_eq!((handle.contacted, handle.num_tokens), (contacted, input.num_tokens));
    for token in 0..input.num_tokens {
        let mine = &routes[token as usize * top_k..][..top_k];
        let num_servers = world.servers_of(input, token).len();
        assert!(
            mine[..num_servers].is_sorted() && mine[num_servers..].iter().all(|r| *r == NO_ROUTE)
        );
    }
}

fn check_head(
    world: &World,
    client: usize,
    server: usize,
    number: u64,
    rows: u32,
    (layer, round): (u32, u64),
) {
    let g = &world.geometry;
    let slot = &world.servers[server].requests[client];
    let place = number % u64::from(g.num_frames);
    let header_word: u64 = slot.one(g.control_offset + 2048 + place * 128);
    assert_eq!(header_word, number << 24 | u64::from(rows));
    let found: FrameHeader = slot.one(place * g.frame_bytes);
    let expected = FrameHeader {
        epoch: world.placement.epoch,
        client_id: world.clients[client].id,
        sequence: round + 1,
        generation: GENERATION,
        layer,
        magic: DEVICE_FRAME_MAGIC,
        version: DEVICE_ABI_VERSION as u16,
        kind: KIND_DISPATCH,
        dtype: g.dtype as u16,
        response_dtype: DTYPE_BF16 as u16,
        num_tokens: rows,
        num_entries: rows * g.top_k,
        hidden: g.hidden,
        num_frames: 1,
        row_stride_bytes: g.row_stride_bytes,
        entries_offset: g.entries_offset as u32,
        scales_offset: g.scales_offset as u32,
        payload_offset: g.payload_offset as u32,
        total_bytes: g.payload_offset + u64::from(rows * g.row_stride_bytes),
        ..FrameHeader::zeroed()
    };
    assert_eq!(found, expected);
}

/// A row of a frame against the quantisation of `protocol`.
fn check_row(world: &World, slot: &Memory, frame: u64, row: u64, source: &[u16]) {
    let g = &world.geometry;
    let at = frame + g.payload_offset + row * u64::from(g.row_stride_bytes);
    if g.dtype == DTYPE_BF16 {
        assert_eq!(slot.read::<u16>(at, g.hidden.into()), source);
        return;
    }
    let (codes, scales) = quantise(source);
    let found: Vec<u8> = slot.read(at, g.hidden.into());
    for (value, (found, expected)) in found.iter().zip(&codes).enumerate() {
        // The sign of a NaN means nothing.
        let both_nan = found & 0x7f == 0x7f && expected & 0x7f == 0x7f;
        assert!(both_nan || found == expected, "value {value}: {found:#x}, not {expected:#x}");
    }
    let at = frame + g.scales_offset + row * u64::from(g.scales_per_row) * 4;
    let found: Vec<u32> = slot.read(at, g.scales_per_row.into());
    assert_eq!(found, scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>());
}

fn quantise(source: &[u16]) -> (Vec<u8>, Vec<f32>) {
    let mut wide = vec![0f32; source.len()];
    bf16_to_f32(source, &mut wide);
    let (mut codes, mut scales) = (vec![0; source.len()], vec![0f32; source.len() / 128]);
    f32_to_f8(&wide, &mut codes, &mut scales);
    (codes, scales)
}

/// A row as the server's arithmetic sees it.
#[cfg(any(feature = "cuda", feature = "emulated"))]
pub fn on_the_wire(g: &FrameGeometry, source: &[u16]) -> Vec<f64> {
    let mut row = vec![0f32; source.len()];
    if g.dtype == DTYPE_BF16 {
        bf16_to_f32(source, &mut row);
    } else {
        let (codes, scales) = quantise(source);
        f8_to_f32(&codes, &scales, &mut row);
    }
    row.into_iter().map(f64::from).collect()
}

pub fn check_batch(world: &World, server_idx: usize, inputs: &[Input], layer: u32) {
    let (g, server) = (&world.geometry, &world.servers[server_idx]);
    let batch: Batch = server.list_memory.one(0);
    // Rows of the batch: clients in order, tokens in order.
    let mut rows = Vec::new();
    let mut entries = BTreeSet::new();
    for (client, input) in inputs.iter().enumerate() {
        assert_eq!(batch.row_begin[client] as usize, rows.len());
        let mut frame_row = 0u32;
        for token in 0..input.num_tokens {
            let servers = world.servers_of(input, token);
            let Some((_, places)) = servers.iter().find(|(s, _)| *s == server_idx as u32) else {
                continue;
            };
            for place in places {
                let at = token as usize * g.top_k as usize + place;
                let local = server.local_expert[input.topk_idx[at] as usize];
                let weight = input.topk_weights[at].to_bits();
                entries.insert((local as u32, rows.len() as u32, *place as u32, weight));
            }
            rows.push(route(client as u32, frame_row));
            frame_row += 1;
        }
    }
    assert_eq!((batch.num_rows as usize, batch.num_entries as usize), (rows.len(), entries.len()));
    assert_eq!(batch.layer, layer);
    let at = |ptr: DevicePtr| ptr.0 - server.list_memory.address().0;
    let read = |ptr, count: usize| server.list_memory.read::<u32>(at(ptr), count as u64);
    assert_eq!(read(server.lists.row_source, rows.len()), rows);
    let num_local = server.local_expert.iter().filter(|l| **l >= 0).count().max(1);
    let begin = read(server.lists.expert_begin, num_local + 1);
    let list_row = read(server.lists.list_row, entries.len());
    let list_weight = read(server.lists.list_weight, entries.len());
    let positions = read(server.lists.row_position, rows.len() * g.top_k as usize);
    // Within an expert the order is any; each entry is where its row says, and once.
    let mut found = BTreeSet::new();
    for (at, position) in positions.iter().enumerate().filter(|(_, p)| **p != NO_EXPERT) {
        let (row, place) = (at as u32 / g.top_k, at as u32 % g.top_k);
        let expert = begin.partition_point(|first| first <= position) as u32 - 1;
        assert_eq!(list_row[*position as usize], row);
        found.insert((expert, row, place, list_weight[*position as usize]));
    }
    assert_eq!(found, entries);
    assert_eq!((begin[0], begin[num_local] as usize), (0, entries.len()));
}

/// The output of identity experts: per server the row times the sum of its weights, then the servers.
pub fn check_output(world: &World, client_idx: usize, input: &Input) {
    check_sums(world, client_idx, input);
    let client = &world.clients[client_idx];
    let state: ClientState = client.state.one(0);
    assert_eq!(state.error.tag, TAG_NONE, "{:?}", state.error);
    let handle: Handle = client.handle.one(0);
    assert_eq!((handle.missing, handle.refused), (0, 0));
    check_holes(world, client_idx, &handle);
}

/// The output of identity experts for the input, and nothing behind it.
pub fn check_sums(world: &World, client_idx: usize, input: &Input) {
    let (g, client) = (&world.geometry, &world.clients[client_idx]);
    let (hidden, top_k) = (g.hidden as usize, g.top_k as usize);
    let out: Vec<u16> = client.out.read(0, u64::from(world.capacity * g.hidden));
    for token in 0..input.num_tokens as usize {
        let source = &input.hidden_states[token * hidden..][..hidden];
        let mut row = vec![0f32; hidden];
        if g.dtype == DTYPE_BF16 {
            bf16_to_f32(source, &mut row);
        } else {
            let (codes, scales) = quantise(source);
            f8_to_f32(&codes, &scales, &mut row);
        }
        let mut sums = vec![0f32; hidden];
        for (_, places) in world.servers_of(input, token as u32) {
            let weight: f32 =
                places.iter().fold(0.0, |sum, p| sum + input.topk_weights[token * top_k + p]);
            for (sum, value) in sums.iter_mut().zip(&row) {
                let mut part = [0f32];
                bf16_to_f32(&[narrow(value * weight)], &mut part);
                *sum += part[0];
            }
        }
        for (value, sum) in sums.iter().enumerate() {
            let (found, expected) = (out[token * hidden + value], narrow(*sum));
            let is_nan = |bits: u16| bits & 0x7fff > 0x7f80;
            assert!(
                found == expected || (is_nan(found) && is_nan(expected)),
                "token {token} value {value}: {found:#x}, not {expected:#x}"
            );
        }
    }
    let rest = &out[input.num_tokens as usize * hidden..];
    assert!(rest.iter().all(|bits| *bits == 0xffff), "rows behind the last token");
}

/// Rows that were summed are as they were before they came.
fn check_holes(world: &World, client_idx: usize, handle: &Handle) {
    let g = &world.geometry;
    for (server, slot) in world.clients[client_idx].responses.iter().enumerate() {
        let number = handle.frame_number[server];
        let frame = number % u64::from(g.num_frames) * g.response_frame_bytes;
        let num_rows = u64::from(handle.num_rows[server]);
        let words = slot.read::<u32>(
            frame + g.response_payload_offset,
            num_rows * u64::from(g.response_stride_bytes) / 4,
        );
        assert!(words.iter().all(|word| *word == ANSWER_HOLE), "server {server}");
    }
}

fn narrow(value: f32) -> u16 {
    let mut bits = [0];
    f32_to_bf16(&[value], &mut bits);
    bits[0]
}
