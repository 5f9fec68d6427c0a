//! Tests of the software NIC: its model, the NICs that GPUs run, and the device functions that post to both.

mod common;
mod disorder;
mod errors;
mod gpu_nic;
mod guessed_keys;
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
#[path = "../../../tests/conformance/suite.rs"]
mod suite;
mod violations;

test_support::child_processes! {
    "peer" => network::child_process,
    "gpu-nic" => gpu_nic::processes::child_process,
}
