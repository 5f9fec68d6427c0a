//! Flags without atomics: the receiving side's driver executes messages in order.
//!
//! Messages and their ordering are shared with libfabric (`backend::counted`). A queue pair executes a message
//! after the writes that it posted before, so those need no count. Parts of a spread put on other queue pairs end
//! with a WRITE_WITH_IMM. Its immediate value is the number of the first message after the part. The receiving side
//! counts these parts. A message waits there until the number of earlier parts that it states has landed.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use super::config::{SIGNALS_VARIABLE, SignalChoice};
use super::detail::Signals;
use super::owner::{CallError, ProtectionDomain};
use super::qp::{Buffer, Capacity};
use super::registration::{MemoryRegion, Rights};
use p2p_core::counted::inbound::{Inbound, OrderError};
use p2p_core::counted::message::{Action, Credit, HEADER_BYTES, Header, MessageError};
use p2p_core::region::Region;

/// Selects the mechanism for flags: as `choice` requires, else as the environment requires, else as the devices
/// can.
///
/// # Errors
/// A text for people that says why the request is invalid.
pub(super) fn choose(
    choice: SignalChoice,
    environment: Option<&str>,
    without_atomics: Option<&str>,
) -> Result<Signals, String> {
    let choice = match (choice, environment) {
        (SignalChoice::Auto, Some("atomics")) => SignalChoice::Atomics,
        (SignalChoice::Auto, Some("messages")) => SignalChoice::Messages,
        (SignalChoice::Auto, Some(other)) if !matches!(other, "" | "auto") => {
            return Err(format!(
                "{SIGNALS_VARIABLE} is `{other}`, expected `auto`, `atomics` or `messages`"
            ));
        }
        (choice, _) => choice,
    };
    match (choice, without_atomics) {
        (SignalChoice::Atomics, Some(port)) => Err(format!(
            "{port} does no 64-bit atomics, which `signals` asks for; leave it at `auto`, or ask for `messages`, on both sides"
        )),
        (SignalChoice::Messages, _) | (SignalChoice::Auto, Some(_)) => Ok(Signals::Messages),
        (SignalChoice::Atomics | SignalChoice::Auto, None) => Ok(Signals::Atomics),
    }
}

/// A message that consists of its header only. The header's fields for mail over libfabric count receives here.
/// `taken` is the number of the sender's own receives that it has seen taken, modulo 2³².
pub(super) fn header(seq: u32, writes: u64, action: Action, taken: u32) -> Header {
    // A queue pair has one peer and one slot, so the header names neither.
    let (slot, token, credit, num_parts) = (0, 0, Credit::default(), 0);
    Header { slot, seq, token, writes, action, credit, num_parts, mails: taken }
}

/// Maximum number of messages and counted writes under way, before the peer reports that it has taken some.
/// `num_receives` is the peer's number of receives at each queue pair. The window is small enough that the peer
/// never runs out. Each message or write makes its driver send at most one answer. Reports of taken receives come once
/// per half window.
pub(super) const fn window_of(num_receives: u32) -> u32 {
    num_receives.saturating_sub(RECEIVES_BESIDE_WINDOW) / 2
}

/// Receives for an answer and a report that were under way when the window was reported free.
pub(super) const RECEIVES_BESIDE_WINDOW: u32 = 4;

/// The resources that one queue pair needs for messages.
#[derive(Debug)]
pub(super) struct Messages {
    // Keeps the memory mapped, and is dropped first.
    key: MemoryRegion,
    /// Buffers for incoming messages, buffers for outgoing messages, and one for answers.
    memory: Region,
    num_receives: u32,
    num_sends: u32,
    /// The latest question, and the latest question that has an answer posted.
    owed: AtomicU64,
    sent: AtomicU64,
    is_answering: AtomicBool,
}

impl Messages {
    /// Bytes of memory that a queue pair of this capacity needs.
    pub(super) const fn memory_bytes(capacity: Capacity) -> usize {
        (capacity.receives + capacity.sends + 1) as usize * BUFFER_BYTES
    }

