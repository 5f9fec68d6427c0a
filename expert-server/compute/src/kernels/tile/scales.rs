//! Scales and minima of a block of columns, read once per row.

use std::mem::MaybeUninit;

use checkpoint::{DType, f32_from_e8m0};

use super::{Bf16, F8, F8_FACTOR, F16, F32, Grouped, MAX_SCALES, Simd, convert, prefetch_all};
use crate::weights::{Weight, WeightScales};

/// Scales or minima of a block of columns; the first ones are initialised.
pub(super) struct Scales(pub(super) [MaybeUninit<f32>; MAX_SCALES]);

impl Scales {
    #[inline(always)]
    pub(super) const fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; MAX_SCALES])
    }

    /// # Safety
    /// The value was written.
    #[inline(always)]
    pub(super) unsafe fn get(&self, idx: usize) -> f32 {
        // SAFETY: as promised by the caller, so `idx` is in range.
        unsafe { self.0.get_unchecked(idx).assume_init() }
    }
}

/// # Safety
/// The processor has the instruction set. Scale `idx` was read, and minimum `idx` if there are minima.
#[inline(always)]
pub(super) unsafe fn group_of<S: Simd, G: Grouped>(
    grid: &Grid<'_>,
    scales: &Scales,
    minima: &Scales,
    idx: usize,
) -> G::Group<S> {
    // SAFETY: as promised by the caller.
    unsafe {
        let has_minimum = G::HAS_MINIMA && grid.has_minima;
        G::group::<S>(scales.get(idx), if has_minimum { minima.get(idx) } else { 0.0 })
    }
}

/// Rows and columns that share a scale.
#[inline(always)]
pub(super) fn scale_block(weight: &Weight) -> [usize; 2] {
    weight.format().scale_block().unwrap_or([1, usize::MAX])
}

/// The scales of a block of columns.
pub(super) struct Grid<'a> {
    scales: &'a WeightScales,
    pub(super) has_minima: bool,
    block_rows: usize,
    /// Scales of a row.
    per_row: usize,
    /// The first scale of these columns in each row, and their number.
    first: usize,
    num: usize,
    /// Columns from the first one on that share a scale, and columns of each later scale.
    pub(super) first_stop: usize,
    pub(super) block_cols: usize,
}

impl<'a> Grid<'a> {
    /// The scales of columns `start..end`, at least one column.
    #[inline(always)]
    pub(super) fn new(weight: &'a Weight, start: usize, end: usize) -> Self {
        let [block_rows, block_cols] = scale_block(weight);
        let first = start / block_cols;
        // The constructor of weights requires scales of these forms.
        let Some(scales) = weight.scales() else { unreachable!("weights without scales") };
        Self {
            scales,
            has_minima: !scales.minima.is_empty(),
            block_rows,
            per_row: weight.cols().div_ceil(block_cols),
            first,
            num: (end - 1) / block_cols + 1 - first,
            first_stop: (first + 1).saturating_mul(block_cols),
            block_cols,
        }
    }

    /// Number of the first scale of a row.
    #[inline(always)]
    pub(super) fn first_of(&self, row: usize) -> usize {
        // Most formats have a scale per row, and divisions are slow.
        let row = if self.block_rows == 1 { row } else { row / self.block_rows };
        row * self.per_row + self.first
    }

    /// Reads the scales of a row, the factor applied. Prefetches those of the row `ahead` rows further on, unless
    /// that is 0.
    ///
    /// # Safety
    /// The processor has the instruction set, and the row exists.
    #[inline(always)]
    pub(super) unsafe fn read<S: Simd>(&self, row: usize, ahead: usize, out: &mut Scales) {
        let WeightScales { dtype, data, factor, .. } = self.scales;
        let (data, first, num) = (data.as_slice(), self.first_of(row), self.num);
        let later = if ahead > 0 { self.first_of(row + ahead) } else { first };
        // SAFETY: there are `num` scales from `first` on.
        unsafe {
            match dtype {
                DType::Bf16 => convert::<S, Bf16>(data, [first, num, later], *factor, out),
                DType::F16 => convert::<S, F16>(data, [first, num, later], *factor, out),
                DType::F8E4m3 => {
                    convert::<S, F8>(data, [first, num, later], *factor * F8_FACTOR, out);
                }
                DType::F8E8m0 => {
                    prefetch_all::<S>(data.as_ptr().wrapping_add(later), num);
                    let out = &mut out.0[..num];
                    for (out, byte) in out.iter_mut().zip(&data[first..][..num]) {
                        out.write(f32_from_e8m0(*byte) * factor);
                    }
                }
                _ => convert::<S, F32>(data, [first, num, later], *factor, out),
            }
        }
    }

    /// As [`read`](Self::read), for the minima, if there are any.
    ///
    /// # Safety
    /// As for [`read`](Self::read).
    #[inline(always)]
    pub(super) unsafe fn read_minima<S: Simd>(&self, row: usize, ahead: usize, out: &mut Scales) {
        if !self.has_minima {
            return;
        }
        let (first, num) = (self.first_of(row), self.num);
        let later = if ahead > 0 { self.first_of(row + ahead) } else { first };
        let later = self.scales.minima.as_ptr().wrapping_add(later);
        // SAFETY: the processor has the instruction set.
        unsafe { prefetch_all::<S>(later.cast(), num * size_of::<f32>()) };
        let out = &mut out.0[..num];
        for (out, minimum) in out.iter_mut().zip(&self.scales.minima[first..][..num]) {
            out.write(*minimum);
        }
    }
}
