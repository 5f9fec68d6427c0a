//! Slots in GPU memory of one link: when kernels stop to wait for them, and when they are freed.

use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::abi::{self, DevicePtr};
use kernels::gpu::GpuBuffer;
use kernels::slots::{DevicePair, KernelWaits, RemoteSlots};
use p2p_core::bootstrap::BackgroundDrop;
use p2p_core::device::DeviceSlots;

use crate::fleet::link::{DeviceLink, Link, LinkState};

/// Bit of a peer in a word of host memory. A set bit ends the waits of kernels for that peer.
#[derive(Debug)]
pub(crate) struct AbortBit {
    /// Page-locked host memory that begins with the word.
    pub word: Arc<GpuBuffer>,
    pub bit: u32,
}

impl AbortBit {
    pub fn set(&self) {
        if let Some(word) = abort_word(&self.word) {
            word.fetch_or(1 << self.bit, Ordering::Release);
        }
    }

    pub fn clear(&self) {
        if let Some(word) = abort_word(&self.word) {
            word.fetch_and(!(1 << self.bit), Ordering::Release);
        }
    }
}

fn abort_word(memory: &GpuBuffer) -> Option<&AtomicU32> {
    // SAFETY: the buffer is host memory of a page at least, aligned, and lives as long as the reference;
    // every access to the word is atomic.
    memory.host().map(|host| unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) })
}

/// Device slots shared by the connection and its calls. The last user frees the memory, on a background thread:
/// freeing waits until kernels have ended, and the user may be the thread that must end them.
#[derive(Debug)]
pub(super) struct LinkSlots {
    pair: Mutex<Option<BackgroundDrop<DevicePair>>>,
    /// Ends the waits of kernels for this peer, as long as the link has its place in the peer table. Locked while
    /// the bit is set, so that it is never set when the place is another link's.
    abort: Mutex<Option<AbortBit>>,
    /// Ends waits on the path to a server whose memory is not mapped here.
    waits: Option<KernelWaits>,
}

impl LinkSlots {
    pub fn new(pair: DevicePair) -> Self {
        let waits = pair.as_remote().map(RemoteSlots::waits);
        Self { pair: Mutex::new(Some(BackgroundDrop::new(pair))), abort: Mutex::new(None), waits }
    }

    /// For [`DeviceSupport::link_of`](crate::fleet::settings::DeviceSupport::link_of).
    pub fn boxed(slots: DeviceSlots) -> Option<Arc<dyn DeviceLink>> {
        Some(Arc::new(Self::new(slots.downcast().ok()?)))
    }

    /// The slots of a link, if it has any.
    pub fn of(link: &Link) -> Option<Arc<Self>> {
        let slots: Arc<dyn Any + Send + Sync> = Arc::clone(link.state.device()?) as _;
        slots.downcast().ok()
    }

    /// The server's slot and this side's slot, as kernels reach them; `None` once they are freed.
    pub fn addresses(&self) -> Option<(abi::Link, DevicePtr)> {
        self.lock().as_ref().map(|pair| (pair.link(), pair.own()))
    }

    /// Runs `read` on this side's slot, which stays mapped meanwhile. `None` once it is freed.
    pub fn with_own_memory<R>(&self, read: impl FnOnce(&GpuBuffer) -> R) -> Option<R> {
        self.lock().as_ref().map(|pair| read(pair.own_memory()))
    }

    /// Returns true if the path to the server over a network has failed.
    pub fn has_failed(&self) -> bool {
        let pair = self.lock();
        let remote = pair.as_ref().and_then(|pair| pair.as_remote());
        remote.is_some_and(|remote| remote.health().is_err())
    }

    fn lock(&self) -> MutexGuard<'_, Option<BackgroundDrop<DevicePair>>> {
        self.pair.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the waits of kernels on the path to the server, for good: the server counts as failed.
    pub fn end_waits(&self) {
        if let Some(waits) = &self.waits {
            waits.end();
        }
    }

    /// Sets this bit when the link ends. If `state` is down already, sets it at once.
    pub fn abort_by(&self, abort: AbortBit, state: &LinkState) {
        let mut place = self.abort_bit();
        if state.down().is_some() {
            abort.set();
        }
        *place = Some(abort);
    }

    /// The link, which is down, leaves its place in the peer table: the bit is another link's from now on.
    pub fn leave_place(&self) {
        self.abort_bit().take();
    }

    /// See [`DeviceLink::take_if_unused`].
    pub fn take_if_unused(&self, state: &LinkState) -> Option<BackgroundDrop<DevicePair>> {
        fence(Ordering::SeqCst);
        let is_unused = state.down().is_some() && state.in_flight.load(Ordering::SeqCst) == 0;
        if is_unused { self.lock().take() } else { None }
    }

