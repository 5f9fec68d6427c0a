//! The step `rxe`: the verbs transport on Soft-RoCE devices in QEMU guests.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{Outcome, features};
use crate::artifacts::{self, Target};
use crate::{told, tools};

/// Programs and files without which there is no test bed, by Debian package.
const NEEDED: [(&str, &str); 12] = [
    ("qemu-system-x86", "qemu-system-x86_64"),
    ("busybox-static", "busybox"),
    ("ibverbs-providers", "/etc/libibverbs.d/rxe.driver"),
    ("ibverbs-utils", "ibv_devinfo"),
    ("rdmacm-utils", "rping"),
    ("perftest", "ib_write_lat"),
    ("iproute2", "rdma"),
    ("kmod", "/sbin/depmod"),
    ("cpio", "cpio"),
    ("libibverbs-dev", "/usr/include/infiniband/verbs.h"),
    ("librdmacm-dev", "/usr/include/rdma/rdma_cma.h"),
    ("libfabric1", LIBFABRIC),
];
/// Ends what hangs. Everything takes minutes; emulated on a busy host it may take its time.
const LIMIT_SECONDS: &str = "1800";
/// Opened at run time, so it does not come with the programs.
const LIBFABRIC: &str = "/usr/lib/x86_64-linux-gnu/libfabric.so.1";

pub(super) fn check() -> Result<Outcome> {
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(_, sign)| !tools::is_here(sign))
        .map(|(package, _)| *package)
        .collect();
    if !missing.is_empty() {
        return Ok(Outcome::Skipped(format!(
            "missing here: {} (Debian package names)",
            missing.join(", ")
        )));
    }
    let bed = Command::new("bash")
        .arg("tests/rxe/build.sh")
        .stdout(Stdio::null())
        .output()
        .context("cannot start tests/rxe/build.sh")?;
    let told = String::from_utf8_lossy(&bed.stderr);
    print!("{told}");
    if !bed.status.success() {
        let reason = told.lines().last().unwrap_or("tests/rxe/build.sh failed").to_owned();
        return Ok(Outcome::Skipped(reason));
    }
    let programs = programs()?;
    let guest = |part: &str| {
        let mut guest = Command::new("tests/rxe/guest.sh");
        guest.args(["-2", "-t", LIMIT_SECONDS, "-m", "2048", "-d", MODEL]);
        guest.args(["-f", "tests/rxe/checks.sh", "-f", LIBFABRIC]);
        for (name, path) in &programs {
            guest.args(["-f", &format!("{}:{name}", path.display())]);
        }
        guest.args(["--", &format!("sh ./checks.sh {part}")]);
        guest
    };
    let (_, switchyard) = &programs[0];
    let mut failover = Command::new("tests/rxe/failover.sh");
    failover.arg(switchyard).arg(MODEL);
    // Much of a guest's time is waiting, so two side by side take less than one after the other.
    let (transport, services) = std::thread::scope(|scope| {
        let services = scope.spawn(|| run_marked(&mut guest("services"), "services"));
        (run_marked(&mut guest("transport"), "transport"), services.join())
    });
    let services = services.map_err(|_| anyhow::anyhow!("the thread beside panicked"))?;
    for outcome in [transport?, services?] {
        let Outcome::Passed = outcome else { return Ok(outcome) };
    }
    // Two guests by itself: whoever gets no processor for some seconds is given up there.
    run_marked(&mut failover, "failover")
}

/// Runs what runs beside something else.
fn run_marked(command: &mut Command, mark: &'static str) -> Result<Outcome> {
    let (status, told) = told::run_marked(command, mark)?;
    if status.success() {
        return Ok(Outcome::Passed);
    }
    Ok(super::failed(&format!("{mark} in its guest"), status, &told))
}

/// Whether the headers are here that the feature `verbs` needs.
pub(super) fn can_build() -> bool {
    let is_header = |sign: &&str| sign.starts_with("/usr/include");
    NEEDED.iter().map(|(_, sign)| *sign).filter(is_header).all(tools::is_here)
}

/// Builds what runs in the guest: the names there, and where they are, the product first.
fn programs() -> Result<Vec<(&'static str, PathBuf)>> {
    let paths = artifacts::build(&[], &features(), &PROGRAMS.map(|(_, target)| target))?;
    Ok(PROGRAMS.iter().map(|(name, _)| *name).zip(paths).collect())
}

/// What runs in the guest: its name there, and the target.
const PROGRAMS: [(&str, Target); 13] = [
    ("switchyard", Target { kind: "--bin", package: "cli", name: "switchyard" }),
    ("verbs", Target { kind: "--test", package: "transports/verbs", name: "verbs" }),
    ("conformance", Target { kind: "--test", package: "tests", name: "conformance" }),
    ("engine", Target { kind: "--test", package: "message-engine", name: "engine" }),
    ("engine_bench", Target { kind: "--test", package: "bench/harness", name: "engine_bench" }),
    ("scale", Target { kind: "--test", package: "tests", name: "scale" }),
    ("scale_kill", Target { kind: "--test", package: "tests", name: "scale_kill" }),
    (
        "p2p_one_to_one",
        Target { kind: "--example", package: "bench/harness", name: "p2p_one_to_one" },
    ),
    ("p2p_multi", Target { kind: "--example", package: "bench/harness", name: "p2p_multi" }),
    ("proxy_network", Target { kind: "--test", package: "transports/proxy", name: "network" }),
    (
        "benchmark_remote",
        Target { kind: "--bin", package: "bench/harness", name: "benchmark_remote" },
    ),
    ("proxy_layers", Target { kind: "--test", package: "tests", name: "proxy" }),
    ("proxy_device", Target { kind: "--test", package: "tests", name: "device-proxy" }),
];
/// The feature `verbs` of every package that has it.
pub(super) const FEATURES: &[&str] = &[
    "switchyard/verbs",
    "switchyard-verbs/rdma",
    "switchyard-bench-harness/verbs",
    "switchyard-tests/verbs",
];
/// Tests that need no device; the others run in the guests only.
pub(super) const ON_HOST: &str =
    "not (binary(verbs) | (binary(conformance) & test(/^verbs::/)) | test(=processes_over_verbs))";
const MODEL: &str = "data/tiny-moe";
