//! The slots of one client, as the handshake gave them. All uses of the handshake's device types are here.

use std::sync::Arc;

use cuda_ipc::GpuMemory;
use kernels::abi::{DevicePtr, FrameGeometry, Link, PATH_DIRECT};
use kernels::gpu::{Gpu, GpuError, Stream};
use kernels::slots::{DevicePair, DeviceSide, PathError, RemoteSlots};
use p2p_core::device::DeviceMemory;
use p2p_core::slot::PROGRESS;
use p2p_core::{AnyEndpoint, Channel, TransportKind};

pub(super) use kernels::slots::KernelWaits;

/// Device slots of a client, and the host slots of its connection. Dropping it unmaps the client's slot.
#[derive(Debug)]
pub(crate) struct ClientSlots {
    pair: DevicePair,
    /// Carries no frames. It stays open as long as the link.
    channel: Channel<AnyEndpoint>,
}

/// The server's side of the handshake, which it offers to every client.
pub(super) fn server_side(gpu: &Gpu, geometry: &FrameGeometry) -> Arc<dyn DeviceMemory> {
    GpuMemory::offer(DeviceSide {
        gpu: gpu.clone(),
        own_slot_bytes: geometry.slot_bytes,
        peer_slot_bytes: geometry.response_slot_bytes,
        shape: geometry.describe().into_bytes(),
    })
}

impl ClientSlots {
    pub(super) const fn new(pair: DevicePair, channel: Channel<AnyEndpoint>) -> Self {
        Self { pair, channel }
    }

    /// The server's slot, which receives requests.
    pub(super) fn request(&self) -> DevicePtr {
        self.pair.own()
    }

    /// The path to the client's slot, which receives answers.
    pub(super) fn response(&self) -> Link {
        self.pair.link()
    }

    /// Returns true if kernels store answers into the client's memory themselves. Rows have no flags then.
    pub(super) fn is_stored_to(&self) -> bool {
        self.pair.link().path == PATH_DIRECT
    }

    /// Returns true if this GPU cannot reach the client's memory itself.
    pub(super) fn is_remote(&self) -> bool {
        self.pair.as_remote().is_some()
    }

    /// Transport of the slots.
    pub(super) fn kind(&self) -> TransportKind {
        match self.pair.as_remote() {
            Some(_) => self.channel.kind(),
            None => TransportKind::CudaIpc,
        }
    }

    /// The kernels' waits for the path to a remote client.
    pub(super) fn waits(&self) -> Option<KernelWaits> {
        Some(self.pair.as_remote()?.waits())
    }

    /// Checks the path to a remote client.
    pub(super) fn health(&self) -> Result<(), PathError> {
        self.pair.as_remote().map_or(Ok(()), RemoteSlots::health)
    }

    /// Adds 1 to the client's progress word. The outer result is the GPU's, the inner one that of the path to a
    /// remote client.
    pub(super) fn show_progress(
        &self,
        control: &Stream,
        geometry: &FrameGeometry,
    ) -> Result<Result<(), PathError>, GpuError> {
        let offset = geometry.response_control_offset + PROGRESS as u64;
        match self.pair.as_remote() {
            Some(remote) => Ok(remote.show_life(offset)),
            None => {
                // SAFETY: the word is aligned within the client's slot, which stays mapped until this stream is
                // done.
                unsafe { control.add_flag(self.pair.peer().add(offset), 1)? };
                Ok(Ok(()))
            }
        }
    }
}

#[cfg(test)]
pub(super) mod fake {
    //! Slots of a client over a network that never fails and carries nothing.

    use std::sync::Arc;

    use kernels::gpu::GpuBuffer;
    use p2p_core::backend::mapped::MappedEndpoint;
    use p2p_core::wait::event_fd;
    use p2p_core::{Region, SlotConfig, SlotKey, SlotLayout};

    use super::*;

    #[derive(Debug)]
    struct FakeSlots {
        own: GpuBuffer,
        waits: Arc<GpuBuffer>,
    }

    impl RemoteSlots for FakeSlots {
        fn own(&self) -> &GpuBuffer {
            &self.own
        }

        fn link(&self) -> Link {
            Link { window: self.own.ptr(), context: 0, path: PATH_DIRECT, reserved: 0 }
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

    /// The slots, and the word that ends the kernels' waits for them.
    pub(in crate::device) fn remote_slots(gpu: &Gpu) -> (ClientSlots, Arc<GpuBuffer>) {
        let waits = Arc::new(gpu.alloc_host(4096).expect("memory"));
        let slots = FakeSlots { own: gpu.alloc(4096).expect("memory"), waits: Arc::clone(&waits) };
        let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
        let gpu = gpu.clone();
        let side = DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape: Vec::new() };
        let pair = DevicePair::remote(Box::new(slots), &side);
        let layout = SlotLayout::new(SlotConfig::default()).expect("a layout");
        let slot = || Region::anonymous(layout.slot_bytes()).expect("memory");
        let event = Arc::new(event_fd().expect("an event"));
        let kind = TransportKind::Local;
        let endpoint = MappedEndpoint::new(kind, slot(), Arc::clone(&event), event);
        let endpoint = AnyEndpoint::Mapped(endpoint);
        let channel = Channel::new(endpoint, layout, slot(), SlotKey).expect("a channel");
        (ClientSlots::new(pair, channel), waits)
    }
}
