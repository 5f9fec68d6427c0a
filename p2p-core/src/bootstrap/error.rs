//! Errors of both sides.

use std::io;
use std::time::Duration;

use thiserror::Error;

use super::Reject;
use super::wire::WireError;
use crate::backend::shm::ShmError;
use crate::channel::ChannelError;
use crate::device::DeviceSlotError;
use crate::network::NetworkError;
use crate::slot::SlotConfigError;

/// A connection could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum ConnectError {
    /// No listener answers at the address.
    #[error("cannot reach {addr}: {source}")]
    Unreachable { addr: String, source: io::Error },
    /// The whole handshake took longer than allowed.
    #[error("{addr} did not complete the handshake within {} ms", .limit.as_millis())]
    Timeout { addr: String, limit: Duration },
    /// The listening side said no.
    #[error("{addr} rejected the connection: {reject}")]
    Rejected { addr: String, reject: Reject },
    /// The other end is not a Switchyard listener, or has another protocol version.
    #[error("{addr}: {source}")]
    Foreign { addr: String, source: WireError },
    /// The TLS handshake failed, or the other end speaks no TLS.
    #[error("no secure connection to {addr}: {reason}")]
    Tls { addr: String, reason: String },
    /// The connection broke during the handshake.
    #[error("the connection to {addr} broke during the handshake: {detail}")]
    Broken { addr: String, detail: String },
    /// A field to be sent is too long. A local bug or misconfiguration.
    #[error("`{field}` is {found} bytes, at most {max} are allowed")]
    TooLong { field: &'static str, found: usize, max: usize },
    /// There is no ticket to show.
    #[error("no ticket for the handshake: {0}")]
    Ticket(String),
    /// The slot configuration is not usable.
    #[error(transparent)]
    Slot(#[from] SlotConfigError),
    /// Shared memory failed.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// Device slots could not be made on this side.
    #[error(transparent)]
    Device(#[from] DeviceSlotError),
    /// A network failed on this side.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// The channel could not be made.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The connection could not be set up as liveness connection.
    #[error("cannot set up the liveness connection: {0}")]
    Liveness(io::Error),
}

impl ConnectError {
    /// The listening side's reason to refuse, if it refused.
    #[must_use]
    pub const fn reject(&self) -> Option<&Reject> {
        match self {
            Self::Rejected { reject, .. } => Some(reject),
            _ => None,
        }
    }
}

/// A listener could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum BindError {
    /// Another process listens there.
    #[error("{addr} is in use by another process; choose another port or stop that process")]
    InUse { addr: String },
    /// The system refuses to listen there.
    #[error("cannot listen on {addr}: {source}")]
    Listen { addr: String, source: io::Error },
    /// The Unix socket for shared memory cannot be made.
    #[error("cannot listen on an abstract Unix socket for shared memory: {0}")]
    Rendezvous(io::Error),
    /// The slot configuration is not usable.
    #[error(transparent)]
    Slot(#[from] SlotConfigError),
}
