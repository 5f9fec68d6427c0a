//! The state of transfers, shared between their users and the engine's thread.
//!
//! A transfer has one or more parts. The thread finishes the parts. The last one makes the transfer done, or failed if
//! any part failed, and wakes the waiter. An entry is free again when the user has taken the outcome. If the user has
//! dropped the handle, it is free when the last part is finished.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use rustix::event::Timespec;
use rustix::thread::futex;

use super::error::{CloseReason, TransferError, UnknownTransfer};
use p2p_core::pulse::Pulse;

/// Number of a transfer within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferId(pub u64);

/// Status of a transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransferStatus {
    /// Under way. Its buffers are in use.
    Pending,
    /// Done.
    Done {
        /// Bytes moved; for a receive, the length of the message.
        bytes: u64,
    },
    /// Failed. Never reported as done.
    Failed(TransferError),
}

/// A transfer under way. It can be polled, waited for and awaited. After a drop it runs on unobserved, and its buffers
/// stay in use until its end. The same holds for a future that awaits it.
#[derive(Debug)]
#[must_use = "dropping a transfer forgets its outcome"]
pub struct Transfer {
    transfers: Arc<Transfers>,
    id: TransferId,
    is_released: bool,
}

impl Transfer {
    pub(super) const fn new(transfers: Arc<Transfers>, id: TransferId) -> Self {
        Self { transfers, id, is_released: false }
    }

    /// Returns the status without blocking, any number of times.
    #[must_use]
    pub fn poll(&self) -> TransferStatus {
        // The entry belongs to this handle until it is dropped.
        self.transfers.status(self.id).unwrap_or_else(|_| stopped())
    }

    /// Blocks until the transfer ends, which its deadline bounds. Returns the bytes moved.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn wait(self) -> Result<u64, TransferError> {
        // The thread ends every transfer at its deadline. A thread that has ended has failed them all.
        let pulse = &self.transfers.pulse;
        let mut watch = pulse.watch();
        while !self.transfers.wait(self.id, Instant::now() + pulse.interval()) {
            if watch.finds_stuck(pulse) {
                return Err(TransferError::Stuck);
            }
        }
        self.outcome().unwrap_or(Err(lost()))
    }

    /// Blocks until the transfer ends or `until` passes. `until` is not the transfer's deadline. Returns `None` if the
    /// transfer is still under way.
    #[must_use]
    pub fn wait_until(&self, until: Instant) -> Option<Result<u64, TransferError>> {
        self.transfers.wait(self.id, until);
        self.outcome()
    }

    /// Turns the handle into the transfer's number, for [`Engine::poll_async`](super::Engine::poll_async).
    #[must_use]
    pub fn into_id(mut self) -> TransferId {
        self.is_released = true;
        self.id
    }

    fn outcome(&self) -> Option<Result<u64, TransferError>> {
        match self.poll() {
            TransferStatus::Pending => None,
            TransferStatus::Done { bytes } => Some(Ok(bytes)),
            TransferStatus::Failed(error) => Some(Err(error)),
        }
    }
}

impl Future for Transfer {
    type Output = Result<u64, TransferError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(outcome) = self.outcome() {
            return Poll::Ready(outcome);
        }
        self.transfers.set_waker(self.id, context.waker());
        self.outcome().map_or(Poll::Pending, Poll::Ready)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if !self.is_released {
            self.transfers.release(self.id);
        }
    }
}

/// All transfers of an engine.
#[derive(Debug)]
pub(super) struct Transfers {
    entries: Box<[Entry]>,
    free: ArrayQueue<u32>,
    /// Pulse of the thread that ends them.
    pub(super) pulse: Pulse,
}

#[derive(Debug, Default)]
struct Entry {
    /// Phase and flags; a futex.
    state: AtomicU32,
    generation: AtomicU32,
    num_parts: AtomicU32,
    bytes: AtomicU64,
    has_failed: AtomicBool,
    /// The first failure.
    error: Mutex<Option<TransferError>>,
    waker: Mutex<Option<Waker>>,
}

