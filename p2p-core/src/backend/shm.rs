//! Slots in shared memory: sealed memfds, exchanged over an abstract Unix socket.
//!
//! Slots have no name in a file system, so a process that dies leaves no file behind.
//!
//! The trust boundary is the user: a process of the same uid could attach a debugger anyway. Within that boundary, the
//! seals prevent a peer from shrinking a mapping, which would turn loads of this process into SIGBUS. Readers check
//! every byte that a peer writes. One hole stays open on purpose: a peer whose slot lies on reserved huge pages can give
//! the pages back to the pool. A store into them then fails if the pool is empty.

mod pages;
pub mod pass;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use thiserror::Error;

pub use pages::PageKind;

use super::mapped::MappedEndpoint;
use crate::endpoint::TransportKind;
use crate::region::Region;
use crate::slot::SlotLayout;
use crate::wait::event_fd;

/// An error of making a shared slot, or of mapping that of a peer.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A system call failed.
    #[error("shared memory: {call} for {bytes} bytes failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// Bytes of the slot.
        bytes: usize,
        /// The system's answer.
        source: io::Error,
    },
    /// The peer's slot has a different size than agreed.
    #[error("the peer's slot is {found} bytes, expected {expected} bytes as agreed")]
    Size {
        /// Bytes found.
        found: u64,
        /// Bytes agreed.
        expected: usize,
    },
    /// The peer could resize its slot while this process has it mapped.
    #[error(
        "the peer's slot is not sealed against resizing (seals {found:#x}, expected {expected:#x}); its mapping would not be safe"
    )]
    Seals {
        /// Seals found.
        found: u32,
        /// Seals expected.
        expected: u32,
    },
    /// The peer's wake-up descriptor is not an eventfd.
    #[error("the peer's wake-up descriptor is `{found}`, expected an eventfd")]
    NotAnEvent {
        /// The kind of descriptor found.
        found: String,
    },
    /// The peers could not exchange descriptors.
    #[error("shared memory rendezvous: {0}")]
    Rendezvous(String),
}

/// A slot of this process that a peer can map.
#[derive(Debug)]
pub struct SharedSlot {
    fd: OwnedFd,
    region: Region,
    wake: Arc<OwnedFd>,
    pages: PageKind,
}

impl SharedSlot {
    /// Makes a zeroed slot that is sealed against resizing, on huge pages if the system has enough. The kernel commits
    /// its memory page by page on first access, except for reserved huge pages.
    ///
    /// # Errors
    /// [`ShmError::System`].
    pub fn create(layout: &SlotLayout) -> Result<Self, ShmError> {
        let bytes = layout.slot_bytes();
        let system = |call| move |e: io::Error| ShmError::System { call, bytes, source: e };
        let wake = Arc::new(event_fd().map_err(system("eventfd"))?);
        if pages::huge_pages_fit(bytes) {
            // Another process may drain the pool first. That is no error: small pages work as well.
            if let Ok((fd, region)) =
                create_mapped(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)
            {
                return Ok(Self { fd, region, wake, pages: PageKind::HugeTlb });
            }
        }
        let (fd, region) = create_mapped(bytes, MemfdFlags::empty())?;
        let pages = pages::advise_huge(&region);
        Ok(Self { fd, region, wake, pages })
    }

    /// The slot's memory.
    #[must_use]
    pub const fn region(&self) -> &Region {
        &self.region
    }

    /// The kind of pages under the slot.
    #[must_use]
    pub const fn pages(&self) -> PageKind {
        self.pages
    }

    /// The descriptors for the peer: the memory, then the wake-up.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.fd.as_fd(), self.wake.as_fd()]
    }

    /// Returns an endpoint of `kind` to `peer`, and this slot. Closes the memory's descriptor; the mappings stay.
    #[must_use]
    pub fn join(self, kind: TransportKind, peer: PeerSlot) -> (MappedEndpoint, Region) {
        let Self { region, wake, .. } = self;
        (MappedEndpoint::new(kind, peer.region, Arc::new(peer.wake), wake), region)
    }
}

/// A peer's slot, mapped into this process.
#[derive(Debug)]
pub struct PeerSlot {
    region: Region,
    wake: OwnedFd,
}

impl PeerSlot {
    /// Verifies the memory and the wake-up descriptor that a peer sent, and maps the memory.
    ///
    /// # Errors
    /// [`ShmError`] if the size or the seals are not as agreed, or a descriptor has the wrong kind.
    pub fn open(memory: &OwnedFd, wake: OwnedFd, layout: &SlotLayout) -> Result<Self, ShmError> {
        let bytes = layout.slot_bytes();
        // Seals first: only the size of a sealed file cannot change after the check.
        let seals = fcntl_get_seals(memory).unwrap_or(SealFlags::empty());
        if !seals.contains(SEALS) {
            return Err(ShmError::Seals { found: seals.bits(), expected: SEALS.bits() });
        }
        let stat = fstat(memory).map_err(|e| ShmError::System {
            call: "fstat",
            bytes,
            source: e.into(),
        })?;
        if u64::try_from(stat.st_size).ok() != Some(bytes as u64) {
            return Err(ShmError::Size { found: stat.st_size.cast_unsigned(), expected: bytes });
        }
        check_event(&wake)?;
        let region = map_shared(memory, bytes)?;
        pages::advise_huge(&region);
        Ok(Self { region, wake })
    }
}

