//! The state machine of the control plane: members, leases, and the placement built from them.
//! Sans-I/O: every call gets the time as an argument, and the fleet does no I/O.

mod follow;
mod view;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use control_api::{
    Assignment, FleetGoals, LeaseRequest, LeaseResponse, MemberId, MemberInfo, ModelDescriptor,
    PlacementTable, ReadyRequest, RegisterRequest, RegisterResponse, SuspectRequest, WantedDigests,
};

use crate::admission::{Refusal, check_assignment, check_load, check_registration};
use crate::balance::{self, BalanceSettings, Loads, PlanJob};
use crate::epoch::EpochAllocator;
use crate::member::{Lease, Member, MemberRecord, Phase, Predecessor, Report};
use crate::planner::{Joiner, Planner};
use crate::store::Snapshot;
use crate::table::{self, Coverage};
use crate::tickets::TicketRecord;

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

/// A change, for the log and the metrics.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FleetEvent {
    Registered {
        name: String,
        kind: RegistrationKind,
    },
    /// Two live processes use one name.
    NameContested {
        name: String,
    },
    /// The fleet was planned, and members have to load experts.
    Planned {
        num_loads: usize,
        before: f64,
        after: f64,
    },
    GoalsChanged {
        goals: FleetGoals,
    },
    /// The members have too little memory for a plan.
    Short {
        shortage: String,
    },
    /// The first member of another model has joined after every member of the old model had gone.
    ModelReplaced {
        fingerprint: String,
    },
    /// The control plane cannot connect to a serving member.
    Unreachable {
        name: String,
        data_addr: String,
        reason: String,
    },
    Serving {
        name: String,
    },
    Draining {
        name: String,
    },
    /// A drain was taken back.
    Resumed {
        name: String,
    },
    Left {
        name: String,
    },
    Suspected {
        name: String,
        reporter: String,
        reason: String,
    },
    Expired {
        name: String,
        cause: ExpiryCause,
    },
    /// An expired member was removed.
    Removed {
        name: String,
    },
    /// This process was paused. All leases were extended by the length of the pause.
    LeasesExtended {
        pause: Duration,
    },
    PlacementChanged {
        epoch: u64,
        num_servers: usize,
    },
    /// A change of the placement waits until the store has reserved more epochs.
    PlacementBlocked,
}

/// Kind of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationKind {
    New,
    /// A known process has registered again.
    Returned,
    /// A restarted process has taken over the name of an earlier one.
    Takeover,
}

