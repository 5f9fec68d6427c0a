//! Clients over a network that is stuck. The network is a fake: its clients store into the server's slot, and
//! a thread takes only a few of the commands by which the server's kernels answer.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kernels::abi::{DevicePtr, Link, PATH_DIRECT, PATH_PROXY};
use kernels::gpu::{DeviceName, Gpu, GpuBuffer};
use kernels::proxy::PROXY_VERSION;
use kernels::slots::{DevicePair, DeviceSide, KernelWaits, PathError, RemoteSlots};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::bootstrap::CloseReason;
use p2p_core::device::{DeviceMemory, DeviceSlots};
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::wait::event_fd;
use p2p_core::{AnyEndpoint, Region, SlotLayout, TransportKind, Transports};
use protocol::{ModelShape, WireDtype};
use switchyard_expert_server::{ExpertSelection, RunningServer};

use crate::common::{PATIENCE, Reference, Request, eventually, metric, seeded};
use crate::device::client::{Client, Outcome, config_for, geometry_of};
use crate::device::{SLOT, check, devices, join, server_on};

const DTYPE: WireDtype = WireDtype::Bf16;
const KIND: TransportKind = TransportKind::Libfabric;
/// The answer to one frame of so many rows takes many more commands than a lane holds.
const MANY: usize = 30;

/// A batch that answers a client's frame waits for room, while the link is closing since the batch before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stuck_client_whose_link_is_closing_delays_no_other_client() {
    let Some((device, gpu)) = emulated() else { return };
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let network = Arc::new(StuckNetwork::default());
    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.limits.max_bad_frames = 0;
        config.transports = transports(&network);
    })
    .await;
    let mut right = join(&gpu, &server, shape, 1, DTYPE).await;
    for turn in 0..NUM_TURNS {
        let mut hostile = join_over(&gpu, &server, shape, 100 + turn).await;
        let requests = [MANY, 1, MANY].map(|rows| Request::random(&mut rng, &shape, rows));
        let (outcome, rows) = tokio::task::block_in_place(|| {
            // Both frames of the other client arrive while this one is computed.
            right.dispatch(&requests[0]);
            let id = hostile.pretend(3);
            hostile.dispatch(&requests[1]);
            hostile.pretend(id);
            hostile.dispatch(&requests[2]);
            right.combine(&requests[0])
        });
        assert_eq!(outcome, Outcome::Answered, "turn {turn}");
        check(&reference, &requests[0], DTYPE, &rows);
        let closed = tokio::time::timeout(PATIENCE, hostile.liveness.closed()).await;
        assert_eq!(closed.expect("dropped"), CloseReason::Left, "turn {turn}");
        let dropped = "switchyard_server_links_dropped_total{reason=\"bad_frames\"}";
        assert_eq!(metric(server.metrics(), dropped), (turn + 1) as f64);
    }
    println!("{} of {NUM_TURNS} were waited for", network.num_stuck.load(Ordering::Relaxed));
    server.shutdown().await;
    server.wait().await.expect("a shutdown is a good end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_does_not_wait_for_a_stuck_client() {
    let Some((device, gpu)) = emulated() else { return };
    let mut rng = seeded();
    let shape = Reference::open().shape;
    let network = Arc::new(StuckNetwork::default());
    let server = server_on(device, DTYPE, ExpertSelection::All, |config| {
        config.transports = transports(&network);
    })
    .await;
    let mut client = join_over(&gpu, &server, shape, 1).await;
    tokio::task::block_in_place(|| {
        client.dispatch(&Request::random(&mut rng, &shape, MANY));
        eventually("its answers wait", || network.num_stuck.load(Ordering::Relaxed) == 1);
    });
    // This bound is shorter than the time after which the server drops clients by itself.
    server.shutdown().await;
    let ended = tokio::time::timeout(Duration::from_secs(1), server.wait()).await;
    ended.expect("it has ended").expect("a shutdown is a good end");
    let dropped = "switchyard_server_links_dropped_total{reason=\"shutdown\"}";
    assert_eq!(metric(server.metrics(), dropped), 1.0);
}

/// On GPUs in software only: the network cannot reach a real GPU's memory.
fn emulated() -> Option<(DeviceName, Gpu)> {
    let (device, gpu) = devices()?;
    if !matches!(device, DeviceName::Emulated(_)) {
        test_support::skip("emulated", "slots of a real GPU are out of this test's reach");
        return None;
    }
    Some((device, gpu))
}

