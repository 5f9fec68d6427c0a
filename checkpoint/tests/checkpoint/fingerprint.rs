//! Changes that affect a fingerprint, and changes that do not.

use std::fs;

use serde_json::{Value, json};
use switchyard_checkpoint::{Checkpoint, DType, Fingerprint, Preset};

use crate::support::{all_tensors, config_text, tiny, write_sharded, write_single};

#[test]
fn place_sharding_spelling_and_weights_do_not_count() {
    for preset in [Preset::TinyQwen3Moe, Preset::TinyMixtral, Preset::TinyDeepseekV3] {
        let (dir, checkpoint) = tiny(preset, 2);
        let fingerprint = checkpoint.fingerprint();
        let (config, mut tensors) = (config_text(dir.path()), all_tensors(&checkpoint));

        let (_elsewhere, again) = tiny(preset, 2);
        assert_eq!(again.fingerprint(), fingerprint, "{preset}: another place");
        for num_shards in [2, 5] {
            let sharded = dir.path().join(format!("sharded-{num_shards}"));
            write_sharded(&sharded, &config, &tensors, num_shards);
            let sharded = Checkpoint::open(&sharded).unwrap();
            assert_eq!(sharded.fingerprint(), fingerprint, "{preset}: {num_shards} shards");
        }

        let mut json: Value = serde_json::from_str(&config).unwrap();
        json["torch_dtype"] = json!("float32");
        json["use_cache"] = json!(false);
        json["an_unknown_field"] = json!([1, 2]);
        tensors.iter_mut().for_each(|t| t.data.fill(0));
        let respelt = dir.path().join("respelt");
        write_single(&respelt, &json.to_string(), &tensors);
        let respelt = Checkpoint::open(&respelt).unwrap().fingerprint();
        assert_eq!(respelt, fingerprint, "{preset}: spelling and values");
    }
}

#[test]
fn every_number_that_defines_the_arithmetic_counts() {
    let (dir, checkpoint) = tiny(Preset::TinyDeepseekV3, 4);
    let config = config_text(dir.path());
    let mut seen = vec![checkpoint.fingerprint()];
    let changes = [
        ("num_experts_per_tok", json!(2)),
        ("n_group", json!(2)),
        ("topk_group", json!(3)),
        ("routed_scaling_factor", json!(2.25)),
        ("norm_topk_prob", json!(false)),
        ("scoring_func", json!("softmax")),
        ("first_k_dense_replace", json!(2)),
        ("rms_norm_eps", json!(1e-5)),
        ("n_shared_experts", json!(2)),
        ("moe_intermediate_size", json!(64)),
        ("hidden_size", json!(161)),
    ];
    for (field, value) in changes {
        let mut json: Value = serde_json::from_str(&config).unwrap();
        assert_ne!(json[field], value, "{field}: not a change");
        json[field] = value;
        fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        push_new(&mut seen, Checkpoint::open(dir.path()).unwrap().fingerprint(), field);
    }

    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 4);
    let config = config_text(dir.path());
    push_new(&mut seen, checkpoint.fingerprint(), "family");
    for (field, value) in [("rope_theta", json!(5e5)), ("attention_bias", json!(true))] {
        let mut json: Value = serde_json::from_str(&config).unwrap();
        json[field] = value;
        fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        push_new(&mut seen, Checkpoint::open(dir.path()).unwrap().fingerprint(), field);
    }
    for num_layers in 1..4 {
        push_new(&mut seen, tiny(Preset::TinyQwen3Moe, num_layers).1.fingerprint(), "layers");
    }
}

#[test]
fn every_name_dtype_and_shape_counts() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    let (config, whole) = (config_text(dir.path()), all_tensors(&checkpoint));
    let mut seen = vec![checkpoint.fingerprint()];
    let copy = dir.path().join("copy");
    for change in ["rename", "dtype", "shape", "rank", "remove"] {
        let mut tensors = whole.clone();
        let last = tensors.last_mut().unwrap();
        match change {
            "rename" => last.name.push('x'),
            "dtype" => last.dtype = DType::F16,
            "shape" => last.shape = vec![last.shape.iter().product::<usize>() / 2, 2],
            "rank" => last.shape.push(1),
            _ => drop(tensors.pop()),
        }
        write_single(&copy, &config, &tensors);
        push_new(&mut seen, Checkpoint::open(&copy).unwrap().fingerprint(), change);
        fs::remove_dir_all(&copy).unwrap();
    }
}

/// The value itself is part of the protocol between peers of different builds.
#[test]
fn the_shipped_model_keeps_its_fingerprint() {
    let checkpoint = Checkpoint::open(crate::support::data("tiny-moe")).unwrap();
    assert_eq!(checkpoint.fingerprint().to_string(), TINY_MOE);
}

fn push_new(seen: &mut Vec<Fingerprint>, fingerprint: Fingerprint, change: &str) {
    assert!(!seen.contains(&fingerprint), "{change} does not change the fingerprint");
    seen.push(fingerprint);
}

const TINY_MOE: &str = "c09fdf2f373f8880741a015ee60376d24d6de1031002424996b1b567bf5f2093";
