//! Tests of the software NIC: its model, the NICs that GPUs run, and the device functions that post to both.

#[path = "../../../tests/support/src/bounded.rs"]
mod bounded;
mod common;
mod disorder;
mod errors;
mod gpu_nic;
mod hostile;
mod link_mutants;
mod mutants;
mod network;
mod oracle;
#[path = "../../../tests/conformance/parties.rs"]
mod parties;
mod partners;
mod poll_turns;
mod posting;
mod receives;
#[path = "../../../tests/support/src/skip.rs"]
mod skip;
#[path = "../../../tests/conformance/suite.rs"]
mod suite;
mod violations;

test_support::child_processes! { "peer" => network::child_process }
