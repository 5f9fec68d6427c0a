//! Device slots made by the handshake, between emulated GPUs: permission, visibility of the other
//! side's memory, and cleanup when one side ends.
#![cfg(not(loom))]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kernels::gpu::{Gpu, GpuError};
use kernels::slots::{DevicePair, DeviceSide};
use p2p_core::bootstrap::{ConnectConfig, ConnectError, Listener, ListenerConfig, connect};
use p2p_core::device::DeviceSlots;
use p2p_core::{Connection, PeerHello, RejectCode, SlotConfig, TransportKind};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use switchyard_cuda_ipc::GpuMemory;
use tokio::sync::mpsc;
use tokio::time::timeout;

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const OWN_BYTES: u64 = 96 << 10;
const PEER_BYTES: u64 = 160 << 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// The connecting side's device. The listening side has the sizes the other way round.
fn side(gpu: u32, shape: &[u8]) -> DeviceSide {
    let gpu = Gpu::open_emulated(gpu).expect("a GPU in software");
    let shape = shape.to_vec();
    DeviceSide { gpu, own_slot_bytes: OWN_BYTES, peer_slot_bytes: PEER_BYTES, shape }
}

async fn listen(
    transports: Vec<TransportKind>,
) -> (SocketAddr, mpsc::UnboundedReceiver<Connection>) {
    let device = DeviceSide {
        own_slot_bytes: PEER_BYTES,
        peer_slot_bytes: OWN_BYTES,
        ..side(0, b"shape one")
    };
    listen_with(device, transports).await
}

async fn listen_with(
    device: DeviceSide,
    transports: Vec<TransportKind>,
) -> (SocketAddr, mpsc::UnboundedReceiver<Connection>) {
    let config = ListenerConfig {
        slot: SLOT,
        transports,
        device: Some(GpuMemory::offer(device)),
        ..Default::default()
    };
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

fn pair(slots: Option<DeviceSlots>) -> DevicePair {
    slots.and_then(|slots| slots.downcast().ok()).expect("a pair")
}

fn memory() -> Vec<TransportKind> {
    vec![TransportKind::Local, TransportKind::Shm]
}

fn config(device: Option<DeviceSide>) -> ConnectConfig {
    let device = device.map(GpuMemory::offer);
    ConnectConfig { slot: SLOT, device, ..Default::default() }
}

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Checks that the other side reads one side's GPU writes from its own slot.
fn crosses(rng: &mut StdRng, from: (&Gpu, &DevicePair), to: (&Gpu, &DevicePair)) {
    let (mut sent, mut found) = (vec![0u8; 4000], vec![0u8; 4000]);
    rng.fill_bytes(&mut sent);
    assert_eq!(from.1.peer_bytes(), to.1.own_bytes());
    // The very last bytes of the slot.
    let offset = from.1.peer_bytes() - 4000;
    from.0
        .write(from.1.peer_memory().expect("mapped"), offset, &sent, deadline())
        .expect("written");
    to.0.read(to.1.own_memory(), offset, &mut found, deadline()).expect("read");
    assert!(sent == found, "other bytes arrived");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_side_writes_into_the_others_gpu_and_late_writes_harm_nobody() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (addr, mut peers) = listen(memory()).await;
    let ours = side(1, b"shape one");
    let gpu = ours.gpu.clone();
    let here = connect(addr, PeerHello::default(), config(Some(ours))).await.expect("connected");
    let there = timeout(PATIENCE, peers.recv()).await.expect("in time").expect("a peer");
    let far = Gpu::open_emulated(0).expect("a GPU in software");
    let (here, there) = (pair(here.device), pair(there.device));
    assert_eq!((here.own_bytes(), here.peer_bytes()), (OWN_BYTES, PEER_BYTES));
    assert_ne!(here.own(), here.peer());
    let mut fresh = vec![1u8; OWN_BYTES as usize];
    gpu.read(here.own_memory(), 0, &mut fresh, deadline()).expect("read");
    assert!(fresh.iter().all(|byte| *byte == 0), "a slot begins as zeros");
    crosses(&mut rng, (&gpu, &here), (&far, &there));
    crosses(&mut rng, (&far, &there), (&gpu, &here));
    // The memory of a closed side can still be written.
    drop(there);
    gpu.write(here.peer_memory().expect("mapped"), 0, &[7; 64], deadline()).expect("a late write");
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_that_do_not_fit_are_refused_with_both_sides_wishes() {
    let (addr, _peers) = listen(memory()).await;
    let refused = async |device| {
        let result = connect(addr, PeerHello::default(), config(device)).await;
        match result {
            Err(ConnectError::Rejected { reject, .. }) => {
                assert_eq!(reject.code, RejectCode::DEVICE, "{reject}");
                reject.message
            }
            other => panic!("expected a rejection, got {other:?}"),
        }
    };
    assert!(refused(None).await.contains("brings no GPU"));
    let said = refused(Some(side(1, b"shape two"))).await;
    assert!(said.contains("shape one") && said.contains("shape two"), "{said}");
    let small = DeviceSide { peer_slot_bytes: 4096, ..side(1, b"shape one") };
    let said = refused(Some(small)).await;
    assert!(said.contains("4096") && said.contains(&PEER_BYTES.to_string()), "{said}");
    // Another island of GPUs.
    let said = refused(Some(side(9, b"shape one"))).await;
    assert!(said.contains("GPU 0 has no access to memory of GPU 9"), "{said}");
    let long = DeviceSide { shape: vec![0; 257], ..side(1, b"") };
    let error = connect(addr, PeerHello::default(), config(Some(long))).await.unwrap_err();
    assert!(matches!(error, ConnectError::TooLong { field: "shape", .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_are_compared_before_anything_is_allocated() {
    let (addr, _peers) = listen(memory()).await;
    // More than the GPU has, and more than the listener would map.
    let greedy = DeviceSide { own_slot_bytes: u64::MAX / 4, ..side(1, b"shape one") };
    let error = connect(addr, PeerHello::default(), config(Some(greedy))).await.unwrap_err();
    assert!(error.reject().is_some_and(|reject| reject.code == RejectCode::DEVICE), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_side_whose_own_gpu_fails_says_so() {
    // Both sides agree on a slot that no GPU has room for.
    let bytes = 1u64 << 62;
    let sizes = |gpu, own_slot_bytes, peer_slot_bytes| DeviceSide {
        own_slot_bytes,
        peer_slot_bytes,
        ..side(gpu, b"shape one")
    };
    let (addr, _peers) = listen_with(sizes(0, PEER_BYTES, bytes), memory()).await;
    let ours = sizes(1, bytes, PEER_BYTES);
    let error = connect(addr, PeerHello::default(), config(Some(ours))).await.unwrap_err();
    let ConnectError::Device(error) = error else { panic!("{error}") };
    let source: &GpuError = error.source_as().expect("the GPU's own error");
    assert!(matches!(source, GpuError::Driver { .. }), "{error}");
}
