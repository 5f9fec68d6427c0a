//! The server's membership of a fleet: lease, load reports, and experts that are assigned later.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, Fingerprint, TensorDigest, TensorDigests};
use control_api::{
    Assignment, ClientOptions, ConfigError, ControlClient, ControlError, LayerAssignment,
    LeaseError, LeaseKeeper, LeaseOptions, LeaseState, LeaseStatus, MemberState, ModelDescriptor,
    ModelDigests, RegisterRequest, WantedDigests, code,
};

use crate::compute::LoadError;
use crate::config::ServerConfig;
use crate::config::selection::check_assignment;
use crate::error::{StartError, is_name_conflict};
use crate::experts::Experts;
use crate::loader::{Loader, Pace};
use crate::metrics::ServerMetrics;
use crate::status::{Health, LoadCounters, LoadWindow};

use self::surplus::{Keep, Surplus};

mod surplus;

/// The description of the model for the control plane.
pub(crate) fn describe(checkpoint: &Checkpoint, fingerprint: Fingerprint) -> ModelDescriptor {
    let model = checkpoint.config();
    ModelDescriptor {
        fingerprint: fingerprint.to_string(),
        architecture: model.family.model_type.to_owned(),
        hidden: model.hidden as u32,
        moe_layers: model.moe_layers(),
        num_experts: model.num_experts,
        top_k: model.top_k as u32,
    }
}

/// A server that has joined a control plane.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) keeper: LeaseKeeper,
    pub(crate) assignment: Arc<Assignment>,
    /// For the digests, with their time limit.
    pub(crate) control: ControlClient,
}

/// Digests of a checkpoint's tensors.
#[derive(Debug)]
pub(crate) struct Digests {
    /// Those of the fingerprint.
    pub(crate) sampled: TensorDigests,
    /// Those of all bytes, if the server has read them.
    pub(crate) full: Option<TensorDigests>,
}

/// A client with the token, or with the one of the token's file.
pub(crate) fn control_client(
    config: &ServerConfig,
    url: &str,
    token: Option<String>,
) -> Result<ControlClient, ConfigError> {
    let mut options = ClientOptions::default();
    options.security = config.security.clone();
    match &config.token_file {
        Some(path) => ControlClient::with_options(url, None, options)?.with_token_file(path),
        None => ControlClient::with_options(url, token, options),
    }
}

/// Joins the control plane. Heartbeats begin at once, before any expert is loaded. Once the server is a member, it
/// sends `digests`, if it has them, to the control plane, for servers with other weights. With digests of all bytes it waits for the
/// answer, otherwise a task sends them.
///
/// # Errors
/// [`StartError::Weights`] with the first tensors that differ if the fleet has other weights,
/// [`StartError::Digests`] if the control plane does not take digests of all bytes, or [`StartError::Join`].
pub(crate) async fn join(
    config: &ServerConfig,
    url: &str,
    token: Option<String>,
    registration: RegisterRequest,
    digests: Option<Arc<Digests>>,
) -> Result<Joined, StartError> {
    let client = control_client(config, url, token)?;
    let failed = |source| StartError::Join { url: url.to_owned(), source };
    let keeper = LeaseKeeper::spawn(&client, registration, LeaseOptions::default());
    let keeper = keeper.map_err(failed)?;
    let control = client.with_timeout(DIGESTS_TIMEOUT);
    let assignment = match keeper.registered(config.register_timeout).await {
        Ok(assignment) => assignment,
        Err(source) => {
            if let LeaseError::Ended { code: Some(code), .. } = &source
                && code == code::MODEL_MISMATCH
                && let Some(digests) = &digests
                && let Some(tensors) = differences(&control, &digests.sampled, false).await
            {
                return Err(StartError::Weights { url: url.to_owned(), source, tensors });
            }
            return Err(failed(source));
        }
    };
    let Some(digests) = digests else { return Ok(Joined { keeper, assignment, control }) };
    if digests.full.is_none() {
        // They only make a later server's error more precise.
        let sender = control.clone();
        tokio::spawn(async move { send_digests(&sender, &digests).await });
        return Ok(Joined { keeper, assignment, control });
    }
    match send_digests(&control, &digests).await {
        Ok(()) => Ok(Joined { keeper, assignment, control }),
        Err(reason) => {
            // No expert is loaded yet: without the member the placement stays as it is.
            if let Err(error) = keeper.leave(DIGESTS_PAUSE).await {
                tracing::debug!(%error, "the lease will expire");
            }
            Err(StartError::Digests { url: url.to_owned(), reason: reason.to_string() })
        }
    }
}

