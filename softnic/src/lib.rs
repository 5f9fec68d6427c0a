//! A model of an mlx5 NIC: it executes genuine work queue entries, in software, between processes of one host.
//!
//! It reads the bytes that the device functions of `kernels/include/switchyard/comm/mlx5` write: send queue,
//! doorbell record and doorbell register. It checks keys, bounds and rights, moves the data, and writes
//! completions as the hardware does. It does not depend on slots, rings or models. Only [`network`] connects it to
//! the transports of `p2p-core`.
//!
//! | module | content |
//! |---|---|
//! | [`mod@format`] | bytes of requests, completions and doorbells |
//! | [`nic`] | the NIC as its host controls it: memory, queues, connections, faults |
//! | `executor` | progress: doorbells, execution, completions |
//! | [`queue`] | a queue pair with all its memory, and posting on it from Rust |
//! | [`abi`] | handles for posters on a GPU |
//! | [`memory`] | memory that NICs of several processes reach |
//! | [`thread`] | a NIC on a thread of its own |
//! | [`network`] | the transport over it |
//!
//! The folder `gpu/` has the same NIC in C++, as a kernel and as a thread that drives copy engines;
//! `tests/it/gpu_nic` compares it with this one.
//!
//! `docs/explanation/ibgda.md` lists the properties that the model can and cannot show.

mod executor;
pub mod format;
pub mod memory;
pub mod network;
pub mod nic;
mod port;
pub mod queue;
pub mod thread;

pub use kernels::mlx5 as abi;

pub use memory::{Segment, SegmentError};
pub use network::SoftNetwork;
pub use nic::{
    Adversary, ControlError, CqConfig, Domain, DoorbellMode, Fault, Keys, Nic, NicConfig, QpConfig,
    QpState, RecvQueueConfig, TraceEntry, Violation,
};
pub use port::{Access, PortAddress};
pub use queue::{HostQueue, Poster, QueueError, QueueSizes};
pub use thread::NicThread;
