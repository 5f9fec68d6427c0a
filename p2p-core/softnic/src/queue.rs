//! A queue pair with all its memory, and posting on it from Rust by one thread.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use p2p_core::Region;
use thiserror::Error;

use crate::abi::{CQ_COLLAPSED, QueueHandle, QueueState};
use crate::cq::CqConfig;
use crate::format::{
    BLOCK_BYTES, CE_ALWAYS, CQE_BYTES, CQE_FILL, Cqe, CqeKind, MAX_MESSAGE_BYTES, Operation,
    Syndrome, Wqe, doorbell_word,
};
use crate::memory::{Part, Segment};
use crate::nic::{ControlError, Domain, Nic, QpConfig, place};
use crate::port::{Access, PortAddress};

/// Sizes of a [`HostQueue`].
#[derive(Debug, Clone, Copy)]
pub struct QueueSizes {
    /// Basic blocks, a power of two from 128 to 32768.
    pub sq_depth: u32,
    /// Whether all completions go to one entry.
    pub is_collapsed: bool,
    /// Receives for immediate data, a power of two, or 0.
    pub recv_depth: u32,
    /// Most bytes of one request.
    pub max_message_bytes: u32,
}

impl Default for QueueSizes {
    fn default() -> Self {
        Self {
            sq_depth: 128,
            is_collapsed: false,
            recv_depth: 0,
            max_message_bytes: MAX_MESSAGE_BYTES,
        }
    }
}

/// A queue pair in host memory. The NIC must be told when it goes: [`destroy`](Self::destroy).
#[derive(Debug)]
pub struct HostQueue {
    memory: Segment,
    layout: Layout,
    sizes: QueueSizes,
    handle: QueueHandle,
    send_cq: u32,
    recv_cq: Option<u32>,
}

/// Offsets within the memory of a queue.
#[derive(Debug, Clone, Copy)]
struct Layout {
    cq: usize,
    recv_cq: usize,
    dbrec: usize,
    cq_dbrec: usize,
    recv_cq_dbrec: usize,
    doorbell: usize,
    state: usize,
    scratch: usize,
    bytes: usize,
}

impl HostQueue {
    /// Makes a queue pair of `nic` in reset, with memory of its own.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn create(nic: &mut Nic, domain: Domain, sizes: QueueSizes) -> Result<Self, ControlError> {
        let cq_depth = if sizes.is_collapsed { 1 } else { sizes.sq_depth };
        let layout = Layout::new(sizes, cq_depth);
        let memory = Segment::create(layout.bytes)?;
        let region = memory.region();
        let scratch = nic.register_local(domain, region, Access::LOCAL_WRITE)?;
        let mut cqs = Vec::with_capacity(2);
        let (qpn, send_cq, recv_cq) =
            match Self::make_pair(nic, domain, sizes, region, &layout, &mut cqs) {
                Ok(made) => made,
                Err(error) => {
                    // What was made a moment ago and was never used goes without an error.
                    for cq in cqs {
                        let _ = nic.destroy_cq(cq);
                    }
                    let _ = nic.deregister(scratch.lkey);
                    return Err(error);
                }
            };
        let at = |offset| memory.address(offset);
        let handle = QueueHandle {
            sq: at(0),
            dbrec: at(layout.dbrec),
            doorbell: at(layout.doorbell),
            cq: at(layout.cq),
            cq_dbrec: at(layout.cq_dbrec),
            state: at(layout.state),
            scratch: at(layout.scratch),
            scratch_lkey: scratch.lkey,
            qpn,
            sq_depth: sizes.sq_depth,
            cq_depth,
            flags: if sizes.is_collapsed { CQ_COLLAPSED } else { 0 },
            batch: 128.min(sizes.sq_depth / 4),
            max_message_bytes: sizes.max_message_bytes,
            peer: 0,
        };
        let queue = Self { memory, layout, sizes, handle, send_cq, recv_cq };
        queue.clear();
        Ok(queue)
    }

    /// Makes the completion queues, which are also put into `cqs` one by one, and the queue pair. Gives the
    /// numbers of the pair and of its queues for sends and receives.
    fn make_pair(
        nic: &mut Nic,
        domain: Domain,
        sizes: QueueSizes,
        region: &Region,
        layout: &Layout,
        cqs: &mut Vec<u32>,
    ) -> Result<(u32, u32, Option<u32>), ControlError> {
        let mut make_cq = |nic: &mut Nic, cq_offset, depth, dbrec_offset, is_collapsed| {
            let region = region.clone();
            let ignores_overrun = false;
            let config =
                CqConfig { region, cq_offset, depth, dbrec_offset, is_collapsed, ignores_overrun };
            let cq = nic.create_cq(&config)?;
            cqs.push(cq);
            Ok::<u32, ControlError>(cq)
        };
        let cq_depth = if sizes.is_collapsed { 1 } else { sizes.sq_depth };
        let send_cq = make_cq(nic, layout.cq, cq_depth, layout.cq_dbrec, sizes.is_collapsed)?;
        let recv_cq = match sizes.recv_depth {
            0 => None,
            depth => Some(make_cq(nic, layout.recv_cq, depth, layout.recv_cq_dbrec, false)?),
        };
        let qpn = nic.create_qp(&QpConfig {
            domain,
            region: region.clone(),
            sq_offset: 0,
            sq_depth: sizes.sq_depth,
            dbrec_offset: layout.dbrec,
            doorbell_offset: layout.doorbell,
            doorbell_region: None,
            send_cq,
            recv_cq,
        })?;
        Ok((qpn, send_cq, recv_cq))
    }

    /// Number of the queue pair.
    #[must_use]
    pub const fn qpn(&self) -> u32 {
        self.handle.qpn
    }

    /// What posters are given, valid as long as this value lives.
    #[must_use]
    pub const fn handle(&self) -> &QueueHandle {
        &self.handle
    }

    /// Joins with a queue pair in reset or ready of another NIC, or of this one.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn connect(
        &self,
        nic: &mut Nic,
        peer: PortAddress,
        remote_qpn: u32,
    ) -> Result<(), ControlError> {
        nic.connect(self.qpn(), peer, remote_qpn)
    }

    /// Takes the queue pair back to reset, with all its memory, so that it can be connected again.
    /// Nobody may post meanwhile.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn reset(&self, nic: &mut Nic) -> Result<(), ControlError> {
        nic.reset(self.qpn())?;
        self.clear();
        Ok(())
    }

    /// Takes everything away, also what is left when a part of it fails.
    ///
    /// # Errors
    /// The first [`ControlError`].
    pub fn destroy(self, nic: &mut Nic) -> Result<(), ControlError> {
        let pair = nic.destroy_qp(self.qpn());
        let send = nic.destroy_cq(self.send_cq);
        let receive = self.recv_cq.map_or(Ok(()), |cq| nic.destroy_cq(cq));
        let scratch = nic.deregister(self.handle.scratch_lkey);
        pair.and(send).and(receive).and(scratch)
    }

    /// Word of the posters' counts at `offset` of [`QueueState`].
    fn state_word(&self, offset: usize) -> u64 {
        let part = Part::new(self.memory.region(), self.layout.state, size_of::<QueueState>());
        let word = part.as_ref().and_then(|part| part.word64(offset));
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Blocks reserved by posters.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.state_word(std::mem::offset_of!(QueueState, reserved))
    }

    /// Blocks known to posters to be complete.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.state_word(std::mem::offset_of!(QueueState, completed))
    }

    /// What took the queue out of service, 0 if nothing did.
    #[must_use]
    pub fn error(&self) -> u64 {
        self.state_word(std::mem::offset_of!(QueueState, error))
    }

    fn clear(&self) {
        let base = self.memory.region().as_ptr().as_ptr();
        let (from, to) = (self.layout.cq, self.layout.dbrec);
        // SAFETY: the offsets are within the memory by construction; the NIC is in reset.
        unsafe {
            std::ptr::write_bytes(base.add(from), CQE_FILL, to - from);
            std::ptr::write_bytes(base.add(to), 0, self.layout.bytes - to);
        }
    }
}

