//! The steps of `cargo xtask test`, in their order.

mod engines;
pub mod fmt;
mod mlx5;
mod rxe;
mod scale;

use std::num::NonZero;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::process::{Form, Outcome, cargo, note_skip, run, target_dir};
use crate::{cuda, features, prose, python, rules, tools};

/// One step.
pub struct Step {
    /// Name, as taken by `--only` and `SWITCHYARD_REQUIRE`.
    pub name: &'static str,
    /// Its purpose.
    pub about: &'static str,
    /// Checks that only `--all` adds. Empty where both forms are the same.
    pub about_long: &'static str,
    /// Runs it.
    pub run: Run,
}

/// The function of a step.
pub enum Run {
    /// One form.
    Same(fn() -> Result<Outcome>),
    /// A short and a long form.
    ByForm(fn(Form) -> Result<Outcome>),
}

impl Step {
    const fn new(name: &'static str, about: &'static str, run: fn() -> Result<Outcome>) -> Self {
        Self { name, about, about_long: "", run: Run::Same(run) }
    }

    const fn by_form(
        name: &'static str,
        about: &'static str,
        about_long: &'static str,
        run: fn(Form) -> Result<Outcome>,
    ) -> Self {
        Self { name, about, about_long, run: Run::ByForm(run) }
    }

    /// Runs it in one of its forms.
    pub fn run(&self, form: Form) -> Result<Outcome> {
        match self.run {
            Run::Same(run) => run(),
            Run::ByForm(run) => run(form),
        }
    }
}

/// All steps, in their order: cheap ones first.
pub const ALL: [Step; 22] = [
    Step::new("packages", "system packages that the tests need", tools::install_packages),
    Step::new("fmt", "formatting of Rust, C, C++ and CUDA", fmt::check),
    Step::new(
        "rules",
        "dependencies of crates, cycles among modules, names of SYNC POINTs",
        rules::check,
    ),
    Step::new("prose", "plain English in comments and Markdown: counts and ceilings", prose::check),
    Step::new("clippy", "lints, warnings as errors", clippy),
    Step::new("deny", "licences, sources and bans of dependencies", deny),
    Step::new("etcd", "the etcd that tests of the control plane start", tools::install_etcd),
    Step::by_form(
        "unit",
        "unit, conformance, end-to-end and fault tests",
        "tests with all their repetitions, and examples",
        unit,
    ),
    Step::new("doc", "documentation tests and links", doc),
    Step::by_form(
        "loom",
        "interleavings of the slot ring, the flags and the proxy's lanes, up to 3 preemptions",
        "up to 4 preemptions",
        loom,
    ),
    Step::by_form(
        "fuzz",
        "decoders under mutated input, 4 s each, by a fixed seed",
        "60 s each",
        fuzz,
    ),
    Step::by_form(
        "kernels",
        "CUDA kernels and programs: compiled, no spills, the expected instructions",
        "tests linked with embedded kernels",
        cuda::check_kernels,
    ),
    Step::new(
        "mlx5",
        "work requests against the vendor's header, fences of doorbells",
        mlx5::check,
    ),
    Step::by_form(
        "scale",
        "a thousand peers and 24 deaths over libfabric",
        "60 deaths",
        scale::check,
    ),
    Step::by_form(
        "rxe",
        "the verbs transport on a Soft-RoCE device in a QEMU guest: data, flags, deaths, the demo",
        "the whole verbs suite, two devices, many peers, failover between two guests",
        rxe::check,
    ),
    Step::new("deploy", "Prometheus rules and scrape configuration, systemd units", deploy),
    Step::new(
        "helm",
        "the Helm chart: lint, rendered objects against the schemas of Kubernetes",
        helm,
    ),
    Step::new(
        "page",
        "the control plane's page in headless Chromium, with 4 and 1,000 members",
        page,
    ),
    Step::new(
        "openapi",
        "requests made from the control plane's OpenAPI document, by a fixed seed: no 5xx, answers as described",
        openapi,
    ),
    Step::new("demo", "the demo, verified against the reference", demo),
    Step::new(
        "python",
        "the wheel in a clean environment: style, types, stubs and tests of the Python package",
        python::check,
    ),
    Step::by_form(
        "engines",
        "transformers and vLLM on a CPU with experts on servers that are killed",
        "SGLang, tensor parallelism, more families, five minutes of deaths",
        engines::check,
    ),
];

