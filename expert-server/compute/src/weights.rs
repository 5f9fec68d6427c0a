//! Expert weights in the dtype of the checkpoint, in mapped files or in memory.

use std::ptr::NonNull;
use std::sync::Arc;

/// Side of the square blocks that share one scale in fp8 weights.
pub const SCALE_BLOCK: usize = 128;

/// Storage type of weights. Arithmetic is in f32 for all types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightDtype {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// fp8 e4m3 (finite variant), with one f32 scale per block of 128 × 128 values.
    F8E4m3,
}

impl WeightDtype {
    /// Bytes per value.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F8E4m3 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Why weights cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum WeightError {
    /// The number of bytes does not fit the shape of the matrix.
    #[error("a {rows} x {cols} matrix of {dtype:?} takes {expected} bytes, found {found}")]
    DataSize { rows: usize, cols: usize, dtype: WeightDtype, expected: usize, found: usize },
    /// The number of scales does not fit the matrix.
    #[error("a {rows} x {cols} matrix of {dtype:?} needs {expected} block scales, found {found}")]
    ScaleSize { rows: usize, cols: usize, dtype: WeightDtype, expected: usize, found: usize },
    /// An fp8 matrix contains NaN, first at byte `offset`.
    #[error(
        "a {rows} x {cols} matrix of F8E4m3 holds NaN at byte {offset}; the weights are damaged"
    )]
    NotFinite { rows: usize, cols: usize, offset: usize },
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

/// A row-major weight matrix `[rows, cols]`. The bytes need no alignment.
#[derive(Clone, Debug)]
pub struct Weight {
    dtype: WeightDtype,
    rows: usize,
    cols: usize,
    data: WeightBytes,
    scales: Arc<[f32]>,
}

impl Weight {
    /// Creates a matrix over `data`. For fp8 `scales` has `ceil(rows / 128) * ceil(cols / 128)` row-major
    /// factors; for other types it is empty. Reads an fp8 matrix once as a whole, because the kernels rely on
    /// finite values.
    ///
    /// # Errors
    /// [`WeightError`] for sizes that do not fit the shape, and for NaN in an fp8 matrix.
    pub fn new(
        dtype: WeightDtype,
        rows: usize,
        cols: usize,
        data: WeightBytes,
        scales: Arc<[f32]>,
    ) -> Result<Self, WeightError> {
        let found = data.as_slice().len();
        let expected = rows.saturating_mul(cols).saturating_mul(dtype.size_bytes());
        if found != expected {
            return Err(WeightError::DataSize { rows, cols, dtype, expected, found });
        }
        let (expected, found) = match dtype {
            WeightDtype::F8E4m3 => {
                (rows.div_ceil(SCALE_BLOCK) * cols.div_ceil(SCALE_BLOCK), scales.len())
            }
            _ => (0, scales.len()),
        };
        if found != expected {
            return Err(WeightError::ScaleSize { rows, cols, dtype, expected, found });
        }
        if dtype == WeightDtype::F8E4m3 {
            let bytes = data.as_slice();
            // Chunks without an early exit vectorise.
            let is_damaged = |chunk: &[u8]| {
                chunk.iter().fold(false, |found, byte| found | (byte & 0x7f == 0x7f))
            };
            if bytes.chunks(4096).any(is_damaged) {
                let offset = bytes.iter().position(|byte| byte & 0x7f == 0x7f).unwrap_or(0);
                return Err(WeightError::NotFinite { rows, cols, offset });
            }
        }
        Ok(Self { dtype, rows, cols, data, scales })
    }

    /// Storage dtype.
    #[must_use]
    pub fn dtype(&self) -> WeightDtype {
        self.dtype
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

    /// The stored values, row-major, little-endian.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Block scales `[ceil(rows / 128), ceil(cols / 128)]`; empty unless fp8.
    #[must_use]
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Bytes of all values and scales.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.data().len() + size_of_val(&*self.scales)
    }
}

/// The three matrices of one expert: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// `[inter, hidden]`.
    pub gate: Weight,
    /// `[inter, hidden]`.
    pub up: Weight,
    /// `[hidden, inter]`.
    pub down: Weight,
}

impl ExpertWeights {
    /// Bytes of all values and scales.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.gate.size_bytes() + self.up.size_bytes() + self.down.size_bytes()
    }
}

/// The loaded experts of one layer. A clone shares the weights. To change the set of experts while batches
/// use it, change a clone and swap it in.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    hidden: usize,
    inter: usize,
    experts: Vec<Option<Arc<ExpertWeights>>>,
}

impl LayerExperts {
    /// Creates a layer without experts.
    ///
    /// # Errors
    /// [`WeightError::EmptyLayer`] when a size is zero.
    pub fn new(hidden: usize, inter: usize) -> Result<Self, WeightError> {
        if hidden == 0 || inter == 0 {
            return Err(WeightError::EmptyLayer { hidden, inter });
        }
        Ok(Self { hidden, inter, experts: Vec::new() })
    }

    /// Adds or replaces an expert. Memory grows with the highest id, so ids should be small and dense.
    ///
    /// # Errors
    /// [`WeightError::Shape`] when a matrix does not have the shape of the layer.
    pub fn insert(&mut self, expert: u32, weights: Arc<ExpertWeights>) -> Result<(), WeightError> {
        let (hidden, inter) = (self.hidden, self.inter);
        for (matrix, weight, rows, cols) in [
            ("gate", &weights.gate, inter, hidden),
            ("up", &weights.up, inter, hidden),
            ("down", &weights.down, hidden, inter),
        ] {
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
}