/// Reason why a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpiryCause {
    /// The member did not renew in time.
    Lease,
    /// A suspected member did not renew by its deadline.
    Suspect,
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
            let mut member = Member::new(record, lease, true);
            if member.record.keeps_serving {
                member.drains_by = settings.balance.map(|balance| now + balance.drain_grace);
            }
            members.insert(member.record.name.clone(), member);
        }
        let drains = members.values().any(Member::keeps_serving);
        // By then every live member has renewed its lease, with a report of its load.
        let plans_from = if members.is_empty() { now } else { now + settings.lease_ttl };
        if let (Some(balance), Some(goals)) = (&mut settings.balance, snapshot.goals) {
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
            changed_goals: snapshot.goals,
            tickets: snapshot.tickets,
            shortage: None,
            events: Vec::new(),
        }
    }

    /// As [`register_for`](Self::register_for), without an owner.
    #[cfg(test)]
    pub(crate) fn register(
        &mut self,
        request: RegisterRequest,
        now: Duration,
    ) -> Result<RegisterResponse, Refusal> {
        self.register_for(request, None, now)
    }

    /// Registers a member. The identity of a new one ends with the tag `owner`.
    pub(crate) fn register_for(
        &mut self,
        request: RegisterRequest,
        owner: Option<&str>,
        now: Duration,
    ) -> Result<RegisterResponse, Refusal> {
        // The model belongs to its members, the expired ones included: an outage of all must not let another model in.
        // A model that never served as a whole gives way as soon as no member lives.
        let is_free = match self.was_complete {
            true => self.members.is_empty(),
            false => !self.members.values().any(Member::is_leased),
        };
        let is_replaced =
            is_free && self.model.as_ref().is_some_and(|model| *model != request.model);
        let model = self.model.as_ref().filter(|_| !is_replaced);
        check_registration(&request, model, self.settings.pinned_fingerprint.as_deref())?;
        let known = self.members.get(&request.name);
        let bound_to = known.and_then(|member| member.record.member_id.tag());
        if owner.is_some() && bound_to.is_some() && owner != bound_to {
            return Err(Refusal::NameBound { name: request.name });
        }
        let was_superseded = known.is_some_and(|member| {
            member.record.superseded.iter().any(|old| old.incarnation == request.incarnation)
        });
        if was_superseded {
            self.note_contest(&request.name, now);
            return Err(Refusal::Superseded { name: request.name });
        }
        if let Some(member) = known
            && member.record.incarnation != request.incarnation
            && member.keeps_name(now)
        {
            let data_addr = member.record.data_addr.clone();
            return Err(Refusal::NameInUse { name: request.name, data_addr });
        }
        if is_replaced {
            self.forget_model(&request.model.fingerprint);
        }
        let kind = match self.members.get(&request.name) {
            None => RegistrationKind::New,
            Some(member) if member.record.incarnation == request.incarnation => {
                RegistrationKind::Returned
            }
            Some(_) => RegistrationKind::Takeover,
        };
        if kind == RegistrationKind::New {
            self.make_room()?;
        }
        if kind == RegistrationKind::Returned {
            self.refresh_member(&request, now);
        } else {
            self.admit(&request, owner, now)?;
        }
        if self.model.is_none() {
            self.model = Some(request.model);
            self.is_table_stale = true;
        }
        self.first_join.get_or_insert(now);
        self.note_unplanned(now);
        self.revision += 1;
        self.events.push(FleetEvent::Registered { name: request.name.clone(), kind });
        let member = &self.members[&request.name];
        Ok(RegisterResponse {
            member_id: member.record.member_id.clone(),
            lease_ttl_ms: self.settings.lease_ttl.as_millis() as u64,
            epoch: self.table.epoch,
            assignment: Assignment::clone(&member.record.assignment),
            assignment_version: member.record.assignment_version,
            ticket_keys: None,
        })
    }

    /// Returns true if a member has this identity.
    pub(crate) fn has_id(&self, member: &MemberId) -> bool {
        self.names.contains_key(member)
    }

    pub(crate) fn renew(
        &mut self,
        member: &MemberId,
        request: LeaseRequest,
        now: Duration,
    ) -> Result<LeaseResponse, Refusal> {
        let lease_ttl = self.settings.lease_ttl;
        let epoch = self.table.epoch;
        if let Some(load) = &request.load {
            check_load(load, self.model.as_ref())?;
        }
        self.calling(member, request.incarnation, now)?;
        if let (Some(model), Some(load)) = (&self.model, &request.load) {
            self.loads.add(model, load);
        }
        let mut is_replan = false;
        let member = self.calling(member, request.incarnation, now)?;
        member.lease = Lease::Until(now + lease_ttl);
        member.renew_by = None;
        member.renewed_at = now;
        if let Some(load) = request.load {
            member.work.add(&load);
            if member.unreadable != load.unreadable {
                member.unreadable = load.unreadable.clone();
                is_replan = true;
            }
            member.load = Some(load);
        }
        let version = member.record.assignment_version;
        let is_news = request.assignment_version != version;
        let response = LeaseResponse {
            lease_ttl_ms: lease_ttl.as_millis() as u64,
            epoch,
            state: member.state(),
            assignment_version: version,
            assignment: is_news.then(|| Assignment::clone(&member.record.assignment)),
            wanted_digests: WantedDigests::None,
            keeps_serving: member.keeps_serving(),
            ticket_keys: None,
        };
        if is_replan {
            self.note_unplanned(now);
        }
        Ok(response)
    }

    pub(crate) fn ready(
        &mut self,
        member: &MemberId,
        request: ReadyRequest,
        now: Duration,
    ) -> Result<MemberInfo, Refusal> {
        if let Some(model) = &self.model {
            check_assignment(&request.holds, model)?;
        }
        let member = self.calling(member, request.incarnation, now)?;
        member.set_holds(request.holds);
        let was = member.record.phase;
        // A late `ready` does not return a draining member to the placement.
        if was == Phase::Loading {
            member.record.phase = Phase::Serving;
        }
        let (info, name) = (member.info(now), member.record.name.clone());
        if was == Phase::Loading {
            self.events.push(FleetEvent::Serving { name });
        }
        self.mark_changed();
        Ok(info)
    }

    pub(crate) fn drain(
        &mut self,
        member: &MemberId,
        incarnation: Option<u64>,
        now: Duration,
    ) -> Result<MemberInfo, Refusal> {
        let drains_by = self.settings.balance.map(|balance| now + balance.drain_grace);
        let member = self.leased(member, incarnation, now)?;
        let was = member.record.phase;
        if was != Phase::Draining {
            member.start_drain(drains_by);
        }
        let (info, name) = (member.info(now), member.record.name.clone());
        if was != Phase::Draining {
            self.events.push(FleetEvent::Draining { name });
            self.note_unplanned(now);
            self.mark_changed();
        }
        Ok(info)
    }

    /// Returns a draining member to the placement. Changes nothing about any other member.
    pub(crate) fn resume(
        &mut self,
        member: &MemberId,
        now: Duration,
    ) -> Result<MemberInfo, Refusal> {
        let member = self.leased(member, None, now)?;
        let was_draining = member.record.phase == Phase::Draining;
        if was_draining {
            member.end_drain();
        }
        let (info, name) = (member.info(now), member.record.name.clone());
        if was_draining {
            self.events.push(FleetEvent::Resumed { name });
            self.note_unplanned(now);
            self.mark_changed();
        }
        Ok(info)
    }

    pub(crate) fn leave(&mut self, member: &MemberId) -> Result<(), Refusal> {
        let name = self.name_of(member)?.to_owned();
        self.remove(&name);
        self.events.push(FleetEvent::Left { name });
        Ok(())
    }

    /// Notes that a client cannot reach a member, and returns the time that the member has left to renew. Once a
    /// second observer agrees (another client, or this process), the member must renew within a heartbeat interval.
    /// A live member does, and stays. One observer alone changes nothing: its own network may be at fault.
    pub(crate) fn suspect(
        &mut self,
        member: &MemberId,
        request: SuspectRequest,
        now: Duration,
    ) -> Result<Duration, Refusal> {
        let name = self.name_of(member)?.to_owned();
        let Some(member) = self.members.get_mut(&name) else { return Ok(Duration::ZERO) };
        let is_other = request.incarnation.is_some_and(|found| found != member.record.incarnation);
        if is_other || !member.is_leased() {
            return Ok(Duration::ZERO);
        }
        // Further reports do not fill the log.
        let is_first = member.num_observers() == 0;
        let (reporter, reason) = (request.reporter, request.reason);
        member.note_report(Report { reporter: reporter.clone(), reason: reason.clone(), at: now });
        if is_first {
            // This process looks for itself.
            member.probe = None;
            self.events.push(FleetEvent::Suspected { name: name.clone(), reporter, reason });
        }
        self.confirm_suspicion(&name, now);
        let deadline = self.members.get(&name).and_then(Member::deadline);
        Ok(deadline.unwrap_or(now).saturating_sub(now))
    }

    /// Brings forward the deadline of a member that two observers cannot reach.
    fn confirm_suspicion(&mut self, name: &str, now: Duration) {
        let wait = self.settings.lease_ttl / 3 + self.settings.suspect_grace;
        if let Some(member) = self.members.get_mut(name)
            && member.is_leased()
            && member.num_observers() >= 2
        {
            // Further reports do not move the deadline.
            member.renew_by.get_or_insert(now + wait);
        }
    }

    /// Expires members whose lease has ended, and removes members that expired long ago. The caller calls
    /// it about every `period`. A much longer gap means that this process was paused: no member could
    /// renew, so all leases are extended by the gap.
    pub(crate) fn tick(&mut self, now: Duration, period: Duration) {
        let gap = now.saturating_sub(self.last_tick);
        self.last_tick = now;
        if gap > period * 4 {
            self.extend_leases(gap - period);
        }
        let mut expired = Vec::new();
        let mut removed = Vec::new();
        for member in self.members.values_mut() {
            match (member.lease, member.deadline()) {
                (Lease::Until(until), Some(deadline)) if deadline <= now => {
                    let cause =
                        if until <= now { ExpiryCause::Lease } else { ExpiryCause::Suspect };
                    member.lease = Lease::ExpiredAt(now);
                    member.renew_by = None;
                    member.load = None;
                    expired.push((member.record.name.clone(), cause));
                }
                (Lease::ExpiredAt(at), _) if now >= at + self.settings.expired_retention => {
                    removed.push(member.record.name.clone());
                }
                _ => {}
            }
        }
        for (name, cause) in expired {
            self.events.push(FleetEvent::Expired { name, cause });
            self.note_unplanned(now);
            self.mark_changed();
        }
        for name in removed {
            self.remove(&name);
            self.events.push(FleetEvent::Removed { name });
        }
        self.decay(now);
        self.balance(now);
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
        self.coverage = Coverage::of(&next, self.replicas());
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

    /// Returns true if the store should be written.
    pub(crate) fn needs_save(&self) -> bool {
        self.revision > self.saved_revision || self.epochs.needs_save()
    }

    /// The snapshot to write, and the revision to pass to [`mark_saved`](Self::mark_saved) once it is
    /// durable.
    pub(crate) fn snapshot(&self) -> (Snapshot, u64) {
        let record = |member: &Member| MemberRecord {
            expired: !member.is_leased(),
            keeps_serving: member.keeps_serving(),
            ..member.record.clone()
        };
        let snapshot = Snapshot {
            cluster_id: self.cluster_id.clone(),
            reserved_epoch: self.epochs.reservation(),
            model: self.model.clone(),
            members: self.members.values().map(record).collect(),
            goals: self.changed_goals,
            tickets: self.tickets.clone(),
        };
        (snapshot, self.revision)
    }

    /// Identity of the cluster.
    pub(crate) fn cluster_id(&self) -> &str {
        &self.cluster_id
    }

    /// The durable part of tickets.
    pub(crate) const fn tickets(&self) -> &TicketRecord {
        &self.tickets
    }

    pub(crate) fn set_tickets(&mut self, tickets: TicketRecord) {
        self.tickets = tickets;
        self.revision += 1;
    }

    /// Records that a snapshot is durable.
    pub(crate) fn mark_saved(&mut self, snapshot: &Snapshot, revision: u64) {
        self.epochs.mark_saved(snapshot.reserved_epoch);
        self.saved_revision = self.saved_revision.max(revision);
        for record in &snapshot.members {
            if let Some(member) = self.members.get_mut(&record.name)
                && member.record.member_id == record.member_id
            {
                member.is_durable = true;
                member.is_name_durable = true;
            }
        }
    }

    /// The reservation to make durable if no snapshot can be written, or `None` while enough epochs are left.
    pub(crate) fn epoch_to_reserve(&self) -> Option<u64> {
        self.epochs.needs_save().then(|| self.epochs.reservation())
    }

    /// Records that a reservation of epochs is durable without a snapshot.
    pub(crate) fn mark_reserved(&mut self, reservation: u64) {
        self.epochs.mark_reserved(reservation);
    }

    /// Returns true if the store contains a member of this name. Such a name may register while the store cannot
    /// be written, with a new process, too: the fleet needs its servers back. If the registration is lost with
    /// this process, the member registers again.
    pub(crate) fn is_known(&self, name: &str) -> bool {
        self.members.get(name).is_some_and(|member| member.is_name_durable)
    }

    /// Returns true if the store contains the process.
    pub(crate) fn is_durable(&self, name: &str, incarnation: u64) -> bool {
        let member = self.members.get(name);
        member.is_some_and(|member| member.is_durable && member.record.incarnation == incarnation)
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// Records the outcome of an attempt to connect to a member.
    pub(crate) fn record_probe(
        &mut self,
        name: &str,
        incarnation: u64,
        outcome: Result<(), String>,
        now: Duration,
    ) {
        let Some(member) = self.members.get_mut(name) else { return };
        if member.record.incarnation != incarnation {
            return;
        }
        let was_error = matches!(member.probe, Some(Err(_)));
        if let (Err(reason), false) = (&outcome, was_error) {
            let (name, data_addr) = (name.to_owned(), member.record.data_addr.clone());
            self.events.push(FleetEvent::Unreachable { name, data_addr, reason: reason.clone() });
        }
        member.probe = Some(outcome);
        self.confirm_suspicion(name, now);
    }

    pub(crate) fn take_events(&mut self) -> Vec<FleetEvent> {
        std::mem::take(&mut self.events)
    }

    /// Registers a known process again: same identity, same assignment, fresh lease.
    fn refresh_member(&mut self, request: &RegisterRequest, now: Duration) {
        let lease_ttl = self.settings.lease_ttl;
        let Some(member) = self.members.get_mut(&request.name) else { return };
        if !member.is_leased() {
            member.record.phase = Phase::Loading;
        }
        member.lease = Lease::Until(now + lease_ttl);
        member.renew_by = None;
        member.renewed_at = now;
        if member.record.data_addr != request.data_addr {
            member.probe = None;
        }
        member.record.data_addr.clone_from(&request.data_addr);
        member.record.capacity_experts = request.capacity_experts;
        member.record.zone.clone_from(&request.zone);
        member.record.needs_tickets = request.needs_tickets;
        member.record.metrics_addr.clone_from(&request.metrics_addr);
        member.record.weights_addr.clone_from(&request.weights_addr);
        self.is_table_stale = true;
    }

    /// Registers a new process, which may replace an earlier one of the same name.
    fn admit(
        &mut self,
        request: &RegisterRequest,
        owner: Option<&str>,
        now: Duration,
    ) -> Result<(), Refusal> {
        let assignment = match request.holds.is_empty() {
            true => self.first_assignment(request)?,
            false => request.holds.clone(),
        };
        let old = self.members.get(&request.name);
        let mut superseded = Vec::new();
        let is_name_durable = old.is_some_and(|member| member.is_name_durable);
        if let Some(old) = old {
            superseded.clone_from(&old.record.superseded);
            superseded.push(Predecessor {
                member_id: old.record.member_id.clone(),
                incarnation: old.record.incarnation,
            });
            let surplus = superseded.len().saturating_sub(MAX_SUPERSEDED);
            superseded.drain(..surplus);
            self.names.remove(&old.record.member_id);
        }
        let record = MemberRecord {
            member_id: owner
                .and_then(|tag| MemberId::random_with_tag(tag).ok())
                .unwrap_or_else(MemberId::random),
            name: request.name.clone(),
            incarnation: request.incarnation,
            data_addr: request.data_addr.clone(),
            metrics_addr: request.metrics_addr.clone(),
            weights_addr: request.weights_addr.clone(),
            phase: Phase::Loading,
            keeps_serving: false,
            expired: false,
            assignment: Arc::new(assignment),
            assignment_version: 1,
            holds: Arc::default(),
            superseded,
            capacity_experts: request.capacity_experts,
            zone: request.zone.clone(),
            needs_tickets: request.needs_tickets,
        };
        self.names.insert(record.member_id.clone(), record.name.clone());
        let lease = Lease::Until(now + self.settings.lease_ttl);
        let member = Member { is_name_durable, ..Member::new(record, lease, false) };
        self.members.insert(request.name.clone(), member);
        self.is_table_stale = true;
        Ok(())
    }

    /// Experts of a process that has loaded none.
    fn first_assignment(&self, request: &RegisterRequest) -> Result<Assignment, Refusal> {
        let old = self.members.get(&request.name);
        let others: Vec<&Assignment> = self
            .members
            .values()
            .filter(|member| member.record.name != request.name && member.is_planned())
            .map(|member| &*member.record.assignment)
            .collect();
        let Some(settings) = self.settings.balance else {
            let joiner = Joiner {
                capacity_experts: request.capacity_experts,
                previous: old.map(|member| &*member.record.assignment),
            };
            return Ok(self.planner.assign(&request.model, &joiner, &others)?);
        };
        // Its share of the fleet. The next plan then moves what the load asks for.
        let num_servers = (others.len() + 1).max(settings.expected_servers as usize);
        let model = &request.model;
        let replicas = settings.goals.min_replicas as usize;
        let num_pairs = model.num_experts as usize * model.moe_layers.len() * replicas;
        let share = num_pairs.div_ceil(num_servers).min(u32::MAX as usize) as u32;
        let room = request.capacity_experts.map_or(share, |most| most.min(share));
        Ok(balance::fill(model, room, &others))
    }

    /// Makes room for one more member. At the limit, evicts the member that expired first.
    fn make_room(&mut self) -> Result<(), Refusal> {
        let limit = self.settings.max_members;
        if self.members.len() < limit {
            return Ok(());
        }
        let expired = self.members.values().filter_map(|member| match member.lease {
            Lease::ExpiredAt(at) => Some((at, member.record.name.clone())),
            Lease::Until(_) => None,
        });
        let Some((_, name)) = expired.min() else {
            return Err(Refusal::TooManyMembers { limit });
        };
        self.remove(&name);
        self.events.push(FleetEvent::Removed { name });
        Ok(())
    }

    fn extend_leases(&mut self, pause: Duration) {
        for member in self.members.values_mut() {
            if let Lease::Until(until) = &mut member.lease {
                *until += pause;
            }
            if let Some(by) = &mut member.renew_by {
                *by += pause;
            }
        }
        self.events.push(FleetEvent::LeasesExtended { pause });
    }

    fn remove(&mut self, name: &str) {
        self.note_unplanned(self.last_tick);
        if let Some(member) = self.members.remove(name) {
            self.names.remove(&member.record.member_id);
        }
        self.mark_changed();
    }

    /// Marks the table and the stored snapshot as out of date.
    fn mark_changed(&mut self) {
        self.is_table_stale = true;
        self.revision += 1;
    }

    fn name_of(&self, member: &MemberId) -> Result<&str, Refusal> {
        if let Some(name) = self.names.get(member) {
            return Ok(name);
        }
        let is_old =
            |other: &&Member| other.record.superseded.iter().any(|old| old.member_id == *member);
        match self.members.values().find(is_old) {
            Some(other) => Err(Refusal::Superseded { name: other.record.name.clone() }),
            None => Err(Refusal::UnknownMember { member: member.to_string() }),
        }
    }

    /// The leased member whose own process calls. A call of a replaced process shows that two live processes
    /// use the name.
    fn calling(
        &mut self,
        id: &MemberId,
        incarnation: u64,
        now: Duration,
    ) -> Result<&mut Member, Refusal> {
        if let Err(Refusal::Superseded { name }) = self.leased(id, Some(incarnation), now) {
            self.note_contest(&name, now);
        }
        self.leased(id, Some(incarnation), now)
    }

    fn note_contest(&mut self, name: &str, now: Duration) {
        let until = now + self.settings.lease_ttl * CONTEST_LEASES;
        let Some(member) = self.members.get_mut(name) else { return };
        let is_news = !member.keeps_name(now);
        member.contested_until = Some(until);
        if is_news {
            self.events.push(FleetEvent::NameContested { name: name.to_owned() });
        }
    }

    /// Removes the model and its members, which have all expired.
    fn forget_model(&mut self, next_fingerprint: &str) {
        self.members.clear();
        self.names.clear();
        self.model = None;
        self.loads.clear();
        (self.first_join, self.was_complete) = (None, false);
        self.mark_changed();
        let fingerprint = next_fingerprint.to_owned();
        self.events.push(FleetEvent::ModelReplaced { fingerprint });
    }

    fn leased(
        &mut self,
        id: &MemberId,
        incarnation: Option<u64>,
        now: Duration,
    ) -> Result<&mut Member, Refusal> {
        let name = self.name_of(id)?.to_owned();
        let unknown = || Refusal::UnknownMember { member: id.to_string() };
        let member = self.members.get_mut(&name).ok_or_else(unknown)?;
        if incarnation.is_some_and(|found| found != member.record.incarnation) {
            return Err(Refusal::Superseded { name });
        }
        if let Lease::ExpiredAt(at) = member.lease {
            let ago_ms = now.saturating_sub(at).as_millis() as u64;
            return Err(Refusal::LeaseExpired { name, ago_ms });
        }
        Ok(member)
    }
}

/// For so many leases after a replaced process was heard, no other process takes the name over.
const CONTEST_LEASES: u32 = 20;
/// Predecessors kept per name, so that a replaced process cannot register again.
const MAX_SUPERSEDED: usize = 8;

#[cfg(test)]
mod tests;
