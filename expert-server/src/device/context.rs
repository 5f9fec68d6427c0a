//! One of the batches that may be under way: its memory and its recorded graphs.

use std::time::{Duration, Instant};

use kernels::abi::{
    Batch, DEVICE_ABI_VERSION, DevicePtr, ErrorWord, ExpertComputeParams, ExpertLists,
    ExpertRecvParams, ExpertSendParams, FLAG_PDL, Gather, ServerState, TAG_NONE,
};
use kernels::gpu::{Event, Gpu, GpuBuffer, GpuError, Graph, Piece, Stream};

use super::plan::DevicePlan;
use super::lru::Recent;

/// Memory and graphs of one batch.
#[derive(Debug)]
pub(super) struct Context {
    // Graphs go before what they use.
    graphs: Recent<GraphKey, Graph>,
    /// The batch is known, and is being computed.
    pub(super) received: Event,
    /// The outputs of all experts are there, of batches that are timed so far.
    computed: Event,
    /// All answers are on their way.
    answered: Event,
    lists: ExpertLists,
    list_memory: GpuBuffer,
    rows: GpuBuffer,
    activation: GpuBuffer,
    expert_out: GpuBuffer,
    /// Everything is done. Recorded behind the graph, not in it, so that it never shows an older run.
    ended: Event,
    /// What the last batch was, in host memory: its head, expert positions, the server's state.
    report: GpuBuffer,
    /// [`Gather`] of the batch, in host memory: recorded graphs read it when they run.
    gather: GpuBuffer,
    /// [`ErrorWord`] of a kernel that ended the GPU's context, in host memory, which outlives it.
    trapped: GpuBuffer,
    pub(super) launched_at: Option<Instant>,
    /// Batches so far, which may wrap.
    pub(super) num_launched: u32,
    /// Whether the last batch was timed as far as the end of its experts.
    times_experts: bool,
}

/// What a recorded graph was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GraphKey {
    pub(super) num_clients: u32,
    pub(super) num_places: u32,
    /// Rows for which the grids are made. More are computed as well, only not as fast.
    pub(super) bucket_rows: u32,
    /// Whether the end of the experts is an event of its own, behind which the answers begin.
    pub(super) times_experts: bool,
}

/// Device memory that all contexts use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    pub(super) state: DevicePtr,
    pub(super) clients: DevicePtr,
    pub(super) local_expert: DevicePtr,
    pub(super) layers: DevicePtr,
    pub(super) abort_mask: DevicePtr,
    pub(super) weights_dtype: u32,
}

impl Context {
    pub(super) fn new(gpu: &Gpu, plan: &DevicePlan) -> Result<Self, GpuError> {
        let list_memory = gpu.alloc(plan.lists_bytes())?;
        let base = list_memory.ptr();
        let (lists, _) = plan.geometry.lists_at(base, plan.num_experts, plan.max_rows);
        let [rows, activation, expert_out] = plan.scratch_bytes();
        Ok(Self {
            graphs: Recent::new(MAX_GRAPHS),
            received: gpu.event()?,
            computed: gpu.event()?,
            answered: gpu.event()?,
            ended: gpu.event()?,
            lists,
            list_memory,
            rows: gpu.alloc(rows)?,
            activation: gpu.alloc(activation)?,
            expert_out: gpu.alloc(expert_out)?,
            report: gpu.alloc_host(state_offset(plan) + size_of::<ServerState>() as u64)?,
            gather: gpu.alloc_host(size_of::<Gather>() as u64)?,
            trapped: gpu.alloc_host(size_of::<ErrorWord>() as u64)?,
            launched_at: None,
            num_launched: 0,
            times_experts: false,
        })
    }

    /// Queues a batch: whatever is ready when its turn comes, with those whom `gather` waits for, or what
    /// comes within the bound. Graphs are recorded from `recorder`, which runs nothing meanwhile. How long that
    /// took is the result, if one had to be.
    pub(super) fn launch(
        &mut self,
        (gpu, stream, recorder): (&Gpu, &Stream, &Stream),
        plan: &DevicePlan,
        shared: &Shared,
        key: GraphKey,
        gather: Gather,
    ) -> Result<Option<Duration>, GpuError> {
        if let Some(host) = self.gather.host() {
            // SAFETY: page-locked memory of this size; the last batch that read it has ended.
            unsafe { host.cast::<Gather>().write_volatile(gather) };
        }
        let start = Instant::now();
        let recorded_in = if self.graphs.renew(&key) {
            None
        } else {
            let graph = self.record(gpu, recorder, plan, shared, key)?;
            self.graphs.push(key, graph);
            Some(start.elapsed())
        };
        if let Some(graph) = self.graphs.newest() {
            stream.replay(graph)?;
        }
        self.times_experts = key.times_experts;
        self.launched_at = Some(Instant::now());
        self.num_launched = self.num_launched.wrapping_add(1);
        stream.record(&self.ended)?;
        Ok(recorded_in)
    }

