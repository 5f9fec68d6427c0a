//! Errors of the engine as exceptions of `switchyard_moe.p2p`.

use message_engine::{
    CloseReason, ConnectError, DeregisterError, RegisterError, StartError, SubmitError,
    TransferError, WaitError,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// An error on its way to Python: the exception's class, and the message.
#[derive(Debug)]
pub(super) struct Failure {
    kind: Kind,
    message: String,
}

/// Classes of `switchyard_moe.p2p._errors`.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Argument,
    Config,
    Closed,
    Connect,
    Memory,
    Timeout,
    PeerLost,
    Truncated,
    Transfer,
    Forked,
    Codec,
}

impl Failure {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// An argument that cannot be used.
    pub(super) fn argument(message: impl Into<String>) -> Self {
        Self::new(Kind::Argument, message)
    }

    /// An endpoint that was closed.
    pub(super) fn closed() -> Self {
        Self::new(Kind::Closed, "the endpoint is closed: make another one")
    }

    /// A call in a child of the process that made the endpoint.
    pub(super) fn forked() -> Self {
        Self::new(
            Kind::Forked,
            "this process was forked after the endpoint was made, and has no thread for it: make an endpoint \
             in the child, or start the child with the method `spawn`",
        )
    }

    /// Something that did not happen in time.
    pub(super) fn timeout(message: impl Into<String>) -> Self {
        Self::new(Kind::Timeout, message)
    }

    /// A transfer that the engine does not end.
    pub(super) fn stuck() -> Self {
        Self::transfer(&TransferError::Stuck)
    }

    /// Bytes that are no frame of the codec.
    pub(super) fn codec(message: impl Into<String>) -> Self {
        Self::new(Kind::Codec, message)
    }

    pub(super) fn transfer(error: &TransferError) -> Self {
        let kind = match error {
            TransferError::Deadline { .. } => Kind::Timeout,
            TransferError::Disconnected { reason, .. } => closed_kind(reason),
            TransferError::Truncated { .. } => Kind::Truncated,
            _ => Kind::Transfer,
        };
        Self::new(kind, error.to_string())
    }

    pub(super) fn submit(error: &SubmitError) -> Self {
        let kind = match error {
            SubmitError::Closed(reason) => closed_kind(reason),
            SubmitError::Busy => Kind::Timeout,
            _ => Kind::Argument,
        };
        Self::new(kind, error.to_string())
    }
}

/// The class for an operation on a connection that ended for `reason`.
const fn closed_kind(reason: &CloseReason) -> Kind {
    match reason {
        CloseReason::Local | CloseReason::Stopped => Kind::Closed,
        CloseReason::Deadline(_) => Kind::Timeout,
        _ => Kind::PeerLost,
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        Self::new(Kind::Config, error.to_string())
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        let kind = match error {
            ConnectError::Metadata(_) => Kind::Argument,
            ConnectError::Stopped => Kind::Closed,
            ConnectError::Timeout { .. } => Kind::Timeout,
            _ => Kind::Connect,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<WaitError> for Failure {
    fn from(error: WaitError) -> Self {
        match error {
            WaitError::Stopped => Self::closed(),
            _ => Self::timeout(error.to_string()),
        }
    }
}

impl From<RegisterError> for Failure {
    fn from(error: RegisterError) -> Self {
        let kind = match error {
            RegisterError::Stopped => Kind::Closed,
            RegisterError::Timeout { .. } => Kind::Timeout,
            _ => Kind::Memory,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<&DeregisterError> for Failure {
    fn from(error: &DeregisterError) -> Self {
        Self::new(Kind::Memory, error.to_string())
    }
}

impl From<Failure> for PyErr {
    fn from(Failure { kind, message }: Failure) -> Self {
        Python::attach(|py| match class(py, kind) {
            Ok(class) => Self::from_type(class.clone(), message),
            Err(error) => error,
        })
    }
}

fn class(py: Python<'_>, kind: Kind) -> PyResult<&Bound<'_, PyType>> {
    let (slot, name) = match kind {
        Kind::Argument => (&CLASSES[0], "ArgumentError"),
        Kind::Config => (&CLASSES[1], "ConfigError"),
        Kind::Closed => (&CLASSES[2], "ClosedError"),
        Kind::Connect => (&CLASSES[3], "ConnectError"),
        Kind::Memory => (&CLASSES[4], "MemoryRegionError"),
        Kind::Timeout => (&CLASSES[5], "TransferTimeoutError"),
        Kind::PeerLost => (&CLASSES[6], "PeerLostError"),
        Kind::Truncated => (&CLASSES[7], "TruncatedError"),
        Kind::Transfer => (&CLASSES[8], "TransferError"),
        Kind::Forked => (&CLASSES[9], "ForkedError"),
        Kind::Codec => (&CLASSES[10], "CodecError"),
    };
    slot.import(py, "switchyard_moe.p2p._errors", name)
}

static CLASSES: [PyOnceLock<Py<PyType>>; 11] = [const { PyOnceLock::new() }; 11];
