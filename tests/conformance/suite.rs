//! The contract of every transport, as scripts for two parties.
//!
//! A script runs on both sides of one fresh channel, in two threads or in two processes. Both derive the same
//! random sequence from the seed. The receiving side therefore knows the expected data without the transport under
//! test.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use p2p_core::channel::ChannelError;
use p2p_core::endpoint::{PostError, Transport};
use p2p_core::slot::{CONSUMED, PROGRESS, PUBLISHED, WAITING};
use p2p_core::wait::{SpinPolicy, WaitSet, wait_until};
use p2p_core::{Channel, Region, RemoteRange};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Party {
    A,
    B,
}

pub type Script<E> = fn(Party, Channel<E>, u64);

pub fn scripts<E: Transport>() -> Vec<(&'static str, Script<E>)> {
    vec![
        ("put, get, fence, quiet and flags", operations),
        ("accesses beyond the slot", bounds),
        ("frames of all sizes, in order, under load", frames_under_load),
        ("credits", credits),
        ("desynchronised counters", desync),
        ("wake-ups", wake_ups),
        ("large counters", large_counters),
        ("empty frames", empty_frames),
    ]
}

const POISON: u8 = 0xa5;
const LIMIT: Duration = Duration::from_secs(60);

fn operations<E: Transport>(party: Party, mut channel: Channel<E>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let frame_bytes = channel.layout().frame_bytes();
    let mut lens = vec![0, 1, 7, 8, 63, 64, 65, 4095, 4096, frame_bytes];
    lens.extend((0..40).map(|_| rng.random_range(0..=frame_bytes)));
    let source = Region::anonymous(frame_bytes).unwrap();
    let back = Region::anonymous(frame_bytes).unwrap();
    channel.endpoint_mut().register(&source).unwrap();
    channel.endpoint_mut().register(&back).unwrap();
    for (round, len) in lens.into_iter().enumerate() {
        let round = round as u64;
        let offset = rng.random_range(0..=frame_bytes - len);
        let mut expected = vec![0; len];
        rng.fill_bytes(&mut expected);
        if party == Party::B {
            fill(channel.local_slot(), 0, frame_bytes, POISON);
            meet(&mut channel);
            meet(&mut channel);
            let mut found = vec![0; frame_bytes];
            load(channel.local_slot(), 0, &mut found);
            assert_eq!(&found[offset..offset + len], &expected, "round {round}, seed {seed}");
            assert!(
                found[..offset].iter().chain(&found[offset + len..]).all(|b| *b == POISON),
                "round {round} wrote beside its range, seed {seed}"
            );
            meet(&mut channel);
        } else {
            store(&source, 0, &expected);
            meet(&mut channel);
            let key = channel.remote_key();
            let end = channel.endpoint_mut();
            // Two halves with a fence between them, or one put.
            let cut = if round.is_multiple_of(2) { len } else { len / 2 };
            for (start, part) in [(0, cut), (cut, len - cut)] {
                let dst = RemoteRange { key, offset: offset + start, len: part };
                // SAFETY: `source` is written again only after the quiet below.
                unsafe { end.put(dst, source.range(start, part).unwrap()).unwrap() };
                end.fence().unwrap();
            }
            end.quiet(Instant::now() + LIMIT).unwrap();
            // SAFETY: `back` is read only after the quiet below.
            unsafe {
                end.get(back.range(0, len).unwrap(), RemoteRange { key, offset, len }).unwrap();
            }
            end.quiet(Instant::now() + LIMIT).unwrap();
            let mut found = vec![0; len];
            load(&back, 0, &mut found);
            assert_eq!(found, expected, "get in round {round}, seed {seed}");
            meet(&mut channel);
            meet(&mut channel);
        }
    }
}

