//! One connection as a state machine: no sockets, no threads, no clock.
//!
//! Inputs are commands of users, frames of the peer, completions of the fabric, and expired deadlines. Outputs are
//! frames to be sent, operations for the fabric, and the ends of transfers. All other effects go through [`Port`].
//!
//! ```text
//! sender                                   receiver
//!   short message   ── Eager ───────────────▶ matched in order, kept until a receive is posted
//!   long message    ── Announce ────────────▶ matched in order
//!                   ◀─ Grant: its buffer ──── when a receive is posted
//!                   == fabric writes ======▶
//!                   ── Finish ──────────────▶ the receive is done
//! ```
//!
//! Bytes that this side pushes through the fabric, for messages and one-sided writes, stay within the receiver's
//! credits ([`crate::credit`]).

mod expiry;
#[cfg(test)]
mod hostile;
mod incoming;
mod notices;
mod push;
mod submit;
#[cfg(test)]
mod tests;

pub(super) use self::notices::NOTIFY_OVERHEAD;

use std::collections::{HashMap, VecDeque};

use super::error::{CloseReason, TransferError};
use super::wire::{Frame, FrameError, put_eager_header};
use crate::credit::{Credit, CreditConfig, CreditError, CreditSender, Demand, Event};
use crate::fabric::{LocalSegment, PostOutcome, RegionId, RemoteSegment};
use p2p_core::endpoint::PostError;

/// Limits of one side on what the other may send. Exchanged in the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// Longest message that may be sent ahead of its receive.
    pub(super) eager_bytes: u64,
    /// Cost of such messages that wait for a receive.
    pub(super) eager_window: u64,
    /// Cost of notifications that wait to be taken.
    pub(super) notify_window: u64,
    /// Longest notification.
    pub(super) max_notification: u64,
    /// See [`CreditConfig`].
    pub(super) unscheduled_bytes: u64,
    /// See [`CreditConfig`].
    pub(super) max_demand_bytes: u64,
}

/// Operation and part of a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tag {
    pub(super) op: u32,
    /// Bytes of this part.
    pub(super) bytes: u32,
}

/// Memory of a user that short messages are copied from and to.
pub(super) trait Memory {
    /// Whether this processor can copy it. If not, `load` and `store` are only called for 0 bytes.
    fn is_host(&self) -> bool;
    /// Appends `bytes` bytes from `offset` of the registration to `out`.
    fn load(&self, offset: u64, bytes: u64, out: &mut Vec<u8>);
    /// Copies `bytes` to `offset` of the registration.
    fn store(&self, offset: u64, bytes: &[u8]);
}

