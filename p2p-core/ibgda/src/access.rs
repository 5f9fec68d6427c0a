//! Memory that both a NIC and the one who posts reach: a GPU's, or the host's.

use std::collections::HashMap;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use thiserror::Error;

/// Whoever posts cannot reach memory, or there is none.
#[derive(Debug, Error)]
#[error("{what} ({bytes} bytes): {detail}")]
pub struct AccessError {
    /// What was to be done with what.
    pub what: String,
    /// Bytes.
    pub bytes: usize,
    /// Why it failed, and what to do.
    pub detail: String,
}

/// Ordinary memory or a device register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostRange {
    /// Pages of the process.
    Memory,
    /// Pages of a device.
    Register,
}

/// Whoever posts on the queues: a GPU, or a thread of this process.
pub trait Access: Send + Sync + Debug {
    /// Zeroed memory, aligned to 64 KiB, that posters and the NIC reach.
    ///
    /// # Errors
    /// [`AccessError`].
    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError>;

    /// Lets posters reach whole pages of this process.
    ///
    /// # Safety
    /// The pages stay mapped as long as the result lives.
    ///
    /// # Errors
    /// [`AccessError`].
    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapped, AccessError>;
}

/// Memory of [`Access::alloc`], freed by drop.
pub trait SharedMemory: Send + Sync + Debug {
    /// Address for posters, and for registration.
    fn address(&self) -> u64;

    /// Bytes.
    fn bytes(&self) -> usize;

    /// Whether it is a GPU's.
    fn is_on_gpu(&self) -> bool;

    /// Descriptor of the pages and where this memory begins in them, if a GPU's driver gives one.
    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)>;

    /// Copies bytes to `offset`.
    ///
    /// # Errors
    /// [`AccessError`], also for a range beyond the end.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError>;
}

/// Pages of this process as posters see them.
#[derive(Debug)]
pub struct Mapped {
    /// Address of the first page for posters.
    pub address: u64,
    /// Ends the mapping by drop.
    pub guard: Option<Box<dyn Guard>>,
}

/// Whatever must be dropped to end a mapping.
pub trait Guard: Send + Sync + Debug {}

/// Mappings shared by the queues that lie in the same pages, as doorbell records and registers do.
#[derive(Debug)]
pub(crate) struct PageTable {
    access: Arc<dyn Access>,
    mapped: Mutex<HashMap<(usize, usize), Weak<Mapped>>>,
}

/// Part of mapped pages.
#[derive(Debug)]
pub(crate) struct MappedPart {
    /// Address for posters.
    pub(crate) address: u64,
    _pages: Arc<Mapped>,
}

impl PageTable {
    pub(crate) fn new(access: Arc<dyn Access>) -> Self {
        Self { access, mapped: Mutex::default() }
    }

    pub(crate) const fn access(&self) -> &Arc<dyn Access> {
        &self.access
    }

    /// Lets posters reach `bytes` from `start` on.
    ///
    /// # Safety
    /// The pages stay mapped as long as the result lives.
    pub(crate) unsafe fn map(
        &self,
        start: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<MappedPart, AccessError> {
        let within = start.addr().get() % PAGE_BYTES;
        let len = (within + bytes).next_multiple_of(PAGE_BYTES);
        // SAFETY: the page's first byte lies before `start` in the same pages.
        let first = unsafe { start.sub(within) };
        let key = (first.addr().get(), len);
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = match mapped.get(&key).and_then(Weak::upgrade) {
            Some(pages) => pages,
            None => {
                // SAFETY: the caller keeps the pages mapped.
                let pages = Arc::new(unsafe { self.access.map(first, len, kind) }?);
                mapped.retain(|_, pages| pages.strong_count() > 0);
                mapped.insert(key, Arc::downgrade(&pages));
                pages
            }
        };
        Ok(MappedPart { address: pages.address + within as u64, _pages: pages })
    }
}

/// Threads of this process post: tests, tools, and hosts whose GPU cannot reach the NIC.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostAccess;

impl Access for HostAccess {
    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        Ok(Box::new(HostMemory::new(bytes)?))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        _bytes: usize,
        _kind: HostRange,
    ) -> Result<Mapped, AccessError> {
        Ok(Mapped { address: pages.as_ptr().expose_provenance() as u64, guard: None })
    }
}

/// Zeroed pages.
#[derive(Debug)]
struct HostMemory {
    reserved: NonNull<u8>,
    reserved_bytes: usize,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain pages; accesses go through `write`, whose caller has the range to itself.
unsafe impl Send for HostMemory {}
// SAFETY: the same.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn new(bytes: usize) -> Result<Self, AccessError> {
        let failed = |detail: String| AccessError { what: "host memory".to_owned(), bytes, detail };
        let reserved_bytes = bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|bytes| bytes.checked_add(ALIGN_BYTES))
            .ok_or_else(|| failed("too large".to_owned()))?;
        // SAFETY: a fresh private mapping.
        let reserved = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error().to_string()));
        }
        let reserved = NonNull::new(reserved.cast::<u8>())
            .ok_or_else(|| failed("mapped at address 0".to_owned()))?;
        let skip = reserved.as_ptr().align_offset(ALIGN_BYTES);
        // SAFETY: there are so many bytes more than asked for.
        let start = unsafe { reserved.add(skip) };
        Ok(Self { reserved, reserved_bytes, start, bytes })
    }
}

impl SharedMemory for HostMemory {
    fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_on_gpu(&self) -> bool {
        false
    }

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        if offset > self.bytes || bytes.len() > self.bytes - offset {
            let detail = format!("a write at {offset} leaves the {} bytes", self.bytes);
            return Err(AccessError { what: "host memory".to_owned(), bytes: bytes.len(), detail });
        }
        // SAFETY: within the mapping; queues are written before the NIC or a poster knows them.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(offset).as_ptr(), bytes.len());
        }
        Ok(())
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once.
        unsafe { libc::munmap(self.reserved.as_ptr().cast(), self.reserved_bytes) };
    }
}

/// Of the processor.
const PAGE_BYTES: usize = 4096;
/// Of memory that a GPU's driver gives in pieces of this size.
const ALIGN_BYTES: usize = 64 << 10;
