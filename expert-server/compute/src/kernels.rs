//! Vector kernels: one set per instruction set. The pool chooses a set at its start.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
mod simd;
mod tile;

use std::ops::Range;

use checkpoint::{Activation, WeightFormat};

use super::weights::Weight;
use tile::{DotTile, GROUP_STEP, K_BLOCK, WIDEN_ROWS};

/// An instruction set that has its own kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL, with FMA.
    Avx512,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Plain Rust, for all other processors.
    Portable,
}

impl Isa {
    /// All instruction sets, fastest first.
    pub const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Portable];

    /// Returns true if this processor has the instruction set.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Self::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512 | Self::Avx2 => false,
            Self::Portable => true,
        }
    }

    /// The fastest instruction set of this processor.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }
}

/// Most tokens of one pass over weights. [`Kernels::dot`] takes any number.
pub(super) const MAX_TOKENS: usize = 6;

/// Tokens of one expert from which a GEMM replaces the portable kernels.
const GEMM_MIN_TOKENS: usize = 8;

type DotFn = unsafe fn(&DotTile<'_>);
type WidenFn = unsafe fn(weight: &Weight, row: usize, columns: Range<usize>, dst: *mut f32);
type ActivateFn =
    unsafe fn(Activation, gate: *const f32, up: *const f32, len: usize, dst: *mut f32);
type ReadFn = unsafe fn(src: *const u8, len: usize) -> f32;
type AxpyFn = unsafe fn(alpha: f32, y: *const f32, len: usize, out: *mut f32);

/// The kernels of one instruction set that this processor has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    isa: Isa,
    /// Most tokens per pass, up to [`MAX_TOKENS`].
    pass_tokens: usize,
    formats: Formats,
    activate: ActivateFn,
    axpy: AxpyFn,
    read: ReadFn,
}

/// The kernels of every form of weights.
#[derive(Clone, Copy, Debug)]
struct Formats {
    bf16: FormatKernels,
    f16: FormatKernels,
    f32: FormatKernels,
    /// fp8 in blocks of several rows.
    f8_blocks: FormatKernels,
    /// fp8 with a scale per row or tile of columns in a row.
    f8: FormatKernels,
    int8: FormatKernels,
    int4: FormatKernels,
    fp4: FormatKernels,
    /// Formats with groups whose size the other kernels do not take.
    irregular: FormatKernels,
}

#[derive(Clone, Copy, Debug)]
struct FormatKernels {
    /// Most tokens that `dot` takes.
    max_tokens: usize,
    dot: DotFn,
    widen: WidenFn,
}

impl Formats {
    fn of(&self, weight: &Weight) -> &FormatKernels {
        let is_regular = |cols: usize| cols.is_multiple_of(GROUP_STEP) || cols >= weight.cols();
        match weight.format() {
            WeightFormat::Bf16 => &self.bf16,
            WeightFormat::F16 => &self.f16,
            WeightFormat::F32 => &self.f32,
            WeightFormat::F8E4m3 { block: [rows, cols] } if is_regular(cols) => {
                if rows >= MIN_BLOCK_ROWS { &self.f8_blocks } else { &self.f8 }
            }
            WeightFormat::Int8 { group, .. } if is_regular(group) => &self.int8,
            WeightFormat::Int4 { group, .. } if is_regular(group) => &self.int4,
            WeightFormat::Fp4 { group } if is_regular(group) => &self.fp4,
            _ => &self.irregular,
        }
    }
}

/// Least rows of a block whose scale is applied to the tokens.
const MIN_BLOCK_ROWS: usize = 8;

/// Rows of f32 that a kernel reads, at any positions.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// The memory of the rows.
    pub(super) data: &'a [f32],
    /// Values per row.
    pub(super) len: usize,
    /// Row numbers, in units of `len`.
    pub(super) rows: RowIds<'a>,
}

/// Numbers of rows: a run (first, number), or a list.
#[derive(Clone, Copy)]
pub(super) enum RowIds<'a> {
    Run(usize, usize),
    List(&'a [u32]),
}

impl RowIds<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Run(_, num) => *num,
            Self::List(list) => list.len(),
        }
    }

    pub(super) fn get(&self, idx: usize) -> usize {
        match self {
            Self::Run(first, _) => first + idx,
            Self::List(list) => list[idx] as usize,
        }
    }
}

impl Rows<'_> {
    pub(super) fn row(&self, idx: usize) -> &[f32] {
        let start = self.rows.get(idx) * self.len;
        &self.data[start..start + self.len]
    }
}

