//! The model and the weights of a server that starts: from the checkpoint's files, or from other servers.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, Coverage, Fingerprint, TensorDigests};
use control_api::{ControlClient, LeaseKeeper, LoadReport};
use httpd::trust::tls::{ClientCertificates, Tls, is_exposed};
use p2p_core::bootstrap::TicketCheck;
use tokio::task::JoinHandle;

use crate::backend::{Backend, LoadedBackend};
use crate::compute::LoadProgress;
use crate::config::{Placement, ServerConfig, WeightsFrom};
use crate::error::StartError;
use crate::experts::Experts;
use crate::loader::{Loader, Observer, Pace};
use crate::members::Digests;
use crate::metrics::ServerMetrics;
use crate::peers::{
    Fetch, ListeningSource, ModelIdentity, ServersOnly, SourceConfig, WeightSource, WeightsSecret,
};
use crate::tickets::TicketGate;

/// The model of a server.
pub(super) struct Model {
    pub(super) checkpoint: Arc<Checkpoint>,
    pub(super) fingerprint: Fingerprint,
    /// `None` if the checkpoint has no weight files, and the fingerprint is the fleet's.
    pub(super) digests: Option<Arc<Digests>>,
}

/// Opens the checkpoint, logs its warnings, and reads the digests of its tensors. A server that takes its weights from
/// others opens the configuration alone. It takes the fingerprint of the fleet, and waits for it up to
/// [`peer_timeout`](crate::WeightsConfig::peer_timeout).
pub(super) async fn open_model(
    config: &ServerConfig,
    control: Option<&ControlClient>,
) -> Result<Model, StartError> {
    let from = config.weights.from;
    let refusal = match control {
        None => Some("the server has no control plane"),
        Some(_) => None,
    };
    if let (WeightsFrom::Peers, Some(reason)) = (from, refusal) {
        return Err(StartError::NoPeers { reason });
    }
    let lacks_files = match (from, control) {
        (WeightsFrom::Peers, Some(control)) => control,
        _ => match (open_checkpoint(config).await, control) {
            (Err(StartError::Open(error)), Some(control))
                if from == WeightsFrom::Auto && refusal.is_none() =>
            {
                let without = Checkpoint::open_without_weights(&config.model_dir);
                if without.is_err() || !has_model(control).await {
                    return Err(StartError::Open(error));
                }
                tracing::warn!(%error, "all experts come from other servers");
                control
            }
            (opened, _) => return opened,
        },
    };
    let checkpoint = Checkpoint::open_without_weights(&config.model_dir)?;
    let fingerprint = fleet_fingerprint(lacks_files, config.weights.peer_timeout).await?;
    Ok(Model { checkpoint: Arc::new(checkpoint), fingerprint, digests: None })
}

async fn open_checkpoint(config: &ServerConfig) -> Result<Model, StartError> {
    let (dir, verify) = (config.model_dir.clone(), config.verify);
    let threads = match config.num_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        num => num,
    };
    let opening = tokio::task::spawn_blocking(move || {
        let checkpoint = Checkpoint::open(dir)?;
        for warning in checkpoint.warnings() {
            tracing::warn!("{warning}");
        }
        let digests = |coverage| {
            let digests = checkpoint.digests(coverage, threads, &mut |_, _| {});
            digests.map_err(StartError::Fingerprint)
        };
        let sampled = digests(Coverage::Sampled)?;
        let full = (verify == Coverage::Full).then(|| digests(Coverage::Full)).transpose()?;
        let fingerprint = TensorDigests::fingerprint(&sampled);
        let digests = Some(Arc::new(Digests { sampled, full }));
        Ok::<_, StartError>(Model { checkpoint: Arc::new(checkpoint), fingerprint, digests })
    });
    opening.await.map_err(|_| StartError::LoadPanicked)?
}

async fn has_model(control: &ControlClient) -> bool {
    control.status().await.is_ok_and(|status| status.model.is_some())
}

/// The fingerprint of the fleet's model. Waits for it up to `bound`.
async fn fleet_fingerprint(
    control: &ControlClient,
    bound: Duration,
) -> Result<Fingerprint, StartError> {
    let begin = Instant::now();
    let mut is_first = true;
    loop {
        match control.status().await {
            Ok(status) => {
                if let Some(found) = status.model.and_then(|model| model.fingerprint.parse().ok()) {
                    return Ok(found);
                }
                if std::mem::take(&mut is_first) {
                    tracing::info!("waiting for the first server with weight files");
                }
            }
            Err(error) => tracing::warn!(%error, "cannot ask the control plane for its model"),
        }
        if begin.elapsed() >= bound {
            let url = control.base_url();
            return Err(StartError::NoModel { url, seconds: begin.elapsed().as_secs() });
        }
        tokio::time::sleep(RETRY_PERIOD.min(bound)).await;
    }
}

