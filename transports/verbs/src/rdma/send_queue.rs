//! The posting side of one queue pair of a peer: requests under way, and the choice of requests to signal.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chain::Chain;
use super::progress::{Progress, Room};
use super::qp::{FENCE, INLINE, QueuePair, Refusal, SIGNALLED, Verb, Work};
use super::registration::MemoryRegion;
use super::request::{OpKind, Place, RequestId};
use super::state::QueuePairState;
use super::status::Cause;
use p2p_core::counted::message::Header;
use p2p_core::region::Region;
use p2p_core::wait::Driver;

/// A joined queue pair and its memory. Fields are dropped in this order: the queue pair, its room in the completion
/// queue, the keys, the memory.
#[derive(Debug)]
pub(super) struct SendQueue {
    state: Arc<QueuePairState>,
    place: Place,
    progress: Arc<Progress>,
    _room: Room,
    slot_key: MemoryRegion,
    scratch_key: MemoryRegion,
    sources: Vec<MemoryRegion>,
    scratch: Region,
    remote_key: u32,
    max_message_bytes: u32,
    /// Longest wait without a completion.
    limit: Duration,
    /// Number of requests posted, including those buffered in the chain.
    posted: u64,
    /// Requests buffered by a batch.
    chain: Chain,
    /// Number of the last signalled request.
    signalled: u64,
    /// True if the next request must wait for earlier reads.
    must_fence: bool,
    /// True if reads may be under way that no later request is ordered after. Also the number of the last such
    /// read.
    has_reads: bool,
    last_read: u64,
    /// See [`Context::keeps_fences`](super::owner::Context::keeps_fences).
    keeps_fences: bool,
}

/// The parts of a send queue.
pub(super) struct SendQueueParts {
    pub(super) state: Arc<QueuePairState>,
    pub(super) place: Place,
    pub(super) progress: Arc<Progress>,
    pub(super) room: Room,
    pub(super) slot_key: MemoryRegion,
    pub(super) scratch_key: MemoryRegion,
    pub(super) scratch: Region,
    pub(super) remote_key: u32,
    pub(super) max_message_bytes: u32,
    pub(super) limit: Duration,
    pub(super) keeps_fences: bool,
}

/// One message of a put or get.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    /// Index of the registration that holds the source or target.
    pub(super) source: usize,
    pub(super) local_address: u64,
    pub(super) bytes: u32,
    pub(super) remote_address: u64,
    /// True for the last message of the operation.
    pub(super) is_last: bool,
    /// Sent to the peer when the message has landed. `None` if the message is not counted.
    pub(super) counted: Option<u32>,
}

/// A request was not posted. The peer's health holds the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PostFailure;

impl SendQueue {
    pub(super) fn new(parts: SendQueueParts) -> Self {
        Self {
            state: parts.state,
            place: parts.place,
            progress: parts.progress,
            _room: parts.room,
            slot_key: parts.slot_key,
            scratch_key: parts.scratch_key,
            sources: Vec::new(),
            scratch: parts.scratch,
            remote_key: parts.remote_key,
            max_message_bytes: parts.max_message_bytes,
            limit: parts.limit,
            posted: 0,
            chain: Chain::default(),
            signalled: 0,
            must_fence: false,
            has_reads: false,
            last_read: 0,
            keeps_fences: parts.keeps_fences,
        }
    }

    /// Opens a batch: requests may be buffered until [`end_batch`](Self::end_batch). A wait posts them first.
    pub(super) fn begin_batch(&mut self) {
        self.chain.open();
    }

    /// Posts all buffered requests. From here on each request is posted at once.
    pub(super) fn end_batch(&mut self) -> Result<(), PostFailure> {
        let flushed = self.flush();
        self.chain.close();
        flushed
    }

    /// Posts all buffered requests.
    pub(super) fn flush(&mut self) -> Result<(), PostFailure> {
        let Self { chain, state, .. } = self;
        // SAFETY: the caller that created a request guarantees its conditions until it is complete.
        let posted = chain.flush(|works| unsafe { post_all(&state.qp, works) });
        posted.map_err(|refused| self.refused(refused))
    }

    pub(super) fn add_source(&mut self, source: MemoryRegion) {
        self.sources.push(source);
    }

    pub(super) const fn domain(&self) -> &Arc<super::owner::ProtectionDomain> {
        self.slot_key.domain()
    }

    pub(super) const fn max_message_bytes(&self) -> usize {
        self.max_message_bytes as usize
    }

