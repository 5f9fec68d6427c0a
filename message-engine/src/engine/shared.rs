//! State that users share with the engine's thread.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;

use super::config::{ConnectOptions, EngineConfig};
use super::connection::Connection;
use super::deregistration::DeregistrationReply;
use super::error::{CloseReason, ConnectError, SubmitError, TransferError};
use super::link::Limits;
use super::mailbox::Mailbox;
use super::memory::{Handle, Keys, Source};
use super::metadata::EndpointMetadata;
use super::transfer::{TransferId, Transfers};
use super::{Notification, PeerInfo};
use crate::fabric::{Access, DirectCopy, RemoteSegment};
use p2p_core::network::Offer;
use p2p_core::pulse::Pulse;
use p2p_core::wait::signal_event;

/// A command of a user to the thread.
#[derive(Debug)]
pub(super) enum Command {
    Transfer(TransferPart),
    Notify {
        conn: ConnKey,
        transfer: u32,
        deadline_ns: u64,
        notification: Vec<u8>,
    },
    Connect {
        addr: SocketAddr,
        options: ConnectOptions,
        deadline: Instant,
        reply: Arc<Mailbox<ConnectReply>>,
    },
    Register(Register),
    Release {
        idx: u32,
        is_full: bool,
        reply: DeregistrationReply,
    },
    Stop,
}

pub(super) type ConnectReply = Result<Connection, ConnectError>;

/// A part of a transfer.
#[derive(Debug)]
pub(super) struct TransferPart {
    pub(super) conn: ConnKey,
    pub(super) operation: Operation,
    pub(super) transfer: u32,
    pub(super) deadline_ns: u64,
    pub(super) handle: Arc<Handle>,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Operation of a part.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operation {
    Send,
    Recv,
    Write(RemoteSegment),
    Read(RemoteSegment),
}

impl Operation {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Write(_) => "write",
            Self::Read(_) => "read",
        }
    }
}

/// Memory to be registered.
#[derive(Debug)]
pub(super) struct Register {
    pub(super) ptr: NonNull<u8>,
    pub(super) bytes: usize,
    pub(super) access: Access,
    pub(super) source: Source,
    pub(super) reply: Arc<Mailbox<Result<Arc<Keys>, String>>>,
}

// SAFETY: an address and its length; the memory has no thread affinity.
unsafe impl Send for Register {}

/// A connection on the thread: index and number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ConnKey {
    pub(super) idx: u32,
    pub(super) serial: u64,
}

/// State of a connection that users share with the thread.
#[derive(Debug)]
pub(super) struct ConnShared {
    pub(super) shared: Arc<Shared>,
    pub(super) key: ConnKey,
    pub(super) fabric: usize,
    pub(super) transport: Offer,
    pub(super) peer: PeerInfo,
    pub(super) theirs: Limits,
    /// Copies on users' threads, if the transport allows them.
    pub(super) direct: Option<Arc<dyn DirectCopy>>,
    pub(super) closed: OnceLock<CloseReason>,
    /// Cost of the notifications that users have taken.
    taken: AtomicU64,
    /// Whether the thread has been asked to read `taken`.
    has_taken: AtomicBool,
}

impl ConnShared {
    /// An established connection over the transport with index `fabric`.
    pub(super) fn new(
        shared: &Arc<Shared>,
        key: ConnKey,
        (fabric, transport): (usize, Offer),
        peer: PeerInfo,
        theirs: Limits,
        direct: Option<Arc<dyn DirectCopy>>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            key,
            fabric,
            transport,
            peer,
            theirs,
            direct,
            closed: OnceLock::new(),
            taken: AtomicU64::new(0),
            has_taken: AtomicBool::new(false),
        }
    }

    /// Adds the cost of a notification that a user has taken. The peer may send as much more.
    pub(super) fn add_taken(&self, cost: u64) {
        self.taken.fetch_add(cost, Ordering::Relaxed);
        // Release: the thread sees the count when it finds this set, or has just reset it.
        if !self.has_taken.swap(true, Ordering::AcqRel) {
            self.shared.defer_taken(self.key);
        }
    }

    /// Returns the cost of all notifications that users have taken so far, and resets the request to the thread.
    pub(super) fn all_taken(&self) -> u64 {
        self.has_taken.swap(false, Ordering::AcqRel);
        self.taken.load(Ordering::Relaxed)
    }
}

