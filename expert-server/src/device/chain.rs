//! Batches that run behind one another as one recorded graph.
//!
//! Within a graph each batch's reception is there, and waits for its frames, before the batch before it has reported to
//! the host. Between two graphs the GPU takes some ten microseconds, which is longer than a client needs to send the
//! next layer of a token. So a graph has several batches, and the host launches once for all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{ErrorWord, GATHER_NONE, Gather, MAX_PEERS};
use kernels::gpu::{Gpu, GpuError, Graph, Stream};
use kernels::starts::BUCKETS;

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
            graphs: LruCache::new(max_graphs(
                plan.batches_per_graph,
                plan.options.experts_timed_every,
            )),
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
        timed_batches(self.num_launched, self.batches.len() as u32, every)
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

/// The batches of launch `num_launched` that are timed, as a mask.
fn timed_batches(num_launched: u32, per_graph: u32, every: u32) -> u32 {
    let first = num_launched.wrapping_mul(per_graph);
    let is_timed = |idx: &u32| every > 0 && first.wrapping_add(*idx).is_multiple_of(every);
    (0..per_graph).filter(is_timed).fold(0, |mask, idx| mask | 1 << idx)
}

/// Graphs per chain: one for each number of clients, bucket of rows and mask of timed batches, for one number of local
/// experts. So a server whose experts stay the same evicts no graph. In docs/how-to/metrics.md.
fn max_graphs(per_graph: usize, every: u32) -> usize {
    // With `every` below the length of a launch there is a mask for each remainder. Otherwise a mask has at most one
    // batch.
    let num_masks = (every as usize).clamp(1, per_graph + 1);
    MAX_PEERS * NUM_BUCKETS * num_masks
}

/// Buckets of rows, with the most rows of a batch.
const NUM_BUCKETS: usize = BUCKETS.len() + 1;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_chain_keeps_a_graph_for_each_combination() {
        for per_graph in 1..=8 {
            for every in 0..40 {
                let masks: HashSet<u32> =
                    (0..1000).map(|launch| timed_batches(launch, per_graph, every)).collect();
                let mut keys = HashSet::new();
                for num_clients in 1..=MAX_PEERS {
                    for bucket in BUCKETS.into_iter().chain([u32::MAX]) {
                        keys.extend(masks.iter().map(|mask| (num_clients, bucket, *mask)));
                    }
                }
                let most = max_graphs(per_graph as usize, every);
                assert!(keys.len() <= most, "{per_graph} {every}: {} of {most}", keys.len());
            }
        }
        assert_eq!(max_graphs(1, 0), 288, "the number in docs/how-to/metrics.md");
    }
}
