//! Puts to further GPUs behind a peer: through staging, with memory of this host in the GPUs' place.

use crate::common;
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{
    Behaviour, Recorder, bytes_of, config, fresh_seed, lanes, wait_for, word, write,
};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::network::{Network, Route};
use p2p_core::slot::{CONSUMED, CONTROL_BYTES, PUBLISHED};
use p2p_core::wait::{Driver, event_fd};
use p2p_core::{Region, SlotConfig, SlotLayout, TransportKind};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_proxy::relay::{
    Copier, CopyError, CopyTask, HostCopier, RelayReceiverError, WordTask,
};
use switchyard_proxy::{
    BadCommand, Cause, Command, Lanes, Opcode, PeerConfig, Poster, Proxy, ProxyError, ProxyPeer,
    RelayConfig, RelayReceiver,
};

const DIRECT: u64 = 4096;
const STAGING: u64 = 16 << 10;
const TARGET: usize = 64 << 10;
const NUM_TASKS: u32 = 16;
const SLOT: usize = (DIRECT + STAGING) as usize + NUM_TASKS as usize * 32 + CONTROL_BYTES;

fn relay_config() -> RelayConfig {
    RelayConfig {
        direct_bytes: DIRECT,
        staging_bytes: STAGING,
        num_tasks: NUM_TASKS,
        targets: vec![TARGET as u64; 3],
    }
}

struct Rig {
    proxy: Proxy<StagedEndpoint>,
    peer: ProxyPeer<StagedEndpoint>,
    lanes: Lanes,
    mirror: Region,
    /// The peer's slot and ours.
    there: Region,
    here: Region,
    targets: Vec<Region>,
}

type Receiver = RelayReceiver<MappedEndpoint, HostCopier>;

fn rig(disorder: Option<Disorder>) -> (Rig, Receiver) {
    rig_with(disorder, |copier| copier)
}

/// With a copier of the test's around that of the host.
fn rig_with<C: Copier>(
    disorder: Option<Disorder>,
    around: impl FnOnce(HostCopier) -> C,
) -> (Rig, RelayReceiver<MappedEndpoint, C>) {
    let region = |bytes| Region::anonymous(bytes).unwrap();
    let (there, here, mirror) = (region(SLOT), region(SLOT), region(TARGET));
    let targets: Vec<Region> = (0..3).map(|_| region(TARGET)).collect();
    let event = Arc::new(event_fd().unwrap());
    let end = |slot: &Region| {
        let (peer, own) = (Arc::clone(&event), Arc::clone(&event));
        MappedEndpoint::new(TransportKind::Local, slot.clone(), peer, own)
    };
    let copier = around(HostCopier::new(there.clone(), targets.clone()));
    let receiver = RelayReceiver::new(&relay_config(), end(&here), there.clone(), copier).unwrap();
    let proxy = Proxy::start(&config(1)).unwrap();
    let lanes = lanes(2, 64, 48);
    let config = PeerConfig {
        peer: 4,
        lanes: lanes.clone(),
        window_bytes: DIRECT,
        sources: vec![mirror.clone()],
        thread: None,
    };
    let endpoint = StagedEndpoint::new(end(&there), disorder);
    let peer = proxy.add_with_relay(endpoint, config, &relay_config(), here.clone()).unwrap();
    (Rig { proxy, peer, lanes, mirror, there, here, targets }, receiver)
}

/// Posts a command for GPU `gpu` once there is room.
fn post(poster: &mut Poster, gpu: u8, mut command: Command) -> u64 {
    command.window = gpu + 1;
    let mut number = None;
    wait_for("room", || {
        number = poster.try_post(&command);
        number.is_some()
    });
    number.unwrap()
}

/// Carries tasks out on a thread of its own while `body` runs.
fn with_receiver(receiver: &mut Receiver, body: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if !receiver.turn().unwrap() {
                    std::thread::yield_now();
                }
            }
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}