fn bounds<E: Transport>(party: Party, mut channel: Channel<E>, _seed: u64) {
    let slot_bytes = channel.layout().slot_bytes();
    fill(channel.local_slot(), 0, channel.layout().control_offset(PUBLISHED), POISON);
    meet(&mut channel);
    if party == Party::A {
        let source = Region::anonymous(4096).unwrap();
        channel.endpoint_mut().register(&source).unwrap();
        let key = channel.remote_key();
        let end = channel.endpoint_mut();
        for (offset, len) in [
            (slot_bytes - 1, 2),
            (slot_bytes, 1),
            (usize::MAX, 1),
            (usize::MAX - 7, 4096),
            (1 << 40, 8),
        ] {
            // SAFETY: `source` is never written.
            let put =
                unsafe { end.put(RemoteRange { key, offset, len }, source.range(0, len).unwrap()) };
            assert!(matches!(put, Err(PostError::RemoteRange { .. })), "put at {offset}: {put:?}");
            // SAFETY: `source` is not read.
            let get =
                unsafe { end.get(source.range(0, len).unwrap(), RemoteRange { key, offset, len }) };
            assert!(matches!(get, Err(PostError::RemoteRange { .. })), "get at {offset}: {get:?}");
        }
        for offset in [slot_bytes, slot_bytes - 4, usize::MAX - 7] {
            let add = end.add_flag(RemoteRange { key, offset, len: 8 }, 1);
            assert!(add.is_err(), "flag at {offset}");
        }
        for offset in [1, 4, slot_bytes - 9] {
            let add = end.add_flag(RemoteRange { key, offset, len: 8 }, 1);
            assert!(matches!(add, Err(PostError::Misaligned { .. })), "flag at {offset}: {add:?}");
        }
        end.quiet(Instant::now() + LIMIT).unwrap();
    }
    meet(&mut channel);
    let mut found = vec![0; channel.layout().control_offset(PUBLISHED)];
    load(channel.local_slot(), 0, &mut found);
    assert!(found.iter().all(|b| *b == POISON));
    assert_eq!([word(&channel, PUBLISHED), word(&channel, CONSUMED)], [0, 0]);
}

fn frames_under_load<E: Transport>(party: Party, mut channel: Channel<E>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let frame_bytes = channel.layout().frame_bytes();
    let mut lens = Vec::new();
    let mut power = 1;
    while power <= frame_bytes {
        lens.extend([power - 1, power, (power + 1).min(frame_bytes)]);
        power *= 2;
    }
    lens.extend((0..600).map(|_| {
        let most = if rng.random_range(0..4) == 0 { frame_bytes } else { 512 };
        rng.random_range(0..=most)
    }));
    let (set, policy) = waiter(&channel, SpinPolicy::default());
    if party == Party::B {
        fill(channel.local_slot(), 0, channel.layout().control_offset(PUBLISHED), POISON);
    }
    meet(&mut channel);
    let mut held = Vec::new();
    for (seq, len) in lens.into_iter().enumerate() {
        let mut expected = vec![0; len];
        rng.fill_bytes(&mut expected);
        if party == Party::A {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_reserve().unwrap());
            assert_eq!(frame.seq(), seq as u64);
            channel.write_view(&frame).put_bytes(0, &expected).unwrap();
            channel.publish(frame, len).unwrap();
        } else {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_next().unwrap());
            assert_eq!(frame.seq(), seq as u64);
            let mut found = vec![0; len];
            channel.view(&frame).copy_to(0, &mut found).unwrap();
            let first_wrong = (0..len).find(|at| found[*at] != expected[*at]);
            assert_eq!(first_wrong, None, "in frame {seq} of {len} bytes, seed {seed}");
            let offset = channel.layout().frame_offset(frame.seq());
            fill(channel.local_slot(), offset, frame_bytes, POISON);
            held.push(frame);
            if held.len() == channel.layout().num_frames() || rng_bit(seq) {
                for _ in held.drain(..) {
                    channel.release().unwrap();
                }
            }
        }
    }
    // Neither side leaves while the other may still send.
    meet(&mut channel);
}

fn credits<E: Transport>(party: Party, mut channel: Channel<E>, _seed: u64) {
    let num_frames = channel.layout().num_frames() as u64;
    let (set, policy) = waiter(&channel, SpinPolicy::default());
    for round in 0..5u64 {
        if party == Party::A {
            for _ in 0..num_frames {
                let frame = channel.try_reserve().unwrap().expect("credit");
                channel.publish(frame, 16).unwrap();
            }
            assert!(channel.try_reserve().unwrap().is_none(), "no credit is left");
            assert_eq!(channel.in_flight(), num_frames);
        }
        meet(&mut channel);
        if party == Party::B {
            // Held frames give no credit, and frames come back one by one.
            let first = wait_for(&set, policy, &mut channel, |c| c.try_next().unwrap());
            assert_eq!(first.seq(), round * num_frames);
            while channel.held() < num_frames {
                channel.try_next().unwrap().expect("published frame");
            }
            assert!(channel.try_next().unwrap().is_none() && !channel.has_frame());
        }
        meet(&mut channel);
        if party == Party::A {
            assert!(channel.try_reserve().unwrap().is_none(), "held frames give no credit");
        }
        meet(&mut channel);
        if party == Party::B {
            for _ in 0..num_frames {
                channel.release().unwrap();
            }
            assert!(matches!(channel.release(), Err(ChannelError::ReleaseUnderflow)));
        }
        meet(&mut channel);
    }
    if party == Party::A {
        let frame = channel.try_reserve().unwrap().expect("credit");
        let too_long = channel.layout().frame_bytes() + 1;
        assert!(matches!(channel.publish(frame, too_long), Err(ChannelError::Publish { .. })));
        let stale = channel.try_reserve().unwrap().expect("credit");
        let frame = channel.try_reserve().unwrap().expect("the same credit");
        channel.publish(frame, 0).unwrap();
        assert!(matches!(channel.publish(stale, 0), Err(ChannelError::Publish { .. })));
    }
    meet(&mut channel);
}

