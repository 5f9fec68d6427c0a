//! Loads experts from peers and from the checkpoint's files, as the server's settings say.

mod addresses;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use control_api::{ControlClient, LoadingReport, MemberState};
use message_engine::ConnectOptions;

use crate::config::WeightsFrom;
use crate::experts::Experts;
use crate::metrics::ServerMetrics;
use crate::peers::{Fetch, Fetched, Peer, ReaderTicket};

/// An expert that was not loaded, with the reason.
pub(crate) type Missing = ((u32, u32), String);

/// Loads experts of one server.
pub(crate) struct Loader {
    /// Name of this server, which is no peer of itself.
    pub(crate) name: String,
    pub(crate) from: WeightsFrom,
    /// Whether the checkpoint has weight files.
    pub(crate) has_files: bool,
    /// `None` if the server cannot read weights of peers.
    pub(crate) peers: Option<(Fetch, ControlClient)>,
    pub(crate) metrics: ServerMetrics,
    pub(crate) progress: Arc<LoadingProgress>,
}

/// How much of the machine a load may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// The server has no clients yet.
    First,
    /// Clients wait for answers meanwhile.
    Background,
}

impl Pace {
    /// Experts of peers that are read at a time, each on a thread of its own.
    fn num_reads(self) -> usize {
        match self {
            Self::First => {
                std::thread::available_parallelism().map_or(2, usize::from).clamp(2, MAX_READS)
            }
            Self::Background => 1,
        }
    }
}

/// Experts by where to take them from.
#[derive(Debug, Default)]
pub(crate) struct Split {
    pub(crate) files: Vec<(u32, u32)>,
    pub(crate) peers: Vec<(u32, u32)>,
}

impl Split {
    /// The experts from files (layer → expert ids).
    pub(crate) fn files_by_layer(&self) -> BTreeMap<u32, Vec<u32>> {
        let mut map = BTreeMap::<u32, Vec<u32>>::new();
        for &(layer, expert) in &self.files {
            map.entry(layer).or_default().push(expert);
        }
        map
    }
}

impl Loader {
    /// Divides experts into experts to read from files and experts to read from peers. Experts whose files are in
    /// memory come from there, unless peers alone are allowed.
    pub(crate) async fn split(
        &self,
        checkpoint: &Arc<Checkpoint>,
        wanted: Vec<(u32, u32)>,
    ) -> Split {
        let from_files = |files| Split { files, peers: Vec::new() };
        if self.peers.is_none() || self.from == WeightsFrom::Disk {
            return from_files(wanted);
        }
        if self.from == WeightsFrom::Peers || !self.has_files {
            return Split { files: Vec::new(), peers: wanted };
        }
        let (files, all) = (Arc::clone(checkpoint), wanted.clone());
        let looking = tokio::task::spawn_blocking(move || {
            let is_cached = |&(layer, expert): &(u32, u32)| files.is_expert_cached(layer, expert);
            let (files, peers) = all.into_iter().partition(is_cached);
            Split { files, peers }
        });
        match looking.await {
            Ok(split) if split.peers.is_empty() || !self.peers(None).await.is_empty() => split,
            _ => from_files(wanted),
        }
    }

    /// Loads experts that a store lacks, puts each into service, and returns the others. Ends early when `stop` becomes
    /// true, and sets `stop` when the future is dropped before its end. Bounded by the time of the reads and the patience with peers.
    pub(crate) async fn load(
        &self,
        store: &Arc<dyn Experts>,
        mut wanted: Vec<(u32, u32)>,
        pace: Pace,
        stop: Arc<AtomicBool>,
    ) -> Vec<Missing> {
        wanted.retain(|&(layer, expert)| !store.has(layer, expert));
        let stop_on_drop = StopOnDrop(Some(Arc::clone(&stop)));
        let Split { mut files, peers } = self.split(store.checkpoint(), wanted).await;
        let mut missing = Vec::new();
        if !peers.is_empty() {
            let fetched = self.fetch(store, peers, pace, &stop).await;
            if self.from == WeightsFrom::Auto && self.has_files {
                files.extend(fetched.missing.into_iter().map(|(expert, _)| expert));
            } else {
                missing = fetched.missing;
            }
        }
        if !files.is_empty() {
            missing.extend(self.read_files(store, files, stop).await);
        }
        stop_on_drop.disarm();
        missing
    }

