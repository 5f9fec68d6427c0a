//! The attention side of a Mixture-of-Experts model whose experts are a service.
//!
//! An engine computes attention and the gate itself, and links this crate for the experts:
//!
//! * [`MoeClient`] sends the tokens of a layer to expert servers and sums the weighted answers. Tensors are in host
//!   memory. It retries on replicas when a server fails.
//! * `DeviceClient` (feature `device`) does the same with tensors in GPU memory, without the processor on the data
//!   path.
//! * `Router` (feature `checkpoint`) chooses experts and weights from gate logits, for most model families.
//! * [`ExpertBackend`] is the interface between a model and its experts. [`MoeClient`] implements it.
//!
//! How servers compute experts, and who decides where experts are, is no part of this crate.
//!
//! # Features
//!
//! | feature | what it adds | what it links |
//! |---|---|---|
//! | `checkpoint` | `Router`, and [`ClientModel`] from a checkpoint on disk | `switchyard-checkpoint` |
//! | `device` | `DeviceClient` | `switchyard-kernels`, `switchyard-proxy` |
//! | `cuda` | `device` with real GPUs; building needs `nvcc` | |
//! | `emulated` | `device` with GPUs in software, for tests | |
//! | `failpoints` | places where tests make the client wait or fail | `fail` |
//!
//! None is on by default.
//!
//! # Example
//!
//! ```no_run
//! use std::time::Duration;
//! use switchyard_attention_client::{ClientModel, MoeClient};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (url, token) = ("http://127.0.0.1:7070", None::<String>);
//! let model = ClientModel::fetch(url, token.clone(), 24, Duration::from_secs(5))?;
//! let client = MoeClient::builder(model).control_plane(url, token.clone()).secret(token).build()?;
//! client.wait_ready(Duration::from_secs(30))?;
//!
//! let x = vec![0.5; client.hidden()]; // one token
//! let mut out = vec![0.0; client.hidden()];
//! let layer = client.model().moe_layers[0];
//! let timing = client.forward(layer, &x, &[3, 7], &[0.6, 0.4], &mut out)?;
//! println!("{} us", timing.total_ns() / 1000);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/standalone-client` in the repository is a program of its own that does this.

pub mod backend;
pub mod client;
#[cfg(feature = "device")]
pub mod device;
mod error;
mod fleet;
pub mod metrics;
mod model;
#[cfg(feature = "checkpoint")]
pub mod router;
mod timing;

// Types of other crates that occur in this crate's signatures.
pub use control_api::trust;
pub use control_api::{
    ConfigError, ControlError, LayerPlacement, MemberId, ModelDescriptor, PlacementError,
    PlacementTable, ServerEntry,
};
pub use p2p_core::{SlotConfig, SlotConfigError, SpinPolicy, TransportKind, Transports};
pub use prometheus;
pub use protocol::geometry::GeometryError;
pub use protocol::{ErrorCode, ModelShape, WireDtype};
pub use telemetry::{Recorder, TraceContext, TraceContextError};
pub use tokio::runtime::Handle as RuntimeHandle;
pub use tokio::sync::watch;

#[cfg(feature = "checkpoint")]
pub use checkpoint::{Checkpoint, ModelConfig, TensorError};

pub use backend::{BackendError, ExpertBackend};
pub use client::{Cancel, Handle, MoeClient, MoeClientBuilder};
#[cfg(feature = "device")]
pub use device::{
    DeviceClient, DeviceClientBuilder, DeviceError, DeviceInput, DeviceOptions, DeviceTensor,
    TensorType,
};
pub use error::{BuildError, ClientError, ErrorKind};
pub use fleet::settings::OnMissingExpert;
pub use fleet::shared::LayerObserver;
pub use model::{ClientModel, ModelError};
#[cfg(feature = "checkpoint")]
pub use router::{Router, RouterConfig, RouterWorkspace};
pub use timing::{LayerReport, LayerTiming, ServerTiming};

/// A named place where tests make the client wait or fail. Expands to nothing without the feature `failpoints`.
#[cfg(feature = "failpoints")]
macro_rules! fail_point {
    ($name:literal) => {
        fail::fail_point!($name)
    };
}
#[cfg(not(feature = "failpoints"))]
macro_rules! fail_point {
    ($name:literal) => {};
}
use fail_point;
