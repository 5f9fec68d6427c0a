//! The source: lets peers read experts of this server's memory.
//!
//! A peer asks for an expert and gets a grant: the layout, the digest and descriptors of the memory. While a grant is
//! in force, it holds the weights and their registration, whatever the store does. A grant ends with the reader's word,
//! with its connection, or with its lease. Only the rate of grants limits the rate of reads.

mod registered;

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use control_api::LayerAssignment;
use httpd::trust::tls::Tls;
use message_engine::{Connection, Engine, EngineConfig, Notification, WaitError, default_fabrics};
use p2p_core::bootstrap::TicketCheck;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::registered::Registered;
use super::limit::RateLimit;
use super::wire::{self, Request, Response, VERSION};
use super::{ModelIdentity, WeightsSecret, manifest};
use crate::compute::ExpertWeights;
use crate::experts::Experts;
use crate::metrics::ServerMetrics;

/// Settings of a source.
pub(crate) struct SourceConfig {
    pub(crate) bind: SocketAddr,
    /// Address of this host for peers, if it is not that of `bind`.
    pub(crate) advertise: Option<IpAddr>,
    /// Check of the tickets of peers; `None` asks for none.
    pub(crate) check: Option<Arc<dyn TicketCheck>>,
    /// Secret that peers must present; `None` asks for none.
    pub(crate) secret: Option<WeightsSecret>,
    /// Certificates. With them, peers without TLS are refused.
    pub(crate) tls: Option<Tls>,
    /// Bytes per second that peers may read.
    pub(crate) limit: u64,
}

/// Why a source cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for servers that read weights on {addr}: {detail}")]
pub struct SourceError {
    addr: SocketAddr,
    detail: String,
}

/// A source that listens. It serves peers once it [runs](Self::run).
pub(crate) struct WeightSource {
    engine: Arc<Engine>,
    identity: ModelIdentity,
    limit: RateLimit,
    metrics: ServerMetrics,
    /// Refused peers that the metrics have.
    num_refused: u64,
    store: Arc<OnceLock<Arc<dyn Experts>>>,
    readers: HashMap<u64, Reader>,
    grants: HashMap<(u64, u64), Grant>,
    /// Registrations in force, to be shared by grants of the same weights.
    registered: HashMap<(u32, u32), Weak<Registered>>,
    /// Digests of weights that have been read before.
    digests: HashMap<(u32, u32), (Weak<ExpertWeights>, [u8; 32])>,
}

/// A connected peer.
struct Reader {
    connection: Connection,
    is_admitted: bool,
    /// Requests that are being prepared.
    preparing: HashSet<u64>,
}

struct Grant {
    /// Keeps the memory readable.
    _registered: Arc<Registered>,
    expires: Instant,
}

/// A request whose memory is being registered.
struct Job {
    connection: u64,
    id: u64,
    layer: u32,
    expert: u32,
    outcome: Result<Arc<Registered>, String>,
}

impl WeightSource {
    /// Listens. Blocks for the time of a few system calls.
    ///
    /// # Errors
    /// [`SourceError`].
    pub(crate) fn open(
        config: SourceConfig,
        identity: ModelIdentity,
        metrics: ServerMetrics,
    ) -> Result<Self, SourceError> {
        let SourceConfig { bind, advertise, check, secret, tls, limit } = config;
        let failed = |detail: String| SourceError { addr: bind, detail };
        let fabrics = default_fabrics(bind.ip(), advertise).map_err(|e| failed(e.to_string()))?;
        let config = EngineConfig {
            bind,
            advertise,
            fabrics,
            check,
            ticket: secret.map(|secret| secret.reveal().to_owned()),
            tls,
            max_connections: MAX_READERS,
            max_handshakes: MAX_READERS,
            max_notification_bytes: MAX_REQUEST_BYTES,
            notify_window_bytes: REQUEST_WINDOW_BYTES,
            ..EngineConfig::default()
        };
        let engine = Engine::start(config).map_err(|error| failed(error.to_string()))?;
        Ok(Self {
            engine: Arc::new(engine),
            identity,
            limit: RateLimit::new(limit),
            metrics,
            num_refused: 0,
            store: Arc::default(),
            readers: HashMap::new(),
            grants: HashMap::new(),
            registered: HashMap::new(),
            digests: HashMap::new(),
        })
    }

    /// Port on which it listens.
    pub(crate) fn port(&self) -> u16 {
        self.engine.endpoint().addr.port()
    }

    /// The place for the store. Until it is set, the source holds nothing.
    pub(crate) fn store(&self) -> Arc<OnceLock<Arc<dyn Experts>>> {
        Arc::clone(&self.store)
    }

