//! The kernels, generic over [`Simd`] and [`Format`].

mod activation;
mod scales;

use std::marker::PhantomData;
use std::ops::Range;

use checkpoint::{FP4_VALUES, WeightFormat, f32_from_e4m3};

use super::MAX_TOKENS;
use super::simd::{
    Bf16, Dtype, F8, F8_FACTOR, F16, F32, Grouped, Simd, load_group_some, load_some,
};
use crate::weights::Weight;
pub(super) use activation::activate;
use scales::{Grid, Scales, group_of, scale_block};

/// Dot products of a run of weight rows with a few token rows.
pub(super) struct DotTile<'a> {
    /// The matrix, for its scales.
    pub(super) weight: &'a Weight,
    /// Number of the first row in the matrix.
    pub(super) row_start: usize,
    /// Column 0 of the first row. Valid from `k_start` to `k_end` in each row.
    pub(super) codes: *const u8,
    /// Bytes from a row to the next.
    pub(super) row_bytes: usize,
    /// The codes are in the first level cache, so that nothing is prefetched.
    pub(super) is_cached: bool,
    pub(super) num_rows: usize,
    /// Adds to `y`, which has the sums over earlier columns, instead of overwriting it.
    pub(super) accumulate: bool,
    /// The columns to sum over. `k_start` is a multiple of [`K_BLOCK`]; so is `k_end`, unless it is the end
    /// of the row.
    pub(super) k_start: usize,
    pub(super) k_end: usize,
    /// The first `num_tokens` are valid for as many values as a row has.
    pub(super) x: [*const f32; MAX_TOKENS],
    /// 1..=MAX_TOKENS.
    pub(super) num_tokens: usize,
    /// Valid for reads and writes at `t * y_stride + row`.
    pub(super) y: *mut f32,
    pub(super) y_stride: usize,
}

