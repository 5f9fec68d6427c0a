//! A joined peer as an entry in the tables of fused kernels: the fields that they read, and refused values.
//! `--test softnic` of `switchyard-tests` tests that kernels post over such links.

use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::mock::{CLEAN, Mock, PATHS, join, rejoin};
use kernels::abi::{DTYPE_F8_E4M3, DevicePtr, FrameGeometry, PATH_IBGDA};
use kernels::gpu::{DeviceName, Gpu};
use kernels::mlx5::{PeerHandle, QueueHandle};
use switchyard_ibgda::queue::Posters;
use switchyard_ibgda::{
    Access, GpuAccess, HostAccess, LinkError, Nic, OpenPeer, Peer, PeerConfig, Place, QueueConfig,
    QueuePath, Waits,
};

/// Addresses that no code dereferences here.
const WAITS: Waits = Waits {
    error: DevicePtr(0x1_0008),
    abort_mask: DevicePtr(0x2_0004),
    timeout: Duration::from_millis(3),
};

fn geometry() -> FrameGeometry {
    FrameGeometry::new(256, 4, DTYPE_F8_E4M3, 16, 2).unwrap()
}

/// A client's end and a server's.
fn pair(nic: &Arc<Nic>, queue: QueueConfig, slots: [usize; 2]) -> [Peer; 2] {
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    let [request, response] = slots;
    let open = |peer, own_slot_bytes, peer_slot_bytes| {
        let config = PeerConfig { peer, num_queues: 3, queue, own_slot_bytes, peer_slot_bytes };
        OpenPeer::open(nic, &access, config).unwrap()
    };
    join(open(7, response, request), open(2, request, response))
}

fn slots() -> [usize; 2] {
    [geometry().slot_bytes as usize, geometry().response_slot_bytes as usize]
}

fn queue(path: QueuePath) -> QueueConfig {
    QueueConfig { path, depth: 128, ..QueueConfig::default() }
}

/// Content at an address of this process that kernels read.
fn read<T: Copy>(address: u64) -> T {
    assert!(address.is_multiple_of(align_of::<T>() as u64));
    // SAFETY: a structure of a live peer, in memory of this process without another writer.
    unsafe { ptr::with_exposed_provenance::<T>(address as usize).read() }
}

#[test]
fn kernels_read_the_peer_and_its_queues_behind_a_link() {
    let Some(mock) = Mock::open() else { return };
    for path in PATHS {
        mock.change(|state| *state = CLEAN);
        let nic = mock.nic();
        let [mut client, mut server] = pair(&nic, queue(path), slots());
        let to_server = client.server(&geometry(), 5, WAITS).unwrap();
        let to_client = server.client(&geometry(), 77, 6, WAITS).unwrap();
        assert_eq!((client.number(), server.number()), (7, 2));
        assert_eq!((to_server.generation, to_server.reserved), (5, 0));
        assert_eq!((to_client.generation, to_client.client_id), (6, 77));
        assert_eq!(to_server.response.0, client.slot().address());
        assert_eq!(to_client.request.0, server.slot().address());
        let ends = [(&client, to_server.request, &server), (&server, to_client.response, &client)];
        for (peer, link, other) in ends {
            assert_eq!((link.path, link.reserved), (PATH_IBGDA, 0));
            assert_eq!(link.window.0, peer.mirror().address());
            let found: PeerHandle = read(link.context);
            assert_eq!((found.mirror, found.remote), (link.window.0, other.slot().address()));
            assert_eq!(found.slot_bytes, other.slot().bytes() as u64);
            let expected = peer.handle(ptr::null_mut(), ptr::null(), 0);
            assert_eq!((found.lkey, found.rkey), (expected.lkey, expected.rkey));
            assert_ne!(found.lkey, found.rkey);
            assert_eq!((found.num_qps, found.reserved), (3, 0));
            assert_eq!(found.bound.error.addr(), 0x1_0008);
            assert_eq!(found.bound.abort_mask.addr(), 0x2_0004);
            assert_eq!(found.bound.timeout_ns, 3_000_000);
            for (idx, queue) in peer.queues().iter().enumerate() {
                let handle: QueueHandle = read(found.qps + (idx * size_of::<QueueHandle>()) as u64);
                assert_eq!(handle, queue.handle(), "{path:?}, queue {idx}");
                assert_eq!(handle.peer, peer.number());
            }
        }

        // The same structure after a reset; new requests replace its content.
        let [mut client, _server] = rejoin([client, server]);
        let before: PeerHandle = read(to_server.request.context);
        assert_eq!(before.bound.timeout_ns, 3_000_000);
        let nobody = Waits { error: DevicePtr::NULL, abort_mask: DevicePtr::NULL, ..WAITS };
        let again =
            client.server(&geometry(), 5, Waits { timeout: Duration::MAX / u32::MAX, ..nobody });
        assert_eq!(again.unwrap().request, to_server.request);
        let after: PeerHandle = read(to_server.request.context);
        assert!(after.bound.error.is_null() && after.bound.abort_mask.is_null());
        assert_eq!((after.qps, after.remote), (before.qps, before.remote));
    }
    mock.settle();
}

