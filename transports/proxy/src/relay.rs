//! Memory of further GPUs behind a peer. Bytes for it travel to the peer's slot. A receiver there
//! forwards them, over NVLink if the copier is a kernel.
//!
//! ```text
//! slot: | window 0 | staging, a ring of bytes | tasks, a ring of 32 bytes each | control tail |
//! ```
//!
//! The sending thread puts the payload into staging, then a task with the payload's target, and
//! adds to `PUBLISHED`. The receiver copies, then adds to the sender's `CONSUMED`. Only then are a
//! command and its bytes in staging finished: the receiver acknowledges the copy, not the arrival.

mod copier;
mod receiver;

use std::collections::VecDeque;

use bytemuck::{Pod, Zeroable};
use p2p_core::endpoint::Transport;
use p2p_core::endpoint::checks::out_of_range;
use p2p_core::flags::{self, Contract};
use p2p_core::region::{LocalRange, MapError, RemoteRange, SlotKey};
use p2p_core::slot::{CONSUMED, CONTROL_BYTES, PUBLISHED};
use p2p_core::{PostError, Region};
use thiserror::Error;

pub use copier::{Copier, CopyError, CopyTask, GpuCopier, GpuTarget, HostCopier, WordTask};
pub use receiver::{RelayReceiver, RelayReceiverError};

use crate::command::Opcode;
use crate::failure::Cause;
use crate::memory;

/// Division of a slot. Both sides of a pair use the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayConfig {
    /// Bytes of window 0, which the peer itself receives. A multiple of 64.
    pub direct_bytes: u64,
    /// Bytes of staging. A multiple of 64. A put of more than half of it is split into pieces.
    pub staging_bytes: u64,
    /// Maximum number of unfinished tasks, a power of two.
    pub num_tasks: u32,
    /// Bytes of memory of each further GPU, as windows 1, 2, ….
    pub targets: Vec<u64>,
}

/// A relay cannot be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The configuration is invalid.
    #[error("{what} is {found}: expected {expected}")]
    Config {
        /// Name of the setting.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The values that are allowed.
        expected: String,
    },
    /// The memory could not be allocated.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The transport could not register the memory of the tasks.
    #[error(transparent)]
    Register(#[from] PostError),
}

/// `kind` of a task.
const COPY: u16 = 1;
const ADD: u16 = 2;
/// All tasks before it finish before a task behind it starts.
const FENCE: u16 = 3;

/// One task of the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Task {
    kind: u16,
    window: u16,
    num_bytes: u32,
    offset: u64,
    /// Offset in staging, or the value of a word.
    value: u64,
    /// Number of the task, which tells it from one of an earlier lap.
    number: u64,
}

const _: () = assert!(size_of::<Task>() == TASK_BYTES);
const TASK_BYTES: usize = 32;
/// Maximum number of tasks in a batch.
const MAX_BATCH: usize = 64;

impl RelayConfig {
    /// Computes the offsets in a slot of `slot_bytes`.
    fn layout(&self, slot_bytes: usize) -> Result<Layout, RelayError> {
        let bad = |what, found, expected: String| Err(RelayError::Config { what, found, expected });
        let Self { direct_bytes, staging_bytes, num_tasks, targets } = self;
        if targets.is_empty() || targets.len() > 255 {
            return bad("number of targets", targets.len() as u64, "1 to 255".to_owned());
        }
        if !num_tasks.is_power_of_two() || *num_tasks > 65_536 {
            let expected = "a power of two up to 65536".to_owned();
            return bad("num_tasks", (*num_tasks).into(), expected);
        }
        if let Some(bytes) = targets.iter().find(|bytes| **bytes > 1 << 32) {
            return bad("bytes of a target", *bytes, "at most 4 GiB".to_owned());
        }
        for (what, bytes) in [("direct_bytes", direct_bytes), ("staging_bytes", staging_bytes)] {
            if bytes % 64 != 0 || *bytes > 1 << 32 {
                return bad(what, *bytes, "a multiple of 64 up to 4 GiB".to_owned());
            }
        }
        let tasks = direct_bytes + staging_bytes;
        let end = tasks + u64::from(*num_tasks) * TASK_BYTES as u64 + CONTROL_BYTES as u64;
        if end > slot_bytes as u64 || *staging_bytes == 0 {
            let expected = format!("at least {end} for this relay, with staging");
            return bad("bytes of the slot", slot_bytes as u64, expected);
        }
        Ok(Layout {
            staging: *direct_bytes as usize,
            staging_bytes: *staging_bytes,
            tasks: tasks as usize,
            num_tasks: u64::from(*num_tasks),
            control: slot_bytes - CONTROL_BYTES,
        })
    }
}

