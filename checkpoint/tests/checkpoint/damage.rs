//! Damaged checkpoints: each causes an error that names the damage, and never a panic.

use std::fs;
use std::path::Path;

use rand::RngExt;
use rand::rngs::StdRng;
use switchyard_checkpoint::{
    Checkpoint, DType, OpenError, Preset, TensorError, TensorFile, TensorFileError,
};

use crate::support::{
    Tensor, all_tensors, config_text, rng, tiny, write_file, write_sharded, write_single,
};

#[test]
fn a_truncated_shard_is_named_with_found_and_expected_bytes() {
    let (dir, checkpoint) = tiny(Preset::TinyMixtral, 1);
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    drop(checkpoint);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let cuts = [
        (0, 8),
        (7, 8),
        (8, header),
        (header - 1, header),
        (header, whole.len()),
        (whole.len() - 1, whole.len()),
    ];
    for (len, expected) in cuts {
        fs::remove_file(&path).unwrap();
        fs::write(&path, &whole[..len]).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        let OpenError::Shard(TensorFileError::Truncated {
            path: named,
            found_bytes,
            expected_bytes,
        }) = &error
        else {
            panic!("{len} bytes: {error}");
        };
        assert_eq!((*found_bytes, *expected_bytes), (len as u64, expected as u64));
        assert_eq!(named, &path);
        let text = error.to_string();
        assert!(text.contains("model.safetensors is truncated"), "{text}");
        assert!(text.contains(&format!("{len} bytes found, {expected} expected")), "{text}");
    }
    fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    let text = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("is too long"), "{text}");
}

#[test]
fn a_missing_shard_is_named() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let tensors = all_tensors(&checkpoint);
    let sharded = dir.path().join("sharded");
    write_sharded(&sharded, &config_text(dir.path()), &tensors, 3);
    assert_eq!(Checkpoint::open(&sharded).unwrap().num_shards(), 3);
    fs::remove_file(sharded.join("part-1.safetensors")).unwrap();
    let error = Checkpoint::open(&sharded).unwrap_err();
    let expected = tensors.len().div_ceil(3);
    assert!(
        matches!(&error, OpenError::MissingShard { path, num_tensors, .. }
            if path.ends_with("part-1.safetensors") && num_tensors.abs_diff(expected) <= 1),
        "{error}"
    );
}

#[test]
fn an_expert_that_the_index_places_wrongly_is_refused_and_another_tensor_is_a_warning() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let sharded = dir.path().join("sharded");
    write_sharded(&sharded, &config_text(dir.path()), &all_tensors(&checkpoint), 2);
    let path = sharded.join("model.safetensors.index.json");
    let index = fs::read_to_string(&path).unwrap();
    fs::write(&path, index.replace("model.norm.weight", "model.norm.height")).unwrap();
    let opened = Checkpoint::open(&sharded).unwrap();
    let text = opened.warnings().join("\n");
    assert!(text.contains("'model.norm.height'") && text.contains("part-"), "{text}");

    let wrong = index.replace("experts.3.up_proj.weight", "experts.3.up_proj.height");
    fs::write(&path, wrong).unwrap();
    let error = Checkpoint::open(&sharded).unwrap_err();
    assert!(matches!(error, OpenError::NotInShard { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("experts.3.up_proj.height'") && text.contains("part-"), "{text}");
    assert!(Checkpoint::open_without_experts(&sharded).is_ok());
}

#[test]
fn the_index_decides_and_a_file_that_it_does_not_list_is_named() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let sharded = dir.path().join("sharded");
    let tensors = all_tensors(&checkpoint);
    write_sharded(&sharded, &config_text(dir.path()), &tensors, 2);
    let mut stray = tensors.clone();
    stray.iter_mut().for_each(|tensor| tensor.data.fill(1));
    write_file(&sharded.join("model.safetensors"), &stray);
    let opened = Checkpoint::open(&sharded).unwrap();
    assert_eq!(all_tensors(&opened), tensors);
    let text = opened.warnings().join("\n");
    assert!(text.contains("model.safetensors is not used") && text.contains("index"), "{text}");
}

#[test]
fn an_index_cannot_lead_out_of_the_directory() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    let sharded = dir.path().join("sharded");
    write_sharded(&sharded, &config_text(dir.path()), &all_tensors(&checkpoint), 2);
    let path = sharded.join("model.safetensors.index.json");
    let index = fs::read_to_string(&path).unwrap();
    for file in ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", ""] {
        fs::write(&path, index.replace("part-1.safetensors", file)).unwrap();
        let error = Checkpoint::open(&sharded).unwrap_err();
        assert!(matches!(error, OpenError::Index { .. }), "{file}: {error}");
        assert!(error.to_string().contains("not a plain file name"), "{file}: {error}");
    }
}