fn desync<E: Transport>(party: Party, mut channel: Channel<E>, _seed: u64) {
    let num_frames = channel.layout().num_frames() as u64;
    if party == Party::A {
        add(&mut channel, PUBLISHED, num_frames + 1);
    }
    meet(&mut channel);
    if party == Party::B {
        let error = channel.try_next().unwrap_err();
        assert!(matches!(error, ChannelError::Desync(_)), "{error}");
        assert!(error.to_string().contains(&(num_frames + 1).to_string()), "{error}");
    }
    meet(&mut channel);
    // The transport reads the counter when credit runs out, so credit must run out first.
    for _ in 0..num_frames {
        if party == Party::B {
            let frame = channel.try_reserve().unwrap().expect("credit");
            channel.publish(frame, 0).unwrap();
        }
    }
    for jump in [num_frames + 1, 1 << 40, u64::MAX / 2] {
        if party == Party::A {
            add(&mut channel, CONSUMED, jump);
        }
        meet(&mut channel);
        if party == Party::B {
            let error = channel.try_reserve().unwrap_err();
            assert!(matches!(error, ChannelError::Desync(_)), "{error}");
        }
        meet(&mut channel);
    }
}

/// Both sides block at once when there is nothing to read, so each frame needs a wake-up. A lost wake-up shows as a
/// missed deadline.
fn wake_ups<E: Transport>(party: Party, mut channel: Channel<E>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed ^ (party as u64));
    let (set, policy) = waiter(&channel, SpinPolicy { spin: Duration::ZERO });
    // Fewer rounds if a sleep and a wake-up take milliseconds, as in an emulated machine.
    let rounds = std::env::var("SWITCHYARD_TEST_WAKE_UPS")
        .map_or(4000u64, |text| text.parse().expect("a number"));
    for round in 0..rounds {
        for sends in [party == Party::A, party == Party::B] {
            if sends {
                let frame = wait_for(&set, policy, &mut channel, |c| c.try_reserve().unwrap());
                for _ in 0..rng.random_range(0..64) {
                    std::hint::spin_loop();
                }
                channel.write_view(&frame).put_bytes(0, &round.to_le_bytes()).unwrap();
                channel.publish(frame, 8).unwrap();
            } else {
                let frame = wait_for(&set, policy, &mut channel, |c| c.try_next().unwrap());
                let mut found = [0; 8];
                channel.view(&frame).copy_to(0, &mut found).unwrap();
                assert_eq!(u64::from_le_bytes(found), round);
                channel.release().unwrap();
            }
        }
    }
    // In one direction only, so that the writer runs out of credit and sleeps until more arrives.
    for round in 0..rounds {
        if party == Party::A {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_reserve().unwrap());
            channel.publish(frame, 0).unwrap();
        } else {
            wait_for(&set, policy, &mut channel, |c| c.try_next().unwrap());
            if round.is_multiple_of(16) {
                std::thread::yield_now();
            }
            channel.release().unwrap();
        }
    }
    // Neither side leaves while the other may still send.
    meet(&mut channel);
}

fn large_counters<E: Transport>(party: Party, mut channel: Channel<E>, _seed: u64) {
    let start = (1u64 << 63) - 5;
    channel.start_at(start).unwrap();
    let (set, policy) = waiter(&channel, SpinPolicy::default());
    eventually("both counters", &channel, |channel| {
        word(channel, PUBLISHED) >= start && word(channel, CONSUMED) >= start
    });
    meet(&mut channel);
    for round in 0..20u64 {
        if party == Party::A {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_reserve().unwrap());
            assert_eq!(frame.seq(), start + round);
            channel.write_view(&frame).put_bytes(0, &round.to_le_bytes()).unwrap();
            channel.publish(frame, 8).unwrap();
        } else {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_next().unwrap());
            let mut found = [0; 8];
            channel.view(&frame).copy_to(0, &mut found).unwrap();
            assert_eq!((frame.seq(), u64::from_le_bytes(found)), (start + round, round));
            channel.release().unwrap();
        }
    }
    // Neither side leaves while the other may still send.
    meet(&mut channel);
}

