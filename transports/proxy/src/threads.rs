//! The threads that post, and the peers they serve.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use p2p_core::endpoint::Transport;
use p2p_core::region::SlotKey;
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, Region};
use rustix::thread::CpuSet;
use thiserror::Error;

use crate::backoff::{Backoff, IdlePolicy};
use crate::failure::{Failure, Shared};
use crate::lane::{LaneError, Lanes};
use crate::line::{ClosedAtEnd, Line, Order, ThreadStats, lock};
use crate::locality::{Device, Placement, Sysfs, allowed};
use crate::port::Port;
use crate::relay::RelaySender;
#[cfg(feature = "relay")]
use crate::relay::{RelayConfig, RelayError};

/// Configuration of a proxy.
#[derive(Debug, Clone)]
pub struct ProxyConfig {
    /// Threads. Every peer belongs to one of them.
    pub num_threads: usize,
    /// Commands of a lane that are taken before the next one's turn, and recycled together.
    pub batch: usize,
    /// Polling policy of idle threads.
    pub idle: IdlePolicy,
    /// Longest time that a peer's commands may be under way without one finishing. Time in which the thread does
    /// not run hardly counts: it is not the peer's fault.
    pub stall_limit: Duration,
    /// Processors of each thread; see [`Placement`].
    pub placement: Placement,
}

impl ProxyConfig {
    /// The defaults for a service, with `num_threads` threads next to `gpu` and `nic`: see
    /// [`Placement::shared`].
    #[must_use]
    pub fn beside(gpu: Option<&Device>, nic: Option<&Device>, num_threads: usize) -> Self {
        let (placement, num_threads) =
            Placement::shared(&Sysfs::default(), &allowed(), gpu, nic, num_threads);
        Self { num_threads, placement, ..Self::default() }
    }
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            num_threads: 1,
            batch: 32,
            idle: IdlePolicy::default(),
            stall_limit: STALL_LIMIT,
            placement: Placement::anywhere(),
        }
    }
}

/// A peer for a proxy.
#[derive(Debug)]
pub struct PeerConfig {
    /// Identifies the peer in reports and error words.
    pub peer: u32,
    /// Its lanes. No other thread takes commands from them.
    pub lanes: Lanes,
    /// Bytes of window 0 at the peer: at most 4 GiB. With a relay at most its `direct_bytes`, behind which its
    /// staging and its counters are.
    pub window_bytes: u64,
    /// Memory that puts and gets name as source 0, 1, …: the first is the mirror.
    pub sources: Vec<Region>,
    /// Thread that serves it, modulo their number. `None`: the one with the fewest.
    pub thread: Option<usize>,
}