/// Variables that make tests repeat more (`tests/support/src/long.rs`).
const LONG: [(&str, &str); 1] = [("SWITCHYARD_LONG", "1")];
/// Variables that make tests repeat less: deaths of peers, of a transport and of the message engine. These tests run
/// alone, so each second of them counts twice.
const SHORT: [(&str, &str); 2] =
    [("SWITCHYARD_KILL_DEATHS", "250"), ("SWITCHYARD_KILL_ROUNDS", "12")];

/// Lints with every feature that can be built here. Code that stands in for an absent feature is compiled by the
/// steps `unit` and `doc`. Build scripts compile no C++ and no CUDA for clippy, so no toolkit is needed.
fn clippy() -> Result<Outcome> {
    if !features::can_build_verbs() {
        note_skip("verbs", "not linted: headers of libibverbs or librdmacm are missing")?;
    }
    let features = features::with_cuda();
    let lints = ["clippy", "--workspace", "--features", &features, "--all-targets"];
    run(cargo(&lints).args(["--", "-D", "warnings"]))
}

/// Also looks for known vulnerabilities if their database can be fetched.
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

/// Examples are programs that measure: only the long form builds them, beside clippy, which compiles them.
fn unit(form: Form) -> Result<Outcome> {
    let nextest = cargo(&["nextest", "--version"]).output().is_ok_and(|out| out.status.success());
    let features = features::all();
    let features = ["--workspace", "--features", &features, "--no-fail-fast"];
    let targets = form.pick(["--lib", "--bins", "--tests"].as_slice(), &[]);
    let variables = form.pick(SHORT.as_slice(), &LONG).iter().copied();
    // A value from the environment wins.
    let variables = variables.filter(|(name, _)| std::env::var_os(name).is_none());
    if !nextest {
        // Several tests count resources of their process, so tests run one after the other.
        let reason = "cargo-nextest is missing, which gives every test a process of its own: tests run one \
                      after the other";
        note_skip("nextest", reason)?;
        println!("{reason}");
        let mut tests = cargo(&["test", "--lib", "--bins", "--tests"]);
        tests.args(features).args(["--", "--test-threads=1"]);
        return run(tests.envs(variables));
    }
    // Weights are in .config/nextest.toml: 2 for a test that needs a processor, 1 for one that mostly waits. One
    // waiting test runs beside the others.
    let threads = 2 * std::thread::available_parallelism().map_or(1, NonZero::get) + 1;
    let threads = threads.to_string();
    let tests = || {
        let mut tests = cargo(&["nextest", "run", "--test-threads", &threads]);
        tests.args(features).args(targets).envs(variables.clone());
        tests
    };
    let outcome = run(tests().args(["-E", rxe::ON_HOST]))?;
    if !matches!(outcome, Outcome::Passed) {
        return Ok(outcome);
    }
    // Orders that the standard leaves to the NIC, and the other kind of queues.
    let seed = std::process::id().to_string();
    println!("services over NICs that delay and reorder: SWITCHYARD_SOFTNIC_SEED={seed}");
    run(tests()
        .args(["-E", "binary(device-ibgda)"])
        .envs([("SWITCHYARD_SOFTNIC_SEED", seed.as_str()), ("SWITCHYARD_TEST_QUEUES", "devx")]))
}

fn doc() -> Result<Outcome> {
    let features = features::all();
    match run(&mut cargo(&["test", "--workspace", "--features", &features, "--doc"]))? {
        Outcome::Passed => {}
        other => return Ok(other),
    }
    let links = ["doc", "--workspace", "--features", &features, "--no-deps", "--quiet"];
    run(cargo(&links).env("RUSTDOCFLAGS", "-D warnings"))
}

