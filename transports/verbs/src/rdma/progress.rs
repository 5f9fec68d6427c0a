//! The driver of a network: polls completions, updates endpoints, and wakes sleeping threads.
//!
//! All queue pairs of a device share few completion queues. A sweep over thousands of idle peers therefore costs
//! one poll. A driving thread takes the completions of all peers, under a lock that it only tries. If the lock is
//! taken, its holder does the work.
//!
//! A completion queue cannot overflow: each queue pair reserves room for all its requests at once. A failure
//! completes that many.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};

use super::owner::{
    AsyncEvent, CallError, CompletionBuffer, CompletionChannel, CompletionQueue, Context,
    WorkCompletion, queue_pair_event,
};
use super::request::{MAX_QUEUE_PAIRS_IN_ALL, OpKind, Place, RequestId};
use super::state::QueuePairState;
use super::status::Cause;
use super::sys::ibv_wc_status::IBV_WC_SUCCESS;
use p2p_core::wait::{Driver, signal_event};

/// Reserved room of a queue pair in a completion queue, returned on drop.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) queue: Arc<CompletionQueue>,
    progress: Weak<Progress>,
    queue_idx: usize,
    num_completions: u32,
}

impl Drop for Room {
    fn drop(&mut self) {
        let Some(progress) = self.progress.upgrade() else { return };
        let mut table = progress.lock();
        // Leftover completions of the queue pair still occupy room, so they are taken first.
        table.take_completions();
        table.queues[self.queue_idx].num_used -= self.num_completions;
    }
}

/// The task of the driver's background thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ThreadTask {
    /// The thread listens for asynchronous events, and drives when no other thread does.
    EventsAndDriving,
    /// The thread listens for asynchronous events only. The one driving thread must not miss a completion that
    /// another thread took.
    EventsOnly,
}

/// The driver of a network.
pub(super) struct Progress {
    table: Mutex<Table>,
    channels: Vec<Arc<CompletionChannel>>,
    /// Readable if any of the channels is readable.
    any_channel: OwnedFd,
    stop: OwnedFd,
}

struct Table {
    queue_pairs: Vec<TableEntry>,
    free: Vec<u32>,
    queues: Vec<Queue>,
    buffer: CompletionBuffer,
}

struct TableEntry {
    generation: u8,
    queue_pair: Option<Arc<QueuePairState>>,
}

struct Queue {
    queue: Arc<CompletionQueue>,
    /// Index of the channel that the queue reports to.
    channel_idx: usize,
    num_entries: u32,
    num_used: u32,
    /// True if polling has failed. The queue's peers are lost.
    is_broken: bool,
}

