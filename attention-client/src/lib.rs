//! The attention side of a Mixture-of-Experts model whose experts are a service.
//!
//! [`router`] chooses experts and an [`ExpertBackend`] computes them. [`MoeClient`] is the backend that
//! talks to expert servers. [`DeviceClient`] does the same with tensors in GPU memory, without the
//! processor on the data path.
//!
//! This crate excludes how experts are computed by servers and who decides their placement.

pub mod backend;
pub mod client;
pub mod device;
pub mod metrics;
mod placement;
pub mod router;

pub use backend::{BackendError, ExpertBackend};
pub use client::{
    BuildError, ClientError, ClientModel, ErrorKind, Handle, LayerReport, LayerTiming, MoeClient,
    MoeClientBuilder, OnMissingExpert,
};
pub use device::{DeviceClient, DeviceError, DeviceInput, DeviceOptions, DeviceTensor, TensorType};
pub use router::{Router, RouterWorkspace};
