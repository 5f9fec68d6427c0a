//! The fused kernels, run on this machine's processor, post work requests by themselves: what comes out
//! is what comes out over direct stores, bit for bit, also after a queue has failed.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use kernels::abi::{
    ClientPeer, ClientState, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, ErrorWord, FLAG_ANY_WAY,
    FLAG_CONTACT_ALL, FrameGeometry, Handle, Link, Placement, ServerPeer, ServerState, TAG_NONE,
    WAY_IBGDA,
};
use kernels::mlx5::{Bound, PeerHandle, QueueHandle};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use softnic::format::Syndrome;
use softnic::{
    Access, Adversary, Domain, DoorbellMode, Fault, HostQueue, Nic, NicConfig, NicThread,
    QueueSizes, Segment,
};

use crate::runner::Runner;
use crate::world::{GENERATION, Input, Memory, World};

#[test]
fn layers_are_the_same_as_over_stores() {
    let Some(runner) = Runner::host() else { return };
    let mut rng = fresh();
    // Hidden size, top-k, tokens, experts, clients, servers; the last one runs the tuned kernels.
    let shapes = [(256, 4, 40, 24, 2, 2), (640, 3, 9, 7, 1, 3), (7168, 8, 5, 64, 2, 2)];
    for (at, (hidden, top_k, tokens, num_experts, num_clients, num_servers)) in
        shapes.into_iter().enumerate()
    {
        for dtype in [DTYPE_F8_E4M3, DTYPE_BF16] {
            let geometry = FrameGeometry::new(hidden, top_k, dtype, tokens, 2).expect("in range");
            let is_adverse = at == 0;
            let sizes = Sizes {
                num_qps: 1 + at,
                queue: QueueSizes {
                    is_collapsed: at % 2 == 0,
                    // Some rows and runs of rows take several requests.
                    max_message_bytes: if at == 1 { 1024 } else { 1 << 30 },
                    ..QueueSizes::default()
                },
                adversary: is_adverse.then(|| Adversary { seed: rng.random() }),
            };
            let (direct, posted) =
                worlds(&runner, &mut rng, geometry, num_experts, num_clients, num_servers);
            let net = Net::join(&posted, sizes);
            for round in 0..4 {
                let inputs: Vec<Input> = (0..num_clients)
                    .map(|_| {
                        let tokens = if round == 1 { 0 } else { rng.random_range(1..=tokens) };
                        Input::random(&mut rng, &geometry, num_experts, tokens)
                    })
                    .collect();
                let echoes = round == 3;
                let expected = layer(&runner, &direct, &inputs, 0, echoes, || {});
                let found = layer(&runner, &posted, &inputs, FLAG_ANY_WAY, echoes, || net.settle());
                assert!(found == expected, "hidden {hidden}, dtype {dtype}, round {round}");
            }
            net.assert_clean();
            assert_eq!(net.num_failures(), 0);
        }
    }
}

