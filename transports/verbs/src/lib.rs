//! RDMA by libibverbs: InfiniBand and RoCE v2.
//!
//! A `VerbsNetwork` opens one or more ports; for every peer it makes a reliable-connected queue pair
//! per port, and a slot with a key of its own in a protection domain of its own. What operations become
//! is in `VerbsEndpoint`; waiting is done by one driver per network.
//!
//! The feature `rdma` links libibverbs. Without it the crate has the settings only.
//!
//! Not here: connection management (the handshake over TCP carries the addresses), datagrams, and
//! GPUs posting for themselves.

mod config;
#[cfg(any(feature = "rdma", test))]
mod detail;
#[cfg(all(fuzzing, not(feature = "rdma")))]
pub mod fuzzing;
#[cfg(feature = "rdma")]
mod rdma;

use p2p_core::fabric::FabricOpener;
use p2p_core::transports::NetworkOpener;

pub use config::{MAX_LANES, PortChoice, SIGNALS_VARIABLE, SignalChoice, VerbsConfig};
#[cfg(feature = "rdma")]
pub use rdma::{DeviceAccess, DmaBuf, VerbsEndpoint, VerbsFabric, VerbsNetwork};

/// How a program opens RDMA devices for slots: `verbs`, `verbs:PORTS`. Ports of a wish replace those of `config`.
/// `None` in a build without the feature `rdma`.
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

/// How a program opens RDMA devices for the message engine: `verbs`, `verbs:DEVICE`. `None` in a build without the
/// feature `rdma`.
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

/// Names of the RDMA devices of this host. Empty when there are none, when the system has no support for them, and
/// in a build without the feature `rdma`.
#[must_use]
pub fn device_names() -> Vec<String> {
    #[cfg(feature = "rdma")]
    return rdma::device_names();
    #[cfg(not(feature = "rdma"))]
    Vec::new()
}
