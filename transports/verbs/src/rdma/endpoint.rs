//! An endpoint that reaches its peer by RDMA.
//!
//! | operation | request |
//! |---|---|
//! | put | WRITE, inline if small, in pieces if longer than a message; large puts spread over all queue pairs |
//! | get | READ, likewise |
//! | flag | FETCH_ADD on the first queue pair; without atomics a SEND there, see below |
//! | wake-up | WRITE_WITH_IMM without bytes, after the flag; nothing if the flag is a SEND |
//! | fence | the fence bit of the next request if reads are under way; on Soft-RoCE a wait for these reads |
//! | quiet | completion of all requests, after a WRITE without bytes if the last request was not signalled |
//!
//! In a batch (`begin_batch`, `flush`) one call posts up to 32 requests of a queue pair. A wait for any buffered
//! request posts it first.
//!
//! A queue pair executes its writes, atomics and messages in order. A flag therefore needs no wait for earlier puts
//! on its own queue pair. It waits only for operations on other queue pairs. Such waits, and waits for room in a
//! full queue, depend on the peer's *device*, never on its process. They are bounded.
//!
//! If flags travel as messages, the peer's driver adds to a flag when it takes the message. It also counts the
//! parts of a spread put, so this side does not wait for them. To learn the peer driver's progress, an endpoint
//! sends a question after all earlier messages and receives an answer. `quiet` always asks. `fence` asks if flags
//! precede it.
//!
//! A message or counted write consumes a receive of the peer. The number under way never exceeds the peer's
//! receives. The next one then waits until the peer reports that it has taken some. This wait depends on the peer's
//! process and is bounded by [`stall_timeout`](super::VerbsConfig::stall_timeout).

mod sent;
mod waits;

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::sent::SentCounters;
use super::messages;
use super::progress::Progress;
use super::registration::{MemoryRegion, Rights};
use super::request::OpKind;
use super::send_queue::{Message, PostFailure, SendQueue};
use super::state::PeerState;
use p2p_core::counted::message::Action;
use p2p_core::endpoint::checks::{check_flag, check_range, find_registered};
use p2p_core::endpoint::{
    self, Batch, Endpoint, Marks, PostError, Progress as _, QuietError, TransportKind,
};
use p2p_core::region::{LocalRange, Region, RemoteRange, SlotKey};
use p2p_core::wait::Driver;

/// An endpoint over one or more queue pairs.
#[derive(Debug)]
pub struct VerbsEndpoint {
    send_queues: Vec<SendQueue>,
    peer: Arc<PeerState>,
    progress: Arc<Progress>,
    /// Local memory of puts and gets, registered on every send queue.
    sources: Vec<Region>,
    remote: RemoteSlot,
    stripe_bytes: usize,
    /// True if send queues other than the first may have requests under way.
    is_spread: bool,
    /// True if a fence separates the first send queue's requests from the next spread operation.
    fence_before_spread: bool,
    /// State of sent messages, if flags travel as messages.
    sent: Option<SentCounters>,
}

/// The peer's slot.
#[derive(Debug, Clone)]
pub(super) struct RemoteSlot {
    pub(super) address: u64,
    pub(super) bytes: usize,
    /// Name of the peer, for error texts.
    pub(super) peer: String,
}

impl VerbsEndpoint {
    pub(super) fn new(
        send_queues: Vec<SendQueue>,
        peer: Arc<PeerState>,
        progress: Arc<Progress>,
        remote: RemoteSlot,
        stripe_bytes: usize,
        window: Option<u32>,
    ) -> Self {
        let sent = window.map(SentCounters::new);
        Self {
            send_queues,
            peer,
            progress,
            sources: Vec::new(),
            remote,
            stripe_bytes,
            is_spread: false,
            fence_before_spread: false,
            sent,
        }
    }

    /// Number of queue pairs in use.
    #[must_use]
    pub const fn num_queue_pairs(&self) -> usize {
        self.send_queues.len()
    }

