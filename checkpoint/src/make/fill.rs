//! Seeded random bytes of every dtype that a checkpoint holds.

use crate::dtype::DType;

/// Distribution of a tensor's values.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fill {
    /// Symmetric, with a root mean square of about 1/√fan_in, so that a product keeps the variance.
    Weight {
        /// Number of inputs that are summed.
        fan_in: usize,
    },
    /// fp8 weights at full range. Their block scales set the magnitude.
    Quantised,
    /// Block scales for [`Fill::Quantised`] weights.
    Scale {
        /// Number of inputs that are summed.
        fan_in: usize,
    },
    /// Positive, from 0.5 to 1: norm weights.
    Norm,
    /// Symmetric and small: a router's correction bias.
    Bias,
}

/// A stream of bytes for one tensor. It depends only on the seed and the tensor's name, so sharding and
/// order do not change a tensor.
pub(super) struct Filler {
    state: u64,
    pattern: Pattern,
}

/// Conversion of 64 random bits to eight bytes of a tensor.
enum Pattern {
    /// Values of 16 or 8 bits: sign and mantissa are random, and the exponent is `top` minus two random bits.
    /// Every value is finite, and the subtraction never borrows from the next value.
    Lanes { random: u64, exponent_step: u64, top: u64 },
    /// Two f32, uniform.
    Uniform { low: f32, span: f32 },
}

impl Filler {
    pub(super) fn new(seed: u64, name: &str, dtype: DType, fill: Fill) -> Filler {
        let state = name.bytes().fold(mix(seed), |s, byte| mix(s ^ u64::from(byte)));
        let uniform = |low: f32, high: f32| Pattern::Uniform { low, span: high - low };
        let pattern = match (fill, dtype) {
            (Fill::Weight { fan_in }, DType::Bf16) => {
                // The mean square over four exponents and a uniform mantissa is 0.775 of the largest
                // exponent's square. The nearest power of two is accurate within √2.
                let exponent = 127.0 - (fan_in as f64).log2() / 2.0;
                Pattern::Lanes {
                    random: 0x807f * LANES_16,
                    exponent_step: 0x0180 * LANES_16,
                    top: ((exponent.round() as u64) << 7) * LANES_16,
                }
            }
            (Fill::Norm, DType::Bf16) => Pattern::Lanes {
                random: 0x007f * LANES_16,
                exponent_step: 0,
                top: (126 << 7) * LANES_16,
            },
            (Fill::Quantised, DType::F8E4m3) => Pattern::Lanes {
                random: 0x87 * LANES_8,
                exponent_step: 0x18 * LANES_8,
                top: (14 << 3) * LANES_8,
            },
            (Fill::Scale { fan_in }, _) => {
                let scale = 1.0 / (QUANTISED_RMS * (fan_in as f32).sqrt());
                uniform(0.75 * scale, 1.25 * scale)
            }
            // A bias spreads less than the sigmoid scores that it corrects.
            _ => uniform(-0.1, 0.1),
        };
        Filler { state, pattern }
    }

    /// Continues the stream. `out` is a whole number of eight bytes except at a tensor's end.
    pub(super) fn fill(&mut self, out: &mut [u8]) {
        let mut state = self.state;
        let mut next = || {
            state = state.wrapping_add(GOLDEN);
            mix(state)
        };
        match self.pattern {
            Pattern::Lanes { random, exponent_step, top } => {
                for_each_word(out, || {
                    let bits = next();
                    (bits & random) + top - (bits & exponent_step)
                });
            }
            Pattern::Uniform { low, span } => for_each_word(out, || {
                let bits = next();
                let value = |half: u32| low + span * ((half >> 8) as f32 / (1u32 << 24) as f32);
                let (a, b) = (value(bits as u32), value((bits >> 32) as u32));
                u64::from(a.to_bits()) | u64::from(b.to_bits()) << 32
            }),
        }
        self.state = state;
    }
}

fn for_each_word(out: &mut [u8], mut next: impl FnMut() -> u64) {
    let (words, rest) = out.as_chunks_mut::<8>();
    for word in words {
        *word = next().to_le_bytes();
    }
    if !rest.is_empty() {
        rest.copy_from_slice(&next().to_le_bytes()[..rest.len()]);
    }
}

/// The finaliser of SplitMix64: a bijection whose outputs on a counter are statistically random.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const LANES_16: u64 = 0x0001_0001_0001_0001;
const LANES_8: u64 = 0x0101_0101_0101_0101;
/// Root mean square of fp8 values with exponents 11 to 14: 0.88 × 2^7.
const QUANTISED_RMS: f32 = 112.7;
