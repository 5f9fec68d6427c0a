//! Device functions with one thing wrong: the model must notice, or it is said here why it cannot.

use crate::common;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Groups, Rig, RigConfig, Wait, adversarial, fresh_seed, named, shows, status};
use softnic_driver::{Driver, Immediate};
use switchyard_softnic::abi::QueueState;
use switchyard_softnic::format::{CQE_BYTES, Cqe, CqeKind, Syndrome};
use switchyard_softnic::{Access, Fault, NicConfig, QueueSizes};

/// Mutants that no run on a processor can catch, and why.
const NOT_CATCHABLE: [(&str, &str); 2] = [
    (
        "no_fence_before_record",
        "x86-64 keeps stores in order, so the fence is a compiler barrier there; on a GPU the step \
         `mlx5` of `cargo xtask test` looks for the fences in the PTX",
    ),
    ("no_fence_before_doorbell", "the same"),
];

/// Receives of the other side, and completions of them.
const RECV_DEPTH: u32 = 4;
/// Time limit of a mutant, which may hang.
const LIMIT: Duration = Duration::from_secs(3);
/// Time limit of the device functions themselves, which a busy machine may delay.
const PRODUCT_LIMIT: Duration = Duration::from_secs(60);

type Stage = (&'static str, fn(&Rig, Duration) -> Result<(), String>);

const STAGES: [Stage; 11] = [
    ("receives", receives),
    ("failed receives", failed_receives),
    ("foreign receives", foreign_receives),
    ("order", order),
    ("failure", failure),
    ("foreign", foreign),
    ("owner", owner),
    ("owned elsewhere", owned_elsewhere),
    ("late writer", late_writer),
    ("stall", stall),
    ("contention", contention),
];

/// How a variant shows that something is wrong with it. All see the same work.
fn symptom(variant: &'static str, limit: Duration) -> Option<Result<(), String>> {
    let seed = fresh_seed();
    for is_collapsed in [true, false] {
        let sizes = QueueSizes { is_collapsed, max_message_bytes: 4096, ..QueueSizes::default() };
        // The other side posts receives again while requests wait for them.
        let nic = NicConfig { rnr_timeout: limit / 4, ..adversarial(seed) };
        let target_access = Access::ALL;
        let config = RigConfig { variant, sizes, nic, recv_depth: RECV_DEPTH, target_access };
        let rig = Rig::new(config)?;
        for (name, stage) in STAGES {
            let result = stage(&rig, limit);
            // Violations that the NICs saw say more than the result.
            for nic in [&rig.client, &rig.server] {
                if let Some(violation) = nic.lock().violations().first() {
                    return Some(Err(format!("{name}: {}", named(violation))));
                }
            }
            if let Err(found) = result {
                return Some(Err(format!("{name}: {found}")));
            }
            rig.recover();
        }
    }
    Some(Ok(()))
}

fn call(what: &str, status: u32) -> Result<(), String> {
    let names = ["ok", "timeout", "aborted", "completion", "desync", "argument"];
    match names.get(status as usize) {
        Some(&"ok") => Ok(()),
        Some(name) => Err(format!("{what}: {name}")),
        None => Err(format!("{what}: {status}")),
    }
}

/// Four warps, enough requests for the 16-bit counters to wrap twice.
fn contention(rig: &Rig, limit: Duration) -> Result<(), String> {
    const GROUPS: u64 = 1100;
    const WORDS: u64 = 4 * 32;
    let result = std::thread::scope(|scope| {
        let warps: Vec<_> = (0..4u64)
            .map(|warp| {
                scope.spawn(move || {
                    let wait = Wait::new(limit);
                    for group in 0..GROUPS {
                        let status = rig.signal_words(warp * 32, group, 32, &wait);
                        call("posting", status)?;
                    }
                    call("quiet", rig.quiet(&wait))
                })
            })
            .collect();
        warps.into_iter().try_for_each(|warp| warp.join().expect("a warp"))
    });
    result?;
    for word in 0..WORDS {
        let found = rig.target_word(word as usize * 8).load(Ordering::Acquire);
        let expected = GROUPS - 1 + word % 32;
        if found != expected {
            return Err("a request was lost or came twice".to_owned());
        }
    }
    Ok(())
}

/// The first group is written only after three more have followed it and a fifth waits for room.
fn late_writer(rig: &Rig, limit: Duration) -> Result<(), String> {
    const GROUP: u64 = 32;
    let gate = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let mut warps = Vec::new();
        for group in 0..5 {
            let gate = (group == 0).then_some(&gate);
            warps.push(scope.spawn(move || {
                let wait = Wait::new(limit);
                call("posting", rig.gated(group * GROUP, 1000, GROUP as u32, gate, &wait))?;
                call("quiet", rig.quiet(&wait))
            }));
            // A mutant may return without having reserved anything, and without an error.
            let (begin, warp) = (Instant::now(), warps.last().expect("a warp"));
            while rig.queue.reserved() < (group + 1) * GROUP
                && rig.queue.error() == 0
                && !warp.is_finished()
                && begin.elapsed() < limit
            {
                std::thread::yield_now();
            }
        }
        // A poster that does not wait for its turn has passed the others by now.
        std::thread::sleep(Duration::from_millis(2));
        gate.store(1, Ordering::Relaxed);
        warps.into_iter().try_for_each(|warp| warp.join().expect("a warp"))
    })?;
    for word in 0..5 * GROUP {
        let found = rig.target_word(word as usize * 8).load(Ordering::Acquire);
        if found != 1000 + word % GROUP {
            return Err("a request was executed before it was written".to_owned());
        }
    }
    Ok(())
}

