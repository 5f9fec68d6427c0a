//! The suite over RDMA devices. `tests/rxe/` provides a software device for hosts without one.

use std::sync::Arc;

use p2p_core::network::Network;
use verbs_transport::{PortChoice, VerbsConfig, VerbsNetwork, device_names};

use crate::parties::{TransportSetup, in_processes};
use test_support::{bounded, skip};

/// Ports to use, as [`VerbsConfig::on`] takes them. Several ports stripe.
const PORTS: &str = "SWITCHYARD_TEST_PORTS";
/// Queue pairs per peer in this process and its children.
const NUM_QUEUE_PAIRS: &str = "P2P_VERBS_QUEUE_PAIRS";

#[test]
fn two_processes_over_verbs() {
    if is_possible() {
        let network = network();
        let flavour = network.flavour().to_owned();
        let setup = TransportSetup::over(network).with("KIND", "verbs");
        in_processes(&setup, |connection| connection.transport.flavour == flavour);
    }
}

#[test]
fn two_processes_over_several_queue_pairs() {
    if is_possible() {
        let this = std::env::current_exe().unwrap();
        let mut child = std::process::Command::new(this)
            .args(["--exact", "verbs::two_processes_over_verbs", "--nocapture"])
            .env(NUM_QUEUE_PAIRS, "3")
            .spawn()
            .unwrap();
        let limit = 4 * bounded::LONG;
        assert!(bounded::status_of(&mut child, "the test over three", limit).success());
    }
}

pub fn network() -> Arc<dyn Network> {
    let queue_pairs_per_port =
        std::env::var(NUM_QUEUE_PAIRS).map_or(1, |text| text.parse().expect("a number"));
    let ports = std::env::var(PORTS);
    let ports = ports.map_or(PortChoice::First, |text| VerbsConfig::on(&text).ports);
    let is_striped = queue_pairs_per_port > 1 || matches!(&ports, PortChoice::Named(_));
    let config = VerbsConfig {
        ports,
        queue_pairs_per_port,
        // Small slots, short messages and a short queue: every transfer is split, and every queue runs full.
        stripe_bytes: if is_striped { 10_000 } else { usize::MAX },
        max_message_bytes: 16 << 10,
        send_queue_depth: 32,
        // Emulated machines pause now and then.
        ack_timeout: 18,
        stall_timeout_ms: 20_000,
        ..Default::default()
    };
    Arc::new(VerbsNetwork::open(config).unwrap())
}

/// True if there is a device. Otherwise reports a skip.
fn is_possible() -> bool {
    if device_names().is_empty() {
        let error = VerbsNetwork::open(VerbsConfig::default()).unwrap_err();
        skip("rdma", &error.to_string());
        return false;
    }
    true
}
