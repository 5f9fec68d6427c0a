//! Queue of a pair's operations that the library has not accepted yet: a ring of fixed size from
//! the posting thread (the poster) to the driving thread (the driver).
//!
//! Neither side takes a lock or waits for the other. Every cell says which side owns it. A thread
//! that finds a cell locked by the other side returns and retries later, so a stuck library never
//! blocks a poster. Cells and room for the bytes of messages are allocated once.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use super::fi_endpoint::{Descriptor, PostStatus};
use super::message::{self, Action, Header};
use p2p_core::region::{MapError, Region};

/// A queued operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op<'a> {
    /// A message, to be sent once `after_writes` writes are complete.
    Message { bytes: &'a [u8], after_writes: u64 },
    /// A copy into the peer's slot.
    Write { src: LocalMemory, offset: usize },
    /// A copy from the peer's slot.
    Read { dst: LocalMemory, offset: usize },
}

/// Local memory of an operation. The creator keeps the memory registered and mapped until the
/// operation is complete.
#[derive(Debug, Clone, Copy)]
pub(super) struct LocalMemory {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    pub(super) descriptor: Descriptor,
}

// SAFETY: memory without thread affinity; see the type's documentation.
unsafe impl Send for LocalMemory {}

/// Outcome of adding an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PushStatus {
    Queued,
    /// The operation became part of the last queued message, and its number is still free.
    Merged,
    /// There is no room.
    Full,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Outbox {
    max_message_bytes: usize,
    /// Allocated for the first queued operation, or by [`prepare`](Self::prepare).
    ring: OnceLock<Ring>,
    /// Number of queued operations, with the one that the driver is posting. Has the bit
    /// [`CLOSED`], with any number, once the outbox is closed.
    num: AtomicUsize,
    is_posting: AtomicBool,
    is_driving: AtomicBool,
}

#[derive(Debug)]
struct Ring {
    cells: Box<[Cell]>,
    /// Bytes of messages, each contiguous, one behind the other.
    bytes: Region,
    /// Owned by the poster: index of the next cell, bytes allocated so far with skipped ones, and a
    /// lower bound of the bytes freed.
    tail: AtomicUsize,
    given: AtomicU64,
    floor: AtomicU64,
    /// Owned by the driver: index of the first operation, and bytes freed so far.
    head: AtomicUsize,
    freed: AtomicU64,
}

struct Cell {
    /// [`EMPTY`], [`READY`] or [`LOCKED`].
    state: AtomicU8,
    content: UnsafeCell<Content>,
}

/// Content of a cell. `end` is the number of bytes allocated when it was filled.
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

// SAFETY: only the thread that has set the state to `LOCKED` uses the content.
unsafe impl Sync for Cell {}

