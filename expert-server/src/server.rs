//! A whole server: checkpoint, listener, data thread, lease, metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use control_api::{Assignment, LeaseKeeper, RegisterRequest};
use kernels::gpu::Gpu;
use p2p_core::SlotConfig;
use p2p_core::bootstrap::{Listener, ListenerConfig};
use protocol::{ModelShape, WireDtype};
use proxy::DeviceTransports;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::clients::{Frames, Host, geometry, serve_clients};
use crate::compute::{ExpertStore, LoadError, LoadProgress, Residency};
use crate::config::{Placement, ServerConfig, check_assignment};
use crate::cpu::{DataConfig, DataError, DataPlane};
use crate::device::{DeviceConfig, DeviceError, DevicePlan, DevicePlane, DeviceStore};
use crate::error::{ServerError, StartError};
use crate::experts::Experts;
use crate::http;
use crate::members::{self, Member};
use crate::metrics::ServerMetrics;
use crate::plane::Plane;
use crate::status::Health;

/// Starts servers.
#[derive(Debug)]
pub struct ExpertServer;

impl ExpertServer {
    /// Opens the checkpoint, listens, joins the control plane if there is one, loads the experts and
    /// serves. Returns when clients can be answered. `progress` hears of every expert loaded, on a
    /// thread of its own. Needs a tokio runtime with I/O and time.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub async fn start(
        config: ServerConfig,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<RunningServer, StartError> {
        Self::start_with_registry(config, prometheus::Registry::new(), progress).await
    }