/// Defines the [`Kernels`](super::Kernels) of an instruction set. Each is a function that enables the
/// instruction set and inlines all that it calls.
#[cfg(target_arch = "x86_64")]
macro_rules! kernels_of {
    ($isa:ident, $features:literal, pass_tokens: $pass_tokens:literal) => {
        use $crate::kernels::simd::{Bf16, F8, F16, F32, Fp4, Int4, Int8};
        use $crate::kernels::tile::{self, Blocks, DotTile, Format, Groups, Irregular, Stored};
        use $crate::kernels::{FormatKernels, Formats, Isa, Kernels};

        pub(super) const KERNELS: Kernels = Kernels {
            isa: Isa::$isa,
            pass_tokens: $pass_tokens,
            formats: Formats {
                bf16: kernels::<Stored<Bf16>>(),
                f16: kernels::<Stored<F16>>(),
                f32: kernels::<Stored<F32>>(),
                f8_blocks: kernels::<Blocks>(),
                f8: kernels::<Groups<F8>>(),
                int8: kernels::<Groups<Int8>>(),
                int4: kernels::<Groups<Int4>>(),
                fp4: kernels::<Groups<Fp4>>(),
                irregular: kernels::<Irregular>(),
            },
            activate,
            axpy,
            read,
        };

        const fn kernels<F: Format>() -> FormatKernels {
            FormatKernels { fused_tokens: F::FUSED_TOKENS, dot: dot::<F>, widen: widen::<F> }
        }

        /// # Safety
        /// As for [`tile::dot`].
        #[target_feature(enable = $features)]
        unsafe fn dot<F: Format>(tile: &DotTile<'_>) {
            // SAFETY: as promised by the caller.
            unsafe { tile::dot::<$isa, F>(tile) }
        }

        /// # Safety
        /// As for [`Format::widen`].
        #[target_feature(enable = $features)]
        unsafe fn widen<F: Format>(
            weight: &$crate::weights::Weight,
            row: usize,
            columns: std::ops::Range<usize>,
            dst: *mut f32,
        ) {
            // SAFETY: as promised by the caller.
            unsafe { F::widen::<$isa>(weight, row, columns, dst) }
        }

        /// # Safety
        /// As for [`tile::activate`].
        #[target_feature(enable = $features)]
        unsafe fn activate(
            activation: checkpoint::Activation,
            gate: *const f32,
            up: *const f32,
            len: usize,
            dst: *mut f32,
        ) {
            // SAFETY: as promised by the caller.
            unsafe { tile::activate(activation, gate, up, len, dst) }
        }

        /// # Safety
        /// As for [`tile::axpy`].
        #[target_feature(enable = $features)]
        unsafe fn axpy(alpha: f32, y: *const f32, len: usize, out: *mut f32) {
            // SAFETY: as promised by the caller.
            unsafe { tile::axpy::<$isa>(alpha, y, len, out) }
        }

        /// # Safety
        /// As for [`tile::read`].
        #[target_feature(enable = $features)]
        unsafe fn read(src: *const u8, len: usize) -> f32 {
            // SAFETY: as promised by the caller.
            unsafe { tile::read::<$isa>(src, len) }
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use kernels_of;

/// Columns that are summed in vector lanes before the lanes are added up. Six token rows of this length stay
/// in the first level cache while weights stream through it.
pub(super) const K_BLOCK: usize = 1024;
/// Groups are multiples of this, except a group that is the whole row, and those of [`Irregular`].
pub(super) const GROUP_STEP: usize = 16;
/// Most groups that a block of columns touches.
const MAX_GROUPS: usize = K_BLOCK / GROUP_STEP + 1;
/// Room for so many scales, in whole vectors.
const MAX_SCALES: usize = MAX_GROUPS.next_multiple_of(16);

/// A form of weights that has its own way to compute.
pub(super) trait Format {
    /// Most tokens for which [`block`](Self::block) is the fastest. For more, weights are widened to memory first.
    const FUSED_TOKENS: usize = usize::MAX;

    /// Rows that one pass computes together (1, 2 or 4) for a number of tokens.
    fn rows_together<S: Simd>(num_tokens: usize) -> usize;

    /// Returns true if [`block`](Self::block) can compute rows `row..row + num` of the matrix together.
    #[inline(always)]
    fn can_join(_weight: &Weight, _row: usize, _num: usize) -> bool {
        true
    }

    /// Sums over one block of columns, by lane: `[t][r]`.
    ///
    /// # Safety
    /// As for [`dot`], with `T == tile.num_tokens`. Rows `row..row + R` of the tile exist and can be joined;
    /// `start..end` are columns of the tile within one block of [`K_BLOCK`].
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        tile: &DotTile<'_>,
        row: usize,
        start: usize,
        end: usize,
    ) -> [[S::V; R]; T];

    /// Widens columns of one row to f32, and prefetches a later row.
    ///
    /// # Safety
    /// `row` and `columns` are in `weight`, which is in this form. `columns` begins at a multiple of [`K_BLOCK`].
    /// `dst` is valid for writes of as many values. The processor has the instruction set.
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, columns: Range<usize>, dst: *mut f32);
}

/// Values without scales.
pub(super) struct Stored<D>(PhantomData<D>);
/// fp8 in blocks of several rows, whose columns are multiples of [`GROUP_STEP`] or all. The scale is applied to
/// the tokens: that is one multiplication for all rows together, and a sixth faster for a single token.
pub(super) struct Blocks;
/// Codes with scales for each row, or each few rows, and group of columns.
pub(super) struct Groups<G>(PhantomData<G>);
/// All other groups. Rows are always widened to memory first, value by value.
pub(super) struct Irregular;

/// `y[t, row] = sum_k w[row, k] * x[t, k]`, or adds it to `y` with `accumulate`.
///
/// The order of the sum does not depend on neighbouring rows and tokens, nor on the division of columns into
/// calls. So the result of a token depends on that token alone.
///
/// # Safety
/// The fields are as [`DotTile`] says, the weight has the form `F`, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd, F: Format>(tile: &DotTile<'_>) {
    // SAFETY: as promised by the caller; `T` is the number of tokens.
    unsafe {
        match tile.num_tokens {
            1 => rows::<S, F, 1>(tile),
            2 => rows::<S, F, 2>(tile),
            3 => rows::<S, F, 3>(tile),
            4 => rows::<S, F, 4>(tile),
            5 => rows::<S, F, 5>(tile),
            _ => rows::<S, F, 6>(tile),
        }
    }
}

