//! Calls into a transport's library that do not return.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use p2p_core::{PostError, Region};
use switchyard_message_engine::engine::{
    Access, Engine, EngineConfig, MemoryRegion, OpError, RegisterError, StopError, TransferError,
};
use switchyard_message_engine::fabric::cma::CmaFabric;

use crate::common::{TestTransport, config, memory_of, pair_of, poisoned, soon, until};
use crate::hooked::HookedFabric;

/// Longer than any call that is not stuck takes on a busy machine.
const STUCK: Duration = Duration::from_secs(5);

#[test]
fn waiters_for_a_stuck_library_get_an_error_and_other_engines_work() {
    let lock = Arc::new(Mutex::new(()));
    let cma = HookedFabric::new(CmaFabric::new().unwrap());
    let theirs = Arc::clone(&lock);
    let before_poll = Box::new(move || drop(theirs.lock().unwrap()));
    let cma = HookedFabric { before_poll, ..cma };
    let here = EngineConfig {
        fabrics: vec![Box::new(cma)],
        stuck_timeout: STUCK,
        ..EngineConfig::local()
    };
    let pair = pair_of(here, config(TestTransport::Cma));
    let (source, target) = (memory_of(&pair.here, &[7; 100]), poisoned(&pair.there, 100));
    let remote = pair.back.advertise(&target.span(0, 100).unwrap()).unwrap();
    let write = || pair.out.write(&source.span(0, 100).unwrap(), &remote, soon());
    assert_eq!(write().unwrap(), 100);

    // The thread calls its fabric, and the call does not return.
    let held = lock.lock().unwrap();
    assert!(matches!(write(), Err(OpError::Transfer(TransferError::Stuck))));
    let other = pair_of(config(TestTransport::Cma), config(TestTransport::Cma));
    let memory = memory_of(&other.here, &[1; 10]);
    other.out.send(&memory.span(0, 10).unwrap(), soon()).unwrap();
    assert_eq!(pair.here.stop(), Err(StopError));

    // The call returns after all, and everything ends as usual.
    drop(held);
    until("the end of the connection", || pair.out.closed().is_some());
    until("the end at the other side", || pair.back.closed().is_some());
}

/// After a failed registration the caller may unmap the memory, and other memory may be mapped at its address. The keys
/// of the first must not serve the second.
#[test]
fn a_registration_that_comes_too_late_is_undone() {
    let num_registered = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&num_registered);
    let before_register = Box::new(move || {
        if count.fetch_add(1, Ordering::SeqCst) == 0 {
            std::thread::sleep(2 * STUCK);
        }
    });
    let slow = HookedFabric { before_register, ..HookedFabric::new(CmaFabric::new().unwrap()) };
    let config = EngineConfig {
        fabrics: vec![Box::new(slow)],
        stuck_timeout: STUCK,
        ..EngineConfig::local()
    };
    let engine = Engine::start(config).unwrap();
    let memory = Region::anonymous(4096).unwrap();
    // SAFETY: the memory outlives the engine.
    let register = || unsafe { engine.reg(memory.as_ptr(), 4096, Access::RemoteReadWrite) };
    let error = register().unwrap_err();
    assert_eq!(error, RegisterError::Timeout { bytes: 4096, limit_s: STUCK.as_secs() }, "{error}");
    let mut again = None;
    until("the thread to come back", || {
        again = register().ok();
        again.is_some()
    });
    assert!(num_registered.load(Ordering::SeqCst) > 1, "the first one's keys are used again");
    assert!(engine.dereg(again.unwrap()).unwrap(), "another handle keeps the registration");
    engine.stop().unwrap();
}

/// An engine whose transport deregisters slowly, and refuses it on demand.
struct SlowDeregistration {
    engine: Engine,
    memory: Region,
    refuses: Arc<AtomicBool>,
    /// Attempts that it refuses before it deregisters.
    num_refusals: Arc<AtomicUsize>,
    /// Milliseconds that the next deregistration takes; reset to 0 by it.
    pause: Arc<AtomicUsize>,
    num_refused: Arc<AtomicUsize>,
    num_registered: Arc<AtomicUsize>,
    num_released: Arc<AtomicUsize>,
}

impl SlowDeregistration {
    fn start() -> Self {
        let refuses = Arc::new(AtomicBool::new(false));
        let [num_refusals, pause, num_refused, num_registered, num_released] =
            [(); 5].map(|()| Arc::new(AtomicUsize::new(0)));
        let hook = {
            let (refuses, pause) = (Arc::clone(&refuses), Arc::clone(&pause));
            let (refused, released) = (Arc::clone(&num_refused), Arc::clone(&num_released));
            let refusals = Arc::clone(&num_refusals);
            move || {
                let pause = pause.swap(0, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(pause as u64));
                let less = |left: usize| left.checked_sub(1);
                let is_refused = refusals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
                if is_refused.is_ok() || refuses.load(Ordering::SeqCst) {
                    refused.fetch_add(1, Ordering::SeqCst);
                    let detail = "the library keeps it".to_owned();
                    return Err(PostError::Register { bytes: 4096, detail });
                }
                released.fetch_add(1, Ordering::SeqCst);
                Ok(())
            }
        };
        let registered = Arc::clone(&num_registered);
        let fabric = HookedFabric {
            before_register: Box::new(move || {
                registered.fetch_add(1, Ordering::SeqCst);
            }),
            before_deregister: Box::new(hook),
            ..HookedFabric::new(CmaFabric::new().unwrap())
        };
        let config = EngineConfig {
            fabrics: vec![Box::new(fabric)],
            stuck_timeout: Duration::from_secs(3),
            ..EngineConfig::local()
        };
        let (engine, memory) = (Engine::start(config).unwrap(), Region::anonymous(8192).unwrap());
        Self {
            engine,
            memory,
            refuses,
            num_refusals,
            pause,
            num_refused,
            num_registered,
            num_released,
        }
    }

