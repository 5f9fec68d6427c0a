//! Tests with a library that does not return: the read function of one device's queue is replaced.

use std::ffi::c_void;
use std::sync::MutexGuard;
use std::sync::atomic::AtomicPtr;
use std::time::Instant;

use super::super::{FabricNetwork, sys};
use super::*;
use p2p_core::endpoint::{Endpoint, Progress, QuietError};
use p2p_core::network::{JoinedSide, Network, Route};
use p2p_core::region::{RemoteRange, SlotKey};
use p2p_core::slot::{SlotConfig, SlotLayout};
use test_support::skip;

const LIMIT: Duration = Duration::from_secs(60);
const FLAG: RemoteRange<SlotKey> = RemoteRange { key: SlotKey, offset: 8, len: 8 };

#[test]
fn only_providers_that_may_stand_still_have_a_library_thread() {
    assert!(is_needed("shm") && is_needed("sm2") && is_needed("shm;ofi_hook"));
    assert!(!is_needed("tcp;ofi_rxm") && !is_needed("verbs;ofi_rxm") && !is_needed("efa"));
}

/// A blocked library blocks for the whole process, so for one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A network over `shm`, or `None` with a skip message.
fn network(timeouts: Timeouts) -> Option<FabricNetwork> {
    match FabricNetwork::open("shm") {
        Ok(network) => Some(FabricNetwork { timeouts, ..network }),
        Err(error) => {
            skip("libfabric", &error.to_string());
            None
        }
    }
}

