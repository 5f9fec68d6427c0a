//! Element types.

use std::fmt;

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
    /// IEEE double precision.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned byte.
    U8,
    /// Any other type, by its safetensors name. Its tensors can be listed but not converted.
    Other(&'static str),
}

impl DType {
    /// Bytes per element; `None` for [`DType::Other`].
    pub fn size_bytes(self) -> Option<usize> {
        match self {
            DType::F8E4m3 | DType::U8 => Some(1),
            DType::F16 | DType::Bf16 => Some(2),
            DType::F32 | DType::I32 => Some(4),
            DType::F64 | DType::I64 => Some(8),
            DType::Other(_) => None,
        }
    }

    /// The name used in safetensors headers.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Bf16 => "BF16",
            DType::F8E4m3 => "F8_E4M3",
            DType::F64 => "F64",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::U8 => "U8",
            DType::Other(name) => name,
        }
    }

    pub(crate) fn from_safetensors(dtype: safetensors::Dtype) -> DType {
        use safetensors::Dtype as D;
        match dtype {
            D::F32 => DType::F32,
            D::F16 => DType::F16,
            D::BF16 => DType::Bf16,
            D::F8_E4M3 => DType::F8E4m3,
            D::F64 => DType::F64,
            D::I64 => DType::I64,
            D::I32 => DType::I32,
            D::U8 => DType::U8,
            D::BOOL => DType::Other("BOOL"),
            D::I8 => DType::Other("I8"),
            D::I16 => DType::Other("I16"),
            D::U16 => DType::Other("U16"),
            D::U32 => DType::Other("U32"),
            D::U64 => DType::Other("U64"),
            D::C64 => DType::Other("C64"),
            D::F4 => DType::Other("F4"),
            D::F6_E2M3 => DType::Other("F6_E2M3"),
            D::F6_E3M2 => DType::Other("F6_E3M2"),
            D::F8_E5M2 => DType::Other("F8_E5M2"),
            D::F8_E8M0 => DType::Other("F8_E8M0"),
            D::F8_E4M3FNUZ => DType::Other("F8_E4M3FNUZ"),
            D::F8_E5M2FNUZ => DType::Other("F8_E5M2FNUZ"),
            _ => DType::Other("unknown"),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
