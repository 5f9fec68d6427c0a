//! The way to servers under test: any network, through a proxy.

use std::sync::Arc;

use libfabric_transport::FabricNetwork;
use p2p_core::Transports;
use p2p_core::network::Network;
use proxy::{DeviceNetwork, LaneConfig, Proxy, ProxyConfig};
use softnic::{NicConfig, SoftNetwork};

/// The carrier of kernels' operations.
pub type Carrier = Arc<Proxy>;

/// The network under test, opened anew for every party. `None`, with a skip, if it is missing.
pub fn network() -> Option<Arc<dyn Network>> {
    let name = std::env::var("SWITCHYARD_TEST_TRANSPORT").unwrap_or_default();
    #[cfg(feature = "verbs")]
    if name == "verbs" {
        use verbs_transport::{VerbsConfig, VerbsNetwork};
        return match VerbsNetwork::open(VerbsConfig::default()) {
            Ok(network) => Some(Arc::new(network)),
            Err(error) => {
                test_support::skip("rdma", &error.to_string());
                None
            }
        };
    }
    if name == "softnic" {
        let network = SoftNetwork::open(NicConfig::default()).expect("a NIC in software");
        return Some(Arc::new(network));
    }
    let provider = if name.is_empty() { "tcp;ofi_rxm" } else { name.as_str() };
    match FabricNetwork::open(provider) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            test_support::skip("libfabric", &error.to_string());
            None
        }
    }
}

/// Settings of the path, for servers.
pub const fn variables() -> [(&'static str, String); 0] {
    []
}

/// The network alone, with the proxy through which kernels reach it.
pub fn reach(network: Arc<dyn Network>) -> (Transports, Carrier) {
    let kind = network.kind();
    let proxy = Arc::new(Proxy::start(&ProxyConfig::default()).expect("threads"));
    // Shallow, so that lanes wrap and fill.
    let lanes = LaneConfig { num_lanes: 3, depth: 64, budget: 48 };
    let network = DeviceNetwork::new(network, Arc::clone(&proxy), lanes);
    let networks = vec![Arc::new(network) as Arc<dyn Network>];
    (Transports { kinds: vec![kind], networks, missing: Vec::new() }, proxy)
}

/// Number of commands from kernels that it has carried out.
pub fn num_carried(proxy: &Carrier) -> u64 {
    proxy.stats().iter().map(|thread| thread.commands).sum()
}

/// Accepts no order: nothing can be done to the network.
pub fn control(order: &str) -> String {
    panic!("`{order}` is no order")
}
