//! Views of tensors in a mapped file.

use crate::convert;
use crate::dtype::DType;

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
    /// [`TensorError::DType`] unless the tensor is f32, f16, bf16 or f8-e4m3.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        self.expect_dtype(FLOATS)?;
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

pub(crate) const FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32, DType::F8E4m3];
