//! Whole MoE blocks of several families against transformers' outputs, `data/reference-blocks`.

use std::sync::Arc;

use checkpoint::{Checkpoint, TensorFile};
use switchyard_reference_model::{ExpertBackend, LocalExperts, MoeBlock};

use crate::common::{data, difference};

#[test]
fn blocks_match_the_reference() {
    let mut checked = Vec::new();
    for entry in std::fs::read_dir(data("reference-blocks")).unwrap() {
        let dir = entry.unwrap().path();
        if dir.join("reference.safetensors").is_file() {
            check_block(&dir);
            checked.push(dir.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    println!("checked {checked:?}");
    for block in BLOCKS {
        assert!(checked.iter().any(|name| name == block), "{block} is missing: {checked:?}");
    }
}

fn check_block(dir: &std::path::Path) {
    let checkpoint = Arc::new(Checkpoint::open(dir).unwrap());
    let config = checkpoint.config();
    let layer = config.moe_layers()[0];
    let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
    let floats = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
    let x = floats("x");
    let expected_idx = reference.tensor("topk_idx").unwrap().to_i32().unwrap();
    let expected_weights = floats("topk_weights");
    let mut block = MoeBlock::load(&checkpoint, layer).unwrap();
    let (idx, weights) = block.route(&x).unwrap();
    assert_eq!(idx.len(), expected_idx.len());
    let sorted = |idx: &[i32], weights: &[f32]| {
        let mut pairs: Vec<_> = idx.iter().copied().zip(weights.iter().copied()).collect();
        pairs.sort_by_key(|p| p.0);
        pairs
    };
    let rows = idx.chunks(config.top_k).zip(weights.chunks(config.top_k));
    let expected = expected_idx.chunks(config.top_k).zip(expected_weights.chunks(config.top_k));
    let mut weight_difference = 0.0f32;
    for (token, ((idx, weights), expected)) in rows.zip(expected).enumerate() {
        for (found, expected) in sorted(idx, weights).iter().zip(sorted(expected.0, expected.1)) {
            assert_eq!(found.0, expected.0, "{dir:?} token {token}");
            weight_difference = weight_difference.max((found.1 - expected.1).abs());
        }
    }
    assert!(weight_difference < 1e-5, "{dir:?}: {weight_difference}");
    let mut experts = LocalExperts::new(checkpoint.clone());
    let mut out = vec![f32::NAN; x.len()];
    experts.forward(layer, &x, &expected_idx, &expected_weights, &mut out).unwrap();
    let (_, routed) = difference(&out, &floats("routed_out"));
    out.fill(f32::NAN);
    block.forward(&x, &mut out, &mut experts, None).unwrap();
    let (_, whole) = difference(&out, &floats("block_out"));
    println!("{}: weights {weight_difference:e} routed {routed:e} block {whole:e}", dir.display());
    assert!(routed < 1e-4 && whole < 1e-4, "{dir:?}: {routed} {whole}");
}

const BLOCKS: [&str; 5] =
    ["mixtral", "deepseek-v2-grouped", "deepseek-v3", "deepseek-v3-fp8", "qwen3-moe-plain-topk"];
