//! Memory that both a NIC and the posters reach: a GPU's, or the host's.

mod gpu;
mod host;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::gpu::GpuError;
use thiserror::Error;

pub use self::gpu::{GpuAccess, GpuMemory, Place};
pub use self::host::{HostAccess, HostPages};
use crate::missing::{MissingPart, list};

/// The poster cannot reach the memory, or there is none.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum AccessError {
    /// The GPU's driver does not let the GPU reach a NIC's doorbell register, because options are missing.
    #[error("the NIC's doorbell register for the GPU ({bytes} bytes): {source}; {}", list(missing))]
    DriverOption {
        /// Bytes of the pages.
        bytes: usize,
        /// Missing part of the host, as the probe reports it.
        missing: Vec<MissingPart>,
        /// The call and its code.
        source: GpuError,
    },
    /// Another part of the process has registered the pages with CUDA.
    #[error(
        "{what} ({bytes} bytes): {source}; something else in this process has registered the same pages with CUDA, which takes them once"
    )]
    Registered {
        what: &'static str,
        bytes: usize,
        /// The call and its code.
        source: GpuError,
    },
    /// A call to the GPU's driver failed for another reason.
    #[error("{what} ({bytes} bytes): {source}")]
    Gpu {
        /// Operation and object.
        what: String,
        bytes: usize,
        /// The call and its code.
        source: GpuError,
    },
    /// The system has no memory left.
    #[error("host memory ({bytes} bytes): {call} failed: {source}")]
    Host {
        bytes: usize,
        call: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The size exceeds the address space.
    #[error("{what} ({bytes} bytes): with its own additions it would exceed {most}")]
    TooLarge {
        /// Object to allocate.
        what: &'static str,
        bytes: usize,
        /// Limit of the size.
        most: usize,
    },
    /// A range beyond the end. A local bug.
    #[error("{what} ({len} bytes): at offset {offset} it leaves the {bytes} bytes")]
    Range {
        /// Operation and object.
        what: String,
        offset: usize,
        len: usize,
        /// Size of the memory in bytes.
        bytes: usize,
    },
    /// The NIC and the posters cannot both use the memory at this place.
    #[error("{what} ({bytes} bytes) begins at {found:#x}, expected {expected}")]
    Address {
        /// Purpose of the memory.
        what: String,
        bytes: usize,
        found: u64,
        expected: String,
    },
    /// Pages that are mapped already, but not as the same range.
    #[error(
        "pages from {begin:#x} on ({bytes} bytes): expected pages that are not mapped, or the same again: {known_bytes} bytes from {known:#x} on are mapped as {kind:?}"
    )]
    Overlap {
        begin: usize,
        bytes: usize,
        /// First byte of the mapped pages.
        known: usize,
        /// Bytes of them.
        known_bytes: usize,
        /// Kind of the existing mapping.
        kind: HostRange,
    },
    /// Another error of an [`Access`] outside of this crate.
    #[error("{what} ({bytes} bytes): {detail}")]
    Other {
        /// Operation and object.
        what: String,
        bytes: usize,
        /// Reason, and remedy.
        detail: String,
    },
}

/// The reason why memory's pages have no descriptor.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum NoDescriptor {
    /// Pages of the host, which every NIC takes by their address.
    #[error("pages of the host have no descriptor")]
    Host,
    /// The GPU's driver gives none.
    #[error("the GPU's driver gives no descriptor: {0}")]
    Driver(Arc<GpuError>),
}

/// Ordinary memory or a device register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostRange {
    /// Pages of the process.
    Memory,
    /// Pages of a device.
    Register,
}

/// Name of the address space in which pages are mapped. A space maps a page once: all users of the space reach the
/// page by the address that the first one got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Space(pub &'static str);

/// Memory for the posters on the queues: a GPU, or a thread of this process.
pub trait Access: Send + Sync + Debug {
    /// Name of the space in which [`map`](Self::map) maps pages.
    fn space(&self) -> Space;

    /// Zeroed memory, aligned to 64 KiB, that posters and the NIC reach.
    ///
    /// # Errors
    /// [`AccessError`].
    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError>;

    /// Allocator of the slots' memory where it differs from that of queues, for example a GPU whose slots a thread
    /// of this process posts to. `None`: this value allocates both, in one piece.
    fn slots(&self) -> Option<&dyn Access> {
        None
    }

    /// Allocator of memory that posters alone use (counts and handles), where the memory of queues is far from
    /// them. A GPU that posts on queues in the host's memory would otherwise read every count across PCIe. May be
    /// the same as [`slots`](Self::slots). `None`: this value allocates it, with the queues.
    fn counts(&self) -> Option<&dyn Access> {
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
    ) -> Result<Mapping, AccessError>;
}

/// Memory of [`Access::alloc`], freed by drop.
pub trait SharedMemory: Send + Sync + Debug {
    /// Address for posters, and for registration.
    fn address(&self) -> u64;

    /// Bytes.
    fn bytes(&self) -> usize;

    /// Whether a GPU owns it.
    fn is_on_gpu(&self) -> bool;