/// Offsets in a slot.
#[derive(Debug, Clone, Copy)]
struct Layout {
    staging: usize,
    staging_bytes: u64,
    tasks: usize,
    num_tasks: u64,
    control: usize,
}

impl Layout {
    const fn task(&self, number: u64) -> usize {
        self.tasks + (number % self.num_tasks) as usize * TASK_BYTES
    }
}

/// Outcome of giving the relay an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RelayStatus {
    Accepted,
    /// There is no room. Retry later.
    Full,
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct RelaySender {
    layout: Layout,
    targets: Vec<u64>,
    /// The words that signals and adds have set, by target and offset / 8.
    words: Vec<Box<[u64]>>,
    /// This side's slot, where the receiver counts.
    slot: Region,
    /// Source of the tasks.
    tasks: Region,
    issued: u64,
    published: u64,
    done: u64,
    /// Bytes of staging allocated and freed, since the beginning.
    head: u64,
    tail: u64,
    /// For each piece in staging, the number of the next task and the value of `head` after it.
    pieces: VecDeque<(u64, u64)>,
}

impl RelaySender {
    /// Called before the port is made. [`Self::tasks`] must be registered with the endpoint.
    pub(crate) fn new(
        config: &RelayConfig,
        slot: Region,
        slot_bytes: usize,
    ) -> Result<Self, RelayError> {
        let layout = config.layout(slot_bytes)?;
        if slot.len() < layout.control + CONTROL_BYTES {
            let (what, found) = ("bytes of the own slot", slot.len() as u64);
            return Err(RelayError::Config { what, found, expected: slot_bytes.to_string() });
        }
        // Zeroed pages, which cost nothing until a word on them is set.
        let words = |bytes: &u64| vec![0; bytes.div_ceil(8) as usize].into_boxed_slice();
        Ok(Self {
            layout,
            targets: config.targets.clone(),
            words: config.targets.iter().map(words).collect(),
            slot,
            tasks: Region::anonymous(config.num_tasks as usize * TASK_BYTES)?,
            issued: 0,
            published: 0,
            done: 0,
            head: 0,
            tail: 0,
            pieces: VecDeque::with_capacity(config.num_tasks as usize),
        })
    }

    pub(crate) const fn tasks(&self) -> &Region {
        &self.tasks
    }

    pub(crate) const fn num_targets(&self) -> usize {
        self.targets.len()
    }

    pub(crate) fn target_bytes(&self, window: u8) -> u64 {
        self.targets.get(usize::from(window) - 1).copied().unwrap_or(0)
    }

    /// Tasks given to the receiver.
    pub(crate) const fn issued(&self) -> u64 {
        self.issued
    }

    /// Finished tasks, as of the last poll.
    pub(crate) const fn done(&self) -> u64 {
        self.done
    }

