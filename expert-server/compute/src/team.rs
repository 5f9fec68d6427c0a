//! A team of threads that join a piece of work while it is open.
//!
//! The work is one `Fn(thread_idx)`, whose threads share its tiles by an atomic counter. A thread that wakes
//! late joins late, and one that wakes after the end finds the work closed and sleeps again. So the caller
//! never waits for a thread to wake up. A piece of work allocates nothing and takes no lock.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use super::kernels::Isa;

/// CPUs of the compute threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinning {
    /// Thread `i` runs on `cpus[i % len]`. Entry 0 is for the calling thread, which the pool does not pin: it
    /// can call [`pin_current_thread`].
    pub cpus: Vec<usize>,
}

/// Why a pool cannot be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum PoolError {
    /// The operating system refused a thread.
    #[error("cannot start compute thread {thread}: {source}; lower the number of threads")]
    Spawn { thread: usize, source: io::Error },
    /// The processor lacks the requested instruction set.
    #[error("this processor cannot run the {isa:?} kernels; leave the choice to the pool")]
    Isa { isa: Isa },
    /// A thread cannot be pinned to its CPU.
    #[error("cannot run a compute thread on CPU {cpu}: {source}; choose CPUs this process may use")]
    Pin { cpu: usize, source: io::Error },
}

/// Pins the calling thread to one CPU.
///
/// # Errors
/// [`PoolError::Pin`] when the CPU does not exist or the process may not use it.
pub fn pin_current_thread(cpu: usize) -> Result<(), PoolError> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if cpu >= CpuSet::MAX_CPU {
        return Err(PoolError::Pin { cpu, source: io::ErrorKind::InvalidInput.into() });
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|errno| PoolError::Pin { cpu, source: errno.into() })
}

type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// The threads. The caller of [`Team::run`] is number 0.
pub(super) struct Team {
    state: Arc<TeamState>,
    workers: Vec<Worker>,
}

struct Worker {
    thread: Thread,
    handle: Option<JoinHandle<()>>,
}

struct TeamState {
    /// Bit 63: open. Bits 32..63: number of the piece of work. Bits 0..32: workers inside it.
    word: CachePadded<AtomicU64>,
    /// The work. Written only while it is closed without workers inside, read only by workers that joined it.
    work: std::cell::UnsafeCell<Option<NonNull<Work<'static>>>>,
    /// Index of the thread that panicked, or `usize::MAX`.
    panicked: AtomicUsize,
    stop: AtomicBool,
    sleeping: Box<[CachePadded<AtomicBool>]>,
}

// SAFETY: the owner of the team alone writes `work`, while it is closed with no worker inside. Workers read
// it between joining and leaving. SYNC POINT team-open orders the two.
unsafe impl Sync for TeamState {}
// SAFETY: the pointer in `work` is to a `Sync` closure, and is only used while it is borrowed.
unsafe impl Send for TeamState {}

impl Team {
    /// Starts `num_threads - 1` workers (0: as many threads as the process has CPUs).
    pub(super) fn new(num_threads: usize, pinning: Option<&Pinning>) -> Result<Self, PoolError> {
        let num_threads = match num_threads {
            0 => thread::available_parallelism().map_or(1, usize::from),
            n => n,
        };
        let state = Arc::new(TeamState {
            word: CachePadded::new(AtomicU64::new(0)),
            work: std::cell::UnsafeCell::new(None),
            panicked: AtomicUsize::new(usize::MAX),
            stop: AtomicBool::new(false),
            sleeping: (1..num_threads).map(|_| CachePadded::new(AtomicBool::new(false))).collect(),
        });
        let mut team = Self { state, workers: Vec::with_capacity(num_threads - 1) };
        for thread in 1..num_threads {
            let cpus = pinning.map_or(&[][..], |pinning| &pinning.cpus);
            let cpu = if cpus.is_empty() { None } else { Some(cpus[thread % cpus.len()]) };
            let (pinned, is_pinned) = std::sync::mpsc::sync_channel(1);
            let state = Arc::clone(&team.state);
            let handle = thread::Builder::new()
                .name(format!("compute-{thread}"))
                .spawn(move || {
                    let result = cpu.map_or(Ok(()), pin_current_thread);
                    let ok = result.is_ok();
                    if pinned.send(result).is_ok() && ok {
                        state.work(thread);
                    }
                })
                .map_err(|source| PoolError::Spawn { thread, source })?;
            team.workers.push(Worker { thread: handle.thread().clone(), handle: Some(handle) });
            // Each worker answers once, right after it starts.
            is_pinned.recv().unwrap_or(Ok(()))?;
        }
        Ok(team)
    }

