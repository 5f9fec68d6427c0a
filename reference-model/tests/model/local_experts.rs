//! The in-process reference experts and whole MoE blocks of every family.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use std::error::Error;
use switchyard_reference_model::LocalExpertsError;
use switchyard_reference_model::{ExpertBackend, LocalExperts, MoeBlock};

use crate::common::{Stored, difference, random_values, seed, tiny_moe, write_checkpoint};

#[test]
fn masked_entries_count_nothing_and_every_row_is_overwritten() {
    let checkpoint = tiny_moe();
    let mut experts = LocalExperts::new(checkpoint.clone());
    let mut rng = StdRng::seed_from_u64(seed());
    let x = random_values(&mut rng, 3 * 256, 1.0);
    let weights = [0.5, 0.25, 0.125, 9.0, 9.0, 9.0, 0.75, 9.0, 0.5];
    // The middle token is masked entirely.
    let idx = [3, 7, 3, -1, -1, -1, 15, -1, 0];
    let mut out = vec![f32::NAN; 3 * 256];
    experts.forward(1, &x, &idx, &weights, &mut out).unwrap();
    assert_eq!(out[256..512], [0.0; 256]);
    // Expert by expert.
    let mut expected = vec![0.0f32; 3 * 256];
    for (entry, (&expert, &weight)) in idx.iter().zip(&weights).enumerate() {
        if expert < 0 {
            continue;
        }
        let row = entry / 3 * 256..(entry / 3 + 1) * 256;
        let mut alone = vec![f32::NAN; 256];
        experts.forward(1, &x[row.clone()], &[expert], &[1.0], &mut alone).unwrap();
        expected[row].iter_mut().zip(alone).for_each(|(e, y)| *e += weight * y);
    }
    let (_, relative) = difference(&out, &expected);
    assert!(relative < 1e-6, "{relative}");
    experts.forward(1, &[], &[], &[], &mut []).unwrap();
}

#[test]
fn calls_that_do_not_fit_are_errors() {
    let mut experts = LocalExperts::new(tiny_moe());
    let mut call = |layer, x: usize, idx: &[i32], weights: usize, out: usize| {
        let (x, weights) = (vec![0.0; x], vec![0.0; weights]);
        let error = experts.forward(layer, &x, idx, &weights, &mut vec![0.0; out]).unwrap_err();
        assert_eq!(error.layer(), layer);
        error.source().unwrap().to_string()
    };
    assert!(call(0, 255, &[], 0, 255).starts_with("x has 255"));
    assert!(call(0, 512, &[0, 1, 2], 3, 512).starts_with("topk_idx has 3"));
    assert!(call(0, 256, &[0, 1], 1, 256).starts_with("topk_weights has 1"));
    assert!(call(0, 256, &[0], 1, 512).starts_with("out has 512"));
    assert_eq!(call(0, 256, &[16], 1, 256), "topk_idx of token 0 is 16, expected -1 or 0 to 15");
    assert!(call(0, 256, &[-2], 1, 256).contains("-2"));
    assert!(call(9, 256, &[0], 1, 256).contains("layer 9"));
    let error = experts.forward(0, &[0.0; 256], &[99], &[1.0], &mut [0.0; 256]).unwrap_err();
    let source = error.source().unwrap().downcast_ref::<LocalExpertsError>();
    assert!(matches!(source, Some(LocalExpertsError::Expert { found: 99, .. })));
}

