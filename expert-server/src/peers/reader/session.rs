//! Connections to the peers of one read, and the read of one expert.

mod connecting;
mod transfer;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use message_engine::{Connection, Engine, EngineConfig, WaitError, default_fabrics};

use self::connecting::{add_connections, connect, nearest_first};
use self::transfer::ReadLimits;
use super::{Fetch, Peer, ReadExpert};
use crate::experts::{CopyError, DeviceExperts, Experts, PeerMemory};
use crate::peers::manifest::{ExpertShape, Manifest};
use crate::peers::ticket::NoPeers;
use crate::peers::wire::{self, Request, Response};

/// Why a peer does not give an expert.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    /// The peer has reached a limit.
    #[error("it has reached its limit")]
    Later(Duration),
    #[error("it refuses: {0}")]
    Refused(String),
    #[error("the weights are damaged: {0}")]
    Damaged(String),
    /// The peer is not asked again.
    #[error("{0}")]
    Failed(String),
    #[error("this server cannot take the expert: {0}")]
    Memory(String),
    /// The memory of the peer's device cannot be reached.
    #[error("{0}")]
    Unreachable(String),
    #[error("the read was stopped")]
    Stopped,
    /// The thread panicked. The log has the place.
    #[error("reading it panicked")]
    Panicked,
}

/// The peer to ask for an expert.
pub(super) enum Choice<'a> {
    Peer(Chosen<'a>),
    /// All peers that hold it have reached their limits for this time.
    Later(Duration),
    None,
}

/// A peer, with one read more under way than it has without this.
pub(super) struct Chosen<'a> {
    pub(super) idx: usize,
    source: &'a Source,
}

impl Drop for Chosen<'_> {
    fn drop(&mut self) {
        self.source.lock().num_reading -= 1;
    }
}

impl Chosen<'_> {
    pub(super) fn name(&self) -> &str {
        &self.source.name
    }

    /// Asks the peer for nothing until `at`.
    pub(super) fn defer(&self, at: Instant) {
        self.source.lock().ready_at = Some(at);
    }
}

/// Connections to peers. Dropping it closes them.
pub(super) struct Session {
    engine: Arc<Engine>,
    shape: ExpertShape,
    chunk_timeout: Duration,
    sources: Vec<Source>,
    next_id: AtomicU64,
    waiting: Mutex<Waiting>,
}

/// Threads that wait for a response, by connection and number of the request: a source answers no request that others
/// were sent.
type Waiting = HashMap<(u64, u64), mpsc::SyncSender<Response>>;

struct Source {
    name: String,
    /// One or more. The threads of one connection take turns.
    connections: Vec<Connection>,
    holds: HashSet<(u32, u32)>,
    /// The memory of its device, if this server's device reaches it.
    device: Option<Box<dyn PeerMemory>>,
    state: Mutex<SourceState>,
}

#[derive(Default)]
struct SourceState {
    num_reading: usize,
    has_failed: bool,
    /// Its device cannot be reached after all, or copies from it are damaged.
    has_lost_device: bool,
    /// It has reached its limit until this time.
    ready_at: Option<Instant>,
}

/// A grant of a peer.
struct Grant {
    manifest: Manifest,
    digest: String,
    parts: Vec<String>,
    limits: ReadLimits,
}

