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
    /// Longest time that a batch waits for clients that were in the one before, and at most half of that
    /// one's length; zero waits for nobody.
    pub gather: Duration,
    /// Multiprocessors that the products of experts use at most, and the kernel that answers, 0 for all: fewer
    /// leave the others to whoever shares the GPU. The reception has a few of its own. Do not give kernels that
    /// wait for this server more than what is left.
    pub num_blocks: u32,
    /// One batch in so many is timed as far as the end of its experts, too, for
    /// [`batch_observer`](crate::ServerConfig::batch_observer), 0 for none. The kernel that answers such a
    /// batch begins behind that end, and not while it comes, so the answers are a little later.
    pub experts_timed_every: u32,
    /// Threads that post for kernels where clients come over a network, 0 for a quarter of the processors
    /// next to GPU and NIC, one to four.
    pub proxy_threads: usize,
}

impl DeviceOptions {
    /// Defaults for a GPU.
    #[must_use]
    pub const fn new(name: DeviceName) -> Self {
        let gather = Duration::from_millis(2);
        Self {
            name,
            dtype: WireDtype::Bf16,
            batches_in_flight: 2,
            random_weights: false,
            gather,
            num_blocks: 0,
            experts_timed_every: 0,
            proxy_threads: 0,
        }
    }
}