/// The NIC stands still until the queue is full.
fn stall(rig: &Rig, limit: Duration) -> Result<(), String> {
    let qpn = rig.queue.qpn();
    rig.client.lock().inject(Fault::Stall { qpn }).expect("the queue");
    let num_posted = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let posting = scope.spawn(|| {
            let wait = Wait::new(limit);
            for word in 0..300 {
                call("posting", rig.signal_words(word, word + 1, 1, &wait))?;
                num_posted.fetch_add(1, Ordering::Release);
            }
            call("quiet", rig.quiet(&wait))
        });
        while num_posted.load(Ordering::Acquire) < 128 && !posting.is_finished() {
            std::thread::yield_now();
        }
        // More arrive only if a poster does not wait for room.
        std::thread::sleep(Duration::from_millis(2));
        rig.client.lock().inject(Fault::Resume { qpn }).expect("the queue");
        posting.join().expect("the poster")
    })?;
    for word in 0..300 {
        if rig.target_word(word * 8).load(Ordering::Acquire) != word as u64 + 1 {
            return Err("a request was overwritten in the queue".to_owned());
        }
    }
    Ok(())
}

/// A put of several requests and its flag, in one group.
fn order(rig: &Rig, limit: Duration) -> Result<(), String> {
    const COUNTER: usize = 512 << 10;
    rig.target_word(COUNTER).store(0, Ordering::Relaxed);
    let wait = Wait::new(limit);
    let counter = rig.target_keys.address + COUNTER as u64;
    let addresses = counter..counter + 8;
    // The add fails. That shows which requests ran before it and which did not.
    let (qpn, syndrome) = (rig.queue.qpn(), Syndrome::RemoteOp);
    rig.client.lock().inject(Fault::FailRange { qpn, addresses, syndrome }).expect("the queue");
    common::fill(&rig.source, 0, 40_000, 1);
    common::fill(&rig.target, 0, 40_000, 2);
    call("posting", rig.put_add(0, 40_000, COUNTER as u64, &wait))?;
    let _ = rig.quiet(&wait);
    match common::mismatch(&rig.target, 0, 40_000, 1) {
        None => Ok(()),
        Some(at) => Err(format!("the flag came before byte {at} of what was put before it")),
    }
}

/// A failed request must not count as a successful one.
fn failure(rig: &Rig, limit: Duration) -> Result<(), String> {
    let (qpn, syndrome) = (rig.queue.qpn(), Syndrome::RemoteAccess);
    rig.client.lock().inject(Fault::Fail { qpn, nth: 0, syndrome }).expect("the queue");
    let wait = Wait::new(limit);
    call("posting", rig.signal(0, 1, &wait))?;
    match rig.quiet(&wait) {
        status::COMPLETION => Ok(()),
        status::OK => Err("a failed request passed for a good one".to_owned()),
        other => call("quiet after a failure", other),
    }
}

