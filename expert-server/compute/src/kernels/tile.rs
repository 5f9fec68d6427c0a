//! The kernels, generic over [`Simd`] and [`Dtype`].

use super::MAX_TOKENS;
use super::simd::{Dtype, F8_FACTOR, F32, Simd, load_some};
use crate::weights::SCALE_BLOCK;

/// Dot products of a run of weight rows with a few token rows.
pub(super) struct DotTile<'a> {
    /// The first of `num_rows * num_cols` values.
    pub(super) weights: *const u8,
    /// Block scales of the whole matrix (fp8 only).
    pub(super) scales: &'a [f32],
    /// Number of the first row in the matrix, for its scales.
    pub(super) row_start: usize,
    pub(super) num_rows: usize,
    pub(super) num_cols: usize,
    /// Adds to `y`, which has the sums over earlier columns, instead of overwriting it.
    pub(super) accumulate: bool,
    /// The columns to sum over. `k_start` is a multiple of [`K_BLOCK`]; so is `k_end`, unless it is the end
    /// of the row.
    pub(super) k_start: usize,
    pub(super) k_end: usize,
    /// The first `num_tokens` are valid for `num_cols` values.
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
        use $crate::kernels::simd::{Bf16, Dtype, F8, F16, F32};
        use $crate::kernels::tile::{self, DotTile};
        use $crate::kernels::{Isa, Kernels};

        pub(super) const KERNELS: Kernels = Kernels {
            isa: Isa::$isa,
            pass_tokens: $pass_tokens,
            dot: [dot::<Bf16>, dot::<F16>, dot::<F32>, dot::<F8>],
            widen: [widen::<Bf16>, widen::<F16>, widen::<F32>, widen::<F8>],
            silu_mul,
            axpy,
            read,
        };

        /// # Safety
        /// As for [`tile::dot`].
        #[target_feature(enable = $features)]
        unsafe fn dot<D: Dtype>(tile: &DotTile) {
            // SAFETY: as promised by the caller.
            unsafe { tile::dot::<$isa, D>(tile) }
        }

        /// # Safety
        /// As for [`tile::widen`].
        #[target_feature(enable = $features)]
        unsafe fn widen<D: Dtype>(
            src: *const u8,
            ahead: usize,
            scales: *const f32,
            len: usize,
            dst: *mut f32,
        ) {
            // SAFETY: as promised by the caller.
            unsafe { tile::widen::<$isa, D>(src, ahead, scales, len, dst) }
        }

        /// # Safety
        /// As for [`tile::silu_mul`].
        #[target_feature(enable = $features)]
        unsafe fn silu_mul(gate: *const f32, up: *const f32, len: usize, dst: *mut f32) {
            // SAFETY: as promised by the caller.
            unsafe { tile::silu_mul(gate, up, len, dst) }
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

/// `y[t, row] = sum_k w[row, k] * x[t, k]`, or adds it to `y` with `accumulate`.
///
/// The order of the sum does not depend on neighbouring rows and tokens, nor on the division of columns into
/// calls. So the result of a token depends on that token alone.
///
/// # Safety
/// The fields are as [`DotTile`] says, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn dot<S: Simd, D: Dtype>(tile: &DotTile) {
    // SAFETY: as promised by the caller; `T` is the number of tokens.
    unsafe {
        match tile.num_tokens {
            1 => rows::<S, D, 1>(tile),
            2 => rows::<S, D, 2>(tile),
            3 => rows::<S, D, 3>(tile),
            4 => rows::<S, D, 4>(tile),
            5 => rows::<S, D, 5>(tile),
            _ => rows::<S, D, 6>(tile),
        }
    }
}

/// # Safety
/// As for [`dot`], with `T == tile.num_tokens`.
#[inline(always)]
unsafe fn rows<S: Simd, D: Dtype, const T: usize>(tile: &DotTile) {
    let mut row = 0;
    // SAFETY: rows `row..row + R` exist in every call.
    unsafe {
        let num_together = if D::SCALED { S::SCALED_ROWS[T] } else { S::ROWS[T] };
        // Rows that share their block scales.
        let share = |row: usize, num: usize| {
            let block = |row: usize| (tile.row_start + row) / SCALE_BLOCK;
            !D::SCALED || block(row) == block(row + num - 1)
        };
        if num_together >= 4 {
            while row + 4 <= tile.num_rows {
                if share(row, 4) {
                    group::<S, D, 4, T>(tile, row);
                    row += 4;
                } else {
                    group::<S, D, 1, T>(tile, row);
                    row += 1;
                }
            }
        }
        if num_together >= 2 {
            while row + 2 <= tile.num_rows && share(row, 2) {
                group::<S, D, 2, T>(tile, row);
                row += 2;
            }
        }
        while row < tile.num_rows {
            group::<S, D, 1, T>(tile, row);
            row += 1;
        }
    }
}

