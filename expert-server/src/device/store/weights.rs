//! Weights in GPU memory: sizes, memory of a layer, and copies from the checkpoint.

use std::collections::BTreeMap;

use checkpoint::{Checkpoint, ExpertTensors, FP8_BLOCK, WeightFormat, WeightView};
use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, GpuError};

use crate::compute::{LoadError, WeightError};
use crate::device::DeviceError;
use crate::device::upload::Uploader;

/// GPU memory for the weights of one layer. Experts have local indices below `capacity`.
#[derive(Debug)]
pub(crate) struct LayerMemory {
    /// `[capacity, 2, inter, hidden]`: gate, then up.
    pub(crate) gate_up: GpuBuffer,
    /// `[capacity, hidden, inter]`.
    pub(crate) down: GpuBuffer,
    /// Scales of fp8 weights: those of gate and up, then those of down.
    pub(crate) scales: Option<[GpuBuffer; 2]>,
    pub(super) capacity: usize,
}

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
    /// experts that are loaded first, because any other may be assigned later.
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
    fn matrix_bytes(&self) -> u64 {
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
    pub(crate) fn expert_bytes(&self) -> u64 {
        3 * (self.matrix_bytes() + self.num_scales() * 4)
    }
}

impl LayerMemory {
    pub(super) fn new(gpu: &Gpu, shape: &WeightShape, capacity: usize) -> Result<Self, GpuError> {
        let capacity = capacity.max(1);
        let num = capacity as u64;
        let scales = match shape.num_scales() * 4 {
            0 => None,
            bytes => Some([gpu.alloc(num * 2 * bytes)?, gpu.alloc(num * bytes)?]),
        };
        Ok(Self {
            gate_up: gpu.alloc(num * 2 * shape.matrix_bytes())?,
            down: gpu.alloc(num * shape.matrix_bytes())?,
            scales,
            capacity,
        })
    }

    /// All buffers, in the same order for every layer.
    pub(super) fn parts(&self) -> impl Iterator<Item = &GpuBuffer> {
        [&self.gate_up, &self.down].into_iter().chain(self.scales.iter().flatten())
    }
}