#[test]
fn slots_of_other_frames_are_refused_by_name() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let [request, response] = slots();
    let cases = [
        ([request - 64, response], "the peer's", "requests", "`peer_slot_bytes`", request),
        ([request, response - 64], "this side's", "answers", "`own_slot_bytes`", response),
    ];
    for (slots, whose, what, field, expected) in cases {
        let [mut client, mut server] = pair(&nic, queue(QueuePath::Plain), slots);
        let text = client.server(&geometry(), 1, WAITS).unwrap_err().to_string();
        let found = format!("{whose} slot has {} bytes", expected - 64);
        for part in [&found, what, field, &expected.to_string(), "hidden 256, top-4, fp8, 2 frames"]
        {
            assert!(text.contains(part), "`{part}` is not in: {text}");
        }
        // The server finds the same slot too small, which is the other one to it.
        let text = server.client(&geometry(), 1, 1, WAITS).unwrap_err().to_string();
        let other = if whose == "the peer's" { "this side's" } else { "the peer's" };
        assert!(text.contains(other) && text.contains(what), "{text}");
    }
    // Larger slots are usable. A server cannot act as a client: its slots are the other way around.
    let [mut client, mut server] =
        pair(&nic, queue(QueuePath::Plain), [request + 64, response + 64]);
    client.server(&geometry(), 1, WAITS).unwrap();
    server.client(&geometry(), 1, 1, WAITS).unwrap();
    let bf16_sized = FrameGeometry::new(4096, 4, DTYPE_F8_E4M3, 16, 2).unwrap();
    assert!(matches!(client.server(&bf16_sized, 1, WAITS), Err(LinkError::Slot { .. })));

    let by_hand = FrameGeometry { slot_bytes: 64, ..geometry() };
    let text = client.server(&by_hand, 1, WAITS).unwrap_err().to_string();
    assert!(text.contains("`FrameGeometry::new`"), "{text}");
    let by_hand = FrameGeometry { hidden: 100, ..geometry() };
    assert!(matches!(client.server(&by_hand, 1, WAITS), Err(LinkError::Geometry(_))));
}

#[test]
fn waits_and_posters_that_kernels_cannot_use_are_refused() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let [mut client, _server] = pair(&nic, queue(QueuePath::Devx), slots());
    let cases = [
        (
            Waits { error: DevicePtr(12), ..WAITS },
            "`error` is 0xc, expected null or a multiple of 8",
        ),
        (
            Waits { abort_mask: DevicePtr(6), ..WAITS },
            "`abort_mask` is 0x6, expected null or a multiple of 4",
        ),
        (Waits { timeout: Duration::ZERO, ..WAITS }, "`timeout` is 0ns, expected from 1 ns"),
        (
            Waits { timeout: Duration::MAX, ..WAITS },
            "expected from 1 ns to 18446744073709551615 ns",
        ),
    ];
    for (waits, part) in cases {
        let text = client.server(&geometry(), 1, waits).unwrap_err().to_string();
        assert!(text.contains(part), "`{part}` is not in: {text}");
        assert!(client.link(waits).is_err());
    }
    client.link(WAITS).unwrap();
    let one_block = QueueConfig { posters: Posters::OneBlock, ..queue(QueuePath::Plain) };
    let [mut client, _server] = pair(&nic, one_block, slots());
    let text = client.server(&geometry(), 1, WAITS).unwrap_err().to_string();
    assert!(text.contains("`Posters::AnyBlocks`"), "{text}");
}

#[test]
fn slots_may_lie_in_a_gpus_memory_and_queues_with_the_host() {
    let gpu = Gpu::open_named(DeviceName::Emulated(0)).unwrap();
    let access = GpuAccess::new(gpu.clone(), Place::Host).with_slots(Place::Gpu);
    let slots = access.slots().expect("another place").alloc(4096).unwrap();
    assert!(slots.is_on_gpu() && !access.alloc(4096).unwrap().is_on_gpu());
    assert!(GpuAccess::new(gpu, Place::Gpu).with_slots(Place::Gpu).slots().is_none());
}
