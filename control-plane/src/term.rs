//! One term of leadership: from the state in the store to the last write.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::board::Board;
use crate::clock::Clock;
use crate::coordinator::{Coordinator, TermTimes};
use crate::fleet::{Fleet, FleetSettings};
use crate::metrics::Metrics;
use crate::planner::BalancedPlanner;
use crate::store::{Revision, Store, StoreError};

/// Everything that a term needs except the store.
#[derive(Clone, Debug)]
pub(crate) struct TermSettings {
    pub(crate) fleet: FleetSettings,
    pub(crate) planner: Arc<BalancedPlanner>,
    pub(crate) lease_ttl: Duration,
    pub(crate) ticket_life: Duration,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Metrics,
    pub(crate) board: Arc<Board>,
}

/// A restored fleet and its store.
#[derive(Debug)]
pub(crate) struct Term {
    pub(crate) coordinator: Arc<Coordinator>,
    store: Box<dyn Store>,
    revision: Revision,
}

impl TermSettings {
    /// Restores the fleet from the store. Blocks on the store.
    pub(crate) fn begin(self, mut store: Box<dyn Store>) -> Result<Term, StoreError> {
        let (snapshot, revision) = store.load()?;
        let fleet = Fleet::new(self.fleet, Box::new(self.planner), snapshot, self.clock.now());
        let times = TermTimes { lease_ttl: self.lease_ttl, ticket_life: self.ticket_life };
        let (coordinator, revision) = Coordinator::start(
            fleet,
            &mut *store,
            revision,
            self.clock,
            times,
            self.metrics,
            self.board,
        )?;
        Ok(Term { coordinator: Arc::new(coordinator), store, revision })
    }
}

impl Term {
    /// Expires members and writes the store. Once `stopping` turns true no member expires any more. Returns after
    /// `writer_stopping` has turned true and the last change was written or has failed.
    ///
    /// # Errors
    /// [`StoreError`] when another control plane has taken over the store.
    pub(crate) async fn run(
        self,
        mut stopping: watch::Receiver<bool>,
        writer_stopping: watch::Receiver<bool>,
    ) -> Result<(), StoreError> {
        let Self { coordinator, store, revision } = self;
        // Dropping the set ends its tasks.
        let mut tasks = JoinSet::new();
        tasks.spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_clock().await }
        });
        tasks.spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_probes().await }
        });
        let writer = coordinator.run_writer(store, revision, writer_stopping);
        let until_stopped = async {
            httpd::stopped(&mut stopping).await;
            tasks.abort_all();
            std::future::pending::<()>().await;
        };
        let outcome = tokio::select! {
            outcome = writer => outcome,
            () = until_stopped => Ok(()),
        };
        coordinator.end();
        outcome
    }
}
