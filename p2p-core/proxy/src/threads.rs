//! The threads that post, and the peers they serve.

use std::fmt::Debug;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use p2p_core::endpoint::Endpoint;
use p2p_core::region::SlotKey;
use p2p_core::{AnyEndpoint, PostError, Region};
use rustix::thread::CpuSet;
use thiserror::Error;

use crate::backoff::{Backoff, Bell, IdlePolicy};
use crate::failure::Failure;
use crate::lane::{LaneError, Lanes};
use crate::locality::Placement;
use crate::port::{Port, Shared};
use crate::relay::{RelayConfig, RelayError, RelaySender};

/// How a proxy works.
#[derive(Debug, Clone)]
pub struct ProxyConfig {
    /// Threads. Every peer belongs to one of them.
    pub num_threads: usize,
    /// Commands of a lane that are taken before the next one's turn, and recycled together.
    pub batch: usize,
    /// What idle threads do.
    pub idle: IdlePolicy,
    /// How long a peer's commands may be under way without any being over.
    pub stall_limit: Duration,
    /// Processors of each thread; see [`Placement`].
    pub placement: Placement,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            num_threads: 1,
            batch: 32,
            idle: IdlePolicy::default(),
            stall_limit: Duration::from_secs(5),
            placement: Placement::anywhere(),
        }
    }
}

/// A peer for a proxy.
#[derive(Debug)]
pub struct PeerConfig {
    /// For reports and error words.
    pub peer: u32,
    /// Its lanes. Nobody else takes commands from them.
    pub lanes: Lanes,
    /// Bytes of window 0 at the peer.
    pub window_bytes: u64,
    /// Memory that puts and gets name as source 0, 1, …: the first is the mirror.
    pub sources: Vec<Region>,
    /// Further GPUs behind the peer, and this side's slot, where their receiver counts.
    pub relay: Option<(RelayConfig, Region)>,
    /// Thread that serves it, modulo their number. `None`: the one with the fewest.
    pub thread: Option<usize>,
}

/// A proxy, or a peer of one, could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProxyError {
    /// A setting cannot be used.
    #[error("{what} is 0: expected at least 1")]
    Zero {
        /// Which.
        what: &'static str,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread of the proxy: {0}")]
    Thread(#[from] io::Error),
    /// Lanes cannot be made.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The transport does not take the memory.
    #[error(transparent)]
    Register(#[from] PostError),
    /// The relay cannot be set up.
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// The peer is not there any more.
    #[error("the peer of the proxy is closed")]
    Closed,
    /// The thread does not answer.
    #[error("the proxy's thread did not answer within {limit_ms} ms")]
    Silent {
        /// How long it was waited for.
        limit_ms: u64,
    },
}

/// What a thread has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct ThreadStats {
    /// Commands taken.
    pub commands: u64,
    /// Commands that are over.
    pub recycled: u64,
    /// Bytes put and got.
    pub bytes: u64,
    /// Looks at all lanes.
    pub sweeps: u64,
    /// Pauses with the processor given up.
    pub sleeps: u64,
}

/// Threads that post for kernels. Dropping it closes every peer.
#[derive(Debug)]
pub struct Proxy<E = AnyEndpoint> {
    threads: Vec<Worker<E>>,
    stall_limit: Duration,
}

/// A peer that a proxy serves. Dropping it ends its service and drops its endpoint.
#[derive(Debug)]
pub struct ProxyPeer<E = AnyEndpoint> {
    line: Arc<Line<E>>,
    shared: Arc<Shared>,
    lanes: Lanes,
}

#[derive(Debug)]
struct Worker<E> {
    line: Arc<Line<E>>,
    thread: Option<JoinHandle<()>>,
}

/// How others reach a thread.
#[derive(Debug)]
struct Line<E> {
    orders: Mutex<Vec<Order<E>>>,
    has_orders: AtomicBool,
    bell: Bell,
    thread: Mutex<Option<Thread>>,
    num_peers: AtomicU64,
    counters: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    commands: AtomicU64,
    recycled: AtomicU64,
    bytes: AtomicU64,
    sweeps: AtomicU64,
    sleeps: AtomicU64,
}

#[derive(Debug)]
enum Order<E> {
    Add(Box<Port<E>>, Arc<Shared>),
    Register(Arc<Shared>, Region, SyncSender<Result<u16, PostError>>),
    Remove(Arc<Shared>, SyncSender<()>),
    Stop,
}

impl<E: Endpoint<RemoteKey = SlotKey> + Debug + Send + 'static> Proxy<E> {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`ProxyError`].
    pub fn start(config: &ProxyConfig) -> Result<Self, ProxyError> {
        for (what, value) in [("num_threads", config.num_threads), ("batch", config.batch)] {
            if value == 0 {
                return Err(ProxyError::Zero { what });
            }
        }
        let threads = Vec::with_capacity(config.num_threads);
        let mut proxy = Self { threads, stall_limit: config.stall_limit };
        for idx in 0..config.num_threads {
            let line = Arc::new(Line::new());
            let (shared, cpus) = (Arc::clone(&line), config.placement.of(idx));
            let (idle, batch) = (config.idle, config.batch);
            let thread = std::thread::Builder::new()
                .name(format!("sy-proxy-{idx}"))
                .spawn(move || run(&shared, idle, batch, cpus.as_ref()))?;
            *lock(&line.thread) = Some(thread.thread().clone());
            proxy.threads.push(Worker { line, thread: Some(thread) });
        }
        Ok(proxy)
    }

    /// Serves a peer. Takes the endpoint over.
    ///
    /// # Errors
    /// [`ProxyError`].
    pub fn add(&self, endpoint: E, config: PeerConfig) -> Result<ProxyPeer<E>, ProxyError> {
        let PeerConfig { peer, lanes, window_bytes, sources, relay, thread } = config;
        let shared = Arc::new(Shared::new(peer));
        let relay = match relay {
            Some((relay, slot)) => {
                let slot_bytes = slot.len();
                Some(RelaySender::new(&relay, slot, slot_bytes)?)
            }
            None => None,
        };
        let tasks = relay.as_ref().map(|relay| relay.tasks().clone());
        let limit = self.stall_limit;
        let mut port = Port::new(endpoint, &lanes, window_bytes, relay, Arc::clone(&shared), limit);
        for source in &sources {
            port.register(source)?;
        }
        if let Some(tasks) = tasks {
            port.register_own(&tasks)?;
        }
        let line = match thread {
            Some(idx) => &self.threads[idx % self.threads.len()].line,
            None => {
                let lines = self.threads.iter().map(|worker| &worker.line);
                lines
                    .min_by_key(|line| line.num_peers.load(Ordering::Relaxed))
                    .ok_or(ProxyError::Closed)?
            }
        };
        line.num_peers.fetch_add(1, Ordering::Relaxed);
        line.order(Order::Add(Box::new(port), Arc::clone(&shared)));
        Ok(ProxyPeer { line: Arc::clone(line), shared, lanes })
    }

    /// What each thread has done.
    #[must_use]
    pub fn stats(&self) -> Vec<ThreadStats> {
        self.threads.iter().map(|worker| worker.line.counters.read()).collect()
    }

    /// Wakes every thread, so that the commands of a kernel that is about to be launched find none
    /// asleep. They fall asleep again as [`IdlePolicy`] says.
    pub fn expect_work(&self) {
        self.threads.iter().for_each(|worker| worker.line.ring());
    }
}

