//! The network: a network underneath joins the hosts, queues of the same handshake join the kernels.

use std::fmt::Display;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use ibgda::nic::LinkLayer;
use ibgda::{Access, Nic, OpenPeer, PeerConfig, QueueConfig};
use kernels::gpu::Gpu;
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::device::{DeviceMemory, DeviceSlots};
use p2p_core::network::{
    JoinedSide, MAX_DETAIL_BYTES, Network, NetworkError, Offer, OpenSide, Route, SideDescription,
};
use p2p_core::slot::{SlotConfigError, SlotLayout};
use p2p_core::{AnyEndpoint, TransportKind};

use crate::detail::{Detail, HEAD_BYTES};
use crate::endpoint::HostEndpoint;
use crate::heartbeat::{OpenHeartbeatQueue, Target};
use crate::place::{self, Parties, SlotPlace};
use crate::slots::Slots;

/// Queues of a peer, and how kernels wait for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Queues that kernels post on, from 1 to 64; both sides need the same number.
    pub num_queues: usize,
    /// Configuration of each queue: by libibverbs, or with [`ibgda::QueuePath::Devx`] by commands to the firmware,
    /// and then without a doorbell record where the NIC supports that. Each side chooses independently.
    pub queue: QueueConfig,
    /// Place of this side's slots; the peer's may lie elsewhere.
    pub slots: SlotPlace,
    /// Longest single wait of a kernel for a queue, above 0: a dead NIC delays a kernel once by this time. A NIC
    /// gives up a peer that does not acknowledge by itself, see [`QueueConfig::ack_timeout`].
    pub wait_limit: Duration,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        let queue = QueueConfig::default();
        let slots = SlotPlace::Auto;
        Self { num_queues: DEFAULT_QUEUES, queue, slots, wait_limit: WAIT_LIMIT }
    }
}

/// A network whose slots kernels reach by requests that they post themselves. It has no slots of hosts.
#[derive(Debug)]
pub struct DeviceNetwork {
    inner: Arc<dyn Network>,
    nic: Arc<Nic>,
    config: DeviceConfig,
    flavour: String,
    /// Configured place of slots.
    logged: place::LoggedPlaces,
    /// See [`over_software_nic`](DeviceNetwork::over_software_nic).
    pages: Option<Arc<dyn Access>>,
}

impl DeviceNetwork {
    /// Kernels post on queues of `nic`. `inner` joins the hosts, preferably by the same port.
    #[must_use]
    pub fn new(inner: Arc<dyn Network>, nic: Arc<Nic>, config: DeviceConfig) -> Self {
        let logged = place::LoggedPlaces::default();
        let mut network = Self { inner, nic, config, flavour: String::new(), logged, pages: None };
        network.flavour = flavour(network.nic.port().link, config.num_queues, &network.hosts());
        network
    }

    /// The same over a NIC in software. Its registers are memory, and it reaches page-locked memory of the host on
    /// pages of `pages`. It reaches memory of GPUs in software only; slots of other GPUs lie in the host's memory.
    #[must_use]
    pub fn over_software_nic(self, pages: Arc<dyn Access>) -> Self {
        Self { pages: Some(pages), ..self }
    }

    /// The NIC that kernels post to.
    #[must_use]
    pub const fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    fn name(&self) -> String {
        format!("ibgda {} beside {}", self.nic.name(), self.hosts())
    }

    /// The network between the hosts.
    fn hosts(&self) -> Offer {
        Offer { kind: self.inner.kind(), flavour: self.inner.flavour().to_owned() }
    }
}

impl Network for DeviceNetwork {
    fn kind(&self) -> TransportKind {
        TransportKind::Ibgda
    }

    fn flavour(&self) -> &str {
        &self.flavour
    }

    fn open(&self, _layout: &SlotLayout, _route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let detail = format!("it is for slots of GPUs: give a GPU, or use {}", self.hosts());
        Err(failed(&self.name(), "open", detail))
    }

