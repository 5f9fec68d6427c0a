//! Timing of a proxy's threads: sleep, expectation, stall limit; and their end.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{Asked, Behaviour, Recorder, config, lanes, peer_config, wait_for};
use p2p_core::Region;
use p2p_core::endpoint::{Batch, Endpoint, Marks, PostError, Progress, QuietError, TransportKind};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use switchyard_proxy::{
    Cause, Command, DeviceTransports, IdlePolicy, Opcode, PeerConfig, Poster, Proxy, ProxyConfig,
    ProxyError, ProxyPeer, RelayConfig, ThreadStats,
};

/// An endpoint's reaction to a flag, and its progress reports.
trait Nature: std::fmt::Debug + Send {
    fn add(&mut self) {}

    fn marks(&mut self) -> Option<Marks> {
        None
    }

    fn is_settled(&mut self) -> bool {
        true
    }

    fn has_room(&mut self) -> bool {
        true
    }

    fn try_fence(&mut self) -> bool {
        self.has_room()
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        None
    }
}

/// How long one side of a test waits for the other at most.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Actor<N>(N);

impl<N: Nature> Endpoint for Actor<N> {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn register(&mut self, _: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, _: RemoteRange<SlotKey>, _: LocalRange) -> Result<(), PostError> {
        Ok(())
    }

    unsafe fn get(&mut self, _: LocalRange, _: RemoteRange<SlotKey>) -> Result<(), PostError> {
        Ok(())
    }

    fn add_flag(&mut self, _: RemoteRange<SlotKey>, _: u64) -> Result<(), PostError> {
        self.0.add();
        Ok(())
    }

    fn fence(&mut self) -> Result<(), PostError> {
        panic!("a fence may wait for the peer");
    }

    fn quiet(&mut self, _: std::time::Instant) -> Result<(), QuietError> {
        if self.0.is_settled() { Ok(()) } else { Err(QuietError::Deadline { outstanding: 1 }) }
    }

    fn wake(&mut self, _: SlotKey, _: usize) -> Result<(), PostError> {
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl<N: Nature> Batch for Actor<N> {
    fn begin_batch(&mut self) {}

    fn flush(&mut self) -> Result<(), PostError> {
        Ok(())
    }
}

impl<N: Nature> Progress for Actor<N> {
    p2p_core::default_progress! { health, add_flag_lazily, has_room_to_spare, is_settled }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.0.driver()
    }

    fn has_room(&mut self) -> bool {
        self.0.has_room()
    }

    fn try_fence(&mut self) -> Result<bool, PostError> {
        Ok(self.0.try_fence())
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        Ok(self.0.marks())
    }
}

struct Rig<N: Nature> {
    proxy: Proxy<Actor<N>>,
    peer: ProxyPeer<Actor<N>>,
    poster: Poster,
}

fn rig<N: Nature + 'static>(nature: N, config: &ProxyConfig) -> Rig<N> {
    let (mirror, lanes) = (Region::anonymous(4096).unwrap(), lanes(1, 16, 8));
    let proxy = Proxy::start(config).unwrap();
    let peer = proxy.add(Actor(nature), peer_config(0, &lanes, &mirror)).unwrap();
    Rig { proxy, peer, poster: lanes.poster(0) }
}

fn add() -> Command {
    Command::word(Opcode::Add, 0, 1)
}

#[derive(Debug)]
struct Plain;

impl Nature for Plain {}

