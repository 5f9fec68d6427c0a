//! Runs the fleet: one lock, one clock, one writer of the store, many watchers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use control_api::{
    ClusterStatus, EventList, FleetGoals, LeaseRequest, LeaseResponse, MemberId, MemberInfo,
    ModelDigests, ReadyRequest, RegisterRequest, RegisterResponse, ScalingAdvice, StoreStatus,
    SuspectRequest, TensorDigest, TicketRequest, TicketResponse, WantedDigests,
};
use futures_util::StreamExt;
use tokio::sync::{Notify, watch};
use tokio::task::{JoinError, JoinSet};
use tracing::{debug, error, info, warn};

use crate::admission::Refusal;
use crate::balance::{PlanJob, PlanOutcome};
use crate::board::Board;
use crate::clock::{Clock, Stopwatch};
use crate::events::EventLog;
use crate::fleet::{ExpiryCause, Fleet, FleetEvent, RegistrationKind};
use crate::metrics::Metrics;
use crate::pace::Pace;
use crate::store::{Revision, Store, StoreError};
use crate::tickets::{IssueError, TicketOffice, TicketSettings};

/// Error of an operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OperationError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("members of new names are refused while the store cannot be written: {reason}")]
    ReadOnly { reason: String },
    #[error(transparent)]
    Ticket(#[from] IssueError),
    #[error("the control plane is shutting down")]
    ShuttingDown,
}

/// Times of a term.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TermTimes {
    pub(crate) lease_ttl: Duration,
    pub(crate) ticket_life: Duration,
}

/// The control plane without HTTP.
#[derive(Debug)]
pub(crate) struct Coordinator {
    fleet: Mutex<Fleet>,
    /// Lock order: fleet, then pace.
    pace: Mutex<Pace>,
    clock: Arc<dyn Clock>,
    started: Duration,
    lease_ttl: Duration,
    metrics: Metrics,
    board: Arc<Board>,
    events: EventLog,
    /// Digests of the model's tensors.
    model_digests: Mutex<Option<KeptDigests>>,
    writes: watch::Sender<WriteState>,
    /// Wakes the writer of the store.
    dirty: Notify,
    /// Wakes the probes.
    suspected: Notify,
    store_kind: &'static str,
    tickets: TicketOffice,
}

/// Digests of the model's tensors, as a member has sent them.
#[derive(Debug)]
struct KeptDigests {
    json: Bytes,
    /// Those of all bytes; empty if the member had none.
    full: Vec<TensorDigest>,
}

/// Progress of writing the store.
#[derive(Clone, Debug, Default)]
struct WriteState {
    /// Fleet revision of the last successful write.
    durable: u64,
    /// Fleet revision of the last failed write.
    failed: u64,
    /// Error of the last write; `None` after a success.
    error: Option<String>,
    /// Reason why the next write would fail, found without a write.
    outage: Option<String>,
    /// True once this process leads no longer.
    is_over: bool,
}