    fn rdma_device(&self) -> Option<&str> {
        Some(self.nic.name())
    }

    fn carries_device_slots(&self) -> bool {
        true
    }

    /// Uses only the endpoints of the hosts' slots.
    fn device_layout(
        &self,
        _device: &dyn DeviceMemory,
        num_frames: usize,
    ) -> Result<SlotLayout, SlotConfigError> {
        SlotLayout::smallest(num_frames)
    }

    fn open_device(
        &self,
        layout: &SlotLayout,
        route: Route,
        device: &dyn DeviceMemory,
    ) -> Result<Box<dyn OpenSide>, NetworkError> {
        let name = self.name();
        let device: &DeviceSide = device.downcast_for(&name)?;
        let slot_bytes = |bytes: u64| {
            let bytes = usize::try_from(bytes).ok();
            let bytes = bytes.and_then(|bytes| bytes.checked_next_multiple_of(LINE_BYTES));
            bytes.ok_or_else(|| failed(&name, "open slots", "they are too large"))
        };
        let config = PeerConfig {
            // Every peer has a word of its own; its first bit ends waits.
            peer: 0,
            num_queues: self.config.num_queues,
            queue: self.config.queue,
            own_slot_bytes: slot_bytes(device.own_slot_bytes)?,
            peer_slot_bytes: slot_bytes(device.peer_slot_bytes)?,
        };
        let (slots, logged) = (self.config.slots, &self.logged);
        let parties = Parties { nic: &self.nic, gpu: &device.gpu, pages: self.pages.as_ref() };
        let peer = place::open(parties, config, slots, logged)
            .map_err(|error| failed(&name, "open queues of kernels", error))?;
        let heartbeat = OpenHeartbeatQueue::open(&self.nic, &self.config.queue)
            .map_err(|error| failed(&name, "open the host's queue", error))?;
        let inner = self.inner.open(layout, route)?;
        let mut description = inner.description();
        let (of_peer, of_host) = (peer.description(), heartbeat.description());
        let detail = Detail { inner: &description.detail, peer: &of_peer, host: &of_host };
        description.detail =
            detail.encode().map_err(|error| failed(&name, "describe queues", error))?;
        let (wait_limit, device) = (self.config.wait_limit, device.clone());
        Ok(Box::new(Side { heartbeat, peer, inner, description, device, wait_limit, name }))
    }
}

/// Both networks' sides before the peer's are known. Fields go in order: queues before memory.
#[derive(Debug)]
struct Side {
    heartbeat: OpenHeartbeatQueue,
    peer: OpenPeer,
    inner: Box<dyn OpenSide>,
    description: SideDescription,
    device: DeviceSide,
    wait_limit: Duration,
    name: String,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        self.description.clone()
    }

    fn join(self: Box<Self>, _peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        Err(failed(&self.name, "join", "slots of a GPU were opened, expected those of a host"))
    }

    fn join_device(
        self: Box<Self>,
        theirs: &SideDescription,
    ) -> Result<(JoinedSide, DeviceSlots), NetworkError> {
        let Self { heartbeat, peer, inner, description: _, device, wait_limit, name } = *self;
        let detail = Detail::decode(&theirs.detail)
            .map_err(|error| failed(&name, "read the peer's detail", error))?;
        let peer = peer
            .join(detail.peer)
            .map_err(|error| failed(&name, "join queues of kernels", error))?;
        let own = peer.slot().gpu().cloned();
        let own = own.ok_or_else(|| failed(&name, "find the own slot", "it is no GPU's"))?;
        let (found, expected) = (own.buffer().ptr().0, peer.slot().address());
        if found != expected {
            let detail = format!("it is at {found:#x}, the NIC has it at {expected:#x}");
            return Err(failed(&name, "find the own slot", detail));
        }
        let handle = peer.handle(ptr::null_mut(), ptr::null(), 0);
        let target = Target { address: handle.remote, bytes: handle.slot_bytes, rkey: handle.rkey };
        let heartbeat = heartbeat
            .join(detail.host, target)
            .map_err(|error| failed(&name, "join the host's queue", error))?;
        let inner_theirs = SideDescription { detail: detail.inner.to_vec(), ..theirs.clone() };
        let JoinedSide { endpoint, slot } = inner.join(&inner_theirs)?;
        let endpoint = HostEndpoint::new(endpoint).map_err(|error| failed(&name, "dup", error))?;
        let waits = wait_word(&device.gpu, &name)?;
        let slots = Slots::new(peer, heartbeat, endpoint.health_of(), (waits, wait_limit), own)
            .map_err(|error| failed(&name, "make a link for kernels", error))?;
        let endpoint = AnyEndpoint::Other(Box::new(endpoint));
        let pair = DevicePair::remote(Box::new(slots), &device);
        Ok((JoinedSide { endpoint, slot }, DeviceSlots::new(pair)))
    }
}