/// # Safety
/// As for [`dot`], with `T == tile.num_tokens`.
#[inline(always)]
unsafe fn rows<S: Simd, F: Format, const T: usize>(tile: &DotTile<'_>) {
    let mut row = 0;
    // SAFETY: rows `row..row + R` exist in every call.
    unsafe {
        let num_together = F::rows_together::<S>(T);
        let can_join = |row: usize, num| F::can_join(tile.weight, tile.row_start + row, num);
        if num_together >= 4 {
            while row + 4 <= tile.num_rows {
                if can_join(row, 4) {
                    group::<S, F, 4, T>(tile, row);
                    row += 4;
                } else {
                    group::<S, F, 1, T>(tile, row);
                    row += 1;
                }
            }
        }
        if num_together >= 2 {
            while row + 2 <= tile.num_rows && can_join(row, 2) {
                group::<S, F, 2, T>(tile, row);
                row += 2;
            }
        }
        while row < tile.num_rows {
            group::<S, F, 1, T>(tile, row);
            row += 1;
        }
    }
}

/// # Safety
/// As for [`rows`], and rows `row..row + R` exist and can be joined; `R` is at most 4.
#[inline(always)]
unsafe fn group<S: Simd, F: Format, const R: usize, const T: usize>(
    tile: &DotTile<'_>,
    row: usize,
) {
    let mut start = tile.k_start;
    let mut accumulate = tile.accumulate;
    while start < tile.k_end {
        let end = if tile.k_end - start < K_BLOCK { tile.k_end } else { start + K_BLOCK };
        // SAFETY: `row + r` is below `num_rows`, `t` below `num_tokens`, and `start..end` within
        // the columns.
        unsafe {
            let acc = F::block::<S, R, T>(tile, row, start, end);
            for (t, acc) in acc.iter().enumerate() {
                let mut four = [S::splat(0.0); 4];
                four[..R].copy_from_slice(acc);
                let sums = S::sum4(four);
                let y = tile.y.add(t * tile.y_stride + row);
                for (r, sum) in sums[..R].iter().enumerate() {
                    *y.add(r) = if accumulate { *y.add(r) + *sum } else { *sum };
                }
            }
        }
        start = end;
        accumulate = true;
    }
}

impl<D: Dtype> Format for Stored<D> {
    #[inline(always)]
    fn rows_together<S: Simd>(num_tokens: usize) -> usize {
        S::ROWS[num_tokens]
    }

    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        tile: &DotTile<'_>,
        row: usize,
        start: usize,
        end: usize,
    ) -> [[S::V; R]; T] {
        // SAFETY: as promised by the caller.
        unsafe {
            let weights = row_starts::<R>(tile, row);
            let mut acc = [[S::splat(0.0); R]; T];
            add_products::<S, D, R, T, false>(tile, &weights, S::splat(1.0), start, end, &mut acc);
            acc
        }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, columns: Range<usize>, dst: *mut f32) {
        let (row_bytes, len) = (weight.row_bytes(), columns.len());
        // SAFETY: the columns exist.
        unsafe {
            let src = weight.codes().as_ptr().add(row * row_bytes + columns.start * D::BYTES);
            let ahead = WIDEN_ROWS_AHEAD * row_bytes;
            let mut k = 0;
            while k + 2 * S::LANES <= len {
                S::prefetch(src.wrapping_add(k * D::BYTES + ahead));
                let [low, high] = D::load_pair::<S>(src.add(k * D::BYTES));
                S::store(low, dst.add(k));
                S::store(high, dst.add(k + S::LANES));
                k += 2 * S::LANES;
            }
            while k < len {
                let num = if len - k < S::LANES { len - k } else { S::LANES };
                store_some::<S>(load_some::<S, D>(src.add(k * D::BYTES), num), num, dst.add(k));
                k += num;
            }
        }
    }
}

