//! AVX-512.

use std::arch::x86_64::*;

use checkpoint::FP4_VALUES;

use super::MAX_TOKENS;
use super::simd::Simd;
use super::tile::kernels_of;

const INT4_VALUES: [f32; 16] =
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

/// The values of 16 packed codes, whose two dwords are each in eight lanes.
///
/// # Safety
/// The caller has the instruction set.
#[inline(always)]
unsafe fn look_up(values: __m512, dwords: __m512i) -> __m512 {
    // SAFETY: as promised by the caller.
    unsafe {
        let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        // The permutation uses the four lowest bits of each index.
        _mm512_permutexvar_ps(_mm512_srlv_epi32(dwords, shifts), values)
    }
}

/// As [`look_up`], for the 16 codes at `src`.
///
/// # Safety
/// The caller has the instruction set, and `src` is valid for 8 bytes.
#[inline(always)]
unsafe fn look_up_at(values: __m512, src: *const u8) -> __m512 {
    // SAFETY: as promised by the caller.
    unsafe {
        let packed = _mm512_castsi128_si512(_mm_loadl_epi64(src.cast()));
        let lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        look_up(values, _mm512_permutexvar_epi32(lanes, packed))
    }
}

/// As [`look_up`], for the 32 codes at `src`.
///
/// # Safety
/// The caller has the instruction set, and `src` is valid for 16 bytes.
#[inline(always)]
unsafe fn look_up_pair(values: __m512, src: *const u8) -> [__m512; 2] {
    // SAFETY: as promised by the caller.
    unsafe {
        let packed = _mm512_castsi128_si512(_mm_loadu_si128(src.cast()));
        let low = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let high = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        let (low, high) =
            (_mm512_permutexvar_epi32(low, packed), _mm512_permutexvar_epi32(high, packed));
        [look_up(values, low), look_up(values, high)]
    }
}

kernels_of!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c", pass_tokens: 6);

#[derive(Clone, Copy)]
struct Avx512;

// SAFETY: the methods use AVX-512 F, BW, DQ, VL and what those imply.
unsafe impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const ROWS: [usize; MAX_TOKENS + 1] = [0, 1, 1, 2, 4, 4, 4];
    const SCALED_ROWS: [usize; MAX_TOKENS + 1] = [0, 4, 4, 4, 4, 4, 4];

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn sum4(v: [__m512; 4]) -> [f32; 4] {
        // SAFETY: the caller has the instruction set; the array has the size of the vector.
        unsafe {
            let [a, b, c, d] = v;
            // Two transposition steps leave one partial sum of each input in every quarter.
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            let quarters = _mm512_add_ps(low, high);
            let upper = _mm512_extractf32x8_ps::<1>(quarters);
            let halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), upper);
            let upper = _mm256_extractf128_ps::<1>(halves);
            let sums = _mm_add_ps(_mm256_castps256_ps128(halves), upper);
            std::mem::transmute::<__m128, [f32; 4]>(sums)
        }
    }

    #[inline(always)]
    unsafe fn store(v: __m512, dst: *mut f32) {
        // SAFETY: the caller promises room for 16 values.
        unsafe { _mm512_storeu_ps(dst, v) }
    }

    #[inline(always)]
    unsafe fn prefetch(src: *const u8) {
        // SAFETY: a prefetch of any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(src.cast()) }
    }

    #[inline(always)]
    unsafe fn load_f32(src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe { _mm512_loadu_ps(src.cast()) }
    }

    #[inline(always)]
    unsafe fn load_bf16(src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(src.cast())) }
    }

    #[inline(always)]
    unsafe fn load_f8(src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe {
            // A sign-extended byte shifted left by 7 is the f16, except bit 14, which is a copy of the sign.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(src.cast()));
            let shifted = _mm256_slli_epi16::<7>(wide);
            let bits = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbfff_u16 as i16));
            _mm512_cvtph_ps(bits)
        }
    }

    #[inline(always)]
    unsafe fn load_f8_pair(src: *const u8) -> [__m512; 2] {
        // SAFETY: the caller promises 32 values.
        unsafe {
            let wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(src.cast()));
            let shifted = _mm512_slli_epi16::<7>(wide);
            let bits = _mm512_and_si512(shifted, _mm512_set1_epi16(0xbfff_u16 as i16));
            let low = _mm512_castsi512_si256(bits);
            let high = _mm512_extracti64x4_epi64::<1>(bits);
            [_mm512_cvtph_ps(low), _mm512_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(src.cast()))) }
    }

    /// The values of all codes.
    type Int4 = __m512;

    #[inline(always)]
    unsafe fn int4(scale: f32, minimum: f32) -> __m512 {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let values = _mm512_loadu_ps(INT4_VALUES.as_ptr());
            _mm512_fmadd_ps(values, _mm512_set1_ps(scale), _mm512_set1_ps(minimum))
        }
    }

    #[inline(always)]
    unsafe fn load_int4(values: __m512, src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe { look_up_at(values, src) }
    }

    #[inline(always)]
    unsafe fn load_int4_pair(values: __m512, src: *const u8) -> [__m512; 2] {
        // SAFETY: the caller promises 32 values.
        unsafe { look_up_pair(values, src) }
    }

    /// The values of all codes.
    type Fp4 = __m512;

    #[inline(always)]
    unsafe fn fp4(scale: f32) -> __m512 {
        // SAFETY: the caller has the instruction set.
        unsafe { _mm512_mul_ps(_mm512_loadu_ps(FP4_VALUES.as_ptr()), _mm512_set1_ps(scale)) }
    }

    #[inline(always)]
    unsafe fn load_fp4(values: __m512, src: *const u8) -> __m512 {
        // SAFETY: the caller promises 16 values.
        unsafe { look_up_at(values, src) }
    }

    #[inline(always)]
    unsafe fn load_fp4_pair(values: __m512, src: *const u8) -> [__m512; 2] {
        // SAFETY: the caller promises 32 values.
        unsafe { look_up_pair(values, src) }
    }
}