/// Properties that must be equal on both sides, as in `ethx8:verbs:roce2`: link layer, number of queues, and the
/// network between the hosts. Specified in docs/reference/wire-format.md.
fn flavour(link: LinkLayer, num_queues: usize, hosts: &Offer) -> String {
    let link = match link {
        LinkLayer::InfiniBand => "ib",
        LinkLayer::Ethernet => "eth",
    };
    format!("{link}x{num_queues}:{hosts}")
}

/// Memory for the word that ends waits.
fn wait_word(gpu: &Gpu, name: &str) -> Result<Arc<kernels::gpu::GpuBuffer>, NetworkError> {
    let memory = gpu.alloc_host(PAGE_BYTES);
    memory.map(Arc::new).map_err(|error| failed(name, "allocate host memory", error))
}

fn failed(network: &str, op: &'static str, detail: impl Display) -> NetworkError {
    NetworkError { network: network.to_owned(), op, code: None, detail: detail.to_string() }
}

/// As many as the usual number of blocks that post to one peer at once. Each takes 4 bytes of the description.
const DEFAULT_QUEUES: usize = 8;
/// A lost packet should not look like a dead NIC: it costs one to four acknowledgement timeouts of 67 ms for each
/// try. Not measured on hardware.
const WAIT_LIMIT: Duration = Duration::from_millis(500);
/// Slots are whole lines.
const LINE_BYTES: usize = 64;
const PAGE_BYTES: u64 = 4096;

// Most of a detail is left to the network underneath.
const _: () = assert!(
    HEAD_BYTES + 2 * ibgda::peer::DESCRIPTION_BYTES + 4 * (DEFAULT_QUEUES + 1)
        <= MAX_DETAIL_BYTES / 4
);

#[cfg(test)]
mod tests {
    use p2p_core::network::MAX_FLAVOUR_BYTES;

    use super::*;

    #[test]
    fn flavours_name_link_queues_and_hosts_and_fit_an_offer() {
        let hosts = |kind, flavour: &str| Offer { kind, flavour: flavour.to_owned() };
        let of = |link, num_queues, hosts: &Offer| flavour(link, num_queues, hosts);
        let verbs = hosts(TransportKind::Verbs, "roce2");
        assert_eq!(of(LinkLayer::Ethernet, 8, &verbs), "ethx8:verbs:roce2");
        assert_eq!(of(LinkLayer::InfiniBand, 16, &verbs), "ibx16:verbs:roce2");
        let plain = hosts(TransportKind::SoftNic, "");
        assert_eq!(of(LinkLayer::Ethernet, 1, &plain), "ethx1:softnic");
        // The longest names that are in use.
        for name in ["verbs;ofi_rxm", "tcp;ofi_rxm", "sockets"] {
            let longest = of(LinkLayer::Ethernet, 64, &hosts(TransportKind::Libfabric, name));
            assert!(longest.len() <= MAX_FLAVOUR_BYTES, "{longest}");
        }
    }
}
