//! The source: lets peers read experts of this server's memory.
//!
//! A peer asks for an expert and gets a grant: the layout, the digest and descriptors of the memory. While a grant is
//! in force, it holds the weights and their registration, whatever the store does. A grant ends with the reader's word,
//! with its connection, or with its lease. Only the rate of grants limits the rate of reads.
//!
//! Experts in a device's memory go to readers as copies in host memory. A reader whose device reaches that memory gets
//! the place instead.

mod connected;
mod listening;
mod registered;

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use control_api::LayerAssignment;
use message_engine::{Engine, Notification, WaitError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use self::connected::Reader;
pub use self::listening::SourceError;
pub(crate) use self::listening::{ListeningSource, SourceConfig};
use self::registered::Registered;
use super::ModelIdentity;
use super::limit::RateLimit;
use super::wire::{self, Request, Response, VERSION};
use crate::compute::ExpertWeights;
use crate::experts::{DeviceExperts, DevicePlace, Experts};
use crate::metrics::ServerMetrics;

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
    /// The same for experts of a device, which never change: of copies in host memory, and of device memory.
    copy_digests: HashMap<(u32, u32), [u8; 32]>,
    device_sums: HashMap<(u32, u32), [u64; 2]>,
    device_limit: RateLimit,
    /// For copies of a device's experts in host memory.
    copies: Arc<Semaphore>,
    /// The text by which peers on this host find the device's memory.
    share: Option<String>,
    sharing: JoinSet<()>,
}

struct Grant {
    /// Keeps the memory readable.
    _granted: Granted,
    expires: Instant,
}

/// The memory of a grant.
enum Granted {
    Host(Arc<Registered>),
    Device { place: DevicePlace, sum: [u64; 2], _memory: Arc<dyn Any + Send + Sync> },
}

/// The weights that a peer has asked for.
enum Wanted {
    Host(Arc<ExpertWeights>),
    /// To be copied to host memory.
    Copy(Arc<dyn DeviceExperts>, OwnedSemaphorePermit),
    Device(Arc<dyn DeviceExperts>),
}

/// A request whose memory is being prepared.
struct Job {
    connection: u64,
    id: u64,
    layer: u32,
    expert: u32,
    bytes: u64,
    outcome: Result<Granted, String>,
}