impl Format for Blocks {
    #[inline(always)]
    fn rows_together<S: Simd>(num_tokens: usize) -> usize {
        S::SCALED_ROWS[num_tokens]
    }

    #[inline(always)]
    fn can_join(weight: &Weight, row: usize, num: usize) -> bool {
        let [block_rows, _] = scale_block(weight);
        row / block_rows == (row + num - 1) / block_rows
    }

    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        tile: &DotTile<'_>,
        row: usize,
        start: usize,
        end: usize,
    ) -> [[S::V; R]; T] {
        let grid = Grid::new(tile.weight, start, end);
        // SAFETY: as promised by the caller. The rows share their scales.
        unsafe {
            let weights = row_starts::<R>(tile, row);
            let mut scales = Scales::new();
            grid.read::<S>(tile.row_start + row, 0, &mut scales);
            let mut acc = [[S::splat(0.0); R]; T];
            let (mut idx, mut k, mut stop) = (0, start, grid.first_stop);
            while k < end {
                stop = if stop < end { stop } else { end };
                let scale = S::splat(scales.get(idx) * F8_FACTOR);
                add_products::<S, F8, R, T, true>(tile, &weights, scale, k, stop, &mut acc);
                (idx, k, stop) = (idx + 1, stop, stop.saturating_add(grid.block_cols));
            }
            acc
        }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, columns: Range<usize>, dst: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe { Groups::<F8>::widen::<S>(weight, row, columns, dst) }
    }
}

impl<G: Grouped> Format for Groups<G> {
    /// Two passes. For more, widening each weight once and using it from the cache is faster.
    const FUSED_TOKENS: usize = 2 * MAX_TOKENS;

