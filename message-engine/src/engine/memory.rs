//! Handles of registered memory, and the cache of registrations.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::deregistration::{DeregistrationQueue, DeregistrationReply};
use super::error::SubmitError;
use super::link::Memory;
use super::shared::Shared;
use crate::fabric::{Access, DmaBuf, Fabric, RegionId, WireRegion};
use p2p_core::region::Region;

/// Registered memory. Clones share it.
///
/// Peers may write it at any time, so this crate only copies from and to it.
#[derive(Debug, Clone)]
pub struct MemoryRegion {
    pub(super) inner: Arc<Handle>,
}

/// A range of registered memory.
#[derive(Debug, Clone)]
pub struct Span {
    pub(super) handle: Arc<Handle>,
    /// First byte within the registration.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// One user's handle of a registration.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) keys: Arc<Keys>,
    /// First byte within the registration.
    offset: u64,
    bytes: u64,
    /// Whether `dereg` has returned it already.
    pub(super) is_returned: std::sync::atomic::AtomicBool,
}

/// A registration with all transports of the engine.
#[derive(Debug)]
pub(super) struct Keys {
    /// Place in the [`Registry`].
    pub(super) idx: u32,
    base: NonNull<u8>,
    bytes: u64,
    /// Whether this processor can read and write it.
    is_host: bool,
    /// Local ids by transport; [`NO_REGION`] for a transport without one.
    ids: Box<[AtomicU32]>,
    wires: Mutex<Vec<Option<WireRegion>>>,
    /// Keeps memory that the engine has allocated mapped.
    _memory: Option<Region>,
}

// SAFETY: an address and numbers; the memory has no thread affinity and stays mapped by the contract of
// registration.
unsafe impl Send for Keys {}
// SAFETY: shared access goes through raw copies and atomics only.
unsafe impl Sync for Keys {}

impl MemoryRegion {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.inner.bytes
    }

    /// Never true: empty memory is not registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.bytes == 0
    }

    /// First byte, for code that reads or writes the memory by raw copies or hands it to a device.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        // SAFETY: the handle lies within the registration.
        unsafe { self.inner.keys.base.add(self.inner.offset as usize) }
    }

    /// Number of the registration: equal for regions that share their keys.
    #[must_use]
    pub fn registration(&self) -> u32 {
        self.inner.keys.idx
    }

    /// Returns a range of the memory.
    ///
    /// # Errors
    /// [`SubmitError::Range`].
    pub fn span(&self, offset: u64, bytes: u64) -> Result<Span, SubmitError> {
        self.inner.check(offset, bytes)?;
        let handle = Arc::clone(&self.inner);
        Ok(Span { offset: handle.offset + offset, bytes, handle })
    }

    /// Returns a span of all of the memory.
    #[must_use]
    pub fn whole(&self) -> Span {
        let handle = Arc::clone(&self.inner);
        Span { offset: handle.offset, bytes: handle.bytes, handle }
    }

    /// Whether this processor can read and write it; false for memory of another device.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.inner.keys.is_host
    }

    /// Copies `bytes` into the memory at `offset`.
    ///
    /// # Errors
    /// [`SubmitError::Range`], [`SubmitError::DeviceMemory`]; nothing is written then.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), SubmitError> {
        self.inner.check_copy(offset, bytes.len() as u64)?;
        self.inner.store(self.inner.offset + offset, bytes);
        Ok(())
    }

    /// Copies from the memory at `offset` into `out`.
    ///
    /// # Errors
    /// [`SubmitError::Range`], [`SubmitError::DeviceMemory`]; `out` is untouched then.
    pub fn copy_out(&self, offset: u64, out: &mut [u8]) -> Result<(), SubmitError> {
        self.inner.check_copy(offset, out.len() as u64)?;
        // SAFETY: the range was checked and is mapped; `out` is exclusive. A peer that writes meanwhile
        // makes the copied bytes arbitrary, nothing else.
        unsafe {
            std::ptr::copy(self.as_ptr().as_ptr().add(offset as usize), out.as_mut_ptr(), out.len())
        };
        Ok(())
    }
}

