//! Descriptors of a layer's matrices for the copy engine.

use crate::abi::{DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, MAX_EXPERTS, MAX_HIDDEN};
use crate::check::CheckError;

/// Sizes of a layer's experts on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerShape {
    /// Hidden size, a multiple of 128.
    pub hidden: u32,
    /// Intermediate size, a multiple of 64.
    pub inter: u32,
    /// Experts.
    pub num_local_experts: u32,
    /// Type of the matrices, `DTYPE_BF16` or `DTYPE_F8_E4M3`.
    pub dtype: u32,
}

/// Addresses of a layer's matrices, laid out as [`LayerWeights`](crate::abi::LayerWeights) says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerMatrices {
    /// Gate and up.
    pub gate_up: DevicePtr,
    /// Down.
    pub down: DevicePtr,
    /// Scales of gate and up, null with bf16.
    pub gate_up_scale: DevicePtr,
    /// Scales of down, null with bf16.
    pub down_scale: DevicePtr,
}

/// A matrix as the copy engine reads it: boxes of `extent`, values innermost. Mirrors `sy_map_shape`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the driver reads it"))]
pub struct MapShape {
    /// Dimensions that are used.
    pub rank: u32,
    /// Box of one copy, values.
    pub extent: [u32; 5],
    /// Sizes, values.
    pub dims: [u64; 5],
    /// Distances in every dimension but the first, bytes.
    pub strides: [u64; 4],
}

impl LayerShape {
    /// Whether the expert stage can multiply by such matrices.
    ///
    /// # Errors
    /// The first [`CheckError`] found.
    pub fn check(&self, at: &LayerMatrices) -> Result<(), CheckError> {
        let is_fp8 = self.dtype == DTYPE_F8_E4M3;
        if !is_fp8 && self.dtype != DTYPE_BF16 {
            return Err(CheckError::Dtype);
        }
        if self.hidden == 0 || !self.hidden.is_multiple_of(128) || self.hidden > MAX_HIDDEN {
            return Err(CheckError::Hidden);
        }
        if self.inter == 0 || !self.inter.is_multiple_of(64) || self.inter > MAX_HIDDEN {
            return Err(CheckError::Inter);
        }
        if self.num_local_experts == 0 || self.num_local_experts as usize > MAX_EXPERTS {
            return Err(CheckError::Experts);
        }
        let needs = [
            (at.gate_up, true),
            (at.down, true),
            (at.gate_up_scale, is_fp8),
            (at.down_scale, is_fp8),
        ];
        if needs.iter().any(|(pointer, is_needed)| *is_needed && pointer.is_null()) {
            return Err(CheckError::Null);
        }
        if needs.iter().any(|(pointer, _)| !pointer.0.is_multiple_of(16)) {
            return Err(CheckError::Alignment);
        }
        Ok(())
    }

    /// Gate and up: a box is a quarter of a tile, half a group of 64 rows of gate and of as many of up, by eight in
    /// turn. Both maps put rows into the order that leaves a thread of the matrix units with neighbouring
    /// results.
    #[must_use]
    pub fn gate_up_map(&self) -> MapShape {
        let row = u64::from(self.hidden) * self.value_bytes();
        let (inter, experts) = (u64::from(self.inter), u64::from(self.num_local_experts));
        MapShape {
            rank: 5,
            extent: [self.panel_values(), 2, 4, 2, 4],
            dims: [self.hidden.into(), inter * 2 * experts, 4, 2, 8],
            strides: [row, row * 16, row * inter, row * 2],
        }
    }

    /// Down: a box is a quarter of a tile, two groups of 32 rows.
    #[must_use]
    pub fn down_map(&self) -> MapShape {
        let row = u64::from(self.inter) * self.value_bytes();
        let (hidden, experts) = (u64::from(self.hidden), u64::from(self.num_local_experts));
        MapShape {
            rank: 5,
            extent: [self.panel_values(), 2, 4, 4, TILE_WEIGHTS / 32 / 4],
            dims: [self.inter.into(), 2, 4, 4, hidden / 32 * experts],
            strides: [row, row * 8, row * 2, row * 32],
        }
    }

    const fn value_bytes(&self) -> u64 {
        if self.dtype == DTYPE_F8_E4M3 { 1 } else { 2 }
    }

    /// Values in 128 bytes.
    const fn panel_values(&self) -> u32 {
        if self.dtype == DTYPE_F8_E4M3 { 128 } else { 64 }
    }
}

/// Rows of weights in a tile of the kernels.
const TILE_WEIGHTS: u32 = 256;
