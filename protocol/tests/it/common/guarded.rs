//! Memory that ends at an unreadable page, so that an access of one byte beyond it faults.

use std::ptr::NonNull;

use p2p_core::{ReadView, WriteView};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const PAGE: usize = 4096;

/// Mapped pages with a guard page behind them.
pub struct Guarded {
    base: NonNull<u8>,
    capacity: usize,
}

// SAFETY: plain memory, owned, without thread affinity.
unsafe impl Send for Guarded {}

impl Guarded {
    /// At least `min_bytes` of zeroed memory.
    pub fn new(min_bytes: usize) -> Self {
        let capacity = min_bytes.next_multiple_of(PAGE);
        let mapped = capacity + PAGE;
        // SAFETY: a fresh private mapping; the guard lies within it.
        let base = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            let base = mmap_anonymous(std::ptr::null_mut(), mapped, prot, MapFlags::PRIVATE)
                .expect("mmap");
            mprotect(base.byte_add(capacity), PAGE, MprotectFlags::empty()).expect("mprotect");
            base
        };
        Self { base: NonNull::new(base.cast()).expect("mmap never returns null"), capacity }
    }

    /// Bytes before the guard.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The last `len` bytes before the guard.
    pub fn tail(&self, len: usize) -> NonNull<u8> {
        assert!(len <= self.capacity);
        // SAFETY: within the mapping.
        unsafe { self.base.add(self.capacity - len) }
    }

    /// Reads the last `len` bytes before the guard.
    pub fn read(&self, len: usize) -> ReadView<'_> {
        // SAFETY: mapped for as long as `self` lives.
        unsafe { ReadView::new(self.tail(len), len) }
    }

    /// Writes the last `len` bytes before the guard.
    pub fn write(&mut self, len: usize) -> WriteView<'_> {
        // SAFETY: mapped for as long as `self` lives, and borrowed exclusively.
        unsafe { WriteView::new(self.tail(len), len) }
    }

    /// Copies `bytes` to the end of the memory and returns a view of exactly them.
    pub fn hold(&mut self, bytes: &[u8]) -> ReadView<'_> {
        self.write(bytes.len()).put_bytes(0, bytes).expect("capacity checked");
        self.read(bytes.len())
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping that `new` made.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.capacity + PAGE) };
        debug_assert!(unmapped.is_ok());
    }
}
