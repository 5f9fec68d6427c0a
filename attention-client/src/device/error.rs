//! Errors of building a GPU client, and of its calls.
#![allow(missing_docs, reason = "the messages explain the fields")]

use std::time::Duration;

use kernels::check::CheckError;
use kernels::gpu::{DeviceName, GpuError};
use protocol::ErrorCode;
use thiserror::Error;

use super::TensorType;
use crate::error::{BuildError, ClientError, ErrorKind};

/// Failure of [`DeviceClientBuilder::build`](super::DeviceClientBuilder::build).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceBuildError {
    /// A failure that a CPU client has too.
    #[error(transparent)]
    Client(#[from] BuildError),
    /// The kernels do not support the model or a setting.
    #[error("{what}: {source}")]
    Shape { what: String, source: CheckError },
    /// A setting out of range.
    #[error("{setting} is {found}, expected {expected}")]
    Setting { setting: &'static str, found: String, expected: String },
    /// The GPU failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The threads that post for kernels could not be started.
    #[error(transparent)]
    Proxy(#[from] proxy::ProxyError),
    /// The operating system failed.
    #[error("{op}: {source}")]
    System { op: &'static str, source: std::io::Error },
}

/// Failure of a call of a [`DeviceClient`](super::DeviceClient).
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A failure that a CPU client has too.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The GPU failed, or it refused an argument. For an argument, nothing was launched.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A tensor with an element type that kernels do not read or write. Nothing was launched.
    #[error("{tensor} holds {found}, expected {expected}: convert it before the call")]
    Dtype { tensor: &'static str, found: TensorType, expected: TensorType },
    /// A tensor without an address. Nothing was launched.
    #[error("{tensor} is null, expected the address of its first element")]
    Null { tensor: &'static str },
    /// A tensor whose address is not aligned. Nothing was launched.
    #[error("{tensor} begins at {found:#x}, expected a multiple of {align} bytes")]
    Alignment { tensor: &'static str, found: u64, align: u64 },
    /// The number of tokens in GPU memory exceeds the call's capacity.
    #[error("num_tokens holds {found}, expected at most the capacity {capacity}")]
    Tokens { found: u64, capacity: u32 },
    /// A batch larger than a frame. Only `forward` sends it in parts, and not while the stream captures.
    #[error(
        "a batch of up to {capacity} tokens does not fit into a frame of {max_tokens}: call `forward`, which sends it in parts, or raise slot_bytes on both sides"
    )]
    Capacity { capacity: u32, max_tokens: u32 },
    /// As many calls are outstanding as slots have frames.
    #[error("{num_frames} calls are outstanding, as many as slots have frames: finish one first")]
    Outstanding { num_frames: u32 },
    /// A live server holds the expert, but outstanding calls use the place in the peer table that it needs.
    #[error(
        "no live server has expert {expert} of layer {layer}, and a new one finds no place among {max_servers}: {num_calls} outstanding calls may still use the slots of an earlier server; finish the calls, or raise max_servers"
    )]
    NoPlace { layer: u32, expert: u32, max_servers: usize, num_calls: usize },
    /// A graph with the client's calls may be running, so nothing else of the client may run.
    #[error(
        "a graph is being replayed: call `finish_replay`, until it returns without an error of the GPU"
    )]
    Replaying,
    /// The stream belongs to another GPU. Nothing was launched.
    #[error(
        "the stream is one of {found}, expected one of {expected}, where the client's memory is"
    )]
    Device { found: DeviceName, expected: DeviceName },
    /// The call was launched on another stream. It may still run when this stream is done.
    #[error("stream {found:#x} was given, expected {expected:#x}, on which the call was launched")]
    Stream { found: u64, expected: u64 },
    /// A server refused a frame of a recorded call. Another replay would not change that.
    #[error("{server} refused a frame of a recorded call: {code} (its status word is {status:#x})")]
    ReplayRefused { server: String, code: ErrorCode, status: u64 },
    /// Calls must be combined in the order of their dispatch.
    #[error("call {found} cannot be combined yet: call {expected} was dispatched before it")]
    Order { found: u64, expected: u64 },
    /// The handle belongs to another client, or to the other kind of call.
    #[error("the handle is {found}, expected {expected}")]
    Handle { found: &'static str, expected: &'static str },
    /// A graph has missing parts after all replays.
    #[error("a graph got no complete answers in {attempts} replays, {waited:?}: {last}")]
    Replays { attempts: u32, waited: Duration, last: String },
}

impl DeviceError {
    /// Origin of the error.
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
