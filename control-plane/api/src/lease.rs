//! The keeper of a member's lease: heartbeats on a thread of their own, never behind device calls
//! or the loading of weights.

use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::backoff::Backoff;
use crate::client::ControlClient;
use crate::error::{ConfigError, ControlError, code};
use crate::types::{
    Assignment, DrainRequest, LeaseRequest, LoadReport, MemberId, MemberState, ReadyRequest,
    RegisterRequest,
};

/// Pace of a [`LeaseKeeper`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LeaseOptions {
    /// First pause after a failed request; doubles up to [`max_backoff`](Self::max_backoff).
    pub first_backoff: Duration,
    /// Longest pause after a failed request.
    pub max_backoff: Duration,
}

impl Default for LeaseOptions {
    fn default() -> Self {
        Self { first_backoff: Duration::from_millis(50), max_backoff: Duration::from_secs(1) }
    }
}

/// Where a [`LeaseKeeper`] stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseStatus {
    /// No lease yet.
    #[default]
    Registering,
    /// The last renewal succeeded and its lease has not run out.
    Leased,
    /// The control plane does not answer or has forgotten the member. Clients are served on; the
    /// keeper goes on trying.
    Lost,
    /// Over for good: the first registration was refused, or another process has taken the name.
    /// [`LeaseState::last_error`] says why.
    Failed,
    /// Over for good: left.
    Left,
}

/// Condition of a [`LeaseKeeper`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseState {
    /// Where the keeper stands.
    pub status: LeaseStatus,
    /// Identity, from the first registration on.
    pub member_id: Option<MemberId>,
    /// What the control plane takes the member for.
    pub member_state: Option<MemberState>,
    /// What to hold, from the first registration on. Changes are rare; load, then report with
    /// [`LeaseKeeper::set_ready`].
    pub assignment: Option<Arc<Assignment>>,
    /// Newest placement epoch heard of.
    pub epoch: u64,
    /// Time to live of the lease.
    pub lease_ttl: Duration,
    /// Why the last request failed; cleared by the next success.
    pub last_error: Option<String>,
    /// Stable code of the last refusal, see [`code`].
    pub last_error_code: Option<String>,
    /// Registrations so far; more than one means that the lease was lost in between.
    pub num_registrations: u64,
    /// Successful renewals so far.
    pub num_renewals: u64,
}

/// Why a [`LeaseKeeper`] could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The thread could not be started.
    #[error("the heartbeat thread could not be started: {0}")]
    Thread(#[source] io::Error),
    /// The HTTP client could not be set up.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The keeper has ended for good before.
    #[error("the lease is over: {reason}")]
    Over {
        /// The last error.
        reason: String,
        /// Its stable code, if the control plane gave one.
        code: Option<String>,
    },
    /// Not done within the bound that the caller gave.
    #[error("the control plane did not confirm within {bound_ms} ms (last error: {last_error})")]
    Timeout {
        /// The bound in milliseconds.
        bound_ms: u64,
        /// The last error, or `none`.
        last_error: String,
    },
}

/// Registers a member and keeps its lease alive.
///
/// Renews every third of the lease's time to live. Registers again by itself, with the same name
/// and incarnation, when the control plane has lost the member or the lease has run out (after a
/// freeze, a partition, a restart of the control plane). Dropping it stops the heartbeats without
/// leaving: the lease then runs out.
#[derive(Debug)]
pub struct LeaseKeeper {
    orders: watch::Sender<Orders>,
    load: Arc<Mutex<Option<LoadReport>>>,
    state: watch::Receiver<LeaseState>,
}

impl LeaseKeeper {
    /// Starts the heartbeat thread, which registers at once.
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
        let (orders, orders_rx) = watch::channel(Orders::default());
        let (state_tx, state) = watch::channel(LeaseState::default());
        let load = Arc::new(Mutex::new(None));
        let worker = Worker {
            backoff: Backoff::new(options.first_backoff, options.max_backoff),
            client,
            registration,
            orders: orders_rx,
            load: Arc::clone(&load),
            state: state_tx,
            reported: None,
            renewed_at: None,
            assignment_version: 0,
            is_drained: false,
        };
        let body = move || {
            runtime.block_on(worker.run());
            // A name look-up that hangs must not keep the thread.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("switchyard-lease".to_owned());
        thread.spawn(body).map_err(LeaseError::Thread)?;
        Ok(Self { orders, load, state })
    }

    /// A receiver of the keeper's condition.
    pub fn state(&self) -> watch::Receiver<LeaseState> {
        self.state.clone()
    }