impl Span {
    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.bytes
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// First byte, if it is memory of this host.
    pub(super) fn host_address(&self) -> Option<NonNull<u8>> {
        // SAFETY: the span lies within the registration.
        self.handle.keys.is_host.then(|| unsafe { self.handle.keys.base.add(self.offset as usize) })
    }

    /// The registration as the transport with index `fabric` describes it to peers.
    pub(super) fn wire(&self, fabric: usize) -> Option<WireRegion> {
        self.handle.keys.lock_wires().get(fabric).copied().flatten()
    }

    /// The transport's id of the registration.
    pub(super) fn region(&self, fabric: usize) -> Option<RegionId> {
        self.handle.keys.region(fabric)
    }
}

impl Handle {
    pub(super) fn new(shared: Arc<Shared>, keys: Arc<Keys>, ptr: NonNull<u8>, bytes: u64) -> Self {
        let offset = (ptr.as_ptr() as u64) - (keys.base.as_ptr() as u64);
        Self { shared, keys, offset, bytes, is_returned: false.into() }
    }

    /// Whether it covers the whole registration.
    pub(super) fn is_full(&self) -> bool {
        self.bytes == self.keys.bytes
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<(), SubmitError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(SubmitError::Range { offset, bytes, limit: self.bytes }),
        }
    }

    /// Checks a range for a copy by this processor.
    fn check_copy(&self, offset: u64, bytes: u64) -> Result<(), SubmitError> {
        self.check(offset, bytes)?;
        if self.keys.is_host { Ok(()) } else { Err(SubmitError::DeviceMemory) }
    }
}

impl Memory for Arc<Handle> {
    fn is_host(&self) -> bool {
        self.keys.is_host
    }

    fn load(&self, offset: u64, bytes: u64, out: &mut Vec<u8>) {
        let bytes = bytes as usize;
        out.reserve(bytes);
        debug_assert!(self.keys.is_host || bytes == 0, "a processor's copy of device memory");
        // SAFETY: the range was checked when the span was made, and is memory of this host, as links
        // check; `out` has room for as much; every byte of it is written before it counts.
        unsafe {
            let src = self.keys.base.as_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(src, out.as_mut_ptr().add(out.len()), bytes);
            out.set_len(out.len() + bytes);
        }
    }

    fn store(&self, offset: u64, bytes: &[u8]) {
        debug_assert!(self.keys.is_host || bytes.is_empty(), "a processor's copy of device memory");
        // SAFETY: the range was checked, and is memory of this host, as links check; raw copies are the
        // only access to registered memory.
        unsafe {
            let dst = self.keys.base.as_ptr().add(offset as usize);
            std::ptr::copy(bytes.as_ptr(), dst, bytes.len());
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.is_returned.load(Ordering::Acquire) {
            self.shared.defer_release(self.keys.idx, self.is_full());
        }
    }
}

impl Keys {
    /// The id with the transport of index `fabric`.
    pub(super) fn region(&self, fabric: usize) -> Option<RegionId> {
        let id = self.ids.get(fabric)?.load(Ordering::Acquire);
        (id != NO_REGION).then_some(RegionId(id))
    }

    /// Whether the range covers the whole registration.
    pub(super) fn covers(&self, ptr: NonNull<u8>, bytes: usize) -> bool {
        self.base == ptr && self.bytes == bytes as u64
    }

