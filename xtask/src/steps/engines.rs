//! The step `engines`: transformers and vLLM with their experts on servers, on a CPU, and tensors of torch. The long form
//! adds SGLang, the next vLLM, tensor parallelism, more families and five minutes of deaths.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::process::{Form, Outcome, run, target_dir};
use crate::{python, tools};

/// Exit code of `install.py` where the engines cannot be installed.
const CANNOT: i32 = 3;

pub(super) fn check(form: Form) -> Result<Outcome> {
    let engines = match install(form)? {
        Ok(folder) => folder,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let wheel = match python::pack()? {
        Ok(wheel) => wheel,
        Err(outcome) => return Ok(outcome),
    };
    // The engines find plugins by the metadata of installed packages, so the tests need the wheel, not its source.
    let package = std::path::absolute(target_dir().join("engines-package"))?;
    if package.exists() {
        std::fs::remove_dir_all(&package)
            .with_context(|| format!("cannot remove {}", package.display()))?;
    }
    let interpreter = engines.join("venv/bin/python");
    let installed = run(Command::new(&interpreter)
        .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"])
        .args(["--no-index", "--target"])
        .arg(&package)
        .arg(wheel))?;
    if !matches!(installed, Outcome::Passed) {
        return Ok(installed);
    }
    let mut tests = Command::new(&interpreter);
    tests
        .args(["-m", "pytest", "-q", "-c", "../pyproject.toml", "--rootdir", ".."])
        .args(["-p", "no:cacheprovider", "engines", "test_torch.py"])
        .current_dir("python/tests")
        .env("PYTHONPATH", package)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        // Its absence is a failure here, and a skip in the step `python`.
        .env("SWITCHYARD_REQUIRE", "torch");
    if form == Form::Long {
        tests
            .env("SWITCHYARD_LONG", "1")
            .env("SWITCHYARD_TEST_SGLANG", engines.join("sglang"))
            .env("SWITCHYARD_TEST_VLLM_NEXT", engines.join("vllm-next"));
    }
    run(&mut tests)
}

/// Folder of the engines in the user's cache, filled on first use. The inner error is the reason why there is none.
fn install(form: Form) -> Result<Result<PathBuf, String>> {
    let interpreter = "python3.11";
    if !tools::on_path(interpreter) {
        return Ok(Err(format!("{interpreter} is missing, which the pinned engines need")));
    }
    println!("the engines: installed once into the user's cache, 2.8 GiB, some minutes");
    let output = Command::new(interpreter)
        .arg("python/tests/engines/install.py")
        .args(form.pick([].as_slice(), &["--sglang", "--vllm-next"]))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("cannot start {interpreter}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if output.status.success() {
        return Ok(Ok(PathBuf::from(text(&output.stdout))));
    }
    let errors = text(&output.stderr);
    let reason = if output.status.code() == Some(CANNOT) {
        errors.lines().last().unwrap_or_default().to_owned()
    } else {
        format!("install.py ended with {}: {errors}", output.status)
    };
    Ok(Err(reason))
}
