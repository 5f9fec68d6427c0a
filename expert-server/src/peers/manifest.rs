//! The layout of an expert's weights between servers: the matrices in the form in which servers hold them, quantised
//! forms included, as a list of parts.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::compute::{
    DType, ExpertBiases, ExpertWeights, Weight, WeightBytes, WeightFormat, WeightMemory,
    WeightScales,
};
use crate::experts::MatrixForm;

/// Sizes and formats of one expert's weights. It determines the [parts](parts) and their lengths.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// Gate if there is one, up, down.
    matrices: Vec<MatrixLayout>,
    has_biases: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MatrixLayout {
    format: Format,
    rows: u64,
    cols: u64,
    scales: Option<ScaleLayout>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ScaleLayout {
    /// Name of the type in safetensors headers.
    dtype: String,
    /// Bits of the factor of all scales, an f32.
    factor_bits: u32,
}

/// [`WeightFormat`] on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Format {
    Bf16,
    F16,
    F32,
    F8E4m3 { block: [u64; 2] },
    Int8 { group: u64, has_minima: bool },
    Int4 { group: u64, has_minima: bool },
    Fp4 { group: u64 },
}

/// The sizes that experts of the model have.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertShape {
    pub(super) hidden: usize,
    pub(super) inter: usize,
    pub(super) is_gated: bool,
}

impl Manifest {
    pub(super) fn of(weights: &ExpertWeights) -> Self {
        let matrices = weights.gate.iter().chain([&weights.up, &weights.down]);
        let layout = |weight: &Weight| MatrixLayout {
            format: weight.format().into(),
            rows: weight.rows() as u64,
            cols: weight.cols() as u64,
            scales: weight.scales().map(|scales| ScaleLayout {
                dtype: scales.dtype.name().to_owned(),
                factor_bits: scales.factor.to_bits(),
            }),
        };
        Self { matrices: matrices.map(layout).collect(), has_biases: weights.biases.is_some() }
    }

    /// The forms of the matrices, in order. `None` for experts with biases, and for fields that no expert can have.
    pub(super) fn forms(&self) -> Option<Vec<MatrixForm>> {
        let form = |matrix: &MatrixLayout| {
            let scales = matrix.scales.as_ref().map(|scales| {
                scales.dtype().map(|dtype| (dtype, f32::from_bits(scales.factor_bits)))
            });
            Some(MatrixForm {
                format: matrix.format.decode().ok()?,
                scales: scales.transpose().ok()?,
            })
        };
        self.matrices.iter().map(form).collect::<Option<_>>().filter(|_| !self.has_biases)
    }

    /// Lengths of the parts in bytes, in order.
    ///
    /// # Errors
    /// The first field that an expert of this shape cannot have. So no length exceeds what the shape allows.
    pub(super) fn part_lens(&self, shape: ExpertShape) -> Result<Vec<usize>, String> {
        let ExpertShape { hidden, inter, is_gated } = shape;
        let gate = is_gated.then_some([inter, hidden]);
        let sizes: Vec<[usize; 2]> =
            gate.into_iter().chain([[inter, hidden], [hidden, inter]]).collect();
        if sizes.len() != self.matrices.len() {
            let (found, expected) = (self.matrices.len(), sizes.len());
            return Err(format!("{found} matrices, expected {expected}"));
        }
        let mut lens = Vec::new();
        for (matrix, [rows, cols]) in self.matrices.iter().zip(sizes) {
            if (matrix.rows, matrix.cols) != (rows as u64, cols as u64) {
                let (found_rows, found_cols) = (matrix.rows, matrix.cols);
                return Err(format!(
                    "a matrix of {found_rows} x {found_cols}, expected {rows} x {cols}"
                ));
            }
            let format = matrix.format.decode()?;
            lens.push(rows * cols * format.code_bits() / 8);
            match (format.scale_shape(rows, cols), &matrix.scales) {
                (None, None) => {}
                (Some([rows, cols]), Some(scales)) => {
                    lens.push(rows * cols * scales.value_bytes()?);
                    lens.push(if has_minima(format) { rows * cols * size_of::<f32>() } else { 0 });
                }
                (_, scales) => {
                    let found = if scales.is_some() { "scales" } else { "no scales" };
                    return Err(format!("a matrix of {format} with {found}"));
                }
            }
        }
        if self.has_biases {
            let gate = if is_gated { inter } else { 0 };
            lens.extend([gate, inter, hidden].map(|len| len * size_of::<f32>()));
        }
        Ok(lens)
    }

