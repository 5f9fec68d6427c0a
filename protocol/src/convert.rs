//! Conversions between `f32` and the wire types, for rows in local memory.
//!
//! Every function works on slices of equal length (blocks of 128 for FP8) and picks the widest
//! instructions of this CPU at run time. Rounding is to nearest, ties to even.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::abi::SCALE_BLOCK;

/// Largest finite E4M3 value.
pub const F8_MAX: f32 = 448.0;
/// Smallest FP8 scale an encoder writes. Its reciprocal is finite.
pub const MIN_SCALE: f32 = f32::MIN_POSITIVE;
/// Largest FP8 scale that a decoder accepts. With a larger one, some codes would become infinite.
pub const MAX_SCALE: f32 = f32::from_bits(MAX_SCALE_BITS);

/// Rounds `src` to half precision. Values beyond 65504 become infinite.
///
/// # Panics
/// When the lengths differ.
pub fn f32_to_f16(src: &[f32], dst: &mut [u16]) {
    assert_eq!(src.len(), dst.len());
    let dst: &mut [f16] = bytemuck::cast_slice_mut(dst);
    dst.convert_from_f32_slice(src);
}

/// Widens half precision. Exact.
///
/// # Panics
/// When the lengths differ.
pub fn f16_to_f32(src: &[u16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    let src: &[f16] = bytemuck::cast_slice(src);
    src.convert_to_f32_slice(dst);
}

/// Rounds `src` to bfloat16. NaN stays NaN.
///
/// # Panics
/// When the lengths differ.
pub fn f32_to_bf16(src: &[f32], dst: &mut [u16]) {
    assert_eq!(src.len(), dst.len());
    widest!(f32_to_bf16_loop(src: &[f32], dst: &mut [u16]));
}

/// Widens bfloat16. Exact.
///
/// # Panics
/// When the lengths differ.
pub fn bf16_to_f32(src: &[u16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    widest!(bf16_to_f32_loop(src: &[u16], dst: &mut [f32]));
}

/// Quantises `src` to E4M3 codes with one scale per 128 values. The last block may be partial.
///
/// The scale of a block is its largest finite magnitude divided by 448, clamped to [`MIN_SCALE`] and
/// [`MAX_SCALE`]. A block of zeros has scale 1. NaN and infinity do not affect the scale and become
/// NaN.
///
/// # Panics
/// When `dst` differs in length from `src`, or when `scales` does not have one element per block.
pub fn f32_to_f8(src: &[f32], dst: &mut [u8], scales: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    assert_eq!(src.len().div_ceil(SCALE_BLOCK), scales.len());
    widest!(f32_to_f8_loop(src: &[f32], dst: &mut [u8], scales: &mut [f32]));
}

/// Widens E4M3 codes and multiplies by their block's scale.
///
/// # Panics
/// When `dst` differs in length from `src`, or when `scales` does not have one element per block.
pub fn f8_to_f32(src: &[u8], scales: &[f32], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    assert_eq!(src.len().div_ceil(SCALE_BLOCK), scales.len());
    widest!(f8_to_f32_loop(src: &[u8], scales: &[f32], dst: &mut [f32]));
}

/// Rounds one value to E4M3, saturating; NaN and infinity become NaN.
#[must_use]
#[inline(always)]
pub fn f8_code(value: f32) -> u8 {
    let bits = value.to_bits();
    let sign = (bits >> 24) & 0x80;
    let magnitude = bits & 0x7fff_ffff;
    let clamped = magnitude.min(F8_MAX.to_bits());
    // Normal: keep three mantissa bits, round the other twenty to even, change the bias from 127 to 7.
    // The subtraction wraps only for values that the subnormal arm handles.
    let rounded = clamped + 0x7_ffff + ((clamped >> 20) & 1);
    let normal = (rounded >> 20).wrapping_sub(120 << 3);
    // Subnormal: at 2^14 the last bit of an f32 is worth 2^-9, so the addition itself rounds to even.
    // A value that rounds up to 8 is the code of the smallest normal number.
    let subnormal = (f32::from_bits(clamped) + SUBNORMAL_MAGIC)
        .to_bits()
        .wrapping_sub(SUBNORMAL_MAGIC.to_bits());
    let finite = if clamped < F8_MIN_NORMAL.to_bits() { subnormal } else { normal };
    let code = if magnitude >= f32::INFINITY.to_bits() { F8_NAN } else { finite };
    (sign | code) as u8
}

/// Widens one E4M3 code. Exact.
#[must_use]
#[inline(always)]
pub fn f8_value(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    let sign = u32::from(code & 0x80) << 24;
    let normal = (magnitude << 20) + (120 << 23);
    // Integers and one exact multiplication give the same result in flush-to-zero modes.
    let subnormal = (magnitude as i32 as f32 * F8_MIN_SUBNORMAL).to_bits();
    let finite = if magnitude < 8 { subnormal } else { normal };
    let bits = if magnitude == F8_NAN { f32::NAN.to_bits() } else { finite };
    f32::from_bits(sign | bits)
}

#[inline(always)]
fn f32_to_bf16_loop(src: &[f32], dst: &mut [u16]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        let bits = src.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
        // Rounding could carry a NaN's mantissa away: set its quiet bit instead.
        let nan = (bits >> 16) as u16 | 0x40;
        *dst = if bits & 0x7fff_ffff > f32::INFINITY.to_bits() { nan } else { rounded };
    }
}

#[inline(always)]
fn bf16_to_f32_loop(src: &[u16], dst: &mut [f32]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        *dst = f32::from_bits(u32::from(*src) << 16);
    }
}

