//! The state machine of the control plane: members, leases, and the placement built from them.
//! Sans-I/O: every call gets the time as an argument, and the fleet does no I/O.

mod durable;
mod edition;
mod event;
mod follow;
mod lease;
mod probe;
mod register;
mod view;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use control_api::{FleetGoals, MemberId, ModelDescriptor, PlacementTable};

pub(crate) use edition::Holder;

use crate::balance::{BalanceSettings, Loads, PlanJob};
use crate::epoch::EpochAllocator;
use crate::member::{Lease, Member};
use crate::planner::Planner;
use crate::store::Snapshot;
use crate::table::{self, Coverage};
use crate::tickets::TicketRecord;

pub(crate) use event::{ExpiryCause, FleetEvent, RegistrationKind};
pub(crate) use probe::ProbeError;

/// Settings of a [`Fleet`].
#[derive(Clone, Debug)]
pub(crate) struct FleetSettings {
    pub(crate) lease_ttl: Duration,
    /// A suspected member must renew within one heartbeat interval plus this time.
    pub(crate) suspect_grace: Duration,
    /// Time for which an expired member is kept.
    pub(crate) expired_retention: Duration,
    pub(crate) max_members: usize,
    /// Fingerprint of the only accepted model. `None` accepts the model of the first member.
    pub(crate) pinned_fingerprint: Option<String>,
    /// Follows the load, if set.
    pub(crate) balance: Option<BalanceSettings>,
    /// Compute share of a server that the scaling advice aims at.
    pub(crate) target_share: f64,
}

/// The fleet.
#[derive(Debug)]
pub(crate) struct Fleet {
    settings: FleetSettings,
    planner: Box<dyn Planner>,
    cluster_id: String,
    model: Option<ModelDescriptor>,
    /// Ordered by name, which keeps the order of servers in the table stable.
    members: BTreeMap<String, Member>,
    names: HashMap<MemberId, String>,
    epochs: EpochAllocator,
    table: Arc<PlacementTable>,
    coverage: Coverage,
    /// True if members changed after the table was built.
    is_table_stale: bool,
    /// True while a change of the table waits for more epochs.
    is_blocked: bool,
    /// Number of changes that belong into the store. `saved_revision` is the last one stored.
    revision: u64,
    saved_revision: u64,
    last_tick: Duration,
    loads: Loads,
    decayed_at: Duration,
    /// Time of the last change of the members that is not planned yet.
    unplanned_since: Option<Duration>,
    /// Number of such changes.
    plan_basis: u64,
    /// The plan to compute.
    due_plan: Option<PlanJob>,
    /// True from the time when a plan is due until it is computed.
    is_planning: bool,
    /// Plans in a row that came too late.
    num_discarded: u32,
    /// No plan before this time: after a restart, loads and speeds are not known yet.
    plans_from: Duration,
    last_plan: Duration,
    /// Time when the first member of an empty fleet joined.
    first_join: Option<Duration>,
    /// True once every expert has had its replicas.
    was_complete: bool,
    /// False if no client follows the placement, as far as the control plane knows.
    has_clients: bool,
    /// True once this process has connected to any member: an unreachable one is then at fault itself.
    has_reached_any: bool,
    /// Goals that were changed while the control plane ran.
    changed_goals: Option<FleetGoals>,
    tickets: TicketRecord,
    /// Reason why the last plan failed.
    shortage: Option<String>,
    events: Vec<FleetEvent>,
}

