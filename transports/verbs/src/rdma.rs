//! The transport itself, over libibverbs.
//!
//! The transport has three layers. `sys` is the foreign interface. `owner` and `qp` have one owner per handle and
//! hold parents by `Arc`. All layers above are safe, except for the promises about memory that posting needs.

mod chain;
mod devices;
mod endpoint;
mod fabric;
mod messages;
mod network;
mod owner;
mod peers;
mod port;
mod progress;
mod qp;
mod registration;
mod request;
mod send_queue;
mod state;
mod status;
mod sys;

use crate::{config, detail};

use std::sync::Arc;

use p2p_core::network::{Network, NetworkError};

pub use devices::DeviceAccess;
pub use endpoint::VerbsEndpoint;
pub use fabric::VerbsFabric;
pub use network::VerbsNetwork;

use config::VerbsConfig;
pub use p2p_core::fabric::DmaBuf;

/// Opens the network of the settings. Ports that the program requests replace those of the settings.
pub(crate) fn open(
    config: &VerbsConfig,
    ports: Option<&str>,
) -> Result<Arc<dyn Network>, NetworkError> {
    VerbsNetwork::open(wished(config, ports)).map(|network| Arc::new(network) as Arc<dyn Network>)
}

pub(crate) fn device_names() -> Vec<String> {
    owner::device_names().unwrap_or_default()
}

/// The settings with the requested ports, if the request names any.
fn wished(config: &VerbsConfig, ports: Option<&str>) -> VerbsConfig {
    let config = config.clone();
    match ports {
        Some(ports) => config.on_ports(ports),
        None => config,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PortChoice;

    #[test]
    fn ports_near_something_mean_the_same_in_settings_and_in_wishes() {
        let settings =
            VerbsConfig { traffic_class: 106, gid_index: Some(3), ..VerbsConfig::default() };
        for text in ["near=0000:3b:00.0", "node=1", "mlx5_0:1+mlx5_1"] {
            let found = wished(&settings, Some(text));
            assert_eq!(found, settings.clone().on_ports(text));
            assert_eq!(found.ports, VerbsConfig::on(text).ports);
            assert_ne!(found.ports, PortChoice::First);
        }
        assert_eq!(wished(&settings, None), settings);
    }
}
