//! The step `rxe`: the verbs transport on Soft-RoCE devices in QEMU guests.
//!
//! The short form runs in one guest and checks only claims that need a device. These are data, flags in both forms,
//! deaths, a tool of perftest as the peer, and the demo. The long form runs every test that can use verbs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::artifacts::{self, Target};
use crate::process::{Form, Outcome, run_with_prefix};
use crate::{features, tools};

/// Programs and files that the test bed needs, by Debian package.
const NEEDED: [(&str, &str); 10] = [
    ("qemu-system-x86", "qemu-system-x86_64"),
    ("busybox-static", "busybox"),
    ("ibverbs-providers", "/etc/libibverbs.d/rxe.driver"),
    ("ibverbs-utils", "ibv_devinfo"),
    ("rdmacm-utils", "rping"),
    ("perftest", "ib_write_lat"),
    ("iproute2", "rdma"),
    ("kmod", "/sbin/depmod"),
    ("cpio", "cpio"),
    ("libfabric1", LIBFABRIC),
];
/// Ends a guest that hangs. All checks take minutes, on an emulated processor several times as long.
const LIMIT_SECONDS: &str = "1800";
/// Programs open it at run time, so their own list of libraries lacks it.
const LIBFABRIC: &str = "/usr/lib/x86_64-linux-gnu/libfabric.so.1";

pub(super) fn check(form: Form) -> Result<Outcome> {
    let missing: Vec<&str> = NEEDED
        .iter()
        .chain(&features::VERBS_HEADERS)
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
    let messages = String::from_utf8_lossy(&bed.stderr);
    print!("{messages}");
    if !bed.status.success() {
        let reason = messages.lines().last().unwrap_or("tests/rxe/build.sh failed").to_owned();
        return Ok(Outcome::Skipped(reason));
    }
    let programs = programs(form)?;
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
    if form == Form::Short {
        return run_with_prefix(&mut guest("short"), "rxe");
    }
    // Much of a guest's time is waiting, so two side by side take less than one after the other.
    let (transport, services) = std::thread::scope(|scope| {
        let services = scope.spawn(|| run_with_prefix(&mut guest("services"), "services"));
        (run_with_prefix(&mut guest("transport"), "transport"), services.join())
    });
    let services = services.map_err(|_| anyhow::anyhow!("the thread of the services panicked"))?;
    for outcome in [transport?, services?] {
        let Outcome::Passed = outcome else { return Ok(outcome) };
    }
    // Two guests, and nothing beside them: a side without a processor for some seconds counts as dead.
    let (_, switchyard) = &programs[0];
    let mut failover = Command::new("tests/rxe/failover.sh");
    run_with_prefix(failover.arg(switchyard).arg(MODEL), "failover")
}

/// Builds the programs for the guest. Returns their names there and their paths, the product first.
fn programs(form: Form) -> Result<Vec<(&'static str, PathBuf)>> {
    let is_needed = |program: &&Program| form == Form::Long || program.is_short;
    let programs: Vec<&Program> = PROGRAMS.iter().filter(is_needed).collect();
    let targets: Vec<Target> = programs.iter().map(|program| program.target).collect();
    let paths = artifacts::build(&[], &features::all(), &targets)?;
    Ok(programs.iter().map(|program| program.name).zip(paths).collect())
}

/// A program for the guest.
struct Program {
    /// Its name there.
    name: &'static str,
    target: Target,
    /// Whether the short form needs it.
    is_short: bool,
}

const fn program(
    name: &'static str,
    kind: &'static str,
    package: &'static str,
    target: &'static str,
    is_short: bool,
) -> Program {
    Program { name, target: Target { kind, package, name: target }, is_short }
}

const PROGRAMS: [Program; 12] = [
    program("switchyard", "--bin", "cli", "switchyard", true),
    program("verbs", "--test", "transports/verbs", "verbs", true),
    program("conformance", "--test", "tests", "conformance", true),
    program("engine", "--test", "message-engine", "engine", true),
    program("engine_bench", "--test", "bench/harness", "engine_bench", false),
    program("scale", "--test", "tests", "scale", false),
    program("p2p_one_to_one", "--example", "bench/harness", "p2p_one_to_one", false),
    program("p2p_multi", "--example", "bench/harness", "p2p_multi", false),
    program("proxy_network", "--test", "transports/proxy", "it", false),
    program("benchmark_remote", "--bin", "bench/harness", "benchmark_remote", false),
    program("proxy_layers", "--test", "tests", "proxy", true),
    program("proxy_device", "--test", "tests", "device-proxy", false),
];
/// Tests that need no device. The guests run the others.
pub(super) const ON_HOST: &str = "not (binary(verbs) | (binary(conformance) & test(/^verbs::/)) | test(=network::processes_over_verbs))";
const MODEL: &str = "data/tiny-moe";
