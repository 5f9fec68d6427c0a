//! The kernels, generic over [`Simd`] and [`Format`].

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use checkpoint::{Activation, DType, FP4_VALUES, WeightFormat, f32_from_e4m3, f32_from_e8m0};

use super::MAX_TOKENS;
use super::simd::{
    Bf16, Dtype, F8, F8_FACTOR, F16, F32, Grouped, Simd, load_group_some, load_some,
};
use crate::weights::{Weight, WeightScales};

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

/// Scales or minima of a block of columns; the first ones are initialised.
struct Scales([MaybeUninit<f32>; MAX_SCALES]);

impl Scales {
    #[inline(always)]
    const fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; MAX_SCALES])
    }

    /// # Safety
    /// The value was written.
    #[inline(always)]
    unsafe fn get(&self, idx: usize) -> f32 {
        // SAFETY: as promised by the caller, so `idx` is in range.
        unsafe { self.0.get_unchecked(idx).assume_init() }
    }
}

/// # Safety
/// The processor has the instruction set. Scale `idx` was read, and minimum `idx` if there are minima.
#[inline(always)]
unsafe fn group_of<S: Simd, G: Grouped>(
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
fn scale_block(weight: &Weight) -> [usize; 2] {
    weight.format().scale_block().unwrap_or([1, usize::MAX])
}

/// The scales of a block of columns.
struct Grid<'a> {
    scales: &'a WeightScales,
    has_minima: bool,
    block_rows: usize,
    /// Scales of a row.
    per_row: usize,
    /// The first scale of these columns in each row, and their number.
    first: usize,
    num: usize,
    /// Columns from the first one on that share a scale, and columns of each later scale.
    first_stop: usize,
    block_cols: usize,
}

