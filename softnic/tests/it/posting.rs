//! Many warps on one queue pair, through every wrap of its counters, with room and without.

use crate::common;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    Groups, PATIENCE, Rig, RigConfig, Wait, adversarial, fill, fresh_seed, mismatch, status, strict,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use softnic_driver::OwnMove;
use switchyard_softnic::{Access, DoorbellMode, Fault, NicConfig, QueueSizes};

/// Indices have 16 bits: this number of requests takes them through three wraps.
const NUM_WRAPPING: u64 = 3 * 65_536 + 100;

fn sizes(sq_depth: u32, is_collapsed: bool) -> QueueSizes {
    QueueSizes { sq_depth, is_collapsed, ..QueueSizes::default() }
}

#[test]
fn counters_wrap_at_depth_128() {
    wraps(128);
}

#[test]
fn counters_wrap_at_depth_1024() {
    wraps(1024);
}

#[test]
fn counters_wrap_at_depth_32768() {
    wraps(32_768);
}

/// Groups of every size from 1 to 32 write consecutive numbers over a ring of words.
fn wraps(sq_depth: u32) {
    const RING: u64 = 4096;
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    for is_collapsed in [true, false] {
        let config = RigConfig { sizes: sizes(sq_depth, is_collapsed), ..RigConfig::default() };
        let Some(rig) = Rig::new(config) else { return };
        let wait = Wait::patient();
        let mut next = 0;
        while next < NUM_WRAPPING {
            let first = next % RING;
            let num = rng.random_range(1..=32).min((RING - first) as u32);
            assert_eq!(rig.signal_words(first, next, num, &wait), status::OK);
            next += u64::from(num);
        }
        assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
        for index in next - RING..next {
            let found = rig.target_word((index % RING) as usize * 8).load(Ordering::Acquire);
            assert_eq!(found, index, "depth {sq_depth}, collapsed {is_collapsed}");
        }
        assert_eq!(rig.queue.reserved(), next);
        assert_eq!(rig.queue.completed(), next);
        rig.assert_clean();
    }
}

/// An exclusive owner of the queue and sharing posters alternate through three wraps; with a record and without.
#[test]
fn counters_wrap_for_an_owner_too() {
    const RING: u64 = 4096;
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    for (sq_depth, is_collapsed, has_record) in
        [(128, true, true), (128, false, false), (1024, true, false)]
    {
        let sizes = QueueSizes { has_record, ..sizes(sq_depth, is_collapsed) };
        let nic = NicConfig { keeps_trace: true, ..strict() };
        let Some(rig) = Rig::new(RigConfig { sizes, nic, ..RigConfig::default() }) else { return };
        let wait = Wait::patient();
        let mut next = 0;
        while next < NUM_WRAPPING {
            let num_lanes = rng.random_range(1..=32);
            // The ring begins with the first of them.
            let groups = Groups::new(rng.random_range(1..=2000), num_lanes, RING);
            assert_eq!(rig.own_signals(next, &groups, &wait), status::OK, "{:?}", wait.error());
            let num = groups.num * u64::from(num_lanes);
            for number in num.saturating_sub(RING)..num {
                let found = rig.target_word((number % RING) as usize * 8).load(Ordering::Acquire);
                assert_eq!(found, next + number);
            }
            next += num;
            assert_eq!(rig.signal_words(0, next, 1, &wait), status::OK);
            next += 1;
            assert_eq!(rig.queue.reserved(), next);
        }
        assert_eq!(rig.quiet(&wait), status::OK);
        assert_eq!(rig.queue.completed(), next);
        let client = rig.client.lock();
        let in_order = client.executed().iter().enumerate();
        assert!(in_order.clone().count() as u64 == next);
        for (position, request) in in_order {
            assert_eq!(request.position, position as u64, "a gap or a repetition");
        }
        drop(client);
        rig.assert_clean();
    }
}

