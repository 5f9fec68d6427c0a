//! The receiving end of a relay: copies tasks out of the slot, checks them, carries them out and
//! counts them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p_core::endpoint::Transport;
use p2p_core::flags::{self, Contract};
use p2p_core::region::{RemoteRange, SlotKey};
use p2p_core::slot::{CONSUMED, CONTROL_BYTES, PUBLISHED};
use p2p_core::wait::Driver;
use p2p_core::{PostError, Region};
use thiserror::Error;

use super::{
    ADD, COPY, Copier, CopyError, CopyTask, FENCE, Layout, MAX_BATCH, RelayConfig, RelayError,
    TASK_BYTES, Task, WordTask,
};
use crate::memory;

/// The receiver has failed. Close the connection.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RelayReceiverError {
    /// The sender's task is invalid.
    #[error("task {number} of the sender: {what} is {found}, expected {expected}")]
    Task {
        /// Number of the task, from 1.
        number: u64,
        /// Name of the field.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The values that are allowed.
        expected: String,
    },
    /// The sender published more tasks than the ring holds, or a lower number than before.
    #[error("the sender says {published} tasks, {taken} were taken of a ring of {num_tasks}")]
    Desync {
        /// Tasks published.
        published: u64,
        /// Tasks taken.
        taken: u64,
        /// Tasks of the ring.
        num_tasks: u64,
    },
    /// The copies failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The finished tasks could not be acknowledged.
    #[error("the finished tasks cannot be acknowledged: {0}")]
    Post(#[from] PostError),
    /// An earlier turn failed.
    #[error(
        "the relay ended with an error after {taken} tasks: make a new one with a new connection"
    )]
    Ended {
        /// Tasks taken before it.
        taken: u64,
    },
}

/// The receiving end. Its owner calls [`turn`](Self::turn) repeatedly.
#[derive(Debug)]
pub struct RelayReceiver<E, C> {
    endpoint: E,
    driver: Option<Arc<dyn Driver>>,
    copier: C,
    slot: Region,
    layout: Layout,
    targets: Vec<u64>,
    taken: u64,
    /// Tasks of the running batch.
    num_under_way: u64,
    /// Time since which there has been no room to acknowledge a batch.
    blocked_since: Option<Instant>,
    has_ended: bool,
    copies: Vec<CopyTask>,
    words: Vec<WordTask>,
}

impl<E: Transport<RemoteKey = SlotKey>, C: Copier> RelayReceiver<E, C> {
    /// Over this side's slot of a pair, and the endpoint towards the sender's.
    ///
    /// # Errors
    /// [`RelayError::Config`], also if the copier's targets are not those of `config`.
    pub fn new(
        config: &RelayConfig,
        endpoint: E,
        slot: Region,
        copier: C,
    ) -> Result<Self, RelayError> {
        let layout = config.layout(slot.len())?;
        let targets = copier.targets();
        if targets != config.targets {
            let (what, found) = ("number of targets of the copier", targets.len() as u64);
            let expected = format!("targets of {:?} bytes", config.targets);
            return Err(RelayError::Config { what, found, expected });
        }
        Ok(Self {
            driver: endpoint.driver(),
            endpoint,
            copier,
            slot,
            layout,
            targets,
            taken: 0,
            num_under_way: 0,
            blocked_since: None,
            has_ended: false,
            copies: Vec::with_capacity(MAX_BATCH),
            words: Vec::with_capacity(MAX_BATCH),
        })
    }

    /// The endpoint towards the sender.
    pub const fn endpoint(&self) -> &E {
        &self.endpoint
    }

    /// Tasks carried out.
    #[must_use]
    pub const fn num_done(&self) -> u64 {
        self.taken - self.num_under_way
    }

    /// Drives the transport, acknowledges finished tasks, and starts tasks that have arrived.
    /// Returns true if it did anything or if a batch is running. Does not wait.
    ///
    /// # Errors
    /// [`RelayReceiverError`]; later turns neither carry out nor acknowledge anything.
    pub fn turn(&mut self) -> Result<bool, RelayReceiverError> {
        if self.has_ended {
            return Err(RelayReceiverError::Ended { taken: self.taken });
        }
        let turn = self.try_turn();
        self.has_ended = turn.is_err();
        turn
    }