    /// The failure that stopped a request.
    #[cold]
    fn failure(&self, op: &'static str) -> PostError {
        match self.health() {
            Err(error) => error,
            Ok(()) => PostError::Disconnected { op },
        }
    }

    fn describe_peer(&self) -> String {
        let RemoteSlot { address, bytes, peer } = &self.remote;
        format!("{peer}, slot of {bytes} bytes at {address:#x}")
    }

    #[inline]
    fn remote_address(
        &self,
        op: &'static str,
        offset: usize,
        len: usize,
    ) -> Result<u64, PostError> {
        check_range(op, offset, len, self.remote.bytes)?;
        Ok(self.remote.address + offset as u64)
    }

    /// Index of the registration that holds `range`.
    #[inline]
    fn source_of(&self, op: &'static str, range: &LocalRange) -> Result<usize, PostError> {
        let sources = self.sources.iter().enumerate().map(|(idx, region)| (region, idx));
        find_registered(op, range, sources).map(|(idx, _)| idx)
    }

    /// # Safety
    /// As for `put` or `get`.
    unsafe fn transfer(
        &mut self,
        kind: OpKind,
        local: &LocalRange,
        remote: RemoteRange<SlotKey>,
    ) -> Result<(), PostError> {
        let op = kind.name();
        self.health()?;
        let len = local.len();
        let remote_address = self.remote_address(op, remote.offset, remote.len.max(len))?;
        let source = self.source_of(op, local)?;
        let local_address = local.as_ptr().as_ptr() as u64;
        if len < self.stripe_bytes || self.send_queues.len() == 1 {
            let whole = Part { source, local_address, len, remote_address, counted: None };
            // SAFETY: the caller's promise; the range lies within the registration.
            return unsafe { self.pieces(0, kind, whole) };
        }
        if self.fence_before_spread {
            self.settle(0)?;
            self.fence_before_spread = false;
        }
        self.is_spread = true;
        let part = len.div_ceil(self.send_queues.len()).next_multiple_of(PART_ALIGN);
        let mut start = 0;
        for send_queue in 0..self.send_queues.len() {
            let part = part.min(len - start);
            if part == 0 {
                break;
            }
            let piece = Part {
                source,
                local_address: local_address + start as u64,
                len: part,
                remote_address: remote_address + start as u64,
                counted: match &self.sent {
                    Some(sent) if send_queue > 0 && kind == OpKind::Put => Some(sent.next_seq),
                    _ => None,
                },
            };
            let is_counted = piece.counted.is_some();
            if is_counted {
                self.wait_for_room(kind)?;
            }
            // SAFETY: the caller's promise; the parts lie within the range.
            unsafe { self.pieces(send_queue, kind, piece)? };
            if let Some(sent) = &mut self.sent {
                if is_counted {
                    sent.count_write();
                }
                sent.has_spread_reads |= kind == OpKind::Get;
            }
            start += part;
        }
        Ok(())
    }

    /// Transfers one send queue's part, in messages that the device accepts.
    ///
    /// # Safety
    /// As for `put` or `get`; the range lies within the registration `source`.
    unsafe fn pieces(
        &mut self,
        send_queue: usize,
        kind: OpKind,
        Part { source, local_address, len, remote_address, counted }: Part,
    ) -> Result<(), PostError> {
        let send_queue = &mut self.send_queues[send_queue];
        let longest = send_queue.max_message_bytes();
        let mut start = 0;
        while start < len {
            let bytes = longest.min(len - start);
            let message = Message {
                source,
                local_address: local_address + start as u64,
                bytes: bytes as u32,
                remote_address: remote_address + start as u64,
                is_last: start + bytes == len,
                counted: counted.filter(|_| start + bytes == len),
            };
            // SAFETY: the caller's promise.
            let posted = unsafe { send_queue.transfer(kind, message) };
            if posted.is_err() {
                return Err(self.failure(kind.name()));
            }
            start += bytes;
        }
        Ok(())
    }

