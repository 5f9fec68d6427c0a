//! Chooses the compiled kernel of a launch, and its number of threads. Mirrors the second half of
//! `cuda/check.hpp`.

use crate::abi::{
    COMPUTE_THREADS, CombineParams, DTYPE_F8_E4M3, DevicePtr, DispatchParams, EchoParams,
    ExpertComputeParams, ExpertRecvParams, ExpertSendParams, FLAG_ANY_PATH, FLAG_PDL,
    PRODUCT_SHARED_BYTES, PRODUCT_THREADS, RECV_BLOCKS, RECV_THREADS,
};
use crate::check::Check;
use crate::entries::{
    COMBINE, COMBINE_TUNED, COMBINE_TUNED_FEW, DISPATCH_BF16, DISPATCH_FP8, DISPATCH_TUNED_BF16,
    DISPATCH_TUNED_FP8, DOWN_BF16, DOWN_FP8, ECHO_BF16, ECHO_FP8, ECHO_TUNED_BF16, ECHO_TUNED_FP8,
    EXPERT_RECV, GATE_UP_BF16, GATE_UP_DIRECT_BF16, GATE_UP_DIRECT_FP8, GATE_UP_FP8,
    GATHER_BF16_TO_FP8, GATHER_FP8_TO_BF16, SEND_BF16, SEND_FP8, SEND_TUNED_BF16, SEND_TUNED_FP8,
    any_path,
};

/// A launch, decided but for the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchPlan {
    /// Thread blocks.
    pub num_blocks: u32,
    /// Threads of each.
    pub num_threads: u32,
    /// Compiled for this hidden size (and top_k), else for any.
    pub is_tuned: bool,
    /// For few blocks that have many tokens each.
    pub is_few: bool,
    /// Name of the kernel in the embedded code.
    pub entry: &'static str,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    /// Whether the kernel may start while the one before it ends.
    pub overlaps: bool,
}

/// Parameters that a kernel takes, whole, as its only argument.
pub trait KernelParams: Check + bytemuck::Pod {
    /// Name of the kernel, for messages.
    const NAME: &'static str;

    /// The launch for these parameters, which must have passed [`Check::check`].
    fn plan(&self) -> LaunchPlan;

    /// Kernels that follow the first in the same launch.
    fn rest(&self) -> Vec<LaunchPlan> {
        Vec::new()
    }

    /// Every pointer with its name, nulls among them.
    fn pointers(&self) -> Vec<(&'static str, DevicePtr)>;
}

impl KernelParams for DispatchParams {
    const NAME: &'static str = "dispatch";

    fn plan(&self) -> LaunchPlan {
        // One more block writes headers.
        // One token each for few; from there on two share a fence, and one block per multiprocessor is
        // enough.
        let units =
            if self.capacity < TOKENS_IN_PAIRS { self.capacity } else { self.capacity.div_ceil(2) };
        let data_blocks = choose_blocks(self.num_blocks, units.into(), u64::MAX);
        let run = self.capacity.div_ceil(data_blocks).max(1);
        let is_tuned = self.geometry.hidden == TUNED_HIDDEN && self.geometry.top_k == TUNED_TOP_K;
        let entry = match (is_tuned, is_fp8(self.geometry.dtype)) {
            (true, true) => DISPATCH_TUNED_FP8,
            (true, false) => DISPATCH_TUNED_BF16,
            (false, true) => DISPATCH_FP8,
            (false, false) => DISPATCH_BF16,
        };
        plan(is_tuned, self.capacity.div_ceil(run) + 1, entry, self.flags)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("hidden_states", self.hidden_states),
            ("topk_idx", self.topk_idx),
            ("topk_weights", self.topk_weights),
            ("num_tokens", self.num_tokens),
            ("placement", self.placement),
            ("state", self.state),
            ("handle", self.handle),
            ("trace", self.trace),
            ("servers", self.servers),
        ]
    }
}

impl KernelParams for CombineParams {
    const NAME: &'static str = "combine";

