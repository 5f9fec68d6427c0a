//! The CUDA toolkit from pinned packages, the GPU bundle, and the check of every kernel.
//!
//! Nothing here needs a GPU or a system toolkit. The compiler comes from `CUDA_HOME` when that is set,
//! else from PyPI wheels kept in the user's cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::steps::{Outcome, cargo, run};
use crate::tools;

/// nvcc's own dependencies are unpinned, and a newer nvvm makes ptxas fail: so all are named.
const WHEELS: [&str; 7] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-cuobjdump==13.2.51",
    "nvidia-cuda-nvdisasm==13.2.51",
];
const VERSION: &str = "13.0";

const KERNELS: [&str; 7] = ["dispatch", "combine", "expert", "compute", "p2p", "flag", "proxy"];
const PROGRAMS: [&str; 7] = [
    "kernels_test",
    "expert_test",
    "fault_test",
    "softnic_test",
    "moe_bench",
    "p2p_bench",
    "ibgda_bench",
];
/// Programs of packages with the feature `cuda`, by package.
const RUST_PROGRAMS: [(&str, &[&str]); 2] = [
    ("switchyard", &["switchyard"]),
    ("switchyard-proxy", &["benchmark_local", "benchmark_relay"]),
];
/// Packages with the feature `cuda`; of each the test that goes into the bundle, and its name there.
const RUST_TESTS: [(&str, &str, &str); 3] = [
    ("switchyard-kernels", "against_rust", "rust_kernels_test"),
    ("switchyard-p2p-core", "cuda_ipc", "rust_cuda_ipc_test"),
    ("switchyard-proxy", "gpu", "rust_proxy_test"),
];
/// Machine code for Hopper, PTX for what comes later.
const TARGETS: [&str; 2] =
    ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_90,code=compute_90"];
/// What must be found in the disassembly of each kernel file.
const EXPECTED_INSTRUCTIONS: [(&str, &[&str]); 4] = [
    // 16-byte loads and stores, a fence over the link, quantisation in hardware.
    (
        "dispatch",
        &["LDG.E.128", "STG.E.128|ST.E.128", "MEMBAR.SC.SYS|MEMBAR.ALL.SYS", "F2FP.SATFINITE.E4M3"],
    ),
    (
        "combine",
        &["LD.E.128|LDG.E.128", "STG.E.128|ST.E.128", "LD.E.64.STRONG.SYS|LDG.E.64.STRONG.SYS"],
    ),
    // Cluster barriers for expert_recv.
    ("expert", &["UCGABAR_ARV", "MEMBAR.SC.SYS|MEMBAR.ALL.SYS"]),
    // Matrix units of a warpgroup in bf16 and fp8, fed by the copy engine; registers handed over between
    // warpgroups; results through shared memory.
    (
        "compute",
        &[
            "HGMMA.64x256x16.F32.BF16",
            "HGMMA.64x8x16.F32.BF16",
            "QGMMA.64x128x32.F32.E4M3.E4M3",
            "QGMMA.64x8x32.F32.E4M3.E4M3",
            "UTMALDG.5D",
            "UTMALDG.3D",
            "UBLKCP",
            "LDGSTS.E.BYPASS",
            "USETMAXREG",
            "STSM.16.M88.4",
            "STSM.16.MT88.2",
        ],
    ),
];
const MAX_BUNDLE_BYTES: u64 = 40 << 20;

/// An installed toolkit.
pub struct Toolkit {
    root: PathBuf,
}

