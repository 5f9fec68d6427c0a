//! Why a server does not start, or stopped on its own.

use std::io;
use std::net::SocketAddr;

use checkpoint::OpenError;
use control_api::{ConfigError, LeaseError};
use p2p_core::bootstrap::BindError;
use protocol::GeometryError;

use crate::compute::LoadError;
use crate::config::SelectionError;
use crate::cpu::DataError;
use crate::device::DeviceError;

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The checkpoint cannot be used.
    #[error("cannot open the checkpoint: {0}")]
    Open(#[from] OpenError),
    /// The experts chosen do not exist.
    #[error("cannot hold the chosen experts: {0}")]
    Selection(#[from] SelectionError),
    /// The control plane assigned experts that the model does not have.
    #[error("the control plane assigned experts that this model does not have: {0}")]
    Assignment(#[source] SelectionError),
    /// Not even one token fits a frame.
    #[error("the slot is too small for this model: {0}")]
    Geometry(#[from] GeometryError),
    /// The GPU cannot serve.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The data listener cannot be made.
    #[error("cannot listen for clients: {0}")]
    Bind(#[from] BindError),
    /// The metrics port is taken.
    #[error(
        "cannot serve metrics: {addr} is in use by another process; choose another port or stop that process"
    )]
    MetricsInUse {
        /// Where.
        addr: SocketAddr,
    },
    /// The metrics listener cannot be made.
    #[error("cannot serve metrics on {addr}: {source}")]
    MetricsBind {
        /// Where.
        addr: SocketAddr,
        /// The system's answer.
        source: io::Error,
    },
    /// Clients cannot reach the address that they would be told.
    #[error(
        "'{found}' cannot be told to clients as the server's address; set an advertised address HOST:PORT"
    )]
    Advertise {
        /// The address.
        found: String,
    },
    /// The metrics registry refused a metric.
    #[error("cannot set up the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The URL or the token of the control plane cannot be used.
    #[error("cannot use the control plane's settings: {0}")]
    ControlPlane(#[from] ConfigError),
    /// The control plane did not take the server.
    #[error("cannot join the control plane at {url}: {source}")]
    Join {
        /// The control plane.
        url: String,
        /// Why.
        source: LeaseError,
    },
    /// The experts cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The loading thread panicked: a bug.
    #[error("loading the experts panicked; see its message on stderr")]
    LoadPanicked,
    /// The data thread cannot be started.
    #[error(transparent)]
    Data(#[from] DataError),
}

/// Why a server stopped on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The data thread ended.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The control plane does not want this process any more: another one has taken its name.
    #[error("the control plane ended the membership: {reason}")]
    Membership {
        /// What it said.
        reason: String,
    },
    /// Nobody could connect any more.
    #[error("the listener for clients ended unasked{}", .outcome.as_ref().map(|e| format!(": {e}")).unwrap_or_default())]
    Listener {
        /// How its task failed, if it did.
        outcome: Option<tokio::task::JoinError>,
    },
}
