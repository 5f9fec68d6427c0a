//! One queue pair of a peer from the posting side: what is under way, and what has to be signalled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chain::Chain;
use super::progress::{Progress, Room};
use super::qp::{FENCE, INLINE, QueuePair, Refusal, SIGNALLED, Verb, Work};
use super::registration::MemoryRegion;
use super::request::{OpKind, Place, RequestId};
use super::state::LaneState;
use super::status::Cause;
use p2p_core::counted::message::Header;
use p2p_core::region::Region;
use p2p_core::wait::Driver;

/// A joined queue pair and its memory. Fields are dropped in this order: queue pair, its room among the
/// completions, the keys, the memory.
#[derive(Debug)]
pub(super) struct Lane {
    state: Arc<LaneState>,
    place: Place,
    progress: Arc<Progress>,
    _room: Room,
    slot_key: MemoryRegion,
    scratch_key: MemoryRegion,
    sources: Vec<MemoryRegion>,
    scratch: Region,
    remote_key: u32,
    max_message_bytes: u32,
    /// Longest time without a completion.
    limit: Duration,
    /// Requests posted, those that the chain keeps back among them.
    posted: u64,
    /// What a batch keeps back.
    chain: Chain,
    /// The last signalled one of them.
    signalled: u64,
    /// Whether the next request has to wait for the reads before it.
    must_fence: bool,
    /// Whether reads may be under way that nothing is ordered after yet, and the last of them.
    has_reads: bool,
    last_read: u64,
    /// See [`Context::keeps_fences`](super::owner::Context::keeps_fences).
    keeps_fences: bool,
}

/// What a lane is made of.
pub(super) struct LaneParts {
    pub(super) state: Arc<LaneState>,
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
    /// Whether it ends the operation.
    pub(super) is_last: bool,
    /// Whether the peer is told when it has landed, and what.
    pub(super) counted: Option<u32>,
}

/// Why a request was not posted. The peer's health says the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Failed;

