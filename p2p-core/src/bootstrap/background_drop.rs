//! Values that are dropped on a background thread.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::runtime::Handle;

/// A value whose drop may take long. It is dropped on a thread of the runtime for blocking work,
/// and the thread that drops the wrapper does not wait.
///
/// Slots of a connection are an example: a GPU frees memory only when no kernel uses any, and a
/// proxy posts for a moment longer. If no such thread can be started, the value stays until one
/// can, or until the last handle of the runtime is gone. Once the runtime is gone, the value is
/// dropped in place.
pub struct BackgroundDrop<T: Send + 'static> {
    value: ManuallyDrop<T>,
    /// `None` without a runtime: the value is then dropped in place.
    runtime: Option<Handle>,
}

impl<T: Send + 'static> BackgroundDrop<T> {
    /// Wraps a value, to be dropped on a thread of the runtime in which this is called. The caller
    /// may also be one of the runtime's threads for blocking work.
    #[must_use]
    pub fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), runtime: Handle::try_current().ok() }
    }

    /// Makes another value out of this one.
    #[must_use]
    pub fn map<U: Send + 'static>(self, make: impl FnOnce(T) -> U) -> BackgroundDrop<U> {
        let (value, runtime) = self.into_parts();
        BackgroundDrop { value: ManuallyDrop::new(make(value)), runtime }
    }

    /// Returns the value. The caller drops it from then on.
    #[must_use]
    pub fn into_inner(self) -> T {
        self.into_parts().0
    }

    fn into_parts(self) -> (T, Option<Handle>) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, and not used after this.
        (unsafe { ManuallyDrop::take(&mut this.value) }, this.runtime.take())
    }
}

impl<T: Send + 'static> Deref for BackgroundDrop<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + 'static> DerefMut for BackgroundDrop<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: Send + 'static> Drop for BackgroundDrop<T> {
    fn drop(&mut self) {
        // SAFETY: not used after this.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        match &self.runtime {
            // This panics if no thread can be started, with the value in its queue.
            Some(runtime) => {
                let drop_there = || drop(runtime.spawn_blocking(move || drop(value)));
                if catch_unwind(AssertUnwindSafe(drop_there)).is_err() {
                    tracing::warn!(
                        "no thread can be started to free memory: it is kept until one can"
                    );
                }
            }
            None => drop(value),
        }
    }
}

impl<T: Send + fmt::Debug + 'static> fmt::Debug for BackgroundDrop<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        T::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Its drop waits for permission, then reports its thread.
    struct Slow {
        allowed: mpsc::Receiver<()>,
        ended: mpsc::Sender<ThreadId>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.allowed.recv_timeout(PATIENCE);
            let _ = self.ended.send(thread::current().id());
        }
    }

    fn slow() -> (Slow, mpsc::Sender<()>, mpsc::Receiver<ThreadId>) {
        let (allow, allowed) = mpsc::channel();
        let (ended, end) = mpsc::channel();
        (Slow { allowed, ended }, allow, end)
    }

    #[test]
    fn a_drop_does_not_wait_for_the_value() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        let (value, allow, end) = slow();
        let (another, allow_another, another_end) = slow();
        // One drop is in a task, the other on a thread without the runtime.
        let value = runtime.block_on(async {
            drop(BackgroundDrop::new(another));
            BackgroundDrop::new(value)
        });
        drop(value.map(|value| (value, 7)));
        for (allow, end) in [(allow, end), (allow_another, another_end)] {
            assert_eq!(end.try_recv(), Err(mpsc::TryRecvError::Empty));
            allow.send(()).expect("it waits");
            assert_ne!(end.recv_timeout(PATIENCE).expect("its end"), thread::current().id());
        }
    }

    #[test]
    fn without_a_thread_the_value_is_dropped_with_the_last_handle() {
        // No address space has room for such a stack.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .thread_stack_size(1 << 60)
            .build()
            .expect("runtime");
        let (value, allow, end) = slow();
        drop(allow);
        runtime.block_on(async { drop(BackgroundDrop::new(value)) });
        assert_eq!(end.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(runtime);
        end.recv_timeout(PATIENCE).expect("its end");
    }

    #[test]
    fn without_a_runtime_the_value_is_dropped_in_place() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        let (late, allow_late, late_end) = slow();
        let late = runtime.block_on(async { BackgroundDrop::new(late) });
        drop(runtime);
        let (value, allow, end) = slow();
        for (value, allow, end) in
            [(late, allow_late, late_end), (BackgroundDrop::new(value), allow, end)]
        {
            drop(allow);
            drop(value);
            assert_eq!(end.try_recv(), Ok(thread::current().id()));
        }
        let (value, _allow, end) = slow();
        let value = BackgroundDrop::new(value).into_inner();
        assert_eq!(end.try_recv(), Err(mpsc::TryRecvError::Empty));
        std::mem::forget(value);
    }
}
