//! The step `mlx5`: the bytes of work requests against the vendor's header, and the order of fences,
//! doorbell record and doorbell in what a GPU runs.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::{Outcome, cargo, run};
use crate::cuda::Toolkit;

const HEADER: &str = "infiniband/mlx5dv.h";
const DEVICE_SOURCE: &str = "p2p-core/softnic/driver/device.cu";
const DOORBELL_HEADER: &str = "switchyard/comm/mlx5/doorbell.h";
/// Every store to a doorbell register is preceded by these, in this order.
const ORDER: [&str; 4] = ["fence.acq_rel", "st.relaxed", "fence.acq_rel", "st.mmio.relaxed.sys"];

pub(super) fn check() -> Result<Outcome> {
    let order = check_order()?;
    if let Outcome::Failed(_) = order {
        return Ok(order);
    }
    let header = Command::new("cc")
        .args(["-E", "-include", HEADER, "-x", "c", "/dev/null"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !header.is_ok_and(|status| status.success()) {
        return Ok(Outcome::Skipped(format!(
            "{HEADER} is missing: install Debian's package `libibverbs-dev`"
        )));
    }
    let test = ["test", "-q", "-p", "switchyard-softnic", "--test", "oracle"];
    match run(cargo(&test).env("SWITCHYARD_ORACLE_CASES", "50000"))? {
        Outcome::Passed => Ok(order),
        other => Ok(other),
    }
}

/// Compiles every device function, and finds in each scope what a doorbell needs. Headers that lack a
/// fence must be found out; no test on a processor can do that.
fn check_order() -> Result<Outcome> {
    let toolkit = match Toolkit::find()? {
        Ok(toolkit) => toolkit,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let include = Path::new("kernels/include");
    let num_doorbells = match doorbells(&ptx(&toolkit, &[include])?) {
        Ok(num) => num,
        Err(reason) => return Ok(Outcome::Failed(format!("{DEVICE_SOURCE}: {reason}"))),
    };
    println!("{DEVICE_SOURCE}: {num_doorbells} doorbells, each behind its record and two fences");

    let path = include.join(DOORBELL_HEADER);
    let header = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let fence = "fence_acq_rel<kScope>();";
    let fences: Vec<usize> = header.match_indices(fence).map(|(at, _)| at).collect();
    if fences.len() != 2 {
        bail!("{} has {} fences, expected 2", path.display(), fences.len());
    }
    for (idx, at) in fences.into_iter().enumerate() {
        let overlay = super::target_dir().join(format!("cuda/without-fence-{idx}"));
        let mutant = overlay.join(DOORBELL_HEADER);
        if let Some(dir) = mutant.parent() {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let text = format!("{};{}", &header[..at], &header[at + fence.len()..]);
        std::fs::write(&mutant, text)
            .with_context(|| format!("cannot write {}", mutant.display()))?;
        match doorbells(&ptx(&toolkit, &[&overlay, include])?) {
            Err(reason) => println!("without fence {idx} it is found out: {reason}"),
            Ok(_) => return Ok(Outcome::Failed(format!("fence {idx} can be left out unnoticed"))),
        }
    }
    Ok(Outcome::Passed)
}

fn ptx(toolkit: &Toolkit, includes: &[&Path]) -> Result<String> {
    let output = toolkit
        .tool("nvcc")
        .args(["-std=c++17", "-O3", "-arch=compute_90", "-ptx", "-o", "-"])
        .args(includes.iter().map(|include| format!("-I{}", include.display())))
        .arg(DEVICE_SOURCE)
        .output()
        .context("cannot start nvcc")?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("nvcc refused {DEVICE_SOURCE}:\n{errors}");
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// How many doorbells there are, or which one lacks what.
fn doorbells(ptx: &str) -> Result<usize, String> {
    let is_ordering = |line: &&str| {
        ["fence.", "st.relaxed.", "st.release.", "st.mmio."].iter().any(|op| line.starts_with(op))
    };
    let steps: Vec<&str> = ptx.lines().map(str::trim).filter(is_ordering).collect();
    let mut num_doorbells = 0;
    for (idx, _) in steps.iter().enumerate().filter(|(_, step)| step.starts_with("st.mmio.")) {
        let found = &steps[idx.saturating_sub(3)..=idx];
        let fits = found.len() == ORDER.len()
            && found.iter().zip(ORDER).all(|(found, expected)| found.starts_with(expected));
        if !fits {
            return Err(format!("a doorbell is reached by {}", found.join(" ")));
        }
        num_doorbells += 1;
    }
    if num_doorbells == 0 { Err("there is no doorbell".to_owned()) } else { Ok(num_doorbells) }
}
