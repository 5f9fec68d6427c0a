//! The attention side of a Mixture-of-Experts model whose experts are a service.
//!
//! [`router`] chooses experts, an [`ExpertBackend`] computes them, [`model`] is a reference model
//! whose MoE blocks call one, and [`Generator`] turns it into text. [`LocalExperts`] is the
//! backend that needs no service, [`MoeClient`] the one that talks to expert servers. [`DeviceClient`]
//! does the same with tensors in GPU memory, without the processor on the data path.
//!
//! This crate excludes how experts are computed by servers and who decides their placement.

pub mod backend;
pub mod client;
pub mod device;
pub mod generate;
pub mod metrics;
pub mod model;
mod placement;
pub mod router;
pub mod tokenizer;

pub use backend::{BackendError, ExpertBackend, LocalExperts};
pub use client::{
    BuildError, ClientError, ClientModel, ErrorKind, Handle, LayerReport, LayerTiming, MoeClient,
    MoeClientBuilder, OnMissingExpert,
};
pub use device::{DeviceClient, DeviceError, DeviceInput, DeviceOptions, DeviceTensor, TensorType};
pub use generate::{GenerateError, GenerateOptions, Generation, Generator, TokenEvent};
pub use model::{KvCache, LogitsOf, MoeBlock, MoeObserver, MoeRecord, Qwen3Moe};
pub use router::{Router, RouterWorkspace};
pub use tokenizer::{TokenStream, Tokenizer};