    /// Longest wait without a completion.
    pub(super) const fn limit(&self) -> Duration {
        self.limit
    }

    /// Number of requests posted so far.
    pub(super) const fn num_posted(&self) -> u64 {
        self.posted
    }

    /// Number of requests not known to be complete.
    pub(super) fn num_outstanding(&self) -> u64 {
        self.posted - self.state.completed()
    }

    /// Puts or gets one message.
    ///
    /// # Safety
    /// As for [`QueuePair::post`], also while the chain buffers the request.
    pub(super) unsafe fn transfer(
        &mut self,
        kind: OpKind,
        message: Message,
    ) -> Result<(), PostFailure> {
        let Message { source, local_address, bytes, remote_address, is_last, counted } = message;
        let mut flags = 0;
        if kind == OpKind::Get {
            // The caller waits for the bytes that it reads.
            if is_last {
                flags |= SIGNALLED;
            }
        } else if bytes <= self.state.qp.capacity().inline_bytes {
            flags |= INLINE;
        }
        let work = Work {
            id: 0,
            verb: match counted {
                _ if kind == OpKind::Get => Verb::Read,
                Some(data) => Verb::WriteWithImmediate(data),
                None => Verb::Write,
            },
            flags,
            local_address,
            local_key: self.sources[source].local_key(),
            bytes,
            remote_address,
            remote_key: self.remote_key,
        };
        // SAFETY: the caller's promise.
        unsafe { self.post(kind, work)? };
        if kind == OpKind::Get {
            (self.has_reads, self.last_read) = (true, self.posted);
        }
        Ok(())
    }

    /// Adds to a word of the peer, after all earlier requests of this send queue.
    pub(super) fn add(&mut self, remote_address: u64, value: u64) -> Result<(), PostFailure> {
        // The device itself keeps writes and atomics of one queue pair in order. Answers to reads may come late,
        // and the flag must not overtake them.
        self.fence();
        let work = Work {
            id: 0,
            verb: Verb::FetchAdd(value),
            flags: SIGNALLED,
            local_address: self.scratch.as_ptr().as_ptr() as u64,
            local_key: self.scratch_key.local_key(),
            bytes: 8,
            remote_address,
            remote_key: self.remote_key,
        };
        // SAFETY: the old value lands in the scratch page. No code reads it, and it stays registered as long as the
        // queue pair lives.
        unsafe { self.post(OpKind::AddFlag, work) }
    }

    /// Sends a message to the peer's driver, after all earlier requests of this send queue.
    pub(super) fn send(&mut self, kind: OpKind, header: &Header) -> Result<(), PostFailure> {
        // The order matters as for an addition by the device.
        self.fence();
        self.make_room(kind)?;
        let Some(messages) = &self.state.messages else { return Err(PostFailure) };
        let buffer = messages.outgoing(self.posted + 1, header);
        let work = Work::message(0, buffer, self.state.qp.capacity());
        // SAFETY: at most as many requests are under way as there are buffers. This buffer is therefore not written
        // before the request is complete. Its memory is freed after the queue pair.
        unsafe { self.post(kind, work) }
    }

    /// Posts a message without bytes. With `kind` Wake it consumes a receive of the peer, otherwise it only
    /// completes.
    pub(super) fn touch(&mut self, kind: OpKind, remote_address: u64) -> Result<(), PostFailure> {
        let (verb, flags) = match kind {
            OpKind::Wake => (Verb::WriteWithImmediate(0), 0),
            _ => (Verb::Write, SIGNALLED),
        };
        let work = Work {
            id: 0,
            verb,
            flags,
            local_address: 0,
            local_key: 0,
            bytes: 0,
            remote_address,
            remote_key: self.remote_key,
        };
        // SAFETY: the request names no memory.
        unsafe { self.post(kind, work) }
    }

    /// Orders later requests after all earlier ones.
    pub(super) const fn fence(&mut self) {
        self.must_fence |= self.has_reads;
        self.has_reads = false;
    }

    /// Ensures that the last request reports its completion.
    pub(super) fn seal(&mut self, remote_address: u64) -> Result<(), PostFailure> {
        if self.signalled == self.posted {
            return Ok(());
        }
        self.touch(OpKind::Quiet, remote_address)
    }

