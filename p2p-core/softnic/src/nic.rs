//! The NIC as its host controls it: memory, queues, connections, faults.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use p2p_core::Region;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use thiserror::Error;

use crate::cq::{Cq, CqConfig};
use crate::engine::{Held, Later};
use crate::format::{DEPTHS, SEGMENT_BYTES, Syndrome};
use crate::memory::{Part, Segment, SegmentError};
use crate::port::{self, Access, Grant, Peer, Port, PortAddress, state};

/// How a NIC behaves.
#[derive(Debug, Clone, Copy, Default)]
pub struct NicConfig {
    /// Whether what no correct driver does takes the queue pair out of service. It is noted in
    /// [`Nic::violations`] in any case.
    pub is_strict: bool,
    /// What it goes by.
    pub doorbell: DoorbellMode,
    /// Delays and reorders as much as the ordering rules of a reliable connection allow.
    pub adversary: Option<Adversary>,
    /// Whether [`Nic::executed`] is kept.
    pub keeps_trace: bool,
    /// How long a write with immediate data waits for a receive. 0 fails at once.
    pub rnr_timeout: Duration,
}

/// What tells the NIC of new requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// The doorbell register.
    #[default]
    Register,
    /// The register; and a doorbell record that is behind it is a violation.
    Checked,
    /// The record alone, as a NIC that lost a doorbell does.
    Record,
}

/// A seeded source of disorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adversary {
    /// Determines all choices.
    pub seed: u64,
}

/// What a driver must not do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A request's index is not its place in the queue.
    #[error("queue pair {qpn:#x}: the request at block {position} has index {found:#06x}")]
    Index {
        /// Queue pair.
        qpn: u32,
        /// Where it stands, in blocks since reset.
        position: u64,
        /// What it says.
        found: u16,
    },
    /// A request or doorbell names another queue pair.
    #[error("queue pair {qpn:#x}: {what} names queue pair {found:#x}")]
    QueuePair {
        /// Queue pair.
        qpn: u32,
        /// Request or doorbell.
        what: &'static str,
        /// What it says.
        found: u32,
    },
    /// The doorbell record is behind the doorbell.
    #[error("queue pair {qpn:#x}: the doorbell says {doorbell:#06x}, its record {record:#06x}")]
    StaleRecord {
        /// Queue pair.
        qpn: u32,
        /// End in the register.
        doorbell: u16,
        /// End in the record.
        record: u16,
    },
    /// More is posted than the queue has room for: something was overwritten.
    #[error(
        "queue pair {qpn:#x}: {outstanding} blocks are posted and not reported complete, in a queue of {depth}"
    )]
    Overrun {
        /// Queue pair.
        qpn: u32,
        /// Blocks.
        outstanding: u64,
        /// Blocks of the queue.
        depth: u32,
    },
    /// A doorbell goes back.
    #[error("queue pair {qpn:#x}: the doorbell went from {from:#06x} back to {to:#06x}")]
    Backwards {
        /// Queue pair.
        qpn: u32,
        /// End before.
        from: u16,
        /// End now.
        to: u16,
    },
    /// A request that cannot be read, or has reserved bits set.
    #[error("queue pair {qpn:#x}: request at block {position}: {detail}")]
    Malformed {
        /// Queue pair.
        qpn: u32,
        /// Where it stands.
        position: u64,
        /// What is wrong.
        detail: String,
    },
    /// A completion found no room, because consumed ones were not given back.
    #[error("queue pair {qpn:#x}: its completion queue of {depth} is full")]
    CompletionOverrun {
        /// Queue pair.
        qpn: u32,
        /// Completions.
        depth: u32,
    },
}