/// Fills a layer's memory with random weights: copies a block from the host and repeats it within the GPU.
pub(super) fn fill_randomly(
    uploader: &mut Uploader,
    shape: &WeightShape,
    memory: &LayerMemory,
) -> Result<(), GpuError> {
    // Xorshift: the quality of the numbers does not matter, and it takes a few instructions.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Keeps outputs at about the magnitude of inputs.
    let scale = (shape.hidden as f32).sqrt().recip();
    let mut value = move || (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    for buffer in [&memory.gate_up, &memory.down] {
        let block_bytes = buffer.len().min(RANDOM_BYTES);
        if shape.is_fp8 {
            // All codes except NaN.
            let code = |value: f32| ((value * 126.0).abs() as u8) | (u8::from(value < 0.0) << 7);
            let block: Vec<u8> = (0..block_bytes).map(|_| code(value())).collect();
            uploader.copy_bytes(buffer.ptr(), &block)?;
        } else {
            let block: Vec<f32> = (0..block_bytes / 2).map(|_| value() * scale).collect();
            uploader.copy_as_bf16(buffer.ptr(), &block)?;
        }
        uploader.wait()?;
        let mut filled = block_bytes;
        while filled < buffer.len() {
            let bytes = filled.min(buffer.len() - filled);
            // SAFETY: both ranges lie in the buffer and do not overlap. No other code uses the buffer yet.
            unsafe { uploader.copy_within_gpu(buffer.at(filled, bytes)?, buffer.ptr(), bytes)? };
            uploader.wait()?;
            filled += bytes;
        }
    }
    for scales in memory.scales.iter().flatten() {
        // The largest code represents 448.
        let factors = vec![scale / 64.0; (scales.len() / 4) as usize];
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        uploader.copy_bytes(scales.ptr(), &bytes)?;
    }
    uploader.wait()
}

/// Starts to copy an expert to its local index. After an error copies may run.
pub(super) fn put(
    uploader: &mut Uploader,
    checkpoint: &Checkpoint,
    shape: &WeightShape,
    memory: &LayerMemory,
    local_idx: usize,
    (layer, expert): (u32, u32),
) -> Result<(), LoadError> {
    let tensors = checkpoint.expert(layer, expert).map_err(|source| LoadError::Tensor {
        layer,
        expert,
        source,
    })?;
    let [gate, up, down] = gated(tensors)?;
    let local_idx = local_idx as u64;
    let (bytes, scales) = (shape.matrix_bytes(), shape.num_scales() * 4);
    let at = |buffer: &GpuBuffer, idx: u64, len: u64| buffer.at(idx * len, len);
    for (view, buffer, scale_idx, idx) in [
        (gate, &memory.gate_up, 0, local_idx * 2),
        (up, &memory.gate_up, 0, local_idx * 2 + 1),
        (down, &memory.down, 1, local_idx),
    ] {
        let to = at(buffer, idx, bytes).map_err(refused)?;
        if shape.is_fp8 {
            check_fp8(&view).map_err(|source| LoadError::Weight { layer, expert, source })?;
        }
        let mut nan_at = None;
        let copied = copy_matrix(uploader, to, &view, shape.is_fp8, &mut nan_at).and_then(|()| {
            let Some((pair, factors)) = memory.scales.as_ref().zip(view.scales()) else {
                return Ok(());
            };
            let factors: Vec<u8> = factors.to_f32().iter().flat_map(|f| f.to_le_bytes()).collect();
            uploader.copy_bytes(at(&pair[scale_idx], idx, scales)?, &factors)
        });
        copied.map_err(|source| DeviceError::Weights {
            what: format!("layer {layer} expert {expert}"),
            source,
        })?;
        if let Some(offset) = nan_at {
            let source = WeightError::NotFinite { rows: view.rows(), cols: view.cols(), offset };
            return Err(LoadError::Weight { layer, expert, source });
        }
    }
    Ok(())
}

/// Gate, up and down of an expert that the kernels compute.
fn gated(tensors: ExpertTensors<'_>) -> Result<[WeightView<'_>; 3], DeviceError> {
    let refused = |what: &str| DeviceError::Arithmetic { what: what.to_owned() };
    if tensors.biases.is_some() {
        return Err(refused("biases of experts"));
    }
    let gate = tensors.gate.ok_or_else(|| refused("experts without a gate"))?;
    Ok([gate, tensors.up, tensors.down])
}

fn copy_matrix(
    uploader: &mut Uploader,
    to: DevicePtr,
    view: &WeightView<'_>,
    keeps_fp8: bool,
    nan_at: &mut Option<usize>,
) -> Result<(), GpuError> {
    match view.format() {
        WeightFormat::Bf16 => uploader.copy_bytes(to, &view.codes()),
        WeightFormat::F8E4m3 { .. } if keeps_fp8 => {
            let mut offset = 0;
            uploader.copy_seen(to, &view.codes(), |part| {
                if nan_at.is_none() && has_nan(part) {
                    *nan_at = part.iter().position(is_nan).map(|at| offset + at);
                }
                offset += part.len();
            })
        }
        _ => uploader.copy_as_bf16(to, &view.to_f32()),
    }
}

fn is_block_fp8(view: &WeightView<'_>) -> bool {
    view.format() == WeightFormat::F8E4m3 { block: FP8_BLOCK }
}

/// Checks that the kernels can use an fp8 matrix, but for its codes.
fn check_fp8(view: &WeightView<'_>) -> Result<(), WeightError> {
    let (rows, cols, format) = (view.rows(), view.cols(), view.format());
    if !is_block_fp8(view) {
        let expected = rows.div_ceil(SCALE_BLOCK) * cols.div_ceil(SCALE_BLOCK);
        let found = format.scale_shape(rows, cols).map_or(0, |[rows, cols]| rows * cols);
        let what = "block scales";
        return Err(WeightError::ScaleSize { rows, cols, format, what, expected, found });
    }
    Ok(())
}

/// Whether an e4m3 code is no number.
const fn is_nan(code: &u8) -> bool {
    *code & 0x7f == 0x7f
}

/// Whether any code is no number. Without a branch per code, so that the compiler takes many at a time.
fn has_nan(codes: &[u8]) -> bool {
    codes.iter().fold(0u8, |found, code| found | u8::from(is_nan(code))) != 0
}

pub(super) fn refused(source: GpuError) -> LoadError {
    DeviceError::Weights { what: "experts".to_owned(), source }.into()
}

/// Side of the blocks that share a scale in the kernels' fp8 weights.
const SCALE_BLOCK: usize = 128;
/// Bytes of the block of random weights that is repeated.
const RANDOM_BYTES: u64 = 64 << 20;