/// The NIC reads the register alone, and posters leave the record as it is.
#[test]
fn queues_without_a_record_go_by_their_register() {
    for doorbell in [DoorbellMode::Register, DoorbellMode::Checked, DoorbellMode::Record] {
        let sizes = QueueSizes { has_record: false, ..sizes(128, true) };
        let nic = NicConfig { doorbell, ..strict() };
        let Some(rig) = Rig::new(RigConfig { sizes, nic, ..RigConfig::default() }) else { return };
        std::thread::scope(|scope| {
            for warp in 0..4u64 {
                let rig = &rig;
                scope.spawn(move || {
                    let wait = Wait::patient();
                    for round in 0..500 {
                        let word = warp * 500 + round;
                        assert_eq!(rig.signal_words(word, word + 1, 1, &wait), status::OK);
                    }
                    assert_eq!(rig.quiet(&wait), status::OK);
                });
            }
        });
        for word in 0..2000 {
            assert_eq!(rig.target_word(word * 8).load(Ordering::Acquire), word as u64 + 1);
        }
        // SAFETY: both words of the record, which lives as long as the queue; accessed atomically.
        let record = unsafe { AtomicU64::from_ptr(rig.queue.handle().dbrec as *mut u64) };
        assert_eq!(record.load(Ordering::Acquire), 0);
        rig.assert_clean();
    }
}

/// Each call of an owner does the same as the corresponding call on a shared queue.
#[test]
fn an_owner_puts_gets_and_adds() {
    const LEN: usize = 40_000;
    const WORD: usize = 512 << 10;
    let sizes = QueueSizes { max_message_bytes: 3000, ..sizes(128, true) };
    let nic = adversarial(fresh_seed());
    let Some(rig) = Rig::new(RigConfig { nic, sizes, ..RigConfig::default() }) else { return };
    let wait = Wait::patient();
    let moved = |kind| rig.own_move(kind, 0, LEN as u64, WORD as u64, &wait);
    let mut expected = 0;
    for (round, kind) in [OwnMove::Put, OwnMove::PutAdd, OwnMove::PutSignal].into_iter().enumerate()
    {
        fill(&rig.source, 0, LEN, round as u64);
        assert_eq!(moved(kind), status::OK, "{kind:?}");
        assert_eq!(mismatch(&rig.target, 0, LEN, round as u64), None, "{kind:?}");
        // A signal sets the word to 1 as well.
        expected = if kind == OwnMove::Put { expected } else { 1 };
        assert_eq!(rig.target_word(WORD).load(Ordering::Acquire), expected, "{kind:?}");
    }
    assert_eq!(moved(OwnMove::Add), status::OK);
    assert_eq!(rig.target_word(WORD).load(Ordering::Acquire), 2);
    assert_eq!(moved(OwnMove::Signal), status::OK);
    assert_eq!(rig.target_word(WORD).load(Ordering::Acquire), 1);
    fill(&rig.target, 0, LEN, 9);
    assert_eq!(moved(OwnMove::Get), status::OK);
    assert_eq!(mismatch(&rig.source, 0, LEN, 9), None);
    for kind in [OwnMove::PutAdd, OwnMove::PutSignal, OwnMove::Add, OwnMove::Signal] {
        let found = rig.own_move(kind, 0, 8, WORD as u64 + 4, &wait);
        assert_eq!(found, status::ARGUMENT, "{kind:?} of a word that is not aligned");
    }
    // The same of a queue that is shared.
    fill(&rig.source, 0, LEN, 10);
    assert_eq!(rig.put_signal(0, LEN as u64, WORD as u64, 77, &wait), status::OK);
    assert_eq!(rig.quiet(&wait), status::OK);
    assert_eq!(mismatch(&rig.target, 0, LEN, 10), None);
    assert_eq!(rig.target_word(WORD).load(Ordering::Acquire), 77);
    assert_eq!(rig.put_signal(0, 8, WORD as u64 + 4, 1, &wait), status::ARGUMENT);
    rig.assert_clean();
}

