//! Puts to further GPUs behind a peer: through staging, with memory of this host in the GPUs' place.
#![cfg(not(loom))]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{bytes_of, config, fresh_seed, lanes, wait_for, word, write};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::slot::{CONSUMED, CONTROL_BYTES, PUBLISHED};
use p2p_core::wait::event_fd;
use p2p_core::{Region, TransportKind};
use proxy::relay::{HostCopier, RelayError, RelayReceiverError};
use proxy::{
    BadCommand, Cause, Command, Lanes, Opcode, PeerConfig, Poster, Proxy, ProxyPeer, RelayConfig,
    RelayReceiver,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

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
    let region = |bytes| Region::anonymous(bytes).unwrap();
    let (there, here, mirror) = (region(SLOT), region(SLOT), region(TARGET));
    let targets: Vec<Region> = (0..3).map(|_| region(TARGET)).collect();
    let event = Arc::new(event_fd().unwrap());
    let end = |slot: &Region| {
        let (peer, own) = (Arc::clone(&event), Arc::clone(&event));
        MappedEndpoint::new(TransportKind::Local, slot.clone(), peer, own)
    };
    let copier = HostCopier::new(there.clone(), targets.clone());
    let receiver = RelayReceiver::new(&relay_config(), end(&here), there.clone(), copier).unwrap();
    let proxy = Proxy::start(&config(1)).unwrap();
    let lanes = lanes(2, 64, 48);
    let config = PeerConfig {
        peer: 4,
        lanes: lanes.clone(),
        window_bytes: DIRECT,
        sources: vec![mirror.clone()],
        relay: Some((relay_config(), here.clone())),
        thread: None,
    };
    let peer = proxy.add(StagedEndpoint::new(end(&there), disorder), config).unwrap();
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
            let len = rng.random_range(0..=STAGING as usize / 2);
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
fn what_a_relay_cannot_do_is_named() {
    let (end, staging) = (TARGET as u32, STAGING as u32);
    let put = |offset, bytes| Command::transfer(Opcode::Put, offset, 0, 0, bytes);
    type Matches = fn(&BadCommand) -> bool;
    let cases: [(u8, Command, Matches); 6] = [
        (3, put(0, 8), |b| matches!(b, BadCommand::Window { window: 4, num_windows: 4 })),
        (0, put(end - 8, 16), |b| matches!(b, BadCommand::RemoteRange { .. })),
        (0, put(0, staging / 2 + 1), |b| {
            matches!(b, BadCommand::RemoteRange { window_bytes: 8192, .. })
        }),
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
    let cases: [(&str, [u64; 4]); 8] = [
        ("its number is 7", [good[0], 0, 0, 7]),
        ("the window is 0", [1 | 64 << 32, 0, 0, 1]),
        ("the window is 4", [1 | 4 << 16 | 64 << 32, 0, 0, 1]),
        ("the offset is", [good[0], TARGET as u64 - 63, 0, 1]),
        ("the offset is", [good[0], u64::MAX, 0, 1]),
        ("the offset in staging", [good[0], 0, STAGING - 63, 1]),
        ("the kind is 3", [3 | 1 << 16 | 64 << 32, 0, 0, 1]),
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
    // Too many at once, or fewer than before.
    let (rig, mut receiver) = rig(None);
    word(&rig.there, SLOT - CONTROL_BYTES + PUBLISHED).store(17, Ordering::Release);
    assert!(matches!(receiver.turn(), Err(RelayReceiverError::Desync { published: 17, .. })));
    // And at the other end: more done than given.
    word(&rig.here, SLOT - CONTROL_BYTES + CONSUMED).store(2, Ordering::Release);
    let mut poster = rig.lanes.poster(0);
    post(&mut poster, 0, Command::word(Opcode::Add, 0, 1));
    wait_for("the error", || poster.error() != 0);
    let failure = rig.peer.take_failures().pop().unwrap();
    let is_desync =
        matches!(failure.cause, Cause::Relay(RelayError::Desync { done: 2, issued: 1 }));
    assert!(is_desync, "{failure}");
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
