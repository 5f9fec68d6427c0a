//! Report of this host's GPUs, and whether this build can use them.

#[cfg(feature = "cuda")]
mod cuda;

use std::fs;
use std::path::Path;

use serde::Serialize;

/// The findings. Nothing here is an error: a host without a GPU is a valid host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuReport {
    /// Version of the NVIDIA kernel driver, if it is loaded.
    pub kernel_driver: Option<String>,
    /// GPUs. From the CUDA driver where this build can query it, so only those that this process may use; from the
    /// kernel driver otherwise.
    pub gpus: Vec<Gpu>,
    /// Whether CUDA can be used.
    pub cuda: CudaState,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Product name.
    pub name: String,
    /// Memory, bytes; only the CUDA driver reports it.
    pub memory_bytes: Option<u64>,
    /// Compute capability, major and minor; only the CUDA driver reports it.
    pub compute_capability: Option<(u32, u32)>,
    /// Permitted access of a NIC to its memory; only the CUDA driver reports it.
    pub nic_access: Option<NicAccess>,
}

/// The CUDA driver's report on access by NICs to a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct NicAccess {
    /// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED`: memory can be registered by its address, with
    /// the module `nvidia_peermem`.
    pub by_address: bool,
    /// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`: memory can be registered as a dma-buf.
    pub by_dma_buf: bool,
    /// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` is at least `OWNER`: kernels of the GPU see
    /// a NIC's writes in the order in which they arrive. Slots of IBGDA lie in the GPU's memory only
    /// where this is so.
    pub orders_writes: bool,
}

/// Whether this process can use CUDA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum CudaState {
    /// This build has no CUDA.
    NotBuilt,
    /// The CUDA driver library is not on this host.
    NoLibrary,
    /// The driver library is there and refuses to work.
    Failed {
        /// Call that failed.
        call: &'static str,
        /// The driver's code and name for the failure.
        error: String,
    },
    /// The driver works.
    Ready {
        /// CUDA version that the driver supports, major and minor.
        version: (u32, u32),
    },
}

/// One line of text: a fact, and a remedy where something is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportLine {
    /// Subject of the line.
    pub name: &'static str,
    /// Whether it is there and works.
    pub usable: bool,
    /// State found.
    pub found: String,
    /// Remedy, if something is missing.
    pub remedy: Option<String>,
}

/// Lists GPUs. Takes well under a second and changes nothing.
#[must_use]
pub fn probe() -> GpuReport {
    let report = from_kernel_driver(Path::new(KERNEL_DRIVER));
    #[cfg(feature = "cuda")]
    let report = cuda::complete(report);
    report
}

impl GpuReport {
    /// The report for people.
    #[must_use]
    pub fn lines(&self) -> Vec<ReportLine> {
        let mut lines = vec![self.driver_line(), self.cuda_line()];
        lines.extend(self.gpus.iter().flat_map(Gpu::lines));
        lines
    }

    fn driver_line(&self) -> ReportLine {
        let name = "nvidia driver";
        match &self.kernel_driver {
            Some(version) => line(name, true, version.clone(), None),
            None => line(
                name,
                false,
                "not loaded".into(),
                Some(
                    "install the NVIDIA driver if this host has a GPU; experts run on CPUs without",
                ),
            ),
        }
    }

    fn cuda_line(&self) -> ReportLine {
        let name = "cuda";
        match &self.cuda {
            CudaState::NotBuilt => line(
                name,
                false,
                "this build has no CUDA support".into(),
                Some("build with `--features cuda` to see more of a GPU; no command needs it"),
            ),
            CudaState::NoLibrary => line(
                name,
                false,
                "libcuda.so.1 is not here".into(),
                Some(
                    "it comes with the NVIDIA driver; in a container, ask the runtime for the GPUs",
                ),
            ),
            CudaState::Failed { call, error } => line(
                name,
                false,
                format!("{call} failed: {error}"),
                Some("compare the versions of libcuda and kernel driver, and run nvidia-smi"),
            ),
            CudaState::Ready { version: (major, minor) } => {
                line(name, true, format!("driver supports CUDA {major}.{minor}"), None)
            }
        }
    }
}

impl Gpu {
    fn lines(&self) -> impl Iterator<Item = ReportLine> {
        let mut found = self.name.clone();
        if let Some(bytes) = self.memory_bytes {
            found.push_str(&format!(" · {:.0} GiB", bytes as f64 / f64::from(1 << 30)));
        }
        if let Some((major, minor)) = self.compute_capability {
            found.push_str(&format!(" · compute capability {major}.{minor}"));
        }
        let access = self.nic_access.as_ref().map(NicAccess::line);
        std::iter::once(line("gpu", true, found, None)).chain(access)
    }
}

