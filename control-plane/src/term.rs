//! Settings of a term of leadership, which survive it.

use std::sync::Arc;
use std::time::Duration;

use crate::boards::Boards;
use crate::clock::Clock;
use crate::editions::{Editions, Term};
use crate::fleet::FleetSettings;
use crate::metrics::Metrics;
use crate::planner::BalancedPlanner;
use crate::store::{Store, StoreError};

/// Everything that a term needs except the store.
#[derive(Clone, Debug)]
pub(crate) struct TermSettings {
    pub(crate) fleet: FleetSettings,
    pub(crate) planner: Arc<BalancedPlanner>,
    pub(crate) lease_ttl: Duration,
    pub(crate) ticket_life: Duration,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) metrics: Metrics,
    pub(crate) boards: Arc<Boards>,
}

impl TermSettings {
    /// Restores the fleet from the store. Blocks on the store.
    pub(crate) fn begin(self, store: Box<dyn Store>) -> Result<Term, StoreError> {
        Editions::restore(self, store)
    }
}
