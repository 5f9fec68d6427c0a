//! Integer codes whose groups are no runs of neighbouring columns.

use half::{bf16, f16};

use super::{Codes, Scales, nibbles};
use crate::dtype::DType;

/// Integer codes with a group for each column, as GPTQ's `g_idx` and `weight_g_idx` of compressed-tensors give it.
#[derive(Debug, Clone)]
pub(crate) struct Reordered<'a> {
    /// The codes in the order of the matrix.
    pub codes: Box<Codes<'a>>,
    /// Bits of a code, 4 or 8.
    pub bits: usize,
    /// The group of each column, below the number of groups.
    pub order: Vec<u32>,
    /// `[rows, groups]` in BF16, F16 or F32.
    pub scales: Scales<'a>,
    /// One zero point for each scale, in codes that start at 0. Without them it is the middle.
    pub zeros: Option<Vec<i32>>,
}

impl Reordered<'_> {
    /// The values of the `rows × cols` matrix, `(code − zero) × scale`, in the type of the scales. Each product is
    /// rounded once, to nearest even: GPTQModel and compressed-tensors compute the same bits.
    pub fn dequantise(&self, rows: usize, cols: usize) -> Vec<u8> {
        let codes = self.codes.row_major(rows, cols);
        let mut values = vec![0.0; rows * cols];
        match self.bits {
            4 => nibbles(&codes, &mut values, |code| f32::from(code) - 8.0),
            _ => values.iter_mut().zip(&*codes).for_each(|(v, code)| *v = f32::from(*code as i8)),
        }
        let scales = self.scales.to_f32();
        let groups = scales.len() / rows.max(1);
        let middle = 1 << (self.bits - 1);
        for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            let first = row * groups;
            for (value, group) in values.iter_mut().zip(&self.order) {
                let at = first + *group as usize;
                let offset = self.zeros.as_ref().map_or(0, |zeros| middle - zeros[at]);
                // The sum has at most 8 bits and a half precision scale 11, so that f32 holds their product exactly.
                *value = (*value + offset as f32) * scales[at];
            }
        }
        match self.scales.dtype {
            DType::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }
}
