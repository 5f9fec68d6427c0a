//! The form of the experts of a model in GPU memory.

use std::collections::BTreeMap;

use checkpoint::{Checkpoint, ExpertTensors, FP8_BLOCK, ModelConfig, WeightFormat, WeightView};

use crate::compute::LoadError;
use crate::device::DeviceError;

/// Sizes of an expert in GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WeightShape {
    pub(crate) hidden: usize,
    pub(crate) inter: usize,
    /// True for fp8-e4m3 with a scale per 128 x 128 values, false for bf16.
    pub(crate) is_fp8: bool,
}

impl WeightShape {
    /// Sizes of the model's experts. The type is fp8 if all experts of the model are fp8 with blocks that the
    /// kernels support; otherwise it is bf16, to which all formats can be rounded. The type does not depend on the
    /// experts that are loaded first, because any other may be assigned later. Without weight files, the configuration
    /// says it.
    ///
    /// Returns an error if the checkpoint lacks one of `experts`, which are to be loaded, or if the kernels do not
    /// compute experts of this kind.
    pub(super) fn of(
        checkpoint: &Checkpoint,
        experts: &BTreeMap<u32, Vec<u32>>,
    ) -> Result<Self, LoadError> {
        let model = checkpoint.config();
        let wanted =
            experts.iter().flat_map(|(layer, ids)| ids.iter().map(move |id| (*layer, *id)));
        for (layer, expert) in wanted {
            let missing = |source| LoadError::Tensor { layer, expert, source };
            gated(checkpoint.expert(layer, expert).map_err(missing)?)?;
        }
        if !checkpoint.has_weights() {
            let is_fp8 = declares_block_fp8(model);
            return Ok(Self { hidden: model.hidden, inter: model.moe_intermediate, is_fp8 });
        }
        let layers = model.moe_layers().into_iter();
        let mut all = layers.flat_map(|layer| (0..model.num_experts).map(move |id| (layer, id)));
        let is_fp8 = all.all(|(layer, expert)| {
            // An expert that the checkpoint lacks cannot be loaded later either.
            checkpoint
                .expert(layer, expert)
                .map_or(true, |tensors| tensors.matrices().all(is_block_fp8))
        });
        let shape = Self { hidden: model.hidden, inter: model.moe_intermediate, is_fp8 };
        shape.log_widening(checkpoint);
        Ok(shape)
    }

    /// Says if the model takes more GPU memory than its files.
    fn log_widening(&self, checkpoint: &Checkpoint) {
        let first = checkpoint.config().moe_layers().first().copied();
        let Some(Ok(tensors)) = first.map(|layer| checkpoint.expert(layer, 0)) else { return };
        let stored: usize = tensors.matrices().map(WeightView::stored_bytes).sum();
        let format = tensors.up.format();
        if self.expert_bytes() > stored as u64 {
            tracing::warn!(
                %format,
                stored_bytes_per_expert = stored,
                gpu_bytes_per_expert = self.expert_bytes(),
                "the GPU kernels have no kernel for this format: experts are widened to bf16 in GPU memory"
            );
        }
    }

    /// Bytes of one matrix: gate, up and down have the same size.
    pub(super) const fn matrix_bytes(&self) -> u64 {
        self.hidden as u64 * self.inter as u64 * if self.is_fp8 { 1 } else { 2 }
    }

    /// Scales of one matrix.
    pub(crate) const fn num_scales(&self) -> u64 {
        if !self.is_fp8 {
            return 0;
        }
        self.hidden.div_ceil(SCALE_BLOCK) as u64 * self.inter.div_ceil(SCALE_BLOCK) as u64
    }

    /// Bytes of one expert.
    pub(crate) const fn expert_bytes(&self) -> u64 {
        3 * (self.matrix_bytes() + self.num_scales() * 4)
    }
}

/// Gate, up and down of an expert that the kernels compute.
pub(super) fn gated(tensors: ExpertTensors<'_>) -> Result<[WeightView<'_>; 3], DeviceError> {
    let refused = |what: &str| DeviceError::Arithmetic { what: what.to_owned() };
    if tensors.biases.is_some() {
        return Err(refused("biases of experts"));
    }
    let gate = tensors.gate.ok_or_else(|| refused("experts without a gate"))?;
    Ok([gate, tensors.up, tensors.down])
}

/// Whether the configuration says that experts are fp8 with blocks that the kernels support.
fn declares_block_fp8(model: &ModelConfig) -> bool {
    model.quantization.as_ref().is_some_and(|found| found.fp8_block == Some(FP8_BLOCK))
}

fn is_block_fp8(view: &WeightView<'_>) -> bool {
    view.format() == BLOCK_FP8
}

/// The form of fp8 weights that the kernels compute.
pub(super) const BLOCK_FP8: WeightFormat = WeightFormat::F8E4m3 { block: FP8_BLOCK };
/// Side of the blocks that share a scale in the kernels' fp8 weights.
pub(super) const SCALE_BLOCK: usize = 128;
