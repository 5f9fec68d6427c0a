//! The device slots of a connection: two slots in GPU memory that kernels read and write by themselves.
//!
//! A transport makes and joins them ([`DeviceSide`] in, [`DevicePair`] out). Services hand the addresses to kernels.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

use crate::abi::{DevicePtr, Link, PATH_DIRECT};
use crate::gpu::{Gpu, GpuBuffer};

/// One side's part of a connection with device slots. Both sides state both sizes, each from its own point of
/// view, and the same shape. The handshake ends with a rejection that names the difference otherwise.
#[derive(Debug, Clone)]
pub struct DeviceSide {
    /// The GPU that holds this side's slot. Its kernels store into the peer's slot.
    pub gpu: Gpu,
    /// Bytes of this side's slot, which the peer writes.
    pub own_slot_bytes: u64,
    /// Bytes of the peer's slot, which this side writes.
    pub peer_slot_bytes: u64,
    /// Everything else that both sides must have alike, at most 256 bytes. Compared as bytes, shown as text.
    pub shape: Vec<u8>,
}

/// The path to a peer is out of service.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{detail}")]
pub struct PathError {
    /// The transport's reason.
    pub detail: String,
}

impl PathError {
    /// Keeps the text of a transport's error.
    #[must_use]
    pub fn new(error: &impl fmt::Display) -> Self {
        Self { detail: error.to_string() }
    }
}

/// The device slots of a connection, one of each side.
///
/// Within a host each side maps the peer's slot. Dropping the pair unmaps it at once, so that a dead peer's GPU
/// memory is free for its successor. The own slot goes as well, but the GPU keeps the memory behind it as long as
/// the peer has it mapped: a late store of a stopped or slow peer lands in memory that nothing reads or reuses.
/// Over a network a transport carries what kernels name: [`RemoteSlots`].
///
/// Kernels of this process fault if memory that they use is unmapped. Stop launching, wait for running kernels,
/// then drop.
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

/// Device slots of two hosts. Kernels store into memory of this side and name the stored bytes; a transport
/// carries these over. The peer's bytes land in a slot that kernels of this side read.
pub trait RemoteSlots: fmt::Debug + Send + Sync {
    /// This side's slot, as this side's GPU reaches it.
    fn own(&self) -> &GpuBuffer;

    /// The path to the peer's slot, for kernels. Memory that it points to lives as long as this object.
    fn link(&self) -> Link;

    /// The word that ends the waits of kernels for the path itself.
    fn waits(&self) -> KernelWaits;

    /// Adds 1 to the progress word at `offset` of the peer's slot. Does nothing while other operations are
    /// outstanding, because the peer sees progress by these.
    ///
    /// # Errors
    /// [`PathError`] when the path is out of service.
    fn show_life(&self, offset: u64) -> Result<(), PathError>;

    /// Tells whether the path works, as far as is known.
    ///
    /// # Errors
    /// [`PathError`] with the reason when it is out of service.
    fn health(&self) -> Result<(), PathError>;
}

/// A word that kernels poll while they wait for the path to a peer.
#[derive(Debug, Clone)]
pub struct KernelWaits(Arc<GpuBuffer>);

impl KernelWaits {
    /// The first word of page-locked memory. Kernels poll its bit 0.
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
    /// Slots of one host, each mapped by both sides.
    #[must_use]
    pub const fn mapped(own: GpuBuffer, peer: GpuBuffer, side: &DeviceSide) -> Self {
        let (own_bytes, peer_bytes) = (side.own_slot_bytes, side.peer_slot_bytes);
        Self { slots: Slots::Mapped { peer, own }, own_bytes, peer_bytes }
    }

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

    /// The memory into which kernels of this process store data for the peer: the peer's slot, or its stand-in on
    /// this host.
    #[must_use]
    pub fn peer(&self) -> DevicePtr {
        self.link().window
    }

    /// Bytes of [`peer`](Self::peer), as agreed.
    #[must_use]
    pub const fn peer_bytes(&self) -> u64 {
        self.peer_bytes
    }

    /// The path to the peer's slot, for kernels.
    #[must_use]
    pub fn link(&self) -> Link {
        match &self.slots {
            Slots::Mapped { peer, .. } => {
                Link { window: peer.ptr(), context: 0, path: PATH_DIRECT, reserved: 0 }
            }
            Slots::Remote(slots) => slots.link(),
        }
    }

    /// The transport's side of the slots, if the peer is on another host.
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

    /// The peer's slot itself, for copies by [`Gpu::write`], if it is mapped here.
    #[must_use]
    pub const fn peer_memory(&self) -> Option<&GpuBuffer> {
        match &self.slots {
            Slots::Mapped { peer, .. } => Some(peer),
            Slots::Remote(_) => None,
        }
    }
}
