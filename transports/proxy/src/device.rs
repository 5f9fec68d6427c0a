//! Slots of GPUs over any network of the handshake. Kernels reach the peer through lanes of a proxy, so a client
//! and a server need neither a common host nor a NIC that a GPU can drive.
//!
//! ```text
//!   kernels ── store ──▶ mirror ── put ─▶ ┐                      ┌ ─▶ slot ◀── read ── kernels
//!           ── commands ─▶ lanes ─ thread ┴─ network ───────────▶┘
//! ```
//!
//! Mirror, lanes and slot lie in page-locked memory of the host, which the network reads and writes, and which
//! kernels reach over the bus. The first lanes are the kernels'. Two lanes follow: one for signs of life, and one
//! for the thread that drives the connection from the host.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kernels::abi::{DevicePtr, ErrorWord, Link, PATH_PROXY};
use kernels::gpu::{Gpu, GpuBuffer, GpuError};
use kernels::slots::{DevicePair, DeviceSide, KernelWaits, PathError, RemoteSlots};
use p2p_core::device::{DeviceMemory, DeviceSlots};
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::{AnyEndpoint, PostError, Region, SlotLayout, TransportKind, Transports};

use crate::command::{Command, Opcode};
use crate::failure::describe_error;
use crate::gpu::{self, GpuPoster, GpuPosterError};
use crate::host::PosterConfig;
use crate::lane::{LaneConfig, Poster};
use crate::locality::Device;
use crate::network::{HalfOpen, ProxyBackend};
use crate::threads::{Proxy, ProxyConfig, ProxyError, ProxyPeer, STALL_LIMIT};

/// A network whose slots kernels reach through a proxy. Host slots are opened unchanged.
#[derive(Debug)]
pub struct DeviceNetwork(ProxyBackend);

impl DeviceNetwork {
    /// Puts `proxy` between kernels and `inner`. `lanes` is the kernels' share per peer, 254 lanes at most.
    #[must_use]
    pub fn new(inner: Arc<dyn Network>, proxy: Arc<Proxy>, lanes: LaneConfig) -> Self {
        Self(ProxyBackend::new(inner, proxy, lanes))
    }

    /// The proxy.
    #[must_use]
    pub const fn proxy(&self) -> &Arc<Proxy> {
        &self.0.proxy
    }
}

impl Network for DeviceNetwork {
    fn kind(&self) -> TransportKind {
        self.0.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.0.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        self.0.inner.open(layout, route)
    }

    fn carries_device_slots(&self) -> bool {
        true
    }

    fn open_device(
        &self,
        layout: &SlotLayout,
        route: Route,
        device: &dyn DeviceMemory,
    ) -> Result<Box<dyn OpenSide>, NetworkError> {
        let device: &DeviceSide = device.downcast_for("proxy of a GPU")?;
        let half = self.0.open(layout, route, "proxy of a GPU")?;
        Ok(Box::new(Side { half, device: device.clone() }))
    }
}

/// Transports that a process with a GPU offers to its peers: those within the host unchanged, and networks through
/// the threads of one proxy. The proxy is started for the first network, next to it and to the GPU.
#[derive(Debug, Default)]
pub struct DeviceTransports {
    gpu: Option<Device>,
    num_threads: usize,
    proxy: Option<Arc<Proxy>>,
    has_networks: bool,
}

impl DeviceTransports {
    /// For the kernels of `gpu`, with this number of threads where there is a network: see [`Placement::shared`].
    ///
    /// [`Placement::shared`]: crate::Placement::shared
    #[must_use]
    pub fn new(gpu: &Gpu, num_threads: usize) -> Self {
        let gpu = gpu.pci_address().map(Device::Pci);
        Self { gpu, num_threads, ..Self::default() }
    }

    /// Returns `transports` with networks that carry device slots, through the proxy where they do not by themselves.
    /// Without a network these are the transports within a host.
    ///
    /// # Errors
    /// [`ProxyError`].
    pub fn wrap(&mut self, transports: &Transports) -> Result<Transports, ProxyError> {
        if transports.networks.is_empty() {
            return Ok(vec![TransportKind::Local, TransportKind::Shm].into());
        }
        self.has_networks = true;
        let networks = transports.networks.iter().map(|network| self.reach(network));
        Ok(Transports { networks: networks.collect::<Result<_, _>>()?, ..transports.clone() })
    }