    #[inline(always)]
    fn rows_together<S: Simd>(num_tokens: usize) -> usize {
        S::GROUPED_ROWS[num_tokens]
    }

    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "several arrays are walked together")]
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        tile: &DotTile<'_>,
        row: usize,
        start: usize,
        end: usize,
    ) -> [[S::V; R]; T] {
        let grid = Grid::new(tile.weight, start, end);
        let ahead = prefetch_distance(tile, R);
        // SAFETY: as promised by the caller. Columns of a group begin at whole bytes, because groups are multiples
        // of `GROUP_STEP`, and so do tails of groups.
        unsafe {
            let weights = row_starts::<R>(tile, row);
            let mut scales = [const { Scales::new() }; R];
            let mut minima = [const { Scales::new() }; R];
            let rows_ahead = ahead / tile.row_bytes;
            for r in 0..R {
                let row = tile.row_start + row + r;
                grid.read::<S>(row, rows_ahead, &mut scales[r]);
                if G::HAS_MINIMA {
                    grid.read_minima::<S>(row, rows_ahead, &mut minima[r]);
                }
            }
            let mut acc = [[S::splat(0.0); R]; T];
            let (mut idx, mut k, mut stop) = (0, start, grid.first_stop);
            while k < end {
                stop = if stop < end { stop } else { end };
                let mut groups = [group_of::<S, G>(&grid, &scales[0], &minima[0], idx); R];
                for r in 1..R {
                    groups[r] = group_of::<S, G>(&grid, &scales[r], &minima[r], idx);
                }
                while k + 2 * S::LANES <= stop {
                    let mut w = [[S::splat(0.0); 2]; R];
                    for r in 0..R {
                        let weights = weights[r].add(k * G::BITS / 8);
                        S::prefetch(weights.wrapping_add(ahead));
                        w[r] = G::load_pair::<S>(groups[r], weights);
                    }
                    for half in 0..2 {
                        for t in 0..T {
                            let x = S::load_f32(tile.x[t].add(k + half * S::LANES).cast());
                            for r in 0..R {
                                acc[t][r] = S::mul_add(w[r][half], x, acc[t][r]);
                            }
                        }
                    }
                    k += 2 * S::LANES;
                }
                if k + S::LANES <= stop {
                    for r in 0..R {
                        let weights = weights[r].add(k * G::BITS / 8);
                        S::prefetch(weights.wrapping_add(ahead));
                        let w = G::load::<S>(groups[r], weights);
                        for t in 0..T {
                            let x = S::load_f32(tile.x[t].add(k).cast());
                            acc[t][r] = S::mul_add(w, x, acc[t][r]);
                        }
                    }
                    k += S::LANES;
                }
                if k < stop {
                    let num = stop - k;
                    for r in 0..R {
                        let weights = weights[r].add(k * G::BITS / 8);
                        let w = load_group_some::<S, G>(groups[r], weights, num);
                        for t in 0..T {
                            let x = load_some::<S, F32>(tile.x[t].add(k).cast(), num);
                            acc[t][r] = S::mul_add(w, x, acc[t][r]);
                        }
                    }
                    k = stop;
                }
                idx += 1;
                stop = stop.saturating_add(grid.block_cols);
            }
            acc
        }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, columns: Range<usize>, dst: *mut f32) {
        let ahead = WIDEN_ROWS_AHEAD * weight.row_bytes();
        let mut start = columns.start;
        // SAFETY: the columns exist.
        unsafe {
            let src = weight.codes().as_ptr().add(row * weight.row_bytes());
            let dst = dst.wrapping_sub(columns.start);
            while start < columns.end {
                let end = if columns.end - start < K_BLOCK { columns.end } else { start + K_BLOCK };
                let grid = Grid::new(weight, start, end);
                let (mut scales, mut minima) = (Scales::new(), Scales::new());
                grid.read::<S>(row, WIDEN_ROWS_AHEAD, &mut scales);
                if G::HAS_MINIMA {
                    grid.read_minima::<S>(row, WIDEN_ROWS_AHEAD, &mut minima);
                }
                let (mut idx, mut k, mut stop) = (0, start, grid.first_stop);
                while k < end {
                    stop = if stop < end { stop } else { end };
                    let group = group_of::<S, G>(&grid, &scales, &minima, idx);
                    while k + 2 * S::LANES <= stop {
                        let src = src.add(k * G::BITS / 8);
                        S::prefetch(src.wrapping_add(ahead));
                        let [low, high] = G::load_pair::<S>(group, src);
                        S::store(low, dst.wrapping_add(k));
                        S::store(high, dst.wrapping_add(k + S::LANES));
                        k += 2 * S::LANES;
                    }
                    while k < stop {
                        let num = if stop - k < S::LANES { stop - k } else { S::LANES };
                        let src = src.add(k * G::BITS / 8);
                        let values = load_group_some::<S, G>(group, src, num);
                        store_some::<S>(values, num, dst.wrapping_add(k));
                        k += num;
                    }
                    idx += 1;
                    stop = stop.saturating_add(grid.block_cols);
                }
                start = end;
            }
        }
    }
}

impl Format for Irregular {
    const FUSED_TOKENS: usize = 0;

    #[inline(always)]
    fn rows_together<S: Simd>(_num_tokens: usize) -> usize {
        1
    }

    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        _tile: &DotTile<'_>,
        _row: usize,
        _start: usize,
        _end: usize,
    ) -> [[S::V; R]; T] {
        unreachable!("these weights are widened first")
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, columns: Range<usize>, dst: *mut f32) {
        // SAFETY: as promised by the caller.
        let dst = unsafe { std::slice::from_raw_parts_mut(dst, columns.len()) };
        widen_values(weight, row, columns.start, dst);
    }
}

/// Prefetches `len` bytes, which need not be valid.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
unsafe fn prefetch_all<S: Simd>(src: *const u8, len: usize) {
    let mut at = 0;
    while at < len {
        // SAFETY: as promised by the caller.
        unsafe { S::prefetch(src.wrapping_add(at)) };
        at += CACHE_LINE;
    }
}

const CACHE_LINE: usize = 64;

