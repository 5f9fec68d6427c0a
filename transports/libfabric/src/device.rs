//! A device: one libfabric endpoint of this process, all pairs over it, and their driver.
//!
//! The thread that drives holds the lock of [`State`]. Other threads do not wait for it, because
//! one driver is enough. Posting takes no lock: the poster calls the library itself. An operation
//! that the library refuses, or that follows a refused one, waits in the pair's
//! [`outbox`](super::outbox) for the next driver.
//!
//! With a [`library_thread`], only that thread drives and calls the library once the device is
//! open. Every post then goes through an outbox, and pairs begin and end on that thread. The lock
//! of the state is never contended then. Posting allocates nothing, with one exception: a lazy
//! addition allocates a task when the lazy additions of 4,096 other pairs are already queued.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;

use super::library_thread::{LibraryThread, Timeouts};
use super::link::Link;
use super::load::Library;
use super::outbox::{Op, PushStatus};
use super::owner::{CallError, Info};
use super::port::{PollOutcome, Port, network_error};
use super::receives::Receives;
use super::table::{MAX_HOT, NUM_ENTRIES, Quarantine, State};
use super::wait_mode::WaitMode;
use super::{library_thread, service, sys};
use p2p_core::endpoint::PostError;
use p2p_core::network::NetworkError;
use p2p_core::wait::Driver;

mod arrivals;
mod pairs;

/// One libfabric endpoint of this process. See the [module](self).
#[derive(Debug)]
pub(super) struct Device {
    // Dropped before the memory that its operations use.
    port: Port,
    state: Mutex<State>,
    /// Longest message that this device sends.
    max_message_bytes: usize,
    /// Pairs with operations in their outbox.
    num_backlogged: AtomicUsize,
    /// Pairs with lazy additions, sent with the next message or by a later turn of the driver.
    credits: ArrayQueue<Arc<Link>>,
    /// Number of turns of the driver so far.
    num_drives: AtomicU64,
    /// True if a thread sleeps on the descriptor and drives when it becomes readable.
    is_watched: AtomicBool,
    /// Time of the last arrival, in nanoseconds since `start`. Only kept without a descriptor.
    last_news_ns: AtomicU64,
    start: Instant,
    /// The only thread that calls the library, for providers whose calls may never return.
    library_thread: Option<Arc<LibraryThread>>,
}

impl Device {
    /// Opens an endpoint and starts the thread that drives it while no other thread does.
    ///
    /// For providers whose calls may never return, a call counts as stuck after [`Timeouts::call`].
    pub(super) fn open(
        library: &'static Library,
        (info, wait_mode): (Info, WaitMode),
        timeouts: Timeouts,
    ) -> Result<Arc<Self>, NetworkError> {
        let has_thread = library_thread::is_needed(&info.first().provider());
        let port =
            Port::open(library, (info, if has_thread { WaitMode::Poll } else { wait_mode }))?;
        let traits = port.traits();
        let max_message_bytes = traits.inject_bytes.min(MAX_MESSAGE_BYTES);
        let provider = traits.provider.clone();
        let failed = |error: CallError| network_error(&provider, error.op, &error);
        if max_message_bytes < super::detail::MIN_MESSAGE_BYTES {
            return Err(NetworkError {
                network: format!("libfabric {provider}"),
                op: "open",
                code: None,
                detail: format!(
                    "the provider sends at most {max_message_bytes} bytes at once, expected {} or more",
                    super::detail::MIN_MESSAGE_BYTES
                ),
            });
        }
        let mut receives = Receives::new(&port, MAX_MESSAGE_BYTES).map_err(failed)?;
        receives.post(&port).map_err(failed)?;
        tracing::debug!(?traits, "libfabric endpoint opened");
        let state = State {
            receives,
            table: Vec::new(),
            cursors: Vec::new(),
            hot: Vec::with_capacity(MAX_HOT),
            next_victim: 0,
            next_cursor: 0,
            stalls: Vec::new(),
            free: Vec::new(),
            addresses: HashMap::new(),
            credit_turns: 0,
            close_requests: Vec::new(),
            closing: Vec::new(),
            quarantine: Quarantine::default(),
            entries: [EMPTY_ENTRY; NUM_ENTRIES],
            sources: [sys::FI_ADDR_UNSPEC; NUM_ENTRIES],
        };
        let library_thread =
            has_thread.then(|| LibraryThread::new(&provider, port.endpoint().name(), timeouts));
        let device = Arc::new(Self {
            port,
            state: Mutex::new(state),
            max_message_bytes,
            num_backlogged: AtomicUsize::new(0),
            credits: ArrayQueue::new(MAX_CREDITS),
            num_drives: AtomicU64::new(0),
            is_watched: AtomicBool::new(false),
            last_news_ns: AtomicU64::new(0),
            start: Instant::now(),
            library_thread,
        });
        match &device.library_thread {
            Some(library_thread) => library_thread::start(&device, library_thread),
            None => service::start(&device),
        }
        .map_err(|error| NetworkError {
            network: format!("libfabric {provider}"),
            op: "start a thread",
            code: error.raw_os_error().map(Into::into),
            detail: error.to_string(),
        })?;
        Ok(device)
    }

