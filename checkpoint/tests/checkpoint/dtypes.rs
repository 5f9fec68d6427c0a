//! The dtypes that experts are stored in.

use rand::RngExt;
use switchyard_checkpoint::{Checkpoint, DType, Preset, WeightFormat};

use crate::support::{Tensor, all_tensors, config_text, rng, tiny, write_single};

#[test]
fn experts_in_bf16_f16_and_f32_read_alike() {
    let mut rng = rng();
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    let (config, mut tensors) = (config_text(dir.path()), all_tensors(&checkpoint));
    // Values that all three hold: seven fraction bits, exponents from -8 to 7, both zeros.
    let values: Vec<f32> = (0..96 * 128)
        .map(|_| {
            let fraction = 1.0 + f32::from(rng.random_range(0..128u8)) / 128.0;
            let sign = if rng.random() { 1.0 } else { -1.0 };
            let zero = f32::from(rng.random_range(0..10u8) != 0);
            sign * zero * fraction * 2f32.powi(rng.random_range(-8..8))
        })
        .collect();
    let w1 = "model.layers.0.block_sparse_moe.experts.2.w1.weight";
    for dtype in [DType::Bf16, DType::F16, DType::F32] {
        let tensor = tensors.iter_mut().find(|t| t.name == w1).unwrap();
        tensor.dtype = dtype;
        tensor.data = store(&values, dtype);
        let copy = dir.path().join(dtype.name());
        write_single(&copy, &config, &tensors);
        let copy = Checkpoint::open(&copy).unwrap();
        let gate = copy.expert(0, 2).unwrap().gate.unwrap();
        let format = match dtype {
            DType::Bf16 => WeightFormat::Bf16,
            DType::F16 => WeightFormat::F16,
            _ => WeightFormat::F32,
        };
        assert_eq!((gate.format(), gate.stored_bytes()), (format, tensors_len(&tensors, w1)));
        let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&gate.to_f32()), bits(&values), "{dtype}");
    }
}

#[test]
fn block_scales_in_bf16_read_like_those_in_f32() {
    let mut rng = rng();
    let (dir, checkpoint) = tiny(Preset::TinyDeepseekV3, 1);
    let (config, mut tensors) = (config_text(dir.path()), all_tensors(&checkpoint));
    let scales: Vec<f32> = (0..4).map(|_| f32::from(rng.random_range(1..128u8)) / 64.0).collect();
    let name = "model.layers.0.mlp.experts.1.up_proj.weight_scale_inv";
    let mut read = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        let tensor = tensors.iter_mut().find(|t| t.name == name).unwrap();
        tensor.dtype = dtype;
        tensor.data = store(&scales, dtype);
        let copy = dir.path().join(dtype.name());
        write_single(&copy, &config, &tensors);
        let copy = Checkpoint::open(&copy).unwrap();
        let up = copy.expert(0, 1).unwrap().up;
        assert_eq!(up.scales().unwrap().to_f32(), scales, "{dtype}");
        read.push(up.to_f32());
    }
    assert_eq!(read[0], read[1]);
    assert!(read[0].iter().any(|v| *v != 0.0));
}

/// Little-endian bytes of values that the dtype holds exactly.
fn store(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

fn tensors_len(tensors: &[Tensor], name: &str) -> usize {
    tensors.iter().find(|t| t.name == name).unwrap().data.len()
}
