//! Reports of single batches, for measurements within a server's process. Metrics have sums and buckets, from
//! which no median can be computed.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::BATCH_STAMPS;

/// One batch with rows that has ended. Times are measured by the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchReport {
    /// MoE layer.
    pub layer: u32,
    /// Clients in the batch.
    pub num_clients: u32,
    /// Tokens of all clients.
    pub num_rows: u32,
    /// Time from the end of the reception to the last answer: the phase `compute` of the metrics.
    pub server_time: Duration,
    /// Time from the end of the reception to the last expert's output, in batches that
    /// [`experts_timed_every`](crate::device::DeviceOptions::experts_timed_every) selects.
    pub experts_time: Option<Duration>,
    /// Times of the batch's steps, with [`timeline`](crate::device::DeviceOptions::timeline).
    pub timeline: Option<BatchTimeline>,
}

/// Times of a batch's steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchTimeline {
    /// Times of the kernels by `kernels::abi::BatchStamp`, nanoseconds of the GPU's global timer.
    pub stamps: [u64; BATCH_STAMPS],
    /// Begin and end of the host's launch of the batch.
    pub launched: [Instant; 2],
    /// The host saw the end of the batch.
    pub ended: Instant,
}

/// A function that receives a report of every batch with rows. The data thread of the GPU calls it, so it must be
/// short.
#[derive(Clone)]
pub struct BatchObserver(Arc<dyn Fn(&BatchReport) + Send + Sync>);

impl BatchObserver {
    /// Wraps a function.
    pub fn new(observer: impl Fn(&BatchReport) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observer))
    }

    pub(crate) fn report(&self, report: &BatchReport) {
        (self.0)(report);
    }
}

impl fmt::Debug for BatchObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BatchObserver(…)")
    }
}
