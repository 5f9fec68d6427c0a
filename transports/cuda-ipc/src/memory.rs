//! GPU memory as the handshake exchanges it.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use kernels::gpu::GpuBuffer;
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::device::{DeviceMemory, DeviceSlotError, DeviceSlots, OpenDeviceSlot};

/// Memory of a GPU for the slots of a connection.
///
/// Networks that carry device slots downcast [`DeviceMemory::as_any`] to [`DeviceSide`]; the pair that a handshake
/// joins is a [`DevicePair`].
#[derive(Debug, Clone)]
pub struct GpuMemory(DeviceSide);

impl GpuMemory {
    /// Offers `side` to peers, in the form that the handshake's configuration takes.
    #[must_use]
    pub fn offer(side: DeviceSide) -> Arc<dyn DeviceMemory> {
        Arc::new(Self(side))
    }
}

impl DeviceMemory for GpuMemory {
    fn own_slot_bytes(&self) -> u64 {
        self.0.own_slot_bytes
    }

    fn peer_slot_bytes(&self) -> u64 {
        self.0.peer_slot_bytes
    }

    fn shape(&self) -> &[u8] {
        &self.0.shape
    }

    fn as_any(&self) -> &dyn Any {
        &self.0
    }

    fn open(&self) -> Result<Box<dyn OpenDeviceSlot>, DeviceSlotError> {
        let own = self.0.gpu.alloc_shared(self.0.own_slot_bytes).map_err(DeviceSlotError::new)?;
        let descriptor = own.export().map_err(DeviceSlotError::new)?;
        Ok(Box::new(OpenGpuSlot { side: self.0.clone(), own, descriptor }))
    }
}

/// This side's slot before the peer's is known.
#[derive(Debug)]
struct OpenGpuSlot {
    side: DeviceSide,
    own: GpuBuffer,
    descriptor: OwnedFd,
}

impl OpenDeviceSlot for OpenGpuSlot {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    fn join(self: Box<Self>, peer: OwnedFd) -> Result<DeviceSlots, DeviceSlotError> {
        let Self { side, own, descriptor } = *self;
        drop(descriptor);
        let peer =
            side.gpu.import_shared(peer, side.peer_slot_bytes).map_err(DeviceSlotError::new)?;
        Ok(DeviceSlots::new(DevicePair::mapped(own, peer, &side)))
    }
}
