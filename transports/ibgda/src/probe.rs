//! Checks of the host and its NICs for GPU-initiated RDMA, one for each requirement.

mod devices;

use std::fmt;
use std::path::Path;

use serde::Serialize;

pub use self::devices::probe_devices;
use crate::library::Libraries;
use crate::missing::{
    DriverOption, PARAMS, PEER_MAPPING, RegistrationMethods, STREAM_MEM_OPS, first_line, is_loaded,
};
pub use crate::missing::{MissingPart, missing_for_doorbells, missing_for_gpu_memory};

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// As needed.
    Present,
    /// Needed and not there.
    Missing,
    /// Better than nothing: something works, only less well.
    Partial,
}

impl State {
    /// Word for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Present => "ok",
            Self::Missing => "MISSING",
            Self::Partial => "partial",
        }
    }
}

/// One thing that is needed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Subject of the check.
    pub name: &'static str,
    /// Whether it is there.
    pub state: State,
    /// State found.
    pub found: String,
    /// Remedy, where something is missing.
    pub remedy: Option<String>,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<8} {:<26} {}", self.state.name(), self.name, self.found)?;
        if let Some(remedy) = &self.remedy {
            writeln!(f, "{:<8} {:<26} → {remedy}", "", "")?;
        }
        Ok(())
    }
}

/// One mlx5 device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceReport {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Properties that the device reports.
    pub checks: Vec<Check>,
}

impl DeviceReport {
    /// Whether nothing is missing.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        is_complete(&self.checks)
    }
}

/// All checks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Checks of the host, in the order of repair.
    pub checks: Vec<Check>,
    /// Checks of each mlx5 device that libibverbs lists.
    pub devices: Vec<DeviceReport>,
}

impl Report {
    /// Whether the host lacks nothing, and one of its devices, if they were checked, lacks nothing either.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        let is_any_ready = self.devices.iter().any(DeviceReport::is_ready);
        is_complete(&self.checks) && (self.devices.is_empty() || is_any_ready)
    }
}

fn is_complete(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.state != State::Missing)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            write!(f, "{check}")?;
        }
        for device in &self.devices {
            writeln!(f, "{}:", device.name)?;
            for check in &device.checks {
                write!(f, "{check}")?;
            }
        }
        let verdict = if self.is_ready() {
            "ready for GPU-initiated RDMA (not yet run on a ConnectX: see docs/explanation/ibgda.md)"
        } else {
            "not ready for GPU-initiated RDMA; the proxy and the other transports need none of this"
        };
        writeln!(f, "{verdict}")
    }
}

/// Probes this host.
#[must_use]
pub fn probe() -> Report {
    let root = Path::new("/");
    let mut report = probe_files(root);
    let name = "libibverbs and libmlx5";
    match Libraries::open() {
        Ok(libraries) => {
            report.checks.push(present(name, "all functions are there".to_owned()));
            let Report { checks, devices } = probe_devices(&libraries, root);
            report.checks.extend(checks);
            report.devices = devices;
        }
        Err(error) => {
            let remedy =
                "install Debian's packages libibverbs1 and ibverbs-providers (44 or later)";
            report.checks.push(missing(name, error.to_string(), remedy));
        }
    }
    report
}

/// Reads the files below `root` only, which is `/` except in tests.
#[must_use]
pub fn probe_files(root: &Path) -> Report {
    let checks = vec![
        nic(root),
        modules(root),
        user_access(root),
        gpu_driver(root),
        driver_option(root, &STREAM_MEM_OPS),
        driver_option(root, &PEER_MAPPING),
        registration(root),
    ];
    Report { checks, devices: Vec::new() }
}

fn nic(root: &Path) -> Check {
    let class = root.join("sys/class/infiniband");
    let mut found = Vec::new();
    let (mut is_any_mlx5, mut is_any_up) = (false, false);
    let mut names: Vec<_> = std::fs::read_dir(&class)
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect())
        .unwrap_or_default();
    names.sort();
    for name in names {
        let device = class.join(&name);
        let driver = std::fs::read_link(device.join("device/driver")).unwrap_or_default();
        let driver = driver.file_name().map(|name| name.to_string_lossy().into_owned());
        let driver = driver.unwrap_or_else(|| "no driver of a device".to_owned());
        let is_mlx5 = driver.starts_with("mlx5_core");
        is_any_mlx5 |= is_mlx5;
        let ports = ports(&device.join("ports"));
        is_any_up |= is_mlx5 && ports.iter().any(|port| port.contains("ACTIVE"));
        let ports = if ports.is_empty() { "no port".to_owned() } else { ports.join(", ") };
        found.push(format!("{} ({driver}, {ports})", name.to_string_lossy()));
    }
    let found = if found.is_empty() {
        format!("no RDMA device below {}", class.display())
    } else {
        found.join("; ")
    };
    let name = "mlx5 NIC";
    if !is_any_mlx5 {
        return missing(name, found, "a ConnectX-5 or later with the driver mlx5_core is needed");
    }
    if !is_any_up {
        return missing(name, found, "no port is active: check cable, switch and subnet manager");
    }
    present(name, found)
}

