//! Queue pairs and completion queues: creation, connection and reset.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use p2p_core::Region;

use super::cq::{Cq, CqConfig};
use super::{ControlError, Domain, Nic, check_depth, place};
use crate::format::{Cqe, DEPTHS, Local, RECEIVE_BYTES, Remote, SEGMENT_BYTES, Syndrome};
use crate::memory::Part;
use crate::port::{self, Peer, PortAddress, state};

/// Memory layout of a queue pair. Offsets are within `region`.
#[derive(Debug, Clone)]
pub struct QpConfig {
    /// Domain.
    pub domain: Domain,
    /// Memory of the queue.
    pub region: Region,
    /// Basic blocks.
    pub sq_offset: usize,
    /// Depth, a power of two from 128 to 32768.
    pub sq_depth: u32,
    /// Doorbell record, 8 bytes.
    pub dbrec_offset: usize,
    /// Whether the NIC reads it for requests; otherwise the register alone counts.
    pub has_record: bool,
    /// Doorbell register, 8 bytes.
    pub doorbell_offset: usize,
    /// Memory of the doorbell register, where that is not `region`.
    pub doorbell_region: Option<Region>,
    /// Completions of requests.
    pub send_cq: u32,
    /// Completions of received immediate data.
    pub recv_cq: Option<u32>,
    /// Memory of receives. `None`: the doorbell record alone counts.
    pub recv_queue: Option<RecvQueueConfig>,
}

/// Memory of a queue pair's receive queue, in the region of its send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecvQueueConfig {
    /// First receive.
    pub offset: usize,
    /// Depth, a power of two from 1 to 32768.
    pub depth: u32,
    /// Stride in bytes.
    pub stride: usize,
}

/// A receive queue.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    pub(crate) part: Part,
    pub(crate) depth: u32,
    pub(crate) stride: usize,
}

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpState {
    /// Not connected.
    Reset,
    /// At work.
    Ready,
    /// Out of service.
    Error,
}

#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) qpn: u32,
    pub(crate) domain: u32,
    pub(crate) depth: u32,
    pub(crate) sq: Part,
    pub(crate) dbrec: Part,
    pub(crate) has_record: bool,
    pub(crate) doorbell: Part,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: Option<usize>,
    pub(crate) recv_queue: Option<RecvQueue>,
    pub(crate) state: QpState,
    pub(crate) remote: Option<(usize, u32)>,
    /// Blocks that the host announced, that are executed, and that a completion reported.
    pub(crate) produced: u64,
    pub(crate) executed: u64,
    pub(crate) reported: u64,
    pub(crate) num_requests: u64,
    pub(crate) deferred: Vec<DeferredEffect>,
    pub(crate) unreported: VecDeque<UnreportedRequest>,
    pub(crate) rnr_since: Option<Instant>,
    pub(crate) num_received: u64,
    /// Receives flushed after the queue pair failed, behind those that were used.
    pub(crate) num_flushed: u32,
    pub(crate) is_stalled: bool,
    pub(crate) num_dropped: u32,
    pub(crate) failures: Vec<(u64, Syndrome)>,
    pub(crate) failing_ranges: Vec<(Range<u64>, Syndrome)>,
}

/// An executed request that is not reported yet.
#[derive(Debug)]
pub(crate) struct UnreportedRequest {
    pub(crate) cqe: Cqe,
    /// Its first block.
    pub(crate) position: u64,
    /// The first one after it.
    pub(crate) end: u64,
    /// Whether a completion is due. A failed request gets one in any case.
    pub(crate) is_reported: bool,
}

/// A part of an executed request that lands later.
#[derive(Debug)]
pub(crate) struct DeferredEffect {
    pub(crate) position: u64,
    pub(crate) effect: Effect,
}

/// The memory operation of a [`DeferredEffect`].
#[derive(Debug)]
pub(crate) enum Effect {
    Write { remote: Remote, local: Local, is_relaxed: bool },
    Read { remote: Remote, local: Local },
    Land { local: Local, bytes: [u8; 8] },
}

impl Nic {
    /// Makes a completion queue of memory that is filled with [`CQE_FILL`](crate::format::CQE_FILL).
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn create_cq(&mut self, config: &CqConfig) -> Result<u32, ControlError> {
        let cq = Cq::new(config)?;
        Ok(put(&mut self.cqs, cq) as u32)
    }

