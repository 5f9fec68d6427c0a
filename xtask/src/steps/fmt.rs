//! The step `fmt`, and the command of that name: rustfmt and clang-format.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{Outcome, cargo, run};
use crate::tools;

pub(super) fn check() -> Result<Outcome> {
    both(&["--check"], &["--dry-run", "-Werror"])
}

/// `cargo xtask fmt`.
pub fn apply() -> Result<Outcome> {
    both(&[], &["-i"])
}

fn both(rust: &[&str], c_like: &[&str]) -> Result<Outcome> {
    if let Outcome::Failed(reason) = run(cargo(&["fmt", "--all"]).args(rust))? {
        return Ok(Outcome::Failed(reason));
    }
    match tools::clang_format()? {
        Ok(program) => run(Command::new(program).args(c_like).args(c_like_sources()?)),
        Err(reason) => Ok(Outcome::Skipped(format!("C, C++ and CUDA are not looked at: {reason}"))),
    }
}

/// Every file of C, C++ and CUDA that the repository has.
fn c_like_sources() -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .args(["ls-files", "-z", "--", "*.c", "*.h", "*.cpp", "*.hpp", "*.cu", "*.cuh"])
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let names = String::from_utf8(output.stdout).context("names of files")?;
    // A file that was removed and not yet committed is listed still.
    Ok(names.split('\0').map(PathBuf::from).filter(|path| path.is_file()).collect())
}