    /// Longest wait for a ticket: short where files are the fallback.
    fn ticket_patience(&self, fetch: &Fetch) -> Duration {
        match self.from == WeightsFrom::Auto && self.has_files {
            true => fetch.patience.min(BEFORE_FILES),
            false => fetch.patience,
        }
    }

    async fn fetch(
        &self,
        store: &Arc<dyn Experts>,
        wanted: Vec<(u32, u32)>,
        pace: Pace,
        stop: &Arc<AtomicBool>,
    ) -> Fetched {
        let Some((fetch, control)) = &self.peers else { return Fetched::default() };
        let patience = self.ticket_patience(fetch);
        let ticket = match fetch.wants_ticket {
            true => match ReaderTicket::fetch(control, &self.name, patience, stop).await {
                Ok(ticket) => Some(ticket),
                Err(reason) => {
                    tracing::warn!(reason, "no ticket to read weights of other servers");
                    let reason = format!("no ticket from the control plane: {reason}");
                    let missing = wanted.into_iter().map(|expert| (expert, reason.clone()));
                    return Fetched { missing: missing.collect(), ..Fetched::default() };
                }
            },
            false => None,
        };
        let peers = self.peers(ticket.as_ref()).await;
        let (fetch, store, stop) = (fetch.clone(), Arc::clone(store), Arc::clone(stop));
        let (metrics, progress) = (self.metrics.clone(), Arc::clone(&self.progress));
        let begin = Instant::now();
        let num_wanted = wanted.len();
        let num_threads = pace.num_reads().min(fetch.num_useful_threads(num_wanted));
        let all = wanted.clone();
        let fetching = tokio::task::spawn_blocking(move || {
            fetch.run(&peers, &wanted, num_threads, &stop, &store, &|read| {
                if read.is_from_device {
                    metrics.weights_device_bytes.inc_by(read.bytes);
                }
                count(&metrics, &progress, read.bytes, true);
            })
        });
        let fetched = fetching.await.unwrap_or_else(|error| {
            tracing::error!(%error, "reading weights of peers panicked");
            Fetched { missing: panicked(all), ..Fetched::default() }
        });
        self.metrics.weights_damaged.inc_by(fetched.num_damaged);
        tracing::info!(
            experts = fetched.num_experts,
            wanted = num_wanted,
            damaged = fetched.num_damaged,
            seconds = begin.elapsed().as_secs_f64(),
            "read weights of other servers"
        );
        fetched
    }

    async fn read_files(
        &self,
        store: &Arc<dyn Experts>,
        files: Vec<(u32, u32)>,
        stop: Arc<AtomicBool>,
    ) -> Vec<Missing> {
        let store = Arc::clone(store);
        let all = files.clone();
        let (metrics, progress) = (self.metrics.clone(), Arc::clone(&self.progress));
        let reading = tokio::task::spawn_blocking(move || {
            let mut missing = Vec::new();
            for (layer, expert) in files {
                if stop.load(Ordering::Relaxed) {
                    missing.push(((layer, expert), "the load was stopped".to_owned()));
                    continue;
                }
                match store.load_one(layer, expert) {
                    Ok(bytes) => count(&metrics, &progress, bytes, false),
                    Err(error) => missing.push(((layer, expert), error.to_string())),
                }
            }
            missing
        });
        reading.await.unwrap_or_else(|error| {
            tracing::error!(%error, "loading experts panicked");
            panicked(all)
        })
    }

    /// Servers that let others read their weights. Without a ticket they are counted only.
    async fn peers(&self, ticket: Option<&ReaderTicket>) -> Vec<Peer> {
        let Some((fetch, control)) = &self.peers else { return Vec::new() };
        let members = match control.members().await {
            Ok(members) => members,
            Err(error) => {
                tracing::warn!(%error, "cannot ask the control plane for servers to read weights of");
                return Vec::new();
            }
        };
        let mut candidates = Vec::new();
        for member in members {
            if member.name == self.name || member.state == MemberState::Expired {
                continue;
            }
            // During an update of the model, servers of the other model have other weights.
            if member
                .fingerprint
                .as_ref()
                .is_some_and(|found| found != fetch.identity.fingerprint())
            {
                continue;
            }
            let Some(weights_addr) = member.weights_addr.clone() else { continue };
            if let Err(error) = fetch.security.check_peer(host_of(&weights_addr)) {
                tracing::warn!(peer = member.name, %error, "weights of a server are not read");
                continue;
            }
            candidates.push((member, weights_addr));
        }
        let names: Vec<&str> = candidates.iter().map(|(_, addr)| &**addr).collect();
        let addrs = addresses::resolve(&names).await;
        let mut unknown =
            addrs.iter().zip(&names).filter_map(|(addr, name)| addr.is_none().then_some(*name));
        if let Some(first) = unknown.next() {
            let others = unknown.count();
            tracing::warn!(
                first,
                others,
                "the resolver knows no address: weights of these servers are not read"
            );
        }
        let mut peers = Vec::new();
        for ((member, weights_addr), addr) in candidates.iter().zip(addrs) {
            let Some(addr) = addr else { continue };
            let tickets = ticket.map(|ticket| ticket.for_member(member));
            let options = ConnectOptions { host: Some(host_of(weights_addr).to_owned()), tickets };
            peers.push(Peer { name: member.name.clone(), addr, options });
        }
        // Servers that start at the same time do not all begin with the same peer.
        let start = self.name.bytes().fold(0, |sum, byte| sum + usize::from(byte));
        let middle = start % peers.len().max(1);
        peers.rotate_left(middle);
        peers
    }
}

