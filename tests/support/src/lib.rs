//! Helpers for the tests of all crates. Only the feature `endpoint` depends on another crate of Switchyard, p2p-core.
//!
//! Rigs of whole services are in `switchyard-tests` (`tests/rig`).

pub mod allocations;
pub mod bounded;
pub mod c_header;
pub mod child;
pub mod descriptors;
#[cfg(feature = "endpoint")]
pub mod endpoint;
pub mod etcd;
pub mod eventually;
pub mod long;
pub mod model;
pub mod namespaces;
pub mod own_process;
pub mod procfs;
pub mod resources;
pub mod seed;
pub mod skip;
pub mod stopped;

pub use eventually::eventually;
pub use seed::printed_seed;
pub use skip::skip;