    /// The weights whose [parts](parts) are at `ranges` of `memory`.
    ///
    /// # Errors
    /// The first fault of the manifest or of the weights.
    pub(super) fn assemble(
        &self,
        memory: &Arc<WeightMemory>,
        ranges: &[std::ops::Range<usize>],
    ) -> Result<ExpertWeights, String> {
        let mut ranges = ranges.iter().cloned();
        let mut next = || ranges.next().ok_or_else(|| "too few parts".to_owned());
        let mut matrices = Vec::new();
        for matrix in &self.matrices {
            let bytes = |range: std::ops::Range<usize>| {
                WeightBytes::new(Arc::clone(memory), |memory| &memory.as_slice()[range])
            };
            let codes = bytes(next()?);
            let scales = match &matrix.scales {
                None => None,
                Some(scales) => Some(WeightScales {
                    dtype: scales.dtype()?,
                    factor: f32::from_bits(scales.factor_bits),
                    data: bytes(next()?),
                    minima: floats(&memory.as_slice()[next()?]).into(),
                }),
            };
            let (rows, cols) = (matrix.rows as usize, matrix.cols as usize);
            let weight = Weight::new(matrix.format.decode()?, rows, cols, codes, scales);
            matrices.push(weight.map_err(|error| error.to_string())?);
        }
        let biases = if self.has_biases {
            let mut bias = || Ok::<_, String>(floats(&memory.as_slice()[next()?]));
            Some(ExpertBiases { gate: bias()?, up: bias()?, down: bias()? })
        } else {
            None
        };
        let (Some(down), Some(up)) = (matrices.pop(), matrices.pop()) else {
            return Err("too few matrices".to_owned());
        };
        Ok(ExpertWeights { gate: matrices.pop(), up, down, biases })
    }
}

/// The bytes of an expert: for each matrix codes, then scales and minima if the format has scales; then the biases of
/// gate, up and down if there are any. A part may be empty.
pub(super) fn parts(weights: &ExpertWeights) -> Vec<&[u8]> {
    let mut parts = Vec::new();
    for weight in weights.gate.iter().chain([&weights.up, &weights.down]) {
        parts.push(weight.codes());
        if let Some(scales) = weight.scales() {
            parts.extend([scales.data.as_slice(), bytemuck::cast_slice(&scales.minima)]);
        }
    }
    if let Some(ExpertBiases { gate, up, down }) = &weights.biases {
        parts.extend([gate, up, down].map(|bias| bytemuck::cast_slice::<f32, u8>(bias)));
    }
    parts
}

/// BLAKE3 over the position of an expert, its layout and all its bytes.
pub(super) fn digest(layer: u32, expert: u32, manifest: &Manifest, parts: &[&[u8]]) -> [u8; 32] {
    let mut digest = Digest::new(layer, expert, manifest);
    parts.iter().for_each(|part| digest.update(part));
    digest.finish()
}

/// The digest of an expert whose bytes come piece by piece.
pub(super) struct Digest(blake3::Hasher);

impl Digest {
    pub(super) fn new(layer: u32, expert: u32, manifest: &Manifest) -> Self {
        let mut hash = blake3::Hasher::new_derive_key("switchyard weights between servers 1");
        hash.update(&layer.to_le_bytes()).update(&expert.to_le_bytes());
        // The layout determines the length of each part, so no two experts have the same byte stream.
        hash.update(&serde_json::to_vec(manifest).unwrap_or_default());
        Self(hash)
    }

    /// Adds the next bytes of the parts. Lengths of 64 KiB and more are fastest.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(&self) -> [u8; 32] {
        *self.0.finalize().as_bytes()
    }
}

impl ScaleLayout {
    /// The type, if scales can have it.
    fn dtype(&self) -> Result<DType, String> {
        let dtype = DType::from_name(&self.dtype);
        let dtype = dtype.ok_or_else(|| format!("scales of type {:?}", self.dtype))?;
        WeightScales::value_bytes(dtype).map(|_| dtype).map_err(|error| error.to_string())
    }

    fn value_bytes(&self) -> Result<usize, String> {
        WeightScales::value_bytes(self.dtype()?).map_err(|error| error.to_string())
    }
}

impl Format {
    fn decode(self) -> Result<WeightFormat, String> {
        let size = |value: u64| {
            let size = usize::try_from(value).ok().filter(|size| *size > 0);
            size.ok_or_else(|| format!("a group or block of {value}"))
        };
        Ok(match self {
            Self::Bf16 => WeightFormat::Bf16,
            Self::F16 => WeightFormat::F16,
            Self::F32 => WeightFormat::F32,
            Self::F8E4m3 { block: [rows, cols] } => {
                WeightFormat::F8E4m3 { block: [size(rows)?, size(cols)?] }
            }
            Self::Int8 { group, has_minima } => {
                WeightFormat::Int8 { group: size(group)?, has_minima }
            }
            Self::Int4 { group, has_minima } => {
                WeightFormat::Int4 { group: size(group)?, has_minima }
            }
            Self::Fp4 { group } => WeightFormat::Fp4 { group: size(group)? },
        })
    }
}

impl From<WeightFormat> for Format {
    fn from(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Bf16 => Self::Bf16,
            WeightFormat::F16 => Self::F16,
            WeightFormat::F32 => Self::F32,
            WeightFormat::F8E4m3 { block } => Self::F8E4m3 { block: block.map(|n| n as u64) },
            WeightFormat::Int8 { group, has_minima } => {
                Self::Int8 { group: group as u64, has_minima }
            }
            WeightFormat::Int4 { group, has_minima } => {
                Self::Int4 { group: group as u64, has_minima }
            }
            WeightFormat::Fp4 { group } => Self::Fp4 { group: group as u64 },
        }
    }
}

fn has_minima(format: WeightFormat) -> bool {
    use WeightFormat::{Int4, Int8};
    matches!(format, Int8 { has_minima: true, .. } | Int4 { has_minima: true, .. })
}

/// Little-endian values at any alignment.
fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
}
