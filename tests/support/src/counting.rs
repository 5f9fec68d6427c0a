//! An allocator that counts. A test binary that includes this file by its path has it for all of its
//! threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Allocations of the whole process but for the thread that runs the tests: on a busy machine that one still
/// writes down that it started a test while the test measures.
pub static PROCESS_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Allocations of this thread.
    pub static THREAD_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

/// The counter of the thread that allocates first in a process, which is its main thread: the one that runs the
/// tests, each in a thread of its own.
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
unsafe impl GlobalAlloc for Counting {
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

#[global_allocator]
static COUNTING: Counting = Counting;
