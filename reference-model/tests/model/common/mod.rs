//! Helpers that the model tests share. Each test binary uses a part of them.
#![allow(dead_code)]

pub mod naive;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use checkpoint::{Checkpoint, TensorFile};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use switchyard_reference_model::{BackendError, ExpertBackend};

/// A fresh seed, printed; `SWITCHYARD_SEED` replays one.
pub fn seed() -> u64 {
    let fresh = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(1, |d| d.as_nanos() as u64 & 0xffff_ffff)
    };
    let seed = std::env::var("SWITCHYARD_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(fresh);
    println!("seed {seed} (replay with SWITCHYARD_SEED={seed})");
    seed
}

pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../data").join(name)
}

pub fn tiny_moe() -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(data("tiny-moe")).unwrap())
}

/// One prompt of `golden.json`.
pub struct Golden {
    pub text: String,
    pub ids: Vec<u32>,
    /// Prompt first.
    pub greedy: Vec<u32>,
    /// Decoded `greedy`.
    pub text_out: String,
}

pub fn goldens() -> Vec<Golden> {
    let text = fs::read_to_string(data("tiny-moe/golden.json")).unwrap();
    let golden: Value = serde_json::from_str(&text).unwrap();
    let ids = |v: &Value| -> Vec<u32> { serde_json::from_value(v.clone()).unwrap() };
    let string = |v: &Value| v.as_str().unwrap().to_owned();
    let prompts = golden["prompts"].as_array().unwrap().iter();
    let prompts = prompts.map(|p| Golden {
        text: string(&p["text"]),
        ids: ids(&p["ids"]),
        greedy: ids(&p["greedy_f32"]),
        text_out: string(&p["text_out"]),
    });
    let prompts: Vec<Golden> = prompts.collect();
    assert_eq!(prompts.len(), 8);
    prompts
}

pub fn golden_tensors() -> TensorFile {
    TensorFile::open(data("tiny-moe/golden.safetensors")).unwrap()
}

/// Largest difference, and that relative to the largest expected magnitude.
pub fn difference(found: &[f32], expected: &[f32]) -> (f32, f32) {
    assert_eq!(found.len(), expected.len());
    assert!(found.iter().chain(expected).all(|v| v.is_finite()));
    let largest = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let difference = found.iter().zip(expected).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    (difference, difference / largest.max(f32::MIN_POSITIVE))
}

pub fn random_values(rng: &mut StdRng, num: usize, scale: f32) -> Vec<f32> {
    (0..num).map(|_| rng.random_range(-scale..scale)).collect()
}

/// A tensor to be written: name, dtype, shape, bytes.
pub struct Stored {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Stored {
    pub fn f32(name: impl Into<String>, shape: &[usize], values: &[f32]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { name: name.into(), dtype: "F32", shape: shape.to_vec(), bytes }
    }

    /// Random f32 values within `scale` around `center`.
    pub fn random(
        rng: &mut StdRng,
        name: impl Into<String>,
        shape: &[usize],
        center: f32,
        scale: f32,
    ) -> Self {
        let values = random_values(rng, shape.iter().product(), scale);
        let values: Vec<f32> = values.iter().map(|v| center + v).collect();
        Self::f32(name, shape, &values)
    }
}

/// Writes a checkpoint of one file, and opens it.
pub fn write_checkpoint(dir: &Path, config: &Value, tensors: &[Stored]) -> Arc<Checkpoint> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()],
        });
        assert!(header.insert(tensor.name.clone(), entry).is_none(), "{} twice", tensor.name);
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(dir.join("model.safetensors"), file).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    Arc::new(Checkpoint::open(dir).unwrap())
}

/// Passes calls on to `inner` until `calls_left` runs out, then fails.
pub struct Failing<B> {
    pub inner: B,
    pub calls_left: usize,
}

impl<B: ExpertBackend> ExpertBackend for Failing<B> {
    fn forward(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        if self.calls_left == 0 {
            return Err(BackendError::new(layer, "no live replica of expert 3"));
        }
        self.calls_left -= 1;
        self.inner.forward(layer, x, topk_idx, topk_weights, out)
    }
}