#[test]
fn puts_and_words_reach_every_target_in_order() {
    let seed = fresh_seed();
    let (rig, mut receiver) = rig(Some(Disorder { seed, max_delay: Duration::ZERO }));
    let mut posters = [rig.lanes.poster(0), rig.lanes.poster(1)];
    with_receiver(&mut receiver, || {
        let mut rng = StdRng::seed_from_u64(seed);
        for round in 1..=300u64 {
            let gpu = rng.random_range(0..3u8);
            // Some in one piece, some in many.
            let most = if round % 2 == 0 { STAGING as usize / 2 } else { TARGET - 64 };
            let len = rng.random_range(0..=most);
            let offset = rng.random_range(0..=TARGET - 64 - len);
            let mut bytes = vec![0; len];
            rng.fill_bytes(&mut bytes);
            write(&rig.mirror, offset, &bytes);
            let (at, value) = (TARGET - 64 + 8 * (round as usize % 4), rng.random::<u64>());
            let poster = &mut posters[usize::from(gpu) % 2];
            let put = Command::transfer(Opcode::Put, offset as u32, 0, offset as u32, len as u32);
            post(poster, gpu, put);
            // Signals and adds to different words, and both through a model.
            let target = &rig.targets[usize::from(gpu)];
            let (flag, expected) = if round % 3 == 0 {
                let count = word(target, TARGET - 32);
                let expected = count.load(Ordering::Acquire).wrapping_add(value);
                post(poster, gpu, Command::word(Opcode::Add, TARGET as u32 - 32, value));
                (count, expected)
            } else {
                post(poster, gpu, Command::word(Opcode::Signal, at as u32, value));
                (word(target, at), value)
            };
            wait_for("the flag", || flag.load(Ordering::Acquire) == expected);
            assert!(bytes_of(target, offset, len) == bytes, "round {round}");
        }
        // Window 0 is the peer's own, beside the staging.
        let direct = Command::transfer(Opcode::Put, 0, 0, 0, DIRECT as u32);
        let number = {
            let mut number = None;
            wait_for("room", || {
                number = posters[0].try_post(&direct);
                number.is_some()
            });
            number.unwrap()
        };
        wait_for("the put", || posters[0].completed() == number);
    });
    assert!(bytes_of(&rig.there, 0, DIRECT as usize) == bytes_of(&rig.mirror, 0, DIRECT as usize));
    assert!(!rig.peer.has_failed());
    let stats = rig.proxy.stats()[0];
    assert_eq!(stats.commands, posters.iter().map(Poster::posted).sum::<u64>());
}

#[test]
fn a_command_is_over_when_it_was_forwarded_and_not_before() {
    let (rig, mut receiver) = rig(None);
    let mut poster = rig.lanes.poster(0);
    let put = Command::transfer(Opcode::Put, 0, 0, 0, 6000);
    // Two fit into staging; the third has to wait, and nothing behind it overtakes.
    for _ in 0..3 {
        post(&mut poster, 0, put);
    }
    post(&mut poster, 1, Command::word(Opcode::Add, 0, 1));
    wait_for("the tasks", || {
        word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).load(Ordering::Acquire) == 2
    });
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(poster.completed(), 0);
    assert!(receiver.turn().unwrap());
    wait_for("the rest", || {
        receiver.turn().unwrap();
        poster.completed() == 4
    });
    assert_eq!(receiver.num_done(), 4);
    assert_eq!(word(&rig.targets[1], 0).load(Ordering::Acquire), 1);
    assert_eq!(word(&rig.here, SLOT - CONTROL_BYTES + CONSUMED).load(Ordering::Acquire), 4);
}

#[test]
fn a_put_larger_than_staging_goes_in_pieces_and_is_over_with_the_last() {
    const BYTES: usize = 60_000;
    const NUM_PIECES: u64 = BYTES.div_ceil(STAGING as usize / 2) as u64;
    let (rig, mut receiver) = rig(None);
    let mut bytes = vec![0; BYTES];
    StdRng::seed_from_u64(fresh_seed()).fill_bytes(&mut bytes);
    write(&rig.mirror, 8, &bytes);
    let mut poster = rig.lanes.poster(0);
    post(&mut poster, 0, Command::transfer(Opcode::Put, 16, 0, 8, BYTES as u32));
    post(&mut poster, 0, Command::word(Opcode::Add, TARGET as u32 - 8, 1));
    // Half of the pieces have to wait for room, and the word with them.
    wait_for("the first", || {
        word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).load(Ordering::Acquire) == 2
    });
    let flag = word(&rig.targets[0], TARGET - 8);
    wait_for("the end", || {
        let completed = poster.completed();
        assert!(completed == 0 || receiver.num_done() >= NUM_PIECES, "over before the last piece");
        if flag.load(Ordering::Acquire) != 0 {
            assert!(bytes_of(&rig.targets[0], 16, BYTES) == bytes, "the word came first");
        }
        receiver.turn().unwrap();
        completed == 2
    });
    assert!(bytes_of(&rig.targets[0], 16, BYTES) == bytes);
    assert_eq!((receiver.num_done(), flag.load(Ordering::Acquire)), (NUM_PIECES + 1, 1));
    assert!(!rig.peer.has_failed(), "{:?}", rig.peer.take_failures());
    assert_eq!(rig.proxy.stats()[0].bytes, BYTES as u64);
}