    /// Number of threads, the caller included.
    pub(super) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work` on the caller (index 0) and on every worker that wakes in time. When it returns, no thread
    /// is inside `work`. If workers panic, the error is the index of one of them. A panic of the caller
    /// unwinds after the workers have left.
    ///
    /// `work` must return on every thread soon after its tiles have run out or the [`AbortFlag`] is set.
    pub(super) fn run(&mut self, work: &Work<'_>) -> Result<(), usize> {
        let state = &*self.state;
        state.panicked.store(usize::MAX, Ordering::Relaxed);
        // SAFETY: no worker is inside: `&mut self` excludes another run, and the guard of every earlier run
        // has waited. The guard below keeps the borrow of `work` alive until all workers have left again.
        unsafe {
            let work = NonNull::from(work);
            *state.work.get() =
                Some(std::mem::transmute::<NonNull<Work<'_>>, NonNull<Work<'static>>>(work));
        }
        let number = (state.word.load(Ordering::Relaxed) + NUMBER_ONE) & NUMBER_MASK;
        // SYNC POINT team-open: pairs with the join of a worker; publishes `work`. Sequentially consistent,
        // so that either this thread sees `sleeping` or the worker sees the new state.
        state.word.store(OPEN | number, Ordering::SeqCst);
        let guard = CloseGuard { state };
        for (worker, sleeping) in self.workers.iter().zip(&state.sleeping) {
            if sleeping.load(Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        work(0);
        drop(guard);
        match state.panicked.load(Ordering::Relaxed) {
            usize::MAX => Ok(()),
            thread => Err(thread),
        }
    }

    /// The flag that is set once a thread has panicked in the current piece of work. The other threads should
    /// leave.
    pub(super) fn abort_flag(&self) -> AbortFlag {
        AbortFlag(Arc::clone(&self.state))
    }
}

/// Set once a thread inside the current piece of work has panicked.
pub(super) struct AbortFlag(Arc<TeamState>);

impl AbortFlag {
    pub(super) fn is_set(&self) -> bool {
        self.0.panicked.load(Ordering::Relaxed) != usize::MAX
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A worker catches panics of the work, so this error cannot occur.
                let _ = handle.join();
            }
        }
    }
}

/// Closes the work and waits until the workers have left it, on return and on unwinding.
struct CloseGuard<'a> {
    state: &'a TeamState,
}

impl Drop for CloseGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.state.panicked.store(0, Ordering::Relaxed);
        }
        let mut word = self.state.word.fetch_and(!OPEN, Ordering::Acquire) & !OPEN;
        let mut backoff = Backoff::default();
        // At most the time of one tile: workers take no new tile of work that has run out or was aborted.
        while word & INSIDE_MASK != 0 {
            backoff.wait();
            // SYNC POINT team-leave: pairs with the leave of a worker.
            word = self.state.word.load(Ordering::Acquire);
        }
    }
}

impl TeamState {
    /// The loop of a worker: joins pieces of work until the team stops.
    fn work(&self, thread_idx: usize) {
        let mut seen = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let Some(number) = self.join(&mut seen) else {
                self.sleep(thread_idx, seen);
                continue;
            };
            seen = number;
            // SAFETY: this thread joined while the work was open, so the pointer is set and its
            // borrow lasts until this thread has left.
            let work = unsafe { (*self.work.get()).map(|work| work.as_ref()) };
            if let Some(work) = work
                && catch_unwind(AssertUnwindSafe(|| work(thread_idx))).is_err()
            {
                self.panicked.store(thread_idx, Ordering::Relaxed);
            }
            // SYNC POINT team-leave: pairs with the wait of `CloseGuard`; publishes the results.
            self.word.fetch_sub(1, Ordering::Release);
        }
    }

    /// Joins the open work if this thread has not been in it, and returns its number.
    fn join(&self, seen: &mut u64) -> Option<u64> {
        let mut word = self.word.load(Ordering::Relaxed);
        while word & OPEN != 0 && word & NUMBER_MASK != *seen {
            // SYNC POINT team-open: pairs with the store in `Team::run`.
            match self.word.compare_exchange_weak(
                word,
                word + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(word & NUMBER_MASK),
                Err(now) => word = now,
            }
        }
        None
    }

    /// Waits for new work. Spins briefly first, because batches often follow each other, then parks.
    fn sleep(&self, thread_idx: usize, seen: u64) {
        let has_work = |order| {
            let word = self.word.load(order);
            (word & OPEN != 0 && word & NUMBER_MASK != seen) || self.stop.load(order)
        };
        let start = Instant::now();
        while start.elapsed() < SPIN {
            for _ in 0..32 {
                if has_work(Ordering::Relaxed) {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        let sleeping = &self.sleeping[thread_idx - 1];
        sleeping.store(true, Ordering::SeqCst);
        if !has_work(Ordering::SeqCst) {
            thread::park();
        }
        sleeping.store(false, Ordering::Relaxed);
    }
}

/// Waits longer with each call: pauses at first, then yields the CPU.
#[derive(Default)]
pub(super) struct Backoff {
    num_waits: u32,
}

impl Backoff {
    pub(super) fn wait(&mut self) {
        self.num_waits = self.num_waits.saturating_add(1);
        if self.num_waits < 256 {
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        } else {
            thread::yield_now();
        }
    }
}

const OPEN: u64 = 1 << 63;
const NUMBER_ONE: u64 = 1 << 32;
const NUMBER_MASK: u64 = OPEN - NUMBER_ONE;
const INSIDE_MASK: u64 = NUMBER_ONE - 1;
/// Time for which a worker polls for the next piece of work before it parks.
const SPIN: Duration = Duration::from_micros(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_of_work_is_done_once_whatever_the_number_of_threads() {
        for num_threads in [1, 2, 5, 16] {
            let mut team = Team::new(num_threads, None).unwrap();
            assert_eq!(team.num_threads(), num_threads);
            for round in 0..200 {
                let next = AtomicUsize::new(0);
                let done: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
                team.run(&|_| {
                    while let Some(tile) = done.get(next.fetch_add(1, Ordering::Relaxed)) {
                        tile.fetch_add(1, Ordering::Relaxed);
                    }
                })
                .unwrap();
                assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "round {round}");
                if round % 50 == 0 {
                    // Long enough for the workers to park.
                    thread::sleep(Duration::from_millis(2));
                }
            }
        }
    }

    #[test]
    fn a_panic_of_a_worker_is_reported_and_the_team_goes_on() {
        let mut team = Team::new(3, None).unwrap();
        let abort = team.abort_flag();
        let inside = AtomicUsize::new(0);
        let result = team.run(&|thread| {
            if thread == 0 {
                while !abort.is_set() {
                    thread::yield_now();
                }
            } else {
                inside.fetch_add(1, Ordering::Relaxed);
                panic!("on purpose, in thread {thread}");
            }
        });
        assert!(matches!(result, Err(1 | 2)), "{result:?}");
        assert!(inside.load(Ordering::Relaxed) >= 1);
        assert_eq!(team.run(&|_| {}), Ok(()));
    }

    #[test]
    fn a_panic_of_the_caller_unwinds_after_the_workers_have_left() {
        let mut team = Team::new(3, None).unwrap();
        let abort = team.abort_flag();
        let inside = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.run(&|thread| {
                if thread == 0 {
                    panic!("on purpose, in the caller");
                }
                inside.fetch_add(1, Ordering::SeqCst);
                while !abort.is_set() {
                    thread::yield_now();
                }
                inside.fetch_sub(1, Ordering::SeqCst);
            })
        }));
        assert!(result.is_err());
        assert_eq!(inside.load(Ordering::SeqCst), 0);
        assert_eq!(team.run(&|_| {}), Ok(()));
    }

    #[test]
    fn pinning_to_a_cpu_that_does_not_exist_is_an_error() {
        let pinning = Pinning { cpus: vec![0, 1_000_000] };
        let error = Team::new(2, Some(&pinning)).err();
        assert!(matches!(error, Some(PoolError::Pin { cpu: 1_000_000, .. })), "{error:?}");
    }
}
