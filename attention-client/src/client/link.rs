//! A connection to one server, as the lane that owns it sees it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use kernels::gpu::GpuBuffer;
use kernels::slots::{DevicePair, KernelWaits};
use p2p_core::bootstrap::{Aside, CloseReason, Liveness};
use p2p_core::{AnyEndpoint, Channel, ChannelError, Kicker};
use tokio::sync::{Notify, oneshot};

use crate::metrics::FailReason;
use crate::placement::Server;

/// How the control side tells a lane that there is something to look at.
#[derive(Debug)]
pub(crate) struct LaneNews {
    count: AtomicU64,
    kicker: Kicker,
}

impl LaneNews {
    pub fn new(kicker: Kicker) -> Self {
        Self { count: AtomicU64::new(0), kicker }
    }

    /// Announces what was stored before.
    pub fn announce(&self) {
        self.count.fetch_add(1, Ordering::Release);
        self.kicker.kick();
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }
}

/// What lane and connector both see of a link.
#[derive(Debug, Default)]
pub(crate) struct LinkState {
    /// 0 while up, else a [`Down`].
    down: AtomicU8,
    /// Frames published and unanswered; of a device link, calls whose kernels may use its slots.
    pub in_flight: AtomicU32,
    /// Something came over the link.
    carried: AtomicBool,
    /// Told once, when that happens.
    first_carried: Notify,
    /// Ends the waits of kernels for this peer, as long as the link has its seat. Locked while the bit is
    /// set, so that nobody sets it when the seat is another link's.
    abort: Mutex<Option<AbortBit>>,
    /// Ends those for the way to it, where it is no mapped memory.
    waits: OnceLock<KernelWaits>,
}

/// Bit of a peer in a word of host memory that waiting kernels look at.
#[derive(Debug)]
pub(crate) struct AbortBit {
    /// Page-locked host memory, which begins with the word.
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
    // everybody uses the word atomically.
    memory.host().map(|host| unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) })
}

/// Device slots that go when neither a call nor the connection needs them. Whoever lets go of them does not wait
/// for that: it may be the thread that is to end what kernels wait for, and memory goes when they have ended.
#[derive(Debug)]
pub(crate) struct PairCell {
    pair: Mutex<Option<Aside<DevicePair>>>,
}

impl PairCell {
    pub fn new(pair: DevicePair) -> Self {
        Self { pair: Mutex::new(Some(Aside::new(pair))) }
    }

    /// Takes the slots out if the link is down and no call uses it.
    pub fn take_if_unused(&self, state: &LinkState) -> Option<Aside<DevicePair>> {
        // A call counts itself first and looks whether the link is down then; who takes it down looks at
        // the count afterwards. So one of the two sees the other.
        fence(Ordering::SeqCst);
        let is_unused = state.down().is_some() && state.in_flight.load(Ordering::SeqCst) == 0;
        if is_unused { self.lock().take() } else { None }
    }