impl Coordinator {
    /// Starts the coordinator of a restored fleet. Writes the store twice before it returns, because the
    /// first epoch can be issued only after two writes. A store that held a state and has no space left is no
    /// reason to fail: the fleet then goes on with that state.
    pub(crate) fn start(
        mut fleet: Fleet,
        store: &mut dyn Store,
        mut revision: Revision,
        clock: Arc<dyn Clock>,
        times: TermTimes,
        metrics: Metrics,
        board: Arc<Board>,
    ) -> Result<(Self, Revision), StoreError> {
        let lease_ttl = times.lease_ttl;
        let tickets = open_tickets(&mut fleet, times, clock.now())?;
        let mut state = WriteState::default();
        while fleet.needs_save() {
            let (snapshot, fleet_revision) = fleet.snapshot();
            match store.save(&snapshot, revision) {
                Ok(next) => {
                    revision = next;
                    fleet.mark_saved(&snapshot, fleet_revision);
                    state.durable = fleet_revision;
                }
                Err(err @ (StoreError::Full { .. } | StoreError::Io { .. }))
                    if revision > Revision::default() =>
                {
                    reserve_epochs(&mut fleet, store)?;
                    error!(error = %err, "{READ_ONLY}");
                    metrics.store_write_errors.inc();
                    state.failed = fleet_revision;
                    state.error = Some(err.to_string());
                    break;
                }
                Err(err) => return Err(err),
            }
        }
        metrics.store_writable.set(i64::from(state.error.is_none()));
        fleet.refresh();
        board.publish(fleet.table());
        let coordinator = Self {
            fleet: Mutex::new(fleet),
            pace: Mutex::default(),
            started: clock.now(),
            clock,
            lease_ttl,
            metrics,
            board,
            events: EventLog::default(),
            model_digests: Mutex::new(None),
            writes: watch::Sender::new(state),
            dirty: Notify::new(),
            suspected: Notify::new(),
            store_kind: store.kind(),
            tickets,
        };
        // Logs and counts the restored members.
        coordinator.with_fleet(|_, _| ());
        Ok((coordinator, revision))
    }

    /// Registers a member. `owner` is the tag of the identity that alone may change it afterwards.
    pub(crate) async fn register(
        &self,
        request: RegisterRequest,
        owner: Option<&str>,
    ) -> Result<RegisterResponse, OperationError> {
        let (name, incarnation) = (request.name.clone(), request.incarnation);
        let is_known = self.with_fleet(|fleet, _| fleet.is_known(&name));
        if let Some(reason) = self.write_error().filter(|_| !is_known) {
            return Err(OperationError::ReadOnly { reason });
        }
        let (response, revision, is_durable) = self.with_fleet(|fleet, now| {
            let response = fleet.register_for(request, owner, now)?;
            let is_durable = fleet.is_durable(&name, incarnation);
            Ok::<_, Refusal>((response, fleet.revision(), is_durable))
        })?;
        let response = RegisterResponse { ticket_keys: Some(self.tickets.keys()), ..response };
        if is_durable || (is_known && self.write_error().is_some()) {
            return Ok(response);
        }
        match self.wait_durable(revision).await {
            Err(OperationError::ReadOnly { .. }) if is_known => Ok(response),
            outcome => outcome.map(|()| response),
        }
    }

    pub(crate) fn renew(
        &self,
        member: &MemberId,
        request: LeaseRequest,
    ) -> Result<LeaseResponse, OperationError> {
        let mut response = self.with_fleet(|fleet, now| fleet.renew(member, request, now))?;
        response.wanted_digests = match &*lock(&self.model_digests) {
            None => WantedDigests::Any,
            Some(kept) if kept.full.is_empty() => WantedDigests::Full,
            Some(_) => WantedDigests::None,
        };
        response.ticket_keys = Some(self.tickets.keys());
        Ok(response)
    }

