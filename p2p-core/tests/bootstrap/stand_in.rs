//! Networks that stand in for networks which do not reach the peer.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::{
    AnyEndpoint, Endpoint, LocalRange, PostError, QuietError, Region, RemoteRange, SlotKey,
    SlotLayout, TransportKind,
};

/// A network whose peers join, unless they refuse, and whose operations succeed without any effect.
/// A filtered port looks like that. On request it works, within the process.
#[derive(Debug)]
pub struct StandIn {
    kind: TransportKind,
    flavour: &'static str,
    /// Number of sides that were opened.
    pub num_opened: AtomicUsize,
    /// No side can be opened.
    pub is_absent: AtomicBool,
    refuses: Arc<AtomicBool>,
    /// Number of next links that carry nothing.
    num_filtered: Arc<AtomicUsize>,
    joining_ms: AtomicU64,
    ends: Arc<Ends>,
}

impl StandIn {
    pub fn new(kind: TransportKind, flavour: &'static str) -> Arc<Self> {
        Arc::new(Self {
            kind,
            flavour,
            num_opened: AtomicUsize::new(0),
            is_absent: AtomicBool::new(false),
            refuses: Arc::default(),
            num_filtered: Arc::new(AtomicUsize::new(usize::MAX)),
            joining_ms: AtomicU64::new(0),
            ends: Arc::default(),
        })
    }

    /// Makes the next `num_links` links carry nothing. Later links work.
    #[allow(dead_code, reason = "not every user of this file has links that carry")]
    pub fn filter_next(&self, num_links: usize) {
        self.num_filtered.store(num_links, Ordering::SeqCst);
    }

    /// Makes joining take this side so long, from the next side on.
    #[allow(dead_code, reason = "not every user of this file joins slowly")]
    pub fn join_within(&self, time: Duration) {
        self.joining_ms.store(time.as_millis() as u64, Ordering::SeqCst);
    }

    /// Makes the drop of a side or a link wait until this is called with `false`, as slots wait for
    /// kernels.
    #[allow(dead_code, reason = "not every user of this file has ends that last")]
    pub fn hold_ends(&self, holds: bool) {
        self.ends.change(|ends| ends.are_held = holds);
    }

    /// Number of drops that wait, and of drops that waited in vain up to the limit.
    #[allow(dead_code, reason = "not every user of this file has ends that last")]
    pub fn ends(&self) -> (usize, usize) {
        let ends = self.ends.state.lock().expect("ends");
        (ends.num_waiting, ends.num_in_vain)
    }

    /// Lets this side refuse to join, or join again.
    pub fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::SeqCst);
    }

    pub fn opened(&self) -> usize {
        self.num_opened.load(Ordering::SeqCst)
    }

    fn error(&self, op: &'static str) -> NetworkError {
        let detail = "no path to the peer".to_owned();
        NetworkError { network: self.flavour.to_owned(), op, code: Some(-113), detail }
    }
}

impl Network for StandIn {
    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn flavour(&self) -> &str {
        self.flavour
    }

    fn open(&self, layout: &SlotLayout, _: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        self.num_opened.fetch_add(1, Ordering::SeqCst);
        if self.is_absent.load(Ordering::SeqCst) {
            return Err(self.error("open"));
        }
        let slot = Region::anonymous(layout.slot_bytes()).expect("memory");
        let refusal = self.refuses.load(Ordering::SeqCst).then(|| self.error("join"));
        let key = NEXT_KEY.fetch_add(1, Ordering::SeqCst);
        SLOTS.lock().expect("slots").insert(key, slot.clone());
        let num_filtered = Arc::clone(&self.num_filtered);
        let joining = Duration::from_millis(self.joining_ms.load(Ordering::SeqCst));
        let end = End(Arc::clone(&self.ends));
        Ok(Box::new(Side { kind: self.kind, slot, key, refusal, num_filtered, joining, end }))
    }
}

