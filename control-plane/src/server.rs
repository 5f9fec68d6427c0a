//! The control plane as a whole: bind it, then run it until shutdown.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use control_api::ModelDescriptor;
use prometheus::Registry;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tracing::{info, warn};
use trust::tls::InsecureListener;
use trust::tokens::TokenFileError;

use crate::access::Access;
use crate::access::audit::AuditLog;
use crate::access::metrics::AccessMetrics;
use crate::access::tokens::TokenFile;
use crate::balance::BalanceSettings;
use crate::boards::Boards;
use crate::clock::{Clock, MonotonicClock};
use crate::config::{ConfigError, EtcdConfig, ServerConfig};
use crate::editions::{Editions, Term};
use crate::election::Election;
use crate::fleet::FleetSettings;
use crate::http::{self, App, Exposure, Guarding};
use crate::metrics::Metrics;
use crate::planner::rebalance::PlanGoals;
use crate::role::{Following, Role, Roles};
use crate::store::etcd::{EtcdClient, EtcdStore};
use crate::store::{FileStore, MemoryStore, Store, StoreError};
use crate::term::TermSettings;

/// A control plane that is bound to its address and has found its state. It serves requests once
/// [`run`](Self::run) is called; earlier connections wait in the backlog.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    listener: TcpListener,
    local_addr: SocketAddr,
    roles: Roles,
    boards: Arc<Boards>,
    metrics: Metrics,
    guarding: Guarding,
    mode: Mode,
}

/// Leadership of a control plane.
#[derive(Debug)]
enum Mode {
    /// It has a store of its own, and leads from start to end.
    Alone(Term),
    /// It shares etcd with others.
    Shared(Box<Election>),
}

impl Server {
    /// Binds the address and opens the store that the settings name. A control plane on etcd waits for its election
    /// in [`run`](Self::run).
    ///
    /// # Errors
    /// [`BindError`] when a setting is invalid, the address cannot be bound, or the stored state cannot be
    /// read and written.
    pub async fn bind(config: ServerConfig) -> Result<Self, BindError> {
        let clock = Arc::new(MonotonicClock::new());
        if let Some(etcd) = config.etcd.clone() {
            return Self::bind_shared(config, etcd, clock).await;
        }
        let store: Box<dyn Store> = match &config.data_dir {
            Some(dir) => Box::new(FileStore::open(dir)?),
            None => Box::new(MemoryStore::new()),
        };
        Self::bind_with(config, store, clock).await
    }

    /// As [`bind`](Self::bind), with a given store and clock.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub async fn bind_with(
        config: ServerConfig,
        store: Box<dyn Store>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, BindError> {
        let (listener, local_addr) = bind_address(&config).await?;
        let settings = term_settings(&config, clock)?;
        let (metrics, boards) = (settings.metrics.clone(), Arc::clone(&settings.boards));
        let guarding = guarding(&config, &metrics)?;
        let begun = tokio::task::spawn_blocking(move || Editions::restore(settings, store)).await;
        let begun = begun.map_err(|err| BindError::Interrupted(io::Error::other(err)))??;
        let editions = Arc::clone(&begun.editions);
        check_model(&config, editions.status().model)?;
        metrics.leader.set(1);
        metrics.terms.inc();
        boards.set_fresh(true);
        let roles = Roles::new(Role::Leader { editions, term: 1 }, None);
        let mode = Mode::Alone(begun);
        Ok(Self { config, listener, local_addr, roles, boards, metrics, guarding, mode })
    }