    fn lock_wires(&self) -> std::sync::MutexGuard<'_, Vec<Option<WireRegion>>> {
        self.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All registrations of an engine, owned by its thread.
#[derive(Debug, Default)]
pub(super) struct Registry {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Registrations by first byte, then index.
    by_start: BTreeSet<(usize, u32)>,
    /// Length of the longest registration so far.
    longest: usize,
    /// Registrations that could not be released yet.
    deregistrations: DeregistrationQueue,
}

/// Reason for which a registration was not released.
#[derive(Debug)]
enum ReleaseError {
    /// The caller may not release it.
    Refused(String),
    /// A transport still uses it. The handle still counts, and the caller may retry.
    Retryable(String),
}

/// Origin of memory to be registered.
#[derive(Debug)]
pub(super) enum Source {
    /// Memory that the engine has allocated and owns.
    Own(Region),
    /// Memory of this host that the user keeps mapped.
    Host,
    /// Memory of another device that the user keeps allocated. If there is a dma-buf, it comes with the offset of the
    /// memory in it.
    Device(Option<(OwnedFd, u64)>),
}

impl Source {
    const fn is_host(&self) -> bool {
        !matches!(self, Self::Device(_))
    }
}

#[derive(Debug)]
struct Entry {
    keys: Arc<Keys>,
    access: Access,
    num_handles: usize,
    /// Handles that cover the whole registration.
    num_full: usize,
    /// Whether it was to be released and could not be yet. Its keys serve the existing handles only, no new ones: when
    /// those are gone the memory may be unmapped, and other memory be mapped at its addresses.
    is_retired: bool,
}

impl Registry {
    /// Registers memory, or finds a registration with the same rights that covers the range.
    ///
    /// # Safety
    /// As for [`Fabric::register`].
    pub(super) unsafe fn acquire(
        &mut self,
        fabrics: &mut [Box<dyn Fabric>],
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        source: Source,
    ) -> Result<Arc<Keys>, String> {
        if bytes == 0 || (ptr.as_ptr() as usize).checked_add(bytes).is_none() {
            return Err("there is nothing to register".to_owned());
        }
        let is_host = source.is_host();
        if let Some(idx) = self.find(ptr.as_ptr() as usize, bytes, access, is_host)
            && let Some(entry) = &mut self.entries[idx as usize]
        {
            entry.num_handles += 1;
            entry.num_full += usize::from(entry.keys.bytes == bytes as u64);
            return Ok(Arc::clone(&entry.keys));
        }
        let mut ids = Vec::with_capacity(fabrics.len());
        let mut why = Vec::new();
        for fabric in fabrics.iter_mut() {
            // SAFETY: the caller's promise.
            let registered = unsafe {
                match &source {
                    Source::Own(_) | Source::Host => fabric.register(ptr, bytes, access),
                    Source::Device(dma_buf) => {
                        let dma_buf = dma_buf.as_ref();
                        let dma_buf =
                            dma_buf.map(|(fd, offset)| DmaBuf { fd: fd.as_fd(), offset: *offset });
                        fabric.register_device(ptr, bytes, access, dma_buf)
                    }
                }
            };
            match registered {
                Ok(id) => ids.push(Some(id)),
                Err(error) => {
                    why.push(format!("{}: {error}", fabric.kind().name()));
                    ids.push(None);
                }
            }
        }
        if ids.iter().all(Option::is_none) {
            return Err(why.join("; "));
        }
        // That some transports do not reach other devices is no news.
        if !why.is_empty() && is_host {
            tracing::warn!(bytes, "registered with some transports only: {}", why.join("; "));
        }
        let wires = ids.iter().zip(fabrics.iter()).map(|(id, fabric)| fabric.describe((*id)?));
        let wires = Mutex::new(wires.collect());
        let ids = ids.iter().map(|id| AtomicU32::new(id.map_or(NO_REGION, |id| id.0))).collect();
        let idx = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        let memory = if let Source::Own(memory) = source { Some(memory) } else { None };
        let bytes_in_all = bytes as u64;
        let keys =
            Keys { idx, base: ptr, bytes: bytes_in_all, is_host, ids, wires, _memory: memory };
        let keys = Arc::new(keys);
        let entry = Entry {
            keys: Arc::clone(&keys),
            access,
            num_handles: 1,
            num_full: 1,
            is_retired: false,
        };
        self.entries[idx as usize] = Some(entry);
        self.by_start.insert((ptr.as_ptr() as usize, idx));
        self.longest = self.longest.max(bytes);
        Ok(keys)
    }

