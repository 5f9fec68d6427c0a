//! The NICs of GPUs (`softnic/gpu`), run by a processor: the kernel as fibres of a thread, and the thread that
//! drives copy engines over queues of copies. The tests compare their results with the model in Rust. Posters
//! check the permitted delays and the injected faults.
//!
//! Not covered: the memory and memory order of real GPUs.

mod faults;
pub mod processes;
mod requests;
mod violations;
mod world;

use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::common::raw::{bytes_of, word64};
use crate::common::{PATIENCE, fresh_seed};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use requests::{MOST_REQUESTS, Plan};
use softnic_driver::gpu_nic::{Backend, Counts};
use switchyard_softnic::format::{
    Atomic, CE_ALWAYS, Cqe, FM_FENCE, Local, Operation, Remote, Source, Syndrome, Wqe,
};
use switchyard_softnic::{Adversary, Fault};
use world::{Gpu, MEMORY_BYTES, Model, NUM_RECEIVES, expect_alike, fill_alike};

/// Rounds of each comparison. `SWITCHYARD_GPU_NIC_ROUNDS` asks for more.
const NUM_ROUNDS: usize = 150;

fn num_rounds() -> usize {
    std::env::var("SWITCHYARD_GPU_NIC_ROUNDS")
        .ok()
        .and_then(|num| num.parse().ok())
        .unwrap_or(NUM_ROUNDS)
}

/// Expected and found results.
#[derive(Debug, Clone, Copy)]
struct Case {
    backend: Backend,
    is_collapsed: bool,
    plan: Plan,
    /// Seed of the disorder of the NIC in C++ (0 for none), and that of the NIC in Rust.
    seeds: (u64, Option<u64>),
}

/// Posts batches to both and compares completions, memory and immediate data. Returns the number of actions of the
/// adversary in C++.
fn compare(case: Case, rng: &mut SmallRng) -> Option<Counts> {
    let mut model = Model::new(case.is_collapsed, case.seeds.1.map(|seed| Adversary { seed }));
    let mut gpu = Gpu::new(case.backend, case.is_collapsed, case.seeds.0, &model.names)?;
    let names = model.names;
    let (mut total, mut num_failed, mut num_good) = (Counts::default(), 0, 0);
    let mut num_refused = 0;
    for round in 0..num_rounds() {
        fill_alike(rng, &model.local, &gpu.local);
        fill_alike(rng, &model.remote, &gpu.remote);
        let num = rng.random_range(1..=MOST_REQUESTS);
        // Some peers have too few receives. The test does not compare which of two errors a request meets first.
        let is_short = rng.random_ratio(1, 8);
        let num_receives = if is_short { rng.random_range(0..3) } else { NUM_RECEIVES };
        model.begin(num_receives);
        gpu.nic.fail(gpu.number, 0, 0);
        let mut is_injected = false;
        if rng.random_ratio(1, 6) {
            is_injected = true;
            let nth = rng.random_range(0..num as u64);
            let syndrome = Syndrome::ALL[rng.random_range(0..Syndrome::ALL.len())];
            model.client.inject(Fault::Fail { qpn: names.qpn, nth, syndrome }).unwrap();
            gpu.nic.fail(gpu.number, nth, syndrome as u32);
        }
        let known_violations = model.client.violations().len();
        // Either the NIC reads while requests are written, or all requests exist before it starts.
        let is_live: bool = rng.random();
        gpu.clear(num_receives);
        if is_live {
            gpu.start();
        }
        for position in 0..num {
            let block: [u8; 64] = if is_short || is_injected {
                requests::good(rng, &names, case.plan, position).encode().try_into().unwrap()
            } else {
                requests::random(rng, &names, case.plan, position)
            };
            model.raw.write(&block);
            gpu.raw.write(&block);
            if is_live && rng.random_ratio(1, 4) {
                gpu.raw.ring();
                model.raw.ring();
                model.run();
            }
        }
        gpu.raw.ring();
        if !is_live {
            gpu.start();
        }
        model.raw.ring();
        model.run();
        let counts = gpu.run();

        let context = format!("{case:?}, round {round}");
        // Whether the first failure is a refusal by the peer; not known where completions replace each other.
        let mut is_refused = None;
        if case.is_collapsed {
            assert_eq!(model.raw.last(), gpu.raw.last(), "{context}");
        } else {
            let expected: Vec<Cqe> = std::iter::from_fn(|| model.raw.take()).collect();
            let found: Vec<Cqe> = std::iter::from_fn(|| gpu.raw.take()).collect();
            assert_eq!(found, expected, "{context}");
            let failed = expected.iter().find_map(|cqe| cqe.status.err());
            is_refused = Some(!is_injected && failed == Some(Syndrome::RemoteAccess));
            num_failed += usize::from(expected.iter().any(|cqe| cqe.status.is_err()));
            num_good += usize::from(expected.iter().all(|cqe| cqe.status.is_ok()));
        }
        expect_alike(&format!("{context}: own memory"), &model.local, &gpu.local);
        expect_alike(&format!("{context}: the peer's memory"), &model.remote, &gpu.remote);
        let (arrived, num_flushed) = gpu.arrivals(num_receives);
        assert_eq!(arrived, model.arrivals(), "{context}");
        if let Some(is_refused) = is_refused {
            // Requests to the other peer, behind a refused one, return flushed.
            let num_left = if is_refused { num_receives as usize - arrived.len() } else { 0 };
            assert_eq!(num_flushed, num_left, "{context}");
            num_refused += usize::from(is_refused);
        }
        let violations = &model.client.violations()[known_violations..];
        assert_eq!(counts.num_violations != 0, !violations.is_empty(), "{context} {violations:?}");
        total.num_requests += counts.num_requests;
        total.num_held += counts.num_held;
        total.num_late += counts.num_late;
        total.num_cut += counts.num_cut;
    }
    println!("{case:?}: {total:?}, {num_failed} rounds with failures, {num_good} without");
    assert!(case.is_collapsed || (num_failed > 10 && num_good > 10 && num_refused > 0));
    Some(total)
}

