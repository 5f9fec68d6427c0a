//! Dispatch and combine with failover over software NICs. Every server and the client have a NIC of their own, and all
//! data goes through it.

mod fused;
mod layer;
#[path = "../../kernels/tests/against_rust/library.rs"]
#[allow(dead_code, reason = "the kernels' own tests use the rest")]
mod library;
#[path = "../../kernels/tests/against_rust/link_calls.rs"]
mod link_calls;
mod links;
mod runner;
#[path = "../../kernels/tests/against_rust/world.rs"]
#[allow(dead_code, reason = "the kernels' own tests use the rest")]
mod world;

use std::sync::Arc;

use p2p_core::network::Network;
use p2p_core::{TransportKind, Transports};
use softnic::format::Syndrome;
use softnic::{Adversary, DoorbellMode, Fault, NicConfig, SoftNetwork};
use switchyard_tests::replicas::{Party, Replicas};

#[test]
fn layers_are_computed_through_the_nics() {
    let mut rig = Rig::start(None);
    rig.replicas.forward(0..25);
    rig.check(0);
}

#[test]
fn nics_that_delay_and_reorder_change_nothing() {
    let mut rig = Rig::start(Some(rand::random()));
    rig.replicas.forward(0..8);
    rig.check(0);
}

#[test]
fn a_server_that_goes_is_replaced() {
    let mut rig = Rig::start(None);
    rig.replicas.lose_a_server();
    // An answer of it may be missing or not.
    rig.check(1);
}

#[test]
fn a_request_that_its_nic_gives_up_is_sent_to_a_replica() {
    for syndrome in [Syndrome::RetryExceeded, Syndrome::RemoteAccess, Syndrome::LocalQpOp] {
        // Some requests are credits, and no call may wait for these.
        let is_resent = (4..28).any(|nth| {
            let mut rig = Rig::start(None);
            rig.replicas.forward(0..3);
            // The client's first queue pair, in the middle of its work.
            let fault = Fault::Fail { qpn: 0x40, nth, syndrome };
            rig.client_network().nic().inject(fault).expect("the queue");
            rig.replicas.forward(3..10);
            let num_failures = rig.client_network().nic().num_failures();
            assert!(num_failures >= 1, "the fault did not happen");
            rig.check(1);
            rig.replicas.num_failovers() > 0
        });
        assert!(is_resent, "{syndrome:?}: whatever failed, nothing was sent again");
    }
}

/// Servers and a client with a NIC each.
struct Rig {
    replicas: Replicas,
    /// The last belongs to the client.
    networks: Vec<Arc<SoftNetwork>>,
}

impl Rig {
    fn start(adversary: Option<u64>) -> Self {
        let mut networks = Vec::new();
        let replicas = Replicas::start(|party| {
            let network = network(adversary.map(|seed| match party {
                Party::Server(server) => seed ^ server as u64,
                Party::Client => !seed,
            }));
            networks.push(Arc::clone(&network));
            let kinds = vec![TransportKind::SoftNic];
            let networks = vec![network as Arc<dyn Network>];
            Some(Transports { kinds, networks, missing: Vec::new() })
        });
        Self { replicas: replicas.expect("transports"), networks }
    }

    fn client_network(&self) -> &SoftNetwork {
        self.networks.last().expect("a client")
    }

    fn check(&self, most_failovers: u32) {
        self.replicas.check(most_failovers);
        for network in &self.networks {
            let nic = network.nic();
            assert!(nic.violations().is_empty(), "{:?}", nic.violations().first());
        }
    }
}

fn network(adversary: Option<u64>) -> Arc<SoftNetwork> {
    let config = NicConfig {
        is_strict: true,
        doorbell: DoorbellMode::Checked,
        adversary: adversary.map(|seed| Adversary { seed }),
        ..NicConfig::default()
    };
    Arc::new(SoftNetwork::open(config).expect("a NIC"))
}