/// Something to go wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The `nth` request from the next one on fails; 0 is the next.
    Fail {
        /// Queue pair.
        qpn: u32,
        /// Requests before it.
        nth: u64,
        /// How.
        syndrome: Syndrome,
    },
    /// Requests to these addresses of the peer fail.
    FailRange {
        /// Queue pair.
        qpn: u32,
        /// Addresses.
        addresses: Range<u64>,
        /// How.
        syndrome: Syndrome,
    },
    /// Doorbells do not reach the NIC.
    DropDoorbells {
        /// Queue pair.
        qpn: u32,
        /// How many.
        num: u32,
    },
    /// The queue pair does nothing until resumed.
    Stall {
        /// Queue pair.
        qpn: u32,
    },
    /// Ends a stall.
    Resume {
        /// Queue pair.
        qpn: u32,
    },
    /// Nobody answers any more.
    Disconnect {
        /// Queue pair.
        qpn: u32,
    },
}

/// A control operation was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// There is none with this number.
    #[error("there is no {what} {number:#x}")]
    Unknown {
        /// What.
        what: &'static str,
        /// Number given.
        number: u32,
    },
    /// A table is full.
    #[error("all {max} {what} are in use")]
    Full {
        /// What.
        what: &'static str,
        /// How many there are.
        max: usize,
    },
    /// Memory given does not hold what it should.
    #[error("{what}: {bytes} bytes at offset {offset} do not fit the region, or are misaligned")]
    Placement {
        /// For what.
        what: &'static str,
        /// Offset given.
        offset: usize,
        /// Bytes needed.
        bytes: usize,
    },
    /// A depth that no queue can have.
    #[error("{what} of depth {found}: expected a power of two from {min} to {max}")]
    Depth {
        /// Which queue.
        what: &'static str,
        /// Depth given.
        found: u32,
        /// Least.
        min: u32,
        /// Most.
        max: u32,
    },
    /// A queue pair still has its completions there.
    #[error("completion queue {cq:#x} is used by queue pair {qpn:#x}: destroy that first")]
    CompletionsInUse {
        /// Completion queue.
        cq: u32,
        /// One of its queue pairs.
        qpn: u32,
    },
    /// A peer is still in the middle of an access to memory whose key is revoked.
    #[error("key {lkey:#x} is revoked, but an access to its memory does not end; do not reuse it")]
    InUse {
        /// Key.
        lkey: u32,
    },
    /// Shared memory failed, or the peer's NIC is not there.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

/// Protection domain: queue pairs reach only memory of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Domain(pub(crate) u32);

/// Registered memory. The local key never leaves the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// For requests of this side.
    pub lkey: u32,
    /// For requests of peers; 0 if none may.
    pub rkey: u32,
    /// Address of the first byte, for both.
    pub address: u64,
    /// Bytes.
    pub num_bytes: u64,
}

/// Where the queue of a queue pair lies. Offsets are within `region`.
#[derive(Debug, Clone)]
pub struct QpConfig {
    /// Domain.
    pub domain: Domain,
    /// Memory of the queue.
    pub region: Region,
    /// Basic blocks.
    pub sq_offset: usize,
    /// How many, a power of two from 128 to 32768.
    pub sq_depth: u32,
    /// Doorbell record, 8 bytes.
    pub dbrec_offset: usize,
    /// Doorbell register, 8 bytes.
    pub doorbell_offset: usize,
    /// Memory of the doorbell register, where that is not `region`.
    pub doorbell_region: Option<Region>,
    /// Completions of requests.
    pub send_cq: u32,
    /// Completions of received immediate data.
    pub recv_cq: Option<u32>,
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

/// A request that was executed, for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Executed {
    /// Queue pair.
    pub qpn: u32,
    /// First block, since reset.
    pub position: u64,
    /// Code.
    pub opcode: u8,
    /// Address at the peer, 0 if it has none.
    pub address: u64,
}

/// A modelled NIC. Nothing happens but in [`progress`](Self::progress).
#[derive(Debug)]
pub struct Nic {
    pub(crate) config: NicConfig,
    pub(crate) port: Port,
    pub(crate) memory: Vec<Option<Memory>>,
    pub(crate) cqs: Vec<Option<Cq>>,
    pub(crate) qps: Vec<Option<Box<Qp>>>,
    pub(crate) peers: Vec<Option<Peer>>,
    pub(crate) rng: Option<SmallRng>,
    pub(crate) violations: Vec<Violation>,
    pub(crate) executed: Vec<Executed>,
    pub(crate) num_failures: u64,
    segments: Vec<ShownSegment>,
    num_domains: u32,
    num_keys: u32,
}

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) lkey: u32,
    pub(crate) domain: u32,
    pub(crate) access: Access,
    pub(crate) address: u64,
    pub(crate) part: Part,
    segment: Option<u32>,
}

