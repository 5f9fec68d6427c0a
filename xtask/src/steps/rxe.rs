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
    let lints = ["clippy", "-q", "-p", PACKAGE, "--features", "verbs", "--all-targets"];
    if let Outcome::Failed(reason) = run(cargo(&lints).args(["--", "-D", "warnings"]))? {
        return Ok(Outcome::Failed(reason));
    }
    let units = ["test", "-q", "-p", PACKAGE, "--features", "verbs", "--lib", "backend::verbs"];
    if let Outcome::Failed(reason) = run(&mut cargo(&units))? {
        return Ok(Outcome::Failed(reason));
    }
    let (suite, verbs) = (test_binary("conformance")?, test_binary("verbs")?);
    // The last test takes the device down, so it comes last and alone.
    let script = "set -e
./verbs --test-threads=1
./suite verbs:: --test-threads=1
SWITCHYARD_TEST_LINK=eth0 ./verbs --exact a_port_that_goes_down_is_noticed_without_an_operation";
    let in_guest = run(Command::new("tests/rxe/guest.sh")
        .args(["-t", LIMIT_SECONDS, "-m", "1536"])
        .args(["-e", "SWITCHYARD_REQUIRE=rdma", "-e", "SWITCHYARD_TEST_WAKE_UPS=300"])
        .args(["-f", &format!("{suite}:suite"), "-f", &format!("{verbs}:verbs")])
        .args(["--", script]))?;
    if let Outcome::Failed(reason) = in_guest {
        return Ok(Outcome::Failed(format!("in one guest: {reason}")));
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
    let failover = run(Command::new("tests/rxe/failover.sh").arg(&binary).arg("data/tiny-moe"))?;
    if let Outcome::Failed(reason) = failover {
        return Ok(Outcome::Failed(format!("failover between two guests: {reason}")));
    }
    Ok(Outcome::Passed)
}

/// Builds a test of p2p-core and says where it is.
fn test_binary(name: &str) -> Result<String> {
    let output = cargo(&["test", "-p", PACKAGE, "--features", "verbs", "--no-run", "--test", name])
        .arg("--message-format=json")
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot build the test {name}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let found = text
        .lines()
        .filter_map(|line| line.split_once("\"executable\":\"")?.1.split_once('"'))
        .map(|(path, _)| path.to_owned())
        .rfind(|path| Path::new(path).exists());
    found.with_context(|| format!("cargo names no executable of the test {name}"))
}

const PACKAGE: &str = "switchyard-p2p-core";
