//! Conversions against independent definitions, over all codes and dense samples of values.

use crate::common::{e4m3_nearest, e4m3_value, fresh_rng};
use half::{bf16, f16};
use rand::RngExt;
use switchyard_protocol::convert::{
    MAX_SCALE, MIN_SCALE, bf16_to_f32, f8_code, f8_to_f32, f8_value, f16_to_f32, f32_to_bf16,
    f32_to_f8, f32_to_f16,
};

#[test]
fn every_e4m3_code_has_its_value_and_comes_back() {
    for code in 0..=u8::MAX {
        let (found, expected) = (f8_value(code), e4m3_value(code));
        if expected.is_nan() {
            assert!(found.is_nan(), "{code:#04x}");
        } else {
            assert_eq!(f64::from(found), expected, "{code:#04x}");
            assert_eq!(found.is_sign_negative(), code & 0x80 != 0, "{code:#04x}");
        }
        assert_eq!(f8_code(found), code, "{code:#04x}");
    }
}

#[test]
fn e4m3_rounds_to_nearest_even_around_every_boundary() {
    for code in 0..0x7eu8 {
        let middle = ((e4m3_value(code) + e4m3_value(code + 1)) / 2.0) as f32;
        let exact = e4m3_value(code) as f32;
        for center in [middle, exact] {
            for value in [center.next_down(), center, center.next_up()] {
                for value in [value, -value] {
                    assert_eq!(f8_code(value), e4m3_nearest(value), "{value:e}");
                }
            }
        }
    }
}

#[test]
fn e4m3_saturates_and_keeps_nan() {
    for value in [448.0, 448.0f32.next_up(), 464.0, 480.0, 1e10, f32::MAX] {
        assert_eq!((f8_code(value), f8_code(-value)), (0x7e, 0xfe), "{value:e}");
    }
    for value in [f32::NAN, f32::INFINITY, f32::from_bits(0x7f80_0001), f32::from_bits(0x7fff_ffff)]
    {
        assert_eq!((f8_code(value), f8_code(-value)), (0x7f, 0xff), "{value:e}");
    }
    for value in [f32::MIN_POSITIVE, f32::from_bits(1), 0.0] {
        assert_eq!((f8_code(value), f8_code(-value)), (0, 0x80), "{value:e}");
    }
}

#[test]
fn e4m3_agrees_with_the_nearest_code_over_all_exponents() {
    // A prime step visits every exponent and sign with different mantissas.
    for bits in (0..u64::from(u32::MAX)).step_by(4099) {
        let value = f32::from_bits(bits as u32);
        assert_eq!(f8_code(value), e4m3_nearest(value), "{value:e} {bits:#x}");
    }
    // Denser samples of the range that is neither flushed nor saturated.
    for bits in (0x3a00_0000u32..0x43f0_0000).step_by(251) {
        let value = f32::from_bits(bits);
        assert_eq!(f8_code(value), e4m3_nearest(value), "{value:e} {bits:#x}");
    }
}

#[test]
fn blocks_are_scaled_to_the_largest_value_and_lose_at_most_half_a_step() {
    let mut rng = fresh_rng();
    for _ in 0..2000 {
        let len = rng.random_range(1..600);
        let magnitude = 10f32.powi(rng.random_range(-30..30));
        let src: Vec<f32> = (0..len).map(|_| rng.random_range(-1f32..1.0) * magnitude).collect();
        let mut codes = vec![0x55u8; len];
        let mut scales = vec![f32::NAN; len.div_ceil(128)];
        f32_to_f8(&src, &mut codes, &mut scales);
        let mut back = vec![f32::NAN; len];
        f8_to_f32(&codes, &scales, &mut back);
        for (block_idx, block) in src.chunks(128).enumerate() {
            let scale = scales[block_idx];
            let largest = block.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            assert_eq!(scale, largest / 448.0);
            for (at, value) in block.iter().enumerate() {
                let at = block_idx * 128 + at;
                assert_eq!(codes[at], e4m3_nearest(value * (1.0 / scale)));
                assert_eq!(back[at], (e4m3_value(codes[at]) as f32) * scale);
                // Half a step is 2^-4 of a normal number, and 2^-10 of the scale for a subnormal one, plus
                // a margin for the rounding of the scale and its reciprocal.
                let bound = (f64::from(value.abs()) / 16.0).max(f64::from(scale) / 1024.0);
                let error = (f64::from(back[at]) - f64::from(*value)).abs();
                assert!(error <= bound * (1.0 + 1e-5), "{value:e} came back as {:e}", back[at]);
            }
        }
    }
}