fn host_of(addr: &str) -> &str {
    addr.rsplit_once(':').map_or(addr, |(host, _)| host)
}

/// Experts of a load that ended with a panic. Some of them may be loaded.
fn panicked(experts: Vec<(u32, u32)>) -> Vec<Missing> {
    experts.into_iter().map(|pair| (pair, "the load panicked".to_owned())).collect()
}

fn count(metrics: &ServerMetrics, progress: &LoadingProgress, bytes: u64, is_from_peer: bool) {
    metrics.experts_loaded.inc();
    metrics.expert_bytes.add(bytes as i64);
    metrics.count_weights_read(bytes, is_from_peer);
    progress.add(bytes, is_from_peer);
}

/// Progress of the load under way, for status and logs.
#[derive(Debug, Default)]
pub(crate) struct LoadingProgress {
    num_experts: AtomicU64,
    num_loaded: AtomicU64,
    num_from_peers: AtomicU64,
    bytes: AtomicU64,
    observer: Mutex<Option<Observer>>,
}

/// Receives the bytes of each expert that has been loaded.
pub(crate) struct Observer(pub(crate) Box<dyn FnMut(u64) + Send>);

impl LoadingProgress {
    /// Starts a load of so many experts. Dropping the result ends it.
    pub(crate) fn begin(self: &Arc<Self>, num_experts: usize) -> LoadingGuard {
        for counter in [&self.num_loaded, &self.num_from_peers, &self.bytes] {
            counter.store(0, Ordering::Relaxed);
        }
        self.num_experts.store(num_experts as u64, Ordering::Relaxed);
        LoadingGuard(Arc::clone(self))
    }

    /// Sets the function that learns of each expert.
    pub(crate) fn observe(&self, observer: Option<Observer>) {
        *self.observer.lock().unwrap_or_else(PoisonError::into_inner) = observer;
    }

    pub(crate) fn add(&self, bytes: u64, is_from_peer: bool) {
        self.num_from_peers.fetch_add(is_from_peer.into(), Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.num_loaded.fetch_add(1, Ordering::Relaxed);
        let mut observer = self.observer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Observer(observer)) = &mut *observer {
            observer(bytes);
        }
    }

    /// The load under way, if there is one.
    pub(crate) fn report(&self) -> Option<LoadingReport> {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let num_experts = load(&self.num_experts);
        (num_experts > 0).then(|| LoadingReport {
            num_experts,
            num_loaded: load(&self.num_loaded),
            num_from_peers: load(&self.num_from_peers),
            bytes: load(&self.bytes),
        })
    }
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Observer")
    }
}

/// Ends a load's progress.
pub(crate) struct LoadingGuard(Arc<LoadingProgress>);

impl Drop for LoadingGuard {
    fn drop(&mut self) {
        self.0.num_experts.store(0, Ordering::Relaxed);
    }
}

/// Stops the threads of a load whose future is dropped.
struct StopOnDrop(Option<Arc<AtomicBool>>);

impl StopOnDrop {
    /// The load has ended by itself. The flag keeps its value, which tells the caller whether the load was stopped.
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if let Some(stop) = &self.0 {
            stop.store(true, Ordering::Relaxed);
        }
    }
}

/// Most experts of peers that are read at a time.
const MAX_READS: usize = 16;
/// Longest wait for a ticket before a load takes its experts from files.
const BEFORE_FILES: Duration = Duration::from_secs(5);
