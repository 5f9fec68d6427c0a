//! The fused kernels post on queue pairs that the control path made: [`ibgda::Peer`] over libibverbs and libmlx5 in
//! software, with both kinds of queues. Their results are those of direct stores.

use std::mem::offset_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ibgda::{
    Access, HostAccess, Nic, NicConfig, OpenPeer, Peer, PeerConfig, QueueConfig, QueuePath, Waits,
};
use kernels::abi::{
    CONTROL_BYTES, ClientPeer, ClientState, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, FLAG_ANY_PATH,
    FrameGeometry, Link, PATH_IBGDA, ServerPeer, ServerState,
};
use rand::RngExt;
use softnic::Fault;
use softnic::format::Syndrome;

use crate::layer::{Ways, fail_over_and_back, fresh, layer, nothing_arrives, worlds};
use crate::library::library;
use crate::link_calls;
use crate::runner::Runner;
use crate::world::{GENERATION, Input, POISON, World};

/// Longest wait, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
const PATHS: [QueuePath; 2] = [QueuePath::Plain, QueuePath::Devx];

#[test]
fn layers_over_queues_of_the_control_path_are_the_same_as_over_stores() {
    let Some(runner) = Runner::host() else { return };
    let _turn = turn();
    let mut rng = fresh();
    // Hidden size, top-k, tokens, experts, clients, servers; the last one runs the tuned kernels.
    let shapes = [(256, 4, 40, 24, 2, 2), (640, 3, 9, 7, 1, 3), (7168, 8, 5, 64, 2, 2)];
    for (at, (hidden, top_k, tokens, num_experts, num_clients, num_servers)) in
        shapes.into_iter().enumerate()
    {
        for (path, dtype) in PATHS.into_iter().zip([DTYPE_F8_E4M3, DTYPE_BF16]) {
            let geometry = FrameGeometry::new(hidden, top_k, dtype, tokens, 2).expect("in range");
            let queue = QueueConfig {
                path,
                // So that indices go around.
                depth: 128,
                // Some rows and runs of rows take several requests.
                max_message_bytes: if at == 1 { 1024 } else { 1 << 30 },
                ..QueueConfig::default()
            };
            let (direct, posted) =
                worlds(&runner, &mut rng, geometry, num_experts, num_clients, num_servers);
            let net = Net::join(&posted, queue, 1 + at, Recovery::Rejoin, PATIENCE);
            for round in 0..4 {
                let inputs: Vec<Input> = (0..num_clients)
                    .map(|_| {
                        let tokens = if round == 1 { 0 } else { rng.random_range(1..=tokens) };
                        Input::random(&mut rng, &geometry, num_experts, tokens)
                    })
                    .collect();
                let echoes = round == 3;
                net.poison();
                let expected = layer(&runner, &direct, &inputs, 0, echoes, || {});
                let found =
                    layer(&runner, &posted, &inputs, FLAG_ANY_PATH, echoes, || net.settle());
                assert!(found == expected, "hidden {hidden}, {path:?}, round {round}");
            }
            net.check();
            net.expect_all_through_the_nic(&posted);
        }
    }
}

#[test]
fn a_failed_queue_of_the_control_path_is_left_and_comes_back() {
    let Some(runner) = Runner::host() else { return };
    let _turn = turn();
    let mut rng = fresh();
    let syndromes = [Syndrome::RetryExceeded, Syndrome::RemoteAccess, Syndrome::LocalQpOp];
    for (at, syndrome) in syndromes.into_iter().enumerate() {
        for (path, recovery) in PATHS.into_iter().zip([Recovery::Rejoin, Recovery::Reopen]) {
            // Each path with each recovery.
            let path = if at == 1 { other(path) } else { path };
            fail_over_and_back(&runner, &mut rng, syndrome, |posted| {
                let queue = QueueConfig { path, depth: 128, ..QueueConfig::default() };
                Net::join(posted, queue, 2, recovery, PATIENCE)
            });
        }
    }
}

