//! Conversions of a caller's matrices against the host's.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use kernels::gpu::{Conversion, ConvertType};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::fresh;
use crate::runner::Runner;

/// Neither padding nor a likely byte of a value.
const POISON: u8 = 0xa5;
const FLOATS: [ConvertType; 3] = [ConvertType::F32, ConvertType::F16, ConvertType::Bf16];

/// All pairs of types, three in a launch, odd sizes, and places that are aligned to an element only.
pub fn matrices_are_converted_as_the_host_converts_them(runner: &Runner) {
    const BYTES: u64 = 1 << 20;
    let Runner::Gpu(gpu) = runner else { return };
    let soon = || Instant::now() + Duration::from_secs(20);
    let mut rng = fresh();
    let (source, target) = (gpu.alloc(BYTES).expect("memory"), gpu.alloc(BYTES).expect("memory"));
    let stream = gpu.stream().expect("stream");
    let mut cases: Vec<(ConvertType, ConvertType)> =
        FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to))).collect();
    cases.extend([(ConvertType::I32, ConvertType::I32), (ConvertType::I64, ConvertType::I32)]);
    cases.push((ConvertType::I64, ConvertType::I32));
    for launch in cases.chunks(3) {
        let (mut from_bytes, mut expected) = (Vec::new(), Vec::new());
        let mut pieces = Vec::new();
        for &(from, to) in launch {
            let rows = rng.random_range(1..300);
            let from_cols = rng.random_range(1..20);
            let to_cols = from_cols + rng.random_range(0..3);
            let place = |bytes: &mut Vec<u8>, of: ConvertType| {
                bytes.resize(bytes.len().next_multiple_of(of.bytes() as usize), POISON);
                bytes.len() as u64
            };
            let (at, to_at) = (place(&mut from_bytes, from), place(&mut expected, to));
            for _ in 0..rows {
                for col in 0..to_cols {
                    match col < from_cols {
                        true => convert_one(&mut rng, from, to, &mut from_bytes, &mut expected),
                        false => expected.extend(padding(to)),
                    }
                }
            }
            pieces.push(Conversion::new(
                (target.ptr().add(to_at), to, to_cols),
                (source.ptr().add(at), from, from_cols),
                rows,
            ));
        }
        gpu.write(&source, 0, &from_bytes, soon()).expect("write");
        expected.extend([POISON; 64]);
        // SAFETY: all matrices are within the two buffers, which outlive the wait.
        unsafe {
            stream.fill(target.ptr(), POISON, BYTES).expect("poison");
            stream.convert(&pieces).expect("conversion");
        }
        stream.wait(soon()).expect("work");
        let mut found = vec![0; expected.len()];
        gpu.read(&target, 0, &mut found, soon()).expect("read");
        assert!(found == expected, "{launch:?}");
    }
}

fn padding(of: ConvertType) -> Vec<u8> {
    let byte = if of == ConvertType::I32 { 0xff } else { 0 };
    vec![byte; of.bytes() as usize]
}

/// Appends a random value to `source`, and to `expected` what it must become. No value is a NaN.
fn convert_one(
    rng: &mut StdRng,
    from: ConvertType,
    to: ConvertType,
    source: &mut Vec<u8>,
    expected: &mut Vec<u8>,
) {
    // Values of every size: subnormal ones, and such that do not fit the target.
    let scale = f32::from(rng.random_range(-40i8..=40)).exp2();
    let random = rng.random_range(-2.0f32..2.0) * scale;
    let value = match from {
        ConvertType::I32 | ConvertType::I64 => {
            let index: i64 = match rng.random_range(0..4) {
                0 => rng.random(),
                1 => rng.random::<i32>().into(),
                _ => rng.random_range(-1..200),
            };
            let narrow = index.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
            match from {
                ConvertType::I64 => source.extend(index.to_ne_bytes()),
                _ => source.extend(narrow.to_ne_bytes()),
            }
            expected.extend(narrow.to_ne_bytes());
            return;
        }
        ConvertType::F16 => {
            source.extend(f16::from_f32(random).to_ne_bytes());
            f16::from_f32(random).to_f32()
        }
        ConvertType::Bf16 => {
            source.extend(bf16::from_f32(random).to_ne_bytes());
            bf16::from_f32(random).to_f32()
        }
        ConvertType::F32 => {
            source.extend(random.to_ne_bytes());
            random
        }
    };
    match to {
        ConvertType::F16 => expected.extend(f16::from_f32(value).to_ne_bytes()),
        ConvertType::Bf16 => expected.extend(bf16::from_f32(value).to_ne_bytes()),
        _ => expected.extend(value.to_ne_bytes()),
    }
}
