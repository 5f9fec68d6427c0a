//! Threads that call the library while the process ends.
//!
//! At the end of a process the library frees what its calls use, also of calls that are under way. So whoever
//! ends it waits, within a bound, until no thread is in the library any more; those that would call it again
//! stay out.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

static IS_ENDING: AtomicBool = AtomicBool::new(false);
static NUM_INSIDE: AtomicUsize = AtomicUsize::new(0);

/// A thread that may be in the library, until it is dropped.
#[derive(Debug)]
pub(super) struct Inside(());

impl Inside {
    /// One more. The library is loaded: what it does at the end, it does after what is registered here.
    pub(super) fn new() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: a function that unwinds nowhere. Without room for it, which does not happen for the first
            // 32, the end of the process is as it was.
            let _ = unsafe { libc::atexit(wait_at_exit) };
        });
        NUM_INSIDE.fetch_add(1, Ordering::SeqCst);
        Self(())
    }

    /// To be called before the library is. Does not come back when the process ends.
    #[inline]
    pub(super) fn stay_out_at_exit(&self) {
        if IS_ENDING.load(Ordering::SeqCst) {
            NUM_INSIDE.fetch_sub(1, Ordering::SeqCst);
            loop {
                thread::park();
            }
        }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        NUM_INSIDE.fetch_sub(1, Ordering::SeqCst);
    }
}

extern "C" fn wait_at_exit() {
    IS_ENDING.store(true, Ordering::SeqCst);
    let deadline = Instant::now() + PATIENCE;
    while NUM_INSIDE.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

/// A library that does not come back must not keep a process from its end.
const PATIENCE: Duration = Duration::from_millis(500);