/// A range of local memory that `hold` keeps alive. It was checked against the registration.
#[derive(Debug)]
pub(super) struct LocalRange<H> {
    pub(super) hold: H,
    pub(super) region: RegionId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Effects of a link: fabric, credits, transfers, notifications.
pub(super) trait Port {
    fn max_operation_bytes(&self) -> u64;
    fn write(
        &mut self,
        dst: RemoteSegment,
        src: LocalSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError>;
    fn read(
        &mut self,
        dst: LocalSegment,
        src: RemoteSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError>;
    /// Opens local memory to the peer, until [`end_grant`](Self::end_grant) or until the fabric closes the peer.
    fn grant(&mut self, part: LocalSegment) -> Result<RemoteSegment, PostError>;
    /// Ends a grant, because its message has ended.
    fn end_grant(&mut self, part: LocalSegment);
    /// Ends one part of a transfer. The link has dropped its memory before.
    fn finish(&mut self, transfer: u32, result: Result<u64, TransferError>);
    fn deliver(&mut self, notification: Vec<u8>);
    /// Passes a report of the peer to this side's receiver of credits.
    fn credit(&mut self, event: Event) -> Result<(), CreditError>;
    /// Reports this side's reads to the same receiver. Returns the credit of the reads.
    fn pull_credit(&mut self, event: Event) -> Result<Credit, CreditError>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    Recv,
    Write,
    Read,
    Notify,
}

/// Progress of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// In a queue of this side; unknown to the peer.
    Queued,
    /// A short message or a notification that was sent, at least in part.
    Sent,
    /// An announced message that was not granted yet.
    Announced,
    /// A receive whose buffer the peer may write.
    Granted,
    /// The fabric moves its bytes.
    Moving,
}

#[derive(Debug)]
struct Op<H> {
    kind: Kind,
    stage: Stage,
    /// The user's transfer; `None` once its end was reported.
    transfer: Option<u32>,
    deadline_ns: u64,
    local: Option<LocalRange<H>>,
    remote: Option<RemoteSegment>,
    /// Bytes of the whole operation.
    total: u64,
    /// Bytes given to the fabric.
    posted: u64,
    /// Bytes that the fabric will get: less than `total` after a failure.
    end: u64,
    /// Parts under way in the fabric.
    num_in_flight: u32,
    /// Whether its bytes need the receiver's grant.
    is_scheduled: bool,
    seq: u64,
    notification: Vec<u8>,
    error: Option<TransferError>,
}

/// A message that came before its receive.
#[derive(Debug)]
enum EarlyMessage {
    Eager { payload: Vec<u8> },
    Announced { seq: u64, bytes: u64 },
}

/// One connection. `H` keeps local memory alive.
#[derive(Debug)]
pub(super) struct Link<H> {
    ours: Limits,
    theirs: Limits,
    chunk_bytes: u64,
    ops: Vec<Option<Op<H>>>,
    free: Vec<u32>,
    /// Lower bound on the deadlines of operations.
    next_deadline_ns: u64,
    num_in_flight: usize,

    /// Messages that are unknown to the peer.
    to_send: VecDeque<u32>,
    next_out_seq: u64,
    announced: HashMap<u64, u32>,
    eager_sent: VecDeque<u32>,
    eager_cost_out: u64,
    eager_freed_out: u64,
    eager_arrived_out: u64,

    /// Receives without a message, or messages without a receive. One of the two is always empty.
    posted: VecDeque<u32>,
    unexpected: VecDeque<EarlyMessage>,
    num_announced_in: usize,
    next_in_seq: u64,
    granted: HashMap<u64, u32>,
    eager_cost_in: u64,
    eager_freed_in: u64,
    eager_arrived_in: u64,
    eager_reported: (u64, u64),
    /// Free buffers for messages that arrive before their receive, and the sum of their costs.
    spare: Vec<Vec<u8>>,
    spare_bytes: u64,

    /// Pushes whose credit was not requested yet.
    to_admit: VecDeque<u32>,
    unscheduled: VecDeque<u32>,
    scheduled: VecDeque<u32>,
    credit: CreditSender,
    demand_reported: Demand,
    /// Bytes that have arrived or never will: scheduled and unscheduled.
    arrived: (u64, u64),
    arrived_reported: (u64, u64),
    /// Reads whose credit was not requested yet, and reads that wait for it. The credit comes from this side's own
    /// receiver, so pushes of peers and reads of this side share one window.
    to_pull: VecDeque<u32>,
    pulling: VecDeque<u32>,
    pull_credit: CreditSender,
    pull_demand_reported: Demand,
    pulled: u64,
    pulled_reported: u64,

