//! What can go wrong, by operation.

use std::sync::Arc;

use thiserror::Error;

use super::descriptor::DescriptorError;
use p2p_core::endpoint::PostError;
use p2p_core::network::NetworkError;

/// Why a connection is over.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer closed it in good order.
    #[error("the peer closed it")]
    Left,
    /// The peer's process ended, or its host answers no more.
    #[error("the peer is gone: {0}")]
    Lost(Arc<str>),
    /// The peer sent what no correct peer sends.
    #[error("the peer broke the protocol: {0}")]
    Protocol(Arc<str>),
    /// A transfer missed its deadline with data under way: only the end of the connection gives its
    /// buffer back for sure.
    #[error("a {0} missed its deadline with data under way")]
    Deadline(&'static str),
    /// This side closed it.
    #[error("closed by this side")]
    Local,
    /// This side's engine was stopped or failed.
    #[error("the engine has stopped")]
    Stopped,
}

/// A transfer has failed. Its local buffer is free again, but for [`Stuck`](Self::Stuck); what is in the
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
        /// Why.
        reason: CloseReason,
    },
    /// The message is longer than the buffer that was to take it. Nothing was written. The receiver
    /// sees it always, the sender unless the message was so short that it went ahead.
    #[error("{op}: a message of {bytes} bytes met a buffer of {capacity}")]
    Truncated {
        /// Operation.
        op: &'static str,
        /// Bytes of the message.
        bytes: u64,
        /// Bytes of the buffer.
        capacity: u64,
    },
    /// The receiver has a buffer for the message, and could not open it to this side. Nothing was
    /// written; its receive has failed with the reason.
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
    /// The sender gave the message up after it was matched.
    #[error("{op}: the peer gave the message up")]
    Withdrawn {
        /// Operation.
        op: &'static str,
    },
    /// The transport refused or failed.
    #[error("{op}: transport error {code}: {detail}")]
    Fabric {
        /// Operation.
        op: &'static str,
        /// The transport's code.
        code: i64,
        /// What it means, what to do.
        detail: Arc<str>,
    },
    /// The engine's thread has gone into a transport's library and does not come back, so that nothing
    /// ends at its deadline any more. The transfer's buffer stays in use. Another engine works.
    #[error(
        "the engine's thread does not come back from a transport's library; its memory stays in use"
    )]
    Stuck,
}

/// An engine could not be stopped: its thread has gone into a transport's library and does not come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the engine's thread does not come back from a transport's library; memory that was registered must stay mapped"
)]
pub struct StopError;

impl TransferError {
    pub(super) fn post(op: &'static str, error: &PostError) -> Self {
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
    /// The peer's description of its memory is not usable here.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
    /// The memory is another device's, which this processor does not read or write. A local bug.
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
        /// Why.
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
    /// As many transfers as configured are under way, or the engine is behind. Try again.
    #[error("the engine has too much to do; wait for transfers and try again")]
    Busy,
    /// The connection is over.
    #[error("the connection is closed: {0}")]
    Closed(CloseReason),
}

/// Why a blocking or awaited transfer ended without success.
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
        /// What was tried.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A setting makes no sense.
    #[error("{what} is {found}, expected {expected}")]
    Config {
        /// Which setting.
        what: &'static str,
        /// Value found.
        found: u64,
        /// What is allowed.
        expected: &'static str,
    },
    /// A setting of text makes no sense.
    #[error("{what} is {found:?}, expected {expected}")]
    Text {
        /// Which setting.
        what: &'static str,
        /// Value found.
        found: String,
        /// What is allowed.
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
    /// Nobody answers there.
    #[error("cannot reach {addr}: {detail}")]
    Unreachable {
        /// Where to.
        addr: String,
        /// The system's answer.
        detail: String,
    },
    /// Not done in time.
    #[error("{addr} did not complete the handshake in time")]
    Timeout {
        /// Where to.
        addr: String,
    },
    /// The other side said no.
    #[error("{addr} rejected the connection: {message}")]
    Rejected {
        /// Where to.
        addr: String,
        /// Its words.
        message: String,
    },
    /// What answered is no engine, or one of another version.
    #[error("{addr}: {detail}")]
    Foreign {
        /// Where to.
        addr: String,
        /// What was wrong.
        detail: String,
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
    /// No memory, or none that any transport takes.
    #[error("cannot register {bytes} bytes: {detail}")]
    Refused {
        /// Bytes.
        bytes: u64,
        /// Why.
        detail: String,
    },
    /// It took longer than [`stuck_timeout`](super::EngineConfig::stuck_timeout). When the transport's
    /// library comes back, it is undone, and nobody is told a key of it; the memory must stay mapped until
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

/// Memory could not be taken back. It must stay mapped.
#[derive(Debug, Error)]
#[error("memory cannot be taken back: {detail}")]
pub struct DeregisterError {
    /// Who still uses it, or what failed.
    pub detail: String,
    /// The registration, still in force. `None` when the engine did not answer in time: it takes the
    /// memory back as soon as it can, and lets no later registration share the keys meanwhile.
    pub region: Option<super::MemoryRegion>,
}

/// The transfer is not known: its outcome was taken already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("there is no such transfer; its outcome was taken already")]
pub struct UnknownTransfer;

/// Nothing came in time.
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
