//! Connections to the peers of one read, and the read of one expert.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use message_engine::{
    Access, Connection, Descriptor, Engine, EngineConfig, MemoryRegion, WaitError, default_fabrics,
};
use p2p_core::TransportKind;

use super::{Fetch, Peer};
use crate::compute::{ExpertWeights, WeightMemory};
use crate::peers::manifest::{Digest, ExpertShape, Manifest};
use crate::peers::ticket::NoPeers;
use crate::peers::wire::{self, Request, Response, VERSION};

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
    #[error("there is no memory for the expert: {0}")]
    Memory(String),
    #[error("the read was stopped")]
    Stopped,
}

/// The peer to ask for an expert.
pub(super) enum Choice {
    Peer(usize),
    /// All peers that hold it have reached their limits for this time.
    Later(Duration),
    None,
}

/// Connections to peers. Dropping it closes them.
pub(super) struct Session {
    engine: Arc<Engine>,
    shape: ExpertShape,
    sources: Vec<Source>,
    next_id: AtomicU64,
    /// Threads that wait for a response, by request.
    waiting: Mutex<HashMap<u64, mpsc::SyncSender<Response>>>,
}

struct Source {
    name: String,
    /// One for each thread, because the threads of one connection take turns.
    connections: Vec<Connection>,
    holds: HashSet<(u32, u32)>,
    state: Mutex<SourceState>,
}

#[derive(Default)]
struct SourceState {
    num_reading: usize,
    has_failed: bool,
    /// It has reached its limit until this time.
    ready_at: Option<Instant>,
}

/// A grant of a peer.
struct Grant {
    manifest: Manifest,
    digest: String,
    parts: Vec<String>,
    deadline: Instant,
}

impl Session {
    /// Connects to peers until each of the experts has two, or none is left. Blocks for at most [`HELLO_TIMEOUT`] for
    /// every [`CONNECTS_AT_ONCE`] peers.
    ///
    /// # Errors
    /// A text that says why there is no peer.
    pub(super) fn open(
        fetch: &Fetch,
        peers: &[Peer],
        wanted: &[(u32, u32)],
        num_threads: usize,
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
        let mut sources: Vec<Source> = Vec::new();
        let mut reasons = Vec::new();
        for group in peers.chunks(CONNECTS_AT_ONCE) {
            let num_holders = |expert| sources.iter().filter(|s| s.holds.contains(expert)).count();
            if wanted.iter().all(|expert| num_holders(expert) >= ENOUGH_HOLDERS) {
                break;
            }
            for (peer, outcome) in connect(&engine, fetch, group, num_threads) {
                match outcome {
                    Ok(source) => sources.push(source),
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
        let waiting = Mutex::default();
        let next_id = AtomicU64::new(1);
        Ok(Self { engine, shape: fetch.shape.0, sources, next_id, waiting })
    }

    pub(super) fn name(&self, peer: usize) -> &str {
        &self.sources[peer].name
    }

    /// The peer with the fewest reads under way that holds the expert.
    pub(super) fn choose(&self, expert: (u32, u32), excluded: &[usize], now: Instant) -> Choice {
        let mut best: Option<(usize, usize)> = None;
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
                _ if best.is_none_or(|(_, least)| state.num_reading < least) => {
                    best = Some((idx, state.num_reading));
                }
                _ => {}
            }
        }
        match (best, earliest) {
            (Some((idx, _)), _) => Choice::Peer(idx),
            (None, Some(at)) => Choice::Later(at - now),
            (None, None) => Choice::None,
        }
    }

    /// Asks a peer for nothing until `at`.
    pub(super) fn defer(&self, peer: usize, at: Instant) {
        self.sources[peer].lock().ready_at = Some(at);
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
                        Response::Grant { id, .. } | Response::Later { id, .. } => Some(*id),
                        Response::Refused { id, .. } => *id,
                        Response::Index { .. } => None,
                    };
                    let waiting = id.and_then(|id| self.lock_waiting().remove(&id));
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

    /// Reads an expert of a peer on the thread with the index `thread`. Blocks until it is verified, at most for the time of the grant and
    /// [`REPLY_TIMEOUT`].
    pub(super) fn read(
        &self,
        (peer, thread): (usize, usize),
        layer: u32,
        expert: u32,
        stop: &AtomicBool,
    ) -> Result<ExpertWeights, ReadError> {
        let source = &self.sources[peer];
        source.lock().num_reading += 1;
        let connection = source.connections.get(thread % source.connections.len().max(1));
        let outcome = match connection {
            Some(connection) => self.read_from(connection, layer, expert, stop),
            None => Err(ReadError::Failed("it has no connection".to_owned())),
        };
        let mut state = source.lock();
        state.num_reading -= 1;
        state.has_failed |= matches!(outcome, Err(ReadError::Failed(_)));
        outcome
    }

    fn read_from(
        &self,
        connection: &Connection,
        layer: u32,
        expert: u32,
        stop: &AtomicBool,
    ) -> Result<ExpertWeights, ReadError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let grant = self.ask(connection, &Request::Read { id, layer, expert }, id)?;
        let weights = self.read_granted(connection, layer, expert, &grant, stop);
        let deadline = Instant::now() + REPLY_TIMEOUT;
        // If it is lost, the source takes the grant back at the end of the connection.
        let _ = connection.start_notify(&wire::encode(&Request::Done { id }), deadline);
        weights
    }