    notices: notices::Notices,
    out: Vec<u8>,
    out_start: usize,
    /// Whether payload waits until `out` is shorter.
    is_output_full: bool,
    /// Whether the fabric had no room at the last attempt. There may be no completion that signals room, so the caller
    /// retries.
    waits_for_fabric: bool,
    closed: Option<CloseReason>,
}

impl<H: Memory> Link<H> {
    pub(super) fn new(ours: Limits, theirs: Limits, chunk_bytes: u64) -> Self {
        let credit_config = CreditConfig {
            unscheduled_bytes: theirs.unscheduled_bytes,
            max_demand_bytes: theirs.max_demand_bytes,
            ..CreditConfig::default()
        };
        // A request for credit takes no round trip here, so every read needs a grant.
        let pull_config = CreditConfig {
            unscheduled_bytes: 0,
            max_demand_bytes: ours.max_demand_bytes,
            ..CreditConfig::default()
        };
        Self {
            ours,
            theirs,
            chunk_bytes: chunk_bytes.clamp(1, MAX_CHUNK_BYTES),
            ops: Vec::new(),
            free: Vec::new(),
            next_deadline_ns: u64::MAX,
            num_in_flight: 0,
            to_send: VecDeque::new(),
            next_out_seq: 0,
            announced: HashMap::new(),
            eager_sent: VecDeque::new(),
            eager_cost_out: 0,
            eager_freed_out: 0,
            eager_arrived_out: 0,
            posted: VecDeque::new(),
            unexpected: VecDeque::new(),
            num_announced_in: 0,
            next_in_seq: 0,
            granted: HashMap::new(),
            eager_cost_in: 0,
            eager_freed_in: 0,
            eager_arrived_in: 0,
            eager_reported: (0, 0),
            spare: Vec::new(),
            spare_bytes: 0,
            to_admit: VecDeque::new(),
            unscheduled: VecDeque::new(),
            scheduled: VecDeque::new(),
            credit: CreditSender::new(&credit_config),
            demand_reported: Demand::default(),
            arrived: (0, 0),
            arrived_reported: (0, 0),
            to_pull: VecDeque::new(),
            pulling: VecDeque::new(),
            pull_credit: CreditSender::new(&pull_config),
            pull_demand_reported: Demand::default(),
            pulled: 0,
            pulled_reported: 0,
            notices: notices::Notices::new(&ours, &theirs),
            out: Vec::new(),
            out_start: 0,
            is_output_full: false,
            waits_for_fabric: false,
            closed: None,
        }
    }

    /// Sends and posts as much as possible now. The caller calls it after every other method.
    pub(super) fn progress(&mut self, port: &mut impl Port) {
        if self.closed.is_some() {
            return;
        }
        self.start_sends();
        self.start_notifications();
        self.waits_for_fabric = false;
        self.push(port);
        self.pull(port);
        self.report_counters();
    }

    /// Frames to be sent.
    pub(super) fn output(&self) -> &[u8] {
        &self.out[self.out_start..]
    }

    /// Whether [`progress`](Self::progress) can do more since output was sent.
    pub(super) fn has_room_again(&self) -> bool {
        self.is_output_full && self.out.len() - self.out_start <= HIGH_WATER
    }

    /// Whether the caller must retry [`progress`](Self::progress) after it has polled the fabric.
    pub(super) const fn waits_for_fabric(&self) -> bool {
        self.waits_for_fabric
    }

    /// Counts `bytes` of the output as sent.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.out_start += bytes;
        if self.out_start == self.out.len() {
            self.out.clear();
            self.out_start = 0;
            // The buffer may have grown while the peer did not read.
            self.out.shrink_to(2 * HIGH_WATER);
        } else if self.out_start > HIGH_WATER {
            self.out.drain(..self.out_start);
            self.out_start = 0;
        }
    }

    /// Appends a frame of the engine.
    pub(super) fn push_frame(&mut self, frame: Frame<'_>) {
        frame.encode(&mut self.out);
    }

    /// Time from which [`expire`](Self::expire) may have something to do.
    pub(super) const fn next_deadline_ns(&self) -> u64 {
        self.next_deadline_ns
    }

    /// Parts under way in the fabric.
    pub(super) const fn num_in_flight(&self) -> usize {
        self.num_in_flight
    }

    /// An operation that exists for certain.
    fn op(&mut self, idx: u32) -> &mut Op<H> {
        let op = self.ops[idx as usize].as_mut();
        op.unwrap_or_else(|| unreachable!("a queue holds an operation that has ended"))
    }

