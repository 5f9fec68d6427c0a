//! Posting on a queue pair from Rust, by one thread.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use thiserror::Error;

use super::HostQueue;
use crate::format::{
    BLOCK_BYTES, CE_ALWAYS, CQE_BYTES, Cqe, CqeKind, Operation, Syndrome, Wqe, doorbell_word,
};
use crate::memory::Part;
use crate::nic::{ControlError, place};

/// A request could not be posted, or completed with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum QueueError {
    /// No room became free before the deadline.
    #[error("queue pair {qpn:#x}: {outstanding} blocks are outstanding at the deadline")]
    Deadline { qpn: u32, outstanding: u64 },
    /// The NIC completed a request with an error; the queue pair must be reset.
    #[error("queue pair {qpn:#x}: the request at index {counter:#06x} failed: {syndrome:?} ({code:#04x})", code = *syndrome as u8)]
    Completion {
        qpn: u32,
        /// Index of the request.
        counter: u16,
        syndrome: Syndrome,
    },
    /// An invalid completion.
    #[error("queue pair {qpn:#x}: a completion cannot be read")]
    Garbled { qpn: u32 },
    /// The request has more blocks than the limit for one request.
    #[error("queue pair {qpn:#x}: a request of {num_blocks} blocks, at most {max} are allowed")]
    TooLarge { qpn: u32, num_blocks: u64, max: u64 },
}

/// Posts on a queue from one thread. The queue must have ordinary completions and no other user.
#[derive(Debug)]
pub struct Poster {
    queue: HostQueue,
    sq: Part,
    cq: Part,
    words: Part,
    recv_cq: Part,
    posted: u64,
    completed: u64,
    cq_index: u64,
    recv_index: u64,
    num_receives: u32,
    error: Option<QueueError>,
}

impl Poster {
    /// Takes ownership of a queue.
    ///
    /// # Errors
    /// [`ControlError::Depth`] when its completions are collapsed.
    pub fn new(queue: HostQueue) -> Result<Self, ControlError> {
        let depth = queue.handle.cq_depth;
        if queue.sizes.is_collapsed {
            let (min, max) = (queue.sizes.sq_depth, queue.sizes.sq_depth);
            let what = "a completion queue for posting from Rust";
            return Err(ControlError::Depth { what, found: depth, min, max });
        }
        let region = queue.memory.region();
        let layout = queue.layout;
        let recv_bytes = layout.dbrec - layout.recv_cq;
        Ok(Self {
            sq: place("send queue", region, 0, layout.cq, 64)?,
            cq: place("completions", region, layout.cq, depth as usize * CQE_BYTES, 64)?,
            words: place("doorbells", region, layout.dbrec, layout.state - layout.dbrec, 64)?,
            recv_cq: place("completions", region, layout.recv_cq, recv_bytes, 64)?,
            queue,
            posted: 0,
            completed: 0,
            cq_index: 0,
            recv_index: 0,
            num_receives: 0,
            error: None,
        })
    }

    /// The queue.
    #[must_use]
    pub const fn queue(&self) -> &HostQueue {
        &self.queue
    }

    /// Returns the queue.
    #[must_use]
    pub fn into_queue(self) -> HostQueue {
        self.queue
    }

    /// Discards all posted requests, after the queue was reset.
    pub fn forget(&mut self) {
        (self.posted, self.completed, self.cq_index) = (0, 0, 0);
        (self.recv_index, self.num_receives) = (0, 0);
        self.error = None;
    }

    /// Blocks posted so far.
    #[must_use]
    pub const fn posted(&self) -> u64 {
        self.posted
    }