/// The quiet behind an owner's request reports its result, and so does every later call.
#[test]
fn an_owner_learns_of_a_failed_request() {
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    let (qpn, syndrome) = (rig.queue.qpn(), switchyard_softnic::format::Syndrome::RemoteAccess);
    rig.client.lock().inject(Fault::Fail { qpn, nth: 3, syndrome }).unwrap();
    let wait = Wait::patient();
    assert_eq!(rig.own_signals(1, &Groups::new(8, 1, 8), &wait), status::COMPLETION);
    assert_eq!(wait.error().tag, 35);
    assert_eq!(rig.target_word(16).load(Ordering::Acquire), 3);
    assert_eq!(rig.target_word(24).load(Ordering::Acquire), 0);
    let groups = Groups::new(1, 1, 1);
    assert_eq!(rig.own_signals(9, &groups, &Wait::patient()), status::COMPLETION);
    assert_eq!(groups.num_posted.load(Ordering::Relaxed), 0);
    rig.recover();
    assert_eq!(rig.own_signals(9, &Groups::new(1, 1, 1), &Wait::patient()), status::OK);
}

#[test]
fn every_request_of_many_warps_is_executed_once_in_the_order_of_reservation() {
    const NUM_WARPS: u64 = 8;
    const GROUPS: u64 = 400;
    const GROUP: u64 = 5;
    let seed = fresh_seed();
    for (is_collapsed, is_hostile) in [(true, false), (false, false), (true, true), (false, true)] {
        let nic = if is_hostile { adversarial(seed) } else { strict() };
        let nic = NicConfig { keeps_trace: true, ..nic };
        let config = RigConfig { nic, sizes: sizes(128, is_collapsed), ..RigConfig::default() };
        let Some(rig) = Rig::new(config) else { return };
        std::thread::scope(|scope| {
            for warp in 0..NUM_WARPS {
                let rig = &rig;
                scope.spawn(move || {
                    let wait = Wait::patient();
                    for group in 0..GROUPS {
                        let first = (warp * GROUPS + group) * GROUP;
                        let status = rig.signal_words(first, first + 1, GROUP as u32, &wait);
                        assert_eq!(status, status::OK, "{:?}", wait.error());
                    }
                    assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
                });
            }
        });
        let client = rig.client.lock();
        let executed = client.executed();
        let total = NUM_WARPS * GROUPS * GROUP;
        assert_eq!(executed.len() as u64, total);
        let mut last_of_warp = HashMap::new();
        for (position, request) in executed.iter().enumerate() {
            assert_eq!(request.position, position as u64, "a gap or a repetition");
            let word = (request.address - rig.target_keys.address) / 8;
            // A group's requests stand together, and a warp's groups follow each other.
            let warp = word / (GROUPS * GROUP);
            let last = last_of_warp.insert(warp, word);
            assert_eq!(word, last.map_or(warp * GROUPS * GROUP, |last| last + 1));
            if word % GROUP != 0 {
                assert_eq!(executed[position - 1].address + 8, request.address);
            }
        }
        drop(client);
        for word in 0..total {
            let found = rig.target_word(word as usize * 8).load(Ordering::Acquire);
            assert_eq!(found, word + 1);
        }
        rig.assert_clean();
    }
}

