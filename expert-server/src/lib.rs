//! The expert server: holds experts and nothing else, and computes them for whoever asks.
//!
//! Clients write frames of routed tokens straight into the server's memory. One data thread takes
//! whatever is ready from all of them, merges frames of one layer into one batch, computes it and
//! writes the weighted sums back, one row per token.
//!
//! | module | what it holds |
//! |---|---|
//! | [`server`] | a whole server: start, drain, stop |
//! | [`config`] | what it is told at its start |
//! | [`data`] | the data thread: links, batches, answers |
//! | [`compute`] | the arithmetic of experts |
//! | [`metrics`] | every metric |
//!
//! This crate does not know who decides a placement, nor how clients route. The failpoints named
//! `server::…` exist in builds with the feature `failpoints` only.

pub mod compute;
pub mod config;
pub mod data;
mod error;
mod http;
mod members;
pub mod metrics;
pub mod server;
mod status;

pub use config::{ExpertSelection, Limits, Placement, SelectionError, ServerConfig, Ticket};
pub use error::{ServerError, StartError};
pub use metrics::{DropReason, ServerMetrics};
pub use server::{ExpertServer, RunningServer};