#[derive(Debug)]
struct ShownSegment {
    segment: Segment,
    index: u32,
    num_uses: usize,
}

#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) qpn: u32,
    pub(crate) domain: u32,
    pub(crate) depth: u32,
    pub(crate) sq: Part,
    pub(crate) dbrec: Part,
    pub(crate) doorbell: Part,
    pub(crate) send_cq: usize,
    pub(crate) recv_cq: Option<usize>,
    pub(crate) state: QpState,
    pub(crate) remote: Option<(usize, u32)>,
    /// Blocks that the host said are written, that are executed, and that a completion reported.
    pub(crate) produced: u64,
    pub(crate) executed: u64,
    pub(crate) reported: u64,
    pub(crate) num_requests: u64,
    pub(crate) later: Vec<Later>,
    pub(crate) held: VecDeque<Held>,
    pub(crate) rnr_since: Option<Instant>,
    pub(crate) num_received: u64,
    pub(crate) is_stalled: bool,
    pub(crate) num_dropped: u32,
    pub(crate) failures: Vec<(u64, Syndrome)>,
    pub(crate) failing_ranges: Vec<(Range<u64>, Syndrome)>,
}

impl Nic {
    /// A NIC without memory or queues.
    ///
    /// # Errors
    /// [`SegmentError`].
    pub fn new(config: NicConfig) -> Result<Self, SegmentError> {
        Ok(Self {
            config,
            port: Port::create()?,
            memory: Vec::new(),
            cqs: Vec::new(),
            qps: Vec::new(),
            peers: Vec::new(),
            rng: config.adversary.map(|adversary| SmallRng::seed_from_u64(adversary.seed)),
            violations: Vec::new(),
            executed: Vec::new(),
            num_failures: 0,
            segments: Vec::new(),
            num_domains: 0,
            num_keys: 0,
        })
    }

    /// Where NICs of peers find this one.
    #[must_use]
    pub fn address(&self) -> PortAddress {
        self.port.address()
    }

    /// A fresh protection domain.
    pub fn alloc_domain(&mut self) -> Domain {
        self.num_domains += 1;
        Domain(self.num_domains)
    }