#[test]
fn posters_wait_for_a_stalled_nic_and_go_on_when_it_does() {
    let config = RigConfig { sizes: sizes(128, true), ..RigConfig::default() };
    let Some(rig) = Rig::new(config) else { return };
    let qpn = rig.queue.qpn();
    rig.client.lock().inject(Fault::Stall { qpn }).unwrap();
    let num_done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for warp in 0..4u64 {
            let (rig, num_done) = (&rig, &num_done);
            scope.spawn(move || {
                let wait = Wait::patient();
                for round in 0..200 {
                    let word = warp * 200 + round;
                    assert_eq!(rig.signal_words(word, word + 1, 1, &wait), status::OK);
                    num_done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // The queue fills up; 128 calls return, and not one more.
        let start = Instant::now();
        while rig.queue.reserved() < 128 + 4 {
            assert!(start.elapsed() < PATIENCE, "the queue did not fill");
            std::thread::yield_now();
        }
        assert_eq!(num_done.load(Ordering::Relaxed), 128);
        assert_eq!(rig.queue.completed(), 0);
        rig.client.lock().inject(Fault::Resume { qpn }).unwrap();
    });
    assert_eq!(rig.quiet(&Wait::patient()), status::OK);
    for word in 0..800 {
        assert_eq!(rig.target_word(word * 8).load(Ordering::Acquire), word as u64 + 1);
    }
    rig.assert_clean();
}

#[test]
fn a_wait_for_room_ends_at_its_bound_and_says_what_it_waited_for() {
    let config = RigConfig { sizes: sizes(128, false), ..RigConfig::default() };
    let Some(rig) = Rig::new(config) else { return };
    rig.client.lock().inject(Fault::Stall { qpn: rig.queue.qpn() }).unwrap();
    let wait = Wait::new(Duration::from_millis(20));
    for group in 0..4 {
        assert_eq!(rig.signal_words(group * 32, 1, 32, &wait), status::OK);
    }
    assert_eq!(rig.signal_words(0, 1, 2, &wait), status::TIMEOUT);
    let error = wait.error();
    assert_eq!((error.tag, error.reason, error.observed, error.expected), (32, 1, 0, 2));
    // The hole that was left takes the queue out of service for all posters immediately.
    assert_eq!(rig.signal_words(0, 1, 1, &Wait::patient()), status::TIMEOUT);
    assert_eq!(rig.quiet(&Wait::patient()), status::TIMEOUT);
    rig.recover();
    assert_eq!(rig.signal_words(9, 77, 1, &Wait::patient()), status::OK);
    assert_eq!(rig.quiet(&Wait::patient()), status::OK);
    assert_eq!(rig.target_word(72).load(Ordering::Acquire), 77);
}

#[test]
fn the_host_can_end_a_wait() {
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    rig.client.lock().inject(Fault::Stall { qpn: rig.queue.qpn() }).unwrap();
    let mask = AtomicU32::new(0);
    let wait = Wait::patient().with_abort(&mask);
    assert_eq!(rig.signal(0, 1, &wait), status::OK);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let wait = Wait::patient().with_abort(&mask);
            (rig.quiet(&wait), wait.error().reason)
        });
        std::thread::sleep(Duration::from_millis(5));
        mask.store(1, Ordering::Relaxed);
        assert_eq!(waiting.join().unwrap(), (status::ABORTED, 2));
    });
}

#[test]
fn a_lost_doorbell_is_made_good_by_the_next_one() {
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    let qpn = rig.queue.qpn();
    rig.client.lock().inject(Fault::DropDoorbells { qpn, num: 1 }).unwrap();
    let wait = Wait::patient();
    assert_eq!(rig.signal(0, 5, &wait), status::OK);
    // One poll suffices to lose it, by this thread or by the NIC itself.
    rig.client.lock().progress();
    assert_eq!(rig.target_word(0).load(Ordering::Acquire), 0);
    assert_eq!(rig.signal(8, 6, &wait), status::OK);
    assert_eq!(rig.quiet(&wait), status::OK);
    assert_eq!(rig.target_word(0).load(Ordering::Acquire), 5);
    assert_eq!(rig.target_word(8).load(Ordering::Acquire), 6);

    rig.client.lock().inject(Fault::DropDoorbells { qpn, num: 1 }).unwrap();
    let wait = Wait::new(Duration::from_millis(50));
    assert_eq!(rig.signal(0, 7, &wait), status::OK);
    assert_eq!(rig.quiet(&wait), status::TIMEOUT);
    let error = wait.error();
    assert_eq!((error.tag, error.observed, error.expected), (34, 2, 3));
}

#[test]
fn a_nic_that_reads_the_record_alone_finds_everything() {
    let nic = NicConfig { doorbell: DoorbellMode::Record, ..strict() };
    let Some(rig) = Rig::new(RigConfig { nic, ..RigConfig::default() }) else { return };
    let wait = Wait::patient();
    for word in 0..500 {
        assert_eq!(rig.signal_words(word, word + 1, 1, &wait), status::OK);
    }
    assert_eq!(rig.quiet(&wait), status::OK);
    for word in 0..500 {
        assert_eq!(rig.target_word(word * 8).load(Ordering::Acquire), word as u64 + 1);
    }
    rig.assert_clean();
}

