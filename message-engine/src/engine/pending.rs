//! Submission of a transfer: its parts go to the thread one by one, and wait while the command queue is full.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::descriptor::Descriptor;
use super::error::{SubmitError, TransferError};
use super::memory::Span;
use super::shared::{Command, ConnShared, Operation, TransferPart};
use super::transfer::{Transfer, TransferId};

/// Operation of all parts of a transfer.
#[derive(Debug, Clone, Copy)]
pub(super) enum TransferKind<'a> {
    Send,
    Recv,
    /// Each part into the range with its index.
    Write(&'a [Descriptor]),
    /// Each part from the range with its index.
    Read(&'a [Descriptor]),
}

/// A transfer whose parts are not all in the command queue.
#[derive(Debug)]
#[must_use = "its parts are to be handed over"]
pub(super) struct PendingTransfer<'a> {
    conn: &'a Arc<ConnShared>,
    kind: TransferKind<'a>,
    /// Local ranges, one per part; the first `num_pushed` are in the queue.
    spans: &'a [Span],
    num_pushed: usize,
    deadline_ns: u64,
    id: TransferId,
    /// Whether a user has its handle.
    has_handle: bool,
    /// Time until which the queue must have room for the next part.
    room_deadline: Instant,
    pause: Duration,
}

impl TransferKind<'_> {
    fn operation(self, nth: usize) -> Operation {
        match self {
            Self::Send => Operation::Send,
            Self::Recv => Operation::Recv,
            Self::Write(remote) => Operation::Write(remote[nth].segment()),
            Self::Read(remote) => Operation::Read(remote[nth].segment()),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Write(_) => "write",
            Self::Read(_) => "read",
        }
    }
}

impl<'a> PendingTransfer<'a> {
    /// Begins a transfer and pushes its first part. Never blocks.
    pub(super) fn new(
        conn: &'a Arc<ConnShared>,
        spans: &'a [Span],
        kind: TransferKind<'a>,
        deadline: Instant,
    ) -> Result<Self, SubmitError> {
        let shared = &conn.shared;
        let id = shared.begin(spans.len())?;
        if spans.is_empty() {
            shared.transfers.finish(id.0 as u32, Ok(0));
        }
        let mut pending = Self::pushed(conn, id);
        (pending.spans, pending.kind) = (spans, kind);
        pending.deadline_ns = shared.ns(deadline);
        // Nothing has begun yet, so the caller may retry. Dropping `pending` ends the transfer.
        if pending.has_more() && !pending.push_part() {
            Err(SubmitError::Busy)
        } else {
            Ok(pending)
        }
    }

    /// A transfer whose only command is in the queue already.
    pub(super) fn pushed(conn: &'a Arc<ConnShared>, id: TransferId) -> Self {
        Self {
            conn,
            kind: TransferKind::Send,
            spans: &[],
            num_pushed: 0,
            deadline_ns: 0,
            id,
            has_handle: false,
            room_deadline: Instant::now() + ROOM_TIMEOUT,
            pause: FIRST_PAUSE,
        }
    }

    /// Pushes the remaining parts. Blocks while the queue is full, for at most [`ROOM_TIMEOUT`] per part.
    pub(super) fn block(mut self) -> Transfer {
        while let Some(pause) = self.push_parts() {
            std::thread::sleep(pause);
        }
        self.transfer()
    }

    /// Awaitable form of [`block`](Self::block).
    pub(super) async fn wait(mut self) -> Transfer {
        while let Some(pause) = self.push_parts() {
            tokio::time::sleep(pause.max(LEAST_TASK_PAUSE)).await;
        }
        self.transfer()
    }

    /// Pushes as many parts as the queue has room for. Returns the time to wait before the next call, or `None` if no
    /// parts are left or the time limit has passed.
    fn push_parts(&mut self) -> Option<Duration> {
        while self.has_more() {
            if self.push_part() {
                continue;
            }
            self.conn.shared.kick();
            if Instant::now() >= self.room_deadline {
                return None;
            }
            let pause = self.pause;
            self.pause = (2 * pause).min(MAX_PAUSE);
            return Some(pause);
        }
        None
    }

    const fn has_more(&self) -> bool {
        self.num_pushed < self.spans.len()
    }

    /// Pushes one part. Returns false if the queue is full.
    fn push_part(&mut self) -> bool {
        let span = &self.spans[self.num_pushed];
        let part = Command::Transfer(TransferPart {
            conn: self.conn.key,
            operation: self.kind.operation(self.num_pushed),
            transfer: self.id.0 as u32,
            deadline_ns: self.deadline_ns,
            handle: Arc::clone(&span.handle),
            offset: span.offset,
            bytes: span.bytes,
        });
        let is_taken = self.conn.shared.push(part).is_ok();
        if is_taken {
            self.num_pushed += 1;
            if self.pause > FIRST_PAUSE {
                (self.room_deadline, self.pause) = (Instant::now() + ROOM_TIMEOUT, FIRST_PAUSE);
            }
        }
        is_taken
    }

    fn transfer(mut self) -> Transfer {
        self.has_handle = true;
        Transfer::new(Arc::clone(&self.conn.shared.transfers), self.id)
    }
}

impl Drop for PendingTransfer<'_> {
    fn drop(&mut self) {
        let transfers = &self.conn.shared.transfers;
        let left = self.spans.len() - self.num_pushed;
        if left > 0 {
            let late = TransferError::Deadline { op: self.kind.name() };
            transfers.finish_many(self.id.0 as u32, left as u32, Err(late));
        }
        if !self.has_handle {
            transfers.release(self.id);
        }
    }
}

/// Time limit for the thread to make room for one part.
const ROOM_TIMEOUT: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_micros(1);
const MAX_PAUSE: Duration = Duration::from_millis(1);
/// Resolution of tokio's timers.
const LEAST_TASK_PAUSE: Duration = Duration::from_millis(1);
