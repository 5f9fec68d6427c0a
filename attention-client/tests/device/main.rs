//! The client with tensors in GPU memory, against real servers on GPUs: here both in software, whose
//! kernels are those of real ones, compiled for the host. With `SWITCHYARD_TEST_DEVICE=cuda` the same
//! tests use GPUs: the first for servers, the last for the client.

#[path = "../client_common/mod.rs"]
mod client_common;

#[path = "../../../tests/support/src/skip.rs"]
mod skip;

#[path = "../../../tests/support/src/stopped.rs"]
mod stopped;

mod ahead;
mod bad_input;
mod crowd;
mod exits;
mod faults;
mod graphs;
mod layers;
mod order;
mod parts;
mod places;
mod rig;
mod stuck;
mod without;

/// Not a test: a server in a process of its own, for tests that kill or stop it.
#[test]
fn child_server() {
    rig::child::run();
}
