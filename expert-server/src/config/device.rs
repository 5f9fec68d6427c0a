//! Settings of a server's GPU.

use std::time::Duration;

use kernels::gpu::DeviceName;
use protocol::WireDtype;

/// Settings of a server on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceOptions {
    /// The GPU.
    pub name: DeviceName,
    /// Element type of requests, bf16 or fp8, the same for all clients. Answers are bf16.
    pub dtype: WireDtype,
    /// Recorded graphs in flight at a time, 1 or 2, of four batches each. With two, a batch waits on the GPU for the
    /// one before it, never for the host.
    pub batches_in_flight: usize,
    /// Serves random weights that are generated on the GPU, for measuring large models without their files. The
    /// checkpoint then only gives names and shapes.
    pub random_weights: bool,
    /// Longest time that a batch waits for clients of the previous batch. A batch never waits for more than half
    /// of the previous one's duration and 15 µs. Zero turns the wait off.
    pub gather: Duration,
    /// Most multiprocessors for the products of experts and for the kernel that answers; 0 for all. A lower
    /// number leaves multiprocessors to other users of the GPU. The reception uses a few more. Kernels that wait
    /// for this server must fit on the multiprocessors that remain.
    pub num_blocks: u32,
    /// Measures the time until the last expert's output in one of this many batches, for
    /// [`batch_observer`](crate::ServerConfig::batch_observer); 0 for none. The answers of such a batch are a
    /// little later, because the kernel that answers starts only after that time.
    pub experts_timed_every: u32,
    /// Notes the times of every batch's steps, for [`batch_observer`](crate::ServerConfig::batch_observer). Each
    /// thread block of a kernel then stores a time or two. Without it each tests a pointer.
    pub timeline: bool,
    /// Threads that post for kernels if clients connect over a network. 0 takes a quarter of the processors next
    /// to GPU and NIC, one to four.
    pub proxy_threads: usize,
}

impl DeviceOptions {
    /// The defaults for a GPU.
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
            timeline: false,
            proxy_threads: 0,
        }
    }
}
