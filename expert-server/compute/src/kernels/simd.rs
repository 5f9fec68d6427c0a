//! The operations that kernels need of an instruction set. The kernels in `tile.rs` are written once over
//! this trait and instantiated inside functions that enable the instruction set.

/// A vector instruction set with f32 lanes.
///
/// # Safety
/// All methods may use the instruction set: the caller ensures that the processor has it. All methods must be
/// inlined into a function that enables it. Pointers need no alignment.
pub(super) unsafe trait Simd: Copy {
    /// `LANES` values of f32.
    type V: Copy;
    /// Values per vector: a power of two, at most 16.
    const LANES: usize;
    /// Weight rows that one pass computes together (1, 2 or 4), by number of tokens. With few tokens the pass
    /// waits for memory, which is fastest in one or two streams. With more tokens it takes as many rows as
    /// there are registers for their sums.
    const ROWS: [usize; super::MAX_TOKENS + 1];
    /// The same for weights with scales. They widen slowly, so more rows help: their work overlaps.
    const SCALED_ROWS: [usize; super::MAX_TOKENS + 1];

    unsafe fn splat(value: f32) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once if the instruction set can.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Sums of the lanes of four vectors, each pairwise in the same order.
    unsafe fn sum4(v: [Self::V; 4]) -> [f32; 4];
    unsafe fn store(v: Self::V, dst: *mut f32);
    /// Prefetches the cache line at `src`, which need not be valid.
    unsafe fn prefetch(src: *const u8);
    /// `LANES` f32 values.
    unsafe fn load_f32(src: *const u8) -> Self::V;
    /// `LANES` bf16 values.
    unsafe fn load_bf16(src: *const u8) -> Self::V;
    /// `LANES` f16 values.
    unsafe fn load_f16(src: *const u8) -> Self::V;
    /// `LANES` finite fp8 e4m3 values divided by [`F8_FACTOR`].
    unsafe fn load_f8(src: *const u8) -> Self::V;
    /// Two vectors of such values, at less than twice the cost.
    unsafe fn load_f8_pair(src: *const u8) -> [Self::V; 2];
    /// `LANES` signed bytes.
    unsafe fn load_i8(src: *const u8) -> Self::V;

    /// A group's scale and minimum, in the form that [`load_int4`](Self::load_int4) takes.
    type Int4: Copy;
    unsafe fn int4(scale: f32, minimum: f32) -> Self::Int4;
    /// `LANES` values `(code − 8) × scale + minimum` of `LANES / 2` bytes.
    unsafe fn load_int4(group: Self::Int4, src: *const u8) -> Self::V;
    /// Two vectors of such values.
    #[inline(always)]
    unsafe fn load_int4_pair(group: Self::Int4, src: *const u8) -> [Self::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { [Self::load_int4(group, src), Self::load_int4(group, src.add(Self::LANES / 2))] }
    }
    /// A group's scale, in the form that [`load_fp4`](Self::load_fp4) takes.
    type Fp4: Copy;
    unsafe fn fp4(scale: f32) -> Self::Fp4;
    /// `LANES` values `FP4_VALUES[code] × scale` of `LANES / 2` bytes.
    unsafe fn load_fp4(group: Self::Fp4, src: *const u8) -> Self::V;
    /// Two vectors of such values.
    #[inline(always)]
    unsafe fn load_fp4_pair(group: Self::Fp4, src: *const u8) -> [Self::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { [Self::load_fp4(group, src), Self::load_fp4(group, src.add(Self::LANES / 2))] }
    }
}

/// Read as the upper bits of an f16, an e4m3 value is divided by 2^8. The kernels multiply the block scale by
/// this factor, which is exact.
pub(super) const F8_FACTOR: f32 = 256.0;

/// A storage dtype without scales.
pub(super) trait Dtype {
    /// Bytes per value.
    const BYTES: usize;
    /// Loads `S::LANES` values.
    ///
    /// # Safety
    /// `src` is valid for that many values, and the processor has the instruction set.
    unsafe fn load<S: Simd>(src: *const u8) -> S::V;
    /// Loads twice `S::LANES` values.
    ///
    /// # Safety
    /// `src` is valid for that many values, and the processor has the instruction set.
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(src: *const u8) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { [Self::load::<S>(src), Self::load::<S>(src.add(S::LANES * Self::BYTES))] }
    }
}

