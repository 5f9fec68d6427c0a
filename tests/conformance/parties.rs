//! The parties of the suite's scripts: two threads, or this process and a child of the same binary.
#![allow(dead_code, reason = "not every transport's tests need everything")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use p2p_core::bootstrap::{ConnectConfig, ConnectError, Listener, ListenerConfig, connect};
use p2p_core::endpoint::Transport;
use p2p_core::network::{JoinedSide, Network, Route};
use p2p_core::region::SlotKey;
use p2p_core::{
    AnyEndpoint, Channel, Connection, PeerHello, SlotConfig, SlotLayout, TransportKind,
};
use test_support::bounded;

use crate::suite::{Party, Script, reset_meetings, scripts};

pub const ROUTE: Route =
    Route { local: IpAddr::V4(Ipv4Addr::LOCALHOST), remote: IpAddr::V4(Ipv4Addr::LOCALHOST) };

pub fn configs() -> [SlotConfig; 3] {
    [
        SlotConfig { slot_bytes: 8 << 10, num_frames: 1 },
        SlotConfig { slot_bytes: 64 << 10, num_frames: 2 },
        SlotConfig { slot_bytes: 1 << 20, num_frames: 5 },
    ]
}

pub fn fresh_seed() -> u64 {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    seed
}

/// Runs every script between two threads, each on a fresh pair of channels.
pub fn in_threads<E: Transport + 'static>(
    mut make: impl FnMut(SlotConfig) -> (Channel<E>, Channel<E>),
) {
    let seed = fresh_seed();
    for config in configs() {
        for (name, script) in scripts::<E>() {
            println!("{name}: {config:?}");
            let (a, b) = make(config);
            let other = std::thread::spawn(move || perform(script, Party::B, b, seed));
            perform(script, Party::A, a, seed);
            other.join().expect("the other party");
        }
    }
}

/// Creates both ends of a channel between two networks of this process.
pub fn pair(
    a: &dyn Network,
    b: &dyn Network,
    config: SlotConfig,
) -> (Channel<AnyEndpoint>, Channel<AnyEndpoint>) {
    let layout = SlotLayout::new(config).unwrap();
    let (here, there) = (a.open(&layout, ROUTE).unwrap(), b.open(&layout, ROUTE).unwrap());
    let (of_here, of_there) = (here.description(), there.description());
    let channel =
        |side: JoinedSide| Channel::new(side.endpoint, layout, side.slot, SlotKey).unwrap();
    (channel(here.join(&of_there).unwrap()), channel(there.join(&of_here).unwrap()))
}

/// The path between a test's processes, and the settings of its children, see [`var`].
#[derive(Clone)]
pub struct TransportSetup {
    pub kind: TransportKind,
    pub networks: Vec<Arc<dyn Network>>,
    pub vars: Vec<(&'static str, String)>,
}

impl TransportSetup {
    pub fn plain(kind: TransportKind) -> Self {
        Self { kind, networks: Vec::new(), vars: Vec::new() }
    }

    pub fn over(network: Arc<dyn Network>) -> Self {
        Self { kind: network.kind(), networks: vec![network], vars: Vec::new() }
    }

    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.vars.push((name, value.to_string()));
        self
    }
}

/// Runs every script between this process and a child, whose `child_process` calls [`perform_all`].
/// `is_as_expected` checks every connection.
pub fn in_processes(setup: &TransportSetup, is_as_expected: impl Fn(&Connection) -> bool) {
    let seed = fresh_seed();
    let setup = setup.clone().with("SEED", seed);
    for config in configs() {
        let (connections, mut child) = serve_one_child(config, &setup);
        for (name, script) in scripts::<AnyEndpoint>() {
            println!("{name}: {config:?}");
            let connection = connections.recv_timeout(PATIENCE).expect("peer");
            assert_eq!(connection.transport.kind, setup.kind);
            assert!(is_as_expected(&connection), "{:?}", connection.transport);
            perform(script, Party::A, connection.channel, seed);
        }
        let status = bounded::status_of(&mut child, "the other party", bounded::LIMIT);
        assert!(status.success(), "the child process failed: {status}");
    }
}