/// A reader that sees the flag finds the bytes, whatever the NIC delays, splits and reorders.
#[test]
fn an_add_is_seen_after_the_puts_before_it() {
    let torn = put_then_flag(Access::ALL, Flag::Add);
    assert_eq!(torn, Some(0));
    let relaxed = Access::ALL.and(Access::RELAXED_ORDERING);
    assert_eq!(put_then_flag(relaxed, Flag::Add).unwrap_or(0), 0);
}

#[test]
fn a_signal_is_seen_after_the_puts_before_it_unless_memory_is_relaxed() {
    let Some(torn) = put_then_flag(Access::ALL, Flag::Signal) else { return };
    assert_eq!(torn, 0);
    // The model would show it.
    let relaxed = Access::ALL.and(Access::RELAXED_ORDERING);
    assert_ne!(put_then_flag(relaxed, Flag::Signal), Some(0));
}

#[derive(Clone, Copy, PartialEq)]
enum Flag {
    Add,
    Signal,
}

/// Rounds in which the flag came before the bytes.
fn put_then_flag(target_access: Access, flag: Flag) -> Option<u64> {
    const ROUNDS: u64 = 300;
    const COUNTER: usize = 512 << 10;
    let seed = fresh_seed();
    let sizes = QueueSizes { max_message_bytes: 3000, ..sizes(128, true) };
    let nic = adversarial(seed);
    let config = RigConfig { nic, sizes, target_access, ..RigConfig::default() };
    let rig = Rig::new(config)?;
    let acknowledged = AtomicU64::new(0);
    let torn = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let mut torn = 0;
            for round in 1..=ROUNDS {
                let start = Instant::now();
                while rig.target_word(COUNTER).load(Ordering::Acquire) < round {
                    assert!(start.elapsed() < PATIENCE, "round {round} did not arrive");
                    std::thread::yield_now();
                }
                let len = length(seed, round);
                torn += u64::from(mismatch(&rig.target, 0, len, seed ^ round).is_some());
                acknowledged.store(round, Ordering::Release);
            }
            torn
        });
        let wait = Wait::patient();
        for round in 1..=ROUNDS {
            let len = length(seed, round);
            fill(&rig.source, 0, len, seed ^ round);
            let status = if flag == Flag::Add {
                rig.put_add(0, len as u64, COUNTER as u64, &wait)
            } else {
                let put = rig.put(0, len as u64, &wait);
                assert_eq!(put, status::OK);
                rig.signal(COUNTER as u64, round, &wait)
            };
            assert_eq!(status, status::OK, "{:?}", wait.error());
            while acknowledged.load(Ordering::Acquire) < round && !receiver.is_finished() {
                std::thread::yield_now();
            }
            // The source may be reused only now.
            assert_eq!(rig.quiet(&wait), status::OK);
        }
        receiver.join().unwrap()
    });
    rig.assert_clean();
    println!("{torn} of {ROUNDS} rounds were torn");
    Some(torn)
}

fn length(seed: u64, round: u64) -> usize {
    SmallRng::seed_from_u64(seed.wrapping_add(round)).random_range(1..=6000) * 8
}