impl Drop for ConnShared {
    fn drop(&mut self) {
        if self.closed.get().is_none() {
            self.shared.defer_close(self.key, CloseReason::Local);
        }
    }
}

/// State of an engine that its users share with its thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) metadata: EndpointMetadata,
    pub(super) start: Instant,
    pub(super) transfers: Arc<Transfers>,
    /// Time limit of commands whose caller waits, such as registering memory.
    pub(super) command_timeout: Duration,
    pub(super) queue: ArrayQueue<Command>,
    wake: OwnedFd,
    /// Whether the thread sleeps or is about to sleep.
    sleeping: AtomicBool,
    pub(super) is_dead: AtomicBool,
    pub(super) inbox: Mailbox<(Weak<ConnShared>, Notification)>,
    /// Cost of the notifications in the inbox.
    untaken: AtomicU64,
    pub(super) accepted: Mailbox<Connection>,
    /// Handshakes of peers that were refused.
    pub(super) num_refused: AtomicU64,
    deferred: Mutex<DeferredCommands>,
    has_deferred: AtomicBool,
    pub(super) connections: Mutex<Vec<Weak<ConnShared>>>,
    pub(super) endpoints: Mutex<Vec<Connection>>,
}

/// Commands of destructors and of users that take notifications. The queue must not refuse them, and no caller waits
/// for them.
#[derive(Debug, Default)]
pub(super) struct DeferredCommands {
    /// Registrations: index, and whether the handle covered all of it.
    pub(super) released: Vec<(u32, bool)>,
    /// Connections to be closed.
    pub(super) closed: Vec<(ConnKey, CloseReason)>,
    /// Connections whose way for direct copies has failed.
    pub(super) lost: Vec<ConnKey>,
    /// Connections whose notifications users have taken.
    pub(super) taken: Vec<ConnKey>,
}

impl Shared {
    pub(super) fn new(metadata: EndpointMetadata, wake: OwnedFd, config: &EngineConfig) -> Self {
        let pulse = Pulse::new(config.stuck_timeout);
        Self {
            metadata,
            start: Instant::now(),
            transfers: Arc::new(Transfers::new(config.max_transfers, pulse)),
            command_timeout: config.stuck_timeout,
            queue: ArrayQueue::new(config.queue_len),
            wake,
            sleeping: AtomicBool::new(false),
            is_dead: AtomicBool::new(false),
            inbox: Mailbox::default(),
            untaken: AtomicU64::new(0),
            accepted: Mailbox::default(),
            num_refused: AtomicU64::new(0),
            deferred: Mutex::default(),
            has_deferred: AtomicBool::new(false),
            connections: Mutex::default(),
            endpoints: Mutex::default(),
        }
    }

