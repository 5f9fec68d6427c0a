//! The device functions as threads of this host, against real threads of the proxy.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{
    Asked, Behaviour, LIMIT, Posters, Recorder, SLOT, bytes_of, config, driver, fresh_seed, lanes,
    peer_config, wait_for, word, write,
};
use p2p_core::backend::local;
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::wait::event_fd;
use p2p_core::{Region, SlotConfig, TransportKind};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_proxy::abi::Status;
use switchyard_proxy::{Lanes, Proxy, ProxyPeer};

#[test]
fn both_sides_have_the_layout_alike() {
    use std::mem::offset_of;
    use switchyard_proxy::abi::{self, LaneHandle, LaneState, LaneWords, PeerHandle, RawCommand};
    let Some(driver) = driver() else { return };
    let ours = [
        size_of::<RawCommand>(),
        size_of::<LaneWords>(),
        offset_of!(LaneWords, error),
        size_of::<LaneState>(),
        offset_of!(LaneState, seen),
        offset_of!(LaneState, error),
        offset_of!(LaneState, asked),
        size_of::<LaneHandle>(),
        offset_of!(LaneHandle, words),
        offset_of!(LaneHandle, depth_shift),
        offset_of!(LaneHandle, budget),
        size_of::<PeerHandle>(),
        offset_of!(PeerHandle, slot_bytes),
        offset_of!(PeerHandle, abort_mask),
        offset_of!(PeerHandle, timeout_ns),
        offset_of!(PeerHandle, num_lanes),
        offset_of!(PeerHandle, peer),
        abi::VERSION as usize,
        abi::MIN_DEPTH as usize,
        abi::MAX_DEPTH as usize,
        abi::MAX_LANES as usize,
        abi::MAX_SOURCES,
        abi::MAX_WINDOWS,
        abi::MAX_BYTES as usize,
        abi::MAX_SLOT_BYTES as usize,
        offset_of!(PeerHandle, window),
        offset_of!(PeerHandle, version),
    ];
    assert_eq!(driver.layout(), ours.map(|value| value as u64));
    let lanes = lanes(2, 16, 16);
    let state = [0u64; 48];
    let good = lanes.handle(1, state.as_ptr() as u64);
    let check = |change: fn(&mut LaneHandle)| {
        let mut lane = good;
        change(&mut lane);
        // SAFETY: points to a lane's handle, which is only read.
        unsafe { driver.check(std::ptr::from_ref(&lane).cast()) }
    };
    assert_eq!(check(|_| {}), None);
    type Change = fn(&mut LaneHandle);
    let cases: [(&str, Change); 7] = [
        ("depth", |lane| lane.depth_shift = 3),
        ("depth", |lane| lane.depth_shift = 17),
        ("budget", |lane| lane.budget = 17),
        ("budget", |lane| lane.budget = 0),
        ("budget", |lane| lane.budget = 1),
        ("commands", |lane| lane.commands += 8),
        ("words", |lane| lane.state = 0),
    ];
    for (expected, change) in cases {
        assert!(check(change).is_some_and(|text| text.contains(expected)), "{expected}");
    }
}

