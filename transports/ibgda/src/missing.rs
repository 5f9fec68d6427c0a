//! Missing parts of a host, as errors carry them, by the same checks as in the report.

use std::fmt;
use std::path::Path;

/// Something that a host lacks for GPUs and NICs to reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingPart {
    /// `EnableStreamMemOPs` of the module nvidia is not 1.
    StreamMemOps,
    /// `RegistryDwords` of the module nvidia has no `PeerMappingOverride=1`.
    PeerMapping,
    /// The kernel modules of NVIDIA's driver are not the open ones, so there is no dma-buf.
    OpenModules,
    /// Linux is older than 5.12, so there is no dma-buf.
    Linux,
    /// The module `nvidia_peermem` is not loaded, so no memory of a GPU goes by its address.
    PeerMemory,
}

impl fmt::Display for MissingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StreamMemOps => {
                write!(f, "the option {} of the module nvidia", STREAM_MEM_OPS.setting)
            }
            Self::PeerMapping => {
                write!(f, "the option {} of the module nvidia", PEER_MAPPING.setting)
            }
            Self::OpenModules => f.write_str("NVIDIA's open kernel modules, for dma-buf"),
            Self::Linux => f.write_str("Linux 5.12 or later, for dma-buf"),
            Self::PeerMemory => f.write_str("the module nvidia_peermem, for addresses"),
        }
    }
}

/// Names the missing ones of these parts.
pub(crate) fn list(missing: &[MissingPart]) -> String {
    if missing.is_empty() {
        return "nothing that `switchyard doctor` looks at is missing".to_owned();
    }
    let names: Vec<String> = missing.iter().map(MissingPart::to_string).collect();
    format!("missing: {}; see `switchyard doctor`", names.join(", and "))
}

/// Parts that a GPU lacks to reach a NIC's doorbell register, by the files below `root`.
#[must_use]
pub fn missing_for_doorbells(root: &Path) -> Vec<MissingPart> {
    [(STREAM_MEM_OPS, MissingPart::StreamMemOps), (PEER_MAPPING, MissingPart::PeerMapping)]
        .into_iter()
        .filter(|(option, _)| !option.value(root).is_some_and(|value| (option.is_right)(&value)))
        .map(|(_, missing)| missing)
        .collect()
}

/// Parts that a NIC lacks to reach memory of a GPU, by the files below `root`. Empty where one of the two methods
/// works, otherwise the missing parts of both.
#[must_use]
pub fn missing_for_gpu_memory(root: &Path) -> Vec<MissingPart> {
    let methods = RegistrationMethods::probe(root);
    if methods.has_dma_buf() || methods.has_peer_memory {
        return Vec::new();
    }
    let lacks = [
        (methods.has_open_modules, MissingPart::OpenModules),
        (methods.has_linux, MissingPart::Linux),
        (methods.has_peer_memory, MissingPart::PeerMemory),
    ];
    lacks.into_iter().filter(|(is_there, _)| !is_there).map(|(_, missing)| missing).collect()
}

/// An option of the module nvidia.
pub(crate) struct DriverOption {
    pub(crate) name: &'static str,
    pub(crate) is_right: fn(&str) -> bool,
    /// As the driver shows it.
    pub(crate) expected: &'static str,
    /// As it is set.
    pub(crate) setting: &'static str,
}

impl DriverOption {
    /// `None` where the driver does not show it, or is not there.
    pub(crate) fn value(&self, root: &Path) -> Option<String> {
        let text = std::fs::read_to_string(root.join(PARAMS)).ok()?;
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == self.name).then(|| value.trim().to_owned())
        })
    }
}

/// State of the two methods that register memory of a GPU.
pub(crate) struct RegistrationMethods {
    has_open_modules: bool,
    has_linux: bool,
    pub(crate) has_peer_memory: bool,
    pub(crate) release: String,
}

impl RegistrationMethods {
    pub(crate) fn probe(root: &Path) -> Self {
        let loaded = std::fs::read_to_string(root.join("proc/modules")).unwrap_or_default();
        let version = first_line(&root.join("proc/driver/nvidia/version")).unwrap_or_default();
        let release = first_line(&root.join("proc/sys/kernel/osrelease")).unwrap_or_default();
        Self {
            has_open_modules: version.contains("Open Kernel Module"),
            has_linux: is_at_least(&release, 5, 12),
            has_peer_memory: is_loaded(&loaded, "nvidia_peermem"),
            release,
        }
    }

    pub(crate) const fn has_dma_buf(&self) -> bool {
        self.has_open_modules && self.has_linux
    }
}

/// Whether the text of `proc/modules` lists a module.
pub(crate) fn is_loaded(modules: &str, module: &str) -> bool {
    modules.lines().any(|line| line.split(' ').next() == Some(module))
}

/// The first line of a file, without white space around it.
pub(crate) fn first_line(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_owned())
}

/// Whether a kernel release such as `6.1.0-18-amd64` is at least `major.minor`.
fn is_at_least(release: &str, major: u32, minor: u32) -> bool {
    let mut parts = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (major, minor)
}

/// Options that the driver was loaded with.
pub(crate) const PARAMS: &str = "proc/driver/nvidia/params";

pub(crate) const STREAM_MEM_OPS: DriverOption = DriverOption {
    name: "EnableStreamMemOPs",
    is_right: |value| value == "1",
    expected: "EnableStreamMemOPs: 1",
    setting: "NVreg_EnableStreamMemOPs=1",
};

pub(crate) const PEER_MAPPING: DriverOption = DriverOption {
    name: "RegistryDwords",
    is_right: |value| value.contains("PeerMappingOverride=1"),
    expected: "RegistryDwords: \"PeerMappingOverride=1;\"",
    setting: "NVreg_RegistryDwords=\"PeerMappingOverride=1;\"",
};
