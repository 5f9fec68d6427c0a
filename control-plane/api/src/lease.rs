//! The keeper of a member's lease. It sends heartbeats on its own thread, so that device calls and the
//! loading of weights never delay them.

use std::future::Future;
use std::io;
use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{debug, info, warn};
use trust::log_limit::LogLimit;

use crate::backoff::Backoff;
use crate::client::ControlClient;
use crate::error::{ConfigError, ControlError, code};
use crate::tickets::TicketKeys;
use crate::types::{
    Assignment, DrainRequest, LeaseRequest, LoadReport, MemberId, MemberState, ReadyRequest,
    RegisterRequest, WantedDigests,
};

/// Retry delays of a [`LeaseKeeper`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeaseOptions {
    /// First delay after a failed request. It doubles up to [`max_backoff`](Self::max_backoff). Default:
    /// 50 ms.
    pub first_backoff: Duration,
    /// Longest delay after a failed request. Default: 1 s.
    pub max_backoff: Duration,
}

impl Default for LeaseOptions {
    fn default() -> Self {
        Self { first_backoff: Duration::from_millis(50), max_backoff: Duration::from_secs(1) }
    }
}

/// Status of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseStatus {
    /// No lease yet.
    #[default]
    Registering,
    /// The last renewal succeeded and its lease has not run out.
    Leased,
    /// The lease has expired, or the control plane does not know the member. The member continues to serve
    /// clients, and the keeper retries.
    Lost,
    /// Final: the first registration was refused, or another process has taken over the name.
    /// [`LeaseState::last_error`] has the reason.
    Failed,
    /// Final: the member has left.
    Left,
}

/// State of a [`LeaseKeeper`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseState {
    /// Status of the lease.
    pub status: LeaseStatus,
    /// Identity of the member; `None` before the first registration.
    pub member_id: Option<MemberId>,
    /// State of the member as the control plane reports it.
    pub member_state: Option<MemberState>,
    /// Experts to hold; `None` before the first registration. Changes are rare. After a change, load the
    /// experts and report them with [`LeaseKeeper::set_ready`].
    pub assignment: Option<Arc<Assignment>>,
    /// Newest placement epoch that the control plane has reported.
    pub epoch: u64,
    /// Time to live of the lease.
    pub lease_ttl: Duration,
    /// Error of the last request; `None` after a success.
    pub last_error: Option<String>,
    /// Stable code of the last refusal, see [`code`].
    pub last_error_code: Option<String>,
    /// Number of registrations. More than one means that the lease was lost in between.
    pub num_registrations: u64,
    /// Number of successful renewals.
    pub num_renewals: u64,
    /// True while the member drains and is in the placement all the same, until others have loaded its experts.
    pub keeps_serving: bool,
    /// Digests that the control plane asked for with the last renewal.
    pub wanted_digests: WantedDigests,
    /// Keys to check tickets with, as the control plane last sent them. They stay while it is down.
    pub ticket_keys: Option<Arc<TicketKeys>>,
}

/// Error of a call of a [`LeaseKeeper`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum LeaseError {
    /// The thread could not be started.
    #[error("the heartbeat thread could not be started: {0}")]
    Thread(#[source] io::Error),
    /// The HTTP client could not be set up.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The lease has ended: the keeper has failed or left.
    #[error(
        "{}: {reason}",
        if *was_leased { "the lease has ended" } else { "the registration has failed" }
    )]
    Ended { reason: String, code: Option<String>, was_leased: bool },
    /// The control plane did not confirm within the caller's time limit.
    #[error("the control plane did not confirm within {bound_ms} ms (last error: {last_error})")]
    Timeout { bound_ms: u64, last_error: String },
}

/// Registers a member and keeps its lease alive.
///
/// The keeper renews the lease three times per time to live. It registers again, with the same name and
/// incarnation, when the control plane does not know the member or the lease has expired. Causes are a
/// suspended process, a network partition or a restart of the control plane. Dropping the keeper stops the
/// heartbeats without leaving, and the lease expires.
#[derive(Debug)]
pub struct LeaseKeeper {
    intent: watch::Sender<Intent>,
    load: Arc<Mutex<Option<LoadReport>>>,
    state: watch::Receiver<LeaseState>,
}

