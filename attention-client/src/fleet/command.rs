//! Messages to and from the control task.

use std::sync::Arc;

use super::lane_port::LanePort;
use super::link::Server;

/// Requests of lanes and connectors to the control task.
#[derive(Debug)]
pub(crate) enum Command {
    /// Connect a new lane.
    AddLane(LanePort),
    /// Report a server that failed.
    Suspect { server: Arc<Server>, reason: String },
}

/// An order to a connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Directive {
    /// Keep the server connected.
    Serve,
    /// The server left the placement: let it answer its frames, then close the connection.
    Drain,
    /// The client ends: close the connection at once.
    Stop,
}
