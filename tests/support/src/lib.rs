//! Helpers for the tests of all crates. Nothing here depends on another crate of Switchyard.
//!
//! Rigs of whole services are in `switchyard-tests` (`tests/rig`).

pub mod allocations;
pub mod child;
pub mod descriptors;
pub mod eventually;
pub mod long;
pub mod model;
pub mod namespaces;
pub mod procfs;
pub mod seed;
pub mod skip;
pub mod stopped;

pub use eventually::eventually;
pub use seed::printed_seed;
pub use skip::skip;