impl Session {
    /// Connects to peers, to those of this host first, until each of the experts has two, or none is left. Then gives
    /// two of each expert up to `num_threads` connections. Blocks for at most [`HELLO_TIMEOUT`](connecting::HELLO_TIMEOUT)
    /// for every [`CONNECTS_AT_ONCE`] peers, and once more. When `stop` becomes true it goes on with the peers that have
    /// answered.
    ///
    /// # Errors
    /// A text that says why there is no peer.
    pub(super) fn open(
        fetch: &Fetch,
        peers: &[Peer],
        wanted: &[(u32, u32)],
        num_threads: usize,
        device: Option<&Arc<dyn DeviceExperts>>,
        stop: &AtomicBool,
    ) -> Result<Self, String> {
        if peers.is_empty() {
            return Err("no server of the fleet lets others read its weights".to_owned());
        }
        let fabrics = default_fabrics(fetch.local, None).map_err(|error| error.to_string())?;
        let config = EngineConfig {
            bind: SocketAddr::new(fetch.local, 0),
            fabrics,
            check: Some(Arc::new(NoPeers)),
            ticket: fetch.secret.as_ref().map(|secret| secret.reveal().to_owned()),
            tls: fetch.security.for_client().cloned(),
            ..EngineConfig::default()
        };
        let engine = Arc::new(Engine::start(config).map_err(|error| error.to_string())?);
        let mut sources: Vec<(&Peer, Source)> = Vec::new();
        let mut reasons = Vec::new();
        let peers = nearest_first(peers, fetch.local);
        for group in peers.chunks(CONNECTS_AT_ONCE) {
            let holds = |expert| sources.iter().filter(move |(_, s)| s.holds.contains(expert));
            let has_enough = |expert| holds(expert).count() >= ENOUGH_HOLDERS;
            if wanted.iter().all(has_enough) || stop.load(Ordering::Relaxed) {
                break;
            }
            for (peer, outcome) in connect(&engine, fetch, group, device, stop) {
                match outcome {
                    Ok(source) => sources.push((peer, source)),
                    Err(reason) => {
                        let (peer, addr) = (&peer.name, peer.addr);
                        tracing::warn!(peer, %addr, reason, "cannot read weights of a server");
                        reasons.push(format!("{peer} at {addr}: {reason}"));
                    }
                }
            }
        }
        if sources.is_empty() {
            return Err(reasons.join("; "));
        }
        if !stop.load(Ordering::Relaxed) {
            add_connections(&engine, fetch, &mut sources, wanted, num_threads, device);
        }
        let sources = sources.into_iter().map(|(_, source)| source).collect();
        let waiting = Mutex::default();
        let next_id = AtomicU64::new(1);
        let (shape, chunk_timeout) = (fetch.shape.0, fetch.chunk_timeout);
        Ok(Self { engine, shape, chunk_timeout, sources, next_id, waiting })
    }

