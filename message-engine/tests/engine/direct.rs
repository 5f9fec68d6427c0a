//! One-sided transfers on the caller's thread, over the transports that allow them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use switchyard_message_engine::engine::{
    Access, CloseReason, DirectWait, Engine, EngineConfig, MemoryRegion, OpError, Span,
    SubmitError, TransferError,
};

use crate::common::{
    Pair, TestTransport, config, contents, memory_of, pair, poisoned, random_bytes, rng, soon,
    until,
};
use crate::hooked::HookedFabric;

/// The transports with a way on the caller's thread.
const DIRECT: [TestTransport; 3] = [TestTransport::Cma, TestTransport::Shm, TestTransport::Tcp];

/// The memory but for the last byte, which `memory_of` adds.
fn all(memory: &MemoryRegion) -> Span {
    memory.span(0, memory.len() - 1).unwrap()
}

#[test]
fn bytes_go_both_ways_on_the_callers_thread() {
    let mut rng = rng();
    for (by, lens) in [
        // The last length is more than one step.
        (TestTransport::Cma, [1, 4096, 1 << 20, (2 << 20) + 77]),
        (TestTransport::Shm, [1, 4096, 70_000, 1 << 20]),
        (TestTransport::Tcp, [1, 4096, 70_000, 1 << 20]),
    ] {
        both_ways(&mut rng, by, &lens);
    }
}

fn both_ways(rng: &mut StdRng, by: TestTransport, lens: &[usize]) {
    let Pair { here, there, out, back } = pair(by);
    for &len in lens {
        let (ours, theirs) = (random_bytes(rng, len), random_bytes(rng, len));
        let (source, target) = (memory_of(&here, &ours), memory_of(&there, &theirs));
        let remote = back.advertise(&all(&target)).unwrap();
        let copy = poisoned(&here, len);
        let read = out.read_directly(&all(&copy), &remote, soon()).expect("a direct copy");
        assert_eq!(read, Ok(len as u64));
        assert_eq!(contents(&copy, 0, len), theirs);
        let written = out.write_directly(&all(&source), &remote, soon()).expect("a direct copy");
        assert_eq!(written, Ok(len as u64));
        assert_eq!(contents(&target, 0, len), ours);
        assert_eq!(contents(&target, len as u64, 1), [0]);
    }
    // A part of a range, and nothing beside it.
    let (source, target) = (memory_of(&here, &[7; 100]), poisoned(&there, 100));
    let remote = back.advertise(&target.span(30, 40).unwrap()).unwrap();
    out.write_directly(&source.span(60, 40).unwrap(), &remote, soon()).unwrap().unwrap();
    assert_eq!(contents(&target, 0, 100), [[0xa5; 30].as_slice(), &[7; 40], &[0xa5; 30]].concat());
}

#[test]
fn long_transfers_are_left_to_the_engines_thread() {
    for by in [TestTransport::Shm, TestTransport::Tcp] {
        let Pair { here, there, out, back } = pair(by);
        let len = (1 << 20) + 1;
        let (source, target) = (memory_of(&here, &vec![7; len]), poisoned(&there, len));
        let remote = back.advertise(&all(&target)).unwrap();
        assert!(out.write_directly(&all(&source), &remote, soon()).is_none(), "{by:?}");
        assert_eq!(contents(&target, 0, len), vec![0xa5; len]);
    }
}

#[test]
fn rights_and_ranges_hold_for_direct_copies() {
    DIRECT.into_iter().for_each(rights_and_ranges);
}

fn rights_and_ranges(by: TestTransport) {
    let Pair { here, there, out, back } = pair(by);
    let source = memory_of(&here, &[7; 100]);
    let readable = there.alloc(100, Access::RemoteRead).unwrap();
    let remote = back.advertise(&readable.whole()).unwrap();
    let refused = out.write_directly(&all(&source), &remote, soon()).unwrap();
    assert!(matches!(refused, Err(OpError::Transfer(TransferError::Fabric { .. }))), "{refused:?}");
    assert_eq!(contents(&readable, 0, 100), [0; 100]);
    let short = out.read_directly(&source.span(0, 99).unwrap(), &remote, soon()).unwrap();
    assert!(matches!(short, Err(OpError::Submit(SubmitError::SizeMismatch { .. }))), "{short:?}");
    let foreign = there.alloc(100, Access::Local).unwrap();
    let foreign = out.read_directly(&foreign.whole(), &remote, soon()).unwrap();
    assert_eq!(foreign, Err(OpError::Submit(SubmitError::ForeignMemory)));
    // A revoked key opens nothing.
    there.dereg(readable).unwrap();
    let revoked = out.read_directly(&all(&source), &remote, soon()).unwrap();
    assert!(matches!(revoked, Err(OpError::Transfer(TransferError::Fabric { .. }))), "{revoked:?}");
    assert_eq!(contents(&source, 0, 100), [7; 100]);
    // The way is in order after refusals.
    let target = poisoned(&there, 100);
    let remote = back.advertise(&all(&target)).unwrap();
    assert_eq!(out.write_directly(&all(&source), &remote, soon()).unwrap(), Ok(100));
    assert_eq!(contents(&target, 0, 100), [7; 100]);
}

