//! Memory of this process.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use super::{
    ALIGN_BYTES, Access, AccessError, HostRange, MAX_BYTES, Mapping, NoDescriptor, PAGE_BYTES,
    SharedMemory, Space,
};

/// Threads of this process post: tests, tools, and hosts whose GPU cannot reach the NIC.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostAccess;

impl Access for HostAccess {
    fn space(&self) -> Space {
        Space("threads of this process")
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let (owner, start) = Reservation::new(bytes)?;
        // SAFETY: the reservation has this number of bytes from there on, and unmaps them by drop.
        Ok(Box::new(unsafe { HostPages::new("host memory", start, bytes, owner) }))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        _bytes: usize,
        _kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        Ok(Mapping { address: pages.as_ptr().expose_provenance() as u64, guard: None })
    }
}

/// Shared memory on pages of this process, which their owner frees by drop.
#[derive(Debug)]
pub struct HostPages<O> {
    name: &'static str,
    start: NonNull<u8>,
    bytes: usize,
    _owner: O,
}

// SAFETY: plain pages; accesses go through `write`, whose caller owns the range exclusively.
unsafe impl<O: Send> Send for HostPages<O> {}
// SAFETY: the same.
unsafe impl<O: Sync> Sync for HostPages<O> {}

impl<O> HostPages<O> {
    /// Memory of `bytes` bytes from `start` on. Errors call it `name`.
    ///
    /// # Safety
    /// The bytes are mapped, readable and writable as long as `owner` lives.
    pub const unsafe fn new(
        name: &'static str,
        start: NonNull<u8>,
        bytes: usize,
        owner: O,
    ) -> Self {
        Self { name, start, bytes, _owner: owner }
    }

    fn range(&self, what: &str, offset: usize, len: usize) -> Result<NonNull<u8>, AccessError> {
        if offset > self.bytes || len > self.bytes - offset {
            let what = format!("{what} {}", self.name);
            return Err(AccessError::Range { what, offset, len, bytes: self.bytes });
        }
        // SAFETY: within the mapping.
        Ok(unsafe { self.start.add(offset) })
    }
}

impl<O: Send + Sync + Debug> SharedMemory for HostPages<O> {
    fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_on_gpu(&self) -> bool {
        false
    }

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.start)
    }

    fn dma_buf(&self) -> Result<(BorrowedFd<'_>, u64), NoDescriptor> {
        Err(NoDescriptor::Host)
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        let to = self.range("a write to", offset, bytes.len())?;
        // SAFETY: within the mapping; queues are written while neither the NIC nor a poster uses them.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        let from = self.range("a read from", offset, bytes.len())?;
        // SAFETY: as for `write`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Zeroed private pages.
#[derive(Debug)]
struct Reservation {
    begin: NonNull<u8>,
    num_bytes: usize,
}

// SAFETY: plain pages; this value only unmaps them.
unsafe impl Send for Reservation {}
// SAFETY: the same.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Returns the pages, and the start of `bytes` bytes in them that has the alignment of [`Access::alloc`].
    fn new(bytes: usize) -> Result<(Self, NonNull<u8>), AccessError> {
        let failed = |source| AccessError::Host { bytes, call: "mmap", source };
        let num_bytes = bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|bytes| bytes.checked_add(ALIGN_BYTES))
            .ok_or(AccessError::TooLarge { what: "host memory", bytes, most: MAX_BYTES })?;
        // SAFETY: a fresh private mapping.
        let reserved = unsafe {
            libc::mmap(
                ptr::null_mut(),
                num_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let reserved = NonNull::new(reserved.cast::<u8>())
            .ok_or_else(|| failed(io::Error::other("mapped at address 0")))?;
        let skip = reserved.as_ptr().align_offset(ALIGN_BYTES);
        // SAFETY: the allocation has this number of bytes beyond those asked for.
        let start = unsafe { reserved.add(skip) };
        Ok((Self { begin: reserved, num_bytes }, start))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once.
        unsafe { libc::munmap(self.begin.as_ptr().cast(), self.num_bytes) };
    }
}