    /// Registers memory that peers may reach.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn register(
        &mut self,
        domain: Domain,
        segment: &Segment,
        offset: usize,
        num_bytes: usize,
        access: Access,
    ) -> Result<Keys, ControlError> {
        let region = segment.region();
        let part = place("memory", region, offset, num_bytes, 1)?;
        let shown = self.show(segment)?;
        match self.add_memory(domain, part, offset, access, Some(shown)) {
            Ok(keys) => Ok(keys),
            Err(error) => {
                self.hide(shown);
                Err(error)
            }
        }
    }

    /// Registers memory that peers may reach, under the addresses of `view`: another mapping of the whole
    /// segment, which is what this side's programs use.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn register_view(
        &mut self,
        domain: Domain,
        segment: &Segment,
        view: &Region,
        access: Access,
    ) -> Result<Keys, ControlError> {
        place("memory", segment.region(), 0, view.len(), 1)?;
        let part = place("memory", view, 0, view.len(), 1)?;
        let shown = self.show(segment)?;
        self.add_memory(domain, part, 0, access, Some(shown)).inspect_err(|_| self.hide(shown))
    }

    /// Registers memory for requests of this side only.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn register_local(
        &mut self,
        domain: Domain,
        region: &Region,
        access: Access,
    ) -> Result<Keys, ControlError> {
        let part = place("memory", region, 0, region.len(), 1)?;
        self.add_memory(domain, part, 0, access, None)
    }

    /// Revokes both keys. When this returns, no access is under way and none can come.
    ///
    /// # Errors
    /// [`ControlError`]; after `InUse` the memory must stay mapped and unused.
    pub fn deregister(&mut self, lkey: u32) -> Result<(), ControlError> {
        let index = port::key_index(lkey);
        let slot = self.memory.get_mut(index);
        let found = slot.filter(|memory| memory.as_ref().is_some_and(|m| m.lkey == lkey));
        let Some(memory) = found.and_then(Option::take) else {
            return Err(ControlError::Unknown { what: "local key", number: lkey });
        };
        let is_quiet = self.port.tables().memory[index].revoke(REVOKE_TIMEOUT);
        if let Some(shown) = memory.segment {
            self.hide(shown);
        }
        if is_quiet { Ok(()) } else { Err(ControlError::InUse { lkey }) }
    }

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
        let mut qp = Box::new(Qp {
            qpn: 0,
            domain: config.domain.0,
            depth: config.sq_depth,
            sq: place("send queue", region, config.sq_offset, sq_bytes, 64)?,
            dbrec: place("doorbell record", region, config.dbrec_offset, 8, 8)?,
            doorbell: place("doorbell", doorbells, config.doorbell_offset, 8, 8)?,
            send_cq: config.send_cq as usize,
            recv_cq: config.recv_cq.map(|cq| cq as usize),
            state: QpState::Reset,
            remote: None,
            produced: 0,
            executed: 0,
            reported: 0,
            num_requests: 0,
            later: Vec::new(),
            held: VecDeque::new(),
            rnr_since: None,
            num_received: 0,
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

    /// Joins a queue pair in reset with one of another NIC, or of this one.
    ///
    /// # Errors
    /// [`ControlError`].
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

    /// Takes a queue pair back to reset: what was posted is forgotten. The host must reset its own
    /// counts, the doorbell record and the completion queue as well.
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

    /// The same by the verbs alone, which leave completion queues as they are: the next completion comes
    /// behind the last one.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn reset_pair(&mut self, qpn: u32) -> Result<(), ControlError> {
        let qp = self.qp(qpn)?;
        qp.state = QpState::Reset;
        qp.remote = None;
        (qp.produced, qp.executed, qp.reported, qp.num_requests) = (0, 0, 0, 0);
        (qp.num_received, qp.num_dropped, qp.is_stalled) = (0, 0, false);
        qp.later.clear();
        qp.held.clear();
        qp.failures.clear();
        qp.failing_ranges.clear();
        qp.rnr_since = None;
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

    /// Takes a queue pair away.
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

    /// Takes a completion queue away that no queue pair uses any more.
    ///
    /// # Errors
    /// [`ControlError::Unknown`], [`ControlError::CompletionsInUse`].
    pub fn destroy_cq(&mut self, cq: u32) -> Result<(), ControlError> {
        let number = cq as usize;
        let mut qps = self.qps.iter().flatten();
        if let Some(qp) = qps.find(|qp| qp.send_cq == number || qp.recv_cq == Some(number)) {
            return Err(ControlError::CompletionsInUse { cq, qpn: qp.qpn });
        }
        let slot = self.cqs.get_mut(cq as usize);
        match slot.and_then(Option::take) {
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

    /// Makes something go wrong.
    ///
    /// # Errors
    /// [`ControlError::Unknown`].
    pub fn inject(&mut self, fault: Fault) -> Result<(), ControlError> {
        match fault {
            Fault::Fail { qpn, nth, syndrome } => {
                let qp = self.qp(qpn)?;
                qp.failures.push((qp.num_requests + nth, syndrome));
            }
            Fault::FailRange { qpn, addresses, syndrome } => {
                self.qp(qpn)?.failing_ranges.push((addresses, syndrome));
            }
            Fault::DropDoorbells { qpn, num } => self.qp(qpn)?.num_dropped = num,
            Fault::Stall { qpn } => self.qp(qpn)?.is_stalled = true,
            Fault::Resume { qpn } => self.qp(qpn)?.is_stalled = false,
            Fault::Disconnect { qpn } => self.qp(qpn)?.remote = None,
        }
        Ok(())
    }

    /// What drivers did wrong so far.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// How often a queue pair went out of service.
    #[must_use]
    pub const fn num_failures(&self) -> u64 {
        self.num_failures
    }

    /// Requests in the order of their execution, if the configuration asks for that.
    #[must_use]
    pub fn executed(&self) -> &[Executed] {
        &self.executed
    }

    pub(crate) fn qp(&mut self, qpn: u32) -> Result<&mut Qp, ControlError> {
        port::qp_index(qpn)
            .and_then(|index| self.qps.get_mut(index))
            .and_then(Option::as_deref_mut)
            .ok_or(ControlError::Unknown { what: "queue pair", number: qpn })
    }

    fn add_memory(
        &mut self,
        domain: Domain,
        part: Part,
        offset: usize,
        access: Access,
        segment: Option<u32>,
    ) -> Result<Keys, ControlError> {
        let tables = self.port.tables();
        let free = (0..port::NUM_KEYS).find(|index| {
            self.memory.get(*index).is_none_or(Option::is_none) && tables.memory[*index].is_free()
        });
        let Some(index) = free else {
            return Err(ControlError::Full { what: "keys", max: port::NUM_KEYS });
        };
        // The low byte changes with every registration, so that an old key never fits a new one.
        self.num_keys = self.num_keys.wrapping_add(1);
        let key = (index as u32) << 8 | (self.num_keys & 0xff);
        let (rkey, lkey) = (key | RKEY_BIT, key | LKEY_BIT);
        let address = part.as_ptr().as_ptr() as u64;
        let num_bytes = part.len() as u64;
        if let Some(segment) = segment {
            tables.memory[index].grant(&Grant {
                key: rkey,
                access,
                domain: domain.0,
                segment,
                address,
                num_bytes,
                offset,
            });
        }
        let memory = Memory { lkey, domain: domain.0, access, address, part, segment };
        if self.memory.len() <= index {
            self.memory.resize_with(index + 1, || None);
        }
        self.memory[index] = Some(memory);
        Ok(Keys { lkey, rkey: if segment.is_some() { rkey } else { 0 }, address, num_bytes })
    }

    fn show(&mut self, segment: &Segment) -> Result<u32, ControlError> {
        let descriptor = segment.descriptor();
        let known = self.segments.iter_mut().find(|s| s.segment.descriptor() == descriptor);
        if let Some(shown) = known {
            shown.num_uses += 1;
            return Ok(shown.index);
        }
        let index = self
            .port
            .show_segment(segment)
            .ok_or(ControlError::Full { what: "segments", max: port::NUM_SEGMENTS })?;
        self.segments.push(ShownSegment { segment: segment.clone(), index, num_uses: 1 });
        Ok(index)
    }

    fn hide(&mut self, index: u32) {
        let Some(at) = self.segments.iter().position(|s| s.index == index) else { return };
        self.segments[at].num_uses -= 1;
        if self.segments[at].num_uses == 0 {
            self.port.hide_segment(index);
            self.segments.swap_remove(at);
        }
    }
}

/// A part of `region`, checked.
pub(crate) fn place(
    what: &'static str,
    region: &Region,
    offset: usize,
    bytes: usize,
    align: usize,
) -> Result<Part, ControlError> {
    Part::new(region, offset, bytes)
        .filter(|part| (part.as_ptr().as_ptr() as usize).is_multiple_of(align))
        .ok_or(ControlError::Placement { what, offset, bytes })
}

/// Checks a queue's depth.
pub(crate) fn check_depth(
    what: &'static str,
    found: u32,
    min: u32,
    max: u32,
) -> Result<(), ControlError> {
    if found.is_power_of_two() && (min..=max).contains(&found) {
        Ok(())
    } else {
        Err(ControlError::Depth { what, found, min, max })
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

/// Keys are told apart by bits above their index.
const RKEY_BIT: u32 = 1 << 24;
const LKEY_BIT: u32 = 1 << 25;
const REVOKE_TIMEOUT: Duration = Duration::from_millis(200);