fn transports(network: &Arc<StuckNetwork>) -> Transports {
    Transports {
        kinds: vec![TransportKind::Local, TransportKind::Shm, KIND],
        networks: vec![Arc::clone(network) as _],
        ..Transports::default()
    }
}

async fn join_over(gpu: &Gpu, server: &RunningServer, shape: ModelShape, id: u64) -> Client {
    let geometry = geometry_of(&shape, DTYPE, SLOT);
    let mut config = config_for(gpu, &geometry);
    config.transports = vec![KIND];
    config.networks = vec![Arc::new(DirectNetwork) as _];
    let joined = Client::join_by(gpu, server.data_addr(), shape, id, DTYPE, geometry, config);
    joined.await.expect("connected")
}

/// The network of servers: it gets stuck after a few commands.
#[derive(Debug, Default)]
struct StuckNetwork {
    /// Number of paths that are stuck.
    num_stuck: Arc<AtomicU32>,
}

/// The network of clients: kernels store into the server's slot.
#[derive(Debug)]
struct DirectNetwork;

/// A side of either network.
#[derive(Debug)]
struct NetworkSide {
    own: GpuBuffer,
    layout: SlotLayout,
    device: DeviceSide,
    /// The count of a server's network; `None` for clients.
    num_stuck: Option<Arc<AtomicU32>>,
}

fn open(
    layout: &SlotLayout,
    device: &DeviceSide,
    num_stuck: Option<Arc<AtomicU32>>,
) -> Box<dyn OpenSide> {
    let own = device.gpu.alloc(device.own_slot_bytes).expect("memory");
    Box::new(NetworkSide { own, layout: *layout, device: device.clone(), num_stuck })
}

fn no_other_slots() -> NetworkError {
    let detail = "it is for device slots only".to_owned();
    NetworkError { network: FLAVOUR.to_owned(), op: "open", code: None, detail }
}

impl Network for StuckNetwork {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn flavour(&self) -> &str {
        FLAVOUR
    }

    fn open(&self, _: &SlotLayout, _: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        Err(no_other_slots())
    }

    fn carries_device_slots(&self) -> bool {
        true
    }

    fn open_device(
        &self,
        layout: &SlotLayout,
        _: Route,
        device: &dyn DeviceMemory,
    ) -> Result<Box<dyn OpenSide>, NetworkError> {
        Ok(open(layout, device.downcast_for(FLAVOUR)?, Some(Arc::clone(&self.num_stuck))))
    }
}

impl Network for DirectNetwork {
    fn kind(&self) -> TransportKind {
        KIND
    }

    fn flavour(&self) -> &str {
        FLAVOUR
    }

    fn open(&self, _: &SlotLayout, _: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        Err(no_other_slots())
    }

    fn carries_device_slots(&self) -> bool {
        true
    }

    fn open_device(
        &self,
        layout: &SlotLayout,
        _: Route,
        device: &dyn DeviceMemory,
    ) -> Result<Box<dyn OpenSide>, NetworkError> {
        Ok(open(layout, device.downcast_for(FLAVOUR)?, None))
    }
}

impl OpenSide for NetworkSide {
    fn description(&self) -> SideDescription {
        let (address, bytes) = (self.own.ptr().0, self.layout.slot_bytes() as u64);
        SideDescription { address, bytes, ..SideDescription::default() }
    }

    fn join(self: Box<Self>, _: &SideDescription) -> Result<JoinedSide, NetworkError> {
        Err(no_other_slots())
    }

    fn join_device(
        self: Box<Self>,
        peer: &SideDescription,
    ) -> Result<(JoinedSide, DeviceSlots), NetworkError> {
        let Self { own, layout, device, num_stuck } = *self;
        let slot = || Region::anonymous(layout.slot_bytes()).expect("memory");
        let event = Arc::new(event_fd().expect("an event"));
        let endpoint = MappedEndpoint::new(KIND, slot(), Arc::clone(&event), event);
        let joined = JoinedSide { endpoint: AnyEndpoint::Mapped(endpoint), slot: slot() };
        let waits = Arc::new(device.gpu.alloc_host(4096).expect("memory"));
        let slots: Box<dyn RemoteSlots> = match num_stuck {
            Some(num_stuck) => Box::new(ProxySlots::new(&device, own, waits, num_stuck)),
            None => Box::new(DirectSlots { own, peer: DevicePtr(peer.address), waits }),
        };
        Ok((joined, DeviceSlots::new(DevicePair::remote(slots, &device))))
    }
}

/// A client's slots: stores go directly to the server's memory.
#[derive(Debug)]
struct DirectSlots {
    own: GpuBuffer,
    peer: DevicePtr,
    waits: Arc<GpuBuffer>,
}