    /// As [`start`](Self::start), with the metrics in a registry of the caller's.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub async fn start_with_registry(
        config: ServerConfig,
        registry: prometheus::Registry,
        mut progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<RunningServer, StartError> {
        let checkpoint = open(&config).await?;
        let shape = shape_of(&checkpoint);
        let device = open_device(&config, &checkpoint).await?;
        let frames = match &device {
            Some((_, plan, dtype)) => {
                Frames::Device { dtype: *dtype, max_tokens: plan.geometry.max_tokens as usize }
            }
            None => {
                let frame_bytes = p2p_core::SlotLayout::new(config.slot)
                    .map_err(p2p_core::bootstrap::BindError::Slot)?
                    .frame_bytes();
                // Whatever a client may ask for, a token must fit; better to say so now than to each
                // client.
                geometry(&shape, frame_bytes, WireDtype::Bf16, WireDtype::Bf16)?;
                Frames::Host { frame_bytes }
            }
        };
        let device = device.map(|(gpu, plan, _)| (gpu, plan));
        if let Placement::Static(selection) = &config.placement {
            selection.resolve(checkpoint.config())?;
        }
        let mut reached = DeviceTransports::default();
        let listening = listener_config(&config, device.as_ref(), &mut reached)?;
        let listener = Listener::bind(config.data_addr, listening).await?;
        let data_addr = listener.local_addr();
        let metrics_listener = match config.metrics_addr {
            Some(addr) => Some(bind_metrics(addr).await?),
            None => None,
        };
        let metrics_addr = metrics_listener.as_ref().and_then(|tcp| tcp.local_addr().ok());
        let metrics = ServerMetrics::new(registry)?;
        let has_control_plane = matches!(config.placement, Placement::ControlPlane { .. });
        let health = Arc::new(Health {
            metrics: metrics.clone(),
            handshakes: listener.stats(),
            rendering: Mutex::new(()),
            data: OnceLock::new(),
            is_draining: AtomicBool::new(false),
            needs_lease: has_control_plane,
            has_lease: AtomicBool::new(false),
        });
        // From here on, so that whoever watches can tell loading from hanging.
        let (stop, stopped) = watch::channel(false);
        if let Some(tcp) = metrics_listener {
            tokio::spawn(httpd::serve(
                tcp,
                http::router(Arc::clone(&health)),
                httpd::Limits::default(),
                metrics.http.clone(),
                stopped.clone(),
            ));
        }

        let mut registration = RegisterRequest::new(
            config.name.clone(),
            advertised(&config, data_addr)?,
            members::describe(&checkpoint),
        );
        registration.metrics_addr = metrics_addr.map(|addr| addr.to_string());
        registration.capacity_experts = config.capacity_experts;
        let incarnation = registration.incarnation;
        let (keeper, assignment) = match &config.placement {
            Placement::ControlPlane { url, token } => {
                let joined = members::join(&config, url, token.clone(), registration).await?;
                (Some(Arc::new(joined.0)), joined.1)
            }
            Placement::Static(selection) => {
                (None, Arc::new(selection.resolve(checkpoint.config())?))
            }
        };
        if !assignment.is_empty() {
            check_assignment(&assignment, checkpoint.config()).map_err(StartError::Assignment)?;
        }

        let load_began = Instant::now();
        let experts = members::as_map(&assignment);
        let loading = tokio::task::spawn_blocking(move || {
            Loaded::load(device, checkpoint, &experts, &mut progress)
        });
        let loaded = loading.await.map_err(|_| StartError::LoadPanicked)??;
        let store = loaded.experts();
        let held = members::holds(&*store);
        metrics.load_seconds.set(load_began.elapsed().as_secs_f64());
        metrics.experts_loaded.set(held.num_experts() as i64);
        metrics.expert_bytes.set(store.loaded_bytes() as i64);

        let (data, data_end) = loaded.start(&config, &metrics, reached)?;
        let data = Arc::new(data);
        // Set once, here.
        let _ = health.data.set(Arc::clone(data.status()));
        health.has_lease.store(keeper.is_some(), Ordering::Relaxed);
        if let Some(keeper) = &keeper {
            keeper.set_ready(held.clone());
        }

        let host = Host {
            name: config.name.clone(),
            shape,
            frames,
            incarnation,
            health: Arc::clone(&health),
            keeper: keeper.clone(),
            data: Arc::clone(&data),
        };
        let listening = tokio::spawn(serve_clients(listener, Arc::new(host), stopped));
        let member = keeper.as_ref().map(|keeper| Member {
            keeper: Arc::clone(keeper),
            store: Arc::clone(&store),
            load: Arc::clone(data.load()),
            health: Arc::clone(&health),
        });
        let (ended, end) = watch::channel(None);
        let supervision =
            supervise(data_end, member, listening, stop.clone(), Arc::clone(&data), ended);
        tokio::spawn(supervision);
        tracing::info!(
            name = config.name,
            %data_addr,
            experts = held.num_experts(),
            bytes = store.loaded_bytes(),
            device = config.device.map_or("cpu".to_owned(), |device| device.name.to_string()),
            "serving"
        );
        Ok(RunningServer {
            config,
            data_addr,
            metrics_addr,
            health,
            store,
            keeper,
            data,
            stop,
            end,
        })
    }
}

/// A server at work. Dropping it stops the server without a word to the control plane.
pub struct RunningServer {
    config: ServerConfig,
    data_addr: SocketAddr,
    metrics_addr: Option<SocketAddr>,
    health: Arc<Health>,
    store: Arc<dyn Experts>,
    keeper: Option<Arc<LeaseKeeper>>,
    data: Arc<Plane>,
    stop: watch::Sender<bool>,
    end: watch::Receiver<Option<End>>,
}

/// How a server ended: taken by the first who asks.
type End = Arc<Mutex<Option<Result<(), ServerError>>>>;

impl RunningServer {
    /// Where clients connect.
    #[must_use]
    pub const fn data_addr(&self) -> SocketAddr {
        self.data_addr
    }