#[test]
fn what_was_got_is_there_after_quiet() {
    let seed = fresh_seed();
    let mut rng = SmallRng::seed_from_u64(seed);
    for is_collapsed in [true, false] {
        let sizes = QueueSizes { max_message_bytes: 5000, ..sizes(128, is_collapsed) };
        let config = RigConfig { nic: adversarial(seed), sizes, ..RigConfig::default() };
        let Some(rig) = Rig::new(config) else { return };
        let wait = Wait::patient();
        for round in 0..60 {
            let len = rng.random_range(1..=20_000) * 8;
            let offset = rng.random_range(0..=(common::DATA_BYTES - len) / 8) * 8;
            fill(&rig.target, offset, len, seed ^ round);
            fill(&rig.source, offset, len, !seed);
            assert_eq!(rig.get(offset as u64, len as u64, &wait), status::OK);
            let status = if round % 2 == 0 {
                rig.quiet(&wait)
            } else {
                let (local, lkey) = (rig.source_keys.address, rig.source_keys.lkey);
                // SAFETY: handle and bound are valid.
                unsafe { (rig.driver.quiet_gets)(rig.handle(), local, lkey, wait.as_ptr()) }
            };
            assert_eq!(status, status::OK, "{:?}", wait.error());
            assert_eq!(mismatch(&rig.source, offset, len, seed ^ round), None);
        }
        rig.assert_clean();
    }
}

#[test]
fn adds_of_both_widths_from_many_warps_sum_up() {
    let seed = fresh_seed();
    let config = RigConfig { nic: adversarial(seed), ..RigConfig::default() };
    let Some(rig) = Rig::new(config) else { return };
    rig.target_word(0).store(u64::MAX - 10, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let rig = &rig;
            scope.spawn(move || {
                let wait = Wait::patient();
                let (rkey, base) = (rig.target_keys.rkey, rig.target_keys.address);
                for value in 1..=100 {
                    assert_eq!(rig.add8(0, value, &wait), status::OK);
                    // SAFETY: handle and bound are valid.
                    let status = unsafe {
                        (rig.driver.add4)(rig.handle(), base + 12, rkey, value, wait.as_ptr())
                    };
                    assert_eq!(status, status::OK);
                }
                assert_eq!(rig.quiet(&wait), status::OK);
            });
        }
    });
    let sum = 4 * 5050;
    assert_eq!(rig.target_word(0).load(Ordering::Acquire), sum - 11);
    // The narrow add leaves its neighbour alone.
    assert_eq!(rig.target_word(8).load(Ordering::Acquire), sum << 32);
    let wait = Wait::patient();
    assert_eq!(rig.add8(4, 1, &wait), status::ARGUMENT);
    rig.assert_clean();
}