impl RemoteSlots for DirectSlots {
    fn own(&self) -> &GpuBuffer {
        &self.own
    }

    fn link(&self) -> Link {
        Link { window: self.peer, context: 0, path: PATH_DIRECT, reserved: 0 }
    }

    fn waits(&self) -> KernelWaits {
        KernelWaits::new(Arc::clone(&self.waits))
    }

    fn show_life(&self, _: u64) -> Result<(), PathError> {
        Ok(())
    }

    fn health(&self) -> Result<(), PathError> {
        Ok(())
    }
}

/// A server's slots with one lane for answers. A thread takes [`TAKEN`] commands from it, and then no more.
#[derive(Debug)]
struct ProxySlots {
    /// It is never freed: a client may store into it after the server has dropped the link, which a NIC would refuse.
    own: ManuallyDrop<GpuBuffer>,
    mirror: GpuBuffer,
    waits: Arc<GpuBuffer>,
    /// `sy_proxy_lane`, `sy_proxy_peer`, `sy_proxy_lane_words`, `sy_proxy_lane_state` and the commands.
    memory: Arc<GpuBuffer>,
    is_over: Arc<AtomicBool>,
}

const PEER: u64 = 64;
const WORDS: u64 = 128;
const STATE: u64 = 256;
const COMMANDS: u64 = 1024;

impl ProxySlots {
    fn new(
        side: &DeviceSide,
        own: GpuBuffer,
        waits: Arc<GpuBuffer>,
        num_stuck: Arc<AtomicU32>,
    ) -> Self {
        let mirror = side.gpu.alloc(side.peer_slot_bytes).expect("memory");
        let memory = Arc::new(side.gpu.alloc_host(4096).expect("memory"));
        let at = |offset: u64| memory.ptr().add(offset).0;
        let (depth_shift, budget) = (4, 4u64);
        let lane = [at(COMMANDS), at(WORDS), at(STATE), budget << 32 | depth_shift];
        // No error word, a timeout longer than any wait of a server, one lane, and the version.
        let (timeout_ns, num_lanes, version) = (100_000_000_000, 1, u64::from(PROXY_VERSION) << 32);
        let (mirror_at, abort_at) = (mirror.ptr().0, waits.ptr().0);
        let peer =
            [at(0), mirror_at, side.peer_slot_bytes, 0, abort_at, timeout_ns, num_lanes, version];
        let base = memory.host().expect("host memory");
        for (offset, words) in [(0, &lane[..]), (PEER, &peer[..])] {
            for (idx, word) in words.iter().enumerate() {
                word_at(base, offset + 8 * idx as u64).store(*word, Ordering::Relaxed);
            }
        }
        let is_over = Arc::new(AtomicBool::new(false));
        let (theirs, over) = (Arc::clone(&memory), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let base = theirs.host().expect("host memory");
            while !over.load(Ordering::Relaxed) {
                let num_posted = word_at(base, STATE).load(Ordering::Acquire);
                if num_posted > TAKEN {
                    num_stuck.fetch_add(1, Ordering::Relaxed);
                    break;
                }
                word_at(base, WORDS).store(num_posted, Ordering::Release);
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        Self { own: ManuallyDrop::new(own), mirror, waits, memory, is_over }
    }
}

/// A word in a page of page-locked memory. The caller keeps the memory alive.
fn word_at<'a>(base: NonNull<u8>, offset: u64) -> &'a AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset < 4096);
    // SAFETY: within the page and aligned. Both sides use the words atomically, and callers keep the memory
    // alive.
    unsafe { AtomicU64::from_ptr(base.as_ptr().add(offset as usize).cast()) }
}

impl Drop for ProxySlots {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl RemoteSlots for ProxySlots {
    fn own(&self) -> &GpuBuffer {
        &self.own
    }

    fn link(&self) -> Link {
        let context = self.memory.ptr().add(PEER).0;
        Link { window: self.mirror.ptr(), context, path: PATH_PROXY, reserved: 0 }
    }

    fn waits(&self) -> KernelWaits {
        KernelWaits::new(Arc::clone(&self.waits))
    }

    fn show_life(&self, _: u64) -> Result<(), PathError> {
        Ok(())
    }

    fn health(&self) -> Result<(), PathError> {
        Ok(())
    }
}

const FLAVOUR: &str = "stuck";
const NUM_TURNS: u64 = 8;
/// Commands that a lane takes: enough to refuse a frame and to ask whether the refusal has arrived.
const TAKEN: u64 = 3;
