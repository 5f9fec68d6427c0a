//! Runs the fleet: one lock, one clock, one writer of the store, many watchers.

mod edition;
mod probes;
mod record;
mod reversible;
mod tasks;
mod tickets;
mod writer;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use control_api::{
    ClusterStatus, LeaseRequest, LeaseResponse, MemberId, MemberInfo, ModelDigests, ReadyRequest,
    RegisterRequest, RegisterResponse, ScalingAdvice, StoreStatus, SuspectRequest, TensorDigest,
    WantedDigests,
};
use tokio::sync::{Notify, watch};
use tracing::error;

use crate::admission::Refusal;
use crate::board::Board;
use crate::clock::{Clock, Stopwatch};
use crate::events::EventLog;
use crate::fleet::Fleet;
use crate::member::{Danger, Predecessor};
use crate::metrics::Metrics;
use crate::pace::Pace;
use crate::store::{Revision, Store, StoreError};
use crate::tickets::{IssueError, TicketOffice};
use writer::{READ_ONLY, WriteState, reserve_epochs};

/// Error of an operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OperationError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("members of new names are refused while the store cannot be written: {reason}")]
    ReadOnly { reason: String },
    /// The change is not in force. A write whose answer was lost may have stored it.
    #[error(
        "the store cannot be written, so the change is not in force: {reason}; repeat the request once it can be (if \
         the answer of the store was lost, a restart before that may find the change)"
    )]
    NotStored { reason: String },
    /// A change is in force, and a restart would lose it.
    #[error(
        "{change}, but a restart of the control plane would lose this, because the store cannot be written: {reason}"
    )]
    NotDurable { change: String, reason: String },
    #[error(transparent)]
    Ticket(#[from] IssueError),
    /// The update of the model does not allow the request.
    #[error("{0}")]
    Update(String),
    #[error("the control plane is shutting down")]
    ShuttingDown,
}

/// Everything that a coordinator works with. Those of all editions share most of it.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) lease_ttl: Duration,
    pub(crate) metrics: Metrics,
    pub(crate) board: Arc<Board>,
    pub(crate) events: EventLog,
    pub(crate) tickets: Arc<TicketOffice>,
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
    probes_due: Notify,
    store_kind: &'static str,
    tickets: Arc<TicketOffice>,
    member_logs: record::MemberLogs,
}

/// Digests of the model's tensors, as a member has sent them.
#[derive(Debug)]
struct KeptDigests {
    json: Bytes,
    /// Those of all bytes; empty if the member had none.
    full: Vec<TensorDigest>,
}

impl Coordinator {
    /// Starts the coordinator of a restored fleet. Writes the store twice before it returns, because the
    /// first epoch can be issued only after two writes. A store that held a state and has no space left is no
    /// reason to fail: the fleet then goes on with that state.
    pub(crate) fn start(
        mut fleet: Fleet,
        store: &mut dyn Store,
        mut revision: Revision,
        context: Context,
    ) -> Result<(Self, Revision), StoreError> {
        let Context { clock, lease_ttl, metrics, board, events, tickets } = context;
        fleet.set_tickets(tickets.record());
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
            events,
            model_digests: Mutex::new(None),
            writes: watch::Sender::new(state),
            dirty: Notify::new(),
            probes_due: Notify::new(),
            store_kind: store.kind(),
            tickets,
            member_logs: Default::default(),
        };
        // Logs and counts the restored members.
        coordinator.with_fleet(|_, _| ());
        Ok((coordinator, revision))
    }

    /// Registers a member. `owner` is the tag of the identity that alone may change it afterwards. `replaced` are processes
    /// that had its name in the fleet of another model.
    pub(crate) async fn register(
        &self,
        request: RegisterRequest,
        owner: Option<&str>,
        replaced: Vec<Predecessor>,
    ) -> Result<RegisterResponse, OperationError> {
        let (name, incarnation) = (request.name.clone(), request.incarnation);
        let is_known = self.with_fleet(|fleet, _| fleet.is_known(&name));
        if let Some(reason) = self.write_error().filter(|_| !is_known) {
            return Err(OperationError::ReadOnly { reason });
        }
        let (response, revision, is_durable) = self.with_fleet(|fleet, now| {
            let response = fleet.register_for(request, owner, now)?;
            fleet.add_predecessors(&name, replaced);
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

    pub(crate) fn ready(
        &self,
        member: &MemberId,
        request: ReadyRequest,
    ) -> Result<MemberInfo, OperationError> {
        let info = self.with_fleet(|fleet, now| fleet.ready(member, request, now))?;
        self.probes_due.notify_one();
        Ok(info)
    }

    /// Starts a drain. It is durable before this returns, unless the store cannot be written: the answer then says so.
    pub(crate) async fn drain(
        &self,
        member: &MemberId,
        incarnation: Option<u64>,
    ) -> Result<MemberInfo, OperationError> {
        let (mut info, revision) = self.with_fleet(|fleet, now| {
            let info = fleet.drain(member, incarnation, now)?;
            Ok::<_, Refusal>((info, fleet.revision()))
        })?;
        match self.wait_durable(revision).await {
            // A server that ends drains whatever the store does.
            Err(OperationError::ReadOnly { reason }) => info.not_stored = Some(reason),
            outcome => outcome?,
        }
        Ok(info)
    }

    pub(crate) fn suspect(
        &self,
        member: &MemberId,
        request: SuspectRequest,
        observer: &str,
    ) -> Result<Duration, OperationError> {
        let left = self.with_fleet(|fleet, now| fleet.suspect(member, request, observer, now))?;
        self.probes_due.notify_one();
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
                tls_error: None,
                insecure: None,
                store,
                health: None,
                problems: server_problems(fleet),
                editions: Vec::new(),
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
            self.metrics.set_epoch(fleet.table().epoch);
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
}

/// A sentence for each danger of servers whose listeners other hosts reach, and for each of the first servers that the
/// control plane cannot connect to.
fn server_problems(fleet: &Fleet) -> Vec<String> {
    let sentence = |(danger, names): (Danger, Vec<&str>)| {
        let shown = names.iter().take(MAX_NAMES).copied().collect::<Vec<_>>().join(", ");
        let more = match names.len().saturating_sub(MAX_NAMES) {
            0 => String::new(),
            more => format!(" and {more} others"),
        };
        format!("INSECURE: {shown}{more}: {}", danger.text())
    };
    let mut problems: Vec<String> = fleet.insecure().into_iter().map(sentence).collect();
    let mut unreachable = fleet.unreachable();
    problems.extend(unreachable.by_ref().take(MAX_NAMES));
    match unreachable.count() {
        0 => {}
        more => problems.push(format!("the control plane cannot connect to {more} other servers")),
    }
    problems
}

const MAX_NAMES: usize = 3;

/// Ignores poisoning: a panic in one task must not stop the others.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