    /// Where metrics are served, if they are.
    #[must_use]
    pub const fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics_addr
    }

    /// Name of the server.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The metrics. Some are brought up to date only by [`render_metrics`](Self::render_metrics).
    #[must_use]
    pub fn metrics(&self) -> &ServerMetrics {
        &self.health.metrics
    }

    /// What `/metrics` answers.
    ///
    /// # Errors
    /// [`prometheus::Error`] when a metric cannot be encoded.
    pub fn render_metrics(&self) -> Result<String, prometheus::Error> {
        self.health.render_metrics()
    }

    /// What is loaded.
    #[must_use]
    pub fn holds(&self) -> Assignment {
        members::holds(&*self.store)
    }

    /// Loads one more expert and puts it into service, as an assignment of the control plane does; nothing
    /// happens when it is loaded already. Takes as long as reading its weights: run it where that blocks
    /// nobody.
    ///
    /// # Errors
    /// [`LoadError`]; the server then serves what it had.
    pub fn load_expert(&self, layer: u32, expert: u32) -> Result<(), LoadError> {
        members::load_one(&*self.store, &self.health.metrics, layer, expert)
    }

    /// Bytes of the loaded weights.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.store.loaded_bytes()
    }

    /// Clients connected.
    #[must_use]
    pub fn num_links(&self) -> usize {
        self.data.status().num_links()
    }

    /// Whether clients should be sent here, or why not.
    ///
    /// # Errors
    /// The reason in words.
    pub fn ready(&self) -> Result<(), String> {
        self.health.ready()
    }

    /// Waits until the control plane has the server in its placement; returns at once without one.
    ///
    /// # Errors
    /// [`StartError::Join`] when that takes longer than `bound` or cannot happen any more.
    pub async fn serving(&self, bound: Duration) -> Result<(), StartError> {
        let (Some(keeper), Placement::ControlPlane { url, .. }) =
            (&self.keeper, &self.config.placement)
        else {
            return Ok(());
        };
        let failed = |source| StartError::Join { url: url.clone(), source };
        keeper.serving(bound).await.map_err(failed)
    }

    /// Leaves in good order: out of the placement, no new clients, and an end once the clients are gone
    /// or idle, at the latest after the drain timeout. What SIGTERM should do.
    pub async fn drain(&self) {
        let deadline = Instant::now() + self.config.drain_timeout;
        self.health.is_draining.store(true, Ordering::Relaxed);
        tracing::info!(name = self.config.name, "draining");
        if let Some(keeper) = &self.keeper {
            let bound = self.config.drain_timeout.min(CONTROL_PATIENCE);
            if let Err(error) = keeper.drain(bound).await {
                tracing::warn!(%error, "draining without the control plane's confirmation");
            }
        }
        // Clients need a moment to hear of the new placement, however idle they look.
        let told_at = Instant::now();
        loop {
            let data = self.data.status();
            let is_idle = data.idle_for().min(told_at.elapsed()) >= self.config.drain_idle;
            if data.num_links() == 0 || is_idle || self.end.borrow().is_some() {
                break;
            }
            if Instant::now() >= deadline {
                tracing::warn!(links = data.num_links(), "drain timeout: clients are still busy");
                break;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
        self.shutdown().await;
    }

    /// Ends at once: connections close, the control plane is told.
    pub async fn shutdown(&self) {
        self.health.is_draining.store(true, Ordering::Relaxed);
        if let Some(keeper) = &self.keeper
            && let Err(error) = keeper.leave(CONTROL_PATIENCE).await
        {
            tracing::warn!(%error, "left without telling the control plane; the lease will run out");
        }
        self.halt();
        let mut end = self.end.clone();
        // The data thread answers within a batch; a stuck one must not hold up the caller for ever.
        let _ = tokio::time::timeout(STOP_PATIENCE, end.wait_for(Option::is_some)).await;
    }

    /// Waits until the server has ended.
    ///
    /// # Errors
    /// [`ServerError`] when it ended on its own; only the first caller gets it.
    pub async fn wait(&self) -> Result<(), ServerError> {
        let mut end = self.end.clone();
        let Ok(end) = end.wait_for(Option::is_some).await.map(|end| end.clone()) else {
            return Ok(());
        };
        let Some(end) = end else { return Ok(()) };
        let taken = end.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.unwrap_or(Ok(()))
    }

    fn halt(&self) {
        // Nobody listening is as good as stopped.
        let _ = self.stop.send(true);
        self.data.stop();
    }
}

impl fmt::Debug for RunningServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningServer")
            .field("name", &self.config.name)
            .field("data_addr", &self.data_addr)
            .field("metrics_addr", &self.metrics_addr)
            .finish_non_exhaustive()
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.halt();
    }
}

