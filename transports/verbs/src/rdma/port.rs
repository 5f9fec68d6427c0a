//! Ports of devices: the available ones, their selection, and their addresses.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::config::{MAX_QUEUE_PAIRS, PortChoice, VerbsConfig};
use super::detail::{Link, QueuePairAddress, Signals};
use super::owner::{CallError, Context, device_names};
use super::sys;
use p2p_core::network::NetworkError;

/// An active port of an open device.
#[derive(Debug, Clone)]
pub(super) struct Port {
    pub(super) context: Arc<Context>,
    pub(super) number: u8,
    pub(super) link: Link,
    pub(super) lid: u16,
    pub(super) mtu: u8,
    /// Longest message in bytes.
    pub(super) max_message_bytes: u32,
    /// Number of reads and atomics that a queue pair may have under way.
    pub(super) num_requests: u8,
    /// Number of reads and atomics that a queue pair answers at the same time.
    pub(super) num_responses: u8,
    num_gids: u8,
}

/// Opens the ports that `config` requests: at least one, all of one link layer.
pub(super) fn open_ports(config: &VerbsConfig) -> Result<Vec<Port>, NetworkError> {
    let names = device_names().map_err(|error| no_devices(&error))?;
    if names.is_empty() {
        return Err(no_devices(&CallError { call: "ibv_get_device_list", code: libc::ENODEV }));
    }
    let ports = match &config.ports {
        PortChoice::First => first_active(&names)?,
        PortChoice::Named(wanted) => {
            let (mut ports, mut opened) = (Vec::new(), Vec::new());
            for port in wanted {
                ports.push(open_named(port, &names, &mut opened)?);
            }
            ports
        }
        PortChoice::Near(device) => nearest(&names, &Place::of_pci_device(&sysfs(), device)?)?,
        PortChoice::NearNode(node) => nearest(&names, &Place::of_node(*node))?,
    };
    let Some(first) = ports.first() else {
        return Err(error("verbs", "choosing ports", None, "no port is named"));
    };
    if let Some(other) = ports.iter().find(|port| port.link != first.link) {
        let detail = format!(
            "{} is {:?} and {} is {:?}; ports of one peer must be alike",
            first.name(),
            first.link,
            other.name(),
            other.link
        );
        return Err(error("verbs", "choosing ports", None, detail));
    }
    Ok(ports)
}

impl Port {
    fn open(context: &Arc<Context>, number: u8) -> Result<Option<Self>, CallError> {
        let attr = context.port(number)?;
        if attr.state != sys::ibv_port_state::IBV_PORT_ACTIVE {
            return Ok(None);
        }
        let device = context.attr();
        let clamp = |value: i32| u8::try_from(value.clamp(1, 16)).unwrap_or(1);
        Ok(Some(Self {
            context: Arc::clone(context),
            number,
            link: if attr.link_layer == ETHERNET { Link::Ethernet } else { Link::InfiniBand },
            lid: attr.lid,
            mtu: u8::try_from(attr.active_mtu.clamp(1, 5)).unwrap_or(1),
            max_message_bytes: attr.max_msg_sz,
            num_requests: clamp(device.max_qp_init_rd_atom),
            num_responses: clamp(device.max_qp_rd_atom),
            num_gids: u8::try_from(attr.gid_tbl_len.clamp(0, 255)).unwrap_or(0),
        }))
    }

    /// The name in the form for people.
    pub(super) fn name(&self) -> String {
        format!("{}:{}", self.context.name(), self.number)
    }

    pub(super) const fn flavour(&self) -> &'static str {
        match self.link {
            Link::InfiniBand => "ib",
            Link::Ethernet => "roce2",
        }
    }

    /// The properties that both ends of slots must share.
    pub(super) const fn slot_flavour(&self, signals: Signals) -> &'static str {
        match (self.link, signals) {
            (_, Signals::Atomics) => self.flavour(),
            (Link::InfiniBand, Signals::Messages) => "ib-messages",
            (Link::Ethernet, Signals::Messages) => "roce2-messages",
        }
    }

    /// Index and bytes of the address for peers that are reached from `local`.
    pub(super) fn address(
        &self,
        config: &VerbsConfig,
        local: IpAddr,
    ) -> Result<(u8, [u8; 16]), NetworkError> {
        let failed = |e: CallError| error(&self.name(), e.call, Some(e.code), e.to_string());
        if let Some(idx) = config.gid_index {
            return Ok((idx, self.context.gid(self.number, idx).map_err(failed)?));
        }
        if self.link == Link::InfiniBand {
            return Ok((0, self.context.gid(self.number, 0).map_err(failed)?));
        }
        let mut entries = Vec::new();
        for idx in 0..self.num_gids {
            // Unused entries have no type.
            if gid_type(&sysfs(), self.context.name(), self.number, idx).as_deref()
                == Some("RoCE v2")
            {
                entries.push((idx, self.context.gid(self.number, idx).map_err(failed)?));
            }
        }
        choose_gid(&entries, local).ok_or_else(|| {
            let detail = "no RoCE v2 address; give the port's network interface an IP address, or set gid_index";
            error(&self.name(), "choosing an address", None, detail)
        })
    }

    /// True if packets to `peer` need a global header: always on Ethernet, and between subnets on InfiniBand.
    pub(super) fn needs_global_route(
        &self,
        own: &QueuePairAddress,
        peer: &QueuePairAddress,
    ) -> bool {
        self.link == Link::Ethernet || peer.lid == 0 || own.gid[..8] != peer.gid[..8]
    }
}