/// An exclusive owner of the queue and sharing posters alternate; then room and the end of service.
fn owner(rig: &Rig, limit: Duration) -> Result<(), String> {
    const WORDS: u64 = 64;
    let wait = Wait::new(limit);
    let mut next = 1;
    for _ in 0..3 {
        let groups = Groups::new(60, 5, WORDS);
        call("posting as the owner", rig.own_signals(next, &groups, &wait))?;
        for word in 0..WORDS {
            let expected = next + 299 - (299 - word) % WORDS;
            let found = rig.target_word(word as usize * 8).load(Ordering::Acquire);
            if found != expected {
                return Err(format!("word {word} is {found} behind the owner's quiet"));
            }
        }
        next += 300;
        call("sharing", rig.signal_words(WORDS, next, 2, &wait))?;
        call("quiet", rig.quiet(&wait))?;
        if rig.target_word(WORDS as usize * 8).load(Ordering::Acquire) != next {
            return Err("what was posted behind the owner did not arrive".to_owned());
        }
    }
    // The NIC stands still: the queue fills up, and a quiet does not return.
    let qpn = rig.queue.qpn();
    rig.client.lock().inject(Fault::Stall { qpn }).expect("the queue");
    let groups = Groups::new(300, 1, 300);
    let result = std::thread::scope(|scope| {
        let posting = scope.spawn(|| rig.own_signals(1, &groups, &Wait::new(limit)));
        while groups.num_posted.load(Ordering::Acquire) < 128 && !posting.is_finished() {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(2));
        let num_posted = groups.num_posted.load(Ordering::Acquire);
        rig.client.lock().inject(Fault::Resume { qpn }).expect("the queue");
        (posting.join().expect("the poster"), num_posted)
    });
    call("posting as the owner", result.0)?;
    if result.1 != 128 {
        return Err(format!("{} requests were posted on a queue of 128", result.1));
    }
    rig.client.lock().inject(Fault::Stall { qpn }).expect("the queue");
    match rig.own_signals(1, &Groups::new(1, 1, 1), &Wait::new(Duration::from_millis(5))) {
        status::TIMEOUT => {}
        status::OK => return Err("a quiet did not wait for a NIC that stands still".to_owned()),
        found => return call("quiet of a NIC that stands still", found),
    }
    rig.recover();
    // Out of service behind the first group: the third is not posted.
    let groups = Groups::new(6, 1, 6);
    groups.num_allowed.store(1, Ordering::Release);
    let found = std::thread::scope(|scope| {
        let posting = scope.spawn(|| rig.own_signals(1, &groups, &Wait::new(limit)));
        while groups.num_posted.load(Ordering::Acquire) < 1 && !posting.is_finished() {
            std::thread::yield_now();
        }
        let error = rig.state_word(std::mem::offset_of!(QueueState, error));
        error.store(u64::from(status::ABORTED), Ordering::Release);
        groups.num_allowed.store(6, Ordering::Release);
        posting.join().expect("the poster")
    });
    match (found, groups.num_posted.load(Ordering::Acquire)) {
        (status::ABORTED, 2) => Ok(()),
        (found, num) => Err(format!(
            "behind the end of service: {num} requests posted, {}",
            call("the last call", found).err().unwrap_or_default()
        )),
    }
}

/// A sharing poster is in the middle of a group, so the queue has no exclusive owner.
fn owned_elsewhere(rig: &Rig, limit: Duration) -> Result<(), String> {
    let gate = AtomicU32::new(0);
    let found = std::thread::scope(|scope| {
        let sharing = scope.spawn(|| rig.gated(0, 1, 1, Some(&gate), &Wait::new(limit)));
        let begin = Instant::now();
        while rig.queue.reserved() == 0 && !sharing.is_finished() && begin.elapsed() < limit {
            std::thread::yield_now();
        }
        let found = rig.own_signals(5, &Groups::new(1, 1, 1), &Wait::new(limit / 8));
        gate.store(1, Ordering::Relaxed);
        (found, sharing.join().expect("the other"))
    });
    match found {
        (status::ARGUMENT, shared) => call("sharing", shared),
        (found, _) => Err(format!(
            "a queue in the middle of a group was given away: {}",
            call("posting", found).err().unwrap_or_default()
        )),
    }
}

/// A completion of a receive must not count as one of a request: its counter has another meaning.
fn foreign(rig: &Rig, limit: Duration) -> Result<(), String> {
    let qpn = rig.queue.qpn();
    rig.client.lock().inject(Fault::Stall { qpn }).expect("the queue");
    let wait = Wait::new(limit);
    call("posting", rig.signal(0, 1, &wait))?;
    let mut cqe = [0; CQE_BYTES];
    // Behind 16 bits of counter and the signature: WRITE with immediate data, of the first round.
    cqe[CQE_BYTES - 1] = 0x1 << 4;
    let to = rig.queue.handle().cq as *mut [u8; CQE_BYTES];
    // SAFETY: the first entry of this queue's completions, which the NIC leaves alone while it stands still.
    unsafe { to.write_volatile(cqe) };
    let found = rig.quiet(&wait);
    rig.client.lock().inject(Fault::Resume { qpn }).expect("the queue");
    match found {
        status::DESYNC if (rig.queue.error() >> 24) as u8 == 0x1 => Ok(()),
        status::OK => Err("a completion of a receive passed for one of a request".to_owned()),
        other => call("a completion of a receive", other),
    }
}