    /// Takes one handle back. Returns true if it was the last, so that the keys are revoked. After an error the handle
    /// still counts.
    fn release(
        &mut self,
        fabrics: &mut [Box<dyn Fabric>],
        idx: u32,
        is_full: bool,
        must_be_free: bool,
    ) -> Result<bool, ReleaseError> {
        let Some(Some(entry)) = self.entries.get_mut(idx as usize) else {
            return Err(ReleaseError::Refused("there is no such registration".to_owned()));
        };
        if entry.num_handles > 1 {
            if must_be_free && is_full && entry.num_full == 1 {
                return Err(ReleaseError::Refused(format!(
                    "{} regions within it share its keys; deregister them first",
                    entry.num_handles - 1
                )));
            }
            entry.num_handles -= 1;
            entry.num_full -= usize::from(is_full);
            return Ok(false);
        }
        let keys = Arc::clone(&entry.keys);
        for (place, fabric) in keys.ids.iter().zip(fabrics.iter_mut()) {
            let id = place.load(Ordering::Acquire);
            if id != NO_REGION {
                if let Err(error) = fabric.deregister(RegionId(id)) {
                    entry.is_retired = true;
                    return Err(ReleaseError::Retryable(error.to_string()));
                }
                place.store(NO_REGION, Ordering::Release);
            }
        }
        keys.lock_wires().fill(None);
        self.by_start.remove(&(keys.base.as_ptr() as usize, idx));
        self.entries[idx as usize] = None;
        self.free.push(idx);
        Ok(true)
    }

    /// Takes a handle back and answers its caller through `reply`: whether the keys are revoked, or the error. Peers in
    /// the middle of an operation get a second to end it.
    pub(super) fn deregister(
        &mut self,
        fabrics: &mut [Box<dyn Fabric>],
        idx: u32,
        is_full: bool,
        reply: DeregistrationReply,
    ) {
        let answer = match self.release(fabrics, idx, is_full, true) {
            Ok(is_revoked) => Ok(is_revoked),
            Err(ReleaseError::Retryable(_)) => {
                return self.deregistrations.add(idx, Some(reply), Instant::now());
            }
            Err(ReleaseError::Refused(detail)) => Err(detail),
        };
        if let Err(Err(_)) = reply.push(answer) {
            // The caller has timed out and dropped its handle. It takes the memory for deregistered, so no new handle
            // may share the keys.
            if let Some(Some(entry)) = self.entries.get_mut(idx as usize) {
                entry.is_retired = true;
            }
            self.deregister_abandoned(fabrics, idx, is_full);
        }
    }

    /// Takes back a handle that its user has dropped: at once, or as soon as the transports allow it.
    pub(super) fn deregister_abandoned(
        &mut self,
        fabrics: &mut [Box<dyn Fabric>],
        idx: u32,
        is_full: bool,
    ) {
        if let Err(ReleaseError::Retryable(error)) = self.release(fabrics, idx, is_full, false) {
            tracing::debug!(error, "memory stays registered for now");
            self.deregistrations.add(idx, None, Instant::now());
        }
    }

    /// Time of the next [retry](Self::retry_deregistrations).
    pub(super) const fn next_attempt(&self) -> Option<Instant> {
        self.deregistrations.next_attempt()
    }

    /// Retries deregistrations that are due.
    pub(super) fn retry_deregistrations(&mut self, fabrics: &mut [Box<dyn Fabric>], now: Instant) {
        if !self.deregistrations.is_due(now) {
            return;
        }
        let mut queue = std::mem::take(&mut self.deregistrations);
        queue.retry_due(now, Instant::now, |idx| match self.release(fabrics, idx, true, false) {
            Ok(_) => Ok(()),
            Err(ReleaseError::Refused(detail) | ReleaseError::Retryable(detail)) => Err(detail),
        });
        self.deregistrations = queue;
    }

    /// Ends all retries, and answers the callers that wait for them.
    pub(super) fn stop(&mut self) {
        self.deregistrations.stop();
    }

    /// A registration with these rights that covers the range.
    fn find(&self, start: usize, bytes: usize, access: Access, is_host: bool) -> Option<u32> {
        let lowest = start.saturating_sub(self.longest);
        let candidates = self.by_start.range((lowest, 0)..=(start, u32::MAX)).rev();
        let covers = |(begin, idx): &&(usize, u32)| {
            self.entries[*idx as usize].as_ref().is_some_and(|entry| {
                entry.access == access
                    && !entry.is_retired
                    && entry.keys.is_host == is_host
                    && begin + entry.keys.bytes as usize >= start + bytes
            })
        };
        candidates.take(MAX_CANDIDATES).find(covers).map(|(_, idx)| *idx)
    }
}

const NO_REGION: u32 = u32::MAX;
/// So many registrations that begin below are looked at: overlapping ones are few.
const MAX_CANDIDATES: usize = 64;
