//! Formats of weights, and random weights in them with their exact values.

use std::sync::Arc;

use half::{bf16, f16};
use rand::RngExt;
use rand::rngs::StdRng;
use switchyard_expert_compute::{DType, Weight, WeightBytes, WeightFormat, WeightScales};

/// A form of weights, and the dtype of its scales.
#[derive(Clone, Copy, Debug)]
pub struct TestFormat {
    format: WeightFormat,
    scales: DType,
}

pub const BF16: TestFormat = plain(WeightFormat::Bf16);
pub const F16: TestFormat = plain(WeightFormat::F16);
pub const F32: TestFormat = plain(WeightFormat::F32);

/// Every form, with blocks and groups around the sizes of vectors, and others that no vector kernel takes.
pub const FORMATS: &[TestFormat] = &[
    BF16,
    F16,
    F32,
    fp8([128, 128], DType::F32),
    fp8([64, 64], DType::F8E8m0),
    fp8([32, 48], DType::Bf16),
    fp8([5000, 5000], DType::F16),
    fp8([1, 5000], DType::Bf16),
    fp8([1, 32], DType::F8E8m0),
    fp8([6, 16], DType::F32),
    fp8([24, 40], DType::F32),
    int8(32, false, DType::Bf16),
    int8(5000, true, DType::F16),
    int8(24, true, DType::F32),
    int4(32, false, DType::Bf16),
    int4(128, true, DType::F16),
    int4(5000, false, DType::F32),
    int4(48, true, DType::Bf16),
    int4(7, true, DType::F32),
    fp4(32, DType::F8E8m0),
    fp4(16, DType::F8E4m3),
    fp4(10, DType::F32),
];

const fn plain(format: WeightFormat) -> TestFormat {
    TestFormat { format, scales: DType::F32 }
}

const fn fp8(block: [usize; 2], scales: DType) -> TestFormat {
    TestFormat { format: WeightFormat::F8E4m3 { block }, scales }
}

const fn int8(group: usize, has_minima: bool, scales: DType) -> TestFormat {
    TestFormat { format: WeightFormat::Int8 { group, has_minima }, scales }
}

const fn int4(group: usize, has_minima: bool, scales: DType) -> TestFormat {
    TestFormat { format: WeightFormat::Int4 { group, has_minima }, scales }
}

const fn fp4(group: usize, scales: DType) -> TestFormat {
    TestFormat { format: WeightFormat::Fp4 { group }, scales }
}

impl TestFormat {
    /// The sizes, even if the format needs it.
    pub fn round_up(&self, hidden: usize, inter: usize) -> (usize, usize) {
        match self.format.code_bits() {
            4 => (hidden.next_multiple_of(2), inter.next_multiple_of(2)),
            _ => (hidden, inter),
        }
    }
}

/// A random matrix, at an odd address, because tensors in a checkpoint are not aligned; and its values.
pub fn random_weight(
    rng: &mut StdRng,
    rows: usize,
    cols: usize,
    format: &TestFormat,
) -> (Weight, Vec<f64>) {
    // Values of about the same size, whatever the format.
    let typical = 1.0 / (cols as f32).sqrt();
    let (codes, mut exact) = random_codes(rng, rows, cols, format.format, typical);
    let [block_rows, block_cols] = format.format.scale_block().unwrap_or([1, 1]);
    let scales = format.format.scale_shape(rows, cols).map(|[grid_rows, grid_cols]| {
        let num = grid_rows * grid_cols;
        // The factor is applied to every scale.
        let factor = if format.scales == DType::F8E4m3 { 0.0137 } else { 1.0 };
        let largest = match format.format {
            WeightFormat::F8E4m3 { .. } => 200.0,
            WeightFormat::Int8 { .. } => 90.0,
            WeightFormat::Int4 { .. } => 6.0,
            _ => 4.0,
        };
        let scale = |rng: &mut StdRng| rng.random_range(0.3..2.0) * typical / largest / factor;
        let (bytes, values) = random_scales(rng, num, format.scales, scale);
        let has_minima = matches!(
            format.format,
            WeightFormat::Int8 { has_minima: true, .. }
                | WeightFormat::Int4 { has_minima: true, .. }
        );
        let minima: Vec<f32> = match has_minima {
            true => (0..num).map(|_| rng.random_range(-1.0..1.0) * typical).collect(),
            false => Vec::new(),
        };
        for (idx, value) in exact.iter_mut().enumerate() {
            let at = idx / cols / block_rows * grid_cols + idx % cols / block_cols;
            let minimum = minima.get(at).copied().unwrap_or(0.0);
            *value = *value * values[at] * f64::from(factor) + f64::from(minimum);
        }
        let data = at_odd_address(bytes);
        WeightScales { dtype: format.scales, data, factor, minima: minima.into() }
    });
    let weight = Weight::new(format.format, rows, cols, at_odd_address(codes), scales);
    (weight.unwrap(), exact)
}