/// Bytes that bypass the queues would arrive here, too.
#[test]
fn nothing_arrives_while_the_nic_stands_still() {
    let Some(runner) = Runner::host() else { return };
    let _turn = turn();
    let mut rng = fresh();
    for path in PATHS {
        nothing_arrives(&runner, &mut rng, |posted| {
            let queue = QueueConfig { path, depth: 128, ..QueueConfig::default() };
            let net = Net::join(posted, queue, 2, Recovery::Rejoin, Duration::from_secs(2));
            for peer in net.ways.iter().map(|way| way.at_client()) {
                for queue in peer.queues() {
                    let fault = Fault::Stall { qpn: queue.qpn() };
                    softnic_nic().lock().inject(fault).expect("a queue");
                }
            }
            net
        });
    }
}

/// A slot, and the link to it over queues of the control path.
struct Posted {
    link: Link,
    at_server: Peer,
    _at_client: Peer,
}

impl link_calls::Ends for Posted {
    fn link(&self) -> Link {
        self.link
    }

    fn slot_bytes(&self) -> usize {
        self.at_server.slot().bytes()
    }

    fn slot(&self) -> *mut u8 {
        self.at_server.slot().address() as *mut u8
    }
}

impl Posted {
    fn join(path: QueuePath, max_message_bytes: u32) -> Self {
        let geometry = FrameGeometry::new(256, 4, DTYPE_BF16, 40, 2).expect("in range");
        let libraries = softnic_verbs::libraries().expect("functions");
        let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
        let nic = Nic::open(&libraries, &config).expect("a NIC");
        let queue = QueueConfig { path, depth: 128, max_message_bytes, ..QueueConfig::default() };
        let access: Arc<dyn Access> = Arc::new(HostAccess);
        let slots = [geometry.response_slot_bytes as usize, geometry.slot_bytes as usize];
        let open = |peer, [own_slot_bytes, peer_slot_bytes]: [usize; 2]| {
            let config = PeerConfig { peer, num_queues: 2, queue, own_slot_bytes, peer_slot_bytes };
            OpenPeer::open(&nic, &access, config).expect("slots and queues")
        };
        let (at_client, at_server) = (open(0, slots), open(0, [slots[1], slots[0]]));
        let (from_client, from_server) = (at_client.description(), at_server.description());
        let mut at_client = at_client.join(&from_server).expect("the server's description");
        let at_server = at_server.join(&from_client).expect("the client's description");
        let nobody = DevicePtr::NULL;
        let waits = Waits { error: nobody, abort_mask: nobody, timeout: PATIENCE };
        let line = at_client.server(&geometry, GENERATION, waits).expect("a link");
        Self { link: line.request, at_server, _at_client: at_client }
    }
}

#[test]
fn bytes_go_to_a_slot_and_back_through_the_nic() {
    let Some(library) = library() else { return };
    let _turn = turn();
    let mut rng = fresh();
    for path in PATHS {
        for max_message_bytes in [1024, 1 << 30] {
            let ends = Posted::join(path, max_message_bytes);
            link_calls::bytes_go_there_and_back(library, &mut rng, &ends);
        }
        link_calls::a_put_out_of_the_slot_is_refused(library, &Posted::join(path, 1024));
        link_calls::a_get_into_other_memory_is_refused(library, &Posted::join(path, 1024));
    }
    let violations = softnic_verbs::violations();
    assert!(violations.is_empty(), "{}", violations.join("; "));
}

const fn other(path: QueuePath) -> QueuePath {
    match path {
        QueuePath::Plain => QueuePath::Devx,
        QueuePath::Devx => QueuePath::Plain,
    }
}

/// A process has one NIC behind the libraries, and `settle` waits for all its requests.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn softnic_nic() -> &'static softnic::NicThread {
    softnic_verbs::nic().expect("a NIC")
}