/// Why the control plane did not take digests.
#[derive(Debug, thiserror::Error)]
enum DigestsError {
    /// It has other digests of all bytes.
    #[error("{source}; tensors that differ first: {tensors}")]
    Mismatch { source: ControlError, tensors: String },
    #[error(transparent)]
    Control(ControlError),
}

/// Sends the digests of all experts' tensors to the control plane.
async fn send_digests(client: &ControlClient, digests: &Digests) -> Result<(), DigestsError> {
    let hex = |digest: &[u8; 16]| digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let list = |digests: &TensorDigests| {
        let tensors = digests.tensors().iter().map(|tensor| control_api::TensorDigest {
            name: tensor.name.clone(),
            digest: hex(&tensor.digest),
        });
        tensors.collect()
    };
    let sent = ModelDigests {
        fingerprint: digests.sampled.fingerprint().to_string(),
        tensors: list(&digests.sampled),
        full: digests.full.as_ref().map(list).unwrap_or_default(),
    };
    let Err(source) = client.send_model_digests(&sent).await else { return Ok(()) };
    tracing::debug!(error = %source, "the control plane did not take the digests of the tensors");
    if source.code() == Some(code::MODEL_MISMATCH)
        && let Some(full) = &digests.full
        && let Some(tensors) = differences(client, full, true).await
    {
        return Err(DigestsError::Mismatch { source, tensors });
    }
    Err(DigestsError::Control(source))
}

/// The first tensors whose digests differ from those of the fleet; `None` if the control plane has none. `is_full`
/// compares digests of all bytes.
async fn differences(
    client: &ControlClient,
    digests: &TensorDigests,
    is_full: bool,
) -> Option<String> {
    let mut fleet = client.model_digests().await;
    for _ in 0..DIGESTS_TRIES {
        if fleet.is_ok() {
            break;
        }
        // The first member sends them just after its registration.
        tokio::time::sleep(DIGESTS_PAUSE).await;
        fleet = client.model_digests().await;
    }
    let fleet = fleet.ok()?;
    let tensors = if is_full { fleet.full } else { fleet.tensors };
    let tensors = tensors.into_iter().filter_map(|tensor| {
        let digest = u128::from_str_radix(&tensor.digest, 16).ok()?.to_be_bytes();
        Some(TensorDigest { name: tensor.name, digest })
    });
    let found = digests.differences(&tensors.collect::<Vec<_>>(), MAX_DIFFERENCES);
    (!found.is_empty()).then(|| found.join(", "))
}

/// The loaded experts of a store as an assignment, which the control plane takes.
pub(crate) fn holds(store: &dyn Experts) -> Assignment {
    let layers = store.loaded().into_iter();
    Assignment {
        layers: layers.map(|(layer, experts)| LayerAssignment { layer, experts }).collect(),
    }
}

/// Loads one more expert and counts it. Has no effect if it is loaded.
pub(crate) fn load_one(
    store: &dyn Experts,
    metrics: &ServerMetrics,
    layer: u32,
    expert: u32,
) -> Result<(), LoadError> {
    if store.has(layer, expert) {
        return Ok(());
    }
    let bytes = store.load_one(layer, expert)?;
    metrics.experts_loaded.inc();
    metrics.expert_bytes.add(bytes as i64);
    metrics.count_weights_read(bytes, false);
    Ok(())
}