    /// Whether a batch is under way. An error means that a kernel failed.
    pub(super) fn is_running(&self) -> Result<bool, GpuError> {
        Ok(self.launched_at.is_some() && !self.ended.is_done()?)
    }

    /// Head of the batch that has just ended.
    pub(super) fn batch(&self) -> Batch {
        self.read_report(0)
    }

    /// The server's state about when the batch ended. The other batch's kernels may have been changing
    /// it: for hints only.
    pub(super) fn state_hint(&self, plan: &DevicePlan) -> ServerState {
        self.read_report(state_offset(plan))
    }

    /// Why a kernel of this context's trapped, if one did. The GPU is lost then.
    pub(super) fn trapped(&self) -> Option<ErrorWord> {
        // SAFETY: page-locked memory of this size, which a kernel writes once, before it traps.
        let word = unsafe { self.trapped.host()?.cast::<ErrorWord>().read_volatile() };
        (word.tag != TAG_NONE).then_some(word)
    }

    /// Positions at which the experts' entries begin, with the end of the last.
    pub(super) fn expert_begin(&self, plan: &DevicePlan, num_places: usize, out: &mut Vec<u32>) {
        let first = plan.expert_begin_offset();
        out.clear();
        out.extend((0..=num_places as u64).map(|idx| self.read_report::<u32>(first + idx * 4)));
    }

    /// Time from the end of the reception to the last answer. The batch has ended.
    pub(super) fn compute_time(&self) -> Result<Duration, GpuError> {
        self.answered.since(&self.received)
    }

    /// The part of it until the last expert's output was there, if the batch was timed so far.
    pub(super) fn experts_time(&self) -> Result<Option<Duration>, GpuError> {
        self.times_experts.then(|| self.computed.since(&self.received)).transpose()
    }

    fn read_report<T: bytemuck::Pod>(&self, offset: u64) -> T {
        let bytes = size_of::<T>() as u64;
        match self.report.host() {
            // SAFETY: within the report, as checked; the copies into it have ended, as the batch has,
            // and no other is started before the next launch by this thread.
            Some(host) if offset + bytes <= self.report.len() => unsafe {
                host.as_ptr().add(offset as usize).cast::<T>().read_unaligned()
            },
            _ => T::zeroed(),
        }
    }

    fn record(
        &self,
        gpu: &Gpu,
        recorder: &Stream,
        plan: &DevicePlan,
        shared: &Shared,
        key: GraphKey,
    ) -> Result<Graph, GpuError> {
        let (recv, compute, send) = self.params(plan, shared, key);
        // SAFETY: the engine owns all of this memory, sized by the same plan, and frees it only after
        // the streams are done; clients' slots and tables change only while no batch is under way.
        let (recv, compute, send) =
            unsafe { (gpu.prepare(recv)?, gpu.prepare(compute)?, gpu.prepare(send)?) };
        recorder.capture(|stream| {
            stream.launch(&recv)?;
            stream.record(&self.received)?;
            stream.launch(&compute)?;
            if key.times_experts {
                stream.record(&self.computed)?;
            }
            stream.launch(&send)?;
            stream.record(&self.answered)?;
            let report = self.report.ptr();
            let state_at = report.add(state_offset(plan));
            // SAFETY: the report has room for both; it is read only while no batch is under way.
            unsafe {
                stream.tell(
                    Piece { to: report, from: self.list_memory.ptr(), bytes: plan.head_bytes() },
                    Piece {
                        to: state_at,
                        from: shared.state,
                        bytes: size_of::<ServerState>() as u64,
                    },
                )
            }
        })
    }