impl Lane {
    pub(super) fn new(parts: LaneParts) -> Self {
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

    /// From here on requests may be kept back, until [`end_batch`](Self::end_batch). Waits keep none back.
    pub(super) fn begin_batch(&mut self) {
        self.chain.open();
    }

    /// Posts what was kept back, and from here on each request at once.
    pub(super) fn end_batch(&mut self) -> Result<(), Failed> {
        let flushed = self.flush();
        self.chain.close();
        flushed
    }

    /// Posts what was kept back.
    pub(super) fn flush(&mut self) -> Result<(), Failed> {
        let Self { chain, state, .. } = self;
        // SAFETY: whoever made a request promised what it takes, until it is complete.
        let posted = chain.flush(|works| unsafe { post_all(&state.queue_pair, works) });
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

    /// Longest time without a completion.
    pub(super) const fn limit(&self) -> Duration {
        self.limit
    }

    /// Requests posted so far.
    pub(super) const fn num_posted(&self) -> u64 {
        self.posted
    }

    /// Requests that are not known to be complete.
    pub(super) fn num_outstanding(&self) -> u64 {
        self.posted - self.state.completed()
    }

    /// Puts or gets one message.
    ///
    /// # Safety
    /// As for [`QueuePair::post`], also while the chain keeps it back.
    pub(super) unsafe fn transfer(&mut self, kind: OpKind, message: Message) -> Result<(), Failed> {
        let Message { source, local_address, bytes, remote_address, is_last, counted } = message;
        let mut flags = 0;
        if kind == OpKind::Get {
            // Whoever reads waits for it.
            if is_last {
                flags |= SIGNALLED;
            }
        } else if bytes <= self.state.queue_pair.capacity().inline_bytes {
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

    /// Adds to a word of the peer, after everything before on this lane.
    pub(super) fn add(&mut self, remote_address: u64, value: u64) -> Result<(), Failed> {
        // The device keeps writes and atomics of one queue pair in order by itself. Reads may be
        // answered late: the flag must not overtake those.
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
        // SAFETY: the old value lands in the scratch page, which nobody looks at and which stays
        // registered as long as the queue pair lives.
        unsafe { self.post(OpKind::AddFlag, work) }
    }

    /// Sends a message to the peer's driver, after everything before on this lane.
    pub(super) fn send(&mut self, kind: OpKind, header: &Header) -> Result<(), Failed> {
        // As for an addition by the device.
        self.fence();
        self.make_room(kind)?;
        let Some(messages) = &self.state.messages else { return Err(Failed) };
        let buffer = messages.outgoing(self.posted + 1, header);
        let work = Work::message(0, buffer, self.state.queue_pair.capacity());
        // SAFETY: at most as many requests are under way as there are buffers, so nobody writes this one
        // before the request is complete; its memory goes after the queue pair.
        unsafe { self.post(kind, work) }
    }

    /// A message without bytes: with `kind` Wake it takes a receive of the peer, else it only completes.
    pub(super) fn touch(&mut self, kind: OpKind, remote_address: u64) -> Result<(), Failed> {
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
        // SAFETY: no memory is named.
        unsafe { self.post(kind, work) }
    }

    /// What comes after is carried out after what came before.
    pub(super) const fn fence(&mut self) {
        self.must_fence |= self.has_reads;
        self.has_reads = false;
    }

    /// Makes sure that the last request tells of its completion.
    pub(super) fn seal(&mut self, remote_address: u64) -> Result<(), Failed> {
        if self.signalled == self.posted {
            return Ok(());
        }
        self.touch(OpKind::Quiet, remote_address)
    }

    /// Waits until at most `most` requests are under way. `false` at `deadline`, if there is one. The peer
    /// fails when nothing at all completes for longer than allowed: not every device notices by itself
    /// that another one is gone.
    pub(super) fn wait(
        &mut self,
        kind: OpKind,
        most: u64,
        deadline: Option<Instant>,
    ) -> Result<bool, Failed> {
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
                return Err(Failed);
            }
            num_looks = num_looks.wrapping_add(1);
            // Most waits end before this, and a clock costs as much as a look.
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
    /// As for [`QueuePair::post`], also while the chain keeps it back.
    unsafe fn post(&mut self, kind: OpKind, mut work: Work) -> Result<(), Failed> {
        self.make_room(kind)?;
        let depth = u64::from(self.state.queue_pair.capacity().sends);
        let sequence = self.posted + 1;
        // Often enough that room comes free while the rest of the queue is still at work.
        if sequence - self.signalled >= depth / 4 {
            work.flags |= SIGNALLED;
        }
        if self.must_fence {
            if self.keeps_fences {
                work.flags |= FENCE;
            } else {
                // The last message of a get is signalled, so this ends.
                self.wait(kind, self.posted - self.last_read, None)?;
            }
            self.must_fence = false;
        }
        work.id = RequestId::new(self.place, kind, sequence).0;
        let Self { chain, state, .. } = self;
        // SAFETY: the caller's promise, and that of those who made what is kept back.
        match chain.add(work, |works| unsafe { post_all(&state.queue_pair, works) }) {
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

    /// Waits until the queue takes another request.
    fn make_room(&mut self, kind: OpKind) -> Result<(), Failed> {
        let depth = u64::from(self.state.queue_pair.capacity().sends);
        if self.num_outstanding() >= depth {
            // Down to half, so that a full queue is not met again at once.
            self.wait(kind, depth / 2, None)?;
        }
        Ok(())
    }

    #[cold]
    fn refused(&self, (kind, code): (OpKind, i32)) -> Failed {
        self.fail(kind, Cause::Refused { code })
    }

    fn fail(&self, kind: OpKind, cause: Cause) -> Failed {
        self.state.peer.health.fail(kind.name(), cause);
        Failed
    }
}

/// Gives requests of a lane to the device. When it refuses one: what that was, and why.
///
/// # Safety
/// As for [`QueuePair::post_chain`].
unsafe fn post_all(queue_pair: &QueuePair, works: &[Work]) -> Result<(), (OpKind, i32)> {
    // SAFETY: the caller's promise.
    unsafe { queue_pair.post_chain(works) }
        .map_err(|Refusal { error, nth }| (RequestId(works[nth].id).kind(), error.code))
}

impl Drop for Lane {
    fn drop(&mut self) {
        // The driver lets go first; then the queue pair stops, so that neither side's requests touch
        // memory any more; the fields follow in order.
        self.progress.leave(self.place);
        if let Err(error) = self.state.queue_pair.stop() {
            tracing::error!(%error, "a queue pair cannot be stopped");
        }
    }
}

/// How long a wait only looks: a device answers within microseconds.
const SPIN: Duration = Duration::from_micros(50);
/// How long it lets others run between looks: the largest puts take this long.
const YIELD: Duration = Duration::from_micros(500);
/// How long it sleeps between looks then.
const PAUSE: Duration = Duration::from_micros(100);
