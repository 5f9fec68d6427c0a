//! The reader: takes experts from the memory of peers that hold them.
//!
//! A few threads work through a list of experts. Each asks a peer for an expert, reads its parts into new memory or
//! the buffers of a device, verifies the digest, and puts the expert into service. An expert that a peer refuses, or has damaged, comes from another
//! one. A peer that does not answer, or whose connection ends, is not asked again.

mod session;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::ModelConfig;
use httpd::trust::tls::Security;
use message_engine::ConnectOptions;

use self::session::{Chosen, ReadError, Session};
use super::manifest::ExpertShape;
use super::{ModelIdentity, WeightsSecret};
use crate::experts::Experts;

/// A server that may hold experts.
#[derive(Debug, Clone)]
pub(crate) struct Peer {
    pub(crate) name: String,
    /// Address of its [source](super::source).
    pub(crate) addr: SocketAddr,
    /// Its name for certificates, and the ticket for it.
    pub(crate) options: ConnectOptions,
}

/// Settings of a read of experts from peers.
#[derive(Debug, Clone)]
pub(crate) struct Fetch {
    pub(crate) identity: ModelIdentity,
    /// Address of this host's interface.
    pub(crate) local: IpAddr,
    /// Secret that sources ask for where there are no tickets.
    pub(crate) secret: Option<WeightsSecret>,
    /// Protection of the connections.
    pub(crate) security: Security,
    /// Whether sources ask for a ticket.
    pub(crate) wants_ticket: bool,
    /// The read ends after this time without a new expert.
    pub(crate) patience: Duration,
    /// Longest read of a chunk. The peer names the lease, so a peer that has stopped must not hold a read until its end.
    pub(crate) chunk_timeout: Duration,
    pub(crate) shape: FetchShape,
}

/// Sizes of the model's experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchShape(ExpertShape);

impl From<&ModelConfig> for FetchShape {
    fn from(config: &ModelConfig) -> Self {
        Self(ExpertShape {
            hidden: config.hidden,
            inter: config.moe_intermediate,
            is_gated: config.arithmetic.activation.is_gated(),
        })
    }
}

/// The outcome of a read of experts.
#[derive(Debug, Default)]
pub(crate) struct Fetched {
    /// Experts that were handed over.
    pub(crate) num_experts: usize,
    /// Experts that came from no peer, each with a reason.
    pub(crate) missing: Vec<((u32, u32), String)>,
    /// Experts whose digest did not match their bytes, or whose weights were invalid.
    pub(crate) num_damaged: u64,
}

/// An expert that was read and is in service.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadExpert {
    pub(crate) bytes: u64,
    /// A device copied it from a peer's device.
    pub(crate) is_from_device: bool,
}

/// Counts an expert.
pub(crate) type Count<'a> = dyn Fn(ReadExpert) + Sync + 'a;

impl Fetch {
    /// Threads that are worth their connections, one to every peer each, for a read of so many experts: a connection takes
    /// as long as a few megabytes.
    pub(crate) fn num_useful_threads(&self, num_experts: usize) -> usize {
        let ExpertShape { hidden, inter, is_gated } = self.shape.0;
        let num_matrices = if is_gated { 3 } else { 2 };
        let sizes = [hidden, inter, num_matrices, BF16_BYTES, num_experts];
        let bytes = sizes.into_iter().fold(1, usize::saturating_mul);
        bytes.div_ceil(BYTES_FOR_A_THREAD).max(MIN_THREADS)
    }

    /// Reads experts of `peers` into `store` and calls `count` for each, on `num_threads` threads. Ends early when `stop` becomes true. Then
    /// the experts that were not read are missing. Blocks until the end: every wait for a peer is bounded, and the read
    /// ends after `patience` without a new expert.
    pub(crate) fn run(
        &self,
        peers: &[Peer],
        wanted: &[(u32, u32)],
        num_threads: usize,
        stop: &AtomicBool,
        store: &Arc<dyn Experts>,
        count: &Count<'_>,
    ) -> Fetched {
        let device = Arc::clone(store).device();
        let session = match Session::open(self, peers, wanted, num_threads, device.as_ref(), stop) {
            Ok(session) => session,
            Err(reason) => {
                let missing = wanted.iter().map(|&expert| (expert, reason.clone())).collect();
                return Fetched { missing, ..Fetched::default() };
            }
        };
        let work = Work {
            session: &session,
            patience: self.patience,
            stop,
            store: &**store,
            count,
            state: Mutex::new(State {
                waiting: wanted.iter().map(|&expert| Job::new(expert)).collect(),
                num_reading: 0,
                last_success: Instant::now(),
                fetched: Fetched::default(),
            }),
        };
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| session.route_responses(&is_over));
            // Set after a panic, too: the scope waits for the thread above.
            let end = SetOnDrop(&is_over);
            let work = &work;
            // None runs on the caller's thread: a thread that has given way to others cannot take that back.
            let threads: Vec<_> = (0..num_threads.min(wanted.len()))
                .map(|thread| {
                    scope.spawn(move || {
                        give_way();
                        work.run(thread);
                    })
                })
                .collect();
            for thread in threads {
                if thread.join().is_err() {
                    tracing::error!("a thread that reads weights of peers panicked");
                }
            }
            drop(end);
        });
        let State { waiting, mut fetched, .. } =
            work.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let why = match stop.load(Ordering::Relaxed) {
            true => "the read was stopped".to_owned(),
            false => format!("no server gave another expert for {} s", self.patience.as_secs_f32()),
        };
        fetched.missing.extend(waiting.into_iter().map(|job| job.into_missing(&why)));
        fetched
    }
}