/// Users' threads and the engine's thread copy at the same time, while the owner takes the memory back. The memory is
/// unmapped then, so a later copy would end the process.
#[test]
fn revocation_ends_direct_copies() {
    let lens = [3 << 20, 200_000, 200_000];
    DIRECT.into_iter().zip(lens).for_each(|(by, len)| revocation(by, len));
}

fn revocation(by: TestTransport, len: usize) {
    let Pair { here, there, out, back } = pair(by);
    let (source, copy) = (memory_of(&here, &vec![7; len]), poisoned(&here, len));
    let mut num_direct = 0;
    for _ in 0..20 {
        let target = poisoned(&there, len);
        let remote = back.advertise(&all(&target)).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let write = || {
                let mut num_direct = 0;
                loop {
                    let direct = out.write_directly(&all(&source), &remote, soon());
                    num_direct += usize::from(direct.is_some());
                    if direct.unwrap_or_else(|| out.write(&all(&source), &remote, soon())).is_err()
                    {
                        return num_direct;
                    }
                }
            };
            let writers = [scope.spawn(write), scope.spawn(write)];
            let reader = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed)
                    && out.read(&all(&copy), &remote, soon()).is_ok()
                {
                    std::hint::spin_loop();
                }
            });
            std::thread::sleep(Duration::from_millis(5));
            let taken = there.dereg(target);
            assert!(matches!(taken, Ok(true)), "{taken:?}");
            is_over.store(true, Ordering::Relaxed);
            num_direct += writers.map(|writer| writer.join().unwrap()).iter().sum::<usize>();
            reader.join().unwrap();
        });
    }
    assert!(num_direct >= 20, "{num_direct}");
}

#[test]
fn direct_copies_end_with_the_connection() {
    DIRECT.into_iter().for_each(end_with_the_connection);
}

fn end_with_the_connection(by: TestTransport) {
    let Pair { here, there, out, back } = pair(by);
    let (source, target) = (memory_of(&here, &[7; 100]), poisoned(&there, 100));
    let remote = back.advertise(&all(&target)).unwrap();
    drop(back);
    until("the end of the connection", || out.closed().is_some());
    let closed = out.write_directly(&all(&source), &remote, soon()).unwrap();
    assert!(matches!(closed, Err(OpError::Submit(SubmitError::Closed(_)))), "{closed:?}");
    assert_eq!(contents(&target, 0, 100), [0xa5; 100]);
    // The index of the closed peer serves the next one.
    let again = here.connect(there.endpoint().addr, soon()).unwrap();
    let back = there.accept(soon()).unwrap();
    let remote = back.advertise(&all(&target)).unwrap();
    again.write_directly(&all(&source), &remote, soon()).unwrap().unwrap();
    assert_eq!(contents(&target, 0, 100), [7; 100]);
}

/// The peer's engine stands still, so no answer comes. Bytes of the write may still arrive there later.
#[test]
fn a_copy_without_an_answer_ends_at_its_deadline_and_closes_the_connection() {
    for by in [TestTransport::Shm, TestTransport::Tcp] {
        for is_cancelled in [false, true] {
            let is_still = Arc::new(AtomicBool::new(false));
            let mut fabric = HookedFabric::of(by.fabric());
            let flag = Arc::clone(&is_still);
            fabric.before_poll = Box::new(move || {
                let begin = Instant::now();
                while flag.load(Ordering::Relaxed) && begin.elapsed() < Duration::from_secs(30) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let here = Engine::start(config(by)).unwrap();
            let fabrics: Vec<Box<dyn p2p_core::fabric::Fabric>> = vec![Box::new(fabric)];
            let there = Engine::start(EngineConfig { fabrics, ..EngineConfig::local() }).unwrap();
            let out = here.connect(there.endpoint().addr, soon()).unwrap();
            let back = there.accept(soon()).unwrap();
            let (source, target) = (memory_of(&here, &[7; 100]), poisoned(&there, 100));
            let remote = back.advertise(&all(&target)).unwrap();
            out.write_directly(&all(&source), &remote, soon()).unwrap().unwrap();
            is_still.store(true, Ordering::Relaxed);
            // A poll may be under way and serve one more.
            let deadline =
                if is_cancelled { soon() } else { Instant::now() + Duration::from_millis(200) };
            let give_up = || is_cancelled;
            let wait = DirectWait { deadline, is_cancelled: Some(&give_up) };
            let error = loop {
                match out.write_directly(&all(&source), &remote, wait) {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => break error,
                    None => panic!("{by:?}: no direct copy"),
                }
            };
            assert_eq!(error, OpError::Transfer(TransferError::Deadline { op: "write" }), "{by:?}");
            until("the end of the connection", || out.closed().is_some());
            assert_eq!(out.closed(), Some(CloseReason::Deadline("write")), "{by:?}");
            is_still.store(false, Ordering::Relaxed);
        }
    }
}
