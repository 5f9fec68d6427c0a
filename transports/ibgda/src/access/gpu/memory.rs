//! Memory that a GPU and a NIC reach: the GPU's own, or page-locked pages of the host.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::gpu::{Gpu, GpuBuffer, GpuError};

use super::Place;
use crate::access::{ALIGN_BYTES, Access, AccessError, NoDescriptor, PAGE_BYTES, SharedMemory};

/// Memory of [`GpuAccess`](super::GpuAccess). Clones share it; the last one frees it.
#[derive(Debug, Clone)]
pub struct GpuMemory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    held: Held,
    bytes: usize,
}

/// The memory, by owner: only pages of the host have an address that this process may use. Fields drop in order.
#[derive(Debug)]
enum Held {
    Device {
        /// Dropped before the memory that it describes. If it is missing, its user reports the reason.
        descriptor: Result<OwnedFd, NoDescriptor>,
        buffer: GpuBuffer,
    },
    PageLocked {
        /// Ends the GPU's reach before the pages go.
        buffer: GpuBuffer,
        pages: Box<dyn SharedMemory>,
    },
}

impl GpuMemory {
    /// Zeroed memory at `place` that begins at a multiple of 64 KiB; that of the host comes from `pages`.
    pub(super) fn new(
        gpu: &Gpu,
        place: Place,
        pages: &dyn Access,
        bytes: usize,
    ) -> Result<Self, AccessError> {
        let held = match place {
            Place::Gpu => Held::device(gpu, bytes)?,
            Place::Host => Held::page_locked(gpu, pages, bytes)?,
        };
        Ok(Self(Arc::new(Inner { gpu: gpu.clone(), held, bytes })))
    }

    /// As the GPU reaches it, from the first byte on; at least as long.
    #[must_use]
    pub fn buffer(&self) -> &GpuBuffer {
        match &self.0.held {
            Held::Device { buffer, .. } | Held::PageLocked { buffer, .. } => buffer,
        }
    }

    /// Place of the memory.
    #[must_use]
    pub fn place(&self) -> Place {
        match self.0.held {
            Held::Device { .. } => Place::Gpu,
            Held::PageLocked { .. } => Place::Host,
        }
    }

    /// The driver's memory goes on behind ours, so it would not notice.
    fn check_range(&self, what: &str, offset: usize, len: usize) -> Result<(), AccessError> {
        if offset <= self.0.bytes && len <= self.0.bytes - offset {
            return Ok(());
        }
        let what = format!("{what} memory of GPU {}", self.0.gpu.ordinal());
        Err(AccessError::Range { what, offset, len, bytes: self.0.bytes })
    }

    fn failed(&self, what: &str, bytes: usize, source: GpuError) -> AccessError {
        let what = format!("{what} memory of GPU {}", self.0.gpu.ordinal());
        AccessError::Gpu { what, bytes, source }
    }
}

impl Held {
    fn device(gpu: &Gpu, bytes: usize) -> Result<Self, AccessError> {
        let what = format!("memory of GPU {}", gpu.ordinal());
        // Whole pieces from the driver begin at multiples of their size, which descriptors of pages need.
        let whole = (bytes as u64).next_multiple_of(PIECE_BYTES);
        let buffer = match gpu.alloc(whole) {
            Ok(buffer) => buffer,
            Err(source) => return Err(AccessError::Gpu { what, bytes, source }),
        };
        let found = buffer.ptr().0;
        if !found.is_multiple_of(ALIGN_BYTES as u64) {
            let expected = "a multiple of 64 KiB".to_owned();
            return Err(AccessError::Address { what, bytes, found, expected });
        }
        let descriptor = buffer.dma_buf().map_err(|error| {
            tracing::debug!(%error, "no descriptor of GPU memory: the NIC gets its address");
            NoDescriptor::Driver(Arc::new(error))
        });
        Ok(Self::Device { descriptor, buffer })
    }

    fn page_locked(gpu: &Gpu, pages: &dyn Access, bytes: usize) -> Result<Self, AccessError> {
        let what = || format!("page-locked pages of the host for GPU {}", gpu.ordinal());
        let pages = pages.alloc(bytes)?;
        let address = pages.address();
        let host = pages.host().ok_or_else(|| AccessError::Address {
            what: what(),
            bytes,
            found: address,
            expected: "an address of this process".to_owned(),
        })?;
        let whole = (bytes as u64).next_multiple_of(PAGE_BYTES as u64);
        // SAFETY: whole pages, which stay mapped until the field before them has gone.
        let buffer = unsafe { gpu.register_host(host, whole, false) };
        let buffer = buffer.map_err(|source| AccessError::Gpu { what: what(), bytes, source })?;
        let found = buffer.ptr().0;
        if found != address {
            // The NIC learns one address for both.
            let expected = format!("{address:#x}, as for this process");
            return Err(AccessError::Address { what: what(), bytes, found, expected });
        }
        Ok(Self::PageLocked { buffer, pages })
    }
}

impl SharedMemory for GpuMemory {
    fn address(&self) -> u64 {
        self.buffer().ptr().0
    }

    fn bytes(&self) -> usize {
        self.0.bytes
    }

    fn is_on_gpu(&self) -> bool {
        self.place() == Place::Gpu
    }

    fn host(&self) -> Option<NonNull<u8>> {
        match &self.0.held {
            Held::Device { .. } => None,
            Held::PageLocked { pages, .. } => pages.host(),
        }
    }

    fn gpu(&self) -> Option<&GpuMemory> {
        Some(self)
    }

    fn dma_buf(&self) -> Result<(BorrowedFd<'_>, u64), NoDescriptor> {
        match &self.0.held {
            Held::Device { descriptor: Ok(descriptor), .. } => Ok((descriptor.as_fd(), 0)),
            Held::Device { descriptor: Err(reason), .. } => Err(reason.clone()),
            Held::PageLocked { .. } => Err(NoDescriptor::Host),
        }
    }

    // NOTES: through the GPU wherever it lies, since the bytes may be in its caches.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.check_range("a write to", offset, bytes.len())?;
        let deadline = Instant::now() + COPY_TIMEOUT;
        let written = self.0.gpu.write(self.buffer(), offset as u64, bytes, deadline);
        written.map_err(|error| self.failed("a write to", bytes.len(), error))
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.check_range("a read from", offset, bytes.len())?;
        let (deadline, len) = (Instant::now() + COPY_TIMEOUT, bytes.len());
        let read = self.0.gpu.read(self.buffer(), offset as u64, bytes, deadline);
        read.map_err(|error| self.failed("a read from", len, error))
    }
}

/// The pieces in which the driver gives memory.
const PIECE_BYTES: u64 = 2 << 20;
/// Of one copy to or from the GPU.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
