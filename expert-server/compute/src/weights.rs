//! Expert weights in the format of the checkpoint, in mapped files or in memory.

use std::ptr::NonNull;
use std::sync::Arc;

use checkpoint::{
    Activation, DType, ExpertArithmetic, ExpertBiases, WeightFormat, Weighting, f32_from_e4m3,
    f32_from_e8m0,
};
use half::f16;

/// Why weights cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum WeightError {
    /// The number of bytes does not fit the shape of the matrix.
    #[error("a {rows} x {cols} matrix of {format} takes {expected} bytes, found {found}")]
    DataSize { rows: usize, cols: usize, format: WeightFormat, expected: usize, found: usize },
    /// The number of bytes of scales, or of minima, does not fit the matrix.
    #[error("a {rows} x {cols} matrix of {format} needs {expected} {what}, found {found}")]
    ScaleSize {
        rows: usize,
        cols: usize,
        format: WeightFormat,
        what: &'static str,
        expected: usize,
        found: usize,
    },
    /// Scales have a dtype that is no float.
    #[error("scales are {dtype}; expected F32, BF16, F16, F8_E8M0 or F8_E4M3")]
    ScaleDtype { dtype: DType },
    /// A packed row does not end at a byte.
    #[error("a {rows} x {cols} matrix of {format} has rows that do not end at a byte")]
    OddRow { rows: usize, cols: usize, format: WeightFormat },
    /// An fp8 matrix contains NaN, first at byte `offset`.
    #[error(
        "a {rows} x {cols} matrix of F8E4m3 holds NaN at byte {offset}; the weights are damaged"
    )]
    NotFinite { rows: usize, cols: usize, offset: usize },
    /// A scale or a minimum is infinite or NaN.
    #[error(
        "a {rows} x {cols} matrix of {format} has {value} as scale or minimum number {idx}; \
         the weights are damaged"
    )]
    ScaleNotFinite { rows: usize, cols: usize, format: WeightFormat, idx: usize, value: String },
    /// A matrix of an expert, `gate`, `up` or `down`, has the wrong shape.
    #[error("{matrix} of expert {expert} is {found_rows} x {found_cols}, expected {rows} x {cols}")]
    Shape {
        matrix: &'static str,
        expert: u32,
        found_rows: usize,
        found_cols: usize,
        rows: usize,
        cols: usize,
    },
    /// An expert has a gate that its activation does not use, or lacks one.
    #[error("expert {expert} {found}, but the activation {activation} expects the opposite")]
    Gate { expert: u32, found: &'static str, activation: String },
    /// A bias of an expert, of `gate`, `up` or `down`, has the wrong length.
    #[error("the bias of {matrix} of expert {expert} holds {found} values, expected {expected}")]
    Bias { matrix: &'static str, expert: u32, found: usize, expected: usize },
    /// The hidden or intermediate size of a layer is zero.
    #[error("a layer of hidden size {hidden} and intermediate size {inter} cannot hold experts")]
    EmptyLayer { hidden: usize, inter: usize },
}

/// Read-only bytes with their owner, such as a mapped checkpoint or a buffer.
#[derive(Clone)]
pub struct WeightBytes {
    data: NonNull<[u8]>,
    _owner: Arc<dyn Send + Sync>,
}

// SAFETY: the bytes are only read, and `_owner`, which is `Send`, keeps them in place.
unsafe impl Send for WeightBytes {}
// SAFETY: shared access only reads the bytes, and no code of this process writes them.
unsafe impl Sync for WeightBytes {}

impl WeightBytes {
    /// Borrows bytes from `owner` for as long as the result or a clone of it lives.
    pub fn new<O: Send + Sync + 'static>(
        owner: Arc<O>,
        bytes: impl for<'a> FnOnce(&'a O) -> &'a [u8],
    ) -> Self {
        // The borrow is of the value behind the `Arc`. While the clone stored here exists, the value does not
        // move and cannot be borrowed mutably.
        let data = NonNull::from(bytes(&owner));
        Self { data, _owner: owner }
    }

    /// Borrows `bytes` for as long as the result or a clone of it lives.
    ///
    /// # Safety
    /// `bytes` is borrowed from the value behind `owner`, and that value does not change.
    pub(crate) unsafe fn borrowed<O: Send + Sync + 'static>(owner: &Arc<O>, bytes: &[u8]) -> Self {
        let owner: Arc<O> = Arc::clone(owner);
        Self { data: NonNull::from(bytes), _owner: owner }
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `data` was borrowed from the value that `_owner` keeps alive and unmoved.
        unsafe { self.data.as_ref() }
    }
}

