//! Memory that both a NIC and the one who posts reach: a GPU's, or the host's.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use crate::gpu::GpuMemory;

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

/// By whom pages are known, by name. A space knows a page once, and everybody whose space it is reaches the
/// page by the address that the first one got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Space(pub &'static str);

/// Whoever posts on the queues: a GPU, or a thread of this process.
pub trait Access: Send + Sync + Debug {
    /// Where [`map`](Self::map) makes pages known.
    fn space(&self) -> Space;

    /// Zeroed memory, aligned to 64 KiB, that posters and the NIC reach.
    ///
    /// # Errors
    /// [`AccessError`].
    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError>;

    /// Who gives the memory of slots where it is not that of queues, such as a GPU whose slots a thread of
    /// this process posts to. `None`: both come from here, in one piece.
    fn slots(&self) -> Option<&dyn Access> {
        None
    }

    /// Lets posters reach whole pages of this process. Never called for pages that the space knows already.
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

    /// Address for this process, where its loads reach the memory.
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    /// As a GPU's buffer that begins with this memory, if a [`GpuAccess`](crate::GpuAccess) gave it.
    fn gpu(&self) -> Option<&GpuMemory> {
        None
    }

    /// Descriptor of the pages and where this memory begins in them, if a GPU's driver gives one.
    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)>;

    /// Copies bytes to `offset`.
    ///
    /// # Errors
    /// [`AccessError`], also for a range beyond the end.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError>;

    /// Copies bytes from `offset`.
    ///
    /// # Errors
    /// [`AccessError`], also for a range beyond the end.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError>;
}

/// Pieces of memory that lie behind one another in one [`Access::alloc`], and so take 2 MiB together where a
/// GPU's driver gives no less, even for the 4 KiB of a queue's state. Each is registered by itself: a key
/// leads to its own piece and not to the neighbours.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    bytes: usize,
}

/// A piece of a [`Plan`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    offset: usize,
    bytes: usize,
}

/// Memory of a [`Plan`], which lives as long as any [`Part`] of it.
#[derive(Debug, Clone)]
pub(crate) struct Pieces(Arc<dyn SharedMemory>);

impl Plan {
    /// Adds `bytes` at a multiple of `align`: a power of two, at most the 64 KiB of [`Access::alloc`].
    ///
    /// # Errors
    /// [`AccessError`] beyond what there are addresses for.
    pub(crate) fn add(&mut self, bytes: usize, align: usize) -> Result<Place, AccessError> {
        let offset = self.bytes.checked_next_multiple_of(align);
        let end = offset.and_then(|offset| offset.checked_add(bytes));
        // The driver rounds up to whole pieces of its own.
        let (Some(offset), Some(end)) = (offset, end.filter(|end| *end <= MAX_BYTES)) else {
            let detail = format!("with what it needs besides, a peer would have over {MAX_BYTES}");
            return Err(AccessError { what: "memory of a peer".to_owned(), bytes, detail });
        };
        self.bytes = end;
        Ok(Place { offset, bytes })
    }

    /// All of it, zeroed.
    ///
    /// # Errors
    /// [`AccessError`].
    pub(crate) fn alloc(self, access: &dyn Access) -> Result<Pieces, AccessError> {
        Ok(Pieces(Arc::from(access.alloc(self.bytes)?)))
    }
}

impl Pieces {
    /// What lies at a place of the plan that this was allocated by.
    pub(crate) fn part(&self, place: Place) -> Part {
        Part { whole: Arc::clone(&self.0), offset: place.offset, bytes: place.bytes }
    }
}

/// Part of shared memory, which stays as long as any of its clones.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    whole: Arc<dyn SharedMemory>,
    offset: usize,
    bytes: usize,
}

impl Part {
    /// The neighbours' memory goes on behind this part, so the whole would not notice.
    fn check_range(&self, what: &str, offset: usize, len: usize) -> Result<(), AccessError> {
        if offset <= self.bytes && len <= self.bytes - offset {
            return Ok(());
        }
        let what = format!("{what} memory of a peer");
        let detail = format!("at offset {offset} it leaves the {} bytes", self.bytes);
        Err(AccessError { what, bytes: len, detail })
    }
}