    /// The peer to read an expert of: one whose device this server's device reaches, if there is one, and among equals
    /// the one with the fewest reads under way. Callers take turns, so that each sees the choices before its own.
    pub(super) fn choose(
        &self,
        expert: (u32, u32),
        excluded: &[usize],
        now: Instant,
    ) -> Choice<'_> {
        let mut best: Option<(usize, (bool, usize))> = None;
        let mut earliest: Option<Instant> = None;
        for (idx, source) in self.sources.iter().enumerate() {
            let state = source.lock();
            if state.has_failed || excluded.contains(&idx) || !source.holds.contains(&expert) {
                continue;
            }
            match state.ready_at {
                Some(at) if at > now => {
                    earliest = Some(earliest.map_or(at, |earliest| earliest.min(at)));
                }
                _ => {
                    let is_remote = source.device.is_none() || state.has_lost_device;
                    let cost = (is_remote, state.num_reading);
                    if best.is_none_or(|(_, least)| cost < least) {
                        best = Some((idx, cost));
                    }
                }
            }
        }
        match (best, earliest) {
            (Some((idx, _)), _) => {
                let source = &self.sources[idx];
                source.lock().num_reading += 1;
                Choice::Peer(Chosen { idx, source })
            }
            (None, Some(at)) => Choice::Later(at - now),
            (None, None) => Choice::None,
        }
    }

    /// Hands responses to the threads that wait for them, until `is_over` is true.
    pub(super) fn route_responses(&self, is_over: &AtomicBool) {
        while !is_over.load(Ordering::Relaxed) {
            let notification = match self.engine.next_notification(Instant::now() + ROUTE_PERIOD) {
                Ok(notification) => notification,
                Err(WaitError::Deadline) => continue,
                Err(error) => {
                    tracing::error!(%error, "reading weights of peers has ended");
                    break;
                }
            };
            let has = |source: &&Source| source.connection(notification.connection).is_some();
            let Some(source) = self.sources.iter().find(has) else { continue };
            match wire::decode::<Response>(&notification.bytes) {
                Ok(response) => {
                    let id = match &response {
                        Response::Grant { id, .. }
                        | Response::DeviceGrant { id, .. }
                        | Response::Later { id, .. } => Some(*id),
                        Response::Refused { id, .. } => *id,
                        Response::Index { .. } => None,
                    };
                    let key = id.map(|id| (notification.connection, id));
                    let waiting = key.and_then(|key| self.lock_waiting().remove(&key));
                    if let Some(waiting) = waiting {
                        // The thread may have given up.
                        let _ = waiting.send(response);
                    }
                }
                Err(reason) => {
                    tracing::warn!(peer = source.name, reason, "a server is not read any more");
                    source.lock().has_failed = true;
                    source.connections.iter().for_each(Connection::close);
                }
            }
        }
        // Nothing wakes the threads that still wait but the drop of their senders.
        self.lock_waiting().clear();
    }

    /// Reads an expert of a peer into `store` on the thread with the index `thread`, and returns it. Blocks until it
    /// is verified and in service, at most for the time of the grant and [`REPLY_TIMEOUT`].
    pub(super) fn read(
        &self,
        (peer, thread): (&Chosen<'_>, usize),
        expert: (u32, u32),
        store: &dyn Experts,
        stop: &AtomicBool,
    ) -> Result<ReadExpert, ReadError> {
        let source = peer.source;
        let connection = source.connections.get(thread % source.connections.len().max(1));
        let outcome = match connection {
            Some(connection) => self.read_from(source, connection, expert, store, stop),
            None => Err(ReadError::Failed("it has no connection".to_owned())),
        };
        source.lock().has_failed |= matches!(outcome, Err(ReadError::Failed(_)));
        outcome
    }

    fn read_from(
        &self,
        source: &Source,
        connection: &Connection,
        (layer, expert): (u32, u32),
        store: &dyn Experts,
        stop: &AtomicBool,
    ) -> Result<ReadExpert, ReadError> {
        if let Some(device) = source.device.as_deref().filter(|_| !source.lock().has_lost_device) {
            match self.copy_from(device, connection, (layer, expert), stop) {
                // A bad link between devices damages good weights. The host's copy has a checksum of its own.
                Err(error @ (ReadError::Unreachable(_) | ReadError::Damaged(_))) => {
                    let peer = &source.name;
                    tracing::warn!(peer, %error, "experts of a device come through the host");
                    source.lock().has_lost_device = true;
                }
                outcome => {
                    return outcome.map(|bytes| ReadExpert { bytes, is_from_device: true });
                }
            }
        }
        // The lease begins at the source, after this.
        let begin = Instant::now();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let grant = match self.ask(connection, &request(id, layer, expert, false), id, stop)? {
            Response::Grant { manifest, digest, parts, lease_ms, .. } => {
                let deadline = begin + lease(lease_ms);
                let limits = ReadLimits { deadline, chunk_timeout: self.chunk_timeout };
                Grant { manifest, digest, parts, limits }
            }
            _ => return Err(ReadError::Failed("an unexpected answer".to_owned())),
        };
        failpoint!("server::in_weights_read");
        let outcome = self.read_granted(connection, (layer, expert), &grant, store, stop);
        give_back(connection, id);
        outcome.map(|bytes| ReadExpert { bytes, is_from_device: false })
    }

    /// Copies an expert from the memory of a peer's device.
    fn copy_from(
        &self,
        device: &dyn PeerMemory,
        connection: &Connection,
        (layer, expert): (u32, u32),
        stop: &AtomicBool,
    ) -> Result<u64, ReadError> {
        let begin = Instant::now();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let response = self.ask(connection, &request(id, layer, expert, true), id, stop)?;
        let Response::DeviceGrant { place, checksum, lease_ms, .. } = response else {
            return Err(ReadError::Failed("an unexpected answer".to_owned()));
        };
        let deadline = begin + lease(lease_ms);
        let failed = |error| match error {
            CopyError::Damaged { .. } => ReadError::Damaged(error.to_string()),
            CopyError::Unreachable(reason) => ReadError::Unreachable(reason),
            CopyError::Load(error) => ReadError::Memory(error.to_string()),
        };
        let outcome = match wire::parse_sum(&checksum) {
            Some(sum) => device.take(layer, expert, &place, sum, deadline).map_err(failed),
            None => Err(ReadError::Damaged("a malformed checksum".to_owned())),
        };
        give_back(connection, id);
        outcome
    }

    /// Sends a request and waits for its grant, of either kind, for up to [`REPLY_TIMEOUT`] or until `stop` is true.
    fn ask(
        &self,
        connection: &Connection,
        request: &Request,
        id: u64,
        stop: &AtomicBool,
    ) -> Result<Response, ReadError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let key = (connection.id(), id);
        self.lock_waiting().insert(key, sender);
        let begin = Instant::now();
        let sent = connection.notify(&wire::encode(request), begin + REPLY_TIMEOUT);
        let response = match sent {
            Ok(_) => loop {
                match receiver.recv_timeout(CLOSE_PERIOD) {
                    Ok(response) => break Ok(Some(response)),
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        break Err("reading has ended".to_owned());
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        if stop.load(Ordering::Relaxed) {
                            break Ok(None);
                        }
                        if let Some(reason) = connection.closed() {
                            break Err(reason.to_string());
                        }
                        if begin.elapsed() >= REPLY_TIMEOUT {
                            let seconds = REPLY_TIMEOUT.as_secs();
                            break Err(format!("no answer within {seconds} s"));
                        }
                    }
                }
            },
            Err(error) => Err(error.to_string()),
        };
        self.lock_waiting().remove(&key);
        let Some(response) = response.map_err(ReadError::Failed)? else {
            // Its grant may be on the way.
            give_back(connection, id);
            return Err(ReadError::Stopped);
        };
        match response {
            granted @ (Response::Grant { .. } | Response::DeviceGrant { .. }) => Ok(granted),
            Response::Later { after_ms, .. } => {
                Err(ReadError::Later(Duration::from_millis(after_ms.min(MAX_LEASE_MS))))
            }
            Response::Refused { reason, .. } => Err(ReadError::Refused(reason)),
            Response::Index { .. } => Err(ReadError::Failed("an unexpected answer".to_owned())),
        }
    }

    fn lock_waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn request(id: u64, layer: u32, expert: u32, on_device: bool) -> Request {
    Request::Read { id, layer, expert, on_device }
}