/// The device functions divide by the number of lanes, and cut an offset to 32 bits: neither side lets such
/// a peer pass.
#[test]
fn rust_and_c_say_the_same_of_peers() {
    use std::collections::BTreeSet;
    use switchyard_proxy::abi::{self, PeerHandle};
    let Some(driver) = driver() else { return };
    let good = PeerHandle {
        lanes: 0x1000,
        mirror: 0x2_0000,
        slot_bytes: 1 << 32,
        error: 0x3008,
        abort_mask: 0x4004,
        timeout_ns: 1,
        num_lanes: 256,
        window: 255,
        peer: 3,
        version: abi::VERSION,
    };
    assert_eq!(good.check(), None);
    let mut peers = vec![good, PeerHandle { error: 0, abort_mask: 0, ..good }];
    let numbers = [0, 1, 2, 255, 256, 257, u32::MAX];
    peers.extend(numbers.map(|num_lanes| PeerHandle { num_lanes, ..good }));
    peers.extend(numbers.map(|window| PeerHandle { window, ..good }));
    peers.extend(numbers.map(|version| PeerHandle { version, ..good }));
    let words = [0, 1, 2, 4, 8, 16, 24, 1 << 32, (1 << 32) + 1, u64::MAX];
    peers.extend(words.map(|lanes| PeerHandle { lanes, ..good }));
    peers.extend(words.map(|mirror| PeerHandle { mirror, ..good }));
    peers.extend(words.map(|slot_bytes| PeerHandle { slot_bytes, ..good }));
    peers.extend(words.map(|error| PeerHandle { error, ..good }));
    peers.extend(words.map(|abort_mask| PeerHandle { abort_mask, ..good }));
    let mut seen = BTreeSet::new();
    for peer in &peers {
        // SAFETY: points to a peer's handle, which is only read.
        let in_c = unsafe { driver.check_peer(std::ptr::from_ref(peer).cast()) };
        assert_eq!(peer.check(), in_c.as_deref(), "{peer:?}");
        seen.insert(in_c);
    }
    // Each of the seven objections, and none.
    assert_eq!(seen.len(), 8, "{seen:?}");
}

#[test]
fn posters_are_not_given_a_peer_that_they_cannot_use() {
    use switchyard_proxy::host::{HostPoster, PosterConfig};
    let mirror = Region::anonymous(SLOT).unwrap();
    let good = PosterConfig {
        mirror: mirror.as_ptr().as_ptr() as u64,
        slot_bytes: SLOT as u64,
        window: 0,
        peer: 3,
        timeout_ns: 1,
        error: 0,
        abort_mask: 0,
    };
    let cases = [
        ("slot_bytes", PosterConfig { slot_bytes: (4 << 30) + 8, ..good }),
        ("slot_bytes", PosterConfig { slot_bytes: 0, ..good }),
        ("mirror", PosterConfig { mirror: 0, ..good }),
        ("window", PosterConfig { window: 256, ..good }),
    ];
    let lanes = lanes(1, 16, 4);
    assert!(HostPoster::new(&lanes, good).is_ok());
    for (what, config) in cases {
        let error = HostPoster::new(&lanes, config).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
}

#[test]
fn every_command_is_carried_out_once_and_in_order() {
    let Some(driver) = driver() else { return };
    // Small rings that wrap hundreds of times, past the 8 bits of a lap; several posters on each lane.
    const LANES: u32 = 4;
    const POSTERS: u64 = 3;
    const EACH: u64 = 3000;
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(LANES, 16, 16);
    let behaviour = Arc::new(Behaviour::default());
    let proxy = Proxy::start(&config(1)).unwrap();
    let recorder = Recorder::new(Arc::clone(&behaviour), mirror.as_ptr().as_ptr() as usize);
    let peer = proxy.add(recorder, peer_config(7, &lanes, &mirror)).unwrap();
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            for poster in 0..POSTERS {
                let posters = &posters;
                scope.spawn(move || {
                    for number in 0..EACH {
                        // The value says who, the offset on which lane.
                        let value = poster << 32 | number;
                        assert_eq!(posters.add(lane, 8 * u64::from(lane), value), 0);
                        if number % 1000 == 0 {
                            assert_eq!(posters.quiet(lane), 0);
                        }
                    }
                });
            }
        }
    });
    (0..LANES).for_each(|lane| assert_eq!(posters.quiet(lane), 0));
    let asked = behaviour.asked.lock().unwrap();
    let mut next: HashMap<(usize, u64), u64> = HashMap::new();
    for entry in &*asked {
        let Asked::Add { offset, value } = entry else { panic!("{entry:?}") };
        let next = next.entry((*offset, value >> 32)).or_default();
        assert_eq!(*next, value & 0xffff_ffff, "lane {}", offset / 8);
        *next += 1;
    }
    assert_eq!(next.len() as u64, u64::from(LANES) * POSTERS);
    assert!(next.values().all(|seen| *seen == EACH));
    let stats = proxy.stats()[0];
    assert_eq!(stats.commands, stats.recycled);
    assert!(!peer.has_failed());
}

