//! Lanes: rings of commands in memory that a poster and a thread share, with both of their ends.
//!
//! ```text
//! per lane: | words: completed, error | cell 0 | cell 1 | … | cell 2^depth_shift - 1 |
//! ```
//!
//! A cell shows by its lap, in both halves, whether it holds the due command. So there is no head to publish,
//! nothing to reset, and a torn command is not taken.

use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use p2p_core::Region;
use p2p_core::flags::Word;
use p2p_core::region::MapError;
use thiserror::Error;

use crate::abi::{LaneHandle, LaneWords, MAX_DEPTH, MAX_LANES, MIN_DEPTH, RawCommand};
use crate::command::{BadCommand, Command, decode_cell, lap_of};

/// Size of the lanes of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneConfig {
    /// Lanes. Blocks of a kernel choose one by their index.
    pub num_lanes: u32,
    /// Cells of each, a power of two.
    pub depth: u32,
    /// Commands of a lane in flight at most, not more than its depth.
    pub budget: u32,
}

impl Default for LaneConfig {
    fn default() -> Self {
        Self { num_lanes: 8, depth: 1024, budget: 256 }
    }
}

/// Lanes could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum LaneError {
    /// The configuration cannot be used.
    #[error("{what} is {found}: expected {expected}")]
    Config {
        /// Name of the setting.
        what: &'static str,
        found: u64,
        expected: &'static str,
    },
    /// Posters could not use the handle.
    #[error("the peer cannot be given to posters: {0}")]
    Handle(&'static str),
    /// No memory.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// Memory of this host that both ends reach, page-locked where one of them is a GPU.
///
/// # Safety
/// `ptr..ptr+len` stays readable and writable as long as the value lives, begins on a page, and has no other use.
pub unsafe trait SharedMemory: Debug + Send + Sync {
    /// First byte.
    fn ptr(&self) -> NonNull<u8>;
    /// Bytes.
    fn len(&self) -> usize;
    /// Never true.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// First byte as posters address it.
    fn device_address(&self) -> u64 {
        self.ptr().as_ptr() as u64
    }
}

// SAFETY: regions are whole mappings, unmapped when the last reference goes.
unsafe impl SharedMemory for Region {
    fn ptr(&self) -> NonNull<u8> {
        self.as_ptr()
    }

    fn len(&self) -> usize {
        Self::len(self)
    }
}

/// The lanes of one peer.
#[derive(Debug, Clone)]
pub struct Lanes {
    memory: Arc<dyn SharedMemory>,
    config: LaneConfig,
}

impl LaneConfig {
    /// Bytes that lanes of this size take.
    ///
    /// # Errors
    /// [`LaneError::Config`].
    pub fn bytes(&self) -> Result<usize, LaneError> {
        let check = |what, found: u32, is_good: bool, expected| {
            if is_good {
                Ok(())
            } else {
                Err(LaneError::Config { what, found: found.into(), expected })
            }
        };
        let Self { num_lanes, depth, budget } = *self;
        check("num_lanes", num_lanes, (1..=MAX_LANES).contains(&num_lanes), "1 to 256")?;
        let is_depth = depth.is_power_of_two() && (MIN_DEPTH..=MAX_DEPTH).contains(&depth);
        check("depth", depth, is_depth, "a power of two from 16 to 65536")?;
        check("budget", budget, (2..=depth).contains(&budget), "2 to the depth")?;
        Ok(num_lanes as usize * self.stride())
    }

    const fn stride(&self) -> usize {
        size_of::<LaneWords>() + self.depth as usize * size_of::<RawCommand>()
    }
}

impl Lanes {
    /// Lanes in fresh memory of this process.
    ///
    /// # Errors
    /// [`LaneError`].
    pub fn anonymous(config: LaneConfig) -> Result<Self, LaneError> {
        let memory = Region::anonymous(config.bytes()?)?;
        Self::new(Arc::new(memory), config)
    }

    /// Lanes in memory that was zeroed before its first use.
    ///
    /// # Errors
    /// [`LaneError::Config`], also when the memory is too small.
    pub fn new(memory: Arc<dyn SharedMemory>, config: LaneConfig) -> Result<Self, LaneError> {
        if memory.len() < config.bytes()? {
            let (what, found) = ("bytes of memory for lanes", memory.len() as u64);
            return Err(LaneError::Config { what, found, expected: "LaneConfig::bytes" });
        }
        Ok(Self { memory, config })
    }

    /// Their size.
    #[must_use]
    pub const fn config(&self) -> LaneConfig {
        self.config
    }

    /// Handle of a lane for posters in C++; `state` is the address of a zeroed
    /// [`LaneState`](crate::abi::LaneState).
    #[must_use]
    pub fn handle(&self, lane: u32, state: u64) -> LaneHandle {
        let words = self.memory.device_address() + self.offset(lane) as u64;
        LaneHandle {
            commands: words + size_of::<LaneWords>() as u64,
            words,
            state,
            depth_shift: self.config.depth.trailing_zeros(),
            budget: self.config.budget,
        }
    }

    /// The posting end of a lane, for one thread of this process. It must be the lane's only poster.
    #[must_use]
    pub fn poster(&self, lane: u32) -> Poster {
        Poster { cells: self.cells(lane), next: 0, seen: 0, budget: self.config.budget.into() }
    }

    /// Returns the taking end of a lane, for one thread of this process. A lane that a [`Proxy`](crate::Proxy)
    /// serves must have no other taker.
    #[must_use]
    pub fn reader(&self, lane: u32) -> Reader {
        Reader { cells: self.cells(lane), next: 0 }
    }

    fn cells(&self, lane: u32) -> Cells {
        // SAFETY: `new` checked that the memory holds all lanes; `offset` stays below their number.
        let words = unsafe { self.memory.ptr().add(self.offset(lane)) };
        Cells {
            words: words.cast(),
            depth_shift: self.config.depth.trailing_zeros(),
            _memory: Arc::clone(&self.memory),
        }
    }

    fn offset(&self, lane: u32) -> usize {
        (lane % self.config.num_lanes) as usize * self.config.stride()
    }
}

/// A lane's memory.
#[derive(Debug)]
struct Cells {
    words: NonNull<AtomicU64>,
    depth_shift: u32,
    _memory: Arc<dyn SharedMemory>,
}

// SAFETY: the memory has no thread affinity and is reached through atomics only.
unsafe impl Send for Cells {}

impl Cells {
    fn word(&self, idx: usize) -> &AtomicU64 {
        // SAFETY: callers stay below the words of one lane; `Lanes::new` checked that they exist. They are
        // aligned, since lanes begin on multiples of 16 bytes.
        unsafe { self.words.add(idx).as_ref() }
    }

    fn completed(&self) -> &AtomicU64 {
        self.word(0)
    }

    fn error(&self) -> &AtomicU64 {
        self.word(1)
    }

    fn cell(&self, index: u64) -> (&AtomicU64, &AtomicU64) {
        let cell = index as usize & ((1 << self.depth_shift) - 1);
        let first = size_of::<LaneWords>() / 8 + 2 * cell;
        (self.word(first), self.word(first + 1))
    }
}

/// The orderings of a lane. Only tests have another implementation than [`Contract`].
pub trait Discipline {
    /// Order of the stores of a command's halves.
    const POST: Ordering;
    /// Order of the loads of a command's halves.
    const TAKE: Ordering;
    /// Order of the store of `completed`.
    const RECYCLE: Ordering;
    /// Order of the load of `completed`.
    const REUSE: Ordering;
}

/// The orders that the memory model demands.
#[derive(Debug, Clone, Copy)]
pub struct Contract;

impl Discipline for Contract {
    const POST: Ordering = Ordering::Release;
    const TAKE: Ordering = Ordering::Acquire;
    const RECYCLE: Ordering = Ordering::Release;
    const REUSE: Ordering = Ordering::Acquire;
}

/// SYNC POINT `command`, posting end: releases this thread's earlier stores to the thread that takes the command.
#[inline]
pub fn write_cell<D: Discipline>((first, second): (&impl Word, &impl Word), raw: RawCommand) {
    first.store(raw.first, D::POST);
    second.store(raw.second, D::POST);
}

/// SYNC POINT `command`, taking end: the command that is due in a cell, if it is there.
///
/// # Errors
/// [`BadCommand`].
#[inline]
pub fn read_cell<D: Discipline>(
    (first, second): (&impl Word, &impl Word),
    lap: u8,
) -> Result<Option<Command>, BadCommand> {
    let first = first.load(D::TAKE);
    decode_cell(RawCommand { first, second: second.load(D::TAKE) }, lap)
}

/// SYNC POINT `recycled`, taking end: returns the cells and sources of all commands before `number`.
#[inline]
pub fn recycle<D: Discipline>(completed: &impl Word, number: u64) {
    completed.store(number, D::RECYCLE);
}

/// SYNC POINT `recycled`, posting end: commands that are over.
#[inline]
pub fn reusable<D: Discipline>(completed: &impl Word) -> u64 {
    completed.load(D::REUSE)
}

/// The taking end of a lane.
#[derive(Debug)]
pub struct Reader {
    cells: Cells,
    next: u64,
}

impl Reader {
    /// Number of the due command.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// Returns the due command, without waiting. It stays due until [`advance`](Self::advance).
    ///
    /// # Errors
    /// [`BadCommand`] if the cell holds no valid command.
    #[inline]
    pub fn peek(&self) -> Result<Option<Command>, BadCommand> {
        let lap = lap_of(self.next, self.cells.depth_shift);
        read_cell::<Contract>(self.cells.cell(self.next), lap)
    }

    /// Opcode bits of the due cell, for reports.
    pub(crate) fn opcode_bits(&self) -> u8 {
        let first = self.cells.cell(self.next).0.load(Ordering::Relaxed);
        (first >> crate::abi::OPCODE_SHIFT & 0xf) as u8
    }

    /// Makes the next command due.
    #[inline]
    pub const fn advance(&mut self) {
        self.next += 1;
    }

    /// Gives the cells and sources of all commands before `number` back to the poster.
    #[inline]
    pub fn recycle(&self, number: u64) {
        recycle::<Contract>(self.cells.completed(), number);
    }

    /// Takes the lane out of service permanently. The first reason stays.
    pub(crate) fn fail(&self, word: u64) {
        let error = self.cells.error();
        let _ = error.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed);
    }
}

