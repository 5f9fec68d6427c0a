//! The fused kernels run on this machine's processor and post work requests by themselves. Their results are those of
//! direct stores, bit for bit, also after a queue has failed.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use kernels::abi::{
    ClientPeer, ClientState, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, FLAG_ANY_PATH, FrameGeometry,
    Link, PATH_IBGDA, ServerPeer, ServerState,
};
use kernels::mlx5::{Bound, PeerHandle, QueueHandle};
use rand::RngExt;
use softnic::format::Syndrome;
use softnic::{
    Access, Adversary, Domain, DoorbellMode, Fault, HostQueue, Nic, NicConfig, NicThread,
    QueueSizes, Segment,
};

use crate::layer::{Ways, fail_over_and_back, fresh, layer, worlds};
use crate::runner::Runner;
use crate::world::{GENERATION, Input, World};

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
                    has_record: at != 2,
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
                let found =
                    layer(&runner, &posted, &inputs, FLAG_ANY_PATH, echoes, || net.settle());
                assert!(found == expected, "hidden {hidden}, dtype {dtype}, round {round}");
            }
            net.assert_clean();
            assert_eq!(net.num_failures(), 0);
        }
    }
}

/// Each client reaches one server by stores and another by its NIC, and each server has a client of either kind in
/// one batch.
#[test]
fn layers_by_stores_and_by_nics_at_once_are_the_same() {
    let Some(runner) = Runner::host() else { return };
    let mut rng = fresh();
    for (hidden, top_k, tokens) in [(256, 4, 40), (7168, 8, 5)] {
        for dtype in [DTYPE_F8_E4M3, DTYPE_BF16] {
            let geometry = FrameGeometry::new(hidden, top_k, dtype, tokens, 2).expect("in range");
            let sizes = Sizes { num_qps: 2, queue: QueueSizes::default(), adversary: None };
            let (direct, mixed) = worlds(&runner, &mut rng, geometry, 24, 2, 2);
            let net = Net::join_some(&mixed, sizes, |client, server| client != server);
            assert_eq!(net.ways.len(), 2);
            for round in 0..4 {
                let inputs: [Input; 2] = std::array::from_fn(|_| {
                    let num_tokens = rng.random_range(1..=tokens);
                    Input::random(&mut rng, &geometry, 24, num_tokens)
                });
                let echoes = round == 3;
                let expected = layer(&runner, &direct, &inputs, 0, echoes, || {});
                let found = layer(&runner, &mixed, &inputs, FLAG_ANY_PATH, echoes, || net.settle());
                assert!(found == expected, "hidden {hidden}, dtype {dtype}, round {round}");
            }
            net.assert_clean();
            for queues in net.ways.iter().flat_map(|way| [&way.client_queues, &way.server_queues]) {
                let num_posted: u64 = queues.iter().map(HostQueue::reserved).sum();
                assert!(num_posted > 0, "nothing went by a NIC");
            }
        }
    }
}

#[test]
fn a_failed_queue_is_noticed_and_its_tokens_go_to_a_replica() {
    let Some(runner) = Runner::host() else { return };
    let mut rng = fresh();
    for syndrome in [Syndrome::RetryExceeded, Syndrome::RemoteAccess, Syndrome::LocalQpOp] {
        fail_over_and_back(&runner, &mut rng, syndrome, |posted| {
            let sizes = Sizes { num_qps: 2, queue: QueueSizes::default(), adversary: None };
            Net::join(posted, sizes)
        });
    }
}

impl Ways for Net {
    fn settle(&self) {
        Self::settle(self);
    }

    fn fail(&self, server: usize, queue_idx: usize, nth: u64, syndrome: Syndrome) {
        let qpn = self.ways[server].client_queues[queue_idx].qpn();
        self.clients[0].nic.lock().inject(Fault::Fail { qpn, nth, syndrome }).expect("a queue");
    }

    fn recover(&mut self, _world: &World, server: usize) {
        Self::recover(self, server);
    }

    fn keeps_causes(&self) -> bool {
        // `QueueSizes::default`
        true
    }

    fn check(&self) {
        self.assert_clean();
    }
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
    // Tables of kernels point into these.
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
        Self::join_some(world, sizes, |_, _| true)
    }

    /// Replaces the links between some clients and servers.
    fn join_some(world: &World, sizes: Sizes, goes_by_nic: impl Fn(usize, usize) -> bool) -> Self {
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
                if !goes_by_nic(c, s) {
                    continue;
                }
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

    /// Waits until every NIC has executed all posted requests.
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

/// The path from one member to a slot of another: the link, and the slot's address at its owner.
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
    // Only stored bytes of the mirror may arrive.
    // SAFETY: the mirror is that large, and no other code knows it yet.
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
        path: PATH_IBGDA,
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
