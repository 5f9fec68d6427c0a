//! Measuring code of the command line and of the libraries.
//!
//! | module | what it measures |
//! |---|---|
//! | [`p2p`] | latency and bandwidth of puts and flags between processes, and between GPUs |
//! | [`proxy`] | commands from kernels or threads of this host, through the threads of a proxy |
//! | `moe` | one layer through the service beside the same experts in process, with the feature `moe` |
//! | `moe_device` | one layer through servers on GPUs, with the feature `moe` |
//! | [`clock`] | no measurement: the clocks that all of them read |
//! | [`stats`] | no measurement: percentiles |
//! | [`engine`] | latency and bandwidth of one-sided transfers of the message engine |

pub mod clock;
pub mod engine;
#[cfg(feature = "moe")]
pub mod moe;
#[cfg(feature = "moe")]
pub mod moe_device;
pub mod p2p;
pub mod proxy;
pub mod stats;