    /// Uses `memory`, which must not be shared.
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        memory: Region,
        capacity: Capacity,
    ) -> Result<Self, CallError> {
        debug_assert!(memory.len() >= Self::memory_bytes(capacity));
        let key = MemoryRegion::of_region(domain, &memory, Rights::Local)?;
        Ok(Self {
            key,
            memory,
            num_receives: capacity.receives,
            num_sends: capacity.sends,
            owed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            is_answering: AtomicBool::new(false),
        })
    }

    /// Buffer of receive number `idx`.
    pub(super) fn incoming(&self, idx: u32) -> Buffer {
        self.buffer(idx % self.num_receives.max(1))
    }

    /// Copies the message of receive number `idx`, before the receive is posted again.
    pub(super) fn take(&self, idx: u32) -> [u8; HEADER_BYTES] {
        let from = self.place(idx % self.num_receives.max(1));
        let mut message = [0; HEADER_BYTES];
        // SAFETY: the buffer lies within the memory. The device writes it only between the receive's posting and
        // its completion. No peer holds a key.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut message).cast(), HEADER_BYTES) };
        message
    }

    /// Writes a message into the buffer of request number `sequence`. The buffer's earlier message is complete,
    /// because no more requests are under way than there are buffers.
    pub(super) fn outgoing(&self, sequence: u64, header: &Header) -> Buffer {
        let nth = sequence % u64::from(self.num_sends.max(1));
        self.fill(self.num_receives + nth as u32, header)
    }

    /// Records a question that needs an answer.
    pub(super) fn owe(&self, id: u64) {
        self.owed.fetch_max(id, Ordering::Relaxed);
    }

    /// The message that the driver must send next, if any. It is an answer, which covers all earlier questions, or
    /// a report of taken receives. At most one is under way. The caller holds the lock of the driver's table, as
    /// for [`sent`](Self::sent).
    pub(super) fn answer(&self, arrivals: &Arrivals) -> Option<Buffer> {
        if self.is_answering.load(Ordering::Relaxed) {
            return None;
        }
        let id = self.owed.load(Ordering::Relaxed);
        let action = if id > self.sent.load(Ordering::Relaxed) {
            self.sent.store(id, Ordering::Relaxed);
            Action::Answered { id }
        } else if arrivals.has_news() {
            Action::Credit
        } else {
            return None;
        };
        self.is_answering.store(true, Ordering::Relaxed);
        let answer = header(0, 0, action, arrivals.tell());
        Some(self.fill(self.num_receives + self.num_sends, &answer))
    }

    /// Records that the answer under way is complete.
    pub(super) fn sent(&self) {
        self.is_answering.store(false, Ordering::Relaxed);
    }

    fn fill(&self, idx: u32, header: &Header) -> Buffer {
        let mut message = [0; HEADER_BYTES];
        header.encode(&mut message);
        // SAFETY: the buffer lies within the memory. The caller has exclusive use of it, and no request uses it.
        unsafe {
            self.place(idx).copy_from_nonoverlapping(NonNull::from(&message).cast(), HEADER_BYTES);
        }
        self.buffer(idx)
    }

    fn buffer(&self, idx: u32) -> Buffer {
        let address = self.place(idx).as_ptr() as u64;
        Buffer { address, key: self.key.local_key(), bytes: HEADER_BYTES as u32 }
    }

    fn place(&self, idx: u32) -> NonNull<u8> {
        debug_assert!(idx <= self.num_receives + self.num_sends, "{idx}");
        // SAFETY: callers pass indices of buffers, and all buffers lie in the memory.
        unsafe { self.memory.as_ptr().add(idx as usize * BUFFER_BYTES) }
    }
}

/// Everything received from one peer, over all its queue pairs.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// The lock is never contended: callers hold the lock of the driver's table.
    inbound: Mutex<Inbound>,
    /// Latest question of this side that the peer has answered.
    answered: AtomicU64,
    /// Completed messages and writes of the peer's endpoint that consumed a receive of this side, modulo 2³². The
    /// second counter is the part already reported to the peer. Messages that the peer's driver sends by itself are
    /// not counted.
    taken: AtomicU32,
    told: AtomicU32,
    /// Number of receives that may be taken before a report to the peer is due.
    tell_after: u32,
    /// Number of the peer's receives that were taken, as the peer reported.
    peer_taken: AtomicU32,
}

/// The cause of a completed receive.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arrival<'a> {
    /// A message.
    Message(&'a [u8]),
    /// A counted write, with the number of the first message after it.
    Write(u32),
}