/// 8-bit floats by their definition: sign, 4 exponent bits (bias 7), 3 mantissa bits.
fn e4m3(byte: u8) -> f64 {
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    match exponent {
        0 => sign * mantissa / 8.0 * 2f64.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// A matrix in every stored dtype, with the values it stands for.
fn stored_matrix(
    rng: &mut StdRng,
    name: &str,
    dtype: &'static str,
    [rows, cols]: [usize; 2],
) -> (Vec<Stored>, Vec<f64>) {
    let shape = vec![rows, cols];
    let tensor = |bytes| Stored { name: name.to_owned(), dtype, shape: shape.clone(), bytes };
    let random = random_values(rng, rows * cols, 0.1);
    if dtype == "F8_E4M3" {
        // All finite bytes: 0x7f and 0xff are NaN.
        let bytes: Vec<u8> = (0..rows * cols)
            .map(|_| rng.random_range(0..0x7f) | if rng.random() { 0x80 } else { 0 })
            .collect();
        let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
        let scales: Vec<f32> =
            (0..blocks[0] * blocks[1]).map(|_| rng.random_range(1e-4..1e-3)).collect();
        let scale = |i: usize| f64::from(scales[i / cols / 128 * blocks[1] + i % cols / 128]);
        let values = bytes.iter().enumerate().map(|(i, b)| e4m3(*b) * scale(i)).collect();
        let scale_tensor = Stored::f32(format!("{name}_scale_inv"), &blocks, &scales);
        return (vec![tensor(bytes), scale_tensor], values);
    }
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    for value in random {
        match dtype {
            "F32" => {
                bytes.extend(value.to_le_bytes());
                values.push(f64::from(value));
            }
            "BF16" => {
                let high = (value.to_bits() >> 16) as u16;
                bytes.extend(high.to_le_bytes());
                values.push(f64::from(f32::from_bits(u32::from(high) << 16)));
            }
            "F16" => {
                // A half-precision number made from its parts: sign, exponent -5, mantissa.
                let (sign, mantissa) = (value < 0.0, rng.random_range(0..1024u16));
                let bits = (u16::from(sign) << 15) | (10 << 10) | mantissa;
                bytes.extend(bits.to_le_bytes());
                let magnitude = (1.0 + f64::from(mantissa) / 1024.0) * 2f64.powi(-5);
                values.push(if sign { -magnitude } else { magnitude });
            }
            other => panic!("{other}"),
        }
    }
    (vec![tensor(bytes)], values)
}

/// Widths that are no multiple of the fp8 block, so that edge blocks are cut.
const HIDDEN: usize = 160;
const WIDTH: usize = 136;

fn swiglu([gate, up, down]: &[Vec<f64>; 3], x: &[f64]) -> Vec<f64> {
    let times = |m: &[f64], x: &[f64]| -> Vec<f64> {
        m.chunks(x.len()).map(|r| r.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
    };
    let (gate, up) = (times(gate, x), times(up, x));
    let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
    times(down, &inner)
}

/// A DeepSeek-V3 layer with four experts and a shared one, and its matrices in f64: the experts',
/// then the shared expert's.
fn deepseek_layer(
    rng: &mut StdRng,
    dtype: &'static str,
    gate_name: &str,
) -> (serde_json::Value, Vec<Stored>, Vec<[Vec<f64>; 3]>) {
    let mut tensors = vec![
        Stored::random(rng, format!("{gate_name}.weight"), &[4, HIDDEN], 0.0, 0.3),
        Stored::random(rng, format!("{gate_name}.e_score_correction_bias"), &[4], 0.0, 0.2),
    ];
    let mut matrices = Vec::new();
    let names = (0..4).map(|e| format!("experts.{e}")).chain(["shared_experts".to_owned()]);
    for name in names {
        let mut matrix = |part: &str, shape| {
            let name = format!("model.layers.0.mlp.{name}.{part}_proj.weight");
            let (stored, values) = stored_matrix(rng, &name, dtype, shape);
            tensors.extend(stored);
            values
        };
        matrices.push([
            matrix("gate", [WIDTH, HIDDEN]),
            matrix("up", [WIDTH, HIDDEN]),
            matrix("down", [HIDDEN, WIDTH]),
        ]);
    }
    let mut config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": 64, "moe_intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1,
        "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 16,
        "max_position_embeddings": 32,
    });
    if dtype == "F8_E4M3" {
        config["quantization_config"] =
            json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    }
    (config, tensors, matrices)
}

#[test]
fn every_stored_dtype_gives_the_block_that_its_numbers_define() {
    let mut rng = StdRng::seed_from_u64(seed());
    for dtype in ["F32", "BF16", "F16", "F8_E4M3"] {
        let (config, tensors, matrices) =
            deepseek_layer(&mut rng, dtype, "model.layers.0.mlp.gate");
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = write_checkpoint(dir.path(), &config, &tensors);
        let mut experts = LocalExperts::new(checkpoint.clone());
        let mut block = MoeBlock::load(&checkpoint, 0).unwrap();
        let num_tokens = 5;
        let x = random_values(&mut rng, num_tokens * HIDDEN, 1.0);
        let (idx, weights) = block.route(&x).unwrap();
        let (idx, weights) = (idx.to_vec(), weights.to_vec());
        let mut expected = Vec::new();
        for token in 0..num_tokens {
            let x: Vec<f64> =
                x[token * HIDDEN..][..HIDDEN].iter().copied().map(f64::from).collect();
            let mut sum = swiglu(&matrices[4], &x);
            for choice in token * 2..token * 2 + 2 {
                let y = swiglu(&matrices[idx[choice] as usize], &x);
                sum.iter_mut().zip(y).for_each(|(s, y)| *s += f64::from(weights[choice]) * y);
            }
            expected.extend(sum.into_iter().map(|v| v as f32));
        }
        let mut out = vec![f32::NAN; x.len()];
        block.forward(&x, &mut out, &mut experts, None).unwrap();
        let (_, relative) = difference(&out, &expected);
        assert!(relative < 1e-5, "{dtype}: {relative}");
    }
}