/// Begins with the last copy, as a kernel may, and writes down how many copies and words came together.
#[derive(Debug)]
struct Backwards {
    inner: HostCopier,
    batches: Arc<Mutex<Vec<(usize, usize)>>>,
}

impl Copier for Backwards {
    fn targets(&self) -> Vec<u64> {
        self.inner.targets()
    }

    fn submit(&mut self, copies: &[CopyTask], words: &[WordTask]) -> Result<(), CopyError> {
        self.batches.lock().unwrap().push((copies.len(), words.len()));
        for copy in copies.iter().rev() {
            self.inner.submit(std::slice::from_ref(copy), &[])?;
        }
        self.inner.submit(&[], words)
    }

    fn is_done(&mut self) -> Result<bool, CopyError> {
        self.inner.is_done()
    }
}

#[test]
fn a_fence_orders_what_is_forwarded() {
    let batches = Arc::new(Mutex::new(Vec::new()));
    let theirs = Arc::clone(&batches);
    let (rig, mut receiver) = rig_with(None, |inner| Backwards { inner, batches: theirs });
    write(&rig.mirror, 0, &[0x11; 64]);
    write(&rig.mirror, 64, &[0x22; 64]);
    let put = |to, from| Command::transfer(Opcode::Put, to, 0, from, 64);
    let fence = Command::new(Opcode::Fence);
    let add = Command::word(Opcode::Add, 4096, 1);
    let mut poster = rig.lanes.poster(0);
    // Twice to the same place; and a put behind a word.
    for command in [put(0, 0), fence, put(0, 64), add, fence, put(128, 64)] {
        post(&mut poster, 0, command);
    }
    wait_for("the tasks", || {
        word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).load(Ordering::Acquire) == 6
    });
    wait_for("the end", || {
        receiver.turn().unwrap();
        poster.completed() == 6
    });
    assert_eq!(bytes_of(&rig.targets[0], 0, 64), [0x22; 64]);
    assert_eq!(*batches.lock().unwrap(), [(1, 0), (1, 1), (1, 0)]);
    assert_eq!(receiver.num_done(), 6);
}

#[test]
fn a_window_that_reaches_into_staging_is_refused() {
    let (rig, _receiver) = rig(None);
    let event = Arc::new(event_fd().unwrap());
    let add = |window_bytes, has_relay: bool| {
        let (peer, own) = (Arc::clone(&event), Arc::clone(&event));
        let end = MappedEndpoint::new(TransportKind::Local, rig.there.clone(), peer, own);
        let config = PeerConfig {
            peer: 5,
            lanes: lanes(1, 16, 8),
            window_bytes,
            sources: vec![rig.mirror.clone()],
            thread: None,
        };
        let endpoint = StagedEndpoint::new(end, None);
        let added = if has_relay {
            rig.proxy.add_with_relay(endpoint, config, &relay_config(), rig.here.clone())
        } else {
            rig.proxy.add(endpoint, config)
        };
        added.map(drop)
    };
    let cases =
        [(DIRECT + 1, true, DIRECT), (SLOT as u64, true, DIRECT), ((1 << 32) + 1, false, 1 << 32)];
    for (bytes, has_relay, most) in cases {
        let error = add(bytes, has_relay).unwrap_err();
        let is_it = matches!(
            error,
            ProxyError::Window { found, limit, .. } if (found, limit) == (bytes, most)
        );
        assert!(is_it, "{error}");
    }
    add(DIRECT, true).unwrap();
}

#[derive(Debug, Default)]
struct Drives(AtomicU64);

