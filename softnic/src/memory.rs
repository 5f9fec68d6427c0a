//! Memory that NICs of several processes reach: sealed memfds, found through `/proc`.
//!
//! Nothing has a name in a file system. Processes of one user can open each other's descriptors; that
//! is the trust boundary, as it is for shared slots.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use p2p_core::Region;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use thiserror::Error;

/// Shared memory could not be made or opened.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum SegmentError {
    /// A system call failed.
    #[error("{call} for {what} failed: {source}")]
    System {
        call: &'static str,
        /// Purpose of the call.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A peer could change the size of its memory under us.
    #[error("{what} is not sealed against resizing (seals {found:#x}), so mapping it is not safe")]
    Seals {
        /// Owner of the memory.
        what: String,
        found: u32,
    },
    /// Another size than promised.
    #[error("{what} has {found} bytes, expected {expected}")]
    Size {
        /// Owner of the memory.
        what: String,
        found: u64,
        expected: u64,
    },
}

/// Memory of this process that NICs of other processes can reach once it is registered.
#[derive(Debug, Clone)]
pub struct Segment {
    fd: Arc<OwnedFd>,
    region: Region,
}

impl Segment {
    /// Fresh zeroed memory, a whole number of pages.
    ///
    /// # Errors
    /// [`SegmentError::System`].
    pub fn create(bytes: usize) -> Result<Self, SegmentError> {
        let what = || format!("{bytes} bytes of shared memory");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("switchyard-softnic", flags)
            .map_err(|e| system("memfd_create", what(), e))?;
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| system("ftruncate", what(), e))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)
            .map_err(|e| system("fcntl(F_ADD_SEALS)", what(), e))?;
        let region = map(&fd, bytes, what)?;
        Ok(Self { fd: Arc::new(fd), region })
    }

    /// The memory.
    #[must_use]
    pub const fn region(&self) -> &Region {
        &self.region
    }

    /// Address of the byte at `offset`, which is at most the length.
    #[must_use]
    pub fn address(&self, offset: usize) -> u64 {
        self.region.as_ptr().as_ptr() as u64 + offset as u64
    }

    /// Number of the descriptor by which other processes find it, as long as this value lives.
    #[must_use]
    pub fn descriptor(&self) -> u32 {
        self.fd.as_raw_fd().cast_unsigned()
    }
}

/// Maps memory that process `pid` has under descriptor `fd`.
pub(crate) fn open(pid: u32, fd: u32, expected: u64) -> Result<Region, SegmentError> {
    let path = format!("/proc/{pid}/fd/{fd}");
    let what = || format!("the peer's memory {path}");
    let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| system("open", what(), e))?;
    // Check the seals first: only a sealed size is constant.
    let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
    if !seals.contains(SEALS) {
        return Err(SegmentError::Seals { what: what(), found: seals.bits() });
    }
    let found =
        rustix::fs::fstat(&file).map_err(|e| system("fstat", what(), e))?.st_size.cast_unsigned();
    if found != expected {
        return Err(SegmentError::Size { what: what(), found, expected });
    }
    let bytes = usize::try_from(found).unwrap_or(0);
    map(&file, bytes, what)
}

fn map(fd: &OwnedFd, bytes: usize, what: impl Fn() -> String) -> Result<Region, SegmentError> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address the kernel chooses aliases nothing of this process; its
    // bytes are reached only through atomics and raw copies.
    let ptr =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, fd, 0) }
            .map_err(|e| system("mmap", what(), e))?;
    // SAFETY: `ptr..ptr+bytes` was just mapped, whole, and has no other owner.
    unsafe { Region::from_raw(ptr.cast(), bytes) }
        .ok_or_else(|| system("mmap", what(), rustix::io::Errno::INVAL))
}

fn system(call: &'static str, what: String, errno: rustix::io::Errno) -> SegmentError {
    SegmentError::System { call, what, source: errno.into() }
}

/// A part of a region that stays mapped: a queue or registered memory.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    region: Region,
    offset: usize,
    len: usize,
}

impl Part {
    /// `None` when it leaves the region.
    pub(crate) fn new(region: &Region, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= region.len()).then(|| Self { region: region.clone(), offset, len })
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: `new` checked that the part lies in the region.
        unsafe { self.region.as_ptr().add(self.offset) }
    }

    /// Pointer to `len` bytes at `offset`. `None` when they leave the part.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        // SAFETY: in range by the check.
        (end <= self.len).then(|| unsafe { self.as_ptr().as_ptr().add(offset) })
    }

    /// The 32-bit word at `offset`. `None` when it is outside or misaligned.
    pub(crate) fn word32(&self, offset: usize) -> Option<&AtomicU32> {
        let ptr = self.at(offset, 4)?;
        // SAFETY: in range and aligned; mapped while `self` lives; every access to it is atomic.
        ptr.cast::<AtomicU32>().is_aligned().then(|| unsafe { AtomicU32::from_ptr(ptr.cast()) })
    }

    /// The 64-bit word at `offset`. `None` when it is outside or misaligned.
    pub(crate) fn word64(&self, offset: usize) -> Option<&AtomicU64> {
        let ptr = self.at(offset, 8)?;
        // SAFETY: as for `word32`.
        ptr.cast::<AtomicU64>().is_aligned().then(|| unsafe { AtomicU64::from_ptr(ptr.cast()) })
    }
}

/// Copies as a NIC does: aligned 8-byte words are never torn, everything else may be. The ranges may
/// overlap, as when a process writes to itself.
///
/// # Safety
/// Both ranges are mapped. Others may access them meanwhile and see any mixture.
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if len <= MAX_WORD_COPY && len.is_multiple_of(8) && dst.cast::<u64>().is_aligned() {
        for at in (0..len).step_by(8) {
            // SAFETY: in range by the caller's promise; `dst` is aligned.
            unsafe {
                let value = src.add(at).cast::<u64>().read_unaligned();
                AtomicU64::from_ptr(dst.add(at).cast()).store(value, Ordering::Relaxed);
            }
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(src, dst, len) }
}

const PAGE_BYTES: usize = 4096;
const MAX_WORD_COPY: usize = 64;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
