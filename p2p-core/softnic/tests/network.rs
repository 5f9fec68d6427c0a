//! The suite that every transport must pass, over the NIC model: between threads, with a NIC that
//! delays and reorders all it may, and between processes.

mod common;
#[path = "../../tests/conformance/suite.rs"]
mod suite;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use common::fresh_seed;
use p2p_core::bootstrap::{ConnectConfig, Connection, Listener, ListenerConfig, connect};
use p2p_core::endpoint::{Endpoint, PostError, QuietError};
use p2p_core::network::{Network, Route, SideDescription};
use p2p_core::region::{RemoteRange, SlotKey};
use p2p_core::{AnyEndpoint, Channel, PeerHello, SlotConfig, SlotLayout, TransportKind};
use softnic::format::Syndrome;
use softnic::{Adversary, DoorbellMode, Fault, NicConfig, SoftNetwork};
use suite::{Party, reset_meetings, scripts};

const ROUTE: Route =
    Route { local: IpAddr::V4(Ipv4Addr::LOCALHOST), remote: IpAddr::V4(Ipv4Addr::LOCALHOST) };

fn configs() -> [SlotConfig; 3] {
    [
        SlotConfig { slot_bytes: 8 << 10, num_frames: 1 },
        SlotConfig { slot_bytes: 64 << 10, num_frames: 2 },
        SlotConfig { slot_bytes: 1 << 20, num_frames: 5 },
    ]
}

fn nic_config(adversary: Option<u64>) -> NicConfig {
    NicConfig {
        is_strict: true,
        doorbell: DoorbellMode::Checked,
        adversary: adversary.map(|seed| Adversary { seed }),
        ..NicConfig::default()
    }
}

fn pair(
    a: &SoftNetwork,
    b: &SoftNetwork,
    config: SlotConfig,
) -> (Channel<AnyEndpoint>, Channel<AnyEndpoint>) {
    let layout = SlotLayout::new(config).unwrap();
    let (here, there) = (a.open(&layout, ROUTE).unwrap(), b.open(&layout, ROUTE).unwrap());
    let (of_here, of_there) = (here.description(), there.description());
    let join = |joined: p2p_core::network::Joined| {
        Channel::new(joined.endpoint, layout, joined.slot, SlotKey).unwrap()
    };
    (join(here.join(&of_there).unwrap()), join(there.join(&of_here).unwrap()))
}

fn in_threads(adversary: Option<u64>) {
    let seed = fresh_seed();
    let a = SoftNetwork::open(nic_config(adversary)).unwrap();
    let b = SoftNetwork::open(nic_config(adversary.map(|seed| !seed))).unwrap();
    for config in configs() {
        for (name, script) in scripts::<AnyEndpoint>() {
            println!("{name}: {config:?}");
            let (x, y) = pair(&a, &b, config);
            let other = std::thread::spawn(move || {
                reset_meetings();
                script(Party::B, y, seed);
            });
            reset_meetings();
            script(Party::A, x, seed);
            other.join().expect("the other party");
        }
    }
    for network in [&a, &b] {
        assert!(network.nic().violations().is_empty(), "{:?}", network.nic().violations().first());
    }
}

#[test]
fn threads() {
    in_threads(None);
}

#[test]
fn threads_with_a_nic_that_delays_and_reorders() {
    in_threads(Some(fresh_seed()));
}

#[test]
fn processes() {
    let seed = fresh_seed();
    for config in configs() {
        let (connections, mut child) = serve_one_child(config, &format!("{seed}"));
        for (name, script) in scripts::<AnyEndpoint>() {
            println!("{name}: {config:?}");
            let connection = connections.recv_timeout(Duration::from_secs(30)).expect("peer");
            assert_eq!(connection.transport.kind, TransportKind::SoftNic);
            reset_meetings();
            script(Party::A, connection.channel, seed);
        }
        assert!(child.wait().unwrap().success(), "the child process failed");
    }
}

#[test]
fn a_killed_process_does_not_answer_any_more() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let (connections, mut child) = serve_one_child(config, "hang");
    let mut connection = connections.recv_timeout(Duration::from_secs(30)).expect("peer");
    let mut add = || {
        let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
        let endpoint = connection.channel.endpoint_mut();
        endpoint.add_flag(dst, 1).map_err(QuietError::from)?;
        endpoint.quiet(Instant::now() + Duration::from_secs(10))
    };
    add().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The process is looked at every millisecond.
    std::thread::sleep(Duration::from_millis(5));
    let error = add().unwrap_err();
    assert!(matches!(error, QuietError::Post(PostError::Disconnected { .. })), "{error}");
    assert!(connection.channel.endpoint().health().is_err());
}

