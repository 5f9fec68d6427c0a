//! Programs that cargo builds to be run elsewhere: in guests, and on hosts with GPUs.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};

use crate::process::cargo;

/// A program of the workspace.
#[derive(Clone, Copy)]
pub struct Target {
    /// `--bin`, `--test` or `--example`.
    pub kind: &'static str,
    /// Folder of its package.
    pub package: &'static str,
    /// What cargo calls it.
    pub name: &'static str,
}

/// Builds `targets` in one go, for the whole workspace, so that all of them share their dependencies.
/// Says where they are, in their order.
pub fn build(profile: &[&str], features: &str, targets: &[Target]) -> Result<Vec<PathBuf>> {
    let text = messages(profile, features, targets)?;
    targets.iter().map(|target| find(&text, target)).collect()
}

/// Builds `target` and says where the build script of the package in folder `package` has left what it made.
pub fn build_script_dir(features: &str, package: &str, target: &Target) -> Result<PathBuf> {
    let text = messages(&[], features, std::slice::from_ref(target))?;
    let signs = ["\"reason\":\"build-script-executed\"".to_owned(), format!("/{package}#")];
    let is_it = |line: &&str| signs.iter().all(|sign| line.contains(sign.as_str()));
    let paths = text.lines().filter(is_it).filter_map(|line| {
        let (path, _) = line.split_once("\"out_dir\":\"")?.1.split_once('"')?;
        Some(PathBuf::from(path))
    });
    match paths.collect::<Vec<_>>().as_slice() {
        [path] => Ok(path.clone()),
        found => {
            bail!("cargo names {} outputs of build scripts of {package}, not one", found.len())
        }
    }
}

/// What cargo tells while it builds `targets`.
fn messages(profile: &[&str], features: &str, targets: &[Target]) -> Result<String> {
    let mut command = cargo(&["build", "--quiet", "--workspace", "--features", features]);
    command.args(profile).arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    for target in targets {
        command.args([target.kind, target.name]);
    }
    let output = command.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("programs could not be built ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Where cargo's messages say that a program is.
fn find(messages: &str, target: &Target) -> Result<PathBuf> {
    let kind = target.kind.trim_start_matches('-');
    let signs = [
        format!("\"kind\":[\"{kind}\"]"),
        format!("\"name\":\"{}\"", target.name),
        format!("/{}/Cargo.toml\"", target.package),
    ];
    let is_it = |line: &&str| signs.iter().all(|sign| line.contains(sign.as_str()));
    let path = messages.lines().filter(is_it).find_map(|line| {
        let (path, _) = line.split_once("\"executable\":\"")?.1.split_once('"')?;
        Path::new(path).exists().then(|| PathBuf::from(path))
    });
    path.with_context(|| {
        format!(
            "cargo names no executable of {} {} in {}",
            target.kind, target.name, target.package
        )
    })
}
