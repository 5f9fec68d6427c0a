//! Violations by drivers, and errors of control operations.

use thiserror::Error;

use crate::memory::SegmentError;

/// A violation of the rules for drivers.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum Violation {
    /// A request's index is not its place in the queue.
    #[error("queue pair {qpn:#x}: the request at block {position} has index {found:#06x}")]
    Index {
        qpn: u32,
        /// Position of the request, in blocks since reset.
        position: u64,
        found: u16,
    },
    /// A request or doorbell names another queue pair.
    #[error("queue pair {qpn:#x}: {what} names queue pair {found:#x}")]
    QueuePair {
        qpn: u32,
        /// Request or doorbell.
        what: &'static str,
        found: u32,
    },
    /// The doorbell record is behind the doorbell.
    #[error("queue pair {qpn:#x}: the doorbell says {doorbell:#06x}, its record {record:#06x}")]
    StaleRecord {
        qpn: u32,
        /// End in the register.
        doorbell: u16,
        /// End in the record.
        record: u16,
    },
    /// More blocks are posted than the queue has: some were overwritten.
    #[error(
        "queue pair {qpn:#x}: {outstanding} blocks are posted and not reported complete, in a queue of {depth}"
    )]
    Overrun {
        qpn: u32,
        outstanding: u64,
        /// Blocks of the queue.
        depth: u32,
    },
    /// A doorbell goes back.
    #[error("queue pair {qpn:#x}: the doorbell went from {from:#06x} back to {to:#06x}")]
    Backwards { qpn: u32, from: u16, to: u16 },
    /// A request that cannot be read, or has reserved bits set.
    #[error("queue pair {qpn:#x}: request at block {position}: {detail}")]
    Malformed {
        qpn: u32,
        /// Position of the request, in blocks since reset.
        position: u64,
        /// Description of the error.
        detail: String,
    },
    /// A receive for more than immediate data, which the model does not support.
    #[error(
        "queue pair {qpn:#x}: receive {number} is not the segment that ends a list: {found:02x?}"
    )]
    Receive {
        qpn: u32,
        /// Receives posted before it since reset.
        number: u64,
        /// Its first bytes.
        found: [u8; 16],
    },
    /// More receives are posted than the queue has, or the record went back.
    #[error("queue pair {qpn:#x}: {outstanding} receives are posted, in a queue of {depth}")]
    ReceiveOverrun {
        qpn: u32,
        /// Receives posted and not used.
        outstanding: u64,
        /// Capacity of the queue.
        depth: u32,
    },
    /// A completion found no room, because consumed entries were not returned.
    #[error("queue pair {qpn:#x}: its completion queue of {depth} is full")]
    CompletionOverrun { qpn: u32, depth: u32 },
}

/// A control operation was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum ControlError {
    /// No object has this number.
    #[error("there is no {what} {number:#x}")]
    Unknown {
        /// Kind of object.
        what: &'static str,
        number: u32,
    },
    /// A table is full.
    #[error("all {max} {what} are in use")]
    Full {
        /// Kind of object.
        what: &'static str,
        /// Limit.
        max: usize,
    },
    /// The given memory cannot hold the object.
    #[error("{what}: {bytes} bytes at offset {offset} do not fit the region, or are misaligned")]
    Placement {
        /// Object that it was given for.
        what: &'static str,
        offset: usize,
        bytes: usize,
    },
    /// A depth that no queue can have.
    #[error("{what} of depth {found}: expected a power of two from {min} to {max}")]
    Depth {
        /// Kind of queue.
        what: &'static str,
        found: u32,
        min: u32,
        max: u32,
    },
    /// A queue pair still has its completions there.
    #[error("completion queue {cq:#x} is used by queue pair {qpn:#x}: destroy that first")]
    CompletionsInUse {
        cq: u32,
        /// One of its queue pairs.
        qpn: u32,
    },
    /// A peer's access to memory with a revoked key has not ended.
    #[error("key {lkey:#x} is revoked, but an access to its memory does not end; do not reuse it")]
    InUse { lkey: u32 },
    /// Shared memory failed, or the peer's NIC does not exist.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}
