//! One suite, every transport: threads over local memory, threads over staged memory with and without
//! disorder, and two processes over shared memory, over shared memory by put only, and over networks.
#![cfg(not(loom))]

#[cfg(feature = "libfabric")]
#[path = "../../../tests/src/skip.rs"]
mod skip;
mod suite;
#[cfg(feature = "verbs")]
mod verbs;

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use p2p_core::backend::local;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::bootstrap::{CloseReason, ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::endpoint::Endpoint;
use p2p_core::network::Network;
use p2p_core::{AnyEndpoint, Channel, Connection, PeerHello, SlotConfig, TransportKind};
use suite::{Party, Script, reset_meetings, scripts};

fn configs() -> Vec<SlotConfig> {
    vec![
        SlotConfig { slot_bytes: 8 << 10, num_frames: 1 },
        SlotConfig { slot_bytes: 64 << 10, num_frames: 2 },
        SlotConfig { slot_bytes: 1 << 20, num_frames: 5 },
    ]
}

fn fresh_seed() -> u64 {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    seed
}

fn in_threads<E: Endpoint + 'static>(mut make: impl FnMut(SlotConfig) -> (Channel<E>, Channel<E>)) {
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

fn perform<E: Endpoint>(script: Script<E>, party: Party, channel: Channel<E>, seed: u64) {
    reset_meetings();
    script(party, channel, seed);
}

#[test]
fn local_threads() {
    in_threads(|config| local::pair(config).unwrap());
}

#[test]
fn staged_threads() {
    in_threads(|config| local::staged_pair(config, None).unwrap());
}

#[test]
fn staged_threads_in_disorder() {
    let mut seed = fresh_seed();
    in_threads(move |config| {
        seed += 1;
        let disorder = Disorder { seed, max_delay: Duration::from_micros(20) };
        local::staged_pair(config, Some(disorder)).unwrap()
    });
}

#[test]
fn two_processes_over_shared_memory() {
    in_processes(&Way::plain(TransportKind::Shm));
}

#[test]
fn two_processes_over_staged_memory() {
    in_processes(&Way::plain(TransportKind::Staged));
}

#[cfg(feature = "libfabric")]
#[test]
fn two_processes_over_libfabric_tcp() {
    over_libfabric("tcp;ofi_rxm");
}

#[cfg(feature = "libfabric")]
#[test]
fn two_processes_over_libfabric_shm() {
    over_libfabric("shm");
}

/// Providers that few hosts have are named by `SWITCHYARD_TEST_PROVIDER`.
#[cfg(feature = "libfabric")]
#[test]
fn two_processes_over_another_provider() {
    let Ok(provider) = std::env::var("SWITCHYARD_TEST_PROVIDER") else { return };
    over_libfabric(&provider);
}

#[cfg(feature = "libfabric")]
fn over_libfabric(provider: &str) {
    let way = Way { kind: TransportKind::Libfabric, flavour: provider.to_owned() };
    match p2p_core::backend::libfabric::FabricNetwork::open(provider) {
        Ok(_) => in_processes(&way),
        Err(error) => skip::skip("libfabric", &error.to_string()),
    }
}

/// A transport, and of a network which.
#[derive(Debug, Clone)]
struct Way {
    kind: TransportKind,
    flavour: String,
}

impl Way {
    fn plain(kind: TransportKind) -> Self {
        Self { kind, flavour: String::new() }
    }

    /// What the other process is told.
    fn encode(&self) -> String {
        format!("{} {}", self.kind.name(), self.flavour)
    }

    fn decode(text: &str) -> Self {
        let (kind, flavour) = text.split_once(' ').unwrap();
        let kind = match kind {
            "staged" => TransportKind::Staged,
            "verbs" => TransportKind::Verbs,
            "libfabric" => TransportKind::Libfabric,
            _ => TransportKind::Shm,
        };
        Self { kind, flavour: flavour.to_owned() }
    }

    fn networks(&self) -> Vec<Arc<dyn Network>> {
        match self.kind {
            #[cfg(feature = "libfabric")]
            TransportKind::Libfabric => {
                let network =
                    p2p_core::backend::libfabric::FabricNetwork::open(&self.flavour).unwrap();
                vec![Arc::new(network)]
            }
            #[cfg(feature = "verbs")]
            TransportKind::Verbs => vec![verbs::network()],
            _ => Vec::new(),
        }
    }
}

fn in_processes(way: &Way) {
    let seed = fresh_seed();
    for config in configs() {
        let (connections, mut child) = serve_one_child(config, way, &[("SEED", seed.to_string())]);
        for (name, script) in scripts::<AnyEndpoint>() {
            println!("{name}: {config:?}");
            let connection = connections.recv_timeout(Duration::from_secs(30)).expect("peer");
            assert_eq!(connection.transport.kind, way.kind);
            assert!(way.flavour.is_empty() || connection.transport.flavour == way.flavour);
            perform(script, Party::A, connection.channel, seed);
        }
        let status = child.wait().unwrap();
        assert!(status.success(), "the child process failed: {status}");
    }
}

#[test]
fn the_death_of_a_process_is_noticed_at_once() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let (connections, mut child) =
        serve_one_child(config, &Way::plain(TransportKind::Shm), &[("HANG", "1".to_owned())]);
    let connection = connections.recv_timeout(Duration::from_secs(30)).expect("peer");
    assert_eq!(connection.liveness.closed_now(), None);
    let runtime = runtime();
    let waiting = runtime.spawn(async move {
        let reason = connection.liveness.closed().await;
        (reason, connection.liveness.closed_now())
    });
    let start = std::time::Instant::now();
    child.kill().unwrap();
    let (reason, again) = runtime.block_on(waiting).unwrap();
    println!("noticed after {:?}", start.elapsed());
    child.wait().unwrap();
    assert!(matches!(reason, CloseReason::Lost | CloseReason::Reset), "{reason}");
    assert_eq!(again, Some(reason));
}