impl Driver for Drives {
    fn drive(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn may_sleep(&self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_turn_of_the_receiver_drives_its_transport() {
    let (drives, behaviour) = (Arc::new(Drives::default()), Arc::new(Behaviour::default()));
    *behaviour.driver.lock().unwrap() = Some(Arc::clone(&drives) as Arc<dyn Driver>);
    let slot = Region::anonymous(SLOT).unwrap();
    let targets = (0..3).map(|_| Region::anonymous(TARGET).unwrap()).collect();
    let copier = HostCopier::new(slot.clone(), targets);
    let mut receiver =
        RelayReceiver::new(&relay_config(), Recorder::new(behaviour, 0), slot, copier).unwrap();
    for turn in 1..=3 {
        assert!(!receiver.turn().unwrap());
        assert_eq!(drives.0.load(Ordering::SeqCst), turn);
    }
}

/// Objects and flags to all targets, over any network.
fn over_network(from: &dyn Network, to: &dyn Network) {
    let localhost = Ipv4Addr::LOCALHOST.into();
    let route = Route { local: localhost, remote: localhost };
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 1 };
    let layout = SlotLayout::new(config).unwrap();
    let (here, there) = (from.open(&layout, route).unwrap(), to.open(&layout, route).unwrap());
    let (of_here, of_there) = (here.description(), there.description());
    let (here, there) = (here.join(&of_there).unwrap(), there.join(&of_here).unwrap());
    let targets: Vec<Region> = (0..3).map(|_| Region::anonymous(TARGET).unwrap()).collect();
    let copier = HostCopier::new(there.slot.clone(), targets.clone());
    let mut receiver =
        RelayReceiver::new(&relay_config(), there.endpoint, there.slot, copier).unwrap();
    let proxy: Proxy = Proxy::start(&common::config(1)).unwrap();
    let (lanes, mirror) = (lanes(1, 64, 48), Region::anonymous(TARGET).unwrap());
    let mut poster = lanes.poster(0);
    let config = PeerConfig {
        peer: 6,
        lanes,
        window_bytes: DIRECT,
        sources: vec![mirror.clone()],
        thread: None,
    };
    let peer = proxy.add_with_relay(here.endpoint, config, &relay_config(), here.slot).unwrap();
    let mut rng = StdRng::seed_from_u64(fresh_seed());
    for round in 1..=60u64 {
        let gpu = (round % 3) as u8;
        let mut bytes = vec![0; 3000];
        rng.fill_bytes(&mut bytes);
        write(&mirror, 0, &bytes);
        post(&mut poster, gpu, Command::transfer(Opcode::Put, 64, 0, 0, 3000));
        let number = post(&mut poster, gpu, Command::word(Opcode::Add, 8, 1));
        peer.ring();
        wait_for("the acknowledgement", || {
            receiver.turn().unwrap();
            assert!(!peer.has_failed(), "{:?}", peer.take_failures());
            poster.completed() == number
        });
        let target = &targets[usize::from(gpu)];
        assert!(bytes_of(target, 64, 3000) == bytes, "round {round}");
        assert_eq!(word(target, 8).load(Ordering::Acquire), round.div_ceil(3));
    }
}

#[test]
fn a_relay_over_the_nic_model() {
    let network = || softnic::SoftNetwork::open(softnic::NicConfig::default()).unwrap();
    over_network(&network(), &network());
}

#[test]
fn a_relay_over_libfabric() {
    use libfabric_transport::FabricNetwork;
    let open = || FabricNetwork::open("tcp;ofi_rxm");
    match (open(), open()) {
        (Ok(from), Ok(to)) => over_network(&from, &to),
        (Err(error), _) | (_, Err(error)) => {
            test_support::skip("libfabric", &error.to_string());
        }
    }
}

#[test]
fn what_a_relay_cannot_do_is_named() {
    let end = TARGET as u32;
    let put = |offset, bytes| Command::transfer(Opcode::Put, offset, 0, 0, bytes);
    type Matches = fn(&BadCommand) -> bool;
    let cases: [(u8, Command, Matches); 5] = [
        (3, put(0, 8), |b| matches!(b, BadCommand::Window { window: 4, num_windows: 4 })),
        (0, put(end - 8, 16), |b| matches!(b, BadCommand::RemoteRange { .. })),
        (1, Command { opcode: Opcode::Get, ..put(0, 8) }, |b| {
            matches!(b, BadCommand::Unsupported { window: 2, opcode: Opcode::Get })
        }),
        (1, Command::word(Opcode::Wake, 0, 0), |b| matches!(b, BadCommand::Unsupported { .. })),
        (2, Command::word(Opcode::Add, 12, 1), |b| matches!(b, BadCommand::Misaligned { .. })),
    ];
    for (gpu, command, is_it) in cases {
        let (rig, _receiver) = rig(None);
        let mut poster = rig.lanes.poster(0);
        post(&mut poster, gpu, command);
        wait_for("the error", || poster.error() != 0);
        let failure = rig.peer.take_failures().pop().unwrap();
        assert!(matches!(&failure.cause, Cause::Command(bad) if is_it(bad)), "{failure}");
    }
}

#[test]
fn tasks_that_make_no_sense_end_the_receiver() {
    let good = [1u64 | 1 << 16 | 64 << 32, 0, 0, 1];
    let tasks = (DIRECT + STAGING) as usize;
    let cases: [(&str, [u64; 4]); 9] = [
        ("its number is 7", [good[0], 0, 0, 7]),
        ("the window is 0", [1 | 64 << 32, 0, 0, 1]),
        ("the window is 4", [1 | 4 << 16 | 64 << 32, 0, 0, 1]),
        ("the offset is", [good[0], TARGET as u64 - 63, 0, 1]),
        ("the offset is", [good[0], u64::MAX, 0, 1]),
        ("the offset in staging", [good[0], 0, STAGING - 63, 1]),
        ("the kind is 4", [4 | 1 << 16 | 64 << 32, 0, 0, 1]),
        ("the length of a fence", [3 | 1 << 16 | 64 << 32, 0, 0, 1]),
        ("the word's offset", [2 | 1 << 16 | 8 << 32, 4, 5, 1]),
    ];
    for (expected, task) in cases {
        let (rig, mut receiver) = rig(None);
        let bytes: Vec<u8> = task.iter().flat_map(|word| word.to_le_bytes()).collect();
        write(&rig.there, tasks, &bytes);
        word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).store(1, Ordering::Release);
        let error = receiver.turn().unwrap_err();
        assert!(matches!(error, RelayReceiverError::Task { number: 1, .. }));
        assert!(error.to_string().contains(expected), "{expected}: {error}");
    }
    // Too many together, or fewer than before.
    let (rig, mut receiver) = rig(None);
    word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).store(17, Ordering::Release);
    assert!(matches!(receiver.turn(), Err(RelayReceiverError::Desync { published: 17, .. })));
    // And at the other end: more done than given.
    word(&rig.here, SLOT - CONTROL_BYTES + CONSUMED).store(2, Ordering::Release);
    let mut poster = rig.lanes.poster(0);
    post(&mut poster, 0, Command::word(Opcode::Add, 0, 1));
    wait_for("the error", || poster.error() != 0);
    let failure = rig.peer.take_failures().pop().unwrap();
    let is_desync = matches!(failure.cause, Cause::Relay { done: 2, issued: 1 });
    assert!(is_desync, "{failure}");
}

