//! The ring between the hot path and the thread that exports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::exemplars::Exemplars;
use crate::ids::{Sampler, call_of, server_key};
use crate::stamp::Stamp;

/// Takes the stamps of sampled calls. Clones share the ring. Recording takes no lock, allocates nothing and never
/// blocks: a stamp that finds the ring full is dropped and counted.
#[derive(Debug, Clone)]
pub struct Recorder {
    sampler: Sampler,
    ring: Arc<Ring>,
    /// Ends the thread that exports, when the last clone goes.
    #[cfg(feature = "otlp")]
    exporter: Option<Arc<dyn Exporter>>,
}

/// A thread that exports stamps. It ends when this is dropped.
#[cfg(feature = "otlp")]
pub(crate) trait Exporter: std::fmt::Debug + Send + Sync {
    /// Returns true once all stamps are exported or lost, false if that takes longer than `timeout`.
    fn flush(&self, timeout: std::time::Duration) -> bool;
}

/// A [`Recorder`] for the frames of one server.
#[derive(Debug, Clone)]
pub struct ServerRecorder {
    /// Takes the stamps.
    pub recorder: Recorder,
    /// [`server_key`] of the server.
    pub server_key: u64,
}

#[derive(Debug)]
struct Ring {
    stamps: ArrayQueue<Stamp>,
    num_dropped: AtomicU64,
    exemplars: Exemplars,
}

impl Recorder {
    /// A recorder with room for `capacity` stamps, one at least.
    #[must_use]
    pub fn new(sampler: Sampler, capacity: usize) -> Self {
        let stamps = ArrayQueue::new(capacity.max(1));
        let ring = Arc::new(Ring {
            stamps,
            num_dropped: AtomicU64::new(0),
            exemplars: Exemplars::default(),
        });
        Self {
            sampler,
            ring,
            #[cfg(feature = "otlp")]
            exporter: None,
        }
    }

    /// The same ring, with a thread that ends when the last clone of this goes.
    #[cfg(feature = "otlp")]
    pub(crate) fn exported_by(&self, thread: impl Exporter + 'static) -> Self {
        Self { exporter: Some(Arc::new(thread)), ..self.clone() }
    }

    /// Returns true if the call with this sequence number is sampled.
    #[must_use]
    pub fn samples(&self, client_id: u64, sequence: u64) -> bool {
        self.sampler.samples(client_id, call_of(sequence))
    }

    /// For the server of this name.
    #[must_use]
    pub fn for_server(&self, name: &str) -> ServerRecorder {
        ServerRecorder { recorder: self.clone(), server_key: server_key(name) }
    }

    /// Keeps a stamp, or drops it if the ring is full.
    pub fn record(&self, stamp: Stamp) {
        if self.ring.stamps.push(stamp).is_err() {
            self.ring.num_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until the thread that exports has sent all stamps recorded so far, for `timeout` at most. Returns false if
    /// that took longer, or if there is no such thread. Blocks, so it is no call for the hot path.
    #[cfg(feature = "otlp")]
    #[must_use]
    pub fn flush(&self, timeout: std::time::Duration) -> bool {
        self.exporter.as_ref().is_some_and(|thread| thread.flush(timeout))
    }

    /// Takes the oldest stamp.
    #[must_use]
    pub fn take(&self) -> Option<Stamp> {
        self.ring.stamps.pop()
    }

    /// Durations of traced calls, by the phases of the metrics. Empty unless a thread exports the stamps.
    #[must_use]
    pub fn exemplars(&self) -> &Exemplars {
        &self.ring.exemplars
    }

    /// Stamps dropped so far.
    #[must_use]
    pub fn num_dropped(&self) -> u64 {
        self.ring.num_dropped.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{FrameKey, ServedStamp};

    #[test]
    fn a_full_ring_drops_and_counts() {
        let recorder = Recorder::new(Sampler::new(1.0).unwrap(), 2);
        let now = Instant::now();
        let stamp = |sequence| {
            let key =
                FrameKey { server_key: 0, client_id: 0, generation: 1, sequence, frame_idx: 0 };
            let times = ServedStamp {
                key,
                layer: 0,
                num_tokens: 1,
                batch_tokens: 1,
                arrived: now,
                began: now,
                gathered: now,
                computed: now,
                answered: now,
                is_on_gpu: false,
            };
            Stamp::Served(times)
        };
        (0..5).for_each(|sequence| recorder.record(stamp(sequence)));
        assert_eq!(recorder.num_dropped(), 3);
        for expected in 0..2 {
            let Some(Stamp::Served(found)) = recorder.take() else { panic!("no stamp {expected}") };
            assert_eq!(found.key.sequence, expected);
        }
        assert!(recorder.take().is_none());
    }
}
