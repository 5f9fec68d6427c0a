//! The suite that every transport must pass, with a proxy in between: over the NIC model (also one that
//! delays and reorders), and over libfabric between processes where it is installed.
#![cfg(not(loom))]

mod common;
#[path = "../../tests/conformance/suite.rs"]
mod suite;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::{config, fresh_seed};
use p2p_core::bootstrap::{ConnectConfig, Connection, Listener, ListenerConfig, connect};
use p2p_core::network::{Joined, Network, Route};
use p2p_core::region::SlotKey;
use p2p_core::{AnyEndpoint, Channel, PeerHello, SlotConfig, SlotLayout};
use proxy::{LaneConfig, Proxy, ProxyNetwork};
use softnic::{Adversary, DoorbellMode, NicConfig, SoftNetwork};
use suite::{Party, reset_meetings, scripts};

const ROUTE: Route =
    Route { local: IpAddr::V4(Ipv4Addr::LOCALHOST), remote: IpAddr::V4(Ipv4Addr::LOCALHOST) };
/// Small, so that posting often finds no room.
const LANES: LaneConfig = LaneConfig { num_lanes: 1, depth: 32, budget: 24 };

fn configs() -> [SlotConfig; 3] {
    [
        SlotConfig { slot_bytes: 8 << 10, num_frames: 1 },
        SlotConfig { slot_bytes: 64 << 10, num_frames: 2 },
        SlotConfig { slot_bytes: 1 << 20, num_frames: 5 },
    ]
}

fn behind(inner: Arc<dyn Network>) -> ProxyNetwork {
    ProxyNetwork::new(inner, Arc::new(Proxy::start(&config(1)).unwrap()), LANES)
}

fn softnic(adversary: Option<u64>) -> Arc<SoftNetwork> {
    let config = NicConfig {
        is_strict: true,
        doorbell: DoorbellMode::Checked,
        adversary: adversary.map(|seed| Adversary { seed }),
        ..NicConfig::default()
    };
    Arc::new(SoftNetwork::open(config).unwrap())
}

fn pair(
    a: &dyn Network,
    b: &dyn Network,
    config: SlotConfig,
) -> (Channel<AnyEndpoint>, Channel<AnyEndpoint>) {
    let layout = SlotLayout::new(config).unwrap();
    let (here, there) = (a.open(&layout, ROUTE).unwrap(), b.open(&layout, ROUTE).unwrap());
    let (of_here, of_there) = (here.description(), there.description());
    let channel = |side: Joined| Channel::new(side.endpoint, layout, side.slot, SlotKey).unwrap();
    (channel(here.join(&of_there).unwrap()), channel(there.join(&of_here).unwrap()))
}

fn in_threads(a: &dyn Network, b: &dyn Network) {
    let seed = fresh_seed();
    for config in configs() {
        for (name, script) in scripts::<AnyEndpoint>() {
            println!("{name}: {config:?}");
            let (x, y) = pair(a, b, config);
            std::thread::scope(|scope| {
                let other = scope.spawn(move || {
                    reset_meetings();
                    script(Party::B, y, seed);
                });
                reset_meetings();
                script(Party::A, x, seed);
                other.join().expect("the other party");
            });
        }
    }
}

#[test]
fn both_sides_behind_a_proxy() {
    in_threads(&behind(softnic(None)), &behind(softnic(None)));
}

#[test]
fn one_side_behind_a_proxy_over_a_nic_that_delays_and_reorders() {
    let (a, b) = (softnic(Some(rand::random())), softnic(Some(rand::random())));
    in_threads(&behind(a), &*b);
}

/// The network that a test between processes is about.
#[cfg(feature = "libfabric")]
fn libfabric() -> Option<Arc<dyn Network>> {
    use p2p_core::backend::libfabric::FabricNetwork;
    let provider = std::env::var("SWITCHYARD_TEST_PROVIDER");
    match FabricNetwork::open(provider.as_deref().unwrap_or("tcp;ofi_rxm")) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            common::skip::skip("libfabric", &error.to_string());
            None
        }
    }
}