    fn abort_bit(&self) -> MutexGuard<'_, Option<AbortBit>> {
        self.abort.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceLink for LinkSlots {
    fn link_down(&self) {
        if let Some(abort) = &*self.abort_bit() {
            abort.set();
        }
        self.end_waits();
    }

    fn take_if_unused(&self, state: &LinkState) -> Option<Box<dyn Send>> {
        // Taken out of its wrapper: the caller frees it on a thread that may block.
        let pair = Self::take_if_unused(self, state)?.into_inner();
        Some(Box::new(pair))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use kernels::abi::PATH_DIRECT;
    use kernels::gpu::Gpu;
    use kernels::slots::{DeviceSide, PathError};

    use super::*;
    use crate::fleet::link::LinkEnd;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Slots whose drop blocks until the test allows it, and then reports its thread.
    #[derive(Debug)]
    struct SlowSlots {
        own: GpuBuffer,
        waits: Arc<GpuBuffer>,
        allowed: Mutex<mpsc::Receiver<()>>,
        freed_by: mpsc::Sender<ThreadId>,
    }

    impl RemoteSlots for SlowSlots {
        fn own(&self) -> &GpuBuffer {
            &self.own
        }

        fn link(&self) -> abi::Link {
            abi::Link { window: self.own.ptr(), context: 0, path: PATH_DIRECT, reserved: 0 }
        }

        fn waits(&self) -> KernelWaits {
            KernelWaits::new(Arc::clone(&self.waits))
        }

        fn show_life(&self, _: u64) -> Result<(), PathError> {
            Ok(())
        }

        fn health(&self) -> Result<(), PathError> {
            Ok(())
        }
    }

    impl Drop for SlowSlots {
        fn drop(&mut self) {
            let _ = self.allowed.get_mut().map(|allowed| allowed.recv_timeout(PATIENCE));
            let _ = self.freed_by.send(thread::current().id());
        }
    }

    #[test]
    fn freeing_slots_does_not_wait_for_kernels() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        // Freed at the end of a call, or by the last reference.
        for is_dropped in [false, true] {
            let (allow, allowed) = mpsc::channel();
            let (freed_by, freed) = mpsc::channel();
            let own = gpu.alloc(4096).expect("memory");
            let waits = Arc::new(gpu.alloc_host(4096).expect("memory"));
            let slow = SlowSlots { own, waits, allowed: Mutex::new(allowed), freed_by };
            let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
            let gpu = gpu.clone();
            let side = DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape: Vec::new() };
            let pair = DevicePair::remote(Box::new(slow), &side);
            let slots = runtime.block_on(async { Arc::new(LinkSlots::new(pair)) });
            let state = LinkState::new(Some(Arc::clone(&slots) as _));
            assert!(slots.take_if_unused(&state).is_none(), "the link is up");
            assert!(state.enter());
            state.set_down(LinkEnd::Closed);
            assert!(slots.take_if_unused(&state).is_none(), "a call uses it");
            assert!(slots.addresses().is_some_and(|(_, own)| own != DevicePtr::NULL));
            state.exit();
            if is_dropped {
                drop((slots, state));
            } else {
                drop(slots.take_if_unused(&state));
                assert!(
                    slots.addresses().is_none(),
                    "other threads see at once that they are gone"
                );
            }
            assert_eq!(freed.try_recv(), Err(mpsc::TryRecvError::Empty));
            allow.send(()).expect("it waits");
            assert_ne!(freed.recv_timeout(PATIENCE).expect("freed"), thread::current().id());
        }
    }

    #[test]
    fn a_link_that_left_its_place_ends_no_waits_for_the_next_one() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let word = Arc::new(gpu.alloc_host(4096).expect("memory"));
        let bit = |bit| AbortBit { word: Arc::clone(&word), bit };
        let bits = || abort_word(&word).expect("host memory").load(Ordering::SeqCst);
        let link = || {
            let (pair, abort) = (Mutex::new(None), Mutex::new(None));
            let slots = Arc::new(LinkSlots { pair, abort, waits: None });
            (LinkState::new(Some(Arc::clone(&slots) as _)), slots)
        };
        let (old, old_slots) = link();
        old_slots.abort_by(bit(3), &old);
        assert_eq!(bits(), 0);
        old.set_down(LinkEnd::Closed);
        assert_eq!(bits(), 1 << 3, "waits for it end");
        old_slots.leave_place();
        assert_eq!(bits(), 1 << 3, "waits of outstanding calls too");
        let (new, new_slots) = link();
        bit(3).clear();
        new_slots.abort_by(bit(3), &new);
        // The connector notices the end later than the lane.
        old.set_down(LinkEnd::Closed);
        assert_eq!(bits(), 0, "the next link is alive");
        new.set_down(LinkEnd::Left);
        assert_eq!(bits(), 1 << 3, "it has ended");
        // A link that ended before it got its place.
        let (late, late_slots) = link();
        late.set_down(LinkEnd::Closed);
        late_slots.abort_by(bit(5), &late);
        assert_eq!(bits(), 1 << 3 | 1 << 5);
    }
}