    /// Address for this process, where its loads reach the memory.
    fn host(&self) -> Option<NonNull<u8>> {
        None
    }

    /// The GPU's buffer that begins with this memory, if it came from a [`GpuAccess`].
    fn gpu(&self) -> Option<&GpuMemory> {
        None
    }

    /// Descriptor of the pages and where this memory begins in them.
    ///
    /// # Errors
    /// [`NoDescriptor`] where no GPU owns it, or the GPU's driver gives none.
    fn dma_buf(&self) -> Result<(BorrowedFd<'_>, u64), NoDescriptor>;

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

/// Pieces of memory that lie behind one another in one [`Access::alloc`]. Together they take one 2 MiB unit where
/// a GPU's driver allocates no less. Each piece is registered separately: a key leads to its own piece and not to
/// the neighbours.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    bytes: usize,
}

/// Offset and size of one piece of a [`Plan`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanSpan {
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
    /// [`AccessError`] if the total exceeds the address space.
    pub(crate) fn add(&mut self, bytes: usize, align: usize) -> Result<PlanSpan, AccessError> {
        let offset = self.bytes.checked_next_multiple_of(align);
        let end = offset.and_then(|offset| offset.checked_add(bytes));
        // The driver rounds up to whole pieces of its own.
        let (Some(offset), Some(end)) = (offset, end.filter(|end| *end <= MAX_BYTES)) else {
            return Err(AccessError::TooLarge { what: "memory of a peer", bytes, most: MAX_BYTES });
        };
        self.bytes = end;
        Ok(PlanSpan { offset, bytes })
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
    /// The part at a span of the plan that this was allocated by.
    pub(crate) fn part(&self, span: PlanSpan) -> Part {
        Part { whole: Arc::clone(&self.0), offset: span.offset, bytes: span.bytes }
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
    /// The neighbours' memory continues behind this part, so the whole would not detect it.
    fn check_range(&self, what: &str, offset: usize, len: usize) -> Result<(), AccessError> {
        if offset <= self.bytes && len <= self.bytes - offset {
            return Ok(());
        }
        let what = format!("{what} memory of a peer");
        Err(AccessError::Range { what, offset, len, bytes: self.bytes })
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

    fn dma_buf(&self) -> Result<(BorrowedFd<'_>, u64), NoDescriptor> {
        let (descriptor, begin) = self.whole.dma_buf()?;
        Ok((descriptor, begin + self.offset as u64))
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
pub struct Mapping {
    /// Address of the first page for posters.
    pub address: u64,
    /// Ends the mapping by drop.
    pub guard: Option<Box<dyn Guard>>,
}

/// An object whose drop ends a mapping.
pub trait Guard: Send + Sync + Debug {}

/// Pages that posters reach, each mapped once: libmlx5 keeps the doorbell records of all queues of a context in
/// common pages, and registers too, and CUDA refuses pages that are registered already.
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
    mapped: Mapping,
}

/// Part of mapped pages.
#[derive(Debug)]
pub(crate) struct MappingPart {
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
    ) -> Result<MappingPart, AccessError> {
        let within = start.addr().get() % PAGE_BYTES;
        let len = (within + bytes).next_multiple_of(PAGE_BYTES);
        // SAFETY: the page's first byte lies before `start` in the same pages.
        let first = unsafe { start.sub(within) };
        let (space, begin) = (access.space(), first.addr().get());
        let end = begin.saturating_add(len);
        let key = (space, begin);
        let mut ranges = self.ranges();
        // Ranges are disjoint. If one overlaps, it is the last one that begins before the end.
        let last = ranges.range_mut((space, 0)..(space, end)).next_back();
        if let Some((found, range)) = last.filter(|(found, range)| found.1 + range.bytes > begin) {
            if *found != key || range.bytes != len || range.kind != kind {
                return Err(AccessError::Overlap {
                    begin,
                    bytes: len,
                    known: found.1,
                    known_bytes: range.bytes,
                    kind: range.kind,
                });
            }
            range.num_parts += 1;
            let address = range.mapped.address + within as u64;
            return Ok(MappingPart { address, key, table: Arc::clone(self) });
        }
        // SAFETY: the caller keeps the pages mapped.
        let mapped = unsafe { access.map(first, len, kind) }?;
        let address = mapped.address + within as u64;
        ranges.insert(key, Range { bytes: len, kind, num_parts: 1, mapped });
        Ok(MappingPart { address, key, table: Arc::clone(self) })
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeMap<(Space, usize), Range>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MappingPart {
    fn drop(&mut self) {
        let mut ranges = self.table.ranges();
        let Some(range) = ranges.get_mut(&self.key) else { return };
        range.num_parts -= 1;
        if range.num_parts == 0 {
            // The table stays locked, so that no thread maps the pages anew before the mapping has ended.
            ranges.remove(&self.key);
        }
    }
}

/// Page size of the processor.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Largest alignment of a peer's memory, with room above for rounding.
const MAX_BYTES: usize = usize::MAX >> 1;
/// Alignment of memory of [`Access::alloc`].
pub(crate) const ALIGN_BYTES: usize = 64 << 10;
