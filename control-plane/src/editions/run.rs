//! The tasks of a term: those of each edition, and the steps of an update that need no operator.

use std::sync::Arc;
use std::time::Duration;

use control_api::{EditionState, Severity};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::book::Entry;
use super::{Edition, Editions, lock};
use crate::coordinator::{Coordinator, OperationError};
use crate::store::{Revision, Store, StoreError};

/// One term of leadership: the editions from the state in the store to the last write.
#[derive(Debug)]
pub(crate) struct Term {
    pub(crate) editions: Arc<Editions>,
    pub(super) workers: Vec<Worker>,
    pub(super) added: mpsc::UnboundedReceiver<Worker>,
}

/// State of the tasks of one edition.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) coordinator: Arc<Coordinator>,
    pub(super) store: Box<dyn Store>,
    pub(super) revision: Revision,
    /// Turns true once the edition is forgotten.
    pub(super) is_over: watch::Receiver<bool>,
}

impl Term {
    pub(super) fn new(
        editions: Arc<Editions>,
        workers: Vec<Worker>,
        added: mpsc::UnboundedReceiver<Worker>,
    ) -> Self {
        Self { editions, workers, added }
    }

    /// Expires members, goes on with an update, and writes the store. Once `stopping` turns true no member expires any
    /// more. Returns after `writer_stopping` has turned true and the last change was written or has failed. A step of an
    /// update that `stopping` cuts off is in the store as a whole or not at all, and the next term goes on from there.
    ///
    /// # Errors
    /// [`StoreError`] when another control plane has taken over the store.
    ///
    /// # Panics
    /// When one of its tasks has panicked.
    pub(crate) async fn run(
        self,
        stopping: watch::Receiver<bool>,
        writer_stopping: watch::Receiver<bool>,
    ) -> Result<(), StoreError> {
        let Self { editions, workers, mut added } = self;
        // Dropping the set ends its tasks.
        let mut running = JoinSet::new();
        for worker in workers {
            running.spawn(worker.run(stopping.clone(), writer_stopping.clone()));
        }
        let update = editions.run_update(stopping.clone());
        tokio::pin!(update);
        let outcome = loop {
            tokio::select! {
                () = &mut update => {}
                Some(worker) = added.recv() => {
                    running.spawn(worker.run(stopping.clone(), writer_stopping.clone()));
                }
                Some(ended) = running.join_next() => match ended {
                    Ok(Err(err)) => break Err(err),
                    Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
                    _ if running.is_empty() => break Ok(()),
                    _ => {}
                },
            }
        };
        editions.end();
        outcome
    }
}

impl Worker {
    async fn run(
        self,
        mut stopping: watch::Receiver<bool>,
        writer_stopping: watch::Receiver<bool>,
    ) -> Result<(), StoreError> {
        let Self { coordinator, store, revision, mut is_over } = self;
        let mut tasks = JoinSet::new();
        tasks.spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_clock().await }
        });
        tasks.spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_probes().await }
        });
        let writing = coordinator.run_writer(store, revision, writer_stopping);
        tokio::pin!(writing);
        let mut is_stopping = false;
        loop {
            tokio::select! {
                outcome = &mut writing => return outcome,
                () = httpd::stopped(&mut stopping), if !is_stopping => {
                    is_stopping = true;
                    tasks.abort_all();
                }
                _ = is_over.wait_for(|&is_over| is_over) => return Ok(()),
                Some(Err(err)) = tasks.join_next() => if err.is_panic() {
                    // Without its clock a leader would never expire a member. Another one takes over.
                    std::panic::resume_unwind(err.into_panic());
                },
            }
        }
    }
}

impl Editions {
    /// Goes on with an update until `stopping` turns true, and then waits for ever.
    pub(super) async fn run_update(&self, mut stopping: watch::Receiver<bool>) {
        let period = (self.settings.lease_ttl / 30).clamp(MIN_PERIOD, MAX_PERIOD);
        let steps = async {
            let mut last_error = None;
            loop {
                tokio::time::sleep(period).await;
                match self.step().await {
                    Ok(()) => last_error = None,
                    Err(err) => {
                        let text = err.to_string();
                        if last_error.as_ref() != Some(&text) {
                            warn!(error = text, "the update of the model waits");
                        }
                        last_error = Some(text);
                        tokio::time::sleep(RETRY).await;
                    }
                }
            }
        };
        tokio::select! {
            () = steps => {}
            () = httpd::stopped(&mut stopping) => {}
        }
        std::future::pending::<()>().await;
    }

    /// Takes the steps of an update that are due.
    pub(super) async fn step(&self) -> Result<(), OperationError> {
        if !self.is_update() {
            self.look_at_clients(self.now());
            return Ok(());
        }
        let _one = self.changing.lock().await;
        let now = self.now();
        self.look_at_clients(now);
        self.show_metrics();
        for edition in self.all() {
            self.step_of(&edition, now).await?;
        }
        Ok(())
    }

    async fn step_of(&self, edition: &Edition, now: Duration) -> Result<(), OperationError> {
        let Entry { record, client_seen_at, retire_by, .. } = &edition.entry;
        let fingerprint = edition.fingerprint().unwrap_or_default();
        match record.state {
            EditionState::Current => {}
            EditionState::Next => {
                if let Some(planned) = record.planned_switch
                    && edition.coordinator.coverage(planned.replicas).is_complete()
                {
                    self.switch_now(&self.book(), planned).await?;
                }
            }
            EditionState::Retiring => {
                let is_late = retire_by.is_some_and(|by| now >= by);
                if !is_late && now < *client_seen_at + self.client_grace() {
                    return Ok(());
                }
                self.change(self.book().with_drain(EditionState::Retiring)).await?;
                let (severity, why) = match is_late {
                    true => (Severity::Warn, "the time for its clients has passed"),
                    false => (Severity::Info, "no client follows it"),
                };
                info!(fingerprint, why, "the servers of the old model are drained");
                self.events.note(
                    severity,
                    format!("the servers of the model {fingerprint} are drained: {why}"),
                );
            }
            EditionState::Draining => {
                if edition.coordinator.drain_all() == 0 {
                    self.change(self.book().without(edition.entry.id)).await?;
                    info!(fingerprint, "the update of the model is over");
                    self.events.note(
                        Severity::Info,
                        format!("the last server of the model {fingerprint} has left"),
                    );
                }
            }
        }
        Ok(())
    }

    /// Notes which editions have clients.
    fn look_at_clients(&self, now: Duration) {
        let counts: Vec<u64> = self.all().iter().map(|edition| self.num_clients(edition)).collect();
        for (edition, num_clients) in lock(&self.editions).iter_mut().zip(counts) {
            let num_opened = edition.board.num_opened();
            if num_clients > 0 || num_opened != edition.num_opened {
                edition.entry.client_seen_at = now;
            }
            edition.num_opened = num_opened;
        }
    }
}

const MIN_PERIOD: Duration = Duration::from_millis(5);
const MAX_PERIOD: Duration = Duration::from_millis(100);
/// Pause after a step whose state could not be written.
const RETRY: Duration = Duration::from_secs(1);
