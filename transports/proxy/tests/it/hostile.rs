//! Invalid commands, and transports that fail or stall: each is named, no thread hangs, and no other peer is
//! affected.

use crate::common;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Behaviour, LIMIT, Recorder, SLOT, config, lanes, peer_config, wait_for};
use bench_harness::proxy::remote;
use p2p_core::Region;
use proptest::prelude::*;
use softnic::{NicConfig, SoftNetwork};
use switchyard_proxy::abi::RawCommand;
use switchyard_proxy::command::lap_of;
use switchyard_proxy::{BadCommand, Cause, Command, Lanes, Opcode, Poster, Proxy, ProxyPeer};

struct Rig {
    _proxy: Proxy<Recorder>,
    peer: ProxyPeer<Recorder>,
    behaviour: Arc<Behaviour>,
    lanes: Lanes,
}

fn rig(stall_limit: Duration) -> Rig {
    let mirror = Region::anonymous(4096).unwrap();
    let lanes = lanes(2, 16, 16);
    let behaviour = Arc::new(Behaviour::default());
    let config = switchyard_proxy::ProxyConfig { stall_limit, ..config(1) };
    let proxy = Proxy::start(&config).unwrap();
    let base = mirror.as_ptr().as_ptr() as usize;
    let recorder = Recorder::new(Arc::clone(&behaviour), base);
    let peer = proxy.add(recorder, peer_config(9, &lanes, &mirror)).unwrap();
    Rig { _proxy: proxy, peer, behaviour, lanes }
}

/// Posts and waits until it is over.
fn served(poster: &mut Poster) {
    let number = poster.try_post(&Command::new(Opcode::Nop)).expect("room");
    wait_for("a command", || poster.completed() == number);
}

#[test]
fn each_bad_command_is_named_and_ends_its_lane_alone() {
    let put =
        |offset, source, from, bytes| Command::transfer(Opcode::Put, offset, source, from, bytes);
    let end = SLOT as u32;
    type Matches = fn(&BadCommand) -> bool;
    let cases: [(RawCommand, u8, Matches); 14] = [
        (RawCommand { first: 1 | 9 << 8, second: 1 }, 1, |b| {
            matches!(b, BadCommand::Opcode { opcode: 9 })
        }),
        (RawCommand { first: 1, second: 1 }, 1, |b| matches!(b, BadCommand::Opcode { opcode: 0 })),
        (Command { window: 1, ..put(0, 0, 0, 8) }.encode(1), 2, |b| {
            matches!(b, BadCommand::Window { window: 1, num_windows: 1 })
        }),
        (put(0, 1, 0, 8).encode(1), 3, |b| {
            matches!(b, BadCommand::Source { source_idx: 1, num_sources: 1 })
        }),
        (put(end - 7, 0, 0, 8).encode(1), 4, |b| matches!(b, BadCommand::RemoteRange { .. })),
        (put(u32::MAX, 0, 0, 0x7fff_ffff).encode(1), 4, |b| {
            matches!(b, BadCommand::RemoteRange { .. })
        }),
        (put(0, 0, 4095, 2).encode(1), 5, |b| {
            matches!(b, BadCommand::SourceRange { source_bytes: 4096, .. })
        }),
        (Command { opcode: Opcode::Get, ..put(0, 0, u32::MAX, 1) }.encode(1), 5, |b| {
            matches!(b, BadCommand::SourceRange { .. })
        }),
        (Command::word(Opcode::Add, 4, 1).encode(1), 6, |b| {
            matches!(b, BadCommand::Misaligned { offset: 4 })
        }),
        (Command::word(Opcode::Signal, end, 1).encode(1), 4, |b| {
            matches!(b, BadCommand::RemoteRange { .. })
        }),
        (Command::word(Opcode::Wake, end - 8 + 4, 0).encode(1), 6, |b| {
            matches!(b, BadCommand::Misaligned { .. })
        }),
        (put(0, 0, 0, 8).encode(3), 7, |b| matches!(b, BadCommand::Lap { found: 3, expected: 1 })),
        (RawCommand { first: 1 | 5 << 8, second: 3 }, 8, |b| {
            matches!(b, BadCommand::Reserved { .. })
        }),
        (RawCommand { first: 1 | 3 << 8 | 1 << 13, second: 1 }, 8, |b| {
            matches!(b, BadCommand::Reserved { .. })
        }),
    ];
    for (raw, code, is_it) in cases {
        let rig = rig(LIMIT);
        let (mut bad, mut good) = (rig.lanes.poster(0), rig.lanes.poster(1));
        bad.post_raw(raw);
        wait_for("the error", || bad.error() != 0);
        assert_eq!(bad.error() as u8, code, "{raw:?}");
        assert_eq!(bad.completed(), 0, "never a silent completion");
        let failures = rig.peer.take_failures();
        let [failure] = failures.as_slice() else { panic!("{failures:?}") };
        assert_eq!((failure.peer, failure.lane, failure.index), (9, 0, 0));
        let Cause::Command(found) = &failure.cause else { panic!("{failure}") };
        assert!(is_it(found), "{failure}");
        assert!(failure.to_string().contains("peer 9, lane 0, command 0"));
        assert_ne!(switchyard_proxy::failure::describe_error(bad.error()), "in service");
        // The other lane goes on.
        served(&mut good);
        assert!(rig.behaviour.asked.lock().unwrap().is_empty());
    }
}