impl Progress {
    /// Starts a driver for queue pairs on `contexts`, with its background thread.
    pub(super) fn start(
        name: &str,
        contexts: &[Arc<Context>],
        task: ThreadTask,
    ) -> Result<Arc<Self>, CallError> {
        let system = |errno: rustix::io::Errno| CallError {
            call: "epoll of the completion channels",
            code: errno.raw_os_error(),
        };
        let channels: Vec<_> =
            contexts.iter().map(CompletionChannel::new).collect::<Result<_, _>>()?;
        let any_channel = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system)?;
        for channel in &channels {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&any_channel, channel.fd(), data, epoll::EventFlags::IN).map_err(system)?;
        }
        let stop = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(system)?;
        let progress = Arc::new(Self {
            table: Mutex::new(Table {
                queue_pairs: Vec::new(),
                free: Vec::new(),
                queues: Vec::new(),
                buffer: CompletionBuffer::new(),
            }),
            channels,
            any_channel,
            stop,
        });
        let standby = Standby {
            stop: progress
                .stop
                .try_clone()
                .map_err(|e| CallError { call: "dup", code: e.raw_os_error().unwrap_or(0) })?,
            progress: Arc::downgrade(&progress),
            contexts: contexts.to_vec(),
            task,
        };
        std::thread::Builder::new()
            .name(format!("verbs-{name}").chars().take(15).collect())
            .spawn(move || standby.run())
            .map_err(|e| CallError { call: "spawn", code: e.raw_os_error().unwrap_or(0) })?;
        Ok(progress)
    }

    /// Reserves room in a completion queue of the context `context_idx`.
    pub(super) fn reserve(
        self: &Arc<Self>,
        context_idx: usize,
        max_entries: u32,
        num_completions: u32,
    ) -> Result<Room, CallError> {
        let mut table = self.lock();
        let found = table.queues.iter().position(|queue| {
            queue.channel_idx == context_idx
                && !queue.is_broken
                && queue.num_entries - queue.num_used >= num_completions
        });
        let queue_idx = match found {
            Some(idx) => idx,
            None => {
                // The first queue is small, since most processes have few peers.
                let of_context = |queue: &&Queue| queue.channel_idx == context_idx;
                let is_first = !table.queues.iter().any(|queue| of_context(&queue));
                let wanted = if is_first { FIRST_QUEUE } else { NEXT_QUEUES };
                let num_entries = wanted.max(num_completions).min(max_entries);
                if num_entries < num_completions {
                    return Err(CallError { call: "ibv_create_cq", code: libc::ENOSPC });
                }
                let queue = CompletionQueue::new(&self.channels[context_idx], num_entries)?;
                // The background thread may sleep already, and has not armed this queue.
                queue.arm()?;
                table.queues.push(Queue {
                    queue,
                    channel_idx: context_idx,
                    num_entries,
                    num_used: 0,
                    is_broken: false,
                });
                table.queues.len() - 1
            }
        };
        let queue = &mut table.queues[queue_idx];
        queue.num_used += num_completions;
        let queue = Arc::clone(&queue.queue);
        Ok(Room { queue, progress: Arc::downgrade(self), queue_idx, num_completions })
    }

    /// Registers `queue_pair`, so that the driver reports completions to it.
    pub(super) fn enter(&self, queue_pair: Arc<QueuePairState>) -> Result<Place, CallError> {
        let mut table = self.lock();
        let idx = match table.free.pop() {
            Some(idx) => idx,
            None if table.queue_pairs.len() < MAX_QUEUE_PAIRS_IN_ALL => {
                table.queue_pairs.push(TableEntry { generation: 0, queue_pair: None });
                table.queue_pairs.len() as u32 - 1
            }
            None => return Err(CallError { call: "counting queue pairs", code: libc::ENOSPC }),
        };
        let entry = &mut table.queue_pairs[idx as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.queue_pair = Some(queue_pair);
        Ok(Place { idx, generation: entry.generation })
    }

    /// Removes a queue pair. Afterwards the driver does not touch it.
    pub(super) fn leave(&self, place: Place) {
        let mut table = self.lock();
        if let Some(entry) = table.queue_pairs.get_mut(place.idx as usize)
            && entry.generation == place.generation
            && entry.queue_pair.take().is_some()
        {
            table.free.push(place.idx);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails all peers that `is_hit` selects.
    fn fail_where(&self, cause: Cause, is_hit: impl Fn(&QueuePairState) -> bool) {
        for queue_pair in
            self.lock().queue_pairs.iter().filter_map(|entry| entry.queue_pair.as_ref())
        {
            if is_hit(queue_pair) {
                queue_pair.peer.health.fail("asynchronous event", cause);
                queue_pair.peer.signal();
            }
        }
    }
}

impl Driver for Progress {
    #[inline]
    fn drive(&self) {
        if let Ok(mut table) = self.table.try_lock() {
            table.take_completions();
        }
    }

    fn may_sleep(&self) -> bool {
        // Events are taken only here, right before the queues are armed again and polled once more. Once an event
        // is gone, either a queue is armed or a thread has just polled. While an event is present, the descriptor
        // is readable for every sleeping thread.
        for channel in &self.channels {
            channel.drain();
        }
        let mut table = self.lock();
        for queue in table.queues.iter().filter(|queue| !queue.is_broken) {
            if let Err(error) = queue.queue.arm() {
                tracing::error!(%error, "cannot ask for completion events");
                return false;
            }
        }
        table.take_completions() == 0
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.any_channel.as_fd())
    }
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").finish_non_exhaustive()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Err(error) = signal_event(self.stop.as_fd()) {
            tracing::error!(%error, "cannot stop a thread");
        }
    }
}

impl Table {
    /// Takes all present completions, up to a bound, and returns their number.
    fn take_completions(&mut self) -> usize {
        let Self { queue_pairs, queues, buffer, .. } = self;
        let mut num_taken = 0;
        for queue in queues.iter_mut().filter(|queue| !queue.is_broken) {
            // Takes at most as many as the queue holds: a stream of new completions must not keep the caller here.
            for _ in 0..queue.num_entries.div_ceil(32) {
                let num_found = match queue.queue.poll(buffer) {
                    Ok(num_found) => num_found,
                    Err(error) => {
                        tracing::error!(%error, "a completion queue cannot be polled; its peers count as lost");
                        queue.is_broken = true;
                        let hit = queue_pairs.iter().filter_map(|entry| entry.queue_pair.as_ref());
                        for queue_pair in
                            hit.filter(|queue_pair| queue_pair.qp.reports_to(&queue.queue))
                        {
                            queue_pair
                                .peer
                                .health
                                .fail("poll", Cause::Refused { code: error.code });
                            queue_pair.peer.signal();
                        }
                        0
                    }
                };
                for completion in buffer.filled(num_found) {
                    dispatch(queue_pairs, completion);
                }
                num_taken += num_found;
                if num_found < 32 {
                    break;
                }
            }
        }
        num_taken
    }
}

