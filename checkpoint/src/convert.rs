//! Conversions from stored dtypes to f32.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dtype::DType;

/// Converts little-endian bfloat16 to f32.
///
/// # Panics
/// If `src` is not exactly two bytes per element of `dst`.
pub fn bf16_to_f32(src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len() * 2, "two bytes per element");
    let (words, _) = src.as_chunks::<2>();
    for (d, s) in dst.iter_mut().zip(words) {
        *d = f32::from_bits(u32::from(u16::from_le_bytes(*s)) << 16);
    }
}

/// Converts little-endian IEEE half precision to f32, including subnormals, infinities and NaN.
///
/// # Panics
/// If `src` is not exactly two bytes per element of `dst`.
pub fn f16_to_f32(src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len() * 2, "two bytes per element");
    let (words, _) = src.as_chunks::<2>();
    // `half` converts slices with vector instructions if the CPU has them. The copy aligns the values.
    let mut aligned = [f16::ZERO; 128];
    for (d, s) in dst.chunks_mut(aligned.len()).zip(words.chunks(aligned.len())) {
        let aligned = &mut aligned[..s.len()];
        aligned.iter_mut().zip(s).for_each(|(a, s)| *a = f16::from_le_bytes(*s));
        aligned.convert_to_f32_slice(d);
    }
}

/// Converts fp8-e4m3 to f32.
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn f8_e4m3_to_f32(src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len(), "one byte per element");
    for (d, s) in dst.iter_mut().zip(src) {
        *d = E4M3[*s as usize];
    }
}

/// The value of one fp8-e4m3 byte. `0x7f` and `0xff` are NaN; there is no infinity.
#[inline]
pub fn f32_from_e4m3(bits: u8) -> f32 {
    E4M3[bits as usize]
}

/// Converts any float dtype. The caller must have checked the dtype and the sizes.
pub(crate) fn to_f32(dtype: DType, src: &[u8], dst: &mut [f32]) {
    match dtype {
        DType::Bf16 => bf16_to_f32(src, dst),
        DType::F16 => f16_to_f32(src, dst),
        DType::F8E4m3 => f8_e4m3_to_f32(src, dst),
        DType::F32 => {
            let (words, _) = src.as_chunks::<4>();
            for (d, s) in dst.iter_mut().zip(words) {
                *d = f32::from_le_bytes(*s);
            }
        }
        // Views check the dtype first. NaN in the output would make a missing check visible.
        _ => dst.fill(f32::NAN),
    }
}

const E4M3: [f32; 256] = {
    let mut table = [0.0f32; 256];
    let mut bits = 0;
    while bits < 256 {
        table[bits] = decode_e4m3(bits as u8);
        bits += 1;
    }
    table
};

/// Rebuilds the f32 bit pattern: the exponent is rebiased from 7 to 127, subnormals are normalised.
const fn decode_e4m3(bits: u8) -> f32 {
    let sign = ((bits as u32) >> 7) << 31;
    let exponent = ((bits as u32) >> 3) & 0xf;
    let mantissa = (bits as u32) & 0x7;
    let magnitude = if exponent == 0xf && mantissa == 0x7 {
        0x7fc0_0000
    } else if exponent != 0 {
        ((exponent + 127 - 7) << 23) | (mantissa << 20)
    } else if mantissa == 0 {
        0
    } else {
        // A subnormal is mantissa × 2^-9. The leading one moves to bit 3 and is dropped.
        let shift = mantissa.leading_zeros() - 28;
        ((127 - 6 - shift) << 23) | (((mantissa << shift) & 0x7) << 20)
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition in the OCP 8-bit floating point specification, in arithmetic.
    fn e4m3_by_definition(bits: u8) -> f64 {
        let sign = if bits & 0x80 != 0 { -1.0 } else { 1.0 };
        let exponent = i32::from((bits & 0x78) >> 3);
        let fraction = f64::from(bits & 0x07) / 8.0;
        match (exponent, bits & 0x07) {
            (15, 7) => f64::NAN,
            (0, _) => sign * fraction * 2f64.powi(-6),
            _ => sign * (1.0 + fraction) * 2f64.powi(exponent - 7),
        }
    }

    #[test]
    fn every_e4m3_byte_has_the_value_of_the_definition() {
        for bits in 0..=255u8 {
            let (ours, reference) = (f32_from_e4m3(bits), e4m3_by_definition(bits));
            if reference.is_nan() {
                assert!(ours.is_nan(), "{bits:#04x}: {ours}, expected NaN");
            } else {
                assert_eq!(f64::from(ours), reference, "{bits:#04x}");
                assert_eq!(ours.is_sign_negative(), bits & 0x80 != 0, "{bits:#04x}: sign");
            }
        }
        assert_eq!(f32_from_e4m3(0x7e), 448.0, "the largest finite value");
        assert_eq!(f32_from_e4m3(0x01), 1.0 / 512.0, "the smallest subnormal");
    }

    #[test]
    fn every_f16_and_bf16_pattern_has_the_value_of_the_definition() {
        let define = |sign: u16, exponent: u16, fraction: f64, bias: i32, top: u16| {
            let sign = if sign != 0 { -1.0 } else { 1.0 };
            match exponent {
                0 => sign * fraction * 2f64.powi(1 - bias),
                e if e == top && fraction == 0.0 => sign * f64::INFINITY,
                e if e == top => f64::NAN,
                e => sign * (1.0 + fraction) * 2f64.powi(i32::from(e) - bias),
            }
        };
        let src: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let (mut bf16, mut f16) = (vec![-7.0; 65536], vec![-7.0; 65536]);
        bf16_to_f32(&src, &mut bf16);
        f16_to_f32(&src, &mut f16);
        for bits in 0..=u16::MAX {
            let expected = [
                define(bits >> 15, (bits >> 7) & 0xff, f64::from(bits & 0x7f) / 128.0, 127, 0xff),
                define(bits >> 15, (bits >> 10) & 0x1f, f64::from(bits & 0x3ff) / 1024.0, 15, 0x1f),
            ];
            for (ours, reference) in [bf16[bits as usize], f16[bits as usize]].iter().zip(expected)
            {
                let same = f64::from(*ours) == reference || (ours.is_nan() && reference.is_nan());
                assert!(same, "{bits:#06x}: {ours}, expected {reference}");
            }
        }
    }

    #[test]
    fn unaligned_source_bytes_convert_the_same() {
        let bytes: Vec<u8> = (0..65u8).collect();
        let mut dst = vec![f32::NAN; 32];
        bf16_to_f32(&bytes[1..65], &mut dst);
        for (i, d) in dst.iter().enumerate() {
            let bits = u16::from_le_bytes([bytes[1 + 2 * i], bytes[2 + 2 * i]]);
            assert_eq!(d.to_bits(), u32::from(bits) << 16, "element {i}");
        }
    }
}
