//! Report of each mlx5 device: firmware, requests, queues, ports and addresses.

use std::net::Ipv6Addr;
use std::path::Path;

use super::{Check, DeviceReport, Report, State, missing, partial, present};
use crate::device::devices;
use crate::ffi;
use crate::library::Libraries;
use crate::nic::{
    Address, Capabilities, DEVX_ADVICE, Inspection, LinkLayer, NicConfig, NicError, PortInspection,
    PortState, inspect,
};
use crate::queue::{MAX_DEPTH, MIN_DEPTH, QueueConfig};

/// Probes the mlx5 devices that libibverbs lists; `sys/class` is below `root`, which is `/` except in tests.
#[must_use]
pub fn probe_devices(libraries: &Libraries, root: &Path) -> Report {
    let name = "mlx5 devices";
    let found = match devices(libraries) {
        Ok(found) => found,
        Err(error) => {
            let check = missing(name, error.to_string(), "modprobe ib_uverbs");
            return Report { checks: vec![check], devices: Vec::new() };
        }
    };
    let (mlx5, others): (Vec<_>, Vec<_>) = found.into_iter().partition(|device| device.is_mlx5);
    let names = |devices: &[crate::Device]| {
        devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    let check = if mlx5.is_empty() {
        let others = if others.is_empty() { "nothing".to_owned() } else { names(&others) };
        let remedy = "modprobe mlx5_ib; in a container pass /dev/infiniband through";
        missing(name, format!("libibverbs lists {others}"), remedy)
    } else {
        present(name, names(&mlx5))
    };
    let look = |device: crate::Device| {
        let config = NicConfig {
            device: Some(device.name.clone()),
            root: root.to_owned(),
            ..NicConfig::default()
        };
        let checks = match inspect(libraries, &config) {
            Ok(inspection) => describe(&inspection),
            Err(error) => vec![lacking("device", State::Missing, &error)],
        };
        DeviceReport { name: device.name, checks }
    };
    Report { checks: vec![check], devices: mlx5.into_iter().map(look).collect() }
}

fn describe(device: &Inspection) -> Vec<Check> {
    let caps = &device.capabilities;
    let mut checks = vec![
        firmware(caps),
        devx(caps),
        completions(caps),
        atomics(caps),
        masked_atomics(caps),
        reads(caps),
        depth(caps),
    ];
    if device.ports.is_empty() {
        checks.push(missing("port", "none".to_owned(), "a port with the driver mlx5_ib is needed"));
    }
    // One port of use is enough: its number is a setting.
    let worst = if device.ports.iter().any(is_usable) { State::Partial } else { State::Missing };
    for port in &device.ports {
        checks.extend(describe_port(&device.name, port, worst));
    }
    checks
}

fn firmware(caps: &Capabilities) -> Check {
    let name = "firmware";
    let limits = &caps.limits;
    let version = if limits.firmware.is_empty() { "no version" } else { &limits.firmware };
    let kind = PARTS.iter().find(|(part_id, _)| *part_id == limits.part_id);
    let kind = kind.map_or("a kind that is not known here", |(_, kind)| kind);
    let found = format!("{version}, {kind} (part {:#06x})", limits.part_id);
    if TOO_OLD.contains(&limits.part_id) {
        return missing(name, found, "a ConnectX-5 or later is needed");
    }
    present(name, found)
}

fn devx(caps: &Capabilities) -> Check {
    let name = "DevX";
    match &caps.devx {
        Ok(caps) => {
            let record = if caps.can_do_without_record { "may do without" } else { "need" };
            present(name, format!("yes: queues may lie in GPU memory, doorbells {record} a record"))
        }
        Err(reason) => {
            let remedy = format!("{DEVX_ADVICE} (`mlxconfig -d DEVICE set UCTX_EN=1`)");
            partial(name, format!("{reason}; queues stay in host memory"), Some(&remedy))
        }
    }
}

fn completions(caps: &Capabilities) -> Check {
    let name = "completion format";
    let Ok(devx) = &caps.devx else { return unknown(name, "cqe_version") };
    match caps.check_completions(devx) {
        Ok(()) => present(name, format!("cqe_version {}", devx.general.cqe_version)),
        // Only the path of DevX asks for it.
        Err(error) => lacking(name, State::Partial, &error),
    }
}

fn atomics(caps: &Capabilities) -> Check {
    let name = "atomics";
    if let Err(error) = caps.check_fetch_add() {
        return lacking(name, State::Missing, &error);
    }
    let cap = match caps.limits.atomics {
        ffi::ATOMIC_NONE => "0 (none)".to_owned(),
        ffi::ATOMIC_HCA => "1 (among this NIC's)".to_owned(),
        other => other.to_string(),
    };
    let of_devx = caps.devx.as_ref().map_or_else(
        |_| String::new(),
        |devx| {
            format!(
                "; fetch-add of 4 and 8 bytes (operations {:#06x}, sizes {:#06x})",
                devx.atomic.operations, devx.atomic.sizes_bytes
            )
        },
    );
    present(name, format!("atomic_cap {cap}{of_devx}"))
}

fn masked_atomics(caps: &Capabilities) -> Check {
    let name = "masked atomics";
    if caps.devx.is_err() {
        let mut check = unknown(name, "masked fetch-add");
        check.found.push_str("; where there is none, the first fails with syndrome 02 or 14");
        return check;
    }
    match caps.check_masked() {
        Ok(()) => present(name, "masked fetch-add of 4 and 8 bytes".to_owned()),
        Err(error) => lacking(name, State::Missing, &error),
    }
}

fn reads(caps: &Capabilities) -> Check {
    let name = "reads and atomics";
    let limits = &caps.limits;
    match caps.check_reads() {
        Ok(()) => present(
            name,
            format!(
                "under way for each queue pair: max_qp_init_rd_atom {}, max_qp_rd_atom {}",
                limits.max_reads, limits.max_peer_reads
            ),
        ),
        Err(error) => {
            let mut check = lacking(name, State::Missing, &error);
            check.remedy =
                check.remedy.map(|remedy| format!("{remedy}; the limit is the firmware's"));
            check
        }
    }
}

fn depth(caps: &Capabilities) -> Check {
    let name = "queue depth";
    let (max_blocks, found) = match &caps.devx {
        Ok(devx) => {
            let log = devx.general.log_max_qp_blocks;
            let blocks = 1_u32.checked_shl(u32::from(log)).unwrap_or(u32::MAX);
            (blocks, format!("log_max_qp_sz {log}, max_qp_wr {}", caps.limits.max_blocks))
        }
        Err(_) => (caps.limits.max_blocks, format!("max_qp_wr {}", caps.limits.max_blocks)),
    };
    let usual = QueueConfig::default().depth;
    let found = format!("at most {max_blocks} blocks of 64 bytes ({found})");
    let remedy = format!(
        "queues have {MIN_DEPTH} to {MAX_DEPTH}, usually {usual}; the limit is the firmware's"
    );
    if max_blocks < MIN_DEPTH {
        missing(name, found, &remedy)
    } else if max_blocks < usual {
        partial(name, found, Some(&remedy))
    } else {
        present(name, found)
    }
}

fn is_usable(port: &PortInspection) -> bool {
    let is_active = |state: &PortState| state.state == ffi::PORT_ACTIVE;
    port.state.as_ref().is_ok_and(is_active) && matches!(port.address, Some(Ok(_)))
}

fn describe_port(device: &str, port: &PortInspection, worst: State) -> Vec<Check> {
    let number = port.number;
    let state = match &port.state {
        Ok(state) => state,
        Err(error) => return vec![of_port(number, lacking("port", worst, error))],
    };
    let link = match state.link {
        LinkLayer::InfiniBand => format!("InfiniBand, LID {:#x}", state.lid),
        LinkLayer::Ethernet => "Ethernet".to_owned(),
    };
    let found = format!("{}, {link}, MTU {}", port_state(state.state), 128_u32 << state.mtu.min(5));
    let mut checks = vec![of_port(
        number,
        match (state.check_active(device), state.link) {
            (Ok(()), _) => present("port", found),
            (Err(_), link) => {
                let remedy = match link {
                    LinkLayer::InfiniBand => "check cable, switch and subnet manager",
                    LinkLayer::Ethernet => {
                        "set its network interface up (`ip link set DEV up`), check cable and switch"
                    }
                };
                Check { state: worst, ..missing("port", found, remedy) }
            }
        },
    )];
    let name = match state.link {
        LinkLayer::InfiniBand => "address",
        LinkLayer::Ethernet => "RoCE v2 address",
    };
    checks.extend(port.address.as_ref().map(|address| {
        let check = match address {
            Ok(Address { gid_idx, gid }) => {
                present(name, format!("{} at index {gid_idx}", Ipv6Addr::from(*gid)))
            }
            Err(error) => {
                let mut check = lacking(name, worst, error);
                if state.link == LinkLayer::Ethernet {
                    let remedy = "give its network interface an IP address, within this container's \
                                  network if this is one";
                    check.remedy = Some(remedy.to_owned());
                }
                check
            }
        };
        of_port(number, check)
    }));
    checks
}

fn of_port(number: u8, check: Check) -> Check {
    Check { found: format!("{number}: {}", check.found), ..check }
}

const fn port_state(state: u32) -> &'static str {
    match state {
        1 => "down",
        2 => "initialising",
        3 => "armed",
        ffi::PORT_ACTIVE => "active",
        _ => "in no known state",
    }
}

