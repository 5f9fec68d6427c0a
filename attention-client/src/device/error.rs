//! What can go wrong with a device client and with its calls.

use std::time::Duration;

use kernels::check::CheckError;
use kernels::gpu::{DeviceName, GpuError};
use protocol::ErrorCode;
use thiserror::Error;

use super::TensorType;
use crate::client::{BuildError, ClientError, ErrorKind};

/// A device client could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceBuildError {
    /// As for a client without a device.
    #[error(transparent)]
    Client(#[from] BuildError),
    /// The model or a setting does not suit the kernels.
    #[error("{what}: {source}")]
    Shape {
        /// Which setting, with its value.
        what: String,
        /// What the kernels can do.
        source: CheckError,
    },
    /// A setting out of range.
    #[error("{setting} is {found}, expected {expected}")]
    Setting {
        /// Which setting.
        setting: &'static str,
        /// The value given.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// The GPU refused.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The threads that post for kernels could not be started.
    #[error(transparent)]
    Proxy(#[from] proxy::ProxyError),
    /// The system refused.
    #[error("{op}: {source}")]
    System {
        /// Operation.
        op: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// A call of a device client failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// As for a client without a device.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The GPU refused, or arguments cannot be used; nothing was launched in the latter case.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A tensor of another element type than kernels read or write. Nothing was launched.
    #[error("{tensor} holds {found}, expected {expected}: convert it before the call")]
    Dtype {
        /// Which tensor of the call.
        tensor: &'static str,
        /// What the caller says that it holds.
        found: TensorType,
        /// What kernels read, or write.
        expected: TensorType,
    },
    /// A tensor without an address. Nothing was launched.
    #[error("{tensor} is null, expected the address of its first element")]
    Null {
        /// Which tensor of the call.
        tensor: &'static str,
    },
    /// A tensor that begins where kernels cannot read or write it. Nothing was launched.
    #[error("{tensor} begins at {found:#x}, expected a multiple of {align} bytes")]
    Alignment {
        /// Which tensor of the call.
        tensor: &'static str,
        /// Its address.
        found: u64,
        /// What kernels need.
        align: u64,
    },
    /// The word with the number of tokens held more than the call's capacity.
    #[error("num_tokens holds {found}, expected at most the capacity {capacity}")]
    Tokens {
        /// The value.
        found: u64,
        /// Rows of the call's tensors.
        capacity: u32,
    },
    /// A batch larger than a frame of the slots, which only `forward` sends in parts, and not into a graph.
    #[error(
        "a batch of up to {capacity} tokens does not fit into a frame of {max_tokens}: call `forward`, which sends it in parts, or raise slot_bytes on both sides"
    )]
    Capacity {
        /// Rows of the call's tensors.
        capacity: u32,
        /// Rows of a frame.
        max_tokens: u32,
    },
    /// As many calls are outstanding as slots have frames.
    #[error("{num_frames} calls are outstanding, as many as slots have frames: finish one first")]
    Outstanding {
        /// Frames of a slot.
        num_frames: u32,
    },
    /// A server is there, but outstanding calls use the place that it would take.
    #[error(
        "no live server has expert {expert} of layer {layer}, and one that is there finds no place: {num_calls} outstanding calls may use what a server before it left, and there are {max_servers} places; finish the calls, or raise max_servers"
    )]
    Seats {
        /// A layer of the model.
        layer: u32,
        /// One of its experts.
        expert: u32,
        /// Servers that the client has places for.
        max_servers: usize,
        /// Calls that are not finished.
        num_calls: usize,
    },
    /// Nothing else of the client runs while a graph with its calls may run.
    #[error(
        "a graph is being replayed: call `finish_replay`, until it returns without an error of the GPU"
    )]
    Replaying,
    /// A stream of another GPU. Nothing was launched.
    #[error(
        "the stream is one of {found}, expected one of {expected}, where the client's memory is"
    )]
    Device {
        /// GPU of the stream.
        found: DeviceName,
        /// GPU of the client.
        expected: DeviceName,
    },
    /// What is waited for was launched on another stream: it may not have ended when this one is done.
    #[error("stream {found:#x} was given, expected {expected:#x}, on which the call was launched")]
    Stream {
        /// Handle of the stream that was given.
        found: u64,
        /// Handle of the other one.
        expected: u64,
    },
    /// A server refused a frame of a recorded graph, which replaying would not change.
    #[error("{server} refused a frame of a recorded call: {code} (its status word is {status:#x})")]
    ReplayRefused {
        /// The server.
        server: String,
        /// Why.
        code: ErrorCode,
        /// The word by which it refused, in which the number of the frame stands.
        status: u64,
    },
    /// Calls are combined in the order in which they were dispatched.
    #[error("call {found} was to be combined, but call {expected} was dispatched before it")]
    Order {
        /// The handle's call.
        found: u64,
        /// The oldest one.
        expected: u64,
    },
    /// A handle of another client, or of the other kind of call.
    #[error("the handle is {found}, expected {expected}")]
    Handle {
        /// What it is.
        found: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A recorded graph that was replayed again and again did not get its answers.
    #[error("a graph got no complete answers in {attempts} replays, {waited:?}: {last}")]
    Replays {
        /// Times replayed.
        attempts: u32,
        /// Time since the first replay.
        waited: Duration,
        /// What was wrong with the last.
        last: String,
    },
}

impl DeviceError {
    /// Whose fault it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Client(error) => error.kind(),
            Self::Replays { .. } | Self::ReplayRefused { .. } => ErrorKind::PeerFault,
            Self::Gpu(GpuError::Driver { .. } | GpuError::Deadline { .. }) => ErrorKind::Transient,
            _ => ErrorKind::LocalBug,
        }
    }
}
