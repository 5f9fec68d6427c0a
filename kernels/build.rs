//! With the feature `cuda`: compiles `cuda/*.cu` to machine code for Hopper and to PTX for later GPUs. The library
//! embeds both. nvcc comes from `CUDA_HOME`, else from the wheels that `cargo xtask cuda-toolkit` keeps in the
//! user's cache.
//!
//! With the feature `emulated`: compiles the same kernels for the host, see `src/gpu/emulated.rs`.

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

#[path = "src/entries.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod entries;

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Printed unchanged: nvcc's report has lines.
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    // Clippy links nothing, so nothing is compiled. Cargo names it in this variable.
    let wrapper = env::var("RUSTC_WORKSPACE_WRAPPER");
    if wrapper.is_ok_and(|wrapper| wrapper.ends_with("clippy-driver")) {
        return write_empty_images();
    }
    if env::var_os("CARGO_FEATURE_EMULATED").is_some() {
        compile_emulated()?;
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    for path in ["cuda", "include", "src/entries.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let flags = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"];
    for name in ["CUDA_HOME", "XDG_CACHE_HOME", "HOME"].into_iter().chain(flags) {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let nvcc = find_nvcc()?;
    println!("cargo::rerun-if-changed={}", nvcc.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut images = Vec::new();
    let mut text = String::from("/// Code of every source file.\npub const IMAGES: [&[u8]; ");
    write!(text, "{}] = [", SOURCES.len())?;
    compile_all(&nvcc, &out)?;
    for name in SOURCES {
        let image = out.join(format!("{name}.fatbin"));
        images.push(fs::read(&image)?);
        write!(text, "\n    &Aligned(*include_bytes!({image:?})).0,")?;
    }
    let count = entries::ENTRIES.len();
    write!(
        text,
        "\n];\n/// Which image has each entry.\npub const IMAGE_OF: [usize; {count}] = ["
    )?;
    for entry in entries::ENTRIES {
        // Images are not compressed, so names stand in them as they are.
        let has_it =
            |image: &Vec<u8>| image.windows(entry.len()).any(|part| part == entry.as_bytes());
        let image_idx = images
            .iter()
            .position(has_it)
            .ok_or_else(|| format!("no kernel in cuda/ is called {entry}: see src/entries.rs"))?;
        write!(text, "{image_idx}, ")?;
    }
    text.push_str("];\n");
    fs::write(out.join("images.rs"), text)?;
    Ok(())
}

/// Images without code, for clippy.
fn write_empty_images() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut text = String::from("/// Code of every source file.\npub const IMAGES: [&[u8]; ");
    write!(text, "{}] = [", SOURCES.len())?;
    for _ in SOURCES {
        text.push_str("\n    &Aligned(*b\"\").0,");
    }
    let count = entries::ENTRIES.len();
    write!(
        text,
        "\n];\n/// Which image has each entry.\npub const IMAGE_OF: [usize; {count}] = [0; {count}];\n"
    )?;
    fs::write(out.join("images.rs"), text)?;
    Ok(())
}

/// Two at a time: often nothing else of a build is left to be done beside them.
fn compile_all(nvcc: &Path, out: &Path) -> Result<(), String> {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(name) = SOURCES.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = compile(nvcc, name, out) {
                next.store(SOURCES.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        Ok(())
    };
    if env::var("NUM_JOBS").is_ok_and(|num| num == "1") {
        return work();
    }
    thread::scope(|scope| {
        let beside = scope.spawn(work);
        let result = work();
        let panicked = |_| Err("a thread that compiles panicked".to_owned());
        result.and(beside.join().unwrap_or_else(panicked))
    })
}

/// Writes the machine code, and beside it the report of ptxas.
fn compile(nvcc: &Path, name: &str, out: &Path) -> Result<(), String> {
    let output = Command::new(nvcc)
        .args(["-O3", "-std=c++17", "-fatbin", "--no-compress", "-Iinclude", "-Icuda"])
        .args(["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_90,code=compute_90"])
        .args(["-Xptxas", "-v", "-o"])
        .args([out.join(format!("{name}.fatbin")), format!("cuda/{name}.cu").into()])
        .output()
        .map_err(|e| format!("cannot start {}: {e}", nvcc.display()))?;
    if !output.status.success() {
        let report = String::from_utf8_lossy(&output.stderr);
        return Err(format!("nvcc refused cuda/{name}.cu:\n{report}"));
    }
    let report = out.join(format!("{name}.ptxas"));
    fs::write(&report, output.stderr).map_err(|e| format!("cannot write {}: {e}", report.display()))
}

/// One static library that exports only `sy_emulated_*`: other linked code may have compiled the same headers with
/// other settings.
fn compile_emulated() -> Result<(), Box<dyn Error>> {
    for path in ["host", "include", "cuda/check.hpp", "cuda/p2p_check.hpp"] {
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-env-changed=CXX");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let [object, whole, hidden] =
        ["compiled.o", "whole.o", "emulated.o"].map(|name| out.join(name));
    let compiler = env::var_os("CXX").unwrap_or_else(|| "g++".into());
    run(Command::new(compiler)
        .args(["-std=c++17", "-O2", "-fPIC", "-pthread", "-ffp-contract=off"])
        // Kernels access frames as words of several sizes.
        .args(["-fno-strict-aliasing", "-fno-gnu-unique"])
        .args(["-Wall", "-Wextra", "-Wno-unknown-pragmas"])
        .args(["-DSIMT_REAL_CLOCK", "-DSY_RECV_BLOCKS=1"])
        .args(["-include", "host/shim/simt.hpp", "-Ihost/shim", "-Iinclude", "-Icuda"])
        .args(["-c", "host/emulated.cpp", "-o"])
        .arg(&object))?;
    run(Command::new("ld").args(["-r", "--force-group-allocation", "-o"]).args([&whole, &object]))?;
    run(Command::new("objcopy")
        .args(["--wildcard", "--keep-global-symbol=sy_emulated_*"])
        .args([&whole, &hidden]))?;
    let archive = out.join("libswitchyard_emulated.a");
    // Appending to an archive of an earlier build would keep its members.
    if archive.exists() {
        fs::remove_file(&archive)?;
    }
    run(Command::new("ar").arg("crs").args([&archive, &hidden]))?;
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=switchyard_emulated");
    println!("cargo::rustc-link-lib=dylib=stdc++");
    Ok(())
}

fn run(command: &mut Command) -> Result<(), Box<dyn Error>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|e| format!("the feature `emulated` needs {name}, which cannot start: {e}"))?;
    if !output.status.success() {
        return Err(format!("{name} failed:\n{}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(())
}

fn find_nvcc() -> Result<PathBuf, String> {
    if let Some(home) = env::var_os("CUDA_HOME") {
        let nvcc = PathBuf::from(home).join("bin/nvcc");
        return if nvcc.exists() {
            Ok(nvcc)
        } else {
            Err(format!("CUDA_HOME is set, but there is no {}", nvcc.display()))
        };
    }
    let cache = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .unwrap_or_default();
    let lib = cache.join("switchyard/cuda-13.0/lib");
    fs::read_dir(&lib)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("site-packages/nvidia/cu13/bin/nvcc")))
        .find(|nvcc| nvcc.exists())
        .ok_or_else(|| {
            format!(
                "the feature `cuda` needs nvcc: set CUDA_HOME, or run `cargo xtask cuda-toolkit` (looked in {})",
                lib.display()
            )
        })
}

/// Source files under `cuda/`, without their ending.
const SOURCES: [&str; 8] =
    ["dispatch", "combine", "expert", "compute", "p2p", "flag", "proxy", "checksum"];
