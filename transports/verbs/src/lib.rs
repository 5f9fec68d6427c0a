//! RDMA by libibverbs: InfiniBand and RoCE v2.
//!
//! A `VerbsNetwork` opens one or more ports. For every peer it creates one reliable-connected queue pair per port,
//! and a slot with its own key in its own protection domain. The docs of `VerbsEndpoint` list the request of each
//! operation. One driver per network polls for completions and wakes waiting threads.
//!
//! The feature `rdma` links libibverbs. Without it the crate contains only the settings.
//!
//! The crate excludes connection management (the handshake over TCP carries the addresses), datagrams, and requests
//! posted by GPUs themselves.

mod config;
#[cfg(any(feature = "rdma", test))]
mod detail;
#[cfg(all(fuzzing, not(feature = "rdma")))]
pub mod fuzzing;
#[cfg(feature = "rdma")]
mod rdma;

use p2p_core::fabric::FabricOpener;
use p2p_core::transports::NetworkOpener;

pub use config::{MAX_QUEUE_PAIRS, PortChoice, SIGNALS_VARIABLE, SignalChoice, VerbsConfig};
#[cfg(feature = "rdma")]
pub use rdma::{DeviceAccess, DmaBuf, VerbsEndpoint, VerbsFabric, VerbsNetwork};

/// Opens RDMA devices for slots from a program's request: `verbs` or `verbs:PORTS`. Requested ports replace those
/// of `config`. `None` in a build without the feature `rdma`.
#[must_use]
pub fn opener(config: VerbsConfig) -> Option<NetworkOpener> {
    #[cfg(feature = "rdma")]
    {
        let open = move |ports: Option<&str>, _: &mut _| {
            rdma::open(&config, ports).map(|network| vec![network])
        };
        Some(NetworkOpener::new(p2p_core::TransportKind::Verbs, open).in_auto())
    }
    #[cfg(not(feature = "rdma"))]
    {
        let _ = config;
        None
    }
}

/// Opens RDMA devices for the message engine from a program's request: `verbs` or `verbs:DEVICE`. `None` in a build
/// without the feature `rdma`.
#[must_use]
pub fn fabric_opener() -> Option<FabricOpener> {
    #[cfg(feature = "rdma")]
    return Some(FabricOpener {
        name: "verbs",
        argument: "DEVICE",
        open: |ports, _| {
            let config = ports.map_or_else(VerbsConfig::default, VerbsConfig::on);
            Ok(Box::new(VerbsFabric::open(config)?))
        },
    });
    #[cfg(not(feature = "rdma"))]
    None
}

/// Names of the RDMA devices of this host. The list is empty if the host has none, if the system has no support for
/// them, and in a build without the feature `rdma`.
#[must_use]
pub fn device_names() -> Vec<String> {
    #[cfg(feature = "rdma")]
    return rdma::device_names();
    #[cfg(not(feature = "rdma"))]
    Vec::new()
}
