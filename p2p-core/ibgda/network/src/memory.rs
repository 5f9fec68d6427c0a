//! Slots that kernels, the host and the NIC reach: page-locked memory of the host, for a first version.
//!
//! A peer's own slot begins where its memory does, so that a [`GpuBuffer`] stands for it.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ibgda::access::{Access, AccessError, HostRange, Mapped, SharedMemory, Space};
use ibgda::{GpuAccess, HostAccess, Place};
use kernels::gpu::{DeviceName, Gpu, GpuBuffer, GpuError};

/// Memory of one peer: queues where the GPU's kernels post, slots page-locked.
#[derive(Debug)]
pub struct SlotAccess {
    queues: Box<dyn Access>,
    slots: PageLocked,
}

impl SlotAccess {
    /// For kernels of `gpu`. Threads of this process post for a GPU in software.
    #[must_use]
    pub fn new(gpu: &Gpu) -> Self {
        let queues: Box<dyn Access> = match gpu.name() {
            DeviceName::Cuda(_) => Box::new(GpuAccess::new(gpu.clone(), Place::Host)),
            DeviceName::Emulated(_) => Box::new(HostAccess),
        };
        let slots = PageLocked { gpu: gpu.clone(), made: Mutex::default() };
        Self { queues, slots }
    }

    /// The memory that slots were last given, whose first bytes are the own slot's. `None` before that.
    #[must_use]
    pub fn own_slot(&self) -> Option<Arc<SlotMemory>> {
        self.slots.made.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Access for SlotAccess {
    fn space(&self) -> Space {
        self.queues.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        self.queues.alloc(bytes)
    }

    fn slots(&self) -> Option<&dyn Access> {
        Some(&self.slots)
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapped, AccessError> {
        // SAFETY: the caller's promise.
        unsafe { self.queues.map(pages, bytes, kind) }
    }
}

/// Gives slots.
#[derive(Debug)]
struct PageLocked {
    gpu: Gpu,
    made: Mutex<Option<Arc<SlotMemory>>>,
}

impl Access for PageLocked {
    fn space(&self) -> Space {
        HostAccess.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let memory = Arc::new(SlotMemory::new(&self.gpu, bytes)?);
        *self.made.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&memory));
        Ok(Box::new(Shared(memory)))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapped, AccessError> {
        // SAFETY: the caller's promise.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

/// Pages of this process that a GPU reaches at the same address.
#[derive(Debug)]
pub struct SlotMemory {
    /// Goes before the pages.
    reached: GpuBuffer,
    pages: Box<dyn SharedMemory>,
    gpu: Gpu,
}

impl SlotMemory {
    fn new(gpu: &Gpu, bytes: usize) -> Result<Self, AccessError> {
        let failed = |detail: String| AccessError {
            what: format!("page-locked memory for GPU {}", gpu.ordinal()),
            bytes,
            detail,
        };
        let pages = HostAccess.alloc(bytes)?;
        let host = pages.host().ok_or_else(|| failed("the host does not reach it".to_owned()))?;
        let whole = (bytes as u64).next_multiple_of(PAGE_BYTES);
        // SAFETY: whole pages, which stay mapped until the result's field behind this one goes.
        let reached = unsafe { gpu.register_host(host, whole, false) };
        let reached = reached.map_err(|error| failed(error.to_string()))?;
        if reached.ptr().0 != pages.address() {
            // The NIC is told one address for both.
            let (found, expected) = (reached.ptr().0, pages.address());
            return Err(failed(format!(
                "the GPU reaches it at {found:#x}, expected {expected:#x}"
            )));
        }
        Ok(Self { reached, pages, gpu: gpu.clone() })
    }

    /// As the GPU reaches it.
    #[must_use]
    pub const fn buffer(&self) -> &GpuBuffer {
        &self.reached
    }

    fn failed(&self, what: &str, bytes: usize, error: &GpuError) -> AccessError {
        let what = format!("{what} page-locked memory for GPU {}", self.gpu.ordinal());
        AccessError { what, bytes, detail: error.to_string() }
    }
}

/// What a peer holds of it.
#[derive(Debug)]
struct Shared(Arc<SlotMemory>);

impl SharedMemory for Shared {
    fn address(&self) -> u64 {
        self.0.pages.address()
    }

    fn bytes(&self) -> usize {
        self.0.pages.bytes()
    }

    fn is_on_gpu(&self) -> bool {
        false
    }

    fn host(&self) -> Option<NonNull<u8>> {
        self.0.pages.host()
    }

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }

    // NOTES: through the GPU, in whose caches the bytes may be.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        let deadline = Instant::now() + COPY_TIMEOUT;
        let written = self.0.gpu.write(&self.0.reached, offset as u64, bytes, deadline);
        written.map_err(|error| self.0.failed("a write to", bytes.len(), &error))
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        let (deadline, len) = (Instant::now() + COPY_TIMEOUT, bytes.len());
        let read = self.0.gpu.read(&self.0.reached, offset as u64, bytes, deadline);
        read.map_err(|error| self.0.failed("a read from", len, &error))
    }
}

const PAGE_BYTES: u64 = 4096;
/// Of one copy to or from the GPU.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
