//! A library that does not come back, made of a real one: reading the queue of one device is replaced.

use std::ffi::c_void;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicPtr;
use std::time::Instant;

use super::super::{FabricNetwork, sys};
use super::*;
use crate::skip::skip;
use p2p_core::endpoint::{Endpoint, Progress, QuietError};
use p2p_core::network::{Joined, Network, Route};
use p2p_core::region::{RemoteRange, SlotKey};
use p2p_core::slot::{SlotConfig, SlotLayout};

const LIMIT: Duration = Duration::from_secs(60);
const FLAG: RemoteRange<SlotKey> = RemoteRange { key: SlotKey, offset: 8, len: 8 };

#[test]
fn only_providers_that_may_stand_still_have_a_keeper() {
    assert!(is_needed("shm") && is_needed("sm2") && is_needed("shm;ofi_hook"));
    assert!(!is_needed("tcp;ofi_rxm") && !is_needed("verbs;ofi_rxm") && !is_needed("efa"));
}

/// What stands still stands still for the whole process, so for one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A network over `shm`, or `None`, loudly.
fn network(patience: Patience) -> Option<FabricNetwork> {
    match FabricNetwork::open("shm") {
        Ok(network) => Some(FabricNetwork { patience, ..network }),
        Err(error) => {
            skip("libfabric", &error.to_string());
            None
        }
    }
}

/// Within one process the library follows pointers into endpoints that were closed: they stay, but their
/// memory goes with the process.
fn leave_open<const N: usize>(networks: [FabricNetwork; N]) {
    for network in &networks {
        for opened in network.devices.lock().unwrap().values() {
            names::forget(opened.device.port().lane().name());
        }
    }
    std::mem::forget(networks);
}

fn layout() -> SlotLayout {
    SlotLayout::new(SlotConfig { slot_bytes: 64 << 10, num_frames: 2 }).unwrap()
}

fn route() -> Route {
    Route { local: [127, 0, 0, 1].into(), remote: [127, 0, 0, 1].into() }
}

