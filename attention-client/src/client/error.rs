//! What can go wrong with a client and with one call.

use std::time::Duration;

use protocol::ErrorCode;
use thiserror::Error;

/// Whose fault an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The arguments or the configuration: the same call fails again.
    LocalBug,
    /// A server or the network, and no replica could make up for it.
    PeerFault,
    /// The same call may succeed later.
    Transient,
}

/// A client could not be made.
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
    #[error("the placement is for model {found}, expected {expected}")]
    ModelMismatch {
        /// Fingerprint in the table.
        found: String,
        /// Fingerprint of the client's model.
        expected: String,
    },
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
    Setting {
        /// Which setting.
        setting: &'static str,
        /// The value given.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The metrics could not be registered, usually because the registry has a client already.
    #[error("cannot register the client's metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The control thread could not be started.
    #[error("cannot start the client's control thread: {0}")]
    Thread(std::io::Error),
}

/// One call failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Slices whose lengths do not fit together.
    #[error("{what} has {found} values, expected {expected}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// Its length.
        found: usize,
        /// What was expected, in words.
        expected: String,
    },
    /// The model has no such MoE layer.
    #[error("layer {layer} has no experts in this model, expected one of {expected}")]
    UnknownLayer {
        /// The layer asked for.
        layer: u32,
        /// The MoE layers, in words.
        expected: String,
    },
    /// An index that is neither an expert nor the mask.
    #[error("topk_idx of token {token} is {found}, expected -1 or 0 to {}", num_experts - 1)]
    ExpertIndex {
        /// Row of `topk_idx`.
        token: usize,
        /// The value.
        found: i32,
        /// Experts of a layer.
        num_experts: u32,
    },
    /// A weight that is NaN or infinite.
    #[error("topk_weights of token {token} holds {found}, expected a finite number")]
    Weight {
        /// Row of `topk_weights`.
        token: usize,
        /// The value.
        found: f32,
    },
    /// More calls are outstanding than the client has lanes.
    #[error(
        "all {max_lanes} lanes stayed in use for {waited:?}: combine outstanding handles, or raise \
         max_lanes"
    )]
    LanesExhausted {
        /// Most lanes.
        max_lanes: usize,
        /// How long the call waited.
        waited: Duration,
    },
    /// No server that holds the expert can be reached.
    #[error(
        "no live replica of expert {expert} of layer {layer}: {detail} (waited {} ms)",
        waited.as_millis()
    )]
    NoReplica {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// How long the call waited for one.
        waited: Duration,
        /// What is known about those that should hold it.
        detail: String,
    },
    /// A server refuses the request for a reason that holds on every replica.
    #[error("server {server} refuses layer {layer} ({code}): {message}")]
    Refused {
        /// Name of the server.
        server: String,
        /// Layer.
        layer: u32,
        /// Why.
        code: ErrorCode,
        /// The server's words.
        message: String,
    },
    /// The tokens were sent too often without an answer.
    #[error(
        "layer {layer} got no answer for expert {expert} in {attempts} attempts; the last one \
         failed: {last}"
    )]
    Attempts {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Times sent.
        attempts: u32,
        /// The last failure.
        last: String,
    },
    /// A request frame could not be written. A local bug.
    #[error("cannot encode a request for layer {layer}: {detail}")]
    Encode {
        /// Layer.
        layer: u32,
        /// What the encoder says.
        detail: String,
    },
    /// The answers do not add up to the request: the output is not to be used. A local bug.
    #[error("layer {layer}: {found} (token, expert) pairs were answered, expected {expected}")]
    Accounting {
        /// Layer.
        layer: u32,
        /// Pairs answered or left out.
        found: u64,
        /// Pairs asked for.
        expected: u64,
    },
    /// The client is shut down.
    #[error("the client is shut down")]
    ShutDown,
    /// The system refused.
    #[error("{op}: {source}")]
    System {
        /// Operation.
        op: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

impl ClientError {
    /// Whose fault it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Length { .. }
            | Self::UnknownLayer { .. }
            | Self::ExpertIndex { .. }
            | Self::Weight { .. }
            | Self::Encode { .. }
            | Self::Accounting { .. }
            | Self::ShutDown => ErrorKind::LocalBug,
            Self::Refused { .. } | Self::Attempts { .. } => ErrorKind::PeerFault,
            Self::LanesExhausted { .. } | Self::NoReplica { .. } | Self::System { .. } => {
                ErrorKind::Transient
            }
        }
    }
}
