//! The report on made-up hosts, on devices of the stand-in (`mock/mlx5.c`), and on this host.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::mock::{CLEAN, Mock, MockState};
use switchyard_ibgda::probe::{
    MissingPart, missing_for_doorbells, missing_for_gpu_memory, probe, probe_devices, probe_files,
};
use switchyard_ibgda::{Check, Libraries, Report, State};

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
fn what_errors_carry_is_what_the_report_says() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    complete(root);
    assert_eq!(missing_for_doorbells(root), []);
    assert_eq!(missing_for_gpu_memory(root), []);
    write(root, "proc/driver/nvidia/params", "EnableStreamMemOPs: 1\n");
    assert_eq!(missing_for_doorbells(root), [MissingPart::PeerMapping]);
    fs::remove_file(root.join("proc/driver/nvidia/params")).unwrap();
    assert_eq!(missing_for_doorbells(root), [MissingPart::StreamMemOps, MissingPart::PeerMapping]);
    // One method of reaching GPU memory is enough.
    write(root, "proc/sys/kernel/osrelease", "5.4.0\n");
    assert_eq!(missing_for_gpu_memory(root), []);
    write(root, "proc/modules", "mlx5_core 1 0\n");
    assert_eq!(missing_for_gpu_memory(root), [MissingPart::Linux, MissingPart::PeerMemory]);
    write(root, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 535\n");
    let all = [MissingPart::OpenModules, MissingPart::Linux, MissingPart::PeerMemory];
    assert_eq!(missing_for_gpu_memory(root), all);
    for (missing, part) in all.into_iter().zip(["open kernel modules", "5.12", "nvidia_peermem"]) {
        assert!(missing.to_string().contains(part), "{missing}");
    }
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

/// Any active port suffices: its number is a setting.
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

/// The report on the stand-in's only mlx5 device.
fn device(mock: &Mock) -> (Report, Vec<Check>) {
    let report = probe_devices(&mock.libraries, &mock.config().root);
    mock.settle();
    let [device] = &report.devices[..] else { panic!("one mlx5 device: {report}") };
    assert_eq!(device.name, "mlx5_7");
    let is_explained = |check: &Check| check.state != State::Missing || check.remedy.is_some();
    assert!(device.checks.iter().all(is_explained), "{report}");
    let checks = device.checks.clone();
    (report, checks)
}

#[test]
fn a_device_says_everything_that_queues_depend_on() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let (report, checks) = device(&mock);
    assert!(report.is_ready(), "{report}");
    assert_eq!((report.checks[0].name, &report.checks[0].found[..]), ("mlx5 devices", "mlx5_7"));
    let expected = [
        ("firmware", "28.39.1002, ConnectX-7 (part 0x1021)"),
        ("DevX", "yes: queues may lie in GPU memory, doorbells may do without a record"),
        ("completion format", "cqe_version 1"),
        (
            "atomics",
            "atomic_cap 1 (among this NIC's); fetch-add of 4 and 8 bytes (operations 0x000f, sizes 0x000c)",
        ),
        ("masked atomics", "masked fetch-add of 4 and 8 bytes"),
        (
            "reads and atomics",
            "under way for each queue pair: max_qp_init_rd_atom 16, max_qp_rd_atom 16",
        ),
        ("queue depth", "at most 32768 blocks of 64 bytes (log_max_qp_sz 15, max_qp_wr 32768)"),
        ("port", "1: active, Ethernet, MTU 4096"),
        ("RoCE v2 address", "1: ::ffff:10.0.0.4 at index 3"),
    ];
    assert_eq!(checks.len(), expected.len(), "{report}");
    for (check, (name, found)) in checks.iter().zip(expected) {
        assert_eq!((check.name, &check.found[..]), (name, found));
        assert_eq!((check.state, &check.remedy), (State::Present, &None), "{report}");
    }

    mock.change(|state| *state = MockState { link_layer: 1, ..CLEAN });
    let (report, checks) = device(&mock);
    assert!(report.is_ready(), "{report}");
    let of_port: Vec<_> = checks[7..].iter().map(|check| (check.name, &check.found[..])).collect();
    let expected = [
        ("port", "1: active, InfiniBand, LID 0x21, MTU 4096"),
        ("address", "1: fe80::1 at index 0"),
    ];
    assert_eq!(of_port, expected, "{report}");

    let text = serde_json::to_value(&report).unwrap();
    assert_eq!(text["devices"][0]["name"], "mlx5_7");
    assert_eq!(text["devices"][0]["checks"][1]["name"], "DevX");
}

