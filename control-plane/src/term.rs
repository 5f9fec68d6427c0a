//! Settings of a term of leadership, which survive it.

use std::sync::Arc;
use std::time::Duration;

use crate::boards::Boards;
use crate::clock::Clock;
use crate::fleet::FleetSettings;
use crate::metrics::Metrics;
use crate::planner::BalancedPlanner;

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
