//! Both sides read each other's description of what a network needs to join them: addresses, keys,
//! queue pairs, processes. It travels in the handshakes, as bytes that only the network understands.

#![no_main]

use ibgda_network::detail::Detail;
use libfabric_transport::fuzzing as libfabric;
use libfuzzer_sys::fuzz_target;
use message_engine::fabric;
use verbs_transport::fuzzing as verbs;

fuzz_target!(|input: &[u8]| {
    check_hosts(input);
    fabric::fuzzing::check_detail(input);
    ibgda::peer::check_description(input);
    // Over a network that joins the hosts.
    if let Ok(detail) = Detail::decode(input) {
        assert_eq!(detail.encode().as_deref(), Ok(input));
        check_hosts(detail.inner);
        ibgda::peer::check_description(detail.peer);
        ibgda::peer::check_description(detail.host);
    }
});

fn check_hosts(input: &[u8]) {
    libfabric::check_detail(input);
    verbs::check_detail(input);
}