    /// Serves peers until `stopped` is true or its sender is gone.
    pub(crate) async fn run(mut self, mut stopped: watch::Receiver<bool>) {
        let engine = Arc::clone(&self.engine);
        let mut jobs = JoinSet::new();
        loop {
            let period = if self.readers.is_empty() { IDLE_PERIOD } else { BUSY_PERIOD };
            tokio::select! {
                _ = stopped.wait_for(|is_stopped| *is_stopped) => break,
                taken = engine.next_notification_async(Instant::now() + period) => match taken {
                    Ok(notification) => {
                        self.accept();
                        self.answer(notification, &mut jobs);
                    }
                    Err(WaitError::Deadline) => self.accept(),
                    Err(error) => {
                        tracing::error!(%error, "peers cannot read weights any more");
                        break;
                    }
                },
                Some(job) = jobs.join_next() => match job {
                    Ok(job) => self.grant(job),
                    Err(error) => tracing::error!(%error, "preparing weights for a peer panicked"),
                },
            }
            self.end_grants();
        }
        // The memory of grants is deregistered with the last of them, which blocks.
        let ending = tokio::task::spawn_blocking(move || drop((self, engine)));
        // A runtime that shuts down drops the closure, which does the same.
        if ending.await.is_err_and(|error| error.is_panic()) {
            tracing::error!("ending the source of weights panicked");
        }
    }

    /// Takes new connections.
    fn accept(&mut self) {
        while let Ok(connection) = self.engine.accept(Instant::now()) {
            let reader = Reader { connection, is_admitted: false, preparing: HashSet::new() };
            self.readers.insert(reader.connection.id(), reader);
        }
    }

    fn answer(&mut self, notification: Notification, jobs: &mut JoinSet<Job>) {
        let connection = notification.connection;
        let Some(reader) = self.readers.get_mut(&connection) else { return };
        match wire::decode(&notification.bytes) {
            Ok(Request::Hello { version, fingerprint, parameters }) => {
                let found = ModelIdentity { fingerprint, parameters };
                if version == VERSION && found == self.identity {
                    reader.is_admitted = true;
                    let experts = self.store.get().map(|store| index(&**store));
                    let experts = experts.unwrap_or_default();
                    reader.send(&Response::Index { version: VERSION, experts });
                } else {
                    let ours = (VERSION, &self.identity);
                    let reason =
                        format!("the server has {ours:?}, the reader {version}, {found:?}");
                    reader.send(&Response::Refused { id: None, reason });
                }
            }
            Ok(Request::Read { id, layer, expert }) => {
                if !reader.is_admitted {
                    let reason = "a request before the hello".to_owned();
                    return reader.send(&Response::Refused { id: Some(id), reason });
                }
                let num_granted = self.grants.keys().filter(|(of, _)| *of == connection).count();
                let num_open = num_granted + reader.preparing.len();
                if num_open >= MAX_GRANTS_OF_READER || self.grants.len() >= MAX_GRANTS {
                    let after_ms = BUSY_PAUSE.as_millis() as u64;
                    return reader.send(&Response::Later { id, after_ms });
                }
                let weights = self.store.get().and_then(|store| store.weights(layer, expert));
                let Some(weights) = weights else {
                    let reason = format!("expert {expert} of layer {layer} is not loaded here");
                    return reader.send(&Response::Refused { id: Some(id), reason });
                };
                let bytes = weights.size_bytes() as u64;
                if let Err(pause) = self.limit.admit(bytes, Instant::now()) {
                    let after_ms = pause.as_millis() as u64 + 1;
                    return reader.send(&Response::Later { id, after_ms });
                }
                reader.preparing.insert(id);
                self.metrics.weights_sent_bytes.inc_by(bytes);
                self.prepare((connection, id), (layer, expert), weights, jobs);
            }
            Ok(Request::Done { id }) => drop_later(self.grants.remove(&(connection, id))),
            Err(reason) => {
                tracing::debug!(connection, reason, "a reader of weights is disconnected");
                reader.connection.close();
            }
        }
    }

    /// Registers the memory of an expert, and computes its digest if it is not known, on a thread that may block.
    fn prepare(
        &self,
        (connection, id): (u64, u64),
        (layer, expert): (u32, u32),
        weights: Arc<ExpertWeights>,
        jobs: &mut JoinSet<Job>,
    ) {
        let job = move |outcome| Job { connection, id, layer, expert, outcome };
        let is_same = |registered: &Arc<Registered>| Arc::ptr_eq(registered.weights(), &weights);
        let known = self.registered.get(&(layer, expert)).and_then(Weak::upgrade).filter(is_same);
        let digest = self.digests.get(&(layer, expert));
        let digest = digest.filter(|(of, _)| of.as_ptr() == Arc::as_ptr(&weights));
        let digest = digest.map(|(_, digest)| *digest);
        let engine = Arc::clone(&self.engine);
        jobs.spawn_blocking(move || {
            if let Some(known) = known {
                return job(Ok(known));
            }
            let manifest = manifest::Manifest::of(&weights);
            let digest = digest.unwrap_or_else(|| {
                manifest::digest(layer, expert, &manifest, &manifest::parts(&weights))
            });
            job(Registered::new(engine, weights, manifest, digest).map(Arc::new))
        });
    }

