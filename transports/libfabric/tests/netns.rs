//! Peers over libfabric in two network namespaces that a pair of virtual interfaces joins: lost
//! packets, a link that goes down, a half-open peer.

#[allow(dead_code, reason = "other tests use the rest")]
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::wait::wait_until;
use p2p_core::{
    AnyEndpoint, Channel, Connection, PeerHello, SlotConfig, SpinPolicy, TransportKind, WaitSet,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_libfabric::FabricNetwork;
use test_support::namespaces::{Site, Star};

test_support::child_processes! { "server" => server, "client" => client }

const LIMIT: Duration = Duration::from_secs(90);
const SLOT: SlotConfig = SlotConfig { slot_bytes: 1 << 20, num_frames: 3 };
/// A round trip that takes longer than this has failed.
const ROUND_LIMIT: Duration = Duration::from_secs(20);

/// A server in the hub, and a client in the spoke.
struct Wire(Star);

impl Wire {
    /// `None`, with a skip message, without the permission or the tools.
    fn lay() -> Option<Self> {
        if let Err(error) = FabricNetwork::open("tcp;ofi_rxm") {
            test_support::skip("libfabric", &error.to_string());
            return None;
        }
        match Star::lay(1) {
            Ok(star) => Some(Self(star)),
            Err(error) => {
                test_support::skip("netns", &error);
                None
            }
        }
    }

    /// Starts this binary again, at one end.
    fn spawn(&self, is_server: bool, num_rounds: u32) -> Talker {
        let site = if is_server { Site::Hub } else { Site::Spoke(0) };
        let this = std::env::current_exe().unwrap();
        let mut child = self
            .0
            .command(site, this.to_str().unwrap())
            .args([format!("{}:7100", self.0.hub_address(0)), num_rounds.to_string()])
            .envs(test_support::child::variables(if is_server { "server" } else { "client" }))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix("netns: ")
                    && sender.send(line.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Talker { child, lines }
    }
}

struct Talker {
    child: Child,
    lines: Receiver<String>,
}

impl Talker {
    /// The next line that begins with `key`. Panics if it does not come soon.
    fn expect(&self, key: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).unwrap_or_else(|e| panic!("no `{key}`: {e}"));
            if let Some(rest) = line.strip_prefix(key) {
                return rest.trim().to_owned();
            }
            assert!(!line.starts_with("gave up:"), "{line}, expected {key}");
        }
    }
}

impl Drop for Talker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn frames_cross_namespaces() {
    let Some(wire) = Wire::lay() else { return };
    let _server = wire.spawn(true, 200);
    let client = wire.spawn(false, 200);
    assert_eq!(client.expect("done"), "200 rounds");
}

#[test]
fn lost_packets_cost_time_and_no_byte() {
    let Some(wire) = Wire::lay() else { return };
    if let Err(error) = wire.0.lose(1) {
        test_support::skip("netns", &format!("packets cannot be lost here: {error}"));
        return;
    }
    let _server = wire.spawn(true, 200);
    let client = wire.spawn(false, 200);
    assert_eq!(client.expect("done"), "200 rounds");
    assert!(wire.0.num_lost().unwrap() > 0);
}

#[test]
fn a_link_that_goes_down_is_an_error_within_its_bound() {
    let Some(wire) = Wire::lay() else { return };
    let server = wire.spawn(true, 0);
    let client = wire.spawn(false, 0);
    client.expect("halfway");
    wire.0.set_link(0, false).unwrap();
    // Both sides notice independently.
    for talker in [&client, &server] {
        let error = talker.expect("gave up:");
        println!("{error}");
        assert!(error.contains("does not answer") || error.contains("transport"), "{error}");
    }
}

#[test]
fn a_half_open_peer_is_an_error_within_its_bound() {
    let Some(wire) = Wire::lay() else { return };
    let mut server = wire.spawn(true, 0);
    let client = wire.spawn(false, 0);
    client.expect("halfway");
    // The server's host falls silent first, so that no packet reports its end.
    if let Err(error) = wire.0.lose(100) {
        test_support::skip("netns", &format!("packets cannot be lost here: {error}"));
        return;
    }
    server.child.kill().unwrap();
    let error = client.expect("gave up:");
    println!("{error}");
    assert!(error.contains("does not answer") || error.contains("transport"), "{error}");
}

fn server() {
    exchange_rounds(true);
}

fn client() {
    exchange_rounds(false);
}

