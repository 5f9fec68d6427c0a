//! What a server is told about its GPU.

use std::time::Duration;

use kernels::gpu::DeviceName;
use protocol::WireDtype;

/// Settings of a server on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Which GPU.
    pub name: DeviceName,
    /// Element type of requests, bf16 or fp8, the same for all clients; answers are bf16.
    pub dtype: WireDtype,
    /// Batches under way at a time, 1 or 2: with two, the next one waits on the GPU for the one before it,
    /// and never for the host.
    pub batches_in_flight: usize,
    /// Serves random weights, made on the GPU, instead of the checkpoint's, of which only names and
    /// shapes are used then: for measuring models that nobody wants to copy.
    pub random_weights: bool,
    /// Longest time that a batch waits for further clients that were active lately, and at most a fifth of
    /// the last batch's length; zero waits for nobody.
    pub gather: Duration,
}

impl DeviceOptions {
    /// Defaults for a GPU.
    #[must_use]
    pub const fn new(name: DeviceName) -> Self {
        let gather = Duration::from_micros(100);
        let (dtype, batches_in_flight) = (WireDtype::Bf16, 2);
        Self { name, dtype, batches_in_flight, random_weights: false, gather }
    }
}