    fn params(
        &self,
        plan: &DevicePlan,
        shared: &Shared,
        key: GraphKey,
    ) -> (ExpertRecvParams, ExpertComputeParams, ExpertSendParams) {
        let (geometry, lists) = (plan.geometry, self.lists);
        let num_clients = key.num_clients.max(1);
        let recv = ExpertRecvParams {
            version: DEVICE_ABI_VERSION,
            flags: plan.way_flags(),
            geometry,
            state: shared.state,
            lists,
            local_expert: shared.local_expert,
            abort_mask: shared.abort_mask,
            min_epoch: DevicePtr::NULL,
            timeout_ns: IDLE_WAIT_NS,
            min_ready: 1,
            num_experts: plan.num_experts,
            num_local_experts: key.num_places,
            num_layers: plan.num_layers,
            num_clients,
            gather_ns: 0,
            gather: self.gather.ptr(),
            clients: shared.clients,
        };
        let compute = ExpertComputeParams {
            version: DEVICE_ABI_VERSION,
            flags: 0,
            geometry,
            lists,
            rows: self.rows.ptr(),
            activation: self.activation.ptr(),
            expert_out: self.expert_out.ptr(),
            layers: shared.layers,
            inter: plan.inter,
            num_local_experts: key.num_places,
            num_layers: plan.num_layers,
            num_clients,
            num_blocks: plan.options.num_blocks,
            weights_dtype: shared.weights_dtype,
            timeout_ns: PRODUCT_WAIT_NS,
            trapped: self.trapped.ptr(),
            clients: shared.clients,
        };
        let send = ExpertSendParams {
            version: DEVICE_ABI_VERSION,
            flags: FLAG_PDL | plan.way_flags(),
            geometry,
            lists,
            expert_out: self.expert_out.ptr(),
            max_rows: key.bucket_rows,
            num_clients,
            num_blocks: plan.options.num_blocks,
            reserved: 0,
            clients: shared.clients,
        };
        (recv, compute, send)
    }
}

fn state_offset(plan: &DevicePlan) -> u64 {
    plan.head_bytes().next_multiple_of(64)
}

/// Longest wait of a batch for its first frame: what joining and leaving clients may have to wait for.
const IDLE_WAIT_NS: u64 = 2_000_000;
/// Longest wait of a thread block for its own copies. None that arrives at all takes a thousandth of it.
pub(super) const PRODUCT_WAIT_NS: u64 = 10_000_000_000;
/// Graphs kept: as many as there are numbers of clients and buckets of rows, for one number of places. One more
/// takes the place of the one that was used longest ago. In docs/operations.md.
const MAX_GRAPHS: usize = 192;

#[cfg(test)]
mod tests {
    use checkpoint::Checkpoint;
    use kernels::gpu::DeviceName;
    use kernels::plan::KernelParams;
    use p2p_core::SlotConfig;

    use super::*;
    use crate::config::Limits;
    use crate::device::DeviceOptions;

    #[test]
    fn experts_and_answers_keep_to_the_multiprocessors_that_they_are_given() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe");
        let checkpoint = Checkpoint::open(dir).expect("the trained checkpoint");
        let gpu = Gpu::open_emulated(0).expect("a GPU in software");
        let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
        let shared = Shared {
            state: DevicePtr::NULL,
            clients: DevicePtr::NULL,
            local_expert: DevicePtr::NULL,
            layers: DevicePtr::NULL,
            abort_mask: DevicePtr::NULL,
            weights_dtype: kernels::abi::DTYPE_BF16,
        };
        let key =
            GraphKey { num_clients: 2, num_places: 8, bucket_rows: 2048, times_experts: false };
        for (num_blocks, most) in [(0, None), (3, Some(3))] {
            let name = DeviceName::Emulated(0);
            let options = DeviceOptions { num_blocks, ..DeviceOptions::new(name) };
            let limits = Limits::default();
            let plan = DevicePlan::new(&options, slot, &limits, checkpoint.config());
            let plan = plan.expect("a plan");
            let context = Context::new(&gpu, &plan).expect("memory");
            let (_, compute, send) = context.params(&plan, &shared, key);
            let mut launches = vec![compute.plan(), send.plan()];
            launches.extend(compute.rest());
            for launch in launches {
                match most {
                    Some(most) => assert!(launch.num_blocks <= most, "{launch:?}"),
                    None => assert!(launch.num_blocks > 100, "{launch:?}"),
                }
            }
        }
    }
}
