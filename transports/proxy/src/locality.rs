//! Processors near a GPU and a NIC, from sysfs, and the placement of a proxy's threads.
//!
//! A thread that posts for a GPU reads commands that came over the GPU's bus and writes doorbells over the NIC's.
//! It belongs on a core of its own, of the processors that both are attached to. Where the system reports nothing,
//! threads run anywhere.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::thread::CpuSet;

/// Folder of devices.
#[derive(Debug, Clone)]
pub struct Sysfs {
    root: PathBuf,
}

/// A device, by its name in the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Device {
    /// By its address on the PCI bus, such as `0000:17:00.0`, as CUDA gives it.
    Pci(String),
    /// An RDMA device, such as `mlx5_0`.
    Rdma(String),
    /// A network interface, such as `eth0`.
    Net(String),
}

/// Processors of each thread.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placement {
    threads: Vec<Vec<usize>>,
    /// Reason of the placement, for logs.
    reason: String,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self { root: PathBuf::from("/sys") }
    }
}

impl Sysfs {
    /// Another root than `/sys`.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Processors next to a device. `None` where the system does not report them.
    #[must_use]
    pub fn cpus_of(&self, device: &Device) -> Option<BTreeSet<usize>> {
        let folder = match device {
            Device::Pci(address) => {
                self.root.join("bus/pci/devices").join(address.to_ascii_lowercase())
            }
            Device::Rdma(name) => self.root.join("class/infiniband").join(name).join("device"),
            Device::Net(name) => self.root.join("class/net").join(name).join("device"),
        };
        let read = |path: PathBuf| std::fs::read_to_string(path).ok();
        let near = read(folder.join("local_cpulist")).and_then(|list| parse_list(&list));
        near.filter(|cpus| !cpus.is_empty()).or_else(|| {
            // Some platforms name the node alone; -1 is none.
            let node: i64 = read(folder.join("numa_node"))?.trim().parse().ok()?;
            let node = self.root.join(format!("devices/system/node/node{node}/cpulist"));
            parse_list(&read(node)?).filter(|cpus| !cpus.is_empty())
        })
    }

    /// The first hardware thread of a processor's core.
    fn core_of(&self, cpu: usize) -> usize {
        let path = format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = std::fs::read_to_string(self.root.join(path)).ok();
        let siblings = siblings.and_then(|list| parse_list(&list));
        siblings.and_then(|set| set.first().copied()).unwrap_or(cpu)
    }
}

impl Placement {
    /// Any processor that the system chooses.
    #[must_use]
    pub fn anywhere() -> Self {
        Self { threads: Vec::new(), reason: "not asked for".to_owned() }
    }

    /// `num_threads` threads near `gpu` and `nic`, among the processors that this process may use.
    #[must_use]
    pub fn near(
        sysfs: &Sysfs,
        gpu: Option<&Device>,
        nic: Option<&Device>,
        num_threads: usize,
    ) -> Self {
        Self::among(sysfs, &allowed(), gpu, nic, num_threads)
    }

    /// As [`near`](Self::near), among `allowed`.
    #[must_use]
    pub fn among(
        sysfs: &Sysfs,
        allowed: &BTreeSet<usize>,
        gpu: Option<&Device>,
        nic: Option<&Device>,
        num_threads: usize,
    ) -> Self {
        let Some((cpus, reason)) = nearest(sysfs, allowed, gpu, nic) else {
            return Self { threads: Vec::new(), reason: UNKNOWN.to_owned() };
        };
        // Cores first, then their further hardware threads. The first core of a node takes most
        // interrupts and gets a thread last.
        let mut cores: Vec<usize> =
            cpus.iter().copied().filter(|&cpu| sysfs.core_of(cpu) == cpu).collect();
        if cores.len() > num_threads {
            cores.rotate_left(1);
        }
        let threads = if cores.len() >= num_threads {
            cores.into_iter().take(num_threads).map(|cpu| vec![cpu]).collect()
        } else {
            // Too few for one each: the system distributes them among all that are near.
            vec![cpus.into_iter().collect(); num_threads]
        };
        Self { threads, reason: reason.to_owned() }
    }

