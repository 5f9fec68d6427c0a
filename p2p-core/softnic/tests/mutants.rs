//! Device functions with one thing wrong: the model must notice, or it is said here why it cannot.

mod common;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Rig, RigConfig, Wait, adversarial, fresh_seed, status};
use softnic::format::{CQE_BYTES, Syndrome};
use softnic::{Access, Fault, QueueSizes};
use softnic_driver::Driver;

/// Mutants that no run on a processor can catch, and why.
const NOT_CATCHABLE: [(&str, &str); 2] = [
    (
        "no_fence_before_record",
        "x86-64 keeps stores in order, so the fence is a compiler barrier there; on a GPU the step \
         `mlx5` of `cargo xtask test` looks for the fences in the PTX",
    ),
    ("no_fence_before_doorbell", "the same"),
];

/// Of a mutant, which may hang.
const LIMIT: Duration = Duration::from_secs(3);
/// Of the device functions themselves, which a busy machine may keep waiting.
const PRODUCT_LIMIT: Duration = Duration::from_secs(60);

/// How a variant shows that something is wrong with it. All see the same work.
fn symptom(variant: &'static str) -> Option<Result<(), String>> {
    let seed = fresh_seed();
    let limit = if variant == "product" { PRODUCT_LIMIT } else { LIMIT };
    for is_collapsed in [true, false] {
        let sizes = QueueSizes { is_collapsed, max_message_bytes: 4096, ..QueueSizes::default() };
        let config =
            RigConfig { variant, sizes, nic: adversarial(seed), target_access: Access::ALL };
        let rig = Rig::new(config)?;
        for stage in [order, failure, foreign, late_writer, stall, contention] {
            let result = stage(&rig, limit);
            // What the NIC saw says more than what came of it.
            if let Some(violation) = rig.client.lock().violations().first() {
                return Some(Err(violation.to_string()));
            }
            if result.is_err() {
                return Some(result);
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
        // Who does not wait for the turn has gone ahead by now.
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
        // More come now only if nobody waits for room.
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
    // The add fails, so that it shows what ran before it and what did not.
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

/// A request that fails must not pass for one that succeeded.
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

/// A completion of a receive must not pass for one of a request, whose counter means something else.
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
        other => Err(format!("a completion of a receive: status {other}")),
    }
}

#[test]
fn the_device_functions_themselves_show_nothing() {
    if let Some(result) = symptom("product") {
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn every_mutant_shows_or_is_listed() {
    common::check_mutants(Driver::mutants(), &NOT_CATCHABLE, symptom);
}
