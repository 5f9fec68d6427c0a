//! Copies of weights to GPU memory, from the checkpoint or from memory of this process.

use std::borrow::Cow;

use checkpoint::{Checkpoint, Scales, WeightFormat, WeightView};
use kernels::abi::DevicePtr;
use kernels::gpu::GpuError;

use super::block::{LayerMemory, Part};
use super::shape::{BLOCK_FP8, SCALE_BLOCK, WeightShape, gated};
use crate::compute::{LoadError, Weight, WeightError, WeightScales};
use crate::device::DeviceError;
use crate::device::upload::Uploader;

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
    let layout = memory.layout();
    let len_of = |part| memory.capacity() as u64 * layout.part_bytes(part);
    for part in [Part::GateUp, Part::Down] {
        let (first, len) = (memory.first(part), len_of(part));
        let block_bytes = len.min(RANDOM_BYTES);
        if shape.is_fp8 {
            // All codes except NaN.
            let code = |value: f32| ((value * 126.0).abs() as u8) | (u8::from(value < 0.0) << 7);
            let block: Vec<u8> = (0..block_bytes).map(|_| code(value())).collect();
            uploader.copy_bytes(first, &block)?;
        } else {
            let block: Vec<f32> = (0..block_bytes / 2).map(|_| value() * scale).collect();
            uploader.copy_as_bf16(first, &block)?;
        }
        uploader.wait()?;
        let mut filled = block_bytes;
        while filled < len {
            let bytes = filled.min(len - filled);
            // SAFETY: both ranges lie in the block and do not overlap. No other code uses the block yet.
            unsafe { uploader.copy_within_gpu(first.add(filled), first, bytes)? };
            uploader.wait()?;
            filled += bytes;
        }
    }
    for part in [Part::GateUpScales, Part::DownScales] {
        // The largest code represents 448.
        let factors = vec![scale / 64.0; (len_of(part) / 4) as usize];
        uploader.copy_bytes(memory.first(part), &le_bytes(&factors))?;
    }
    uploader.wait()
}

/// A matrix of an expert, in a checkpoint or in memory of this process.
pub(super) trait Matrix {
    fn format(&self) -> WeightFormat;
    fn size(&self) -> [usize; 2];
    fn codes(&self) -> Cow<'_, [u8]>;
    fn scales(&self) -> Option<Vec<f32>>;
    fn to_f32(&self) -> Vec<f32>;
}

impl Matrix for WeightView<'_> {
    fn format(&self) -> WeightFormat {
        self.format()
    }

    fn size(&self) -> [usize; 2] {
        [self.rows(), self.cols()]
    }

    fn codes(&self) -> Cow<'_, [u8]> {
        self.codes()
    }

    fn scales(&self) -> Option<Vec<f32>> {
        self.scales().map(Scales::to_f32)
    }

    fn to_f32(&self) -> Vec<f32> {
        self.to_f32()
    }
}

impl Matrix for Weight {
    fn format(&self) -> WeightFormat {
        self.format()
    }

    fn size(&self) -> [usize; 2] {
        [self.rows(), self.cols()]
    }

    fn codes(&self) -> Cow<'_, [u8]> {
        self.codes().into()
    }

    fn scales(&self) -> Option<Vec<f32>> {
        self.scales().map(WeightScales::to_f32)
    }

    fn to_f32(&self) -> Vec<f32> {
        self.to_f32()
    }
}

/// Starts to copy an expert of the checkpoint to its local index. After an error copies may run.
pub(super) fn put(
    uploader: &mut Uploader,
    checkpoint: &Checkpoint,
    memory: &LayerMemory,
    local_idx: usize,
    (layer, expert): (u32, u32),
) -> Result<(), LoadError> {
    let tensors = checkpoint.expert(layer, expert).map_err(|source| LoadError::Tensor {
        layer,
        expert,
        source,
    })?;
    put_matrices(uploader, &gated(tensors)?, memory, local_idx, (layer, expert))
}