#[test]
fn a_failed_queue_is_noticed_and_its_tokens_go_to_a_replica() {
    let Some(runner) = Runner::host() else { return };
    let mut rng = fresh();
    for syndrome in [Syndrome::RetryExceeded, Syndrome::RemoteAccess, Syndrome::LocalQpOp] {
        let geometry = FrameGeometry::new(256, 4, DTYPE_F8_E4M3, 24, 2).expect("in range");
        let num_experts = 16;
        let (mut direct, mut posted) = worlds(&runner, &mut rng, geometry, num_experts, 1, 2);
        let sizes = Sizes { num_qps: 2, queue: QueueSizes::default(), adversary: None };
        let net = Net::join(&posted, sizes);
        let victim = 1;
        let input = Input::random(&mut rng, &geometry, num_experts, 24);
        let expected = layer(&runner, &direct, std::slice::from_ref(&input), 0, false, || {});

        // Each queue has at least the entries, rows and flags of some tokens, or the header.
        let (at, nth) = (rng.random_range(0..2), rng.random_range(0..3));
        let qpn = net.ways[victim].client_queues[at].qpn();
        net.clients[0].nic.lock().inject(Fault::Fail { qpn, nth, syndrome }).expect("a queue");
        posted.load(0, &input);
        dispatch(&runner, &posted, 0, FLAG_ANY_WAY);
        net.settle();
        serve(&runner, &posted, 0, 1, FLAG_ANY_WAY, false);
        net.settle();
        combine(&runner, &posted, 0, FLAG_ANY_WAY);
        let handle: Handle = posted.clients[0].handle.one(0);
        assert_eq!((handle.missing, handle.refused), (1 << victim, 0), "{syndrome:?}");
        let error = client_error(&posted);
        // `SY_TAG_MLX5_COMPLETION`, with the syndrome in the second byte.
        assert_eq!((error.tag, error.peer), (35, victim as u32));
        assert_eq!(error.observed >> 8 & 0xff, syndrome as u64);
        let first = out(&posted, 0);

        // Tokens that lack a part go again, to the server that is left.
        let missing: Vec<u32> = posted.clients[0].token_missing.read(0, 24);
        assert!(missing.contains(&(1 << victim)));
        let mut again = input.clone();
        for (token, experts) in again.topk_idx.chunks_mut(4).enumerate() {
            if missing[token] == 0 {
                experts.fill(-1);
            }
        }
        for world in [&mut direct, &mut posted] {
            leave_one(&runner, world, num_experts);
            world.clients[0]
                .state
                .write(offset_of!(ClientState, error) as u64, &[ErrorWord::default()]);
        }
        let alone = one_server_layer(&runner, &direct, &again, 0, || {});
        let second = one_server_layer(&runner, &posted, &again, FLAG_ANY_WAY, || net.settle());
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
        net.recover(victim);
        let mut state: ServerState = posted.servers[victim].state.one(0);
        state.taken[0] = handle.frame_number[victim];
        posted.servers[victim].state.write(0, &[state]);
        posted.placement_memory.write(0, &[posted.placement]);
        direct.placement_memory.write(0, &[direct.placement]);
        let inputs = [Input::random(&mut rng, &geometry, num_experts, 24)];
        let expected = layer(&runner, &direct, &inputs, 0, false, || {});
        let found = layer(&runner, &posted, &inputs, FLAG_ANY_WAY, false, || net.settle());
        assert!(found == expected, "after recovery from {syndrome:?}");
        net.assert_clean();
    }
}

