//! Running commands, and what comes of them.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result};

use crate::output;

/// The result of a step or command.
pub enum Outcome {
    /// Every check holds.
    Passed,
    /// A check does not hold.
    Failed(String),
    /// It cannot run here, for this reason.
    Skipped(String),
}

/// How much of a step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Without `--all`.
    Short,
    /// With `--all`.
    Long,
}

impl Form {
    /// Chooses between two values.
    pub fn pick<T>(self, short: T, long: T) -> T {
        match self {
            Self::Short => short,
            Self::Long => long,
        }
    }
}

/// Makes the workspace's root the current directory, wherever cargo was called, and starts a new skip log.
pub fn enter_workspace() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent")?;
    std::env::set_current_dir(root).with_context(|| format!("cannot enter {}", root.display()))?;
    let log = skip_log();
    if log.exists() {
        std::fs::remove_file(&log).with_context(|| format!("cannot remove {}", log.display()))?;
    }
    Ok(())
}

/// Whether `SWITCHYARD_REQUIRE` names `name` or `all`.
pub fn is_required(name: &str) -> bool {
    std::env::var("SWITCHYARD_REQUIRE")
        .is_ok_and(|list| list.split(',').any(|item| item == name || item == "all"))
}

/// Skips that single tests noted in the skip log: `(resource, reason)`.
pub fn skipped_inside_tests() -> Vec<(String, String)> {
    let Ok(text) = std::fs::read_to_string(skip_log()) else { return Vec::new() };
    let mut rows: Vec<_> = text
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(resource, reason)| (resource.to_owned(), reason.to_owned()))
        .collect();
    rows.sort();
    rows.dedup();
    rows
}

/// Notes in the skip log that a part of a step did not run.
pub fn note_skip(resource: &str, reason: &str) -> Result<()> {
    let path = skip_log();
    let mut log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    writeln!(log, "{resource}\t{reason}")
        .with_context(|| format!("cannot write to {}", path.display()))
}

fn skip_log() -> PathBuf {
    target_dir().join("skipped-tests.tsv")
}

/// The folder that cargo builds in.
pub fn target_dir() -> PathBuf {
    let root = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The cargo that runs this program, with the skip log in its environment.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).env("SWITCHYARD_SKIP_LOG", skip_log());
    command
}

/// Runs a command to its end and passes its output on. Outside of a terminal the outcome also holds the lines of
/// the output that explain a failure.
pub fn run(command: &mut Command) -> Result<Outcome> {
    let (status, lines) = if std::io::stdout().is_terminal() {
        let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
        (status, Vec::new())
    } else {
        output::run(command)?
    };
    Ok(outcome(&format!("{:?}", command.get_program()), status, &lines))
}

/// As [`run`], with `prefix` before each line of the output, for commands that run side by side.
pub fn run_with_prefix(command: &mut Command, prefix: &'static str) -> Result<Outcome> {
    let (status, lines) = output::run_with_prefix(command, prefix)?;
    Ok(outcome(prefix, status, &lines))
}

/// A failure names the command and its status, and below them `lines`.
fn outcome(name: &str, status: ExitStatus, lines: &[String]) -> Outcome {
    if status.success() {
        return Outcome::Passed;
    }
    let reason = format!("{name} ended with {status}");
    Outcome::Failed([std::slice::from_ref(&reason), lines].concat().join("\n         "))
}