/// A proxy, or a peer of one, could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum ProxyError {
    /// A setting cannot be used.
    #[error("{what} is 0: expected at least 1")]
    Zero {
        /// Name of the range.
        what: &'static str,
    },
    /// Commands would reach memory that is not theirs to write, or could not reach it.
    #[error("window_bytes is {found}: expected at most {limit}, {reason}")]
    Window {
        found: u64,
        /// Upper limit.
        limit: u64,
        reason: &'static str,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread of the proxy: {0}")]
    Thread(#[from] io::Error),
    /// Lanes cannot be made.
    #[error(transparent)]
    Lane(#[from] LaneError),
    /// The transport does not register the memory.
    #[error(transparent)]
    Register(#[from] PostError),
    /// The relay cannot be set up.
    #[cfg(feature = "relay")]
    #[error(transparent)]
    Relay(#[from] RelayError),
    /// The thread has ended: the proxy was dropped, or the thread panicked.
    #[error("the proxy's thread has ended")]
    Closed,
    /// The thread does not answer.
    #[error("the proxy's thread did not answer within {limit_ms} ms")]
    Silent {
        /// Length of the wait.
        limit_ms: u64,
    },
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

/// A peer as its thread sees it.
#[derive(Debug)]
struct PeerService<E> {
    port: Port<E>,
    shared: Arc<Shared>,
    /// Waiters for the end of its service, once that has begun.
    leaver: Option<SyncSender<()>>,
}

#[derive(Debug)]
struct Worker<E> {
    line: Arc<Line<E>>,
    thread: Option<JoinHandle<()>>,
}

impl<E: Transport<RemoteKey = SlotKey> + Debug + Send + 'static> Proxy<E> {
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

    /// Serves a peer. Takes ownership of the endpoint.
    ///
    /// # Errors
    /// [`ProxyError`].
    pub fn add(&self, endpoint: E, config: PeerConfig) -> Result<ProxyPeer<E>, ProxyError> {
        check_window(&config, MAX_WINDOW_BYTES, "where offsets of commands end")?;
        self.serve(endpoint, config, None)
    }

    /// As [`add`](Self::add), for a peer with further GPUs behind it. `slot` is the local slot, where the
    /// relay's receiver counts.
    ///
    /// # Errors
    /// [`ProxyError`].
    #[cfg(feature = "relay")]
    pub fn add_with_relay(
        &self,
        endpoint: E,
        config: PeerConfig,
        relay: &RelayConfig,
        slot: Region,
    ) -> Result<ProxyPeer<E>, ProxyError> {
        check_window(&config, relay.direct_bytes, "the direct_bytes of the relay")?;
        let slot_bytes = slot.len();
        let relay = RelaySender::new(relay, slot, slot_bytes)?;
        self.serve(endpoint, config, Some(relay))
    }

    fn serve(
        &self,
        endpoint: E,
        config: PeerConfig,
        relay: Option<RelaySender>,
    ) -> Result<ProxyPeer<E>, ProxyError> {
        let PeerConfig { peer, lanes, window_bytes, sources, thread } = config;
        let shared = Arc::new(Shared::new(peer));
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
                // A thread that has panicked takes no more peers.
                let lines = self.threads.iter().map(|worker| &worker.line);
                lines
                    .filter(|line| !line.is_closed())
                    .min_by_key(|line| line.num_peers.load(Ordering::Relaxed))
                    .ok_or(ProxyError::Closed)?
            }
        };
        if !line.order(Order::Add(Box::new(port), Arc::clone(&shared))) {
            return Err(ProxyError::Closed);
        }
        line.num_peers.fetch_add(1, Ordering::Relaxed);
        Ok(ProxyPeer { line: Arc::clone(line), shared, lanes })
    }

    /// Work of each thread.
    #[must_use]
    pub fn stats(&self) -> Vec<ThreadStats> {
        self.threads.iter().map(|worker| worker.line.counters.read()).collect()
    }

    /// Wakes every thread, so that all are awake for the commands of a kernel that is about to be launched. They
    /// fall asleep again as [`IdlePolicy`] says, as if they had just found a command.
    pub fn expect_work(&self) {
        self.threads.iter().for_each(|worker| worker.line.expect());
    }
}

impl<E> Drop for Proxy<E> {
    fn drop(&mut self) {
        self.threads.iter().for_each(|worker| worker.line.close());
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

    /// Registers a further region with the transport. Returns its number as a source.
    ///
    /// # Errors
    /// [`ProxyError`].
    pub fn register(&self, region: &Region) -> Result<u16, ProxyError> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.line.order(Order::Register(Arc::clone(&self.shared), region.clone(), sender));
        Ok(answer(&receiver)??)
    }

    /// Wakes the thread if it sleeps: posters on this host call it behind their posts.
    #[inline]
    pub fn ring(&self) {
        self.line.ring();
    }

    /// Whether a failure was ever reported.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.shared.has_failed()
    }

    /// The reason why lane `lane` is out of service, if it is, as the error of `op`. Does not consume a report.
    #[cfg_attr(loom, allow(dead_code, reason = "endpoints of networks ask"))]
    pub(crate) fn reason(&self, lane: u32, op: &'static str) -> Option<PostError> {
        self.shared.reason(lane, op)
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

fn check_window(config: &PeerConfig, limit: u64, reason: &'static str) -> Result<(), ProxyError> {
    let found = config.window_bytes;
    if found > limit {
        return Err(ProxyError::Window { found, limit, reason });
    }
    Ok(())
}

fn answer<T>(receiver: &Receiver<T>) -> Result<T, ProxyError> {
    receiver.recv_timeout(ANSWER_LIMIT).map_err(|error| match error {
        mpsc::RecvTimeoutError::Disconnected => ProxyError::Closed,
        mpsc::RecvTimeoutError::Timeout => {
            ProxyError::Silent { limit_ms: ANSWER_LIMIT.as_millis() as u64 }
        }
    })
}

fn run<E: Transport<RemoteKey = SlotKey>>(
    line: &Line<E>,
    idle: IdlePolicy,
    batch: usize,
    cpus: Option<&CpuSet>,
) {
    prepare_thread(cpus);
    let _closed = ClosedAtEnd(line);
    let mut peers: Vec<PeerService<E>> = Vec::new();
    let mut drivers: Vec<Arc<dyn Driver>> = Vec::new();
    let mut backoff = Backoff::new(idle);
    // One writer: the totals are kept here and stored.
    let mut stats = ThreadStats::default();
    loop {
        if line.has_orders.load(Ordering::Acquire) {
            if follow(line, &mut peers) {
                break;
            }
            find_drivers(&peers, &mut drivers);
        }
        let mut num_moved = 0;
        let mut is_busy = false;
        let mut has_closed = false;
        for PeerService { port, leaver, .. } in &mut peers {
            let turn = port.turn(batch);
            num_moved += turn.taken + turn.recycled + turn.pieces;
            stats.commands += turn.taken;
            stats.recycled += turn.recycled;
            stats.bytes += turn.bytes;
            is_busy |= port.is_busy() || leaver.is_some();
            has_closed |= port.try_close(turn.taken);
        }
        if has_closed {
            // The last owner drops a device, and this thread must not be the last.
            drivers.clear();
            release(line, &mut peers);
            find_drivers(&peers, &mut drivers);
        }
        stats.sweeps += 1;
        if num_moved > 0 {
            line.counters.commands.store(stats.commands, Ordering::Relaxed);
            line.counters.recycled.store(stats.recycled, Ordering::Relaxed);
            line.counters.bytes.store(stats.bytes, Ordering::Relaxed);
            backoff.reset();
            continue;
        }
        if line.was_expecting() {
            backoff.reset();
        }
        // A GPU waits for peers' data and drives nothing. This thread drove the drivers for its own posts only, so
        // another thread that drives would wrongly regard them as served.
        if !drivers.is_empty() && backoff.is_attentive() {
            drivers.iter().for_each(|driver| driver.drive());
        }
        // Operations under way have to be polled, and often enough.
        let longest = if is_busy { BUSY_SLEEP } else { Duration::MAX };
        backoff.pause(longest, |pause| {
            stats.sleeps += 1;
            line.counters.sweeps.store(stats.sweeps, Ordering::Relaxed);
            line.counters.sleeps.store(stats.sleeps, Ordering::Relaxed);
            let has_news = |peer: &PeerService<E>| {
                peer.leaver.is_none() && !peer.port.is_busy() && peer.port.has_work()
            };
            line.bell.sleep(pause, || line.has_news() || peers.iter().any(has_news));
        });
    }
    drop(drivers);
    // All together, in turns.
    peers.iter_mut().for_each(|peer| peer.port.begin_close());
    while !peers.is_empty() {
        let mut num_taken = 0;
        peers.retain_mut(|peer| {
            let turn = peer.port.turn(batch);
            num_taken += turn.taken + turn.pieces;
            !peer.port.try_close(turn.taken)
        });
        if num_taken == 0 {
            std::thread::yield_now();
        }
    }
}

/// The drivers of all peers, each once.
fn find_drivers<E: Transport<RemoteKey = SlotKey>>(
    peers: &[PeerService<E>],
    drivers: &mut Vec<Arc<dyn Driver>>,
) {
    drivers.clear();
    for driver in peers.iter().filter_map(|peer| peer.port.driver()) {
        let is_same =
            |known: &Arc<dyn Driver>| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(&driver));
        if !drivers.iter().any(is_same) {
            drivers.push(driver);
        }
    }
}

/// Removes the peers whose service has ended.
fn release<E: Transport<RemoteKey = SlotKey>>(line: &Line<E>, peers: &mut Vec<PeerService<E>>) {
    while let Some(idx) = peers.iter().position(|peer| peer.port.has_closed()) {
        let PeerService { port, leaver, .. } = peers.remove(idx);
        // The endpoint is dropped too, before the waiters are notified.
        drop(port);
        line.num_peers.fetch_sub(1, Ordering::Relaxed);
        if let Some(leaver) = leaver {
            let _ = leaver.send(());
        }
    }
}

/// Executes orders of other threads. `true`: stop.
fn follow<E: Transport<RemoteKey = SlotKey>>(
    line: &Line<E>,
    peers: &mut Vec<PeerService<E>>,
) -> bool {
    let (orders, is_last) = {
        let mut orders = lock(&line.orders);
        line.has_orders.store(false, Ordering::Relaxed);
        (std::mem::take(&mut orders.list), orders.is_closed)
    };
    serve(orders, peers);
    is_last
}

fn serve<E: Transport<RemoteKey = SlotKey>>(
    orders: Vec<Order<E>>,
    peers: &mut Vec<PeerService<E>>,
) {
    for order in orders {
        match order {
            Order::Add(port, shared) => {
                peers.push(PeerService { port: *port, shared, leaver: None })
            }
            Order::Register(whose, region, answer) => {
                if let Some(peer) = find(peers, &whose) {
                    // A caller that stopped waiting needs no answer.
                    let _ = answer.send(peer.port.register(&region));
                }
            }
            Order::Remove(whose, answer) => {
                if let Some(peer) = find(peers, &whose) {
                    peer.port.begin_close();
                    peer.leaver = Some(answer);
                }
            }
        }
    }
}

fn find<'a, E>(
    peers: &'a mut [PeerService<E>],
    whose: &Arc<Shared>,
) -> Option<&'a mut PeerService<E>> {
    peers.iter_mut().find(|peer| Arc::ptr_eq(&peer.shared, whose))
}

fn prepare_thread(cpus: Option<&CpuSet>) {
    if let Some(cpus) = cpus
        && let Err(error) = rustix::thread::sched_setaffinity(None, cpus)
    {
        tracing::warn!(%error, "a thread of the proxy runs anywhere");
    }
    // Keeps short sleeps short: by default the system may add 50 µs. SAFETY: sets a number of this thread.
    if unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) } != 0 {
        tracing::debug!("sleeps of the proxy stay coarse");
    }
}

const MAX_WINDOW_BYTES: u64 = 1 << 32;
/// See [`ProxyConfig::stall_limit`].
pub(crate) const STALL_LIMIT: Duration = Duration::from_secs(5);
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
const BUSY_SLEEP: Duration = Duration::from_micros(50);