/// A peer sent an invalid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(super) enum ReceiveError {
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error(transparent)]
    Order(#[from] OrderError),
    #[error("a message with {what}, which verbs do not use")]
    Unexpected { what: &'static str },
    #[error(
        "that it took more messages than went to it: {under_way} under way, at most {window} can be"
    )]
    Taken { under_way: u32, window: u32 },
    #[error("an answer to question {found}, {asked} were asked")]
    Answer { found: u64, asked: u64 },
}

impl Arrivals {
    /// State of a side with this number of receives for messages at each queue pair.
    pub(super) fn new(num_receives: u32) -> Self {
        let window = window_of(num_receives);
        Self {
            inbound: Mutex::new(Inbound::with_window(window)),
            answered: AtomicU64::new(0),
            taken: AtomicU32::new(0),
            told: AtomicU32::new(0),
            // A peer that keeps half of the window free always receives a report about the other half.
            tell_after: (window / 4).max(1),
            peer_taken: AtomicU32::new(0),
        }
    }

    /// True if the peer may soon wait for a report of taken receives.
    fn has_news(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        taken.wrapping_sub(self.told.load(Ordering::Relaxed)) >= self.tell_after
    }

    /// The count of taken receives to report to the peer. Repeated or late reports do no harm.
    pub(super) fn tell(&self) -> u32 {
        // Ordered after the driver has posted the receives again.
        let taken = self.taken.load(Ordering::Acquire);
        self.told.store(taken, Ordering::Relaxed);
        taken
    }

    /// Number of the peer's receives that were taken, as the peer reported; modulo 2³².
    pub(super) fn peer_taken(&self) -> u32 {
        self.peer_taken.load(Ordering::Relaxed)
    }

    fn note_peer_taken(&self, taken: u32) {
        // Only the driver stores this value. Queue pairs progress independently, so a report may be older than the
        // known one.
        if taken.wrapping_sub(self.peer_taken()).cast_signed() > 0 {
            self.peer_taken.store(taken, Ordering::Relaxed);
        }
    }

    /// Processes an arrival, after its receive was posted again. Executes the additions that are due, in order, by
    /// calls to `add`. Their offsets are valid in a slot of `slot_bytes`. Returns the question that needs an
    /// answer, if there is one.
    pub(super) fn take(
        &self,
        arrival: Arrival<'_>,
        slot_bytes: usize,
        mut add: impl FnMut(usize, u64),
    ) -> Result<Option<u64>, ReceiveError> {
        // No holder of the lock can leave the contents half changed.
        let mut inbound = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        let mut question = None;
        let mut land = |header: &Header| match header.action {
            Action::Add { offset, value } => add(offset as usize, value),
            Action::Answer { id } => question = question.max(Some(id)),
            Action::Nothing | Action::Answered { .. } | Action::Credit | Action::Farewell => {}
        };
        match arrival {
            Arrival::Write(seq) => inbound.count_write_before(seq)?,
            Arrival::Message(message) => {
                let header = Header::decode(message)?;
                check(&header, message, slot_bytes)?;
                self.note_peer_taken(header.mails);
                match header.action {
                    Action::Credit => return Ok(None),
                    Action::Answered { id } => {
                        self.answered.fetch_max(id, Ordering::Release);
                        return Ok(None);
                    }
                    _ => {}
                }
                // A header has no payload.
                if inbound.admit(&header, &[])? {
                    land(&header);
                }
            }
        }
        while let Some((header, _)) = inbound.next_ready() {
            land(&header);
        }
        self.taken.store(inbound.num_done(), Ordering::Release);
        Ok(question)
    }

    /// Latest question of this side that the peer has answered.
    pub(super) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Acquire)
    }
}

/// Refuses messages that this transport never sends. Parts do not fit into a receive.
fn check(header: &Header, message: &[u8], slot_bytes: usize) -> Result<(), ReceiveError> {
    header.for_each_part(message, slot_bytes, |_, _| {})?;
    let what = match header.action {
        Action::Farewell => "a farewell",
        _ if header.num_parts > 0 => "parts",
        _ if header.credit != Credit::default() => "credit",
        _ if (header.slot, header.token) != (0, 0) => "a slot or token",
        _ => return Ok(()),
    };
    Err(ReceiveError::Unexpected { what })
}

/// A header, on a cache line of its own.
const BUFFER_BYTES: usize = 64;
const _: () = assert!(HEADER_BYTES <= BUFFER_BYTES);

#[cfg(test)]
mod tests;
