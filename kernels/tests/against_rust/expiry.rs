//! Output of servers when an expected arrival does not come.

use kernels::abi::{
    Batch, CONTROL_BYTES, DTYPE_BF16, DTYPE_F8_E4M3, EchoParams, ErrorWord, ExpertRecvParams,
    FrameGeometry, Handle, REASON_TIMEOUT, ServerState, TAG_NONE,
};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, World};

/// `SY_TAG_RECV_FRAME` of the kernels' header.
const TAG_RECV_FRAME: u32 = 1;
/// `SY_WORD_HEADER(0)`, and how far it is to the next.
const WORD_HEADER: u64 = 2048;
const CONTROL_STRIDE: u64 = 128;
const ANNOUNCE_SHIFT: u32 = 24;
const NUM_FRAMES: u64 = 2;
/// Thousands of warps wait for a missing arrival, one after the other where there is no GPU.
const TIMEOUT_NS: u64 = 1_000_000;

pub fn an_expired_wait_leaves_what_it_saw_in_the_error_word(runner: &Runner) {
    let mut rng = fresh();
    for (is_echo, dtype, tokens) in [(false, DTYPE_F8_E4M3, 5), (true, DTYPE_BF16, 150)] {
        let geometry =
            FrameGeometry::new(128, 2, dtype, tokens, NUM_FRAMES as u32).expect("in range");
        let world = World::new(runner, &mut rng, geometry, 8, 2, 1);
        for number in 1..=3 {
            send(runner, &mut rng, &world, &[0, 1]);
            serve(runner, &world, is_echo);
            assert_eq!(error(&world).tag, TAG_NONE, "frame {number}");
        }
        // A row of the one client has the number of an earlier frame than the last, or none.
        send(runner, &mut rng, &world, &[0, 1]);
        let planted = rng.random_range(0..3);
        plant_row(&mut rng, &world, 1, 4, planted);
        serve(runner, &world, is_echo);
        let expected = ErrorWord {
            tag: TAG_RECV_FRAME,
            peer: 1,
            reason: REASON_TIMEOUT,
            reserved: 0,
            observed: planted,
            expected: 4,
        };
        assert_eq!(error(&world), expected, "echo: {is_echo}, {tokens} tokens");
        clear_error(&world);
        // The other client announces nothing new: its word names a frame that is long gone, or none.
        // An echo takes no frame before all of it is there, so it waits for the same once more.
        let number = if is_echo { 4 } else { 5 };
        send(runner, &mut rng, &world, &[0]);
        let planted = rng.random_range(0..4);
        let word = planted << ANNOUNCE_SHIFT | 3;
        world.servers[0].requests[1].write(header_at(&world, number), &[word]);
        serve(runner, &world, is_echo);
        let expected = ErrorWord { observed: planted, expected: number, ..expected };
        assert_eq!(error(&world), expected, "header, echo: {is_echo}");
    }
}

pub fn every_client_that_withholds_rows_of_a_batch_is_noted(runner: &Runner) {
    let mut rng = fresh();
    let geometry = FrameGeometry::new(128, 2, DTYPE_BF16, 6, NUM_FRAMES as u32).expect("in range");
    let world = World::new(runner, &mut rng, geometry, 8, 3, 1);
    let all = [0, 1, 2];
    for (number, late) in [(1u64, &[0usize, 2][..]), (2, &[]), (3, &[2]), (4, &[1, 0])] {
        send(runner, &mut rng, &world, &all);
        for &client in late {
            plant_row(&mut rng, &world, client, number, number - 1);
        }
        serve(runner, &world, false);
        let state: ServerState = world.servers[0].state.one(0);
        for client in all {
            let mut told = [0; 8];
            if late.contains(&client) {
                let code = u64::from(protocol::ErrorCode::Internal.to_u32());
                told[(number % NUM_FRAMES) as usize] = number << 16 | code;
            }
            assert_eq!(state.refusals[client], told, "client {client}, frame {number}");
        }
        let batch: Batch = world.servers[0].list_memory.one(0);
        let served = all.iter().filter(|client| !late.contains(client));
        assert_eq!(batch.clients, served.fold(0, |mask, client| mask | 1 << client));
        // Otherwise the earlier record stays.
        world.servers[0]
            .state
            .write(std::mem::offset_of!(ServerState, refusals) as u64, &[0u64; 8 * 32]);
    }
}

/// Dispatches a row at least to the one server.
fn send(runner: &Runner, rng: &mut StdRng, world: &World, clients: &[usize]) {
    for &client in clients {
        let num_tokens = rng.random_range(1..=world.capacity);
        let input = loop {
            let input =
                Input::random(rng, &world.geometry, world.placement.num_experts, num_tokens);
            if (0..num_tokens).any(|token| !world.servers_of(&input, token).is_empty()) {
                break input;
            }
        };
        world.load(client, &input);
        // SAFETY: the world's memory is as large as its geometry says.
        assert_eq!(unsafe { runner.launch(&world.dispatch_params(client, 1)) }, 0);
    }
}

fn serve(runner: &Runner, world: &World, is_echo: bool) {
    // SAFETY: as above.
    let code = unsafe {
        match is_echo {
            true => runner.launch(&EchoParams { timeout_ns: TIMEOUT_NS, ..world.echo_params(0) }),
            false => {
                let params = world.recv_params(0, world.clients.len() as u32);
                runner.launch(&ExpertRecvParams { timeout_ns: TIMEOUT_NS, ..params })
            }
        }
    };
    assert_eq!(code, 0);
}

fn error(world: &World) -> ErrorWord {
    world.servers[0].state.one::<ServerState>(0).error
}

fn clear_error(world: &World) {
    let offset = std::mem::offset_of!(ServerState, error) as u64;
    world.servers[0].state.write(offset, &[ErrorWord::default()]);
}

fn header_at(world: &World, number: u64) -> u64 {
    world.geometry.slot_bytes - CONTROL_BYTES + WORD_HEADER + number % NUM_FRAMES * CONTROL_STRIDE
}

/// Gives a row of frame `number`, which has come, another number.
fn plant_row(rng: &mut StdRng, world: &World, client: usize, number: u64, planted: u64) {
    let num_rows = world.clients[client].handle.one::<Handle>(0).num_rows[0];
    let row = u64::from(rng.random_range(0..num_rows));
    let g = &world.geometry;
    let at = number % NUM_FRAMES * g.frame_bytes + g.flags_offset + row * 8;
    world.servers[0].requests[client].write(at, &[planted]);
}
