//! The start of a server, step by step. This file alone knows both kinds of data threads.

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, Fingerprint, TensorDigests};
use control_api::placement::cannot_be_reached;
use control_api::{ControlClient, RegisterRequest};
use httpd::trust::Role;
use p2p_core::bootstrap::{Listener, ListenerConfig, TicketCheck};
use protocol::ModelShape;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::RunningServer;
use super::supervision::Supervision;
use super::weights;
use crate::backend::{Backend, LoadedBackend};
use crate::clients::{Admission, serve_clients};
use crate::compute::LoadProgress;
use crate::config::selection::check_assignment;
use crate::config::{Placement, ServerConfig};
use crate::cpu::CpuBackend;
#[cfg(feature = "device")]
use crate::device::{DeviceBackend, OpeningGpu};
use crate::error::StartError;
use crate::http;
use crate::loader::Loader;
use crate::members::{self, Membership};
use crate::metrics::ServerMetrics;
use crate::peers::WeightSource;
use crate::status::Health;
use crate::tickets::TicketGate;

pub(super) async fn start(
    config: ServerConfig,
    registry: prometheus::Registry,
    progress: impl FnMut(LoadProgress) + Send + 'static,
) -> Result<RunningServer, StartError> {
    let security = &config.security;
    security.check_listener(config.data_addr)?;
    if let Some(addr) = config.metrics_addr {
        security.check_listener(addr)?;
    }
    if let Some(addr) = weights::source_addr(&config) {
        security.check_listener(addr)?;
    }
    check_admission(&config)?;
    let other = weights::source_addr(&config).filter(|addr| addr.ip() != config.data_addr.ip());
    for addr in [Some(config.data_addr), other].into_iter().flatten() {
        if let Some(exposure) = security.exposure(addr) {
            tracing::warn!("{exposure}");
        }
    }
    let control = control_client(&config)?;
    #[cfg(feature = "device")]
    let opening = config.device.map(|options| OpeningGpu::begin(options.name));
    let gate = ticket_gate(&config, Role::Client);
    let weights_gate = ticket_gate(&config, Role::Server);
    // While the model is opened, which takes as long on small models.
    let opening_source = weights::begin_source(&config, weights_gate.clone());
    let model = weights::open_model(&config, control.as_ref()).await?;
    let (checkpoint, fingerprint) = (Arc::clone(&model.checkpoint), model.fingerprint);
    let full = model.digests.as_ref().and_then(|digests| digests.full.as_ref());
    let full_digest = full.map(TensorDigests::fingerprint);
    let shape = shape_of(&checkpoint, fingerprint);
    #[cfg(feature = "device")]
    let mut backend = open_backend(&config, &checkpoint, &shape, opening).await?;
    #[cfg(not(feature = "device"))]
    let mut backend = open_backend(&config, &checkpoint, &shape).await?;
    let (device, frames) = (backend.device_name(), backend.frame_limits());
    if let Placement::Static(selection) = &config.placement {
        selection.resolve(checkpoint.config())?;
    }
    let listener_config =
        backend.listener_config(&config, listener_config(&config, gate.clone()))?;
    let listener = Listener::bind(config.data_addr, listener_config).await?;
    let data_addr = listener.local_addr();
    let metrics_listener = match config.metrics_addr {
        Some(addr) => Some(bind_metrics(addr).await?),
        None => None,
    };
    let metrics_addr = metrics_listener.as_ref().and_then(|tcp| tcp.local_addr().ok());
    if let Some(tls) = &config.security.tls {
        httpd::register_tls_metrics(&registry, tls.clone())?;
    }
    let metrics = ServerMetrics::new(registry)?;
    let has_control_plane = matches!(config.placement, Placement::ControlPlane { .. });
    let health = Arc::new(Health {
        metrics: metrics.clone(),
        recorder: config.recorder.clone(),
        handshakes: listener.stats(),
        rendering: Mutex::new(()),
        data: OnceLock::new(),
        is_draining: AtomicBool::new(false),
        keeps_serving: AtomicBool::new(false),
        needs_lease: has_control_plane,
        has_lease: AtomicBool::new(false),
        had_lease: AtomicBool::new(false),
        is_refused: AtomicBool::new(false),
        tls: config.security.tls.clone(),
    });
    // Served before the experts are loaded, so that a monitor can tell a load from a hang.
    let (stop, stopped) = watch::channel(false);
    if let Some(tcp) = metrics_listener {
        tokio::spawn(httpd::serve(
            tcp,
            http::router(Arc::clone(&health)),
            config.security.for_listener().cloned(),
            httpd::Limits::default(),
            metrics.http.clone(),
            stopped.clone(),
        ));
    }

    let advertised = advertised_addr(&config, data_addr).await?;
    let source = match opening_source {
        Some(opening) => {
            Some(weights::finish_source(opening, &model, &advertised, &metrics).await?)
        }
        None => None,
    };
    let (source, weights_addr) = source.unzip();
    let source_store = source.map(|source: WeightSource| {
        let store = source.store();
        tokio::spawn(source.run(stopped.clone()));
        store
    });
    let mut registration = RegisterRequest::new(
        config.name.clone(),
        advertised,
        members::describe(&checkpoint, fingerprint),
    );
    registration.weights_addr = weights_addr;
    registration.metrics_addr = metrics_addr.map(|addr| addr.to_string());
    registration.capacity_experts = config.capacity_experts;
    registration.zone.clone_from(&config.zone);
    registration.needs_tickets = gate.is_some();
    registration.plain_text = config.security.for_listener().is_none();
    let incarnation = registration.incarnation;
    let loader = Loader {
        name: config.name.clone(),
        from: config.weights.from,
        has_files: model.digests.is_some(),
        peers: weights::peers_of(&config, &model, control.as_ref()),
        metrics: metrics.clone(),
        progress: Arc::default(),
    };
    let (control, assignment) = match &config.placement {
        Placement::ControlPlane { url, token } => {
            let digests = model.digests.clone();
            let joined = members::join(&config, url, token.clone(), registration, digests).await?;
            for gate in gate.iter().chain(&weights_gate) {
                let lease = joined.keeper.state();
                if lease.borrow().ticket_keys.is_none() {
                    return Err(StartError::NoTicketKeys { url: url.clone() });
                }
                gate.follow(incarnation, lease);
            }
            (Some((Arc::new(joined.keeper), joined.control)), joined.assignment)
        }
        Placement::Static(selection) => (None, Arc::new(selection.resolve(checkpoint.config())?)),
    };
    let keeper = control.as_ref().map(|(keeper, _)| Arc::clone(keeper));
    if !assignment.is_empty() {
        check_assignment(&assignment, checkpoint.config()).map_err(StartError::Assignment)?;
    }

    let load_began = Instant::now();
    let wanted = assignment.layers.iter();
    let wanted = wanted.flat_map(|entry| entry.experts.iter().map(|&id| (entry.layer, id)));
    let publish = |backend: &dyn LoadedBackend| {
        if let Some(store) = &source_store {
            // This is the only place that sets it.
            let _ = store.set(backend.experts());
        }
    };
    let backend = weights::load_first(
        backend,
        &model,
        &loader,
        wanted.collect(),
        keeper.as_deref(),
        progress,
        publish,
    )
    .await?;
    let store = backend.experts();
    let held = members::holds(&*store);
    metrics.load_seconds.set(load_began.elapsed().as_secs_f64());
    metrics.experts_loaded.set(held.num_experts() as i64);
    metrics.expert_bytes.set(store.loaded_bytes() as i64);

    let (data, data_end) = backend.start(&config, &metrics)?;
    data.load().set_loading(Arc::clone(&loader.progress));
    // Cannot be set yet: this is the only place that sets it.
    let _ = health.data.set(Arc::clone(data.status()));
    health.set_lease(keeper.is_some(), false);
    if let Some(keeper) = &keeper {
        keeper.set_ready(held.clone());
    }

    let admission = Admission {
        name: config.name.clone(),
        shape,
        frames,
        incarnation,
        health: Arc::clone(&health),
        keeper: keeper.clone(),
        data: Arc::clone(&data),
    };
    let listening = tokio::spawn(serve_clients(listener, Arc::new(admission), stopped));
    let member = control.map(|(keeper, control)| Membership {
        keeper,
        store: Arc::clone(&store),
        load: Arc::clone(data.load()),
        health: Arc::clone(&health),
        loader: Arc::new(loader),
        control,
        digests: model.digests,
    });
    let (ended, end) = watch::channel(None);
    let (stop_all, data_plane) = (stop.clone(), Arc::clone(&data));
    let supervision =
        Supervision { data_end, member, listening, stop: stop_all, data: data_plane, end: ended };
    tokio::spawn(supervision.run());
    tracing::info!(
        name = config.name,
        %data_addr,
        experts = held.num_experts(),
        bytes = store.loaded_bytes(),
        device,
        "serving"
    );
    Ok(RunningServer {
        config,
        data_addr,
        metrics_addr,
        full_digest,
        health,
        store,
        keeper,
        data,
        stop,
        end,
    })
}

