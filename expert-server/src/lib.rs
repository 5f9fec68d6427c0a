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
//! | [`cpu`] | the data thread: links, batches, answers |
//! | [`compute`] | the arithmetic of experts on CPUs |
//! | [`device`] | slots, weights and arithmetic on a GPU instead |
//! | [`metrics`] | every metric |
//!
//! This crate does not know who decides a placement, nor how clients route.
//!
//! Builds with the feature `failpoints` have failpoints, in the order in which a frame passes them:
//! `server::after_accept`, `server::after_copy_before_release`, `server::after_release`,
//! `server::before_compute`, `server::in_tick`, `server::after_compute`,
//! `server::between_payload_and_publish`, `server::after_publish`.

mod clients;
pub mod config;
pub mod cpu;
pub mod device;
mod error;
mod experts;
mod http;
mod inbox;
mod members;
pub mod metrics;
mod plane;
pub mod server;
mod status;

pub use expert_compute as compute;

pub use config::{ExpertSelection, Limits, Placement, SelectionError, ServerConfig, Ticket};
pub use error::{ServerError, StartError};
pub use metrics::{DropReason, ServerMetrics};
pub use server::{ExpertServer, RunningServer};
