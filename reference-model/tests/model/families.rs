//! Routers, experts and whole blocks of every family against transformers' outputs, `data/family-blocks`.

use std::path::Path;
use std::sync::Arc;

use attention_client::router::{Router, RouterConfig, RouterWorkspace};
use checkpoint::{Checkpoint, TensorFile};
use switchyard_reference_model::{ExpertBackend, LocalExperts, MoeBlock};

use crate::common::{data, difference};

#[test]
fn every_family_agrees_with_transformers() {
    let mut faults = Vec::new();
    let mut num_checked = 0;
    for entry in std::fs::read_dir(data("family-blocks")).unwrap() {
        let dir = entry.unwrap().path();
        if !dir.join("reference.safetensors").is_file() {
            continue;
        }
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        num_checked += 1;
        let outcome = std::panic::catch_unwind(|| check(&dir, &name));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(fault)) => faults.push(format!("{name}: {fault}")),
            Err(_) => faults.push(format!("{name}: panic")),
        }
    }
    assert!(num_checked > 50, "{num_checked} folders");
    assert!(faults.is_empty(), "{faults:#?}");
}

fn check(dir: &Path, name: &str) -> Result<(), String> {
    let checkpoint = Arc::new(Checkpoint::open(dir).map_err(|error| error.to_string())?);
    let config = checkpoint.config();
    let layer = config.moe_layers()[0];
    let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
    let floats = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
    let (x, expected_weights) = (floats("x"), floats("topk_weights"));
    let expected_idx = reference.tensor("topk_idx").unwrap().to_i32().unwrap();

    let experts_x = if reference.contains("experts_x") { floats("experts_x") } else { x.clone() };
    let mut experts = LocalExperts::new(Arc::clone(&checkpoint));
    let mut out = vec![f32::NAN; experts_x.len()];
    experts
        .forward(layer, &experts_x, &expected_idx, &expected_weights, &mut out)
        .map_err(|error| error.to_string())?;
    let (_, routed) = difference(&out, &floats("routed_out"));
    if routed > 1e-4 {
        return Err(format!("routed experts differ by {routed}"));
    }

    let mut block = match MoeBlock::load(&checkpoint, layer) {
        Ok(block) => block,
        Err(error) if OWN_ROUTERS.contains(&name) => {
            let text = error.to_string();
            if !text.contains("engine") {
                return Err(text);
            }
            return if name == "deepseek_v4-hash" {
                check_hash(&checkpoint, &reference)
            } else {
                Ok(())
            };
        }
        Err(error) => return Err(error.to_string()),
    };
    if OWN_ROUTERS.contains(&name) {
        return Err("has a router".to_owned());
    }
    // These families scale the routed experts' sum, and the router here the weights.
    let output_scale = match name {
        "laguna" => 1.5,
        "minimax_m3_vl" => 2.0,
        "openai_privacy_filter" => config.top_k as f32,
        _ => 1.0,
    };
    let (mut idx, mut weights) = (vec![-1; expected_idx.len()], vec![0.0; expected_idx.len()]);
    if matches!(name, "laguna" | "inkling" | "gemma4") {
        // The reference has capped logits, or none of shared experts; Gemma 4's gate normalises its input.
        let (chosen, their_weights) = block.route(&x).map_err(|error| error.to_string())?;
        idx.copy_from_slice(chosen);
        weights.copy_from_slice(their_weights);
    } else {
        let (logits, mut workspace) = (floats("router_logits"), RouterWorkspace::default());
        block
            .router()
            .route(&logits, &mut workspace, &mut idx, &mut weights)
            .map_err(|error| error.to_string())?;
    }
    let sorted = |idx: &[i32], weights: &[f32]| {
        let mut pairs: Vec<_> = idx.iter().copied().zip(weights.iter().copied()).collect();
        pairs.sort_by_key(|pair| pair.0);
        pairs
    };
    let rows = idx.chunks(config.top_k).zip(weights.chunks(config.top_k));
    let expected = expected_idx.chunks(config.top_k).zip(expected_weights.chunks(config.top_k));
    for (token, ((idx, weights), expected)) in rows.zip(expected).enumerate() {
        for (found, expected) in sorted(idx, weights).iter().zip(sorted(expected.0, expected.1)) {
            let expected = (expected.0, expected.1 * output_scale);
            if found.0 != expected.0
                || (found.1 - expected.1).abs() > 1e-5 * expected.1.abs().max(1.0)
            {
                return Err(format!("token {token}: {found:?}, expected {expected:?}"));
            }
        }
    }
    if name == "gemma4" {
        // The router and the experts take different inputs.
        return Ok(());
    }
    out.fill(f32::NAN);
    block.forward(&x, &mut out, &mut experts, None).map_err(|error| error.to_string())?;
    let (_, whole) = difference(&out, &floats("block_out"));
    if whole > 1e-4 { Err(format!("the block differs by {whole}")) } else { Ok(()) }
}

/// The weights of experts that a table gives for each token id.
fn check_hash(checkpoint: &Checkpoint, reference: &TensorFile) -> Result<(), String> {
    let layer = checkpoint.config().moe_layers()[0];
    let floats = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
    let whole = |name: &str| reference.tensor(name).unwrap().to_i32().unwrap();
    let tensors = checkpoint.router(layer).map_err(|error| error.to_string())?;
    let table = tensors.hash_table.ok_or("no table")?.to_i32().unwrap();
    let config = RouterConfig {
        has_bias: false,
        ..*checkpoint.config().router().map_err(|e| e.to_string())?
    };
    let router = Router::new(config, Vec::new()).map_err(|error| error.to_string())?;
    let rows = whole("token_ids").into_iter().map(|id| id as usize * config.top_k);
    let idx: Vec<i32> = rows.flat_map(|first| table[first..][..config.top_k].to_vec()).collect();
    if idx != whole("topk_idx") {
        return Err(format!("{idx:?}"));
    }
    let (expected, mut weights) = (floats("topk_weights"), vec![f32::NAN; idx.len()]);
    router
        .weigh(&floats("router_logits"), &mut RouterWorkspace::default(), &idx, &mut weights)
        .map_err(|error| error.to_string())?;
    let (_, error) = difference(&weights, &expected);
    if error > 1e-5 { Err(format!("the weights differ by {error}")) } else { Ok(()) }
}

/// Folders whose experts the engine has to choose: by token ids, by the state of the layer before, for rows of another
/// width, or by logits with a bias.
const OWN_ROUTERS: [&str; 4] = ["zaya", "deepseek_v4-hash", "nemotron_h-latent", "kolibri1"];