/// The client of the control plane, if the server has one.
fn control_client(config: &ServerConfig) -> Result<Option<ControlClient>, StartError> {
    match &config.placement {
        Placement::ControlPlane { url, token } => {
            Ok(Some(members::control_client(config, url, token.clone())?))
        }
        Placement::Static(_) => Ok(None),
    }
}

/// Opens the GPU of the configuration, or takes CPUs without one.
#[cfg_attr(not(feature = "device"), allow(clippy::unused_async, unused_variables))]
async fn open_backend(
    config: &ServerConfig,
    checkpoint: &Checkpoint,
    shape: &ModelShape,
    #[cfg(feature = "device")] opening: Option<OpeningGpu>,
) -> Result<Box<dyn Backend>, StartError> {
    #[cfg(feature = "device")]
    if let Some((options, opening)) = config.device.zip(opening) {
        return Ok(Box::new(DeviceBackend::open(options, opening, config, checkpoint).await?));
    }
    Ok(Box::new(CpuBackend::new(config, shape)?))
}

fn shape_of(checkpoint: &Checkpoint, fingerprint: Fingerprint) -> ModelShape {
    let model = checkpoint.config();
    ModelShape {
        fingerprint: fingerprint.0,
        hidden: model.hidden as u32,
        num_layers: model.num_layers,
        num_experts: model.num_experts,
        top_k: model.top_k as u32,
    }
}

