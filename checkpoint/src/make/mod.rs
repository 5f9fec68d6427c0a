//! Writes checkpoints of seeded random weights in the layout of a real model.

mod fill;
mod presets;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::dtype::DType;
use crate::open::{CONFIG_FILE, INDEX_FILE, SINGLE_FILE};
use fill::{Fill, Filler};
pub use presets::{ParsePresetError, Preset};

/// Options of [`make_checkpoint`].
#[derive(Debug, Clone)]
pub struct MakeOptions {
    /// Model that provides shapes, dtypes and tensor names.
    pub preset: Preset,
    /// Decoder layers, from 1 to the model's number of layers. A DeepSeek-V3 of N layers starts with
    /// min(3, N − 1) dense layers instead of 3, so that at least one layer has experts.
    pub num_layers: u32,
    /// The same seed gives the same bytes.
    pub seed: u64,
    /// Replaces an existing checkpoint. Without it, a directory that is not empty is refused. Files that are
    /// not part of a checkpoint are never removed.
    pub overwrite: bool,
    /// Upper limit of one weight file. A tensor larger than that gets a file of its own.
    pub max_shard_bytes: u64,
    /// Writes no weights. The files have the right names, shapes and sizes, and holes instead of data. Holes
    /// use no disk space and read as zeros. For programs that generate their own weights.
    pub shapes_only: bool,
}

impl MakeOptions {
    /// Seed 0, no overwriting, files of up to 5 GB as on the Hugging Face Hub.
    pub fn new(preset: Preset, num_layers: u32) -> MakeOptions {
        let max_shard_bytes = 5_000_000_000;
        let shapes_only = false;
        MakeOptions { preset, num_layers, seed: 0, overwrite: false, max_shard_bytes, shapes_only }
    }
}

/// Summary of a written checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MakeSummary {
    /// Tensors in all files.
    pub num_tensors: usize,
    /// Weight files.
    pub num_shards: usize,
    /// Bytes of tensor data.
    pub tensor_bytes: u64,
}

/// Writes a checkpoint of seeded random weights to `dir`. Creates `dir` if it does not exist.
///
/// The outputs of each matrix have about the variance of its inputs, so activations stay finite through any
/// number of layers. Weights are generated a few mebibytes at a time. `progress` is called with the tensor
/// bytes written so far and in total. `config.json` is written last, so the result of an interrupted run
/// cannot be opened.
pub fn make_checkpoint(
    dir: impl AsRef<Path>,
    options: &MakeOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<MakeSummary, MakeError> {
    let dir = dir.as_ref();
    let plan = plan(options.preset, options.num_layers)?;
    let old_files = prepare_dir(dir, options.overwrite)?;
    let tensor_bytes: u64 = plan.iter().map(TensorPlan::len_bytes).sum();
    if !options.shapes_only {
        check_free_space(dir, tensor_bytes, &old_files)?;
    }
    // Remove the configuration first and write it last: without it, the directory is not a checkpoint.
    old_files.iter().rev().try_for_each(|f| fs::remove_file(f).map_err(write_error(f)))?;

    let shards = split(plan, options.max_shard_bytes);
    let mut writer = ShardWriter {
        seed: options.seed,
        shapes_only: options.shapes_only,
        done: 0,
        total: tensor_bytes,
        buffer: Vec::new(),
        progress,
    };
    let mut weight_map = Map::new();
    let mut num_tensors = 0;
    for (idx, shard) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => SINGLE_FILE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", idx + 1),
        };
        writer.write(&dir.join(&file), shard)?;
        num_tensors += shard.len();
        weight_map.extend(shard.iter().map(|t| (t.name.clone(), Value::from(file.clone()))));
    }
    if shards.len() > 1 {
        let index = json!({ "metadata": { "total_size": tensor_bytes }, "weight_map": weight_map });
        write_json(&dir.join(INDEX_FILE), &index)?;
    }
    write_json(&dir.join(CONFIG_FILE), &options.preset.config_json(options.num_layers))?;
    Ok(MakeSummary { num_tensors, num_shards: shards.len(), tensor_bytes })
}

/// Bytes of tensor data in a checkpoint of `num_layers` layers.
pub fn planned_bytes(preset: Preset, num_layers: u32) -> Result<u64, MakeError> {
    Ok(plan(preset, num_layers)?.iter().map(TensorPlan::len_bytes).sum())
}

/// Error of [`make_checkpoint`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum MakeError {
    /// The number of layers is out of range.
    #[error("{found} layers requested, but {preset} can have 1 to {max}")]
    Layers { found: u32, preset: Preset, max: u32 },
    /// The directory is not empty.
    #[error("{} is not empty: name another directory, or allow overwriting", dir.display())]
    NotEmpty { dir: PathBuf },
    /// The disk is too full.
    #[error(
        "{} has {found_bytes} bytes free, but {expected_bytes} are needed: free some, or write fewer layers",
        dir.display()
    )]
    NoSpace { dir: PathBuf, found_bytes: u64, expected_bytes: u64 },
    /// Creating, writing or removing failed.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// A tensor to be written.
