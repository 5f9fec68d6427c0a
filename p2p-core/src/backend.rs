//! The backends that need no network, and a transport for tests.
//!
//! | backend | peers | puts |
//! |---|---|---|
//! | [`local`] | two in one process | stores |
//! | [`shm`] | two processes of one host | stores into a sealed memfd |
//! | `staged` (feature `test-transports`) | as [`shm`], for tests | copies from staging memory, delayed and reordered on request |
//!
//! Transports over networks are crates in `transports/`.

pub mod local;
pub mod mapped;
#[cfg(not(loom))]
pub mod shm;
#[cfg(feature = "test-transports")]
pub mod staged;