/// Lets other threads of the host run before the calling one, for good: servers of this host that compute meanwhile have
/// clients that wait.
fn give_way() {
    // Best effort: without it, other servers slow down during the read.
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(None, NICE) {
        tracing::debug!(%error, "cannot lower the priority of a thread that reads weights");
    }
}

/// Sets a flag when dropped.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A list of experts under way.
struct Work<'a> {
    session: &'a Session,
    patience: Duration,
    stop: &'a AtomicBool,
    store: &'a dyn Experts,
    count: &'a Count<'a>,
    state: Mutex<State>,
}

struct State {
    waiting: VecDeque<Job>,
    num_reading: usize,
    last_success: Instant,
    fetched: Fetched,
}

/// An expert to be read.
struct Job {
    expert: (u32, u32),
    /// Peers that do not give it.
    excluded: Vec<usize>,
    reason: Option<String>,
}

impl Job {
    fn new(expert: (u32, u32)) -> Self {
        Self { expert, excluded: Vec::new(), reason: None }
    }

    /// The expert, with the end of the read and the last answer of a peer as the reason.
    fn into_missing(self, end: &str) -> ((u32, u32), String) {
        let reason = match self.reason {
            Some(answer) => format!("{end}; {answer}"),
            None => end.to_owned(),
        };
        (self.expert, reason)
    }
}

impl Work<'_> {
    /// Reads experts until none is left, the read is stopped or patience is over.
    fn run(&self, thread: usize) {
        loop {
            let mut state = self.lock();
            let is_late = state.last_success.elapsed() >= self.patience;
            if is_late || self.stop.load(Ordering::Relaxed) {
                return;
            }
            let Some(mut job) = state.waiting.pop_front() else {
                if state.num_reading == 0 {
                    return;
                }
                // Another thread may give its expert back.
                drop(state);
                std::thread::sleep(PAUSE);
                continue;
            };
            let peer = match self.session.choose(job.expert, &job.excluded, Instant::now()) {
                session::Choice::Peer(peer) => peer,
                session::Choice::Later(pause) => {
                    state.waiting.push_back(job);
                    drop(state);
                    std::thread::sleep(pause.min(MAX_PAUSE));
                    continue;
                }
                session::Choice::None => {
                    let end = match job.reason {
                        Some(_) => "no other server of the fleet gives it",
                        None => "no server of the fleet holds it",
                    };
                    state.fetched.missing.push(job.into_missing(end));
                    continue;
                }
            };
            state.num_reading += 1;
            drop(state);
            let outcome = self.read((&peer, thread), job.expert);
            let mut state = self.lock();
            state.num_reading -= 1;
            match outcome {
                Ok(()) => {
                    state.fetched.num_experts += 1;
                    state.last_success = Instant::now();
                }
                Err(error @ ReadError::Later(pause)) => {
                    peer.defer(Instant::now() + pause);
                    job.reason = Some(format!("{}: {error}", peer.name()));
                    state.waiting.push_back(job);
                }
                Err(ReadError::Stopped) => state.waiting.push_back(job),
                // The expert of another peer would find no room either.
                Err(error @ ReadError::Memory(_)) => {
                    let (layer, expert) = job.expert;
                    tracing::warn!(layer, expert, %error, "an expert that a peer gives is not loaded");
                    state.fetched.missing.push(job.into_missing(&error.to_string()));
                }
                Err(error) => {
                    let ((layer, expert), name) = (job.expert, peer.name());
                    tracing::warn!(layer, expert, peer = name, %error, "an expert comes from another server or the disk");
                    state.fetched.num_damaged += u64::from(matches!(error, ReadError::Damaged(_)));
                    job.excluded.push(peer.idx);
                    job.reason = Some(format!("{name}: {error}"));
                    state.waiting.push_back(job);
                }
            }
        }
    }

    /// Reads an expert. A panic is an error like others: the caller still knows which expert it was, so another peer or
    /// the disk gives it.
    fn read(&self, peer: (&Chosen<'_>, usize), expert: (u32, u32)) -> Result<(), ReadError> {
        let read = || {
            let read = self.session.read(peer, expert, self.store, self.stop)?;
            (self.count)(read);
            Ok(())
        };
        catch_unwind(AssertUnwindSafe(read)).unwrap_or(Err(ReadError::Panicked))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nice value of the threads. On a busy processor they get a tenth of what a computing thread gets.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;
/// Bytes of a value of the usual format.
const BF16_BYTES: usize = 2;
/// So that two peers share a read.
const MIN_THREADS: usize = 2;
/// Bytes to read for each thread.
const BYTES_FOR_A_THREAD: usize = 64 << 20;
/// Pause of a thread without work.
const PAUSE: Duration = Duration::from_millis(2);
/// Longest pause before another look at the list.
const MAX_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
