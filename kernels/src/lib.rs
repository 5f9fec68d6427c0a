//! The one crate that owns CUDA.
//!
//! `include/switchyard/` and `cuda/` have the kernels of the data path, `gpu-tests/` their tests and
//! benchmarks in C++. The Rust side launches them:
//!
//! | module | content |
//! |---|---|
//! | [`abi`] | parameters, states and tables, field by field as in `device_abi.h` |
//! | [`geometry`] | where the sections of device frames lie |
//! | [`check`] | whether parameters can be used, decided before anything is launched |
//! | [`link_calls`] | the calls of a link one after the other, for tests of paths to a peer |
//! | [`p2p`] | measurements of puts between GPUs |
//! | [`plan`] | which compiled kernel serves a launch, and with how many threads |
//! | [`gpu`] | memory, streams, launches, graphs: the narrow interface to the driver |
//! | [`mlx5`] | send queues that kernels post RDMA requests on |
//! | [`proxy`] | measurements of commands to a proxy, and the copy that a relay forwards with |
//! | [`slots`] | the device slots of a connection |
//! | [`starts`] | how kernels start, and in how many blocks, by size |
//! | [`mod@probe`] | report of this host's GPUs |
//!
//! The feature `cuda` embeds the compiled kernels and opens the CUDA driver at run time; without it
//! [`gpu::Gpu::open`] says that this build has no GPU support, and everything else is there.
//!
//! The crate knows no sockets, no HTTP and no models.

pub mod abi;
pub mod check;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the driver looks names up"))]
mod entries;
mod error_word;
pub mod geometry;
pub mod gpu;
pub mod link_calls;
pub mod mlx5;
pub mod p2p;
pub mod plan;
pub mod probe;
pub mod proxy;
pub mod slots;
pub mod starts;

pub use probe::{CudaState, Gpu, GpuReport, NicAccess, ReportLine, probe};

/// Folder of the C headers, for build scripts and tests of this workspace.
pub const INCLUDE_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