#[test]
fn requests_do_what_they_do_in_rust() {
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    for backend in Backend::ALL {
        for is_collapsed in [false, true] {
            let case = Case { backend, is_collapsed, plan: Plan::Anywhere, seeds: (0, None) };
            let Some(total) = compare(case, &mut rng) else { return };
            assert_eq!((total.num_held, total.num_late, total.num_cut), (0, 0, 0));
        }
    }
}

#[test]
fn disorder_does_not_show_once_everything_is_complete() {
    let seed = fresh_seed();
    let mut rng = SmallRng::seed_from_u64(seed);
    for backend in Backend::ALL {
        for is_collapsed in [false, true] {
            let seeds = (seed | 1, Some(seed));
            let case = Case { backend, is_collapsed, plan: Plan::Apart, seeds };
            let Some(total) = compare(case, &mut rng) else { return };
            assert!(
                total.num_held > 10 && total.num_late > 10 && total.num_cut > 10,
                "{backend:?}: there was hardly any disorder: {total:?}"
            );
        }
    }
}

const PUT_BYTES: usize = 1024;
const NUM_SLOTS: usize = 16;
const FLAGS_AT: usize = MEMORY_BYTES - 64;

/// Puts with a flag behind each, and gets, beside a polling thread: bytes that a flag or a completion reports must
/// be there. Whether pieces of puts become visible in disorder before that is random; the count is printed.
#[test]
fn what_flags_and_completions_announce_is_there() {
    let seed = fresh_seed();
    let mut rng = SmallRng::seed_from_u64(seed);
    for backend in Backend::ALL {
        let model = Model::new(false, None);
        let Some(mut gpu) = Gpu::new(backend, false, seed | 1, &model.names) else { return };
        let (names, mut num_backwards, mut num_cut) = (model.names, 0, 0);
        for round in 0..20 {
            fill_alike(&mut rng, &gpu.local, &gpu.local.clone());
            for at in (0..MEMORY_BYTES).step_by(8) {
                word64(gpu.remote.address(at)).store(0, Ordering::Relaxed);
            }
            gpu.clear(0);
            gpu.start();
            for i in 0..NUM_SLOTS {
                for operation in put_with_flag_and_get(&names, i) {
                    let index = gpu.raw.posted() as u16;
                    // The get waits for nothing that comes later; the put after it may not be fenced.
                    let wqe = Wqe { qpn: names.qpn, index, flags: CE_ALWAYS, operation };
                    gpu.raw.write(&wqe.encode().try_into().unwrap());
                }
            }
            gpu.raw.ring();
            let (mut num_flags, mut num_completions) = (0, 0);
            let start = Instant::now();
            while num_completions < 3 * NUM_SLOTS {
                assert!(start.elapsed() < PATIENCE, "{num_flags} flags, {num_completions} cqes");
                let flags = word64(gpu.remote.address(FLAGS_AT)).load(Ordering::Acquire) as usize;
                for i in num_flags..flags {
                    let source = bytes_of(&gpu.local, i * PUT_BYTES, PUT_BYTES);
                    let found = bytes_of(&gpu.remote, i * PUT_BYTES, PUT_BYTES);
                    assert!(source == found, "round {round}: put {i} is not behind its flag");
                }
                num_flags = num_flags.max(flags);
                if num_flags < NUM_SLOTS {
                    num_backwards += usize::from(is_backwards(&gpu, num_flags));
                }
                while let Some(cqe) = gpu.raw.take() {
                    assert!(cqe.status.is_ok(), "{cqe:?}");
                    if num_completions % 3 == 2 {
                        expect_got(&gpu, num_completions / 3);
                    }
                    num_completions += 1;
                }
            }
            assert_eq!(num_flags.max(NUM_SLOTS), NUM_SLOTS);
            let counts = gpu.run();
            assert_eq!(counts.num_violations, 0, "{counts:?}");
            num_cut += counts.num_cut;
        }
        println!(
            "{backend:?}: {num_cut} puts in pieces, the last seen first {num_backwards} times"
        );
        assert!(num_cut > 0, "{backend:?}: no put came in pieces");
    }
}

