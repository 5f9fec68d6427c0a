//! The servers of a placement and the connections to them: the common part of the CPU client and the GPU client.
//!
//! ```text
//!   control task ── follows the placement, reports suspects
//!        └─ connector, one for each lane and server ── handshake, liveness ──▶ link ──▶ mailbox of the lane
//! ```
//!
//! A *link* is a connection of one lane to one server. Its connector makes it, puts it into the lane's mailbox
//! and watches it. The lane uses it alone, and returns it when it is over.
//!
//! This module knows neither client: it imports nothing from `client` or `device`.

pub(crate) mod builder;
pub(crate) mod command;
mod connector;
pub(crate) mod control;
pub(crate) mod lane_port;
pub(crate) mod link;
pub(crate) mod pace;
pub(crate) mod placement;
pub(crate) mod settings;
pub(crate) mod shared;
mod tickets;

use std::sync::Arc;

use prometheus::Registry;

use control::Control;
use shared::Shared;

/// The running control side of a client. Dropping it ends the control task and all connections.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub shared: Arc<Shared>,
    pub control: Control,
    pub registry: Registry,
}