/// Proximity of two PCI devices. A greater value is nearer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Nearness {
    is_same_node: bool,
    /// Number of bridges above both devices.
    num_common: usize,
}

/// Location of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    /// NUMA node; negative if there is none.
    node: i32,
    /// PCI addresses from the root down.
    path: Vec<String>,
}

impl Place {
    const fn of_node(node: i32) -> Self {
        Self { node, path: Vec::new() }
    }

    fn of_pci_device(sysfs: &Path, address: &str) -> Result<Self, NetworkError> {
        let folder = sysfs.join("bus/pci/devices").join(address.to_ascii_lowercase());
        Self::of_folder(&folder).ok_or_else(|| {
            let detail = format!("{} is not there; `lspci -D` shows addresses", folder.display());
            error("verbs", "looking for a PCI device", None, detail)
        })
    }

    fn of_rdma_device(sysfs: &Path, name: &str) -> Option<Self> {
        Self::of_folder(&sysfs.join("class/infiniband").join(name).join("device"))
    }

    fn of_folder(folder: &Path) -> Option<Self> {
        let real = folder.canonicalize().ok()?;
        let node = std::fs::read_to_string(real.join("numa_node"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or(-1);
        let parts = real.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
        let path = parts.skip_while(|part| !part.starts_with("pci")).collect();
        Some(Self { node, path })
    }

    fn nearness(&self, other: &Self) -> Nearness {
        let common = self.path.iter().zip(&other.path).take_while(|(a, b)| a == b);
        Nearness {
            is_same_node: self.node >= 0 && self.node == other.node,
            num_common: common.count(),
        }
    }
}

fn first_active(names: &[String]) -> Result<Vec<Port>, NetworkError> {
    for name in names {
        if let Some(port) = active_ports(name)?.into_iter().next() {
            return Ok(vec![port]);
        }
    }
    Err(no_active_port(names))
}

fn nearest(names: &[String], place: &Place) -> Result<Vec<Port>, NetworkError> {
    let mut best: Vec<Port> = Vec::new();
    let mut best_nearness = None;
    for name in names {
        let nearness = Place::of_rdma_device(&sysfs(), name).map(|found| found.nearness(place));
        if nearness < best_nearness {
            continue;
        }
        let ports = active_ports(name)?;
        if ports.is_empty() {
            continue;
        }
        if nearness > best_nearness || best.is_empty() {
            best_nearness = nearness;
            best.clear();
        }
        best.extend(ports);
    }
    if best.is_empty() {
        return Err(no_active_port(names));
    }
    let link = best[0].link;
    best.retain(|port| port.link == link);
    best.truncate(MAX_QUEUE_PAIRS);
    Ok(best)
}

fn active_ports(name: &str) -> Result<Vec<Port>, NetworkError> {
    let failed = |e: CallError| error(name, e.call, Some(e.code), e.to_string());
    let context = Context::open(name).map_err(failed)?;
    let mut ports = Vec::new();
    for number in 1..=context.attr().phys_port_cnt {
        ports.extend(Port::open(&context, number).map_err(failed)?);
    }
    Ok(ports)
}

/// Opens the named ports. Ports of one device share its context in `opened`.
fn open_named(
    wanted: &str,
    names: &[String],
    opened: &mut Vec<(String, Vec<Port>)>,
) -> Result<Port, NetworkError> {
    let (name, number) = match wanted.split_once(':') {
        None => (wanted, None),
        Some((name, number)) => match number.parse::<u8>() {
            Ok(number) if number > 0 => (name, Some(number)),
            _ => {
                let detail =
                    format!("`{wanted}` is not a port; expected such as mlx5_0 or mlx5_0:1");
                return Err(error("verbs", "choosing ports", None, detail));
            }
        },
    };
    if !names.iter().any(|found| found == name) {
        let detail = format!("there is no device {name}; this host has {}", names.join(", "));
        return Err(error("verbs", "choosing ports", None, detail));
    }
    if !opened.iter().any(|(known, _)| known == name) {
        opened.push((name.to_owned(), active_ports(name)?));
    }
    let ports = opened.iter().filter(|(known, _)| known == name).flat_map(|(_, ports)| ports);
    let mut ports = ports.filter(|port| number.is_none_or(|number| port.number == number));
    ports.next().cloned().ok_or_else(|| {
        let detail =
            "the port is not active; `ibv_devinfo` shows its state, `ip link` its interface";
        error(wanted, "opening a port", None, detail)
    })
}
/// Selects the entry that fits the route: its own address, else an IPv4 address, else any.
fn choose_gid(entries: &[(u8, [u8; 16])], local: IpAddr) -> Option<(u8, [u8; 16])> {
    let wanted = match local {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let is_mapped = |gid: &[u8; 16]| gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    let is_link_local = |gid: &[u8; 16]| gid[0] == 0xfe && gid[1] & 0xc0 == 0x80;
    let rank = |gid: &[u8; 16]| match gid {
        gid if *gid == wanted.octets() => 0,
        gid if is_mapped(gid) => 1,
        gid if !is_link_local(gid) => 2,
        _ => 3,
    };
    entries.iter().copied().min_by_key(|(idx, gid)| (rank(gid), *idx))
}

fn gid_type(sysfs: &Path, device: &str, port: u8, idx: u8) -> Option<String> {
    let file = format!("class/infiniband/{device}/ports/{port}/gid_attrs/types/{idx}");
    Some(std::fs::read_to_string(sysfs.join(file)).ok()?.trim().to_owned())
}

fn sysfs() -> PathBuf {
    PathBuf::from("/sys")
}

fn no_devices(cause: &CallError) -> NetworkError {
    let detail = format!(
        "this host has no RDMA device ({}); use shm or libfabric, or load the driver of its NIC",
        sys::describe_errno(cause.code)
    );
    error("verbs", cause.call, Some(cause.code), detail)
}

fn no_active_port(names: &[String]) -> NetworkError {
    let detail = format!(
        "no port of {} is active; `ibv_devinfo` shows their state, `ip link` their interfaces",
        names.join(", ")
    );
    error("verbs", "choosing ports", None, detail)
}

pub(super) fn error(
    network: &str,
    op: &'static str,
    code: Option<i32>,
    detail: impl Into<String>,
) -> NetworkError {
    let network = if network == "verbs" { network.to_owned() } else { format!("verbs {network}") };
    NetworkError { network, op, code: code.map(i64::from), detail: detail.into() }
}

/// `IBV_LINK_LAYER_ETHERNET`.
const ETHERNET: u8 = 2;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_address_of_the_route_comes_first() {
        let mapped = |last: u8| {
            let mut gid = [0; 16];
            gid[10..].copy_from_slice(&[0xff, 0xff, 10, 7, 0, last]);
            gid
        };
        let mut link_local = [0; 16];
        link_local[..2].copy_from_slice(&[0xfe, 0x80]);
        let mut global = [0; 16];
        global[0] = 0x20;
        let entries = [(0, link_local), (1, global), (3, mapped(1)), (5, mapped(2))];
        let choose = |local: &str| choose_gid(&entries, local.parse().unwrap()).unwrap().0;
        assert_eq!(choose("10.7.0.2"), 5);
        assert_eq!(choose("127.0.0.1"), 3);
        assert_eq!(choose("2000::"), 1);
        assert_eq!(choose_gid(&entries[..2], "10.7.0.1".parse().unwrap()), Some((1, global)));
        assert_eq!(choose_gid(&entries[..1], "::1".parse().unwrap()), Some((0, link_local)));
        assert_eq!(choose_gid(&[], "::1".parse().unwrap()), None);
    }

    #[test]
    fn the_port_below_the_same_switch_is_nearest() {
        let root = std::env::temp_dir().join(format!("switchyard-sysfs-{}", std::process::id()));
        let device = |path: &str, node: &str| {
            let folder = root.join("devices").join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), node).unwrap();
            folder
        };
        let gpu = device("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0", "0\n");
        let beside = device("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3d:00.0", "0\n");
        let same_root = device("pci0000:3a/0000:3a:01.0/0000:41:00.0", "0\n");
        let same_node = device("pci0000:16/0000:16:00.0", "0\n");
        let far = device("pci0000:b0/0000:b0:00.0", "1\n");
        fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
        symlink(&gpu, root.join("bus/pci/devices/0000:3c:00.0")).unwrap();
        for (name, folder) in [("a", &far), ("b", &same_node), ("c", &same_root), ("d", &beside)] {
            let class = root.join("class/infiniband").join(name);
            fs::create_dir_all(&class).unwrap();
            symlink(folder, class.join("device")).unwrap();
        }
        let gpu = Place::of_pci_device(&root, "0000:3C:00.0").unwrap();
        let near = |name| Place::of_rdma_device(&root, name).unwrap().nearness(&gpu);
        assert!(near("a") < near("b") && near("b") < near("c") && near("c") < near("d"));
        let node = Place::of_node(1);
        let near = |name| Place::of_rdma_device(&root, name).unwrap().nearness(&node);
        assert!(near("a") > near("d"));
        assert!(Place::of_pci_device(&root, "0000:ff:00.0").is_err());
        fs::remove_dir_all(&root).unwrap();
    }
}
