//! A pool of free lanes. Taking and returning one takes no lock unless a thread waits.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;

use super::Cancel;

/// A bounded pool of `T`.
#[derive(Debug)]
pub(crate) struct Pool<T> {
    free: ArrayQueue<T>,
    /// Numbers of items that do not exist yet.
    unmade: ArrayQueue<usize>,
    waiters: AtomicUsize,
    lock: Mutex<()>,
    returned: Condvar,
}

/// Result of [`Pool::take`].
pub(crate) enum PoolEntry<T> {
    Free(T),
    /// The pool may grow: the caller makes the item with this number.
    MayCreate(usize),
    TimedOut,
    Cancelled,
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

    /// Takes a free item, or the right to make one. Without either it blocks until `deadline`, and asks `cancelled`
    /// every [`CANCEL_POLL`] meanwhile.
    pub fn take(&self, deadline: Instant, cancelled: Cancel<'_>) -> PoolEntry<T> {
        if let Some(taken) = self.try_take() {
            return taken;
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let taken = loop {
            // Pairs with the fence in `wake_one`: either this look finds the returned item, or `wake_one` sees a
            // waiter and notifies. It needs the lock for that, so this thread sleeps by then.
            fence(Ordering::SeqCst);
            if let Some(taken) = self.try_take() {
                break taken;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break PoolEntry::TimedOut;
            }
            guard = self
                .returned
                .wait_timeout(guard, left.min(CANCEL_POLL))
                .map_or_else(|poisoned| poisoned.into_inner().0, |(guard, _)| guard);
            // The function may block, and a thread that returns an item needs the lock.
            drop(guard);
            if cancelled() {
                self.waiters.fetch_sub(1, Ordering::Relaxed);
                return PoolEntry::Cancelled;
            }
            guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        };
        self.waiters.fetch_sub(1, Ordering::Relaxed);
        taken
    }

    /// Returns an item.
    pub fn put(&self, item: T) {
        // Cannot fail: there are never more than `capacity` items.
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

    /// Returns the right to make an item.
    pub fn not_created(&self, id: usize) {
        let _ = self.unmade.push(id);
        self.wake_one();
    }

    /// Number of items that exist.
    pub fn created(&self) -> usize {
        self.capacity() - self.unmade.len()
    }

    fn try_take(&self) -> Option<PoolEntry<T>> {
        if let Some(item) = self.free.pop() {
            return Some(PoolEntry::Free(item));
        }
        self.unmade.pop().map(PoolEntry::MayCreate)
    }
}

/// Longest sleep between two looks at a caller's wish to end.
const CANCEL_POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn many_takers_share_few_and_each_gets_its_own() {
        let pool: Arc<Pool<Box<u64>>> = Arc::new(Pool::new(3));
        let takers: Vec<_> = (0..8)
            .map(|_| {
                let pool = Arc::clone(&pool);
                std::thread::spawn(move || {
                    for _ in 0..2000 {
                        let mut item =
                            match pool.take(Instant::now() + Duration::from_secs(30), &|| false) {
                                PoolEntry::Free(item) => item,
                                PoolEntry::MayCreate(_) => Box::new(0),
                                PoolEntry::TimedOut | PoolEntry::Cancelled => panic!("starved"),
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
        while let PoolEntry::Free(item) = pool.take(Instant::now(), &|| false) {
            total += *item;
        }
        assert_eq!(total, 8 * 2000);
    }

    #[test]
    fn an_empty_pool_ends_the_wait() {
        let pool: Pool<()> = Pool::new(1);
        let never = || false;
        assert!(matches!(pool.take(Instant::now(), &never), PoolEntry::MayCreate(0)));
        let until = Instant::now() + Duration::from_millis(5);
        assert!(matches!(pool.take(until, &never), PoolEntry::TimedOut));
        assert!(Instant::now() >= until);
        let until = Instant::now() + Duration::from_secs(3600);
        assert!(matches!(pool.take(until, &|| true), PoolEntry::Cancelled));
        pool.not_created(0);
        assert!(matches!(pool.take(Instant::now(), &never), PoolEntry::MayCreate(0)));
    }
}
