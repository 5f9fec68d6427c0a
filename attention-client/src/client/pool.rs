//! Free lanes. Taking and giving back takes no lock unless somebody has to wait.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crossbeam_queue::ArrayQueue;

/// A bounded pool of `T`.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    free: ArrayQueue<T>,
    /// Numbers of those that do not exist yet.
    unmade: ArrayQueue<usize>,
    waiters: AtomicUsize,
    lock: Mutex<()>,
    returned: Condvar,
}

/// What [`Pool::take`] found.
pub(crate) enum Taken<T> {
    Free(T),
    /// There may be one more: the caller makes the one with this number.
    MayCreate(usize),
    TimedOut,
}

impl<T> Pool<T> {
    pub fn new(capacity: usize) -> Self {
        let unmade = ArrayQueue::new(capacity);
        for id in 0..capacity {
            let _ = unmade.push(id);
        }
        Self {
            free: ArrayQueue::new(capacity),
            unmade,
            waiters: AtomicUsize::new(0),
            lock: Mutex::new(()),
            returned: Condvar::new(),
        }
    }

    pub fn capacity(&self) -> usize {
        self.free.capacity()
    }

    /// Takes a free one, or the right to make one; waits until `deadline` when there is neither.
    pub fn take(&self, deadline: Instant) -> Taken<T> {
        if let Some(taken) = self.try_take() {
            return taken;
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let taken = loop {
            // Pairs with the fence in `put`: either this look finds what was put, or `put` sees a
            // waiter and notifies, which it can only do while this thread sleeps.
            fence(Ordering::SeqCst);
            if let Some(taken) = self.try_take() {
                break taken;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Taken::TimedOut;
            }
            guard = self
                .returned
                .wait_timeout(guard, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard);
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        taken
    }

    /// Gives one back.
    pub fn put(&self, item: T) {
        // There are never more than `capacity`; a surplus is dropped.
        let _ = self.free.push(item);
        self.wake_one();
    }

    fn wake_one(&self) {
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.returned.notify_one();
        }
    }

    /// Gives the right to make one back.
    pub fn not_created(&self, id: usize) {
        let _ = self.unmade.push(id);
        self.wake_one();
    }

    /// How many exist.
    pub fn created(&self) -> usize {
        self.capacity() - self.unmade.len()
    }

    fn try_take(&self) -> Option<Taken<T>> {
        if let Some(item) = self.free.pop() {
            return Some(Taken::Free(item));
        }
        self.unmade.pop().map(Taken::MayCreate)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn many_takers_share_few_and_each_gets_its_own() {
        let pool: Arc<Pool<Box<u64>>> = Arc::new(Pool::new(3));
        let takers: Vec<_> = (0..8)
            .map(|_| {
                let pool = Arc::clone(&pool);
                std::thread::spawn(move || {
                    for _ in 0..2000 {
                        let mut item = match pool.take(Instant::now() + Duration::from_secs(30)) {
                            Taken::Free(item) => item,
                            Taken::MayCreate(_) => Box::new(0),
                            Taken::TimedOut => panic!("starved"),
                        };
                        *item += 1;
                        pool.put(item);
                    }
                })
            })
            .collect();
        takers.into_iter().for_each(|taker| taker.join().unwrap());
        assert!(pool.created() <= 3);
        let mut total = 0;
        while let Taken::Free(item) = pool.take(Instant::now()) {
            total += *item;
        }
        assert_eq!(total, 8 * 2000);
    }

    #[test]
    fn an_empty_pool_ends_the_wait() {
        let pool: Pool<()> = Pool::new(1);
        assert!(matches!(pool.take(Instant::now()), Taken::MayCreate(0)));
        let until = Instant::now() + Duration::from_millis(5);
        assert!(matches!(pool.take(until), Taken::TimedOut));
        assert!(Instant::now() >= until);
        pool.not_created(0);
        assert!(matches!(pool.take(Instant::now()), Taken::MayCreate(0)));
    }
}
