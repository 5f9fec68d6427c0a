//! Memory that a GPU reaches, and copies to and from it that wait for their end.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::Instant;

use super::kind::Kind;
use super::{Gpu, GpuBuffer, GpuError, Stream};
use crate::abi::DevicePtr;

impl Gpu {
    /// Copies `bytes` to device memory and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Range`], [`GpuError::Foreign`], [`GpuError::Driver`], [`GpuError::Deadline`].
    pub fn write(
        &self,
        buffer: &GpuBuffer,
        offset: u64,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), GpuError> {
        self.check_kind(buffer)?;
        let to = buffer.at(offset, bytes.len() as u64)?;
        let (stream, staging) = self.staging(bytes.len())?;
        if let Some(host) = staging.host() {
            // SAFETY: fresh memory of at least this length.
            unsafe { host.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        }
        // SAFETY: the range was checked; the staging memory outlives the copy, see `settle`.
        let copied = unsafe { stream.copy(to, staging.ptr(), bytes.len() as u64) };
        settle(staging, copied.and_then(|()| stream.wait(deadline))).map(drop)
    }

    /// Copies device memory to `out` and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Range`], [`GpuError::Foreign`], [`GpuError::Driver`], [`GpuError::Deadline`].
    pub fn read(
        &self,
        buffer: &GpuBuffer,
        offset: u64,
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<(), GpuError> {
        let len = out.len();
        self.check_kind(buffer)?;
        let from = buffer.at(offset, len as u64)?;
        let (stream, staging) = self.staging(len)?;
        // SAFETY: the range was checked; the staging memory outlives the copy, see `settle`.
        let copied = unsafe { stream.copy(staging.ptr(), from, len as u64) };
        let staging = settle(staging, copied.and_then(|()| stream.wait(deadline)))?;
        if let Some(host) = staging.host() {
            // SAFETY: at least this length, and the copy into it is complete.
            unsafe { host.copy_to_nonoverlapping(NonNull::from(out).cast(), len) };
        }
        Ok(())
    }

    /// GPUs in software reach memory by this process's addresses, others by the driver's.
    const fn check_kind(&self, buffer: &GpuBuffer) -> Result<(), GpuError> {
        match (&self.0, &buffer.0) {
            (Kind::Driver(_), Kind::Driver(_)) | (Kind::Emulated(_), Kind::Emulated(_)) => Ok(()),
            _ => Err(GpuError::Foreign),
        }
    }

    fn staging(&self, len: usize) -> Result<(Stream, GpuBuffer), GpuError> {
        Ok((self.stream()?, self.alloc_host(len as u64)?))
    }
}

impl GpuBuffer {
    /// Address, for kernels and copies.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        either!(&self.0, memory => memory.ptr())
    }

    /// Bytes that can be used.
    #[must_use]
    pub fn len(&self) -> u64 {
        either!(&self.0, memory => memory.len())
    }

    /// Never true: empty buffers cannot be made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address for this process, if it is host memory.
    #[must_use]
    pub fn host(&self) -> Option<NonNull<u8>> {
        either!(&self.0, memory => memory.host())
    }

    /// Address of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`GpuError::Range`] when they leave the buffer.
    pub fn at(&self, offset: u64, len: u64) -> Result<DevicePtr, GpuError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(self.ptr().add(offset)),
            _ => Err(GpuError::Range { offset, len, buffer_bytes: self.len() }),
        }
    }

    /// A descriptor of this GPU memory's pages, by which a NIC registers them. From the first byte on.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when the driver, the kernel or the GPU cannot give one.
    pub fn dma_buf(&self) -> Result<OwnedFd, GpuError> {
        either!(&self.0, memory => memory.dma_buf())
    }

    /// A descriptor by which another process can map this memory, if it came from
    /// [`Gpu::alloc_shared`].
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn export(&self) -> Result<OwnedFd, GpuError> {
        either!(&self.0, memory => memory.export())
    }
}

/// A copy that may not have ended could still use its staging memory, which must then stay.
fn settle(staging: GpuBuffer, copied: Result<(), GpuError>) -> Result<GpuBuffer, GpuError> {
    match copied {
        Ok(()) => Ok(staging),
        Err(error) => {
            let _kept = std::mem::ManuallyDrop::new(staging);
            Err(error)
        }
    }
}