/// Rejects a wake-up descriptor that is not an eventfd.
pub fn check_event(wake: &OwnedFd) -> Result<(), ShmError> {
    let kind = std::fs::read_link(format!("/proc/self/fd/{}", wake.as_raw_fd()))
        .map(|path| path.to_string_lossy().into_owned())
        .unwrap_or_default();
    if kind == "anon_inode:[eventfd]" { Ok(()) } else { Err(ShmError::NotAnEvent { found: kind }) }
}

fn create_mapped(bytes: usize, extra: MemfdFlags) -> Result<(OwnedFd, Region), ShmError> {
    let system =
        |call| move |e: rustix::io::Errno| ShmError::System { call, bytes, source: e.into() };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
    let fd = memfd_create("switchyard-slot", flags).map_err(system("memfd_create"))?;
    rustix::fs::ftruncate(&fd, bytes as u64).map_err(system("ftruncate"))?;
    fcntl_add_seals(&fd, SEALS).map_err(system("fcntl(F_ADD_SEALS)"))?;
    let region = map_shared(&fd, bytes)?;
    Ok((fd, region))
}

fn map_shared(fd: &OwnedFd, bytes: usize) -> Result<Region, ShmError> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address that the kernel chooses aliases no memory of this process. This process
    // accesses its bytes only through views, atomics and copies.
    let ptr = unsafe { mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, fd, 0) }
        .map_err(|e| ShmError::System { call: "mmap", bytes, source: e.into() })?;
    // SAFETY: `ptr..ptr+bytes` was just mapped, whole, and has no other owner.
    unsafe { Region::from_raw(ptr.cast(), bytes) }.ok_or(ShmError::System {
        call: "mmap",
        bytes,
        source: io::ErrorKind::InvalidInput.into(),
    })
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::SlotConfig;

    fn layout() -> SlotLayout {
        SlotLayout::new(SlotConfig { slot_bytes: 64 << 10, num_frames: 2 }).unwrap()
    }

    fn dup(fd: BorrowedFd<'_>) -> OwnedFd {
        fd.try_clone_to_owned().unwrap()
    }

    #[test]
    fn a_slot_crosses_by_its_descriptors() {
        let slot = SharedSlot::create(&layout()).unwrap();
        let [memory, wake] = slot.descriptors().map(dup);
        let peer = PeerSlot::open(&memory, wake, &layout()).unwrap();
        // SAFETY: both mappings are alive, and only this thread touches them.
        unsafe {
            peer.region.as_ptr().add(4097).write(77);
            assert_eq!(slot.region().as_ptr().add(4097).read(), 77);
        }
        assert_ne!(peer.region.as_ptr(), slot.region().as_ptr());
    }

    #[test]
    fn huge_pages_are_used_when_the_pool_has_them_and_given_back() {
        let layout = SlotLayout::new(SlotConfig { slot_bytes: 4 << 20, num_frames: 2 }).unwrap();
        if !pages::huge_pages_fit(layout.slot_bytes()) {
            let reason = "the pool is empty: sysctl vm.nr_hugepages=16";
            return test_support::skip("huge-pages", reason);
        }
        let slot = SharedSlot::create(&layout).unwrap();
        assert_eq!(slot.pages(), PageKind::HugeTlb);
        let [memory, wake] = slot.descriptors().map(dup);
        let peer = PeerSlot::open(&memory, wake, &layout).unwrap();
        // SAFETY: both mappings are alive, and only this thread touches them.
        unsafe {
            peer.region.as_ptr().add(layout.slot_bytes() - 1).write(9);
            assert_eq!(slot.region().as_ptr().add(layout.slot_bytes() - 1).read(), 9);
        }
        let shrunk = rustix::fs::ftruncate(slot.descriptors()[0], 0);
        assert_eq!(shrunk, Err(rustix::io::Errno::PERM));
    }

    #[test]
    fn a_slot_cannot_be_resized_by_anyone() {
        let slot = SharedSlot::create(&layout()).unwrap();
        let [memory, _] = slot.descriptors();
        for bytes in [0, 4096, 1 << 20] {
            assert_eq!(rustix::fs::ftruncate(memory, bytes), Err(rustix::io::Errno::PERM));
        }
    }

    #[test]
    fn unsealed_foreign_and_wrongly_sized_memory_is_refused() {
        let slot = SharedSlot::create(&layout()).unwrap();
        let wake = || dup(slot.descriptors()[1]);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let unsealed = memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&unsealed, 64 << 10).unwrap();
        assert!(matches!(
            PeerSlot::open(&unsealed, wake(), &layout()),
            Err(ShmError::Seals { found: 0, .. })
        ));
        let (small, _mapped) = create_mapped(32 << 10, MemfdFlags::empty()).unwrap();
        assert!(matches!(
            PeerSlot::open(&small, wake(), &layout()),
            Err(ShmError::Size { found: 32768, expected: 65536 })
        ));
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(matches!(PeerSlot::open(&null, wake(), &layout()), Err(ShmError::Seals { .. })));
        let memory = dup(slot.descriptors()[0]);
        let error = PeerSlot::open(&memory, null, &layout()).unwrap_err();
        assert!(error.to_string().contains("/dev/null"), "{error}");
    }
}
