//! Threads that post for kernels.
//!
//! A GPU that cannot drive a NIC by itself writes 16-byte commands into rings in page-locked memory
//! (`kernels/include/switchyard/comm/proxy.h`). Threads of the host, next to GPU and NIC, execute them on any
//! [`Endpoint`](p2p_core::Endpoint): verbs, libfabric, shared memory. The endpoint decides whether a flag is an
//! atomic, a write with immediate data or a message that counts the writes before it, and how the peer orders it.
//!
//! | module | content |
//! |---|---|
//! | [`abi`] | structures shared with posters in C++ |
//! | [`command`] | a command's bits, and its possible errors |
//! | [`lane`] | rings of commands, both ends |
//! | [`threads`] | the threads, and the peers they serve |
//! | [`failure`] | failures, for the peer's manager |
//! | `relay` | memory of further GPUs behind a peer, with the feature `relay` |
//! | [`network`] | any network of the handshake, with a proxy in between |
//! | [`locality`] | processors near a GPU and a NIC |
//! | [`host`] | peers whose posters run on this host |
//! | [`gpu`] | peers whose posters are kernels |
//! | [`device`] | slots of GPUs over any network of the handshake |
//!
//! Not here: connections, which the handshake of `p2p-core` makes, and the content of messages, which this crate
//! does not read.

pub mod abi;
mod backoff;
pub mod command;
#[cfg(not(loom))]
pub mod device;
pub mod failure;
#[cfg(not(loom))]
pub mod gpu;
pub mod host;
pub mod lane;
mod line;
pub mod locality;
pub mod memory;
#[cfg(not(loom))]
pub mod network;
mod port;
#[cfg(feature = "relay")]
pub mod relay;
#[cfg(not(feature = "relay"))]
#[path = "no_relay.rs"]
mod relay;
pub mod threads;

pub use backoff::IdlePolicy;
pub use command::{BadCommand, Command, Opcode};
#[cfg(not(loom))]
pub use device::{DeviceNetwork, DeviceTransports};
pub use failure::{Cause, Failure};
pub use lane::{LaneConfig, LaneError, Lanes, Poster};
pub use line::ThreadStats;
pub use locality::{Device, Placement, Sysfs};
#[cfg(not(loom))]
pub use network::ProxyNetwork;
#[cfg(feature = "relay")]
pub use relay::{RelayConfig, RelayReceiver};
pub use threads::{PeerConfig, Proxy, ProxyConfig, ProxyError, ProxyPeer};
