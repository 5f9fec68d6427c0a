//! What a batch took, for whoever measures a server from within its process: metrics have sums and buckets,
//! not medians.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A batch with rows that has ended, as an observer sees it. Times are the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchReport {
    /// MoE layer.
    pub layer: u32,
    /// Clients in it.
    pub num_clients: u32,
    /// Tokens of all clients.
    pub num_rows: u32,
    /// From the end of the reception to the last answer: what the metrics call `compute`.
    pub server_time: Duration,
    /// The part of it until the last expert's output was there, of batches that
    /// [`experts_timed_every`](crate::device::DeviceOptions::experts_timed_every) chooses.
    pub experts_time: Option<Duration>,
}

/// Is told of every batch of a GPU with rows, by the thread that keeps batches under way: it must be short.
#[derive(Clone)]
pub struct BatchObserver(Arc<dyn Fn(&BatchReport) + Send + Sync>);

impl BatchObserver {
    /// Wraps a function.
    pub fn new(observer: impl Fn(&BatchReport) + Send + Sync + 'static) -> Self {
        Self(Arc::new(observer))
    }

    pub(crate) fn tell(&self, report: &BatchReport) {
        (self.0)(report);
    }
}

impl fmt::Debug for BatchObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BatchObserver(…)")
    }
}