/// Immediate data in several rounds of the ring, taken and its receives posted again.
fn receives(rig: &Rig, limit: Duration) -> Result<(), String> {
    let (wait, receives) = (Wait::new(limit), rig.receives(RECV_DEPTH));
    let qpn = rig.remote_queue.qpn();
    for round in 0..4 {
        for number in 0..RECV_DEPTH {
            let imm = round * 100 + number;
            call("posting", rig.put_imm(8 + u64::from(number), imm, &wait))?;
        }
        call("quiet", rig.quiet(&wait))?;
        for number in 0..RECV_DEPTH {
            let expected = Immediate { qpn, imm: round * 100 + number, num_bytes: 8 + number };
            match receives.take(&wait) {
                Ok(taken) if taken == expected => {}
                Ok(taken) => return Err(format!("{taken:?} was taken, {expected:?} was sent")),
                Err(status) => return call("taking", status),
            }
        }
        if let Some(taken) = receives.try_take() {
            return Err(format!("{taken:?} was taken twice"));
        }
        if receives.error() != 0 {
            return Err("what was taken before passes for something new".to_owned());
        }
    }
    Ok(())
}

/// Receives of a queue pair that has failed are no immediate data.
fn failed_receives(rig: &Rig, limit: Duration) -> Result<(), String> {
    let (wait, receives) = (Wait::new(limit), rig.receives(RECV_DEPTH));
    // A refused access takes both ends out of service.
    let (remote, rkey) = (rig.target_keys.address, rig.target_keys.rkey ^ 1);
    // SAFETY: the handle and the bound are valid; addresses are checked by the NIC.
    let posted = unsafe { (rig.driver.signal)(rig.handle(), remote, rkey, 1, wait.as_ptr()) };
    call("posting", posted)?;
    match receives.take(&wait) {
        Err(status::COMPLETION) if (receives.error() >> 8) as u8 == Syndrome::Flushed as u8 => {}
        Ok(taken) => return Err(format!("{taken:?} was taken out of a flushed receive")),
        Err(status) => return call("a flushed receive", status),
    }
    let _ = rig.quiet(&wait);
    Ok(())
}

/// Completions that are not of the next receive of this queue pair.
fn foreign_receives(rig: &Rig, limit: Duration) -> Result<(), String> {
    let qpn = rig.remote_queue.qpn();
    let good = Cqe {
        status: Ok(CqeKind::WriteImm(7)),
        qpn,
        opcode: 0,
        counter: 0,
        num_bytes: 8,
        is_receive: true,
    };
    let cases = [
        ("another opcode", Cqe { status: Ok(CqeKind::Request), ..good }),
        ("another queue pair", Cqe { qpn: qpn + 1, ..good }),
        ("another receive", Cqe { counter: 1, ..good }),
    ];
    for (what, cqe) in cases {
        let receives = rig.receives(RECV_DEPTH);
        receives.forge(0, &cqe);
        match receives.take(&Wait::new(limit)) {
            Err(status::DESYNC) => {}
            Ok(_) => return Err(format!("a completion of {what} was taken")),
            Err(status) => return call(&format!("a completion of {what}"), status),
        }
        rig.recover();
    }
    Ok(())
}

#[test]
fn the_device_functions_themselves_show_nothing() {
    if let Some(result) = symptom("product", PRODUCT_LIMIT) {
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn only_what_is_named_is_a_symptom() {
    let expected = "stall: violation Overrun or overwritten in the queue";
    assert!(shows(expected, "stall: violation Overrun: queue pair 0x40: 129 blocks"));
    assert!(shows(expected, "stall: a request was overwritten in the queue"));
    assert!(!shows(expected, "order: violation Overrun: queue pair 0x40: 129 blocks"));
    assert!(!shows(expected, "stall: quiet: timeout"));
    // The result of a stage on a busy machine that differs from the expected one, and the stage.
    assert!(!shows("contention: posting", "contention: posting: timeout"));
    assert!(shows("contention: posting: timeout", "contention: posting: timeout"));
    assert!(!shows("contention: posting: timeout", "contention: quiet: timeout"));
}

#[test]
fn every_mutant_shows_or_is_listed() {
    common::check_mutants(Driver::mutants(), &NOT_CATCHABLE, LIMIT, symptom);
}
