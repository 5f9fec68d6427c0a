//! One registration of one engine, used by many peers. The end of one peer does not affect the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use switchyard_message_engine::engine::{Access, CloseReason, Engine, EngineConfig};

use crate::common::{TestTransport, config, contents, memory_of, poisoned, soon, until};
use crate::hooked::HookedFabric;

const PART: u64 = 1 << 20;

fn bytes(byte: u8) -> Vec<u8> {
    vec![byte; PART as usize]
}

/// A peer that is granted a part of a registration, and dies or stalls in the middle of its message, must lose its
/// access. Others have operations under way with the same registration, and keep its keys.
#[test]
fn the_end_of_a_peer_affects_no_other_peer_of_the_memory() {
    for by in TestTransport::robust() {
        let engine = Engine::start(config(by)).unwrap();
        // Takes the index before the shared registration's, which is free afterwards.
        let before = engine.alloc(4096, Access::RemoteReadWrite).unwrap();
        let memory = poisoned(&engine, 4 * PART as usize);
        let part = |nth: u64| memory.span(nth * PART, PART).unwrap();
        let silent = HookedFabric { may_write: false, ..HookedFabric::of(by.fabric()) };
        let silent = EngineConfig { fabrics: vec![Box::new(silent)], ..EngineConfig::local() };
        let (bad, good) = (Engine::start(silent).unwrap(), Engine::start(config(by)).unwrap());
        let out = bad.connect(engine.endpoint().addr, soon()).unwrap();
        let to_bad = engine.accept(soon()).unwrap();
        let from_good = good.connect(engine.endpoint().addr, soon()).unwrap();
        let to_good = engine.accept(soon()).unwrap();

        let source = memory_of(&good, &bytes(7));
        let target = poisoned(&good, PART as usize);
        let (all, into) = (
            source.span(0, PART).unwrap(),
            from_good.advertise(&target.span(0, PART).unwrap()).unwrap(),
        );
        let described = to_good.advertise(&part(1)).unwrap();
        let receive = to_good.start_recv(&part(2), soon()).unwrap();
        from_good.write(&all, &described, soon()).unwrap();
        // The message is granted and never written.
        let stalling = out.start_send(&memory_of(&bad, &bytes(9)).whole(), soon());
        // Time for the grant to arrive.
        let late = Instant::now() + Duration::from_secs(2);
        let granted = to_bad.start_recv(&memory.whole(), late).unwrap();
        let (is_over, limit) = (AtomicBool::new(false), soon());
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let mut num_written = 0;
                while !is_over.load(Ordering::Relaxed) && Instant::now() < limit {
                    to_good.write(&part(3), &into, soon()).unwrap();
                    num_written += 1;
                }
                num_written
            });
            assert!(granted.wait().is_err(), "{by:?}");
            until("the end of the connection", || to_bad.closed().is_some());
            assert_eq!(to_bad.closed(), Some(CloseReason::Deadline("recv")), "{by:?}");
            is_over.store(true, Ordering::Relaxed);
            assert!(writing.join().unwrap() > 0);
        });
        // Memory that the fabric might confuse with the shared one.
        engine.dereg(before).unwrap();
        let other = poisoned(&engine, 4 * PART as usize);

        assert_eq!(to_good.closed(), None, "{by:?}");
        source.copy_in(0, &bytes(8)).unwrap();
        from_good.write(&all, &described, soon()).unwrap();
        assert!(contents(&memory, PART, PART as usize) == bytes(8), "{by:?}");
        from_good.send(&all, soon()).unwrap();
        assert_eq!(receive.wait(), Ok(PART));
        assert!(contents(&memory, 2 * PART, PART as usize) == bytes(8), "{by:?}");
        memory.copy_in(3 * PART, &bytes(3)).unwrap();
        to_good.write(&part(3), &into, soon()).unwrap();
        assert!(contents(&target, 0, PART as usize) == bytes(3), "{by:?}");
        let untouched = contents(&other, 0, 4 * PART as usize);
        assert!(untouched.iter().all(|byte| *byte == 0xa5), "{by:?}");
        drop((stalling, bad));
        for region in [memory, other] {
            until("everybody to let go", || engine.stats().num_transfers == 0);
            assert!(engine.dereg(region).unwrap(), "{by:?}");
        }
    }
}