/// The way to read weights of other servers, if this server can.
pub(super) fn peers_of(
    config: &ServerConfig,
    model: &Model,
    control: Option<&ControlClient>,
) -> Option<(Fetch, ControlClient)> {
    let control = control?;
    let fetch = Fetch {
        identity: ModelIdentity::new(&model.checkpoint, model.fingerprint),
        local: config.data_addr.ip(),
        secret: secret_of(config),
        security: config.security.clone(),
        wants_ticket: config.wants_tickets(),
        patience: config.weights.peer_timeout,
        chunk_timeout: config.weights.chunk_timeout,
        shape: model.checkpoint.config().into(),
    };
    Some((fetch, control.clone()))
}

/// The address on which the server offers its weights to others. `None` if it offers none.
pub(super) fn source_addr(config: &ServerConfig) -> Option<SocketAddr> {
    let is_member = matches!(config.placement, Placement::ControlPlane { .. });
    let is_offered = is_member && config.weights.read_limit > 0;
    let default = SocketAddr::new(config.data_addr.ip(), 0);
    is_offered.then(|| config.weights.listen.unwrap_or(default))
}

/// The secret of the port for weights. There is none where tickets decide.
fn secret_of(config: &ServerConfig) -> Option<WeightsSecret> {
    let token = config.secret.as_ref().filter(|_| !config.wants_tickets());
    token.map(WeightsSecret::of)
}

/// Returns true if a listener on `addr` would admit every process of other hosts, and plain text is not allowed.
/// A required certificate counts: the port for weights admits those of servers, and the data plane any.
pub(super) fn admits_all(config: &ServerConfig, addr: SocketAddr) -> bool {
    let needs_proof =
        config.wants_tickets() || config.secret.is_some() || needs_certificates(config);
    !needs_proof && !config.security.insecure && is_exposed(addr)
}

/// Returns true if peers without a certificate are refused.
fn needs_certificates(config: &ServerConfig) -> bool {
    let is_required = |tls: &Tls| tls.clients() == ClientCertificates::Required;
    config.security.for_listener().is_some_and(is_required)
}

/// A source of weights whose engine starts on a thread of its own.
pub(super) struct OpeningSource(JoinHandle<Result<ListeningSource, StartError>>);

/// Begins to open the source of weights for other servers, while the caller opens the model. `None` if they may not read
/// any: the configuration says so, or the port would admit every process of other hosts. `gate` checks tickets, if the
/// server wants some.
pub(super) fn begin_source(
    config: &ServerConfig,
    gate: Option<Arc<TicketGate>>,
) -> Option<OpeningSource> {
    let bind = source_addr(config)?;
    if admits_all(config, bind) {
        tracing::warn!(
            addr = %bind,
            "other servers cannot read weights of this one: their port is reachable from other hosts, and nothing says \
             who may read; use tickets, give all servers one token, or listen for them on loopback (--weights-listen)"
        );
        return None;
    }
    let check = match gate {
        Some(gate) => Some(gate as Arc<dyn TicketCheck>),
        None => needs_certificates(config).then(|| Arc::new(ServersOnly) as Arc<dyn TicketCheck>),
    };
    let (advertised, data_ip) = (config.advertise_addr.clone(), config.data_addr.ip());
    let (secret, tls) = (secret_of(config), config.security.for_listener().cloned());
    let limit = config.weights.read_limit;
    Some(OpeningSource(tokio::spawn(async move {
        let advertise = match advertised {
            Some(addr) => ip_of(&addr).await,
            None => Some(data_ip),
        };
        let source = SourceConfig { bind, advertise, check, secret, tls, limit };
        let listening = tokio::task::spawn_blocking(move || source.listen()).await;
        Ok(listening.map_err(|_| StartError::LoadPanicked)??)
    })))
}

/// Waits for a source that is being opened, and returns it with its address for other servers.
pub(super) async fn finish_source(
    opening: OpeningSource,
    model: &Model,
    advertised: &str,
    metrics: &ServerMetrics,
) -> Result<(WeightSource, String), StartError> {
    let listening = opening.0.await.map_err(|_| StartError::LoadPanicked)??;
    let identity = ModelIdentity::new(&model.checkpoint, model.fingerprint);
    let source = WeightSource::new(listening, identity, metrics.clone());
    let host = advertised.rsplit_once(':').map_or(advertised, |(host, _)| host);
    let addr = format!("{host}:{}", source.port());
    Ok((source, addr))
}

/// The IP address of an advertised address. `None` if its name has none, or the resolver does not answer within
/// [`RESOLVE_TIMEOUT`].
async fn ip_of(advertised: &str) -> Option<IpAddr> {
    if let Ok(addr) = advertised.parse::<SocketAddr>() {
        return Some(addr.ip());
    }
    let lookup = tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host(advertised));
    let reason = match lookup.await {
        Ok(Ok(mut addrs)) => match addrs.next() {
            Some(addr) => return Some(addr.ip()),
            None => "the name has no address".to_owned(),
        },
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", RESOLVE_TIMEOUT.as_secs()),
    };
    tracing::warn!(
        advertised,
        reason,
        "the port for weights has no address of the advertised name"
    );
    None
}