/// A peer of this process: the slot, and an endpoint towards it.
fn slot_pair(disorder: Option<Disorder>) -> (Region, StagedEndpoint) {
    let slot = Region::anonymous(SLOT).unwrap();
    let event = Arc::new(event_fd().unwrap());
    let endpoint =
        MappedEndpoint::new(TransportKind::Local, slot.clone(), Arc::clone(&event), event);
    (slot, StagedEndpoint::new(endpoint, disorder))
}

#[test]
fn flags_come_behind_their_puts_whatever_the_transport_does() {
    let Some(driver) = driver() else { return };
    let seed = fresh_seed();
    const LANES: u32 = 3;
    const ROUNDS: u64 = 400;
    const PART: usize = 4096;
    // Each lane has a part of the slot, and two words at the end: one is signalled, one added to.
    let words =
        |lane: u32| (SLOT - 4096 + 16 * lane as usize, SLOT - 4096 + 16 * lane as usize + 8);
    let (slot, endpoint) = slot_pair(Some(Disorder { seed, max_delay: Duration::from_micros(3) }));
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(LANES, 64, 32);
    let proxy = Proxy::start(&config(2)).unwrap();
    let _peer = proxy.add(endpoint, peer_config(0, &lanes, &mirror)).unwrap();
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    std::thread::scope(|scope| {
        for lane in 0..LANES {
            let (posters, mirror, slot) = (&posters, &mirror, &slot);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(seed ^ u64::from(lane));
                let base = lane as usize * PART;
                let (signalled, counted) = words(lane);
                let mut bytes = vec![0; PART];
                for round in 1..=ROUNDS {
                    rng.fill_bytes(&mut bytes);
                    write(mirror, base, &bytes);
                    // In several puts of any size.
                    let cut = rng.random_range(0..=PART / 8) * 8;
                    assert_eq!(posters.put(lane, base as u64, cut as u64), 0);
                    let (rest, left) = ((base + cut) as u64, (PART - cut) as u64);
                    let (word_at, value) = if round % 2 == 0 {
                        // Signals jump: any value, also a lower one.
                        (signalled, rng.random::<u64>() | 1)
                    } else {
                        (counted, round.div_ceil(2))
                    };
                    let status = if word_at == signalled {
                        posters.put_signal(lane, rest, left, word_at as u64, value)
                    } else {
                        posters.put_add(lane, rest, left, word_at as u64, 1)
                    };
                    assert_eq!(status, 0);
                    let word = word(slot, word_at);
                    wait_for("the flag", || word.load(Ordering::Acquire) == value);
                    assert!(bytes_of(slot, base, PART) == bytes, "round {round}");
                }
            });
        }
    });
}

