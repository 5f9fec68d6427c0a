//! Operations of a pair that wait until the library takes them, in order: a ring of fixed size, from whoever
//! posts to whoever drives.
//!
//! Neither takes a lock or waits for the other. Every cell says whose it is, and who finds one in the other's
//! hands comes back later: so nobody who posts stands still with a library that does. Cells, and room for the
//! bytes of messages, are made once, and nothing is allocated after that.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use super::fi_endpoint::{Descriptor, PostStatus};
use super::message::{self, Header, Then};
use p2p_core::region::{MapError, Region};

/// An operation that waits its turn.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op<'a> {
    /// A message, once as many writes are complete.
    Message { bytes: &'a [u8], after_writes: u64 },
    /// A copy into the peer's slot.
    Write { src: LocalMemory, offset: usize },
    /// A copy from the peer's slot.
    Read { dst: LocalMemory, offset: usize },
}

/// Local memory of an operation. Whoever makes one keeps the memory registered and mapped until the
/// operation is over.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalMemory {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    pub(super) descriptor: Descriptor,
}

// SAFETY: memory without thread affinity; see the type's documentation.
unsafe impl Send for LocalMemory {}

/// What became of an operation for the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PushStatus {
    /// It waits.
    Queued,
    /// It became part of the message before it, which waits, and its number is still free.
    Merged,
    /// There is no room.
    Full,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Outbox {
    max_message_bytes: usize,
    /// Made for the first operation that waits, or by [`prepare`](Self::prepare).
    ring: OnceLock<Ring>,
    /// How many there are, with the one that the library has at the moment; [`CLOSED`] and anything
    /// once it is closed.
    num: AtomicUsize,
    is_posting: AtomicBool,
    is_driving: AtomicBool,
}

#[derive(Debug)]
struct Ring {
    cells: Box<[Cell]>,
    /// Where the bytes of messages are, the next one behind the last one, as far as one piece of it goes.
    bytes: Region,
    /// Of whoever posts: where the next operation goes, how many bytes were given out, with those left
    /// out, and how many of them were given back at least.
    tail: AtomicUsize,
    given: AtomicU64,
    floor: AtomicU64,
    /// Of whoever drives: the operation that is the next one, and how many bytes were given back.
    head: AtomicUsize,
    freed: AtomicU64,
}

struct Cell {
    /// [`EMPTY`], [`READY`] or [`LOCKED`].
    state: AtomicU8,
    content: UnsafeCell<Content>,
}

/// What a cell keeps. `end` is how many bytes were given out when it was filled.
#[derive(Debug, Clone, Copy)]
struct Content {
    op: StoredOp,
    end: u64,
}

#[derive(Debug, Clone, Copy)]
enum StoredOp {
    Nothing,
    Message { at: usize, len: usize, after_writes: u64 },
    Write { src: LocalMemory, offset: usize },
    Read { dst: LocalMemory, offset: usize },
}

// SAFETY: the content is used only by whoever has set the state to `LOCKED`.
unsafe impl Sync for Cell {}

