//! The memory of one batch, and its recording. Batches of a [`Chain`](super::chain::Chain) have a context each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kernels::abi::{
    Batch, DEVICE_ABI_VERSION, DevicePtr, ErrorWord, ExpertComputeParams, ExpertLists,
    ExpertRecvParams, ExpertSendParams, FLAG_CHOSEN, FLAG_EARLY, FLAG_PDL, Gather, STAMPS_OFFSET,
    ServerState, TAG_NONE, TILE_ARRIVALS,
};
use kernels::gpu::{Event, Gpu, GpuBuffer, GpuError, Piece, Stream};
use kernels::starts::LayerSize;

use super::BatchTimeline;
use super::plan::DevicePlan;

/// Memory and graphs of one batch.
#[derive(Debug)]
pub(super) struct Context {
    /// The reception has ended, and the experts begin.
    pub(super) received: Event,
    /// The last expert has ended, in batches that are timed up to there.
    computed: Event,
    /// In host memory: the time when all answers were sent, stored at the end of a batch.
    answered: GpuBuffer,
    lists: ExpertLists,
    list_memory: GpuBuffer,
    /// All batches are on one stream, and use it in turn.
    scratch: Arc<Scratch>,
    /// Description of the last batch, in host memory: its head, expert positions, the server's state.
    report: GpuBuffer,
    /// [`Gather`] of the batch, in host memory. Recorded graphs read it when they run.
    gather: GpuBuffer,
    /// [`ErrorWord`] of a kernel that trapped, in host memory, which outlives the GPU's context.
    trapped: GpuBuffer,
    /// True if the last batch was timed up to the end of its experts.
    times_experts: bool,
}

/// Memory of the expert stage.
#[derive(Debug)]
pub(super) struct Scratch {
    rows: GpuBuffer,
    activation: GpuBuffer,
    expert_out: GpuBuffer,
    /// Counts the parts of tiles that are done. Each kernel leaves it as it was, zeroed.
    tile_arrivals: GpuBuffer,
}

impl Scratch {
    pub(super) fn new(gpu: &Gpu, plan: &DevicePlan) -> Result<Self, GpuError> {
        let [rows, activation, expert_out] = plan.scratch_bytes();
        Ok(Self {
            rows: gpu.alloc(rows)?,
            activation: gpu.alloc(activation)?,
            expert_out: gpu.alloc(expert_out)?,
            tile_arrivals: gpu.alloc(u64::from(TILE_ARRIVALS) * 4)?,
        })
    }
}

/// The properties for which a graph was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GraphKey {
    pub(super) num_clients: u32,
    pub(super) num_local_experts: u32,
    /// Rows for which the grids are sized. More rows are computed, too, but not as fast.
    pub(super) bucket_rows: u32,
    /// Batches whose experts' end is an event of its own, as a mask. The answers begin behind it.
    pub(super) times_experts: u32,
}

/// Device memory that all contexts use.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedTables {
    pub(super) state: DevicePtr,
    pub(super) clients: DevicePtr,
    pub(super) local_expert: DevicePtr,
    pub(super) layers: DevicePtr,
    pub(super) abort_mask: DevicePtr,
    pub(super) weights_dtype: u32,
}

impl Context {
    pub(super) fn new(
        gpu: &Gpu,
        plan: &DevicePlan,
        scratch: &Arc<Scratch>,
    ) -> Result<Self, GpuError> {
        let list_memory = gpu.alloc(plan.lists_bytes())?;
        let base = list_memory.ptr();
        let (mut lists, _) = plan.geometry.lists_at(base, plan.num_experts, plan.max_rows);
        if plan.options.timeline {
            lists.stamps = base.add(STAMPS_OFFSET);
        }
        Ok(Self {
            received: gpu.event()?,
            computed: gpu.event()?,
            answered: gpu.alloc_host(size_of::<u64>() as u64)?,
            lists,
            list_memory,
            scratch: Arc::clone(scratch),
            report: gpu.alloc_host(state_offset(plan) + size_of::<ServerState>() as u64)?,
            gather: gpu.alloc_host(size_of::<Gather>() as u64)?,
            trapped: gpu.alloc_host(size_of::<ErrorWord>() as u64)?,
            times_experts: false,
        })
    }

    /// Prepares the memory of the host for a batch that is launched next. No batch of this context is in flight.
    pub(super) fn prepare(&mut self, gather: Gather, times_experts: bool) {
        self.set_gather(gather);
        if let Some(host) = self.answered.host() {
            // SAFETY: as for `answered_ns`. No batch is in flight that writes it.
            unsafe { AtomicU64::from_ptr(host.as_ptr().cast()).store(0, Ordering::Relaxed) };
        }
        self.times_experts = times_experts;
    }

