//! Headers that deceive, and folders that are no complete checkpoint: each is refused with its name and the next step.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};
use switchyard_checkpoint::{Checkpoint, ModelConfig, Preset, TensorFile};

use crate::support::{config_text, tiny};

/// Writes a safetensors file with this header and so many bytes of data.
fn write(path: &Path, header: &str, data_bytes: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data_bytes).map(|byte| byte as u8));
    fs::write(path, bytes).unwrap();
}

#[test]
fn an_alias_stands_for_the_stored_tensor_and_for_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let header = r#"{"__metadata__": {"format": "pt", "lm_head.weight": "embed.weight", "embed.weight": "other",
        "stray": "nowhere"},
        "embed.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "other": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}}"#;
    write(&path, header, 12);
    let file = TensorFile::open(&path).unwrap();
    let bytes = |name: &str| file.tensor(name).map(|tensor| tensor.data.to_vec());
    assert_eq!(bytes("lm_head.weight").unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
    // A stored tensor is itself, whatever the metadata says.
    assert_eq!(bytes("embed.weight").unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(bytes("stray").is_err() && bytes("format").is_err());
}

#[test]
fn entries_that_deceive_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let entry = |name: &str, from: usize, to: usize| {
        let len = (to - from) / 4;
        format!(r#""{name}": {{"dtype": "F32", "shape": [{len}], "data_offsets": [{from}, {to}]}}"#)
    };
    for (entries, reason) in [
        ([entry("twin", 0, 8), entry("twin", 8, 16)], "tensor 'twin' is listed twice"),
        ([entry("a", 0, 12), entry("b", 8, 16)], "tensors 'a' and 'b' overlap"),
        ([entry("a", 0, 8), entry("b", 0, 8)], "tensors 'a' and 'b' overlap"),
        ([entry("a", 0, 4), entry("b", 8, 16)], "belong to no tensor"),
    ] {
        write(&path, &format!("{{{}}}", entries.join(",")), 16);
        let text = TensorFile::open(&path).unwrap_err().to_string();
        assert!(text.contains(reason) && text.contains("model.safetensors"), "{reason}: {text}");
    }
}

#[test]
fn folders_that_are_no_complete_checkpoint_say_the_next_step() {
    let (whole, _checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let config = config_text(whole.path());
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str, files: &[&str]| {
        let dir = root.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        for file in files {
            let path = dir.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, if *file == "config.json" { config.as_str() } else { "x" }).unwrap();
        }
        dir
    };
    let link = |name: &str, file: &str| {
        let dir = folder(name, &["config.json"]);
        symlink("../../blobs/missing", dir.join(file)).unwrap();
        dir
    };
    let stray = link("stray", "model.safetensors.index.json");
    fs::copy(whole.path().join("model.safetensors"), stray.join("model.safetensors")).unwrap();
    let cached = "models--org--name/snapshots/0123/config.json";
    for (dir, found, remedy) in [
        (link("dangling", "model.safetensors"), "a link model.safetensors", "finish the download"),
        (stray, "model.safetensors.index.json", ""),
        (folder("part", &["config.json", "model.safetensors.incomplete"]), "incomplete", "finish"),
        (
            folder("shards", &["config.json", "model-00001-of-00002.safetensors"]),
            "model.safetensors.index.json is missing",
            "download model.safetensors.index.json",
        ),
        (folder("bin", &["config.json", "pytorch_model.bin"]), "PyTorch weights", "convert"),
        (
            folder("gguf", &["config.json", "model-Q4.gguf"]),
            "GGUF file model-Q4.gguf",
            "safetensors",
        ),
        (folder("bare-gguf", &["model-Q4.gguf"]), "GGUF", "safetensors"),
        (folder("empty", &[]), "has no config.json", "as it was downloaded"),
        (folder("no-weights", &["config.json"]), "neither", "download the weights"),
        (folder("cache", &[cached]), "the Hugging Face cache", "snapshots/0123"),
        (root.path().join("cache/models--org--name"), "the Hugging Face cache", "snapshots/0123"),
        (root.path().join("cache").join(cached), "is a file", "snapshots/0123"),
        (root.path().join("nowhere"), "does not exist", "give the folder"),
        ("some-org/some-name".into(), "Hugging Face Hub", "hf download some-org/some-name"),
    ] {
        let text = Checkpoint::open(&dir).unwrap_err().to_string();
        assert!(text.contains(found) && text.contains(remedy), "{}: {text}", dir.display());
        assert!(!text.contains('\n'), "{text}");
    }
}

#[test]
fn settings_of_arithmetic_that_a_family_lacks_are_refused_and_contradictions_named() {
    let (dir, _checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let base: Value = serde_json::from_str(&config_text(dir.path())).unwrap();
    let read = |changes: Value| {
        let mut config = base.clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        ModelConfig::from_json(&config.to_string())
    };
    for key in ["swiglu_limit", "swiglu_alpha"] {
        let text = read(json!({ key: 7.0 })).unwrap_err().to_string();
        assert!(text.contains(key), "{text}");
        read(json!({ key: null })).unwrap();
    }
    // A key of other families that asks for other layers than the family's own keys.
    let types = |first: &str| json!({"mlp_layer_types": [first], "num_hidden_layers": 1});
    let text = read(types("dense")).unwrap_err().to_string();
    assert!(text.contains("mlp_layer_types") && text.contains("Qwen3Moe"), "{text}");
    read(types("sparse")).unwrap();
    let text = read(json!({"hidden_act": "sine"})).unwrap_err().to_string();
    assert!(text.contains("hidden_act") && text.contains("sine"), "{text}");
}