impl std::fmt::Debug for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cell").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Outbox {
    /// For messages of at most `max_message_bytes`.
    pub(super) const fn new(max_message_bytes: usize) -> Self {
        Self {
            max_message_bytes,
            ring: OnceLock::new(),
            num: AtomicUsize::new(0),
            is_posting: AtomicBool::new(false),
            is_driving: AtomicBool::new(false),
        }
    }

    /// Makes what operations wait in, unless there is one. Nothing is allocated later.
    ///
    /// # Errors
    /// [`MapError`] when the system gives no memory.
    pub(super) fn prepare(&self) -> Result<(), MapError> {
        if self.ring.get().is_none() {
            let _ = self.ring.set(Ring::new(self.max_message_bytes)?);
        }
        Ok(())
    }

    /// Operations that wait. Nobody may overtake them.
    #[inline]
    pub(super) fn num(&self) -> usize {
        let num = self.num.load(Ordering::Acquire);
        if num & CLOSED == 0 { num } else { 0 }
    }

    /// Puts `op` behind those that wait. True beside: it is the only one. One thread at a time: a second one
    /// is told that there is no room.
    ///
    /// # Errors
    /// [`MapError`] when it would be the first and the system gives no memory.
    pub(super) fn push(&self, op: Op<'_>) -> Result<(PushStatus, bool), MapError> {
        if self.num.load(Ordering::Acquire) & CLOSED != 0 {
            // Thrown away like the others.
            return Ok((PushStatus::Merged, false));
        }
        self.prepare()?;
        let (Some(ring), Some(_lock)) = (self.ring.get(), SideLock::try_lock(&self.is_posting))
        else {
            return Ok((PushStatus::Full, false));
        };
        if let Op::Message { bytes, .. } = op
            && ring.merge(bytes)
        {
            return Ok((PushStatus::Merged, false));
        }
        if !ring.push(op) {
            return Ok((PushStatus::Full, false));
        }
        let before = self.num.fetch_add(1, Ordering::AcqRel);
        if before & CLOSED != 0 {
            return Ok((PushStatus::Merged, false));
        }
        Ok((PushStatus::Queued, before == 0))
    }

    /// Gives operations to `post`, as far as it takes them. `None` from it: nothing can be posted any
    /// more, and what waits is thrown away. True when the last one went. One thread at a time: a second one
    /// does nothing.
    pub(super) fn flush(&self, mut post: impl FnMut(Op<'_>) -> Option<PostStatus>) -> bool {
        let (Some(ring), Some(_lock)) = (self.ring.get(), SideLock::try_lock(&self.is_driving))
        else {
            return false;
        };
        let mut is_over = false;
        while self.num() > 0 {
            let taken = ring.first(|op| {
                if is_over {
                    return Some(PostStatus::Accepted);
                }
                let taken = post(op);
                is_over |= taken.is_none();
                taken.or(Some(PostStatus::Accepted))
            });
            if taken != Some(PostStatus::Accepted) {
                // Not now, or whoever posts is just adding to it.
                return false;
            }
            let fewer = |num: usize| (num & CLOSED == 0).then(|| num - 1);
            match self.num.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer) {
                Ok(1) => return true,
                Ok(_) => {}
                // Closed meanwhile.
                Err(_) => return false,
            }
        }
        false
    }

    /// Throws away what waits, for good. True when there was something.
    pub(super) fn close(&self) -> bool {
        let num = self.num.swap(CLOSED, Ordering::AcqRel);
        num & CLOSED == 0 && num > 0
    }
}

impl Ring {
    fn new(max_message_bytes: usize) -> Result<Self, MapError> {
        let cell = |_| Cell {
            state: AtomicU8::new(EMPTY),
            content: UnsafeCell::new(Content { op: StoredOp::Nothing, end: 0 }),
        };
        Ok(Self {
            // Every operation may be a message of full length; memory is committed page by page, and used
            // again from its begin whenever nothing waits.
            bytes: Region::anonymous((MAX_WAITING + 1) * max_message_bytes.max(1))?,
            cells: (0..MAX_WAITING).map(cell).collect(),
            tail: AtomicUsize::new(0),
            given: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            head: AtomicUsize::new(0),
            freed: AtomicU64::new(0),
        })
    }

    fn cell(&self, number: usize) -> &Cell {
        &self.cells[number % MAX_WAITING]
    }

    /// Makes the message that waits last stand for `newer` as well, if that can be.
    fn merge(&self, newer: &[u8]) -> bool {
        let Ok(header) = Header::decode(newer) else { return false };
        if !matches!(header.then, Then::Add { .. }) || header.num_parts > 0 {
            return false;
        }
        let last = self.cell(self.tail.load(Ordering::Relaxed).wrapping_sub(1));
        let Some(cell) = last.try_lock(READY) else { return false };
        let merged = match cell.content().op {
            StoredOp::Message { at, len, .. } => {
                // SAFETY: the message's own bytes, which belong to whoever holds its cell.
                let bytes = unsafe { std::slice::from_raw_parts_mut(self.byte(at).as_ptr(), len) };
                message::merge_add(bytes, &header)
            }
            _ => false,
        };
        cell.unlock(READY);
        merged
    }