#[cfg(feature = "verbs")]
fn verbs() -> Option<Arc<dyn Network>> {
    use p2p_core::backend::verbs::{VerbsConfig, VerbsNetwork};
    match VerbsNetwork::open(VerbsConfig::default()) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            common::skip::skip("rdma", &error.to_string());
            None
        }
    }
}

fn named(name: &str) -> Option<Arc<dyn Network>> {
    match name {
        #[cfg(feature = "libfabric")]
        "libfabric" => libfabric(),
        #[cfg(feature = "verbs")]
        "verbs" => verbs(),
        _ => Some(softnic(None)),
    }
}

#[test]
fn processes_over_the_nic_model() {
    processes("softnic");
}

#[test]
#[cfg(feature = "libfabric")]
fn processes_over_libfabric() {
    processes("libfabric");
}

#[test]
#[cfg(feature = "verbs")]
fn processes_over_verbs() {
    processes("verbs");
}

fn processes(name: &'static str) {
    if named(name).is_none() {
        return;
    }
    let seed = fresh_seed();
    for config in configs() {
        let (connections, mut child) = serve_one_child(name, config, seed);
        for (script_name, script) in scripts::<AnyEndpoint>() {
            println!("{script_name}: {config:?}");
            let connection = connections.recv_timeout(Duration::from_secs(60)).expect("peer");
            reset_meetings();
            script(Party::A, connection.channel, seed);
        }
        assert!(child.wait().unwrap().success(), "the child process failed");
    }
}

/// A listener behind a proxy, and this binary again as its peer.
fn serve_one_child(
    name: &'static str,
    slot: SlotConfig,
    seed: u64,
) -> (mpsc::Receiver<Connection>, std::process::Child) {
    let (sender, receiver) = mpsc::channel();
    let (addr_sender, addr) = mpsc::channel::<SocketAddr>();
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let network: Arc<dyn Network> = Arc::new(behind(named(name).expect("found before")));
            let config = ListenerConfig {
                slot,
                transports: vec![network.kind()],
                networks: vec![network],
                ..Default::default()
            };
            let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
            addr_sender.send(listener.local_addr()).unwrap();
            let on_peer = move |connection| drop(sender.send(connection));
            listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()).await;
        });
    });
    let addr = addr.recv_timeout(Duration::from_secs(30)).expect("listener");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process", "--nocapture"])
        .env("PROXY_CHILD_ADDR", addr.to_string())
        .env("PROXY_CHILD_NETWORK", name)
        .env("PROXY_CHILD_SLOT", format!("{} {}", slot.slot_bytes, slot.num_frames))
        .env("PROXY_CHILD_SEED", seed.to_string())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    (receiver, child)
}

/// The other half of the tests with two processes. Does nothing when run on its own.
#[test]
fn child_process() {
    let var = |name: &str| std::env::var(format!("PROXY_CHILD_{name}")).ok();
    let Some(addr) = var("ADDR") else { return };
    let slot = var("SLOT").unwrap();
    let sizes: Vec<usize> = slot.split(' ').map(|part| part.parse().unwrap()).collect();
    let seed = var("SEED").unwrap().parse().unwrap();
    let network: Arc<dyn Network> = Arc::new(behind(named(&var("NETWORK").unwrap()).unwrap()));
    let runtime = runtime();
    for (_, script) in scripts::<AnyEndpoint>() {
        let config = ConnectConfig {
            slot: SlotConfig { slot_bytes: sizes[0], num_frames: sizes[1] },
            transports: vec![network.kind()],
            networks: vec![Arc::clone(&network)],
            timeout: Duration::from_secs(30),
            ..Default::default()
        };
        let connection =
            runtime.block_on(connect(addr.as_str(), PeerHello::default(), config)).unwrap();
        reset_meetings();
        script(Party::B, connection.channel, seed);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
