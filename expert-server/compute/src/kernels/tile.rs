//! The kernels, generic over [`Simd`] and [`Format`].

use std::marker::PhantomData;

use checkpoint::{Activation, DType, FP4_VALUES, WeightFormat, f32_from_e4m3, f32_from_e8m0};

use super::MAX_TOKENS;
use super::simd::{Dtype, F8, F8_FACTOR, F16, F32, Grouped, Simd, load_group_some, load_some};
use crate::weights::{Weight, WeightScales};

/// Dot products of a run of weight rows with a few token rows.
pub(super) struct DotTile<'a> {
    pub(super) weight: &'a Weight,
    /// Number of the first row in the matrix.
    pub(super) row_start: usize,
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
            FormatKernels { dot: dot::<F>, widen: widen::<F> }
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
        unsafe fn widen<F: Format>(weight: &$crate::weights::Weight, row: usize, dst: *mut f32) {
            // SAFETY: as promised by the caller.
            unsafe { F::widen::<$isa>(weight, row, dst) }
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

/// A form of weights that has its own way to compute.
pub(super) trait Format {
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

    /// Widens one row to f32, and prefetches a later row.
    ///
    /// # Safety
    /// `row` is a row of `weight`, which is in this form; `dst` is valid for writes of a row. The processor has
    /// the instruction set.
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, dst: *mut f32);
}

/// Values without scales.
pub(super) struct Stored<D>(PhantomData<D>);
/// fp8 in blocks of several rows, whose columns are multiples of [`GROUP_STEP`] or all. The scale is applied to
/// the tokens: that is one multiplication for all rows together, and a sixth faster for a single token.
pub(super) struct Blocks;
/// Codes with scales for each row, or each few rows, and group of columns.
pub(super) struct Groups<G>(PhantomData<G>);
/// All other groups. Rows are widened to memory first, value by value.
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
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, dst: *mut f32) {
        let (row_bytes, len) = (weight.row_bytes(), weight.cols());
        // SAFETY: the row exists.
        unsafe {
            let src = weight.codes().as_ptr().add(row * row_bytes);
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
        let [_, block_cols] = scale_block(tile.weight);
        // SAFETY: as promised by the caller. The rows share their scales.
        unsafe {
            let weights = row_starts::<R>(tile, row);
            let mut scales = [0.0; MAX_GROUPS];
            let first = start / block_cols;
            read_scales::<S>(tile.weight, tile.row_start + row, start, end, &mut scales);
            let mut acc = [[S::splat(0.0); R]; T];
            let mut k = start;
            while k < end {
                let idx = k / block_cols;
                let stop = (idx + 1).saturating_mul(block_cols);
                let stop = if stop < end { stop } else { end };
                let scale = S::splat(scales[idx - first] * F8_FACTOR);
                add_products::<S, F8, R, T, true>(tile, &weights, scale, k, stop, &mut acc);
                k = stop;
            }
            acc
        }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, dst: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe { Groups::<F8>::widen::<S>(weight, row, dst) }
    }
}