/// # Safety
/// As for [`rows`], and rows `row..row + R` exist; `R` is at most 4.
#[inline(always)]
unsafe fn group<S: Simd, D: Dtype, const R: usize, const T: usize>(tile: &DotTile, row: usize) {
    let mut start = tile.k_start;
    let mut accumulate = tile.accumulate;
    while start < tile.k_end {
        let end = if tile.k_end - start < K_BLOCK { tile.k_end } else { start + K_BLOCK };
        // SAFETY: `row + r` is below `num_rows`, `t` below `num_tokens`, and `start..end` within
        // the columns.
        unsafe {
            let acc = block::<S, D, R, T>(tile, row, start, end);
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

/// Sums over one block of columns, by lane: `[t][r]`.
///
/// # Safety
/// As for [`group`], and `start..end` are columns.
#[inline(always)]
unsafe fn block<S: Simd, D: Dtype, const R: usize, const T: usize>(
    tile: &DotTile,
    row: usize,
    start: usize,
    end: usize,
) -> [[S::V; R]; T] {
    let len = tile.num_cols;
    // SAFETY: `row + r` is below `num_rows`, `t` below `num_tokens`, and all columns are below
    // `end`; scales exist for every block of the matrix.
    unsafe {
        let mut weights = [tile.weights; R];
        for (r, weights) in weights.iter_mut().enumerate() {
            *weights = weights.add((row + r) * len * D::BYTES);
        }
        let mut acc = [[S::splat(0.0); R]; T];
        if !D::SCALED {
            let one = S::splat(1.0);
            add_products::<S, D, R, T>(tile, &weights, one, start, end, &mut acc);
            return acc;
        }
        // Blocks of columns begin at multiples of the scale block. The scale is applied to the tokens: that
        // is one multiplication for all rows together, and a sixth faster for a single token.
        let block_row = (tile.row_start + row) / SCALE_BLOCK;
        let mut k = start;
        while k < end {
            let stop = if end - k < SCALE_BLOCK { end } else { k + SCALE_BLOCK };
            let idx = block_row * len.div_ceil(SCALE_BLOCK) + k / SCALE_BLOCK;
            let scale = S::splat(*tile.scales.get_unchecked(idx) * F8_FACTOR);
            add_products::<S, D, R, T>(tile, &weights, scale, k, stop, &mut acc);
            k = stop;
        }
        acc
    }
}

/// Adds the products of columns `start..end` to `acc [t][r]`.
///
/// # Safety
/// As for [`block`]; `weights` are the rows, `scale` their factor in these columns.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "several arrays are walked together")]
unsafe fn add_products<S: Simd, D: Dtype, const R: usize, const T: usize>(
    tile: &DotTile,
    weights: &[*const u8; R],
    scale: S::V,
    start: usize,
    end: usize,
    acc: &mut [[S::V; R]; T],
) {
    let ahead = prefetch_distance(R * tile.num_cols * D::BYTES);
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
                    if D::SCALED {
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
                    if D::SCALED {
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

/// Widens one row to f32, and prefetches the row `ahead` bytes further on.
///
/// # Safety
/// `src` is valid for `len` values, `dst` for writes of as many, `scales` for one value per block
/// (fp8 only), and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, D: Dtype>(
    src: *const u8,
    ahead: usize,
    scales: *const f32,
    len: usize,
    dst: *mut f32,
) {
    let block_len = if D::SCALED { SCALE_BLOCK } else { len };
    let mut start = 0;
    while start < len {
        let end = if len - start < block_len { len } else { start + block_len };
        // SAFETY: all accesses are below `len`.
        unsafe {
            let scale = if D::SCALED { *scales.add(start / SCALE_BLOCK) * F8_FACTOR } else { 1.0 };
            let scale = S::splat(scale);
            let mut k = start;
            while k + 2 * S::LANES <= end {
                S::prefetch(src.wrapping_add(k * D::BYTES + ahead));
                let [mut low, mut high] = D::load_pair::<S>(src.add(k * D::BYTES));
                if D::SCALED {
                    (low, high) = (S::mul(low, scale), S::mul(high, scale));
                }
                S::store(low, dst.add(k));
                S::store(high, dst.add(k + S::LANES));
                k += 2 * S::LANES;
            }
            while k < end {
                let num = if end - k < S::LANES { end - k } else { S::LANES };
                let mut v = load_some::<S, D>(src.add(k * D::BYTES), num);
                if D::SCALED {
                    v = S::mul(v, scale);
                }
                store_some::<S>(v, num, dst.add(k));
                k += num;
            }
        }
        start = end;
    }
}

/// `dst = silu(gate) * up`.
///
/// # Safety
/// The pointers are valid for `len` values, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn silu_mul(gate: *const f32, up: *const f32, len: usize, dst: *mut f32) {
    let mut k = 0;
    // SAFETY: all accesses are below `len`; arrays of f32 have the alignment of f32.
    unsafe {
        while k + 16 <= len {
            let gate = &*gate.add(k).cast::<[f32; 16]>();
            let up = &*up.add(k).cast::<[f32; 16]>();
            let mut h = [0.0f32; 16];
            for lane in 0..16 {
                h[lane] = silu(gate[lane]) * up[lane];
            }
            *dst.add(k).cast::<[f32; 16]>() = h;
            k += 16;
        }
        while k < len {
            *dst.add(k) = silu(*gate.add(k)) * *up.add(k);
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

const _: () = assert!(K_BLOCK.is_multiple_of(SCALE_BLOCK) && SCALE_BLOCK.is_multiple_of(16));

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
