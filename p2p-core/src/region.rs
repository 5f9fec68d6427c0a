//! Owned memory, its local ranges and its wire form.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use thiserror::Error;

/// Memory could not be mapped.
#[derive(Debug, Error)]
#[error("cannot map {bytes} bytes of {what}: {source}")]
#[allow(missing_docs, reason = "the message explains the fields")]
pub struct MapError {
    pub bytes: usize,
    pub what: &'static str,
    pub source: std::io::Error,
}

/// A mapping that is unmapped when the last reference is dropped.
///
/// Clones share the mapping. Peers may write the memory at any time, so code reaches it only
/// through views, atomics and copies.
///
/// # Examples
/// ```
/// use switchyard_p2p_core::Region;
///
/// let region = Region::anonymous(8192).unwrap();
/// let page = region.range(4096, 4096).expect("a range of the region");
/// let header = page.sub(0, 64).expect("a part of the page");
/// assert_eq!((page.len(), header.len()), (4096, 64));
/// assert!(region.range(4096, 4097).is_none(), "it leaves the region");
/// // The range keeps the memory mapped.
/// drop(region);
/// // SAFETY: the byte is mapped, and no other code writes it.
/// assert_eq!(unsafe { header.as_ptr().read() }, 0);
/// ```
#[derive(Debug, Clone)]
pub struct Region {
    inner: Arc<Mapping>,
}

#[derive(Debug)]
struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
    /// Frees the memory when dropped. `None`: this value itself unmaps the memory.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the mapping is plain memory with no thread affinity; it is unmapped once, by the last owner.
unsafe impl Send for Mapping {}
// SAFETY: shared access goes through raw copies and atomics only; see the type's documentation.
unsafe impl Sync for Mapping {}

impl Region {
    /// Maps zeroed anonymous memory of this process. The system commits it page by page when
    /// touched.
    ///
    /// # Errors
    /// [`MapError`] when the system refuses.
    pub fn anonymous(len: usize) -> Result<Self, MapError> {
        // SAFETY: a fresh private anonymous mapping at an address the kernel chooses aliases nothing.
        let ptr = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| MapError {
            bytes: len,
            what: "anonymous memory",
            source: e.into(),
        })?;
        // SAFETY: `ptr..ptr+len` was just mapped and has no other owner.
        unsafe { Self::from_raw(ptr.cast(), len) }.ok_or(MapError {
            bytes: len,
            what: "anonymous memory",
            source: std::io::ErrorKind::InvalidInput.into(),
        })
    }

    /// Takes over a mapping. Returns `None` if `ptr` is null or `len` is 0.
    ///
    /// # Safety
    /// `ptr..ptr+len` is a whole mapping, readable and writable, and no other code unmaps it.
    #[must_use]
    pub unsafe fn from_raw(ptr: *mut u8, len: usize) -> Option<Self> {
        let ptr = NonNull::new(ptr)?;
        (len > 0).then(|| Self { inner: Arc::new(Mapping { ptr, len, owner: None }) })
    }

    /// Wraps memory that `owner` frees when dropped, such as page-locked memory of a GPU's driver.
    /// The region keeps `owner` alive. Returns `None` if `ptr` is null or `len` is 0.
    ///
    /// # Safety
    /// `ptr..ptr+len` stays readable and writable as long as `owner` lives.
    #[must_use]
    pub unsafe fn of_owner(
        ptr: *mut u8,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Option<Self> {
        let ptr = NonNull::new(ptr)?;
        (len > 0).then(|| Self { inner: Arc::new(Mapping { ptr, len, owner: Some(owner) }) })
    }

    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.inner.ptr
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Never true: empty regions cannot be made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// Returns a checked range of this region, or `None` if it leaves the region.
    #[must_use]
    pub fn range(&self, offset: usize, len: usize) -> Option<LocalRange> {
        let end = offset.checked_add(len)?;
        (end <= self.len()).then(|| LocalRange { region: self.clone(), offset, len })
    }

    /// Offset of `range` in this region, by address. `None` if it is not inside, as a whole. The range may have been
    /// made from another region over the same memory.
    #[must_use]
    #[inline]
    pub fn offset_of(&self, range: &LocalRange) -> Option<usize> {
        let offset = range.as_ptr().addr().get().checked_sub(self.as_ptr().addr().get())?;
        let end = offset.checked_add(range.len())?;
        (end <= self.len()).then_some(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner.is_some() {
            return;
        }
        // SAFETY: this is the last reference to a mapping that `from_raw` took over whole.
        if let Err(error) = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) } {
            tracing::error!(%error, len = self.len, "munmap failed");
        }
    }
}

/// A range of local memory together with the guard that keeps it mapped.
#[derive(Debug, Clone)]
pub struct LocalRange {
    region: Region,
    offset: usize,
    len: usize,
}

impl LocalRange {
    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: `range` checked that offset + len stays inside the region.
        unsafe { self.region.as_ptr().add(self.offset) }
    }

    /// Returns the part that starts at `offset` and has `len` bytes, or `None` if it leaves the
    /// range.
    #[must_use]
    pub fn sub(&self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self {
            region: self.region.clone(),
            offset: self.offset + offset,
            len,
        })
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the range is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Stands for the one region of a peer that an endpoint reaches: the peer's slot. Its address and
/// remote key, if the transport has them, stay in the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotKey;

/// A range of a peer's memory: the wire view. `K` is the remote key; a local key is never part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRange<K> {
    /// The right to access one region of the peer.
    pub key: K,
    /// First byte within that region.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
}
