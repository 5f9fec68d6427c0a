//! Objects that kernels use, for as long as they may run.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use kernels::gpu::Stream;

/// The owner of kernels, with all objects that they use. It frees them only when the kernels have ended. Their
/// waits are bounded, so a kernel that does not end is lost, and its objects are never freed.
pub(crate) struct InUse<T: Launches>(ManuallyDrop<T>);

/// Has streams on which kernels run.
pub(crate) trait Launches {
    fn streams(&self) -> [&Stream; 2];
}

impl<T: Launches> InUse<T> {
    pub(crate) fn new(parts: T) -> Self {
        Self(ManuallyDrop::new(parts))
    }
}

impl<T: Launches> Deref for InUse<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Launches> DerefMut for InUse<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Launches> Drop for InUse<T> {
    fn drop(&mut self) {
        // The launching code has waited already, for longer.
        let deadline = Instant::now() + LAST_PATIENCE;
        if self.0.streams().into_iter().all(|stream| stream.wait(deadline).is_ok()) {
            // SAFETY: not used after this, and no kernel runs.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        } else {
            eprintln!(
                "ibgda-bring-up: a kernel has not ended within {} s more, so its memory and queues stay as \
                 long as this process",
                LAST_PATIENCE.as_secs()
            );
        }
    }
}

/// With kernels that should have ended.
const LAST_PATIENCE: Duration = Duration::from_secs(1);
