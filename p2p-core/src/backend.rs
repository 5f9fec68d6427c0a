//! Transports.
//!
//! | backend | peers | puts |
//! |---|---|---|
//! | [`local`] | two ends in one process | stores |
//! | [`shm`] | two processes of one host | stores into a sealed memfd |
//! | `verbs` (feature) | processes of any hosts with RDMA devices | WRITE |
//! | `libfabric` (feature) | processes of any hosts, by TCP, shared memory, RDMA, EFA or CXI | messages and writes |
//! | [`cuda_ipc`] | two processes of one host with GPUs | stores of kernels into mapped GPU memory |
//! | [`staged`] | as [`shm`], for tests | copies from staging memory, delayed and reordered at will |

pub mod local;
pub mod mapped;
#[cfg(not(loom))]
pub mod shm;
#[cfg(test)]
#[path = "../../tests/support/src/skip.rs"]
mod skip;
#[cfg(feature = "test-transports")]
pub mod staged;
