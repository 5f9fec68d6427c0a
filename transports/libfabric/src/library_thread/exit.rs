//! Threads that call the library while the process exits.
//!
//! At exit the library frees memory that its running calls still use. So the exiting thread waits,
//! within a bound, until no thread is inside the library. Threads that would call it again are
//! parked.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

static IS_EXITING: AtomicBool = AtomicBool::new(false);
static NUM_CALLERS: AtomicUsize = AtomicUsize::new(0);

/// Marks a thread that may be inside the library, until it is dropped.
#[derive(Debug)]
pub(super) struct CallGuard(());

impl CallGuard {
    /// Counts the calling thread. The library must be loaded: exit handlers run in reverse order,
    /// so its own run after the one that is registered here.
    pub(super) fn new() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the function never unwinds. Registration can only fail beyond the first 32
            // handlers; then the process exits without waiting.
            let _ = unsafe { libc::atexit(wait_at_exit) };
        });
        NUM_CALLERS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }

    /// Call this before each call of the library. It never returns once the process exits.
    #[inline]
    pub(super) fn park_if_exiting(&self) {
        if IS_EXITING.load(Ordering::SeqCst) {
            NUM_CALLERS.fetch_sub(1, Ordering::SeqCst);
            loop {
                thread::park();
            }
        }
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        NUM_CALLERS.fetch_sub(1, Ordering::SeqCst);
    }
}

extern "C" fn wait_at_exit() {
    IS_EXITING.store(true, Ordering::SeqCst);
    let deadline = Instant::now() + EXIT_TIMEOUT;
    while NUM_CALLERS.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Longest time that a stuck library may delay the exit.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);
