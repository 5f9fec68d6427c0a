//! GPU-initiated RDMA on mlx5: the control path, and a report of everything that this host lacks for it.
//!
//! **Not yet run on a ConnectX.** Nothing is linked: the vendor's libraries are opened at run time, and a
//! host without them gets a line in the report. The steps from here to a queue that a kernel posts on are
//! in `docs/explanation/ibgda.md`.
//!
//! | module | content |
//! |---|---|
//! | [`mod@probe`] | checks of drivers, modules, driver options, libraries, and of the properties that each device reports |
//! | [`peer`] | a peer's slot and the queues to it: open, describe, join; as a link of fused kernels |
//! | [`queue`] | queue pairs by libibverbs or by DevX, as kernels post on them |
//! | [`nic`] | a port of a NIC, registration of host and GPU memory |
//! | [`access`] | memory that both the NIC and the posters reach: the host's, or a GPU's by CUDA |
//! | [`prm`] | commands to the firmware, as bytes |
//! | [`device`] | devices as libibverbs lists them, and which are mlx5 |
//! | [`library`], [`ffi`] | libibverbs and libmlx5, opened at run time |

pub mod access;
pub mod device;
pub mod ffi;
pub mod library;
mod missing;
pub mod nic;
pub mod peer;
pub mod prm;
pub mod probe;
pub mod queue;

pub use access::{Access, GpuAccess, GpuMemory, HostAccess, Place};
pub use device::{Device, DeviceError, devices};
pub use library::{Libraries, LibraryError};
pub use nic::{Nic, NicConfig, NicError};
pub use peer::{LinkError, OpenPeer, Peer, PeerConfig, PeerError, ResetPeer, Waits};
pub use probe::{Check, DeviceReport, Report, State, probe};
pub use queue::{
    Doorbell, Immediate, ParseQueueError, Posters, QueueConfig, QueueError, QueuePath, ReceiveError,
};
