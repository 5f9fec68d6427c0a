//! A network whose first connection keeps back rows that kernels have announced.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::abi::{CONTROL_BYTES, DTYPE_BF16, FrameGeometry};
use p2p_core::endpoint::{Endpoint, Marks};
use p2p_core::network::{Joined, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, SlotLayout};

use super::*;

/// Which frames its first connection sends without their rows: those whose number is odd, or even. The
/// connections after it send all.
#[derive(Debug)]
pub struct WithholdingNetwork {
    inner: Arc<dyn Network>,
    odd: bool,
    num_connections: AtomicU64,
    num_withheld: Arc<AtomicU64>,
    /// Where a slot's rows end, and its words about frames begin.
    control_offset: usize,
}

impl WithholdingNetwork {
    pub fn over(inner: Arc<dyn Network>, odd: bool, model: &ClientModel) -> Self {
        let shape = &model.shape;
        let (frames, bytes) = (SLOT.num_frames as u32, SLOT.slot_bytes as u64);
        let tokens =
            FrameGeometry::tokens_for_slot(shape.hidden, shape.top_k, DTYPE_BF16, frames, bytes);
        let geometry = FrameGeometry::new(shape.hidden, shape.top_k, DTYPE_BF16, tokens, frames);
        let control_offset = geometry.expect("a geometry").slot_bytes - CONTROL_BYTES;
        let control_offset = control_offset as usize;
        let (num_connections, num_withheld) = Default::default();
        Self { inner, odd, num_connections, num_withheld, control_offset }
    }

    /// Frames that were sent without their rows.
    pub fn num_withheld(&self) -> u64 {
        self.num_withheld.load(Ordering::SeqCst)
    }
}

impl Network for WithholdingNetwork {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let inner = self.inner.open(layout, route)?;
        if self.num_connections.fetch_add(1, Ordering::SeqCst) > 0 {
            return Ok(inner);
        }
        let num_withheld = Arc::clone(&self.num_withheld);
        let (odd, control_offset) = (self.odd, self.control_offset);
        Ok(Box::new(Side { inner, odd, num_withheld, control_offset }))
    }
}

#[derive(Debug)]
struct Side {
    inner: Box<dyn OpenSide>,
    odd: bool,
    num_withheld: Arc<AtomicU64>,
    control_offset: usize,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        self.inner.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<Joined, NetworkError> {
        let Self { inner, odd, num_withheld, control_offset } = *self;
        let Joined { endpoint, slot } = inner.join(peer)?;
        let words = HashMap::new();
        let endpoint =
            Withholding { inner: endpoint, odd, last: 0, num_withheld, control_offset, words };
        Ok(Joined { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

#[derive(Debug)]
struct Withholding {
    inner: AnyEndpoint,
    odd: bool,
    /// The last frame that was withheld.
    last: u64,
    num_withheld: Arc<AtomicU64>,
    control_offset: usize,
    /// Of flags of rows: what they are for the sender, and what was not added for the receiver.
    words: HashMap<usize, (u64, u64)>,
}

impl Endpoint for Withholding {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        self.inner.register(region)
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.inner.driver()
    }

    fn health(&self) -> Result<(), PostError> {
        self.inner.health()
    }

    fn direct(&self, key: SlotKey) -> Option<NonNull<u8>> {
        self.inner.direct(key)
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        if dst.offset >= self.control_offset {
            return self.inner.add_flag(dst, value);
        }
        // A row's flag, whose value is the number of its frame.
        let (number, owed) = self.words.entry(dst.offset).or_default();
        *number = number.wrapping_add(value);
        *owed = owed.wrapping_add(value);
        if (*number % 2 == 1) == self.odd {
            if std::mem::replace(&mut self.last, *number) != *number {
                self.num_withheld.fetch_add(1, Ordering::SeqCst);
            }
            return Ok(());
        }
        self.inner.add_flag(dst, std::mem::take(owed))
    }

    fn add_flag_lazily(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.inner.add_flag_lazily(dst, value)
    }

    fn has_room(&mut self) -> bool {
        self.inner.has_room()
    }

    fn has_room_to_spare(&mut self) -> bool {
        self.inner.has_room_to_spare()
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.inner.fence()
    }

    fn try_fence(&mut self) -> Result<bool, PostError> {
        self.inner.try_fence()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.inner.quiet(deadline)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        self.inner.is_settled()
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        self.inner.marks()
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.inner.wake(key, waiting_offset)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}