#[inline(always)]
fn f32_to_f8_loop(src: &[f32], dst: &mut [u8], scales: &mut [f32]) {
    let blocks = src.chunks(SCALE_BLOCK).zip(dst.chunks_mut(SCALE_BLOCK)).zip(scales);
    for ((src, dst), scale) in blocks {
        // Magnitudes of floats order like integers, which reduce in any order and so in vectors.
        let mut largest = 0;
        for value in src {
            let magnitude = value.to_bits() & 0x7fff_ffff;
            largest = largest.max(if magnitude < f32::INFINITY.to_bits() { magnitude } else { 0 });
        }
        *scale = scale_for(f32::from_bits(largest));
        let inverse = 1.0 / *scale;
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f8_code(src * inverse);
        }
    }
}

#[inline(always)]
fn f8_to_f32_loop(src: &[u8], scales: &[f32], dst: &mut [f32]) {
    let blocks = src.chunks(SCALE_BLOCK).zip(dst.chunks_mut(SCALE_BLOCK)).zip(scales);
    for ((src, dst), scale) in blocks {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f8_value(*src) * scale;
        }
    }
}

#[inline(always)]
fn scale_for(largest: f32) -> f32 {
    if largest == 0.0 { 1.0 } else { (largest / F8_MAX).clamp(MIN_SCALE, MAX_SCALE) }
}

/// Runs a loop compiled for the widest vectors of this CPU.
macro_rules! widest {
    ($body:ident($($arg:ident: $ty:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $ty),*) {
                $body($($arg),*)
            }
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                $body($($arg),*)
            }
            if std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
                && std::arch::is_x86_feature_detected!("avx512dq")
                && std::arch::is_x86_feature_detected!("avx512vl")
            {
                // SAFETY: the CPU has the features, as just detected.
                unsafe { avx512($($arg),*) }
            } else if std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma")
            {
                // SAFETY: the CPU has the features, as just detected.
                unsafe { avx2($($arg),*) }
            } else {
                $body($($arg),*)
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        $body($($arg),*)
    }};
}
use widest;

const F8_NAN: u32 = 0x7f;
const F8_MIN_NORMAL: f32 = 0.015_625;
const F8_MIN_SUBNORMAL: f32 = 0.001_953_125;
const SUBNORMAL_MAGIC: f32 = 16_384.0;
/// f32::MAX is just under 2^128 and 448 is 1.75 times 2^8, so the quotient is just under
/// 2^120 / 1.75. One bit less keeps the product finite in every rounding mode.
const MAX_SCALE_BITS: u32 = (f32::MAX / F8_MAX).to_bits() - 1;

const _: () = assert!(MAX_SCALE * F8_MAX < f32::INFINITY);
