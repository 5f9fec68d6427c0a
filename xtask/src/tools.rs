//! Tools and packages that the tests need beyond Rust, and their installation.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::process::{Outcome, run};

/// Debian packages, each with a program or file that shows its presence.
const PACKAGES: [(&str, &str); 23] = [
    ("gcc", "cc"),
    ("g++", "g++"),
    ("prometheus", "promtool"),
    ("procps", "ps"),
    ("python3-venv", "/usr/share/doc/python3-venv"),
    ("iproute2", "ip"),
    ("nftables", "nft"),
    ("systemd", "systemd-analyze"),
    ("libibverbs-dev", "/usr/include/infiniband/mlx5dv.h"),
    ("librdmacm-dev", "/usr/include/rdma/rdma_cma.h"),
    ("libclang-dev", "/usr/share/doc/libclang-dev"),
    ("qemu-system-x86", "qemu-system-x86_64"),
    ("busybox-static", "busybox"),
    ("ibverbs-providers", "/etc/libibverbs.d/rxe.driver"),
    ("ibverbs-utils", "ibv_devinfo"),
    ("rdmacm-utils", "rping"),
    ("perftest", "ib_write_lat"),
    ("iproute2", "rdma"),
    ("kmod", "/sbin/depmod"),
    ("cpio", "cpio"),
    ("libfabric-dev", "/usr/include/rdma/fi_domain.h"),
    ("libfabric-bin", "fi_info"),
    ("chromium", "chromium"),
];

/// Installs missing packages on Debian and Ubuntu as root; elsewhere names them.
pub fn install_packages() -> Result<Outcome> {
    let missing: Vec<&str> =
        PACKAGES.iter().filter(|(_, sign)| !is_here(sign)).map(|(package, _)| *package).collect();
    if missing.is_empty() {
        return Ok(Outcome::Passed);
    }
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|out| out.stdout == b"0\n");
    if !is_root || !on_path("apt-get") {
        return Ok(Outcome::Skipped(format!(
            "missing here: {} (Debian package names); install them to run every step",
            missing.join(", ")
        )));
    }
    println!("installing {}", missing.join(", "));
    // An outdated package list is the usual reason for a failed install, so it is refreshed first. The install itself
    // shows whether that worked.
    let update = apt().args(["update", "-qq"]).status().context("cannot start apt-get")?;
    if !update.success() {
        println!("apt-get update ended with {update}; trying with the list that is here");
    }
    run(apt().args(["install", "-y", "-qq", "--no-install-recommends"]).args(&missing))
}

/// Downloads etcd into the user's cache unless it is on the search path. Needs no root, and starts no service as the
/// package's own installation would.
pub fn install_etcd() -> Result<Outcome> {
    let folder = cache_dir().join("tools").join("etcd");
    if std::env::var_os("SWITCHYARD_ETCD").is_some()
        || (on_path("etcd") && on_path("etcdctl"))
        || folder.join("usr/bin/etcdctl").exists()
    {
        return Ok(Outcome::Passed);
    }
    if !on_path("apt-get") || !on_path("dpkg-deb") {
        let reason = "etcd is missing: install etcd 3.4 or later, with etcdctl, or set SWITCHYARD_ETCD to its program";
        return Ok(Outcome::Failed(reason.to_owned()));
    }
    println!("downloading etcd into {} (once, 13 MB)", folder.display());
    let download = folder.join("download");
    std::fs::create_dir_all(&download)
        .with_context(|| format!("cannot make {}", download.display()))?;
    let fetch = || {
        let mut command = apt();
        command.args(["download", "-qq", "etcd-server", "etcd-client"]).current_dir(&download);
        command.status().context("cannot start apt-get")
    };
    // A machine without a package list needs one first, which only root can fetch.
    if !fetch()?.success() {
        apt().args(["update", "-qq"]).status().context("cannot start apt-get")?;
        let status = fetch()?;
        if !status.success() {
            let reason = format!("apt-get download of etcd-server and etcd-client: {status}");
            return Ok(Outcome::Failed(reason));
        }
    }
    for entry in std::fs::read_dir(&download).context("cannot list the download")? {
        let package = entry.context("cannot list the download")?.path();
        let unpack = run(Command::new("dpkg-deb").arg("-x").arg(&package).arg(&folder))?;
        if !matches!(unpack, Outcome::Passed) {
            return Ok(unpack);
        }
    }
    std::fs::remove_dir_all(&download)
        .with_context(|| format!("cannot remove {}", download.display()))?;
    Ok(Outcome::Passed)
}

/// Path of a cargo tool, installed into the user's cache on first use. The inner error is the
/// reason why there is none.
pub fn cargo_tool(name: &str, version: &str) -> Result<Result<PathBuf, String>> {
    let root = cache_dir().join("tools").join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if program.exists() {
        return Ok(Ok(program));
    }
    println!("installing {name} {version} into {} (once, some minutes)", root.display());
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        // The tool runs for seconds; an unoptimised build of it is ready minutes earlier.
        .args([
            "install",
            "--quiet",
            "--locked",
            "--profile",
            "dev",
            "--version",
            version,
            "--root",
        ])
        .arg(&root)
        .arg(name)
        .env("CARGO_TARGET_DIR", root.join("build"))
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env_remove("RUSTFLAGS")
        .status()
        .with_context(|| format!("cannot start cargo to install {name}"))?;
    if !status.success() {
        return Ok(Err(format!("{name} {version} could not be installed ({status})")));
    }
    if let Err(error) = std::fs::remove_dir_all(root.join("build")) {
        println!("cannot remove the build folder of {name}: {error}");
    }
    Ok(Ok(program))
}

/// Installs pinned packages from PyPI into a virtual environment at `venv`. The inner error is
/// the reason for a failure.
pub fn install_wheels(venv: &Path, packages: &[&str]) -> Result<Result<(), String>> {
    if !on_path("python3") {
        return Ok(Err(format!("python3 is missing: it installs {}", packages.join(", "))));
    }
    let made = Command::new("python3").args(["-m", "venv"]).arg(venv).status();
    if !made.is_ok_and(|status| status.success()) {
        return Ok(Err("python3 -m venv failed: install Debian's package `python3-venv`".into()));
    }
    let installed = Command::new(venv.join("bin/pip"))
        .args(["install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"])
        .args(packages)
        .status()
        .context("cannot start pip")?;
    if !installed.success() {
        let packages = packages.join(", ");
        return Ok(Err(format!("pip could not install {packages} ({installed})")));
    }
    Ok(Ok(()))
}

/// Path of clang-format, of the one version whose output is expected. The inner error is the reason why there is
/// none.
pub fn clang_format() -> Result<Result<PathBuf, String>> {
    const VERSION: &str = "20.1.8";
    let venv = cache_dir().join("tools").join(format!("clang-format-{VERSION}"));
    let program = venv.join("bin/clang-format");
    if !program.exists() {
        println!("installing clang-format {VERSION} into {} (once, 2 MB)", venv.display());
        if let Err(reason) = install_wheels(&venv, &[&format!("clang-format=={VERSION}")])? {
            return Ok(Err(reason));
        }
    }
    Ok(Ok(program))
}

/// Whether a program is on the search path, or a file exists.
pub fn is_here(sign: &str) -> bool {
    if sign.starts_with('/') { Path::new(sign).exists() } else { on_path(sign) }
}

/// Whether a program is on the search path.
pub fn on_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").stdin(Stdio::null());
    command
}

/// The folder that keeps downloaded and built tools between runs.
pub fn cache_dir() -> PathBuf {
    std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("switchyard")
}
