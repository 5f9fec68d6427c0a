//! Element types on the wire.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::abi::SCALE_BLOCK;

/// Element type of the rows of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WireDtype {
    /// IEEE single precision, 4 bytes. Lossless.
    #[serde(rename = "f32")]
    F32,
    /// IEEE half precision, 2 bytes.
    #[serde(rename = "f16")]
    F16,
    /// bfloat16, 2 bytes.
    #[serde(rename = "bf16")]
    Bf16,
    /// FP8 E4M3 (finite, NaN = 0x7f and 0xff), 1 byte, with one f32 scale per 128 values.
    #[serde(rename = "fp8")]
    F8E4m3,
}

impl WireDtype {
    /// Every element type.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::F8E4m3];

    /// Name on command lines and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F8E4m3 => "fp8",
        }
    }

    /// Number in frames and hellos, never 0.
    #[must_use]
    pub const fn code(self) -> u16 {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
            Self::Bf16 => 3,
            Self::F8E4m3 => 4,
        }
    }

    /// The type with this number.
    #[must_use]
    pub const fn from_code(code: u16) -> Option<Self> {
        match code {
            1 => Some(Self::F32),
            2 => Some(Self::F16),
            3 => Some(Self::Bf16),
            4 => Some(Self::F8E4m3),
            _ => None,
        }
    }

    /// Bytes of one value.
    #[must_use]
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 => 1,
        }
    }

    /// Bytes of a row of `hidden` values, without scales and padding.
    #[must_use]
    pub const fn row_bytes(self, hidden: usize) -> usize {
        hidden * self.element_bytes()
    }

    /// Scales of a row of `hidden` values: one per 128 values for FP8, including a partial last block.
    /// Zero for all other types.
    #[must_use]
    pub const fn scales_per_row(self, hidden: usize) -> usize {
        match self {
            Self::F8E4m3 => hidden.div_ceil(SCALE_BLOCK),
            Self::F32 | Self::F16 | Self::Bf16 => 0,
        }
    }
}

impl fmt::Display for WireDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No element type has this name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("unknown wire dtype {found:?}: expected f32, f16, bf16 or fp8")]
pub struct UnknownDtype {
    /// The name given.
    pub found: String,
}

impl FromStr for WireDtype {
    type Err = UnknownDtype;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownDtype { found: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_json_round_trip() {
        for dtype in WireDtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
            assert_eq!(WireDtype::from_code(dtype.code()), Some(dtype));
            let json = serde_json::to_string(&dtype).expect("json");
            assert_eq!(json, format!("\"{dtype}\""));
            assert_eq!(serde_json::from_str::<WireDtype>(&json).expect("json"), dtype);
        }
        for code in (0..=u16::MAX).filter(|code| !(1..=4).contains(code)) {
            assert_eq!(WireDtype::from_code(code), None);
        }
        assert!("fp32".parse::<WireDtype>().is_err());
    }

    #[test]
    fn a_partial_last_block_has_a_scale() {
        assert_eq!(WireDtype::F8E4m3.scales_per_row(1), 1);
        assert_eq!(WireDtype::F8E4m3.scales_per_row(128), 1);
        assert_eq!(WireDtype::F8E4m3.scales_per_row(129), 2);
        assert_eq!(WireDtype::Bf16.scales_per_row(129), 0);
    }
}