impl<E> Drop for Proxy<E> {
    fn drop(&mut self) {
        for worker in &self.threads {
            worker.line.order(Order::Stop);
        }
        for worker in &mut self.threads {
            if let Some(thread) = worker.thread.take()
                && thread.join().is_err()
            {
                tracing::error!("a thread of the proxy panicked");
            }
        }
    }
}

impl<E> ProxyPeer<E> {
    /// Its lanes.
    #[must_use]
    pub const fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Makes a further region known to the transport. Gives its number as a source.
    ///
    /// # Errors
    /// [`ProxyError`].
    pub fn register(&self, region: &Region) -> Result<u16, ProxyError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.line.order(Order::Register(Arc::clone(&self.shared), region.clone(), sender));
        Ok(answer(&receiver)??)
    }

    /// Wakes the thread if it sleeps: posters on this host call it behind what they post.
    #[inline]
    pub fn ring(&self) {
        self.line.ring();
    }

    /// Whether a failure was reported since the beginning.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed()
    }

    /// Failures since the last call, the first 256 at most.
    #[must_use]
    pub fn take_failures(&self) -> Vec<Failure> {
        self.shared.take()
    }
}

impl<E> Drop for ProxyPeer<E> {
    fn drop(&mut self) {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.line.order(Order::Remove(Arc::clone(&self.shared), sender));
        // When this returns, the endpoint is dropped and the peer's keys are revoked.
        if let Err(error @ ProxyError::Silent { .. }) = answer(&receiver) {
            tracing::error!(%error, peer = self.shared.peer, "a peer is closed late");
        }
    }
}

fn answer<T>(receiver: &Receiver<T>) -> Result<T, ProxyError> {
    receiver.recv_timeout(ANSWER_LIMIT).map_err(|error| match error {
        mpsc::RecvTimeoutError::Disconnected => ProxyError::Closed,
        mpsc::RecvTimeoutError::Timeout => {
            ProxyError::Silent { limit_ms: ANSWER_LIMIT.as_millis() as u64 }
        }
    })
}

impl<E> Line<E> {
    fn new() -> Self {
        Self {
            orders: Mutex::new(Vec::new()),
            has_orders: AtomicBool::new(false),
            bell: Bell::new(),
            thread: Mutex::new(None),
            num_peers: AtomicU64::new(0),
            counters: Counters::default(),
        }
    }