/// The length of a grant, as its source names it.
fn lease(lease_ms: u64) -> Duration {
    Duration::from_millis(lease_ms.min(MAX_LEASE_MS))
}

/// Tells a source that a grant is not used any more.
fn give_back(connection: &Connection, id: u64) {
    let deadline = Instant::now() + REPLY_TIMEOUT;
    // If it is lost, the source takes the grant back at the end of the connection.
    let _ = connection.start_notify(&wire::encode(&Request::Done { id }), deadline);
}

impl Source {
    fn connection(&self, id: u64) -> Option<&Connection> {
        self.connections.iter().find(|connection| connection.id() == id)
    }

    fn lock(&self) -> MutexGuard<'_, SourceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Peers that are connected at the same time.
const CONNECTS_AT_ONCE: usize = 16;
/// No more peers are connected when each expert has so many.
const ENOUGH_HOLDERS: usize = 2;
/// Longest wait for the answer to a request.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks of a connection's end during a wait.
const CLOSE_PERIOD: Duration = Duration::from_millis(50);
/// Time between two checks of the end of a session.
const ROUTE_PERIOD: Duration = Duration::from_millis(20);
/// Longest lease and pause that a peer can name.
const MAX_LEASE_MS: u64 = 3_600_000;

#[cfg(test)]
mod tests;