#[test]
fn whether_a_lane_is_quiet_is_asked_once_and_without_waiting() {
    let Some(driver) = driver() else { return };
    let behaviour = Arc::new(Behaviour::default());
    behaviour.is_stalled.store(true, Ordering::SeqCst);
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(3, 16, 4);
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    // No thread takes commands yet, and still no call waits. The second lane has no room for the query.
    assert!(posters.is_quiet(0), "there is nothing to wait for");
    (0..3).for_each(|_| assert_eq!(posters.add(0, 0, 1), 0));
    (0..4).for_each(|_| assert_eq!(posters.add(1, 8, 1), 0));
    (0..100).for_each(|_| assert!(!posters.is_quiet(0) && !posters.is_quiet(1)));
    let proxy = Proxy::start(&config(1)).unwrap();
    let base = mirror.as_ptr().as_ptr() as usize;
    let endpoint = Recorder::new(Arc::clone(&behaviour), base);
    let peer = proxy.add(endpoint, peer_config(0, &lanes, &mirror)).unwrap();
    wait_for("the commands to be taken", || proxy.stats()[0].commands == 8);
    (0..100).for_each(|_| assert!(!posters.is_quiet(0) && !posters.is_quiet(1)));
    behaviour.is_stalled.store(false, Ordering::SeqCst);
    wait_for("quiet lanes", || posters.is_quiet(0) && posters.is_quiet(1));
    (0..100).for_each(|_| assert!(posters.is_quiet(0) && posters.is_quiet(1)));
    assert_eq!(proxy.stats()[0].commands, 7 + 2, "a quiet each");
    assert_eq!(posters.add(0, 0, 1), 0);
    assert!(!posters.is_quiet(0), "there is something new");
    wait_for("a quiet lane", || posters.is_quiet(0));
    // For a lane out of service, arrival is unknown.
    behaviour.is_broken.store(true, Ordering::SeqCst);
    assert_eq!(posters.add(1, 8, 1), 0);
    wait_for("the failure", || !posters.is_quiet(1) && peer.has_failed());
    assert!(!posters.is_quiet(1));
}

#[test]
fn gets_are_complete_behind_a_quiet() {
    let Some(driver) = driver() else { return };
    let seed = fresh_seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let (slot, endpoint) = slot_pair(Some(Disorder { seed, max_delay: Duration::ZERO }));
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(1, 16, 16);
    let proxy = Proxy::start(&config(1)).unwrap();
    let _peer = proxy.add(endpoint, peer_config(0, &lanes, &mirror)).unwrap();
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    for _ in 0..50 {
        let len = rng.random_range(0..=SLOT);
        let offset = rng.random_range(0..=SLOT - len);
        let mut bytes = vec![0; len];
        rng.fill_bytes(&mut bytes);
        write(&slot, offset, &bytes);
        write(&mirror, 0, &[0xa5; SLOT]);
        assert_eq!(posters.get(0, offset as u64, len as u64), 0);
        assert_eq!(posters.quiet(0), 0);
        assert!(bytes_of(&mirror, offset, len) == bytes);
        assert!(bytes_of(&mirror, 0, offset).iter().all(|byte| *byte == 0xa5));
    }
}

#[test]
fn a_random_sequence_leaves_what_a_model_says() {
    let Some(driver) = driver() else { return };
    let seed = fresh_seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let (slot, endpoint) = slot_pair(None);
    let mirror = Region::anonymous(SLOT).unwrap();
    let other = Region::anonymous(8192).unwrap();
    let mut bytes = vec![0; SLOT];
    rng.fill_bytes(&mut bytes);
    write(&mirror, 0, &bytes);
    let mut others = vec![0; 8192];
    rng.fill_bytes(&mut others);
    write(&other, 0, &others);
    let lanes = lanes(2, 32, 20);
    let proxy = Proxy::start(&config(1)).unwrap();
    let peer = proxy.add(endpoint, peer_config(0, &lanes, &mirror)).unwrap();
    assert_eq!(peer.register(&other).unwrap(), 1);
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    // The last page has words, and nothing is put there. One lane at a time, since lanes have no order.
    let mut model = vec![0u8; SLOT];
    let data = SLOT - 4096;
    for step in 0..3000 {
        let lane = step / 1000 % 2;
        if step % 1000 == 0 {
            assert_eq!(posters.quiet(0), 0);
            assert_eq!(posters.quiet(1), 0);
        }
        let word_at = data + 8 * rng.random_range(0..512);
        let value: u64 = rng.random();
        match rng.random_range(0..5) {
            0 => {
                let len = rng.random_range(0..=2000);
                let at = rng.random_range(0..=data - len);
                assert_eq!(posters.put(lane, at as u64, len as u64), 0);
                model[at..at + len].copy_from_slice(&bytes[at..at + len]);
            }
            1 => {
                let len = rng.random_range(0..=2000);
                let at = rng.random_range(0..=data - len);
                let from = rng.random_range(0..=others.len() - len);
                let status = posters.put_from(lane, at as u64, 1, from as u64, len as u64);
                assert_eq!(status, 0);
                model[at..at + len].copy_from_slice(&others[from..from + len]);
            }
            2 => {
                assert_eq!(posters.signal(lane, word_at as u64, value), 0);
                model[word_at..word_at + 8].copy_from_slice(&value.to_ne_bytes());
            }
            _ => {
                assert_eq!(posters.add(lane, word_at as u64, value), 0);
                let old = u64::from_ne_bytes(model[word_at..word_at + 8].try_into().unwrap());
                model[word_at..word_at + 8].copy_from_slice(&old.wrapping_add(value).to_ne_bytes());
            }
        }
        if step % 97 == 0 {
            assert_eq!(posters.quiet(lane), 0);
            assert!(bytes_of(&slot, 0, SLOT) == model, "step {step}");
        }
    }
}

