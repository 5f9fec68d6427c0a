//! Views of tensors in a mapped file.

use std::fmt;

use crate::convert;

/// Element type of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent and 3 mantissa bits, no infinities (OCP "E4M3", `float8_e4m3fn`).
    F8E4m3,
    /// A power of two, 2^(byte − 127); 255 is NaN (OCP "E8M0"). For scales.
    F8E8m0,
    /// IEEE double precision.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Signed byte.
    I8,
    /// Unsigned byte.
    U8,
    /// Any other type, by its safetensors name. Its tensors can be listed but not converted.
    Other(&'static str),
}

impl DType {
    /// Bytes per element; `None` for [`DType::Other`].
    #[must_use]
    pub fn size_bytes(self) -> Option<usize> {
        match self {
            DType::Other(_) => None,
            known => Some(known.size_bits() / 8),
        }
    }

    /// Bits per element.
    pub(crate) fn size_bits(self) -> usize {
        match self {
            DType::F8E4m3 | DType::F8E8m0 | DType::U8 | DType::I8 => 8,
            DType::F16 | DType::Bf16 => 16,
            DType::F32 | DType::I32 => 32,
            DType::F64 | DType::I64 => 64,
            DType::Other(name) => OTHERS.iter().find(|(n, _)| *n == name).map_or(0, |(_, b)| *b),
        }
    }

    /// The name used in safetensors headers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
            DType::F8E4m3 => "F8_E4M3",
            DType::F8E8m0 => "F8_E8M0",
            DType::F64 => "F64",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::I8 => "I8",
            DType::U8 => "U8",
            DType::Other(name) => name,
        }
    }

    /// The type with that name in safetensors headers.
    pub(crate) fn from_name(name: &str) -> Option<DType> {
        const KNOWN: [DType; 10] = [
            DType::F32,
            DType::F16,
            DType::Bf16,
            DType::F8E4m3,
            DType::F8E8m0,
            DType::F64,
            DType::I64,
            DType::I32,
            DType::I8,
            DType::U8,
        ];
        let known = KNOWN.into_iter().find(|dtype| dtype.name() == name);
        let other = || OTHERS.iter().find(|(n, _)| *n == name).map(|(n, _)| DType::Other(n));
        known.or_else(other)
    }
}

/// Types of the safetensors format that are listed only, with bits per element.
const OTHERS: &[(&str, usize)] = &[
    ("BOOL", 8),
    ("I16", 16),
    ("U16", 16),
    ("U32", 32),
    ("U64", 64),
    ("C64", 64),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("F8_E5M2", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
];

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor inside a mapped file: row-major, little-endian, at any alignment.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// The name in the file.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: &'a [usize],
    /// The raw bytes: product of `shape` × element size.
    pub data: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Returns the view itself if its shape is `expected`, [`TensorError::Shape`] otherwise.
    pub fn expect_shape(self, expected: &[usize]) -> Result<Self, TensorError> {
        if self.shape == expected {
            return Ok(self);
        }
        Err(TensorError::Shape {
            name: self.name.to_owned(),
            found: self.shape.to_vec(),
            expected: expected.to_vec(),
        })
    }

    /// Returns the view itself if its dtype is one of `expected`, [`TensorError::DType`] otherwise.
    pub fn expect_dtype(self, expected: &'static [DType]) -> Result<Self, TensorError> {
        if expected.contains(&self.dtype) {
            return Ok(self);
        }
        Err(TensorError::DType { name: self.name.to_owned(), found: self.dtype, expected })
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// All elements as f32, row-major, without block scales.
    /// [`WeightView::to_f32`](crate::WeightView::to_f32) applies block scales.
    ///
    /// # Errors
    /// [`TensorError::DType`] unless the tensor is f32, f16, bf16, f8-e4m3 or f8-e8m0.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        self.expect_dtype(SCALES)?;
        let mut out = vec![0.0; self.num_elements()];
        convert::to_f32(self.dtype, self.data, &mut out);
        Ok(out)
    }

    /// All elements as i32, row-major, from i32, or from i64 if the values fit.
    ///
    /// # Errors
    /// [`TensorError::DType`] for another dtype, [`TensorError::Value`] for a value out of range.
    pub fn to_i32(&self) -> Result<Vec<i32>, TensorError> {
        self.expect_dtype(&[DType::I32, DType::I64])?;
        if self.dtype == DType::I32 {
            let (words, _) = self.data.as_chunks::<4>();
            return Ok(words.iter().map(|w| i32::from_le_bytes(*w)).collect());
        }
        let (words, _) = self.data.as_chunks::<8>();
        words
            .iter()
            .map(|w| {
                let value = i64::from_le_bytes(*w);
                i32::try_from(value).map_err(|_| TensorError::Value {
                    name: self.name.to_owned(),
                    found: value.to_string(),
                    expected: "a value that fits 32 bits",
                })
            })
            .collect()
    }
}

/// Error of reading a tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum TensorError {
    /// No tensor of that name.
    #[error(
        "tensor '{name}' is not in {location}; check that the checkpoint is complete and matches its config.json"
    )]
    NotFound { name: String, location: String },
    /// The shape differs from the configuration.
    #[error("tensor '{name}' has shape {found:?}, expected {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    /// The dtype is not supported here.
    #[error("tensor '{name}' has dtype {found}, expected {}", names(.expected))]
    DType { name: String, found: DType, expected: &'static [DType] },
    /// A value is invalid.
    #[error("tensor '{name}' holds {found}, expected {expected}")]
    Value { name: String, found: String, expected: &'static str },
    /// The tensors of an expert do not form a format that is supported.
    #[error("tensor '{name}' {found}, expected {expected}")]
    Format { name: String, found: String, expected: String },
    /// The checkpoint stores no routed experts in a layout that is known.
    #[error(
        "{location} holds no routed experts of layer {layer} under a known name (such as '{example}'); \
         give the folder that holds the experts' weights"
    )]
    NoExperts { layer: u32, example: String, location: String },
    /// The layer has no experts, or does not exist.
    #[error("layer {layer} is not an MoE layer; the MoE layers of this model are {moe_layers}")]
    NotMoeLayer { layer: u32, moe_layers: String },
    /// The expert index is out of range.
    #[error("expert {expert} does not exist; the model has experts 0 to {}", num_experts.saturating_sub(1))]
    NoSuchExpert { expert: u32, num_experts: u32 },
}

fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ")
}

/// Types that weights of routers, norms and biases have.
pub(crate) const PLAIN_FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
/// Types that scales have.
pub(crate) const SCALES: &[DType] =
    &[DType::F32, DType::Bf16, DType::F16, DType::F8E8m0, DType::F8E4m3];