#[test]
fn what_is_absent_is_said_to_be_absent() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 2);
    let text = checkpoint.tensor("model.nothing").unwrap_err().to_string();
    assert!(text.contains("'model.nothing'"), "{text}");
    assert!(text.contains(&dir.path().display().to_string()), "{text}");
    let text = checkpoint.expert(2, 0).unwrap_err().to_string();
    assert!(text.contains("layer 2") && text.contains("0-1"), "{text}");
    let text = checkpoint.expert(0, 8).unwrap_err().to_string();
    assert!(text.contains("expert 8") && text.contains("0 to 7"), "{text}");

    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, OpenError::NotACheckpoint { .. }), "{error}");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    let text = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("has no config.json"), "{text}");
}

#[test]
fn a_git_lfs_pointer_is_recognised() {
    let (dir, checkpoint) = tiny(Preset::TinyQwen3Moe, 1);
    drop(checkpoint);
    let path = dir.path().join("model.safetensors");
    fs::remove_file(&path).unwrap();
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        .unwrap();
    let text = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(text.contains("git lfs pull"), "{text}");
}

#[test]
fn wrong_shapes_and_dtypes_are_named_with_found_and_expected() {
    let (dir, checkpoint) = tiny(Preset::TinyDeepseekV3, 1);
    let whole = all_tensors(&checkpoint);
    let config = config_text(dir.path());
    // Hidden 160, width 136: the name, the wrong shape, the right one.
    let expert = "model.layers.0.mlp.experts.5";
    let cases: [(String, Vec<usize>, &[usize]); 4] = [
        (format!("{expert}.gate_proj.weight"), vec![160, 136], &[136, 160]),
        (format!("{expert}.down_proj.weight"), vec![21760], &[160, 136]),
        (format!("{expert}.up_proj.weight_scale_inv"), vec![4, 1], &[2, 2]),
        (format!("{expert}.down_proj.weight_scale_inv"), vec![4], &[2, 2]),
    ];
    for (case_idx, (name, found, expected)) in cases.iter().enumerate() {
        let mut tensors = whole.clone();
        tensors.iter_mut().find(|t| &t.name == name).unwrap().shape = found.clone();
        let bad = dir.path().join(format!("bad-{case_idx}"));
        write_single(&bad, &config, &tensors);
        let bad = Checkpoint::open(&bad).unwrap();
        assert!(bad.expert(0, 4).is_ok());
        assert_eq!(
            bad.check_moe().unwrap_err().to_string(),
            bad.expert(0, 5).unwrap_err().to_string()
        );
        let error = bad.expert(0, 5).unwrap_err();
        let is_scale = name.ends_with("_scale_inv");
        assert!(
            matches!(&error, TensorError::Shape { name: n, found: f, expected: e }
                if n == name && f == found && e == expected && !is_scale)
                || matches!(&error, TensorError::Format { name: n, .. } if n == name && is_scale),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(&format!("{expected:?}")), "{text}");
        assert!(text.contains(&format!("{found:?}")), "{text}");
    }

    // A quantised weight without its scales, and a router of integers.
    let mut tensors = whole.clone();
    tensors.retain(|t| t.name != format!("{expert}.gate_proj.weight_scale_inv"));
    let gate = tensors.iter_mut().find(|t| t.name == "model.layers.0.mlp.gate.weight").unwrap();
    (gate.dtype, gate.data) = (DType::I32, vec![0; 8 * 160 * 4]);
    let bad = dir.path().join("bad");
    write_single(&bad, &config, &tensors);
    let bad = Checkpoint::open(&bad).unwrap();
    let text = bad.expert(0, 5).unwrap_err().to_string();
    assert!(text.contains("gate_proj.weight_scale_inv' is not in"), "{text}");
    let text = bad.router(0).unwrap_err().to_string();
    assert!(text.contains("dtype I32, expected BF16 or F16 or F32"), "{text}");
}

#[test]
fn integers_are_read_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let idx = |name: &str, values: &[i64]| Tensor {
        name: name.to_owned(),
        dtype: DType::I64,
        shape: vec![values.len()],
        data: values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    let narrow = Tensor {
        name: "narrow".into(),
        dtype: DType::I32,
        shape: vec![2, 1],
        data: [-1i32, 7].iter().flat_map(|v| v.to_le_bytes()).collect(),
    };
    write_file(&path, &[idx("wide", &[-1, 127]), idx("too-wide", &[1, 1 << 40]), narrow]);
    let file = TensorFile::open(&path).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), ["narrow", "too-wide", "wide"]);
    assert_eq!(file.tensor("wide").unwrap().to_i32().unwrap(), [-1, 127]);
    assert_eq!(file.tensor("narrow").unwrap().to_i32().unwrap(), [-1, 7]);
    let text = file.tensor("too-wide").unwrap().to_i32().unwrap_err().to_string();
    assert!(text.contains("'too-wide' holds 1099511627776"), "{text}");
    assert!(file.tensor("wide").unwrap().to_f32().is_err());
}

