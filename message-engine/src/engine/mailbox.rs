//! A queue from the engine's thread to users who block or await.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::error::WaitError;

/// A queue of items, with a lock. Not for the hot path.
#[derive(Debug)]
pub(super) struct Mailbox<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    wakers: Vec<Waker>,
    is_closed: bool,
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        let state = State { items: VecDeque::new(), wakers: Vec::new(), is_closed: false };
        Self { state: Mutex::new(state), filled: Condvar::new() }
    }
}

impl<T> Mailbox<T> {
    /// Appends an item.
    ///
    /// # Errors
    /// The item, if the mailbox is closed.
    pub(super) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.lock();
        if state.is_closed {
            return Err(item);
        }
        state.items.push_back(item);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.filled.notify_one();
        wakers.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Closes the mailbox and returns an item that arrived before. Later pushes fail.
    pub(super) fn close_and_pop(&self) -> Option<T> {
        let mut state = self.lock();
        state.is_closed = true;
        state.items.pop_front()
    }

    /// Closes the mailbox and wakes all waiters. Items in it can still be taken.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.filled.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Takes all items, without blocking.
    pub(super) fn drain(&self) -> VecDeque<T> {
        std::mem::take(&mut self.lock().items)
    }

    pub(super) fn retain(&self, keep: impl FnMut(&T) -> bool) {
        self.lock().items.retain(keep);
    }

    /// Takes the first item. Blocks until there is one, at the latest at `deadline`.
    pub(super) fn pop(&self, deadline: Instant) -> Result<T, WaitError> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                return Ok(item);
            }
            if state.is_closed {
                return Err(WaitError::Stopped);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WaitError::Deadline);
            }
            let waited = self.filled.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Awaitable form of [`pop`](Self::pop).
    pub(super) async fn pop_async(&self, deadline: Instant) -> Result<T, WaitError> {
        let wait = std::future::poll_fn(|context| self.poll_pop(context));
        // The timer adds milliseconds to the deadline, and the sum must be representable.
        let deadline = deadline.min(Instant::now() + FAR_AWAY);
        match tokio::time::timeout_at(deadline.into(), wait).await {
            Ok(result) => result,
            Err(_) => Err(WaitError::Deadline),
        }
    }

    fn poll_pop(&self, context: &mut Context<'_>) -> Poll<Result<T, WaitError>> {
        let mut state = self.lock();
        match state.items.pop_front() {
            Some(item) => Poll::Ready(Ok(item)),
            None if state.is_closed => Poll::Ready(Err(WaitError::Stopped)),
            None => {
                state.wakers.retain(|waker| !waker.will_wake(context.waker()));
                state.wakers.push(context.waker().clone());
                Poll::Pending
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Upper bound on any wait.
const FAR_AWAY: Duration = Duration::from_secs(365 * 24 * 3600);
