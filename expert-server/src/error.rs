//! Why a server does not start, or ended on its own.

#![allow(missing_docs, reason = "the message of a variant says what its fields are")]

#[cfg(feature = "device")]
pub(crate) mod device;

use std::io;
use std::net::SocketAddr;

use checkpoint::{OpenError, TensorError};
use control_api::{ConfigError, LeaseError, code};
use httpd::trust::tls::InsecureListener;
#[cfg(feature = "device")]
use kernels::{abi::ErrorWord, gpu::GpuError};
use p2p_core::bootstrap::BindError;
use protocol::GeometryError;

use crate::compute::{LoadError, PoolError};
use crate::config::SelectionError;
use crate::peers::SourceError;

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The checkpoint cannot be used.
    #[error("cannot open the checkpoint: {0}")]
    Open(#[from] OpenError),
    /// The experts' tensors cannot be read.
    #[error("cannot read the experts of the checkpoint: {0}")]
    Fingerprint(#[source] TensorError),
    /// The selected experts do not exist.
    #[error("cannot hold the chosen experts: {0}")]
    Selection(#[from] SelectionError),
    /// The control plane assigned experts that the model does not have.
    #[error("the control plane assigned experts that this model does not have: {0}")]
    Assignment(#[source] SelectionError),
    /// A frame is too small for one token.
    #[error("the slot is too small for this model: {0}")]
    Geometry(#[from] GeometryError),
    /// The GPU cannot serve.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The data listener cannot be created.
    #[error("cannot listen for clients: {0}")]
    Bind(#[from] BindError),
    /// A listener would be open to other hosts without TLS.
    #[error(transparent)]
    Insecure(#[from] InsecureListener),
    /// Every process of other hosts could be a client.
    #[error(
        "{addr} is reachable from other hosts and would admit every client: it asks for no ticket, no token and no \
         certificate; give --tickets required with --control-plane, --token-file, or --tls-clients required, or, on a \
         trusted network, --insecure (SWITCHYARD_INSECURE=1)"
    )]
    AdmitsAll { addr: SocketAddr },
    /// The metrics port is taken.
    #[error(
        "cannot serve metrics: {addr} is in use by another process; choose another port or stop that process"
    )]
    MetricsInUse { addr: SocketAddr },
    /// The metrics listener cannot be created.
    #[error("cannot serve metrics on {addr}: {source}")]
    MetricsBind { addr: SocketAddr, source: io::Error },
    /// Clients could not reach the address that the server would advertise.
    #[error(
        "clients cannot connect to '{found}'; set an advertised address HOST:PORT with an address or \
         name of this host"
    )]
    Advertise { found: String },
    /// The advertised name does not resolve on this host.
    #[error(
        "the advertised address '{found}' does not resolve ({reason}); set HOST:PORT with a name that \
         clients can resolve, or an IP address"
    )]
    AdvertiseName { found: String, reason: String },
    /// The metrics registry refused a metric.
    #[error("cannot set up the metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The URL or the token of the control plane cannot be used.
    #[error("cannot use the control plane's settings: {0}")]
    ControlPlane(#[from] ConfigError),
    /// The control plane did not admit the server.
    #[error("cannot join the control plane at {url}: {source}")]
    Join { url: String, source: LeaseError },
    /// The fleet has other weights.
    #[error(
        "cannot join the control plane at {url}: {source}; tensors that differ first: {tensors}"
    )]
    Weights { url: String, source: LeaseError, tensors: String },
    /// The control plane has other digests of all bytes, or does not take this server's.
    #[error("cannot join the control plane at {url} with digests of all bytes: {reason}")]
    Digests { url: String, reason: String },
    /// The fleet has no model yet, so there is no server to read weights of.
    #[error(
        "cannot read weights of other servers: no server with the model has joined {url} within {seconds} s; start one \
         with the checkpoint's weight files first, or use --weights-from auto and a complete checkpoint here"
    )]
    NoModel { url: String, seconds: u64 },
    /// Experts came neither from other servers nor from files.
    #[error(
        "{missing} of {num_experts} experts are missing after {seconds} s without progress, first expert {expert} of layer \
         {layer} ({reason}); start a server that holds them, or give this one a complete checkpoint and --weights-from auto"
    )]
    Missing {
        missing: usize,
        num_experts: usize,
        seconds: u64,
        layer: u32,
        expert: u32,
        reason: String,
    },
    /// The server cannot read weights of others.
    #[error("--weights-from peers is not possible: {reason}; use auto or disk")]
    NoPeers { reason: &'static str },
    /// The control plane is of a version without tickets.
    #[error(
        "the control plane at {url} sends no keys for tickets: update it first, or start this server with --tickets off"
    )]
    NoTicketKeys { url: String },
    /// Other servers cannot connect to read weights.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The experts cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The loading thread panicked, which is a bug.
    #[error("loading the experts panicked; see its message on stderr")]
    LoadPanicked,
    /// The data thread cannot be started.
    #[error(transparent)]
    Data(#[from] DataError),
}

impl StartError {
    /// True if the control plane refused the server because another live process has its name.
    #[must_use]
    pub fn is_name_conflict(&self) -> bool {
        let Self::Join { source: LeaseError::Ended { code, .. }, .. } = self else { return false };
        is_name_conflict(code.as_deref())
    }
}

/// True if a refusal with this code says that another live process has the name.
pub(crate) fn is_name_conflict(code: Option<&str>) -> bool {
    matches!(code, Some(code::NAME_IN_USE | code::SUPERSEDED))
}

/// Why a server ended on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The data thread ended.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The control plane ended the membership: another live process has the name, or the fleet has other weights.
    #[error("the control plane ended the membership: {reason}")]
    Membership { reason: String, is_name_conflict: bool },
    /// The listener ended, so no client could connect any more. `outcome` is the failure of its task, if any.
    #[error("the listener for clients ended unexpectedly{}", .outcome.as_ref().map(|e| format!(": {e}")).unwrap_or_default())]
    Listener { outcome: Option<tokio::task::JoinError> },
}

/// Why a data thread does not start, or ended on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The system refused a resource that the thread needs.
    #[error("cannot start the data thread: {0}")]
    Start(#[source] io::Error),
    /// The compute threads cannot be started.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The thread panicked, which is a bug. Every link is closed.
    #[error("the data thread panicked: {message}")]
    Panicked { message: String },
    /// The system call that waits for clients failed.
    #[error("the data thread cannot wait for its clients: {0}")]
    Wait(#[source] io::Error),
    /// The GPU failed, or did not finish a batch. Its memory is lost with the process.
    #[cfg(feature = "device")]
    #[error("the data thread lost its GPU: {0}")]
    Gpu(#[from] GpuError),
    /// A kernel found that the GPU, or the description of its copies, is out of order. It ended itself, so that
    /// no wrong answer is sent. The GPU's memory is lost with the process.
    #[cfg(feature = "device")]
    #[error("the data thread lost its GPU: {word}; then {source}")]
    Trapped {
        /// The wait in which the kernel ended.
        word: ErrorWord,
        /// The GPU's error after it.
        source: GpuError,
    },
}
