//! The one writer of the store, and waits for what it has written.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tracing::{debug, error, info};

use super::{Coordinator, OperationError, lock};
use crate::fleet::Fleet;
use crate::store::{Revision, Store, StoreError};

/// Progress of writing the store.
#[derive(Clone, Debug, Default)]
pub(super) struct WriteState {
    /// Fleet revision of the last successful write.
    pub(super) durable: u64,
    /// Fleet revision of the last failed write.
    pub(super) failed: u64,
    /// Error of the last write; `None` after a success.
    pub(super) error: Option<String>,
    /// Reason why the next write would fail, found without a write.
    pub(super) outage: Option<String>,
    /// True once this process leads no longer.
    pub(super) is_over: bool,
}

impl Coordinator {
    /// Writes the store after every change. Returns after `shutdown` turns true and the last change was
    /// written or has failed. Returns early when another control plane has taken over the store.
    pub(crate) async fn run_writer(
        &self,
        store: Box<dyn Store>,
        mut revision: Revision,
        mut shutdown: watch::Receiver<bool>,
    ) -> Result<(), StoreError> {
        let store = Arc::new(Mutex::new(store));
        loop {
            let is_last = *shutdown.borrow_and_update();
            let mut has_failed = false;
            while lock(&self.fleet).needs_save() {
                match self.write(&store, revision).await {
                    Ok(next) => revision = next,
                    Err(err @ (StoreError::Conflict { .. } | StoreError::Deposed)) => {
                        error!(error = %err, "another control plane has taken over the store");
                        return Err(err);
                    }
                    Err(_) => {
                        has_failed = true;
                        break;
                    }
                }
            }
            if is_last {
                return Ok(());
            }
            let retry = async {
                match has_failed {
                    true => tokio::time::sleep(WRITE_RETRY).await,
                    false => self.dirty.notified().await,
                }
            };
            tokio::select! {
                () = retry => {}
                // An error means that the server was dropped.
                changed = shutdown.wait_for(|&down| down) => if changed.is_err() { return Ok(()) },
            }
        }
    }

    async fn write(
        &self,
        store: &Arc<Mutex<Box<dyn Store>>>,
        expected: Revision,
    ) -> Result<Revision, StoreError> {
        let (snapshot, fleet_revision) = lock(&self.fleet).snapshot();
        let snapshot = Arc::new(snapshot);
        let timer = self.metrics.store_write_seconds.start_timer();
        let (store, written) = (Arc::clone(store), Arc::clone(&snapshot));
        let store_for_write = Arc::clone(&store);
        let write =
            tokio::task::spawn_blocking(move || lock(&store_for_write).save(&written, expected));
        let outcome = write.await.unwrap_or_else(|err| {
            // The task panicked, or the runtime shuts down.
            let (operation, path) = ("write", std::path::PathBuf::from("snapshot"));
            Err(StoreError::Io { operation, path, source: std::io::Error::other(err) })
        });
        timer.observe_duration();
        match outcome {
            Ok(revision) => {
                // Newly reserved epochs may unblock a change of the table.
                self.with_fleet(|fleet, _| fleet.mark_saved(&snapshot, fleet_revision));
                if self.write_error().is_some() {
                    info!("the store can be written again");
                }
                self.metrics.store_writable.set(1);
                self.writes.send_modify(|state| {
                    state.durable = fleet_revision;
                    (state.error, state.outage) = (None, None);
                });
                Ok(revision)
            }
            Err(err) => {
                self.reserve_epochs_without_snapshot(&store).await;
                if self.write_error().is_none() {
                    error!(error = %err, "{READ_ONLY}");
                } else {
                    debug!(error = %err, "the store still cannot be written");
                }
                self.metrics.store_writable.set(0);
                self.metrics.store_write_errors.inc();
                self.writes.send_modify(|state| {
                    state.failed = fleet_revision;
                    state.error = Some(err.to_string());
                });
                Err(err)
            }
        }
    }

    /// Reserves epochs in a store that takes no snapshot, so that the placement can still change.
    async fn reserve_epochs_without_snapshot(&self, store: &Arc<Mutex<Box<dyn Store>>>) {
        let Some(reservation) = lock(&self.fleet).epoch_to_reserve() else { return };
        let store = Arc::clone(store);
        let reserve =
            tokio::task::spawn_blocking(move || lock(&store).reserve_epoch(reservation)).await;
        match reserve {
            Ok(Ok(())) => self.with_fleet(|fleet, _| fleet.mark_reserved(reservation)),
            Ok(Err(err)) => debug!(error = %err, "no epochs can be reserved"),
            Err(err) => debug!(error = %err, "no epochs can be reserved"),
        }
    }

    /// Error of the last write of the store; `None` while it can be written.
    pub(crate) fn write_error(&self) -> Option<String> {
        let writes = self.writes.borrow();
        writes.error.as_ref().or(writes.outage.as_ref()).cloned()
    }

    /// Notes that the store cannot be written although no write has failed, or that it can be written again.
    pub(crate) fn note_outage(&self, reason: Option<&str>) {
        let was_writable = self.write_error().is_none();
        self.writes.send_modify(|state| state.outage = reason.map(str::to_owned));
        let is_writable = self.write_error().is_none();
        match (was_writable, reason) {
            (true, Some(reason)) => error!(reason, "{READ_ONLY}"),
            (false, None) if is_writable => info!("the store can be written again"),
            _ => {}
        }
        self.metrics.store_writable.set(i64::from(is_writable));
    }

    /// Ends all waits for the store, because nothing writes it any more.
    pub(crate) fn end(&self) {
        self.writes.send_modify(|state| state.is_over = true);
    }

    /// Waits until a revision is in the store, for [`WRITE_BOUND`] at most.
    pub(super) async fn wait_durable(&self, revision: u64) -> Result<(), OperationError> {
        let mut writes = self.writes.subscribe();
        let settling = writes.wait_for(|state| {
            state.is_over
                || state.durable >= revision
                || (state.error.is_some() && state.failed >= revision)
        });
        let settled = tokio::time::timeout(WRITE_BOUND, settling).await.map_err(|_| {
            let reason = format!("no write has ended within {} s", WRITE_BOUND.as_secs());
            OperationError::ReadOnly { reason }
        })?;
        let state = settled.map_err(|_| OperationError::ShuttingDown)?.clone();
        match state.error {
            _ if state.is_over && state.durable < revision => Err(OperationError::ShuttingDown),
            Some(reason) if state.durable < revision => Err(OperationError::ReadOnly { reason }),
            _ => Ok(()),
        }
    }
}

/// Reserves epochs in a store that takes no snapshot.
pub(super) fn reserve_epochs(fleet: &mut Fleet, store: &mut dyn Store) -> Result<(), StoreError> {
    if let Some(reservation) = fleet.epoch_to_reserve() {
        store.reserve_epoch(reservation)?;
        fleet.mark_reserved(reservation);
    }
    Ok(())
}

pub(super) const READ_ONLY: &str =
    "the store cannot be written: known members keep serving, members of new names are refused";
/// Longest wait for a write. Longer than any write to etcd, and than the time for a request: a task that goes on without
/// its caller ends by then, however long a disk takes.
const WRITE_BOUND: Duration = Duration::from_secs(10);
const WRITE_RETRY: Duration = Duration::from_secs(1);