    /// Nanoseconds of the engine's clock at `at`.
    pub(super) fn ns(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Removes a connection that is about to end from every list, so that no user gets it any more.
    pub(super) fn remove_connection(&self, conn: &Weak<ConnShared>) {
        self.accepted.retain(|waiting| !std::ptr::eq(Arc::as_ptr(&waiting.shared), conn.as_ptr()));
        lock(&self.connections).retain(|other| !other.ptr_eq(conn));
    }

    /// Appends a notification to the inbox.
    pub(super) fn deliver(&self, from: Weak<ConnShared>, notification: Notification) {
        self.untaken.fetch_add(notification.cost(), Ordering::Relaxed);
        // A closed inbox drops it: the engine has ended.
        let _ = self.inbox.push((from, notification));
    }

    /// Subtracts the cost of a notification that a user has taken.
    pub(super) fn subtract_untaken(&self, cost: u64) {
        self.untaken.fetch_sub(cost, Ordering::Relaxed);
    }

    /// Cost of the notifications that wait to be taken.
    pub(super) fn untaken(&self) -> u64 {
        self.untaken.load(Ordering::Relaxed)
    }

    /// Pushes a command to the thread. Returns it if the queue is full.
    pub(super) fn push(&self, command: Command) -> Result<(), Command> {
        self.queue.push(command)?;
        self.kick();
        if self.is_dead.load(Ordering::SeqCst) {
            self.fail_queued();
        }
        Ok(())
    }

    /// Pushes a command. Blocks while the queue is full, until `deadline`.
    pub(super) fn push_until(
        &self,
        mut command: Command,
        deadline: Instant,
    ) -> Result<(), Command> {
        let mut pause = Duration::from_micros(1);
        loop {
            match self.push(command) {
                Ok(()) => return Ok(()),
                Err(back) if Instant::now() >= deadline => return Err(back),
                Err(back) => command = back,
            }
            self.kick();
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Awaitable form of [`push_until`](Self::push_until).
    pub(super) async fn push_until_async(
        &self,
        mut command: Command,
        deadline: Instant,
    ) -> Result<(), Command> {
        loop {
            match self.push(command) {
                Ok(()) => return Ok(()),
                Err(back) if Instant::now() >= deadline => return Err(back),
                Err(back) => command = back,
            }
            self.kick();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Wakes the thread if it sleeps.
    pub(super) fn kick(&self) {
        // SYNC POINT: engine-sleep. A thread that went to sleep before this load sees the commands queued before. A
        // thread that goes to sleep after it sees the queue.
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst)
            && self.sleeping.swap(false, Ordering::SeqCst)
            && let Err(error) = signal_event(self.wake.as_fd())
        {
            tracing::error!(%error, "cannot wake the engine's thread");
        }
    }

    /// Announces that the thread sleeps. Returns false, without the announcement, if there is something to do.
    pub(super) fn may_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        // SYNC POINT: engine-sleep.
        fence(Ordering::SeqCst);
        let is_idle = self.queue.is_empty() && !self.has_deferred.load(Ordering::SeqCst);
        if !is_idle {
            self.end_sleep();
        }
        is_idle
    }

    pub(super) fn end_sleep(&self) {
        self.sleeping.store(false, Ordering::SeqCst);
    }

    pub(super) fn defer_release(&self, idx: u32, is_full: bool) {
        lock(&self.deferred).released.push((idx, is_full));
        self.has_deferred.store(true, Ordering::SeqCst);
        self.kick();
    }

    pub(super) fn defer_close(&self, conn: ConnKey, reason: CloseReason) {
        lock(&self.deferred).closed.push((conn, reason));
        self.has_deferred.store(true, Ordering::SeqCst);
        self.kick();
    }

    pub(super) fn defer_lost(&self, conn: ConnKey) {
        lock(&self.deferred).lost.push(conn);
        self.has_deferred.store(true, Ordering::SeqCst);
        self.kick();
    }

    fn defer_taken(&self, conn: ConnKey) {
        lock(&self.deferred).taken.push(conn);
        self.has_deferred.store(true, Ordering::SeqCst);
        self.kick();
    }

    pub(super) fn take_deferred(&self) -> Option<DeferredCommands> {
        if !self.has_deferred.load(Ordering::SeqCst)
            || !self.has_deferred.swap(false, Ordering::SeqCst)
        {
            return None;
        }
        Some(std::mem::take(&mut *lock(&self.deferred)))
    }

    /// Fails the queued commands of a thread that has ended.
    pub(super) fn fail_queued(&self) {
        while let Some(command) = self.queue.pop() {
            let (transfer, op) = match &command {
                Command::Transfer(part) => (part.transfer, part.operation.name()),
                Command::Notify { transfer, .. } => (*transfer, "notify"),
                Command::Connect { reply, .. } => {
                    reply.close();
                    continue;
                }
                Command::Register(Register { reply, .. }) => {
                    reply.close();
                    continue;
                }
                Command::Release { reply, .. } => {
                    reply.close();
                    continue;
                }
                Command::Stop => continue,
            };
            drop(command);
            let error = TransferError::Disconnected { op, reason: CloseReason::Stopped };
            self.transfers.finish(transfer, Err(error));
        }
    }

    /// Begins a transfer of `num_parts` parts.
    pub(super) fn begin(&self, num_parts: usize) -> Result<TransferId, SubmitError> {
        let num_parts = u32::try_from(num_parts).unwrap_or(u32::MAX).max(1);
        self.transfers.begin(num_parts).ok_or(SubmitError::Busy)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
