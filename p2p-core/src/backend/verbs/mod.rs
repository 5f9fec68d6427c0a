//! RDMA by libibverbs: InfiniBand and RoCE v2.
//!
//! A [`VerbsNetwork`] opens one or more ports; for every peer it makes a reliable-connected queue pair
//! per port, and a slot with a key of its own in a protection domain of its own. What operations become
//! is in [`endpoint`](self::VerbsEndpoint); waiting is done by one driver per network.
//!
//! Three layers: `sys` is the foreign interface; `owner` and `qp` hold one owner per handle, parents by
//! `Arc`; everything above is safe but for the promises about memory that posting needs.
//!
//! Not here: connection management (the handshake over TCP carries the addresses), datagrams, and
//! GPUs posting for themselves.

mod chain;
mod config;
mod detail;
mod devices;
mod endpoint;
mod fabric;
mod lane;
mod messages;
mod network;
mod owner;
mod peers;
mod port;
mod progress;
mod qp;
mod registration;
mod request;
mod state;
mod status;
mod sys;

pub use config::{MAX_LANES, PortChoice, SIGNALS_VARIABLE, SignalChoice, VerbsConfig};
pub use devices::DeviceAccess;
pub use endpoint::VerbsEndpoint;
pub use fabric::VerbsFabric;
pub use network::VerbsNetwork;

pub use crate::fabric::DmaBuf;

/// Names of the RDMA devices of this host. Empty when there are none, also when the system has no
/// support for them.
#[must_use]
pub fn device_names() -> Vec<String> {
    owner::device_names().unwrap_or_default()
}