impl NicAccess {
    fn line(&self) -> ReportLine {
        let ways = match (self.by_dma_buf, self.by_address) {
            (true, true) => "by dma-buf and by address",
            (true, false) => "by dma-buf",
            (false, true) => "by address",
            (false, false) => "in no way",
        };
        let order = if self.orders_writes { "in order" } else { "in any order" };
        let found = format!("a NIC reaches its memory {ways}; its kernels see such writes {order}");
        let remedy = match self {
            Self { by_address: false, by_dma_buf: false, .. } => Some(
                "dma-buf needs NVIDIA's open kernel modules and Linux 5.12, access by address the module nvidia_peermem; slots for NICs lie in the host's memory without either",
            ),
            Self { orders_writes: false, .. } => {
                Some("slots of IBGDA lie in the host's memory, and kernels read them over PCIe")
            }
            _ => None,
        };
        line("gpu for nics", remedy.is_none(), found, remedy)
    }
}

fn line(name: &'static str, usable: bool, found: String, remedy: Option<&str>) -> ReportLine {
    ReportLine { name, usable, found, remedy: remedy.map(str::to_owned) }
}

/// Reads the folder of the NVIDIA kernel driver.
fn from_kernel_driver(folder: &Path) -> GpuReport {
    let kernel_driver = fs::read_to_string(folder.join("version"))
        .ok()
        .map(|text| driver_version(&text).unwrap_or("version unknown").to_owned());
    let mut gpus: Vec<(String, Gpu)> = fs::read_dir(folder.join("gpus"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let text = fs::read_to_string(entry.path().join("information")).ok()?;
            let name = text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_owned();
            let gpu = Gpu { name, memory_bytes: None, compute_capability: None, nic_access: None };
            Some((entry.file_name().to_string_lossy().into_owned(), gpu))
        })
        .collect();
    // Folders are named for bus addresses; the order of a directory means nothing.
    gpus.sort_by(|left, right| left.0.cmp(&right.0));
    GpuReport {
        kernel_driver,
        gpus: gpus.into_iter().map(|(_, gpu)| gpu).collect(),
        cuda: CudaState::NotBuilt,
    }
}

/// The first word like `570.124.06` in the driver's version text.
fn driver_version(text: &str) -> Option<&str> {
    text.split_whitespace().find(|word| {
        word.contains('.')
            && word
                .split('.')
                .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

const KERNEL_DRIVER: &str = "/proc/driver/nvidia";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_the_version_text_are_understood() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\n";
        assert_eq!(driver_version(closed), Some("550.54.15"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release";
        assert_eq!(driver_version(open), Some("570.124.06"));
        assert_eq!(driver_version("GCC version"), None);
    }

    #[test]
    fn gpus_are_listed_in_bus_order_and_damaged_entries_left_out() {
        let folder = tempfile::tempdir().expect("temporary folder");
        fs::write(folder.path().join("version"), "NVRM version: x 1.2.3 y").expect("file");
        for (bus, text) in [
            ("0000:9a:00.0", "Model: \t\t NVIDIA H200\nIRQ: 1\n"),
            ("0000:18:00.0", "Model: \t\t NVIDIA H100\n"),
            ("0000:20:00.0", "IRQ: 7\n"),
        ] {
            let gpu = folder.path().join("gpus").join(bus);
            fs::create_dir_all(&gpu).expect("folder");
            fs::write(gpu.join("information"), text).expect("file");
        }
        let report = from_kernel_driver(folder.path());
        assert_eq!(report.kernel_driver.as_deref(), Some("1.2.3"));
        let names: Vec<&str> = report.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        assert_eq!(names, ["NVIDIA H100", "NVIDIA H200"]);
    }

    #[test]
    fn what_nics_may_do_with_a_gpu_s_memory_is_a_line_of_its_own() {
        let access = |by_dma_buf, by_address, orders_writes| NicAccess {
            by_address,
            by_dma_buf,
            orders_writes,
        };
        let lines = |nic_access| {
            let name = "NVIDIA H200".to_owned();
            let gpu =
                Gpu { name, memory_bytes: None, compute_capability: Some((9, 0)), nic_access };
            gpu.lines().collect::<Vec<_>>()
        };
        assert_eq!(lines(None).len(), 1);
        let good = lines(Some(access(true, false, true)));
        assert_eq!((good.len(), good[1].usable, &good[1].remedy), (2, true, &None));
        assert!(good[1].found.contains("by dma-buf;"), "{}", good[1].found);
        assert!(good[1].found.ends_with("in order"), "{}", good[1].found);
        for (found, remedy, bad) in [
            ("in no way", "nvidia_peermem", access(false, false, true)),
            (
                "by address; its kernels see such writes in any order",
                "over PCIe",
                access(false, true, false),
            ),
        ] {
            let line = &lines(Some(bad))[1];
            assert!(!line.usable && line.found.contains(found), "{line:?}");
            assert!(line.remedy.as_ref().is_some_and(|text| text.contains(remedy)), "{line:?}");
        }
    }

    #[test]
    fn a_host_without_a_driver_gets_a_report_with_remedies() {
        let report = from_kernel_driver(Path::new("/nonexistent"));
        assert_eq!((report.kernel_driver.clone(), report.gpus.len()), (None, 0));
        for line in report.lines() {
            assert!(!line.usable && line.remedy.is_some(), "{line:?}");
        }
        // Probing neither fails nor panics, on any host.
        let lines = probe().lines();
        assert!(lines.iter().all(|line| line.usable == line.remedy.is_none()), "{lines:?}");
    }
}
