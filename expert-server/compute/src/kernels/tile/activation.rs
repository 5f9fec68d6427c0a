//! Activations, in forms that vectorise.

use checkpoint::Activation;

/// `dst = activation(gate, up)`.
///
/// # Safety
/// The pointers are valid for `len` values, except `gate` if the activation has none. The processor has the
/// instruction set.
#[inline(always)]
pub(in crate::kernels) unsafe fn activate(
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