#[test]
fn failures_of_the_nic_are_failures_of_the_endpoint() {
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let a = SoftNetwork::open(nic_config(None)).unwrap();
    let b = SoftNetwork::open(nic_config(None)).unwrap();
    let (mut x, y) = pair(&a, &b, config);
    let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
    let deadline = || Instant::now() + Duration::from_secs(10);
    x.endpoint_mut().add_flag(dst, 1).unwrap();
    x.endpoint_mut().quiet(deadline()).unwrap();
    x.endpoint().health().unwrap();
    // The first queue pair of a NIC.
    let fault = Fault::Fail { qpn: 0x40, nth: 0, syndrome: Syndrome::RemoteOp };
    a.nic().inject(fault).unwrap();
    let _ = x.endpoint_mut().add_flag(dst, 1);
    let error = x.endpoint_mut().quiet(deadline()).unwrap_err().to_string();
    assert!(error.contains("RemoteOp") && error.contains("0x14"), "{error}");
    x.endpoint().health().unwrap_err();
    x.endpoint_mut().add_flag(dst, 1).unwrap_err();

    // A peer that has dropped its end has revoked its key.
    let (mut x, z) = pair(&a, &b, config);
    drop((y, z));
    let _ = x.endpoint_mut().add_flag(dst, 1);
    x.endpoint_mut().quiet(deadline()).unwrap_err();
}

#[test]
fn descriptions_that_make_no_sense_are_refused() {
    let layout = SlotLayout::new(SlotConfig { slot_bytes: 64 << 10, num_frames: 2 }).unwrap();
    let network = SoftNetwork::open(nic_config(None)).unwrap();
    let good = network.open(&layout, ROUTE).unwrap();
    let description = good.description();
    assert_eq!(description.detail.len(), 24);
    type Change = fn(&mut SideDescription);
    let cases: [(&str, Change); 6] = [
        ("24", |d| d.detail.truncate(23)),
        ("32 bits", |d| d.remote_key = 1 << 40),
        ("65536", |d| d.bytes = 4096),
        // No such process, a descriptor that is no NIC, an impossible queue pair.
        ("fd/", |d| d.detail[0..4].copy_from_slice(&u32::MAX.to_le_bytes())),
        ("not the NIC", |d| d.detail[8] ^= 1),
        ("remote queue pair", |d| d.detail[16..20].copy_from_slice(&u32::MAX.to_le_bytes())),
    ];
    for (expected, change) in cases {
        let mut peer = description.clone();
        change(&mut peer);
        let side = network.open(&layout, ROUTE).unwrap();
        let error = side.join(&peer).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
}

/// A listener, and this binary again as its peer.
fn serve_one_child(
    slot: SlotConfig,
    seed: &str,
) -> (mpsc::Receiver<Connection>, std::process::Child) {
    let (sender, receiver) = mpsc::channel();
    let (addr_sender, addr) = mpsc::channel::<SocketAddr>();
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let network: Arc<dyn Network> = Arc::new(SoftNetwork::open(nic_config(None)).unwrap());
            let config = ListenerConfig {
                slot,
                transports: vec![TransportKind::SoftNic],
                networks: vec![network],
                ..Default::default()
            };
            let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
            addr_sender.send(listener.local_addr()).unwrap();
            let on_peer = move |connection| drop(sender.send(connection));
            listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()).await;
        });
    });
    let addr = addr.recv_timeout(Duration::from_secs(10)).expect("listener");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_process", "--nocapture"])
        .env("SOFTNIC_CHILD_ADDR", addr.to_string())
        .env("SOFTNIC_CHILD_SLOT", format!("{} {}", slot.slot_bytes, slot.num_frames))
        .env("SOFTNIC_CHILD_SEED", seed)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    (receiver, child)
}

/// The other half of the tests with two processes. Does nothing when run on its own.
#[test]
fn child_process() {
    let var = |name: &str| std::env::var(format!("SOFTNIC_CHILD_{name}")).ok();
    let Some(addr) = var("ADDR") else { return };
    let sizes: Vec<usize> =
        var("SLOT").unwrap().split(' ').map(|part| part.parse().unwrap()).collect();
    let network: Arc<dyn Network> = Arc::new(SoftNetwork::open(nic_config(None)).unwrap());
    let runtime = runtime();
    let meet = || {
        let config = ConnectConfig {
            slot: SlotConfig { slot_bytes: sizes[0], num_frames: sizes[1] },
            transports: vec![TransportKind::SoftNic],
            networks: vec![Arc::clone(&network)],
            timeout: Duration::from_secs(20),
            ..Default::default()
        };
        runtime.block_on(connect(addr.as_str(), PeerHello::default(), config)).unwrap()
    };
    let Ok(seed) = var("SEED").unwrap().parse() else {
        let _connection = meet();
        std::thread::sleep(Duration::from_secs(60));
        return;
    };
    for (_, script) in scripts::<AnyEndpoint>() {
        let connection = meet();
        reset_meetings();
        script(Party::B, connection.channel, seed);
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