    /// Sends a request and waits for its grant.
    fn ask(&self, connection: &Connection, request: &Request, id: u64) -> Result<Grant, ReadError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.lock_waiting().insert(id, sender);
        let begin = Instant::now();
        let sent = connection.notify(&wire::encode(request), begin + REPLY_TIMEOUT);
        let response = match sent {
            Ok(_) => loop {
                match receiver.recv_timeout(CLOSE_PERIOD) {
                    Ok(response) => break Ok(response),
                    Err(mpsc::RecvTimeoutError::Disconnected) => {
                        break Err("reading has ended".to_owned());
                    }
                    Err(mpsc::RecvTimeoutError::Timeout) => {
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
        self.lock_waiting().remove(&id);
        match response.map_err(ReadError::Failed)? {
            Response::Grant { manifest, digest, parts, lease_ms, .. } => {
                let lease = Duration::from_millis(lease_ms.min(MAX_LEASE_MS));
                Ok(Grant { manifest, digest, parts, deadline: begin + lease })
            }
            Response::Later { after_ms, .. } => {
                Err(ReadError::Later(Duration::from_millis(after_ms.min(MAX_LEASE_MS))))
            }
            Response::Refused { reason, .. } => Err(ReadError::Refused(reason)),
            Response::Index { .. } => Err(ReadError::Failed("an unexpected answer".to_owned())),
        }
    }

    fn read_granted(
        &self,
        connection: &Connection,
        layer: u32,
        expert: u32,
        grant: &Grant,
        stop: &AtomicBool,
    ) -> Result<ExpertWeights, ReadError> {
        let lens = grant.manifest.part_lens(self.shape).map_err(ReadError::Damaged)?;
        let descriptors = grant.parts.iter().map(|text| wire::descriptor(text));
        let descriptors = descriptors.collect::<Result<Vec<_>, _>>().map_err(ReadError::Damaged)?;
        let found = descriptors.iter().map(|part| part.map_or(0, |part| part.bytes as usize));
        if !found.eq(lens.iter().copied()) {
            return Err(ReadError::Damaged("parts of other lengths than the layout's".to_owned()));
        }
        let mut ranges = Vec::with_capacity(lens.len());
        let mut offset = 0usize;
        for len in lens {
            ranges.push(offset..offset + len);
            offset += len.next_multiple_of(ALIGN_BYTES);
        }
        let memory = WeightMemory::new(offset.max(ALIGN_BYTES));
        let memory = memory.map_err(|error| ReadError::Memory(error.to_string()))?;
        let mut digest = Digest::new(layer, expert, &grant.manifest);
        let parts: Vec<_> = ranges.iter().cloned().zip(descriptors).collect();
        let memory = self.fill(connection, memory, &parts, grant.deadline, &mut digest, stop)?;
        let found = wire::hex(&digest.finish());
        if found != grant.digest {
            let expected = &grant.digest;
            let text = format!("checksum {found:.16}…, expected {expected:.16}…");
            return Err(ReadError::Damaged(text));
        }
        grant.manifest.assemble(&Arc::new(memory), &ranges).map_err(ReadError::Damaged)
    }

    /// Reads the parts of a grant into `memory` and adds them to `digest`. Returns the memory when no operation uses it
    /// any more.
    fn fill(
        &self,
        connection: &Connection,
        mut memory: WeightMemory,
        parts: &[(Range<usize>, Option<Descriptor>)],
        deadline: Instant,
        digest: &mut Digest,
        stop: &AtomicBool,
    ) -> Result<WeightMemory, ReadError> {
        let bytes = memory.as_slice().len();
        let first = memory.as_mut_ptr();
        // SAFETY: the memory is writable, and stays mapped until `dereg` below has succeeded, or for ever. Only
        // `read_part` makes references to it before, and those to bytes that no transfer uses.
        let region = unsafe { self.engine.reg(first, bytes, Access::Local) };
        let region = region.map_err(|error| ReadError::Memory(error.to_string()))?;
        let outcome = parts.iter().try_for_each(|(range, part)| match part {
            Some(part) => read_part(connection, &region, range, part, deadline, digest, stop),
            None => Ok(()),
        });
        if let Err(error) = self.engine.dereg(region) {
            // An operation may still write.
            std::mem::forget(memory);
            return Err(ReadError::Failed(error.to_string()));
        }
        outcome.map(|()| memory)
    }

    fn lock_waiting(&self) -> MutexGuard<'_, HashMap<u64, mpsc::SyncSender<Response>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source {
    fn connection(&self, id: u64) -> Option<&Connection> {
        self.connections.iter().find(|connection| connection.id() == id)
    }

    fn lock(&self) -> MutexGuard<'_, SourceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads one part into its range of `region`, on the caller's thread if the transport allows it. Adds each chunk to the
/// digest while it is in the processor's cache.
fn read_part(
    connection: &Connection,
    region: &MemoryRegion,
    range: &Range<usize>,
    part: &Descriptor,
    deadline: Instant,
    digest: &mut Digest,
    stop: &AtomicBool,
) -> Result<(), ReadError> {
    let failed = |error: &dyn std::error::Error| ReadError::Failed(error.to_string());
    let is_direct = connection.transport().kind == TransportKind::Cma;
    let chunk_bytes = if is_direct { DIRECT_CHUNK_BYTES } else { CHUNK_BYTES };
    let mut done = 0;
    while done < part.bytes {
        if stop.load(Ordering::Relaxed) {
            return Err(ReadError::Stopped);
        }
        let len = (part.bytes - done).min(chunk_bytes);
        let first = range.start as u64 + done;
        let span = region.span(first, len).map_err(|error| failed(&error))?;
        let remote = part.sub(done, len).map_err(|error| failed(&error))?;
        let read = connection
            .read_directly(&span, &remote, deadline)
            .unwrap_or_else(|| connection.read(&span, &remote, deadline));
        read.map_err(|error| failed(&error))?;
        // SAFETY: the bytes are within the region, as `span` has checked, and initialised: the memory was zeroed. Their
        // transfer has ended, later transfers write other bytes, and peers have no right to the region.
        let bytes = unsafe {
            std::slice::from_raw_parts(region.as_ptr().as_ptr().add(first as usize), len as usize)
        };
        digest.update(bytes);
        done += len;
    }
    Ok(())
}

/// Connects to some peers at the same time.
fn connect<'a>(
    engine: &Engine,
    fetch: &Fetch,
    peers: &'a [Peer],
    num_threads: usize,
) -> Vec<(&'a Peer, Result<Source, String>)> {
    let deadline = Instant::now() + HELLO_TIMEOUT;
    let hello = wire::encode(&Request::Hello {
        version: VERSION,
        fingerprint: fetch.identity.fingerprint.clone(),
        parameters: fetch.identity.parameters.clone(),
    });
    let reach = |peer: &Peer| {
        let connect = |_| {
            let connection = engine.connect_with(peer.addr, peer.options.clone(), deadline);
            let connection = connection.map_err(|error| error.to_string())?;
            connection.notify(&hello, deadline).map_err(|error| error.to_string())?;
            Ok::<_, String>(connection)
        };
        (0..num_threads).map(connect).collect::<Result<Vec<_>, _>>()
    };
    let reached: Vec<_> = std::thread::scope(|scope| {
        let reaching: Vec<_> = peers.iter().map(|peer| scope.spawn(|| reach(peer))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Vec<Connection>, String>>| {
            thread.join().unwrap_or_else(|_| Err("connecting panicked".to_owned()))
        };
        reaching.into_iter().map(join).collect()
    });
    let mut answers: HashMap<u64, Result<HashSet<(u32, u32)>, String>> = HashMap::new();
    // All connections of a peer get the same answer.
    let num_awaited = |answers: &HashMap<u64, _>| {
        let first = reached.iter().flatten().filter_map(|connections| connections.first());
        let awaited = first.filter(|connection| connection.closed().is_none());
        awaited.filter(|connection| !answers.contains_key(&connection.id())).count()
    };
    while num_awaited(&answers) > 0 && Instant::now() < deadline {
        let until = deadline.min(Instant::now() + CLOSE_PERIOD);
        if let Ok(notification) = engine.next_notification(until) {
            answers.insert(notification.connection, index(&notification.bytes));
        }
    }
    let sources = peers.iter().zip(reached).map(|(peer, connections)| {
        let source = connections.and_then(|connections| {
            let Some(connection) = connections.first() else {
                return Err("it has no connection".to_owned());
            };
            let no_answer = || match connection.closed() {
                Some(reason) => Err(reason.to_string()),
                None => Err(format!("no answer within {} s", HELLO_TIMEOUT.as_secs())),
            };
            let holds = answers.remove(&connection.id()).unwrap_or_else(no_answer)?;
            let (name, state) = (peer.name.clone(), Mutex::default());
            Ok(Source { name, connections, holds, state })
        });
        (peer, source)
    });
    sources.collect()
}

/// The experts of a peer, from its answer to the hello.
fn index(bytes: &[u8]) -> Result<HashSet<(u32, u32)>, String> {
    match wire::decode(bytes)? {
        Response::Index { version: VERSION, experts } => {
            let of_layer = experts.into_iter();
            let pairs = of_layer
                .flat_map(|entry| entry.experts.into_iter().map(move |id| (entry.layer, id)));
            Ok(pairs.collect())
        }
        Response::Index { version, .. } => Err(format!("version {version}, expected {VERSION}")),
        Response::Refused { reason, .. } => Err(reason),
        _ => Err("an unexpected answer".to_owned()),
    }
}

/// Peers that are connected at the same time.
const CONNECTS_AT_ONCE: usize = 16;
/// No more peers are connected when each expert has so many.
const ENOUGH_HOLDERS: usize = 2;
/// Longest wait for a peer's connection and index.
const HELLO_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest wait for the answer to a request.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks of a connection's end during a wait.
const CLOSE_PERIOD: Duration = Duration::from_millis(50);
/// Time between two checks of the end of a session.
const ROUTE_PERIOD: Duration = Duration::from_millis(20);
/// Longest lease and pause that a peer can name.
const MAX_LEASE_MS: u64 = 3_600_000;
/// Bytes that are read at once, and then added to the digest.
const CHUNK_BYTES: u64 = 16 << 20;
/// The same for copies on the reader's thread, which cost no round trip: less than a processor's cache.
const DIRECT_CHUNK_BYTES: u64 = 256 << 10;
/// Alignment of parts: a cache line.
const ALIGN_BYTES: usize = 64;

#[cfg(test)]
mod tests;
