//! Errors of building a client, and of its calls.
#![allow(missing_docs, reason = "the messages explain the fields")]

use std::time::Duration;

use protocol::ErrorCode;
use thiserror::Error;

/// Origin of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Arguments, configuration or a bug of this process. The same call fails again.
    LocalBug,
    /// A server or the network, and no replica could replace it.
    PeerFault,
    /// The same call may succeed later.
    Transient,
}

/// Failure of [`MoeClientBuilder::build`](crate::MoeClientBuilder::build).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Neither a placement table nor a control plane was given.
    #[error("the client has no placement: give it a control plane's URL or a placement table")]
    NoPlacement,
    /// The model descriptor contradicts itself.
    #[error("the model descriptor is not usable: {0}")]
    Model(control_api::PlacementError),
    /// The placement table contradicts itself.
    #[error("the placement table is not usable: {0}")]
    Placement(control_api::PlacementError),
    /// The placement table is for another model.
    #[error("the placement is for another model: {difference}")]
    ModelMismatch { difference: String },
    /// The control plane's URL or token cannot be used.
    #[error(transparent)]
    Control(#[from] control_api::ConfigError),
    /// The slot configuration cannot be used.
    #[error(transparent)]
    Slot(#[from] p2p_core::SlotConfigError),
    /// A frame cannot hold one token.
    #[error(transparent)]
    Geometry(#[from] protocol::geometry::GeometryError),
    /// A setting out of range.
    #[error("{setting} is {found}, expected {expected}")]
    Setting { setting: &'static str, found: String, expected: &'static str },
    /// The metrics could not be registered, usually because the registry has a client already.
    #[error("cannot register the client's metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The key of the client's tickets could not be made.
    #[error("cannot make a key for tickets: {0}")]
    Tickets(#[from] trust::ticket::SignError),
    /// The control thread could not be started.
    #[error("cannot start the client's control thread: {0}")]
    Thread(std::io::Error),
}

/// Failure of a call.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Slices whose lengths do not match.
    #[error("{what} has {found} values, expected {expected}")]
    Length { what: &'static str, found: usize, expected: String },
    /// The model has no such MoE layer.
    #[error("layer {layer} has no experts in this model, expected one of {expected}")]
    UnknownLayer { layer: u32, expected: String },
    /// An index that is neither an expert nor the mask.
    #[error("topk_idx of token {token} is {found}, expected -1 or 0 to {}", num_experts - 1)]
    ExpertIndex { token: usize, found: i32, num_experts: u32 },
    /// A weight that is NaN or infinite.
    #[error("topk_weights of token {token} holds {found}, expected a finite number")]
    Weight { token: usize, found: f32 },
    /// A warm-up for no call, or for more calls at a time than the client may have lanes.
    #[error(
        "a warm-up for {num_calls} calls at a time, expected 1 to {max_lanes}, the most lanes of the client"
    )]
    WarmUp { num_calls: usize, max_lanes: usize },
    /// As many calls are outstanding as the client may have lanes.
    #[error(
        "all {max_lanes} lanes stayed in use for {waited:?}: combine outstanding handles, or raise \
         max_lanes"
    )]
    LanesExhausted { max_lanes: usize, waited: Duration },
    /// No live server holds the expert.
    #[error(
        "no live replica of expert {expert} of layer {layer}: {detail} (waited {} ms)",
        waited.as_millis()
    )]
    NoReplica { layer: u32, expert: u32, waited: Duration, detail: String },
    /// A server refused the request, and every replica would.
    #[error("server {server} refuses layer {layer} ({code}): {message}")]
    Refused { server: String, layer: u32, code: ErrorCode, message: String },
    /// The retry budget of a call is used up.
    #[error(
        "layer {layer} got no answer for expert {expert} in {attempts} attempts; the last one \
         failed: {last}"
    )]
    Attempts { layer: u32, expert: u32, attempts: u32, last: String },
    /// A request frame could not be written. A local bug.
    #[error("cannot encode a request for layer {layer}: {detail}")]
    Encode { layer: u32, detail: String },
    /// The number of answered pairs differs from the request, so the output is wrong. A local bug.
    #[error("layer {layer}: {found} (token, expert) pairs were answered, expected {expected}")]
    Accounting { layer: u32, found: u64, expected: u64 },
    /// The client is shut down.
    #[error("the client is shut down")]
    ShutDown,
    /// The caller's own function ended the wait.
    #[error("the caller cancelled the call")]
    Cancelled,
    /// The operating system failed.
    #[error("{op}: {source}")]
    System { op: &'static str, source: std::io::Error },
}

impl ClientError {
    /// Origin of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Length { .. }
            | Self::UnknownLayer { .. }
            | Self::ExpertIndex { .. }
            | Self::Weight { .. }
            | Self::WarmUp { .. }
            | Self::Encode { .. }
            | Self::Accounting { .. }
            | Self::ShutDown => ErrorKind::LocalBug,
            Self::Refused { .. } | Self::Attempts { .. } => ErrorKind::PeerFault,
            Self::LanesExhausted { .. }
            | Self::NoReplica { .. }
            | Self::Cancelled
            | Self::System { .. } => ErrorKind::Transient,
        }
    }
}
