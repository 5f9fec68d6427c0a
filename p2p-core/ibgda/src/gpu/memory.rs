//! Memory that a GPU and a NIC reach: the GPU's own, or page-locked pages of the host.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::gpu::{Gpu, GpuBuffer, GpuError};

use super::Place;
use crate::access::{ALIGN_BYTES, Access, AccessError, HostAccess, PAGE_BYTES, SharedMemory};

/// What [`GpuAccess`](super::GpuAccess) gives. Clones share it; it is freed with the last of them.
#[derive(Debug, Clone)]
pub struct GpuMemory(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    gpu: Gpu,
    held: Held,
    bytes: usize,
}

/// The memory, by whose it is: only pages of the host have an address that this process may use. Fields go in
/// order.
#[derive(Debug)]
enum Held {
    Device {
        /// Goes before what it describes.
        descriptor: Option<OwnedFd>,
        buffer: GpuBuffer,
    },
    PageLocked {
        /// Ends the GPU's reach before the pages go.
        buffer: GpuBuffer,
        pages: Box<dyn SharedMemory>,
    },
}

impl GpuMemory {
    /// Zeroed memory at `place` that begins at a multiple of 64 KiB.
    pub(super) fn new(gpu: &Gpu, place: Place, bytes: usize) -> Result<Self, AccessError> {
        let held = match place {
            Place::Gpu => Held::device(gpu, bytes),
            Place::Host => Held::page_locked(gpu, bytes),
        };
        let failed = |detail| AccessError {
            what: format!("memory of GPU {}", gpu.ordinal()),
            bytes,
            detail,
        };
        Ok(Self(Arc::new(Inner { gpu: gpu.clone(), held: held.map_err(failed)?, bytes })))
    }

    /// As the GPU reaches it, from the first byte on; at least as long.
    #[must_use]
    pub fn buffer(&self) -> &GpuBuffer {
        match &self.0.held {
            Held::Device { buffer, .. } | Held::PageLocked { buffer, .. } => buffer,
        }
    }

    /// Where it lies.
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
        let detail = format!("at offset {offset} it leaves the {} bytes", self.0.bytes);
        Err(AccessError { what, bytes: len, detail })
    }

    fn failed(&self, what: &str, bytes: usize, error: &GpuError) -> AccessError {
        let what = format!("{what} memory of GPU {}", self.0.gpu.ordinal());
        AccessError { what, bytes, detail: error.to_string() }
    }
}

impl Held {
    fn device(gpu: &Gpu, bytes: usize) -> Result<Self, String> {
        // Whole pieces of the driver's begin at multiples of their size, which descriptors of pages
        // need.
        let whole = (bytes as u64).next_multiple_of(PIECE_BYTES);
        let buffer = gpu.alloc(whole).map_err(|error| error.to_string())?;
        if !buffer.ptr().0.is_multiple_of(ALIGN_BYTES as u64) {
            return Err("the driver's memory does not begin at a multiple of 64 KiB".to_owned());
        }
        let descriptor = buffer.dma_buf().map_err(|error| {
            tracing::debug!(%error, "no descriptor of GPU memory: the NIC gets its address");
        });
        Ok(Self::Device { descriptor: descriptor.ok(), buffer })
    }

    fn page_locked(gpu: &Gpu, bytes: usize) -> Result<Self, String> {
        let pages = HostAccess.alloc(bytes).map_err(|error| error.to_string())?;
        let host = pages.host().ok_or("the host does not reach its own memory")?;
        let whole = (bytes as u64).next_multiple_of(PAGE_BYTES as u64);
        // SAFETY: whole pages, which stay mapped until the field before them has gone.
        let buffer = unsafe { gpu.register_host(host, whole, false) };
        let buffer = buffer.map_err(|error| format!("page-locked pages of the host: {error}"))?;
        let (found, expected) = (buffer.ptr().0, pages.address());
        if found != expected {
            // The NIC is told one address for both.
            return Err(format!(
                "the GPU reaches pages of the host at {found:#x}, expected {expected:#x}"
            ));
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

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.0.held {
            Held::Device { descriptor, .. } => Some((descriptor.as_ref()?.as_fd(), 0)),
            Held::PageLocked { .. } => None,
        }
    }

    // NOTES: through the GPU wherever it lies, since the bytes may be in its caches.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.check_range("a write to", offset, bytes.len())?;
        let deadline = Instant::now() + COPY_TIMEOUT;
        let written = self.0.gpu.write(self.buffer(), offset as u64, bytes, deadline);
        written.map_err(|error| self.failed("a write to", bytes.len(), &error))
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.check_range("a read from", offset, bytes.len())?;
        let (deadline, len) = (Instant::now() + COPY_TIMEOUT, bytes.len());
        let read = self.0.gpu.read(self.buffer(), offset as u64, bytes, deadline);
        read.map_err(|error| self.failed("a read from", len, &error))
    }
}

/// The pieces in which the driver gives memory.
const PIECE_BYTES: u64 = 2 << 20;
/// Of one copy to or from the GPU.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
