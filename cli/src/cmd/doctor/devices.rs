//! Device files that the kernel has devices for and this process cannot open.
//!
//! The kernel shows RDMA devices and GPUs in every container, in `/sys` and `/proc`. Their files in `/dev` are there
//! only if the container was given them.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use rustix::io::Errno;

use super::{Check, Verdict, problem};

/// How this process was started, which decides what adds a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Pod,
    Container,
    Host,
}

/// A device of the kernel's, and the file that programs open to use it.
struct Device {
    name: String,
    /// Below the root.
    file: PathBuf,
}

/// Checks the devices of this host.
pub(super) fn checks() -> Vec<Check> {
    let is_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    checks_of(Path::new("/"), place(Path::new("/"), is_pod))
}

fn place(root: &Path, is_pod: bool) -> Place {
    let marks = [".dockerenv", "run/.containerenv"];
    if is_pod {
        Place::Pod
    } else if marks.iter().any(|mark| root.join(mark).exists()) {
        Place::Container
    } else {
        Place::Host
    }
}

/// Problems only: `rdma` and `gpu` describe devices that work.
fn checks_of(root: &Path, place: Place) -> Vec<Check> {
    let rdma = match place {
        Place::Pod => {
            "add the resource of your RDMA device plugin to the container, such as limits: {rdma/hca: 1}, and the \
             capability IPC_LOCK"
        }
        Place::Container => "start the container with --device=/dev/infiniband --ulimit memlock=-1",
        Place::Host => "modprobe ib_uverbs, and give this user access to /dev/infiniband",
    };
    let gpu = match place {
        Place::Pod => "add limits: {nvidia.com/gpu: 1} to the container",
        Place::Container => {
            "start the container with --gpus all (Docker) or --device nvidia.com/gpu=all (Podman)"
        }
        Place::Host => "nvidia-modprobe -u -c=0 makes them; give this user access to /dev/nvidia*",
    };
    let found =
        [("rdma device files", rdma_devices(root), rdma), ("gpu device files", gpus(root), gpu)];
    found
        .into_iter()
        .filter_map(|(name, devices, remedy)| check(root, name, &devices, remedy))
        .collect()
}

/// Verbs devices: `/sys/class/infiniband_verbs/uverbsN/ibdev` has the name.
fn rdma_devices(root: &Path) -> Vec<Device> {
    let folder = root.join("sys/class/infiniband_verbs");
    let entries = names(&folder).into_iter().filter(|entry| entry.starts_with("uverbs"));
    let devices = entries.map(|entry| {
        let name = std::fs::read_to_string(folder.join(&entry).join("ibdev")).unwrap_or_default();
        let name = if name.trim().is_empty() { &entry } else { name.trim() };
        Device { name: name.to_owned(), file: Path::new("dev/infiniband").join(&entry) }
    });
    given_or_all(root, devices.collect())
}

/// GPUs of the NVIDIA driver: `/proc/driver/nvidia/gpus/BUS/information` has the number of the file.
fn gpus(root: &Path) -> Vec<Device> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let mut minors: Vec<u32> = names(&folder)
        .into_iter()
        .filter_map(|bus| {
            let text = std::fs::read_to_string(folder.join(bus).join("information")).ok()?;
            let minor = text.lines().find_map(|line| line.strip_prefix("Device Minor:"))?;
            minor.trim().parse().ok()
        })
        .collect();
    if minors.is_empty() {
        return Vec::new();
    }
    minors.sort_unstable();
    let device = |name: String, file: &str| Device { name, file: Path::new("dev").join(file) };
    let gpus = minors.iter().map(|minor| device(format!("GPU {minor}"), &format!("nvidia{minor}")));
    let mut devices = given_or_all(root, gpus.collect());
    let of_driver = ["nvidiactl", "nvidia-uvm"].map(|file| device("the driver".to_owned(), file));
    devices.extend(of_driver);
    devices
}

/// The devices that have a file, since a container may have been given only some. All, if none has one.
fn given_or_all(root: &Path, mut devices: Vec<Device>) -> Vec<Device> {
    let is_given = |device: &Device| root.join(&device.file).exists();
    if devices.iter().any(is_given) {
        devices.retain(is_given);
    }
    devices
}

