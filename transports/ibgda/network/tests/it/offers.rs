//! Pairs in the handshake. Sides with equal properties of queues join with device slots. Others join by another
//! transport, or get a refusal with the reason.

use crate::rig;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use cuda_ipc::GpuMemory;
use ibgda::QueueConfig;
use kernels::gpu::Gpu;
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::bootstrap::{ConnectConfig, ConnectError, Listener, ListenerConfig, connect};
use p2p_core::device::DeviceMemory;
use p2p_core::network::{Network, NetworkError, OpenSide, Route};
use p2p_core::{Connection, PeerHello, Reject, RejectCode, SlotConfig, SlotLayout, TransportKind};
use softnic::SoftNetwork;
use switchyard_ibgda_network::{DeviceConfig, DeviceNetwork};
use tokio::sync::mpsc;
use tokio::time::timeout;

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const PATIENCE: Duration = Duration::from_secs(30);

fn network(num_queues: usize) -> Arc<dyn Network> {
    let inner = SoftNetwork::open(softnic::NicConfig::default()).expect("a NIC in software");
    let queue = QueueConfig { depth: 128, ..QueueConfig::default() };
    let config = DeviceConfig { num_queues, queue, ..DeviceConfig::default() };
    Arc::new(DeviceNetwork::new(Arc::new(inner), rig::nic(), config))
}

/// The same on InfiniBand, as far as a handshake sees.
#[derive(Debug)]
struct OnInfiniBand(Arc<dyn Network>, String);

impl OnInfiniBand {
    fn over(network: Arc<dyn Network>) -> Arc<dyn Network> {
        let flavour = network.flavour().replacen("eth", "ib", 1);
        Arc::new(Self(network, flavour))
    }
}

impl Network for OnInfiniBand {
    fn kind(&self) -> TransportKind {
        self.0.kind()
    }

    fn flavour(&self) -> &str {
        &self.1
    }

    fn carries_device_slots(&self) -> bool {
        true
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        self.0.open(layout, route)
    }
}

/// Device memory of the client on GPU 1, or of the server on GPU 0.
fn device(is_client: bool) -> Option<Arc<dyn DeviceMemory>> {
    let gpu = Gpu::open_emulated(is_client.into()).expect("a GPU in software");
    let (own_slot_bytes, peer_slot_bytes) = if is_client { (4096, 8192) } else { (8192, 4096) };
    let shape = b"alike".to_vec();
    Some(GpuMemory::offer(DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape }))
}

/// Tells whether the device slots are reached over a network.
fn is_remote(connection: &Connection) -> bool {
    let slots = connection.device.as_ref().expect("device slots");
    let pair: &DevicePair = slots.downcast_ref().expect("slots of GPUs");
    pair.as_remote().is_some()
}

type Peers = mpsc::UnboundedReceiver<Connection>;

async fn listen(
    transports: &[TransportKind],
    networks: &[Arc<dyn Network>],
    device: Option<Arc<dyn DeviceMemory>>,
) -> (SocketAddr, Peers) {
    let (transports, networks) = (transports.to_vec(), networks.to_vec());
    let config = ListenerConfig { slot: SLOT, transports, networks, device, ..Default::default() };
    let listener = Listener::bind("127.0.0.1:0", config).await.expect("bound");
    let addr = listener.local_addr();
    let (sender, peers) = mpsc::unbounded_channel();
    tokio::spawn(listener.serve(
        |_| Ok(Vec::new()),
        move |connection| drop(sender.send(connection)),
        std::future::pending(),
    ));
    (addr, peers)
}

async fn meet(
    addr: SocketAddr,
    transports: &[TransportKind],
    networks: &[Arc<dyn Network>],
    device: Option<Arc<dyn DeviceMemory>>,
) -> Result<Connection, ConnectError> {
    let (transports, networks) = (transports.to_vec(), networks.to_vec());
    let config = ConnectConfig { slot: SLOT, transports, networks, device, ..Default::default() };
    timeout(PATIENCE, connect(addr, PeerHello::default(), config)).await.expect("in time")
}

fn rejection(result: Result<Connection, ConnectError>) -> Reject {
    match result {
        Err(ConnectError::Rejected { reject, .. }) => reject,
        other => panic!("expected a rejection, got {other:?}"),
    }
}

fn num_queue_pairs() -> usize {
    softnic_verbs::nic().expect("a NIC").lock().queue_pairs().len()
}

const BOTH: [TransportKind; 2] = [TransportKind::Ibgda, TransportKind::Shm];

#[tokio::test(flavor = "multi_thread")]
async fn sides_that_differ_take_another_transport_or_are_told_both_values() {
    let (two, three) = (network(2), network(3));
    let on_infiniband = OnInfiniBand::over(network(2));
    let before = num_queue_pairs();
    let (addr, mut peers) = listen(&BOTH, &[Arc::clone(&two)], device(false)).await;
    for other in [&three, &on_infiniband] {
        let here = meet(addr, &BOTH, &[Arc::clone(other)], device(true)).await.expect("by memory");
        let there = timeout(PATIENCE, peers.recv()).await.expect("in time").expect("a peer");
        for connection in [&here, &there] {
            assert_eq!(connection.transport.to_string(), "shm");
            assert!(!is_remote(connection));
            // It was no attempt that failed.
            assert_eq!(connection.left_out, "");
        }
        assert_eq!(num_queue_pairs(), before, "queues were made for a choice that cannot be");
        let only = [TransportKind::Ibgda];
        let reject = rejection(meet(addr, &only, &[Arc::clone(other)], device(true)).await);
        assert_eq!(reject.code, RejectCode::NO_TRANSPORT, "{reject}");
        for side in [&two, other] {
            let offer = format!("offers ibgda:{}", side.flavour());
            assert!(reject.message.contains(&offer), "{offer}: {reject}");
        }
    }
    // Sides with equal properties, and one that offers the other's properties beside different ones.
    for networks in [&[Arc::clone(&two)][..], &[Arc::clone(&three), Arc::clone(&two)]] {
        let here = meet(addr, &BOTH, networks, device(true)).await.expect("by requests");
        let there = timeout(PATIENCE, peers.recv()).await.expect("in time").expect("a peer");
        for connection in [&here, &there] {
            assert_eq!(connection.transport.to_string(), format!("ibgda:{}", two.flavour()));
            assert!(is_remote(connection));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_slots_of_gpus_it_is_not_offered() {
    let network = [network(2)];
    let (addr, mut peers) = listen(&BOTH, &network, None).await;
    let here = meet(addr, &BOTH, &network, None).await.expect("by memory");
    assert_eq!(here.transport.to_string(), "shm");
    assert_eq!(here.left_out, "", "it was tried");
    timeout(PATIENCE, peers.recv()).await.expect("in time").expect("a peer");
    let reject = rejection(meet(addr, &[TransportKind::Ibgda], &network, None).await);
    assert_eq!(reject.code, RejectCode::NO_TRANSPORT);
    let told = "the listener offers shm, the connecting side offers nothing";
    assert!(reject.message.contains(told), "{reject}");
}