fn pair(a: &FabricNetwork, b: &FabricNetwork) -> (Joined, Joined) {
    let (a, b) = (a.open(&layout(), route()).unwrap(), b.open(&layout(), route()).unwrap());
    let (of_a, of_b) = (a.description(), b.description());
    (a.join(&of_b).unwrap(), b.join(&of_a).unwrap())
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn flag_of(side: &Joined) -> u64 {
    // SAFETY: within the slot, aligned; flags are only accessed atomically.
    let flag = unsafe {
        std::sync::atomic::AtomicU64::from_ptr(side.slot.as_ptr().add(FLAG.offset).as_ptr().cast())
    };
    flag.load(Ordering::Acquire)
}

/// A flag that arrives, and a question that is answered.
fn exchange(from: &mut Joined, to: &Joined) {
    let before = flag_of(to);
    from.endpoint.add_flag(FLAG, 3).unwrap();
    from.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    assert_eq!(flag_of(to), before + 3);
}

/// The library stands still whenever it reads the queue of one device, until this is dropped.
struct Stuck(*mut sys::FidCq);

static IS_HELD: AtomicBool = AtomicBool::new(false);
static IS_INSIDE: AtomicBool = AtomicBool::new(false);
static REAL: AtomicPtr<sys::OpsCq> = AtomicPtr::new(std::ptr::null_mut());

fn wait_and_get() -> &'static sys::OpsCq {
    while IS_HELD.load(Ordering::Acquire) {
        IS_INSIDE.store(true, Ordering::Release);
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: the library's own table, which stays.
    unsafe { &*REAL.load(Ordering::Acquire) }
}

unsafe extern "C" fn read(cq: *mut sys::FidCq, buf: *mut c_void, num: usize) -> isize {
    let table = wait_and_get();
    // SAFETY: as called.
    unsafe { (table.read)(cq, buf, num) }
}

unsafe extern "C" fn readfrom(
    cq: *mut sys::FidCq,
    buf: *mut c_void,
    num: usize,
    from: *mut sys::FiAddr,
) -> isize {
    let table = wait_and_get();
    // SAFETY: as called.
    unsafe { (table.readfrom)(cq, buf, num, from) }
}

impl Stuck {
    /// Once the thread of `device` stands still.
    fn at(device: &Device) -> Self {
        IS_INSIDE.store(false, Ordering::Release);
        let cq = device.port().queue().owner().as_ptr();
        // SAFETY: a live queue; its table is copied bit by bit, and stays for ever.
        unsafe {
            let real = (*cq).ops;
            REAL.store(real, Ordering::Release);
            let copy = Box::leak(Box::new(sys::OpsCq { read, readfrom, ..std::ptr::read(real) }));
            IS_HELD.store(true, Ordering::Release);
            AtomicPtr::from_ptr(&raw mut (*cq).ops).store(copy, Ordering::Release);
        }
        eventually("the library to stand still", || IS_INSIDE.load(Ordering::Acquire));
        Self(cq)
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        // SAFETY: the thread that stands still keeps the device, and the queue with it.
        unsafe { AtomicPtr::from_ptr(&raw mut (*self.0).ops) }
            .store(REAL.load(Ordering::Acquire), Ordering::Release);
        IS_HELD.store(false, Ordering::Release);
    }
}

#[test]
fn a_library_that_does_not_come_back_ends_its_pairs_and_nothing_else() {
    let _alone = alone();
    let patience = Patience { library: Duration::from_secs(5), ..Patience::DEFAULT };
    let (Some(a), Some(b)) = (network(patience), network(patience)) else { return };
    let (mut near, mut far) = pair(&a, &b);
    let (second, _second_far) = pair(&a, &b);
    exchange(&mut near, &far);
    exchange(&mut far, &near);
    let device = a.device(route()).unwrap();
    let stuck = Stuck::at(&device);

    // Nobody who waits waits for ever, and nothing that is called stays inside.
    near.endpoint.add_flag(FLAG, 1).unwrap();
    let result = near.endpoint.quiet(Instant::now() + Duration::from_millis(50));
    assert!(matches!(result, Err(QuietError::Deadline { .. })), "{result:?}");
    let half_open = a.open(&layout(), route());
    println!("meanwhile: {:?}", half_open.as_ref().err().map(ToString::to_string));
    for side in [&near, &second] {
        eventually("the end of the pair", || side.endpoint.health().is_err());
        let error = side.endpoint.health().unwrap_err().to_string();
        assert!(error.contains("has not come back for 5s"), "{error}");
    }
    assert!(near.endpoint.add_flag(FLAG, 1).is_err());
    let result = near.endpoint.quiet(Instant::now() + LIMIT);
    assert!(matches!(result, Err(QuietError::Post(_))), "{result:?}");
    assert!(far.endpoint.health().is_ok(), "its own library does come back");

    // New pairs have a new device, and go on.
    let (mut again, far_again) = pair(&a, &b);
    exchange(&mut again, &far_again);
    assert!(!Arc::ptr_eq(&device, &a.device(route()).unwrap()));

    // What uses the old one can be dropped, and is done with when it comes back after all.
    drop((near, second, half_open));
    let (sender, is_back) = sync_channel(1);
    device.keeper().unwrap().hand_over(move |_| sender.send(()).unwrap_or_default());
    assert!(is_back.recv_timeout(Duration::from_millis(50)).is_err(), "it is still away");
    drop(stuck);
    is_back.recv_timeout(LIMIT).expect("it goes on with what it was asked for");
    exchange(&mut again, &far_again);
    leave_open([a, b]);
    std::mem::forget(device);
}

/// For ever, as far as a test goes.
const UNBOUNDED: Patience =
    Patience { library: Duration::from_secs(100_000), last: Duration::from_secs(100_000) };

#[test]
fn whoever_ends_an_endpoint_does_not_wait_and_what_it_posted_still_goes() {
    let _alone = alone();
    let (Some(a), Some(b)) = (network(UNBOUNDED), network(UNBOUNDED)) else { return };
    let (mut near, far) = pair(&a, &b);
    exchange(&mut near, &far);
    let before = flag_of(&far);
    let stuck = Stuck::at(&a.device(route()).unwrap());
    near.endpoint.add_flag(FLAG, 3).unwrap();
    assert!(!near.endpoint.is_settled().unwrap(), "it waits for the library");
    let (sender, is_gone) = sync_channel(1);
    std::thread::spawn(move || {
        drop(near);
        sender.send(()).unwrap_or_default();
    });
    is_gone.recv_timeout(LIMIT).expect("the library holds up who ends an endpoint");
    assert_eq!(flag_of(&far), before);
    drop(stuck);
    eventually("what was posted before the end", || flag_of(&far) == before + 3);
    leave_open([a, b]);
}

#[test]
fn the_last_user_of_a_device_waits_until_what_was_posted_is_taken() {
    let _alone = alone();
    let (Some(a), Some(b)) = (network(UNBOUNDED), network(UNBOUNDED)) else { return };
    let (mut near, far) = pair(&a, &b);
    exchange(&mut near, &far);
    let before = flag_of(&far);
    let device = a.device(route()).unwrap();
    let stuck = Stuck::at(&device);
    near.endpoint.add_flag(FLAG, 3).unwrap();
    let (sender, is_gone) = sync_channel(1);
    std::thread::spawn(move || {
        // The network first: who is the last one is not known before.
        drop(a);
        drop(near);
        sender.send(IS_HELD.load(Ordering::Acquire)).unwrap_or_default();
    });
    std::thread::sleep(Duration::from_millis(20));
    drop(stuck);
    let was_held = is_gone.recv_timeout(LIMIT).expect("the last user waits for ever");
    assert!(!was_held, "the process could have ended with something posted and not taken");
    eventually("what was posted before the end", || flag_of(&far) == before + 3);
    leave_open([b]);
    std::mem::forget(device);
}

/// A peer, or a library, that takes nothing.
#[test]
fn the_last_user_of_a_device_waits_within_a_bound() {
    let _alone = alone();
    let patience = Patience { last: Duration::from_millis(1), ..UNBOUNDED };
    let (Some(a), Some(b)) = (network(patience), network(patience)) else { return };
    let (mut near, far) = pair(&a, &b);
    exchange(&mut near, &far);
    let device = a.device(route()).unwrap();
    let stuck = Stuck::at(&device);
    near.endpoint.add_flag(FLAG, 3).unwrap();
    let (sender, is_gone) = sync_channel(1);
    std::thread::spawn(move || {
        drop(near);
        drop(a);
        sender.send(()).unwrap_or_default();
    });
    is_gone.recv_timeout(LIMIT).expect("the last user waits for ever");
    drop(stuck);
    leave_open([b]);
    std::mem::forget(device);
}
