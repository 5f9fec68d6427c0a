//! The steps of `cargo xtask test`, in order: cheap and telling first.

pub mod fmt;
mod mlx5;
mod rxe;
mod scale;

use std::io::{IsTerminal as _, Write as _};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result};

use crate::{cuda, told, tools};

/// How a step ended.
pub enum Outcome {
    /// Everything held.
    Passed,
    /// Something did not hold.
    Failed(String),
    /// It could not run here, for this reason.
    Skipped(String),
}

/// One step.
pub struct Step {
    /// Name, as taken by `--only` and `SWITCHYARD_REQUIRE`.
    pub name: &'static str,
    /// What it checks.
    pub about: &'static str,
    /// Runs it.
    pub run: fn() -> Result<Outcome>,
}

/// All steps, in order.
pub fn all() -> Vec<Step> {
    let step = |name, about, run| Step { name, about, run };
    vec![
        step("packages", "system packages that the tests need", tools::install_packages),
        step("fmt", "formatting of Rust, C, C++ and CUDA", fmt::check),
        step("clippy", "lints, warnings as errors", clippy),
        step("deny", "licences, sources and bans of dependencies", deny),
        step("unit", "unit, conformance, end-to-end and fault tests", unit),
        step("doc", "documentation tests and links", doc),
        step("loom", "interleavings of the slot ring, the flags and the proxy's lanes", loom),
        step("fuzz", "decoders under mutated input, for a bounded time", fuzz),
        step(
            "kernels",
            "CUDA kernels and programs: compiled, no spills, instructions as meant",
            cuda::check_kernels,
        ),
        step("mlx5", "work requests against the vendor's header, fences of doorbells", mlx5::check),
        step("scale", "a thousand peers and deaths over libfabric", scale::check),
        step("rxe", "the verbs transport on Soft-RoCE devices in QEMU guests", rxe::check),
        step("deploy", "Prometheus rules and scrape configuration, systemd units", deploy),
        step("demo", "the demo, verified against the reference", demo),
    ]
}

/// Makes the workspace root the current directory, wherever cargo was called.
pub fn enter_workspace() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask has no parent")?;
    std::env::set_current_dir(root).with_context(|| format!("cannot enter {}", root.display()))?;
    let log = skip_log();
    if log.exists() {
        std::fs::remove_file(&log).with_context(|| format!("cannot remove {}", log.display()))?;
    }
    Ok(())
}

/// Whether `SWITCHYARD_REQUIRE` names `what` (or `all`).
pub fn is_required(what: &str) -> bool {
    std::env::var("SWITCHYARD_REQUIRE")
        .is_ok_and(|list| list.split(',').any(|item| item == what || item == "all"))
}

/// What single tests could not run: `(resource, reason)`, as they noted in the skip log.
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

/// Notes that a part of a step did not run, as single tests do.
fn note_skip(resource: &str, reason: &str) -> Result<()> {
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

/// Where cargo builds.
pub fn target_dir() -> PathBuf {
    let root = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from)
}

/// The cargo that runs this.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).env("SWITCHYARD_SKIP_LOG", skip_log());
    command
}

/// Runs a command to its end; its output goes to ours. What of it tells why it failed is in the outcome, too,
/// where nobody has watched.
pub fn run(command: &mut Command) -> Result<Outcome> {
    let (status, told) = if std::io::stdout().is_terminal() {
        let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
        (status, Vec::new())
    } else {
        told::run(command)?
    };
    if status.success() {
        return Ok(Outcome::Passed);
    }
    Ok(failed(&format!("{:?}", command.get_program()), status, &told))
}

/// What of its output tells why something failed stands below how it ended.
fn failed(what: &str, status: ExitStatus, told: &[String]) -> Outcome {
    let reason = format!("{what} ended with {status}");
    Outcome::Failed([std::slice::from_ref(&reason), told].concat().join("\n         "))
}