/// `out = factor * data[first..first + num]`. Prefetches as many values from `later` on.
///
/// # Safety
/// The processor has the instruction set. `data` holds the values, and `out` has room for whole vectors.
#[inline(always)]
unsafe fn convert<S: Simd, D: Dtype>(
    data: &[u8],
    [first, num, later]: [usize; 3],
    factor: f32,
    out: &mut Scales,
) {
    debug_assert!((first + num) * D::BYTES <= data.len() && num <= MAX_GROUPS);
    // SAFETY: all accesses are below the lengths.
    unsafe {
        prefetch_all::<S>(data.as_ptr().wrapping_add(later * D::BYTES), num * D::BYTES);
        let factor = S::splat(factor);
        let src = data.as_ptr().add(first * D::BYTES);
        let dst = out.0.as_mut_ptr().cast::<f32>();
        // Whole vectors if there are values behind these ones: the others are not used.
        let readable = data.len() / D::BYTES - first;
        let mut idx = 0;
        while idx < num && idx + S::LANES <= readable {
            S::store(S::mul(D::load::<S>(src.add(idx * D::BYTES)), factor), dst.add(idx));
            idx += S::LANES;
        }
        if idx < num {
            let values = load_some::<S, D>(src.add(idx * D::BYTES), num - idx);
            S::store(S::mul(values, factor), dst.add(idx));
        }
    }
}

/// Widens values of a row from column `start` on, for any format and group.
fn widen_values(weight: &Weight, row: usize, start: usize, dst: &mut [f32]) {
    let (codes, scales) = (weight.codes(), weight.scales());
    let [block_rows, block_cols] = scale_block(weight);
    let first = row / block_rows * weight.cols().div_ceil(block_cols);
    for (col, dst) in (start..).zip(dst) {
        let idx = row * weight.cols() + col;
        let code = match weight.format().code_bits() {
            4 => codes[idx / 2] >> (idx % 2 * 4) & 15,
            8 => codes[idx],
            _ => 0,
        };
        let value = match weight.format() {
            WeightFormat::F8E4m3 { .. } => f32_from_e4m3(code),
            WeightFormat::Int8 { .. } => f32::from(code as i8),
            WeightFormat::Int4 { .. } => f32::from(code) - 8.0,
            WeightFormat::Fp4 { .. } => FP4_VALUES[usize::from(code)],
            // Formats without scales are never irregular.
            WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32 => f32::NAN,
        };
        let at = first + col / block_cols;
        *dst = scales.map_or(value, |scales| {
            value * scales.get(at) + scales.minima.get(at).copied().unwrap_or(0.0)
        });
    }
}

/// The starts of rows `row..row + R` of the tile.
///
/// # Safety
/// The rows exist.
#[inline(always)]
unsafe fn row_starts<const R: usize>(tile: &DotTile<'_>, row: usize) -> [*const u8; R] {
    let mut starts = [tile.codes; R];
    for (r, start) in starts.iter_mut().enumerate() {
        // Rows of widened weights lack the columns before the first one that is summed.
        *start = start.wrapping_add((row + r) * tile.row_bytes);
    }
    starts
}

/// Adds the products of columns `start..end` to `acc [t][r]`.
///
/// # Safety
/// As for [`Format::block`]; `weights` are the rows, `scale` their factor in these columns if they have one.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "several arrays are walked together")]
unsafe fn add_products<S: Simd, D: Dtype, const R: usize, const T: usize, const SCALED: bool>(
    tile: &DotTile<'_>,
    weights: &[*const u8; R],
    scale: S::V,
    start: usize,
    end: usize,
    acc: &mut [[S::V; R]; T],
) {
    let ahead = prefetch_distance(tile, R);
    let mut k = start;
    // SAFETY: all columns are below `end`.
    unsafe {
        while k + 2 * S::LANES <= end {
            let mut w = [[S::splat(0.0); 2]; R];
            for r in 0..R {
                let weights = weights[r].add(k * D::BYTES);
                S::prefetch(weights.wrapping_add(ahead));
                w[r] = D::load_pair::<S>(weights);
            }
            for half in 0..2 {
                for t in 0..T {
                    let mut x = S::load_f32(tile.x[t].add(k + half * S::LANES).cast());
                    if SCALED {
                        x = S::mul(x, scale);
                    }
                    for r in 0..R {
                        acc[t][r] = S::mul_add(w[r][half], x, acc[t][r]);
                    }
                }
            }
            k += 2 * S::LANES;
        }
        while k < end {
            let num = if end - k < S::LANES { end - k } else { S::LANES };
            for r in 0..R {
                let w = load_some::<S, D>(weights[r].add(k * D::BYTES), num);
                for t in 0..T {
                    let mut x = load_some::<S, F32>(tile.x[t].add(k).cast(), num);
                    if SCALED {
                        x = S::mul(x, scale);
                    }
                    acc[t][r] = S::mul_add(w, x, acc[t][r]);
                }
            }
            k += num;
        }
    }
}

