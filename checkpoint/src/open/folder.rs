//! Errors of paths that hold no complete checkpoint, each with the next step.

use std::fs;
use std::path::{Path, PathBuf};

use super::{CONFIG_FILE, INDEX_FILE, OpenError, SINGLE_FILE};

/// Refuses a path that is no directory, or a directory of another kind.
pub(super) fn check(dir: &Path) -> Result<(), OpenError> {
    let refuse = |found: &str, remedy: String| {
        let (path, found) = (dir.to_owned(), found.to_owned());
        Err(OpenError::NotACheckpoint { path, found, remedy })
    };
    if is_dangling(dir) {
        return refuse("is a link to a folder that is missing", "finish the download".to_owned());
    }
    if !dir.exists() {
        let text = dir.to_string_lossy();
        let is_hub_name = dir.is_relative()
            && text.split('/').count() == 2
            && text.split('/').all(|part| !part.is_empty() && !part.starts_with('.'));
        return match is_hub_name {
            true => refuse(
                "is no folder here; it looks like the name of a model on the Hugging Face Hub",
                format!(
                    "download it (`hf download {text} --local-dir FOLDER`) and give the folder"
                ),
            ),
            false => refuse("does not exist", "give the folder of a checkpoint".to_owned()),
        };
    }
    if dir.is_file() {
        if is_gguf(dir) {
            return refuse("is a GGUF file", GGUF_REMEDY.to_owned());
        }
        let parent = dir.parent().unwrap_or(Path::new(".")).display();
        return refuse(
            "is a file",
            format!("give the folder that holds it with its {CONFIG_FILE}: {parent}"),
        );
    }
    if !dir.join(CONFIG_FILE).exists() {
        let snapshots = entries(&dir.join("snapshots"));
        if !snapshots.is_empty() {
            let list: Vec<String> =
                snapshots.iter().map(|path| path.display().to_string()).collect();
            return refuse(
                "is an entry of the Hugging Face cache, whose checkpoints are in its folder 'snapshots'",
                format!("give one of: {}", list.join(", ")),
            );
        }
        let cached = cached_models(dir);
        if !cached.is_empty() {
            let list: Vec<String> =
                cached.iter().take(MAX_LISTED).map(|path| path.display().to_string()).collect();
            return refuse(
                "is the root of the Hugging Face cache",
                format!("give the checkpoint of one model, such as {}", list.join(", ")),
            );
        }
        if is_dangling(&dir.join(CONFIG_FILE)) {
            return refuse(
                &format!("has a {CONFIG_FILE} that links to a missing blob"),
                UNFINISHED.to_owned(),
            );
        }
        if files(dir).iter().any(|path| is_gguf(path)) {
            return refuse("holds a GGUF file and no config.json", GGUF_REMEDY.to_owned());
        }
        return refuse(
            &format!("has no {CONFIG_FILE}"),
            "give the folder of a checkpoint as it was downloaded".to_owned(),
        );
    }
    Ok(())
}

/// The error for a directory with a configuration and neither an index nor `model.safetensors`.
pub(super) fn no_weights(dir: &Path) -> OpenError {
    let (found, remedy) = describe(dir);
    OpenError::NotACheckpoint { path: dir.to_owned(), found, remedy }
}

fn describe(dir: &Path) -> (String, String) {
    let all = files(dir);
    let names: Vec<String> = all
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    let with = |suffix: &str| names.iter().find(|name| name.ends_with(suffix)).cloned();
    let dangling = all.iter().find(|path| is_dangling(path) && is_weights(path));
    if let Some(link) = dangling {
        let name = link.file_name().unwrap_or_default().to_string_lossy();
        return (format!("has a link {name} to a missing blob"), UNFINISHED.to_owned());
    }
    if let Some(partial) = with(".incomplete").or_else(|| with(".part")) {
        return (
            format!("holds {partial}, a download that is not finished"),
            UNFINISHED.to_owned(),
        );
    }
    let shards: Vec<&String> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    if let Some(first) = shards.first() {
        let number = shards.len();
        return (
            format!(
                "holds {number} safetensors file(s), such as {first}, but {INDEX_FILE} is missing"
            ),
            format!("download {INDEX_FILE}, or rename a single complete file to {SINGLE_FILE}"),
        );
    }
    if let Some(gguf) = all.iter().find(|path| is_gguf(path)) {
        let name = gguf.file_name().unwrap_or_default().to_string_lossy().into_owned();
        return (format!("holds the GGUF file {name} and no safetensors"), GGUF_REMEDY.to_owned());
    }
    if let Some(bin) = with(".bin").or_else(|| with(".pt")).or_else(|| with(".pth")) {
        return (
            format!("holds PyTorch weights ({bin}) and no safetensors"),
            "convert them with transformers: `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)`"
                .to_owned(),
        );
    }
    (format!("has neither {SINGLE_FILE} nor {INDEX_FILE}"), "download the weights, too".to_owned())
}

/// A note on a missing file for messages.
pub(super) fn missing_detail(path: &Path) -> &'static str {
    if is_dangling(path) { " (a link to a missing blob: the download is not finished)" } else { "" }
}

fn is_dangling(path: &Path) -> bool {
    path.is_symlink() && !path.exists()
}

fn is_weights(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(".safetensors") || name == INDEX_FILE
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> =
        fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    found.sort();
    found
}

fn files(dir: &Path) -> Vec<PathBuf> {
    entries(dir).into_iter().filter(|path| !path.is_dir()).collect()
}

/// Snapshots of models below the root of a cache of the Hugging Face Hub.
fn cached_models(dir: &Path) -> Vec<PathBuf> {
    let is_model = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("models--"))
    };
    let models = entries(dir).into_iter().filter(is_model);
    models.flat_map(|model| entries(&model.join("snapshots"))).collect()
}

/// Most snapshots that an error lists.
const MAX_LISTED: usize = 5;
const UNFINISHED: &str = "finish the download, for example by running the same command again";
const GGUF_REMEDY: &str = "experts are served from safetensors: download the model's original checkpoint, or convert \
                           the file with transformers (`from_pretrained(DIR, gguf_file=FILE)`, then `save_pretrained`)";