    fn order(&self, order: Order<E>) {
        {
            let mut orders = lock(&self.orders);
            // Nobody takes orders any more behind a stop: whoever waits sees the sender go.
            if matches!(orders.last(), Some(Order::Stop)) {
                return;
            }
            orders.push(order);
            self.has_orders.store(true, Ordering::Release);
        }
        self.ring();
    }

    fn ring(&self) {
        // Sleeping is rare, and the lock with it.
        self.bell.ring_with(|| lock(&self.thread).clone());
    }
}

impl Counters {
    fn read(&self) -> ThreadStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ThreadStats {
            commands: read(&self.commands),
            recycled: read(&self.recycled),
            bytes: read(&self.bytes),
            sweeps: read(&self.sweeps),
            sleeps: read(&self.sleeps),
        }
    }
}

fn run<E: Endpoint<RemoteKey = SlotKey>>(
    line: &Line<E>,
    idle: IdlePolicy,
    batch: usize,
    cpus: Option<&CpuSet>,
) {
    prepare_thread(cpus);
    let mut ports: Vec<(Port<E>, Arc<Shared>)> = Vec::new();
    let mut backoff = Backoff::new(idle);
    // One writer: the totals are kept here and stored.
    let mut stats = ThreadStats::default();
    loop {
        if line.has_orders.load(Ordering::Acquire) && follow(line, &mut ports) {
            break;
        }
        let mut num_moved = 0;
        let mut is_busy = false;
        for (port, _) in &mut ports {
            let turn = port.turn(batch);
            num_moved += turn.taken + turn.recycled;
            stats.commands += turn.taken;
            stats.recycled += turn.recycled;
            stats.bytes += turn.bytes;
            is_busy |= port.is_busy();
        }
        stats.sweeps += 1;
        if num_moved > 0 {
            line.counters.commands.store(stats.commands, Ordering::Relaxed);
            line.counters.recycled.store(stats.recycled, Ordering::Relaxed);
            line.counters.bytes.store(stats.bytes, Ordering::Relaxed);
            backoff.reset();
            continue;
        }
        // What is under way has to be looked at, and often enough.
        let longest = if is_busy { BUSY_SLEEP } else { Duration::MAX };
        backoff.pause(longest, |pause| {
            stats.sleeps += 1;
            line.counters.sweeps.store(stats.sweeps, Ordering::Relaxed);
            line.counters.sleeps.store(stats.sleeps, Ordering::Relaxed);
            let has_news = |(port, _): &(Port<E>, _)| !port.is_busy() && port.has_work();
            line.bell.sleep(pause, || {
                line.has_orders.load(Ordering::Acquire) || ports.iter().any(has_news)
            });
        });
    }
    for (port, _) in &mut ports {
        port.close(batch);
    }
}

/// Does what others asked for. `true`: stop.
fn follow<E: Endpoint<RemoteKey = SlotKey>>(
    line: &Line<E>,
    ports: &mut Vec<(Port<E>, Arc<Shared>)>,
) -> bool {
    let orders = {
        let mut orders = lock(&line.orders);
        line.has_orders.store(false, Ordering::Relaxed);
        if matches!(orders.last(), Some(Order::Stop)) {
            // Left in place, so that nothing comes behind it.
            let stop = orders.pop();
            let before = std::mem::take(&mut *orders);
            orders.extend(stop);
            drop(orders);
            serve(before, line, ports);
            return true;
        }
        std::mem::take(&mut *orders)
    };
    serve(orders, line, ports);
    false
}

fn serve<E: Endpoint<RemoteKey = SlotKey>>(
    orders: Vec<Order<E>>,
    line: &Line<E>,
    ports: &mut Vec<(Port<E>, Arc<Shared>)>,
) {
    for order in orders {
        match order {
            Order::Add(port, shared) => ports.push((*port, shared)),
            Order::Register(whose, region, answer) => {
                let port = ports.iter_mut().find(|(_, shared)| Arc::ptr_eq(shared, &whose));
                if let Some((port, _)) = port {
                    // Who does not wait for the answer any more does not need it.
                    let _ = answer.send(port.register(&region));
                }
            }
            Order::Remove(whose, answer) => {
                ports.retain_mut(|(port, shared)| {
                    let is_it = Arc::ptr_eq(shared, &whose);
                    if is_it {
                        port.close(CLOSE_BATCH);
                    }
                    !is_it
                });
                line.num_peers.fetch_sub(1, Ordering::Relaxed);
                let _ = answer.send(());
            }
            Order::Stop => {}
        }
    }
}

fn prepare_thread(cpus: Option<&CpuSet>) {
    if let Some(cpus) = cpus
        && let Err(error) = rustix::thread::sched_setaffinity(None, cpus)
    {
        tracing::warn!(%error, "a thread of the proxy runs anywhere");
    }
    // Short sleeps are to be short: by default the system may add 50 µs.
    // SAFETY: sets a number of this thread.
    if unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) } != 0 {
        tracing::debug!("sleeps of the proxy stay coarse");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds a lock can leave its content half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const CLOSE_BATCH: usize = 64;
const BUSY_SLEEP: Duration = Duration::from_micros(50);