#[derive(Debug, Default)]
struct Ends {
    state: Mutex<EndsState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct EndsState {
    are_held: bool,
    num_waiting: usize,
    num_in_vain: usize,
}

impl Ends {
    fn change(&self, change: impl FnOnce(&mut EndsState)) {
        change(&mut self.state.lock().expect("ends"));
        self.changed.notify_all();
    }
}

/// A value whose drop may have to wait.
#[derive(Debug)]
struct End(Arc<Ends>);

impl Drop for End {
    fn drop(&mut self) {
        let Ok(mut state) = self.0.state.lock() else { return };
        state.num_waiting += 1;
        let waited = self.0.changed.wait_timeout_while(state, END_LIMIT, |ends| ends.are_held);
        let Ok((mut state, waited)) = waited else { return };
        state.num_waiting -= 1;
        state.num_in_vain += usize::from(waited.timed_out());
    }
}

/// Limit of that wait. Without it, a test whose own threads wait would hang instead of failing.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Slots of this process by their remote keys.
static SLOTS: LazyLock<Mutex<HashMap<u64, Region>>> = LazyLock::new(Mutex::default);
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
struct Side {
    kind: TransportKind,
    slot: Region,
    key: u64,
    refusal: Option<NetworkError>,
    num_filtered: Arc<AtomicUsize>,
    joining: Duration,
    end: End,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        let (bytes, remote_key) = (self.slot.len() as u64, self.key);
        SideDescription { bytes, remote_key, ..SideDescription::default() }
    }

    fn join(self: Box<Self>, theirs: &SideDescription) -> Result<JoinedSide, NetworkError> {
        std::thread::sleep(self.joining);
        if let Some(error) = self.refusal {
            return Err(error);
        }
        let one_less = |num: usize| num.checked_sub(1).filter(|_| num < usize::MAX);
        let is_filtered = self.num_filtered.load(Ordering::SeqCst) > 0;
        let _ = self.num_filtered.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
        let peer = SLOTS.lock().expect("slots").get(&theirs.remote_key).cloned();
        let peer = peer.filter(|_| !is_filtered);
        let endpoint =
            AnyEndpoint::Other(Box::new(StandInEndpoint { kind: self.kind, peer, _end: self.end }));
        Ok(JoinedSide { endpoint, slot: self.slot })
    }
}

/// Reaches the peer's slot, if the link works.
#[derive(Debug)]
struct StandInEndpoint {
    kind: TransportKind,
    peer: Option<Region>,
    _end: End,
}

impl StandInEndpoint {
    fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        Some(self.peer.as_ref()?.range(offset, len).expect("a range of the slot").as_ptr())
    }
}

impl Endpoint for StandInEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn register(&mut self, _: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        if let Some(at) = self.at(dst.offset, src.len()) {
            // SAFETY: both ranges are checked, mapped, and of different slots. A reader of the
            // target waits for a flag behind it.
            unsafe { src.as_ptr().copy_to_nonoverlapping(at, src.len()) };
        }
        Ok(())
    }

    unsafe fn get(&mut self, _: LocalRange, _: RemoteRange<SlotKey>) -> Result<(), PostError> {
        Ok(())
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        if let Some(at) = self.at(dst.offset, 8) {
            // SAFETY: the word is mapped, at a multiple of 8 from the start of a page, and code
            // accesses flags only atomically.
            let flag = unsafe { AtomicU64::from_ptr(at.as_ptr().cast()) };
            flag.fetch_add(value, Ordering::SeqCst);
        }
        Ok(())
    }

    fn fence(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    fn quiet(&mut self, _: Instant) -> Result<(), QuietError> {
        Ok(())
    }

    fn wake(&mut self, _: SlotKey, _: usize) -> Result<(), PostError> {
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

p2p_core::unbatched!(StandInEndpoint);
p2p_core::immediate_progress!(StandInEndpoint);