    /// Says whom the batch waits for. A batch that has begun already knows it.
    pub(super) fn set_gather(&self, gather: Gather) {
        let Some(host) = self.gather.host() else { return };
        let word = u64::from(gather.within_ns) << 32 | u64::from(gather.clients);
        // SAFETY: an aligned word of page-locked memory, which a kernel reads as a whole.
        unsafe { AtomicU64::from_ptr(host.as_ptr().cast()).store(word, Ordering::Relaxed) };
    }

    /// Returns true if the last batch has ended. One with a kernel that failed never ends.
    pub(super) fn has_ended(&self) -> bool {
        self.answered_ns() != 0
    }

    /// Time of the last answer, by the GPU's timer; 0 before the batch has ended.
    fn answered_ns(&self) -> u64 {
        // SYNC POINT `told`: the report is complete when this word is there.
        // SAFETY: an aligned word of page-locked memory, which a kernel stores as a whole.
        self.answered.host().map_or(0, |host| unsafe {
            AtomicU64::from_ptr(host.as_ptr().cast()).load(Ordering::Acquire)
        })
    }

    /// Head of the batch that ended last.
    pub(super) fn batch(&self) -> Batch {
        self.read_report(0)
    }

    /// Times of the last batch, which was launched in `launched` and seen to have ended at `ended`; `None` if they are
    /// not noted.
    pub(super) fn timeline(&self, launched: [Instant; 2], ended: Instant) -> Option<BatchTimeline> {
        let is_noted = !self.lists.stamps.is_null();
        is_noted.then(|| BatchTimeline { stamps: self.read_report(STAMPS_OFFSET), launched, ended })
    }

    /// The server's state at about the end of the batch. The other batch's kernels may have changed it
    /// meanwhile, so it is a hint only.
    pub(super) fn state_hint(&self, plan: &DevicePlan) -> ServerState {
        self.read_report(state_offset(plan))
    }

    /// The error word of a kernel of this context that trapped, if any. The GPU is lost then.
    pub(super) fn trapped(&self) -> Option<ErrorWord> {
        // SAFETY: page-locked memory of this size. A kernel writes it once, before it traps.
        let word = unsafe { self.trapped.host()?.cast::<ErrorWord>().read_volatile() };
        (word.tag != TAG_NONE).then_some(word)
    }

    /// Positions at which the entries of each expert begin, and the end of the last.
    pub(super) fn expert_begin(
        &self,
        plan: &DevicePlan,
        num_local_experts: usize,
        out: &mut Vec<u32>,
    ) {
        let first = plan.expert_begin_offset();
        out.clear();
        out.extend(
            (0..=num_local_experts as u64).map(|idx| self.read_report::<u32>(first + idx * 4)),
        );
    }

    /// Time from the end of the reception to the last answer. The batch must have ended.
    pub(super) fn compute_time(&self) -> Duration {
        Duration::from_nanos(self.answered_ns().saturating_sub(self.batch().received_ns))
    }

    /// Time from the end of the reception to the last expert's output, if the batch was timed up to there.
    pub(super) fn experts_time(&self) -> Result<Option<Duration>, GpuError> {
        self.times_experts.then(|| self.computed.since(&self.received)).transpose()
    }

    fn read_report<T: bytemuck::Pod>(&self, offset: u64) -> T {
        let bytes = size_of::<T>() as u64;
        match self.report.host() {
            // SAFETY: within the report, as checked. The copies into it have ended with the batch, and this
            // thread starts no other before the next launch.
            Some(host) if offset + bytes <= self.report.len() => unsafe {
                host.as_ptr().add(offset as usize).cast::<T>().read_unaligned()
            },
            _ => T::zeroed(),
        }
    }

    /// Records the batch at place `idx` of a graph.
    pub(super) fn record(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        plan: &DevicePlan,
        shared: &SharedTables,
        key: GraphKey,
        idx: usize,
    ) -> Result<(), GpuError> {
        let times_experts = key.times_experts >> idx & 1 != 0;
        let (mut recv, compute, send) = self.params(plan, shared, key);
        if idx > 0 {
            recv.flags |= FLAG_PDL;
        }
        // SAFETY: the data thread owns all of this memory, which the same plan has sized, and frees it only after
        // the streams are done. Clients' slots and tables change only while no batch is in flight.
        let (recv, compute, send) =
            unsafe { (gpu.prepare(recv)?, gpu.prepare(compute)?, gpu.prepare(send)?) };
        stream.launch(&recv)?;
        // An event between two kernels keeps the second from starting early.
        if times_experts {
            stream.record(&self.received)?;
        }
        stream.launch(&compute)?;
        if times_experts {
            stream.record(&self.computed)?;
        }
        stream.launch(&send)?;
        let report = self.report.ptr();
        let state_at = report.add(state_offset(plan));
        // SAFETY: the report has room for both pieces. It is read only when the word behind them is there.
        unsafe {
            stream.tell_with_time(
                Piece { to: report, from: self.list_memory.ptr(), bytes: plan.head_bytes() },
                Piece { to: state_at, from: shared.state, bytes: size_of::<ServerState>() as u64 },
                self.answered.ptr(),
            )
        }
    }

