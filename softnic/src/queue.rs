//! A queue pair with all its memory.

mod poster;

pub use self::poster::{Poster, QueueError};

use std::sync::atomic::Ordering;

use p2p_core::Region;

use crate::abi::{CQ_COLLAPSED, NO_RECORD, QueueHandle, QueueState, ReceiveHandle, ReceiveState};
use crate::format::{
    BLOCK_BYTES, CQE_BYTES, CQE_FILL, MAX_MESSAGE_BYTES, RECEIVE_BYTES, empty_receive,
};
use crate::memory::{Part, Segment};
use crate::nic::{ControlError, CqConfig, Domain, Nic, QpConfig, RecvQueueConfig};
use crate::port::{Access, PortAddress};

/// Sizes of a [`HostQueue`].
#[derive(Debug, Clone, Copy)]
pub struct QueueSizes {
    /// Basic blocks, a power of two from 128 to 32768.
    pub sq_depth: u32,
    /// Whether all completions go to one entry.
    pub is_collapsed: bool,
    /// Whether the NIC reads a doorbell record for requests.
    pub has_record: bool,
    /// Receives for immediate data, a power of two, or 0.
    pub recv_depth: u32,
    /// Largest number of bytes of one request.
    pub max_message_bytes: u32,
}

impl Default for QueueSizes {
    fn default() -> Self {
        Self {
            sq_depth: 128,
            is_collapsed: false,
            has_record: true,
            recv_depth: 0,
            max_message_bytes: MAX_MESSAGE_BYTES,
        }
    }
}

/// A queue pair in host memory. Call [`destroy`](Self::destroy) to remove it from the NIC.
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
    recv_state: usize,
    rq: usize,
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
                    // Objects that were just made and never used are destroyed without an error.
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
            host_error: 0,
            scratch_lkey: scratch.lkey,
            qpn,
            sq_depth: sizes.sq_depth,
            cq_depth,
            flags: if sizes.is_collapsed { CQ_COLLAPSED } else { 0 }
                | if sizes.has_record { 0 } else { NO_RECORD },
            batch: 128.min(sizes.sq_depth / 4),
            max_message_bytes: sizes.max_message_bytes,
            peer: 0,
        };
        let queue = Self { memory, layout, sizes, handle, send_cq, recv_cq };
        queue.clear();
        Ok(queue)
    }

    /// Makes the completion queues and the queue pair. Adds each completion queue to `cqs` as soon as it exists.
    /// Returns the numbers of the pair and of its queues for sends and receives.
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
            has_record: sizes.has_record,
            doorbell_offset: layout.doorbell,
            doorbell_region: None,
            send_cq,
            recv_cq,
            recv_queue: recv_cq.map(|_| RecvQueueConfig {
                offset: layout.rq,
                depth: sizes.recv_depth,
                stride: RECEIVE_BYTES,
            }),
        })?;
        Ok((qpn, send_cq, recv_cq))
    }

    /// Number of the queue pair.
    #[must_use]
    pub const fn qpn(&self) -> u32 {
        self.handle.qpn
    }

    /// Handle for posters, valid as long as this value lives.
    #[must_use]
    pub const fn handle(&self) -> &QueueHandle {
        &self.handle
    }

    /// Handle for readers of immediate data, if there are receives. `num_receives` of them are kept posted;
    /// [`post_receives`](Self::post_receives) posts them first.
    #[must_use]
    pub fn receive_handle(&self, num_receives: u32) -> Option<ReceiveHandle> {
        let at = |offset| self.memory.address(offset);
        self.recv_cq.map(|_| ReceiveHandle {
            dbrec: at(self.layout.dbrec),
            cq: at(self.layout.recv_cq),
            cq_dbrec: at(self.layout.recv_cq_dbrec),
            state: at(self.layout.recv_state),
            qpn: self.qpn(),
            cq_depth: self.sizes.recv_depth,
            num_receives,
            peer: 0,
        })
    }

    /// Posts the first `num_receives` since the last reset.
    pub fn post_receives(&self, num_receives: u32) {
        let part = Part::new(self.memory.region(), self.layout.dbrec, 8);
        if let Some(word) = part.as_ref().and_then(|part| part.word32(0)) {
            word.store((num_receives & 0xffff).to_be(), Ordering::Release);
        }
    }

    /// Writes a receive that takes bytes, which a NIC records as a violation: for tests.
    pub fn spoil_receive(&self) {
        let part = Part::new(self.memory.region(), self.layout.rq, RECEIVE_BYTES);
        if let Some(word) = part.as_ref().and_then(|part| part.word32(0)) {
            word.store(64_u32.to_be(), Ordering::Release);
        }
    }

    /// Connects it to a queue pair in reset or ready, of another NIC or of this one.
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

    /// Resets the queue pair with all its memory, so that it can be connected again. No thread may post meanwhile.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn reset(&self, nic: &mut Nic) -> Result<(), ControlError> {
        nic.reset(self.qpn())?;
        self.clear();
        Ok(())
    }

    /// Destroys all parts, even when destroying one of them fails.
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

    /// The error that took the queue out of service, 0 if none did.
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
            for number in 0..self.sizes.recv_depth as usize {
                let receive = base.add(self.layout.rq + number * RECEIVE_BYTES);
                std::ptr::copy_nonoverlapping(empty_receive().as_ptr(), receive, RECEIVE_BYTES);
            }
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
        let recv_state = scratch + 64;
        let rq = recv_state + size_of::<ReceiveState>();
        Self {
            cq,
            recv_cq,
            dbrec,
            cq_dbrec,
            recv_cq_dbrec,
            doorbell,
            state,
            scratch,
            recv_state,
            rq,
            bytes: (rq + sizes.recv_depth as usize * RECEIVE_BYTES).next_multiple_of(4096),
        }
    }
}