/// Mutations of a small file. Some stay valid, most do not. No mutation may cause a panic, and a file that
/// opens must be readable to the last byte.
#[test]
fn mutated_headers_never_panic() {
    let mut rng = rng();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let tensor = |name: &str, dtype, shape: &[usize], len: usize| Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        data: vec![0x5a; len],
    };
    let tensors = [
        tensor("a.weight", DType::Bf16, &[3, 4], 24),
        tensor("b.weight", DType::F8E4m3, &[5, 7], 35),
        tensor("b.weight_scale_inv", DType::F32, &[1, 1], 4),
        tensor("c", DType::I64, &[2], 16),
        tensor("empty", DType::F16, &[0, 9], 0),
    ];
    write_file(&path, &tensors);
    let whole = fs::read(&path).unwrap();
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..4000 {
        fs::remove_file(&path).unwrap();
        fs::write(&path, mutate(&whole, &mut rng)).unwrap();
        match TensorFile::open(&path) {
            Ok(file) => {
                opened += 1;
                for name in file.names() {
                    let view = file.tensor(name).unwrap();
                    std::hint::black_box(view.data.iter().fold(0u8, |sum, b| sum ^ b));
                    let _ = (view.to_f32(), view.to_i32());
                }
            }
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("model.safetensors"), "{error}");
            }
        }
    }
    println!("{opened} opened, {refused} refused");
    assert!(opened > 0 && refused > 0, "the mutations are all of one kind");
}

/// The same for the two JSON files.
#[test]
fn mutated_configurations_and_indices_never_panic() {
    let mut rng = rng();
    let (dir, checkpoint) = tiny(Preset::TinyDeepseekV3, 1);
    let sharded = dir.path().join("sharded");
    // Two shards of a few tensors: what matters here are the files beside them.
    let few: Vec<Tensor> = all_tensors(&checkpoint)
        .into_iter()
        .filter(|t| !t.name.contains("experts") || t.name.contains("experts.0."))
        .collect();
    write_sharded(&sharded, &config_text(dir.path()), &few, 2);
    // Nearly every change to an index breaks a tensor's name, so that it may never open.
    for (file, least) in [("config.json", 1), ("model.safetensors.index.json", 0)] {
        let path = sharded.join(file);
        let whole = fs::read(&path).unwrap();
        let mut opened = 0;
        for _ in 0..1000 {
            fs::write(&path, mutate(&whole, &mut rng)).unwrap();
            opened += usize::from(try_everything(&sharded));
        }
        println!("{file}: {opened} of 1000 opened");
        assert!((least..1000).contains(&opened), "the mutations are all of one kind");
        fs::write(&path, &whole).unwrap();
    }
    assert!(Checkpoint::open(&sharded).is_ok());
}

fn try_everything(dir: &Path) -> bool {
    let Ok(checkpoint) = Checkpoint::open(dir) else { return false };
    for layer in checkpoint.config().moe_layers().into_iter().take(3) {
        let _ = (checkpoint.router(layer), checkpoint.shared_expert(layer));
        if let Ok(expert) = checkpoint.expert(layer, 0) {
            let _ = expert.matrices().map(|m| m.to_f32()).collect::<Vec<_>>();
        }
    }
    let _ = (checkpoint.check_moe(), checkpoint.fingerprint());
    true
}

fn mutate(whole: &[u8], rng: &mut StdRng) -> Vec<u8> {
    let mut bytes = whole.to_vec();
    for _ in 0..rng.random_range(1..4) {
        if bytes.is_empty() {
            break;
        }
        let at = rng.random_range(0..bytes.len());
        match rng.random_range(0..7) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            2 => bytes.truncate(at),
            3 => drop(bytes.remove(at)),
            4 => bytes.insert(at, b"0123456789,:[]{}\"-"[rng.random_range(0..18)]),
            // Digits make numbers that are valid but wrong.
            5 => {
                let digits: Vec<usize> =
                    (0..bytes.len()).filter(|i| bytes[*i].is_ascii_digit()).collect();
                if let Some(&digit) = digits.get(rng.random_range(0..digits.len().max(1))) {
                    bytes[digit] = rng.random_range(b'0'..=b'9');
                }
            }
            _ => {
                let from = rng.random_range(0..bytes.len());
                let len = rng.random_range(0..64).min(bytes.len() - from.max(at));
                bytes.copy_within(from..from + len, at);
            }
        }
    }
    bytes
}