/// Starts to copy gate, up and down of an expert to its local index. After an error copies may run.
pub(super) fn put_matrices<M: Matrix>(
    uploader: &mut Uploader,
    [gate, up, down]: &[M; 3],
    memory: &LayerMemory,
    local_idx: usize,
    (layer, expert): (u32, u32),
) -> Result<(), LoadError> {
    let shape = memory.layout().shape;
    let (bytes, scale_bytes) = (shape.matrix_bytes(), shape.num_scales() * 4);
    let (inputs, outputs) = ([shape.inter, shape.hidden], [shape.hidden, shape.inter]);
    for (matrix, size, [codes_part, scales_part], idx) in [
        (gate, inputs, [Part::GateUp, Part::GateUpScales], 0),
        (up, inputs, [Part::GateUp, Part::GateUpScales], 1),
        (down, outputs, [Part::Down, Part::DownScales], 0),
    ] {
        let to = memory.at(codes_part, local_idx).map_err(refused)?.add(idx * bytes);
        check_size(matrix, size).map_err(|source| LoadError::Weight { layer, expert, source })?;
        if shape.is_fp8 {
            check_fp8(matrix).map_err(|source| LoadError::Weight { layer, expert, source })?;
        }
        let mut nan_at = None;
        let copied = copy_matrix(uploader, to, matrix, shape.is_fp8, &mut nan_at).and_then(|()| {
            let Some(factors) = matrix.scales().filter(|_| shape.is_fp8) else { return Ok(()) };
            let to = memory.at(scales_part, local_idx)?.add(idx * scale_bytes);
            uploader.copy_bytes(to, &le_bytes(&factors))
        });
        copied.map_err(|source| DeviceError::Weights {
            what: format!("layer {layer} expert {expert}"),
            source,
        })?;
        if let Some(offset) = nan_at {
            let [rows, cols] = size;
            let source = WeightError::NotFinite { rows, cols, offset };
            return Err(LoadError::Weight { layer, expert, source });
        }
    }
    Ok(())
}

fn copy_matrix<M: Matrix>(
    uploader: &mut Uploader,
    to: DevicePtr,
    view: &M,
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

fn check_size(matrix: &impl Matrix, size: [usize; 2]) -> Result<(), WeightError> {
    if matrix.size() == size {
        return Ok(());
    }
    let ([rows, cols], format) = (size, matrix.format());
    let expected = rows * cols * format.code_bits() / 8;
    Err(WeightError::DataSize { rows, cols, format, expected, found: matrix.codes().len() })
}

/// Checks that the kernels can use an fp8 matrix, but for its codes.
fn check_fp8(matrix: &impl Matrix) -> Result<(), WeightError> {
    let ([rows, cols], format) = (matrix.size(), matrix.format());
    if format != BLOCK_FP8 {
        let expected = rows.div_ceil(SCALE_BLOCK) * cols.div_ceil(SCALE_BLOCK);
        let found = format.scale_shape(rows, cols).map_or(0, |[rows, cols]| rows * cols);
        let what = "block scales";
        return Err(WeightError::ScaleSize { rows, cols, format, what, expected, found });
    }
    Ok(())
}

pub(super) fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Whether an e4m3 code is no number.
pub(super) const fn is_nan(code: &u8) -> bool {
    *code & 0x7f == 0x7f
}

/// Whether any code is no number. Without a branch per code, so that the compiler takes many at a time.
pub(super) fn has_nan(codes: &[u8]) -> bool {
    codes.iter().fold(0u8, |found, code| found | u8::from(is_nan(code))) != 0
}

pub(super) fn refused(source: GpuError) -> LoadError {
    DeviceError::Weights { what: "experts".to_owned(), source }.into()
}

/// Bytes of the block of random weights that is repeated.
const RANDOM_BYTES: u64 = 64 << 20;
