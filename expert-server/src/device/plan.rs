//! Sizes of a server on a GPU, computed before any memory is allocated.

use std::mem::size_of;

use checkpoint::ModelConfig;
use kernels::abi::{
    Batch, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, FLAG_ANY_PATH, FrameGeometry, LayerWeights,
    MAX_EXPERTS, MAX_PEERS, RANK_BITS, ServerState,
};
use kernels::check::CheckError;
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::SlotConfig;
use protocol::WireDtype;

use super::{DeviceError, DeviceOptions};
use crate::config::Limits;
use crate::gpu_support::gpu_lacks;

/// Sizes of a server on a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DevicePlan {
    pub(crate) device: DeviceName,
    pub(crate) geometry: FrameGeometry,
    /// Most rows of a batch.
    pub(crate) max_rows: u32,
    /// Intermediate size of the experts.
    pub(crate) inter: u32,
    pub(crate) num_layers: u32,
    /// Experts per layer.
    pub(crate) num_experts: u32,
    /// Most graphs in flight.
    pub(crate) num_chains: usize,
    /// Batches of a graph.
    pub(crate) batches_per_graph: usize,
    /// Most clients.
    pub(crate) max_clients: usize,
    pub(crate) options: DeviceOptions,
    /// Clients may connect over networks. Kernels then support other paths besides direct stores.
    pub(crate) has_networks: bool,
}

impl DevicePlan {
    /// Sizes for `model`, or the reason why the kernels cannot serve it.
    pub(crate) fn new(
        options: &DeviceOptions,
        slot: SlotConfig,
        limits: &Limits,
        model: &ModelConfig,
    ) -> Result<Self, DeviceError> {
        if let Some(what) = gpu_lacks(model.arithmetic, false) {
            return Err(DeviceError::Arithmetic { what });
        }
        let unsupported = |source| DeviceError::Model {
            hidden: model.hidden,
            inter: model.moe_intermediate,
            top_k: model.top_k,
            num_experts: model.num_experts,
            source,
        };
        let dtype = match options.dtype {
            WireDtype::Bf16 => DTYPE_BF16,
            WireDtype::F8E4m3 => DTYPE_F8_E4M3,
            found => return Err(DeviceError::Dtype { found }),
        };
        let hidden = u32::try_from(model.hidden).unwrap_or(u32::MAX);
        let top_k = u32::try_from(model.top_k).unwrap_or(u32::MAX);
        let inter = u32::try_from(model.moe_intermediate).unwrap_or(u32::MAX);
        // One token in one frame: an error is then the model's, not the slot's.
        FrameGeometry::new(hidden, top_k, dtype, 1, 1).map_err(unsupported)?;
        if inter == 0 || !inter.is_multiple_of(64) {
            return Err(unsupported(CheckError::Inter));
        }
        if model.num_experts == 0 || model.num_experts as usize > MAX_EXPERTS {
            return Err(unsupported(CheckError::Experts));
        }
        let too_small =
            DeviceError::Slot { slot_bytes: slot.slot_bytes, num_frames: slot.num_frames };
        let num_frames = u32::try_from(slot.num_frames).unwrap_or(u32::MAX);
        let slot_bytes = slot.slot_bytes as u64;
        let max_tokens =
            FrameGeometry::tokens_for_slot(hidden, top_k, dtype, num_frames, slot_bytes);
        let Ok(geometry) = FrameGeometry::new(hidden, top_k, dtype, max_tokens, num_frames) else {
            return Err(too_small);
        };
        // The rank of an entry within its expert has `RANK_BITS` bits.
        let most_rows = ((1 << RANK_BITS) - 1) / top_k;
        if max_tokens > most_rows {
            return Err(unsupported(CheckError::Tokens));
        }
        let asked = u32::try_from(limits.max_batch_tokens).unwrap_or(u32::MAX);
        Ok(Self {
            device: options.name,
            geometry,
            max_rows: asked.max(max_tokens).min(most_rows),
            inter,
            num_layers: model.num_layers,
            num_experts: model.num_experts,
            num_chains: options.batches_in_flight.clamp(1, 2),
            batches_per_graph: match options.name {
                DeviceName::Cuda(_) => BATCHES_PER_GRAPH,
                DeviceName::Emulated(_) => BATCHES_PER_EMULATED_GRAPH,
            },
            max_clients: limits.max_links.clamp(1, MAX_PEERS),
            options: *options,
            has_networks: false,
        })
    }