/// Twice the same clients and servers, for two ways between them.
fn worlds(
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

/// A layer of everybody; `settle` is called where requests may be under way. What the clients get.
fn layer(
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

struct Sizes {
    num_qps: usize,
    queue: QueueSizes,
    adversary: Option<Adversary>,
}

/// A client or a server with its NIC.
struct Member {
    nic: NicThread,
    domain: Domain,
}

/// Both directions between a client and a server.
struct Way {
    client: usize,
    server: usize,
    client_queues: Vec<HostQueue>,
    server_queues: Vec<HostQueue>,
    // What kernels are given points into these.
    _kept: Vec<Box<dyn std::any::Any>>,
}

/// Slots that NICs reach, and everything between them.
struct Net {
    ways: Vec<Way>,
    clients: Vec<Member>,
    servers: Vec<Member>,
}

impl Net {
    /// Replaces all links of a world.
    fn join(world: &World, sizes: Sizes) -> Self {
        let members = |count: usize, salt: u64| -> Vec<Member> {
            let member = |at: usize| {
                let adversary =
                    sizes.adversary.map(|a| Adversary { seed: a.seed ^ salt ^ at as u64 });
                let config = NicConfig {
                    is_strict: true,
                    doorbell: DoorbellMode::Checked,
                    adversary,
                    ..NicConfig::default()
                };
                let mut nic = Nic::new(config).expect("a NIC");
                let domain = nic.alloc_domain();
                Member { nic: NicThread::spawn(nic).expect("a thread"), domain }
            };
            (0..count).map(member).collect()
        };
        let clients = members(world.clients.len(), 0x100);
        let servers = members(world.servers.len(), 0x200);
        let mut ways = Vec::new();
        for (c, client) in clients.iter().enumerate() {
            for (s, server) in servers.iter().enumerate() {
                let queues = |member: &Member| -> Vec<HostQueue> {
                    let mut nic = member.nic.lock();
                    let create = |_| HostQueue::create(&mut nic, member.domain, sizes.queue);
                    (0..sizes.num_qps).map(create).collect::<Result<_, _>>().expect("queues")
                };
                let mut way = Way {
                    client: c,
                    server: s,
                    client_queues: queues(client),
                    server_queues: queues(server),
                    _kept: Vec::new(),
                };
                connect(&way, client, server);
                let error_of = |state: DevicePtr, offset: usize| state.0 + offset as u64;
                let geometry = &world.geometry;
                let (client_state, server_state) =
                    (world.clients[c].state.address(), world.servers[s].state.address());
                let (request, request_at) = direction(
                    &mut way,
                    (client, server),
                    geometry.slot_bytes as usize,
                    s as u32,
                    error_of(client_state, offset_of!(ClientState, error)),
                    true,
                );
                let (response, response_at) = direction(
                    &mut way,
                    (server, client),
                    geometry.response_slot_bytes as usize,
                    c as u32,
                    error_of(server_state, offset_of!(ServerState, error)),
                    false,
                );
                let server_peer = ServerPeer {
                    request,
                    response: response_at,
                    generation: GENERATION,
                    reserved: 0,
                };
                let client_peer = ClientPeer {
                    request: request_at,
                    response,
                    client_id: world.clients[c].id,
                    generation: GENERATION,
                    reserved: 0,
                };
                let at = (s * size_of::<ServerPeer>()) as u64;
                world.clients[c].table.write(at, &[server_peer]);
                let at = (c * size_of::<ClientPeer>()) as u64;
                world.servers[s].table.write(at, &[client_peer]);
                ways.push(way);
            }
        }
        Self { ways, clients, servers }
    }

    fn nics(&self) -> impl Iterator<Item = &NicThread> {
        self.clients.iter().chain(&self.servers).map(|member| &member.nic)
    }

    /// Waits until every NIC has done what it was told of.
    fn settle(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut num_idle = 0;
        while num_idle < 3 {
            assert!(Instant::now() < deadline, "the NICs do not come to rest");
            let work: usize = self.nics().map(|nic| nic.lock().progress()).sum();
            num_idle = if work == 0 { num_idle + 1 } else { 0 };
        }
    }

    fn recover(&self, way: usize) {
        let way = &self.ways[way];
        let (client, server) = (&self.clients[way.client], &self.servers[way.server]);
        for (queues, member) in [(&way.client_queues, client), (&way.server_queues, server)] {
            for queue in queues {
                queue.reset(&mut member.nic.lock()).expect("reset");
            }
        }
        connect(way, client, server);
    }

    fn assert_clean(&self) {
        for nic in self.nics() {
            let nic = nic.lock();
            assert!(nic.violations().is_empty(), "{:?}", nic.violations().first());
        }
    }

    fn num_failures(&self) -> u64 {
        self.nics().map(|nic| nic.lock().num_failures()).sum()
    }
}

fn connect(way: &Way, client: &Member, server: &Member) {
    let (mut here, mut there) = (client.nic.lock(), server.nic.lock());
    let (client_port, server_port) = (here.address(), there.address());
    for (mine, theirs) in way.client_queues.iter().zip(&way.server_queues) {
        mine.connect(&mut here, server_port, theirs.qpn()).expect("connect");
        theirs.connect(&mut there, client_port, mine.qpn()).expect("connect");
    }
}

/// The way from one member to a slot of another: the link, and where the owner finds the slot.
fn direction(
    way: &mut Way,
    (from, to): (&Member, &Member),
    slot_bytes: usize,
    peer: u32,
    error: u64,
    is_request: bool,
) -> (Link, DevicePtr) {
    let slot = Segment::create(slot_bytes).expect("a slot");
    let mirror = Segment::create(slot_bytes).expect("a mirror");
    // Nothing of the mirror may arrive that was not stored there.
    // SAFETY: the mirror is that large, and nobody knows it yet.
    unsafe { mirror.region().as_ptr().as_ptr().write_bytes(0xee, slot_bytes) };
    let rights = Access::REMOTE_WRITE.and(Access::REMOTE_ATOMIC);
    let remote = to.nic.lock().register(to.domain, &slot, 0, slot_bytes, rights).expect("a key");
    let local = from
        .nic
        .lock()
        .register_local(from.domain, mirror.region(), Access::default())
        .expect("a key");
    let queues = if is_request { &way.client_queues } else { &way.server_queues };
    let handles: Box<[QueueHandle]> =
        queues.iter().map(|queue| QueueHandle { peer, ..*queue.handle() }).collect();
    let handle = Box::new(PeerHandle {
        qps: handles.as_ptr() as u64,
        mirror: local.address,
        remote: remote.address,
        slot_bytes: slot_bytes as u64,
        lkey: local.lkey,
        rkey: remote.rkey,
        num_qps: handles.len() as u32,
        reserved: 0,
        bound: Bound {
            error: error as *mut kernels::mlx5::ErrorWord,
            abort_mask: std::ptr::null(),
            timeout_ns: 60_000_000_000,
        },
    });
    let address = |segment: &Segment| DevicePtr(segment.region().as_ptr().as_ptr() as u64);
    let link = Link {
        window: address(&mirror),
        context: std::ptr::from_ref(&*handle) as u64,
        way: WAY_IBGDA,
        reserved: 0,
    };
    let slot_at = address(&slot);
    way._kept.extend([
        Box::new(slot) as Box<dyn std::any::Any>,
        Box::new(mirror),
        Box::new(handles),
        Box::new(handle),
    ]);
    (link, slot_at)
}

fn fresh() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}
