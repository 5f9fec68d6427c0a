//! Both sides read each other's description of what a network needs to join them: addresses, keys,
//! queue pairs, processes. It travels in the handshakes, as bytes that only the network understands.

#![no_main]

use libfuzzer_sys::fuzz_target;
use p2p_core::backend::{libfabric, verbs};
use p2p_core::fabric;

fuzz_target!(|input: &[u8]| {
    libfabric::fuzzing::check_detail(input);
    verbs::check_detail(input);
    fabric::fuzzing::check_detail(input);
});
