//! A checkpoint directory: configuration, index, shards.

mod folder;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::ops::Bound;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::config::keys::Keys;
use crate::config::{ConfigError, ModelConfig, token_ids};
use crate::layout::{Layout, ROOTS};
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
    layout: Option<Layout>,
    warnings: Vec<String>,
}

/// The tensors of the index that must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    /// Those of routed experts in layers of the model.
    Experts,
    /// None: the program says what it misses when it reads it.
    Nothing,
}

impl Checkpoint {
    /// Opens a directory with `config.json` and either `model.safetensors.index.json` with its shards or
    /// `model.safetensors`, and checks every shard's header against its length and the index. With an index, only the
    /// files that it lists count.
    ///
    /// If `generation_config.json` is present, its `eos_token_id` replaces that of the configuration, as in
    /// transformers.
    ///
    /// # Errors
    /// [`OpenError`] that names the file and the next step. A tensor that no routed expert needs may be missing, see
    /// [`warnings`](Self::warnings).
    pub fn open(dir: impl AsRef<Path>) -> Result<Checkpoint, OpenError> {
        Self::open_with(dir.as_ref(), Needs::Experts)
    }

    /// As [`open`](Self::open) for a program that holds no experts: shards may be missing, those with experts, too.
    ///
    /// # Errors
    /// As for `open`, apart from missing shards and tensors.
    pub fn open_without_experts(dir: impl AsRef<Path>) -> Result<Checkpoint, OpenError> {
        Self::open_with(dir.as_ref(), Needs::Nothing)
    }

    /// Opens the configuration of a directory, and no weights: for a program that gets the experts elsewhere. The
    /// directory needs no weight files.
    ///
    /// # Errors
    /// As for `open`, apart from weight files.
    pub fn open_without_weights(dir: impl AsRef<Path>) -> Result<Checkpoint, OpenError> {
        let dir = dir.as_ref();
        folder::check(dir)?;
        let path = dir.join(CONFIG_FILE);
        let config = ModelConfig::from_json(&read_text(&path)?)
            .map_err(|source| OpenError::Config { path, source })?;
        Ok(Checkpoint {
            dir: dir.to_owned(),
            config,
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            layout: None,
            warnings: Vec::new(),
        })
    }

    fn open_with(dir: &Path, needs: Needs) -> Result<Checkpoint, OpenError> {
        folder::check(dir)?;
        let config_path = dir.join(CONFIG_FILE);
        let mut config = ModelConfig::from_json(&read_text(&config_path)?)
            .map_err(|source| OpenError::Config { path: config_path, source })?;
        let mut warnings = Vec::new();
        match generation_eos(&dir.join(GENERATION_FILE)) {
            Ok(None) => {}
            Ok(Some(eos_ids)) => config.set_eos_ids(eos_ids),
            Err(error) => warnings.push(format!("{error}; the end tokens of {CONFIG_FILE} count")),
        }
        let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
        // A link to a missing blob is an index, too: a single file beside it would be another checkpoint.
        let (shards, tensors) = if index.exists() || index.is_symlink() {
            open_sharded(dir, &index, &config, needs, &mut warnings)?
        } else if single.exists() {
            let shard = TensorFile::open(single)?;
            let tensors = shard.names().map(|name| (name.to_owned(), 0)).collect();
            (vec![shard], tensors)
        } else {
            return Err(folder::no_weights(dir));
        };
        let found = Layout::find(tensors.keys().map(String::as_str), config.num_layers);
        if let Some((_, stored)) = &found
            && let Some(layer) = stored.iter().find(|layer| !config.is_moe_layer(**layer))
        {
            warnings.push(format!(
                "layer {layer} has experts in the files but none by {CONFIG_FILE}, which counts"
            ));
        }
        let layout = found.map(|(layout, _)| layout);
        Ok(Checkpoint { dir: dir.to_owned(), config, shards, tensors, layout, warnings })
    }

    /// Returns false if it was opened [without weights](Self::open_without_weights).
    #[must_use]
    pub fn has_weights(&self) -> bool {
        !self.shards.is_empty()
    }