fn at_odd_address(mut bytes: Vec<u8>) -> WeightBytes {
    bytes.insert(0, 0xff);
    WeightBytes::new(Arc::new(bytes), |bytes| &bytes[1..])
}

/// Codes, and their values before scales.
fn random_codes(
    rng: &mut StdRng,
    rows: usize,
    cols: usize,
    format: WeightFormat,
    typical: f32,
) -> (Vec<u8>, Vec<f64>) {
    let (mut bytes, mut exact) = (Vec::new(), Vec::new());
    for idx in 0..rows * cols {
        let value: f32 = rng.random_range(-1.5..1.5) * typical;
        match format {
            WeightFormat::Bf16 => {
                let value = bf16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                exact.push(value.to_f64());
            }
            WeightFormat::F16 => {
                // Some are subnormal.
                let value = if idx % 17 == 0 { value * 1e-5 } else { value };
                let value = f16::from_f32(value);
                bytes.extend(value.to_le_bytes());
                exact.push(value.to_f64());
            }
            WeightFormat::F32 => {
                bytes.extend(value.to_le_bytes());
                exact.push(f64::from(value));
            }
            WeightFormat::F8E4m3 { .. } => {
                let byte: u8 = rng.random_range(0..0x7f) | (rng.random::<u8>() & 0x80);
                bytes.push(byte);
                exact.push(e4m3(byte));
            }
            WeightFormat::Int8 { .. } => {
                let code: i8 = rng.random();
                bytes.push(code as u8);
                exact.push(f64::from(code));
            }
            WeightFormat::Int4 { .. } | WeightFormat::Fp4 { .. } => {
                let code: u8 = rng.random_range(0..16);
                match idx % 2 {
                    0 => bytes.push(code),
                    _ => *bytes.last_mut().unwrap() |= code << 4,
                }
                exact.push(match format {
                    WeightFormat::Int4 { .. } => f64::from(code) - 8.0,
                    _ => {
                        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
                        if code >= 8 { -magnitude } else { magnitude }
                    }
                });
            }
        }
    }
    (bytes, exact)
}

/// Scales near what `scale` gives, in a dtype, and their values.
fn random_scales(
    rng: &mut StdRng,
    num: usize,
    dtype: DType,
    scale: impl Fn(&mut StdRng) -> f32,
) -> (Vec<u8>, Vec<f64>) {
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for _ in 0..num {
        let scale = scale(rng);
        match dtype {
            DType::Bf16 => {
                let scale = bf16::from_f32(scale);
                bytes.extend(scale.to_le_bytes());
                values.push(scale.to_f64());
            }
            DType::F16 => {
                let scale = f16::from_f32(scale);
                bytes.extend(scale.to_le_bytes());
                values.push(scale.to_f64());
            }
            DType::F8E8m0 => {
                let exponent = scale.log2().round() as i32;
                bytes.push((exponent + 127) as u8);
                values.push(2f64.powi(exponent));
            }
            DType::F8E4m3 => {
                let byte = (0..0x7f).min_by(|a, b| {
                    let distance = |byte: &u8| (e4m3(*byte) - f64::from(scale)).abs();
                    distance(a).total_cmp(&distance(b))
                });
                bytes.push(byte.unwrap());
                values.push(e4m3(byte.unwrap()));
            }
            _ => {
                bytes.extend(scale.to_le_bytes());
                values.push(f64::from(scale));
            }
        }
    }
    (bytes, values)
}

/// Converts a value by the definition of the format.
fn e4m3(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-6),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
    };
    if byte & 0x80 != 0 { -magnitude } else { magnitude }
}