/// Properties that only the firmware reports.
fn unknown(name: &'static str, what: &str) -> Check {
    partial(name, format!("{what} is not known without DevX"), Some("see the line DevX"))
}

fn lacking(name: &'static str, state: State, error: &NicError) -> Check {
    let (found, remedy) = match error {
        NicError::Capability { what, found, expected, .. } => {
            (format!("{what} is {found}"), format!("needed: {expected}"))
        }
        NicError::Port { found, expected, .. } => (found.clone(), format!("needed: {expected}")),
        NicError::Call { call, source, advice, .. } => {
            (format!("{call} failed: {source}"), (*advice).to_owned())
        }
        other => (other.to_string(), "see the lines above".to_owned()),
    };
    Check { name, state, found, remedy: Some(remedy) }
}

/// The vendor's numbers, as the driver `mlx5_core` knows them. Virtual functions since ConnectX-6 share one.
const PARTS: [(u32, &str); 19] = [
    (0x1011, "Connect-IB"),
    (0x1012, "Connect-IB, virtual function"),
    (0x1013, "ConnectX-4"),
    (0x1014, "ConnectX-4, virtual function"),
    (0x1015, "ConnectX-4 Lx"),
    (0x1016, "ConnectX-4 Lx, virtual function"),
    (0x1017, "ConnectX-5"),
    (0x1018, "ConnectX-5, virtual function"),
    (0x1019, "ConnectX-5 Ex"),
    (0x101a, "ConnectX-5 Ex, virtual function"),
    (0x101b, "ConnectX-6"),
    (0x101c, "ConnectX-6, virtual function"),
    (0x101d, "ConnectX-6 Dx"),
    (0x101e, "virtual function"),
    (0x101f, "ConnectX-6 Lx"),
    (0x1021, "ConnectX-7"),
    (0x1023, "ConnectX-8"),
    (0xa2d6, "BlueField-2"),
    (0xa2dc, "BlueField-3"),
];
/// Before ConnectX-5.
const TOO_OLD: std::ops::RangeInclusive<u32> = 0x1011..=0x1016;