impl From<Vec<u8>> for WeightBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes), |owner| owner)
    }
}

impl std::fmt::Debug for WeightBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WeightBytes({})", self.data.len())
    }
}

/// Scales of a weight matrix, row-major as [`WeightFormat::scale_shape`] says, in a dtype of the checkpoint.
#[derive(Clone, Debug)]
pub struct WeightScales {
    /// F32, BF16, F16, F8_E8M0 or F8_E4M3.
    pub dtype: DType,
    /// The values, little-endian, at any alignment.
    pub data: WeightBytes,
    /// Multiplies every scale.
    pub factor: f32,
    /// Added to the scaled values of a group, one for each scale; empty if the format has no minima.
    pub minima: Arc<[f32]>,
}

impl From<Vec<f32>> for WeightScales {
    fn from(scales: Vec<f32>) -> Self {
        let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        Self { dtype: DType::F32, data: bytes.into(), factor: 1.0, minima: Arc::new([]) }
    }
}

impl WeightScales {
    /// The scale at `idx`, the factor applied. `idx` must be within the data.
    #[inline]
    pub(crate) fn get(&self, idx: usize) -> f32 {
        let data = self.data.as_slice();
        let pair = |idx: usize| u16::from_le_bytes([data[2 * idx], data[2 * idx + 1]]);
        let scale = match self.dtype {
            DType::Bf16 => f32::from_bits(u32::from(pair(idx)) << 16),
            DType::F16 => f16::from_bits(pair(idx)).to_f32(),
            DType::F8E8m0 => f32_from_e8m0(data[idx]),
            DType::F8E4m3 => f32_from_e4m3(data[idx]),
            DType::F32 => {
                let [a, b, c, d] = [0, 1, 2, 3].map(|byte| data[4 * idx + byte]);
                f32::from_le_bytes([a, b, c, d])
            }
            // `Weight::new` refuses these types.
            _ => f32::NAN,
        };
        scale * self.factor
    }

    /// Bytes of one scale of a type.
    ///
    /// # Errors
    /// [`WeightError::ScaleDtype`] for types that scales cannot have.
    pub const fn value_bytes(dtype: DType) -> Result<usize, WeightError> {
        match dtype {
            DType::F32 => Ok(4),
            DType::Bf16 | DType::F16 => Ok(2),
            DType::F8E8m0 | DType::F8E4m3 => Ok(1),
            dtype => Err(WeightError::ScaleDtype { dtype }),
        }
    }

    /// All scales as f32, the factor applied. None for a type that scales cannot have.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        let Ok(size) = Self::value_bytes(self.dtype) else { return Vec::new() };
        (0..self.data.as_slice().len() / size).map(|idx| self.get(idx)).collect()
    }

    fn size_bytes(&self) -> usize {
        self.data.as_slice().len() + size_of_val(&*self.minima)
    }
}

/// A row-major weight matrix `[rows, cols]`. The bytes need no alignment.
#[derive(Clone, Debug)]
pub struct Weight {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    codes: WeightBytes,
    scales: Option<WeightScales>,
}

impl Weight {
    /// Creates a matrix over packed `codes`, see [`WeightFormat`]. Reads all scales, and an fp8 matrix as a whole,
    /// because the kernels rely on finite values.
    ///
    /// # Errors
    /// [`WeightError`] for sizes that do not fit the shape, for NaN in an fp8 matrix, and for scales and minima that
    /// are not finite.
    pub fn new(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        codes: WeightBytes,
        scales: Option<WeightScales>,
    ) -> Result<Self, WeightError> {
        let row_bytes = match format.code_bits() {
            4 if !cols.is_multiple_of(2) => {
                return Err(WeightError::OddRow { rows, cols, format });
            }
            4 => cols / 2,
            bits => cols.saturating_mul(bits / 8),
        };
        let found = codes.as_slice().len();
        let expected = row_bytes.saturating_mul(rows);
        if found != expected {
            return Err(WeightError::DataSize { rows, cols, format, expected, found });
        }
        check_scales(format, rows, cols, scales.as_ref())?;
        if matches!(format, WeightFormat::F8E4m3 { .. }) {
            let bytes = codes.as_slice();
            // Chunks without an early exit vectorise.
            let is_damaged = |chunk: &[u8]| {
                chunk.iter().fold(false, |found, byte| found | (byte & 0x7f == 0x7f))
            };
            if bytes.chunks(4096).any(is_damaged) {
                let offset = bytes.iter().position(|byte| byte & 0x7f == 0x7f).unwrap_or(0);
                return Err(WeightError::NotFinite { rows, cols, offset });
            }
        }
        Ok(Self { format, rows, cols, codes, scales })
    }

