//! The backends that need no network, and a transport of tests.
//!
//! | backend | peers | puts |
//! |---|---|---|
//! | [`local`] | two ends in one process | stores |
//! | [`shm`] | two processes of one host | stores into a sealed memfd |
//! | `staged` (feature `test-transports`) | as [`shm`], for tests | copies from staging memory, delayed and reordered at will |
//!
//! Transports over networks are crates of their own, below `transports/`.

pub mod local;
pub mod mapped;
#[cfg(not(loom))]
pub mod shm;
#[cfg(feature = "test-transports")]
pub mod staged;