    /// Flags of launches that use the paths to clients.
    pub(crate) const fn path_flags(&self) -> u32 {
        if self.has_networks { FLAG_ANY_PATH } else { 0 }
    }

    /// Bytes of one batch's lists.
    pub(crate) fn lists_bytes(&self) -> u64 {
        self.geometry.lists_at(DevicePtr::NULL, self.num_experts, self.max_rows).1
    }

    /// Bytes of a batch's head with the expert positions behind it.
    pub(crate) fn head_bytes(&self) -> u64 {
        let (lists, _) =
            self.geometry.lists_at(DevicePtr(HEAD_BASE), self.num_experts, self.max_rows);
        lists.expert_begin.0 - HEAD_BASE + (u64::from(self.num_experts) + 1) * 4
    }

    /// Offset of the expert positions from the batch's head.
    pub(crate) fn expert_begin_offset(&self) -> u64 {
        let (lists, _) =
            self.geometry.lists_at(DevicePtr(HEAD_BASE), self.num_experts, self.max_rows);
        lists.expert_begin.0 - lists.batch.0
    }

    /// Bytes of the expert stage's scratch: rows, activations, outputs.
    pub(crate) fn scratch_bytes(&self) -> [u64; 3] {
        let (hidden, inter) = (self.geometry.hidden, self.inter);
        let entries = u64::from(self.max_rows) * u64::from(self.geometry.top_k);
        // The weights may be bf16 or fp8, which is known later.
        let scratch = |row_values| {
            let of = |dtype| {
                self.geometry.expert_scratch_bytes(
                    self.num_experts,
                    self.max_rows,
                    dtype,
                    row_values,
                )
            };
            of(DTYPE_BF16).max(of(DTYPE_F8_E4M3))
        };
        [scratch(hidden), scratch(inter), entries * u64::from(hidden) * 2]
    }

    /// Bytes of GPU memory besides the weights, with the slot of one client.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        let num_batches = (self.num_chains * self.batches_per_graph) as u64;
        let batches = num_batches * self.lists_bytes() + self.scratch_bytes().iter().sum::<u64>();
        let tables = u64::from(self.num_layers)
            * (u64::from(self.num_experts) * 2 + size_of::<LayerWeights>() as u64);
        let state = (size_of::<ServerState>() + size_of::<Batch>()) as u64;
        // The slot of free entries in the client table, and the first client's.
        batches + tables + state + 2 * self.geometry.slot_bytes
    }

    /// Returns an error if the GPU has less than `needed_bytes` free for `what`.
    pub(crate) fn check_memory(
        &self,
        gpu: &Gpu,
        what: &'static str,
        needed_bytes: u64,
    ) -> Result<(), DeviceError> {
        let free_bytes = gpu.free_bytes()?;
        if needed_bytes <= free_bytes {
            return Ok(());
        }
        Err(DeviceError::Memory { what, needed_bytes, device: self.device, free_bytes })
    }
}

/// Enough that the time between two graphs hardly counts, and few enough that a change of the tables comes soon.
const BATCHES_PER_GRAPH: usize = 4;
/// For tests: more than one, and few for a processor that waits for frames in each.
const BATCHES_PER_EMULATED_GRAPH: usize = 2;
/// Any aligned address, because only differences matter.
const HEAD_BASE: u64 = 1 << 20;
