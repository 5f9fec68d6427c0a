//! Changes that affect a fingerprint, and changes that do not.

use std::fs;

use serde_json::{Value, json};
use switchyard_checkpoint::{Checkpoint, Coverage, DType, Fingerprint, Preset};

use crate::support::{Tensor, all_tensors, config_text, tiny, write_sharded, write_single};

const TINY: [Preset; 3] = [Preset::TinyQwen3Moe, Preset::TinyMixtral, Preset::TinyDeepseekV3];

fn fingerprint(checkpoint: &Checkpoint) -> Fingerprint {
    checkpoint.fingerprint().unwrap()
}

fn is_expert(tensor: &Tensor) -> bool {
    tensor.name.contains(".experts.")
}

#[test]
fn place_sharding_spelling_and_tensors_that_are_no_experts_do_not_count() {
    for preset in TINY {
        let (dir, checkpoint) = tiny(preset, 2);
        let expected = fingerprint(&checkpoint);
        let (config, mut tensors) = (config_text(dir.path()), all_tensors(&checkpoint));

        let (_elsewhere, again) = tiny(preset, 2);
        assert_eq!(fingerprint(&again), expected, "{preset}: another place");
        for num_shards in [2, 5] {
            let sharded = dir.path().join(format!("sharded-{num_shards}"));
            write_sharded(&sharded, &config, &tensors, num_shards);
            let sharded = Checkpoint::open(&sharded).unwrap();
            assert_eq!(fingerprint(&sharded), expected, "{preset}: {num_shards} shards");
        }

        let mut json: Value = serde_json::from_str(&config).unwrap();
        json["torch_dtype"] = json!("float32");
        json["rope_theta"] = json!(5e5);
        json["an_unknown_field"] = json!([1, 2]);
        tensors.retain(|tensor| !tensor.name.contains("embed_tokens"));
        tensors.iter_mut().filter(|t| !is_expert(t)).for_each(|t| t.data.fill(0));
        let mut extra = tensors[0].clone();
        extra.name = "visual.patch_embed.weight".to_owned();
        tensors.push(extra);
        let changed = dir.path().join("changed");
        write_single(&changed, &json.to_string(), &tensors);
        let changed = Checkpoint::open(&changed).unwrap();
        assert_eq!(fingerprint(&changed), expected, "{preset}: spelling and other tensors");
    }
}

#[test]
fn every_number_that_defines_the_experts_counts() {
    let (dir, checkpoint) = tiny(Preset::TinyDeepseekV3, 4);
    let config = config_text(dir.path());
    let mut seen = vec![fingerprint(&checkpoint)];
    let changes = [
        ("num_experts_per_tok", json!(2)),
        ("first_k_dense_replace", json!(2)),
        ("moe_intermediate_size", json!(64)),
        ("hidden_size", json!(161)),
        ("hidden_act", json!("gelu")),
    ];
    for (field, value) in changes {
        let mut json: Value = serde_json::from_str(&config).unwrap();
        assert_ne!(json[field], value, "{field}: not a change");
        json[field] = value;
        fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
        push_new(&mut seen, fingerprint(&Checkpoint::open(dir.path()).unwrap()), field);
    }
    for preset in TINY {
        for num_layers in 1..3 {
            push_new(&mut seen, fingerprint(&tiny(preset, num_layers).1), "layers");
        }
    }
}

#[test]
fn names_dtypes_shapes_and_values_of_experts_count_and_are_named() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    let (config, whole) = (config_text(dir.path()), all_tensors(&checkpoint));
    let mut seen = vec![fingerprint(&checkpoint)];
    let ours = checkpoint.digests(Coverage::Sampled, 2, &mut |_, _| {}).unwrap();
    assert_eq!(ours.differences(ours.tensors(), 5), Vec::<String>::new());
    let copy = dir.path().join("copy");
    for change in ["rename", "dtype", "shape", "first byte", "last byte", "remove"] {
        let mut tensors = whole.clone();
        let last = tensors.iter().rposition(is_expert).unwrap();
        let name = tensors[last].name.clone();
        let tensor = &mut tensors[last];
        match change {
            "rename" => tensor.name.push('x'),
            "dtype" => tensor.dtype = DType::F16,
            "shape" => tensor.shape = vec![tensor.shape.iter().product::<usize>() / 2, 2],
            "first byte" => tensor.data[0] ^= 1,
            "last byte" => *tensor.data.last_mut().unwrap() ^= 1,
            _ => drop(tensors.remove(last)),
        }
        write_single(&copy, &config, &tensors);
        let other = Checkpoint::open(&copy).unwrap();
        push_new(&mut seen, fingerprint(&other), change);
        let theirs = other.digests(Coverage::Sampled, 1, &mut |_, _| {}).unwrap();
        let differing = ours.differences(theirs.tensors(), 5);
        assert!(differing[0].starts_with(&name), "{change}: {differing:?}");
        fs::remove_dir_all(&copy).unwrap();
    }
}

