//! Files for the tests, written by the safetensors crate.

use std::fs;
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use switchyard_checkpoint::{Checkpoint, DType, MakeOptions, Preset, make_checkpoint};
use tempfile::TempDir;

/// A tensor with its bytes, owned.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// A fresh tiny checkpoint of that layout in a directory of its own.
pub fn tiny(preset: Preset, num_layers: u32) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    make_checkpoint(dir.path(), &MakeOptions::new(preset, num_layers), &mut |_, _| {}).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

/// Every tensor, copied out.
pub fn all_tensors(checkpoint: &Checkpoint) -> Vec<Tensor> {
    let copy = |name: &str| {
        let view = checkpoint.tensor(name).unwrap();
        Tensor {
            name: name.to_owned(),
            dtype: view.dtype,
            shape: view.shape.to_vec(),
            data: view.data.to_vec(),
        }
    };
    checkpoint.names().map(copy).collect()
}

/// Writes a directory with that configuration and all tensors in one file.
pub fn write_single(dir: &Path, config: &str, tensors: &[Tensor]) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
    write_file(&dir.join("model.safetensors"), tensors);
}

/// Writes a directory with the tensors dealt out to `num_shards` files, and an index.
pub fn write_sharded(dir: &Path, config: &str, tensors: &[Tensor], num_shards: usize) {
    fs::create_dir_all(dir).unwrap();
    fs::write(dir.join("config.json"), config).unwrap();
    let mut map = serde_json::Map::new();
    for shard in 0..num_shards {
        let file = format!("part-{shard}.safetensors");
        let part: Vec<Tensor> = tensors.iter().skip(shard).step_by(num_shards).cloned().collect();
        map.extend(part.iter().map(|t| (t.name.clone(), file.clone().into())));
        write_file(&dir.join(file), &part);
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

pub fn write_file(path: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|t| {
        let dtype = match t.dtype {
            DType::Bf16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            DType::F32 => Dtype::F32,
            DType::F8E4m3 => Dtype::F8_E4M3,
            DType::I32 => Dtype::I32,
            DType::I64 => Dtype::I64,
            other => panic!("no test writes {other}"),
        };
        (t.name.as_str(), TensorView::new(dtype, t.shape.clone(), &t.data).unwrap())
    });
    serialize_to_file(views, None, path).unwrap();
}

pub fn config_text(dir: &Path) -> String {
    fs::read_to_string(dir.join("config.json")).unwrap()
}

/// Folder of the repository's test data.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name)
}

/// A generator whose seed is printed, and taken from `SWITCHYARD_TEST_SEED` if that is set.
pub fn rng() -> StdRng {
    let seed = match std::env::var("SWITCHYARD_TEST_SEED") {
        Ok(text) => text.parse().expect("SWITCHYARD_TEST_SEED is a number"),
        Err(_) => rand::rng().random::<u64>(),
    };
    println!("SWITCHYARD_TEST_SEED={seed}");
    StdRng::seed_from_u64(seed)
}