impl Kernels {
    /// The kernels for `isa`, or `None` when this processor cannot run them.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        if !isa.is_available() {
            return None;
        }
        Some(match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::KERNELS,
            _ => portable::KERNELS,
        })
    }

    /// The instruction set.
    pub(super) fn isa(&self) -> Isa {
        self.isa
    }

    /// `y[t, i] = sum_k w[rows.start + i, k] * x.row(t)[k]` for every row of `x`, with
    /// `y [num_tokens, num_rows]`.
    pub(super) fn dot(&self, w: &Weight, rows: Range<usize>, x: Rows<'_>, y: &mut [f32]) {
        let (num_tokens, num_rows, num_cols) = (x.rows.len(), rows.len(), w.cols());
        assert!(rows.start <= rows.end && rows.end <= w.rows() && x.len == num_cols);
        assert_eq!(y.len(), num_tokens * num_rows);
        if y.is_empty() {
            return;
        }
        let kernels = self.formats.of(w);
        if kernels.max_tokens < MAX_TOKENS && num_tokens > kernels.max_tokens {
            self.dot_widened(kernels.widen, w, rows, x, y);
            return;
        }
        let first = rows.start * w.row_bytes();
        let mut tile = DotTile {
            weight: w,
            row_start: rows.start,
            codes: w.codes()[first..].as_ptr(),
            row_bytes: w.row_bytes(),
            is_cached: false,
            num_rows,
            accumulate: false,
            k_start: 0,
            k_end: num_cols,
            x: [x.data.as_ptr(); MAX_TOKENS],
            num_tokens: 0,
            y: y.as_mut_ptr(),
            y_stride: num_rows,
        };
        // One pass reads whole rows, in the order of the weights in memory. Several passes read one block of
        // columns after the other, so that tokens and weights stay in the caches.
        let k_step = if num_tokens <= self.pass_tokens { num_cols } else { K_BLOCK };
        for k_start in (0..num_cols).step_by(k_step) {
            tile.accumulate = k_start > 0;
            (tile.k_start, tile.k_end) = (k_start, num_cols.min(k_start + k_step));
            self.run_passes(kernels.dot, &mut tile, x, y);
        }
    }

    /// As [`dot`](Self::dot), over weights that are widened to f32 a few rows and a block of columns at a time.
    fn dot_widened(
        &self,
        widen: WidenFn,
        w: &Weight,
        rows: Range<usize>,
        x: Rows<'_>,
        y: &mut [f32],
    ) {
        let mut widened = [0.0f32; WIDEN_ROWS * K_BLOCK];
        let num_cols = w.cols();
        for k_start in (0..num_cols).step_by(K_BLOCK) {
            let k_end = num_cols.min(k_start + K_BLOCK);
            let len = k_end - k_start;
            for first in rows.clone().step_by(WIDEN_ROWS) {
                let some = first..rows.end.min(first + WIDEN_ROWS);
                for (row, widened) in some.clone().zip(widened.chunks_exact_mut(len)) {
                    // SAFETY: the processor has the instruction set. The row and its columns exist, and
                    // `widened` has as many values.
                    unsafe { widen(w, row, k_start..k_end, widened.as_mut_ptr()) };
                }
                let y = &mut y[first - rows.start..];
                let mut tile = DotTile {
                    weight: w,
                    row_start: first,
                    codes: widened.as_ptr().wrapping_sub(k_start).cast(),
                    row_bytes: len * size_of::<f32>(),
                    is_cached: true,
                    num_rows: some.len(),
                    accumulate: k_start > 0,
                    k_start,
                    k_end,
                    x: [x.data.as_ptr(); MAX_TOKENS],
                    num_tokens: 0,
                    y: y.as_mut_ptr(),
                    y_stride: rows.len(),
                };
                self.run_passes(self.formats.f32.dot, &mut tile, x, y);
            }
        }
    }

    /// Runs a tile for all rows of `x`, some at a time. `y` begins at the tile's first row.
    fn run_passes(&self, dot: DotFn, tile: &mut DotTile<'_>, x: Rows<'_>, y: &mut [f32]) {
        let num_tokens = x.rows.len();
        for tokens in passes(num_tokens, num_tokens.div_ceil(self.pass_tokens)) {
            tile.num_tokens = tokens.len();
            for (ptr, token) in tile.x.iter_mut().zip(tokens.clone()) {
                *ptr = x.row(token).as_ptr();
            }
            let y = &mut y[tokens.start * tile.y_stride..];
            assert!(y.len() >= (tokens.len() - 1) * tile.y_stride + tile.num_rows);
            tile.y = y.as_mut_ptr();
            // SAFETY: `new` has checked the instruction set. The callers and the assertion ensure the sizes that
            // `DotTile` requires.
            unsafe { dot(tile) };
        }
    }

    /// Returns true if a GEMM over weights widened to f32 is faster than [`dot`](Self::dot) for that many tokens.
    ///
    /// It is never faster than the vector kernels: from 4 tokens on they reach about nine tenths of the
    /// processor's rate, without packing. On other processors the library has its own vector code (NEON,
    /// wasm), which is faster from enough tokens on to pay for the packing.
    pub(super) fn prefers_gemm(&self, num_tokens: usize) -> bool {
        self.isa == Isa::Portable && num_tokens >= GEMM_MIN_TOKENS
    }

    /// Widens rows of `w` to f32, row by row.
    pub(super) fn widen(&self, w: &Weight, rows: Range<usize>, dst: &mut [f32]) {
        assert!(rows.end <= w.rows());
        assert_eq!(dst.len(), rows.len() * w.cols());
        let widen = self.formats.of(w).widen;
        for (row, dst) in rows.zip(dst.chunks_exact_mut(w.cols())) {
            // SAFETY: the processor has the instruction set. The row exists, and `dst` has its length.
            unsafe { widen(w, row, 0..w.cols(), dst.as_mut_ptr()) };
        }
    }

    /// `dst[i] = activation(gate[i], up[i])`. Without a gate, `gate` is not used.
    ///
    /// # Safety
    /// `dst` is valid for writes of `up.len()` values, and no other thread accesses them meanwhile.
    pub(super) unsafe fn activate(
        &self,
        activation: Activation,
        gate: &[f32],
        up: &[f32],
        dst: *mut f32,
    ) {
        assert!(gate.len() == up.len() || !activation.is_gated());
        // SAFETY: the processor has the instruction set; sizes as asserted and promised.
        unsafe { (self.activate)(activation, gate.as_ptr(), up.as_ptr(), up.len(), dst) };
    }

    /// `out[i] += alpha * y[i]`.
    ///
    /// # Safety
    /// `out` is valid for reads and writes of `y.len()` values, and no other thread accesses them meanwhile.
    pub(super) unsafe fn axpy(&self, alpha: f32, y: &[f32], out: *mut f32) {
        // SAFETY: the processor has the instruction set; sizes as promised.
        unsafe { (self.axpy)(alpha, y.as_ptr(), y.len(), out) };
    }

    /// Reads all of `data` as fast as possible, and returns a value that depends on it.
    pub(super) fn read(&self, data: &[u8]) -> f32 {
        // SAFETY: the processor has the instruction set.
        unsafe { (self.read)(data.as_ptr(), data.len()) }
    }
}

