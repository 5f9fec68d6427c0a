//! The exceptions of `switchyard_moe`, and which of them a failure of the Rust client becomes.

use attention_client::device::{DeviceBuildError, DeviceName, GpuError};
use attention_client::{BuildError, ClientError, DeviceError, ModelError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyType};

/// An exception class of `switchyard_moe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Error,
    Argument,
    ArgumentType,
    Busy,
    Closed,
    Config,
    ControlPlane,
    ControlPlaneUnavailable,
    Forked,
    ModelMismatch,
    NoReplica,
    NotReady,
    Peer,
    Refused,
}

impl Kind {
    /// Name of the class in Python.
    const fn name(self) -> &'static str {
        match self {
            Self::Error => "Error",
            Self::Argument => "ArgumentError",
            Self::ArgumentType => "ArgumentTypeError",
            Self::Busy => "BusyError",
            Self::Closed => "ClosedError",
            Self::Config => "ConfigError",
            Self::ControlPlane => "ControlPlaneError",
            Self::ControlPlaneUnavailable => "ControlPlaneUnavailableError",
            Self::Forked => "ForkedError",
            Self::ModelMismatch => "ModelMismatchError",
            Self::NoReplica => "NoReplicaError",
            Self::NotReady => "NotReady",
            Self::Peer => "PeerError",
            Self::Refused => "RefusedError",
        }
    }
}

/// An exception of class `kind`.
pub fn error(py: Python<'_>, kind: Kind, message: impl Into<String>) -> PyErr {
    match class(py, kind) {
        Ok(class) => PyErr::from_type(class, message.into()),
        Err(error) => error,
    }
}

fn class(py: Python<'_>, kind: Kind) -> PyResult<Bound<'_, PyType>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module =
        MODULE.get_or_try_init(py, || py.import("switchyard_moe._errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(kind.name())?.cast_into()?)
}

/// The exception for a failed call.
pub fn of_call(py: Python<'_>, failure: &ClientError) -> PyErr {
    let kind = match failure {
        ClientError::Length { .. }
        | ClientError::UnknownLayer { .. }
        | ClientError::ExpertIndex { .. }
        | ClientError::Weight { .. }
        | ClientError::WarmUp { .. } => Kind::Argument,
        ClientError::LanesExhausted { .. } => Kind::Busy,
        ClientError::NoReplica { .. } => Kind::NoReplica,
        ClientError::Refused { .. } => Kind::Refused,
        ClientError::Attempts { .. } => Kind::Peer,
        ClientError::ShutDown => Kind::Closed,
        _ => Kind::Error,
    };
    error(py, kind, failure.to_string())
}

/// The exception for a failed call on a GPU.
pub fn of_device(py: Python<'_>, failure: &DeviceError) -> PyErr {
    let kind = match failure {
        DeviceError::Client(failure) => return of_call(py, failure),
        DeviceError::Outstanding { .. } => Kind::Busy,
        DeviceError::NoPlace { .. } => Kind::NoReplica,
        DeviceError::Replays { .. } | DeviceError::ReplayRefused { .. } => Kind::Peer,
        DeviceError::Gpu(
            GpuError::Unregistered { .. } | GpuError::OtherGpu { .. } | GpuError::Short { .. },
        ) => Kind::Argument,
        DeviceError::Gpu(_) | DeviceError::Replaying => Kind::Error,
        _ => Kind::Argument,
    };
    error(py, kind, failure.to_string())
}

/// The exception for a GPU that cannot be opened.
pub fn of_gpu(py: Python<'_>, device: DeviceName, failure: &GpuError) -> PyErr {
    let text = match failure {
        GpuError::NotBuilt => format!(
            "device is {device}, but this build of switchyard-moe has no kernels for GPUs: install a wheel that has \
             them, or build one with SWITCHYARD_WHEEL_FEATURES=cuda"
        ),
        failure => format!("device is {device}, which cannot be used: {failure}"),
    };
    error(py, Kind::Config, text)
}

/// The exception for a client on a GPU that could not be built.
pub fn of_device_build(py: Python<'_>, device: DeviceName, failure: &DeviceBuildError) -> PyErr {
    match failure {
        DeviceBuildError::Client(failure) => of_build(py, failure),
        DeviceBuildError::Gpu(failure) => of_gpu(py, device, failure),
        DeviceBuildError::System { .. } => error(py, Kind::Error, failure.to_string()),
        _ => error(py, Kind::Config, failure.to_string()),
    }
}

/// The exception for a client that could not be built.
pub fn of_build(py: Python<'_>, failure: &BuildError) -> PyErr {
    let kind = match failure {
        BuildError::ModelMismatch { .. } => Kind::ModelMismatch,
        BuildError::Metrics(_) | BuildError::Thread(_) => Kind::Error,
        _ => Kind::Config,
    };
    error(py, kind, failure.to_string())
}

/// The exception for a control plane that did not say which model it serves.
pub fn of_model(py: Python<'_>, failure: &ModelError) -> PyErr {
    let kind = match failure {
        ModelError::Config(_) => Kind::Config,
        ModelError::Control(failure) if failure.is_transient() => Kind::ControlPlaneUnavailable,
        ModelError::Control(_) | ModelError::Fingerprint { .. } => Kind::ControlPlane,
        ModelError::NoModel => Kind::NotReady,
        _ => Kind::Error,
    };
    error(py, kind, failure.to_string())
}
