//! The beginning of a transfer: its parts go to the thread one by one, and wait for room in its queue.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::descriptor::Descriptor;
use super::error::{SubmitError, TransferError};
use super::memory::Span;
use super::shared::{Command, ConnShared, Move, What};
use super::transfer::{Transfer, TransferId};

/// What the parts of a transfer do.
#[derive(Debug, Clone, Copy)]
pub(super) enum Moves<'a> {
    Send,
    Recv,
    /// Each into the range in its place.
    Write(&'a [Descriptor]),
    /// Each from the range in its place.
    Read(&'a [Descriptor]),
}

/// A transfer of which not all parts were handed to the thread.
#[derive(Debug)]
#[must_use = "its parts are to be handed over"]
pub(super) struct Starting<'a> {
    conn: &'a Arc<ConnShared>,
    moves: Moves<'a>,
    /// Those that were not handed over.
    spans: &'a [Span],
    num_taken: usize,
    deadline_ns: u64,
    id: TransferId,
    /// Whether somebody has its handle.
    is_known: bool,
    /// When the next part must have been taken.
    give_up: Instant,
    pause: Duration,
}

impl Moves<'_> {
    fn what(self, nth: usize) -> What {
        match self {
            Self::Send => What::Send,
            Self::Recv => What::Recv,
            Self::Write(remote) => What::Write(remote[nth].segment()),
            Self::Read(remote) => What::Read(remote[nth].segment()),
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

impl<'a> Starting<'a> {
    /// Hands over the first part.
    pub(super) fn new(
        conn: &'a Arc<ConnShared>,
        spans: &'a [Span],
        moves: Moves<'a>,
        deadline: Instant,
    ) -> Result<Self, SubmitError> {
        let shared = &conn.shared;
        let id = shared.begin(spans.len())?;
        if spans.is_empty() {
            shared.transfers.finish(id.0 as u32, Ok(0));
        }
        let mut starting = Self::of_one(conn, id);
        (starting.spans, starting.moves) = (spans, moves);
        starting.deadline_ns = shared.ns(deadline);
        // Busy before anything has begun: the caller may try again. All are given up on its drop.
        if starting.has_more() && !starting.hand_over() {
            Err(SubmitError::Busy)
        } else {
            Ok(starting)
        }
    }

    /// A transfer that was handed over as a whole.
    pub(super) fn of_one(conn: &'a Arc<ConnShared>, id: TransferId) -> Self {
        Self {
            conn,
            moves: Moves::Send,
            spans: &[],
            num_taken: 0,
            deadline_ns: 0,
            id,
            is_known: false,
            give_up: Instant::now() + PATIENCE,
            pause: FIRST_PAUSE,
        }
    }

    /// Hands the rest over, sleeping while there is no room.
    pub(super) fn block(mut self) -> Transfer {
        while let Some(pause) = self.go_on() {
            std::thread::sleep(pause);
        }
        self.transfer()
    }

    /// The same for tasks.
    pub(super) async fn wait(mut self) -> Transfer {
        while let Some(pause) = self.go_on() {
            tokio::time::sleep(pause.max(LEAST_TASK_PAUSE)).await;
        }
        self.transfer()
    }

    /// Hands over what there is room for. Gives how long to wait before the rest is tried; `None` when there
    /// is nothing left, or no sense in it.
    fn go_on(&mut self) -> Option<Duration> {
        while self.has_more() {
            if self.hand_over() {
                continue;
            }
            self.conn.shared.kick();
            if Instant::now() >= self.give_up {
                return None;
            }
            let pause = self.pause;
            self.pause = (2 * pause).min(MAX_PAUSE);
            return Some(pause);
        }
        None
    }

    const fn has_more(&self) -> bool {
        self.num_taken < self.spans.len()
    }

    /// Hands over one part, if there is room.
    fn hand_over(&mut self) -> bool {
        let span = &self.spans[self.num_taken];
        let part = Command::Move(Move {
            conn: self.conn.key,
            what: self.moves.what(self.num_taken),
            transfer: self.id.0 as u32,
            deadline_ns: self.deadline_ns,
            handle: Arc::clone(&span.handle),
            offset: span.offset,
            bytes: span.bytes,
        });
        let is_taken = self.conn.shared.push(part).is_ok();
        if is_taken {
            self.num_taken += 1;
            if self.pause > FIRST_PAUSE {
                (self.give_up, self.pause) = (Instant::now() + PATIENCE, FIRST_PAUSE);
            }
        }
        is_taken
    }

    fn transfer(mut self) -> Transfer {
        self.is_known = true;
        Transfer::new(Arc::clone(&self.conn.shared.transfers), self.id)
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        let transfers = &self.conn.shared.transfers;
        let left = self.spans.len() - self.num_taken;
        if left > 0 {
            let late = TransferError::Deadline { op: self.moves.name() };
            transfers.finish_many(self.id.0 as u32, left as u32, Err(late));
        }
        if !self.is_known {
            transfers.release(self.id);
        }
    }
}

/// Time for the thread, which is never long behind, to make room for one part.
const PATIENCE: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_micros(1);
const MAX_PAUSE: Duration = Duration::from_millis(1);
/// Timers of tasks are no finer.
const LEAST_TASK_PAUSE: Duration = Duration::from_millis(1);