    /// Issues a ticket, once servers have had the time to learn the key of this term.
    pub(crate) async fn issue_ticket(
        &self,
        request: &TicketRequest,
    ) -> Result<TicketResponse, OperationError> {
        let wait = self.tickets.wait(self.clock.now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        let epoch = lock(&self.fleet).table().epoch;
        Ok(self.tickets.issue(request, epoch, SystemTime::now().into())?)
    }

    /// Revokes all tickets. This is durable before it returns, unless the store cannot be written. Returns the least
    /// epoch of tickets.
    pub(crate) async fn revoke_tickets(&self) -> Result<u64, OperationError> {
        let (least_epoch, revision) = self.with_fleet(|fleet, _| {
            let least_epoch = self.tickets.revoke(fleet.table().epoch);
            fleet.set_tickets(self.tickets.record());
            (least_epoch, fleet.revision())
        });
        warn!(least_epoch, "all tickets are revoked");
        match self.wait_durable(revision).await {
            Err(OperationError::ReadOnly { .. }) => Ok(least_epoch),
            outcome => outcome.map(|()| least_epoch),
        }
    }

    pub(crate) fn ready(
        &self,
        member: &MemberId,
        request: ReadyRequest,
    ) -> Result<MemberInfo, OperationError> {
        Ok(self.with_fleet(|fleet, now| fleet.ready(member, request, now))?)
    }

    /// Starts a drain. It is durable before this returns, unless the store cannot be written.
    pub(crate) async fn drain(
        &self,
        member: &MemberId,
        incarnation: Option<u64>,
    ) -> Result<MemberInfo, OperationError> {
        let (info, revision) = self.with_fleet(|fleet, now| {
            let info = fleet.drain(member, incarnation, now)?;
            Ok::<_, Refusal>((info, fleet.revision()))
        })?;
        match self.wait_durable(revision).await {
            Err(OperationError::ReadOnly { .. }) => Ok(info),
            outcome => outcome.map(|()| info),
        }
    }

    pub(crate) fn goals(&self) -> Result<FleetGoals, OperationError> {
        Ok(self.with_fleet(|fleet, _| fleet.goals())?)
    }

    pub(crate) fn set_goals(&self, goals: FleetGoals) -> Result<FleetGoals, OperationError> {
        Ok(self.with_fleet(|fleet, now| fleet.set_goals(goals, now))?)
    }

    pub(crate) fn resume(&self, member: &MemberId) -> Result<MemberInfo, OperationError> {
        Ok(self.with_fleet(|fleet, now| fleet.resume(member, now))?)
    }

    pub(crate) fn suspect(
        &self,
        member: &MemberId,
        request: SuspectRequest,
    ) -> Result<Duration, OperationError> {
        let left = self.with_fleet(|fleet, now| fleet.suspect(member, request, now))?;
        self.suspected.notify_one();
        Ok(left)
    }

    pub(crate) fn leave(&self, member: &MemberId) -> Result<(), OperationError> {
        Ok(self.with_fleet(|fleet, _| fleet.leave(member))?)
    }

    pub(crate) fn members(&self) -> Vec<MemberInfo> {
        self.with_fleet(|fleet, now| fleet.infos(now))
    }

    /// Returns true if a member has this identity.
    pub(crate) fn has_member(&self, member: &MemberId) -> bool {
        lock(&self.fleet).has_id(member)
    }

    /// The last events, after number `seq`.
    pub(crate) fn events_after(&self, seq: u64) -> EventList {
        self.events.after(seq)
    }

    pub(crate) fn status(&self) -> ClusterStatus {
        let error = self.write_error();
        let store =
            StoreStatus { kind: self.store_kind.to_owned(), writable: error.is_none(), error };
        let num_watchers = self.metrics.watchers.get().max(0) as u64;
        self.with_fleet(|fleet, now| {
            let coverage = fleet.coverage();
            ClusterStatus {
                cluster_id: fleet.table().cluster_id.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                uptime_ms: now.saturating_sub(self.started).as_millis() as u64,
                epoch: fleet.table().epoch,
                model: fleet.model().cloned(),
                num_servers: fleet.planner().num_servers(),
                replicas: fleet.replicas(),
                lease_ttl_ms: self.lease_ttl.as_millis() as u64,
                members: fleet.counts(),
                experts_total: coverage.experts_total,
                experts_without_replica: coverage.without_replica,
                experts_under_replicated: coverage.under_replicated,
                num_watchers,
                plan_error: fleet.shortage(),
                store,
                problems: Vec::new(),
                leader: None,
                followers: Vec::new(),
            }
        })
    }

    pub(crate) fn advice(&self) -> ScalingAdvice {
        self.with_fleet(|fleet, _| fleet.advice())
    }

    /// The digests of the model's tensors as JSON, if a member has sent them.
    pub(crate) fn model_digests(&self) -> Option<Bytes> {
        lock(&self.model_digests).as_ref().map(|kept| kept.json.clone())
    }

    /// Keeps `digests`, whose JSON is `json`, unless there are some that cover as much. Refuses digests of another
    /// model, and those of all bytes if others are kept.
    pub(crate) fn store_model_digests(
        &self,
        digests: ModelDigests,
        json: Bytes,
    ) -> Result<(), OperationError> {
        let ModelDigests { fingerprint, full, .. } = digests;
        let model = lock(&self.fleet).model().cloned();
        let expected = model.map(|model| model.fingerprint).unwrap_or_default();
        if fingerprint != expected {
            let (name, found) = ("that sends digests".to_owned(), fingerprint);
            let is_same_shape = false;
            return Err(Refusal::ModelMismatch { name, found, expected, is_same_shape }.into());
        }
        let mut kept = lock(&self.model_digests);
        match &*kept {
            Some(kept) if full.is_empty() || kept.full == full => Ok(()),
            Some(kept) if !kept.full.is_empty() => Err(Refusal::BytesMismatch.into()),
            _ => {
                *kept = Some(KeptDigests { json, full });
                Ok(())
            }
        }
    }

    /// Expires members, and plans the fleet on a thread for blocking work, until the task is aborted.
    pub(crate) async fn run_clock(&self) {
        let period = (self.lease_ttl / 30).clamp(MIN_TICK, MAX_TICK);
        let mut advise_at = Duration::ZERO;
        // At most one plan at a time.
        let mut planning = JoinSet::new();
        loop {
            let due = tokio::select! {
                () = tokio::time::sleep(period) => self.tick(period, &mut advise_at),
                Some(planned) = planning.join_next() => {
                    self.finish_plan(planned);
                    None
                }
            };
            if let Some(job) = due {
                let timer = self.metrics.plan_seconds.start_timer();
                planning.spawn_blocking(move || {
                    let outcome = job.run();
                    timer.observe_duration();
                    (job, outcome)
                });
            }
        }
    }

    /// Expires members. Returns the plan to compute, if one is due.
    fn tick(&self, period: Duration, advise_at: &mut Duration) -> Option<PlanJob> {
        self.renew_ticket_key();
        let (advice, due) = self.with_fleet(|fleet, now| {
            fleet.tick(now, period);
            let loads = |fleet: &Fleet| fleet.expert_loads(self.metrics.top_experts);
            let advice = (now >= *advise_at)
                .then(|| (fleet.advice(), fleet.num_unreachable(), loads(fleet)));
            (advice, fleet.take_plan())
        });
        if let Some((advice, num_unreachable, loads)) = advice {
            self.metrics.set_unreachable(num_unreachable);
            self.metrics.set_expert_load(&loads);
            *advise_at = self.clock.now() + ADVICE_PERIOD;
            self.metrics.set_advice(&advice);
        }
        due
    }

    fn finish_plan(&self, planned: Result<(PlanJob, PlanOutcome), JoinError>) {
        if let Err(err) = &planned {
            error!(error = %err, "the fleet could not be planned: the next plan tries again");
        }
        self.with_fleet(|fleet, now| fleet.finish_plan(planned.ok(), now));
    }

    /// Makes the next key of tickets in time.
    fn renew_ticket_key(&self) {
        match self.tickets.tick(self.clock.now(), SystemTime::now().into()) {
            Ok(false) => {}
            Ok(true) => {
                info!("a new key for tickets is published");
                self.with_fleet(|fleet, _| fleet.set_tickets(self.tickets.record()));
            }
            // The old key goes on. The next tick tries again.
            Err(err) => debug!(error = %err, "no new key for tickets"),
        }
    }

    /// Connects to every serving member once, again until that works, and when a client suspects it. So an address that
    /// nothing can reach shows in the status, and a death has a second observer. Ends when the task is aborted.
    pub(crate) async fn run_probes(&self) {
        loop {
            // A suspicion is looked into at once, but many of them cause few attempts.
            tokio::time::sleep(PROBE_PAUSE).await;
            let _ = tokio::time::timeout(PROBE_PERIOD, self.suspected.notified()).await;
            let unprobed = lock(&self.fleet).unprobed();
            let probes = unprobed.into_iter().map(|(name, incarnation, addr)| async move {
                (name, incarnation, connect(&addr).await)
            });
            let mut probes = futures_util::stream::iter(probes).buffer_unordered(MAX_PROBES);
            while let Some((name, incarnation, outcome)) = probes.next().await {
                self.with_fleet(|fleet, now| {
                    fleet.record_probe(&name, incarnation, outcome, now);
                });
            }
        }
    }

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

    /// Waits until a revision is in the store. The request's timeout bounds the wait.
    async fn wait_durable(&self, revision: u64) -> Result<(), OperationError> {
        let mut writes = self.writes.subscribe();
        let settled = writes.wait_for(|state| {
            state.is_over
                || state.durable >= revision
                || (state.error.is_some() && state.failed >= revision)
        });
        let state = settled.await.map_err(|_| OperationError::ShuttingDown)?.clone();
        match state.error {
            _ if state.is_over && state.durable < revision => Err(OperationError::ShuttingDown),
            Some(reason) if state.durable < revision => Err(OperationError::ReadOnly { reason }),
            _ => Ok(()),
        }
    }

    /// Runs `action` on the fleet, then publishes, logs and counts its results. In a large fleet the placement may
    /// change only with a later call: [`run_clock`](Self::run_clock) makes one with every tick.
    fn with_fleet<R>(&self, action: impl FnOnce(&mut Fleet, Duration) -> R) -> R {
        let mut fleet = lock(&self.fleet);
        let now = self.clock.now();
        let result = action(&mut fleet, now);
        let mut rebuild = None;
        if fleet.needs_refresh() && lock(&self.pace).is_due(now) {
            let stopwatch = Stopwatch::start();
            let table = fleet.refresh();
            lock(&self.pace).note(self.clock.now(), stopwatch.elapsed(), 0);
            rebuild = Some((table, stopwatch));
        }
        let events = fleet.take_events();
        if !events.is_empty() {
            self.metrics.set_members(fleet.counts());
            self.metrics.set_coverage(fleet.coverage());
            self.metrics.epoch.set(fleet.table().epoch as i64);
        }
        let is_dirty = fleet.needs_save();
        drop(fleet);
        if let Some((table, stopwatch)) = rebuild {
            let num_bytes = table.map_or(0, |table| self.board.publish(&table));
            let computing = stopwatch.elapsed();
            lock(&self.pace).note(self.clock.now(), computing, num_bytes);
            self.metrics.placement_seconds.observe(computing.as_secs_f64());
        }
        for event in &events {
            self.record_event(event);
        }
        if is_dirty {
            self.dirty.notify_one();
        }
        result
    }

    fn record_event(&self, event: &FleetEvent) {
        self.events.add(event);
        let metrics = &self.metrics;
        match event {
            FleetEvent::Registered { name, kind } => {
                let kind = match kind {
                    RegistrationKind::New => "new",
                    RegistrationKind::Returned => "returned",
                    RegistrationKind::Takeover => "takeover",
                };
                metrics.registrations.with_label_values(&[kind]).inc();
                info!(name, kind, "member registered");
            }
            FleetEvent::Planned { num_loads, before, after } => {
                metrics.expert_moves.inc_by(*num_loads as u64);
                info!(num_loads, before, after, "new plan: servers load experts");
            }
            FleetEvent::GoalsChanged { goals } => {
                info!(replicas = goals.replicas, spare = goals.spare, "the goals have changed");
            }
            FleetEvent::Short { shortage } => {
                error!(shortage, "the fleet cannot be planned: the placement stays as it is");
            }
            FleetEvent::NameContested { name } => {
                metrics.name_conflicts.inc();
                error!(name, "two live processes use this name: the later one keeps it");
            }
            FleetEvent::ModelReplaced { fingerprint } => {
                *lock(&self.model_digests) = None;
                warn!(
                    fingerprint,
                    "the old model has no members left: the fleet serves another one"
                );
            }
            FleetEvent::Unreachable { name, data_addr, reason } => {
                warn!(name, data_addr, reason, "cannot connect to a serving member");
            }
            FleetEvent::Serving { name } => info!(name, "member is serving"),
            FleetEvent::Draining { name } => info!(name, "member is draining"),
            FleetEvent::Resumed { name } => info!(name, "member resumed: its drain was taken back"),
            FleetEvent::Left { name } => info!(name, "member left"),
            FleetEvent::Suspected { name, reporter, reason } => {
                metrics.suspects.inc();
                warn!(name, reporter, reason, "member suspected");
            }
            FleetEvent::Expired { name, cause } => {
                let cause = match cause {
                    ExpiryCause::Lease => "lease",
                    ExpiryCause::Suspect => "suspect",
                };
                metrics.expirations.with_label_values(&[cause]).inc();
                warn!(name, cause, "member expired");
            }
            FleetEvent::Removed { name } => info!(name, "expired member removed"),
            FleetEvent::LeasesExtended { pause } => {
                warn!(?pause, "this process was paused; all leases extended by the pause");
            }
            FleetEvent::PlacementChanged { epoch, num_servers } => {
                metrics.placement_changes.inc();
                info!(epoch, num_servers, "new placement");
            }
            FleetEvent::PlacementBlocked => {
                error!("the placement cannot change until the store can be written");
            }
        }
    }
}

/// Connects to `addr` and closes the connection.
async fn connect(addr: &str) -> Result<(), String> {
    match tokio::time::timeout(PROBE_TIMEOUT, tokio::net::TcpStream::connect(addr)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(err)) => Err(err.to_string()),
        Err(_) => Err(format!("no answer within {} s", PROBE_TIMEOUT.as_secs())),
    }
}