    /// False when there is no room.
    fn push(&self, op: Op<'_>) -> bool {
        // Relaxed: only whoever posts writes these.
        let tail = self.tail.load(Ordering::Relaxed);
        let given = self.given.load(Ordering::Relaxed);
        let Some(cell) = self.cell(tail).try_lock(EMPTY) else { return false };
        let content = match op {
            Op::Message { bytes, after_writes } => {
                let len = bytes.len();
                let Some((at, end)) = self.room(given, len) else {
                    cell.unlock(EMPTY);
                    return false;
                };
                // SAFETY: `len` bytes of the region from `at` on, given to nobody else.
                unsafe { self.byte(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), len) };
                Content { op: StoredOp::Message { at, len, after_writes }, end }
            }
            Op::Write { src, offset } => {
                Content { op: StoredOp::Write { src, offset }, end: given }
            }
            Op::Read { dst, offset } => Content { op: StoredOp::Read { dst, offset }, end: given },
        };
        self.given.store(content.end, Ordering::Relaxed);
        cell.fill(content);
        cell.unlock(READY);
        self.tail.store(tail.wrapping_add(1), Ordering::Relaxed);
        true
    }

    /// Room for a message of `len` bytes when `given` were given out: where, and how many are given out then.
    fn room(&self, given: u64, len: usize) -> Option<(usize, u64)> {
        let capacity = self.bytes.len() as u64;
        let len = len as u64;
        // SYNC POINT `outbox`: what is given back was read.
        let freed = self.freed.load(Ordering::Acquire);
        let mut floor = self.floor.load(Ordering::Relaxed).max(freed);
        let mut start = given;
        if floor == given {
            // Nothing waits: from the begin, whose pages are there.
            start = given.next_multiple_of(capacity);
            floor = start;
        } else if start % capacity + len > capacity {
            // In one piece.
            start = start.next_multiple_of(capacity);
        }
        if start + len - floor > capacity {
            return None;
        }
        self.floor.store(floor, Ordering::Relaxed);
        Some(((start % capacity) as usize, start + len))
    }

    /// Gives the first operation to `post`. `None` when there is none, or when it is in other hands.
    fn first(&self, post: impl FnOnce(Op<'_>) -> Option<PostStatus>) -> Option<PostStatus> {
        // Relaxed: only whoever drives writes it.
        let head = self.head.load(Ordering::Relaxed);
        let cell = self.cell(head).try_lock(READY)?;
        let Content { op, end } = cell.content();
        let op = match op {
            StoredOp::Nothing => return None,
            StoredOp::Message { at, len, after_writes } => {
                // SAFETY: the message's own bytes, which belong to whoever holds its cell.
                let bytes = unsafe { std::slice::from_raw_parts(self.byte(at).as_ptr(), len) };
                Op::Message { bytes, after_writes }
            }
            StoredOp::Write { src, offset } => Op::Write { src, offset },
            StoredOp::Read { dst, offset } => Op::Read { dst, offset },
        };
        let taken = post(op);
        if taken == Some(PostStatus::Accepted) {
            // SYNC POINT `outbox`: releases the bytes, and then the cell.
            self.freed.store(end, Ordering::Release);
            self.head.store(head.wrapping_add(1), Ordering::Relaxed);
            cell.unlock(EMPTY);
        } else {
            cell.unlock(READY);
        }
        taken
    }

    fn byte(&self, at: usize) -> NonNull<u8> {
        debug_assert!(at < self.bytes.len(), "{at}");
        // SAFETY: `room` gives places within the region only.
        unsafe { self.bytes.as_ptr().add(at) }
    }
}

impl Cell {
    /// Takes the cell in hand, if it is in that state.
    fn try_lock(&self, state: u8) -> Option<LockedCell<'_>> {
        // SYNC POINT `outbox`: sees what whoever left it in that state had done.
        let result =
            self.state.compare_exchange(state, LOCKED, Ordering::Acquire, Ordering::Relaxed);
        result.is_ok().then_some(LockedCell(self))
    }
}

/// A cell in hand. Whoever drops it without a word keeps it from everybody.
struct LockedCell<'a>(&'a Cell);

impl LockedCell<'_> {
    fn content(&self) -> Content {
        // SAFETY: whoever holds the cell alone uses the content.
        unsafe { *self.0.content.get() }
    }

    fn fill(&self, content: Content) {
        // SAFETY: as above.
        unsafe { *self.0.content.get() = content }
    }

    fn unlock(self, state: u8) {
        // SYNC POINT `outbox`: releases what was done to the content.
        self.0.state.store(state, Ordering::Release);
    }
}

/// One side's turn, for one thread at a time.
struct SideLock<'a>(&'a AtomicBool);

impl<'a> SideLock<'a> {
    fn try_lock(is_locked: &'a AtomicBool) -> Option<Self> {
        // SYNC POINT `outbox`: sees what the thread before has left of this side.
        (!is_locked.swap(true, Ordering::Acquire)).then_some(Self(is_locked))
    }
}

impl Drop for SideLock<'_> {
    fn drop(&mut self) {
        // SYNC POINT `outbox`: releases it to the next thread of this side.
        self.0.store(false, Ordering::Release);
    }
}

/// Operations of one pair that may wait.
const MAX_WAITING: usize = 1024;
/// Nothing waits any more.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// Of whoever posts.
const EMPTY: u8 = 0;
/// Of whoever drives, or of whoever posts if something is to be added to it.
const READY: u8 = 1;
/// In somebody's hands.
const LOCKED: u8 = 2;

#[cfg(test)]
mod tests;