#[test]
fn another_user_is_refused_by_name() {
    let this_user = std::fs::metadata("/proc/self").unwrap().uid();
    if this_user != 0 {
        println!("SKIPPED: needs root to start a process of another user");
        return;
    }
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let way = Way::plain(TransportKind::Shm);
    let (connections, addr) = serve(slot, &way);
    let mut command = child_command(addr, slot, &way, &[("REFUSED", "1".to_owned())]);
    match command.uid(65534).gid(65534).status() {
        Ok(status) => assert!(status.success(), "see the child's message"),
        Err(error) => println!("SKIPPED: another user cannot execute this test: {error}"),
    }
    assert!(connections.try_recv().is_err());
}

/// A listener, and this binary again as its peer.
fn serve_one_child(
    slot: SlotConfig,
    way: &Way,
    env: &[(&str, String)],
) -> (mpsc::Receiver<Connection>, Child) {
    let (receiver, addr) = serve(slot, way);
    (receiver, child_command(addr, slot, way, env).spawn().unwrap())
}

fn serve(slot: SlotConfig, way: &Way) -> (mpsc::Receiver<Connection>, SocketAddr) {
    let (sender, receiver) = mpsc::channel();
    let (addr_sender, addr) = mpsc::channel();
    let (kind, networks) = (way.kind, way.networks());
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let transports = vec![kind];
            let config = ListenerConfig { slot, transports, networks, ..Default::default() };
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
    let addr = addr.recv_timeout(Duration::from_secs(10)).expect("listener");
    (receiver, addr)
}

fn child_command(addr: SocketAddr, slot: SlotConfig, way: &Way, env: &[(&str, String)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child_process", "--nocapture"])
        .env("P2P_CHILD_ADDR", addr.to_string())
        .env("P2P_CHILD_SLOT", format!("{} {}", slot.slot_bytes, slot.num_frames))
        .env("P2P_CHILD_WAY", way.encode())
        .envs(env.iter().map(|(k, v)| (format!("P2P_CHILD_{k}"), v)))
        .stdin(Stdio::null());
    command
}

/// The other half of the tests with two processes. Does nothing when run on its own.
#[test]
fn child_process() {
    let var = |name: &str| std::env::var(format!("P2P_CHILD_{name}")).ok();
    let Some(addr) = var("ADDR") else { return };
    let sizes: Vec<usize> =
        var("SLOT").unwrap().split(' ').map(|part| part.parse().unwrap()).collect();
    let way = Way::decode(&var("WAY").unwrap());
    let networks = way.networks();
    let runtime = runtime();
    let try_to_meet = || {
        let config = ConnectConfig {
            slot: SlotConfig { slot_bytes: sizes[0], num_frames: sizes[1] },
            transports: vec![way.kind],
            networks: networks.clone(),
            timeout: Duration::from_secs(20),
            ..Default::default()
        };
        runtime.block_on(connect(addr.as_str(), PeerHello::default(), config))
    };
    if var("REFUSED").is_some() {
        let error = try_to_meet().unwrap_err().to_string();
        assert!(error.contains("uid 65534") && error.contains("uid 0"), "{error}");
        return;
    }
    let meet = || try_to_meet().unwrap();
    if var("HANG").is_some() {
        let _connection = meet();
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let seed = var("SEED").unwrap().parse().unwrap();
    for (_, script) in scripts::<AnyEndpoint>() {
        let connection = meet();
        perform(script, Party::B, connection.channel, seed);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<Channel<StagedEndpoint>>();
    is_send::<Connection>();
};