/// How a path is restored.
#[derive(Debug, Clone, Copy)]
enum Recovery {
    /// With the same queue pairs.
    Rejoin,
    /// With other queue pairs and slots.
    Reopen,
}

/// Both ends between a client and a server.
struct Way {
    client: usize,
    server: usize,
    /// The client's end, then the server's. `None` while they are replaced.
    ends: Option<[Peer; 2]>,
}

/// Links of a world by the control path.
struct Net {
    geometry: FrameGeometry,
    nic: Arc<Nic>,
    queue: QueueConfig,
    num_queues: usize,
    recovery: Recovery,
    timeout: Duration,
    ways: Vec<Way>,
    /// Of queue pairs, before this.
    num_failures: u64,
}

impl Net {
    /// Replaces all links of a world.
    fn join(
        world: &World,
        queue: QueueConfig,
        num_queues: usize,
        recovery: Recovery,
        timeout: Duration,
    ) -> Self {
        let libraries = softnic_verbs::libraries().expect("functions");
        // A NIC in software is in no list of addresses.
        let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
        let nic = Nic::open(&libraries, &config).expect("a NIC");
        let num_failures = softnic_nic().lock().num_failures();
        let geometry = world.geometry;
        let ways = Vec::new();
        let mut net =
            Self { geometry, nic, queue, num_queues, recovery, timeout, ways, num_failures };
        for client in 0..world.clients.len() {
            for server in 0..world.servers.len() {
                let ends = Some(net.open(world, client, server));
                net.ways.push(Way { client, server, ends });
            }
        }
        net
    }

    /// Opens, joins, and writes the lines of both tables.
    fn open(&self, world: &World, client: usize, server: usize) -> [Peer; 2] {
        let geometry = &self.geometry;
        let (request, response) =
            (geometry.slot_bytes as usize, geometry.response_slot_bytes as usize);
        let access: Arc<dyn Access> = Arc::new(HostAccess);
        let open = |peer: usize, own_slot_bytes, peer_slot_bytes| {
            let (peer, num_queues, queue) = (peer as u32, self.num_queues, self.queue);
            let config = PeerConfig { peer, num_queues, queue, own_slot_bytes, peer_slot_bytes };
            OpenPeer::open(&self.nic, &access, config).expect("slots and queues")
        };
        let (at_client, at_server) =
            (open(server, response, request), open(client, request, response));
        let (from_client, from_server) = (at_client.description(), at_server.description());
        let mut at_client = at_client.join(&from_server).expect("the server's description");
        let mut at_server = at_server.join(&from_client).expect("the client's description");
        for (peer, len) in [(&at_client, request), (&at_server, response)] {
            // Only stored bytes of the mirror may arrive.
            peer.mirror().write(0, &vec![0xee; len]).expect("a mirror");
        }

        let waits = |state: DevicePtr, offset: usize| Waits {
            error: state.add(offset as u64),
            abort_mask: DevicePtr::NULL,
            timeout: self.timeout,
        };
        let state = world.clients[client].state.address();
        let line: ServerPeer = at_client
            .server(geometry, GENERATION, waits(state, offset_of!(ClientState, error)))
            .expect("a link");
        assert_eq!((line.request.path, at_client.number()), (PATH_IBGDA, server as u32));
        world.clients[client].table.write((server * size_of::<ServerPeer>()) as u64, &[line]);
        let (id, state) = (world.clients[client].id, world.servers[server].state.address());
        let line: ClientPeer = at_server
            .client(geometry, id, GENERATION, waits(state, offset_of!(ServerState, error)))
            .expect("a link");
        world.servers[server].table.write((client * size_of::<ClientPeer>()) as u64, &[line]);
        [at_client, at_server]
    }