#[test]
fn work_that_is_expected_finds_nobody_asleep() {
    // A long sleep is not ended by time.
    let idle = IdlePolicy { spin: Duration::ZERO, max_sleep: Duration::from_secs(3600) };
    let Rig { proxy, peer, mut poster } = rig(Plain, &ProxyConfig { idle, ..config(1) });
    // A thread that waits for a processor does nothing, either, but does not sleep.
    let asleep = || {
        let mut last = ThreadStats::default();
        wait_for("a long sleep", || {
            let sleeps_all_along = (0..30).all(|_| {
                std::thread::sleep(Duration::from_millis(10));
                threads_sleep()
            });
            let now = proxy.stats()[0];
            std::mem::replace(&mut last, now) == now && now.sleeps > 0 && sleeps_all_along
        });
    };
    asleep();
    // A kernel's post: no wake-up.
    let number = poster.try_post(&add()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(poster.completed(), 0);
    proxy.expect_work();
    wait_for("the first command", || poster.completed() == number);
    // Also when the command comes a while later.
    let mut num_late = 0;
    loop {
        asleep();
        let (sleeps, begin) = (proxy.stats()[0].sleeps, Instant::now());
        proxy.expect_work();
        wait_for("short sleeps", || proxy.stats()[0].sleeps > sleeps + 20);
        let number = poster.try_post(&add()).unwrap();
        if begin.elapsed() < EXPECTED_FOR / 2 {
            wait_for("the second command", || poster.completed() == number);
            break;
        }
        // This thread had to wait for a processor, and the expectation has expired.
        proxy.expect_work();
        wait_for("a late command", || poster.completed() == number);
        num_late += 1;
        assert!(num_late < 20, "no command of {num_late} came in time");
    }
    drop(peer);
}

/// Time of frequent polling after an expectation was announced.
const EXPECTED_FOR: Duration = Duration::from_secs(1);

/// Whether the threads of proxies in this process sleep.
fn threads_sleep() -> bool {
    let read = |task: &std::path::Path, file| std::fs::read_to_string(task.join(file));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks.map(|task| task.unwrap().path()).all(|task| {
        // Other threads may end meanwhile.
        let (Ok(name), Ok(stat)) = (read(&task, "comm"), read(&task, "stat")) else { return true };
        // The name before may hold anything, but for the last parenthesis.
        let (_, rest) = stat.rsplit_once(") ").expect("a name");
        !name.starts_with("sy-proxy-") || rest.starts_with('S')
    })
}

/// Operations do not finish while its thread does not run, nor for some polls after that.
#[derive(Debug)]
struct Frozen {
    pause: Duration,
    num_looks: u32,
}

impl Nature for Frozen {
    fn is_settled(&mut self) -> bool {
        self.num_looks += 1;
        if self.num_looks == 10 {
            std::thread::sleep(self.pause);
        }
        self.num_looks > 300
    }
}

#[test]
fn a_thread_that_did_not_run_does_not_blame_the_peer() {
    let stall_limit = Duration::from_secs(2);
    let frozen = Frozen { pause: stall_limit * 3 / 2, num_looks: 0 };
    let Rig { proxy: _proxy, peer, mut poster } =
        rig(frozen, &ProxyConfig { stall_limit, ..config(1) });
    let number = poster.try_post(&add()).unwrap();
    wait_for("the command", || poster.completed() == number || poster.error() != 0);
    assert_eq!(poster.error(), 0, "{:?}", peer.take_failures());
}

/// Operations arrive three polls later, and at no moment does this side report that nothing is under way.
#[derive(Debug, Default)]
struct Stream {
    issued: u64,
    looks: [u64; 3],
}

impl Nature for Stream {
    fn add(&mut self) {
        self.issued += 1;
    }

    fn marks(&mut self) -> Option<Marks> {
        let arrived = self.looks[0];
        self.looks = [self.looks[1], self.looks[2], self.issued];
        Some(Marks { issued: self.issued, arrived })
    }

    fn is_settled(&mut self) -> bool {
        false
    }
}

#[test]
fn what_was_issued_is_over_while_more_is_issued() {
    let Rig { proxy: _proxy, peer, mut poster } = rig(Stream::default(), &config(1));
    // Many times the capacity of a lane.
    for _ in 0..1000 {
        wait_for("room", || poster.try_post(&add()).is_some());
    }
    // Earlier operations end a quiet, too.
    wait_for("room", || poster.try_post(&Command::new(Opcode::Quiet)).is_some());
    wait_for("the quiet", || poster.completed() == 1001);
    assert_eq!(poster.error(), 0, "{:?}", peer.take_failures());
}

#[derive(Debug)]
struct Fragile(Arc<AtomicU64>);

impl Nature for Fragile {
    fn add(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("injected");
    }
}

#[test]
fn a_thread_that_panics_is_said_to_have_ended() {
    let num_added = Arc::new(AtomicU64::new(0));
    let Rig { proxy, peer, mut poster } = rig(Fragile(Arc::clone(&num_added)), &config(1));
    poster.try_post(&add()).unwrap();
    // The waiter for the command gets the error.
    wait_for("the error", || poster.error() != 0);
    assert_eq!(poster.error() as u8, 12);
    assert_eq!((poster.completed(), num_added.load(Ordering::SeqCst)), (0, 1));
    let (mirror, lanes) = (Region::anonymous(4096).unwrap(), lanes(1, 16, 8));
    let add = || {
        let config = peer_config(1, &lanes, &mirror);
        proxy.add(Actor(Fragile(Arc::clone(&num_added))), config)
    };
    // Until then it still unwinds, and orders to it are lost with it.
    wait_for("the end of the thread", || add().is_err());
    assert!(matches!(add(), Err(ProxyError::Closed)));
    assert!(matches!(peer.register(&mirror), Err(ProxyError::Closed)));
    let mut late = lanes.poster(0);
    assert_eq!(late.error() as u8, 12, "lanes that nobody serves say so");
    assert_eq!(late.completed(), 0);
}

#[test]
fn a_thread_that_has_panicked_is_given_no_peers_while_another_lives() {
    let num_added = Arc::new(AtomicU64::new(0));
    let Rig { proxy, peer: _peer, mut poster } = rig(Fragile(Arc::clone(&num_added)), &config(2));
    poster.try_post(&add()).unwrap();
    wait_for("the error", || poster.error() != 0);
    let (mirror, lanes) = (Region::anonymous(4096).unwrap(), lanes(1, 16, 8));
    let add = || {
        let config = peer_config(1, &lanes, &mirror);
        proxy.add(Actor(Fragile(Arc::clone(&num_added))), config)
    };
    // More than the thread had that ended, so that it has the fewest.
    let others: Vec<_> = (0..8).map(|_| add().expect("the other lives")).collect();
    drop(others);
}

/// Counts how often it is driven.
#[derive(Debug, Default)]
struct Wheel(AtomicU64);

impl Driver for Wheel {
    fn drive(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn may_sleep(&self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[derive(Debug)]
struct Driven(Arc<Wheel>);

impl Nature for Driven {
    fn driver(&self) -> Option<Arc<dyn Driver>> {
        Some(Arc::clone(&self.0) as Arc<dyn Driver>)
    }
}

/// A GPU that waits for a peer's answer drives nothing.
#[test]
fn peers_are_driven_for_while_they_have_nothing_to_post_and_let_be_in_the_end() {
    let wheel = Arc::new(Wheel::default());
    let drives = || wheel.0.load(Ordering::Relaxed);
    let Rig { proxy, peer, mut poster } = rig(Driven(Arc::clone(&wheel)), &config(1));
    poster.try_post(&add()).unwrap();
    wait_for("the command", || poster.completed() == 1);
    let before = drives();
    wait_for("somebody drives", || drives() > before + 10);
    wait_for("nobody does any more", || {
        let (before, sweeps) = (drives(), proxy.stats()[0].sleeps);
        std::thread::sleep(Duration::from_millis(100));
        drives() == before && proxy.stats()[0].sleeps > sweeps
    });
    // Work that is expected begins it anew.
    let before = drives();
    proxy.expect_work();
    wait_for("somebody drives again", || drives() > before + 10);
    drop(peer);
    wait_for("nobody holds it", || Arc::strong_count(&wheel) == 1);
}

/// Writes down when it is served and when it is gone. A gate says that it is at it, and waits.
#[derive(Debug)]
struct Guest {
    name: &'static str,
    log: Arc<Mutex<Vec<String>>>,
    gate: Option<(Sender<()>, Receiver<()>)>,
}

impl Nature for Guest {
    fn add(&mut self) {
        if let Some((entered, open)) = &self.gate {
            entered.send(()).unwrap();
            open.recv_timeout(LIMIT).unwrap();
        }
        self.log.lock().unwrap().push(format!("{} served", self.name));
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.log.lock().unwrap().push(format!("{} gone", self.name));
    }
}

#[test]
fn a_peer_that_is_closed_with_commands_holds_up_no_other() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let guest = |name, gate| Guest { name, log: Arc::clone(&log), gate };
    let Rig { proxy, peer: _other, mut poster } = rig(guest("other", None), &config(1));
    let (mirror, gated_lanes, full_lanes) =
        (Region::anonymous(4096).unwrap(), lanes(1, 16, 8), lanes(1, 16, 8));
    let (entered, has_entered) = mpsc::channel();
    let (open, is_open) = mpsc::channel();
    let gated = guest("gated", Some((entered, is_open)));
    let _gated = proxy.add(Actor(gated), peer_config(1, &gated_lanes, &mirror)).unwrap();
    // A relay without a receiver, with room for one task: the second command waits for ever.
    let relay =
        RelayConfig { direct_bytes: 64, staging_bytes: 64, num_tasks: 1, targets: vec![64] };
    let full_config = PeerConfig { window_bytes: 64, ..peer_config(2, &full_lanes, &mirror) };
    let slot = Region::anonymous(8192).unwrap();
    let full = guest("full", None);
    let full = proxy.add_with_relay(Actor(full), full_config, &relay, slot).unwrap();
    let mut full_poster = full_lanes.poster(0);
    for _ in 0..2 {
        full_poster.try_post(&Command { window: 1, ..add() }).unwrap();
    }
    wait_for("the first", || log.lock().unwrap().contains(&"full served".to_owned()));

    // The thread is held up while others are served no more and one is to be closed.
    gated_lanes.poster(0).try_post(&add()).unwrap();
    has_entered.recv_timeout(LIMIT).unwrap();
    let number = poster.try_post(&add()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(full));
        std::thread::sleep(Duration::from_millis(50));
        open.send(()).unwrap();
    });
    wait_for("the other", || poster.completed() == number);
    let log = log.lock().unwrap().clone();
    assert_eq!(log, ["full served", "gated served", "other served", "full gone"]);
    assert_eq!(full_poster.error() as u8, 12);
}

#[test]
fn services_choose_the_number_of_threads() {
    let network = softnic::SoftNetwork::open(softnic::NicConfig::default()).unwrap();
    let network: Arc<dyn p2p_core::network::Network> = Arc::new(network);
    let transports = p2p_core::Transports {
        networks: vec![Arc::clone(&network), network],
        ..vec![TransportKind::SoftNic].into()
    };
    let gpu = kernels::gpu::Gpu::open_emulated(0).unwrap();
    assert_eq!(gpu.pci_address(), None);
    let mut reached = DeviceTransports::new(&gpu, 3);
    assert!(reached.proxy().is_none() && !reached.has_networks());
    let wrapped = reached.wrap(&transports).unwrap();
    assert!(reached.has_networks() && wrapped.networks.iter().all(|n| n.carries_device_slots()));
    // One proxy for all.
    assert_eq!(reached.proxy().unwrap().stats().len(), 3);
    reached.expect_work();
    let mut by_itself = DeviceTransports::new(&gpu, 0);
    by_itself.wrap(&transports).unwrap();
    assert!((1..=4).contains(&by_itself.proxy().unwrap().stats().len()));
}

/// The peer's process stands still: nothing fits that it would have to take.
#[derive(Debug)]
struct Full(Arc<AtomicBool>, Arc<AtomicU64>);

impl Nature for Full {
    fn add(&mut self) {
        assert!(self.has_room(), "whoever posts now waits for the peer");
        self.1.fetch_add(1, Ordering::SeqCst);
    }

    fn has_room(&mut self) -> bool {
        !self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_peer_that_takes_nothing_holds_up_no_other() {
    let (is_full, added) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    let (mirror, other_mirror) =
        (Region::anonymous(4096).unwrap(), Region::anonymous(4096).unwrap());
    let (full, free) = (lanes(1, 16, 8), lanes(1, 16, 8));
    let stall_limit = Duration::from_secs(2);
    let proxy = Proxy::start(&ProxyConfig { stall_limit, ..config(1) }).unwrap();
    let nature = |is_full: &Arc<AtomicBool>| Actor(Full(Arc::clone(is_full), Arc::clone(&added)));
    let stuck = proxy.add(nature(&is_full), peer_config(0, &full, &mirror)).unwrap();
    let open = Arc::new(AtomicBool::new(false));
    let other = proxy.add(nature(&open), peer_config(1, &free, &other_mirror)).unwrap();
    let (mut poster, mut other_poster) = (full.poster(0), free.poster(0));
    // Once an addition is first, once a fence.
    for (round, first) in [add(), Command::new(Opcode::Fence)].into_iter().enumerate() {
        is_full.store(true, Ordering::SeqCst);
        let before = added.load(Ordering::SeqCst);
        let is_flag = u64::from(round == 0);
        let held = poster.try_post(&first).unwrap();
        let last = poster.try_post(&add()).unwrap();
        for _ in 0..20 {
            let number = other_poster.try_post(&add()).unwrap();
            wait_for("another peer", || other_poster.completed() == number);
        }
        assert_eq!(added.load(Ordering::SeqCst), before + 20);
        assert!(poster.completed() < held);
        is_full.store(false, Ordering::SeqCst);
        wait_for("the commands that were held back", || poster.completed() == last);
        assert_eq!(added.load(Ordering::SeqCst), before + 20 + is_flag + 1);
    }
    // Not for ever.
    is_full.store(true, Ordering::SeqCst);
    poster.try_post(&add()).unwrap();
    wait_for("the end of patience", || poster.error() != 0);
    let failures = stuck.take_failures();
    assert!(matches!(failures[0].cause, Cause::Stalled { limit_ms: 2_000 }), "{}", failures[0]);
    let number = other_poster.try_post(&add()).unwrap();
    wait_for("another peer", || other_poster.completed() == number);
    drop((stuck, other));
}

/// Has room for one flag between two polls. A fence finishes only if it polls three times before any other post.
/// One lane always has commands.
#[derive(Debug)]
struct Cramped {
    num_free: u32,
    num_asked: u32,
    busy: Poster,
}

impl Nature for Cramped {
    fn add(&mut self) {
        self.num_free -= 1;
        self.num_asked = 0;
    }

    fn is_settled(&mut self) -> bool {
        self.num_free = 1;
        true
    }

    fn has_room(&mut self) -> bool {
        while self.busy.try_post(&add()).is_some() {}
        self.num_free > 0
    }

    fn try_fence(&mut self) -> bool {
        self.num_asked += 1;
        self.num_asked > 3
    }
}

#[test]
fn a_busy_lane_leaves_room_to_the_others() {
    let (mirror, lanes) = (Region::anonymous(4096).unwrap(), lanes(3, 16, 8));
    let proxy = Proxy::start(&config(1)).unwrap();
    let mut busy = lanes.poster(0);
    while busy.try_post(&add()).is_some() {}
    let nature = Cramped { num_free: 1, num_asked: 0, busy };
    let peer = proxy.add(Actor(nature), peer_config(0, &lanes, &mirror)).unwrap();
    for (lane, command) in [(1, add()), (2, Command::new(Opcode::Fence))] {
        let mut poster = lanes.poster(lane);
        for _ in 0..20 {
            let number = poster.try_post(&command).unwrap();
            wait_for("a lane beside a busy one", || poster.completed() == number);
        }
    }
    drop(peer);
}

fn put(number: u32) -> Command {
    Command::transfer(Opcode::Put, 8 * number, 0, 0, 8)
}

/// A recorder behind lanes with commands that were there before it was served.
fn recorded(
    behaviour: &Arc<Behaviour>,
    commands: [&[Command]; 2],
) -> (Proxy<Recorder>, ProxyPeer<Recorder>, [Poster; 2]) {
    let (mirror, lanes) = (Region::anonymous(4096).unwrap(), lanes(2, 128, 128));
    let mut posters = [lanes.poster(0), lanes.poster(1)];
    for (poster, commands) in posters.iter_mut().zip(commands) {
        commands.iter().for_each(|command| assert!(poster.try_post(command).is_some()));
    }
    let proxy = Proxy::start(&config(1)).unwrap();
    let recorder = Recorder::new(Arc::clone(behaviour), mirror.as_ptr().as_ptr() as usize);
    let peer = proxy.add(recorder, peer_config(0, &lanes, &mirror)).unwrap();
    (proxy, peer, posters)
}

fn puts_of(behaviour: &Behaviour) -> Vec<u32> {
    let asked = behaviour.asked.lock().unwrap();
    let number = |asked: &Asked| match asked {
        Asked::Put { offset, .. } => *offset as u32 / 8,
        other => panic!("{other:?}"),
    };
    asked.iter().map(number).collect()
}

#[test]
fn what_a_turn_takes_is_posted_together_and_in_order() {
    // A turn takes up to 32 of a lane.
    for (first, second, num_posts) in [(20, 0, 1), (20, 30, 1), (70, 0, 3), (32, 33, 2)] {
        let behaviour = Arc::new(Behaviour::default());
        let commands = [
            (0..first).map(put).collect::<Vec<_>>(),
            (0..second).map(|number| put(1000 + number)).collect(),
        ];
        let (_proxy, _peer, mut posters) = recorded(&behaviour, [&commands[0], &commands[1]]);
        for (poster, commands) in posters.iter_mut().zip(&commands) {
            wait_for("all of them", || poster.completed() == commands.len() as u64);
        }
        assert_eq!(behaviour.num_posts.load(Ordering::SeqCst), num_posts, "{first}, {second}");
        let puts = puts_of(&behaviour);
        let of = |lane: u32| puts.iter().copied().filter(move |put| put / 1000 == lane);
        assert!(of(0).eq(0..first) && of(1).eq(1000..1000 + second), "{puts:?}");
    }
}

/// However a turn ends, its batch is posted.
#[test]
fn nothing_that_was_begun_is_left_behind() {
    let held = |behaviour: &Behaviour| behaviour.num_held.load(Ordering::SeqCst);
    // The third put is refused, and with it the peer.
    let behaviour = Arc::new(Behaviour::default());
    behaviour.fail_at.store(3, Ordering::SeqCst);
    let commands: Vec<_> = (0..5).map(put).collect();
    let (_proxy, peer, posters) = recorded(&behaviour, [&commands, &[]]);
    wait_for("the failure", || posters.iter().all(|poster| poster.error() != 0));
    wait_for("the rest", || held(&behaviour) == 0);
    assert_eq!(puts_of(&behaviour), [0, 1]);
    assert_eq!(behaviour.num_posts.load(Ordering::SeqCst), 1);
    assert!(matches!(peer.take_failures()[0].cause, Cause::Post { .. }));

    // A command that leaves the source, and with it its lane.
    let behaviour = Arc::new(Behaviour::default());
    let bad = Command::transfer(Opcode::Put, 0, 0, 4096, 8);
    let (_proxy, peer, mut posters) =
        recorded(&behaviour, [&[put(0), bad, put(1)], &[put(1000), put(1001)]]);
    wait_for("the failure", || posters[0].error() != 0);
    wait_for("the other lane", || posters[1].completed() == 2);
    assert_eq!(puts_of(&behaviour), [0, 1000, 1001]);
    assert_eq!(held(&behaviour), 0);
    assert!(matches!(peer.take_failures()[0].cause, Cause::Command(_)));

    // All of it is refused: nothing is over, and both lanes hear of it.
    let behaviour = Arc::new(Behaviour::default());
    behaviour.refuses_batches.store(true, Ordering::SeqCst);
    let (_proxy, peer, mut posters) = recorded(&behaviour, [&commands, &commands]);
    wait_for("the failure", || posters.iter().all(|poster| poster.error() != 0));
    assert_eq!(posters.each_mut().map(|poster| poster.completed()), [0, 0]);
    let failure = peer.take_failures().remove(0);
    assert!(failure.to_string().contains("flush: transport error -6: injected"), "{failure}");
}
