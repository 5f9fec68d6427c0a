//! The expert server: holds experts of a Mixture-of-Experts model and computes them for its clients.
//!
//! Clients write frames of routed tokens into the server's memory. One data thread takes the frames that are
//! ready, merges frames of one layer into a batch, and computes the batch. It writes the weighted sums back
//! to the clients, one row per token.
//!
//! | module | contents |
//! |---|---|
//! | [`server`] | a whole server: start, drain, stop |
//! | [`config`] | settings of a server |
//! | [`cpu`] | the data thread on CPUs: links, batches, answers |
//! | [`compute`] | arithmetic of experts on CPUs |
//! | `device` | the data thread on a GPU: slots, weights and arithmetic in GPU memory |
//! | `loader`, `peers` | experts from files and from the memory of other servers |
//! | [`metrics`] | all metrics |
//!
//! `cpu` and `device` do not know each other, and the modules that both use know neither. Only the start of a
//! server chooses between the two. The crate excludes placement decisions and routing.
//!
//! # Features
//! - `device`: servers on GPUs, by [`ServerConfig::device`](config::ServerConfig). `cuda` adds GPUs of this
//!   host (building needs nvcc), `emulated` adds GPUs in software for tests.
//! - `failpoints`: named places where tests make the server fail or wait. A frame passes them in this order:
//!   `server::after_accept`, `server::after_copy_before_release`, `server::after_release`,
//!   `server::before_compute`, `server::in_tick`, `server::after_compute`,
//!   `server::between_payload_and_publish`, `server::after_publish`. A read of weights passes
//!   `server::in_weights_read` once the peer has granted it. As `return`,
//!   `server::in_device_copy` makes copies from GPU to GPU succeed without their bytes.

#[macro_use]
mod failpoint;

mod backend;
mod clients;
pub mod config;
pub mod cpu;
#[cfg(feature = "device")]
pub mod device;
mod error;
mod experts;
mod gpu_support;
mod http;
mod inbox;
mod loader;
mod members;
pub mod metrics;
mod peers;
mod plane;
pub mod server;
mod status;
mod tickets;

pub use expert_compute as compute;

pub use config::{
    DEFAULT_READ_LIMIT, ExpertSelection, Limits, Placement, Secret, SelectionError, ServerConfig,
    TicketMode, WeightsConfig, WeightsFrom,
};
pub use error::{DataError, ServerError, StartError};
pub use gpu_support::{gpu_lacks, gpu_needs, gpu_reads};
pub use inbox::LinkId;
pub use metrics::{DropReason, ServerMetrics};
pub use peers::SourceError;
pub use plane::{ClosedLink, ThreadEnd};
pub use server::{ExpertServer, RunningServer};

/// Types of other crates that appear in this crate's signatures.
pub mod reexports {
    pub use checkpoint::{Checkpoint, Coverage, Fingerprint, ModelConfig, OpenError};
    pub use control_api::{Assignment, ConfigError, LayerAssignment, LeaseError};
    #[cfg(feature = "device")]
    pub use kernels::{
        abi::ErrorWord,
        check::CheckError,
        gpu::{DeviceName, GpuError},
    };
    pub use p2p_core::bootstrap::BindError;
    pub use p2p_core::{Channel, Endpoint, SlotConfig, SpinPolicy, TransportKind, Transports};
    pub use prometheus;
    pub use protocol::{DispatchExpect, GeometryError, WireDtype};
    #[cfg(feature = "device")]
    pub use proxy::ProxyError;
    pub use telemetry::{Recorder, ServerRecorder};
    pub use tokio::sync::oneshot;
    pub use tokio::task::JoinError;
}
