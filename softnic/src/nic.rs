//! The NIC as its host controls it: memory, queues, connections, faults.

mod cq;
mod error;
mod fault;
mod keys;
mod pairs;

pub use self::cq::CqConfig;
pub use self::error::{ControlError, Violation};
pub use self::fault::Fault;
pub(crate) use self::keys::Memory;
pub use self::keys::{Domain, Keys};
pub(crate) use self::pairs::{DeferredEffect, Effect, Qp, UnreportedRequest};
pub use self::pairs::{QpConfig, QpState, RecvQueueConfig};

use std::time::Duration;

use p2p_core::Region;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use self::cq::Cq;
use self::keys::ShownSegment;
use crate::memory::{Part, SegmentError};
use crate::port::{Peer, Port, PortAddress};

/// Behaviour of a NIC.
#[derive(Debug, Clone, Copy, Default)]
pub struct NicConfig {
    /// Whether a violation takes the queue pair out of service. [`Nic::violations`] records violations in any
    /// case. A doorbell record behind the register is recorded only if this is set or the mode is
    /// [`DoorbellMode::Checked`].
    pub is_strict: bool,
    /// Source of announcements.
    pub doorbell: DoorbellMode,
    /// Delays and reorders as much as the ordering rules of a reliable connection allow.
    pub adversary: Option<Adversary>,
    /// Whether [`Nic::executed`] is kept.
    pub keeps_trace: bool,
    /// Time limit for a receive that a write with immediate data needs. 0 fails immediately.
    pub rnr_timeout: Duration,
}

/// Source from which the NIC learns of new requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// The doorbell register.
    #[default]
    Register,
    /// The register. For queue pairs with a record, a record behind the register is a violation.
    Checked,
    /// The record alone, as a NIC that lost a doorbell does; the register for queue pairs without one.
    Record,
}

/// A seeded source of disorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adversary {
    /// Determines all choices.
    pub seed: u64,
}

/// A request that was executed, for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceEntry {
    /// Queue pair.
    pub qpn: u32,
    /// First block, since reset.
    pub position: u64,
    /// Code.
    pub opcode: u8,
    /// Address at the peer, 0 if it has none.
    pub address: u64,
}

/// A modelled NIC. It acts only in [`progress`](Self::progress).
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
    pub(crate) executed: Vec<TraceEntry>,
    pub(crate) num_failures: u64,
    pub(crate) num_requests: u64,
    segments: Vec<ShownSegment>,
    num_domains: u32,
    num_keys: u32,
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
            num_requests: 0,
            segments: Vec::new(),
            num_domains: 0,
            num_keys: 0,
        })
    }

    /// Address by which NICs of peers find this one.
    #[must_use]
    pub fn address(&self) -> PortAddress {
        self.port.address()
    }

    /// Violations by drivers so far.
    ///
    /// Completions report violations where they can. A wrong request fails. Requests that a wrong doorbell should
    /// have announced return flushed if the doorbell record announces them. Two violations have no completion: a
    /// wrong doorbell without such a record, and a completion queue without room. Their posters wait until their
    /// time limit.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Number of times that a queue pair went out of service.
    #[must_use]
    pub const fn num_failures(&self) -> u64 {
        self.num_failures
    }

    /// Requests executed without an error, of all queue pairs since the start.
    #[must_use]
    pub const fn num_requests(&self) -> u64 {
        self.num_requests
    }

    /// Registrations in force.
    #[must_use]
    pub fn num_registrations(&self) -> usize {
        self.memory.iter().flatten().count()
    }

    /// Numbers of the existing queue pairs, ascending.
    #[must_use]
    pub fn queue_pairs(&self) -> Vec<u32> {
        self.qps.iter().flatten().map(|qp| qp.qpn).collect()
    }

    /// Requests in the order of their execution, if the configuration asks for that.
    #[must_use]
    pub fn executed(&self) -> &[TraceEntry] {
        &self.executed
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
