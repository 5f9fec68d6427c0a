//! Transports.
//!
//! | backend | peers | puts |
//! |---|---|---|
//! | [`local`] | two ends in one process | stores |
//! | [`shm`] | two processes of one host | stores into a sealed memfd |
//! | [`staged`] | as [`shm`], for tests | copies from staging memory, delayed and reordered at will |

pub mod local;
pub mod mapped;
#[cfg(not(loom))]
pub mod shm;
pub mod staged;
