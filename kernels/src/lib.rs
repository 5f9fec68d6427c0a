//! The one crate that owns CUDA.
//!
//! It holds the C layout of frames for device code, `include/switchyard/abi.h`, and the probe behind
//! `switchyard doctor`. There are no device kernels in it yet: experts are computed on CPUs. What
//! needs the CUDA driver is behind the feature `cuda`, which opens the driver at run time; without
//! it nothing here refers to CUDA at all.
//!
//! The crate knows no sockets, no HTTP and no models.

#[cfg(feature = "cuda")]
mod cuda;
pub mod probe;

pub use probe::{CudaState, Gpu, GpuReport, ReportLine, probe};

/// Folder of the C headers, for build scripts and tests of this workspace.
pub const INCLUDE_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