impl SharedMemory for Part {
    fn address(&self) -> u64 {
        self.whole.address() + self.offset as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn is_on_gpu(&self) -> bool {
        self.whole.is_on_gpu()
    }

    fn host(&self) -> Option<NonNull<u8>> {
        // SAFETY: the part lies within the whole.
        self.whole.host().map(|host| unsafe { host.add(self.offset) })
    }

    fn gpu(&self) -> Option<&GpuMemory> {
        self.whole.gpu().filter(|_| self.offset == 0)
    }

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let (descriptor, begin) = self.whole.dma_buf()?;
        Some((descriptor, begin + self.offset as u64))
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.check_range("a write to", offset, bytes.len())?;
        self.whole.write(self.offset + offset, bytes)
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.check_range("a read from", offset, bytes.len())?;
        self.whole.read(self.offset + offset, bytes)
    }
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

/// Pages that posters reach, each mapped once: libmlx5 keeps the doorbell records of all queues of a context
/// in common pages, and registers too, and CUDA refuses pages that it knows.
#[derive(Debug, Default)]
pub(crate) struct PageTable {
    /// By their first byte. No two ranges of a space overlap.
    ranges: Mutex<BTreeMap<(Space, usize), Range>>,
}

/// Mapped pages and how many parts of them are in use.
#[derive(Debug)]
struct Range {
    bytes: usize,
    kind: HostRange,
    num_parts: usize,
    mapped: Mapped,
}

/// Part of mapped pages.
#[derive(Debug)]
pub(crate) struct MappedPart {
    /// Address for posters.
    pub(crate) address: u64,
    key: (Space, usize),
    table: Arc<PageTable>,
}

impl PageTable {
    /// Lets posters reach `bytes` from `start` on.
    ///
    /// # Safety
    /// The pages stay mapped as long as the result lives.
    pub(crate) unsafe fn map(
        self: &Arc<Self>,
        access: &dyn Access,
        start: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<MappedPart, AccessError> {
        let within = start.addr().get() % PAGE_BYTES;
        let len = (within + bytes).next_multiple_of(PAGE_BYTES);
        // SAFETY: the page's first byte lies before `start` in the same pages.
        let first = unsafe { start.sub(within) };
        let (space, begin) = (access.space(), first.addr().get());
        let end = begin.saturating_add(len);
        let key = (space, begin);
        let mut ranges = self.ranges();
        // Ranges are disjoint: whichever overlaps, the last one that begins before the end does.
        let last = ranges.range_mut((space, 0)..(space, end)).next_back();
        if let Some((found, range)) = last.filter(|(found, range)| found.1 + range.bytes > begin) {
            if *found != key || range.bytes != len || range.kind != kind {
                return Err(AccessError {
                    what: format!("pages from {begin:#x} on"),
                    bytes: len,
                    detail: format!(
                        "expected pages that are not mapped, or the same again: {} bytes from {:#x} on \
                         are mapped as {:?}",
                        range.bytes, found.1, range.kind
                    ),
                });
            }
            range.num_parts += 1;
            let address = range.mapped.address + within as u64;
            return Ok(MappedPart { address, key, table: Arc::clone(self) });
        }
        // SAFETY: the caller keeps the pages mapped.
        let mapped = unsafe { access.map(first, len, kind) }?;
        let address = mapped.address + within as u64;
        ranges.insert(key, Range { bytes: len, kind, num_parts: 1, mapped });
        Ok(MappedPart { address, key, table: Arc::clone(self) })
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeMap<(Space, usize), Range>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MappedPart {
    fn drop(&mut self) {
        let mut ranges = self.table.ranges();
        let Some(range) = ranges.get_mut(&self.key) else { return };
        range.num_parts -= 1;
        if range.num_parts == 0 {
            // While the table is locked: nobody maps the pages anew before the mapping has ended.
            ranges.remove(&self.key);
        }
    }
}

/// Threads of this process post: tests, tools, and hosts whose GPU cannot reach the NIC.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostAccess;

impl Access for HostAccess {
    fn space(&self) -> Space {
        Space("threads of this process")
    }

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

    fn range(&self, what: &str, offset: usize, len: usize) -> Result<NonNull<u8>, AccessError> {
        if offset > self.bytes || len > self.bytes - offset {
            let detail = format!("{what} at {offset} leaves the {} bytes", self.bytes);
            return Err(AccessError { what: "host memory".to_owned(), bytes: len, detail });
        }
        // SAFETY: within the mapping.
        Ok(unsafe { self.start.add(offset) })
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

    fn host(&self) -> Option<NonNull<u8>> {
        Some(self.start)
    }

    fn dma_buf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        None
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        let to = self.range("a write", offset, bytes.len())?;
        // SAFETY: within the mapping; queues are written while neither the NIC nor a poster uses them.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        let from = self.range("a read", offset, bytes.len())?;
        // SAFETY: as for `write`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
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
pub(crate) const PAGE_BYTES: usize = 4096;
/// Of a peer, with room above for rounding.
const MAX_BYTES: usize = usize::MAX >> 1;
/// Of memory as [`Access::alloc`] gives it.
pub(crate) const ALIGN_BYTES: usize = 64 << 10;