impl std::fmt::Debug for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cell").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Outbox {
    /// An outbox for messages of at most `max_message_bytes`.
    pub(super) const fn new(max_message_bytes: usize) -> Self {
        Self {
            max_message_bytes,
            ring: OnceLock::new(),
            num: AtomicUsize::new(0),
            is_posting: AtomicBool::new(false),
            is_driving: AtomicBool::new(false),
        }
    }

    /// Allocates the ring, unless there is one. No later call allocates.
    ///
    /// # Errors
    /// [`MapError`] if the system has no memory left.
    pub(super) fn prepare(&self) -> Result<(), MapError> {
        if self.ring.get().is_none() {
            let _ = self.ring.set(Ring::new(self.max_message_bytes)?);
        }
        Ok(())
    }

    /// Number of queued operations. Later posts must not overtake them.
    #[inline]
    pub(super) fn num(&self) -> usize {
        let num = self.num.load(Ordering::Acquire);
        if num & CLOSED == 0 { num } else { 0 }
    }

    /// Queues `op`. Also returns true if it is the only operation. One thread at a time may push: a
    /// concurrent call returns [`PushStatus::Full`].
    ///
    /// # Errors
    /// [`MapError`] if the ring must be allocated and the system has no memory left.
    pub(super) fn push(&self, op: Op<'_>) -> Result<(PushStatus, bool), MapError> {
        if self.num.load(Ordering::Acquire) & CLOSED != 0 {
            // Dropped, like all operations of a closed outbox.
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

    /// Passes operations to `post` until it refuses one. If `post` returns `None`, posting is
    /// impossible and the queued operations are dropped. Returns true if the last one left the
    /// queue. One thread at a time may flush: a concurrent call does nothing.
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
                // Refused, or the poster is merging into it.
                return false;
            }
            let fewer = |num: usize| (num & CLOSED == 0).then(|| num - 1);
            match self.num.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer) {
                Ok(1) => return true,
                Ok(_) => {}
                // Closed in the meantime.
                Err(_) => return false,
            }
        }
        false
    }

    /// Drops all queued operations and rejects later ones. Returns true if there were any.
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
            // Every operation may be a message of full length. Pages are committed on first use,
            // and the region is used from its start again whenever the queue is empty.
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

    /// Merges `newer` into the last queued message, if possible.
    fn merge(&self, newer: &[u8]) -> bool {
        let Ok(header) = Header::decode(newer) else { return false };
        if !matches!(header.action, Action::Add { .. }) || header.num_parts > 0 {
            return false;
        }
        let last = self.cell(self.tail.load(Ordering::Relaxed).wrapping_sub(1));
        let Some(cell) = last.try_lock(READY) else { return false };
        let merged = match cell.content().op {
            StoredOp::Message { at, len, .. } => {
                // SAFETY: the message's own bytes, which belong to the thread that locked its cell.
                let bytes = unsafe { std::slice::from_raw_parts_mut(self.byte(at).as_ptr(), len) };
                message::merge_add(bytes, &header)
            }
            _ => false,
        };
        cell.unlock(READY);
        merged
    }

    /// Returns false if there is no room.
    fn push(&self, op: Op<'_>) -> bool {
        // Relaxed: only the poster writes these.
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
                // SAFETY: `len` bytes of the region from `at` on, allocated to this message alone.
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

    /// Allocates a message of `len` bytes after `given` bytes were allocated. Returns its offset,
    /// and the number of bytes allocated afterwards.
    fn room(&self, given: u64, len: usize) -> Option<(usize, u64)> {
        let capacity = self.bytes.len() as u64;
        let len = len as u64;
        // SYNC POINT `outbox`: bytes that are freed were read.
        let freed = self.freed.load(Ordering::Acquire);
        let mut floor = self.floor.load(Ordering::Relaxed).max(freed);
        let mut start = given;
        if floor == given {
            // The queue is empty: use the start, whose pages are committed.
            start = given.next_multiple_of(capacity);
            floor = start;
        } else if start % capacity + len > capacity {
            // A message is contiguous: skip the rest.
            start = start.next_multiple_of(capacity);
        }
        if start + len - floor > capacity {
            return None;
        }
        self.floor.store(floor, Ordering::Relaxed);
        Some(((start % capacity) as usize, start + len))
    }

    /// Passes the first operation to `post`. Returns `None` if there is none, or if its cell is
    /// locked.
    fn first(&self, post: impl FnOnce(Op<'_>) -> Option<PostStatus>) -> Option<PostStatus> {
        // Relaxed: only the driver writes it.
        let head = self.head.load(Ordering::Relaxed);
        let cell = self.cell(head).try_lock(READY)?;
        let Content { op, end } = cell.content();
        let op = match op {
            StoredOp::Nothing => return None,
            StoredOp::Message { at, len, after_writes } => {
                // SAFETY: the message's own bytes, which belong to the thread that locked its cell.
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
        // SAFETY: `room` returns offsets within the region only.
        unsafe { self.bytes.as_ptr().add(at) }
    }
}

impl Cell {
    /// Locks the cell if it is in `state`.
    fn try_lock(&self, state: u8) -> Option<LockedCell<'_>> {
        // SYNC POINT `outbox`: acquires what the previous owner of the cell did.
        let result =
            self.state.compare_exchange(state, LOCKED, Ordering::Acquire, Ordering::Relaxed);
        result.is_ok().then_some(LockedCell(self))
    }
}

/// A locked cell. Call [`unlock`](Self::unlock): without it the cell stays locked forever.
struct LockedCell<'a>(&'a Cell);

impl LockedCell<'_> {
    fn content(&self) -> Content {
        // SAFETY: the thread that locked the cell alone uses the content.
        unsafe { *self.0.content.get() }
    }

    fn fill(&self, content: Content) {
        // SAFETY: as above.
        unsafe { *self.0.content.get() = content }
    }

    fn unlock(self, state: u8) {
        // SYNC POINT `outbox`: releases the changes to the content.
        self.0.state.store(state, Ordering::Release);
    }
}

/// Lets one thread at a time act as the poster, or as the driver.
struct SideLock<'a>(&'a AtomicBool);

impl<'a> SideLock<'a> {
    fn try_lock(is_locked: &'a AtomicBool) -> Option<Self> {
        // SYNC POINT `outbox`: acquires this side's state from the previous thread.
        (!is_locked.swap(true, Ordering::Acquire)).then_some(Self(is_locked))
    }
}

impl Drop for SideLock<'_> {
    fn drop(&mut self) {
        // SYNC POINT `outbox`: releases this side's state to the next thread.
        self.0.store(false, Ordering::Release);
    }
}

/// Most queued operations of one pair.
const MAX_WAITING: usize = 1024;
/// Bit of `num`: the outbox is closed.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// The cell belongs to the poster.
const EMPTY: u8 = 0;
/// The cell belongs to the driver. The poster may lock it to merge an operation into it.
const READY: u8 = 1;
/// A thread uses the content.
const LOCKED: u8 = 2;

#[cfg(test)]
mod tests;