#[test]
fn a_stalled_proxy_is_waited_for_and_no_longer_than_allowed() {
    let Some(driver) = driver() else { return };
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(1, 16, 8);
    let posters = Posters::new(driver, &lanes, &mirror, Duration::from_millis(30));
    // No thread takes commands: the budget is the exact number of cells.
    for number in 0..8 {
        assert_eq!(posters.add(0, 0, 1), Status::Ok as u32, "command {number}");
    }
    assert_eq!(posters.add(0, 0, 1), Status::Timeout as u32);
    let error = &posters.error;
    assert_eq!((error.tag, error.peer, error.reason), (48, 3, 1));
    assert_eq!((error.observed, error.expected), (0, 1));
    // The lane is immediately out of service at this end.
    assert_eq!(posters.quiet(0), Status::Timeout as u32);

    // A thread that is only slow is waited for.
    let slow = self::lanes(1, 16, 8);
    let posters = Posters::new(driver, &slow, &mirror, LIMIT);
    let behaviour = Arc::new(Behaviour::default());
    std::thread::scope(|scope| {
        let poster =
            scope.spawn(|| (0..100).all(|_| posters.add(0, 0, 1) == 0) && posters.quiet(0) == 0);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!poster.is_finished());
        let proxy = Proxy::start(&config(1)).unwrap();
        let recorder = Recorder::new(Arc::clone(&behaviour), 0);
        behaviour.is_stalled.store(true, Ordering::SeqCst);
        let _peer = proxy.add(recorder, peer_config(0, &slow, &mirror)).unwrap();
        wait_for("the budget", || behaviour.num_asked.load(Ordering::SeqCst) == 8);
        std::thread::sleep(Duration::from_millis(5));
        // Taken is not over: nothing more comes while nothing is settled.
        assert_eq!(behaviour.num_asked.load(Ordering::SeqCst), 8);
        behaviour.is_stalled.store(false, Ordering::SeqCst);
        assert!(poster.join().unwrap());
    });
}

#[test]
fn waits_end_when_the_host_says_so() {
    let Some(driver) = driver() else { return };
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(1, 16, 4);
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| posters.quiet(0));
        posters.abort_mask.store(1 << 3, Ordering::SeqCst);
        assert_eq!(waiter.join().unwrap(), Status::Aborted as u32);
    });
    assert_eq!((posters.error.tag, posters.error.reason), (49, 2));
}

