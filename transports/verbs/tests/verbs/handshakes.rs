//! Handshakes that stop in the middle. Either side gives up within its limit and releases all objects made on the
//! device. The listener serves other peers meanwhile.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::network::Network;
use p2p_core::{Connection, PeerHello, SlotConfig, TransportKind};
use rand::RngExt;

use crate::common::{LIMIT, is_possible, network, seeded};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
/// Handshake timeout of the side under test.
const PATIENCE: Duration = Duration::from_secs(4);

#[test]
fn a_handshake_that_stalls_costs_nobody_else() {
    if !is_possible() {
        return;
    }
    let mut rng = seeded();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let network: Arc<dyn Network> = Arc::new(network(1));
    let (addr, peers) = listener(&runtime, &network);
    let meet = |addr: SocketAddr| {
        let config = ConnectConfig {
            slot: SLOT,
            transports: vec![TransportKind::Verbs],
            networks: vec![Arc::clone(&network)],
            timeout: PATIENCE,
            ..ConnectConfig::default()
        };
        connect(addr, PeerHello::default(), config)
    };
    // Counts the bytes of each side.
    let relay = Relay::start(addr, [usize::MAX; 2]);
    drop(runtime.block_on(meet(relay.addr)).expect("a handshake through a relay"));
    drop(peers.recv_timeout(LIMIT).expect("its other end"));
    let [from_client, from_server] = relay.count();
    assert!(from_client > 100 && from_server > 100, "{from_client}, {from_server}");
    let before = num_objects();
    let stalled: Vec<_> = (0..16)
        .map(|round| {
            let (whose, total) = [(0, from_client), (1, from_server)][round % 2];
            let mut limits = [usize::MAX; 2];
            limits[whose] = rng.random_range(0..total);
            let relay = Relay::start(addr, limits);
            (runtime.spawn(meet(relay.addr)), relay)
        })
        .collect();
    // Other peers are served meanwhile.
    for _ in 0..4 {
        drop(runtime.block_on(meet(addr)).expect("a connection beside the stalled ones"));
    }
    for (attempt, relay) in stalled {
        // If only the last bytes for the other side were missing, this side has a connection.
        if let Err(error) = runtime.block_on(attempt).unwrap() {
            let text = error.to_string();
            assert!(text.contains("127.0.0.1") && text.lines().count() == 1, "{text}");
        }
        drop(relay);
    }
    // Queue pairs, keys and domains of all attempts have been released.
    let deadline = Instant::now() + LIMIT;
    while num_objects() > before {
        peers.try_iter().for_each(drop);
        assert!(Instant::now() < deadline, "{} objects of {before} before", num_objects());
        std::thread::sleep(Duration::from_millis(20));
    }
    runtime.shutdown_background();
}

fn listener(
    runtime: &tokio::runtime::Runtime,
    network: &Arc<dyn Network>,
) -> (SocketAddr, Receiver<Connection>) {
    let config = ListenerConfig {
        slot: SLOT,
        transports: vec![TransportKind::Verbs],
        networks: vec![Arc::clone(network)],
        handshake_timeout: PATIENCE,
        ..ListenerConfig::default()
    };
    let listener = runtime.block_on(Listener::bind("127.0.0.1:0", config)).unwrap();
    let addr = listener.local_addr();
    let (sender, peers) = channel();
    let on_peer = move |connection| drop(sender.send(connection));
    runtime.spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
    (addr, peers)
}

/// Number of objects on this host's devices, as counted by `rdma resource`.
fn num_objects() -> u64 {
    let output = std::process::Command::new("rdma").args(["resource", "show"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let words = text.unwrap_or_default();
    words.split_whitespace().filter_map(|word| word.parse::<u64>().ok()).sum()
}

/// Relays one connection, up to a byte limit in each direction.
struct Relay {
    addr: SocketAddr,
    ends: Vec<TcpStream>,
    copies: Vec<std::thread::JoinHandle<usize>>,
    begun: Receiver<(Vec<TcpStream>, Vec<std::thread::JoinHandle<usize>>)>,
}

impl Relay {
    fn start(target: SocketAddr, limits: [usize; 2]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (sender, begun) = channel();
        std::thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let server = TcpStream::connect(target).unwrap();
            let ends = vec![client.try_clone().unwrap(), server.try_clone().unwrap()];
            let pairs = [
                (client.try_clone().unwrap(), server.try_clone().unwrap(), limits[0]),
                (server, client, limits[1]),
            ];
            let copies =
                pairs.map(|(from, to, limit)| std::thread::spawn(move || copy(from, to, limit)));
            let _ = sender.send((ends, copies.into()));
        });
        Self { addr, ends: Vec::new(), copies: Vec::new(), begun }
    }

    fn close(&mut self) {
        if let Ok((ends, copies)) = self.begun.recv_timeout(Duration::from_secs(1)) {
            (self.ends, self.copies) = (ends, copies);
        }
        for end in &self.ends {
            let _ = end.shutdown(Shutdown::Both);
        }
    }

    /// Stops the relay. Returns the number of bytes relayed in each direction.
    fn count(mut self) -> [usize; 2] {
        self.close();
        let counts = std::mem::take(&mut self.copies).into_iter().map(|copy| copy.join().unwrap());
        counts.collect::<Vec<_>>().try_into().unwrap()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.close();
    }
}

fn copy(mut from: TcpStream, mut to: TcpStream, limit: usize) -> usize {
    let mut count = 0;
    let mut bytes = [0; 4096];
    while let Ok(found @ 1..) = from.read(&mut bytes) {
        let most = found.min(limit - count.min(limit));
        if to.write_all(&bytes[..most]).is_err() {
            break;
        }
        count += most;
    }
    count
}