    /// True if a sent message may still await execution by the peer's driver.
    fn has_open_messages(&self) -> bool {
        let answered = self.peer.arrivals.answered();
        self.sent.as_ref().is_some_and(|sent| sent.has_open(answered))
    }

    /// Sends a message after all earlier requests. `None` if flags do not travel as messages.
    fn send(&mut self, kind: OpKind, action: Action) -> Option<Result<(), PostError>> {
        let sent = self.sent.as_ref()?;
        let (seq, writes) = (sent.next_seq, sent.num_writes);
        let settled = if sent.has_spread_reads { self.settle(1) } else { Ok(()) };
        if let Err(error) = settled.and_then(|()| self.wait_for_room(kind)) {
            return Some(Err(error));
        }
        let header = messages::header(seq, writes, action, self.peer.arrivals.tell());
        // SYNC POINT `published`, SYNC POINT `consumed`: the device completes the peer's receive after earlier
        // writes of this queue pair. The peer's driver counts the writes of other queue pairs.
        if self.send_queues[0].send(kind, &header).is_err() {
            return Some(Err(self.failure(kind.name())));
        }
        if let Some(sent) = &mut self.sent {
            sent.count_message();
        }
        Some(Ok(()))
    }
}

/// The part of a transfer that one queue pair carries.
#[derive(Debug, Clone, Copy)]
struct Part {
    source: usize,
    local_address: u64,
    len: usize,
    remote_address: u64,
    /// Sent to the peer when the part has landed: the number of the first message after it.
    counted: Option<u32>,
}

impl Endpoint for VerbsEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        let is_known =
            |known: &Region| known.as_ptr() == region.as_ptr() && known.len() == region.len();
        if self.sources.iter().any(is_known) {
            return Ok(());
        }
        let keys: Result<Vec<_>, _> = self
            .send_queues
            .iter()
            .map(|send_queue| MemoryRegion::of_region(send_queue.domain(), region, Rights::Local))
            .collect();
        let keys = keys.map_err(|error| PostError::Register {
            bytes: region.len(),
            detail: format!("{error}; check the limit on locked memory (`ulimit -l`)"),
        })?;
        for (send_queue, key) in self.send_queues.iter_mut().zip(keys) {
            send_queue.add_source(key);
        }
        self.sources.push(region.clone());
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        // SAFETY: the caller's promise about `src`.
        unsafe { self.transfer(OpKind::Put, &src, dst) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        // SAFETY: the caller's promise about `dst`.
        unsafe { self.transfer(OpKind::Get, &dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        check_flag("add_flag", dst.offset, self.remote.bytes)?;
        let address = self.remote.address + dst.offset as u64;
        self.health()?;
        let action = Action::Add { offset: dst.offset as u32, value };
        if let Some(sent) = self.send(OpKind::AddFlag, action) {
            return sent;
        }
        if self.is_spread {
            self.settle(1)?;
        }
        // SYNC POINT `published`, SYNC POINT `consumed`: the device executes the addition after all earlier writes,
        // and makes them visible in that order.
        self.send_queues[0].add(address, value).map_err(|PostFailure| self.failure("add_flag"))
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.health()?;
        if self.has_open_messages() {
            // The peer's driver may apply a flag after its device performs later writes.
            return match self.quiet(Instant::now() + FENCE_PATIENCE) {
                Ok(()) => Ok(()),
                Err(QuietError::Post(error)) => Err(error),
                Err(error @ QuietError::Deadline { .. }) => {
                    let code = i64::from(libc::ETIMEDOUT);
                    Err(PostError::Transport { op: "fence", code, detail: error.to_string() })
                }
            };
        }
        if self.is_spread {
            return self.settle(0);
        }
        self.send_queues[0].fence();
        self.fence_before_spread = self.send_queues.len() > 1;
        Ok(())
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.health()?;
        // The question goes first, so that its answer travels while the rest completes.
        let heard = self.hear(deadline);
        match (heard, self.drain(deadline)) {
            // A failure takes precedence over a deadline that it causes.
            (Err(QuietError::Deadline { .. }), Err(failed @ QuietError::Post(_))) => Err(failed),
            (heard, drained) => heard.and(drained),
        }
    }

    fn wake(&mut self, _key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        let address = self.remote_address("wake", waiting_offset, 8)?;
        // SYNC POINT `waiting`: the message follows the flag, and the peer's driver checks the word. If the driver
        // adds to flags itself, it checks then.
        if self.sent.is_none() {
            self.send_queues[0]
                .touch(OpKind::Wake, address)
                .map_err(|PostFailure| self.failure("wake"))?;
        }
        // Also processes the peer's own wake-ups, so that the peer never runs out of receives while this side works
        // without waiting.
        self.progress.drive();
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.peer.wake_self.as_fd())
    }
}