#[test]
fn extreme_blocks_stay_finite_and_special_values_stay_where_they_are() {
    let convert = |src: &[f32]| {
        let (mut codes, mut back) = (vec![0u8; src.len()], vec![0f32; src.len()]);
        let mut scales = vec![0f32; src.len().div_ceil(128)];
        f32_to_f8(src, &mut codes, &mut scales);
        assert!(scales.iter().all(|scale| (MIN_SCALE..=MAX_SCALE).contains(scale)), "{scales:?}");
        f8_to_f32(&codes, &scales, &mut back);
        back
    };
    assert!(convert(&[0.0; 130]).iter().all(|value| value.to_bits() == 0));
    let back = convert(&[f32::MAX, -f32::MAX, 1.0]);
    assert!(back.iter().all(|value| value.is_finite()), "{back:?}");
    assert!(
        back[0] > f32::MAX * 0.999 && back[1] < -f32::MAX * 0.999 && back[2] == 0.0,
        "{back:?}"
    );
    let back = convert(&[f32::from_bits(1), f32::MIN_POSITIVE, -f32::MIN_POSITIVE * 3.0]);
    assert_eq!(back, [0.0, f32::MIN_POSITIVE, -f32::MIN_POSITIVE * 3.0]);
    let mut src = [1.0f32; 200];
    (src[3], src[70], src[199]) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
    for (at, value) in convert(&src).into_iter().enumerate() {
        assert_eq!(value.is_nan(), [3, 70, 199].contains(&at), "{at}");
        assert!(value.is_nan() || value == 1.0, "{at}");
    }
    assert!(convert(&[f32::NAN; 5]).iter().all(|value| value.is_nan()));
}

#[test]
fn halves_agree_with_scalar_conversions() {
    let values: Vec<f32> = (0..=u64::from(u32::MAX))
        .step_by(1021)
        .map(|bits| f32::from_bits(bits as u32))
        .chain((0..=u16::MAX).flat_map(around_f16))
        .chain((0..=u16::MAX).flat_map(around_bf16))
        .collect();
    let mut codes = vec![0x5555u16; values.len()];
    f32_to_f16(&values, &mut codes);
    for (value, code) in values.iter().zip(&codes) {
        let expected = f16::from_f32_const(*value);
        let both_nan = expected.is_nan() && f16::from_bits(*code).is_nan();
        assert!(both_nan || *code == expected.to_bits(), "{value:e}: {code:#06x}");
    }
    f32_to_bf16(&values, &mut codes);
    for (value, code) in values.iter().zip(&codes) {
        let expected = bf16::from_f32_const(*value);
        let both_nan = expected.is_nan() && bf16::from_bits(*code).is_nan();
        assert!(both_nan || *code == expected.to_bits(), "{value:e}: {code:#06x}");
    }

    let codes: Vec<u16> = (0..=u16::MAX).collect();
    let mut found = vec![0f32; codes.len()];
    f16_to_f32(&codes, &mut found);
    for (code, value) in codes.iter().zip(&found) {
        let expected = f16::from_bits(*code).to_f32_const();
        let both_nan = expected.is_nan() && value.is_nan();
        assert!(both_nan || value.to_bits() == expected.to_bits(), "{code:#06x}");
    }
    bf16_to_f32(&codes, &mut found);
    for (code, value) in codes.iter().zip(&found) {
        assert_eq!(value.to_bits(), u32::from(*code) << 16, "{code:#06x}");
    }
}

/// The midpoint above a code and its neighbours, where ties occur.
fn around_f16(code: u16) -> [f32; 3] {
    let (value, next) = (f16::from_bits(code), f16::from_bits(code.wrapping_add(1)));
    let middle = (value.to_f32_const() + next.to_f32_const()) / 2.0;
    [middle.next_down(), middle, middle.next_up()]
}

fn around_bf16(code: u16) -> [f32; 3] {
    let middle = f32::from_bits(u32::from(code) << 16 | 0x8000);
    [middle.next_down(), middle, middle.next_up()]
}
