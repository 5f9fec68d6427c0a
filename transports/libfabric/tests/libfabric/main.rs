//! Tests of libfabric beyond the conformance suite: drivers, dying peers and invalid input.

mod lost;

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::endpoint::{Endpoint, Progress};
use p2p_core::network::{Network, Route, SideDescription};
use p2p_core::wait::wait_until;
use p2p_core::{
    AnyEndpoint, Channel, Connection, PeerHello, PostError, QuietError, Region, RemoteRange,
    SlotConfig, SlotKey, SlotLayout, SpinPolicy, TransportKind, WaitSet,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_libfabric::{FabricNetwork, LIBRARY_VARIABLE, WAIT_VARIABLE, providers};
use test_support::resources::{num_descriptors, num_threads, resident_bytes, usual_growth};

test_support::child_processes! {
    "missing library" => report_missing_library,
    "unknown wait mode" => report_unknown_wait_mode,
    "idle" => be_idle,
    "leftovers" => lost::meet_leftovers,
    "crowd" => crowd,
    "echo" => echo,
    "leaver" => leave,
}

const LIMIT: Duration = Duration::from_secs(60);
const TCP: &str = "tcp;ofi_rxm";
const SLOT: SlotConfig = SlotConfig { slot_bytes: 256 << 10, num_frames: 2 };

/// A provider of this host, or `None` with a skip message.
fn network(provider: &str) -> Option<FabricNetwork> {
    match FabricNetwork::open(provider) {
        Ok(network) => Some(network),
        Err(error) => {
            test_support::skip("libfabric", &error.to_string());
            None
        }
    }
}

fn route() -> Route {
    Route { local: [127, 0, 0, 1].into(), remote: [127, 0, 0, 1].into() }
}

fn layout() -> SlotLayout {
    SlotLayout::new(SLOT).unwrap()
}

/// Two ends of one pair, over two devices of this process.
fn pair(a: &FabricNetwork, b: &FabricNetwork) -> (Channel<AnyEndpoint>, Channel<AnyEndpoint>) {
    let (a, b) = (a.open(&layout(), route()).unwrap(), b.open(&layout(), route()).unwrap());
    let (of_a, of_b) = (a.description(), b.description());
    let (a, b) = (a.join(&of_b).unwrap(), b.join(&of_a).unwrap());
    let channel = |side: p2p_core::network::JoinedSide| {
        Channel::new(side.endpoint, layout(), side.slot, SlotKey).unwrap()
    };
    (channel(a), channel(b))
}

fn publish(channel: &mut Channel<AnyEndpoint>, bytes: &[u8]) -> bool {
    let Some(frame) = channel.try_reserve().unwrap() else { return false };
    channel.write_view(&frame).put_bytes(0, bytes).unwrap();
    channel.publish(frame, bytes.len()).unwrap();
    true
}

fn take(channel: &mut Channel<AnyEndpoint>, len: usize) -> Option<Vec<u8>> {
    let frame = channel.try_next().unwrap()?;
    let mut found = vec![0; len];
    channel.view(&frame).copy_to(0, &mut found).unwrap();
    channel.release().unwrap();
    Some(found)
}

fn drive(channels: &[&Channel<AnyEndpoint>]) {
    for channel in channels {
        channel.endpoint().driver().unwrap().drive();
    }
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::yield_now();
    }
}

/// A round trip of `bytes`, driven by this thread.
fn exchange(a: &mut Channel<AnyEndpoint>, b: &mut Channel<AnyEndpoint>, bytes: &[u8]) {
    for _ in 0..2 {
        eventually("credit", || {
            drive(&[a, b]);
            publish(a, bytes)
        });
        let mut found = None;
        eventually("the frame", || {
            drive(&[a, b]);
            found = take(b, bytes.len());
            found.is_some()
        });
        assert!(found.unwrap() == bytes);
        std::mem::swap(a, b);
    }
}