struct TensorPlan {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    fill: Fill,
}

impl TensorPlan {
    fn len_bytes(&self) -> u64 {
        let elements: u64 = self.shape.iter().map(|d| *d as u64).product();
        elements * self.dtype.size_bytes().unwrap_or(0) as u64
    }
}

fn plan(preset: Preset, num_layers: u32) -> Result<Vec<TensorPlan>, MakeError> {
    let max = preset.max_layers();
    if num_layers == 0 || num_layers > max {
        return Err(MakeError::Layers { found: num_layers, preset, max });
    }
    Ok(preset.tensors(num_layers))
}

/// Creates the directory. Returns the files of the old checkpoint, which is to be replaced.
fn prepare_dir(dir: &Path, overwrite: bool) -> Result<Vec<PathBuf>, MakeError> {
    fs::create_dir_all(dir).map_err(write_error(dir))?;
    let mut old_files = Vec::new();
    for entry in fs::read_dir(dir).map_err(write_error(dir))? {
        if !overwrite {
            return Err(MakeError::NotEmpty { dir: dir.to_owned() });
        }
        let path = entry.map_err(write_error(dir))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let is_weights = name.starts_with("model") && name.ends_with(".safetensors");
        if is_weights || name == INDEX_FILE || name == CONFIG_FILE {
            old_files.push(path);
        }
    }
    old_files.sort_by_key(|path| path.ends_with(CONFIG_FILE));
    Ok(old_files)
}

fn check_free_space(dir: &Path, tensor_bytes: u64, old: &[PathBuf]) -> Result<(), MakeError> {
    let stat = rustix::fs::statvfs(dir).map_err(|e| write_error(dir)(e.into()))?;
    let freed: u64 = old.iter().filter_map(|f| Some(f.metadata().ok()?.len())).sum();
    let found_bytes = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_add(freed);
    // Headers and index: a few hundred bytes per tensor, far less than this margin.
    let expected_bytes = tensor_bytes + tensor_bytes / 64 + (1 << 20);
    if found_bytes < expected_bytes {
        return Err(MakeError::NoSpace { dir: dir.to_owned(), found_bytes, expected_bytes });
    }
    Ok(())
}

/// Fills one file after the other, in the order of the plan.
fn split(plan: Vec<TensorPlan>, max_shard_bytes: u64) -> Vec<Vec<TensorPlan>> {
    let mut shards: Vec<Vec<TensorPlan>> = Vec::new();
    let mut shard_bytes = 0;
    for tensor in plan {
        let len = tensor.len_bytes();
        match shards.last_mut() {
            Some(shard) if shard_bytes + len <= max_shard_bytes => {
                shard_bytes += len;
                shard.push(tensor);
            }
            _ => {
                shard_bytes = len;
                shards.push(vec![tensor]);
            }
        }
    }
    shards
}

struct ShardWriter<'a> {
    seed: u64,
    shapes_only: bool,
    done: u64,
    total: u64,
    buffer: Vec<u8>,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl ShardWriter<'_> {
    fn write(&mut self, path: &Path, shard: &[TensorPlan]) -> Result<(), MakeError> {
        let mut file = File::create_new(path).map_err(write_error(path))?;
        let head = header(shard);
        file.write_all(&head).map_err(write_error(path))?;
        if self.shapes_only {
            let data_bytes: u64 = shard.iter().map(TensorPlan::len_bytes).sum();
            self.done += data_bytes;
            return file.set_len(head.len() as u64 + data_bytes).map_err(write_error(path));
        }
        self.buffer.resize(CHUNK_BYTES, 0);
        for tensor in shard {
            let mut filler = Filler::new(self.seed, &tensor.name, tensor.dtype, tensor.fill);
            let mut left = tensor.len_bytes();
            while left > 0 {
                let chunk = &mut self.buffer[..left.min(CHUNK_BYTES as u64) as usize];
                filler.fill(chunk);
                file.write_all(chunk).map_err(write_error(path))?;
                left -= chunk.len() as u64;
                self.done += chunk.len() as u64;
                (self.progress)(self.done, self.total);
            }
        }
        Ok(())
    }
}

/// A safetensors header: its length as a 64-bit word, then JSON padded to eight bytes.
fn header(shard: &[TensorPlan]) -> Vec<u8> {
    let mut entries = Map::new();
    entries.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut start = 0;
    for tensor in shard {
        let end = start + tensor.len_bytes();
        let (dtype, shape) = (tensor.dtype.name(), &tensor.shape);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        entries.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut text = Value::Object(entries).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(text.as_bytes());
    header
}

fn write_json(path: &Path, value: &Value) -> Result<(), MakeError> {
    fs::write(path, format!("{value:#}\n")).map_err(write_error(path))
}

fn write_error(path: &Path) -> impl FnOnce(io::Error) -> MakeError {
    let path = path.to_owned();
    move |source| MakeError::Write { path, source }
}

/// Bytes per write: large enough for full disk speed, small enough for the second-level cache.
const CHUNK_BYTES: usize = 1 << 20;
