//! Layers of clients and servers, one kernel after the other, over whatever links their tables have.

use std::mem::offset_of;

use kernels::abi::{
    ClientState, DTYPE_F8_E4M3, DevicePtr, ErrorWord, FLAG_ANY_PATH, FLAG_CONTACT_ALL,
    FrameGeometry, Handle, Placement, ServerState, TAG_NONE,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use softnic::format::Syndrome;

use crate::runner::Runner;
use crate::world::{Input, Memory, World};

/// The network under the links of a world.
pub trait Ways {
    /// Waits until every NIC has executed all posted requests.
    fn settle(&self);
    /// Fails the `nth` request from now on of a client's queue to a server.
    fn fail(&self, server: usize, queue_idx: usize, nth: u64, syndrome: Syndrome);
    /// Restores the paths between the client and a server. Requests of before no longer arrive.
    fn recover(&mut self, world: &World, server: usize);
    /// Whether the error word has the cause of a failure, and not the flush of a request behind it: a
    /// collapsed completion queue has room for the last one only.
    fn keeps_causes(&self) -> bool;
    /// Checks that all posted requests are valid.
    fn check(&self);
}

/// A client with two servers, and a queue that fails. The client notices, and resends missing tokens to the other
/// server. Once the paths are restored it uses both as before.
pub fn fail_over_and_back<W: Ways>(
    runner: &Runner,
    rng: &mut StdRng,
    syndrome: Syndrome,
    join: impl FnOnce(&World) -> W,
) {
    const NUM_TOKENS: u32 = 24;
    const NUM_EXPERTS: u32 = 16;
    const VICTIM: usize = 1;
    let geometry = FrameGeometry::new(256, 4, DTYPE_F8_E4M3, NUM_TOKENS, 2).expect("in range");
    let (mut direct, mut posted) = worlds(runner, rng, geometry, NUM_EXPERTS, 1, 2);
    let mut ways = join(&posted);
    let input = Input::random(rng, &geometry, NUM_EXPERTS, NUM_TOKENS);
    let expected = layer(runner, &direct, std::slice::from_ref(&input), 0, false, || {});

    // Each queue has at least the entries, rows and flags of some tokens, or the header.
    ways.fail(VICTIM, rng.random_range(0..2), rng.random_range(0..3), syndrome);
    posted.load(0, &input);
    dispatch(runner, &posted, 0, FLAG_ANY_PATH);
    ways.settle();
    serve(runner, &posted, 0, 1, FLAG_ANY_PATH, false);
    ways.settle();
    combine(runner, &posted, 0, FLAG_ANY_PATH);
    let handle: Handle = posted.clients[0].handle.one(0);
    assert_eq!((handle.missing, handle.refused), (1 << VICTIM, 0), "{syndrome:?}");
    let error = client_error(&posted);
    // `SY_TAG_MLX5_COMPLETION`, with the syndrome in the second byte.
    assert_eq!((error.tag, error.peer), (35, VICTIM as u32));
    let found = error.observed >> 8 & 0xff;
    let is_flush = !ways.keeps_causes() && found == Syndrome::Flushed as u64;
    assert!(found == syndrome as u64 || is_flush, "{syndrome:?}: {found:#x}");
    let first = out(&posted, 0);

    // Tokens that lack a part are resent, to the server that is left.
    let missing: Vec<u32> = posted.clients[0].token_missing.read(0, NUM_TOKENS.into());
    assert!(missing.contains(&(1 << VICTIM)));
    let mut again = input.clone();
    for (token, experts) in again.topk_idx.chunks_mut(4).enumerate() {
        if missing[token] == 0 {
            experts.fill(-1);
        }
    }
    for world in [&mut direct, &mut posted] {
        leave_one(runner, world, NUM_EXPERTS);
        world.clients[0]
            .state
            .write(offset_of!(ClientState, error) as u64, &[ErrorWord::default()]);
    }
    let alone = one_server_layer(runner, &direct, &again, 0, || {});
    let second = one_server_layer(runner, &posted, &again, FLAG_ANY_PATH, || ways.settle());
    assert_eq!(client_error(&posted).tag, TAG_NONE);
    for (token, &missing) in missing.iter().enumerate() {
        let row = token * 256..(token + 1) * 256;
        if missing == 0 {
            assert_eq!(first[row.clone()], expected[0][row], "token {token}");
        } else {
            assert_eq!(second[row.clone()], alone[row], "token {token}");
        }
    }

    // The pair comes back with fresh queues: all frames of the old ones count as taken.
    ways.recover(&posted, VICTIM);
    posted.begin_anew(0, VICTIM);
    posted.placement_memory.write(0, &[posted.placement]);
    direct.placement_memory.write(0, &[direct.placement]);
    for round in 0..3 {
        let inputs = [Input::random(rng, &geometry, NUM_EXPERTS, NUM_TOKENS)];
        let expected = layer(runner, &direct, &inputs, 0, false, || {});
        let found = layer(runner, &posted, &inputs, FLAG_ANY_PATH, false, || ways.settle());
        assert!(found == expected, "round {round} after recovery from {syndrome:?}");
    }
    ways.check();
}

/// A client's frames do not leave it: no server sees one, and the client names the missing servers. Once the paths are
/// restored, results are those of direct stores.
pub fn nothing_arrives<W: Ways>(runner: &Runner, rng: &mut StdRng, join: impl FnOnce(&World) -> W) {
    const NUM_TOKENS: u32 = 12;
    const NUM_EXPERTS: u32 = 16;
    let geometry = FrameGeometry::new(256, 4, DTYPE_F8_E4M3, NUM_TOKENS, 2).expect("in range");
    let (direct, posted) = worlds(runner, rng, geometry, NUM_EXPERTS, 1, 2);
    let mut ways = join(&posted);
    posted.load(0, &Input::random(rng, &geometry, NUM_EXPERTS, NUM_TOKENS));
    dispatch(runner, &posted, 0, FLAG_ANY_PATH | FLAG_CONTACT_ALL);
    ways.settle();
    for server in 0..2 {
        serve(runner, &posted, server, 1, FLAG_ANY_PATH, false);
        let state: ServerState = posted.servers[server].state.one(0);
        assert_eq!((state.taken[0], state.last_clients), (0, 0), "server {server}");
    }
    posted.poison();
    combine(runner, &posted, 0, FLAG_ANY_PATH);
    let handle: Handle = posted.clients[0].handle.one(0);
    assert_eq!((handle.contacted, handle.missing), (0b11, 0b11));
    for server in 0..2 {
        ways.recover(&posted, server);
        posted.begin_anew(0, server);
    }
    for round in 0..3 {
        let inputs = [Input::random(rng, &geometry, NUM_EXPERTS, NUM_TOKENS)];
        let expected = layer(runner, &direct, &inputs, 0, false, || {});
        let found = layer(runner, &posted, &inputs, FLAG_ANY_PATH, false, || ways.settle());
        assert!(found == expected, "round {round} after the NIC stood still");
    }
    ways.check();
}

/// The same clients and servers twice, for two kinds of paths between them.
pub fn worlds(
    runner: &Runner,
    rng: &mut StdRng,
    geometry: FrameGeometry,
    num_experts: u32,
    num_clients: usize,
    num_servers: usize,
) -> (World, World) {
    let seed = rng.random();
    let make = || {
        let rng = &mut StdRng::seed_from_u64(seed);
        World::new(runner, rng, geometry, num_experts, num_clients, num_servers)
    };
    (make(), make())
}

fn dispatch(runner: &Runner, world: &World, client: usize, flags: u32) {
    let mut params = world.dispatch_params(client, 5);
    params.flags |= flags;
    // SAFETY: the world's memory, and the net's slots, are as large as the geometry says.
    assert_eq!(unsafe { runner.launch(&params) }, 0);
}

fn serve(runner: &Runner, world: &World, server: usize, num_ready: u32, flags: u32, echoes: bool) {
    if echoes {
        let mut params = world.echo_params(server);
        params.flags |= flags;
        // SAFETY: as for `dispatch`.
        assert_eq!(unsafe { runner.launch(&params) }, 0);
        return;
    }
    let mut recv = world.recv_params(server, num_ready);
    recv.flags |= flags;
    let mut send = world.send_params(server, DevicePtr::NULL);
    send.flags |= flags;
    // SAFETY: as for `dispatch`; null stands for identity experts.
    assert_eq!(unsafe { (runner.launch(&recv), runner.launch(&send)) }, (0, 0));
}

fn combine(runner: &Runner, world: &World, client: usize, flags: u32) {
    let mut params = world.combine_params(client);
    params.flags |= flags;
    // SAFETY: as for `dispatch`.
    assert_eq!(unsafe { runner.launch(&params) }, 0);
}

/// Runs a layer on all clients and servers, and returns the clients' outputs. Calls `settle` wherever requests may be
/// in flight.
pub fn layer(
    runner: &Runner,
    world: &World,
    inputs: &[Input],
    flags: u32,
    echoes: bool,
    settle: impl Fn(),
) -> Vec<Vec<u16>> {
    world.poison();
    for (client, input) in inputs.iter().enumerate() {
        world.load(client, input);
        dispatch(runner, world, client, flags | FLAG_CONTACT_ALL);
    }
    settle();
    for server in 0..world.servers.len() {
        serve(runner, world, server, inputs.len() as u32, flags, echoes);
    }
    settle();
    for client in 0..inputs.len() {
        combine(runner, world, client, flags);
        let state: ClientState = world.clients[client].state.one(0);
        assert_eq!(state.error.tag, TAG_NONE, "{:?}", state.error);
    }
    (0..inputs.len()).map(|client| out(world, client)).collect()
}

fn one_server_layer(
    runner: &Runner,
    world: &World,
    input: &Input,
    flags: u32,
    settle: impl Fn(),
) -> Vec<u16> {
    world.poison();
    world.load(0, input);
    dispatch(runner, world, 0, flags);
    settle();
    serve(runner, world, 0, 1, flags, false);
    settle();
    combine(runner, world, 0, flags);
    let handle: Handle = world.clients[0].handle.one(0);
    assert_eq!((handle.contacted, handle.missing), (1, 0));
    out(world, 0)
}

/// All experts at server 0, and nothing else known to the client.
fn leave_one(runner: &Runner, world: &mut World, num_experts: u32) {
    let placement = Placement::new(8, &vec![vec![0]; num_experts as usize]).expect("in range");
    world.placement_memory.write(0, &[placement]);
    let server = &mut world.servers[0];
    let local_expert: Vec<i16> = (0..num_experts as i16).collect();
    server.local_memory =
        Memory::of(runner, &local_expert.repeat(crate::world::NUM_LAYERS as usize));
    server.local_expert = local_expert;
    let geometry = &world.geometry;
    let (_, bytes) = geometry.lists_at(DevicePtr::NULL, num_experts, geometry.max_tokens);
    server.list_memory = Memory::filled(runner, bytes, 0xff);
    let base = server.list_memory.address();
    server.lists = geometry.lists_at(base, num_experts, geometry.max_tokens).0;
}

fn out(world: &World, client: usize) -> Vec<u16> {
    world.clients[client].out.read(0, u64::from(world.capacity * world.geometry.hidden))
}

fn client_error(world: &World) -> ErrorWord {
    world.clients[0].state.one::<ClientState>(0).error
}

pub fn fresh() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}
