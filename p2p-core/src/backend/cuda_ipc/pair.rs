//! The device slots of a connection: made and exchanged by the handshake, driven by kernels alone.

use std::os::fd::OwnedFd;

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer};

use super::{DeviceError, blocking};

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
/// Dropping it unmaps the peer's slot at once, so that a dead peer's GPU memory is free for its
/// successor. The own slot goes as well, but the GPU keeps the memory behind it as long as the peer has
/// it mapped: a late store of a stopped or slow peer lands in memory that nobody reads or reuses.
///
/// Kernels of this process fault if what they use is unmapped. Stop launching, wait for what runs, then
/// drop.
#[derive(Debug)]
pub struct DevicePair {
    // First, so that the peer's memory is free as soon as possible.
    peer: GpuBuffer,
    own: GpuBuffer,
    own_bytes: u64,
    peer_bytes: u64,
}

impl DevicePair {
    /// This side's slot, in its own GPU's memory; all zeros until the peer stores into it.
    #[must_use]
    pub fn own(&self) -> DevicePtr {
        self.own.ptr()
    }

    /// Bytes of [`own`](Self::own), as agreed.
    #[must_use]
    pub const fn own_bytes(&self) -> u64 {
        self.own_bytes
    }

    /// The peer's slot, mapped for kernels and copies of this process.
    #[must_use]
    pub fn peer(&self) -> DevicePtr {
        self.peer.ptr()
    }

    /// Bytes of [`peer`](Self::peer), as agreed.
    #[must_use]
    pub const fn peer_bytes(&self) -> u64 {
        self.peer_bytes
    }

    /// Memory of [`own`](Self::own), for copies by [`Gpu::read`].
    #[must_use]
    pub const fn own_memory(&self) -> &GpuBuffer {
        &self.own
    }

    /// Memory of [`peer`](Self::peer), for copies by [`Gpu::write`].
    #[must_use]
    pub const fn peer_memory(&self) -> &GpuBuffer {
        &self.peer
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
            Ok(DevicePair { peer, own, own_bytes, peer_bytes })
        })
        .await
    }
}
