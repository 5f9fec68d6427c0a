//! Batches that run behind one another as one recorded graph.
//!
//! Within a graph each batch's reception is there, and waits for its frames, before the batch before it has reported to
//! the host. Between two graphs the GPU takes some ten microseconds, which is longer than a client needs to send the
//! next layer of a token. So a graph has several batches, and the host launches once for all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{ErrorWord, GATHER_NONE, Gather};
use kernels::gpu::{Gpu, GpuError, Graph, Stream};

use super::BatchTimeline;
use super::context::{Context, GraphKey, Scratch, SharedTables};
use super::lru::LruCache;
use super::plan::DevicePlan;

/// The graphs of some batches, and their memory.
#[derive(Debug)]
pub(super) struct Chain {
    // First, so that graphs are dropped before the memory that they use.
    graphs: LruCache<GraphKey, Graph>,
    batches: Vec<Context>,
    /// The batch that ends next.
    next: usize,
    /// End of the launch while a batch is in flight.
    pub(super) launched_at: Option<Instant>,
    /// Begin and end of the last launch.
    launched: [Instant; 2],
    /// Launches so far; wraps.
    num_launched: u32,
}

impl Chain {
    pub(super) fn new(
        gpu: &Gpu,
        plan: &DevicePlan,
        scratch: &Arc<Scratch>,
    ) -> Result<Self, GpuError> {
        let batch = |_| Context::new(gpu, plan, scratch);
        Ok(Self {
            graphs: LruCache::new(MAX_GRAPHS),
            batches: (0..plan.batches_per_graph).map(batch).collect::<Result<_, _>>()?,
            next: 0,
            launched_at: None,
            launched: [Instant::now(); 2],
            num_launched: 0,
        })
    }

    /// The batches of the next launch that are timed up to the end of their experts, as a mask: one in `every` of all
    /// batches; 0 for none.
    pub(super) fn times_experts(&self, every: u32) -> u32 {
        let per_graph = self.batches.len() as u32;
        let first = self.num_launched.wrapping_mul(per_graph);
        let is_timed = |idx: &u32| every > 0 && first.wrapping_add(*idx).is_multiple_of(every);
        (0..per_graph).filter(is_timed).fold(0, |mask, idx| mask | 1 << idx)
    }

    /// Queues the batches. Each takes the frames that are ready when it begins, and those of clients that `gather`
    /// names if they arrive in time. A missing graph is recorded from `recorder`, which runs nothing
    /// meanwhile. Returns the time that the recording took, if any.
    pub(super) fn launch(
        &mut self,
        (gpu, stream, recorder): (&Gpu, &Stream, &Stream),
        plan: &DevicePlan,
        shared: &SharedTables,
        key: GraphKey,
        gather: Gather,
    ) -> Result<Option<Duration>, GpuError> {
        for (idx, batch) in self.batches.iter_mut().enumerate() {
            batch.prepare(gather, key.times_experts >> idx & 1 != 0);
        }
        let start = Instant::now();
        let record_time = if self.graphs.touch(&key) {
            None
        } else {
            let graph = recorder.capture(|recorder| {
                let mut batches = self.batches.iter().enumerate();
                batches.try_for_each(|(idx, batch)| {
                    batch.record((gpu, recorder), plan, shared, key, idx)
                })
            })?;
            self.graphs.insert(key, graph);
            Some(start.elapsed())
        };
        if let Some(graph) = self.graphs.newest() {
            stream.replay(graph)?;
        }
        self.next = 0;
        self.num_launched = self.num_launched.wrapping_add(1);
        self.launched = [start, Instant::now()];
        self.launched_at = Some(self.launched[1]);
        Ok(record_time)
    }

    /// The oldest batch in flight, if it has ended; it is not in flight any more.
    pub(super) fn take_ended(&mut self) -> Option<usize> {
        let idx = self.next;
        if self.launched_at.is_none() || !self.batches.get(idx)?.has_ended() {
            return None;
        }
        self.next += 1;
        if self.next == self.batches.len() {
            self.launched_at = None;
        }
        Some(idx)
    }

    /// A batch that has ended.
    pub(super) fn batch(&self, idx: usize) -> &Context {
        &self.batches[idx]
    }

    /// Times of a batch that was seen to have ended at `ended`, if they are noted.
    pub(super) fn timeline(&self, idx: usize, ended: Instant) -> Option<BatchTimeline> {
        self.batches[idx].timeline(self.launched, ended)
    }

    /// Says whom the batches in flight wait for. A batch that has read the value already keeps the old one.
    pub(super) fn set_gather(&self, gather: Gather) {
        if self.launched_at.is_some() {
            self.batches[self.next..].iter().for_each(|batch| batch.set_gather(gather));
        }
    }

    /// Lets the batches in flight that have not read the last value take what is there, without waiting.
    pub(super) fn hurry(&self) {
        self.set_gather(Gather { clients: 0, within_ns: GATHER_NONE });
    }

    /// The error word of a kernel that trapped, if any. The GPU is lost then.
    pub(super) fn trapped(&self) -> Option<ErrorWord> {
        self.batches.iter().find_map(Context::trapped)
    }
}

/// Graphs per chain: as many as there are numbers of clients and buckets of rows, for one number of local
/// experts. One more graph evicts the least recently used. In docs/how-to/metrics.md.
const MAX_GRAPHS: usize = 192;
