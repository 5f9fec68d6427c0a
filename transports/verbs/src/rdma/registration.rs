//! Registered memory and its keys.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::owner::{CallError, ProtectionDomain, raw_domain};
use super::sys;
use p2p_core::region::Region;

/// Rights of peers on registered memory. This side may always read and write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rights {
    /// Nothing.
    Local,
    /// Read.
    Read,
    /// Read and write.
    Write,
    /// Read, write and, if the device supports it, add.
    All,
}

impl Rights {
    const fn flags(self, has_atomics: bool) -> u32 {
        // No relaxed ordering anywhere: a flag must not become visible before the bytes that precede it.
        let local = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        let read = sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        let write = sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        match self {
            Self::Local => local,
            Self::Read => local | read,
            Self::All if has_atomics => {
                local | read | write | sys::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0
            }
            Self::Write | Self::All => local | read | write,
        }
    }
}

/// Registered memory. Dropping it revokes its keys, and only then releases the memory.
#[derive(Debug)]
pub(super) struct MemoryRegion {
    // Dropped before its domain.
    keys: Keys,
    domain: Arc<ProtectionDomain>,
}

/// A registration, and the memory that stays mapped while the registration is in force, even if the owner is
/// dropped.
#[derive(Debug)]
struct Keys {
    raw: NonNull<sys::ibv_mr>,
    /// Copies, which outlive the registration. If only some keys of a memory could be revoked, a transfer of it
    /// fails by its revoked key.
    local: u32,
    remote: u32,
    memory: Option<Region>,
    deregister: unsafe extern "C" fn(*mut sys::ibv_mr) -> c_int,
    is_closed: bool,
}

// SAFETY: a registration has no thread affinity.
unsafe impl Send for Keys {}
// SAFETY: only immutable fields are read through a shared reference.
unsafe impl Sync for Keys {}

impl Keys {
    /// # Safety
    /// `raw` is a registration with no other owner.
    unsafe fn of(raw: NonNull<sys::ibv_mr>) -> Self {
        // SAFETY: it lives, by the caller's promise.
        let (local, remote) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Self { raw, local, remote, memory: None, deregister: sys::ibv_dereg_mr, is_closed: false }
    }

    fn close(&mut self) -> Result<(), CallError> {
        if self.is_closed {
            return Ok(());
        }
        // SAFETY: the memory is registered, and deregistered once: `raw` is not used after a success.
        CallError::check("ibv_dereg_mr", unsafe { (self.deregister)(self.raw.as_ptr()) })?;
        self.is_closed = true;
        Ok(())
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            // A holder of a key may still write there, so the memory is not reused.
            let bytes = self.memory.as_ref().map(Region::len);
            tracing::error!(%error, bytes, "a registration stays in force, and its memory mapped");
            std::mem::forget(self.memory.take());
        }
    }
}

impl MemoryRegion {
    /// Registers a whole region and keeps it mapped.
    pub(super) fn of_region(
        domain: &Arc<ProtectionDomain>,
        region: &Region,
        rights: Rights,
    ) -> Result<Self, CallError> {
        // SAFETY: the region stays mapped as long as the clone beside the registration.
        let mut registered =
            unsafe { Self::of_pointer(domain, region.as_ptr(), region.len(), rights)? };
        registered.keys.memory = Some(region.clone());
        Ok(registered)
    }