    /// Registers the first bytes of the memory, as soon as the engine answers.
    fn reg(&self, bytes: usize) -> MemoryRegion {
        let mut registered = None;
        until("the engine to register", || {
            // SAFETY: the memory outlives the engine, in whose drop the thread ends.
            let tried = unsafe { self.engine.reg(self.memory.as_ptr(), bytes, ACCESS) };
            registered = tried.ok();
            registered.is_some()
        });
        registered.unwrap()
    }

    /// Waits until the transport has nothing registered.
    fn wait_until_empty(&self) {
        until("everything to be released", || {
            let num_registered = self.num_registered.load(Ordering::SeqCst);
            self.num_released.load(Ordering::SeqCst) == num_registered
        });
    }

    /// Waits until the transport has refused something.
    fn has_refused(&self) {
        until("the refusal", || self.num_refused.load(Ordering::SeqCst) > 0);
    }

    fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::SeqCst);
    }
}

/// Longer than the engine waits, with a margin for busy machines.
const PAUSE_MS: usize = 6000;
const ACCESS: Access = Access::RemoteReadWrite;

/// After a deregistration that timed out, the caller has no handle and may unmap the memory. Other memory may be mapped
/// at its address. The keys of the first must not serve the second.
#[test]
fn a_late_deregistration_shares_no_keys_and_completes() {
    let rig = SlowDeregistration::start();
    let first = rig.reg(4096);
    let number = first.registration();
    rig.refuse(true);
    rig.pause.store(PAUSE_MS, Ordering::SeqCst);
    let error = rig.engine.dereg(first).unwrap_err();
    assert!(error.region.is_none() && error.detail.contains("in time"), "{error}");
    rig.has_refused();
    let second = rig.reg(4096);
    assert_ne!(
        second.registration(),
        number,
        "shared with memory that its user takes for deregistered"
    );
    rig.refuse(false);
    assert!(rig.engine.dereg(second).unwrap());
    rig.wait_until_empty();
}

#[test]
fn a_refused_deregistration_shares_no_keys_and_completes() {
    let rig = SlowDeregistration::start();
    let first = rig.reg(4096);
    let number = first.registration();
    rig.refuse(true);
    drop(first);
    rig.has_refused();
    let second = rig.reg(4096);
    assert_ne!(
        second.registration(),
        number,
        "shared with memory that its user takes for deregistered"
    );
    // A caller that keeps its handle can retry.
    let second = rig.engine.dereg(second).unwrap_err().region.unwrap();
    rig.refuse(false);
    assert!(rig.engine.dereg(second).unwrap());
    rig.wait_until_empty();
}

/// The same rule for memory that a handle of a part keeps registered.
#[test]
fn a_registration_that_only_a_part_of_it_keeps_is_not_given_to_others() {
    let rig = SlowDeregistration::start();
    let (whole, part) = (rig.reg(8192), rig.reg(4096));
    let number = whole.registration();
    assert_eq!(part.registration(), number);
    // Another deregistration blocks the thread. So it reports too late that the part prevents the release.
    let other = rig.engine.alloc(4096, ACCESS).unwrap();
    rig.pause.store(PAUSE_MS, Ordering::SeqCst);
    drop(other);
    until("the thread to stand still", || rig.pause.load(Ordering::SeqCst) == 0);
    let error = rig.engine.dereg(whole).unwrap_err();
    assert!(error.region.is_none() && error.detail.contains("in time"), "{error}");
    let again = rig.reg(8192);
    assert_ne!(
        again.registration(),
        number,
        "shared with memory that its user takes for deregistered"
    );
    assert!(rig.engine.dereg(part).unwrap(), "another handle keeps the registration");
    assert!(rig.engine.dereg(again).unwrap());
    rig.wait_until_empty();
}

/// A peer in the middle of a copy ends it soon. The caller that deregisters the memory sees no error.
#[test]
fn a_registration_that_is_in_use_for_a_moment_is_given_back_by_one_call() {
    let rig = SlowDeregistration::start();
    for num_refusals in 1..4 {
        let first = rig.reg(4096);
        rig.num_refusals.store(num_refusals, Ordering::SeqCst);
        assert!(rig.engine.dereg(first).unwrap(), "another handle keeps the registration");
    }
    assert_eq!(rig.num_refused.load(Ordering::SeqCst), 1 + 2 + 3);
    rig.wait_until_empty();
}

/// The thread serves others meanwhile, and the caller gets the error in the end.
#[test]
fn a_registration_that_stays_in_use_blocks_no_other_command() {
    let rig = SlowDeregistration::start();
    let (first, second) = (rig.reg(4096), rig.engine.alloc(4096, ACCESS).unwrap());
    rig.refuse(true);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| rig.engine.dereg(first).unwrap_err());
        rig.has_refused();
        // The thread does more than one attempt per round: it executes these commands meanwhile.
        for _ in 0..100 {
            drop(rig.reg(8192));
        }
        let error = waiting.join().unwrap();
        assert!(error.detail.contains("keeps it"), "{error}");
        rig.refuse(false);
        assert!(rig.engine.dereg(error.region.unwrap()).unwrap());
    });
    assert!(rig.engine.dereg(second).unwrap());
    rig.wait_until_empty();
}
