//! AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use checkpoint::FP4_VALUES;

use super::MAX_TOKENS;
use super::simd::Simd;
use super::tile::kernels_of;

/// Eight packed codes, each in the lowest bits of its lane; higher bits hold other codes.
///
/// # Safety
/// The caller has the instruction set, and `src` is valid for 4 bytes.
#[inline(always)]
unsafe fn codes(src: *const u8) -> __m256i {
    // SAFETY: as promised by the caller.
    unsafe {
        let packed = _mm256_set1_epi32(src.cast::<i32>().read_unaligned());
        _mm256_srlv_epi32(packed, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28))
    }
}

kernels_of!(Avx2, "avx2,fma,f16c", pass_tokens: 6);

#[derive(Clone, Copy)]
struct Avx2;

// SAFETY: the methods use AVX2, FMA, F16C and what those imply.
unsafe impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const ROWS: [usize; MAX_TOKENS + 1] = [0, 1, 1, 2, 2, 2, 2];
    const SCALED_ROWS: [usize; MAX_TOKENS + 1] = [0, 4, 4, 2, 2, 1, 1];
    const GROUPED_ROWS: [usize; MAX_TOKENS + 1] = [0, 4, 2, 2, 2, 1, 1];

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum4(v: [__m256; 4]) -> [f32; 4] {
        // SAFETY: the caller has the instruction set; the array has the size of the vector.
        unsafe {
            let [a, b, c, d] = v;
            // Two transposition steps leave one partial sum of each input in either half.
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
            let low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
            let high = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
            let halves = _mm256_add_ps(low, high);
            let upper = _mm256_extractf128_ps::<1>(halves);
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), upper);
            std::mem::transmute::<__m128, [f32; 4]>(sums)
        }
    }

    #[inline(always)]
    unsafe fn store(v: __m256, dst: *mut f32) {
        // SAFETY: the caller promises room for 8 values.
        unsafe { _mm256_storeu_ps(dst, v) }
    }

    #[inline(always)]
    unsafe fn prefetch(src: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(src.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f32(src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe { _mm256_loadu_ps(src.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bf16(src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(src.cast())) }
    }

    #[inline(always)]
    unsafe fn load_f8(src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe {
            // A sign-extended byte shifted left by 7 is the f16, except bit 14, which is a copy of the sign.
            let wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(src.cast()));
            let shifted = _mm_slli_epi16::<7>(wide);
            let bits = _mm_and_si128(shifted, _mm_set1_epi16(0xbfff_u16 as i16));
            _mm256_cvtph_ps(bits)
        }
    }

    #[inline(always)]
    unsafe fn load_f8_pair(src: *const u8) -> [__m256; 2] {
        // SAFETY: the caller promises 16 values.
        unsafe {
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(src.cast()));
            let shifted = _mm256_slli_epi16::<7>(wide);
            let bits = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbfff_u16 as i16));
            let low = _mm256_castsi256_si128(bits);
            let high = _mm256_extracti128_si256::<1>(bits);
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(src.cast()))) }
    }

    /// Scale, and the value of code 0.
    type Int4 = [__m256; 2];

    #[inline(always)]
    unsafe fn int4(scale: f32, minimum: f32) -> [__m256; 2] {
        // SAFETY: the caller has the instruction set. Eight times the scale is exact.
        unsafe { [_mm256_set1_ps(scale), _mm256_set1_ps(minimum - 8.0 * scale)] }
    }

    #[inline(always)]
    unsafe fn load_int4([scale, least]: [__m256; 2], src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe {
            let codes = _mm256_and_si256(codes(src), _mm256_set1_epi32(15));
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), scale, least)
        }
    }

    /// The values of codes 0 to 7.
    type Fp4 = __m256;

    #[inline(always)]
    unsafe fn fp4(scale: f32) -> __m256 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm256_mul_ps(_mm256_loadu_ps(FP4_VALUES.as_ptr()), _mm256_set1_ps(scale)) }
    }

    #[inline(always)]
    unsafe fn load_fp4(values: __m256, src: *const u8) -> __m256 {
        // SAFETY: the caller promises 8 values.
        unsafe {
            let codes = codes(src);
            // The permutation uses the three lowest bits of each index. The fourth is the sign.
            let values = _mm256_permutevar8x32_ps(values, codes);
            let sign = _mm256_slli_epi32::<28>(codes);
            let sign = _mm256_and_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(-0.0));
            _mm256_xor_ps(values, sign)
        }
    }
}