    async fn bind_shared(
        config: ServerConfig,
        etcd: EtcdConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, BindError> {
        let (listener, local_addr) = bind_address(&config).await?;
        let own_url = etcd.own_url(local_addr, &config.security)?;
        let prefix = etcd.checked_prefix()?;
        let mut security = etcd.security.clone();
        security.insecure |= config.security.insecure;
        let client = EtcdClient::new(&etcd.endpoints, etcd.credentials.clone(), &security);
        let client = Arc::new(client.map_err(StoreError::Etcd)?);
        if let Some(exposure) = client.exposure() {
            warn!("{exposure}");
        }
        let settings = term_settings(&config, clock)?;
        let guarding = guarding(&config, &settings.metrics)?;
        // Finds a wrong endpoint, wrong credentials and data of another program before the process counts as started.
        let store = EtcdStore::new(Arc::clone(&client), &prefix, Handle::current(), None);
        let found = tokio::task::spawn_blocking(move || {
            let mut store = store;
            store.load()
        })
        .await;
        let found = found.map_err(|err| BindError::Interrupted(io::Error::other(err)))??.0;
        check_model(&config, found.and_then(|snapshot| snapshot.model))?;
        let roles = Roles::new(Role::Follower(Following::default()), Some(own_url.clone()));
        let (metrics, boards) = (settings.metrics.clone(), Arc::clone(&settings.boards));
        let election = Election {
            client,
            prefix,
            lease_ttl: etcd.lease,
            own_url,
            token: config.token.clone(),
            previous_token: config.previous_token.clone(),
            security: config.security.clone(),
            settings,
            roles: roles.clone(),
        };
        let mode = Mode::Shared(Box::new(election));
        Ok(Self { config, listener, local_addr, roles, boards, metrics, guarding, mode })
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
    /// [`RunError`] when another control plane has taken over a store that is not shared, the state of a shared one
    /// is damaged, or a task panicked.
    pub async fn run(
        self,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), RunError> {
        let Self { config, listener, local_addr, roles, boards, metrics, guarding, mode } = self;
        let (stop, stopping) = watch::channel(false);
        let limits = config.limits.clone();
        let http_metrics = metrics.http.clone();
        let tls = config.security.for_listener().cloned();
        let exposure = Exposure {
            store: match &mode {
                Mode::Alone(_) => None,
                Mode::Shared(election) => election.client.exposure(),
            },
            security: config.security.clone(),
            listen: config.listen.clone(),
            advertise: roles.group().own_url,
            local_addr,
            requires_identity: config.requires_identity(),
        };
        let following = guarding.access.tokens.clone().map(|tokens| {
            let task = tokens.follow(guarding.metrics.clone(), guarding.audit.clone());
            AbortOnDrop(tokio::spawn(task))
        });
        let audit = guarding.audit.clone();
        let counting = AbortOnDrop(tokio::spawn(audit.clone().follow_tickets()));
        let (stopped, limits_of_app) = (stopping.clone(), limits.clone());
        let app = App::new(roles, boards, metrics, limits_of_app, guarding, exposure, stopped);
        let router = http::router(app);
        info!(%local_addr, "control plane is serving");

        let (stop_deciding, deciding_stops) = watch::channel(false);
        let (stop_writer, writer_stopping) = watch::channel(false);
        let mut deciding = tokio::spawn(async move {
            match mode {
                Mode::Alone(begun) => begun.run(deciding_stops, writer_stopping).await,
                Mode::Shared(election) => election.run(deciding_stops, writer_stopping).await,
            }
        });
        let mut serving = tokio::spawn(httpd::serve(
            listener,
            router,
            tls,
            limits.http(),
            http_metrics,
            stopping,
        ));

        let panicked = |err| RunError::Panicked(io::Error::other(err));
        let (mut served, mut decided) = (None, None);
        tokio::select! {
            () = shutdown => info!("control plane is stopping"),
            outcome = &mut deciding => decided = Some(outcome),
            outcome = &mut serving => served = Some(outcome),
        }
        // From here on no member can renew, so none may expire.
        stop_deciding.send_replace(true);
        stop.send_replace(true);
        // The shutdown timeout bounds this wait.
        let served = match served {
            Some(outcome) => outcome,
            None => serving.await,
        };
        stop_writer.send_replace(true);
        let decided = match decided {
            Some(outcome) => outcome,
            None => deciding.await,
        };
        drop((following, counting));
        tokio::task::spawn_blocking(move || audit.close()).await.map_err(panicked)?;
        served.map_err(panicked)?;
        decided.map_err(panicked)?.map_err(RunError::Store)
    }
}

async fn bind_address(config: &ServerConfig) -> Result<(TcpListener, SocketAddr), BindError> {
    config.check()?;
    let listener = listen(&config.listen).await?;
    let local_addr = listener.local_addr();
    let local_addr =
        local_addr.map_err(|source| BindError::Listen { addr: config.listen.clone(), source })?;
    config.security.check_listener(local_addr)?;
    if let Some(exposure) = config.security.exposure(local_addr) {
        warn!("{exposure}");
    }
    if !config.requires_identity() && !local_addr.ip().is_loopback() {
        warn!(%local_addr, "no identity is asked for: every client that can reach this address is accepted");
    }
    Ok((listener, local_addr))
}

/// Reads the token file and opens the audit log.
fn guarding(config: &ServerConfig, metrics: &Metrics) -> Result<Guarding, BindError> {
    let tokens = config.tokens.as_deref().map(TokenFile::open).transpose()?.map(Arc::new);
    let metrics = AccessMetrics::new(&metrics.registry).map_err(BindError::Metrics)?;
    let path = config.audit_log.as_deref();
    let audit = AuditLog::open(path, metrics.audit_lost.clone()).map_err(|source| {
        BindError::AuditLog { path: path.unwrap_or(Path::new("")).to_owned(), source }
    })?;
    let accepts_certificates = config.security.for_listener().is_some();
    let access = Access::new(config.cluster_tokens(), tokens, accepts_certificates);
    let cluster_tokens = config.cluster_tokens().map(str::to_owned).collect();
    Ok(Guarding { access, metrics, audit, cluster_tokens })
}

/// A task that ends with its owner.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn term_settings(config: &ServerConfig, clock: Arc<dyn Clock>) -> Result<TermSettings, BindError> {
    let fleet = FleetSettings {
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
    let (planner, lease_ttl) = (Arc::new(config.check()?), config.lease_ttl);
    let num_top = config.metrics_top_experts as usize;
    let metrics = Metrics::new(num_top).map_err(BindError::Metrics)?;
    if let Some(tls) = &config.security.tls {
        httpd::register_tls_metrics(&metrics.registry, tls.clone()).map_err(BindError::Metrics)?;
    }
    let boards = Arc::new(Boards::new());
    let ticket_life = config.ticket_life;
    Ok(TermSettings { fleet, planner, lease_ttl, ticket_life, clock, metrics, boards })
}

/// Compares the stored model with the one that the settings name.
fn check_model(config: &ServerConfig, stored: Option<ModelDescriptor>) -> Result<(), BindError> {
    match (stored, &config.model_fingerprint) {
        (Some(stored), Some(wanted)) if stored.fingerprint != *wanted => {
            Err(BindError::Model { stored: stored.fingerprint, wanted: wanted.clone() })
        }
        _ => Ok(()),
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
    /// The port would be open to other hosts without TLS.
    #[error(transparent)]
    Insecure(#[from] InsecureListener),
    /// The token file cannot be used.
    #[error(transparent)]
    Tokens(#[from] TokenFileError),
    /// The audit log cannot be opened.
    #[error("the audit log {} cannot be opened: {source}", path.display())]
    AuditLog { path: PathBuf, source: io::Error },
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
    /// The store cannot be used any more: see [`Server::run`].
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