/// One end of the connection, in a process of its own.
fn exchange_rounds(is_server: bool) {
    let mut arguments = std::env::args().skip(1);
    let addr = arguments.next().unwrap();
    let num_rounds: u32 = arguments.next().unwrap().parse().unwrap();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let network = Arc::new(FabricNetwork::open("tcp;ofi_rxm").unwrap());
    let (slot, transports) = (SLOT, vec![TransportKind::Libfabric]);
    let liveness_timeout = Duration::from_secs(4);
    let connection = if is_server {
        let (sender, connections) = channel();
        runtime.spawn(async move {
            let networks: Vec<Arc<dyn p2p_core::network::Network>> = vec![network];
            let config = ListenerConfig {
                slot,
                transports,
                networks,
                liveness_timeout,
                handshake_timeout: LIMIT,
                ..Default::default()
            };
            let listener = Listener::bind(addr, config).await.unwrap();
            let on_peer = move |connection| drop(sender.send(connection));
            listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()).await;
        });
        connections.recv_timeout(LIMIT).unwrap()
    } else {
        let deadline = Instant::now() + LIMIT;
        loop {
            let networks: Vec<Arc<dyn p2p_core::network::Network>> = vec![network.clone()];
            let config = ConnectConfig {
                slot,
                transports: transports.clone(),
                networks,
                liveness_timeout,
                timeout: LIMIT,
                ..Default::default()
            };
            match runtime.block_on(connect(addr.as_str(), PeerHello::default(), config)) {
                Ok(connection) => break connection,
                // The server may not listen yet.
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let mut connection = connection;
    match talk(&mut connection, !is_server, num_rounds) {
        Ok(()) => println!("netns: done {num_rounds} rounds"),
        Err(error) => println!("netns: gave up: {error}"),
    }
    if is_server {
        // The other side reads its last answers before this connection closes.
        std::thread::sleep(Duration::from_secs(2));
    }
}

/// Sends random frames there and back and compares every byte. Never ends if `num_rounds` is 0.
fn talk(connection: &mut Connection, is_client: bool, num_rounds: u32) -> Result<(), String> {
    let Connection { channel, liveness, .. } = connection;
    let set = WaitSet::new().unwrap();
    set.attach(channel.endpoint()).unwrap();
    let mut rng = StdRng::seed_from_u64(7);
    let mut round = 0;
    while num_rounds == 0 || round < num_rounds {
        let len = match rng.random_range(0..3) {
            0 => rng.random_range(0..64),
            1 => rng.random_range(0..8192),
            _ => rng.random_range(0..=channel.layout().frame_bytes()),
        };
        let mut bytes = vec![0; len];
        rng.fill_bytes(&mut bytes);
        let is_over = || liveness.closed_now().map(|reason| reason.to_string());
        for sends in [is_client, !is_client] {
            let done = one_way(&set, channel, &bytes, sends, is_over)?;
            assert!(done, "round {round}: other bytes came than were sent");
        }
        round += 1;
        if round == 20 {
            println!("netns: halfway");
        }
    }
    Ok(())
}

fn one_way(
    set: &WaitSet,
    channel: &mut Channel<AnyEndpoint>,
    bytes: &[u8],
    sends: bool,
    is_over: impl Fn() -> Option<String>,
) -> Result<bool, String> {
    let deadline = Instant::now() + ROUND_LIMIT;
    let channel = std::cell::RefCell::new(channel);
    let poll = || -> Result<Option<bool>, String> {
        if let Some(reason) = is_over() {
            return Err(reason);
        }
        let text = |error: p2p_core::ChannelError| error.to_string();
        let mut channel = channel.borrow_mut();
        if sends {
            let Some(frame) = channel.try_reserve().map_err(text)? else { return Ok(None) };
            channel.write_view(&frame).put_bytes(0, bytes).map_err(|e| e.to_string())?;
            channel.publish(frame, bytes.len()).map_err(text)?;
            return Ok(Some(true));
        }
        let Some(frame) = channel.try_next().map_err(text)? else { return Ok(None) };
        let mut found = vec![0; bytes.len()];
        channel.view(&frame).copy_to(0, &mut found).map_err(|e| e.to_string())?;
        channel.release().map_err(text)?;
        Ok(Some(found == bytes))
    };
    loop {
        let slice = deadline.min(Instant::now() + Duration::from_millis(200));
        let found = wait_until(
            set,
            SpinPolicy::default(),
            slice,
            || poll().transpose(),
            |on| {
                let channel = channel.borrow();
                if on { channel.arm() } else { channel.disarm() }
            },
        );
        match found.map_err(|error| error.to_string())? {
            Some(result) => return result,
            None if Instant::now() >= deadline => {
                return Err(format!("no answer within {} s", ROUND_LIMIT.as_secs()));
            }
            None => {}
        }
    }
}