#[test]
fn what_came_with_a_bad_task_is_neither_carried_out_nor_acknowledged() {
    let good = [1u64 | 1 << 16 | 64 << 32, 0, 0, 1];
    let tasks = (DIRECT + STAGING) as usize;
    let (rig, mut receiver) = rig(None);
    let bytes: Vec<u8> =
        [good, [good[0], 0, 0, 7]].concat().iter().flat_map(|w| w.to_le_bytes()).collect();
    write(&rig.there, tasks, &bytes);
    write(&rig.there, DIRECT as usize, &[0xab; 64]);
    word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).store(2, Ordering::Release);
    let error = receiver.turn().unwrap_err();
    assert!(matches!(error, RelayReceiverError::Task { number: 2, .. }), "{error}");
    let error = receiver.turn().unwrap_err();
    assert!(matches!(error, RelayReceiverError::Ended { taken: 0 }), "{error}");
    assert_eq!(receiver.num_done(), 0);
    assert_eq!(word(&rig.here, SLOT - CONTROL_BYTES + CONSUMED).load(Ordering::Acquire), 0);
    assert_eq!(word(&rig.targets[0], 0).load(Ordering::Acquire), 0);
}

#[test]
fn a_slot_that_is_too_small_is_refused() {
    let (rig, _receiver) = rig(None);
    let event = Arc::new(event_fd().unwrap());
    let end =
        MappedEndpoint::new(TransportKind::Local, rig.here.clone(), Arc::clone(&event), event);
    let small = Region::anonymous(SLOT - 4096).unwrap();
    let copier = HostCopier::new(small.clone(), rig.targets.clone());
    let error = RelayReceiver::new(&relay_config(), end, small, copier).unwrap_err();
    assert!(error.to_string().contains("at least"), "{error}");
}