    pub(super) const fn port(&self) -> &Port {
        &self.port
    }

    pub(super) const fn max_message_bytes(&self) -> usize {
        self.max_message_bytes
    }

    /// Number of turns so far, and whether a sleeping thread drives at the next arrival.
    pub(super) fn attention(&self) -> (u64, bool) {
        let is_watched = self.is_watched.load(Ordering::Acquire);
        (self.num_drives.load(Ordering::Relaxed), is_watched)
    }

    /// True if posters call the library themselves. False if the library thread does it for them.
    #[inline]
    pub(super) const fn posts_here(&self) -> bool {
        self.library_thread.is_none()
    }

    pub(super) const fn library_thread(&self) -> Option<&Arc<LibraryThread>> {
        self.library_thread.as_ref()
    }

    /// True if a library call has not returned in time. The device stays unusable then.
    pub(super) fn is_stuck(&self) -> bool {
        self.library_thread.as_ref().is_some_and(|library_thread| library_thread.is_stuck())
    }

    /// Queues `op` until the library accepts it.
    ///
    /// With a full outbox it drives, for at most [`POST_TIMEOUT`]; then the pair fails. Returns
    /// false if `op` was merged into a queued message.
    pub(super) fn enqueue(
        &self,
        link: &Link,
        name: &'static str,
        op: Op<'_>,
    ) -> Result<bool, PostError> {
        let mut deadline = None;
        loop {
            link.health()?;
            let queued = link.enqueue(op).map_err(|error| PostError::Transport {
                op: name,
                code: sys::FI_ENOMEM,
                detail: format!("no memory to queue an operation: {error}"),
            })?;
            match queued {
                (PushStatus::Merged, _) => return Ok(false),
                (PushStatus::Queued, is_first) => {
                    if is_first {
                        self.num_backlogged.fetch_add(1, Ordering::AcqRel);
                    }
                    // A provider that refuses a post may have made progress on arrivals instead. No
                    // completion reports those if they are mail.
                    self.progress();
                    return Ok(true);
                }
                (PushStatus::Full, _) => {
                    let now = Instant::now();
                    if now >= *deadline.get_or_insert(now + POST_TIMEOUT) {
                        let code = sys::FI_EAGAIN;
                        let detail = format!(
                            "the peer has accepted nothing for {} ms",
                            POST_TIMEOUT.as_millis()
                        );
                        link.fail(name, code, detail.clone());
                        return Err(PostError::Transport { op: name, code, detail });
                    }
                    self.progress();
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Drives, or wakes the library thread to do so.
    fn progress(&self) {
        match &self.library_thread {
            Some(library_thread) => library_thread.wake(),
            None => self.turn(),
        }
    }

    /// Delays an addition until the next message to the peer or a later turn of the driver. Returns
    /// false if it cannot be delayed.
    pub(super) fn add_credit(&self, link: &Arc<Link>, offset: u32, value: u64) -> bool {
        match link.add_credit(offset, value) {
            None => false,
            Some(false) => true,
            Some(true) => {
                if let Err(link) = self.credits.push(Arc::clone(link)) {
                    // The queue is full: send this addition at once.
                    match &self.library_thread {
                        Some(library_thread) => {
                            library_thread.submit(move |device| {
                                let _ = link.flush_credit(&device.port);
                            });
                        }
                        None => {
                            let _ = link.flush_credit(&self.port);
                        }
                    }
                }
                true
            }
        }
    }

    /// True if lazy additions are queued.
    pub(super) fn has_credits(&self) -> bool {
        !self.credits.is_empty()
    }

    /// Sends the lazy additions that no message has carried.
    pub(super) fn flush_credits(&self) {
        for _ in 0..self.credits.len() {
            let Some(link) = self.credits.pop() else { break };
            if !link.flush_credit(&self.port)
                && let Err(link) = self.credits.push(link)
            {
                link.fail("send", sys::FI_EAGAIN, "the peer accepts nothing".to_owned());
            }
        }
    }

    /// Fails all pairs, because the completion queue itself failed.
    fn fail_all(&self, state: &State, error: &CallError) {
        tracing::error!(%error, provider = self.port.traits().provider, "libfabric queue failed");
        for link in state.table.iter().filter_map(|entry| entry.link.as_deref()) {
            let _ = link.fail_call(error);
        }
    }

    fn flush_backlogs(&self, state: &State) {
        for link in state.table.iter().filter_map(|entry| entry.link.as_deref()) {
            if link.backlog() > 0 && link.flush(&self.port) {
                self.num_backlogged.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

impl Driver for Device {
    fn drive(&self) {
        if self.library_thread.is_none() {
            self.turn();
        }
    }

    fn may_sleep(&self) -> bool {
        if let Some(library_thread) = &self.library_thread {
            // The library thread wakes the owner of each arrival.
            if self.has_credits() {
                library_thread.wake();
            }
            return true;
        }
        if self.has_credits() {
            self.flush_credits();
        }
        self.is_watched.store(true, Ordering::Release);
        self.port.wait_fd().is_none() || (self.port.queue().may_sleep() && !self.has_mail())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.wait_fd()
    }

    fn max_sleep(&self) -> Duration {
        if self.library_thread.is_some() { WATCHED_TICK } else { self.nap() }
    }
}

impl Device {
    /// Runs one turn of the driver, unless another thread is driving.
    pub(super) fn turn(&self) {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            // Another thread drives.
            Err(TryLockError::WouldBlock) => return,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let state = &mut *state;
        // Relaxed: only the holder of the lock writes it.
        let num_drives = self.num_drives.load(Ordering::Relaxed) + 1;
        self.num_drives.store(num_drives, Ordering::Relaxed);
        if self.is_watched.load(Ordering::Relaxed) {
            self.is_watched.store(false, Ordering::Release);
        }
        let polled = self.port.queue().poll(&mut state.entries, &mut state.sources);
        // Mail first: the completions just read may belong to messages sent after it.
        let mut is_news = self.read_mailboxes(state);
        match polled {
            Ok(PollOutcome::Nothing) => {
                if !state.stalls.is_empty() {
                    Self::sweep_stalls(state);
                }
                if state.receives.has_spare() {
                    self.repost(state);
                }
                if !state.closing.is_empty() {
                    state.sweep_closing(&self.port);
                }
            }
            Ok(PollOutcome::Entries(num)) => {
                for nth in 0..num.min(NUM_ENTRIES) {
                    self.handle(state, nth);
                }
                if state.receives.is_low() {
                    self.repost(state);
                }
                is_news = true;
            }
            Ok(PollOutcome::Failed(failure)) => self.handle_failure(state, &failure),
            Err(error) => self.fail_all(state, &error),
        }
        if is_news && self.port.wait_fd().is_none() {
            let now = self.start.elapsed().as_nanos() as u64;
            self.last_news_ns.store(now, Ordering::Relaxed);
        }
        if self.num_backlogged.load(Ordering::Acquire) > 0 {
            self.flush_backlogs(state);
        }
        if self.has_credits() {
            // Wait some turns, in which most additions find a message that carries them.
            state.credit_turns += 1;
            if state.credit_turns >= CREDIT_TURNS {
                state.credit_turns = 0;
                self.flush_credits();
            }
        }
    }

    /// Longest time until the next turn.
    pub(super) fn nap(&self) -> Duration {
        if self.num_backlogged.load(Ordering::Acquire) > 0 {
            return if self.library_thread.is_some() { SHORTEST_TICK } else { BACKLOG_TICK };
        }
        if self.port.wait_fd().is_some() {
            return WATCHED_TICK;
        }
        let quiet_ns = (self.start.elapsed().as_nanos() as u64)
            .saturating_sub(self.last_news_ns.load(Ordering::Relaxed));
        if quiet_ns < AWAKE_NS {
            return Duration::ZERO;
        }
        // A hundredth of the time since the last arrival: quick under traffic, cheap when idle.
        Duration::from_nanos(quiet_ns / 100).clamp(SHORTEST_TICK, LONGEST_TICK)
    }

    /// True if unread mail has arrived. Also true while another thread drives.
    fn has_mail(&self) -> bool {
        match self.state.try_lock() {
            Ok(state) => state
                .cursors
                .iter()
                .flatten()
                .any(|cursor| cursor.has_started() && cursor.read().is_some()),
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Poisoned(_)) => false,
        }
    }

    fn repost(&self, state: &mut State) {
        if let Err(error) = state.receives.post(&self.port) {
            self.fail_all(state, &error);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // No code that holds the lock can leave the state half changed.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Longest message. Longer puts become writes.
const MAX_MESSAGE_BYTES: usize = 8 << 10;
const EMPTY_ENTRY: sys::CqDataEntry = sys::CqDataEntry {
    op_context: std::ptr::null_mut(),
    flags: 0,
    len: 0,
    buf: std::ptr::null_mut(),
    data: 0,
};
/// Longest time that a post waits for room in the outbox.
const POST_TIMEOUT: Duration = Duration::from_secs(1);
/// Turns of the driver for which lazy additions wait: about 20 µs of polling.
const CREDIT_TURNS: u32 = 32;
/// Pairs whose lazy additions may be queued at the same time.
const MAX_CREDITS: usize = 4096;
const BACKLOG_TICK: Duration = Duration::from_millis(1);
const WATCHED_TICK: Duration = Duration::from_millis(100);
/// Without a descriptor no thread sleeps until this long after the last arrival.
const AWAKE_NS: u64 = 200_000;
const SHORTEST_TICK: Duration = Duration::from_micros(20);
const LONGEST_TICK: Duration = Duration::from_millis(2);