    /// Waits for the first registration and gives what to load, at most for `bound`.
    pub async fn registered(&self, bound: Duration) -> Result<Arc<Assignment>, LeaseError> {
        let state = self.wait(bound, |state| state.assignment.is_some()).await?;
        Ok(state.assignment.unwrap_or_default())
    }

    /// Says that these experts are loaded and answer. The keeper reports it, and reports it again
    /// after every new registration.
    pub fn set_ready(&self, holds: Assignment) {
        self.orders.send_modify(|orders| orders.holds = Some(Arc::new(holds)));
    }

    /// Waits until the control plane has the member in its placement, at most for `bound`.
    pub async fn serving(&self, bound: Duration) -> Result<(), LeaseError> {
        let serves = |state: &LeaseState| {
            state.status == LeaseStatus::Leased && state.member_state == Some(MemberState::Serving)
        };
        self.wait(bound, serves).await.map(drop)
    }

    /// Hands over load to travel with the next renewal; a report not yet sent is replaced.
    pub fn report_load(&self, report: LoadReport) {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
    }

    /// Asks to be taken out of the placement and waits for the confirmation, at most for `bound`.
    /// The lease lives on until [`leave`](Self::leave). Also drains after the bound has passed.
    pub async fn drain(&self, bound: Duration) -> Result<(), LeaseError> {
        self.orders.send_modify(|orders| orders.goal = orders.goal.max(Goal::Drain));
        let drained = |state: &LeaseState| state.member_state == Some(MemberState::Draining);
        self.wait(bound, drained).await.map(drop)
    }

    /// Leaves for good and waits for the confirmation, at most for `bound`. When the control
    /// plane cannot be reached the lease runs out by itself.
    pub async fn leave(&self, bound: Duration) -> Result<(), LeaseError> {
        let deadline = Instant::now() + bound;
        self.orders.send_modify(|orders| {
            orders.goal = orders.goal.max(Goal::Leave);
            orders.leave_by.get_or_insert(deadline);
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
        Err(LeaseError::Over { reason, code: settled.last_error_code })
    }
}

/// What the keeper is to achieve, in rising order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Goal {
    #[default]
    Run,
    Drain,
    Leave,
}

#[derive(Clone, Debug, Default)]
struct Orders {
    goal: Goal,
    holds: Option<Arc<Assignment>>,
    leave_by: Option<Instant>,
}

struct Worker {
    client: ControlClient,
    registration: RegisterRequest,
    orders: watch::Receiver<Orders>,
    load: Arc<Mutex<Option<LoadReport>>>,
    state: watch::Sender<LeaseState>,
    backoff: Backoff,
    /// What the control plane has been told to be loaded, since the last registration.
    reported: Option<Arc<Assignment>>,
    /// When the request that last renewed the lease was sent: the lease cannot end before this
    /// plus its time to live.
    renewed_at: Option<Instant>,
    /// Version of the assignment in the published state.
    assignment_version: u64,
    is_drained: bool,
}

/// What to do after one step of the worker.
enum Next {
    Sleep(Duration),
    Over,
}

impl Worker {
    async fn run(mut self) {
        loop {
            // Orders that arrive from here on interrupt the sleep below.
            let orders = self.orders.borrow_and_update().clone();
            match self.step(&orders).await {
                Next::Over => return,
                Next::Sleep(pause) => {
                    let changed = tokio::time::timeout(pause, self.orders.changed()).await;
                    if matches!(changed, Ok(Err(_))) {
                        debug!(name = self.registration.name, "heartbeats stop");
                        return;
                    }
                }
            }
        }
    }

    async fn step(&mut self, orders: &Orders) -> Next {
        let member = self.state.borrow().member_id.clone();
        let is_leased = self.renewed_at.is_some();
        if orders.goal == Goal::Leave {
            return self.leave(orders, member).await;
        }
        let Some(member) = member.filter(|_| is_leased) else {
            return self.register().await;
        };
        if orders.goal == Goal::Drain && !self.is_drained {
            return self.drain(&member).await;
        }
        if let Some(holds) = &orders.holds
            && self.reported.as_ref() != Some(holds)
            && orders.goal == Goal::Run
        {
            return self.ready(&member, holds).await;
        }
        self.renew(&member).await
    }

