//! Measuring code of the command line and of the libraries.
//!
//! | module | what it measures |
//! |---|---|
//! | [`p2p`] | latency and bandwidth of puts and flags between processes, and between GPUs |
//! | [`proxy`] | commands from kernels or threads of this host, through the threads of a proxy |
//! | [`engine`] | latency and bandwidth of one-sided transfers of the message engine |

pub mod engine;
pub mod p2p;
pub mod proxy;