#[test]
fn what_came_before_a_bad_command_is_carried_out_and_nothing_behind_it() {
    let rig = rig(LIMIT);
    let mut poster = rig.lanes.poster(0);
    for _ in 0..3 {
        poster.try_post(&Command::word(Opcode::Add, 8, 5)).unwrap();
    }
    poster.post_raw(RawCommand { first: u64::from(lap_of(3, 4)) | 0xf << 8, second: 1 });
    poster.try_post(&Command::word(Opcode::Add, 8, 5)).unwrap();
    wait_for("the error", || poster.error() != 0);
    wait_for("the first three", || poster.completed() == 3);
    assert_eq!(poster.error() >> 16, 3);
    assert_eq!(rig.behaviour.asked.lock().unwrap().len(), 3);
}

#[test]
fn a_post_that_fails_ends_the_peer_and_no_other() {
    for nth in [1, 5] {
        let rig = rig(LIMIT);
        let (mut first, mut second) = (rig.lanes.poster(0), rig.lanes.poster(1));
        let other_lanes = lanes(1, 16, 16);
        let others = Arc::new(Behaviour::default());
        let mirror = Region::anonymous(4096).unwrap();
        let config = peer_config(10, &other_lanes, &mirror);
        let other = rig._proxy.add(Recorder::new(Arc::clone(&others), 0), config).unwrap();
        rig.behaviour.fail_at.store(nth, Ordering::SeqCst);
        for _ in 0..6 {
            let _ = first.try_post(&Command::word(Opcode::Add, 8, 1));
        }
        wait_for("the error", || first.error() != 0 && second.error() != 0);
        assert_eq!(first.error() as u8, 10);
        assert_eq!(first.error() >> 16, nth - 1);
        let failure = rig.peer.take_failures().pop().unwrap();
        assert!(failure.to_string().contains("injected"), "{failure}");
        assert!(matches!(failure.cause, Cause::Post { opcode: Opcode::Add, .. }), "{failure}");
        assert!(second.completed() == 0);
        served(&mut other_lanes.poster(0));
        assert!(!other.has_failed());
    }
}

#[test]
fn a_transport_that_stalls_is_given_up() {
    for opcode in [Opcode::Nop, Opcode::Quiet] {
        let rig = rig(Duration::from_millis(50));
        rig.behaviour.is_stalled.store(true, Ordering::SeqCst);
        let mut poster = rig.lanes.poster(1);
        poster.try_post(&Command::new(opcode)).unwrap();
        wait_for("the error", || poster.error() != 0);
        assert_eq!(poster.error() as u8, 11);
        assert_eq!(poster.completed(), 0);
        let failure = rig.peer.take_failures().pop().unwrap();
        assert!(matches!(failure.cause, Cause::Stalled { limit_ms: 50 }), "{failure}");
        assert_eq!(failure.lane, 1);
    }
}

