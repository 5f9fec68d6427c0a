//! Allocation of pages before a provider registers them.

use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

/// Populates every page without changing it: as writable pages if the mapping allows it, otherwise
/// as readable ones.
///
/// # Safety
/// `ptr..ptr+len` is mapped and readable.
pub(super) unsafe fn prefault(ptr: NonNull<u8>, len: usize) {
    let page = rustix::param::page_size();
    let skipped = ptr.as_ptr().addr() % page;
    let first_page = ptr.as_ptr().wrapping_sub(skipped).cast();
    for advice in [Advice::LinuxPopulateWrite, Advice::LinuxPopulateRead] {
        // SAFETY: whole pages of a mapping; no byte of them changes.
        if unsafe { madvise(first_page, skipped + len, advice) }.is_ok() {
            return;
        }
    }
    // Kernels before 5.14 know neither advice.
    for offset in (0..len).step_by(page).chain(len.checked_sub(1)) {
        // SAFETY: in range, and readable.
        unsafe { ptr.as_ptr().add(offset).read_volatile() };
    }
}

#[cfg(test)]
mod tests {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;

    const PAGES: usize = 5;

    /// Number of resident pages of a fresh mapping after all but its first and last 100 bytes were
    /// populated.
    fn num_there(protection: ProtFlags) -> usize {
        let page = rustix::param::page_size();
        let bytes = PAGES * page;
        let mut there = [0u8; PAGES];
        // SAFETY: a fresh mapping that only this function uses, and a byte for each of its pages.
        unsafe {
            let start =
                mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE).unwrap();
            prefault(NonNull::new(start.cast::<u8>().add(100)).unwrap(), bytes - 200);
            assert_eq!(libc::mincore(start, bytes, there.as_mut_ptr()), 0);
            munmap(start, bytes).unwrap();
        }
        there.iter().filter(|flags| **flags & 1 != 0).count()
    }

    #[test]
    fn every_page_exists_afterwards() {
        assert_eq!(num_there(ProtFlags::READ | ProtFlags::WRITE), PAGES);
    }

    #[test]
    fn memory_that_can_only_be_read_is_not_written() {
        assert_eq!(num_there(ProtFlags::READ), PAGES);
    }
}
