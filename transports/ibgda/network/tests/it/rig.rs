//! Two sides in one process. Their kernels post to a NIC in software.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuda_ipc::GpuMemory;
use ibgda::{Nic, NicConfig};
use kernels::gpu::Gpu;
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::SlotLayout;
use p2p_core::device::{DeviceMemory, DeviceSlots};
use p2p_core::network::{JoinedSide, Network, OpenSide, Route};
use switchyard_ibgda_network::DeviceNetwork;

pub const ROUTE: Route =
    Route { local: IpAddr::V4(Ipv4Addr::LOCALHOST), remote: IpAddr::V4(Ipv4Addr::LOCALHOST) };
pub const NUM_FRAMES: usize = 2;
/// Of waits that end well, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A process has one NIC behind the libraries, and the tests count its objects.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // Independent of the result of the test before.
    softnic_verbs::refuse_memory(None);
    turn
}

pub fn nic() -> Arc<Nic> {
    let libraries = softnic_verbs::libraries().expect("functions");
    // A NIC in software is in no list of addresses.
    let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
    Nic::open(&libraries, &config).expect("a NIC")
}

pub fn gpu() -> Gpu {
    Gpu::open_emulated(0).expect("a GPU in software")
}

/// Sides of the client and the server, with slots of this number of bytes for requests and for answers.
pub fn sides_of(request_bytes: u64, response_bytes: u64) -> [DeviceSide; 2] {
    let side = |own_slot_bytes, peer_slot_bytes| {
        let (gpu, shape) = (gpu(), b"alike".to_vec());
        DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape }
    };
    [side(response_bytes, request_bytes), side(request_bytes, response_bytes)]
}

/// A side as the handshake gives it to a network.
pub fn memory(side: &DeviceSide) -> Arc<dyn DeviceMemory> {
    GpuMemory::offer(side.clone())
}

/// The slots of GPUs in a joined pair.
pub fn with_pair((joined, slots): (JoinedSide, DeviceSlots)) -> (JoinedSide, DevicePair) {
    (joined, slots.downcast().expect("slots of GPUs"))
}

/// Layout of the hosts' slots.
pub fn host_layout(network: &DeviceNetwork, side: &DeviceSide) -> SlotLayout {
    network.device_layout(&*memory(side), NUM_FRAMES).expect("a layout")
}

pub fn open_sides(
    networks: [&DeviceNetwork; 2],
    sides: &[DeviceSide; 2],
) -> [Box<dyn OpenSide>; 2] {
    let [client, server] = sides;
    let layout = host_layout(networks[0], client);
    assert_eq!(layout, host_layout(networks[1], server));
    [(networks[0], client), (networks[1], server)]
        .map(|(network, side)| network.open_device(&layout, ROUTE, &*memory(side)).expect("a side"))
}

pub fn join_sides([client, server]: [Box<dyn OpenSide>; 2]) -> [(JoinedSide, DevicePair); 2] {
    let (of_client, of_server) = (client.description(), server.description());
    [
        with_pair(client.join_device(&of_server).expect("the server's description")),
        with_pair(server.join_device(&of_client).expect("the client's description")),
    ]
}

/// A word of the own slot.
pub fn own_word(pair: &DevicePair, offset: u64) -> u64 {
    let mut word = [0; 8];
    let deadline = Instant::now() + PATIENCE;
    gpu().read(pair.own_memory(), offset, &mut word, deadline).expect("a word of the own slot");
    u64::from_le_bytes(word)
}

pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Fails if drivers of queues committed a violation.
pub fn check_drivers() {
    let violations = softnic_verbs::violations();
    assert!(violations.is_empty(), "{}", violations.join("; "));
}