    fn plan(&self) -> LaunchPlan {
        let is_tuned = self.geometry.hidden == TUNED_HIDDEN;
        let entry = if is_tuned { COMBINE_TUNED } else { COMBINE };
        let num_blocks = choose_blocks(self.num_blocks, self.capacity.into(), 512);
        let mut plan = plan(is_tuned, num_blocks, entry, self.flags);
        // Where links are direct and each block has two tokens at least.
        plan.is_few = is_tuned
            && self.flags & FLAG_ANY_PATH == 0
            && num_blocks <= MOST_FEW_BLOCKS
            && self.capacity >= 2 * num_blocks;
        if plan.is_few {
            plan.entry = COMBINE_TUNED_FEW;
        }
        plan
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("handle", self.handle),
            ("state", self.state),
            ("out", self.out),
            ("token_missing", self.token_missing),
            ("abort_mask", self.abort_mask),
            ("trace", self.trace),
            ("servers", self.servers),
        ]
    }
}

impl KernelParams for ExpertRecvParams {
    const NAME: &'static str = "expert_recv";

    fn plan(&self) -> LaunchPlan {
        LaunchPlan {
            num_blocks: RECV_BLOCKS,
            num_threads: RECV_THREADS,
            is_tuned: false,
            is_few: false,
            entry: entry_for(self.flags, EXPERT_RECV),
            shared_bytes: 0,
            overlaps: self.flags & FLAG_PDL != 0,
        }
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("state", self.state),
            ("lists.batch", self.lists.batch),
            ("lists.row_position", self.lists.row_position),
            ("lists.stamps", self.lists.stamps),
            ("local_expert", self.local_expert),
            ("abort_mask", self.abort_mask),
            ("min_epoch", self.min_epoch),
            ("gather", self.gather),
            ("clients", self.clients),
        ]
    }
}

impl KernelParams for ExpertSendParams {
    const NAME: &'static str = "expert_send";

    fn plan(&self) -> LaunchPlan {
        let is_tuned = self.geometry.hidden == TUNED_HIDDEN;
        let entry = match (is_tuned, is_fp8(self.geometry.dtype)) {
            (true, true) => SEND_TUNED_FP8,
            (true, false) => SEND_TUNED_BF16,
            (false, true) => SEND_FP8,
            (false, false) => SEND_BF16,
        };
        let num_blocks = choose_blocks(self.num_blocks, self.max_rows.into(), 1024);
        plan(is_tuned, num_blocks, entry, self.flags)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("lists.batch", self.lists.batch),
            ("lists.row_position", self.lists.row_position),
            ("expert_out", self.expert_out),
            ("clients", self.clients),
        ]
    }
}

impl KernelParams for ExpertComputeParams {
    const NAME: &'static str = "expert_compute";

    fn plan(&self) -> LaunchPlan {
        let is_fp8_weights = is_fp8(self.weights_dtype);
        if self.geometry.dtype == self.weights_dtype {
            let entry = if is_fp8_weights { GATE_UP_DIRECT_FP8 } else { GATE_UP_DIRECT_BF16 };
            return LaunchPlan { overlaps: self.flags & FLAG_PDL != 0, ..self.product(entry) };
        }
        // Requests of another type than the weights' are converted before.
        LaunchPlan {
            num_blocks: self.conversion_blocks(),
            num_threads: COMPUTE_THREADS,
            is_tuned: false,
            is_few: false,
            entry: if is_fp8_weights { GATHER_BF16_TO_FP8 } else { GATHER_FP8_TO_BF16 },
            shared_bytes: 0,
            overlaps: self.flags & FLAG_PDL != 0,
        }
    }

    fn rest(&self) -> Vec<LaunchPlan> {
        let is_fp8_weights = is_fp8(self.weights_dtype);
        let down = self.product(if is_fp8_weights { DOWN_FP8 } else { DOWN_BF16 });
        if self.geometry.dtype == self.weights_dtype {
            return vec![down];
        }
        vec![self.product(if is_fp8_weights { GATE_UP_FP8 } else { GATE_UP_BF16 }), down]
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("lists.batch", self.lists.batch),
            ("lists.list_row", self.lists.list_row),
            ("rows", self.rows),
            ("activation", self.activation),
            ("expert_out", self.expert_out),
            ("layers", self.layers),
            ("trapped", self.trapped),
            ("clients", self.clients),
            ("tile_arrivals", self.tile_arrivals),
        ]
    }
}

