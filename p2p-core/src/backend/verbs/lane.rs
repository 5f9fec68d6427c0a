//! One queue pair of a peer from the posting side: what is under way, and what has to be signalled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::owner::MemoryRegion;
use super::progress::{LaneState, OpKind, Place, Progress, RequestId, Room};
use super::qp::{FENCE, INLINE, SIGNALLED, Verb, Work};
use super::status::Cause;
use crate::region::Region;
use crate::wait::Driver;

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
    /// Requests posted.
    posted: u64,
    /// The last signalled one of them.
    signalled: u64,
    /// Whether the next request has to wait for the reads before it.
    must_fence: bool,
    /// Whether reads may be under way.
    has_reads: bool,
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
            posted: 0,
            signalled: 0,
            must_fence: false,
            has_reads: false,
        }
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

    /// Requests that are not known to be complete.
    pub(super) fn num_outstanding(&self) -> u64 {
        self.posted - self.state.completed()
    }

    /// Puts or gets `bytes` at once. The source or target is the registration with index `source`.
    ///
    /// # Safety
    /// As for [`QueuePair::post`](super::qp::QueuePair::post).
    pub(super) unsafe fn transfer(
        &mut self,
        kind: OpKind,
        source: usize,
        local_address: u64,
        bytes: u32,
        remote_address: u64,
        is_last: bool,
        limit: Duration,
    ) -> Result<(), Failed> {
        let (verb, mut flags) = match kind {
            OpKind::Get => (Verb::Read, 0),
            _ => (Verb::Write, 0),
        };
        if kind == OpKind::Get {
            self.has_reads = true;
            // Whoever reads waits for it.
            if is_last {
                flags |= SIGNALLED;
            }
        } else if bytes <= self.state.queue_pair.capacity().inline_bytes {
            flags |= INLINE;
        }
        let work = Work {
            id: 0,
            verb,
            flags,
            local_address,
            local_key: self.sources[source].local_key(),
            bytes,
            remote_address,
            remote_key: self.remote_key,
        };
        // SAFETY: the caller's promise.
        unsafe { self.post(kind, work, limit) }
    }

    /// Adds to a word of the peer, after everything before on this lane.
    pub(super) fn add(
        &mut self,
        remote_address: u64,
        value: u64,
        limit: Duration,
    ) -> Result<(), Failed> {
        // The device keeps writes and atomics of one queue pair in order by itself. Reads may be
        // answered late: the flag must not overtake those.
        let fence = if self.has_reads { FENCE } else { 0 };
        self.has_reads = false;
        let work = Work {
            id: 0,
            verb: Verb::FetchAdd(value),
            flags: SIGNALLED | fence,
            local_address: self.scratch.as_ptr().as_ptr() as u64,
            local_key: self.scratch_key.local_key(),
            bytes: 8,
            remote_address,
            remote_key: self.remote_key,
        };
        // SAFETY: the old value lands in the scratch page, which nobody looks at and which stays
        // registered as long as the queue pair lives.
        unsafe { self.post(OpKind::AddFlag, work, limit) }
    }

    /// A message without bytes: with `kind` Wake it takes a receive of the peer, else it only completes.
    pub(super) fn touch(
        &mut self,
        kind: OpKind,
        remote_address: u64,
        limit: Duration,
    ) -> Result<(), Failed> {
        let (verb, flags) = match kind {
            OpKind::Wake => (Verb::WriteWithImmediate, 0),
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
        unsafe { self.post(kind, work, limit) }
    }

    /// What comes after is carried out after what came before.
    pub(super) const fn fence(&mut self) {
        self.must_fence |= self.has_reads;
        self.has_reads = false;
    }

    /// Makes sure that the last request tells of its completion.
    pub(super) fn seal(&mut self, remote_address: u64, limit: Duration) -> Result<(), Failed> {
        if self.signalled == self.posted {
            return Ok(());
        }
        self.touch(OpKind::Quiet, remote_address, limit)
    }

    /// Waits until at most `most` requests are under way. `false` at the deadline.
    pub(super) fn wait(&self, most: u64, deadline: Instant) -> Result<bool, Failed> {
        let mut num_looks = 0u32;
        while self.num_outstanding() > most {
            self.progress.drive();
            if self.num_outstanding() <= most {
                break;
            }
            if self.state.peer.health.has_failed() {
                return Err(Failed);
            }
            num_looks += 1;
            match num_looks {
                // The device answers within microseconds; a software one needs this processor.
                0..SPINS => std::hint::spin_loop(),
                SPINS..YIELDS => std::thread::yield_now(),
                _ => std::thread::sleep(PAUSE),
            }
            if num_looks % 16 == 0 && Instant::now() >= deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// # Safety
    /// As for [`QueuePair::post`](super::qp::QueuePair::post).
    unsafe fn post(&mut self, kind: OpKind, mut work: Work, limit: Duration) -> Result<(), Failed> {
        let depth = u64::from(self.state.queue_pair.capacity().sends);
        if self.num_outstanding() >= depth {
            let deadline = Instant::now() + limit;
            // Down to half, so that a full queue is not met again at once.
            if !self.wait(depth / 2, deadline)? {
                let limit_ms = limit.as_millis() as u64;
                return Err(self.fail(kind, Cause::Late { limit_ms }));
            }
        }
        let sequence = self.posted + 1;
        // Often enough that room comes free while the rest of the queue is still at work.
        if sequence - self.signalled >= depth / 4 {
            work.flags |= SIGNALLED;
        }
        if self.must_fence {
            work.flags |= FENCE;
            self.must_fence = false;
        }
        work.id = RequestId::new(self.place, kind, sequence).0;
        // SAFETY: the caller's promise.
        match unsafe { self.state.queue_pair.post(&work) } {
            Ok(()) => {
                self.posted = sequence;
                if work.flags & SIGNALLED != 0 {
                    self.signalled = sequence;
                }
                Ok(())
            }
            Err(error) => Err(self.fail(kind, Cause::Refused { code: error.code })),
        }
    }

    fn fail(&self, kind: OpKind, cause: Cause) -> Failed {
        self.state.peer.health.fail(kind.name(), cause);
        Failed
    }
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

const SPINS: u32 = 1 << 10;
const YIELDS: u32 = 1 << 14;
const PAUSE: Duration = Duration::from_micros(50);