    /// Puts `src` where the receiver forwards it from, in as many pieces as staging needs. `begun` counts the
    /// bytes that were put: while there is no room for more, it is to be called again with it.
    pub(crate) fn put<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        endpoint: &mut E,
        window: u8,
        offset: u32,
        src: &LocalRange,
        begun: &mut u32,
    ) -> Result<RelayStatus, Cause> {
        loop {
            // A piece of this size always fits, wherever the ring ends.
            let most = self.layout.staging_bytes as usize / 2;
            let begin = *begun as usize;
            let len = src.len().saturating_sub(begin).min(most);
            let Some(piece) = src.sub(begin, len) else { return Ok(RelayStatus::Accepted) };
            if self.put_piece(endpoint, window, offset + *begun, piece)? == RelayStatus::Full {
                return Ok(RelayStatus::Full);
            }
            *begun += len as u32;
            if *begun as usize >= src.len() {
                return Ok(RelayStatus::Accepted);
            }
        }
    }

    fn put_piece<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        endpoint: &mut E,
        window: u8,
        offset: u32,
        src: LocalRange,
    ) -> Result<RelayStatus, Cause> {
        let num_bytes = src.len() as u64;
        let bytes = self.layout.staging_bytes;
        // A piece is contiguous: a rest of the ring that is too short is skipped.
        let (at, room) = (self.head % bytes, num_bytes.next_multiple_of(16));
        let skipped = if at + room > bytes { bytes - at } else { 0 };
        let head = self.head + skipped + room;
        if head - self.tail > bytes || self.is_full() || !endpoint.has_room() {
            return Ok(RelayStatus::Full);
        }
        let at = (self.head + skipped) % bytes;
        let dst = self.layout.staging + at as usize;
        let dst = RemoteRange { key: SlotKey, offset: dst, len: src.len() };
        let post = |source| Cause::Post { opcode: Opcode::Put, source };
        // SAFETY: as for a put to window 0: the command is not finished before the endpoint is
        // settled.
        unsafe { endpoint.put(dst, src) }.map_err(post)?;
        self.head = head;
        let task = Task {
            kind: COPY,
            window: u16::from(window),
            num_bytes: num_bytes as u32,
            offset: u64::from(offset),
            value: at,
            number: 0,
        };
        self.give(endpoint, task).map_err(post)?;
        self.pieces.push_back((self.issued, head));
        Ok(RelayStatus::Accepted)
    }

    /// Adds to a word, or sets it, after what was put there before.
    pub(crate) fn word<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        endpoint: &mut E,
        window: u8,
        offset: u32,
        is_add: bool,
        value: u64,
    ) -> Result<RelayStatus, Cause> {
        if self.is_full() {
            return Ok(RelayStatus::Full);
        }
        let opcode = if is_add { Opcode::Add } else { Opcode::Signal };
        let words = &mut self.words[usize::from(window) - 1];
        let last = &mut words[offset as usize / 8];
        let (value, new) = if is_add {
            (value, last.wrapping_add(value))
        } else {
            (value.wrapping_sub(*last), value)
        };
        *last = new;
        let (window, offset) = (u16::from(window), u64::from(offset));
        let task = Task { kind: ADD, window, num_bytes: 8, offset, value, number: 0 };
        self.give(endpoint, task).map_err(|source| Cause::Post { opcode, source })?;
        Ok(RelayStatus::Accepted)
    }

    /// Has the receiver finish everything given to it before it begins with what comes then.
    pub(crate) fn fence<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        endpoint: &mut E,
        window: u8,
    ) -> Result<RelayStatus, Cause> {
        if self.is_full() {
            return Ok(RelayStatus::Full);
        }
        let window = u16::from(window);
        let task = Task { kind: FENCE, window, num_bytes: 0, offset: 0, value: 0, number: 0 };
        let post = |source| Cause::Post { opcode: Opcode::Fence, source };
        self.give(endpoint, task).map_err(post)?;
        Ok(RelayStatus::Accepted)
    }

    /// True if the receiver was not notified of the latest tasks.
    pub(crate) const fn has_unpublished(&self) -> bool {
        self.issued > self.published
    }

    /// Tells the receiver of everything given to it, unless there is no room for that.
    pub(crate) fn publish<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        endpoint: &mut E,
    ) -> Result<(), PostError> {
        let num = self.issued - self.published;
        // Without the notification, the tasks stay unfinished and the next turn retries.
        if num == 0 || !endpoint.has_room() {
            return Ok(());
        }
        self.published = self.issued;
        let offset = self.layout.control + PUBLISHED;
        endpoint.add_flag(RemoteRange { key: SlotKey, offset, len: 8 }, num)?;
        let waiting_offset = self.layout.control + p2p_core::slot::WAITING;
        endpoint.wake(SlotKey, waiting_offset)
    }

    /// Reads the number of finished tasks.
    pub(crate) fn poll_done(&mut self) -> Result<u64, Cause> {
        // The slot was checked to be long enough.
        let word = memory::word(&self.slot, self.layout.control + CONSUMED);
        let done = word.map_or(self.done, flags::observe::<Contract>);
        if done > self.issued || done < self.done {
            return Err(Cause::Relay { done, issued: self.issued });
        }
        self.done = done;
        while let Some((_, head)) = self.pieces.front().filter(|(task, _)| *task <= done) {
            self.tail = *head;
            self.pieces.pop_front();
        }
        Ok(done)
    }

    fn is_full(&self) -> bool {
        self.issued - self.done >= self.layout.num_tasks
    }

    fn give<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        endpoint: &mut E,
        mut task: Task,
    ) -> Result<(), PostError> {
        task.number = self.issued + 1;
        let at = self.layout.task(self.issued);
        let local = at - self.layout.tasks;
        let written = memory::write(&self.tasks, local, bytemuck::bytes_of(&task));
        let range = self.tasks.range(local, TASK_BYTES);
        let (Ok(()), Some(range)) = (written, range) else {
            return Err(out_of_range("task", local, TASK_BYTES, self.tasks.len()));
        };
        let dst = RemoteRange { key: SlotKey, offset: at, len: TASK_BYTES };
        // SAFETY: the cell is written again only after the receiver has finished this task. It
        // learns of the task behind the put.
        unsafe { endpoint.put(dst, range)? };
        self.issued += 1;
        Ok(())
    }
}