    /// Poisons everything that earlier layers left in slots, except row flags and control tails, which keep their values.
    fn poison(&self) {
        let g = &self.geometry;
        let poison = |peer: &Peer, from: u64, to: u64| {
            peer.slot().write(from as usize, &vec![POISON; (to - from) as usize]).expect("a slot");
        };
        for [at_client, at_server] in self.ways.iter().filter_map(|way| way.ends.as_ref()) {
            for place in 0..u64::from(g.num_frames) {
                let frame = place * g.frame_bytes;
                poison(at_server, frame, frame + g.flags_offset);
                poison(at_server, frame + g.entries_offset, frame + g.frame_bytes);
                let frame = place * g.response_frame_bytes;
                let begin = frame + g.response_payload_offset;
                poison(at_client, begin, frame + g.response_frame_bytes);
            }
        }
    }

    /// Checks that the world's own slots, over which links were direct, are unchanged: headers and progress would be in
    /// their control tails. The slots of the queues contain all arrivals.
    fn expect_all_through_the_nic(&self, world: &World) {
        let servers = world.servers.iter().flat_map(|server| &server.requests);
        let clients = world.clients.iter().flat_map(|client| &client.responses);
        let slots = servers
            .map(|slot| (slot, self.geometry.slot_bytes))
            .chain(clients.map(|slot| (slot, self.geometry.response_slot_bytes)));
        for (slot, bytes) in slots {
            let tail: Vec<u8> = slot.read(bytes - CONTROL_BYTES, CONTROL_BYTES);
            assert!(tail.iter().all(|byte| *byte == 0), "something came by a store");
        }
        for way in &self.ways {
            let [_, at_server] = way.ends.as_ref().expect("both ends");
            let mut tail = vec![0; CONTROL_BYTES as usize];
            let begin = self.geometry.slot_bytes - CONTROL_BYTES;
            at_server.slot().read(begin as usize, &mut tail).expect("a slot");
            assert!(tail.iter().any(|byte| *byte != 0), "client {}: no header", way.client);
        }
        assert_eq!(softnic_nic().lock().num_failures(), self.num_failures);
    }
}

impl Way {
    fn at_client(&self) -> &Peer {
        &self.ends.as_ref().expect("both ends")[0]
    }
}

impl Ways for Net {
    fn settle(&self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut num_idle = 0;
        while num_idle < 3 {
            assert!(Instant::now() < deadline, "the NIC does not come to rest");
            let work = softnic_nic().lock().progress();
            num_idle = if work == 0 { num_idle + 1 } else { 0 };
        }
    }

    fn fail(&self, server: usize, queue_idx: usize, nth: u64, syndrome: Syndrome) {
        let qpn = self.ways[server].at_client().queues()[queue_idx].qpn();
        softnic_verbs::fail(qpn, nth, syndrome).expect("a queue");
    }

    fn recover(&mut self, world: &World, server: usize) {
        let Way { client, server, ends } = &mut self.ways[server];
        let (client, server) = (*client, *server);
        let ends = ends.take().expect("both ends");
        let ends = match self.recovery {
            Recovery::Rejoin => {
                let [at_client, at_server] = ends.map(|peer| peer.reset().expect("a reset"));
                let (from_client, from_server) = (at_client.description(), at_server.description());
                // The tables stay as they are.
                [
                    at_client.rejoin(&from_server).expect("the server's description"),
                    at_server.rejoin(&from_client).expect("the client's description"),
                ]
            }
            Recovery::Reopen => {
                drop(ends);
                self.open(world, client, server)
            }
        };
        for peer in &ends {
            for queue in peer.queues() {
                assert_eq!(queue.error().expect("a state"), 0);
            }
        }
        self.ways[server].ends = Some(ends);
    }

    fn keeps_causes(&self) -> bool {
        self.queue.path == QueuePath::Plain
    }

    fn check(&self) {
        let violations = softnic_verbs::violations();
        assert!(violations.is_empty(), "{}", violations.join("; "));
    }
}