    /// The directory of the checkpoint.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Oddities of the directory that are no errors: files that do not count, missing tensors that no routed expert
    /// needs. One sentence each.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Names that start with `prefix`, ascending.
    pub(crate) fn names_below<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let names = self.tensors.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        names.map(|(name, _)| name.as_str()).take_while(move |name| name.starts_with(prefix))
    }

    /// Returns true if a tensor of that name exists.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// [`TensorError::NotFound`].
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, TensorError> {
        match self.tensors.get(name) {
            Some(&shard_idx) => self.shards[shard_idx].tensor(name),
            None => Err(TensorError::NotFound {
                name: name.to_owned(),
                location: self.dir.display().to_string(),
            }),
        }
    }

    /// The path of the file that holds the tensor.
    #[must_use]
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.tensors.get(name).map(|&shard_idx| self.shards[shard_idx].path())
    }

    /// The file of a tensor, with the tensor.
    pub(crate) fn stored(&self, name: &str) -> Option<(&TensorFile, TensorView<'_>)> {
        let file = &self.shards[*self.tensors.get(name)?];
        Some((file, file.tensor(name).ok()?))
    }

    /// The weight files.
    pub fn files(&self) -> impl Iterator<Item = &TensorFile> {
        self.shards.iter()
    }

    /// Bytes of all shards together.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.shards.iter().map(TensorFile::len_bytes).sum()
    }

    /// Number of weight files.
    #[must_use]
    pub fn num_shards(&self) -> usize {
        self.shards.len()
    }

    /// Asks the system to read and map the files in huge pages, which loads weights from a disk several times faster.
    /// For programs that read most of the weights: any read of a byte that is not in memory then takes 2 MiB. Has no
    /// effect on file systems without huge pages.
    pub fn prefer_huge_pages(&self) {
        self.shards.iter().for_each(TensorFile::prefer_huge_pages);
    }

    /// Returns true if the directory holds routed experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        self.layout.is_some()
    }

    pub(crate) fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// The prefix before `layers.` in names of tensors, for a checkpoint without experts.
    pub(crate) fn root(&self) -> &'static str {
        let has_layers = |root: &&&str| {
            let prefix = format!("{root}layers.");
            self.tensors
                .range(prefix.clone()..)
                .next()
                .is_some_and(|(name, _)| name.starts_with(&prefix))
        };
        ROOTS.iter().find(has_layers).copied().unwrap_or(ROOTS[0])
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
    /// The path is no directory with a checkpoint.
    #[error("{} {found}; {remedy}", path.display())]
    NotACheckpoint { path: PathBuf, found: String, remedy: String },
    /// The index is invalid.
    #[error("{} is not a valid index: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    /// The index names a missing shard.
    #[error(
        "shard {} is missing{detail}; the index expects {num_tensors} tensors in it; download it",
        path.display()
    )]
    MissingShard { path: PathBuf, num_tensors: usize, detail: &'static str },
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

type Shards = (Vec<TensorFile>, BTreeMap<String, usize>);

fn open_sharded(
    dir: &Path,
    index_path: &Path,
    config: &ModelConfig,
    needs: Needs,
    warnings: &mut Vec<String>,
) -> Result<Shards, OpenError> {
    let index_error = |reason: String| OpenError::Index { path: index_path.to_owned(), reason };
    let index: Index =
        serde_json::from_str(&read_text(index_path)?).map_err(|e| index_error(e.to_string()))?;
    warn_of_stray_files(dir, &index, warnings);

    let names = index.weight_map.keys().map(String::as_str);
    let layout = Layout::find(names, config.num_layers).map(|(layout, _)| layout);
    let is_needed = |tensor: &str| {
        let layer = layout.as_ref().and_then(|layout| layout.layer_of_expert_tensor(tensor));
        needs == Needs::Experts && layer.is_some_and(|layer| config.is_moe_layer(layer))
    };

    let mut tensors_per_file: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, file) in &index.weight_map {
        tensors_per_file.entry(file).or_default().push(tensor);
    }
    let mut shards = Vec::with_capacity(tensors_per_file.len());
    let mut shard_idx: HashMap<&str, usize> = HashMap::new();
    for (file, tensors) in &tensors_per_file {
        // The index comes with the download, so its paths must stay in the directory.
        let mut parts = Path::new(file).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
            return Err(index_error(format!("'{file}' is not a plain file name")));
        }
        let path = dir.join(file);
        match TensorFile::open(&path) {
            Err(TensorFileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                let num_tensors = tensors.len();
                if tensors.iter().any(|tensor| is_needed(tensor)) {
                    let detail = folder::missing_detail(&path);
                    return Err(OpenError::MissingShard { path, num_tensors, detail });
                }
                let why = match needs {
                    Needs::Experts => "none of its tensors is a routed expert's",
                    Needs::Nothing => "this program needs no experts",
                };
                warnings.push(format!(
                    "shard {} with {num_tensors} tensors is missing; {why}",
                    path.display()
                ));
            }
            opened => {
                shards.push(opened?);
                shard_idx.insert(file, shards.len() - 1);
            }
        }
    }

    let mut tensors = BTreeMap::new();
    for (tensor, file) in &index.weight_map {
        let Some(&idx) = shard_idx.get(file.as_str()) else { continue };
        if shards[idx].contains(tensor) {
            tensors.insert(tensor.clone(), idx);
        } else if is_needed(tensor) {
            return Err(OpenError::NotInShard { tensor: tensor.clone(), path: dir.join(file) });
        } else {
            warnings.push(format!(
                "tensor '{tensor}' is not in shard {}, where the index places it; no routed expert needs it",
                dir.join(file).display()
            ));
        }
    }
    // Names of tensors that are stored once under another name are often left out of the index.
    for (idx, shard) in shards.iter().enumerate() {
        for alias in shard.aliases() {
            tensors.entry(alias.to_owned()).or_insert(idx);
        }
    }
    Ok((shards, tensors))
}

/// Warns of files that look like weights and that the index does not list.
fn warn_of_stray_files(dir: &Path, index: &Index, warnings: &mut Vec<String>) {
    let listed: HashSet<&str> = index.weight_map.values().map(String::as_str).collect();
    if dir.join(SINGLE_FILE).exists() && !listed.contains(SINGLE_FILE) {
        warnings.push(format!(
            "{} is not used: {INDEX_FILE} does not list it; remove one of the two",
            dir.join(SINGLE_FILE).display()
        ));
    }
}

/// The end tokens of `generation_config.json`; `None` if there is no such file or no such field.
fn generation_eos(path: &Path) -> Result<Option<Vec<u32>>, OpenError> {
    if !path.exists() {
        return Ok(None);
    }
    let config_error = |source| OpenError::Config { path: path.to_owned(), source };
    let keys = Keys::parse(&read_text(path)?).map_err(config_error)?;
    let value = keys.get("eos_token_id");
    if value.is_none() {
        return Ok(None);
    }
    token_ids("eos_token_id", value).map(Some).map_err(config_error)
}

fn read_text(path: &Path) -> Result<String, OpenError> {
    fs::read_to_string(path).map_err(|source| OpenError::Read { path: path.to_owned(), source })
}

pub(crate) const CONFIG_FILE: &str = "config.json";
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
const GENERATION_FILE: &str = "generation_config.json";
