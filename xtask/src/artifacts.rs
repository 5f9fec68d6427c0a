//! Programs that cargo builds to be run elsewhere: in guests, and on hosts with GPUs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::process::cargo;

/// A program of the workspace.
#[derive(Clone, Copy)]
pub struct Target {
    /// `--bin`, `--test` or `--example`.
    pub kind: &'static str,
    /// Folder of its package.
    pub package: &'static str,
    /// Its name in the manifest.
    pub name: &'static str,
}

/// Builds `targets` with one call, for the whole workspace, so that they share their dependencies. Returns their
/// paths, in their order.
pub fn build(profile: &[&str], features: &str, targets: &[Target]) -> Result<Vec<PathBuf>> {
    let mut command = cargo(&["build", "--quiet", "--workspace", "--features", features]);
    command.args(profile);
    for target in targets {
        command.args([target.kind, target.name]);
    }
    let text = messages(&mut command)?;
    targets.iter().map(|target| find(&text, target)).collect()
}

/// Runs the build script of a package's library and returns its output folder. Only the library itself is checked:
/// features that the rest of the workspace asks for, such as GPUs in software, would be compiled for nothing.
pub fn build_script_dir(package: &str, features: &str, folder: &str) -> Result<PathBuf> {
    let mut command = cargo(&["check", "--quiet", "--lib", "--package", package]);
    let text = messages(command.args(["--features", features]))?;
    let signs = ["\"reason\":\"build-script-executed\"".to_owned(), format!("/{folder}#")];
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

/// Cargo's messages in JSON.
fn messages(command: &mut Command) -> Result<String> {
    command.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("programs could not be built ({})", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The path of a program, from cargo's messages.
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
