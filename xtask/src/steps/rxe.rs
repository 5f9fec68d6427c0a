//! The step `rxe`: the verbs transport on Soft-RoCE devices in QEMU guests.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{Outcome, cargo, run, target_dir};
use crate::tools;

/// Programs and files without which there is no test bed, by Debian package.
const NEEDED: [(&str, &str); 11] = [
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
];
/// A guest boots within seconds; emulated on a busy host it may take its time.
const LIMIT_SECONDS: &str = "400";

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
    let lints = ["clippy", "-q", "-p", PACKAGE, "--features", FEATURES, "--all-targets"];
    if let Outcome::Failed(reason) = run(cargo(&lints).args(["--", "-D", "warnings"]))? {
        return Ok(Outcome::Failed(reason));
    }
    let units = ["test", "-q", "-p", PACKAGE, "--features", FEATURES, "--lib", "backend::verbs"];
    if let Outcome::Failed(reason) = run(&mut cargo(&units))? {
        return Ok(Outcome::Failed(reason));
    }
    if let Outcome::Failed(reason) =
        run(&mut cargo(&["build", "-q", "-p", "switchyard", "--features", "verbs"]))?
    {
        return Ok(Outcome::Failed(reason));
    }
    // A copy, since the next build without the feature replaces it.
    let binary = target_dir().join("switchyard-verbs");
    std::fs::copy(target_dir().join("debug/switchyard"), &binary)
        .context("cannot copy the binary")?;
    let mut guest = Command::new("tests/rxe/guest.sh");
    guest.args(["-2", "-t", LIMIT_SECONDS, "-m", "2048", "-d", MODEL, "-f", "tests/rxe/checks.sh"]);
    guest.args(["-f", &format!("{}:switchyard", binary.display())]);
    for (name, path) in programs()? {
        guest.args(["-f", &format!("{path}:{name}")]);
    }
    if let Outcome::Failed(reason) = run(guest.args(["--", "sh ./checks.sh"]))? {
        return Ok(Outcome::Failed(format!("in one guest: {reason}")));
    }
    let failover = run(Command::new("tests/rxe/failover.sh").arg(&binary).arg(MODEL))?;
    if let Outcome::Failed(reason) = failover {
        return Ok(Outcome::Failed(format!("failover between two guests: {reason}")));
    }
    Ok(Outcome::Passed)
}

/// Builds what runs in the guest: the names there, and where they are.
fn programs() -> Result<Vec<(&'static str, String)>> {
    let mut arguments: Vec<&str> = vec!["-p", PACKAGE, "--features", FEATURES];
    arguments.extend(TESTS.iter().flat_map(|name| ["--test", name]));
    arguments.extend(EXAMPLES.iter().flat_map(|name| ["--example", name]));
    let names: Vec<(&str, &str)> =
        TESTS.iter().chain(&EXAMPLES).map(|name| (*name, *name)).collect();
    let mut programs = built(&arguments, &names)?;
    for (package, features, test, name) in FURTHER_TESTS {
        let arguments = ["-p", package, "--features", features, "--test", test];
        programs.extend(built(&arguments, &[(test, name)])?);
    }
    Ok(programs)
}

/// Runs `cargo build` and finds the executables of targets; each gets a name for the guest.
fn built(
    arguments: &[&str],
    names: &[(&str, &'static str)],
) -> Result<Vec<(&'static str, String)>> {
    let output = cargo(&["build", "-q"])
        .args(arguments)
        .arg("--message-format=json")
        .stderr(Stdio::inherit())
        .output()
        .context("cannot build the programs for the guest")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let find = |(target, name): &(&str, &'static str)| {
        let target = format!("\"name\":\"{target}\"");
        let path = text.lines().filter(|line| line.contains(&target)).find_map(|line| {
            let (path, _) = line.split_once("\"executable\":\"")?.1.split_once('"')?;
            Path::new(path).exists().then(|| path.to_owned())
        });
        Ok((*name, path.with_context(|| format!("cargo names no executable of {name}"))?))
    };
    names.iter().map(find).collect()
}

/// Tests of further packages: package, features, test, name in the guest.
const FURTHER_TESTS: [(&str, &str, &str, &str); 2] = [
    ("switchyard-proxy", "verbs,libfabric", "network", "proxy_network"),
    ("switchyard-tests", "verbs", "proxy", "proxy_layers"),
];
const TESTS: [&str; 6] = ["verbs", "conformance", "engine", "engine_bench", "scale", "scale_kill"];
const EXAMPLES: [&str; 2] = ["p2p_one_to_one", "p2p_multi"];
const FEATURES: &str = "verbs,libfabric";
const MODEL: &str = "data/tiny-moe";
const PACKAGE: &str = "switchyard-p2p-core";