impl<'a> Grid<'a> {
    /// The scales of columns `start..end`, at least one column.
    #[inline(always)]
    fn new(weight: &'a Weight, start: usize, end: usize) -> Self {
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
    fn first_of(&self, row: usize) -> usize {
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
    unsafe fn read<S: Simd>(&self, row: usize, ahead: usize, out: &mut Scales) {
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
    unsafe fn read_minima<S: Simd>(&self, row: usize, ahead: usize, out: &mut Scales) {
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

/// `dst = activation(gate, up)`.
///
/// # Safety
/// The pointers are valid for `len` values, except `gate` if the activation has none. The processor has the
/// instruction set.
#[inline(always)]
pub(super) unsafe fn activate(
    activation: Activation,
    gate: *const f32,
    up: *const f32,
    len: usize,
    dst: *mut f32,
) {
    // SAFETY: as promised by the caller. Without a gate, `up` stands for it, too.
    unsafe {
        match activation {
            Activation::SILU => map(gate, up, len, dst, |gate, up| silu(gate) * up),
            Activation::Swiglu { alpha, limit, offset } => map(gate, up, len, dst, |gate, up| {
                // Comparisons in this form let NaN through.
                let gate = if gate > limit { limit } else { gate };
                let up = if up > limit { limit } else { up };
                let up = if up < -limit { -limit } else { up };
                gate / (1.0 + exp(-alpha * gate)) * (up + offset)
            }),
            Activation::Gelu => map(gate, up, len, dst, |gate, up| gelu(gate) * up),
            Activation::GeluTanh => map(gate, up, len, dst, |gate, up| gelu_tanh(gate) * up),
            Activation::Relu => map(gate, up, len, dst, |gate, up| relu(gate) * up),
            Activation::Relu2 => map(up, up, len, dst, |up, _| relu(up) * relu(up)),
        }
    }
}

/// `dst = f(gate, up)`, in a form that vectorises.
///
/// # Safety
/// The pointers are valid for `len` values.
#[inline(always)]
unsafe fn map(
    gate: *const f32,
    up: *const f32,
    len: usize,
    dst: *mut f32,
    f: impl Fn(f32, f32) -> f32,
) {
    let mut k = 0;
    // SAFETY: all accesses are below `len`; arrays of f32 have the alignment of f32.
    unsafe {
        while k + 16 <= len {
            let gate = &*gate.add(k).cast::<[f32; 16]>();
            let up = &*up.add(k).cast::<[f32; 16]>();
            let mut h = [0.0f32; 16];
            for lane in 0..16 {
                h[lane] = f(gate[lane], up[lane]);
            }
            *dst.add(k).cast::<[f32; 16]>() = h;
            k += 16;
        }
        while k < len {
            *dst.add(k) = f(*gate.add(k), *up.add(k));
            k += 1;
        }
    }
}

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

/// `v / (1 + exp(-v))`.
#[inline(always)]
fn silu(v: f32) -> f32 {
    v / (1.0 + exp(-v))
}

/// `max(v, 0)`. NaN stays NaN.
#[inline(always)]
fn relu(v: f32) -> f32 {
    if v < 0.0 { 0.0 } else { v }
}

/// `v · Φ(v)` with the normal distribution's Φ. The complementary error function is a Chebyshev fit with a relative
/// error of 1.2e-7 (Press et al., Numerical Recipes, `erfcc`).
#[inline(always)]
fn gelu(v: f32) -> f32 {
    let z = v.abs() * std::f32::consts::FRAC_1_SQRT_2;
    // Beyond this the result is zero or v; the bound keeps infinities out of the polynomial.
    let z = if z > 12.0 { 12.0 } else { z };
    let t = 1.0 / (1.0 + 0.5 * z);
    let p = 0.170_872_77;
    let p = p * t - 0.822_152_23;
    let p = p * t + 1.488_515_9;
    let p = p * t - 1.135_204;
    let p = p * t + 0.278_868_07;
    let p = p * t - 0.186_288_06;
    let p = p * t + 0.096_784_18;
    let p = p * t + 0.374_091_96;
    let p = p * t + 1.000_023_7;
    let p = p * t - 1.265_512_2;
    let tail = 0.5 * t * exp(p - z * z);
    // An infinity times zero would be NaN.
    if v < -16.0 {
        0.0
    } else if v < 0.0 {
        v * tail
    } else {
        v * (1.0 - tail)
    }
}

/// `v · (1 + tanh(√(2/π) (v + 0.044715 v³))) / 2`, which is `v` times a sigmoid.
#[inline(always)]
fn gelu_tanh(v: f32) -> f32 {
    const TWICE_SQRT_2_BY_PI: f32 = 1.595_769_2;
    v / (1.0 + exp(-TWICE_SQRT_2_BY_PI * (v + 0.044_715 * v * v * v)))
}

/// exp with a relative error of about 2e-7. It has no calls and no branches, so that it vectorises: `2^n *
/// p(r)` with `n = round(x / ln 2)` and a Taylor polynomial on `|r| <= ln 2 / 2`. NaN stays NaN. Beyond ±87
/// the result saturates, which does not change silu.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Comparisons in this form let NaN through.
    let x = if x > 87.0 { 87.0 } else { x };
    let x = if x < -87.0 { -87.0 } else { x };
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts. The first has so few bits that `n * LN2_HI` is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    p * power
}

const _: () = assert!(K_BLOCK.is_multiple_of(GROUP_STEP) && GROUP_STEP.is_multiple_of(16));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_silu_agree_with_f64() {
        let mut worst = 0.0f64;
        for i in -870_000..=870_000i32 {
            let x = i as f32 * 1e-4;
            let expected = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) - expected).abs() / expected);
        }
        assert!(worst < 4e-7, "{worst}");
        assert!(exp(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
        assert_eq!(silu(f32::INFINITY), f32::INFINITY);
        assert_eq!(silu(0.0), 0.0);
        assert!(silu(-1e4).abs() < 1e-30);
        assert_eq!(silu(1e4), 1e4);
    }
}