    /// The form of the values.
    #[must_use]
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Number of rows (outputs).
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs).
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The packed codes, row-major, little-endian.
    #[must_use]
    pub fn codes(&self) -> &[u8] {
        self.codes.as_slice()
    }

    /// The scales; `None` for formats without.
    #[must_use]
    pub fn scales(&self) -> Option<&WeightScales> {
        self.scales.as_ref()
    }

    /// The matrix as f32, row-major, scales and minima applied.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        let scales = self.scales.as_ref().map(WeightScales::to_f32);
        let minima = self.scales.as_ref().map(|scales| &*scales.minima);
        let minima = minima.filter(|minima| !minima.is_empty());
        let size = [self.rows, self.cols];
        checkpoint::dequantize(self.format, size, self.codes(), scales.as_deref(), minima)
    }

    /// Bytes of a row of codes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.cols * self.format.code_bits() / 8
    }

    /// Bytes of all codes, scales and minima.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.codes().len() + self.scales.as_ref().map_or(0, WeightScales::size_bytes)
    }
}

fn check_scales(
    format: WeightFormat,
    rows: usize,
    cols: usize,
    scales: Option<&WeightScales>,
) -> Result<(), WeightError> {
    let size = |what, expected, found| match found == expected {
        true => Ok(()),
        false => Err(WeightError::ScaleSize { rows, cols, format, what, expected, found }),
    };
    if format.scale_block().is_some_and(|block| block.contains(&0)) {
        return size("rows and columns in a block", 1, 0);
    }
    let shape = format.scale_shape(rows, cols);
    let expected = shape.map_or(0, |[rows, cols]| rows.saturating_mul(cols));
    let Some(scales) = scales else { return size("scales", expected, 0) };
    let scale_bytes = WeightScales::value_bytes(scales.dtype)?;
    let bytes = expected.saturating_mul(scale_bytes);
    size("bytes of scales", bytes, scales.data.as_slice().len())?;
    let has_minima = matches!(
        format,
        WeightFormat::Int8 { has_minima: true, .. } | WeightFormat::Int4 { has_minima: true, .. }
    );
    size("minima", if has_minima { expected } else { 0 }, scales.minima.len())?;
    let values = (0..expected).map(|idx| scales.get(idx)).enumerate();
    let minima = scales.minima.iter().copied().enumerate();
    match values.chain(minima).find(|(_, value)| !value.is_finite()) {
        None => Ok(()),
        Some((idx, value)) => {
            let value = value.to_string();
            Err(WeightError::ScaleNotFinite { rows, cols, format, idx, value })
        }
    }
}

/// The matrices of one expert: `down(activation(gate(x), up(x)))`.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// `[inter, hidden]`; `None` if the layer's activation has no gate.
    pub gate: Option<Weight>,
    /// `[inter, hidden]`.
    pub up: Weight,
    /// `[hidden, inter]`.
    pub down: Weight,
    /// Added to the matrices' outputs.
    pub biases: Option<ExpertBiases>,
}

impl ExpertWeights {
    /// Bytes of all values, scales and biases.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let matrices = self.gate.iter().chain([&self.up, &self.down]);
        let biases = self.biases.as_ref().map_or(0, |b| b.gate.len() + b.up.len() + b.down.len());
        matrices.map(Weight::size_bytes).sum::<usize>() + biases * size_of::<f32>()
    }
}