impl LeaseKeeper {
    /// Starts the heartbeat thread, which registers at once.
    ///
    /// # Errors
    /// [`LeaseError`] when the thread or the HTTP client cannot be set up.
    pub fn spawn(
        client: &ControlClient,
        registration: RegisterRequest,
        options: LeaseOptions,
    ) -> Result<Self, LeaseError> {
        let client = client.isolated()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(LeaseError::Thread)?;
        let (intent, intent_rx) = watch::channel(Intent::default());
        let (state_tx, state) = watch::channel(LeaseState::default());
        let load = Arc::new(Mutex::new(None));
        let worker = Worker {
            backoff: Backoff::new(options.first_backoff, options.max_backoff),
            client,
            registration,
            intent: intent_rx,
            load: Arc::clone(&load),
            state: state_tx,
            reported: None,
            renewed_at: None,
            name_refused_at: None,
            name_wait: None,
            assignment_version: 0,
            is_drained: false,
            outage: Outage::default(),
        };
        let body = move || {
            runtime.block_on(worker.run());
            // Do not wait for a DNS lookup that hangs.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("switchyard-lease".to_owned());
        thread.spawn(body).map_err(LeaseError::Thread)?;
        Ok(Self { intent, load, state })
    }

    /// A receiver of the keeper's state.
    pub fn state(&self) -> watch::Receiver<LeaseState> {
        self.state.clone()
    }

    /// Waits up to `bound` for the first registration and returns the experts to load.
    ///
    /// # Errors
    /// [`LeaseError::Timeout`], or [`LeaseError::Ended`] when the control plane refused the registration.
    pub async fn registered(&self, bound: Duration) -> Result<Arc<Assignment>, LeaseError> {
        let state = self.wait(bound, |state| state.assignment.is_some()).await?;
        Ok(state.assignment.unwrap_or_default())
    }

    /// Sets the loaded experts. The keeper reports them to the control plane, and again after every new
    /// registration.
    pub fn set_ready(&self, holds: Assignment) {
        self.intent.send_modify(|intent| intent.holds = Some(Arc::new(holds)));
    }

    /// Waits up to `bound` until the member is in the placement.
    ///
    /// # Errors
    /// [`LeaseError::Timeout`] or [`LeaseError::Ended`].
    pub async fn serving(&self, bound: Duration) -> Result<(), LeaseError> {
        let serves = |state: &LeaseState| {
            state.status == LeaseStatus::Leased && state.member_state == Some(MemberState::Serving)
        };
        self.wait(bound, serves).await.map(drop)
    }

    /// Sets the load report to send with the next renewal. It replaces a report that was not sent yet.
    pub fn report_load(&self, report: LoadReport) {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
    }

    /// Asks the control plane to remove the member from the placement, and waits up to `bound` for the
    /// confirmation. [`LeaseState::keeps_serving`] is true until other members have loaded its experts. The lease continues until [`leave`](Self::leave). After a timeout the keeper keeps
    /// trying to drain.
    ///
    /// # Errors
    /// [`LeaseError::Timeout`] or [`LeaseError::Ended`].
    pub async fn drain(&self, bound: Duration) -> Result<(), LeaseError> {
        self.intent.send_modify(|intent| intent.goal = intent.goal.max(Goal::Drain));
        let drained = |state: &LeaseState| state.member_state == Some(MemberState::Draining);
        self.wait(bound, drained).await.map(drop)
    }

    /// Leaves for good and waits up to `bound` for the confirmation. If the control plane is unreachable,
    /// the lease expires by itself.
    ///
    /// # Errors
    /// [`LeaseError::Timeout`] or [`LeaseError::Ended`].
    pub async fn leave(&self, bound: Duration) -> Result<(), LeaseError> {
        let deadline = Instant::now() + bound;
        self.intent.send_modify(|intent| {
            intent.goal = intent.goal.max(Goal::Leave);
            intent.leave_by.get_or_insert(deadline);
        });
        self.wait(bound, |state| state.status == LeaseStatus::Left).await.map(drop)
    }

    async fn wait(
        &self,
        bound: Duration,
        mut wanted: impl FnMut(&LeaseState) -> bool,
    ) -> Result<LeaseState, LeaseError> {
        let mut receiver = self.state.clone();
        let is_over =
            |state: &LeaseState| matches!(state.status, LeaseStatus::Failed | LeaseStatus::Left);
        let settled = receiver.wait_for(|state| wanted(state) || is_over(state));
        let settled = match tokio::time::timeout(bound, settled).await {
            Ok(Ok(state)) => state.clone(),
            _ => {
                let last_error = self.state.borrow().last_error.clone();
                return Err(LeaseError::Timeout {
                    bound_ms: bound.as_millis() as u64,
                    last_error: last_error.unwrap_or_else(|| "none".to_owned()),
                });
            }
        };
        if wanted(&settled) {
            return Ok(settled);
        }
        let reason = settled.last_error.unwrap_or_else(|| "the member has left".to_owned());
        let was_leased = settled.num_registrations > 0;
        Err(LeaseError::Ended { reason, code: settled.last_error_code, was_leased })
    }
}

/// Goal of the keeper, in rising order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Goal {
    #[default]
    Run,
    Drain,
    Leave,
}

