//! Communication with a thread: orders, and a bell.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Thread;

use p2p_core::{PostError, Region};

use crate::backoff::Bell;
use crate::failure::Shared;
use crate::port::Port;

/// Communication with a thread.
#[derive(Debug)]
pub(crate) struct Line<E> {
    pub(crate) orders: Mutex<Orders<E>>,
    pub(crate) has_orders: AtomicBool,
    /// Commands are expected: the thread polls as if it had just found one.
    is_expecting: AtomicBool,
    pub(crate) bell: Bell,
    pub(crate) thread: Mutex<Option<Thread>>,
    pub(crate) num_peers: AtomicU64,
    pub(crate) counters: Counters,
}

/// Pending orders to a thread.
#[derive(Debug)]
pub(crate) struct Orders<E> {
    pub(crate) list: Vec<Order<E>>,
    /// No thread follows orders any more: it has ended, or is about to.
    pub(crate) is_closed: bool,
}

/// Work of a thread so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct ThreadStats {
    /// Commands taken.
    pub commands: u64,
    /// Commands that are over.
    pub recycled: u64,
    /// Bytes put and got.
    pub bytes: u64,
    /// Polls all lanes.
    pub sweeps: u64,
    /// Pauses in which the processor was yielded.
    pub sleeps: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commands: AtomicU64,
    pub(crate) recycled: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) sweeps: AtomicU64,
    pub(crate) sleeps: AtomicU64,
}

#[derive(Debug)]
pub(crate) enum Order<E> {
    Add(Box<Port<E>>, Arc<Shared>),
    Register(Arc<Shared>, Region, SyncSender<Result<u16, PostError>>),
    Remove(Arc<Shared>, SyncSender<()>),
}

impl<E> Line<E> {
    pub(crate) fn new() -> Self {
        Self {
            orders: Mutex::new(Orders { list: Vec::new(), is_closed: false }),
            has_orders: AtomicBool::new(false),
            is_expecting: AtomicBool::new(false),
            bell: Bell::new(),
            thread: Mutex::new(None),
            num_peers: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    /// Sends the thread an order. `false`: it has ended, and a caller that waits for an answer sees the sender
    /// dropped.
    pub(crate) fn order(&self, order: Order<E>) -> bool {
        {
            let mut orders = lock(&self.orders);
            if orders.is_closed {
                return false;
            }
            orders.list.push(order);
            self.has_orders.store(true, Ordering::Release);
        }
        self.ring();
        true
    }

    /// Whether the thread has ended, or is about to.
    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.orders).is_closed
    }

    /// Ends the thread once it has executed earlier orders.
    pub(crate) fn close(&self) {
        {
            lock(&self.orders).is_closed = true;
            self.has_orders.store(true, Ordering::Release);
        }
        self.ring();
    }

    /// Makes the thread poll for expected commands.
    pub(crate) fn expect(&self) {
        self.is_expecting.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// Whether commands are expected. The call clears the expectation.
    pub(crate) fn was_expecting(&self) -> bool {
        // One load where nothing is expected, since idle threads call it repeatedly.
        self.is_expecting.load(Ordering::Relaxed)
            && self.is_expecting.swap(false, Ordering::Relaxed)
    }

    /// Whether a thread that is about to sleep has a reason not to.
    pub(crate) fn has_news(&self) -> bool {
        self.has_orders.load(Ordering::Acquire) || self.is_expecting.load(Ordering::Relaxed)
    }

    pub(crate) fn ring(&self) {
        // Sleeping is rare, and the lock with it.
        self.bell.ring_with(|| lock(&self.thread).clone());
    }
}

impl Counters {
    pub(crate) fn read(&self) -> ThreadStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ThreadStats {
            commands: read(&self.commands),
            recycled: read(&self.recycled),
            bytes: read(&self.bytes),
            sweeps: read(&self.sweeps),
            sleeps: read(&self.sleeps),
        }
    }
}

/// Closes a thread's line when the thread ends for any reason, so that no caller waits for it.
pub(crate) struct ClosedAtEnd<'a, E>(pub(crate) &'a Line<E>);

impl<E> Drop for ClosedAtEnd<'_, E> {
    fn drop(&mut self) {
        let left = {
            let mut orders = lock(&self.0.orders);
            orders.is_closed = true;
            std::mem::take(&mut orders.list)
        };
        // Ports among them end outside of the lock: dropping an endpoint takes its time.
        drop(left);
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds a lock can leave its content half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
