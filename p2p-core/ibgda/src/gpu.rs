//! A GPU posts: [`Access`] over CUDA. *Not yet run with a ConnectX.*
//!
//! NOTES: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is not set on memory that a NIC reaches. It makes CUDA's
//! *synchronous* copies and fills, some of which return before they are done, wait for their end. There are
//! none here: memory is zeroed, written and read by asynchronous operations on a stream of their own, and
//! [`Access::alloc`], [`SharedMemory::write`] and [`SharedMemory::read`] return once that stream is
//! empty. So what the NIC is told of afterwards is in place. Whoever copies to or from a slot by
//! `cudaMemcpy` sets the attribute, or waits.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use kernels::gpu::{DeviceName, Gpu, GpuBuffer, GpuError};

use crate::access::{
    ALIGN_BYTES, Access, AccessError, Guard, HostRange, Mapped, SharedMemory, Space,
};

/// Where queues and slots lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The GPU's memory. Queues there need the DevX path.
    Gpu,
    /// Page-locked host memory that the GPU reaches.
    Host,
}

/// Kernels of this GPU post.
#[derive(Debug, Clone)]
pub struct GpuAccess {
    gpu: Gpu,
    place: Place,
    /// Where slots lie, if not with the queues.
    slots: Option<Box<Self>>,
}

impl GpuAccess {
    /// For kernels of `gpu`, with memory at `place`.
    #[must_use]
    pub const fn new(gpu: Gpu, place: Place) -> Self {
        Self { gpu, place, slots: None }
    }

    /// The same with slots at `place`, wherever queues lie: those of libibverbs are in host memory, and
    /// frames are best in the GPU's.
    #[must_use]
    pub fn with_slots(self, place: Place) -> Self {
        let slots = (place != self.place).then(|| Box::new(Self::new(self.gpu.clone(), place)));
        Self { slots, ..self }
    }
}

impl Access for GpuAccess {
    /// Pages are registered for all GPUs of the process at once, which reach them at the same address.
    fn space(&self) -> Space {
        Space(match self.gpu.name() {
            DeviceName::Cuda(_) => "CUDA",
            DeviceName::Emulated(_) => "GPUs in software",
        })
    }

    fn slots(&self) -> Option<&dyn Access> {
        self.slots.as_deref().map(|slots| slots as &dyn Access)
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let failed = |error: GpuError| AccessError {
            what: format!("memory of GPU {}", self.gpu.ordinal()),
            bytes,
            detail: error.to_string(),
        };
        let align_bytes = ALIGN_BYTES as u64;
        let (buffer, descriptor) = match self.place {
            Place::Gpu => {
                // Whole pieces of the driver's begin at multiples of their size, which descriptors
                // of pages need.
                let buffer =
                    self.gpu.alloc((bytes as u64).next_multiple_of(PIECE_BYTES)).map_err(failed)?;
                let descriptor = buffer.dma_buf().map_err(|error| {
                    tracing::debug!(%error, "no descriptor of GPU memory: the NIC gets its address");
                });
                (buffer, descriptor.ok())
            }
            Place::Host => (self.gpu.alloc_host(bytes as u64 + align_bytes).map_err(failed)?, None),
        };
        let skip = buffer.ptr().0.next_multiple_of(align_bytes) - buffer.ptr().0;
        if skip + bytes as u64 > buffer.len() {
            return Err(AccessError {
                what: format!("memory of GPU {}", self.gpu.ordinal()),
                bytes,
                detail: "the driver's memory does not begin at a multiple of 64 KiB".to_owned(),
            });
        }
        let gpu = self.gpu.clone();
        let is_on_gpu = self.place == Place::Gpu;
        Ok(Box::new(GpuMemory { gpu, buffer, skip, bytes, is_on_gpu, descriptor }))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapped, AccessError> {
        let is_register = kind == HostRange::Register;
        // SAFETY: the caller keeps the pages mapped.
        let mapped = unsafe { self.gpu.register_host(pages, bytes as u64, is_register) };
        let buffer = mapped.map_err(|error| AccessError {
            what: if is_register {
                "the NIC's doorbell register for the GPU".to_owned()
            } else {
                "a queue's host memory for the GPU".to_owned()
            },
            bytes,
            detail: if matches!(error, GpuError::Driver { code: ALREADY_REGISTERED, .. }) {
                format!(
                    "{error}; something else in this process has registered the same pages with CUDA, \
                     which takes them once"
                )
            } else if is_register {
                format!(
                    "{error}; the options NVreg_EnableStreamMemOPs=1 and \
                     NVreg_RegistryDwords=\"PeerMappingOverride=1;\" of the module nvidia are needed, \
                     see `switchyard doctor`"
                )
            } else {
                error.to_string()
            },
        })?;
        Ok(Mapped { address: buffer.ptr().0, guard: Some(Box::new(RegisteredPages(buffer))) })
    }
}

#[derive(Debug)]
struct RegisteredPages(#[allow(dead_code, reason = "held until drop")] GpuBuffer);

impl Guard for RegisteredPages {}

#[derive(Debug)]
struct GpuMemory {
    gpu: Gpu,
    // The descriptor goes before what it describes.
    descriptor: Option<OwnedFd>,
    buffer: GpuBuffer,
    skip: u64,
    bytes: usize,
    is_on_gpu: bool,
}

impl SharedMemory for GpuMemory {
    fn address(&self) -> u64 {
        self.buffer.ptr().0 + self.skip
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    fn host(&self) -> Option<NonNull<u8>> {
        // SAFETY: `alloc` saw that so many bytes are there to skip.
        self.buffer.host().map(|host| unsafe { host.add(self.skip as usize) })
    }

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        self.descriptor.as_ref().map(|descriptor| (descriptor.as_fd(), self.skip))
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.check_range("a write to", offset, bytes.len())?;
        let deadline = Instant::now() + COPY_TIMEOUT;
        self.gpu
            .write(&self.buffer, self.skip + offset as u64, bytes, deadline)
            .map_err(|error| self.failed("a write to", bytes.len(), &error))
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.check_range("a read from", offset, bytes.len())?;
        let deadline = Instant::now() + COPY_TIMEOUT;
        let len = bytes.len();
        self.gpu
            .read(&self.buffer, self.skip + offset as u64, bytes, deadline)
            .map_err(|error| self.failed("a read from", len, &error))
    }
}

impl GpuMemory {
    /// The driver's memory goes on behind ours, so it would not notice.
    fn check_range(&self, what: &str, offset: usize, len: usize) -> Result<(), AccessError> {
        if offset <= self.bytes && len <= self.bytes - offset {
            return Ok(());
        }
        let what = format!("{what} memory of GPU {}", self.gpu.ordinal());
        let detail = format!("at offset {offset} it leaves the {} bytes", self.bytes);
        Err(AccessError { what, bytes: len, detail })
    }

    fn failed(&self, what: &str, bytes: usize, error: &GpuError) -> AccessError {
        let what = format!("{what} memory of GPU {}", self.gpu.ordinal());
        AccessError { what, bytes, detail: error.to_string() }
    }
}

/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`
const ALREADY_REGISTERED: u32 = 712;
/// The pieces in which the driver gives memory.
const PIECE_BYTES: u64 = 2 << 20;
/// Of one copy to or from the GPU.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
