//! Flags without atomics: messages, which the receiving side's driver carries out in order.
//!
//! The messages, and what puts them in order, are those of libfabric (`backend::counted`). A queue pair
//! carries a message out behind the writes that were posted before it, so those need not be counted.
//! Parts of a spread put that go by other queue pairs end with a WRITE_WITH_IMM that says which message comes
//! first behind it. The receiving side counts it, and a message waits there until as many of those before it
//! have landed as it says.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;

use super::config::{SIGNALS_VARIABLE, SignalChoice};
use super::detail::Signals;
use super::owner::{CallError, ProtectionDomain};
use super::qp::Capacity;
use super::registration::{MemoryRegion, Rights};
use p2p_core::counted::inbound::{Inbound, OrderError};
use p2p_core::counted::message::{Credit, HEADER_BYTES, Header, MessageError, Then};
use p2p_core::region::Region;

/// How flags travel: as `choice` says, else as the environment does, else as devices can.
///
/// # Errors
/// What is wrong with the wish, for people.
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

/// A message with nothing but its head. What is mail over libfabric are receives here: `taken` is how many of
/// its own the sender has seen taken, modulo 2³².
pub(super) fn header(seq: u32, writes: u64, then: Then, taken: u32) -> Header {
    // A queue pair has one peer and one slot: neither has to be named.
    let (slot, token, credit, num_parts) = (0, 0, Credit::default(), 0);
    Header { slot, seq, token, writes, then, credit, num_parts, mails: taken }
}

/// How many messages and counted writes may be under way to a side with so many receives at each queue pair,
/// before it says that it has taken some. So many that it never runs out: each of them has the peer's driver
/// send one answer at most, and news of what it took comes once in half a window.
pub(super) const fn window_of(num_receives: u32) -> u32 {
    num_receives.saturating_sub(RECEIVES_BESIDE_WINDOW) / 2
}

/// For an answer and news that were under way when the window was told to be free.
pub(super) const RECEIVES_BESIDE_WINDOW: u32 = 4;

/// What one queue pair needs for messages.
#[derive(Debug)]
pub(super) struct Messages {
    // Keeps the memory mapped, and is given up first.
    key: MemoryRegion,
    /// Buffers that messages come into, those that they go from, and one for answers.
    memory: Region,
    num_receives: u32,
    num_sends: u32,
    /// The latest question, and the latest one that an answer was posted to.
    owed: AtomicU64,
    sent: AtomicU64,
    is_answering: AtomicBool,
}

/// Local memory of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Buffer {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) bytes: u32,
}

impl Messages {
    /// Bytes of memory that a queue pair of that capacity needs.
    pub(super) const fn memory_bytes(capacity: Capacity) -> usize {
        (capacity.receives + capacity.sends + 1) as usize * BUFFER_BYTES
    }

    /// In `memory`, of which nobody else has a part.
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

    /// What the receive of that number comes into.
    pub(super) fn incoming(&self, idx: u32) -> Buffer {
        self.buffer(idx % self.num_receives.max(1))
    }

    /// A copy of what came by the receive of that number, before it is posted again.
    pub(super) fn take(&self, idx: u32) -> [u8; HEADER_BYTES] {
        let from = self.place(idx % self.num_receives.max(1));
        let mut message = [0; HEADER_BYTES];
        // SAFETY: within the memory. The device writes a buffer only between its posting and its
        // completion, and no peer holds a key.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut message).cast(), HEADER_BYTES) };
        message
    }

    /// Puts a message where request number `sequence` may send it from: the one that was there before is
    /// complete, since no more requests are under way than there are buffers.
    pub(super) fn outgoing(&self, sequence: u64, header: &Header) -> Buffer {
        let nth = sequence % u64::from(self.num_sends.max(1));
        self.fill(self.num_receives + nth as u32, header)
    }

    /// Notes a question that is to be answered.
    pub(super) fn owe(&self, id: u64) {
        self.owed.fetch_max(id, Ordering::Relaxed);
    }

    /// What the driver is to send now, if anything: an answer, which answers everything before, or that
    /// receives were taken. One is under way at a time. Only ever called with the driver's table locked,
    /// like [`sent`](Self::sent).
    pub(super) fn answer(&self, arrivals: &Arrivals) -> Option<Buffer> {
        if self.is_answering.load(Ordering::Relaxed) {
            return None;
        }
        let id = self.owed.load(Ordering::Relaxed);
        let then = if id > self.sent.load(Ordering::Relaxed) {
            self.sent.store(id, Ordering::Relaxed);
            Then::Answered { id }
        } else if arrivals.has_news() {
            Then::Credit
        } else {
            return None;
        };
        self.is_answering.store(true, Ordering::Relaxed);
        let answer = header(0, 0, then, arrivals.tell());
        Some(self.fill(self.num_receives + self.num_sends, &answer))
    }

    /// The answer that was under way is complete.
    pub(super) fn sent(&self) {
        self.is_answering.store(false, Ordering::Relaxed);
    }