impl Toolkit {
    /// `CUDA_HOME`, or the wheels, installed on first use. The inner error says why there is none.
    pub fn find() -> Result<Result<Self, String>> {
        if let Some(home) = std::env::var_os("CUDA_HOME") {
            let root = PathBuf::from(home);
            return Ok(if root.join("bin/nvcc").exists() {
                Ok(Self { root })
            } else {
                Err(format!("CUDA_HOME is {}, but there is no bin/nvcc in it", root.display()))
            });
        }
        let venv = tools::cache_dir().join(format!("cuda-{VERSION}"));
        if let Some(root) = wheel_root(&venv) {
            return Ok(Ok(Self { root }));
        }
        if !tools::on_path("python3") {
            return Ok(
                Err("python3 is missing: it installs the CUDA compiler's wheels".to_owned()),
            );
        }
        println!("installing the CUDA {VERSION} compiler into {} (once, 280 MB)", venv.display());
        let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).status();
        if !made.is_ok_and(|status| status.success()) {
            return Ok(Err(
                "python3 -m venv failed: install Debian's package `python3-venv`".to_owned()
            ));
        }
        let installed = Command::new(venv.join("bin/pip"))
            .args(["install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"])
            .args(WHEELS)
            .status()
            .context("cannot start pip")?;
        match wheel_root(&venv) {
            Some(root) if installed.success() => Ok(Ok(Self { root })),
            _ => Ok(Err(format!(
                "the CUDA wheels could not be installed (pip ended with {installed})"
            ))),
        }
    }

    /// One of its programs.
    pub fn tool(&self, name: &str) -> Command {
        Command::new(self.root.join("bin").join(name))
    }

    fn library_dir(&self) -> PathBuf {
        let lib64 = self.root.join("lib64");
        if lib64.join("libcudart_static.a").exists() { lib64 } else { self.root.join("lib") }
    }

    /// Compiles `source` for `targets` into `object`. Returns ptxas's resource report.
    fn compile(&self, source: &Path, object: &Path, targets: &[&str]) -> Result<String> {
        let output = self
            .tool("nvcc")
            .args(["-O3", "-std=c++17", "-Xptxas", "-v", "-c"])
            .args(targets)
            .args(["-Ikernels/include", "-Ikernels/cuda", "-Ikernels/gpu-tests", "-o"])
            .args([object, source])
            .output()
            .context("cannot start nvcc")?;
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            bail!("nvcc refused {}:\n{report}", source.display());
        }
        Ok(report)
    }
}

/// `cargo xtask cuda-toolkit`.
pub fn install_toolkit() -> Result<Outcome> {
    Ok(match Toolkit::find()? {
        Ok(toolkit) => {
            println!("{}", toolkit.root.display());
            Outcome::Passed
        }
        Err(reason) => Outcome::Failed(reason),
    })
}