/// The posting end of a lane in this process.
#[derive(Debug)]
pub struct Poster {
    cells: Cells,
    next: u64,
    seen: u64,
    budget: u64,
}

impl Poster {
    /// Posts a command if the budget allows. Returns the number that [`completed`](Self::completed) reaches when
    /// it is over. Does not block.
    #[inline]
    pub fn try_post(&mut self, command: &Command) -> Option<u64> {
        if self.next - self.seen >= self.budget && self.next - self.completed() >= self.budget {
            return None;
        }
        let lap = lap_of(self.next, self.cells.depth_shift);
        write_cell::<Contract>(self.cells.cell(self.next), command.encode(lap));
        self.next += 1;
        Some(self.next)
    }

    /// Limit of commands under way.
    pub(crate) const fn budget(&self) -> u64 {
        self.budget
    }

    /// Number of commands that can be posted at this time.
    pub(crate) fn num_free(&mut self) -> u64 {
        self.budget.saturating_sub(self.next - self.completed())
    }

    /// Commands that are over.
    #[inline]
    pub fn completed(&mut self) -> u64 {
        // Never beyond the posted commands, whatever the word says.
        self.seen = reusable::<Contract>(self.cells.completed()).clamp(self.seen, self.next);
        self.seen
    }

    /// Commands posted.
    #[must_use]
    pub const fn posted(&self) -> u64 {
        self.next
    }

    /// Reason why the lane is out of service: `sy_proxy_lane_words.error`, 0 while it is in service.
    #[must_use]
    pub fn error(&self) -> u64 {
        self.cells.error().load(Ordering::Acquire)
    }

    /// Writes a cell without any check: for tests of the other end.
    #[doc(hidden)]
    pub fn post_raw(&mut self, raw: RawCommand) {
        write_cell::<Contract>(self.cells.cell(self.next), raw);
        self.next += 1;
    }
}
