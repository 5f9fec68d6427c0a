//! A checkpoint directory: configuration, index, shards.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::config::{ConfigError, ModelConfig};
use crate::shard::{TensorFile, TensorFileError};
use crate::tensor::{TensorError, TensorView};

/// A model checkpoint: its configuration and its tensors, mapped into memory.
///
/// Opening reads headers only. The system pages in weights when they are read. Share a checkpoint among
/// threads with `Arc`.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    shards: Vec<TensorFile>,
    /// Tensor name to index in `shards`.
    tensors: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens a directory with `config.json` and either `model.safetensors` or
    /// `model.safetensors.index.json` with its shards, and checks every shard's header against
    /// its length and the index.
    ///
    /// If `generation_config.json` is present, its `eos_token_id` replaces that of the configuration, as in
    /// transformers.
    pub fn open(dir: impl AsRef<Path>) -> Result<Checkpoint, OpenError> {
        let dir = dir.as_ref();
        let config_path = dir.join(CONFIG_FILE);
        let mut config = ModelConfig::from_json(&read_text(&config_path)?)
            .map_err(|source| OpenError::Config { path: config_path, source })?;
        if let Some(eos_ids) = generation_eos(&dir.join(GENERATION_FILE))? {
            config.eos_ids = eos_ids;
        }
        let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
        let (shards, tensors) = if single.exists() {
            let shard = TensorFile::open(single)?;
            let tensors = shard.names().map(|name| (name.to_owned(), 0)).collect();
            (vec![shard], tensors)
        } else if index.exists() {
            open_sharded(dir, &index)?
        } else {
            return Err(OpenError::NoWeights { dir: dir.to_owned() });
        };
        Ok(Checkpoint { dir: dir.to_owned(), config, shards, tensors })
    }

    /// The directory of the checkpoint.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns true if a tensor of that name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of that name, or [`TensorError::NotFound`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, TensorError> {
        match self.tensors.get(name) {
            Some(&shard_idx) => self.shards[shard_idx].tensor(name),
            None => Err(TensorError::NotFound {
                name: name.to_owned(),
                location: self.dir.display().to_string(),
            }),
        }
    }

    /// Bytes of all shards together.
    pub fn len_bytes(&self) -> u64 {
        self.shards.iter().map(TensorFile::len_bytes).sum()
    }

    /// Number of weight files.
    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }
}

/// Error of opening a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum OpenError {
    /// A file other than the weights cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The configuration is invalid.
    #[error("{}: {source}", path.display())]
    Config { path: PathBuf, source: ConfigError },
    /// The directory has no weights.
    #[error("{} has neither {SINGLE_FILE} nor {INDEX_FILE}", dir.display())]
    NoWeights { dir: PathBuf },
    /// The index is invalid.
    #[error("{} is not a valid index: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    /// The index names a missing shard.
    #[error(
        "shard {} is missing; the index expects {num_tensors} tensors in it; download it",
        path.display()
    )]
    MissingShard { path: PathBuf, num_tensors: usize },
    /// The index places a tensor in a shard that does not contain it.
    #[error("tensor '{tensor}' is not in shard {}, where the index places it", path.display())]
    NotInShard { tensor: String, path: PathBuf },
    /// A shard is invalid.
    #[error(transparent)]
    Shard(#[from] TensorFileError),
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Generation {
    eos_token_id: Option<serde_json::Value>,
}

type Shards = (Vec<TensorFile>, BTreeMap<String, usize>);

fn open_sharded(dir: &Path, index_path: &Path) -> Result<Shards, OpenError> {
    let index_error = |reason: String| OpenError::Index { path: index_path.to_owned(), reason };
    let index: Index =
        serde_json::from_str(&read_text(index_path)?).map_err(|e| index_error(e.to_string()))?;

    let mut tensors_per_file: BTreeMap<&str, usize> = BTreeMap::new();
    for file in index.weight_map.values() {
        *tensors_per_file.entry(file).or_default() += 1;
    }
    let mut shards = Vec::with_capacity(tensors_per_file.len());
    let mut shard_idx: HashMap<String, usize> = HashMap::new();
    for (file, num_tensors) in tensors_per_file {
        // The index comes with the download, so its paths must stay in the directory.
        let mut parts = Path::new(file).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(index_error(format!("'{file}' is not a plain file name")));
        }
        let path = dir.join(file);
        shards.push(match TensorFile::open(&path) {
            Err(TensorFileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Err(OpenError::MissingShard { path, num_tensors });
            }
            opened => opened?,
        });
        shard_idx.insert(file.to_owned(), shards.len() - 1);
    }

    let mut tensors = BTreeMap::new();
    for (tensor, file) in index.weight_map {
        let idx = shard_idx[&file];
        if !shards[idx].contains(&tensor) {
            return Err(OpenError::NotInShard { tensor, path: dir.join(file) });
        }
        tensors.insert(tensor, idx);
    }
    Ok((shards, tensors))
}

/// The end tokens of `generation_config.json`; `None` if there is no such file or no such field.
fn generation_eos(path: &Path) -> Result<Option<Vec<u32>>, OpenError> {
    if !path.exists() {
        return Ok(None);
    }
    let config_error =
        |source| OpenError::Config { path: path.to_owned(), source: ConfigError::Json(source) };
    let generation: Generation = serde_json::from_str(&read_text(path)?).map_err(config_error)?;
    match generation.eos_token_id {
        None | Some(serde_json::Value::Null) => Ok(None),
        Some(value @ serde_json::Value::Array(_)) => {
            serde_json::from_value(value).map(Some).map_err(config_error)
        }
        Some(value) => serde_json::from_value(value).map(|id| Some(vec![id])).map_err(config_error),
    }
}

fn read_text(path: &Path) -> Result<String, OpenError> {
    fs::read_to_string(path).map_err(|source| OpenError::Read { path: path.to_owned(), source })
}

pub(crate) const CONFIG_FILE: &str = "config.json";
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
const GENERATION_FILE: &str = "generation_config.json";