/// Experts in memory, before anybody serves them.
#[allow(clippy::large_enum_variant, reason = "there is one, at the start")]
enum Loaded {
    Host(Arc<ExpertStore>),
    Device { gpu: Gpu, plan: DevicePlan, store: Arc<DeviceStore> },
}

impl Loaded {
    fn load(
        device: Option<(Gpu, DevicePlan)>,
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let Some((gpu, plan)) = device else {
            let store = ExpertStore::load(checkpoint, experts, Residency::default(), progress)?;
            return Ok(Self::Host(Arc::new(store)));
        };
        let store = Arc::new(DeviceStore::load(&gpu, plan, checkpoint, experts, progress)?);
        Ok(Self::Device { gpu, plan, store })
    }

    fn experts(&self) -> Arc<dyn Experts> {
        match self {
            Self::Host(store) => Arc::clone(store) as Arc<dyn Experts>,
            Self::Device { store, .. } => Arc::clone(store) as Arc<dyn Experts>,
        }
    }

    fn start(
        self,
        config: &ServerConfig,
        metrics: &ServerMetrics,
        reached: DeviceTransports,
    ) -> Result<(Plane, oneshot::Receiver<Result<(), DataError>>), DataError> {
        let (limits, spin) = (config.limits, config.spin);
        let metrics_by_layer = config.metrics_by_layer;
        match self {
            Self::Host(store) => {
                let (num_threads, cpus) = (config.num_threads, config.cpus.clone());
                let config = DataConfig { num_threads, cpus, limits, spin, metrics_by_layer };
                let (data, end) = DataPlane::start(store, config, metrics.clone())?;
                Ok((Plane::Host(data), end))
            }
            Self::Device { gpu, plan, store } => {
                let observer = config.batch_observer.clone();
                let config = DeviceConfig { limits, spin, metrics_by_layer, reached, observer };
                let (data, end) = DevicePlane::start(&gpu, plan, config, store, metrics.clone())?;
                Ok((Plane::Device(data), end))
            }
        }
    }
}

/// Waits for whatever ends first, and stops the rest.
async fn supervise(
    data_end: oneshot::Receiver<Result<(), DataError>>,
    member: Option<Member>,
    mut listening: JoinHandle<()>,
    stop: watch::Sender<bool>,
    data: Arc<Plane>,
    ended: watch::Sender<Option<End>>,
) {
    let mut is_listening = true;
    let vanished = || Err(DataError::Panicked { message: "the thread vanished".to_owned() });
    tokio::pin!(data_end);
    let membership = async {
        match member {
            // Whoever leaves of its own will stops the data thread as well, which ends the wait.
            Some(member) => match member.run().await {
                Ok(()) => std::future::pending().await,
                Err(reason) => reason,
            },
            None => std::future::pending().await,
        }
    };
    let result = tokio::select! {
        biased;
        result = &mut data_end => result.unwrap_or_else(|_| vanished()).map_err(ServerError::from),
        reason = membership => {
            data.stop();
            let result = (&mut data_end).await.unwrap_or_else(|_| vanished());
            result.map_err(ServerError::from).and(Err(ServerError::Membership { reason }))
        }
        outcome = &mut listening => {
            is_listening = false;
            let was_asked = *stop.borrow();
            data.stop();
            let result = (&mut data_end).await.unwrap_or_else(|_| vanished());
            let result = result.map_err(ServerError::from);
            // Clients that are here could go on, but no other could ever join: better to start anew.
            if was_asked { result } else { result.and(Err(ServerError::Listener { outcome: outcome.err() })) }
        }
    };
    if let Err(error) = &result {
        tracing::error!(%error, "the server ended");
    }
    let _ = stop.send(true);
    // Whoever sees the end can take the port again.
    if is_listening && tokio::time::timeout(LISTENER_PATIENCE, listening).await.is_err() {
        tracing::warn!("the listener for clients is slow to close");
    }
    ended.send_replace(Some(Arc::new(Mutex::new(Some(result)))));
}