    fn reach(&mut self, network: &Arc<dyn Network>) -> Result<Arc<dyn Network>, ProxyError> {
        if network.carries_device_slots() {
            return Ok(Arc::clone(network));
        }
        let proxy = match &self.proxy {
            Some(proxy) => Arc::clone(proxy),
            None => Arc::new(self.start(network.as_ref())?),
        };
        self.proxy = Some(Arc::clone(&proxy));
        Ok(Arc::new(DeviceNetwork::new(Arc::clone(network), proxy, LANES)))
    }

    fn start(&self, network: &dyn Network) -> Result<Proxy, ProxyError> {
        let nic = network.rdma_device().map(|name| Device::Rdma(name.to_owned()));
        let config = ProxyConfig::beside(self.gpu.as_ref(), nic.as_ref(), self.num_threads);
        let (num_threads, placement) = (config.num_threads, &config.placement);
        let cpus = placement.threads().first();
        tracing::info!(num_threads, ?cpus, why = placement.reason(), "a proxy posts for kernels");
        Proxy::start(&config)
    }

    /// Whether kernels need other paths besides direct stores.
    #[must_use]
    pub const fn has_networks(&self) -> bool {
        self.has_networks
    }

    /// The proxy, where one was started.
    #[must_use]
    pub const fn proxy(&self) -> Option<&Arc<Proxy>> {
        self.proxy.as_ref()
    }

    /// Called where kernels are launched: see [`Proxy::expect_work`].
    #[inline]
    pub fn expect_work(&self) {
        if let Some(proxy) = &self.proxy {
            proxy.expect_work();
        }
    }
}

#[derive(Debug)]
struct Side {
    half: HalfOpen,
    device: DeviceSide,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        self.half.inner.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        self.half.inner.join(peer)
    }

    fn join_device(
        self: Box<Self>,
        peer: &SideDescription,
    ) -> Result<(JoinedSide, DeviceSlots), NetworkError> {
        let Self { half: HalfOpen { inner, with }, device } = *self;
        let JoinedSide { endpoint, slot } = inner.join(peer)?;
        let num_lanes = with.lanes.num_lanes;
        let memory = Memory::new(&device, with.lanes, slot.clone())
            .map_err(|error| with.failed("make lanes for kernels", &error))?;
        let (lanes, sources) = (memory.lanes.clone(), vec![memory.mirror.clone()]);
        let endpoint = with.serve(endpoint, lanes, slot.len(), sources, num_lanes + 1)?;
        let slots = Slots {
            peer: Arc::clone(endpoint.peer()),
            words: Mutex::new(memory.lanes.poster(num_lanes)),
            memory,
        };
        let endpoint = AnyEndpoint::Other(Box::new(endpoint));
        let pair = DevicePair::remote(Box::new(slots), &device);
        Ok((JoinedSide { endpoint, slot }, DeviceSlots::new(pair)))
    }
}

/// Shared state of kernels and the proxy's thread for one peer.
#[derive(Debug)]
struct Memory {
    lanes: crate::lane::Lanes,
    poster: GpuPoster,
    mirror_at: DevicePtr,
    mirror: Region,
    /// The word that ends waits of kernels, and their [`ErrorWord`].
    waits: Arc<GpuBuffer>,
    /// The slot as the GPU reaches it. Dropped before the slot.
    own: GpuBuffer,
    _slot: Region,
}

impl Memory {
    fn new(device: &DeviceSide, lanes: LaneConfig, slot: Region) -> Result<Self, GpuPosterError> {
        let gpu = &device.gpu;
        let num_lanes = lanes.num_lanes;
        let lanes = gpu::lanes(gpu, LaneConfig { num_lanes: num_lanes + HOST_LANES, ..lanes })?;
        let (mirror, mirror_at) = gpu::mirror(gpu, device.peer_slot_bytes)?;
        let waits = Arc::new(gpu.alloc_host(PAGE)?);
        let config = PosterConfig {
            mirror: mirror_at.0,
            slot_bytes: device.peer_slot_bytes,
            window: 0,
            // The bit of the word that ends waits: every peer has a word of its own.
            peer: 0,
            timeout_ns: WAIT_LIMIT.as_nanos() as u64,
            // The lane reports errors of the thread; only this word reports errors of kernels.
            error: waits.ptr().0 + ERROR_OFFSET as u64,
            abort_mask: waits.ptr().0,
        };
        let poster = GpuPoster::on_first(gpu, &lanes, num_lanes, config)?;
        let own = register(gpu, &slot)?;
        Ok(Self { lanes, poster, mirror_at, mirror, waits, own, _slot: slot })
    }
}