fn check(root: &Path, name: &'static str, devices: &[Device], remedy: &str) -> Option<Check> {
    let mut bad = Vec::new();
    for Device { name, file } in devices {
        // Opening the file of a GPU would wake the GPU.
        let reason = match access(root.join(file), Access::READ_OK | Access::WRITE_OK) {
            Ok(()) => continue,
            Err(Errno::NOENT) => "missing".to_owned(),
            Err(Errno::ACCESS | Errno::PERM) => "not permitted".to_owned(),
            Err(error) => error.to_string(),
        };
        bad.push(format!("/{} is {reason} ({name})", file.display()));
    }
    let num_more = bad.len().saturating_sub(MAX_SHOWN);
    bad.truncate(MAX_SHOWN);
    if num_more > 0 {
        bad.push(format!("{num_more} more"));
    }
    (!bad.is_empty()).then(|| problem(name, Verdict::Warn, bad.join(", "), remedy))
}

/// Names in a folder, sorted. Empty if there is no such folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// Most files that one line names.
const MAX_SHOWN: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        std::fs::write(path, text).expect("a file");
    }

    fn lines(root: &Path, place: Place) -> Vec<(String, String)> {
        let checks = checks_of(root, place);
        assert!(checks.iter().all(|check| check.verdict == Verdict::Warn));
        checks.into_iter().map(|check| (check.found, check.remedy.expect("a remedy"))).collect()
    }

    #[test]
    fn a_host_without_devices_has_no_line() {
        let root = tempfile::tempdir().expect("a folder");
        assert!(lines(root.path(), Place::Pod).is_empty());
    }

    #[test]
    fn devices_that_a_container_was_not_given_are_named() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        for (number, name) in ["mlx5_0", "mlx5_1"].iter().enumerate() {
            let path = format!("sys/class/infiniband_verbs/uverbs{number}/ibdev");
            write(root, &path, &format!("{name}\n"));
        }
        write(root, "sys/class/infiniband_verbs/abi_version", "6\n");
        for (bus, minor) in [("0000:3b:00.0", 1), ("0000:19:00.0", 0)] {
            let text = format!("Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n");
            write(root, &format!("proc/driver/nvidia/gpus/{bus}/information"), &text);
        }
        let rdma = "/dev/infiniband/uverbs0 is missing (mlx5_0), /dev/infiniband/uverbs1 is missing (mlx5_1)";
        let gpu = "/dev/nvidia0 is missing (GPU 0), /dev/nvidia1 is missing (GPU 1), \
                   /dev/nvidiactl is missing (the driver), /dev/nvidia-uvm is missing (the driver)";
        for (place, remedies) in [
            (Place::Pod, ["rdma/hca: 1", "nvidia.com/gpu: 1"]),
            (Place::Container, ["--device=/dev/infiniband", "--gpus all"]),
            (Place::Host, ["modprobe ib_uverbs", "nvidia-modprobe"]),
        ] {
            let found = lines(root, place);
            assert_eq!([&*found[0].0, &*found[1].0], [rdma, gpu]);
            assert!(found.iter().zip(remedies).all(|((_, text), part)| text.contains(part)));
        }
        // The container gets one GPU and one RDMA device.
        for name in ["infiniband/uverbs0", "nvidia1", "nvidiactl", "nvidia-uvm"] {
            write(root, &format!("dev/{name}"), "");
        }
        assert!(lines(root, Place::Container).is_empty());
        std::fs::remove_file(root.join("dev/nvidia-uvm")).expect("a file");
        let found = lines(root, Place::Container);
        assert_eq!(found[0].0, "/dev/nvidia-uvm is missing (the driver)");
    }

    #[test]
    fn many_devices_make_one_line() {
        let root = tempfile::tempdir().expect("a folder");
        for number in 0..16 {
            let path = format!("sys/class/infiniband_verbs/uverbs{number}/ibdev");
            write(root.path(), &path, &format!("mlx5_{number}"));
        }
        let found = lines(root.path(), Place::Pod);
        assert!(found[0].0.ends_with("(mlx5_11), 12 more"), "{found:?}");
    }

    #[test]
    fn the_place_is_recognised() {
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(place(root.path(), false), Place::Host);
        write(root.path(), "run/.containerenv", "");
        assert_eq!(place(root.path(), false), Place::Container);
        assert_eq!(place(root.path(), true), Place::Pod);
    }
}