async fn open(config: &ServerConfig) -> Result<Arc<Checkpoint>, StartError> {
    let dir = config.model_dir.clone();
    let opening = tokio::task::spawn_blocking(move || Checkpoint::open(dir));
    Ok(Arc::new(opening.await.map_err(|_| StartError::LoadPanicked)??))
}

/// Opens the GPU of the configuration, if there is one, and plans what it will hold.
async fn open_device(
    config: &ServerConfig,
    checkpoint: &Checkpoint,
) -> Result<Option<(Gpu, DevicePlan, WireDtype)>, StartError> {
    let Some(options) = config.device else { return Ok(None) };
    // What the model lacks is said before the GPU is touched.
    let mut plan = DevicePlan::new(&options, config.slot, &config.limits, checkpoint.config())?;
    plan.any_way = !config.transports.networks.is_empty();
    // The driver takes a second to wake a GPU.
    let opening = tokio::task::spawn_blocking(move || Gpu::open_named(options.name));
    let gpu = opening
        .await
        .map_err(|_| StartError::LoadPanicked)?
        .map_err(|source| DeviceError::Open { device: options.name, source })?;
    plan.check_memory(&gpu, "batches and a client's slot", plan.workspace_bytes())?;
    Ok(Some((gpu, plan, options.dtype)))
}

fn shape_of(checkpoint: &Checkpoint) -> ModelShape {
    let model = checkpoint.config();
    ModelShape {
        fingerprint: checkpoint.fingerprint().0,
        hidden: model.hidden as u32,
        num_layers: model.num_layers,
        num_experts: model.num_experts,
        top_k: model.top_k as u32,
    }
}

fn listener_config(
    config: &ServerConfig,
    device: Option<&(Gpu, DevicePlan)>,
    reached: &mut DeviceTransports,
) -> Result<ListenerConfig, DeviceError> {
    let common = ListenerConfig {
        slot: config.slot,
        ticket: config.ticket.as_ref().map(|ticket| ticket.reveal().to_owned()),
        transports: config.transports.kinds.clone(),
        networks: config.transports.networks.clone(),
        handshake_timeout: config.limits.handshake_timeout,
        max_peers: config.limits.max_links,
        ..ListenerConfig::default()
    };
    let Some((gpu, plan)) = device else { return Ok(common) };
    *reached = DeviceTransports::new(gpu, plan.options.proxy_threads);
    let transports = reached.wrap(&config.transports)?;
    Ok(ListenerConfig {
        slot: HOST_SLOT,
        transports: transports.kinds,
        networks: transports.networks,
        device: Some(plan.side(gpu)),
        max_peers: plan.max_clients,
        ..common
    })
}

async fn bind_metrics(addr: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(addr).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => StartError::MetricsInUse { addr },
        _ => StartError::MetricsBind { addr, source },
    })
}

/// Where clients are sent. An unspecified address listens everywhere, but is nowhere to connect to.
fn advertised(config: &ServerConfig, data_addr: SocketAddr) -> Result<String, StartError> {
    match &config.advertise_addr {
        Some(addr) => Ok(addr.clone()),
        None if data_addr.ip().is_unspecified()
            && matches!(config.placement, Placement::ControlPlane { .. }) =>
        {
            Err(StartError::Advertise { found: data_addr.to_string() })
        }
        None => Ok(data_addr.to_string()),
    }
}

/// Host slots beside device slots: nothing goes through them.
const HOST_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
/// Longest wait for the control plane when leaving: a server must go even if nobody answers.
const CONTROL_PATIENCE: Duration = Duration::from_secs(2);
/// Longest wait for the data thread to end.
const STOP_PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for the listener to close.
const LISTENER_PATIENCE: Duration = Duration::from_secs(2);
/// How often a drain looks whether it is done.
const DRAIN_POLL: Duration = Duration::from_millis(20);