/// A child's part of [`in_processes`].
pub fn perform_all(setup: &TransportSetup) {
    let seed = var("SEED").expect("a seed").parse().expect("a number");
    let runtime = runtime();
    for (_, script) in scripts::<AnyEndpoint>() {
        let connection = meet(&runtime, setup).unwrap();
        perform(script, Party::B, connection.channel, seed);
    }
}

/// Starts a listener, and this binary again as its peer.
pub fn serve_one_child(
    slot: SlotConfig,
    setup: &TransportSetup,
) -> (mpsc::Receiver<Connection>, Child) {
    let (receiver, addr) = serve(slot, setup);
    (receiver, child_command(addr, slot, setup).spawn().unwrap())
}

pub fn serve(slot: SlotConfig, setup: &TransportSetup) -> (mpsc::Receiver<Connection>, SocketAddr) {
    let (sender, receiver) = mpsc::channel();
    let (addr_sender, addr) = mpsc::channel();
    let (kind, networks) = (setup.kind, setup.networks.clone());
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let transports = vec![kind];
            // The first peer waits until its provider is open, which takes long on an emulated processor.
            let handshake_timeout = PATIENCE;
            let config = ListenerConfig {
                slot,
                transports,
                networks,
                handshake_timeout,
                ..Default::default()
            };
            // Providers choose their device by the address of the connection.
            let host = std::env::var("SWITCHYARD_TEST_ADDRESS");
            let host = host.unwrap_or_else(|_| "127.0.0.1".to_owned());
            let listener = Listener::bind(format!("{host}:0"), config).await.unwrap();
            addr_sender.send(listener.local_addr()).unwrap();
            let forever = std::future::pending();
            let on_peer = move |connection| drop(sender.send(connection));
            listener.serve(|_| Ok(Vec::new()), on_peer, forever).await;
        });
    });
    let addr = addr.recv_timeout(PATIENCE).expect("listener");
    (receiver, addr)
}

/// Command that starts this binary as a child, which reads its settings by [`var`].
pub fn child_command(addr: SocketAddr, slot: SlotConfig, setup: &TransportSetup) -> Command {
    let mut command = test_support::child::command("peer");
    command
        .env("P2P_CHILD_ADDR", addr.to_string())
        .env("P2P_CHILD_SLOT", format!("{} {}", slot.slot_bytes, slot.num_frames))
        .envs(setup.vars.iter().map(|(name, value)| (format!("P2P_CHILD_{name}"), value)))
        .stdin(Stdio::null());
    command
}

/// A setting of a child, by its name.
pub fn var(name: &str) -> Option<String> {
    std::env::var(format!("P2P_CHILD_{name}")).ok()
}

/// Connects a child to the listener of its parent.
pub fn meet(
    runtime: &tokio::runtime::Runtime,
    setup: &TransportSetup,
) -> Result<Connection, ConnectError> {
    let slot = var("SLOT").expect("a slot");
    let sizes: Vec<usize> = slot.split(' ').map(|part| part.parse().unwrap()).collect();
    let config = ConnectConfig {
        slot: SlotConfig { slot_bytes: sizes[0], num_frames: sizes[1] },
        transports: vec![setup.kind],
        networks: setup.networks.clone(),
        timeout: PATIENCE,
        ..Default::default()
    };
    let addr = var("ADDR").expect("an address");
    runtime.block_on(connect(addr.as_str(), PeerHello::default(), config))
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn perform<E: Transport>(script: Script<E>, party: Party, channel: Channel<E>, seed: u64) {
    reset_meetings();
    script(party, channel, seed);
}

/// Timeout for the other process, on a machine with little time to spare.
const PATIENCE: Duration = Duration::from_secs(60);