impl Memory {
    /// The error that took a lane out of service at the kernels' end.
    fn fault(&self) -> Option<ErrorWord> {
        let host = self.waits.host()?;
        // SAFETY: aligned memory of a page, alive as long as `self`; only kernels write it.
        unsafe {
            let word = host.as_ptr().add(ERROR_OFFSET).cast::<ErrorWord>();
            // Its other fields may follow.
            let tag = AtomicU32::from_ptr(word.cast()).load(Ordering::Acquire);
            (tag != 0).then(|| word.read_volatile())
        }
    }
}

/// Lets a GPU reach a slot.
fn register(gpu: &Gpu, slot: &Region) -> Result<GpuBuffer, GpuError> {
    // SAFETY: the owner of the result keeps the slot as long.
    unsafe { gpu.register_host(slot.as_ptr(), slot.len() as u64, false) }
}

#[derive(Debug)]
struct Slots {
    /// Shared with the endpoint of the channel. Until the last owner is gone, the thread executes posted commands:
    /// its port keeps mirror and lanes, and the endpoint keeps the slot.
    peer: Arc<ProxyPeer>,
    words: Mutex<Poster>,
    memory: Memory,
}

impl RemoteSlots for Slots {
    fn own(&self) -> &GpuBuffer {
        &self.memory.own
    }

    fn link(&self) -> Link {
        let (window, context) = (self.memory.mirror_at, self.memory.poster.address().0);
        Link { window, context, path: PATH_PROXY, reserved: 0 }
    }

    fn waits(&self) -> KernelWaits {
        KernelWaits::new(Arc::clone(&self.memory.waits))
    }

    fn show_life(&self, offset: u64) -> Result<(), PathError> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        check(&words, "show_life").map_err(|error| PathError::new(&error))?;
        // One at a time: a quiet is over when for a moment nothing is under way. That would never happen where the
        // path takes longer than the time between two signs. The one that is under way suffices as a sign.
        if words.completed() < words.posted() {
            return Ok(());
        }
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        if words.try_post(&Command::word(Opcode::Add, offset, 1)).is_some() {
            self.peer.ring();
        }
        Ok(())
    }

    fn health(&self) -> Result<(), PathError> {
        self.check().map_err(|error| PathError::new(&error))
    }
}

impl Slots {
    fn check(&self) -> Result<(), PostError> {
        if self.peer.has_failed() {
            let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
            check(&words, "health")?;
            let detail = "a lane of the kernels is out of service".to_owned();
            return Err(PostError::Transport { op: "health", code: 0, detail });
        }
        match self.memory.fault() {
            None => Ok(()),
            Some(word) => {
                let detail = format!("a kernel gave a lane up: {word}");
                Err(PostError::Transport { op: "health", code: i64::from(word.tag), detail })
            }
        }
    }
}

fn check(lane: &Poster, op: &'static str) -> Result<(), PostError> {
    match lane.error() {
        0 => Ok(()),
        word => {
            let code = i64::from(word as u8);
            Err(PostError::Transport { op, code, detail: format!("lane {}", describe_error(word)) })
        }
    }
}

/// Commands in flight of a peer. All together are fewer than libfabric queues for a peer that takes nothing, so
/// that a frozen peer does not block the thread, which serves others, too.
const LANES: LaneConfig = LaneConfig { num_lanes: 8, depth: 128, budget: 96 };
/// Lanes behind those of the kernels: for signs of life, and for the host's endpoint.
const HOST_LANES: u32 = 2;
const PAGE: u64 = 4096;
/// Offset of the [`ErrorWord`] in the page whose first word ends waits.
const ERROR_OFFSET: usize = 64;

/// Longest wait of a kernel for room, or for the peer to have everything. It exceeds the time that the thread lets a
/// peer stall, so it expires only where the peer moves too slowly. The peer then counts as failed.
pub const WAIT_LIMIT: Duration = Duration::from_secs(8);

const _: () = assert!(WAIT_LIMIT.as_millis() > STALL_LIMIT.as_millis() * 3 / 2);

#[cfg(test)]
mod tests;