/// Bytes from a weight to the weight that is prefetched with it: the same position in a later group of rows.
/// So the lines of all rows are prefetched in time, and once each.
#[inline(always)]
fn prefetch_distance(tile: &DotTile<'_>, num_rows: usize) -> usize {
    let group_bytes = num_rows * tile.row_bytes;
    if tile.is_cached {
        0
    } else if group_bytes < PREFETCH_BYTES {
        PREFETCH_BYTES / group_bytes * group_bytes
    } else {
        group_bytes
    }
}

/// Prefetch distance: the best of 4 to 32 KiB as measured, a tenth faster for a single token.
const PREFETCH_BYTES: usize = 8 << 10;

/// Distance from the row that is widened to the row that is prefetched, in rows.
const WIDEN_ROWS_AHEAD: usize = WIDEN_ROWS;
/// Rows that are widened before they are used. Blocks of so many rows stay in the first level cache.
pub(super) const WIDEN_ROWS: usize = 4;

/// `out += alpha * y`.
///
/// # Safety
/// The pointers are valid for `len` values, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn axpy<S: Simd>(alpha: f32, y: *const f32, len: usize, out: *mut f32) {
    // SAFETY: all accesses are below `len`.
    unsafe {
        let factor = S::splat(alpha);
        let mut k = 0;
        while k + S::LANES <= len {
            let (y, out) = (y.add(k), out.add(k));
            let sum = S::load_f32(out.cast_const().cast());
            S::store(S::mul_add(factor, S::load_f32(y.cast()), sum), out);
            k += S::LANES;
        }
        if k < len {
            let (y, out, num) = (y.add(k), out.add(k), len - k);
            let sum = load_some::<S, F32>(out.cast_const().cast(), num);
            let sum = S::mul_add(factor, load_some::<S, F32>(y.cast(), num), sum);
            store_some::<S>(sum, num, out);
        }
    }
}

/// Adds up all values in `len` bytes, except a last part shorter than eight vectors.
///
/// # Safety
/// `src` is valid for `len` bytes, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn read<S: Simd>(src: *const u8, len: usize) -> f32 {
    let step = S::LANES * size_of::<f32>();
    // SAFETY: all accesses are below `len`.
    unsafe {
        let one = S::splat(1.0);
        let mut acc = [S::splat(0.0); 8];
        let mut at = 0;
        while at + 8 * step <= len {
            for (lane, acc) in acc.iter_mut().enumerate() {
                *acc = S::mul_add(S::load_f32(src.add(at + lane * step)), one, *acc);
            }
            at += 8 * step;
        }
        let [a, b, c, d, e, f, g, h] = acc;
        let (low, high) = (S::sum4([a, b, c, d]), S::sum4([e, f, g, h]));
        low.iter().sum::<f32>() + high.iter().sum::<f32>()
    }
}

/// # Safety
/// `dst` is valid for writes of `num <= LANES` values.
#[inline(always)]
unsafe fn store_some<S: Simd>(v: S::V, num: usize, dst: *mut f32) {
    // SAFETY: as promised by the caller; the buffer holds any vector.
    unsafe {
        if num == S::LANES {
            S::store(v, dst);
        } else {
            let mut lanes = [0.0f32; 16];
            S::store(v, lanes.as_mut_ptr());
            core::ptr::copy_nonoverlapping(lanes.as_ptr(), dst, num);
        }
    }
}

const _: () = assert!(K_BLOCK.is_multiple_of(GROUP_STEP) && GROUP_STEP.is_multiple_of(16));