/// A format whose columns have scales by group.
pub(super) trait Grouped {
    /// Bits per code.
    const BITS: usize;
    /// True if groups may have minima.
    const HAS_MINIMA: bool;
    /// A group's scale and minimum, in the form that [`load`](Self::load) takes.
    type Group<S: Simd>: Copy;
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn group<S: Simd>(scale: f32, minimum: f32) -> Self::Group<S>;
    /// Loads `S::LANES` values, scaled.
    ///
    /// # Safety
    /// `src` is valid for that many codes, and the processor has the instruction set.
    unsafe fn load<S: Simd>(group: Self::Group<S>, src: *const u8) -> S::V;
    /// Loads twice `S::LANES` values.
    ///
    /// # Safety
    /// As for [`load`](Self::load), with twice as many codes.
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(group: Self::Group<S>, src: *const u8) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe {
            let second = src.add(S::LANES * Self::BITS / 8);
            [Self::load::<S>(group, src), Self::load::<S>(group, second)]
        }
    }
}

pub(super) struct Bf16;
pub(super) struct F16;
pub(super) struct F32;
/// fp8 e4m3 divided by [`F8_FACTOR`] as a [`Dtype`], with scales as [`Grouped`].
pub(super) struct F8;
pub(super) struct Int8;
pub(super) struct Int4;
pub(super) struct Fp4;

impl Dtype for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_bf16(src) }
    }
}

impl Dtype for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_f16(src) }
    }
}

impl Dtype for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_f32(src) }
    }
}

impl Dtype for F8 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_f8(src) }
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(src: *const u8) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { S::load_f8_pair(src) }
    }
}

impl Grouped for F8 {
    const BITS: usize = 8;
    const HAS_MINIMA: bool = false;
    type Group<S: Simd> = S::V;
    #[inline(always)]
    unsafe fn group<S: Simd>(scale: f32, _minimum: f32) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::splat(scale * F8_FACTOR) }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(scale: S::V, src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::mul(S::load_f8(src), scale) }
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(scale: S::V, src: *const u8) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe {
            let [low, high] = S::load_f8_pair(src);
            [S::mul(low, scale), S::mul(high, scale)]
        }
    }
}

impl Grouped for Int8 {
    const BITS: usize = 8;
    const HAS_MINIMA: bool = true;
    type Group<S: Simd> = [S::V; 2];
    #[inline(always)]
    unsafe fn group<S: Simd>(scale: f32, minimum: f32) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { [S::splat(scale), S::splat(minimum)] }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>([scale, minimum]: [S::V; 2], src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::mul_add(S::load_i8(src), scale, minimum) }
    }
}

impl Grouped for Int4 {
    const BITS: usize = 4;
    const HAS_MINIMA: bool = true;
    type Group<S: Simd> = S::Int4;
    #[inline(always)]
    unsafe fn group<S: Simd>(scale: f32, minimum: f32) -> S::Int4 {
        // SAFETY: as promised by the caller.
        unsafe { S::int4(scale, minimum) }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(group: S::Int4, src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_int4(group, src) }
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(group: S::Int4, src: *const u8) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { S::load_int4_pair(group, src) }
    }
}

impl Grouped for Fp4 {
    const BITS: usize = 4;
    const HAS_MINIMA: bool = false;
    type Group<S: Simd> = S::Fp4;
    #[inline(always)]
    unsafe fn group<S: Simd>(scale: f32, _minimum: f32) -> S::Fp4 {
        // SAFETY: as promised by the caller.
        unsafe { S::fp4(scale) }
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(group: S::Fp4, src: *const u8) -> S::V {
        // SAFETY: as promised by the caller.
        unsafe { S::load_fp4(group, src) }
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(group: S::Fp4, src: *const u8) -> [S::V; 2] {
        // SAFETY: as promised by the caller.
        unsafe { S::load_fp4_pair(group, src) }
    }
}

/// Loads `num <= S::LANES` scaled values; the other lanes are finite.
///
/// # Safety
/// `src` is valid for `num` codes, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn load_group_some<S: Simd, G: Grouped>(
    group: G::Group<S>,
    src: *const u8,
    num: usize,
) -> S::V {
    // SAFETY: `num` codes are at most 16 bytes.
    unsafe {
        if num == S::LANES {
            return G::load::<S>(group, src);
        }
        let mut padded = [0u8; 16];
        std::ptr::copy_nonoverlapping(src, padded.as_mut_ptr(), (num * G::BITS).div_ceil(8));
        G::load::<S>(group, padded.as_ptr())
    }
}

/// Loads `num <= S::LANES` values; the other lanes are zero.
///
/// # Safety
/// `src` is valid for `num` values, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn load_some<S: Simd, D: Dtype>(src: *const u8, num: usize) -> S::V {
    // SAFETY: `num * BYTES` is at most 16 * 4; all-zero bits are zero in every dtype.
    unsafe {
        if num == S::LANES {
            return D::load::<S>(src);
        }
        let mut padded = [0u8; 64];
        std::ptr::copy_nonoverlapping(src, padded.as_mut_ptr(), num * D::BYTES);
        D::load::<S>(padded.as_ptr())
    }
}