/// Checks that clients of other hosts need a ticket, the secret or a certificate, unless plain text is allowed.
fn check_admission(config: &ServerConfig) -> Result<(), StartError> {
    match weights::admits_all(config, config.data_addr) {
        true => Err(StartError::AdmitsAll { addr: config.data_addr }),
        false => Ok(()),
    }
}

/// The check of the tickets of `role`, if the server wants some.
fn ticket_gate(config: &ServerConfig, role: Role) -> Option<Arc<TicketGate>> {
    config.wants_tickets().then(|| Arc::new(TicketGate::new(config.name.clone(), role)))
}

fn listener_config(config: &ServerConfig, gate: Option<Arc<TicketGate>>) -> ListenerConfig {
    // Clients with a ticket do not have the secret: it may be this server's own token.
    let secret = config.secret.as_ref().filter(|_| gate.is_none());
    ListenerConfig {
        slot: config.slot,
        secret: secret.map(|secret| secret.reveal().to_owned()),
        tickets: gate.map(|gate| gate as Arc<dyn TicketCheck>),
        tls: config.security.for_listener().cloned(),
        transports: config.transports.kinds.clone(),
        networks: config.transports.networks.clone(),
        handshake_timeout: config.limits.handshake_timeout,
        max_peers: config.limits.max_links,
        ..ListenerConfig::default()
    }
}

async fn bind_metrics(addr: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(addr).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => StartError::MetricsInUse { addr },
        _ => StartError::MetricsBind { addr, source },
    })
}

/// The address that clients connect to. An unspecified address accepts connections on every interface, but no
/// client can connect to it. A name must resolve on this host, so that a misspelt one is noticed before clients
/// fail with it.
async fn advertised_addr(
    config: &ServerConfig,
    data_addr: SocketAddr,
) -> Result<String, StartError> {
    let found = match &config.advertise_addr {
        Some(addr) => addr.clone(),
        None => data_addr.to_string(),
    };
    if !matches!(config.placement, Placement::ControlPlane { .. }) {
        return Ok(found);
    }
    if cannot_be_reached(&found) {
        return Err(StartError::Advertise { found });
    }
    let lookup = || async {
        let mut addrs = tokio::net::lookup_host(found.clone()).await?;
        Ok(addrs.next().is_some())
    };
    match resolve(&found, lookup, RESOLVE_PAUSE, RESOLVE_PATIENCE).await {
        Ok(()) => Ok(found),
        Err(reason) => Err(StartError::AdvertiseName { found, reason }),
    }
}

/// Looks `name` up every `pause` until it has an address, for `patience` at most. Returns the last reason why it has none.
///
/// The name of a new pod reaches the name servers of Kubernetes after the start of its process, and they remember for
/// a while that it was not there.
async fn resolve<F: Future<Output = std::io::Result<bool>>>(
    name: &str,
    lookup: impl Fn() -> F,
    pause: Duration,
    patience: Duration,
) -> Result<(), String> {
    let started = Instant::now();
    let mut has_warned = false;
    loop {
        let reason = match tokio::time::timeout(weights::RESOLVE_TIMEOUT, lookup()).await {
            Ok(Ok(true)) => return Ok(()),
            Ok(Ok(false)) => "the name has no address".to_owned(),
            // No name: it will not come.
            Ok(Err(err)) if err.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(err.to_string());
            }
            Ok(Err(err)) => err.to_string(),
            Err(_) => format!("no answer within {} s", weights::RESOLVE_TIMEOUT.as_secs()),
        };
        if started.elapsed() + pause > patience {
            return Err(reason);
        }
        if !std::mem::replace(&mut has_warned, true) {
            tracing::warn!(
                name,
                reason,
                "the advertised name does not resolve, trying for {} s",
                patience.as_secs()
            );
        }
        tokio::time::sleep(pause).await;
    }
}

/// Longest wait for an advertised name. CoreDNS remembers for 30 s that a name is not there.
const RESOLVE_PATIENCE: Duration = Duration::from_secs(60);
const RESOLVE_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