/// Features of the workspace's builds, beside the default ones: RDMA where its headers are.
///
/// All steps build for the whole workspace with these, or with more: for a single package cargo chooses
/// other features of dependencies, and builds all of them once more.
pub fn features() -> String {
    let rdma = if rxe::can_build() { rxe::FEATURES } else { &[] };
    let all: Vec<&str> = [["switchyard-bench-harness/libfabric"].as_slice(), rdma].concat();
    all.join(",")
}

/// Lints with every feature that can be built here. What stands in for a feature that is left out is
/// compiled by the steps `unit` and `doc`.
fn clippy() -> Result<Outcome> {
    let mut features = features();
    match cuda::Toolkit::find()? {
        Ok(_) => features = cuda::features(),
        Err(reason) => note_skip("cuda", &format!("not linted: {reason}"))?,
    }
    if !rxe::can_build() {
        note_skip("verbs", "not linted: headers of libibverbs or librdmacm are missing")?;
    }
    let lints = ["clippy", "--workspace", "--features", &features, "--all-targets"];
    run(cargo(&lints).args(["--", "-D", "warnings"]))
}

/// Known vulnerabilities are looked up where their database can be fetched.
fn deny() -> Result<Outcome> {
    let program = match tools::cargo_tool("cargo-deny", "0.20.2")? {
        Ok(program) => program,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut checks = vec!["licenses", "bans", "sources"];
    let fetched = Command::new(&program)
        .args(["--log-level", "off", "fetch", "db"])
        .stderr(Stdio::null())
        .status()
        .context("cannot start cargo-deny")?;
    if fetched.success() {
        checks.push("advisories");
    } else {
        let reason = "the RustSec database cannot be fetched from github.com";
        note_skip("advisories", reason)?;
    }
    run(Command::new(program).args(["check", "--hide-inclusion-graph"]).args(checks))
}

fn unit() -> Result<Outcome> {
    let nextest = cargo(&["nextest", "--version"]).output().is_ok_and(|out| out.status.success());
    let features = features();
    let features = ["--workspace", "--features", &features, "--no-fail-fast"];
    if nextest {
        // Weights in .config/nextest.toml: 2 for what needs a processor, 1 for what mostly waits, of which one more
        // finds room.
        let threads = 2 * std::thread::available_parallelism().map_or(1, NonZero::get) + 1;
        let threads = threads.to_string();
        let tests = ["nextest", "run", "--test-threads", &threads];
        match run(cargo(&tests).args(features).args(["-E", rxe::ON_HOST]))? {
            Outcome::Passed => {}
            other => return Ok(other),
        }
        // Whatever the NIC leaves open, and the other way of making queues.
        let seed = std::process::id().to_string();
        println!("services over NICs that delay and reorder: SWITCHYARD_SOFTNIC_SEED={seed}");
        run(cargo(&tests)
            .args(features)
            .args(["-E", "binary(device-ibgda)"])
            .envs([("SWITCHYARD_SOFTNIC_SEED", seed.as_str()), ("SWITCHYARD_TEST_QUEUES", "devx")]))
    } else {
        // Several tests count what their process holds, so nobody may be beside them.
        let reason = "cargo-nextest is missing, which gives every test a process of its own: tests run one \
                      after the other";
        note_skip("nextest", reason)?;
        println!("{reason}");
        let tests = ["test", "--lib", "--bins", "--tests"];
        run(cargo(&tests).args(features).args(["--", "--test-threads=1"]))
    }
}

fn doc() -> Result<Outcome> {
    let features = features();
    match run(&mut cargo(&["test", "--workspace", "--features", &features, "--doc"]))? {
        Outcome::Passed => {}
        other => return Ok(other),
    }
    let links = ["doc", "--workspace", "--features", &features, "--no-deps", "--quiet"];
    run(cargo(&links).env("RUSTDOCFLAGS", "-D warnings"))
}

fn loom() -> Result<Outcome> {
    let packages = ["-p", "switchyard-p2p-core", "-p", "switchyard-proxy"];
    run(cargo(&["test", "--release", "--test", "loom"])
        .args(packages)
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", target_dir().join("loom"))
        // Compiling takes most of the time, and what is run is over in seconds.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("LOOM_MAX_PREEMPTIONS", "3"))
}

fn fuzz() -> Result<Outcome> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if !tools::on_path(&compiler) {
        let reason =
            format!("{compiler} is missing, which libFuzzer needs: install g++, or set CXX");
        return Ok(Outcome::Skipped(reason));
    }
    // Whoever changes one thing should not be stopped by what a new seed finds elsewhere; `fuzz/run.sh` by
    // itself takes a new one every time.
    let seed = std::env::var("SWITCHYARD_FUZZ_SEED").unwrap_or_else(|_| "1".to_owned());
    run(Command::new("bash").args(["fuzz/run.sh", "13"]).env("SWITCHYARD_FUZZ_SEED", seed))
}

fn deploy() -> Result<Outcome> {
    if !tools::on_path("promtool") {
        return Ok(Outcome::Skipped(
            "promtool is missing: install Debian's package `prometheus`".to_owned(),
        ));
    }
    for args in [
        ["check", "config", "deploy/prometheus/prometheus.yml"],
        ["check", "rules", "deploy/prometheus/rules.yml"],
        ["test", "rules", "deploy/prometheus/rules.test.yml"],
    ] {
        if let Outcome::Failed(reason) = run(Command::new("promtool").args(args))? {
            return Ok(Outcome::Failed(format!("promtool {}: {reason}", args.join(" "))));
        }
    }
    verify_units()
}

/// Has systemd read the units. It also looks for the binary, which is not installed here.
fn verify_units() -> Result<Outcome> {
    if !tools::on_path("systemd-analyze") {
        return Ok(Outcome::Skipped(
            "systemd-analyze is missing: install Debian's package `systemd`".to_owned(),
        ));
    }
    let folder = target_dir().join("units");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let mut verify = Command::new("systemd-analyze");
    verify.arg("verify");
    for name in ["switchyard-control-plane.service", "switchyard-expert-server@.service"] {
        let unit = Path::new("deploy/systemd").join(name);
        let text = std::fs::read_to_string(&unit)
            .with_context(|| format!("cannot read {}", unit.display()))?;
        let copy = folder.join(name);
        std::fs::write(&copy, text.replace("/usr/local/bin/switchyard", "/bin/true"))
            .with_context(|| format!("cannot write {}", copy.display()))?;
        verify.arg(copy);
    }
    let output = verify.output().context("cannot start systemd-analyze")?;
    // An unknown or misplaced setting is only a warning, with the unit's name.
    let said = String::from_utf8_lossy(&output.stderr);
    Ok(if output.status.success() && !said.contains("switchyard-") {
        Outcome::Passed
    } else {
        Outcome::Failed(format!("systemd-analyze verify: {}", said.trim()))
    })
}

/// With the binary of the steps before: one of the release profile would be minutes of compiling for the
/// same checks.
fn demo() -> Result<Outcome> {
    let features = features();
    let build = ["build", "--quiet", "--workspace", "--features", &features, "--bin", "switchyard"];
    // The features that tests add to dependencies count only when some test is built, too.
    if let Outcome::Failed(reason) = run(cargo(&build).args(["--test", "cli"]))? {
        return Ok(Outcome::Failed(reason));
    }
    let output = Command::new(target_dir().join("debug/switchyard"))
        .args(["demo", "--json"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start the demo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{}", text.trim_end());
    if !output.status.success() {
        return Ok(Outcome::Failed(format!("the demo ended with {}", output.status)));
    }
    let compact: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    for expected in ["\"verified\":true", "\"lost_requests\":0", "\"duplicated_requests\":0"] {
        if !compact.contains(expected) {
            return Ok(Outcome::Failed(format!("the demo's report lacks {expected}")));
        }
    }
    Ok(Outcome::Passed)
}