impl Transfers {
    pub(super) fn new(most: u32, pulse: Pulse) -> Self {
        let free = ArrayQueue::new(most as usize);
        for idx in 0..most {
            let _ = free.push(idx);
        }
        Self { entries: (0..most).map(|_| Entry::default()).collect(), free, pulse }
    }

    /// Begins a transfer of `num_parts` parts, at least one. Returns `None` if no entry is free.
    pub(super) fn begin(&self, num_parts: u32) -> Option<TransferId> {
        let idx = self.free.pop()?;
        let entry = &self.entries[idx as usize];
        entry.num_parts.store(num_parts, Ordering::Relaxed);
        entry.bytes.store(0, Ordering::Relaxed);
        entry.has_failed.store(false, Ordering::Relaxed);
        // Pushing to the command queue publishes the stores above to the thread.
        entry.state.store(PENDING, Ordering::Relaxed);
        let generation = entry.generation.load(Ordering::Relaxed);
        Some(TransferId(u64::from(generation) << 32 | u64::from(idx)))
    }

    /// Ends one part of the transfer with index `idx`.
    pub(super) fn finish(&self, idx: u32, result: Result<u64, TransferError>) {
        self.finish_many(idx, 1, result);
    }

    /// Ends `num` parts at once.
    pub(super) fn finish_many(&self, idx: u32, num: u32, result: Result<u64, TransferError>) {
        let entry = &self.entries[idx as usize];
        match result {
            Ok(bytes) => {
                entry.bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Err(error) => {
                lock(&entry.error).get_or_insert(error);
                entry.has_failed.store(true, Ordering::Relaxed);
            }
        }
        // Release: a reader of the phase sees the bytes and counts of all parts.
        if entry.num_parts.fetch_sub(num, Ordering::AcqRel) != num {
            return;
        }
        let phase = if entry.has_failed.load(Ordering::Relaxed) { FAILED } else { DONE };
        // SYNC POINT: transfer-end. Pairs with the loads in `status` and `wait`.
        let flags = entry.state.swap(phase, Ordering::AcqRel);
        if flags & DETACHED != 0 {
            return self.free(idx);
        }
        if flags & WAITS != 0 {
            let _ = futex::wake(&entry.state, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
        if flags & WAKES != 0
            && let Some(waker) = lock(&entry.waker).take()
        {
            waker.wake();
        }
    }

    pub(super) fn status(&self, id: TransferId) -> Result<TransferStatus, UnknownTransfer> {
        let entry = self.entry(id).ok_or(UnknownTransfer)?;
        // SYNC POINT: transfer-end.
        Ok(match entry.state.load(Ordering::Acquire) & PHASE {
            PENDING => TransferStatus::Pending,
            DONE => TransferStatus::Done { bytes: entry.bytes.load(Ordering::Relaxed) },
            FAILED => TransferStatus::Failed(lock(&entry.error).clone().unwrap_or_else(lost)),
            _ => return Err(UnknownTransfer),
        })
    }

    /// Blocks until the transfer ends. Returns false if `until` passes first.
    pub(super) fn wait(&self, id: TransferId, until: Instant) -> bool {
        let Some(entry) = self.entry(id) else { return true };
        let start = Instant::now();
        loop {
            for _ in 0..32 {
                if entry.state.load(Ordering::Acquire) & PHASE != PENDING {
                    return true;
                }
                std::hint::spin_loop();
            }
            if start.elapsed() >= SPIN {
                break;
            }
        }
        loop {
            let state = entry.state.fetch_or(WAITS, Ordering::AcqRel) | WAITS;
            if state & PHASE != PENDING {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let timeout = Timespec {
                tv_sec: left.as_secs().min(3600).cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            };
            // After a wake-up, a change, a signal or a timeout, the loop checks again.
            let _ = futex::wait(&entry.state, futex::Flags::PRIVATE, state, Some(&timeout));
        }
    }

    /// Drops a user's interest in a transfer. Its entry is free once it has ended.
    pub(super) fn release(&self, id: TransferId) {
        let Some(entry) = self.entry(id) else { return };
        let mut state = entry.state.load(Ordering::Acquire);
        loop {
            let next = match state & PHASE {
                PENDING => state | DETACHED,
                DONE | FAILED => FREE,
                _ => return,
            };
            match entry.state.compare_exchange(state, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) if next == FREE => return self.free(id.0 as u32),
                Ok(_) => return,
                Err(found) => state = found,
            }
        }
    }

    fn set_waker(&self, id: TransferId, waker: &Waker) {
        let Some(entry) = self.entry(id) else { return };
        *lock(&entry.waker) = Some(waker.clone());
        entry.state.fetch_or(WAKES, Ordering::AcqRel);
    }

    fn free(&self, idx: u32) {
        let entry = &self.entries[idx as usize];
        entry.state.store(FREE, Ordering::Relaxed);
        if entry.has_failed.load(Ordering::Relaxed) {
            *lock(&entry.error) = None;
        }
        entry.generation.fetch_add(1, Ordering::Release);
        let _ = self.free.push(idx);
    }

    fn entry(&self, id: TransferId) -> Option<&Entry> {
        let entry = self.entries.get(id.0 as u32 as usize)?;
        (entry.generation.load(Ordering::Acquire) == (id.0 >> 32) as u32).then_some(entry)
    }

    /// Number of entries in use.
    pub(super) fn num_in_use(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

/// Ignores poison: no holder of these locks leaves the value inconsistent.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn stopped() -> TransferStatus {
    TransferStatus::Failed(lost())
}

const fn lost() -> TransferError {
    TransferError::Disconnected { op: "transfer", reason: CloseReason::Stopped }
}

const FREE: u32 = 0;
const PENDING: u32 = 1;
const DONE: u32 = 2;
const FAILED: u32 = 3;
const PHASE: u32 = 3;
/// The user has dropped the handle.
const DETACHED: u32 = 4;
/// A thread sleeps on the futex.
const WAITS: u32 = 8;
/// There is a waker.
const WAKES: u32 = 16;
const SPIN: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    fn transfers(most: u32) -> Transfers {
        Transfers::new(most, Pulse::new(Duration::from_secs(60)))
    }

    fn error() -> TransferError {
        TransferError::Deadline { op: "write" }
    }

    #[test]
    fn one_failed_part_fails_the_transfer_until_it_is_taken() {
        let transfers = transfers(2);
        let id = transfers.begin(3).unwrap();
        transfers.finish(id.0 as u32, Ok(5));
        transfers.finish(id.0 as u32, Err(error()));
        assert_eq!(transfers.status(id), Ok(TransferStatus::Pending));
        transfers.finish(id.0 as u32, Ok(6));
        for _ in 0..3 {
            assert_eq!(transfers.status(id), Ok(TransferStatus::Failed(error())));
        }
        transfers.release(id);
        assert_eq!(transfers.status(id), Err(UnknownTransfer));
        // The entry is reused without a trace of the failure.
        for _ in 0..4 {
            let next = transfers.begin(1).unwrap();
            assert_ne!(next, id);
            transfers.finish(next.0 as u32, Ok(7));
            assert_eq!(transfers.status(next), Ok(TransferStatus::Done { bytes: 7 }));
            transfers.release(next);
        }
    }

    #[test]
    fn a_forgotten_transfer_frees_its_place_at_its_end() {
        let transfers = transfers(1);
        let id = transfers.begin(1).unwrap();
        transfers.release(id);
        assert!(transfers.begin(1).is_none());
        transfers.finish(id.0 as u32, Ok(0));
        assert!(transfers.begin(1).is_some());
    }

    #[test]
    fn waiting_ends_with_the_transfer_or_in_time() {
        let transfers = Arc::new(transfers(1));
        let id = transfers.begin(1).unwrap();
        assert!(!transfers.wait(id, Instant::now() + Duration::from_millis(2)));
        let other = Arc::clone(&transfers);
        let waiter = std::thread::spawn(move || Transfer::new(other, id).wait());
        std::thread::sleep(Duration::from_millis(5));
        transfers.finish(id.0 as u32, Ok(9));
        assert_eq!(waiter.join().unwrap(), Ok(9));
        assert_eq!(transfers.num_in_use(), 0);
    }
}