/// Loads the first experts of a server: from files with all threads, then from other servers. Reports the progress to
/// `progress` and, with a lease, to the control plane. Calls `publish` when the store is there, before the experts of
/// other servers.
pub(super) async fn load_first(
    backend: Box<dyn Backend>,
    model: &Model,
    loader: &Loader,
    wanted: Vec<(u32, u32)>,
    keeper: Option<&LeaseKeeper>,
    progress: impl FnMut(LoadProgress) + Send + 'static,
    publish: impl FnOnce(&dyn LoadedBackend),
) -> Result<Box<dyn LoadedBackend>, StartError> {
    let num_experts = wanted.len();
    let _progress = loader.progress.begin(num_experts);
    let loading = load_parts(backend, model, loader, wanted, progress, publish);
    tokio::pin!(loading);
    loop {
        tokio::select! {
            loaded = &mut loading => return loaded,
            () = tokio::time::sleep(REPORT_PERIOD) => if let Some(keeper) = keeper {
                keeper.report_load(LoadReport { loading: loader.progress.report(), ..LoadReport::default() });
            },
        }
    }
}

async fn load_parts(
    backend: Box<dyn Backend>,
    model: &Model,
    loader: &Loader,
    wanted: Vec<(u32, u32)>,
    progress: impl FnMut(LoadProgress) + Send + 'static,
    publish: impl FnOnce(&dyn LoadedBackend),
) -> Result<Box<dyn LoadedBackend>, StartError> {
    let num_experts = wanted.len();
    let mut rooms = BTreeMap::<u32, usize>::new();
    wanted.iter().for_each(|(layer, _)| *rooms.entry(*layer).or_default() += 1);
    let split = loader.split(&model.checkpoint, wanted).await;
    let files = split.files_by_layer();
    let progress = Arc::new(Mutex::new(progress));
    let (checkpoint, shared) = (Arc::clone(&model.checkpoint), Arc::clone(&progress));
    let (state, metrics) = (Arc::clone(&loader.progress), loader.metrics.clone());
    let loading = tokio::task::spawn_blocking(move || {
        let mut done = LoadProgress { num_loaded: 0, num_experts, loaded_bytes: 0 };
        let backend = backend.load(checkpoint, &files, &rooms, &mut |now| {
            let bytes = now.loaded_bytes - done.loaded_bytes;
            state.add(bytes, false);
            metrics.count_weights_read(bytes, false);
            done = LoadProgress { num_experts, ..now };
            shared.lock().unwrap_or_else(PoisonError::into_inner)(done);
        });
        backend.map(|backend| (backend, done))
    });
    let (backend, mut done) = loading.await.map_err(|_| StartError::LoadPanicked)??;
    publish(&*backend);
    if split.peers.is_empty() {
        return Ok(backend);
    }
    loader.progress.observe(Some(Observer(Box::new(move |bytes| {
        done.num_loaded += 1;
        done.loaded_bytes += bytes;
        progress.lock().unwrap_or_else(PoisonError::into_inner)(done);
    }))));
    let outcome = load_from_peers(&backend.experts(), loader, split.peers).await;
    loader.progress.observe(None);
    outcome.map(|()| backend)
}

/// Loads experts until none is missing, or no server gives another one for too long.
async fn load_from_peers(
    store: &Arc<dyn Experts>,
    loader: &Loader,
    mut rest: Vec<(u32, u32)>,
) -> Result<(), StartError> {
    let num_experts = rest.len();
    let patience = loader.peers.as_ref().map_or(Duration::ZERO, |(fetch, _)| fetch.patience);
    let mut since = Instant::now();
    loop {
        let num_wanted = rest.len();
        let stop = Arc::new(AtomicBool::new(false));
        let missing = loader.load(store, rest, Pace::First, stop).await;
        let Some(((layer, expert), reason)) = missing.first().cloned() else { return Ok(()) };
        if missing.len() < num_wanted {
            since = Instant::now();
        }
        let is_final = loader.from == WeightsFrom::Auto && loader.has_files;
        if is_final || since.elapsed() >= patience {
            let (missing, seconds) = (missing.len(), since.elapsed().as_secs());
            return Err(StartError::Missing {
                missing,
                num_experts,
                seconds,
                layer,
                expert,
                reason,
            });
        }
        tracing::warn!(
            missing = missing.len(),
            layer,
            expert,
            reason,
            "waiting for servers with experts"
        );
        rest = missing.into_iter().map(|(expert, _)| expert).collect();
        tokio::time::sleep(RETRY_PERIOD).await;
    }
}

/// Pause before another attempt.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// Time between two reports of a load's progress.
const REPORT_PERIOD: Duration = Duration::from_millis(500);
/// Longest wait for one answer of the resolver.
pub(super) const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);
