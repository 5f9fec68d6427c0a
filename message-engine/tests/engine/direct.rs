//! One-sided transfers on the caller's thread, over the transports that allow them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use switchyard_message_engine::engine::{
    Access, MemoryRegion, OpError, Span, SubmitError, TransferError,
};

use crate::common::{
    Pair, TestTransport, contents, memory_of, pair, poisoned, random_bytes, rng, soon, until,
};

/// The memory but for the last byte, which `memory_of` adds.
fn all(memory: &MemoryRegion) -> Span {
    memory.span(0, memory.len() - 1).unwrap()
}

#[test]
fn bytes_go_both_ways_on_the_callers_thread() {
    let mut rng = rng();
    let Pair { here, there, out, back } = pair(TestTransport::Cma);
    // The last length is more than one step.
    for len in [1, 4096, 1 << 20, (2 << 20) + 77] {
        let (ours, theirs) = (random_bytes(&mut rng, len), random_bytes(&mut rng, len));
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
fn other_transports_have_no_direct_copies() {
    let Pair { here, there, out, back } = pair(TestTransport::Tcp);
    let (source, target) = (memory_of(&here, &[7; 100]), poisoned(&there, 100));
    let remote = back.advertise(&all(&target)).unwrap();
    assert!(out.write_directly(&all(&source), &remote, soon()).is_none());
    assert_eq!(contents(&target, 0, 100), [0xa5; 100]);
}

#[test]
fn rights_and_ranges_hold_for_direct_copies() {
    let Pair { here, there, out, back } = pair(TestTransport::Cma);
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
}

/// Users' threads and the engine's thread copy at the same time, while the owner takes the memory back. The memory is
/// unmapped then, so a later copy would end the process.
#[test]
fn revocation_ends_direct_copies() {
    const LEN: usize = 3 << 20;
    let Pair { here, there, out, back } = pair(TestTransport::Cma);
    let (source, copy) = (memory_of(&here, &vec![7; LEN]), poisoned(&here, LEN));
    let mut num_direct = 0;
    for _ in 0..20 {
        let target = poisoned(&there, LEN);
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
    let Pair { here, there, out, back } = pair(TestTransport::Cma);
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