impl WeightSource {
    /// A source of the weights of one model.
    pub(crate) fn new(
        listening: ListeningSource,
        identity: ModelIdentity,
        metrics: ServerMetrics,
    ) -> Self {
        let ListeningSource { engine, limit } = listening;
        Self {
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
            copy_digests: HashMap::new(),
            device_sums: HashMap::new(),
            device_limit: RateLimit::new(limit.saturating_mul(DEVICE_SPEEDUP)),
            copies: Arc::new(Semaphore::new(MAX_COPIES)),
            share: None,
            sharing: JoinSet::new(),
        }
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
            self.readers.insert(connection.id(), Reader::new(connection));
        }
    }

    fn answer(&mut self, notification: Notification, jobs: &mut JoinSet<Job>) {
        let connection = notification.connection;
        let Some(reader) = self.readers.get(&connection) else { return };
        match wire::decode(&notification.bytes) {
            Ok(Request::Hello { version, fingerprint, parameters, device }) => {
                let found = ModelIdentity { fingerprint, parameters };
                if version == VERSION && found == self.identity {
                    let device = device.and_then(|form| self.share_with(&form));
                    let experts = self.store.get().map(|store| index(&**store));
                    let experts = experts.unwrap_or_default();
                    let Some(reader) = self.readers.get_mut(&connection) else { return };
                    reader.is_admitted = true;
                    reader.send(&Response::Index { version: VERSION, experts, device });
                } else {
                    let ours = (VERSION, &self.identity);
                    let reason =
                        format!("the server has {ours:?}, the reader {version}, {found:?}");
                    reader.send(&Response::Refused { id: None, reason });
                }
            }
            Ok(Request::Read { id, layer, expert, on_device }) => {
                let what = ((connection, id), (layer, expert));
                if let Err(response) = self.read(what.0, what.1, on_device, jobs)
                    && let Some(reader) = self.readers.get(&connection)
                {
                    reader.send(&response);
                }
            }
            Ok(Request::Done { id }) => drop_later(self.grants.remove(&(connection, id))),
            Err(reason) => {
                tracing::debug!(connection, reason, "a reader of weights is disconnected");
                reader.connection.close();
            }
        }
    }

    /// The text by which a reader on this host, whose device has experts in this form, finds the device's memory.
    fn share_with(&mut self, form: &str) -> Option<String> {
        let device = Arc::clone(self.store.get()?).device()?;
        if device.form() != form {
            return None;
        }
        if self.share.is_none() {
            match device.share() {
                Ok((text, serving)) => {
                    self.share = Some(text);
                    self.sharing.spawn(serving);
                }
                Err(error) => tracing::warn!(%error, "peers cannot map this device's memory"),
            }
        }
        self.share.clone()
    }

    /// Begins to prepare an expert.
    ///
    /// # Errors
    /// The answer, if the reader does not get the expert.
    fn read(
        &mut self,
        (connection, id): (u64, u64),
        (layer, expert): (u32, u32),
        on_device: bool,
        jobs: &mut JoinSet<Job>,
    ) -> Result<(), Response> {
        let Some(reader) = self.readers.get_mut(&connection) else { return Ok(()) };
        let refused = |reason: String| Response::Refused { id: Some(id), reason };
        let later = |pause: Duration| {
            let after_ms = pause.as_millis() as u64 + 1;
            Response::Later { id, after_ms }
        };
        if !reader.is_admitted {
            return Err(refused("a request before the hello".to_owned()));
        }
        if reader.preparing.contains(&id) || self.grants.contains_key(&(connection, id)) {
            return Err(refused(format!("the number {id} is in use")));
        }
        let num_granted = self.grants.keys().filter(|(of, _)| *of == connection).count();
        let num_open = num_granted + reader.preparing.len();
        if num_open >= MAX_GRANTS_OF_READER || self.grants.len() + jobs.len() >= MAX_GRANTS {
            return Err(later(BUSY_PAUSE));
        }
        let store = self.store.get();
        let device = store.and_then(|store| Arc::clone(store).device());
        let on_this = device.and_then(|device| Some((device.size_bytes(layer, expert)?, device)));
        let weights = store.and_then(|store| store.weights(layer, expert));
        let (bytes, wanted) = match (weights, on_this) {
            (_, Some((bytes, device))) if on_device => (bytes, Wanted::Device(device)),
            (Some(weights), _) if !on_device => {
                (weights.size_bytes() as u64, Wanted::Host(weights))
            }
            (None, Some((bytes, device))) => {
                let permit = Arc::clone(&self.copies).try_acquire_owned();
                (bytes, Wanted::Copy(device, permit.map_err(|_| later(BUSY_PAUSE))?))
            }
            _ => {
                let reason = format!("expert {expert} of layer {layer} is not loaded here");
                return Err(refused(reason));
            }
        };
        let limit = if on_device { &mut self.device_limit } else { &mut self.limit };
        limit.admit(bytes, Instant::now()).map_err(later)?;
        reader.preparing.insert(id);
        self.metrics.weights_sent_bytes.inc_by(bytes);
        self.prepare((connection, id), (layer, expert), bytes, wanted, jobs);
        Ok(())
    }

    /// Registers the memory of an expert, and computes its digest if it is not known, on a thread that may block.
    fn prepare(
        &self,
        (connection, id): (u64, u64),
        (layer, expert): (u32, u32),
        bytes: u64,
        wanted: Wanted,
        jobs: &mut JoinSet<Job>,
    ) {
        let key = (layer, expert);
        let job = move |outcome| Job { connection, id, layer, expert, bytes, outcome };
        let known = self.registered.get(&key).and_then(Weak::upgrade);
        let engine = Arc::clone(&self.engine);
        match wanted {
            Wanted::Host(weights) => {
                let is_same =
                    |registered: &Arc<Registered>| Arc::ptr_eq(registered.weights(), &weights);
                let known = known.filter(is_same);
                let digest = self.digests.get(&key);
                let digest = digest.filter(|(of, _)| of.as_ptr() == Arc::as_ptr(&weights));
                let digest = digest.map(|(_, digest)| *digest);
                jobs.spawn_blocking(move || {
                    if let Some(known) = known {
                        return job(Ok(Granted::Host(known)));
                    }
                    let registered = Registered::new(engine, key, weights, digest, None);
                    job(registered.map(Granted::Host))
                });
            }
            Wanted::Copy(device, permit) => {
                let digest = self.copy_digests.get(&key).copied();
                jobs.spawn_blocking(move || {
                    if let Some(known) = known {
                        return job(Ok(Granted::Host(known)));
                    }
                    let copied = device.copy_to_host(layer, expert).map_err(|e| e.to_string());
                    let registered = copied.and_then(|weights| {
                        Registered::new(engine, key, Arc::new(weights), digest, Some(permit))
                    });
                    job(registered.map(Granted::Host))
                });
            }
            Wanted::Device(device) => {
                let sum = self.device_sums.get(&key).copied();
                jobs.spawn_blocking(move || {
                    let gone = || "it is not loaded any more".to_owned();
                    let placed = device.place(layer, expert).ok_or_else(gone);
                    job(placed.and_then(|(place, memory)| {
                        let sum = sum.map_or_else(|| device.checksum(layer, expert), Ok);
                        let sum = sum.map_err(|error| error.to_string())?;
                        Ok(Granted::Device { place, sum, _memory: memory })
                    }))
                });
            }
        }
    }

    /// Sends a prepared grant.
    fn grant(&mut self, job: Job) {
        let Job { connection, id, layer, expert, bytes, outcome } = job;
        match &outcome {
            Ok(Granted::Host(registered)) => {
                self.registered.insert((layer, expert), Arc::downgrade(registered));
                if registered.is_copy() {
                    self.copy_digests.insert((layer, expert), registered.digest());
                } else {
                    let weights = Arc::downgrade(registered.weights());
                    self.digests.insert((layer, expert), (weights, registered.digest()));
                }
            }
            Ok(Granted::Device { sum, .. }) => {
                self.device_sums.insert((layer, expert), *sum);
            }
            Err(_) => {}
        }
        let Some(reader) = self.readers.get_mut(&connection) else {
            return drop_later(outcome.ok());
        };
        reader.preparing.remove(&id);
        let lease = LEASE + Duration::from_secs(bytes / SLOWEST_BYTES_PER_S);
        let lease_ms = lease.as_millis() as u64;
        let described = outcome.and_then(|granted| {
            let response = match &granted {
                Granted::Host(registered) => Response::Grant {
                    id,
                    manifest: registered.manifest().clone(),
                    digest: wire::hex(&registered.digest()),
                    parts: registered.describe(&reader.connection)?,
                    lease_ms,
                },
                Granted::Device { place, sum, .. } => {
                    let checksum = wire::sum_text(*sum);
                    Response::DeviceGrant { id, place: *place, checksum, lease_ms }
                }
            };
            Ok((granted, response))
        });
        match described {
            Ok((granted, response)) => {
                reader.send(&response);
                let grant = Grant { _granted: granted, expires: Instant::now() + lease };
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

/// Most grants at a time, of one reader and of all. Grants that are being prepared count.
const MAX_GRANTS_OF_READER: usize = 8;
const MAX_GRANTS: usize = 64;
/// Most experts of a device whose copies in host memory peers read at a time.
const MAX_COPIES: usize = 16;
/// The limit for reads of a device's memory by other devices of the host, as a multiple of that for host memory. By
/// default it is a small part of what the memory of a GPU carries.
const DEVICE_SPEEDUP: u64 = 25;
/// Pause of a reader that has reached these limits.
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Least length of a grant.
const LEASE: Duration = Duration::from_secs(30);
/// A reader at this rate can still use a grant.
const SLOWEST_BYTES_PER_S: u64 = 1 << 20;
/// Time between two checks for new and closed connections.
const IDLE_PERIOD: Duration = Duration::from_secs(5);
const BUSY_PERIOD: Duration = Duration::from_millis(100);
