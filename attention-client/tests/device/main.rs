//! The client with tensors in GPU memory, against real servers on GPUs: here both in software, whose
//! kernels are those of real ones, compiled for the host. With `SWITCHYARD_TEST_DEVICE=cuda` the same
//! tests use GPUs: the first for servers, the last for the client.

#[path = "../client_common/mod.rs"]
mod client_common;

mod bad_input;
mod crowd;
mod early_sum;
mod exits;
mod faults;
mod graphs;
mod late;
mod layers;
mod order;
mod parts;
mod places;
mod rig;
mod stuck;
mod traces;
mod without;

test_support::child_processes! { "server" => rig::child::run }