/// Number, state, kind and speed of each port of a device.
fn ports(dir: &Path) -> Vec<String> {
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse::<u8>().ok();
    let mut numbers: Vec<u8> = std::fs::read_dir(dir)
        .map(|entries| entries.filter_map(|entry| number(entry.ok()?)).collect())
        .unwrap_or_default();
    numbers.sort_unstable();
    let describe = |number: u8| {
        let line = |file: &str| first_line(&dir.join(number.to_string()).join(file));
        let state = line("state").unwrap_or_else(|| "no state".to_owned());
        let facts = [Some(state), line("link_layer"), line("rate")];
        format!("port {number}: {}", facts.into_iter().flatten().collect::<Vec<_>>().join(" "))
    };
    numbers.into_iter().map(describe).collect()
}

fn modules(root: &Path) -> Check {
    const NEEDED: [&str; 3] = ["mlx5_core", "mlx5_ib", "ib_uverbs"];
    let name = "kernel modules";
    let loaded = std::fs::read_to_string(root.join("proc/modules")).unwrap_or_default();
    let is_there =
        |module: &str| is_loaded(&loaded, module) || root.join("sys/module").join(module).is_dir();
    let absent: Vec<&str> = NEEDED.into_iter().filter(|module| !is_there(module)).collect();
    if absent.is_empty() {
        present(name, NEEDED.join(", "))
    } else {
        let remedy = format!("modprobe {}", absent.join(" "));
        missing(name, format!("not loaded: {}", absent.join(", ")), &remedy)
    }
}

fn user_access(root: &Path) -> Check {
    let name = "user access to RDMA";
    let dir = root.join("dev/infiniband");
    let is_uverbs =
        |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().starts_with("uverbs");
    let devices: Vec<_> = std::fs::read_dir(&dir)
        .map(|entries| entries.filter_map(Result::ok).filter(is_uverbs).collect())
        .unwrap_or_default();
    if devices.is_empty() {
        let remedy = "load ib_uverbs; in a container pass /dev/infiniband through";
        return missing(name, format!("no uverbs device in {}", dir.display()), remedy);
    }
    let mut refused = Vec::new();
    for device in &devices {
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(device.path());
        if let Err(error) = opened {
            refused.push(format!("{}: {error}", device.path().display()));
        }
    }
    if refused.len() == devices.len() {
        return missing(name, refused.join("; "), "add this user to the group that owns them");
    }
    present(name, format!("{} uverbs devices", devices.len()))
}

fn gpu_driver(root: &Path) -> Check {
    let name = "NVIDIA driver";
    match first_line(&root.join("proc/driver/nvidia/version")) {
        Some(version) => present(name, version),
        None => missing(name, "not loaded".to_owned(), "install the NVIDIA driver on this host"),
    }
}

fn driver_option(root: &Path, option: &DriverOption) -> Check {
    let DriverOption { name, expected, setting, .. } = *option;
    let remedy = format!(
        "`options nvidia {setting}` in /etc/modprobe.d/, rebuild the initramfs, reboot; needed to \
         map the NIC's doorbell into the GPU"
    );
    match option.value(root) {
        Some(value) if (option.is_right)(&value) => present(name, value),
        Some(value) => missing(name, format!("{value}, expected {expected}"), &remedy),
        None => missing(name, format!("not in {}", root.join(PARAMS).display()), &remedy),
    }
}

fn registration(root: &Path) -> Check {
    let name = "registration of GPU memory";
    let methods = RegistrationMethods::probe(root);
    let release = &methods.release;
    match (methods.has_dma_buf(), methods.has_peer_memory) {
        (true, _) => present(name, format!("dma-buf (open kernel modules, Linux {release})")),
        (false, true) => {
            partial(name, "nvidia_peermem; dma-buf needs the open kernel modules".to_owned(), None)
        }
        (false, false) => {
            let found = format!(
                "neither dma-buf (open kernel modules and Linux 5.12, this is {release}) nor \
                 nvidia_peermem"
            );
            missing(name, found, "install the open kernel modules, or modprobe nvidia_peermem")
        }
    }
}

const fn present(name: &'static str, found: String) -> Check {
    Check { name, state: State::Present, found, remedy: None }
}

fn missing(name: &'static str, found: String, remedy: &str) -> Check {
    Check { name, state: State::Missing, found, remedy: Some(remedy.to_owned()) }
}

/// Of use, only less well.
fn partial(name: &'static str, found: String, remedy: Option<&str>) -> Check {
    Check { name, state: State::Partial, found, remedy: remedy.map(str::to_owned) }
}
