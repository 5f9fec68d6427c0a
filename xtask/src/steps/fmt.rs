//! The step `fmt`, and the command of that name: rustfmt and clang-format.

use std::process::Command;

use anyhow::Result;

use crate::process::{Outcome, cargo, run};
use crate::{tools, tree};

const C_LIKE: [&str; 6] = ["*.c", "*.h", "*.cpp", "*.hpp", "*.cu", "*.cuh"];

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
        Ok(program) => run(Command::new(program).args(c_like).args(tree::list(&C_LIKE)?)),
        Err(reason) => Ok(Outcome::Skipped(format!("C, C++ and CUDA are not looked at: {reason}"))),
    }
}