#[test]
fn a_driver_that_nobody_drives_drives_itself() {
    let (Some(a), Some(b)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else { return };
    let (mut a, mut b) = pair(&a, &b);
    let bytes: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
    let small = &bytes[..100];
    for bytes in [small, &bytes[..100_000], small] {
        assert!(publish(&mut a, bytes));
        let deadline = Instant::now() + LIMIT;
        while !b.has_frame() {
            assert!(Instant::now() < deadline, "the frame did not arrive");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(take(&mut b, bytes.len()).unwrap() == bytes);
        // The credit returns although this side does not drive either.
        while a.in_flight() > 0 {
            assert!(Instant::now() < deadline, "the credit did not return");
            std::thread::sleep(Duration::from_millis(1));
            for _ in 0..2 {
                let _ = a.try_reserve().unwrap();
            }
            if a.has_news() || a.try_reserve().unwrap().is_some() {
                break;
            }
        }
    }
}

#[test]
fn threads_share_a_driver_and_wake_each_other() {
    let (Some(left), Some(right)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else {
        return;
    };
    let rounds = 300u64;
    let mut threads = Vec::new();
    for nth in 0..3u64 {
        let (a, b) = pair(&left, &right);
        for (mut channel, begins) in [(a, true), (b, false)] {
            threads.push(std::thread::spawn(move || {
                let set = WaitSet::new().unwrap();
                set.attach(channel.endpoint()).unwrap();
                let policy = SpinPolicy { spin: Duration::ZERO };
                for round in 0..rounds {
                    let bytes = (nth << 32 | round).to_le_bytes();
                    for sends in [begins, !begins] {
                        let channel = std::cell::RefCell::new(&mut channel);
                        let done = wait_until(
                            &set,
                            policy,
                            Instant::now() + LIMIT,
                            || {
                                let mut channel = channel.borrow_mut();
                                if sends {
                                    return publish(&mut channel, &bytes).then_some(());
                                }
                                let found = take(&mut channel, 8)?;
                                assert_eq!(found, bytes);
                                Some(())
                            },
                            |on| {
                                let channel = channel.borrow();
                                if on { channel.arm() } else { channel.disarm() }
                            },
                        );
                        done.unwrap().expect("a wake-up was lost");
                    }
                }
            }));
        }
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

/// The environment selects the mode, so this test has a child process.
#[test]
fn those_who_look_find_what_comes() {
    let tests =
        ["threads_share_a_driver_and_wake_each_other", "a_driver_that_nobody_drives_drives_itself"];
    for (name, value) in [(WAIT_VARIABLE, "poll"), ("FI_OFI_RXM_DEF_TCP_WAIT_OBJ", "pollfd")] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut child = command.arg("--exact").args(tests).env(name, value).spawn().unwrap();
        let status = test_support::bounded::status_of(
            &mut child,
            &format!("{name}={value}"),
            test_support::bounded::LONG,
        );
        assert!(status.success(), "with {name}={value}: {status}");
    }
}

#[test]
fn a_word_that_says_no_way_to_wait_is_refused_by_name() {
    if network("tcp;ofi_rxm").is_none() {
        return;
    }
    let mut command = test_support::child::command("unknown wait mode");
    let mut child = command.env(WAIT_VARIABLE, "sometimes").spawn().unwrap();
    let status =
        test_support::bounded::status_of(&mut child, "the process", test_support::bounded::LIMIT);
    assert!(status.success(), "{status}");
}

const NUM_BLOCKS: u64 = 6;
/// Pairs between two measurements of the resources that are left.
const BLOCK: u64 = 50;

#[test]
fn pairs_that_come_and_go_leave_nothing_behind() {
    let (Some(a), Some(b)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else { return };
    let bytes = vec![7; 60_000];
    let round = || {
        let (mut a, mut b) = pair(&a, &b);
        exchange(&mut a, &mut b, &bytes);
    };
    (0..20).for_each(|_| round());
    std::thread::sleep(Duration::from_millis(200));
    let descriptors = num_descriptors();
    let resident: Vec<u64> = (0..NUM_BLOCKS)
        .map(|_| {
            (0..BLOCK).for_each(|_| round());
            // Each pair has several; some of the last pairs may still be open.
            eventually("the descriptors to be closed", || num_descriptors() <= descriptors + 8);
            resident_bytes()
        })
        .collect();
    println!("resident after each {BLOCK} pairs: {resident:?}");
    // Each pair has two slots and staging, and has touched 60 000 bytes of them at least.
    let (usual, most) = (usual_growth(&resident), (BLOCK * 30_000).cast_signed());
    assert!(usual < most, "usually {usual} bytes for each {BLOCK} pairs: {resident:?}");
}

#[test]
fn a_description_that_makes_no_sense_is_refused_by_name() {
    let (Some(a), Some(b)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else { return };
    let good = b.open(&layout(), route()).unwrap();
    let good_description = good.description();
    let refused = |change: &dyn Fn(&mut SideDescription)| {
        let mut description = good_description.clone();
        change(&mut description);
        let side = a.open(&layout(), route()).unwrap();
        let error = side.join(&description).unwrap_err().to_string();
        assert!(error.starts_with("libfabric tcp;ofi_rxm: "), "{error}");
        assert!(!error.contains('\n'), "{error}");
        error
    };
    assert!(refused(&|d| d.bytes -= 4096).contains("expected 262144"));
    assert!(refused(&|d| d.address = u64::MAX - 5).contains("leaves memory"));
    assert!(refused(&|d| d.detail.clear()).contains("0 bytes"));
    assert!(refused(&|d| d.detail[0] ^= 1).contains("SYLF"));
    assert!(refused(&|d| d.detail[4] = 9).contains("version 9"));
    assert!(refused(&|d| d.detail.truncate(30)).contains("bytes"));
    assert!(refused(&|d| d.detail.extend([0; 600])).contains("bytes"));
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..200 {
        let mut detail = vec![0; rng.random_range(0..200)];
        rng.fill_bytes(&mut detail);
        refused(&|d| d.detail.clone_from(&detail));
    }
    // The device still serves valid peers.
    let (mut a, mut b) = pair(&a, &b);
    exchange(&mut a, &mut b, b"still here");
}

#[test]
fn a_wrong_key_or_token_harms_nobody_else() {
    let (Some(a), Some(b)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else { return };
    let (mut near, mut distant) = pair(&a, &b);
    exchange(&mut near, &mut distant, b"before");
    // A key that the victim did not give.
    let (evil, victim) = (a.open(&layout(), route()).unwrap(), b.open(&layout(), route()).unwrap());
    let (of_evil, mut of_victim) = (evil.description(), victim.description());
    of_victim.remote_key ^= 0x100;
    let mut evil = evil.join(&of_victim).unwrap();
    let victim = victim.join(&of_evil).unwrap();
    let source = Region::anonymous(200 << 10).unwrap();
    evil.endpoint.register(&source).unwrap();
    let dst = RemoteRange { key: SlotKey, offset: 0, len: source.len() };
    // SAFETY: `source` is not written.
    unsafe { evil.endpoint.put(dst, source.range(0, source.len()).unwrap()).unwrap() };
    let result = evil.endpoint.quiet(Instant::now() + Duration::from_secs(5));
    assert!(result.is_err(), "the write went through");
    println!("wrong key: {}", result.unwrap_err());
    drop((evil, victim));
    // A token that the victim did not give: its last byte is at 23 of the description.
    let (evil, victim) = (a.open(&layout(), route()).unwrap(), b.open(&layout(), route()).unwrap());
    let (of_evil, mut of_victim) = (evil.description(), victim.description());
    of_victim.detail[23] ^= 1;
    let mut evil = evil.join(&of_victim).unwrap();
    let victim = victim.join(&of_evil).unwrap();
    let flag = RemoteRange { key: SlotKey, offset: 8, len: 8 };
    evil.endpoint.add_flag(flag, 1).unwrap();
    let result = evil.endpoint.quiet(Instant::now() + Duration::from_millis(300));
    assert!(matches!(result, Err(QuietError::Deadline { .. })), "{result:?}");
    victim.endpoint.driver().unwrap().drive();
    assert!(victim.endpoint.health().is_ok());
    // SAFETY: no thread writes the slot: the message had no right to.
    assert_eq!(unsafe { victim.slot.as_ptr().add(8).cast::<u64>().read_volatile() }, 0);
}

#[test]
fn what_is_missing_is_said_in_one_line() {
    if network("tcp;ofi_rxm").is_none() {
        return;
    }
    let error = FabricNetwork::open("cxi").unwrap_err().to_string();
    println!("{error}");
    assert!(error.contains("no provider `cxi` here; found: ") && error.contains("tcp;ofi_rxm"));
    assert!(providers().unwrap().contains(&"tcp;ofi_rxm".to_owned()));
    let mut command = test_support::child::command("missing library");
    command.env(LIBRARY_VARIABLE, "/nonexistent/libfabric.so");
    let output =
        test_support::bounded::output_of(&mut command, "the process", test_support::bounded::LIMIT);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_killed_peer_costs_an_error_and_nothing_else() {
    let Some(network) = network("tcp;ofi_rxm") else { return };
    let num_deaths = num_deaths();
    let (connections, addr) = serve(network, SLOT);
    let mut rng = StdRng::seed_from_u64(1);
    let (mut baseline, mut num_taken) = (None, 0);
    for death in 0..num_deaths {
        let mut child = child("echo", TCP, &addr);
        let connection = connections.recv_timeout(LIMIT).expect("peer");
        let Connection { mut channel, liveness, .. } = connection;
        let kill_after = Duration::from_micros(rng.random_range(0..40_000));
        let start = Instant::now();
        let mut is_killed = false;
        let bytes = vec![death as u8; 100_000];
        // Works until the loss of the peer is noticed, by either means.
        let reason = loop {
            if !is_killed && start.elapsed() >= kill_after {
                child.kill().unwrap();
                is_killed = true;
            }
            if let Some(reason) = liveness.closed_now() {
                break reason.to_string();
            }
            drive(&[&channel]);
            match step(&mut channel, &bytes) {
                Ok(has_come) => num_taken += u32::from(has_come),
                Err(error) => break error,
            }
            assert!(start.elapsed() < LIMIT, "the loss of the peer was not noticed");
        };
        child.wait().unwrap();
        let before = Instant::now();
        let result = channel.endpoint_mut().quiet(before + Duration::from_millis(200));
        assert!(before.elapsed() < Duration::from_secs(20), "{result:?}");
        if death == 0 {
            println!("{reason}; {result:?}");
        }
        drop((channel, liveness));
        if death == num_deaths / 5 {
            std::thread::sleep(Duration::from_secs(6));
            baseline = Some(held());
        }
    }
    assert!(num_taken > 0, "nothing was ever exchanged");
    let baseline = baseline.unwrap();
    // Longer than the runtime keeps threads for blocking work. A leak per death would show every
    // time. Pages of memory are the subject of `lost`.
    let deadline = Instant::now() + LIMIT;
    let after = loop {
        let after = held();
        let is_clean = after.0 <= baseline.0 + 4
            && after.1 <= baseline.1 + 2
            && after.2 < baseline.2 + (64 << 20);
        if is_clean {
            break after;
        }
        assert!(
            Instant::now() < deadline,
            "{num_deaths} deaths: descriptors, threads, bytes {baseline:?} → {after:?}"
        );
        std::thread::sleep(Duration::from_millis(50));
    };
    println!("{num_deaths} deaths: descriptors, threads, bytes {baseline:?} → {after:?}");
}

/// Descriptors, threads and resident bytes of this process.
fn held() -> (usize, usize, u64) {
    (num_descriptors(), num_threads(), resident_bytes())
}

fn num_deaths() -> u32 {
    std::env::var("SWITCHYARD_LIBFABRIC_DEATHS").map_or(25, |text| text.parse().expect("a number"))
}

/// Sends and receives as far as possible. Returns true if a frame arrived.
fn step(channel: &mut Channel<AnyEndpoint>, bytes: &[u8]) -> Result<bool, String> {
    let text = |error: p2p_core::ChannelError| error.to_string();
    if let Some(frame) = channel.try_reserve().map_err(text)? {
        channel.write_view(&frame).put_bytes(0, bytes).unwrap();
        channel.publish(frame, bytes.len()).map_err(text)?;
    }
    let has_come = channel.try_next().map_err(text)?.is_some();
    if has_come {
        channel.release().map_err(text)?;
    }
    Ok(has_come)
}

#[test]
fn a_peer_that_stands_still_blocks_nobody() {
    let Some(network) = network("tcp;ofi_rxm") else { return };
    let (connections, addr) = serve(network, SLOT);
    let mut child = child("echo", TCP, &addr);
    let Connection { mut channel, liveness: _liveness, .. } =
        connections.recv_timeout(LIMIT).expect("peer");
    let pid = rustix::process::Pid::from_child(&child);
    eventually("the first answer", || {
        drive(&[&channel]);
        step(&mut channel, b"x").unwrap();
        channel.peer_activity() > 0
    });
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    test_support::stopped::await_stop(child.id());
    let start = Instant::now();
    let mut result = Ok(());
    // Far more than any buffer on the way holds, as single additions.
    for _ in 0..200_000 {
        result = channel.bump_progress();
        if result.is_err() {
            break;
        }
        drive(&[&channel]);
    }
    println!("{:?} after {:?}", result, start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(30));
    let before = Instant::now();
    let quiet = channel.endpoint_mut().quiet(before + Duration::from_millis(100));
    assert!(quiet.is_err(), "it stands still");
    assert!(before.elapsed() < Duration::from_secs(10));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn an_idle_device_costs_almost_no_processor_time() {
    if network("tcp;ofi_rxm").is_none() {
        return;
    }
    // A child process, because other tests of this process use processor time.
    let mut command = test_support::child::command("idle");
    let output = test_support::bounded::output_of(
        &mut command,
        "the idle process",
        test_support::bounded::LIMIT,
    );
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Opens two devices with an idle pair.
fn be_idle() {
    let (Some(a), Some(b)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else { return };
    let (mut a, mut b) = pair(&a, &b);
    exchange(&mut a, &mut b, b"once");
    std::thread::sleep(Duration::from_millis(100));
    let (before, start) = (cpu_time(), Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let share = (cpu_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    println!("two idle devices: {:.3} % of a processor", share * 100.0);
    // Other work on the host only lowers this. A busy loop would take all the time that it gets.
    assert!(share < 0.1, "two idle devices take {share:.3} of a processor");
}

#[test]
fn unregistered_memory_is_refused() {
    let (Some(a), Some(b)) = (network("tcp;ofi_rxm"), network("tcp;ofi_rxm")) else { return };
    let (mut a, _b) = pair(&a, &b);
    let stranger = Region::anonymous(4096).unwrap();
    let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
    // SAFETY: `stranger` is not written.
    let result = unsafe { a.endpoint_mut().put(dst, stranger.range(0, 8).unwrap()) };
    assert!(matches!(result, Err(PostError::Unregistered { .. })), "{result:?}");
}

fn report_missing_library() {
    let error = FabricNetwork::open("tcp;ofi_rxm").unwrap_err().to_string();
    assert!(error.contains("/nonexistent/libfabric.so"), "{error}");
    assert!(error.contains(LIBRARY_VARIABLE) && !error.contains('\n'), "{error}");
    assert!(providers().is_err());
}

fn report_unknown_wait_mode() {
    let error = FabricNetwork::open("tcp;ofi_rxm").unwrap_err().to_string();
    assert!(error.contains(WAIT_VARIABLE) && error.contains("`sometimes`"), "{error}");
}

fn echo() {
    let peer = Peer::from_arguments();
    answer_until_closed(&mut peer.connect(SLOT));
}

/// Ends in order after its peer has left.
fn leave() {
    let peer = Peer::from_arguments();
    let mut connection = peer.connect(SLOT);
    answer_until_closed(&mut connection);
    // The endpoint, and then the network. The threads that sleep on it keep it until the process
    // exits, so the library's endpoint is not closed before.
    let set = WaitSet::new().unwrap();
    set.attach(connection.channel.endpoint()).unwrap();
    drop(connection);
    drop(peer);
    std::mem::forget(set);
}

fn crowd() {
    let peer = Peer::from_arguments();
    let mut crowd: Vec<Connection> = (0..lost::CROWD).map(|_| peer.connect(lost::SLOT)).collect();
    lost::answer(&mut crowd);
}

fn answer_until_closed(connection: &mut Connection) {
    let bytes = vec![1; 50_000];
    while connection.liveness.closed_now().is_none() {
        drive(&[&connection.channel]);
        if step(&mut connection.channel, &bytes).is_err() {
            break;
        }
    }
}

/// The connecting side in a child process.
struct Peer {
    runtime: tokio::runtime::Runtime,
    network: Arc<dyn Network>,
    addr: String,
}

impl Peer {
    /// With the arguments that [`child`] passes.
    fn from_arguments() -> Self {
        let mut arguments = std::env::args().skip(1);
        let (provider, addr) = (arguments.next().unwrap(), arguments.next().unwrap());
        let network = Arc::new(FabricNetwork::open(&provider).unwrap());
        Self { runtime: runtime(), network, addr }
    }

    fn connect(&self, slot: SlotConfig) -> Connection {
        let config = ConnectConfig {
            slot,
            transports: vec![TransportKind::Libfabric],
            networks: vec![Arc::clone(&self.network)],
            timeout: LIMIT,
            ..ConnectConfig::default()
        };
        self.runtime.block_on(connect(self.addr.as_str(), PeerHello::default(), config)).unwrap()
    }
}

fn serve(network: FabricNetwork, slot: SlotConfig) -> (Receiver<Connection>, String) {
    let (sender, connections) = channel();
    let (addr_sender, addr) = channel();
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let config = ListenerConfig {
                slot,
                transports: vec![TransportKind::Libfabric],
                networks: vec![Arc::new(network)],
                handshake_timeout: LIMIT,
                ..ListenerConfig::default()
            };
            let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
            addr_sender.send(listener.local_addr().to_string()).unwrap();
            let on_peer = move |connection| drop(sender.send(connection));
            listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()).await;
        });
    });
    (connections, addr.recv_timeout(LIMIT).unwrap())
}

fn child(role: &str, provider: &str, addr: &str) -> Child {
    test_support::child::command(role)
        .args([provider, addr])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn cpu_time() -> Duration {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec.cast_unsigned(), spent.tv_nsec as u32)
}