    pub fn lock(&self) -> MutexGuard<'_, Option<Aside<DevicePair>>> {
        self.pair.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LinkState {
    /// Of a link over `device` slots.
    pub fn new(device: Option<&DevicePair>) -> Self {
        let state = Self::default();
        if let Some(remote) = device.and_then(DevicePair::as_remote) {
            let _ = state.waits.set(remote.waits());
        }
        state
    }

    /// Something came over the link: the transport works.
    pub fn note_carried(&self) {
        if !self.has_carried() && !self.carried.swap(true, Ordering::Relaxed) {
            self.first_carried.notify_one();
        }
    }

    /// Completes when the first bytes come over the link, once. For the link's connector.
    pub async fn carried(&self) {
        self.first_carried.notified().await;
    }

    /// Whether anything ever came over the link.
    pub fn has_carried(&self) -> bool {
        self.carried.load(Ordering::Relaxed)
    }

    pub fn set_down(&self, reason: Down) {
        let _ = self.down.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if let Some(abort) = &*self.abort_bit() {
            abort.set();
        }
        self.end_waits();
    }

    /// Ends what kernels wait for on the way to the server, for good: it has been given up.
    pub fn end_waits(&self) {
        if let Some(waits) = self.waits.get() {
            waits.end();
        }
    }

    /// From now on the link's end sets this bit; if it has ended already, it is set here.
    pub fn abort_by(&self, abort: AbortBit) {
        let mut place = self.abort_bit();
        if self.down().is_some() {
            abort.set();
        }
        *place = Some(abort);
    }

    /// The link, which is down, leaves its seat: the bit is no longer its own.
    pub fn leave_seat(&self) {
        self.abort_bit().take();
    }

    fn abort_bit(&self) -> MutexGuard<'_, Option<AbortBit>> {
        self.abort.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call whose kernels will use the link's slots. `false`, and not counted, when it is down.
    pub fn enter(&self) -> bool {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.down().is_some() {
            self.in_flight.fetch_sub(1, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// The call's kernels have ended.
    pub fn exit(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn down(&self) -> Option<Down> {
        match self.down.load(Ordering::Acquire) {
            0 => None,
            code if code == Down::Closed as u8 => Some(Down::Closed),
            _ => Some(Down::Left),
        }
    }
}

/// Why the connection of a link is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Down {
    /// The server closed it, or is gone.
    Closed = 1,
    /// This side closed it because the server left the placement.
    Left = 2,
}

impl Down {
    pub const fn reason(self) -> FailReason {
        match self {
            Self::Closed => FailReason::Closed,
            Self::Left => FailReason::Left,
        }
    }
}

/// A frame that was published and not yet answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub sequence: u64,
    pub frame_idx: u32,
    pub layer: u32,
    pub num_tokens: u32,
    /// Frame of the lane's current call, or [`ABANDONED`].
    pub frame: u32,
}

/// The frame belongs to a call that nobody waits for any more.
pub(crate) const ABANDONED: u32 = u32::MAX;

/// What the connector gets back when a lane is through with a link.
#[derive(Debug)]
pub(crate) struct Retired {
    /// Kept until the connection is closed: a late write of the peer lands in memory that nobody
    /// reads, and the memory goes when the peer cannot write any more.
    pub channel: Aside<Channel<AnyEndpoint>>,
    pub reason: FailReason,
    /// If no place was free for the link, how often one had become free.
    pub turned_away: Option<u64>,
}

/// One slot pair to one server, owned by one lane.
#[derive(Debug)]
pub(crate) struct Link {
    pub server: Arc<Server>,
    pub generation: u32,
    pub channel: Aside<Channel<AnyEndpoint>>,
    pub state: Arc<LinkState>,
    pub liveness: Arc<Liveness>,
    /// Slots in GPU memory, of a device client's links.
    pub device: Option<Arc<PairCell>>,
    pub pending: Vec<Pending>,
    /// Frames of the current call that wait for credit.
    pub queue: VecDeque<u32>,
    /// Last seen value of the peer's activity, and when it last changed.
    pub activity: u64,
    pub last_life: Instant,
    /// When the last frame was accepted or answered, or the first one began to wait.
    pub last_step: Instant,
    /// Answers read whose frames the server has not got back yet.
    num_owed: u32,
    retire: oneshot::Sender<Retired>,
}

impl Link {
    pub fn new(
        server: Arc<Server>,
        generation: u32,
        channel: Aside<Channel<AnyEndpoint>>,
        state: Arc<LinkState>,
        liveness: Arc<Liveness>,
        device: Option<Arc<PairCell>>,
        retire: oneshot::Sender<Retired>,
    ) -> Self {
        let num_frames = channel.layout().num_frames();
        let now = Instant::now();
        Self {
            server,
            generation,
            activity: channel.peer_activity(),
            channel,
            state,
            liveness,
            device,
            // A server takes frames out of the ring before it answers them.
            pending: Vec::with_capacity(4 * num_frames),
            queue: VecDeque::with_capacity(4 * num_frames),
            last_life: now,
            last_step: now,
            num_owed: 0,
            retire,
        }
    }

    /// Whether frames are outstanding or wait for credit.
    pub fn is_active(&self) -> bool {
        !self.pending.is_empty() || !self.queue.is_empty()
    }

    /// Looks at what is known of the connection: one word, which the thread that holds it writes. The
    /// connector sees its end too, but on another thread that has to be scheduled first.
    pub fn note_closed(&self) -> bool {
        match self.liveness.closed_now() {
            None => return false,
            Some(CloseReason::Local) => self.state.set_down(Down::Left),
            Some(_) => self.state.set_down(Down::Closed),
        }
        true
    }

    /// Whether there is something to do: an answer, or credit for a waiting frame.
    pub fn has_work(&self) -> bool {
        self.channel.has_frame()
            || (!self.queue.is_empty() && self.channel.has_news())
            || self.channel.health().is_err()
    }

    /// Notes a sign of life.
    pub fn observe_life(&mut self, now: Instant) {
        let activity = self.channel.peer_activity();
        if activity != self.activity {
            self.activity = activity;
            self.last_life = now;
            self.state.note_carried();
            // Only written when it changes: the line is shared by all lanes.
            if self.server.silenced.load(Ordering::Relaxed) {
                self.server.silenced.store(false, Ordering::Relaxed);
            }
        }
    }

    /// A frame of the current call waits for credit.
    pub fn enqueue(&mut self, frame: u32, now: Instant) {
        if !self.is_active() {
            // The clocks start here: before, silence meant nothing.
            (self.last_life, self.last_step) = (now, now);
            self.activity = self.channel.peer_activity();
        }
        self.queue.push_back(frame);
    }

    /// The first waiting frame was published.
    pub fn push_pending(&mut self, pending: Pending, now: Instant) {
        self.queue.pop_front();
        self.pending.push(pending);
        self.last_step = now;
        self.state.in_flight.store(self.pending.len() as u32, Ordering::Relaxed);
    }

    /// A published frame was answered.
    pub fn remove_pending(&mut self, position: usize, now: Instant) {
        self.pending.remove(position);
        self.state.note_carried();
        self.last_step = now;
        self.state.in_flight.store(self.pending.len() as u32, Ordering::Relaxed);
    }

    /// An answer was read: the server gets its frame back. The last one of a call waits for the next
    /// request, if the ring has another: given back on its own it would wake a server that has
    /// nothing to do.
    pub fn owe_credit(&mut self) -> Result<(), ChannelError> {
        self.num_owed += 1;
        if self.is_active() || self.channel.layout().num_frames() == 1 {
            return self.give_credit();
        }
        while self.num_owed > 1 {
            self.channel.release()?;
            self.num_owed -= 1;
        }
        Ok(())
    }

    /// Gives all frames of answers back.
    pub fn give_credit(&mut self) -> Result<(), ChannelError> {
        while self.num_owed > 0 {
            self.channel.release()?;
            self.num_owed -= 1;
        }
        Ok(())
    }

    /// Gives the slots to the connector, which closes the connection and then frees them.
    pub fn retire(self: Box<Self>, reason: FailReason) {
        self.give_back(reason, None);
    }

    /// As [`retire`](Self::retire), where all places are taken: the connector comes back when more than `freed`
    /// have become free.
    pub fn turn_away(self: Box<Self>, freed: u64) {
        self.give_back(FailReason::Left, Some(freed));
    }

    fn give_back(self: Box<Self>, reason: FailReason, turned_away: Option<u64>) {
        let Self { channel, retire, .. } = *self;
        // The connector may be gone, or no longer listen: then so is the connection, and the slots go aside.
        let _ = retire.send(Retired { channel, reason, turned_away });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use kernels::abi::{self, DevicePtr, WAY_DIRECT};
    use kernels::gpu::Gpu;
    use kernels::slots::{DeviceSide, PathError, RemoteSlots};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Slots whose memory goes when it is allowed to, and say which thread waited for that.
    #[derive(Debug)]
    struct Slow {
        own: GpuBuffer,
        waits: Arc<GpuBuffer>,
        allowed: Mutex<mpsc::Receiver<()>>,
        freed_by: mpsc::Sender<ThreadId>,
    }

    impl RemoteSlots for Slow {
        fn own(&self) -> &GpuBuffer {
            &self.own
        }

        fn link(&self) -> abi::Link {
            abi::Link { window: self.own.ptr(), context: 0, way: WAY_DIRECT, reserved: 0 }
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

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.allowed.get_mut().map(|allowed| allowed.recv_timeout(PATIENCE));
            let _ = self.freed_by.send(thread::current().id());
        }
    }

    #[test]
    fn who_lets_go_of_slots_does_not_wait_for_kernels() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        // The end of a call, or of the last that knows them.
        for is_dropped in [false, true] {
            let (allow, allowed) = mpsc::channel();
            let (freed_by, freed) = mpsc::channel();
            let own = gpu.alloc(4096).expect("memory");
            let waits = Arc::new(gpu.alloc_host(4096).expect("memory"));
            let slow = Slow { own, waits, allowed: Mutex::new(allowed), freed_by };
            let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
            let gpu = gpu.clone();
            let side = DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape: Vec::new() };
            let pair = DevicePair::remote(Box::new(slow), &side);
            let state = LinkState::new(Some(&pair));
            let cell = runtime.block_on(async { PairCell::new(pair) });
            assert!(cell.take_if_unused(&state).is_none(), "the link is up");
            assert!(state.enter());
            state.set_down(Down::Closed);
            assert!(cell.take_if_unused(&state).is_none(), "a call uses it");
            assert!(cell.lock().as_ref().is_some_and(|pair| pair.own() != DevicePtr::NULL));
            state.exit();
            if is_dropped {
                drop(cell);
            } else {
                drop(cell.take_if_unused(&state));
                assert!(cell.lock().is_none(), "nobody is kept from looking");
            }
            assert_eq!(freed.try_recv(), Err(mpsc::TryRecvError::Empty));
            allow.send(()).expect("it waits");
            assert_ne!(freed.recv_timeout(PATIENCE).expect("freed"), thread::current().id());
        }
    }

    #[test]
    fn a_link_that_left_its_seat_ends_no_waits_for_the_next_one() {
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let word = Arc::new(gpu.alloc_host(4096).expect("memory"));
        let bit = || AbortBit { word: Arc::clone(&word), bit: 3 };
        let bits = || abort_word(&word).expect("host memory").load(Ordering::SeqCst);
        let old = LinkState::default();
        old.abort_by(bit());
        assert_eq!(bits(), 0);
        old.set_down(Down::Closed);
        assert_eq!(bits(), 1 << 3, "waits for it end");
        old.leave_seat();
        assert_eq!(bits(), 1 << 3, "those that are still under way, too");
        let new = LinkState::default();
        bit().clear();
        new.abort_by(bit());
        // The connector comes to it later than the lane.
        old.set_down(Down::Closed);
        assert_eq!(bits(), 0, "the next link is alive");
        new.set_down(Down::Left);
        assert_eq!(bits(), 1 << 3, "it has ended");
        // One that ended before it got its seat.
        let (late, bit) = (LinkState::default(), AbortBit { word: Arc::clone(&word), bit: 5 });
        late.set_down(Down::Closed);
        late.abort_by(bit);
        assert_eq!(bits(), 1 << 3 | 1 << 5);
    }
}