    fn params(
        &self,
        plan: &DevicePlan,
        shared: &SharedTables,
        key: GraphKey,
    ) -> (ExpertRecvParams, ExpertComputeParams, ExpertSendParams) {
        let geometry = plan.geometry;
        let lists = ExpertLists { usual_rows: key.bucket_rows, ..self.lists };
        let num_clients = key.num_clients.max(1);
        let recv = ExpertRecvParams {
            version: DEVICE_ABI_VERSION,
            flags: FLAG_CHOSEN | plan.path_flags(),
            geometry,
            state: shared.state,
            lists,
            local_expert: shared.local_expert,
            abort_mask: shared.abort_mask,
            min_epoch: DevicePtr::NULL,
            timeout_ns: IDLE_WAIT_NS,
            min_ready: 1,
            num_experts: plan.num_experts,
            num_local_experts: key.num_local_experts,
            num_layers: plan.num_layers,
            num_clients,
            gather_ns: 0,
            gather: self.gather.ptr(),
            clients: shared.clients,
        };
        let compute = ExpertComputeParams {
            version: DEVICE_ABI_VERSION,
            flags: FLAG_PDL,
            geometry,
            lists,
            rows: self.scratch.rows.ptr(),
            activation: self.scratch.activation.ptr(),
            expert_out: self.scratch.expert_out.ptr(),
            layers: shared.layers,
            inter: plan.inter,
            num_local_experts: key.num_local_experts,
            num_layers: plan.num_layers,
            num_clients,
            num_blocks: plan.options.num_blocks,
            weights_dtype: shared.weights_dtype,
            timeout_ns: PRODUCT_WAIT_NS,
            trapped: self.trapped.ptr(),
            clients: shared.clients,
            tile_arrivals: self.scratch.tile_arrivals.ptr(),
        };
        let starts = LayerSize::of_server(key.bucket_rows, num_clients).starts();
        let num_blocks = match plan.options.num_blocks {
            0 => starts.answer_blocks,
            asked => asked,
        };
        let send = ExpertSendParams {
            version: DEVICE_ABI_VERSION,
            flags: FLAG_PDL | FLAG_EARLY | plan.path_flags(),
            geometry,
            lists,
            expert_out: self.scratch.expert_out.ptr(),
            max_rows: key.bucket_rows,
            num_clients,
            num_blocks,
            reserved: 0,
            clients: shared.clients,
        };
        (recv, compute, send)
    }
}

fn state_offset(plan: &DevicePlan) -> u64 {
    plan.head_bytes().next_multiple_of(64)
}

/// Longest wait of a batch for its first frame. Clients that connect or leave may wait as long.
const IDLE_WAIT_NS: u64 = 2_000_000;
/// Longest wait of a thread block for its own copies. A copy that arrives takes less than a thousandth of it.
pub(super) const PRODUCT_WAIT_NS: u64 = 10_000_000_000;

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
        let shared = SharedTables {
            state: DevicePtr::NULL,
            clients: DevicePtr::NULL,
            local_expert: DevicePtr::NULL,
            layers: DevicePtr::NULL,
            abort_mask: DevicePtr::NULL,
            weights_dtype: kernels::abi::DTYPE_BF16,
        };
        let key =
            GraphKey { num_clients: 2, num_local_experts: 8, bucket_rows: 2048, times_experts: 0 };
        for (num_blocks, most) in [(0, None), (3, Some(3))] {
            let name = DeviceName::Emulated(0);
            let options = DeviceOptions { num_blocks, ..DeviceOptions::new(name) };
            let limits = Limits::default();
            let plan = DevicePlan::new(&options, slot, &limits, checkpoint.config());
            let plan = plan.expect("a plan");
            let scratch = Arc::new(Scratch::new(&gpu, &plan).expect("memory"));
            let context = Context::new(&gpu, &plan, &scratch).expect("memory");
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