impl Batch for VerbsEndpoint {
    fn begin_batch(&mut self) {
        self.send_queues.iter_mut().for_each(SendQueue::begin_batch);
    }

    fn flush(&mut self) -> Result<(), PostError> {
        // Ends the batch on every send queue, even after a failure: otherwise the next batch would post leftover
        // requests.
        let ended = self.send_queues.iter_mut().map(SendQueue::end_batch).fold(Ok(()), Result::and);
        ended.map_err(|PostFailure| self.failure("flush"))
    }
}

impl endpoint::Progress for VerbsEndpoint {
    p2p_core::default_progress! { add_flag_lazily }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        Some(Arc::clone(&self.progress) as Arc<dyn Driver>)
    }

    #[inline]
    fn health(&self) -> Result<(), PostError> {
        self.peer.health.check(|| self.describe_peer())
    }

    fn has_room(&mut self) -> bool {
        // Each part of a spread put takes one receive.
        let Some(SentCounters { window, .. }) = self.sent else { return true };
        let wanted = window.min(self.send_queues.len() as u32);
        if self.room() < wanted {
            self.progress.drive();
        }
        self.room() >= wanted || self.peer.health.has_failed()
    }

    fn has_room_to_spare(&mut self) -> bool {
        let Some(SentCounters { window, .. }) = self.sent else { return true };
        if self.room() <= window / 2 {
            self.progress.drive();
        }
        self.room() > window / 2 || self.peer.health.has_failed()
    }

    fn try_fence(&mut self) -> Result<bool, PostError> {
        if !self.has_open_messages() {
            return self.fence().map(|()| true);
        }
        match self.quiet(Instant::now()) {
            Ok(()) => Ok(true),
            Err(QuietError::Deadline { .. }) => Ok(false),
            Err(QuietError::Post(error)) => Err(error),
        }
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        // Pending work of the peer's driver uses no memory of this side.
        match self.drain(Instant::now()) {
            Ok(()) => Ok(true),
            Err(QuietError::Deadline { .. }) => Ok(false),
            Err(QuietError::Post(error)) => Err(error),
        }
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        self.health()?;
        if self.is_spread || self.sent.is_some() {
            // Requests of several queue pairs have no mutual order. A message at the peer's device may also wait
            // for its driver.
            return Ok(None);
        }
        let send_queue = &mut self.send_queues[0];
        if send_queue.seal(self.remote.address).and_then(|()| send_queue.flush()).is_err() {
            return Err(self.failure("marks"));
        }
        self.progress.drive();
        let issued = send_queue.num_posted();
        Ok(Some(Marks { issued, arrived: issued - send_queue.num_outstanding() }))
    }
}

/// Time limit of a fence after flags. Such a fence completes all earlier operations.
const FENCE_PATIENCE: Duration = Duration::from_secs(5);
/// Alignment of the parts of a spread operation: one page.
const PART_ALIGN: usize = 4096;