    /// Registers memory that is not a [`Region`].
    ///
    /// # Safety
    /// `ptr..ptr+bytes` stays mapped until the registration is dropped.
    pub(super) unsafe fn of_pointer(
        domain: &Arc<ProtectionDomain>,
        ptr: NonNull<u8>,
        bytes: usize,
        rights: Rights,
    ) -> Result<Self, CallError> {
        // SAFETY: the domain lives; the range is mapped, by the caller's promise. The flags contain no optional
        // ones, so the plain call suffices.
        let raw = unsafe {
            sys::__ibv_reg_mr(
                raw_domain(domain),
                ptr.as_ptr().cast(),
                bytes,
                rights.flags(domain.context().has_atomics()),
                1,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_reg_mr"))?;
        // SAFETY: the registration was just created.
        Ok(Self { keys: unsafe { Keys::of(raw) }, domain: Arc::clone(domain) })
    }

    /// Registers memory behind a dma-buf, to be addressed as `address`.
    ///
    /// # Safety
    /// The range stays allocated until the registration is dropped.
    pub(super) unsafe fn of_dmabuf(
        domain: &Arc<ProtectionDomain>,
        fd: RawFd,
        offset: u64,
        address: u64,
        bytes: usize,
        rights: Rights,
    ) -> Result<Self, CallError> {
        let call = "ibv_reg_dmabuf_mr";
        let register = sys::reg_dmabuf_mr().ok_or(CallError { call, code: libc::EOPNOTSUPP })?;
        // SAFETY: the domain lives; the kernel checks descriptor and range.
        let raw = unsafe {
            register(
                raw_domain(domain),
                offset,
                bytes,
                address,
                fd,
                rights.flags(domain.context().has_atomics()).cast_signed(),
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last(call))?;
        // SAFETY: the registration was just created.
        Ok(Self { keys: unsafe { Keys::of(raw) }, domain: Arc::clone(domain) })
    }

    pub(super) const fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    pub(super) const fn local_key(&self) -> u32 {
        self.keys.local
    }

    pub(super) const fn remote_key(&self) -> u32 {
        self.keys.remote
    }

    /// Revokes the keys.
    ///
    /// # Errors
    /// [`CallError`]. The keys then stay in force, and the memory must stay mapped.
    pub(super) fn close(&mut self) -> Result<(), CallError> {
        self.keys.close()
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::Weak;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    static REFUSALS: AtomicU32 = AtomicU32::new(0);

    unsafe extern "C" fn refuse_for_a_while(_: *mut sys::ibv_mr) -> c_int {
        let is_over =
            REFUSALS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |num| num.checked_sub(1));
        if is_over.is_ok() { libc::EBUSY } else { 0 }
    }

    /// Memory, and a weak reference that shows whether it is still held.
    fn memory() -> (Region, Weak<dyn Any + Send + Sync>) {
        let page = Region::anonymous(4096).unwrap();
        let (ptr, owner) = (page.as_ptr(), Arc::new(page) as Arc<dyn Any + Send + Sync>);
        let watch = Arc::downgrade(&owner);
        // SAFETY: the owner keeps the page mapped.
        (unsafe { Region::of_owner(ptr.as_ptr(), 4096, owner) }.unwrap(), watch)
    }

    /// A device that refuses cannot be produced on demand, so only the call is a fake.
    #[test]
    fn memory_whose_keys_cannot_be_revoked_stays_mapped() {
        let keys = |region: &Region| {
            let (raw, memory) = (NonNull::dangling(), Some(region.clone()));
            let deregister = refuse_for_a_while;
            Keys { raw, local: 1, remote: 2, memory, deregister, is_closed: false }
        };
        let (region, watch) = memory();
        REFUSALS.store(1, Ordering::Relaxed);
        let mut refused_once = keys(&region);
        drop(region);
        let error = refused_once.close().unwrap_err();
        assert_eq!(error, CallError { call: "ibv_dereg_mr", code: libc::EBUSY });
        assert_eq!(watch.strong_count(), 1, "the key is in force");
        refused_once.close().unwrap();
        REFUSALS.store(1, Ordering::Relaxed);
        refused_once.close().expect("closed once and for all");
        drop(refused_once);
        assert_eq!(watch.strong_count(), 0, "the key is gone, and nobody else holds the memory");

        let (region, watch) = memory();
        drop(keys(&region));
        drop(region);
        assert_eq!(REFUSALS.load(Ordering::Relaxed), 0, "it was asked");
        assert_eq!(watch.strong_count(), 1, "nobody gave the key up");
    }
}
