//! Peers whose posters are kernels: lanes in page-locked memory, shared state of posters in memory of the GPU.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, GpuError};
use p2p_core::Region;
use thiserror::Error;

use crate::abi::PeerHandle;
use crate::host::{PosterConfig, handle_bytes, peer_handle, sizes};
use crate::lane::{LaneConfig, LaneError, Lanes, SharedMemory};

/// Lanes or handles for kernels could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum GpuPosterError {
    /// The GPU refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The lanes cannot be made.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// Page-locked memory that this process cannot address.
    #[error("page-locked memory of {bytes} bytes has no address in this process")]
    NoAddress { bytes: u64 },
}

/// Page-locked memory that is freed with its last user.
#[derive(Debug)]
struct PageLockedMemory {
    buffer: GpuBuffer,
    ptr: NonNull<u8>,
}

// SAFETY: an address; the buffer behind it has no thread affinity.
unsafe impl Send for PageLockedMemory {}
// SAFETY: as above; nothing is changed.
unsafe impl Sync for PageLockedMemory {}

// SAFETY: the buffer is page-locked memory of this length as long as it lives, on pages of its own.
unsafe impl SharedMemory for PageLockedMemory {
    fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    fn len(&self) -> usize {
        self.buffer.len() as usize
    }

    fn device_address(&self) -> u64 {
        self.buffer.ptr().0
    }
}

impl PageLockedMemory {
    fn new(gpu: &Gpu, bytes: u64) -> Result<Arc<Self>, GpuPosterError> {
        let buffer = gpu.alloc_host(bytes)?;
        let ptr = buffer.host().ok_or(GpuPosterError::NoAddress { bytes })?;
        Ok(Arc::new(Self { buffer, ptr }))
    }
}

/// Lanes that kernels of `gpu` write.
///
/// # Errors
/// [`GpuPosterError`].
pub fn lanes(gpu: &Gpu, config: LaneConfig) -> Result<Lanes, GpuPosterError> {
    let memory = PageLockedMemory::new(gpu, config.bytes()? as u64)?;
    Ok(Lanes::new(memory, config)?)
}

/// Page-locked memory as a region, such as a mirror that kernels fill and any transport can read, and
/// its address for kernels.
///
/// # Errors
/// [`GpuPosterError`].
pub fn mirror(gpu: &Gpu, bytes: u64) -> Result<(Region, DevicePtr), GpuPosterError> {
    let memory = PageLockedMemory::new(gpu, bytes)?;
    let (ptr, address) = (memory.ptr.as_ptr(), memory.buffer.ptr());
    // SAFETY: the memory stays as long as its owner.
    let region = unsafe { Region::of_owner(ptr, bytes as usize, memory) };
    Ok((region.ok_or(GpuPosterError::NoAddress { bytes })?, address))
}

/// The shared state of a peer's posters on a GPU, and their handle.
#[derive(Debug)]
pub struct GpuPoster {
    memory: GpuBuffer,
    handle: PeerHandle,
    handle_offset: u64,
}

impl GpuPoster {
    /// Posters of `gpu` on `lanes`.
    ///
    /// # Errors
    /// [`GpuPosterError`].
    pub fn new(gpu: &Gpu, lanes: &Lanes, config: PosterConfig) -> Result<Self, GpuPosterError> {
        Self::on_first(gpu, lanes, lanes.config().num_lanes, config)
    }

    /// Posters on the first `num_lanes` of `lanes`; the host has the others.
    pub(crate) fn on_first(
        gpu: &Gpu,
        lanes: &Lanes,
        num_lanes: u32,
        config: PosterConfig,
    ) -> Result<Self, GpuPosterError> {
        let (handles, states) = sizes(num_lanes);
        let handle_offset = (handles + states) as u64;
        let memory = gpu.alloc(handle_offset + size_of::<PeerHandle>() as u64)?;
        let base = memory.ptr().0;
        let handle = peer_handle(config, num_lanes, base)?;
        let deadline = Instant::now() + SETUP_LIMIT;
        gpu.write(&memory, 0, &handle_bytes(lanes, num_lanes, base + handles as u64), deadline)?;
        gpu.write(&memory, handle_offset, bytemuck::bytes_of(&handle), deadline)?;
        Ok(Self { memory, handle, handle_offset })
    }

    /// The handle.
    #[must_use]
    pub const fn handle(&self) -> &PeerHandle {
        &self.handle
    }

    /// Address of the handle for kernels: `sy_link.context`.
    #[must_use]
    pub fn address(&self) -> DevicePtr {
        self.memory.ptr().add(self.handle_offset)
    }
}

const SETUP_LIMIT: Duration = Duration::from_secs(10);