    fn try_turn(&mut self) -> Result<bool, RelayReceiverError> {
        if let Some(driver) = &self.driver {
            driver.drive();
        }
        if self.num_under_way > 0 {
            if !self.copier.is_done()? {
                return Ok(true);
            }
            if !self.endpoint.has_room()
                && self.blocked_since.get_or_insert_with(Instant::now).elapsed() < ROOM_LIMIT
            {
                return Ok(true);
            }
            // If there is still no room, the endpoint waits and fails within its own limit.
            self.blocked_since = None;
            let offset = self.slot.len() - CONTROL_BYTES + CONSUMED;
            let num = std::mem::take(&mut self.num_under_way);
            self.endpoint.add_flag(RemoteRange { key: SlotKey, offset, len: 8 }, num)?;
        }
        let published = memory::word(&self.slot, self.layout.control + PUBLISHED)
            .map_or(self.taken, flags::observe::<Contract>);
        let (taken, num_tasks) = (self.taken, self.layout.num_tasks);
        let num_ready = published.checked_sub(taken).filter(|ready| *ready <= num_tasks);
        let Some(num_ready) = num_ready else {
            return Err(RelayReceiverError::Desync { published, taken, num_tasks });
        };
        if num_ready == 0 {
            return Ok(false);
        }
        self.copies.clear();
        self.words.clear();
        let mut num_tasks = num_ready.min(MAX_BATCH as u64);
        for idx in 0..num_tasks {
            // Within a batch, the only order is that words follow copies. So a fence ends a batch.
            if self.check(taken + idx)? {
                num_tasks = idx + 1;
                break;
            }
        }
        // Copies first: an add to a word follows all earlier puts, and puts have no order.
        self.copier.submit(&self.copies, &self.words)?;
        // Counted only once all of them have started.
        (self.taken, self.num_under_way) = (taken + num_tasks, num_tasks);
        Ok(true)
    }

    /// Adds the task after `before` others to the batch. Returns true if it is a fence, and so the
    /// last.
    fn check(&mut self, before: u64) -> Result<bool, RelayReceiverError> {
        let mut bytes = [0; TASK_BYTES];
        let number = before + 1;
        let bad = |what, found, expected: String| {
            Err(RelayReceiverError::Task { number, what, found, expected })
        };
        let place = self.layout.task(before);
        if memory::read(&self.slot, place, &mut bytes).is_err() {
            return bad("its place", place as u64, "in the slot".to_owned());
        }
        let task: Task = bytemuck::pod_read_unaligned(&bytes);
        if task.number != number {
            return bad("its number", task.number, number.to_string());
        }
        let target = usize::from(task.window).wrapping_sub(1);
        let Some(target_bytes) = self.targets.get(target).copied() else {
            let expected = format!("1 to {}", self.targets.len());
            return bad("the window", task.window.into(), expected);
        };
        let num_bytes = u64::from(task.num_bytes);
        if task.offset.checked_add(num_bytes).is_none_or(|end| end > target_bytes) {
            let expected = format!("at most {target_bytes} with its {num_bytes} bytes");
            return bad("the offset", task.offset, expected);
        }
        match task.kind {
            COPY => {
                let staging = self.layout.staging_bytes;
                if task.value.checked_add(num_bytes).is_none_or(|end| end > staging) {
                    let expected = format!("at most {staging} with its {num_bytes} bytes");
                    return bad("the offset in staging", task.value, expected);
                }
                let source_offset = self.layout.staging as u64 + task.value;
                let target_offset = task.offset;
                if num_bytes > 0 {
                    self.copies.push(CopyTask { target, source_offset, target_offset, num_bytes });
                }
            }
            ADD if num_bytes == 8 && task.offset.is_multiple_of(8) => {
                let (target_offset, value) = (task.offset, task.value);
                // Each word costs a launch on a GPU, and readers see only sums.
                let is_same =
                    |w: &&mut WordTask| w.target == target && w.target_offset == target_offset;
                match self.words.iter_mut().find(is_same) {
                    Some(word) => word.value = word.value.wrapping_add(value),
                    None => self.words.push(WordTask { target, target_offset, value }),
                }
            }
            ADD => return bad("the word's offset", task.offset, "a multiple of 8".to_owned()),
            FENCE if num_bytes > 0 => {
                return bad("the length of a fence", num_bytes, "0".to_owned());
            }
            FENCE => return Ok(true),
            kind => return bad("the kind", kind.into(), "1 to 3".to_owned()),
        }
        Ok(false)
    }
}

/// How long a batch waits for room before its acknowledgement is posted without room.
const ROOM_LIMIT: Duration = Duration::from_secs(3);
