//! Threads that call the library while the process ends.
//!
//! At the end of a process the library frees what its calls use, also of calls that are under way. So whoever
//! ends it waits, within a bound, until no thread is in the library any more; those that would call it again
//! stay out.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

static IS_EXITING: AtomicBool = AtomicBool::new(false);
static NUM_CALLERS: AtomicUsize = AtomicUsize::new(0);

/// A thread that may be in the library, until it is dropped.
#[derive(Debug)]
pub(super) struct CallGuard(());

impl CallGuard {
    /// One more. The library is loaded: what it does at the end, it does after what is registered here.
    pub(super) fn new() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: a function that unwinds nowhere. Without room for it, which does not happen for the first
            // 32, the end of the process is as it was.
            let _ = unsafe { libc::atexit(wait_at_exit) };
        });
        NUM_CALLERS.fetch_add(1, Ordering::SeqCst);
        Self(())
    }

    /// To be called before the library is. Does not come back when the process ends.
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

/// A library that does not come back must not keep a process from its end.
const EXIT_TIMEOUT: Duration = Duration::from_millis(500);