    /// Sends a prepared grant.
    fn grant(&mut self, job: Job) {
        let Job { connection, id, layer, expert, outcome } = job;
        if let Ok(registered) = &outcome {
            self.registered.insert((layer, expert), Arc::downgrade(registered));
            let weights = Arc::downgrade(registered.weights());
            self.digests.insert((layer, expert), (weights, registered.digest()));
        }
        let Some(reader) = self.readers.get_mut(&connection) else {
            return drop_later(outcome.ok());
        };
        reader.preparing.remove(&id);
        let described = outcome.and_then(|registered| {
            let parts = registered.describe(&reader.connection)?;
            Ok((registered, parts))
        });
        match described {
            Ok((registered, parts)) => {
                let bytes = registered.weights().size_bytes() as u64;
                let lease = LEASE + Duration::from_secs(bytes / SLOWEST_BYTES_PER_S);
                reader.send(&Response::Grant {
                    id,
                    manifest: registered.manifest().clone(),
                    digest: wire::hex(&registered.digest()),
                    parts,
                    lease_ms: lease.as_millis() as u64,
                });
                let grant = Grant { _registered: registered, expires: Instant::now() + lease };
                drop_later(self.grants.insert((connection, id), grant));
            }
            Err(reason) => {
                tracing::warn!(layer, expert, reason, "cannot let a peer read an expert");
                reader.send(&Response::Refused { id: Some(id), reason });
            }
        }
    }

    /// Ends grants of closed connections and expired leases. Forgets digests of weights that are gone.
    fn end_grants(&mut self) {
        let now = Instant::now();
        self.readers.retain(|_, reader| reader.connection.closed().is_none());
        let is_over = |(connection, _): &(u64, u64), grant: &mut Grant| {
            grant.expires <= now || !self.readers.contains_key(connection)
        };
        let ended: Vec<_> = self
            .grants
            .extract_if(|key, grant| is_over(key, grant))
            .map(|(_, grant)| grant)
            .collect();
        drop_later((!ended.is_empty()).then_some(ended));
        self.registered.retain(|_, registered| registered.strong_count() > 0);
        self.digests.retain(|_, (weights, _)| weights.strong_count() > 0);
        self.metrics.weights_grants.set(self.grants.len() as i64);
        let num_refused = self.engine.stats().num_refused;
        self.metrics.weights_refused.inc_by(num_refused - self.num_refused);
        self.num_refused = num_refused;
    }
}

impl Reader {
    /// Sends a response without waiting. A reader that does not take it in time asks elsewhere.
    fn send(&self, response: &Response) {
        let deadline = Instant::now() + SEND_TIMEOUT;
        if let Err(error) = self.connection.start_notify(&wire::encode(response), deadline) {
            tracing::debug!(connection = self.connection.id(), %error, "a reader of weights is lost");
            self.connection.close();
        }
    }
}

/// The experts of a store.
fn index(store: &dyn Experts) -> Vec<LayerAssignment> {
    let layers = store.loaded().into_iter();
    layers.map(|(layer, experts)| LayerAssignment { layer, experts }).collect()
}

/// Drops grants on a thread that may block, because the last grant of an expert deregisters its memory.
fn drop_later<T: Send + 'static>(grants: Option<T>) {
    if let Some(grants) = grants {
        tokio::task::spawn_blocking(move || drop(grants));
    }
}

/// Most peers that read at a time.
const MAX_READERS: usize = 256;
/// Most grants at a time, of one reader and of all.
const MAX_GRANTS_OF_READER: usize = 8;
const MAX_GRANTS: usize = 64;
/// Pause of a reader that has reached these limits.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Least length of a grant.
const LEASE: Duration = Duration::from_secs(30);
/// A reader at this rate can still use a grant.
const SLOWEST_BYTES_PER_S: u64 = 1 << 20;
/// Longest request, and most bytes of requests of one reader that wait.
const MAX_REQUEST_BYTES: u64 = 4096;
const REQUEST_WINDOW_BYTES: u64 = 64 << 10;
/// Longest wait for room in a reader's window of notifications.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two checks for new and closed connections.
const IDLE_PERIOD: Duration = Duration::from_secs(5);
const BUSY_PERIOD: Duration = Duration::from_millis(100);