    /// Threads of a service near `gpu` and `nic`, and their number: 0 takes a quarter of the processors that are
    /// near, one to four. Each may run on any of those, since other processes on this host choose alike, and must
    /// not share one core.
    #[must_use]
    pub fn shared(
        sysfs: &Sysfs,
        allowed: &BTreeSet<usize>,
        gpu: Option<&Device>,
        nic: Option<&Device>,
        num_threads: usize,
    ) -> (Self, usize) {
        let near = nearest(sysfs, allowed, gpu, nic);
        let num_near = near.as_ref().map_or(allowed.len(), |(cpus, _)| cpus.len());
        let num_threads = if num_threads == 0 { (num_near / 4).clamp(1, 4) } else { num_threads };
        let placed = match near {
            Some((cpus, reason)) => Self {
                threads: vec![cpus.into_iter().collect(); num_threads],
                reason: reason.to_owned(),
            },
            None => Self { threads: Vec::new(), reason: UNKNOWN.to_owned() },
        };
        (placed, num_threads)
    }

    /// Processors of thread `idx`; `None`: any.
    #[must_use]
    pub fn of(&self, idx: usize) -> Option<CpuSet> {
        let cpus = self.threads.get(idx)?;
        let mut set = CpuSet::new();
        cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
        Some(set)
    }

    /// Processors of each thread; empty: anywhere.
    #[must_use]
    pub fn threads(&self) -> &[Vec<usize>] {
        &self.threads
    }

    /// Reason.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}

/// Processors of `allowed` next to both devices, else to the NIC, else to the GPU.
fn nearest(
    sysfs: &Sysfs,
    allowed: &BTreeSet<usize>,
    gpu: Option<&Device>,
    nic: Option<&Device>,
) -> Option<(BTreeSet<usize>, &'static str)> {
    let near = |device: Option<&Device>| -> Option<BTreeSet<usize>> {
        let cpus = sysfs.cpus_of(device?)?;
        let cpus: BTreeSet<usize> = cpus.intersection(allowed).copied().collect();
        (!cpus.is_empty()).then_some(cpus)
    };
    let (of_gpu, of_nic) = (near(gpu), near(nic));
    let both = of_gpu.as_ref().zip(of_nic.as_ref()).map(|(gpu, nic)| gpu & nic);
    match (both.filter(|cpus| !cpus.is_empty()), of_nic, of_gpu) {
        (Some(cpus), ..) => Some((cpus, "near both GPU and NIC")),
        // Posting is most of a thread's work, and distance to the NIC's registers slows it most.
        (None, Some(cpus), _) => Some((cpus, "near the NIC")),
        (None, None, Some(cpus)) => Some((cpus, "near the GPU")),
        (None, None, None) => None,
    }
}

/// Processors that this process may use.
#[must_use]
pub fn allowed() -> BTreeSet<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect(),
        Err(error) => {
            tracing::debug!(%error, "the system does not report the permitted processors");
            BTreeSet::new()
        }
    }
}

/// Parses numbers and ranges: `0-3,8,10-11`. `None` for any other text.
fn parse_list(text: &str) -> Option<BTreeSet<usize>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