    fn end(&mut self, port: &mut impl Port, idx: u32, result: Result<u64, TransferError>) {
        let Some(op) = self.ops[idx as usize].take() else { return };
        self.free.push(idx);
        // The user may unmap the memory as soon as the end is reported.
        drop(op.local);
        if let Some(transfer) = op.transfer {
            port.finish(transfer, result);
        }
    }

    /// Keeps the buffer of a message for a later one, up to twice the window of such messages. Without the bound,
    /// buffers of many short messages would in time all grow to the length of long ones.
    fn recycle_buffer(&mut self, buffer: Vec<u8>) {
        let cost = buffer.capacity() as u64 + EAGER_OVERHEAD;
        if self.spare_bytes + cost <= 2 * self.ours.eager_window {
            self.spare_bytes += cost;
            self.spare.push(buffer);
        }
    }

    /// Returns a buffer for a message that arrives before its receive.
    fn reuse_buffer(&mut self) -> Vec<u8> {
        let Some(mut buffer) = self.spare.pop() else { return Vec::new() };
        self.spare_bytes -= buffer.capacity() as u64 + EAGER_OVERHEAD;
        buffer.clear();
        buffer
    }

    /// Sends or announces messages that are unknown to the peer.
    fn start_sends(&mut self) {
        while let Some(&idx) = self.to_send.front() {
            if self.is_congested() {
                return;
            }
            let seq = self.next_out_seq;
            let bytes = self.op(idx).total;
            let cost = bytes + EAGER_OVERHEAD;
            let in_window = self.eager_cost_out - self.eager_freed_out + cost;
            let is_host = self.op(idx).local.as_ref().is_none_or(|local| local.hold.is_host());
            let may_copy = is_host || bytes == 0;
            if may_copy && bytes <= self.theirs.eager_bytes && in_window <= self.theirs.eager_window
            {
                put_eager_header(&mut self.out, seq, bytes as usize);
                let op = self.ops[idx as usize].as_mut();
                if let Some((op, local)) = op.and_then(|op| op.local.take().map(|l| (op, l))) {
                    local.hold.load(local.offset, bytes, &mut self.out);
                    op.stage = Stage::Sent;
                }
                self.eager_cost_out += cost;
                self.eager_sent.push_back(idx);
            } else if bytes > 0 && self.announced.len() < MAX_ANNOUNCED {
                Frame::Announce { seq, bytes }.encode(&mut self.out);
                let op = self.op(idx);
                (op.stage, op.seq) = (Stage::Announced, seq);
                self.announced.insert(seq, idx);
            } else {
                return;
            }
            self.next_out_seq += 1;
            self.to_send.pop_front();
        }
    }

    /// Whether so much output is unsent that payload must wait.
    fn is_congested(&mut self) -> bool {
        self.is_output_full = self.out.len() - self.out_start > HIGH_WATER;
        self.is_output_full
    }
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Write => "write",
            Self::Read => "read",
            Self::Notify => "notify",
        }
    }
}

fn invalid_value(what: &'static str, found: u64, expected: u64) -> FrameError {
    FrameError::Value { what, found, expected }
}

/// Cost of a short message in addition to its bytes.
pub(super) const EAGER_OVERHEAD: u64 = 64;
/// Most messages announced and not granted.
const MAX_ANNOUNCED: usize = 1024;
/// Most parts of one connection under way in the fabric.
const MAX_IN_FLIGHT: usize = 256;
/// Largest part that a [`Tag`] can describe.
pub(super) const MAX_CHUNK_BYTES: u64 = 128 << 20;
const HIGH_WATER: usize = 512 << 10;
/// Most output for a peer that does not read. Payload waits far below this, and answers to a correct peer need far
/// less.
const MAX_UNREAD: usize = HIGH_WATER + (8 << 20);
