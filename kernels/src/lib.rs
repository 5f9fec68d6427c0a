//! The one crate that owns CUDA.
//!
//! Its Rust side holds the path of the C headers, `include/switchyard/`, and the probe behind
//! `switchyard doctor`. What needs the CUDA driver is behind the feature `cuda`, which opens the
//! driver at run time; without it nothing here refers to CUDA at all.
//!
//! Beside it, `cuda/` has the kernels of the data path and `gpu-tests/` their tests and benchmarks.
//! `cargo xtask` compiles and bundles them; no service launches them yet, and experts are computed on
//! CPUs.
//!
//! The crate knows no sockets, no HTTP and no models.

#[cfg(feature = "cuda")]
mod cuda;
pub mod probe;

pub use probe::{CudaState, Gpu, GpuReport, ReportLine, probe};

/// Folder of the C headers, for build scripts and tests of this workspace.
pub const INCLUDE_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