/// The loaded experts of one layer. A clone shares the weights. To change the set of experts while batches
/// use it, change a clone and swap it in.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    hidden: usize,
    inter: usize,
    arithmetic: ExpertArithmetic,
    experts: Vec<Option<Arc<ExpertWeights>>>,
}

impl LayerExperts {
    /// Creates a layer without experts, whose arithmetic is [`ExpertArithmetic::SWIGLU`].
    ///
    /// # Errors
    /// [`WeightError::EmptyLayer`] when a size is zero.
    pub fn new(hidden: usize, inter: usize) -> Result<Self, WeightError> {
        if hidden == 0 || inter == 0 {
            return Err(WeightError::EmptyLayer { hidden, inter });
        }
        Ok(Self { hidden, inter, arithmetic: ExpertArithmetic::SWIGLU, experts: Vec::new() })
    }

    /// The same layer without experts, with another arithmetic.
    #[must_use]
    pub fn with_arithmetic(self, arithmetic: ExpertArithmetic) -> Self {
        Self { arithmetic, experts: Vec::new(), ..self }
    }

    /// Adds or replaces an expert. Memory grows with the highest id, so ids should be small and dense.
    ///
    /// # Errors
    /// [`WeightError`] when a matrix or a bias does not have the shape of the layer, or when a gate is missing or
    /// superfluous.
    pub fn insert(&mut self, expert: u32, weights: Arc<ExpertWeights>) -> Result<(), WeightError> {
        let (hidden, inter) = (self.hidden, self.inter);
        let activation = self.arithmetic.activation;
        if activation.is_gated() != weights.gate.is_some() {
            let found = if weights.gate.is_some() { "has a gate" } else { "has no gate" };
            return Err(WeightError::Gate { expert, found, activation: activation.to_string() });
        }
        let gate = weights.gate.as_ref().map(|gate| ("gate", gate, inter, hidden));
        for (matrix, weight, rows, cols) in gate
            .into_iter()
            .chain([("up", &weights.up, inter, hidden), ("down", &weights.down, hidden, inter)])
        {
            if (weight.rows, weight.cols) != (rows, cols) {
                let (found_rows, found_cols) = (weight.rows, weight.cols);
                return Err(WeightError::Shape {
                    matrix,
                    expert,
                    found_rows,
                    found_cols,
                    rows,
                    cols,
                });
            }
        }
        if let Some(biases) = &weights.biases {
            let gate = if activation.is_gated() { inter } else { 0 };
            for (matrix, bias, expected) in [
                ("gate", &biases.gate, gate),
                ("up", &biases.up, inter),
                ("down", &biases.down, hidden),
            ] {
                let found = bias.len();
                if found != expected {
                    return Err(WeightError::Bias { matrix, expert, found, expected });
                }
            }
        }
        let idx = expert as usize;
        if idx >= self.experts.len() {
            self.experts.resize(idx + 1, None);
        }
        self.experts[idx] = Some(weights);
        Ok(())
    }

    /// Removes an expert and returns its weights, which stay alive while a batch uses them.
    pub fn remove(&mut self, expert: u32) -> Option<Arc<ExpertWeights>> {
        self.experts.get_mut(expert as usize)?.take()
    }

    /// The weights of an expert, if it is loaded.
    #[must_use]
    pub fn get(&self, expert: u32) -> Option<&Arc<ExpertWeights>> {
        self.experts.get(expert as usize)?.as_ref()
    }

    /// Ids of the loaded experts, in increasing order.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        let loaded = self.experts.iter().enumerate().filter(|(_, expert)| expert.is_some());
        loaded.map(|(idx, _)| idx as u32)
    }

    /// Number of loaded experts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ids().count()
    }

    /// Returns true if no expert is loaded.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ids().next().is_none()
    }

    /// Hidden size of the layer: values per token.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Intermediate size of the experts.
    #[must_use]
    pub fn inter(&self) -> usize {
        self.inter
    }

    /// The arithmetic of the experts.
    #[must_use]
    pub fn arithmetic(&self) -> ExpertArithmetic {
        self.arithmetic
    }

    pub(crate) fn activation(&self) -> Activation {
        self.arithmetic.activation
    }

    /// Returns true if a token's factor for an expert applies to the expert's input.
    pub(crate) fn weights_input(&self) -> bool {
        self.arithmetic.weighting == Weighting::Input
    }
}