/// The task that follows the lease.
pub(crate) struct Membership {
    pub(crate) keeper: Arc<LeaseKeeper>,
    pub(crate) store: Arc<dyn Experts>,
    pub(crate) load: Arc<LoadCounters>,
    pub(crate) health: Arc<Health>,
    /// The control plane, and the digests to send when it asks for them.
    pub(crate) control: ControlClient,
    pub(crate) digests: Option<Arc<Digests>>,
    pub(crate) loader: Arc<Loader>,
}

/// A load of assigned experts in the background.
struct Loading {
    stop: Arc<AtomicBool>,
    /// The assignment that it follows.
    assignment: Arc<Assignment>,
    end: EndOfLoad,
}

/// Returns the (layer, expert) pairs that could not be loaded. A load that was stopped has none.
type EndOfLoad = Pin<Box<dyn Future<Output = Vec<(u32, u32)>> + Send>>;

impl Loading {
    /// Waits for the end of a load; for ever without one. Cancel safe.
    async fn end(loading: &mut Option<Self>) -> Vec<(u32, u32)> {
        match loading {
            Some(loading) => (&mut loading.end).await,
            None => std::future::pending().await,
        }
    }
}

/// Why a membership ended that the server wanted to keep.
pub(crate) struct MembershipEnd {
    pub(crate) reason: String,
    /// Another live process has the name.
    pub(crate) is_name_conflict: bool,
}

impl From<String> for MembershipEnd {
    fn from(reason: String) -> Self {
        Self { reason, is_name_conflict: false }
    }
}

