//! Flags without atomics: messages that the peer's driver executes.

use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use p2p_core::endpoint::{Endpoint, PostError, Progress, QuietError};
use p2p_core::network::{JoinedSide, Network};
use p2p_core::{AnyEndpoint, Region, RemoteRange, SlotKey};
use rand::RngExt;
use switchyard_verbs::{SIGNALS_VARIABLE, SignalChoice, VerbsConfig, VerbsNetwork};

use crate::common::{LIMIT, ROUTE, bytes_of, is_possible, layout, pair, put, seeded, store, word};
use crate::deaths::{child_process, read_description};

const SLOT_BYTES: usize = 1 << 20;
/// Offset of the flag that the tests add to.
const FLAG: usize = SLOT_BYTES - 4096;
const STALL_MS: u64 = 4_000;

fn network_with(signals: SignalChoice, queue_pairs_per_port: u32) -> VerbsNetwork {
    let config = VerbsConfig {
        queue_pairs_per_port,
        stripe_bytes: 16 << 10,
        ack_timeout: 16,
        retry_count: 3,
        stall_timeout_ms: STALL_MS,
        signals,
        ..Default::default()
    };
    VerbsNetwork::open(config).unwrap()
}

fn add(endpoint: &mut AnyEndpoint, value: u64) -> Result<(), PostError> {
    endpoint.add_flag(RemoteRange { key: SlotKey, offset: FLAG, len: 8 }, value)
}

fn wait_for(endpoint: &AnyEndpoint, slot: &Region, expected: u64) {
    let deadline = Instant::now() + LIMIT;
    while word(slot, FLAG) < expected {
        endpoint.driver().unwrap().drive();
        endpoint.health().unwrap();
        assert!(Instant::now() < deadline, "{} of {expected}", word(slot, FLAG));
        std::thread::yield_now();
    }
    assert_eq!(word(slot, FLAG), expected);
}

#[test]
fn ends_that_differ_refuse_each_other() {
    if !is_possible() {
        return;
    }
    let atomics = network_with(SignalChoice::Atomics, 1);
    let messages = network_with(SignalChoice::Messages, 1);
    // A peer that selects by flavour never gets this far.
    assert_eq!(format!("{}-messages", atomics.flavour()), messages.flavour());
    let layout = layout(SLOT_BYTES);
    for (own, peer, found) in [
        (&atomics, &messages, "as Messages, this side's as Atomics"),
        (&messages, &atomics, "as Atomics, this side's as Messages"),
    ] {
        let described = peer.open(&layout, ROUTE).unwrap().description();
        let text = own.open(&layout, ROUTE).unwrap().join(&described).unwrap_err().to_string();
        assert!(text.contains(found) && text.contains("`signals`"), "{text}");
    }
}

/// Alternates both directions. A reader that sees a flag must find all bytes of the earlier put, from every queue
/// pair.
#[test]
fn a_flag_comes_behind_its_puts() {
    if !is_possible() {
        return;
    }
    for num_queue_pairs in [1, 3] {
        let network = network_with(SignalChoice::Messages, num_queue_pairs);
        let (mut a, mut b) = pair(&network, &layout(SLOT_BYTES));
        let sources = [(); 2].map(|()| Region::anonymous(200_000).unwrap());
        a.endpoint.register(&sources[0]).unwrap();
        b.endpoint.register(&sources[1]).unwrap();
        let (mut rng, mut counts) = (seeded(), [0u64; 2]);
        for round in 0..100u64 {
            let way = (round % 2) as usize;
            let (from, to) = if way == 0 { (&mut a, &b) } else { (&mut b, &a) };
            // Short puts use one queue pair, long ones use all.
            let most = if rng.random() { 300 } else { 200_000 };
            let len = rng.random_range(1..=most);
            let bytes = vec![round as u8 + 1; len];
            store(&sources[way], &bytes);
            put(&mut from.endpoint, &sources[way], 0, len).unwrap();
            counts[way] += round + 1;
            add(&mut from.endpoint, round + 1).unwrap();
            wait_for(&to.endpoint, &to.slot, counts[way]);
            assert!(bytes_of(&to.slot)[..len] == bytes[..], "{len} bytes in round {round}");
            from.endpoint.quiet(Instant::now() + LIMIT).unwrap();
        }
    }
}

