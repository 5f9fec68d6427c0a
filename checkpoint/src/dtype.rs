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
    #[must_use]
    pub fn from_name(name: &str) -> Option<DType> {
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