impl Membership {
    /// Follows the lease until its end. Returns `Ok` after the server has left, or the reason why the control
    /// plane ended the membership.
    ///
    /// Sends the digests of the tensors when the control plane asks for them, as it does after a restart. If other
    /// digests of all bytes are there by then, the membership ends: the fleet has other weights.
    ///
    /// Experts that are assigned later are loaded in the background, and reported as they come. A drain or another
    /// assignment stops a load after the experts that it is reading. Experts that are no longer assigned stay loaded
    /// while clients with an older placement ask for them: see [`Surplus`].
    pub(crate) async fn run(self) -> Result<(), MembershipEnd> {
        let mut state = self.keeper.state();
        let mut window = LoadWindow::new(&self.load);
        let mut held = holds(&*self.store);
        let mut num_renewals = 0;
        let mut was_draining = false;
        let mut surplus = Surplus::default();
        let mut failed: HashMap<(u32, u32), Failed> = HashMap::new();
        let mut sending = None;
        let mut loading: Option<Loading> = None;
        loop {
            let now = state.borrow_and_update().clone();
            // A drain may come from this process or from an operator, who may take it back.
            let is_draining = match now.member_state {
                Some(MemberState::Draining) => true,
                Some(MemberState::Serving) => false,
                _ => was_draining,
            };
            self.health.keeps_serving.store(now.keeps_serving, Ordering::Relaxed);
            if is_draining != was_draining {
                was_draining = is_draining;
                self.health.is_draining.store(is_draining, Ordering::Relaxed);
                match is_draining {
                    true => tracing::warn!("this server is drained: it is out of the placement"),
                    false => tracing::info!("the drain was taken back"),
                }
            }
            let is_refused = now.last_error_code.as_deref() == Some(code::UNAUTHORIZED);
            self.health.set_lease(now.status == LeaseStatus::Leased, is_refused);
            match now.status {
                LeaseStatus::Left => return Ok(()),
                LeaseStatus::Failed => {
                    let code = now.last_error_code.as_deref();
                    return Err(MembershipEnd {
                        reason: now.last_error.unwrap_or_else(|| "no reason given".to_owned()),
                        is_name_conflict: is_name_conflict(code),
                    });
                }
                _ => {}
            }
            failed.retain(|(layer, expert), failed| {
                failed.last.elapsed() < UNREADABLE_FOR && !self.store.has(*layer, *expert)
            });
            let is_stale = |loading: &Loading| {
                was_draining || now.assignment.as_ref() != Some(&loading.assignment)
            };
            match &loading {
                Some(loading) if is_stale(loading) => loading.stop.store(true, Ordering::Relaxed),
                None if !was_draining => loading = self.start_load(&now, &failed),
                _ => {}
            }
            let kept = self.kept_experts(&now, &mut surplus);
            if kept != held {
                held = kept;
                self.keeper.set_ready(held.clone());
            }
            // One report per heartbeat, because a second one would replace the first.
            if now.num_renewals != num_renewals {
                num_renewals = now.num_renewals;
                let mut report = window.next_report(&self.load, &held);
                report.memory_experts = Some(holds(&*self.store).num_experts() as u32);
                let unreadable = failed.iter().filter(|(_, failed)| failed.num_tries >= TRIES);
                report.unreadable = assignment_of(unreadable.map(|(pair, _)| *pair));
                self.keeper.report_load(report);
                if sending.is_none() && self.has(now.wanted_digests) {
                    sending = Some(Box::pin(self.send_again()));
                }
            }
            let sent = async {
                match &mut sending {
                    Some(sending) => sending.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = state.changed() => if changed.is_err() {
                    return Err("the heartbeat thread has ended".to_owned().into());
                },
                outcome = sent => {
                    outcome?;
                    sending = None;
                }
                missing = Loading::end(&mut loading) => {
                    loading = None;
                    for pair in missing {
                        let num_tries = failed.get(&pair).map_or(0, |failed| failed.num_tries) + 1;
                        failed.insert(pair, Failed { last: Instant::now(), num_tries });
                    }
                }
            }
        }
    }

    /// The loaded experts that plans may count on. Frees experts that no client needs any more.
    fn kept_experts(&self, state: &LeaseState, surplus: &mut Surplus) -> Assignment {
        let mut kept = holds(&*self.store);
        let Some(assignment) = state.assignment.as_deref().filter(|found| !found.is_empty()) else {
            self.health.metrics.experts_still_asked.set(0);
            return kept;
        };
        surplus.retain(|layer, expert| assignment.contains(layer, expert));
        let now = Instant::now();
        let mut num_still_asked = 0;
        for entry in &mut kept.layers {
            let layer = entry.layer;
            entry.experts.retain(|&expert| {
                if assignment.contains(layer, expert) {
                    return true;
                }
                match surplus.look(layer, expert, self.load.num_tokens_of(layer, expert), now) {
                    Keep::Reported => return true,
                    Keep::Unreported => {}
                    Keep::StillAsked => num_still_asked += 1,
                    Keep::Free => {
                        if self.store.unload(layer, expert) {
                            surplus.remove(layer, expert);
                            self.health.metrics.experts_loaded.dec();
                            self.health.metrics.expert_bytes.set(self.store.loaded_bytes() as i64);
                        }
                    }
                }
                false
            });
        }
        self.health.metrics.experts_still_asked.set(surplus.num_still_asked() as i64);
        if num_still_asked > 0 {
            tracing::warn!(
                num_experts = num_still_asked,
                "a client with an older placement still asks for experts that were taken from this server; they stay \
                 loaded meanwhile. Check that every client reaches the control plane"
            );
        }
        kept.layers.retain(|entry| !entry.experts.is_empty());
        kept
    }

    fn has(&self, wanted: WantedDigests) -> bool {
        match wanted {
            WantedDigests::None => false,
            WantedDigests::Full => self.digests.as_ref().is_some_and(|d| d.full.is_some()),
            WantedDigests::Any => self.digests.is_some(),
        }
    }

    /// Sends the digests, and waits after a failure. Returns an error if the fleet has other weights.
    async fn send_again(&self) -> Result<(), String> {
        let Some(digests) = &self.digests else { return Ok(()) };
        match send_digests(&self.control, digests).await {
            Ok(()) => {}
            Err(error @ DigestsError::Mismatch { .. }) => return Err(error.to_string()),
            Err(DigestsError::Control(error)) => {
                tracing::warn!(%error, "the control plane asked for the digests of the tensors, but did not take them");
                tokio::time::sleep(RESEND_PAUSE).await;
            }
        }
        Ok(())
    }

    /// Assigned experts that are not loaded, except the ones that failed a moment ago: a fault of the files does not end
    /// at once.
    fn newly_assigned(
        &self,
        state: &LeaseState,
        failed: &HashMap<(u32, u32), Failed>,
    ) -> Option<Vec<(u32, u32)>> {
        let assignment = state.assignment.as_deref()?;
        let model = self.store.checkpoint().config();
        if assignment.is_empty() || check_assignment(assignment, model).is_err() {
            return None;
        }
        let mut new = Vec::new();
        for LayerAssignment { layer, experts } in &assignment.layers {
            let missing = experts.iter().filter(|&&expert| !self.store.has(*layer, expert));
            let has_failed = |pair: &(u32, u32)| {
                failed.get(pair).is_some_and(|failed| failed.last.elapsed() < RELOAD_PAUSE)
            };
            new.extend(missing.map(|&expert| (*layer, expert)).filter(|pair| !has_failed(pair)));
        }
        (!new.is_empty()).then_some(new)
    }

    /// Starts to load assigned experts that are not loaded. `None` if there are none.
    fn start_load(
        &self,
        state: &LeaseState,
        failed: &HashMap<(u32, u32), Failed>,
    ) -> Option<Loading> {
        let new = self.newly_assigned(state, failed)?;
        let assignment = Arc::clone(state.assignment.as_ref()?);
        tracing::info!(num_experts = new.len(), "loading newly assigned experts");
        let stop = Arc::new(AtomicBool::new(false));
        let (loader, store) = (Arc::clone(&self.loader), Arc::clone(&self.store));
        let stopped = Arc::clone(&stop);
        let end = async move {
            let _progress = loader.progress.begin(new.len());
            let missing = loader.load(&store, new, Pace::Background, Arc::clone(&stopped)).await;
            let is_stopped = stopped.load(Ordering::Relaxed);
            if is_stopped {
                return Vec::new();
            }
            if let Some(((layer, expert), reason)) = missing.first() {
                let num_missing = missing.len();
                tracing::error!(num_missing, layer, expert, reason, "cannot load assigned experts");
            }
            missing.into_iter().map(|(pair, _)| pair).collect()
        };
        Some(Loading { stop, assignment, end: Box::pin(end) })
    }
}

/// Tries to load an assigned expert that have failed.
#[derive(Debug, Clone, Copy)]
struct Failed {
    last: Instant,
    num_tries: u32,
}

/// (layer, expert) pairs in any order as an assignment.
fn assignment_of(pairs: impl Iterator<Item = (u32, u32)>) -> Assignment {
    let mut layers: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (layer, expert) in pairs {
        layers.entry(layer).or_default().push(expert);
    }
    let sorted = |(layer, mut experts): (u32, Vec<u32>)| {
        experts.sort_unstable();
        LayerAssignment { layer, experts }
    };
    Assignment { layers: layers.into_iter().map(sorted).collect() }
}

/// Time limit for sending or fetching the digests of all tensors, a few megabytes.
const DIGESTS_TIMEOUT: Duration = Duration::from_secs(30);
const DIGESTS_TRIES: u32 = 4;
const DIGESTS_PAUSE: Duration = Duration::from_millis(250);
/// Pause before digests that were not taken are sent again.
const RESEND_PAUSE: Duration = Duration::from_secs(60);
/// Tensors that an error names.
const MAX_DIFFERENCES: usize = 5;
/// Pause between two tries to load an expert.
const RELOAD_PAUSE: Duration = Duration::from_secs(10);
/// Failed tries before an expert is reported: a source may be busy, or the control plane away, for a moment.
const TRIES: u32 = 2;
/// A failed expert is reported for so long after the last try. The control plane may then assign it again.
const UNREADABLE_FOR: Duration = Duration::from_secs(600);