/// `quiet` and `fence` cover the work of the peer's driver. Flags wait when they outnumber its receives.
#[test]
fn more_flags_than_receives_all_count() {
    if !is_possible() {
        return;
    }
    let network = network_with(SignalChoice::Messages, 1);
    let (mut a, b) = pair(&network, &layout(SLOT_BYTES));
    let (mut rng, mut sum) = (seeded(), 0u64);
    for _ in 0..4 {
        for _ in 0..500 {
            let value = rng.random();
            sum = sum.wrapping_add(value);
            add(&mut a.endpoint, value).unwrap();
        }
        a.endpoint.quiet(Instant::now() + LIMIT).unwrap();
        assert_eq!(word(&b.slot, FLAG), sum);
        let before = word(&b.slot, FLAG + 8);
        let other = RemoteRange { key: SlotKey, offset: FLAG + 8, len: 8 };
        a.endpoint.add_flag(other, 1).unwrap();
        a.endpoint.fence().unwrap();
        assert_eq!(word(&b.slot, FLAG + 8), before + 1, "a fence leaves no flag behind");
    }
}

/// A suspended process delays its senders and receives everything once it continues. If it does not continue,
/// senders fail within the limit.
#[test]
fn a_peer_that_stands_still_is_waited_for_within_the_limit() {
    if !is_possible() {
        return;
    }
    let network = network_with(SignalChoice::Messages, 1);
    let side = network.open(&layout(SLOT_BYTES), ROUTE).unwrap();
    let mut child = child_process(&side.description(), &[(SIGNALS_VARIABLE, "messages")]);
    let theirs = read_description(&mut child);
    let JoinedSide { mut endpoint, slot: _slot } = side.join(&theirs).unwrap();
    let found = Region::anonymous(4096).unwrap();
    endpoint.register(&found).unwrap();
    // More flags than the peer has receives.
    let (num_flags, is_running) = (1_000, AtomicBool::new(false));
    signal(&child, libc::SIGSTOP);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(STALL_MS / 4));
            is_running.store(true, Ordering::Release);
            signal(&child, libc::SIGCONT);
        });
        for _ in 0..num_flags {
            add(&mut endpoint, 1).unwrap();
        }
        assert!(is_running.load(Ordering::Acquire), "nobody was held back");
    });
    endpoint.quiet(Instant::now() + LIMIT).unwrap();
    let remote = RemoteRange { key: SlotKey, offset: FLAG, len: 8 };
    // SAFETY: no other code uses the memory before the quiet.
    unsafe { endpoint.get(found.range(0, 8).unwrap(), remote).unwrap() };
    endpoint.quiet(Instant::now() + LIMIT).unwrap();
    assert_eq!(word(&found, 0), num_flags);

    signal(&child, libc::SIGSTOP);
    let start = Instant::now();
    let error = (0..num_flags).find_map(|_| add(&mut endpoint, 1).err()).expect("an error");
    let text = error.to_string();
    assert!(text.contains(&format!("the peer took nothing for {STALL_MS} ms")), "{text}");
    assert!(start.elapsed() >= Duration::from_millis(STALL_MS), "{:?}", start.elapsed());
    assert!(endpoint.quiet(Instant::now() + LIMIT).is_err() && endpoint.health().is_err());
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A sender that checks for room first never waits for a suspended process. Essential traffic always has room.
#[test]
fn nobody_who_asks_waits_for_a_peer_that_stands_still() {
    if !is_possible() {
        return;
    }
    let network = network_with(SignalChoice::Messages, 1);
    let layout = layout(SLOT_BYTES);
    let side = network.open(&layout, ROUTE).unwrap();
    let mut child = child_process(&side.description(), &[(SIGNALS_VARIABLE, "messages")]);
    let theirs = read_description(&mut child);
    let JoinedSide { mut endpoint, slot: _slot } = side.join(&theirs).unwrap();
    signal(&child, libc::SIGSTOP);
    let (start, mut num_posted) = (Instant::now(), 0u64);
    while start.elapsed() < Duration::from_millis(STALL_MS / 8) {
        if endpoint.has_room_to_spare() {
            add(&mut endpoint, 1).unwrap();
            num_posted += 1;
        }
    }
    // Two flags for each frame.
    for _ in 0..2 * layout.num_frames() {
        assert!(endpoint.has_room(), "after {num_posted}");
        add(&mut endpoint, 1).unwrap();
        num_posted += 1;
    }
    let num_expected = num_posted;
    while endpoint.has_room() {
        add(&mut endpoint, 1).unwrap();
        num_posted += 1;
        assert!(num_posted < 10_000, "the peer takes nothing");
    }
    assert!(num_posted > num_expected);
    assert!(!endpoint.try_fence().unwrap());
    assert!(matches!(endpoint.quiet(Instant::now()), Err(QuietError::Deadline { .. })));
    assert!(!endpoint.try_fence().unwrap(), "the flags are still open");
    assert!(start.elapsed() < Duration::from_millis(STALL_MS / 2), "{:?}", start.elapsed());
    signal(&child, libc::SIGCONT);
    let deadline = Instant::now() + LIMIT;
    while !endpoint.try_fence().unwrap() {
        assert!(Instant::now() < deadline);
    }
    assert!(endpoint.has_room_to_spare());
    let found = Region::anonymous(4096).unwrap();
    endpoint.register(&found).unwrap();
    let remote = RemoteRange { key: SlotKey, offset: FLAG, len: 8 };
    // SAFETY: no other code uses the memory before the quiet.
    unsafe { endpoint.get(found.range(0, 8).unwrap(), remote).unwrap() };
    endpoint.quiet(Instant::now() + LIMIT).unwrap();
    assert_eq!(word(&found, 0), num_posted);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Many flags after spread puts, without waits in between: each flag comes after its own put.
#[test]
fn flags_one_after_the_other_come_behind_their_own_puts() {
    if !is_possible() {
        return;
    }
    let network = network_with(SignalChoice::Messages, 4);
    let (mut a, b) = pair(&network, &layout(SLOT_BYTES));
    const BYTES: usize = 64 << 10;
    let source = Region::anonymous(BYTES * 8).unwrap();
    a.endpoint.register(&source).unwrap();
    for round in 0..40u8 {
        // Eight puts to eight places, each with a flag, all under way at the same time.
        store(&source, &vec![round + 1; BYTES * 8]);
        let before = word(&b.slot, FLAG);
        for nth in 0..8 {
            let remote = RemoteRange { key: SlotKey, offset: nth * BYTES, len: BYTES };
            let local = source.range(nth * BYTES, BYTES).unwrap();
            // SAFETY: the memory is registered and not written before the quiet.
            unsafe { a.endpoint.put(remote, local).unwrap() };
            add(&mut a.endpoint, 1).unwrap();
        }
        let (mut seen, deadline) = (0, Instant::now() + LIMIT);
        while seen < 8 {
            b.endpoint.driver().unwrap().drive();
            b.endpoint.health().unwrap();
            let now = (word(&b.slot, FLAG) - before) as usize;
            let bytes = bytes_of(&b.slot);
            for nth in seen..now {
                let place = &bytes[nth * BYTES..(nth + 1) * BYTES];
                assert!(place.iter().all(|byte| *byte == round + 1), "put {nth} of round {round}");
            }
            seen = now;
            assert!(Instant::now() < deadline, "{seen} of 8 in round {round}");
        }
        a.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    }
}

fn signal(child: &Child, signal: libc::c_int) {
    // SAFETY: no memory is involved; the child has not been waited for, so the number is its own.
    let done = unsafe { libc::kill(child.id().cast_signed(), signal) };
    assert_eq!(done, 0);
    if signal == libc::SIGSTOP {
        test_support::stopped::await_stop(child.id());
    }
}

#[test]
fn what_the_environment_says_is_checked() {
    if !is_possible() {
        return;
    }
    // The check runs in a process of its own, because the environment is shared by all tests.
    if std::env::var_os(CHECK).is_some() {
        let text = VerbsNetwork::open(VerbsConfig::default()).unwrap_err().to_string();
        assert!(text.contains(SIGNALS_VARIABLE) && text.contains("`imm`"), "{text}");
        let explicit = VerbsConfig { signals: SignalChoice::Messages, ..VerbsConfig::default() };
        assert!(VerbsNetwork::open(explicit).is_ok());
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "signals::what_the_environment_says_is_checked"])
        .env(CHECK, "1")
        .env(SIGNALS_VARIABLE, "imm")
        .status();
    assert!(status.unwrap().success());
}

const CHECK: &str = "P2P_VERBS_CHECK_SIGNALS";