/// Slot `i`: put, add to the flags, get of the same bytes.
fn put_with_flag_and_get(names: &world::Names, i: usize) -> [Operation; 3] {
    let local = |offset: usize, num_bytes: usize| Local {
        address: names.local + offset as u64,
        lkey: names.lkey,
        num_bytes: num_bytes as u32,
    };
    let remote =
        |offset: usize| Remote { address: names.remote + offset as u64, rkey: names.rkeys[0] };
    let (from, back) = (i * PUT_BYTES, (NUM_SLOTS + i) * PUT_BYTES);
    [
        Operation::Write(remote(from), Source::Gather(vec![local(from, PUT_BYTES)])),
        Operation::Atomic(remote(FLAGS_AT), Atomic::Add8(1), local(FLAGS_AT, 8)),
        Operation::Read(remote(from), vec![local(back, PUT_BYTES)]),
    ]
}

fn expect_got(gpu: &Gpu, i: usize) {
    let source = bytes_of(&gpu.local, i * PUT_BYTES, PUT_BYTES);
    let found = bytes_of(&gpu.local, (NUM_SLOTS + i) * PUT_BYTES, PUT_BYTES);
    assert!(source == found, "get {i} is complete and its bytes are not there");
}

/// Whether the put to slot `i`, whose target was zeros, is visible with a hole at its front.
fn is_backwards(gpu: &Gpu, i: usize) -> bool {
    // Read the last word first, so that the read of the first word is not older.
    let at = |offset: usize| word64(gpu.remote.address(i * PUT_BYTES + offset));
    let last = at(PUT_BYTES - 8).load(Ordering::Acquire);
    let first = at(0).load(Ordering::Acquire);
    // A word may have arrived between the two reads; then it is not counted.
    last != 0 && first == 0
}

/// A fenced request sees the bytes of earlier gets, whatever lands late.
#[test]
fn fenced_puts_carry_what_gets_brought() {
    let seed = fresh_seed();
    let mut rng = SmallRng::seed_from_u64(seed);
    for backend in Backend::ALL {
        let model = Model::new(false, None);
        let Some(mut gpu) = Gpu::new(backend, false, seed | 1, &model.names) else { return };
        let names = model.names;
        for _ in 0..20 {
            fill_alike(&mut rng, &gpu.remote, &gpu.remote.clone());
            gpu.clear(0);
            gpu.start();
            for i in 0..NUM_SLOTS {
                // From slot i of the peer to here, and from here to slot i of its second half.
                let here = Local {
                    address: names.local + (i * PUT_BYTES) as u64,
                    lkey: names.lkey,
                    num_bytes: PUT_BYTES as u32,
                };
                let there = |slot: usize| Remote {
                    address: names.remote + (slot * PUT_BYTES) as u64,
                    rkey: names.rkeys[0],
                };
                let put = Source::Gather(vec![here]);
                for (operation, flags) in [
                    (Operation::Read(there(i), vec![here]), 0),
                    (Operation::Write(there(NUM_SLOTS + i), put), FM_FENCE | CE_ALWAYS),
                ] {
                    let index = gpu.raw.posted() as u16;
                    let wqe = Wqe { qpn: names.qpn, index, flags, operation };
                    gpu.raw.write(&wqe.encode().try_into().unwrap());
                }
            }
            gpu.raw.ring();
            let counts = gpu.run();
            assert_eq!(counts.num_violations, 0);
            let half = NUM_SLOTS * PUT_BYTES;
            assert!(bytes_of(&gpu.remote, 0, half) == bytes_of(&gpu.remote, half, half));
        }
    }
}