/// A refused call posts nothing, not even a part: no flag comes without its payload.
#[test]
fn arguments_that_make_no_sense_are_refused_and_post_nothing() {
    const COUNTER: u64 = 512 << 10;
    for max_message_bytes in [1 << 30, 4096] {
        let sizes = QueueSizes { max_message_bytes, ..QueueSizes::default() };
        let Some(rig) = Rig::new(RigConfig { sizes, ..RigConfig::default() }) else { return };
        let wait = Wait::patient();
        // Differences that went below 0, by little and by much, and the least that is too long.
        let below: [u64; 4] = [1, u64::from(max_message_bytes), 5 << 30, 1 << 40];
        for bytes in below.map(u64::wrapping_neg).into_iter().chain([1 << 63, (1 << 48) + 1]) {
            let found = [
                rig.put(0, bytes, &wait),
                rig.get(0, bytes, &wait),
                rig.put_add(0, bytes, COUNTER, &wait),
            ];
            assert_eq!(found, [status::ARGUMENT; 3], "{bytes:#x} bytes");
        }
        assert_eq!(rig.put_add(0, 8, COUNTER + 4, &wait), status::ARGUMENT);
        let (source, target) = (rig.source_keys, rig.target_keys);
        for num_bytes in [max_message_bytes + 1, u32::MAX] {
            // SAFETY: handle and bound are valid; addresses are checked by the NIC.
            let found = unsafe {
                (rig.driver.put_imm)(
                    rig.handle(),
                    source.address,
                    source.lkey,
                    target.address,
                    target.rkey,
                    num_bytes.into(),
                    7,
                    wait.as_ptr(),
                )
            };
            assert_eq!(found, status::ARGUMENT, "{num_bytes} bytes with immediate data");
        }
        for offset in [1, 4, 7] {
            assert_eq!(rig.signal(offset, 1, &wait), status::ARGUMENT);
            assert_eq!(rig.add8(offset, 1, &wait), status::ARGUMENT);
            assert_eq!(rig.add_fields(offset, 1, 0, &wait), status::ARGUMENT);
        }
        for offset in [1, 2, 7] {
            let word = target.address + offset;
            // SAFETY: as above.
            let found =
                unsafe { (rig.driver.add4)(rig.handle(), word, target.rkey, 1, wait.as_ptr()) };
            assert_eq!(found, status::ARGUMENT, "a 32-bit add at {offset}");
        }
        assert_eq!(rig.queue.reserved(), 0);
        // The queue goes on.
        fill(&rig.source, 0, 4096, 1);
        assert_eq!(rig.put_add(0, 4096, COUNTER, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
        assert_eq!(rig.target_word(COUNTER as usize).load(Ordering::Acquire), 1);
        assert_eq!(mismatch(&rig.target, 0, 4096, 1), None);
        rig.assert_clean();
    }
}

/// Fields of random widths in one word. Four warps add to it in parallel, and each field wraps on its own.
#[test]
fn adds_to_fields_of_a_word_do_not_carry_into_their_neighbours() {
    const ADDS: u64 = 50;
    let seed = fresh_seed();
    let mut rng = SmallRng::seed_from_u64(seed);
    let config = RigConfig { nic: adversarial(seed), ..RigConfig::default() };
    let Some(rig) = Rig::new(config) else { return };
    for round in 0..20 {
        // The last bit of each field.
        let boundary: u64 = if round == 0 { 0 } else { rng.random::<u64>() & rng.random::<u64>() };
        let (before, value): (u64, u64) = (rng.random(), rng.random());
        rig.target_word(0).store(before, Ordering::Relaxed);
        rig.target_word(8).store(!before, Ordering::Relaxed);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let wait = Wait::patient();
                    for _ in 0..ADDS {
                        assert_eq!(rig.add_fields(0, value, boundary, &wait), status::OK);
                    }
                    assert_eq!(rig.quiet(&wait), status::OK);
                });
            }
        });
        let mut first = 0;
        for last in (0..64).filter(|bit| *bit == 63 || boundary >> bit & 1 == 1) {
            let field = |word: u64| word << (63 - last) >> (63 - last) >> first;
            let expected = field(before).wrapping_add(field(value).wrapping_mul(4 * ADDS));
            let expected = expected << first << (63 - last) >> (63 - last) >> first;
            let found = field(rig.target_word(0).load(Ordering::Acquire));
            assert_eq!(found, expected, "bits {first} to {last} of boundary {boundary:#x}");
            first = last + 1;
        }
        assert_eq!(rig.target_word(8).load(Ordering::Acquire), !before, "the next word");
    }
    assert_eq!(rig.add_fields(4, 1, 0, &Wait::patient()), status::ARGUMENT);
    rig.assert_clean();
}

#[test]
fn handles_that_make_no_sense_are_named() {
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    let good = *rig.queue.handle();
    let check = |handle: &switchyard_softnic::abi::QueueHandle| {
        // SAFETY: a pointer to a handle.
        unsafe { rig.driver.check(std::ptr::from_ref(handle).cast()) }
    };
    assert_eq!(check(&good), None);
    type Change = fn(&mut switchyard_softnic::abi::QueueHandle);
    let broken: [(&str, Change); 9] = [
        ("sq_depth", |h| h.sq_depth = 64),
        ("sq_depth", |h| h.sq_depth = 65_536),
        ("sq_depth", |h| h.sq_depth = 1000),
        ("cq_depth", |h| h.cq_depth = 64),
        ("sq ", |h| h.sq += 8),
        ("doorbell", |h| h.doorbell = 0),
        ("batch", |h| h.batch = h.sq_depth),
        ("max_message_bytes", |h| h.max_message_bytes = 0),
        ("qpn", |h| h.qpn = 1 << 24),
    ];
    for (what, change) in broken {
        let mut handle = good;
        change(&mut handle);
        let found = check(&handle).unwrap_or_default();
        assert!(found.contains(what), "{what}: {found:?}");
    }
}