/// Goal of the member and its loaded experts.
#[derive(Clone, Debug, Default)]
struct Intent {
    goal: Goal,
    holds: Option<Arc<Assignment>>,
    leave_by: Option<Instant>,
}

struct Worker {
    client: ControlClient,
    registration: RegisterRequest,
    intent: watch::Receiver<Intent>,
    load: Arc<Mutex<Option<LoadReport>>>,
    state: watch::Sender<LeaseState>,
    backoff: Backoff,
    /// Experts reported to the control plane since the last registration.
    reported: Option<Arc<Assignment>>,
    /// Time when the request of the last renewal was sent. The lease lasts at least until this time plus
    /// its time to live.
    renewed_at: Option<Instant>,
    /// Time of the first registration that was refused because the name is in use.
    name_refused_at: Option<Instant>,
    /// How long the keeper retries a name that is in use.
    name_wait: Option<Duration>,
    /// Version of the assignment in the published state.
    assignment_version: u64,
    is_drained: bool,
    outage: Outage,
}

/// The failure of the last request, to log each kind of failure of an outage.
#[derive(Debug, Default)]
struct Outage {
    kind: Option<(Discriminant<ControlError>, Option<String>)>,
    lines: LogLimit,
}

impl Outage {
    /// Returns true if a failure should be in the log: it begins an outage, or is of another kind than the one before.
    /// Kinds that change all the time are limited.
    fn is_news(&mut self, err: &ControlError, has_begun: bool) -> bool {
        let kind = Some((discriminant(err), err.code().map(str::to_owned)));
        let is_same = has_begun && self.kind == kind;
        self.kind = kind;
        !is_same && self.lines.allow().is_some()
    }
}

/// Action after one step of the worker.
enum Next {
    Sleep(Duration),
    Stop,
}

impl Worker {
    async fn run(mut self) {
        loop {
            // A change of the intent from here on interrupts the sleep below.
            let intent = self.intent.borrow_and_update().clone();
            match self.step(&intent).await {
                Next::Stop => return,
                Next::Sleep(pause) => {
                    let changed = tokio::time::timeout(pause, self.intent.changed()).await;
                    if matches!(changed, Ok(Err(_))) {
                        debug!(name = self.registration.name, "heartbeats stopped");
                        return;
                    }
                }
            }
        }
    }

    async fn step(&mut self, intent: &Intent) -> Next {
        let member = self.state.borrow().member_id.clone();
        let is_leased = self.renewed_at.is_some();
        if intent.goal == Goal::Leave {
            return self.leave(intent, member).await;
        }
        let Some(member) = member.filter(|_| is_leased) else {
            return self.register().await;
        };
        if intent.goal == Goal::Drain && !self.is_drained {
            return self.drain(&member).await;
        }
        if let Some(holds) = &intent.holds
            && self.reported.as_ref() != Some(holds)
            && intent.goal == Goal::Run
        {
            return self.ready(&member, holds).await;
        }
        self.renew(&member).await
    }