    fn fill(&self, idx: u32, header: &Header) -> Buffer {
        let mut message = [0; HEADER_BYTES];
        header.encode(&mut message);
        // SAFETY: within the memory; whoever fills a buffer has it alone, and no request uses it.
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
        // SAFETY: callers give indices of buffers, all of which lie in the memory.
        unsafe { self.memory.as_ptr().add(idx as usize * BUFFER_BYTES) }
    }
}

/// What came of one peer, over all its queue pairs.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Never waited for: used only with the driver's table locked.
    inbound: Mutex<Inbound>,
    /// Latest question of this side that the peer has answered.
    answered: AtomicU64,
    /// Messages and writes of the peer's endpoint that took a receive of this side and are done, and of these,
    /// how many the peer was told of; modulo 2³². What its driver sends by itself is not counted.
    taken: AtomicU32,
    told: AtomicU32,
    /// How many may be taken before the peer has to be told.
    tell_after: u32,
    /// Receives of the peer that were taken, as far as it said.
    peer_taken: AtomicU32,
}

/// What took a receive.
#[derive(Debug, Clone, Copy)]
pub(super) enum Arrival<'a> {
    /// A message.
    Message(&'a [u8]),
    /// A counted write, and the message that comes first behind it.
    Write(u32),
}

/// A peer sent what cannot be.
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
    /// Of a side with so many receives for messages at each queue pair.
    pub(super) fn new(num_receives: u32) -> Self {
        let window = window_of(num_receives);
        Self {
            inbound: Mutex::new(Inbound::with_window(window)),
            answered: AtomicU64::new(0),
            taken: AtomicU32::new(0),
            told: AtomicU32::new(0),
            // Whoever keeps half of the window free always hears of the other half.
            tell_after: (window / 4).max(1),
            peer_taken: AtomicU32::new(0),
        }
    }

    /// Whether the peer may soon wait for news of what was taken.
    fn has_news(&self) -> bool {
        let taken = self.taken.load(Ordering::Relaxed);
        taken.wrapping_sub(self.told.load(Ordering::Relaxed)) >= self.tell_after
    }

    /// What to tell the peer of receives. Told again, or late, does no harm.
    pub(super) fn tell(&self) -> u32 {
        // Behind the driver's posting of the receives.
        let taken = self.taken.load(Ordering::Acquire);
        self.told.store(taken, Ordering::Relaxed);
        taken
    }

    /// Receives of the peer that were taken, as far as it said; modulo 2³².
    pub(super) fn peer_taken(&self) -> u32 {
        self.peer_taken.load(Ordering::Relaxed)
    }

    fn note_peer_taken(&self, taken: u32) {
        // Only the driver stores. Queue pairs run at their own pace: what comes may be older than what is
        // known.
        if taken.wrapping_sub(self.peer_taken()).cast_signed() > 0 {
            self.peer_taken.store(taken, Ordering::Relaxed);
        }
    }

    /// Called once the receive is posted again. Does what may be done now, in order: additions to flags of a
    /// slot of `slot_bytes`, whose offsets are sound, go to `add`. Gives the question that is to be answered, if
    /// there is one.
    pub(super) fn take(
        &self,
        arrival: Arrival<'_>,
        slot_bytes: usize,
        mut add: impl FnMut(usize, u64),
    ) -> Result<Option<u64>, ReceiveError> {
        // Nothing that holds the lock can leave the contents half changed.
        let mut inbound = self.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        let mut question = None;
        let mut land = |header: &Header| match header.then {
            Then::Add { offset, value } => add(offset as usize, value),
            Then::Answer { id } => question = question.max(Some(id)),
            Then::Nothing | Then::Answered { .. } | Then::Credit | Then::Farewell => {}
        };
        match arrival {
            Arrival::Write(seq) => inbound.count_write_before(seq)?,
            Arrival::Message(message) => {
                let header = Header::decode(message)?;
                check(&header, message, slot_bytes)?;
                self.note_peer_taken(header.mails);
                match header.then {
                    Then::Credit => return Ok(None),
                    Then::Answered { id } => {
                        self.answered.fetch_max(id, Ordering::Release);
                        return Ok(None);
                    }
                    _ => {}
                }
                // There is nothing behind a head.
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

/// Refuses what this transport never sends. Parts do not fit a receive.
fn check(header: &Header, message: &[u8], slot_bytes: usize) -> Result<(), ReceiveError> {
    header.for_each_part(message, slot_bytes, |_, _| {})?;
    let what = match header.then {
        Then::Farewell => "a farewell",
        _ if header.num_parts > 0 => "parts",
        _ if header.credit != Credit::default() => "credit",
        _ if (header.slot, header.token) != (0, 0) => "a slot or token",
        _ => return Ok(()),
    };
    Err(ReceiveError::Unexpected { what })
}

/// A head, on a cache line of its own.
const BUFFER_BYTES: usize = 64;
const _: () = assert!(HEADER_BYTES <= BUFFER_BYTES);

#[cfg(test)]
mod tests;
