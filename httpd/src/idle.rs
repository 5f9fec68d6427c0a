//! Connections without an open request, for eviction.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

use crate::Metrics;

/// Connections on which no request is open, idle longest first.
#[derive(Debug, Default)]
pub(crate) struct IdleConnections {
    table: Mutex<IdleTable>,
}

#[derive(Debug, Default)]
pub(crate) struct IdleTable {
    next_rank: u64,
    by_rank: BTreeMap<u64, IdleConnection>,
}

#[derive(Debug)]
struct IdleConnection {
    task: AbortHandle,
    is_blocked: Arc<AtomicBool>,
}

impl IdleTable {
    pub(crate) fn insert(&mut self, state: &ConnectionState, task: AbortHandle) {
        self.next_rank += 1;
        let is_blocked = Arc::clone(&state.is_blocked);
        self.by_rank.insert(self.next_rank, IdleConnection { task, is_blocked });
        state.rank.store(self.next_rank, Ordering::Relaxed);
    }
}

impl IdleConnections {
    pub(crate) fn lock(&self) -> MutexGuard<'_, IdleTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the connection that has been idle longest. Returns false if there is none.
    pub(crate) fn evict_oldest(&self, metrics: &Metrics) -> bool {
        let mut table = self.lock();
        let idle = table.by_rank.iter().find(|(_, idle)| !idle.is_blocked.load(Ordering::Relaxed));
        let Some(rank) = idle.map(|(rank, _)| *rank) else { return false };
        let idle = table.by_rank.remove(&rank);
        drop(table);
        idle.inspect(|idle| idle.task.abort());
        metrics.culled.with_label_values(&["crowded"]).inc();
        true
    }
}

/// A connection's place among the idle ones. HTTP/1 has at most one open request at a time.
#[derive(Debug)]
pub(crate) struct ConnectionState {
    idle: Arc<IdleConnections>,
    /// Key in the table while the connection is idle. Changes under the table's lock only, as the next does.
    rank: AtomicU64,
    has_ended: AtomicBool,
    /// The peer has yet to read a part of the last response.
    pub(crate) is_blocked: Arc<AtomicBool>,
}

/// Takes its connection out of the table for good when dropped.
pub(crate) struct EndOfConnection(pub(crate) Arc<ConnectionState>);

impl Drop for EndOfConnection {
    fn drop(&mut self) {
        let mut table = self.0.idle.lock();
        self.0.has_ended.store(true, Ordering::Relaxed);
        table.by_rank.remove(&self.0.rank.load(Ordering::Relaxed));
    }
}

impl ConnectionState {
    pub(crate) fn new(idle: &Arc<IdleConnections>) -> Self {
        Self {
            idle: Arc::clone(idle),
            rank: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
            is_blocked: Arc::default(),
        }
    }

    /// Notes that a request is open. Returns the task if the connection was idle until then.
    pub(crate) fn begin(&self) -> Option<AbortHandle> {
        let mut table = self.idle.lock();
        table.by_rank.remove(&self.rank.load(Ordering::Relaxed)).map(|idle| idle.task)
    }

    /// Notes that the response of the open request is complete.
    pub(crate) fn end(&self, task: Option<AbortHandle>) {
        let Some(task) = task else { return };
        let mut table = self.idle.lock();
        if !self.has_ended.load(Ordering::Relaxed) {
            table.insert(self, task);
        }
    }
}