    async fn register(&mut self) -> Next {
        let mut request = self.registration.clone();
        if let Some(holds) = &self.intent.borrow().holds {
            request.holds = Assignment::clone(holds);
        }
        let sent_at = Instant::now();
        let client = self.client.clone();
        let response = match self.interruptible(client.register(&request)).await {
            None => return Next::Sleep(Duration::ZERO),
            Some(Ok(response)) => response,
            Some(Err(err)) => {
                let is_first = self.state.borrow().num_registrations == 0;
                let is_final = match err.code() {
                    Some(code::SUPERSEDED) => true,
                    Some(code::NAME_IN_USE) => {
                        let refused_at = *self.name_refused_at.get_or_insert(sent_at);
                        refused_at.elapsed() >= self.name_wait().await
                    }
                    _ => is_first && !err.is_transient(),
                };
                return if is_final { self.fail(&err) } else { self.retry_later(&err) };
            }
        };
        self.renewed_at = Some(sent_at);
        self.name_refused_at = None;
        self.reported = None;
        self.is_drained = false;
        self.assignment_version = response.assignment_version;
        info!(
            name = request.name,
            member = %response.member_id,
            epoch = response.epoch,
            experts = response.assignment.num_experts(),
            "registered with the control plane"
        );
        self.state.send_modify(|state| {
            state.status = LeaseStatus::Leased;
            state.member_id = Some(response.member_id);
            state.member_state = Some(MemberState::Loading);
            set_assignment(state, response.assignment);
            set_ticket_keys(state, response.ticket_keys);
            state.epoch = response.epoch;
            state.lease_ttl = clamp_ttl(response.lease_ttl_ms);
            clear_error(state);
            state.num_registrations += 1;
        });
        // A goal or loaded experts that were set meanwhile are sent at once.
        let has_change = {
            let intent = self.intent.borrow();
            intent.holds.is_some() || intent.goal != Goal::Run
        };
        Next::Sleep(if has_change { Duration::ZERO } else { self.interval() })
    }

    /// A holder that has died loses the name when its lease ends. So a name that stays in use for longer belongs to a
    /// live process. A member that is not registered yet asks for the time to live.
    async fn name_wait(&mut self) -> Duration {
        if let Some(wait) = self.name_wait {
            return wait;
        }
        match self.interruptible(self.client.status()).await {
            Some(Ok(status)) => {
                let wait = clamp_ttl(status.lease_ttl_ms) * NAME_WAIT_LEASES;
                *self.name_wait.insert(wait)
            }
            // The next refusal asks again.
            _ => self.ttl() * NAME_WAIT_LEASES,
        }
    }

    async fn renew(&mut self, member: &MemberId) -> Next {
        let load = self.load.lock().unwrap_or_else(PoisonError::into_inner).take();
        let request = LeaseRequest {
            incarnation: self.registration.incarnation,
            assignment_version: self.assignment_version,
            load,
        };
        let sent_at = Instant::now();
        // Retry rather than wait longer than a heartbeat interval for a response.
        let client =
            self.client.with_timeout(self.client.options().timeout.min(self.longest_interval()));
        match client.renew(member, &request).await {
            Ok(response) => {
                self.backoff.reset();
                self.renewed_at = Some(sent_at);
                if response.state == MemberState::Loading {
                    self.reported = None;
                }
                self.is_drained = response.state == MemberState::Draining;
                self.assignment_version = response.assignment_version;
                self.state.send_modify(|state| {
                    state.status = LeaseStatus::Leased;
                    state.member_state = Some(response.state);
                    if let Some(assignment) = response.assignment {
                        set_assignment(state, assignment);
                    }
                    set_ticket_keys(state, response.ticket_keys);
                    state.epoch = response.epoch;
                    state.lease_ttl = clamp_ttl(response.lease_ttl_ms);
                    clear_error(state);
                    state.num_renewals += 1;
                    state.wanted_digests = response.wanted_digests;
                    state.keeps_serving = response.keeps_serving;
                });
                let must_report = self.reported.is_none() && self.intent.borrow().holds.is_some();
                Next::Sleep(if must_report { self.interval() / 8 } else { self.interval() })
            }
            Err(err) => self.recover(&err),
        }
    }

