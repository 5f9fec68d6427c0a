//! The long run of the fault rig.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};

use crate::process;

/// Builds the shipped binary and the rig without failpoints, both in release, and runs the schedule.
pub fn run(layers: u64, seed: Option<u64>, out: Option<PathBuf>, rig: &[String]) -> ExitCode {
    match try_run(layers, seed, out, rig) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn try_run(layers: u64, seed: Option<u64>, out: Option<PathBuf>, rig: &[String]) -> Result<bool> {
    let out = out.map(|dir| std::path::absolute(&dir).context("cannot tell where we are"));
    let out = out.transpose()?;
    process::enter_workspace()?;
    build(&["-p", "switchyard-cli", "--bin", "switchyard"])?;
    build(&["-p", "switchyard-tests", "--bin", "fault-rig", "--no-default-features"])?;
    let release = process::target_dir().join("release");
    let mut command = Command::new(release.join("fault-rig"));
    command.arg("--json").arg("--binary").arg(release.join("switchyard"));
    command.args(["--layers", &layers.to_string()]);
    if let Some(seed) = seed {
        command.args(["--seed", &seed.to_string()]);
    }
    let output = command
        .args(rig)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start the fault rig")?;
    let report = String::from_utf8_lossy(&output.stdout);
    println!("{}", report.trim_end());
    if let Some(dir) = out {
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let path = dir.join("faults.json");
        std::fs::write(&path, output.stdout)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    match output.status.code() {
        Some(0) => Ok(true),
        Some(1) => Ok(false),
        _ => bail!("the fault rig ended with {}", output.status),
    }
}

fn build(args: &[&str]) -> Result<()> {
    let status = process::cargo(&["build", "--release"]).args(args).status();
    let status = status.context("cannot start cargo")?;
    if !status.success() {
        bail!("cargo build {} ended with {status}", args.join(" "));
    }
    Ok(())
}