/// The step `kernels`: compiles every kernel, finds no spills and the instructions that are meant to be
/// there.
pub fn check_kernels() -> Result<Outcome> {
    let toolkit = match Toolkit::find()? {
        Ok(toolkit) => toolkit,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let objects = object_dir()?;
    for name in KERNELS {
        let object = objects.join(format!("{name}.o"));
        let report = toolkit.compile(&kernel_source(name), &object, &TARGETS)?;
        let num_kernels = report.matches("Compiling entry function").count();
        let spills: Vec<&str> = report
            .lines()
            .filter(|line| {
                line.contains("spill")
                    && !line.contains(" 0 bytes spill stores, 0 bytes spill loads")
            })
            .collect();
        if !spills.is_empty() {
            return Ok(Outcome::Failed(format!(
                "{name}.cu spills registers: {}",
                spills.join("; ").trim()
            )));
        }
        // ptxas says so when it makes asynchronous products wait for one another.
        if let Some(line) = report.lines().find(|line| line.contains("Potential Performance Loss"))
        {
            return Ok(Outcome::Failed(format!("{name}.cu: {}", line.trim())));
        }
        println!("{name}.cu: {num_kernels} kernels, no spills");
    }
    for (name, instructions) in EXPECTED_INSTRUCTIONS {
        let listing = toolkit
            .tool("cuobjdump")
            .arg("--dump-sass")
            .arg(objects.join(format!("{name}.o")))
            .env("PATH", search_path(&toolkit))
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cuobjdump")?;
        let listing = String::from_utf8_lossy(&listing.stdout);
        for choice in instructions {
            if !choice.split('|').any(|instruction| listing.contains(instruction)) {
                return Ok(Outcome::Failed(format!(
                    "{name}.cu has no {choice} in its machine code"
                )));
            }
        }
        // A stack array in local memory shows as LDL or STL.
        if listing.lines().any(|line| line.contains(" LDL") || line.contains(" STL")) {
            println!("{name}.cu: note: some kernel keeps data in local memory");
        }
        println!("{name}.cu: {} found", instructions.join(", "));
    }
    check_rust_side()
}

/// Lints and runs the Rust side with the kernels embedded, all packages at once so that what they share
/// is built once. The build finds the toolkit as we did. Tests that need a GPU skip themselves.
fn check_rust_side() -> Result<Outcome> {
    let tested = RUST_TESTS.map(|(package, ..)| package);
    let mut lint = cargo(&["clippy", "--all-targets"]);
    let linted = RUST_PROGRAMS.map(|(package, _)| package);
    for package in linted.iter().filter(|package| !tested.contains(package)).chain(&tested) {
        lint.args(["-p", package, "--features", &format!("{package}/cuda")]);
    }
    let mut run_tests = cargo(&["test", "--lib"]);
    for (package, test, _) in RUST_TESTS {
        run_tests.args(["-p", package, "--features", &format!("{package}/cuda"), "--test", test]);
    }
    // What needs no GPU runs with the other tests already, in builds without the feature.
    run_tests.args(["--", "gpu", "slots"]);
    for command in [lint.args(["--", "-D", "warnings"]), &mut run_tests] {
        if let Outcome::Failed(reason) = run(command)? {
            return Ok(Outcome::Failed(format!("with feature `cuda`: {reason}")));
        }
    }
    Ok(Outcome::Passed)
}

/// `cargo xtask gpu-bundle`: programs and scripts in `target/gpu-bundle`, for a host with a driver.
pub fn make_bundle() -> Result<Outcome> {
    let toolkit = match Toolkit::find()? {
        Ok(toolkit) => toolkit,
        Err(reason) => return Ok(Outcome::Failed(reason)),
    };
    let objects = object_dir()?.join("bundle");
    std::fs::create_dir_all(&objects)
        .with_context(|| format!("cannot create {}", objects.display()))?;
    let bundle = Path::new("target/gpu-bundle");
    // Nothing of an earlier bundle stays.
    if bundle.exists() {
        std::fs::remove_dir_all(bundle)
            .with_context(|| format!("cannot remove {}", bundle.display()))?;
    }
    std::fs::create_dir_all(bundle)
        .with_context(|| format!("cannot create {}", bundle.display()))?;
    let sources = KERNELS
        .map(|name| (name, kernel_source(name)))
        .into_iter()
        .chain(PROGRAMS.map(|name| (name, PathBuf::from(format!("kernels/gpu-tests/{name}.cu")))));
    for (name, source) in sources {
        println!("compiling {}", source.display());
        // Machine code only: every program has all kernels, and PTX would double the bundle.
        toolkit.compile(&source, &objects.join(format!("{name}.o")), &TARGETS[..1])?;
    }
    for program in PROGRAMS {
        let status = Command::new("g++")
            .args(KERNELS.map(|name| objects.join(format!("{name}.o"))))
            .arg(objects.join(format!("{program}.o")))
            .arg("-o")
            .arg(bundle.join(program))
            .arg("-L")
            .arg(toolkit.library_dir())
            .args([
                "-lcudart_static",
                "-ldl",
                "-lrt",
                "-lpthread",
                "-static-libstdc++",
                "-static-libgcc",
            ])
            .status()
            .context("cannot start g++")?;
        if !status.success() {
            return Ok(Outcome::Failed(format!("{program} could not be linked ({status})")));
        }
        strip(&bundle.join(program))?;
    }
    for (package, test, name) in RUST_TESTS {
        println!("compiling test {test} of {package}");
        let program = build_with_cuda(&["test", "--no-run"], package, "--test", test)?;
        add_program(&program, &bundle.join(name))?;
    }
    for (package, programs) in RUST_PROGRAMS {
        for name in programs {
            println!("compiling {name} of {package}");
            let program = build_with_cuda(&["build"], package, "--bin", name)?;
            add_program(&program, &bundle.join(name))?;
        }
    }
    for (from, to) in [
        ("kernels/gpu-tests/run-tests.sh", "run-tests.sh"),
        ("kernels/gpu-tests/run-bench.sh", "run-bench.sh"),
        ("bench/gpu/baseline.py", "baseline.py"),
        ("bench/gpu/peak.py", "peak.py"),
        ("bench/gpu/summarize.py", "summarize.py"),
    ] {
        std::fs::copy(from, bundle.join(to)).with_context(|| format!("cannot copy {from}"))?;
    }
    // The scripts unpack them where they run.
    let programs = PROGRAMS.into_iter().chain(RUST_TESTS.map(|(.., name)| name));
    let programs =
        programs.chain(RUST_PROGRAMS.iter().flat_map(|(_, names)| names.iter().copied()));
    for program in programs {
        let mut gzip = Command::new("gzip");
        if let Outcome::Failed(reason) = run(gzip.arg("--force").arg(bundle.join(program)))? {
            return Ok(Outcome::Failed(format!("{program} could not be packed: {reason}")));
        }
    }
    let mut num_bytes = 0;
    for entry in std::fs::read_dir(bundle)? {
        num_bytes += entry?.metadata()?.len();
    }
    println!("{}: {:.1} MB", bundle.display(), num_bytes as f64 / 1e6);
    Ok(if num_bytes > MAX_BUNDLE_BYTES {
        Outcome::Failed(format!(
            "the bundle has {num_bytes} bytes, at most {MAX_BUNDLE_BYTES} are meant"
        ))
    } else {
        Outcome::Passed
    })
}

fn add_program(from: &Path, to: &Path) -> Result<()> {
    std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    strip(to)
}

/// Debug information would double the bundle.
fn strip(program: &Path) -> Result<()> {
    match run(Command::new("strip").arg(program))? {
        Outcome::Failed(reason) => bail!("{}: {reason}", program.display()),
        _ => Ok(()),
    }
}

/// Builds a program or test with the feature `cuda` and says where it is.
fn build_with_cuda(command: &[&str], package: &str, kind: &str, name: &str) -> Result<PathBuf> {
    let output = cargo(command)
        .args(["--message-format", "json", "-p", package, "--features", "cuda", kind, name])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("{name} of {package} could not be built ({})", output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let program = text
        .lines()
        .filter(|line| line.contains("\"compiler-artifact\""))
        // A test brings its package's programs along.
        .filter(|line| line.contains(&format!("\"name\":\"{name}\"")))
        .filter_map(|line| line.split_once("\"executable\":\"")?.1.split_once('"'))
        .map(|(path, _)| PathBuf::from(path))
        .next_back();
    program.with_context(|| format!("cargo named no program for {name} of {package}"))
}

fn wheel_root(venv: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(venv.join("lib")).ok()?;
    versions
        .filter_map(|entry| Some(entry.ok()?.path().join("site-packages/nvidia/cu13")))
        .find(|root| root.join("bin/nvcc").exists() && root.join("bin/cuobjdump").exists())
}

fn kernel_source(name: &str) -> PathBuf {
    PathBuf::from(format!("kernels/cuda/{name}.cu"))
}

fn object_dir() -> Result<PathBuf> {
    let dir = PathBuf::from("target/cuda/objects");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir)
}

/// cuobjdump looks for nvdisasm on the search path.
fn search_path(toolkit: &Toolkit) -> std::ffi::OsString {
    let mut dirs = vec![toolkit.root.join("bin")];
    if let Some(path) = std::env::var_os("PATH") {
        dirs.extend(std::env::split_paths(&path));
    }
    std::env::join_paths(dirs).unwrap_or_else(|_| toolkit.root.join("bin").into_os_string())
}