/// Large matrices are sampled. A change of a run of bytes as long as a stratum is always seen; one bit is seen for
/// certain only by the digest of all bytes.
#[test]
fn samples_lie_in_every_part_of_a_large_matrix_and_full_coverage_sees_every_bit() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    let mut json: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
    let (hidden, width) = (512, 1024);
    json["hidden_size"] = json!(hidden);
    json["intermediate_size"] = json!(width);
    json["num_local_experts"] = json!(2);
    json["num_experts_per_tok"] = json!(1);
    drop(checkpoint);
    let bytes = hidden * width * 2;
    let tensors: Vec<Tensor> = ["w1", "w2", "w3"]
        .into_iter()
        .flat_map(|matrix| (0..2).map(move |expert| (expert, matrix)))
        .map(|(expert, matrix)| Tensor {
            name: format!("model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.weight"),
            dtype: DType::Bf16,
            shape: if matrix == "w2" { vec![hidden, width] } else { vec![width, hidden] },
            data: vec![0; bytes],
        })
        .collect();
    let write = |name: &str, change: &dyn Fn(&mut [u8])| {
        let mut tensors = tensors.clone();
        change(&mut tensors[3].data);
        let place = dir.path().join(name);
        write_single(&place, &json.to_string(), &tensors);
        Checkpoint::open(&place).unwrap()
    };
    let digest = |checkpoint: &Checkpoint, coverage| {
        checkpoint.digests(coverage, 2, &mut |_, _| {}).unwrap().fingerprint()
    };
    let plain = write("plain", &|_| {});
    assert_ne!(digest(&plain, Coverage::Sampled), digest(&plain, Coverage::Full));
    let part = bytes / 16;
    for idx in 0..16 {
        let changed = write("part", &|data| data[idx * part..(idx + 1) * part].fill(1));
        let what = format!("part {idx}");
        assert_ne!(
            digest(&changed, Coverage::Sampled),
            digest(&plain, Coverage::Sampled),
            "{what}"
        );
        fs::remove_dir_all(dir.path().join("part")).unwrap();
    }
    let bit = write("bit", &|data| data[12_345] ^= 4);
    assert_ne!(digest(&bit, Coverage::Full), digest(&plain, Coverage::Full));
}

#[test]
fn a_checkpoint_without_experts_has_no_fingerprint() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let mut tensors = all_tensors(&checkpoint);
    tensors.retain(|tensor| !is_expert(tensor));
    let copy = dir.path().join("copy");
    write_single(&copy, &config_text(dir.path()), &tensors);
    let checkpoint = Checkpoint::open(&copy).unwrap();
    assert!(!checkpoint.has_experts());
    let error = checkpoint.fingerprint().unwrap_err().to_string();
    assert!(error.contains("no routed experts"), "{error}");
    assert!(checkpoint.router(0).is_ok());
}

/// The value itself is part of the protocol between peers of different builds.
#[test]
fn the_shipped_model_keeps_its_fingerprint() {
    let checkpoint = Checkpoint::open(crate::support::data("tiny-moe")).unwrap();
    assert_eq!(fingerprint(&checkpoint).to_string(), TINY_MOE);
}

fn push_new(seen: &mut Vec<Fingerprint>, fingerprint: Fingerprint, change: &str) {
    assert!(!seen.contains(&fingerprint), "{change} does not change the fingerprint");
    seen.push(fingerprint);
}

const TINY_MOE: &str = "0ca8f131c0e3b2dc3c0a3a139dbe3dbe5fcea5e9e3cf5dda38564c24cb601d78";