    async fn register(&mut self) -> Next {
        let mut request = self.registration.clone();
        if let Some(holds) = &self.orders.borrow().holds {
            request.holds = Assignment::clone(holds);
        }
        let sent_at = Instant::now();
        let client = self.client.clone();
        let response = match self.interruptible(client.register(&request)).await {
            None => return Next::Sleep(Duration::ZERO),
            Some(Ok(response)) => response,
            Some(Err(err)) => {
                let is_first = self.state.borrow().num_registrations == 0;
                let is_superseded = err.code() == Some(code::SUPERSEDED);
                if is_superseded || (is_first && !err.is_transient()) {
                    return self.fail(&err);
                }
                return self.retry_later(&err);
            }
        };
        self.renewed_at = Some(sent_at);
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
            state.epoch = response.epoch;
            state.lease_ttl = sane_ttl(response.lease_ttl_ms);
            clear_error(state);
            state.num_registrations += 1;
        });
        // At once: an order may be waiting to be passed on.
        let has_order = {
            let orders = self.orders.borrow();
            orders.holds.is_some() || orders.goal != Goal::Run
        };
        Next::Sleep(if has_order { Duration::ZERO } else { self.interval() })
    }

    async fn renew(&mut self, member: &MemberId) -> Next {
        let load = self.load.lock().unwrap_or_else(PoisonError::into_inner).take();
        let request = LeaseRequest {
            incarnation: self.registration.incarnation,
            assignment_version: self.assignment_version,
            load,
        };
        let sent_at = Instant::now();
        // An answer that takes longer than a heartbeat interval is worth no more than a new try.
        let client = self.client.with_timeout(self.client.options().timeout.min(self.ttl() / 3));
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
                    state.epoch = response.epoch;
                    state.lease_ttl = sane_ttl(response.lease_ttl_ms);
                    clear_error(state);
                    state.num_renewals += 1;
                });
                let must_report = self.reported.is_none() && self.orders.borrow().holds.is_some();
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
                    clear_error(state);
                });
                Next::Sleep(self.until_renewal())
            }
            Err(err) => self.recover(&err),
        }
    }

    async fn leave(&mut self, orders: &Orders, member: Option<MemberId>) -> Next {
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
                if orders.leave_by.is_none_or(|by| Instant::now() >= by) {
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
                Next::Over
            }
        }
    }

    /// After a failed request about a lease that was thought to be held.
    fn recover(&mut self, err: &ControlError) -> Next {
        match err.code() {
            Some(code::SUPERSEDED) => self.fail(err),
            Some(code::UNKNOWN_MEMBER | code::LEASE_EXPIRED) => {
                warn!(name = self.registration.name, error = %err, "lease lost, registering again");
                self.renewed_at = None;
                self.state.send_modify(|state| {
                    state.status = LeaseStatus::Lost;
                    set_error(state, err);
                });
                // A pause although the way is clear: a control plane that forgets whom it has just
                // registered must not be asked in a tight loop.
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
        let is_new = self.state.borrow().last_error.is_none();
        if is_new {
            warn!(name = self.registration.name, error = %err, "control plane fails, trying on");
        } else {
            debug!(name = self.registration.name, error = %err, "control plane still fails");
        }
        self.state.send_modify(|state| {
            state.status = status;
            set_error(state, err);
        });
        Next::Sleep(self.backoff.next_delay().min(self.interval()))
    }

    fn fail(&mut self, err: &ControlError) -> Next {
        // Whoever waits for the registration gets the error itself, once.
        debug!(name = self.registration.name, error = %err, "the lease is over");
        self.state.send_modify(|state| {
            state.status = LeaseStatus::Failed;
            set_error(state, err);
        });
        Next::Over
    }

    /// Runs a request unless the keeper is told to leave or is dropped meanwhile.
    async fn interruptible<F: Future>(&self, request: F) -> Option<F::Output> {
        let mut orders = self.orders.clone();
        let leaving = async {
            // An error means that the keeper was dropped.
            let _ = orders.wait_for(|orders| orders.goal == Goal::Leave).await;
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

    /// A third of the time to live, minus up to a tenth of that, so that a fleet spreads out.
    fn interval(&self) -> Duration {
        (self.ttl() / 3).mul_f64(rand::random_range(0.9..=1.0))
    }

    fn until_renewal(&self) -> Duration {
        let since = self.renewed_at.map_or(Duration::ZERO, |at| at.elapsed());
        self.interval().saturating_sub(since)
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

/// Keeps a nonsensical time to live from making the keeper spin or sleep for ever.
fn sane_ttl(ttl_ms: u64) -> Duration {
    Duration::from_millis(ttl_ms.clamp(30, 3_600_000))
}

/// Pace before the control plane has named one.
const FALLBACK_TTL: Duration = Duration::from_secs(3);