fn empty_frames<E: Transport>(party: Party, mut channel: Channel<E>, _seed: u64) {
    let (set, policy) = waiter(&channel, SpinPolicy::default());
    fill(channel.local_slot(), 0, channel.layout().frame_bytes(), POISON);
    meet(&mut channel);
    for _ in 0..10 {
        if party == Party::A {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_reserve().unwrap());
            channel.publish(frame, 0).unwrap();
        } else {
            let frame = wait_for(&set, policy, &mut channel, |c| c.try_next().unwrap());
            let mut found = [0];
            channel.view(&frame).copy_to(0, &mut found).unwrap();
            if frame.seq() == 0 {
                assert_eq!(found, [POISON]);
            }
            channel.release().unwrap();
        }
    }
    // Neither side leaves while the other may still send.
    meet(&mut channel);
}

fn waiter<E: Transport>(channel: &Channel<E>, policy: SpinPolicy) -> (WaitSet, SpinPolicy) {
    let set = WaitSet::new().unwrap();
    set.attach(channel.endpoint()).unwrap();
    (set, policy)
}

fn wait_for<E: Transport, T>(
    set: &WaitSet,
    policy: SpinPolicy,
    channel: &mut Channel<E>,
    mut poll: impl FnMut(&mut Channel<E>) -> Option<T>,
) -> T {
    let channel = std::cell::RefCell::new(channel);
    let deadline = Instant::now() + LIMIT;
    wait_until(
        set,
        policy,
        deadline,
        || poll(&mut channel.borrow_mut()),
        |on| {
            let channel = channel.borrow();
            if on { channel.arm() } else { channel.disarm() }
        },
    )
    .unwrap()
    .expect("a frame or a credit before the deadline: a wake-up was lost")
}

/// Waits until both parties have arrived here.
fn meet<E: Transport>(channel: &mut Channel<E>) {
    channel.bump_progress().unwrap();
    let target = MET.get() + 1;
    MET.set(target);
    eventually("the other party", channel, |channel| word(channel, PROGRESS) >= target);
}

thread_local! {
    /// Number of rendezvous in this thread's current script.
    static MET: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Resets the count. Call it before each script.
pub fn reset_meetings() {
    MET.set(0);
}

/// Waits for an action of the other party, and drives the transport meanwhile. If the transport fails, the wait
/// ends with its error.
fn eventually<E: Transport>(
    what: &str,
    channel: &Channel<E>,
    condition: impl Fn(&Channel<E>) -> bool,
) {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(driver) = channel.endpoint().driver() {
            driver.drive();
        }
        // Read before the check: anything that arrived before the failure counts.
        let health = channel.health();
        if condition(channel) {
            return;
        }
        if let Err(error) = health {
            panic!("while waiting for {what}: {error}");
        }
        assert!(
            Instant::now() < deadline,
            "waited too long for {what}, with no failure reported; words {:?}",
            [PUBLISHED, CONSUMED, PROGRESS].map(|which| word(channel, which))
        );
        std::thread::yield_now();
    }
}

fn add<E: Transport>(channel: &mut Channel<E>, which: usize, value: u64) {
    let dst = RemoteRange {
        key: channel.remote_key(),
        offset: channel.layout().control_offset(which),
        len: 8,
    };
    channel.endpoint_mut().add_flag(dst, value).unwrap();
}

fn word<E: Transport>(channel: &Channel<E>, which: usize) -> u64 {
    assert!(which <= WAITING);
    let offset = channel.layout().control_offset(which);
    // SAFETY: control words are aligned, mapped as long as the channel, and only accessed atomically.
    let word =
        unsafe { AtomicU64::from_ptr(channel.local_slot().as_ptr().add(offset).as_ptr().cast()) };
    word.load(Ordering::Acquire)
}

fn rng_bit(seq: usize) -> bool {
    seq.wrapping_mul(0x9e37_79b9) & 0x80 != 0
}

fn fill(region: &Region, offset: usize, len: usize, byte: u8) {
    assert!(offset + len <= region.len());
    // SAFETY: in range; the other party does not touch it at this point of the script.
    unsafe { region.as_ptr().add(offset).write_bytes(byte, len) }
}

fn store(region: &Region, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= region.len());
    // SAFETY: in range; regions and slices do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(
            bytes.as_ptr(),
            region.as_ptr().add(offset).as_ptr(),
            bytes.len(),
        );
    }
}

fn load(region: &Region, offset: usize, out: &mut [u8]) {
    assert!(offset + out.len() <= region.len());
    // SAFETY: in range; regions and slices do not overlap.
    unsafe {
        std::ptr::copy_nonoverlapping(
            region.as_ptr().add(offset).as_ptr(),
            out.as_mut_ptr(),
            out.len(),
        );
    }
}