fn loom(form: Form) -> Result<Outcome> {
    let packages = ["-p", "switchyard-p2p-core", "-p", "switchyard-proxy"];
    run(cargo(&["test", "--release", "--test", "loom"])
        .args(packages)
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", target_dir().join("loom"))
        // Compiling takes most of the time; the tests run for seconds.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("LOOM_MAX_PREEMPTIONS", form.pick("3", "4")))
}

fn fuzz(form: Form) -> Result<Outcome> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    if !tools::on_path(&compiler) {
        let reason =
            format!("{compiler} is missing, which libFuzzer needs: install g++, or set CXX");
        return Ok(Outcome::Skipped(reason));
    }
    // A change should not fail because a new seed finds an old error; `fuzz/run.sh` by itself takes a new seed
    // every time.
    let seed = std::env::var("SWITCHYARD_FUZZ_SEED").unwrap_or_else(|_| "1".to_owned());
    let seconds = form.pick("4", "60");
    run(Command::new("bash").args(["fuzz/run.sh", seconds]).env("SWITCHYARD_FUZZ_SEED", seed))
}

/// Tests of the command line compare these files with the names of the metrics. Here they write them.
pub fn write_dashboards() -> Result<Outcome> {
    let test = ["test", "-p", "switchyard-cli", "--test", "it", "--", "dashboards::"];
    run(cargo(&test).env("SWITCHYARD_BLESS", "1"))
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

/// Helm itself comes as a library of a Python package: its binary is in no registry of Rust, Python or Debian.
fn helm() -> Result<Outcome> {
    let folder = Path::new("deploy/helm");
    let environment = match python::environment("helm", &folder.join("requirements.txt"))? {
        Ok(environment) => environment,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    run(Command::new(environment.join("bin/python")).arg(folder.join("check.py")))
}

fn page() -> Result<Outcome> {
    let folder = Path::new("tests/page");
    if !tools::on_path("chromium") && !tools::on_path("google-chrome") {
        return Ok(Outcome::Skipped(
            "chromium is missing: install Debian's package `chromium`".to_owned(),
        ));
    }
    let environment = match python::environment("page", &folder.join("requirements.txt"))? {
        Ok(environment) => environment,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    run(Command::new(environment.join("bin/python"))
        .arg(folder.join("check.py"))
        .arg(target_dir().join("page"))
        .env("PYTHONDONTWRITEBYTECODE", "1"))
}

/// With the binary that the step `unit` has built, like the step `demo`.
fn openapi() -> Result<Outcome> {
    let folder = Path::new("tests/openapi");
    let environment = match python::environment("openapi", &folder.join("requirements.txt"))? {
        Ok(environment) => environment,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    if let Outcome::Failed(reason) = build_binary()? {
        return Ok(Outcome::Failed(reason));
    }
    // A change should not fail because a new seed finds an old error.
    let seed = std::env::var("SWITCHYARD_FUZZ_SEED").unwrap_or_else(|_| "1".to_owned());
    run(Command::new(environment.join("bin/python"))
        .arg(folder.join("check.py"))
        .arg(target_dir().join("debug/switchyard"))
        .arg(seed)
        .env("PYTHONDONTWRITEBYTECODE", "1"))
}

/// Checks the units with systemd. It also looks for the binary, which is not installed here.
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
    // An unknown or misplaced setting is only a warning that names the unit.
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() || messages.contains("switchyard-") {
        return Ok(Outcome::Failed(format!("systemd-analyze verify: {}", messages.trim())));
    }
    // systemd's measure of what a service could do to its host, times ten: 0 to 100.
    for (name, limit) in
        [("switchyard-control-plane.service", 20), ("switchyard-expert-server@.service", 30)]
    {
        let mut security = Command::new("systemd-analyze");
        security.args(["security", "--offline=true", "--no-pager"]);
        security.arg(format!("--threshold={limit}")).arg(folder.join(name));
        let output = security.output().context("cannot start systemd-analyze")?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stdout);
            let last = text.trim().lines().last().unwrap_or("no answer").to_owned();
            return Ok(Outcome::Failed(format!("systemd-analyze security, limit {limit}: {last}")));
        }
    }
    Ok(Outcome::Passed)
}

/// Builds the binary `switchyard` as the step `unit` does.
fn build_binary() -> Result<Outcome> {
    let features = features::all();
    let build = ["build", "--quiet", "--workspace", "--features", &features, "--bin", "switchyard"];
    // Only a build with a test has the features that tests add to dependencies.
    run(cargo(&build).args(["--test", "fault"]))
}

/// With the binary that the step `unit` has built: a release build takes minutes for the same checks.
fn demo() -> Result<Outcome> {
    if let Outcome::Failed(reason) = build_binary()? {
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