/// Within one process the library follows pointers into closed endpoints. So they are never closed,
/// but their memory is removed with the process.
fn leave_open<const N: usize>(networks: [FabricNetwork; N]) {
    for network in &networks {
        for opened in network.devices.lock().unwrap().values() {
            names::unlink(opened.device.port().endpoint().name());
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

fn pair(a: &FabricNetwork, b: &FabricNetwork) -> (JoinedSide, JoinedSide) {
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

fn flag_of(side: &JoinedSide) -> u64 {
    // SAFETY: within the slot, aligned; flags are only accessed atomically.
    let flag = unsafe {
        std::sync::atomic::AtomicU64::from_ptr(side.slot.as_ptr().add(FLAG.offset).as_ptr().cast())
    };
    flag.load(Ordering::Acquire)
}

/// Sends a flag, and a question that is answered.
fn exchange(from: &mut JoinedSide, to: &JoinedSide) {
    let before = flag_of(to);
    from.endpoint.add_flag(FLAG, 3).unwrap();
    from.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    assert_eq!(flag_of(to), before + 3);
}

/// Blocks the library in each read of one device's queue, until it is dropped.
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
    /// Returns once the thread of `device` is blocked.
    fn at(device: &Device) -> Self {
        IS_INSIDE.store(false, Ordering::Release);
        let cq = device.port().queue().owner().as_ptr();
        // SAFETY: a live queue; its table is copied bit by bit, and the copy is never freed.
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
        // SAFETY: the blocked thread keeps the device, and the queue with it.
        unsafe { AtomicPtr::from_ptr(&raw mut (*self.0).ops) }
            .store(REAL.load(Ordering::Acquire), Ordering::Release);
        IS_HELD.store(false, Ordering::Release);
    }
}

#[test]
fn a_library_that_does_not_come_back_ends_its_pairs_and_nothing_else() {
    let _alone = alone();
    let timeouts = Timeouts { call: Duration::from_secs(5), ..Timeouts::DEFAULT };
    let (Some(a), Some(b)) = (network(timeouts), network(timeouts)) else { return };
    let (mut local, mut remote) = pair(&a, &b);
    let (second, _second_remote) = pair(&a, &b);
    exchange(&mut local, &remote);
    exchange(&mut remote, &local);
    let device = a.device(route()).unwrap();
    let stuck = Stuck::at(&device);

    // All waits are bounded, and no call blocks inside the library.
    local.endpoint.add_flag(FLAG, 1).unwrap();
    let result = local.endpoint.quiet(Instant::now() + Duration::from_millis(50));
    assert!(matches!(result, Err(QuietError::Deadline { .. })), "{result:?}");
    let half_open = a.open(&layout(), route());
    println!("meanwhile: {:?}", half_open.as_ref().err().map(ToString::to_string));
    for side in [&local, &second] {
        eventually("the end of the pair", || side.endpoint.health().is_err());
        let error = side.endpoint.health().unwrap_err().to_string();
        assert!(error.contains("has not returned for 5s"), "{error}");
    }
    assert!(local.endpoint.add_flag(FLAG, 1).is_err());
    let result = local.endpoint.quiet(Instant::now() + LIMIT);
    assert!(matches!(result, Err(QuietError::Post(_))), "{result:?}");
    assert!(remote.endpoint.health().is_ok(), "its own library does come back");

    // New pairs get a new device, and work.
    let (mut local_again, remote_again) = pair(&a, &b);
    exchange(&mut local_again, &remote_again);
    assert!(!Arc::ptr_eq(&device, &a.device(route()).unwrap()));

    // The users of the old device can be dropped. They are cleaned up when the library returns
    // after all.
    drop((local, second, half_open));
    let (sender, is_back) = sync_channel(1);
    device.library_thread().unwrap().submit(move |_| sender.send(()).unwrap_or_default());
    assert!(is_back.recv_timeout(Duration::from_millis(50)).is_err(), "it is still away");
    drop(stuck);
    is_back.recv_timeout(LIMIT).expect("it goes on with what it was asked for");
    exchange(&mut local_again, &remote_again);
    leave_open([a, b]);
    std::mem::forget(device);
}

/// Longer than any test.
const UNBOUNDED: Timeouts =
    Timeouts { call: Duration::from_secs(100_000), drain: Duration::from_secs(100_000) };

#[test]
fn whoever_ends_an_endpoint_does_not_wait_and_what_it_posted_still_goes() {
    let _alone = alone();
    let (Some(a), Some(b)) = (network(UNBOUNDED), network(UNBOUNDED)) else { return };
    let (mut local, remote) = pair(&a, &b);
    exchange(&mut local, &remote);
    let before = flag_of(&remote);
    let stuck = Stuck::at(&a.device(route()).unwrap());
    local.endpoint.add_flag(FLAG, 3).unwrap();
    assert!(!local.endpoint.is_settled().unwrap(), "it waits for the library");
    let (sender, is_gone) = sync_channel(1);
    std::thread::spawn(move || {
        drop(local);
        sender.send(()).unwrap_or_default();
    });
    is_gone.recv_timeout(LIMIT).expect("the library holds up who ends an endpoint");
    assert_eq!(flag_of(&remote), before);
    drop(stuck);
    eventually("what was posted before the end", || flag_of(&remote) == before + 3);
    leave_open([a, b]);
}

#[test]
fn the_last_user_of_a_device_waits_until_what_was_posted_is_taken() {
    let _alone = alone();
    let (Some(a), Some(b)) = (network(UNBOUNDED), network(UNBOUNDED)) else { return };
    let (mut local, remote) = pair(&a, &b);
    exchange(&mut local, &remote);
    let before = flag_of(&remote);
    let device = a.device(route()).unwrap();
    let stuck = Stuck::at(&device);
    local.endpoint.add_flag(FLAG, 3).unwrap();
    let (sender, is_gone) = sync_channel(1);
    std::thread::spawn(move || {
        // The network first: until then it is unknown which user is the last.
        drop(a);
        drop(local);
        sender.send(IS_HELD.load(Ordering::Acquire)).unwrap_or_default();
    });
    std::thread::sleep(Duration::from_millis(20));
    drop(stuck);
    let was_held = is_gone.recv_timeout(LIMIT).expect("the last user waits for ever");
    assert!(!was_held, "the process could have ended with something posted and not taken");
    eventually("what was posted before the end", || flag_of(&remote) == before + 3);
    leave_open([b]);
    std::mem::forget(device);
}

/// The cause may be a peer or a library that accepts nothing.
#[test]
fn the_last_user_of_a_device_waits_within_a_bound() {
    let _alone = alone();
    let timeouts = Timeouts { drain: Duration::from_millis(1), ..UNBOUNDED };
    let (Some(a), Some(b)) = (network(timeouts), network(timeouts)) else { return };
    let (mut local, remote) = pair(&a, &b);
    exchange(&mut local, &remote);
    let device = a.device(route()).unwrap();
    let stuck = Stuck::at(&device);
    local.endpoint.add_flag(FLAG, 3).unwrap();
    let (sender, is_gone) = sync_channel(1);
    std::thread::spawn(move || {
        drop(local);
        drop(a);
        sender.send(()).unwrap_or_default();
    });
    is_gone.recv_timeout(LIMIT).expect("the last user waits for ever");
    drop(stuck);
    leave_open([b]);
    std::mem::forget(device);
}