    async fn ready(&mut self, member: &MemberId, holds: &Arc<Assignment>) -> Next {
        let request = ReadyRequest {
            incarnation: self.registration.incarnation,
            holds: Assignment::clone(holds),
        };
        match self.client.ready(member, &request).await {
            Ok(info) => {
                self.backoff.reset();
                self.reported = Some(Arc::clone(holds));
                self.state.send_modify(|state| {
                    state.member_state = Some(info.state);
                    clear_error(state);
                });
                Next::Sleep(self.until_renewal())
            }
            Err(err) => self.recover(&err),
        }
    }

    async fn drain(&mut self, member: &MemberId) -> Next {
        let request = DrainRequest { incarnation: Some(self.registration.incarnation) };
        match self.client.drain(member, &request).await {
            Ok(info) => {
                self.backoff.reset();
                self.is_drained = true;
                self.state.send_modify(|state| {
                    state.member_state = Some(info.state);
                    state.keeps_serving = info.keeps_serving;
                    clear_error(state);
                });
                Next::Sleep(self.until_renewal())
            }
            Err(err) => self.recover(&err),
        }
    }

    async fn leave(&mut self, intent: &Intent, member: Option<MemberId>) -> Next {
        let outcome = match &member {
            Some(member) => self.client.leave(member).await,
            None => Ok(()),
        };
        let is_gone = match &outcome {
            Ok(()) => true,
            Err(err) => err.code() == Some(code::UNKNOWN_MEMBER),
        };
        match outcome {
            Err(err) if !is_gone => {
                if intent.leave_by.is_none_or(|by| Instant::now() >= by) {
                    return self.fail(&err);
                }
                self.retry_later(&err)
            }
            _ => {
                info!(name = self.registration.name, "left the fleet");
                self.state.send_modify(|state| {
                    state.status = LeaseStatus::Left;
                    state.member_state = None;
                    clear_error(state);
                });
                Next::Stop
            }
        }
    }

    /// Handles a failed request of a registered member.
    fn recover(&mut self, err: &ControlError) -> Next {
        match err.code() {
            Some(code::SUPERSEDED) => self.fail(err),
            // A member whose identity has a new name registers again, too.
            Some(code::UNKNOWN_MEMBER | code::LEASE_EXPIRED | code::FORBIDDEN) => {
                warn!(name = self.registration.name, error = %err, "lease lost, registering again");
                self.renewed_at = None;
                self.state.send_modify(|state| {
                    state.status = LeaseStatus::Lost;
                    set_error(state, err);
                });
                // Back off: a control plane that registers members and does not know them would otherwise
                // be called in a tight loop.
                Next::Sleep(self.backoff.next_delay())
            }
            _ => self.retry_later(err),
        }
    }

    fn retry_later(&mut self, err: &ControlError) -> Next {
        let is_out = self.renewed_at.is_none_or(|at| at.elapsed() > self.ttl());
        let status = match (self.state.borrow().num_registrations, is_out) {
            (0, _) => LeaseStatus::Registering,
            (_, true) => LeaseStatus::Lost,
            (_, false) => LeaseStatus::Leased,
        };
        let has_begun = self.state.borrow().last_error.is_some();
        if self.outage.is_news(err, has_begun) {
            warn!(name = self.registration.name, error = %err, "request to the control plane failed, retrying");
        } else {
            debug!(name = self.registration.name, error = %err, "request to the control plane still fails");
        }
        self.state.send_modify(|state| {
            state.status = status;
            set_error(state, err);
        });
        Next::Sleep(self.backoff.next_delay().min(self.interval()))
    }

    fn fail(&mut self, err: &ControlError) -> Next {
        // Callers that wait get the error itself, so the log has it at debug level only.
        debug!(name = self.registration.name, error = %err, "the lease has ended");
        self.state.send_modify(|state| {
            state.status = LeaseStatus::Failed;
            set_error(state, err);
        });
        Next::Stop
    }

    /// Runs a request. Returns `None` when the keeper is dropped or should leave before it completes.
    async fn interruptible<F: Future>(&self, request: F) -> Option<F::Output> {
        let mut intent = self.intent.clone();
        let leaving = async {
            // An error means that the keeper was dropped.
            let _ = intent.wait_for(|intent| intent.goal == Goal::Leave).await;
        };
        tokio::select! {
            output = request => Some(output),
            () = leaving => None,
        }
    }