#[test]
fn what_a_device_lacks_is_named_with_what_to_do() {
    let Some(mock) = Mock::open() else { return };
    type Change = fn(&mut MockState);
    let cases: [(&str, State, &str, Change); 18] = [
        (
            "firmware",
            State::Missing,
            "ConnectX-4 Lx (part 0x1015) → a ConnectX-5 or later",
            |s| {
                s.part_id = 0x1015;
            },
        ),
        ("DevX", State::Partial, "UCTX_EN=1", |s| s.has_devx = 0),
        ("DevX", State::Present, "doorbells need a record", |s| s.has_no_record = 0),
        ("DevX", State::Present, "doorbells need a record", |s| s.has_caps_2 = 0),
        ("DevX", State::Partial, "QUERY_HCA_CAP was refused with status 0x08", |s| {
            s.firmware_status = 8;
        }),
        ("completion format", State::Partial, "cqe_version is not known without DevX", |s| {
            s.has_devx = 0;
        }),
        ("completion format", State::Partial, "cqe_version is 0 → needed: 1", |s| {
            s.cqe_version = 0
        }),
        ("atomics", State::Missing, "atomic_cap is 0 → needed: 1 (IBV_ATOMIC_HCA)", |s| {
            (s.has_devx, s.atomic_cap) = (0, 0);
        }),
        ("atomics", State::Missing, "atomic_operations is 0x0005", |s| s.atomic_operations = 5),
        ("masked atomics", State::Missing, "for this virtual function", |s| {
            s.atomic_operations = 3
        }),
        ("masked atomics", State::Partial, "not known without DevX", |s| s.has_devx = 0),
        (
            "reads and atomics",
            State::Missing,
            "max_qp_init_rd_atom is 8 → needed: at least 16",
            |s| {
                s.max_reads = 8;
            },
        ),
        ("queue depth", State::Partial, "at most 512 blocks", |s| s.log_max_blocks = 9),
        ("queue depth", State::Missing, "at most 64 blocks of 64 bytes (max_qp_wr 64)", |s| {
            (s.has_devx, s.max_blocks) = (0, 64);
        }),
        (
            "port",
            State::Missing,
            "1: down, Ethernet, MTU 4096 → set its network interface up",
            |s| {
                s.port_state = 1;
            },
        ),
        (
            "port",
            State::Missing,
            "LID 0x21, MTU 4096 → check cable, switch and subnet manager",
            |s| {
                (s.port_state, s.link_layer) = (2, 1);
            },
        ),
        ("port", State::Missing, "none", |s| s.num_ports = 0),
        ("device", State::Missing, "ibv_query_device failed", |s| {
            // List, and context for each of two inspections; the query comes after them.
            (s.num_failures, s.fail_code) = (4, libc::EIO);
        }),
    ];
    for (name, expected, part, change) in cases {
        mock.change(|state| *state = CLEAN);
        mock.change(change);
        let (report, checks) = device(&mock);
        let check = checks.iter().find(|check| check.name == name);
        let check = check.unwrap_or_else(|| panic!("no check {name}: {report}"));
        let text = format!("{} → {}", check.found, check.remedy.clone().unwrap_or_default());
        assert_eq!(check.state, expected, "{name}: {text}");
        assert!(text.contains(part), "{name}: {text}");
        assert_eq!(report.is_ready(), expected != State::Missing, "{report}");
    }
}

#[test]
fn a_port_without_a_routable_address_is_named() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    fs::remove_dir_all(mock.config().root.join("sys/class/infiniband")).unwrap();
    let (report, checks) = device(&mock);
    let check = checks.last().unwrap();
    assert_eq!((check.name, check.state), ("RoCE v2 address", State::Missing), "{report}");
    assert_eq!(check.found, "1: no RoCE v2 address among 4");
    assert!(check.remedy.as_ref().unwrap().contains("an IP address"), "{report}");
    assert!(!report.is_ready());
}

#[test]
fn one_port_of_use_is_enough() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = MockState { num_ports: 2, ..CLEAN });
    let (report, checks) = device(&mock);
    let down = checks.iter().find(|check| check.found.starts_with("2: down")).unwrap();
    assert_eq!((down.name, down.state), ("port", State::Partial), "{report}");
    assert!(down.remedy.is_some());
    assert!(report.is_ready(), "{report}");
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