    /// Makes a queue pair, in reset.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn create_qp(&mut self, config: &QpConfig) -> Result<u32, ControlError> {
        check_depth("a send queue", config.sq_depth, *DEPTHS.start(), *DEPTHS.end())?;
        for cq in [Some(config.send_cq), config.recv_cq].into_iter().flatten() {
            if self.cqs.get(cq as usize).is_none_or(Option::is_none) {
                return Err(ControlError::Unknown { what: "completion queue", number: cq });
            }
        }
        let sq_bytes = config.sq_depth as usize * SEGMENT_BYTES * 4;
        let region = &config.region;
        let doorbells = config.doorbell_region.as_ref().unwrap_or(region);
        let recv_queue = config.recv_queue.map(|queue| {
            check_depth("a receive queue", queue.depth, 1, *DEPTHS.end())?;
            let bytes = queue.depth as usize * queue.stride.max(RECEIVE_BYTES);
            let part = place("receive queue", region, queue.offset, bytes, RECEIVE_BYTES)?;
            Ok::<_, ControlError>(RecvQueue { part, depth: queue.depth, stride: queue.stride })
        });
        let mut qp = Box::new(Qp {
            qpn: 0,
            domain: config.domain.0,
            depth: config.sq_depth,
            sq: place("send queue", region, config.sq_offset, sq_bytes, 64)?,
            dbrec: place("doorbell record", region, config.dbrec_offset, 8, 8)?,
            has_record: config.has_record,
            doorbell: place("doorbell", doorbells, config.doorbell_offset, 8, 8)?,
            send_cq: config.send_cq as usize,
            recv_cq: config.recv_cq.map(|cq| cq as usize),
            recv_queue: recv_queue.transpose()?,
            state: QpState::Reset,
            remote: None,
            produced: 0,
            executed: 0,
            reported: 0,
            num_requests: 0,
            deferred: Vec::new(),
            unreported: VecDeque::new(),
            rnr_since: None,
            num_received: 0,
            num_flushed: 0,
            is_stalled: false,
            num_dropped: 0,
            failures: Vec::new(),
            failing_ranges: Vec::new(),
        });
        let tables = self.port.tables();
        let free = tables.qps.iter().position(|e| e.state.load(Ordering::Acquire) == state::NONE);
        let Some(index) = free else {
            return Err(ControlError::Full { what: "queue pairs", max: port::NUM_QPS });
        };
        let entry = &tables.qps[index];
        entry.domain.store(config.domain.0, Ordering::Relaxed);
        entry.peer_qpn.store(0, Ordering::Relaxed);
        entry.state.store(state::RESET, Ordering::Release);
        qp.qpn = port::qpn_of(index);
        let qpn = qp.qpn;
        if self.qps.len() <= index {
            self.qps.resize_with(index + 1, || None);
        }
        self.qps[index] = Some(qp);
        self.reset(qpn)?;
        Ok(qpn)
    }

    /// Connects a queue pair in reset to one of another NIC or of this one. Like hardware, it cannot check whether
    /// the peer has a queue pair with this number that is connected to this one. If not, requests exceed their
    /// retries (syndrome `15`).
    ///
    /// # Errors
    /// [`ControlError`], [`ControlError::Unknown`] for a number that no queue pair can have.
    pub fn connect(
        &mut self,
        qpn: u32,
        peer: PortAddress,
        remote_qpn: u32,
    ) -> Result<(), ControlError> {
        if port::qp_index(remote_qpn).is_none() {
            return Err(ControlError::Unknown { what: "remote queue pair", number: remote_qpn });
        }
        self.qp(qpn)?;
        let known = self.peers.iter().position(|p| p.as_ref().is_some_and(|p| p.address() == peer));
        let peer = match known {
            Some(index) => index,
            None => put(&mut self.peers, Peer::open(peer)?),
        };
        let qp = self.qp(qpn)?;
        qp.remote = Some((peer, remote_qpn));
        qp.state = QpState::Ready;
        let entry = &self.port.tables().qps[(qpn - port::FIRST_QPN) as usize];
        entry.peer_qpn.store(remote_qpn, Ordering::Relaxed);
        entry.state.store(state::READY, Ordering::Release);
        Ok(())
    }

    /// Resets a queue pair and discards its posted requests. The host must also reset its own counts, the doorbell
    /// record and the completion queue.
    ///
    /// # Errors
    /// [`ControlError::Unknown`].
    pub fn reset(&mut self, qpn: u32) -> Result<(), ControlError> {
        self.reset_pair(qpn)?;
        let qp = self.qp(qpn)?;
        for cq in [Some(qp.send_cq), qp.recv_cq].into_iter().flatten() {
            if let Some(cq) = self.cqs.get_mut(cq).and_then(Option::as_mut) {
                cq.reset();
            }
        }
        Ok(())
    }

    /// The same by the verbs alone, which do not reset completion queues: the next completion comes behind the
    /// last one.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn reset_pair(&mut self, qpn: u32) -> Result<(), ControlError> {
        let qp = self.qp(qpn)?;
        qp.state = QpState::Reset;
        qp.remote = None;
        (qp.produced, qp.executed, qp.reported, qp.num_requests) = (0, 0, 0, 0);
        (qp.num_received, qp.num_dropped, qp.is_stalled) = (0, 0, false);
        qp.deferred.clear();
        qp.unreported.clear();
        qp.failures.clear();
        qp.failing_ranges.clear();
        qp.rnr_since = None;
        qp.num_flushed = 0;
        for (part, value) in [(&qp.doorbell, 0), (&qp.dbrec, 0)] {
            if let Some(word) = part.word64(0) {
                word.store(value, Ordering::Release);
            }
        }
        let entry = &self.port.tables().qps[(qpn - port::FIRST_QPN) as usize];
        entry.state.store(state::RESET, Ordering::Release);
        entry.num_receives.store(0, Ordering::Relaxed);
        entry.num_used.store(0, Ordering::Relaxed);
        entry.inbox_head.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Destroys a queue pair.
    ///
    /// # Errors
    /// [`ControlError::Unknown`].
    pub fn destroy_qp(&mut self, qpn: u32) -> Result<(), ControlError> {
        let remote = self.qp(qpn)?.remote;
        self.reset(qpn)?;
        let index = (qpn - port::FIRST_QPN) as usize;
        self.qps[index] = None;
        self.port.tables().qps[index].state.store(state::NONE, Ordering::Release);
        if let Some((peer, _)) = remote {
            let is_used = self
                .qps
                .iter()
                .flatten()
                .any(|qp| qp.remote.is_some_and(|(other, _)| other == peer));
            if !is_used {
                self.peers[peer] = None;
            }
        }
        Ok(())
    }

    /// Destroys a completion queue without queue pairs.
    ///
    /// # Errors
    /// [`ControlError::Unknown`], [`ControlError::CompletionsInUse`].
    pub fn destroy_cq(&mut self, cq: u32) -> Result<(), ControlError> {
        let number = cq as usize;
        let mut qps = self.qps.iter().flatten();
        if let Some(qp) = qps.find(|qp| qp.send_cq == number || qp.recv_cq == Some(number)) {
            return Err(ControlError::CompletionsInUse { cq, qpn: qp.qpn });
        }
        let entry = self.cqs.get_mut(cq as usize);
        match entry.and_then(Option::take) {
            Some(_) => Ok(()),
            None => Err(ControlError::Unknown { what: "completion queue", number: cq }),
        }
    }

    /// State of a queue pair.
    ///
    /// # Errors
    /// [`ControlError::Unknown`].
    pub fn qp_state(&mut self, qpn: u32) -> Result<QpState, ControlError> {
        Ok(self.qp(qpn)?.state)
    }

    pub(crate) fn qp(&mut self, qpn: u32) -> Result<&mut Qp, ControlError> {
        port::qp_index(qpn)
            .and_then(|index| self.qps.get_mut(index))
            .and_then(Option::as_deref_mut)
            .ok_or(ControlError::Unknown { what: "queue pair", number: qpn })
    }
}

fn put<T>(table: &mut Vec<Option<T>>, value: T) -> usize {
    match table.iter().position(Option::is_none) {
        Some(index) => {
            table[index] = Some(value);
            index
        }
        None => {
            table.push(Some(value));
            table.len() - 1
        }
    }
}
