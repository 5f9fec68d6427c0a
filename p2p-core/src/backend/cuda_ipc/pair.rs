//! The device slots of a connection: made and exchanged by the handshake, driven by kernels alone.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kernels::abi::{DevicePtr, Link, PATH_DIRECT};
use kernels::gpu::{Gpu, GpuBuffer};

use super::{DeviceError, blocking};
use crate::endpoint::PostError;

/// What one side of a connection brings for device slots. Both sides name both sizes, each from its own
/// point of view, and the same shape; otherwise the handshake ends with a rejection that says why.
#[derive(Debug, Clone)]
pub struct DeviceSide {
    /// Whose memory the own slot lies in, and whose kernels store into the peer's.
    pub gpu: Gpu,
    /// Bytes of this side's slot, which the peer writes.
    pub own_slot_bytes: u64,
    /// Bytes of the peer's slot, which this side writes.
    pub peer_slot_bytes: u64,
    /// What both sides must have alike beside the sizes, at most
    /// [`MAX_SHAPE_BYTES`](crate::bootstrap::wire::MAX_SHAPE_BYTES). Compared as bytes, shown as text.
    pub shape: Vec<u8>,
}

/// The device slots of a connection, one of each side.
///
/// Within a host each side maps the peer's slot. Dropping the pair unmaps it at once, so that a dead
/// peer's GPU memory is free for its successor. The own slot goes as well, but the GPU keeps the memory
/// behind it as long as the peer has it mapped: a late store of a stopped or slow peer lands in memory
/// that nobody reads or reuses. Over a network somebody carries what kernels name: [`RemoteSlots`].
///
/// Kernels of this process fault if what they use is unmapped. Stop launching, wait for what runs, then
/// drop.
#[derive(Debug)]
pub struct DevicePair {
    slots: Slots,
    own_bytes: u64,
    peer_bytes: u64,
}

#[derive(Debug)]
enum Slots {
    Mapped {
        // First, so that the peer's memory is free as soon as possible.
        peer: GpuBuffer,
        own: GpuBuffer,
    },
    Remote(Box<dyn RemoteSlots>),
}

/// Device slots of two hosts. Kernels store into memory of this side and name what they stored, and
/// somebody carries it over; what the peer sends lands in a slot that kernels of this side read.
pub trait RemoteSlots: fmt::Debug + Send + Sync {
    /// This side's slot, as this side's GPU reaches it.
    fn own(&self) -> &GpuBuffer;

    /// The way to the peer's slot. What it points to lives as long as this.
    fn link(&self) -> Link;

    /// What ends the waits of kernels for the way itself.
    fn waits(&self) -> KernelWaits;

    /// Adds 1 to a word by which the peer sees that this side is at work. Not done where other things are
    /// in the way: those show as much.
    ///
    /// # Errors
    /// [`PostError`] when the way is out of service.
    fn show_life(&self, offset: u64) -> Result<(), PostError>;

    /// Why the way is out of service, if it is.
    ///
    /// # Errors
    /// [`PostError`].
    fn health(&self) -> Result<(), PostError>;
}

/// A word that kernels look at while they wait for the way to a peer.
#[derive(Debug, Clone)]
pub struct KernelWaits(Arc<GpuBuffer>);

impl KernelWaits {
    /// The first word of page-locked memory, of which kernels look at bit 0.
    #[must_use]
    pub const fn new(memory: Arc<GpuBuffer>) -> Self {
        Self(memory)
    }

    /// Ends all waits, for good: the peer is gone.
    pub fn end(&self) {
        if let Some(host) = self.0.host() {
            // SAFETY: aligned memory of at least a page, alive as long as `self`; used atomically.
            let word = unsafe { AtomicU32::from_ptr(host.as_ptr().cast()) };
            word.fetch_or(1, Ordering::Release);
        }
    }
}

impl DevicePair {
    /// Slots of two hosts.
    #[must_use]
    pub fn remote(slots: Box<dyn RemoteSlots>, side: &DeviceSide) -> Self {
        let (own_bytes, peer_bytes) = (side.own_slot_bytes, side.peer_slot_bytes);
        Self { slots: Slots::Remote(slots), own_bytes, peer_bytes }
    }

    /// This side's slot, as its own GPU reaches it; all zeros until the peer stores into it.
    #[must_use]
    pub fn own(&self) -> DevicePtr {
        self.own_memory().ptr()
    }

    /// Bytes of [`own`](Self::own), as agreed.
    #[must_use]
    pub const fn own_bytes(&self) -> u64 {
        self.own_bytes
    }

    /// Where kernels of this process store what is for the peer: its slot, or what stands in for it.
    #[must_use]
    pub fn peer(&self) -> DevicePtr {
        self.link().window
    }

    /// Bytes of [`peer`](Self::peer), as agreed.
    #[must_use]
    pub const fn peer_bytes(&self) -> u64 {
        self.peer_bytes
    }

    /// The way to the peer's slot, for kernels.
    #[must_use]
    pub fn link(&self) -> Link {
        match &self.slots {
            Slots::Mapped { peer, .. } => {
                Link { window: peer.ptr(), context: 0, path: PATH_DIRECT, reserved: 0 }
            }
            Slots::Remote(slots) => slots.link(),
        }
    }

    /// What there is beside the slots where the peer is reached over a network.
    #[must_use]
    pub fn as_remote(&self) -> Option<&dyn RemoteSlots> {
        match &self.slots {
            Slots::Mapped { .. } => None,
            Slots::Remote(slots) => Some(slots.as_ref()),
        }
    }

    /// Memory of [`own`](Self::own), for copies by [`Gpu::read`].
    #[must_use]
    pub fn own_memory(&self) -> &GpuBuffer {
        match &self.slots {
            Slots::Mapped { own, .. } => own,
            Slots::Remote(slots) => slots.own(),
        }
    }

    /// The peer's slot itself, for copies by [`Gpu::write`], where it is mapped here.
    #[must_use]
    pub const fn peer_memory(&self) -> Option<&GpuBuffer> {
        match &self.slots {
            Slots::Mapped { peer, .. } => Some(peer),
            Slots::Remote(_) => None,
        }
    }
}

/// This side's slot before the peer's is known.
#[derive(Debug)]
pub(crate) struct DeviceHalf {
    side: DeviceSide,
    own: GpuBuffer,
    descriptor: OwnedFd,
}

impl DeviceHalf {
    /// Makes this side's slot, zeroed.
    pub(crate) async fn create(side: DeviceSide) -> Result<Self, DeviceError> {
        blocking(move || {
            let own = side.gpu.alloc_shared(side.own_slot_bytes)?;
            let descriptor = own.export()?;
            Ok(Self { side, own, descriptor })
        })
        .await
    }

    /// What the peer needs to map this side's slot.
    pub(crate) const fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Maps the peer's slot. The descriptor of the own one is closed.
    pub(crate) async fn join(self, peer: OwnedFd) -> Result<DevicePair, DeviceError> {
        blocking(move || {
            let Self { side, own, descriptor } = self;
            drop(descriptor);
            let (own_bytes, peer_bytes) = (side.own_slot_bytes, side.peer_slot_bytes);
            let peer = side.gpu.import_shared(peer, peer_bytes)?;
            Ok(DevicePair { slots: Slots::Mapped { peer, own }, own_bytes, peer_bytes })
        })
        .await
    }
}