    fn ttl(&self) -> Duration {
        let ttl = self.state.borrow().lease_ttl;
        if ttl.is_zero() { FALLBACK_TTL } else { ttl }
    }

    /// A third of the time to live or the limit of the keys of tickets, minus a random part of up to 10 %. The random
    /// part spreads the heartbeats of a fleet over time.
    fn interval(&self) -> Duration {
        self.longest_interval().mul_f64(rand::random_range(0.9..=1.0))
    }

    fn longest_interval(&self) -> Duration {
        let of_lease = self.ttl() / 3;
        let refresh_ms = self.state.borrow().ticket_keys.as_ref().map_or(0, |keys| keys.refresh_ms);
        match refresh_ms {
            0 => of_lease,
            ms => of_lease.min(Duration::from_millis(ms).max(LEAST_REFRESH)),
        }
    }

    fn until_renewal(&self) -> Duration {
        let since = self.renewed_at.map_or(Duration::ZERO, |at| at.elapsed());
        self.interval().saturating_sub(since)
    }
}

/// Keeps the allocation while the keys stay the same, so that readers can compare by pointer. Keys that are absent from
/// a response stay: only other keys replace them.
fn set_ticket_keys(state: &mut LeaseState, keys: Option<TicketKeys>) {
    if keys.is_some() && state.ticket_keys.as_deref() != keys.as_ref() {
        state.ticket_keys = keys.map(Arc::new);
    }
}

fn set_assignment(state: &mut LeaseState, assignment: Assignment) {
    if state.assignment.as_deref() != Some(&assignment) {
        state.assignment = Some(Arc::new(assignment));
    }
}

fn set_error(state: &mut LeaseState, err: &ControlError) {
    state.last_error = Some(err.to_string());
    state.last_error_code = err.code().map(str::to_owned);
}

fn clear_error(state: &mut LeaseState) {
    state.last_error = None;
    state.last_error_code = None;
}

/// Limits a time to live to 30 ms to 1 hour, so that the keeper neither spins nor sleeps for ever.
fn clamp_ttl(ttl_ms: u64) -> Duration {
    Duration::from_millis(ttl_ms.clamp(30, 3_600_000))
}

/// The keeper does not renew more often for the keys of tickets, whatever the control plane asks for.
const LEAST_REFRESH: Duration = Duration::from_millis(10);
/// A name that stays in use for so many leases belongs to a live process.
const NAME_WAIT_LEASES: u32 = 2;
/// Time to live before the control plane has sent one.
const FALLBACK_TTL: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    /// A refused token must not hide behind a control plane that could not be reached before.
    #[test]
    fn each_kind_of_failure_of_an_outage_is_news() {
        let (url, message) = ("http://plane:7070".to_owned(), "unknown".to_owned());
        let unreachable = |reason: &str| ControlError::Unreachable {
            url: url.clone(),
            reason: reason.to_owned(),
        };
        let rejected = |code: &str| {
            let (code, message) = (code.to_owned(), message.clone());
            ControlError::Rejected { status: 503, code, message }
        };
        let (has_token, refusal) = (true, message.clone());
        let refused = ControlError::Unauthorized { url: url.clone(), message: refusal, has_token };
        let mut outage = Outage::default();
        assert!(outage.is_news(&unreachable("refused"), false));
        assert!(!outage.is_news(&unreachable("reset"), true));
        assert!(outage.is_news(&refused, true));
        assert!(!outage.is_news(&refused, true));
        assert!(outage.is_news(&rejected(code::NO_LEADER), true));
        assert!(outage.is_news(&rejected(code::STORE_READ_ONLY), true));
        // Another outage, of the same kind.
        assert!(outage.is_news(&rejected(code::STORE_READ_ONLY), false));
        let flapping = (0..1000).filter(|round| match round % 2 {
            0 => outage.is_news(&refused, true),
            _ => outage.is_news(&unreachable("refused"), true),
        });
        assert!(flapping.count() < 100);
    }
}