impl ExpertComputeParams {
    /// Blocks of the conversion: one for an entry, up to eight for a multiprocessor.
    fn conversion_blocks(&self) -> u32 {
        let lists = &self.lists;
        let rows = if lists.usual_rows == 0 { lists.max_rows } else { lists.usual_rows };
        let entries = rows.saturating_mul(self.geometry.top_k).max(1);
        let most = if self.num_blocks == 0 { 8 * NUM_MULTIPROCESSORS } else { self.num_blocks };
        entries.min(most)
    }

    /// A kernel that multiplies: it fills a multiprocessor's shared memory, and starts while the one
    /// before it ends.
    const fn product(&self, entry: &'static str) -> LaunchPlan {
        LaunchPlan {
            num_blocks: if self.num_blocks == 0 { NUM_MULTIPROCESSORS } else { self.num_blocks },
            num_threads: PRODUCT_THREADS,
            is_tuned: false,
            is_few: false,
            entry,
            shared_bytes: PRODUCT_SHARED_BYTES,
            overlaps: true,
        }
    }
}

impl KernelParams for EchoParams {
    const NAME: &'static str = "echo";

    fn plan(&self) -> LaunchPlan {
        let is_tuned = self.geometry.hidden == TUNED_HIDDEN;
        let entry = match (is_tuned, is_fp8(self.geometry.dtype)) {
            (true, true) => ECHO_TUNED_FP8,
            (true, false) => ECHO_TUNED_BF16,
            (false, true) => ECHO_FP8,
            (false, false) => ECHO_BF16,
        };
        let num_units = u64::from(self.capacity) * u64::from(self.num_clients);
        let num_blocks = choose_blocks(self.num_blocks, num_units, 1024);
        plan(is_tuned, num_blocks, entry, self.flags)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![("state", self.state), ("abort_mask", self.abort_mask), ("clients", self.clients)]
    }
}

fn entry_for(flags: u32, entry: &'static str) -> &'static str {
    if flags & FLAG_ANY_PATH != 0 { any_path(entry) } else { entry }
}

fn plan(is_tuned: bool, num_blocks: u32, entry: &'static str, flags: u32) -> LaunchPlan {
    let entry = entry_for(flags, entry);
    let num_threads = if is_tuned { TUNED_THREADS } else { GENERIC_THREADS };
    let overlaps = flags & FLAG_PDL != 0;
    LaunchPlan {
        num_blocks,
        num_threads,
        is_tuned,
        is_few: false,
        entry,
        shared_bytes: 0,
        overlaps,
    }
}

/// Blocks for `num_units` of work: one each as long as every multiprocessor has at most one, then two
/// per multiprocessor.
fn choose_blocks(asked: u32, num_units: u64, units_for_two: u64) -> u32 {
    let most = match asked {
        0 if num_units >= units_for_two => 2 * NUM_MULTIPROCESSORS,
        0 => NUM_MULTIPROCESSORS,
        _ => asked,
    };
    if num_units < u64::from(most) { (num_units as u32).max(1) } else { most }
}

const fn is_fp8(dtype: u32) -> bool {
    dtype == DTYPE_F8_E4M3
}

/// From this number of tokens on, a block of dispatch takes two or more.
const TOKENS_IN_PAIRS: u32 = 96;
/// Fewer blocks than a GPU has multiprocessors, so that something else may run there.
const MOST_FEW_BLOCKS: u32 = 64;
const NUM_MULTIPROCESSORS: u32 = 132;
const GENERIC_THREADS: u32 = 256;
const TUNED_HIDDEN: u32 = 7168;
const TUNED_TOP_K: u32 = 8;
const TUNED_THREADS: u32 = 448;