    /// Polls the completion queue. Returns the number of blocks complete so far.
    ///
    /// # Errors
    /// [`QueueError`]; after the first failed completion every call fails.
    pub fn poll(&mut self) -> Result<u64, QueueError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let qpn = self.queue.qpn();
        let begin = self.cq_index;
        while let Some(bytes) = take_cqe(&self.cq, self.cq_index) {
            let error = match Cqe::decode(&bytes) {
                None => QueueError::Garbled { qpn },
                Some((Cqe { status: Err(syndrome), counter, .. }, _)) => {
                    QueueError::Completion { qpn, counter, syndrome }
                }
                Some((Cqe { status: Ok(CqeKind::WriteImm(_)), .. }, _)) => {
                    QueueError::Garbled { qpn }
                }
                Some((cqe, _)) => {
                    let end = cqe.counter.wrapping_add(1);
                    self.completed += u64::from(end.wrapping_sub(self.completed as u16));
                    self.cq_index += 1;
                    continue;
                }
            };
            self.error = Some(error);
            return Err(error);
        }
        if self.cq_index != begin {
            let consumed = (self.cq_index & 0xff_ffff) as u32;
            self.store32(self.queue.layout.cq_dbrec, consumed.to_be());
        }
        Ok(self.completed)
    }

    /// Posts a request of one block, signalled, and rings the doorbell. `drive` is called while there
    /// is no room.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn post(
        &mut self,
        operation: Operation,
        flags: u8,
        deadline: Instant,
        mut drive: impl FnMut(),
    ) -> Result<(), QueueError> {
        let qpn = self.queue.qpn();
        let flags = flags | CE_ALWAYS;
        let wqe = Wqe { qpn, index: self.posted as u16, flags, operation };
        let bytes = wqe.encode();
        if bytes.len() != BLOCK_BYTES {
            let num_blocks = (bytes.len() / BLOCK_BYTES) as u64;
            return Err(QueueError::TooLarge { qpn, num_blocks, max: 1 });
        }
        let depth = u64::from(self.queue.handle.sq_depth);
        while self.poll()? + depth < self.posted + 1 {
            if Instant::now() >= deadline {
                let outstanding = self.posted - self.completed;
                return Err(QueueError::Deadline { qpn, outstanding });
            }
            drive();
        }
        let slot = (self.posted % depth) as usize * BLOCK_BYTES;
        for (i, word) in bytes.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes(std::array::from_fn(|at| word[at]));
            if let Some(target) = self.sq.word64(slot + i * 8) {
                target.store(value, Ordering::Relaxed);
            }
        }
        self.posted += 1;
        // SYNC POINT `doorbell`: block, record, register.
        fence(Ordering::Release);
        self.store32(self.queue.layout.dbrec + 4, ((self.posted & 0xffff) as u32).to_be());
        fence(Ordering::Release);
        if let Some(register) = self.word64(self.queue.layout.doorbell) {
            register.store(doorbell_word(qpn, self.posted), Ordering::Release);
        }
        Ok(())
    }

    /// Waits until everything posted is complete.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn quiet(&mut self, deadline: Instant, mut drive: impl FnMut()) -> Result<(), QueueError> {
        while self.poll()? < self.posted {
            if Instant::now() >= deadline {
                let outstanding = self.posted - self.completed;
                return Err(QueueError::Deadline { qpn: self.queue.qpn(), outstanding });
            }
            drive();
        }
        Ok(())
    }

    /// Posts `num` more receives for immediate data.
    pub fn post_receives(&mut self, num: u32) {
        self.num_receives = self.num_receives.wrapping_add(num);
        self.store32(self.queue.layout.dbrec, (self.num_receives & 0xffff).to_be());
    }

    /// The next immediate data that arrived, and the bytes written before it.
    pub fn take_imm(&mut self) -> Option<(u32, u32)> {
        let bytes = take_cqe(&self.recv_cq, self.recv_index)?;
        let (cqe, _) = Cqe::decode(&bytes)?;
        self.recv_index += 1;
        let consumed = (self.recv_index & 0xff_ffff) as u32;
        self.store32(self.queue.layout.recv_cq_dbrec, consumed.to_be());
        match cqe.status {
            Ok(CqeKind::WriteImm(imm)) => Some((imm, cqe.num_bytes)),
            _ => None,
        }
    }

    fn store32(&self, offset: usize, value: u32) {
        if let Some(word) = self.words.word32(offset - self.queue.layout.dbrec) {
            word.store(value, Ordering::Release);
        }
    }

    fn word64(&self, offset: usize) -> Option<&AtomicU64> {
        self.words.word64(offset - self.queue.layout.dbrec)
    }
}

/// The completion at `index` of a ring, if it is there.
///
/// SYNC POINT `completion`: pairs with the NIC's store of its last bytes.
fn take_cqe(ring: &Part, index: u64) -> Option<[u8; CQE_BYTES]> {
    let depth = (ring.len() / CQE_BYTES) as u64;
    let slot = index.checked_rem(depth)? as usize * CQE_BYTES;
    let tail = ring.word64(slot + CQE_BYTES - 8)?.load(Ordering::Acquire);
    let op_own = tail.to_ne_bytes()[7];
    let owner = (index / depth) & 1;
    if op_own >> 4 == 0xf || u64::from(op_own & 1) != owner {
        return None;
    }
    let mut bytes = [0; CQE_BYTES];
    for at in (0..CQE_BYTES - 8).step_by(8) {
        let value = ring.word64(slot + at)?.load(Ordering::Relaxed);
        bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    bytes[CQE_BYTES - 8..].copy_from_slice(&tail.to_ne_bytes());
    Some(bytes)
}