const MAX_CPUS: usize = 1 << 16;
const UNKNOWN: &str = "the system does not say what is near";

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let sysfs = Sysfs::at(root.path());
        (root, sysfs)
    }

    fn pci() -> Device {
        Device::Pci("0000:AB:00.0".to_owned())
    }

    fn nic() -> Device {
        Device::Rdma("mlx5_3".to_owned())
    }

    fn siblings(cores: std::ops::Range<usize>, num: usize) -> Vec<(String, String)> {
        let entry = |cpu, core| {
            let path = format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            (path, format!("{core},{}\n", core + num))
        };
        cores.flat_map(|core| [entry(core, core), entry(core + num, core)]).collect()
    }

    #[test]
    fn threads_get_cores_that_are_near_both() {
        let mut files = vec![
            ("bus/pci/devices/0000:ab:00.0/local_cpulist".to_owned(), "0-7,16-23\n".to_owned()),
            ("class/infiniband/mlx5_3/device/local_cpulist".to_owned(), "4-11,20-27\n".to_owned()),
        ];
        files.extend(siblings(0..16, 16));
        let files: Vec<(&str, &str)> =
            files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let (_root, sysfs) = tree(&files);
        let all = (0..32).collect();
        let place = |num| Placement::among(&sysfs, &all, Some(&pci()), Some(&nic()), num);
        assert_eq!(place(2).threads(), [[5], [6]]);
        assert_eq!(place(4).threads(), [[4], [5], [6], [7]]);
        // More threads than cores: all of them anywhere near.
        assert_eq!(place(5).threads(), vec![vec![4, 5, 6, 7, 20, 21, 22, 23]; 5]);
        assert!(place(2).reason().contains("both"));
        // Processors that the process may not use are left out.
        let few = BTreeSet::from([6, 9, 12]);
        let placed = Placement::among(&sysfs, &few, Some(&pci()), Some(&nic()), 1);
        assert_eq!(placed.threads(), [[6]]);
        let nic_only =
            Placement::among(&sysfs, &BTreeSet::from([9, 12]), Some(&pci()), Some(&nic()), 1);
        assert_eq!((nic_only.threads(), nic_only.reason()), (&[vec![9]][..], "near the NIC"));
    }

    #[test]
    fn a_node_will_do_and_nothing_is_no_failure() {
        let (_root, sysfs) = tree(&[
            ("bus/pci/devices/0000:ab:00.0/numa_node", "1\n"),
            ("devices/system/node/node1/cpulist", "2-3\n"),
            ("class/infiniband/mlx5_3/device/numa_node", "-1\n"),
            ("class/net/eth0/device/local_cpulist", "3-1\n"),
        ]);
        assert_eq!(sysfs.cpus_of(&pci()), Some(BTreeSet::from([2, 3])));
        assert_eq!(sysfs.cpus_of(&nic()), None);
        assert_eq!(sysfs.cpus_of(&Device::Net("eth0".to_owned())), None);
        let all = (0..4).collect();
        let placed = Placement::among(&sysfs, &all, Some(&pci()), Some(&nic()), 1);
        assert_eq!((placed.threads(), placed.reason()), (&[vec![3]][..], "near the GPU"));
        let nowhere = Placement::among(&sysfs, &all, None, Some(&nic()), 3);
        assert!(nowhere.threads().is_empty() && nowhere.of(0).is_none());
    }

    #[test]
    fn threads_of_services_share_what_is_near() {
        let (_root, sysfs) = tree(&[
            ("bus/pci/devices/0000:ab:00.0/local_cpulist", "0-31\n"),
            ("class/infiniband/mlx5_3/device/local_cpulist", "20-31,40\n"),
        ]);
        let all = (0..64).collect();
        let (gpu, nic) = (pci(), nic());
        let (gpu, nic) = (Some(&gpu), Some(&nic));
        let place = |gpu, nic, num| Placement::shared(&sysfs, &all, gpu, nic, num);
        let (placed, num) = place(gpu, nic, 0);
        assert_eq!((num, placed.threads()), (3, &vec![(20..32).collect::<Vec<_>>(); 3][..]));
        // The requested number, however few are near; by default one to four.
        assert_eq!(place(gpu, nic, 7).0.threads().len(), 7);
        assert_eq!(place(gpu, None, 0).1, 4);
        let (placed, num) = Placement::shared(&sysfs, &BTreeSet::from([20, 21]), gpu, None, 0);
        assert_eq!((num, placed.threads()), (1, &[vec![20, 21]][..]));
        let (placed, num) = place(None, None, 0);
        assert_eq!((num, placed.of(0)), (4, None));
    }

    #[test]
    fn lists_are_parsed_or_refused() {
        assert_eq!(parse_list("0-2,5\n"), Some(BTreeSet::from([0, 1, 2, 5])));
        assert_eq!(parse_list(""), Some(BTreeSet::new()));
        for bad in ["a", "1-", "-3", "5-2", "0-99999999999", "18446744073709551616"] {
            assert_eq!(parse_list(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_pinned_thread_runs_where_it_was_put() {
        let allowed = allowed();
        let Some(cpu) = allowed.last().copied() else { return };
        let placement = Placement { threads: vec![vec![cpu]], reason: String::new() };
        let set = placement.of(0).unwrap();
        let seen = std::thread::spawn(move || {
            rustix::thread::sched_setaffinity(None, &set).unwrap();
            rustix::thread::sched_getcpu()
        });
        assert_eq!(seen.join().unwrap(), cpu);
    }
}
