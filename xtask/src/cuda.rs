//! The CUDA toolkit from pinned packages, the GPU bundle, and the check of every kernel.
//!
//! Nothing here needs a GPU or a system toolkit. The compiler comes from `CUDA_HOME` when that is set,
//! else from PyPI wheels kept in the user's cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::artifacts::{self, Target};
use crate::parallel;
use crate::process::{Form, Outcome, cargo, run};
use crate::sass::{self, Findings};
use crate::{features, tools};

/// nvcc does not pin its own dependencies, and a newer nvvm makes ptxas fail. So all of them have a version here.
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
/// Programs for users, built as they are shipped.
const RUST_PROGRAMS: [Target; 4] = [
    Target { kind: "--bin", package: "cli", name: "switchyard" },
    Target { kind: "--bin", package: "bench/harness", name: "benchmark_local" },
    Target { kind: "--bin", package: "bench/harness", name: "benchmark_relay" },
    Target { kind: "--bin", package: "bench/harness", name: "benchmark_remote" },
];
/// Tests that go into the bundle: their names there.
const RUST_TESTS: [(&str, Target); 9] = [
    ("rust_kernels_test", Target { kind: "--test", package: "kernels", name: "against_rust" }),
    (
        "rust_cuda_ipc_test",
        Target { kind: "--test", package: "transports/cuda-ipc", name: "cuda_ipc" },
    ),
    ("rust_proxy_test", Target { kind: "--test", package: "transports/proxy", name: "gpu" }),
    ("rust_ibgda_test", Target { kind: "--test", package: "transports/ibgda", name: "gpu" }),
    ("rust_device_proxy_test", Target { kind: "--test", package: "tests", name: "device-proxy" }),
    ("rust_device_ibgda_test", Target { kind: "--test", package: "tests", name: "device-ibgda" }),
    (
        "rust_device_server_test",
        Target { kind: "--test", package: "expert-server", name: "expert_server" },
    ),
    (
        "rust_device_client_test",
        Target { kind: "--test", package: "attention-client", name: "device" },
    ),
    (
        "rust_device_alloc_test",
        Target { kind: "--test", package: "attention-client", name: "device_alloc" },
    ),
];
/// The small model, for tests of whole layers.
const MODEL: (&str, [&str; 2]) = ("data/tiny-moe", ["config.json", "model.safetensors"]);
/// Layers that other libraries computed, for tests of formats and families: folders of `data`.
const REFERENCES: [&str; 2] = ["reference-formats", "family-blocks"];
const REFERENCE_FILES: [&str; 3] = ["config.json", "model.safetensors", "reference.safetensors"];
/// Machine code for Hopper.
const TARGET: &str = "-gencode=arch=compute_90a,code=sm_90a";
const MAX_BUNDLE_BYTES: u64 = 40_000_000;

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
        println!("installing the CUDA {VERSION} compiler into {} (once, 280 MB)", venv.display());
        if let Err(reason) = tools::install_wheels(&venv, &WHEELS)? {
            return Ok(Err(reason));
        }
        let root = wheel_root(&venv);
        Ok(root.map(|root| Self { root }).ok_or_else(|| "the CUDA wheels have no nvcc".to_owned()))
    }

    /// A program of the toolkit.
    pub fn tool(&self, name: &str) -> Command {
        Command::new(self.root.join("bin").join(name))
    }

    /// Such as `13.0.88`. A toolkit in `CUDA_HOME` may have any version.
    fn version(&self) -> Option<String> {
        let text = output(self.tool("nvcc").arg("--version"))?;
        let (_, rest) = text.split_once(", V")?;
        rest.split_whitespace().next().map(str::to_owned)
    }

    fn library_dir(&self) -> PathBuf {
        let lib64 = self.root.join("lib64");
        if lib64.join("libcudart_static.a").exists() { lib64 } else { self.root.join("lib") }
    }

    /// Compiles `source` into `object`, for Hopper.
    fn compile(&self, optimized: &str, source: &Path, object: &Path) -> Result<()> {
        let output = self
            .tool("nvcc")
            .args(["-std=c++17", "-c", optimized, TARGET])
            .args(["-Ikernels/include", "-Ikernels/cuda", "-Isoftnic/gpu", "-o"])
            .args([object, source])
            .output()
            .context("cannot start nvcc")?;
        if !output.status.success() {
            let report = String::from_utf8_lossy(&output.stderr);
            bail!("nvcc refused {}:\n{report}", source.display());
        }
        Ok(())
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

/// The step `kernels`: compiles every kernel, and checks that none spills registers and that each has the
/// instructions that it needs. The long form also links tests with the kernels embedded.
pub fn check_kernels(form: Form) -> Result<Outcome> {
    let toolkit = match Toolkit::find()? {
        Ok(toolkit) => toolkit,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    // The library's build script compiles them for embedding, and keeps the reports of ptxas.
    let images = artifacts::build_script_dir("switchyard-kernels", "cuda", "kernels")?;
    let mut num_reported = Vec::new();
    for name in KERNELS {
        let report = images.join(format!("{name}.ptxas"));
        let report = std::fs::read_to_string(&report)
            .with_context(|| format!("cannot read {}", report.display()))?;
        let num_kernels = report.matches("Compiling entry function").count();
        if num_kernels == 0 {
            return Ok(Outcome::Failed(format!("{name}.cu: ptxas reported no kernel")));
        }
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
        let wrong = sass::check_registers(name, &report);
        if !wrong.is_empty() {
            return Ok(Outcome::Failed(format!("{name}.cu:\n  {}", wrong.join("\n  "))));
        }
        // With this line ptxas reports that asynchronous products wait for one another.
        if let Some(line) = report.lines().find(|line| line.contains("Potential Performance Loss"))
        {
            return Ok(Outcome::Failed(format!("{name}.cu: {}", line.trim())));
        }
        println!("{name}.cu: {num_kernels} kernels, no spills");
        num_reported.push(num_kernels);
    }
    let path = search_path(&toolkit);
    let findings = parallel::map(&KERNELS, |name| {
        let listing = toolkit
            .tool("cuobjdump")
            .arg("--dump-sass")
            .arg(images.join(format!("{name}.fatbin")))
            .env("PATH", &path)
            .stderr(Stdio::inherit())
            .output()
            .context("cannot start cuobjdump")?;
        if !listing.status.success() {
            bail!("cuobjdump ended with {} at {name}.fatbin", listing.status);
        }
        Ok(sass::check(name, &String::from_utf8_lossy(&listing.stdout)))
    })?;
    let findings = KERNELS.iter().zip(num_reported).zip(findings);
    for ((name, num_reported), Findings { num_kernels, exceptions, wrong }) in findings {
        if num_kernels != num_reported {
            return Ok(Outcome::Failed(format!(
                "{name}.cu: cuobjdump lists {num_kernels} kernels, ptxas reported {num_reported}"
            )));
        }
        if !wrong.is_empty() {
            return Ok(Outcome::Failed(format!(
                "{name}.cu, in its machine code:\n  {}",
                wrong.join("\n  ")
            )));
        }
        println!("{name}.cu: {num_kernels} kernels have the instructions that they must have");
        for (reason, num) in exceptions {
            println!("{name}.cu: local memory in {num} of them: {reason}");
        }
    }
    // Programs of the bundle run elsewhere; here they must compile.
    let objects = object_dir()?;
    parallel::map(&PROGRAMS, |name| {
        let object = objects.join(format!("{name}.o"));
        toolkit.compile("-O0", &program_source(name), &object)
    })?;
    println!("the bundle's {} programs for GPUs compile", PROGRAMS.len());
    match form {
        Form::Short => Ok(Outcome::Passed),
        Form::Long => test_rust_side(&features::with_kernels()),
    }
}

/// Builds and starts tests with the kernels embedded. Without a GPU they are listed as skipped; the step `unit` runs
/// them on GPUs in software.
fn test_rust_side(features: &str) -> Result<Outcome> {
    let command = ["test", "--workspace", "--features", features, "--test", "against_rust"];
    match run(cargo(&command).args(["--", "gpu"]))? {
        Outcome::Failed(reason) => Ok(Outcome::Failed(format!("with feature `cuda`: {reason}"))),
        other => Ok(other),
    }
}

/// All programs and reference data of the bundle.
const ARCHIVE: &str = "programs.tar.xz";

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
    // No file of an earlier bundle stays.
    if bundle.exists() {
        std::fs::remove_dir_all(bundle)
            .with_context(|| format!("cannot remove {}", bundle.display()))?;
    }
    std::fs::create_dir_all(bundle)
        .with_context(|| format!("cannot create {}", bundle.display()))?;
    // Before anything is compiled: the tree may change meanwhile.
    for (name, text) in [("COMMIT", commit()), ("CUDA", toolkit.version())] {
        let text = text.unwrap_or_else(|| "unknown".to_owned());
        std::fs::write(bundle.join(name), text + "\n")
            .with_context(|| format!("cannot write {name}"))?;
    }
    let sources: Vec<_> = KERNELS
        .map(|name| (name, kernel_source(name)))
        .into_iter()
        .chain(PROGRAMS.map(|name| (name, program_source(name))))
        .collect();
    parallel::map(&sources, |(name, source)| {
        println!("compiling {}", source.display());
        // Machine code only: every program has all kernels, and PTX would double the bundle.
        toolkit.compile("-O3", source, &objects.join(format!("{name}.o")))
    })?;
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
    let features = features::of_bundle();
    println!("compiling the tests in Rust");
    let tests = artifacts::build(&[], &features, &RUST_TESTS.map(|(_, target)| target))?;
    println!("compiling the programs in Rust");
    let programs = artifacts::build(&["--release"], &features, &RUST_PROGRAMS)?;
    let test_names = RUST_TESTS.map(|(name, _)| name);
    let program_names = RUST_PROGRAMS.map(|target| target.name);
    for (name, from) in test_names.iter().chain(&program_names).zip(tests.iter().chain(&programs)) {
        add_program(from, &bundle.join(name))?;
    }
    for (from, to) in [
        ("kernels/gpu-tests/run-tests.sh", "run-tests.sh"),
        ("kernels/gpu-tests/run-bench.sh", "run-bench.sh"),
        ("bench/gpu/baseline.py", "baseline.py"),
        ("bench/gpu/peak.py", "peak.py"),
        ("bench/gpu/summarize.py", "summarize.py"),
        ("bench/gpu/weights.py", "weights.py"),
    ] {
        std::fs::copy(from, bundle.join(to)).with_context(|| format!("cannot copy {from}"))?;
    }
    let mut num_bytes = copy_model(&bundle.join("tiny-moe"))?;
    copy_references(&bundle.join("data"))?;
    let packed = PROGRAMS.into_iter().chain(test_names).chain(program_names).chain(["data"]);
    if let Outcome::Failed(reason) = pack(bundle, &packed.collect::<Vec<_>>())? {
        return Ok(Outcome::Failed(format!("the programs could not be packed: {reason}")));
    }
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

/// Packs programs and folders into one archive, which the scripts unpack on the GPU host. All programs contain the same
/// kernels and libraries; a window over the whole archive stores these once.
fn pack(bundle: &Path, names: &[&str]) -> Result<Outcome> {
    if !tools::on_path("xz") {
        let reason = "xz is missing: install Debian's package `xz-utils`";
        return Ok(Outcome::Failed(reason.to_owned()));
    }
    println!("packing {} programs and folders", names.len());
    let mut tar = Command::new("tar");
    tar.arg("--create")
        .arg("--use-compress-program=xz --lzma2=preset=6,dict=256MiB")
        .args(["--file", ARCHIVE, "--remove-files"])
        .args(names)
        .current_dir(bundle);
    run(&mut tar)
}

fn copy_model(to: &Path) -> Result<u64> {
    let (from, files) = MODEL;
    std::fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    let copy = |name: &str| std::fs::copy(Path::new(from).join(name), to.join(name));
    let copied: std::io::Result<Vec<u64>> = files.into_iter().map(copy).collect();
    Ok(copied.with_context(|| format!("cannot copy {from}"))?.into_iter().sum())
}

/// Copies the folders of reference data that hold a layer.
fn copy_references(to: &Path) -> Result<()> {
    for kind in REFERENCES {
        let from = Path::new("data").join(kind);
        let entries = std::fs::read_dir(&from);
        for entry in entries.with_context(|| format!("cannot list {}", from.display()))? {
            let folder = entry?;
            if !folder.path().join(REFERENCE_FILES[2]).is_file() {
                continue;
            }
            let to = to.join(kind).join(folder.file_name());
            std::fs::create_dir_all(&to)
                .with_context(|| format!("cannot create {}", to.display()))?;
            for name in REFERENCE_FILES {
                let from = folder.path().join(name);
                std::fs::copy(&from, to.join(name))
                    .with_context(|| format!("cannot copy {}", from.display()))?;
            }
        }
    }
    Ok(())
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

/// The commit of the tree, with a mark if anything differs from it. `None` outside of a repository.
fn commit() -> Option<String> {
    let commit = output(Command::new("git").args(["rev-parse", "--short", "HEAD"]))?;
    let changes = output(Command::new("git").args(["status", "--porcelain"]))?;
    let mark = if changes.is_empty() { "" } else { "-dirty" };
    Some(format!("{commit}{mark}"))
}

/// The output of a program, without the last line's end. `None` if it fails.
fn output(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::inherit()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    output.status.success().then_some(text)
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

fn program_source(name: &str) -> PathBuf {
    PathBuf::from(format!("kernels/gpu-tests/{name}.cu"))
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