/// Opens the office of tickets, whose key becomes a part of the fleet's snapshot.
fn open_tickets(
    fleet: &mut Fleet,
    times: TermTimes,
    now: Duration,
) -> Result<TicketOffice, StoreError> {
    let settings = TicketSettings {
        life: times.ticket_life,
        spread: (times.lease_ttl / 2).min(MAX_KEY_SPREAD),
    };
    let has_servers = !fleet.infos(now).is_empty();
    let (fleet_id, record) = (fleet.cluster_id().to_owned(), fleet.tickets().clone());
    let wall = SystemTime::now().into();
    let office = TicketOffice::open(&fleet_id, record, settings, has_servers, now, wall);
    let office = office.map_err(|err| StoreError::Io {
        operation: "make a key for tickets of",
        path: fleet_id.into(),
        source: std::io::Error::other(err),
    })?;
    fleet.set_tickets(office.record());
    Ok(office)
}

/// Reserves epochs in a store that takes no snapshot.
fn reserve_epochs(fleet: &mut Fleet, store: &mut dyn Store) -> Result<(), StoreError> {
    if let Some(reservation) = fleet.epoch_to_reserve() {
        store.reserve_epoch(reservation)?;
        fleet.mark_reserved(reservation);
    }
    Ok(())
}

/// Ignores poisoning: a panic in one task must not stop the others.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const READ_ONLY: &str =
    "the store cannot be written: known members keep serving, members of new names are refused";
/// A request for a ticket waits no longer than this for the servers to learn a new key.
const MAX_KEY_SPREAD: Duration = Duration::from_secs(2);
/// The gauges of the advice change at this rate.
const ADVICE_PERIOD: Duration = Duration::from_secs(1);
const PROBE_PERIOD: Duration = Duration::from_secs(2);
const PROBE_PAUSE: Duration = Duration::from_millis(20);
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Connection attempts at a time.
const MAX_PROBES: usize = 32;
const MIN_TICK: Duration = Duration::from_millis(5);
const MAX_TICK: Duration = Duration::from_millis(100);
const WRITE_RETRY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