impl<G: Grouped> Format for Groups<G> {
    #[inline(always)]
    fn rows_together<S: Simd>(num_tokens: usize) -> usize {
        S::SCALED_ROWS[num_tokens]
    }

    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        tile: &DotTile<'_>,
        row: usize,
        start: usize,
        end: usize,
    ) -> [[S::V; R]; T] {
        let [_, group_cols] = scale_block(tile.weight);
        let ahead = prefetch_distance(R * tile.weight.row_bytes());
        // SAFETY: as promised by the caller. Columns of a group begin at whole bytes, because groups are multiples
        // of `GROUP_STEP`, and so do tails of groups.
        unsafe {
            let weights = row_starts::<R>(tile, row);
            let mut scales = [[0.0; MAX_GROUPS]; R];
            let mut minima = [[0.0; MAX_GROUPS]; R];
            for r in 0..R {
                let row = tile.row_start + row + r;
                read_scales::<S>(tile.weight, row, start, end, &mut scales[r]);
                if G::HAS_MINIMA {
                    read_minima(tile.weight, row, start, end, &mut minima[r]);
                }
            }
            let mut acc = [[S::splat(0.0); R]; T];
            let mut idx = 0;
            let mut k = start;
            let mut stop = (start / group_cols + 1).saturating_mul(group_cols);
            while k < end {
                stop = if stop < end { stop } else { end };
                let mut groups = [G::group::<S>(scales[0][idx], minima[0][idx]); R];
                for r in 1..R {
                    groups[r] = G::group::<S>(scales[r][idx], minima[r][idx]);
                }
                while k + 2 * S::LANES <= stop {
                    let mut w = [[S::splat(0.0); 2]; R];
                    for r in 0..R {
                        let weights = weights[r].add(k * G::BITS / 8);
                        S::prefetch(weights.wrapping_add(ahead));
                        w[r][0] = G::load::<S>(groups[r], weights);
                        w[r][1] = G::load::<S>(groups[r], weights.add(S::LANES * G::BITS / 8));
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
                while k < stop {
                    let num = if stop - k < S::LANES { stop - k } else { S::LANES };
                    for r in 0..R {
                        let weights = weights[r].add(k * G::BITS / 8);
                        let w = load_group_some::<S, G>(groups[r], weights, num);
                        for t in 0..T {
                            let x = load_some::<S, F32>(tile.x[t].add(k).cast(), num);
                            acc[t][r] = S::mul_add(w, x, acc[t][r]);
                        }
                    }
                    k += num;
                }
                idx += 1;
                stop = stop.saturating_add(group_cols);
            }
            acc
        }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, dst: *mut f32) {
        let (row_bytes, len) = (weight.row_bytes(), weight.cols());
        let [_, group_cols] = scale_block(weight);
        let ahead = WIDEN_ROWS_AHEAD * row_bytes;
        let mut start = 0;
        // SAFETY: the row exists.
        unsafe {
            let src = weight.codes().as_ptr().add(row * row_bytes);
            while start < len {
                let end = if len - start < K_BLOCK { len } else { start + K_BLOCK };
                let (mut scales, mut minima) = ([0.0; MAX_GROUPS], [0.0; MAX_GROUPS]);
                read_scales::<S>(weight, row, start, end, &mut scales);
                read_minima(weight, row, start, end, &mut minima);
                let first = start / group_cols;
                let mut k = start;
                while k < end {
                    let idx = k / group_cols;
                    let stop = (idx + 1).saturating_mul(group_cols);
                    let stop = if stop < end { stop } else { end };
                    let group = G::group::<S>(scales[idx - first], minima[idx - first]);
                    while k < stop {
                        let num = if stop - k < S::LANES { stop - k } else { S::LANES };
                        let src = src.add(k * G::BITS / 8);
                        S::prefetch(src.wrapping_add(ahead));
                        let values = load_group_some::<S, G>(group, src, num);
                        store_some::<S>(values, num, dst.add(k));
                        k += num;
                    }
                }
                start = end;
            }
        }
    }
}

impl Format for Irregular {
    #[inline(always)]
    fn rows_together<S: Simd>(_num_tokens: usize) -> usize {
        1
    }

    #[inline(always)]
    unsafe fn block<S: Simd, const R: usize, const T: usize>(
        tile: &DotTile<'_>,
        row: usize,
        start: usize,
        end: usize,
    ) -> [[S::V; R]; T] {
        let mut acc = [[unsafe { S::splat(0.0) }; R]; T];
        let mut widened = [0.0f32; K_BLOCK];
        for r in 0..R {
            widen_values(tile.weight, tile.row_start + row + r, start, &mut widened[..end - start]);
            let mut k = start;
            // SAFETY: columns below `end` are widened, and tokens have as many values.
            unsafe {
                while k < end {
                    let num = if end - k < S::LANES { end - k } else { S::LANES };
                    let w = load_some::<S, F32>(widened.as_ptr().add(k - start).cast(), num);
                    for t in 0..T {
                        let x = load_some::<S, F32>(tile.x[t].add(k).cast(), num);
                        acc[t][r] = S::mul_add(w, x, acc[t][r]);
                    }
                    k += num;
                }
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(weight: &Weight, row: usize, dst: *mut f32) {
        // SAFETY: as promised by the caller.
        let dst = unsafe { std::slice::from_raw_parts_mut(dst, weight.cols()) };
        widen_values(weight, row, 0, dst);
    }
}

/// Rows and columns that share a scale.
#[inline(always)]
fn scale_block(weight: &Weight) -> [usize; 2] {
    weight.format().scale_block().unwrap_or([1, usize::MAX])
}

/// Number of the first scale of columns from `start` on, and of scales up to `end`.
#[inline(always)]
fn scale_range(weight: &Weight, row: usize, start: usize, end: usize) -> (usize, usize) {
    let [block_rows, block_cols] = scale_block(weight);
    let per_row = weight.cols().div_ceil(block_cols);
    let first = start / block_cols;
    (row / block_rows * per_row + first, (end - 1) / block_cols + 1 - first)
}

/// The scales of columns `start..end` of a row, at least one column, the factor applied.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
unsafe fn read_scales<S: Simd>(
    weight: &Weight,
    row: usize,
    start: usize,
    end: usize,
    out: &mut [f32; MAX_GROUPS],
) {
    let Some(scales) = weight.scales() else { return };
    let (first, num) = scale_range(weight, row, start, end);
    let WeightScales { dtype, data, factor, .. } = scales;
    let (data, out) = (data.as_slice(), &mut out[..num]);
    match dtype {
        DType::Bf16 => {
            let (words, _) = data[2 * first..][..2 * num].as_chunks::<2>();
            for (out, word) in out.iter_mut().zip(words) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*word)) << 16);
            }
        }
        DType::F16 => {
            let data = &data[2 * first..][..2 * num];
            let mut idx = 0;
            while idx < num {
                let some = if num - idx < S::LANES { num - idx } else { S::LANES };
                // SAFETY: `some` scales from `idx` on exist.
                unsafe {
                    let values = load_some::<S, F16>(data.as_ptr().add(2 * idx), some);
                    store_some::<S>(values, some, out.as_mut_ptr().add(idx));
                }
                idx += some;
            }
        }
        DType::F8E8m0 => {
            for (out, byte) in out.iter_mut().zip(&data[first..][..num]) {
                *out = f32_from_e8m0(*byte);
            }
        }
        DType::F8E4m3 => {
            for (out, byte) in out.iter_mut().zip(&data[first..][..num]) {
                *out = f32_from_e4m3(*byte);
            }
        }
        _ => {
            let (words, _) = data[4 * first..][..4 * num].as_chunks::<4>();
            for (out, word) in out.iter_mut().zip(words) {
                *out = f32::from_le_bytes(*word);
            }
        }
    }
    if *factor != 1.0 {
        for out in out {
            *out *= factor;
        }
    }
}

