//! The fabrics that need nothing installed: [`cma`] and `shm` within a host, `tcp` between any two hosts. [`stream`]
//! contains the last two.
//!
//! The contract is [`p2p_core::fabric`], which this module re-exports. The crates of the transports contain the fabrics
//! over libfabric and verbs.

pub mod cma;
#[cfg(fuzzing)]
pub mod fuzzing;
mod memory;
mod raw;
pub mod stream;

pub use p2p_core::fabric::*;
