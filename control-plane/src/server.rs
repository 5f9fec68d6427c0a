//! The control plane as a whole: bind it, then run it until shutdown.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use prometheus::Registry;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::balance::BalanceSettings;
use crate::clock::{Clock, MonotonicClock};
use crate::config::{ConfigError, ServerConfig};
use crate::coordinator::Coordinator;
use crate::fleet::{Fleet, FleetSettings};
use crate::http::{self, App};
use crate::metrics::Metrics;
use crate::planner::rebalance::PlanGoals;
use crate::store::{FileStore, MemoryStore, Revision, Store, StoreError};

/// A control plane that is bound to its address and has restored its state. It serves requests once
/// [`run`](Self::run) is called; earlier connections wait in the backlog.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    listener: TcpListener,
    local_addr: SocketAddr,
    coordinator: Arc<Coordinator>,
    store: Box<dyn Store>,
    revision: Revision,
    metrics: Metrics,
}

impl Server {
    /// Binds the address and opens the store that the settings name.
    ///
    /// # Errors
    /// [`BindError`] when a setting is invalid, the address cannot be bound, or the stored state cannot be
    /// read and written.
    pub async fn bind(config: ServerConfig) -> Result<Self, BindError> {
        let store: Box<dyn Store> = match &config.data_dir {
            Some(dir) => Box::new(FileStore::open(dir)?),
            None => Box::new(MemoryStore::new()),
        };
        Self::bind_with(config, store, Arc::new(MonotonicClock::new())).await
    }

    /// As [`bind`](Self::bind), with a given store and clock.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub async fn bind_with(
        config: ServerConfig,
        mut store: Box<dyn Store>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, BindError> {
        let planner = config.check()?;
        let listener = listen(&config.listen).await?;
        let local_addr = listener
            .local_addr()
            .map_err(|source| BindError::Listen { addr: config.listen.clone(), source })?;
        let metrics = Metrics::new().map_err(BindError::Metrics)?;
        let settings = FleetSettings {
            lease_ttl: config.lease_ttl,
            suspect_grace: config.suspect_grace,
            expired_retention: config.expired_retention,
            max_members: config.limits.max_members,
            pinned_fingerprint: config.model_fingerprint.clone(),
            target_share: config.target_share,
            balance: config.balance.map(|balance| BalanceSettings {
                goals: PlanGoals { min_replicas: config.replicas, ..balance.goals },
                expected_servers: config.num_servers,
                ..balance
            }),
        };
        let started = {
            let (metrics, lease_ttl) = (metrics.clone(), config.lease_ttl);
            let restore = move || {
                let (snapshot, revision) = store.load()?;
                let fleet = Fleet::new(settings, Box::new(planner), snapshot, clock.now());
                let (coordinator, revision) =
                    Coordinator::start(fleet, &mut *store, revision, clock, lease_ttl, metrics)?;
                Ok::<_, StoreError>((coordinator, revision, store))
            };
            tokio::task::spawn_blocking(restore).await
        };
        let (coordinator, revision, store) =
            started.map_err(|err| BindError::Interrupted(io::Error::other(err)))??;
        let model = coordinator.status().model;
        if let (Some(model), Some(wanted)) = (model, &config.model_fingerprint)
            && model.fingerprint != *wanted
        {
            let (stored, wanted) = (model.fingerprint, wanted.clone());
            return Err(BindError::Model { stored, wanted });
        }
        if config.token.is_none() && !local_addr.ip().is_loopback() {
            warn!(%local_addr, "no token is set: every client that can reach this address is accepted");
        }
        Ok(Self {
            config,
            listener,
            local_addr,
            coordinator: Arc::new(coordinator),
            store,
            revision,
            metrics,
        })
    }

    /// The bound address. For port 0 in the settings it has the chosen port.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The metrics, also served at `/metrics`.
    pub fn registry(&self) -> Registry {
        self.metrics.registry.clone()
    }

    /// Serves until `shutdown` completes. Then waits up to [`Limits::shutdown_timeout`](crate::Limits) for
    /// open requests and writes the state a last time.
    ///
    /// # Errors
    /// [`RunError`] when another control plane has taken over the store, or a task panicked.
    pub async fn run(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), RunError> {
        let Self { config, listener, local_addr, coordinator, store, revision, metrics } = self;
        let (stop, stopping) = watch::channel(false);
        let (limits, token) = (config.limits.clone(), config.token.as_deref());
        let app = App::new(Arc::clone(&coordinator), limits.clone(), token, stopping.clone());
        let router = http::router(app);
        info!(%local_addr, epoch = coordinator.status().epoch, "control plane is serving");

        let clock = tokio::spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_clock().await }
        });
        let probes = tokio::spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_probes().await }
        });
        let (stop_writer, writer_stopping) = watch::channel(false);
        let mut writer = tokio::spawn({
            let coordinator = Arc::clone(&coordinator);
            async move { coordinator.run_writer(store, revision, writer_stopping).await }
        });
        let mut serving =
            tokio::spawn(httpd::serve(listener, router, limits.http(), metrics.http, stopping));

        let panicked = |err| RunError::Panicked(io::Error::other(err));
        let (mut served, mut written) = (None, None);
        tokio::select! {
            () = shutdown => info!("control plane is stopping"),
            outcome = &mut writer => written = Some(outcome),
            outcome = &mut serving => served = Some(outcome),
        }
        clock.abort();
        probes.abort();
        stop.send_replace(true);
        // The shutdown timeout bounds this wait.
        let served = match served {
            Some(outcome) => outcome,
            None => serving.await,
        };
        stop_writer.send_replace(true);
        let written = match written {
            Some(outcome) => outcome,
            None => writer.await,
        };
        served.map_err(panicked)?;
        written.map_err(panicked)?.map_err(RunError::Store)
    }
}

/// Error of [`Server::bind`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum BindError {
    /// A setting is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Another process listens on the address.
    #[error("{addr} is in use by another process: stop it or listen on another port")]
    AddrInUse { addr: String },
    /// The operating system refuses to listen on the address.
    #[error("cannot listen on {addr} ({source}): expected HOST:PORT of this machine")]
    Listen { addr: String, source: io::Error },
    /// The state cannot be restored or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state belongs to a fleet of another model.
    #[error(
        "the stored state belongs to a fleet that serves the model {stored}, but the settings name \
         {wanted}: use an empty data directory for another model"
    )]
    Model { stored: String, wanted: String },
    /// Two metrics have the same name. A bug.
    #[error("metrics could not be registered: {0}")]
    Metrics(#[source] prometheus::Error),
    /// The runtime shut down during the start.
    #[error("starting was interrupted: {0}")]
    Interrupted(#[source] io::Error),
}

/// Error that ended a control plane.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Another control plane has taken over the store.
    #[error(transparent)]
    Store(StoreError),
    /// A task panicked. A bug.
    #[error("a task of the control plane panicked: {0}")]
    Panicked(#[source] io::Error),
}

/// Listens with a backlog large enough for many simultaneous connections. With a full backlog, clients
/// retry only after a second.
async fn listen(addr: &str) -> Result<TcpListener, BindError> {
    let classify = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => BindError::AddrInUse { addr: addr.to_owned() },
        _ => BindError::Listen { addr: addr.to_owned(), source },
    };
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for addr in tokio::net::lookup_host(addr).await.map_err(classify)? {
        match listen_on(addr) {
            Ok(listener) => return Ok(listener),
            Err(err) => last = err,
        }
    }
    Err(classify(last))
}

fn listen_on(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// The system's limit (`net.core.somaxconn`) applies as well.
const BACKLOG: u32 = 4096;
