//! Work on all processors.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::Result;

/// Runs `work` on every item, as many at a time as there are processors. Results keep the order of the items.
///
/// # Errors
/// Of the first item that failed. After a failure no further item begins.
pub fn map<I: Sync, T: Send>(items: &[I], work: impl Fn(&I) -> Result<T> + Sync) -> Result<Vec<T>> {
    let num_threads = thread::available_parallelism().map_or(1, NonZero::get).min(items.len());
    let next = AtomicUsize::new(0);
    let work_on = || {
        let mut done = Vec::new();
        loop {
            let idx = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(idx) else { return done };
            let result = work(item);
            if result.is_err() {
                next.store(items.len(), Ordering::Relaxed);
            }
            done.push((idx, result));
        }
    };
    let mut done = thread::scope(|scope| {
        let threads: Vec<_> = (0..num_threads).map(|_| scope.spawn(work_on)).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Vec<(usize, Result<T>)>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().flat_map(join).collect::<Vec<_>>()
    });
    done.sort_unstable_by_key(|(idx, _)| *idx);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use anyhow::ensure;

    use super::*;

    #[test]
    fn results_keep_the_order_of_the_items() {
        let items: Vec<usize> = (0..100).collect();
        let results = map(&items, |item| Ok(item * 3)).unwrap();
        assert!(results.iter().enumerate().all(|(idx, result)| *result == idx * 3));
        assert!(map(&[] as &[u8], |_| Ok(())).unwrap().is_empty());
    }

    #[test]
    fn items_are_worked_on_at_the_same_time() {
        let num = thread::available_parallelism().map_or(1, NonZero::get);
        let num_begun = AtomicUsize::new(0);
        let deadline = Instant::now() + Duration::from_secs(60);
        let wait_for_all = |()| {
            num_begun.fetch_add(1, Ordering::Relaxed);
            while num_begun.load(Ordering::Relaxed) < num {
                ensure!(Instant::now() < deadline, "the others have not begun");
                thread::yield_now();
            }
            Ok(())
        };
        map(&vec![(); num], |&unit| wait_for_all(unit)).unwrap();
    }

    #[test]
    fn the_first_failure_ends_it() {
        let num_begun = AtomicUsize::new(0);
        let items: Vec<usize> = (0..10_000).collect();
        let error = map(&items, |item| {
            num_begun.fetch_add(1, Ordering::Relaxed);
            ensure!(*item < 5, "enough at {item}");
            Ok(())
        });
        assert_eq!(error.unwrap_err().to_string(), "enough at 5");
        let most = 5 + 2 * thread::available_parallelism().map_or(1, NonZero::get);
        assert!(num_begun.into_inner() <= most);
    }
}