impl Fleet {
    /// A fleet restored from a snapshot, or a new one. Leased members get one fresh time to live. The
    /// fleet issues no epoch before two snapshots were [marked as saved](Self::mark_saved).
    pub(crate) fn new(
        settings: FleetSettings,
        planner: Box<dyn Planner>,
        snapshot: Option<Snapshot>,
        now: Duration,
    ) -> Self {
        let mut settings = settings;
        let snapshot = snapshot.unwrap_or_else(|| Snapshot::fresh(MemberId::random().to_string()));
        let mut members = BTreeMap::new();
        let mut names = HashMap::new();
        // The snapshot does not say so. A model with loaded experts is taken for one that has served.
        let was_complete = snapshot.members.iter().any(|record| !record.holds.is_empty());
        for record in snapshot.members {
            let lease = match record.expired {
                true => Lease::ExpiredAt(now),
                false => Lease::Until(now + settings.lease_ttl),
            };
            names.insert(record.member_id.clone(), record.name.clone());
            let mut member = Member { probed_at: now, ..Member::new(record, lease, true) };
            if member.record.keeps_serving {
                member.drains_by = settings.balance.map(|balance| now + balance.drain_grace);
            }
            members.insert(member.record.name.clone(), member);
        }
        let drains = members.values().any(Member::keeps_serving);
        // By then every live member has renewed its lease, with a report of its load.
        let plans_from = if members.is_empty() { now } else { now + settings.lease_ttl };
        let mut events = Vec::new();
        if let (Some(balance), Some(goals)) = (&mut settings.balance, snapshot.goals) {
            let asked =
                FleetGoals { replicas: balance.goals.min_replicas, spare: balance.goals.spare };
            if asked != goals {
                events.push(FleetEvent::GoalsKept { asked, goals });
            }
            balance.goals.min_replicas = goals.replicas;
            balance.goals.spare = goals.spare;
        }
        let table =
            PlacementTable { cluster_id: snapshot.cluster_id.clone(), ..Default::default() };
        Self {
            settings,
            planner,
            cluster_id: snapshot.cluster_id,
            model: snapshot.model,
            members,
            names,
            epochs: EpochAllocator::resume(snapshot.reserved_epoch),
            table: Arc::new(table),
            coverage: Coverage::default(),
            is_table_stale: true,
            is_blocked: false,
            revision: 1,
            saved_revision: 0,
            last_tick: now,
            loads: Loads::default(),
            decayed_at: now,
            unplanned_since: drains.then_some(now),
            plan_basis: 0,
            due_plan: None,
            is_planning: false,
            num_discarded: 0,
            plans_from,
            last_plan: now,
            first_join: None,
            was_complete,
            has_clients: true,
            has_reached_any: false,
            changed_goals: snapshot.goals,
            tickets: snapshot.tickets,
            shortage: None,
            events,
        }
    }

    /// Returns true if [`refresh`](Self::refresh) has something to do.
    pub(crate) fn needs_refresh(&self) -> bool {
        self.is_table_stale
    }

    /// Rebuilds the table if members changed. Returns the new table, under a new epoch, if it differs from
    /// the old one. While no reserved epoch is left the old table stays in force.
    pub(crate) fn refresh(&mut self) -> Option<Arc<PlacementTable>> {
        if !self.is_table_stale {
            return None;
        }
        self.follow_targets();
        let model = self.model.as_ref();
        let mut next = table::build(&self.cluster_id, 0, model, self.members.values());
        self.coverage = self.coverage_of(&next, self.replicas());
        self.was_complete |= self.coverage.is_complete();
        if self.table.epoch > 0 && !table::differs(&next, &self.table) {
            self.is_table_stale = false;
            self.is_blocked = false;
            return None;
        }
        let Some(epoch) = self.epochs.issue() else {
            if !std::mem::replace(&mut self.is_blocked, true) {
                self.events.push(FleetEvent::PlacementBlocked);
            }
            return None;
        };
        next.epoch = epoch;
        self.is_table_stale = false;
        self.is_blocked = false;
        let num_servers = next.servers.len();
        self.table = Arc::new(next);
        self.events.push(FleetEvent::PlacementChanged { epoch, num_servers });
        Some(Arc::clone(&self.table))
    }

    pub(crate) fn take_events(&mut self) -> Vec<FleetEvent> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.note_unplanned(self.last_tick);
        if let Some(member) = self.members.remove(name) {
            self.names.remove(&member.record.member_id);
        }
        self.mark_changed();
    }

    /// Marks the table and the stored snapshot as out of date.
    pub(super) fn mark_changed(&mut self) {
        self.is_table_stale = true;
        self.revision += 1;
    }
}

#[cfg(test)]
mod tests;
