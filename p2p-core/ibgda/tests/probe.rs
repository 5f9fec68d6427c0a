//! The report on made-up hosts, and on this one.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use ibgda::probe::{probe, probe_files};
use ibgda::{Libraries, Report, State};

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A host that has everything.
fn complete(root: &Path) {
    write(root, "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
    write(root, "sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n");
    write(root, "sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n");
    fs::create_dir_all(root.join("sys/class/infiniband/mlx5_0/device")).unwrap();
    symlink("/bus/pci/drivers/mlx5_core", root.join("sys/class/infiniband/mlx5_0/device/driver"))
        .unwrap();
    write(
        root,
        "proc/modules",
        "mlx5_ib 1 0 - Live\nib_uverbs 1 0 - Live\nmlx5_core 1 0 - Live\nnvidia_peermem 1 0 - Live\n",
    );
    write(root, "dev/infiniband/uverbs0", "");
    write(
        root,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86\n",
    );
    write(
        root,
        "proc/driver/nvidia/params",
        "EnableStreamMemOPs: 1\nRegistryDwords: \"PeerMappingOverride=1;\"\nOther: 0\n",
    );
    write(root, "proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
}

fn state(report: &Report, name: &str) -> (State, String) {
    let check = report.checks.iter().find(|check| check.name == name);
    let check = check.unwrap_or_else(|| panic!("no check {name}"));
    assert!(check.state != State::Missing || check.remedy.is_some());
    (check.state, format!("{} → {}", check.found, check.remedy.clone().unwrap_or_default()))
}

#[test]
fn a_complete_host_is_ready() {
    let root = tempfile::tempdir().unwrap();
    complete(root.path());
    let report = probe_files(root.path());
    assert!(report.is_ready(), "{report}");
    assert!(report.checks.iter().all(|check| check.state == State::Present), "{report}");
    let text = serde_json::to_string(&report).unwrap();
    assert!(text.contains("\"state\":\"present\"") && text.contains("400 Gb/sec"), "{text}");
}

#[test]
fn each_thing_that_is_missing_is_named_with_what_to_do() {
    type Break = fn(&Path);
    let cases: [(&str, State, &str, Break); 11] = [
        ("mlx5 NIC", State::Missing, "no RDMA device", |root| {
            fs::remove_dir_all(root.join("sys/class/infiniband")).unwrap();
        }),
        ("mlx5 NIC", State::Missing, "no port is active", |root| {
            write(root, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
        }),
        ("mlx5 NIC", State::Missing, "port 1: 1: DOWN Ethernet", |root| {
            write(root, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
            write(root, "sys/class/infiniband/mlx5_0/ports/2/state", "2: INIT\n");
        }),
        ("mlx5 NIC", State::Missing, "no port", |root| {
            fs::remove_dir_all(root.join("sys/class/infiniband/mlx5_0/ports")).unwrap();
        }),
        ("mlx5 NIC", State::Missing, "bnxt_en", |root| {
            let driver = root.join("sys/class/infiniband/mlx5_0/device/driver");
            fs::remove_file(&driver).unwrap();
            symlink("/bus/pci/drivers/bnxt_en", driver).unwrap();
        }),
        ("kernel modules", State::Missing, "modprobe mlx5_ib ib_uverbs", |root| {
            write(root, "proc/modules", "mlx5_core 1 0 - Live\nmlx5_ibx 1 0 - Live\n");
        }),
        ("user access to RDMA", State::Missing, "container", |root| {
            fs::remove_file(root.join("dev/infiniband/uverbs0")).unwrap();
        }),
        ("EnableStreamMemOPs", State::Missing, "NVreg_EnableStreamMemOPs=1", |root| {
            write(root, "proc/driver/nvidia/params", "EnableStreamMemOPs: 0\n");
        }),
        (
            "RegistryDwords",
            State::Missing,
            "NVreg_RegistryDwords=\"PeerMappingOverride=1;\"",
            |root| {
                write(root, "proc/driver/nvidia/params", "RegistryDwords: \"\"\n");
            },
        ),
        ("registration of GPU memory", State::Partial, "nvidia_peermem", |root| {
            write(root, "proc/sys/kernel/osrelease", "5.4.0\n");
        }),
        ("registration of GPU memory", State::Missing, "neither", |root| {
            write(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 535\n");
            write(root, "proc/modules", "mlx5_core 1 0\n");
        }),
    ];
    for (name, expected, part, change) in cases {
        let root = tempfile::tempdir().unwrap();
        complete(root.path());
        change(root.path());
        let report = probe_files(root.path());
        let (found, text) = state(&report, name);
        assert_eq!(found, expected, "{name}: {text}");
        assert!(text.contains(part), "{name}: {text}");
        assert_eq!(report.is_ready(), expected != State::Missing, "{report}");
    }
}

/// Whatever port is up will do: its number is a setting.
#[test]
fn every_port_of_a_nic_counts() {
    let root = tempfile::tempdir().unwrap();
    complete(root.path());
    write(root.path(), "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    for (file, text) in
        [("state", "4: ACTIVE\n"), ("link_layer", "InfiniBand\n"), ("rate", "200 Gb/sec\n")]
    {
        write(root.path(), &format!("sys/class/infiniband/mlx5_0/ports/2/{file}"), text);
    }
    let report = probe_files(root.path());
    let (found, text) = state(&report, "mlx5 NIC");
    assert_eq!(found, State::Present, "{text}");
    assert!(text.contains("port 1: 1: DOWN Ethernet 400 Gb/sec (4X NDR), port 2: 4: ACTIVE"));
    assert!(text.contains("InfiniBand 200 Gb/sec"), "{text}");
}

#[test]
fn this_host_gets_a_report_whatever_it_has() {
    let report = probe();
    println!("{report}");
    assert!(report.checks.len() >= 8);
    assert!(report.checks.iter().all(|check| !check.found.is_empty()));
    match Libraries::open() {
        Ok(_) => println!("both libraries are here"),
        Err(error) => assert!(error.to_string().contains("install"), "{error}"),
    }
}