#[test]
fn calls_out_of_the_slot_post_nothing() {
    let Some(driver) = driver() else { return };
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(1, 16, 4);
    let posters = Posters::new(driver, &lanes, &mirror, LIMIT);
    let slot = SLOT as u64;
    let refused = Status::Argument as u32;
    assert_eq!(posters.put(0, slot - 8, 16), refused);
    assert_eq!(posters.put(0, u64::MAX, 2), refused);
    assert_eq!(posters.get(0, 1, slot), refused);
    assert_eq!(posters.put_from(0, 0, 2048, 0, 8), refused);
    assert_eq!(posters.put_from(0, 0, 0, 1 << 32, 8), refused);
    assert_eq!(posters.add(0, 4, 1), refused);
    assert_eq!(posters.add(0, slot, 1), refused);
    assert_eq!(posters.signal(0, slot - 4, 1), refused);
    assert_eq!(posters.put_add(0, 0, 8, 12, 1), refused);
    assert_eq!(posters.put_signal(0, 0, slot + 1, 8, 1), refused);
    assert_eq!(lanes.poster(0).completed(), 0);
    assert_eq!(posters.error.tag, 0);
}

#[test]
fn closing_a_peer_ends_its_posters() {
    let Some(driver) = driver() else { return };
    let mirror = Region::anonymous(SLOT).unwrap();
    let proxy = Proxy::start(&config(1)).unwrap();
    let start = |lanes: &Lanes| -> (Arc<Behaviour>, ProxyPeer<Recorder>) {
        let behaviour = Arc::new(Behaviour::default());
        behaviour.is_stalled.store(true, Ordering::SeqCst);
        let recorder = Recorder::new(Arc::clone(&behaviour), 0);
        let peer = proxy.add(recorder, peer_config(0, lanes, &mirror)).unwrap();
        (behaviour, peer)
    };
    let (first, second) = (lanes(1, 16, 4), lanes(1, 16, 4));
    let (of_first, peer) = start(&first);
    let posters = Posters::new(driver, &first, &mirror, LIMIT);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| posters.quiet(0));
        drop(peer);
        assert!(of_first.is_dropped.load(Ordering::SeqCst), "the endpoint goes with the peer");
        assert_eq!(waiter.join().unwrap(), Status::Refused as u32);
    });
    assert_eq!(posters.error.tag, 50);
    assert_eq!(posters.error.observed & 0xff, 12);
    // And with the proxy.
    let (of_second, peer) = start(&second);
    let posters = Posters::new(driver, &second, &mirror, LIMIT);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| posters.quiet(0));
        drop(proxy);
        assert!(of_second.is_dropped.load(Ordering::SeqCst));
        assert_eq!(waiter.join().unwrap(), Status::Refused as u32);
    });
    drop(peer);
}

#[test]
fn idle_threads_sleep_and_wake_for_commands() {
    let (slot, endpoint) = slot_pair(None);
    let mirror = Region::anonymous(SLOT).unwrap();
    let lanes = lanes(2, 16, 16);
    let proxy = Proxy::start(&config(1)).unwrap();
    let peer = proxy.add(endpoint, peer_config(0, &lanes, &mirror)).unwrap();
    let mut poster = lanes.poster(1);
    for round in 1..=20 {
        let sleeps = proxy.stats()[0].sleeps;
        wait_for("sleep", || proxy.stats()[0].sleeps > sleeps + 3);
        let add = switchyard_proxy::Command::word(switchyard_proxy::Opcode::Add, 64, 1);
        let number = poster.try_post(&add).unwrap();
        // A GPU cannot ring: every other command is found without.
        if round % 2 == 0 {
            peer.ring();
        }
        wait_for("the command", || poster.completed() == number);
        assert_eq!(word(&slot, 64).load(Ordering::Acquire), round);
    }
}

#[test]
fn a_local_channel_is_left_to_work_beside() {
    // The proxy's peers and channels may share a process and its transports.
    let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let (mut a, mut b) = local::pair(config).unwrap();
    let frame = a.try_reserve().unwrap().unwrap();
    a.write_view(&frame).put_bytes(0, b"beside").unwrap();
    a.publish(frame, 6).unwrap();
    assert_eq!(b.try_next().unwrap().map(|_| ()), Some(()));
}