/// The minima of columns `start..end` of a row, zeros if there are none.
#[inline(always)]
fn read_minima(weight: &Weight, row: usize, start: usize, end: usize, out: &mut [f32; MAX_GROUPS]) {
    let Some(scales) = weight.scales().filter(|scales| !scales.minima.is_empty()) else { return };
    let (first, num) = scale_range(weight, row, start, end);
    out[..num].copy_from_slice(&scales.minima[first..][..num]);
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

/// Where rows `row..row + R` of the tile begin.
///
/// # Safety
/// The rows exist.
#[inline(always)]
unsafe fn row_starts<const R: usize>(tile: &DotTile<'_>, row: usize) -> [*const u8; R] {
    let row_bytes = tile.weight.row_bytes();
    let mut weights = [tile.weight.codes().as_ptr(); R];
    for (r, weights) in weights.iter_mut().enumerate() {
        // SAFETY: within the codes of the matrix.
        *weights = unsafe { weights.add((tile.row_start + row + r) * row_bytes) };
    }
    weights
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
    let ahead = prefetch_distance(R * tile.weight.row_bytes());
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
fn prefetch_distance(group_bytes: usize) -> usize {
    if group_bytes < PREFETCH_BYTES {
        PREFETCH_BYTES / group_bytes * group_bytes
    } else {
        group_bytes
    }
}

/// Prefetch distance: the best of 4 to 32 KiB as measured, a tenth faster for a single token.
const PREFETCH_BYTES: usize = 8 << 10;

/// Distance from the row that is widened to the row that is prefetched, in rows.
const WIDEN_ROWS_AHEAD: usize = 4;

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
    let p = p * t + 1.488_515_87;
    let p = p * t - 1.135_203_98;
    let p = p * t + 0.278_868_07;
    let p = p * t - 0.186_288_06;
    let p = p * t + 0.096_784_18;
    let p = p * t + 0.374_091_96;
    let p = p * t + 1.000_023_68;
    let p = p * t - 1.265_512_23;
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
    const TWICE_SQRT_2_BY_PI: f32 = 1.595_769_1;
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
