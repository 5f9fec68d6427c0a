//! Errors, one type per operation.

use std::sync::Arc;

use thiserror::Error;

use super::descriptor::DescriptorError;
use p2p_core::endpoint::PostError;
use p2p_core::network::NetworkError;

/// Reason of a connection's end.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer closed it in an orderly way.
    #[error("the peer closed it")]
    Left,
    /// The peer's process ended, or its host no longer answers.
    #[error("the peer is gone: {0}")]
    Lost(Arc<str>),
    /// The peer sent bytes that no correct peer sends.
    #[error("the peer broke the protocol: {0}")]
    Protocol(Arc<str>),
    /// A transfer missed its deadline while data was under way. Only the end of the connection frees its buffer with
    /// certainty.
    #[error("a {0} missed its deadline with data under way")]
    Deadline(&'static str),
    /// This side closed it.
    #[error("closed by this side")]
    Local,
    /// This side's engine was stopped or failed.
    #[error("the engine has stopped")]
    Stopped,
}

/// Failure of a transfer. Its local buffer is free again, except after [`Stuck`](Self::Stuck). The content of the
/// destination is undefined.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// Not done in time.
    #[error("{op}: not done at its deadline")]
    Deadline {
        /// Operation.
        op: &'static str,
    },
    /// The connection ended before.
    #[error("{op}: the connection is closed: {reason}")]
    Disconnected {
        /// Operation.
        op: &'static str,
        /// Reason of the end.
        reason: CloseReason,
    },
    /// The message is longer than the buffer of its receive. Nothing was written. The receiver always gets this error.
    /// The sender gets it unless the message was sent ahead of its receive.
    #[error("{op}: a message of {bytes} bytes for a buffer of {capacity} bytes")]
    Truncated {
        /// Operation.
        op: &'static str,
        /// Bytes of the message.
        bytes: u64,
        /// Bytes of the buffer.
        capacity: u64,
    },
    /// The receiver has a buffer for the message, but could not open it to this side. Nothing was written. The receive
    /// has failed with the reason.
    #[error(
        "{op}: the peer has a buffer for the {bytes} bytes and could not open it to this side; the error \
         of its receive says why: let it register the buffer for writing by peers, and send again when \
         fewer of its receives are under way"
    )]
    NotOpened {
        /// Operation.
        op: &'static str,
        /// Bytes of the message.
        bytes: u64,
    },
    /// The sender withdrew the message after it was matched.
    #[error("{op}: the peer withdrew the message")]
    Withdrawn {
        /// Operation.
        op: &'static str,
    },
    /// The transport refused the operation or failed.
    #[error("{op}: transport error {code}: {detail}")]
    Fabric {
        /// Operation.
        op: &'static str,
        /// The transport's code.
        code: i64,
        /// Meaning of the code, and remedy.
        detail: Arc<str>,
    },
    /// A call of the engine's thread into a transport's library does not return, so nothing ends at its deadline. The
    /// transfer's buffer stays in use. Another engine of this process still works.
    #[error(
        "a call of the engine's thread into a transport's library does not return; the memory stays in use"
    )]
    Stuck,
}

/// An engine could not be stopped, because a call of its thread into a transport's library does not return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "a call of the engine's thread into a transport's library does not return; registered memory must stay mapped"
)]
pub struct StopError;

impl TransferError {
    pub(super) fn post(op: &'static str, error: &PostError) -> Self {
        if let PostError::Disconnected { .. } = error {
            return Self::Disconnected { op, reason: CloseReason::Lost(error.to_string().into()) };
        }
        let code = match error {
            PostError::Transport { code, .. } => *code,
            _ => 0,
        };
        let detail = match error {
            PostError::Transport { detail, .. } => detail.as_str().into(),
            other => other.to_string().into(),
        };
        Self::Fabric { op, code, detail }
    }
}

