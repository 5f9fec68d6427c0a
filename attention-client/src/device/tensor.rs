//! A caller's tensors, and checks of them before anything is launched.

use std::fmt;

use kernels::abi::DevicePtr;

use super::DeviceError;

/// Element type of a tensor in an engine. Kernels read only a few of them; a call with another type is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names say it")]
pub enum TensorType {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F8E4m3,
    F8E5m2,
    F16,
    Bf16,
    F32,
    F64,
}

impl TensorType {
    /// The name, as in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::F8E4m3 => "fp8-e4m3",
            Self::F8E5m2 => "fp8-e5m2",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes that kernels move at a time.
const ROW_ALIGN: u64 = 16;

/// A contiguous tensor in memory that the GPU reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceTensor {
    /// Address of the first element.
    pub ptr: DevicePtr,
    /// Element type.
    pub dtype: TensorType,
}

impl DeviceTensor {
    /// A tensor at an address.
    #[must_use]
    pub const fn new(ptr: DevicePtr, dtype: TensorType) -> Self {
        Self { ptr, dtype }
    }

    /// The part of the tensor behind its first `bytes` bytes.
    pub(super) const fn skip(self, bytes: u64) -> Self {
        Self { ptr: self.ptr.add(bytes), ..self }
    }

    fn check(
        self,
        tensor: &'static str,
        expected: &'static [TensorType],
        align: u64,
    ) -> Result<(), DeviceError> {
        if !expected.contains(&self.dtype) {
            return Err(DeviceError::Dtype { tensor, found: self.dtype, expected: expected[0] });
        }
        if self.ptr.is_null() {
            return Err(DeviceError::Null { tensor });
        }
        if !self.ptr.0.is_multiple_of(align) {
            return Err(DeviceError::Alignment { tensor, found: self.ptr.0, align });
        }
        Ok(())
    }
}

/// Tensors of a call, in memory that the GPU reaches. None may change until the call is finished.
///
/// Each call asks the driver whether the GPU reaches these tensors and the output from first byte to last. A recorded
/// call asks when it is recorded; its replays do not. So memory that was returned to the driver is an error before a
/// launch. The driver cannot notice memory that was freed to an engine's caching allocator, or that holds another
/// tensor by now. Valid tensors are the caller's promise in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceInput {
    /// bf16 `[capacity, hidden]`, aligned to 16 bytes.
    pub hidden_states: DeviceTensor,
    /// i32 `[capacity, top_k]`, -1 = masked, aligned to 16 bytes.
    pub topk_idx: DeviceTensor,
    /// f32 `[capacity, top_k]`, aligned to 16 bytes.
    pub topk_weights: DeviceTensor,
    /// One u32 or i32, aligned to 4 bytes: the number of tokens, `capacity` at most. Kernels read it when they run.
    pub num_tokens: DeviceTensor,
    /// Rows of the tensors; at most [`DeviceClient::max_tokens`](super::DeviceClient::max_tokens), except in
    /// [`DeviceClient::forward`](super::DeviceClient::forward).
    pub capacity: u32,
}

impl DeviceInput {
    /// Tensors of the types that kernels read. An engine with types of its own fills the fields instead, so that a
    /// wrong type is refused.
    #[must_use]
    pub const fn new(
        hidden_states: DevicePtr,
        topk_idx: DevicePtr,
        topk_weights: DevicePtr,
        num_tokens: DevicePtr,
        capacity: u32,
    ) -> Self {
        Self {
            hidden_states: DeviceTensor::new(hidden_states, TensorType::Bf16),
            topk_idx: DeviceTensor::new(topk_idx, TensorType::I32),
            topk_weights: DeviceTensor::new(topk_weights, TensorType::F32),
            num_tokens: DeviceTensor::new(num_tokens, TensorType::U32),
            capacity,
        }
    }

    /// Checks types, null pointers and alignment.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.hidden_states.check("hidden_states", &[TensorType::Bf16], ROW_ALIGN)?;
        self.topk_idx.check("topk_idx", &[TensorType::I32], ROW_ALIGN)?;
        self.topk_weights.check("topk_weights", &[TensorType::F32], ROW_ALIGN)?;
        // An i32 works too: a negative number exceeds any capacity.
        self.num_tokens.check("num_tokens", &[TensorType::U32, TensorType::I32], 4)
    }
}

/// Checks an output tensor.
pub(super) fn check_out(out: DeviceTensor) -> Result<(), DeviceError> {
    out.check("out", &[TensorType::Bf16], ROW_ALIGN)
}
