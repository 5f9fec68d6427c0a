use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Instant;

use kernels::abi::REASON_TIMEOUT;
use p2p_core::endpoint::{Endpoint, QuietError};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};

use super::*;
use crate::threads::PeerConfig;

/// Recorded calls of an endpoint, and whether any operation is over.
#[derive(Debug, Default)]
struct Path {
    num_adds: AtomicU64,
    is_over: AtomicBool,
}

#[derive(Debug)]
struct Slow(Arc<Path>);

impl Endpoint for Slow {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn register(&mut self, _: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, _: RemoteRange<SlotKey>, _: LocalRange) -> Result<(), PostError> {
        Ok(())
    }

    unsafe fn get(&mut self, _: LocalRange, _: RemoteRange<SlotKey>) -> Result<(), PostError> {
        Ok(())
    }

    fn add_flag(&mut self, _: RemoteRange<SlotKey>, _: u64) -> Result<(), PostError> {
        self.0.num_adds.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn fence(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    fn quiet(&mut self, _: Instant) -> Result<(), QuietError> {
        match self.0.is_over.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err(QuietError::Deadline { outstanding: 1 }),
        }
    }

    fn wake(&mut self, _: SlotKey, _: usize) -> Result<(), PostError> {
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

p2p_core::unbatched!(Slow);
p2p_core::immediate_progress!(Slow);

/// Slots of a peer behind `path`, and the proxy.
fn slots_over(path: &Arc<Path>) -> (Slots, Proxy) {
    const BYTES: u64 = 64 << 10;
    let gpu = Gpu::open_emulated(0).expect("a GPU in software");
    let device = DeviceSide { gpu, own_slot_bytes: BYTES, peer_slot_bytes: BYTES, shape: vec![] };
    let slot = Region::anonymous(BYTES as usize).expect("memory");
    let memory = Memory::new(&device, LANES, slot).expect("lanes");
    let proxy = Proxy::start(&ProxyConfig::default()).expect("a thread");
    let config = PeerConfig {
        peer: 0,
        lanes: memory.lanes.clone(),
        window_bytes: BYTES,
        sources: vec![memory.mirror.clone()],
        thread: None,
    };
    let endpoint = AnyEndpoint::Other(Box::new(Slow(Arc::clone(path))));
    let peer = Arc::new(proxy.add(endpoint, config).expect("a peer"));
    let words = Mutex::new(memory.lanes.poster(LANES.num_lanes));
    (Slots { peer, words, memory }, proxy)
}

fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_there() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn signs_of_life_go_out_one_at_a_time() {
    let path = Arc::new(Path::default());
    let (slots, _proxy) = slots_over(&path);
    let show = || slots.show_life(64).expect("in service");
    show();
    wait_for("the first", || path.num_adds.load(Ordering::SeqCst) == 1);
    for _ in 0..20 {
        show();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(path.num_adds.load(Ordering::SeqCst), 1, "it is still under way");
    path.is_over.store(true, Ordering::SeqCst);
    wait_for("the second", || {
        show();
        path.num_adds.load(Ordering::SeqCst) > 1
    });
}

#[test]
fn a_lane_that_a_kernel_gave_up_is_told() {
    let path = Arc::new(Path::default());
    let (slots, _proxy) = slots_over(&path);
    slots.health().expect("in service");
    let at = slots.memory.poster.handle().error;
    assert!(slots.memory.waits.ptr().0 < at, "not the word that ends waits");
    // A wait for room that expired.
    let word = ErrorWord { tag: 48, reason: REASON_TIMEOUT, expected: 97, ..ErrorWord::default() };
    // SAFETY: the host reaches this memory of a GPU in software by the same address; no other code writes there.
    unsafe { (at as *mut ErrorWord).write_volatile(word) };
    let told = slots.health().expect_err("out of service").to_string();
    assert!(told.contains("gave a lane up") && told.contains("expired"), "{told}");
}