impl Layout {
    fn new(sizes: QueueSizes, cq_depth: u32) -> Self {
        let cq = sizes.sq_depth as usize * BLOCK_BYTES;
        let recv_cq = cq + cq_depth as usize * CQE_BYTES;
        let dbrec = recv_cq + sizes.recv_depth as usize * CQE_BYTES;
        let cq_dbrec = dbrec + 64;
        let recv_cq_dbrec = cq_dbrec + 64;
        let doorbell = (recv_cq_dbrec + 64).next_multiple_of(4096);
        let state = doorbell + 4096;
        let scratch = state + size_of::<QueueState>();
        Self {
            cq,
            recv_cq,
            dbrec,
            cq_dbrec,
            recv_cq_dbrec,
            doorbell,
            state,
            scratch,
            bytes: (scratch + 64).next_multiple_of(4096),
        }
    }
}

/// A request could not be posted, or completed with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// No room, and none came before the deadline.
    #[error("queue pair {qpn:#x}: {outstanding} blocks are outstanding at the deadline")]
    Deadline {
        /// Queue pair.
        qpn: u32,
        /// Blocks.
        outstanding: u64,
    },
    /// The NIC completed a request with an error; the queue pair must be reset.
    #[error("queue pair {qpn:#x}: the request at index {counter:#06x} failed: {syndrome:?} ({code:#04x})", code = *syndrome as u8)]
    Completion {
        /// Queue pair.
        qpn: u32,
        /// Index of the request.
        counter: u16,
        /// Why.
        syndrome: Syndrome,
    },
    /// A completion that makes no sense.
    #[error("queue pair {qpn:#x}: a completion cannot be read")]
    Garbled {
        /// Queue pair.
        qpn: u32,
    },
    /// The request has more blocks than may be posted at once.
    #[error("queue pair {qpn:#x}: a request of {num_blocks} blocks, at most {max} are allowed")]
    TooLarge {
        /// Queue pair.
        qpn: u32,
        /// Blocks.
        num_blocks: u64,
        /// Most.
        max: u64,
    },
}

/// Posts on a queue from one thread. It needs a queue with ordinary completions that nobody else uses.
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
    /// Takes over a queue.
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

    /// Gives the queue back.
    #[must_use]
    pub fn into_queue(self) -> HostQueue {
        self.queue
    }

    /// Forgets what was posted, after the queue was reset.
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

    /// Blocks complete so far, after a look at the completion queue.
    ///
    /// # Errors
    /// [`QueueError`], from the first failed completion on.
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
