//! The files of the repository.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Names of the files that match `patterns` of git, committed or not. Ignored files are left out.
pub fn list(patterns: &[&str]) -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"])
        .args(patterns)
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let names = String::from_utf8(output.stdout).context("names of files")?;
    // Git lists a file that was removed and not yet committed.
    let is_file = |path: &PathBuf| path.is_file();
    Ok(names.split('\0').map(PathBuf::from).filter(is_file).collect())
}

/// The same files with their text, by name.
pub fn read(patterns: &[&str]) -> Result<BTreeMap<String, String>> {
    let text = |path: &Path| {
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
    };
    list(patterns)?
        .iter()
        .map(|path| Ok((path.to_string_lossy().into_owned(), text(path)?)))
        .collect()
}
