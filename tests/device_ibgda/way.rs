//! The way to servers under test: requests that kernels post by themselves, to NICs in software behind the
//! calls of libibverbs and libmlx5. Hosts are joined by the NIC model as a transport.

use std::sync::Arc;

use ibgda::{Nic, NicConfig, QueueConfig, QueuePath};
use ibgda_network::{DeviceConfig, DeviceNetwork};
use p2p_core::network::Network;
use p2p_core::{TransportKind, Transports};
use softnic::SoftNetwork;

use crate::rig::PATIENCE;

/// Counts from here: the requests that the NIC of the process had executed before.
#[derive(Debug, Clone, Copy)]
pub struct Carrier(u64);

/// The network under test, opened anew for every party.
#[allow(clippy::unnecessary_wraps, reason = "other ways are not on every host")]
pub fn network() -> Option<Arc<dyn Network>> {
    let libraries = softnic_verbs::libraries().expect("functions");
    // A NIC in software is in no list of addresses.
    let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
    let nic = Nic::open(&libraries, &config).expect("a NIC");
    let inner = SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC in software");
    let path = match std::env::var("SWITCHYARD_TEST_QUEUES").as_deref() {
        Ok("devx") => QueuePath::Devx,
        _ => QueuePath::Plain,
    };
    // Shallow, so that queues wrap and fill, and few, so that blocks share them.
    let queue = QueueConfig { path, depth: 128, ..QueueConfig::default() };
    let config = DeviceConfig { num_queues: 3, queue, wait_limit: PATIENCE };
    Some(Arc::new(DeviceNetwork::new(Arc::new(inner), nic, config)))
}

/// The network alone: there is no other way.
pub fn reach(network: Arc<dyn Network>) -> (Transports, Carrier) {
    let (kinds, networks) = (vec![TransportKind::Ibgda], vec![network]);
    (Transports { kinds, networks, missing: Vec::new() }, Carrier(num_requests()))
}

/// Requests that the NIC has executed since.
pub fn num_carried(carrier: &Carrier) -> u64 {
    num_requests() - carrier.0
}

fn num_requests() -> u64 {
    softnic_verbs::nic().expect("a NIC").lock().num_requests()
}