fn dispatch(queue_pairs: &[TableEntry], completion: WorkCompletion) {
    let id = RequestId(completion.id);
    let place = id.place();
    let queue_pair = queue_pairs
        .get(place.idx as usize)
        .filter(|entry| entry.generation == place.generation)
        .and_then(|entry| entry.queue_pair.as_deref());
    // A leftover of a destroyed queue pair.
    let Some(queue_pair) = queue_pair else { return };
    if completion.status == IBV_WC_SUCCESS {
        match id.kind() {
            OpKind::Receive => queue_pair.receive(id, completion),
            OpKind::Answer => queue_pair.answered(place),
            _ => queue_pair.complete(id.0 as u32),
        }
        return;
    }
    let cause = Cause::Completion { status: completion.status, vendor: completion.vendor };
    if !queue_pair.peer.health.has_failed() {
        tracing::debug!(
            qpn = queue_pair.qp.number(),
            op = id.kind().name(),
            status = completion.status,
            vendor = completion.vendor,
            "a request failed"
        );
    }
    queue_pair.fail(id.kind().name(), cause);
    queue_pair.peer.signal();
}

/// The background thread of a driver.
struct Standby {
    progress: Weak<Progress>,
    contexts: Vec<Arc<Context>>,
    stop: OwnedFd,
    task: ThreadTask,
}

impl Standby {
    fn run(self) {
        let drives = self.task == ThreadTask::EventsAndDriving;
        loop {
            let Some(progress) = self.progress.upgrade() else { return };
            let is_idle = !drives || progress.may_sleep();
            let Ok(any_channel) = progress.any_channel.try_clone() else { return };
            // The thread must not keep the driver alive while it sleeps.
            drop(progress);
            let limit = if is_idle { LONGEST_SLEEP } else { Duration::ZERO };
            let events = self.contexts.iter().map(|context| context.async_fd());
            let mut watched = vec![PollFd::new(&self.stop, PollFlags::IN)];
            watched.extend(events.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            if drives {
                watched.push(PollFd::new(&any_channel, PollFlags::IN));
            }
            let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: 0 };
            // After an interrupt, too, everything is checked.
            let _ = poll(&mut watched, Some(&limit));
            if !watched[0].revents().is_empty() {
                return;
            }
            let Some(progress) = self.progress.upgrade() else { return };
            for context in &self.contexts {
                while let Some(event) = context.next_event() {
                    handle(&progress, context, event);
                }
            }
            if drives {
                progress.drive();
            }
            drop(progress);
            // Under load other threads drive and events follow each other closely. This rate is then enough.
            std::thread::sleep(PAUSE);
        }
    }
}

fn handle(progress: &Progress, context: &Context, event: AsyncEvent) {
    let device = context.name();
    match event {
        AsyncEvent::QueuePair { kind, number } => {
            let why = queue_pair_event(kind);
            tracing::warn!(device, qpn = number, why, "a queue pair failed");
            progress.fail_where(Cause::Event { kind, why }, |queue_pair| {
                queue_pair.qp.number() == number && queue_pair.qp.device() == device
            });
        }
        AsyncEvent::Port { is_up: true, port } => tracing::info!(device, port, "port up"),
        AsyncEvent::Port { is_up: false, port } => {
            tracing::warn!(device, port, "port down; its peers count as lost");
            let cause = Cause::Event { kind: 0, why: "the port of this side went down" };
            progress.fail_where(cause, |queue_pair| {
                queue_pair.qp.device() == device && queue_pair.qp.port() == port
            });
        }
        AsyncEvent::Device => {
            tracing::error!(device, "the RDMA device failed; its peers count as lost");
            let cause = Cause::Event { kind: 0, why: "the device of this side failed" };
            progress.fail_where(cause, |queue_pair| queue_pair.qp.device() == device);
        }
        AsyncEvent::CompletionQueue => {
            tracing::error!(device, "a completion queue failed; the device's peers count as lost");
            let cause = Cause::Event { kind: 0, why: "a completion queue of this side failed" };
            progress.fail_where(cause, |queue_pair| queue_pair.qp.device() == device);
        }
        AsyncEvent::Other(kind) => tracing::debug!(device, kind, "asynchronous event"),
    }
}

/// Entries of the first completion queue of a device.
const FIRST_QUEUE: u32 = 4 << 10;
/// Entries of each further completion queue.
const NEXT_QUEUES: u32 = 64 << 10;
/// Longest delay until the background thread notices a dropped network if the stop event fails.
const LONGEST_SLEEP: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);