/// Tokens of each pass. Their numbers are nearly equal, because a last pass of one token would waste its loads.
fn passes(num_tokens: usize, num_passes: usize) -> impl Iterator<Item = Range<usize>> {
    let mut begin = 0;
    (0..num_passes).map(move |pass| {
        let end = begin + (num_tokens - begin).div_ceil(num_passes - pass);
        std::mem::replace(&mut begin, end)..end
    })
}

/// The default [`Products`](crate::Products), by crate `gemm` on the calling thread.
///
/// `y[t, i] = sum_k panel[i, k] * x[t, k]` for row-major f32 matrices `panel [num_rows, len]`,
/// `x [num_tokens, len]` and `y [num_tokens, num_rows]`.
///
/// # Panics
/// If the lengths do not match.
pub fn gemm(panel: &[f32], x: &[f32], len: usize, y: &mut [f32]) {
    let (num_rows, num_tokens) = (panel.len() / len, x.len() / len);
    assert!(panel.len() == num_rows * len && x.len() == num_tokens * len);
    assert_eq!(y.len(), num_tokens * num_rows);
    let (len_stride, row_stride) = (len as isize, num_rows as isize);
    // SAFETY: the matrices have the asserted sizes. `y` is not read and aliases no other matrix.
    unsafe {
        gemm::gemm(
            num_tokens,
            num_rows,
            len,
            y.as_mut_ptr(),
            1,
            row_stride,
            false,
            x.as_ptr(),
            1,
            len_stride,
            panel.as_ptr(),
            len_stride,
            1,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
