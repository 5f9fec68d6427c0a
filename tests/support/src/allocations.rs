//! An allocator that counts. A test binary makes it its global allocator:
//!
//! ```
//! use switchyard_test_support::allocations::{CountingAllocator, THREAD_ALLOCATIONS};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! let before = THREAD_ALLOCATIONS.get();
//! drop(Box::new(1));
//! assert_eq!(THREAD_ALLOCATIONS.get(), before + 1);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Allocations of the whole process, except those of the thread that runs the tests. On a busy machine that thread
/// still records the start of a test while the test measures.
pub static PROCESS_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Allocations of this thread.
    pub static THREAD_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with counters.
pub struct CountingAllocator;

/// The counter of the thread that allocates first in a process. That is its main thread, which runs every test in a
/// thread of its own.
static HARNESS: AtomicPtr<Cell<u64>> = AtomicPtr::new(ptr::null_mut());

fn count() {
    let is_harness = THREAD_ALLOCATIONS.try_with(|count| {
        count.set(count.get() + 1);
        let this = ptr::from_ref(count).cast_mut();
        let first =
            HARNESS.compare_exchange(ptr::null_mut(), this, Ordering::Relaxed, Ordering::Relaxed);
        first.map_or_else(|first| first == this, |_| true)
    });
    // A thread that is ending has no counter any more.
    if !is_harness.unwrap_or(false) {
        PROCESS_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator unchanged. Counting touches an atomic and a
// plain cell in thread-local storage without a destructor, and itself never allocates.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are the callee's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the callee's.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are the callee's.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
