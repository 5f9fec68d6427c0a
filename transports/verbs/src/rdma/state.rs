//! State that endpoints share with the driver, per peer and per queue pair.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::messages::{Arrival, Arrivals, Messages};
use super::owner::{CallError, WorkCompletion};
use super::qp::{QueuePair, Work};
use super::request::{OpKind, Place, RequestId};
use super::status::{Cause, Health};
use p2p_core::flags::{self, Contract};
use p2p_core::region::Region;
use p2p_core::wait::signal_event;

/// State that all queue pairs of one peer share with the driver.
#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) health: Health,
    /// Threads that wait for this peer sleep on this descriptor.
    pub(super) wake_self: OwnedFd,
    /// The slot that the peer writes, if it has one.
    pub(super) sleeper: Option<Sleeper>,
    /// State of arrivals by message.
    pub(super) arrivals: Arrivals,
}

/// The word by which a thread announces that it sleeps on a slot.
#[derive(Debug)]
pub(super) struct Sleeper {
    /// This side's slot.
    pub(super) slot: Region,
    /// Its `WAITING` word.
    pub(super) waiting_offset: usize,
}

impl Sleeper {
    fn waiting_word(&self) -> &AtomicU64 {
        self.word(self.waiting_offset)
    }

    /// `offset` is a multiple of 8 within the slot.
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= self.slot.len(), "{offset}");
        // SAFETY: the offset is that of an aligned word inside the page-aligned slot, which `self` keeps mapped.
        // Flags and control words are only accessed atomically.
        unsafe { AtomicU64::from_ptr(self.slot.as_ptr().add(offset).as_ptr().cast()) }
    }
}

impl PeerState {
    /// Wakes the thread that sleeps on the slot.
    fn wake_sleeper(&self) {
        let Some(sleeper) = &self.sleeper else { return };
        // SYNC POINT `waiting`: the completion came after the peer's flag. The fence is between the completion and
        // the read of the word.
        if flags::must_wake::<Contract, _>(sleeper.waiting_word()) {
            self.signal();
        }
    }

    /// Processes an arrival. Returns the question that needs an answer, if the arrival is one.
    fn take(&self, arrival: Arrival<'_>) -> Option<u64> {
        let Sleeper { slot, .. } = self.sleeper.as_ref()?;
        let taken =
            self.arrivals.take(arrival, slot.len(), |offset, value| self.add(offset, value));
        taken.unwrap_or_else(|error| {
            self.health.fail("receive", Cause::Peer(error));
            self.signal();
            None
        })
    }

    /// Adds to a flag of the slot on the peer's behalf. The offset was checked.
    fn add(&self, offset: usize, value: u64) {
        let Some(sleeper) = &self.sleeper else { return };
        // SYNC POINT `published`, SYNC POINT `consumed`: releases the writes of the device before it completed the
        // receives, as the polling thread observed them.
        flags::add::<Contract>(sleeper.word(offset), value);
        self.wake_sleeper();
    }

    pub(super) fn signal(&self) {
        if let Err(error) = signal_event(self.wake_self.as_fd()) {
            tracing::error!(%error, "cannot wake a waiting thread");
        }
    }
}

/// State that one queue pair shares with the driver.
#[derive(Debug)]
pub(super) struct QueuePairState {
    pub(super) qp: QueuePair,
    /// Buffers of the queue pair, if flags travel as messages.
    pub(super) messages: Option<Messages>,
    /// Number of completed requests, counted from the first.
    completed: AtomicU64,
    /// True if this queue pair failed the peer, or would have failed it.
    has_failed: AtomicBool,
    pub(super) peer: Arc<PeerState>,
}

impl QueuePairState {
    pub(super) const fn new(
        qp: QueuePair,
        messages: Option<Messages>,
        peer: Arc<PeerState>,
    ) -> Self {
        let (completed, has_failed) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { qp, messages, completed, has_failed, peer }
    }

    /// Posts receive number `idx`, which must not be posted already.
    pub(super) fn post_receive(&self, place: Place, idx: u32) -> Result<(), CallError> {
        let id = RequestId::new(place, OpKind::Receive, idx.into());
        let into = self.messages.as_ref().map(|messages| messages.incoming(idx));
        // SAFETY: the buffer belongs to that receive alone and is read only while the receive is not posted. Its
        // memory is freed after the queue pair.
        unsafe { self.qp.post_receive(id.0, into) }
    }

    /// Handles a completed receive. The caller holds the lock of the table.
    pub(super) fn receive(&self, id: RequestId, completion: WorkCompletion) {
        let (place, idx) = (id.place(), id.0 as u32);
        let message = self.messages.as_ref().map(|messages| messages.take(idx));
        if let Err(error) = self.post_receive(place, idx) {
            self.fail("receive", Cause::Refused { code: error.code });
            self.peer.signal();
        }
        let (Some(message), Some(messages)) = (message, &self.messages) else {
            return self.peer.wake_sleeper();
        };
        let len = message.len().min(completion.bytes as usize);
        let arrival = match completion.is_message {
            true => Arrival::Message(&message[..len]),
            false => Arrival::Write(completion.immediate),
        };
        if self.peer.health.has_failed() {
            return;
        }
        if let Some(id) = self.peer.take(arrival) {
            messages.owe(id);
        }
        self.answer(place);
    }

    /// Sends the message that the peer waits for, if any.
    fn answer(&self, place: Place) {
        let Some(buffer) =
            self.messages.as_ref().and_then(|messages| messages.answer(&self.peer.arrivals))
        else {
            return;
        };
        let id = RequestId::new(place, OpKind::Answer, 0).0;
        let work = Work::message(id, buffer, self.qp.capacity());
        // SAFETY: the buffer is the one for answers, and at most one answer is under way. Its memory is freed after
        // the queue pair.
        if let Err(error) = unsafe { self.qp.post(&work) } {
            self.fail("answer", Cause::Refused { code: error.code });
            self.peer.signal();
        }
    }

    pub(super) fn answered(&self, place: Place) {
        if let Some(messages) = &self.messages {
            messages.sent();
        }
        self.answer(place);
    }

    /// Fails the peer because of a failure on this queue pair.
    pub(super) fn fail(&self, op: &'static str, cause: Cause) {
        self.has_failed.store(true, Ordering::Release);
        self.peer.health.fail(op, cause);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn completed(&self) -> u64 {
        // SYNC POINT `completed`: acquires the device's writes for a get, as the polling thread observed them.
        self.completed.load(Ordering::Acquire)
    }

    /// Records a completion. The caller holds the lock of the table.
    pub(super) fn complete(&self, sequence: u32) {
        let before = self.completed.load(Ordering::Relaxed);
        let advance = sequence.wrapping_sub(before as u32);
        // Completions of one queue pair come in order. Any other sequence is stale.
        if advance < 1 << 31 {
            // SYNC POINT `completed`: releases to the thread that waits.
            self.completed.store(before + u64::from(advance), Ordering::Release);
        }
    }
}