/// A transfer could not be started.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The range leaves the registration. A local bug.
    #[error("{bytes} bytes at offset {offset} leave the registered {limit} bytes")]
    Range {
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: u64,
        /// Bytes of the registration.
        limit: u64,
    },
    /// The two sides of a one-sided transfer differ in size. A local bug.
    #[error("{local} bytes here for {remote} bytes at the peer: give ranges of one size")]
    SizeMismatch {
        /// Bytes of the local range.
        local: u64,
        /// Bytes of the descriptor.
        remote: u64,
    },
    /// The peer's description of its memory is not usable on this connection.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The memory belongs to another device, and this processor does not read or write it. A local bug.
    #[error("the memory is another device's: let the device copy from or to it")]
    DeviceMemory,
    /// The memory belongs to another engine. A local bug.
    #[error("the memory is registered with another engine")]
    ForeignMemory,
    /// The memory cannot be used over this connection's transport.
    #[error("the memory is not registered with {transport}: {detail}")]
    Unregistered {
        /// The transport.
        transport: String,
        /// Reason and remedy.
        detail: &'static str,
    },
    /// A notification is longer than the peer takes.
    #[error("a notification of {bytes} bytes, the peer takes at most {limit}")]
    TooLong {
        /// Bytes of it.
        bytes: u64,
        /// The peer's limit.
        limit: u64,
    },
    /// The configured number of transfers is under way, or the command queue is full. The caller may retry.
    #[error("the engine is busy; wait for transfers and retry")]
    Busy,
    /// The connection is closed.
    #[error("the connection is closed: {0}")]
    Closed(CloseReason),
}

/// Failure of a blocking or awaited transfer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OpError {
    /// It could not be started.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// It failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// The engine could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// Attempted action.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A setting is out of range.
    #[error("{what} is {found}, expected {expected}")]
    Config {
        /// Name of the setting.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Allowed values.
        expected: &'static str,
    },
    /// A text setting is invalid.
    #[error("{what} is {found:?}, expected {expected}")]
    Text {
        /// Name of the setting.
        what: &'static str,
        /// Value found.
        found: String,
        /// Allowed values.
        expected: &'static str,
    },
    /// A transport could not be opened.
    #[error(transparent)]
    Network(#[from] NetworkError),
}

/// A connection could not be made.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// No process answers at the address.
    #[error("cannot reach {addr}: {detail}")]
    Unreachable {
        /// Address of the attempt.
        addr: String,
        /// The system's answer.
        detail: String,
    },
    /// Not done in time.
    #[error("{addr} did not complete the handshake in time")]
    Timeout {
        /// Address of the attempt.
        addr: String,
    },
    /// The other side rejected the handshake.
    #[error("{addr} rejected the connection: {message}")]
    Rejected {
        /// Address of the attempt.
        addr: String,
        /// Reason that the other side gave.
        message: String,
    },
    /// The other side is no engine, or an engine of another version or incarnation.
    #[error("{addr}: {detail}")]
    Foreign {
        /// Address of the attempt.
        addr: String,
        /// Details of the failure.
        detail: String,
    },
    /// The TLS handshake failed.
    #[error("{addr}: {reason}")]
    Tls {
        /// Address of the attempt.
        addr: String,
        /// Reason and remedy.
        reason: String,
    },
    /// There is no ticket to show.
    #[error("no ticket for {addr}: {reason}")]
    Ticket {
        /// Address of the attempt.
        addr: String,
        /// Reason.
        reason: String,
    },
    /// The endpoint's metadata cannot be used.
    #[error("endpoint metadata: {0}")]
    Metadata(String),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// Memory could not be registered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The system has no memory, or no transport accepts the memory.
    #[error("cannot register {bytes} bytes: {detail}")]
    Refused {
        /// Bytes.
        bytes: u64,
        /// Reasons of the system and of each transport.
        detail: String,
    },
    /// The call took longer than [`stuck_timeout`](super::EngineConfig::stuck_timeout). The engine undoes the
    /// registration when the transport's library returns, and hands out no key of it. The memory must stay mapped until
    /// the engine answers again or has stopped.
    #[error(
        "registering {bytes} bytes has not ended within {limit_s} s; it will be undone when it does; raise `stuck_timeout` for memory that takes longer"
    )]
    Timeout {
        /// Bytes.
        bytes: u64,
        /// The limit in seconds.
        limit_s: u64,
    },
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}

/// Memory could not be deregistered. It must stay mapped.
#[derive(Debug, Error)]
#[error("memory cannot be taken back: {detail}")]
pub struct DeregisterError {
    /// User that still holds the memory, or the failed step.
    pub detail: String,
    /// The registration, still in force. `None` if the engine did not answer in time. It then deregisters the memory as
    /// soon as it can, and lets no later registration share the keys meanwhile.
    pub region: Option<super::MemoryRegion>,
}

/// The transfer is unknown: its outcome was taken already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("there is no such transfer; its outcome was taken already")]
pub struct UnknownTransfer;

/// A wait ended without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline has passed.
    #[error("nothing came before the deadline")]
    Deadline,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}
