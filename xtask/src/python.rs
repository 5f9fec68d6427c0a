//! The Python package: its wheel, and its tests in a clean environment.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{Outcome, cargo, run, target_dir};
use crate::{features, tools};

/// Builds the sdist and a manylinux wheel into `target/wheels`, or with `dev` a wheel of what the steps of `test` build.
pub fn wheel(dev: bool) -> Result<Outcome> {
    if dev {
        let built = match pack()? {
            Ok(wheel) => wheel,
            Err(outcome) => return Ok(outcome),
        };
        println!("{}", built.display());
        return Ok(Outcome::Passed);
    }
    let tools = match environment("wheel", Path::new("python/build_backend/requirements.txt"))? {
        Ok(tools) => tools,
        Err(reason) => return Ok(Outcome::Failed(reason)),
    };
    let folder = absolute(&wheels())?;
    let search = std::env::var_os("PATH").unwrap_or_default();
    let search = std::env::join_paths(
        std::iter::once(tools.join("bin")).chain(std::env::split_paths(&search)),
    )?;
    run(Command::new(tools.join("bin/python"))
        .args(["python/build_backend/switchyard_build.py", "release", "--out"])
        .arg(&folder)
        .env("PATH", search))
}

/// Builds the wheel, installs it into a clean environment, and there checks style, types and stubs and runs the tests.
pub fn check() -> Result<Outcome> {
    let tools = match environment("tests", Path::new("python/tests/requirements.txt"))? {
        Ok(tools) => tools,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let wheel = match pack()? {
        Ok(wheel) => wheel,
        Err(outcome) => return Ok(outcome),
    };
    let python = install(&tools, &wheel)?;
    let tool = |name: &str, args: &[&str]| {
        let mut command = Command::new(tools.join("bin").join(name));
        command.args(args).current_dir("python");
        command
    };
    let with_python = |mut command: Command, option: &str| {
        command.arg(option).arg(&python);
        command
    };
    // Run below `tests`, so that Python finds the package that is installed, not its source.
    let module = |args: &[&str]| {
        let mut command = Command::new(&python);
        command.arg("-m").args(args).current_dir("python/tests");
        command
    };
    let steps = [
        tool("ruff", &["format", "--check", "--quiet", "."]),
        tool("ruff", &["check", "--quiet", "."]),
        with_python(tool("mypy", &["--no-error-summary"]), "--python-executable"),
        with_python(tool("basedpyright", &["--warnings"]), "--pythonpath"),
        module(&[
            "mypy.stubtest",
            "switchyard_moe._native",
            "--allowlist",
            "../stubtest-allowed.txt",
        ]),
        module(&[
            "pytest",
            "-q",
            "-c",
            "../pyproject.toml",
            "--rootdir",
            "..",
            "-p",
            "no:cacheprovider",
        ]),
    ];
    for mut step in steps {
        let outcome = run(step.env("PYTHONDONTWRITEBYTECODE", "1"))?;
        if !matches!(outcome, Outcome::Passed) {
            return Ok(outcome);
        }
    }
    Ok(Outcome::Passed)
}

/// Packs a wheel of the module and the binary in the development profile. The inner error is that of a build.
///
/// It builds them with the rest of the workspace, like the steps `unit` and `demo`. For the two packages alone cargo
/// would choose other features of dependencies, and compile these once more.
pub fn pack() -> Result<Result<PathBuf, Outcome>> {
    let features = features::all();
    let build = ["build", "--quiet", "--workspace", "--features", &features];
    let built = run(cargo(&build).args(["--lib", "--bin", "switchyard", "--test", "fault"]))?;
    if !matches!(built, Outcome::Passed) {
        return Ok(Err(built));
    }
    let debug = target_dir().join("debug");
    let folder = wheels();
    let output = Command::new("python3")
        .args(["python/build_backend/switchyard_build.py", "pack"])
        .arg("--module")
        .arg(debug.join("libswitchyard_moe_native.so"))
        .arg("--binary")
        .arg(debug.join("switchyard"))
        .arg("--out")
        .arg(&folder)
        .output()
        .context("cannot start python3")?;
    if !output.status.success() {
        bail!("the wheel cannot be packed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())))
}

/// Makes an environment that holds nothing but `wheel` and, by a path file, the packages of `tools`. Returns its Python.
fn install(tools: &Path, wheel: &Path) -> Result<PathBuf> {
    let folder = absolute(&target_dir().join("python-env"))?;
    if folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    succeed(
        Command::new(tools.join("bin/python")).args(["-m", "venv", "--without-pip"]).arg(&folder),
    )?;
    let python = folder.join("bin/python");
    succeed(
        Command::new(tools.join("bin/pip"))
            .arg("--python")
            .arg(&python)
            .args(["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"])
            .arg(wheel),
    )?;
    let packages = |python: &Path| {
        let print = "import sysconfig; print(sysconfig.get_path('purelib'))";
        let output = Command::new(python).args(["-c", print]).output()?;
        anyhow::Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let path_file = Path::new(&packages(&python)?).join("tools.pth");
    std::fs::write(&path_file, packages(&tools.join("bin/python"))? + "\n")
        .with_context(|| format!("cannot write {}", path_file.display()))?;
    Ok(python)
}

/// Folder of a virtual environment in the user's cache with the packages that a file pins by hash, made on first use.
/// The inner error is the reason why there is none.
pub(crate) fn environment(name: &str, requirements: &Path) -> Result<Result<PathBuf, String>> {
    let pins = std::fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let mut hasher = DefaultHasher::new();
    pins.hash(&mut hasher);
    let folder = tools::cache_dir().join("python").join(format!("{name}-{:016x}", hasher.finish()));
    let mark = folder.join("complete");
    if mark.exists() {
        return Ok(Ok(folder));
    }
    println!(
        "installing the packages of {} into {} (once)",
        requirements.display(),
        folder.display()
    );
    let file = requirements.to_string_lossy();
    if let Err(reason) =
        tools::install_wheels(&folder, &["--require-hashes", "--requirement", &file])?
    {
        return Ok(Err(reason));
    }
    std::fs::write(&mark, "").with_context(|| format!("cannot write {}", mark.display()))?;
    Ok(Ok(folder))
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("no absolute path of {}", path.display()))
}

fn wheels() -> PathBuf {
    target_dir().join("wheels")
}