#[test]
fn a_transport_that_fails_is_reported_for_the_lane_that_waits_and_without_an_opcode() {
    let rig = rig(LIMIT);
    let (mut idle, mut busy) = (rig.lanes.poster(0), rig.lanes.poster(1));
    (0..2).for_each(|_| served(&mut idle));
    // Past the end of the ring, so that the next cell holds an old command.
    (0..20).for_each(|_| served(&mut busy));
    rig.behaviour.is_stalled.store(true, Ordering::SeqCst);
    busy.try_post(&Command::new(Opcode::Nop)).unwrap();
    wait_for("the command", || rig._proxy.stats()[0].commands == 23);
    rig.behaviour.is_broken.store(true, Ordering::SeqCst);
    wait_for("the errors", || idle.error() != 0 && busy.error() != 0);
    let failure = rig.peer.take_failures().pop().unwrap();
    assert!(matches!(failure.cause, Cause::Transport(_)), "{failure}");
    assert_eq!((failure.lane, failure.index), (1, 20), "{failure}");
    // Code, opcode, and each lane's own first command that is not over.
    let parts = |word: u64| (word as u8, (word >> 8) as u8, word >> 16);
    assert_eq!(parts(busy.error()), (10, 0, 20));
    assert_eq!(parts(idle.error()), (10, 0, 2));
}

#[test]
fn the_sender_of_a_benchmark_decides_over_neither_memory_nor_time() {
    let network = SoftNetwork::open(NicConfig::default()).unwrap();
    let plan = |threads: u64, object_bytes: u64, budget: u64| {
        let rest = r#""batch":1,"commands":1,"checks":1"#;
        let sizes = format!(r#""object_bytes":{object_bytes},"budget":{budget}"#);
        format!("{{\"Plan\":{{\"threads\":{threads},{sizes},{rest}}}}}\n")
    };
    let cases = [
        (plan(1, 0xffff_fff8, 16_384), "in all"),
        (plan(1, 1 << 20, 4097), "in all"),
        (plan(64, 1 << 20, 65), "in all"),
        (plan(65, 8, 2), "threads: expected"),
        ("x".repeat(1 << 20), "a line of more than 65536 bytes"),
        ("half a line".to_owned(), "has closed"),
    ];
    for (said, expected) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let sender = std::thread::spawn(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            // A peer with enough input closes the connection.
            let _ = stream.write_all(said.as_bytes());
        });
        let error = remote::receive(&network, &listener, LIMIT).unwrap_err();
        sender.join().unwrap();
        assert!(error.to_string().contains(expected), "{expected}: {error:#}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = remote::receive(&network, &listener, Duration::from_millis(30)).unwrap_err();
    assert!(error.to_string().contains("no sender came"), "{error:#}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Random content of a lane: it is executed within bounds, or the lane ends with a named error, or it counts
    /// as half a command. The thread survives.
    #[test]
    fn any_bytes_in_a_lane(words in proptest::collection::vec(any::<(u64, u64, bool)>(), 1..16)) {
        let rig = rig(LIMIT);
        let mut poster = rig.lanes.poster(0);
        let num = words.len() as u64;
        for (first, second, is_due) in words {
            // Half of them pretend to be due.
            let first = if is_due { first & !0xff | 1 } else { first };
            let second = if is_due { second | 1 } else { second };
            poster.post_raw(RawCommand { first, second });
        }
        let mut other = rig.lanes.poster(1);
        served(&mut other);
        served(&mut other);
        prop_assert!(poster.completed() <= num);
        let asked = rig.behaviour.asked.lock().unwrap();
        for asked in &*asked {
            let (common::Asked::Put { offset, bytes, .. } | common::Asked::Get { offset, bytes }) = asked
            else { continue };
            prop_assert!(offset + bytes <= SLOT);
        }
    }
}