    /// Waits until at most `most` requests are under way. Returns `false` at `deadline`, if there is one. The peer
    /// fails when nothing completes for longer than the limit, because not every device notices the loss of another
    /// one.
    pub(super) fn wait(
        &mut self,
        kind: OpKind,
        most: u64,
        deadline: Option<Instant>,
    ) -> Result<bool, PostFailure> {
        self.flush()?;
        let mut num_looks = 0u32;
        let mut begun = None;
        let mut seen = (self.state.completed(), None);
        while self.num_outstanding() > most {
            self.progress.drive();
            if self.num_outstanding() <= most {
                break;
            }
            if self.state.peer.health.has_failed() {
                return Err(PostFailure);
            }
            num_looks = num_looks.wrapping_add(1);
            // Most waits end before this, and reading the clock costs as much as one check.
            if !num_looks.is_multiple_of(16) {
                continue;
            }
            let now = Instant::now();
            let completed = self.state.completed();
            let since = if seen.0 == completed { seen.1.unwrap_or(now) } else { now };
            seen = (completed, Some(since));
            if now - since >= self.limit {
                let limit_ms = self.limit.as_millis() as u64;
                return Err(self.fail(kind, Cause::Late { limit_ms }));
            }
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(false);
            }
            let waited = now - *begun.get_or_insert(now);
            if waited >= YIELD {
                std::thread::sleep(PAUSE);
            } else if waited >= SPIN {
                std::thread::yield_now();
            }
        }
        Ok(true)
    }

    /// # Safety
    /// As for [`QueuePair::post`], also while the chain buffers the request.
    unsafe fn post(&mut self, kind: OpKind, mut work: Work) -> Result<(), PostFailure> {
        self.make_room(kind)?;
        let depth = u64::from(self.state.qp.capacity().sends);
        let sequence = self.posted + 1;
        // Signals often enough that room comes free while the device still works on the rest of the queue.
        if sequence - self.signalled >= depth / 4 {
            work.flags |= SIGNALLED;
        }
        if self.must_fence {
            if self.keeps_fences {
                work.flags |= FENCE;
            } else {
                // The last message of a get is signalled, so this wait ends.
                self.wait(kind, self.posted - self.last_read, None)?;
            }
            self.must_fence = false;
        }
        work.id = RequestId::new(self.place, kind, sequence).0;
        let Self { chain, state, .. } = self;
        // SAFETY: the caller's promise, and the promises of the callers whose requests are buffered.
        match chain.add(work, |works| unsafe { post_all(&state.qp, works) }) {
            Ok(()) => {
                self.posted = sequence;
                if work.flags & SIGNALLED != 0 {
                    self.signalled = sequence;
                }
                Ok(())
            }
            Err(refused) => Err(self.refused(refused)),
        }
    }

    /// Waits until the queue accepts another request.
    fn make_room(&mut self, kind: OpKind) -> Result<(), PostFailure> {
        let depth = u64::from(self.state.qp.capacity().sends);
        if self.num_outstanding() >= depth {
            // Waits down to half the depth, so that the queue does not fill up again at once.
            self.wait(kind, depth / 2, None)?;
        }
        Ok(())
    }

    #[cold]
    fn refused(&self, (kind, code): (OpKind, i32)) -> PostFailure {
        self.fail(kind, Cause::Refused { code })
    }

    fn fail(&self, kind: OpKind, cause: Cause) -> PostFailure {
        self.state.peer.health.fail(kind.name(), cause);
        PostFailure
    }
}

/// Posts requests of a send queue to the device. If the device refuses one, the error names that request and the code.
///
/// # Safety
/// As for [`QueuePair::post_chain`].
unsafe fn post_all(queue_pair: &QueuePair, works: &[Work]) -> Result<(), (OpKind, i32)> {
    // SAFETY: the caller's promise.
    unsafe { queue_pair.post_chain(works) }
        .map_err(|Refusal { error, nth }| (RequestId(works[nth].id).kind(), error.code))
}

impl Drop for SendQueue {
    fn drop(&mut self) {
        // The driver removes its entry first. Then the queue pair stops, so that requests of neither side touch
        // memory any more. The fields follow in order.
        self.progress.leave(self.place);
        if let Err(error) = self.state.qp.stop() {
            tracing::error!(%error, "a queue pair cannot be stopped");
        }
    }
}

/// Duration of the busy-polling phase of a wait. A device answers within microseconds.
const SPIN: Duration = Duration::from_micros(50);
/// Duration of the phase that yields between checks. The largest puts take this long.
const YIELD: Duration = Duration::from_micros(500);
/// Sleep between checks after that.
const PAUSE: Duration = Duration::from_micros(100);
