//! Memory of GPUs, as NICs and posters get it. GPUs in software refuse operations that only a driver can do: a
//! descriptor of its pages, a NIC's register mapped into the GPU. The tests of errors use that.

#[path = "gpu/memory.rs"]
mod memory;
mod mock;

use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::abi::DevicePtr;
use kernels::gpu::{DeviceName, Gpu};
use kernels::mlx5::{QueueHandle, QueueState};
use mock::{CLEAN, Mock, MockState};
use switchyard_ibgda::access::{Access, AccessError, HostRange, Mapping, SharedMemory, Space};
use switchyard_ibgda::nic::{RegistrationMethod, Rights};
use switchyard_ibgda::{
    GpuAccess, HostAccess, OpenPeer, PeerConfig, Place, QueueConfig, QueuePath,
};

/// Alignment of queues, and the pieces that descriptors need.
const ALIGN_BYTES: u64 = 64 << 10;

/// Counts of free memory are the process's, so tests go one at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gpu(ordinal: u32) -> Gpu {
    Gpu::open_named(DeviceName::Emulated(ordinal)).unwrap()
}

#[test]
fn a_gpus_memory_without_a_descriptor_goes_by_its_address_or_says_why_not() {
    let _turn = turn();
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let memory = GpuAccess::new(gpu(0), Place::Gpu).alloc(4096).unwrap();
    let register = || {
        // SAFETY: the registration is dropped before the memory.
        unsafe { nic.register_gpu(memory.address(), 4096, memory.dma_buf(), Rights::Peer) }
    };
    assert_eq!(register().unwrap().by(), RegistrationMethod::PeerMemory);
    mock.change(|state| *state = MockState { num_failures: 0, ..*state });
    let text = register().unwrap_err().to_string();
    for part in [
        "4096 bytes of GPU memory",
        "the GPU's driver gives no descriptor: ",
        "dma-buf of an emulated GPU's memory failed: ",
        "by address, which is nvidia_peermem's: ibv_reg_mr failed: ",
    ] {
        assert!(text.contains(part), "{text}");
    }
    mock.change(|state| state.num_failures = -1);
    drop(nic);
    mock.settle();
}

/// The queue was made and some of its pages were mapped when the doorbell was refused.
#[test]
fn a_peer_whose_doorbell_is_refused_leaves_nothing_behind() {
    let _turn = turn();
    let Some(mock) = Mock::open() else { return };
    for path in [QueuePath::Plain, QueuePath::Devx] {
        for place in [Place::Host, Place::Gpu] {
            mock.change(|state| *state = CLEAN);
            let nic = mock.nic();
            let num_live = mock.get().num_live;
            let gpu = gpu(5);
            let free_bytes = gpu.free_bytes().unwrap();
            let access: Arc<dyn Access> = Arc::new(GpuAccess::new(gpu.clone(), place));
            let config = PeerConfig {
                peer: 1,
                num_queues: 2,
                queue: QueueConfig { path, depth: 128, ..QueueConfig::default() },
                own_slot_bytes: 4096,
                peer_slot_bytes: 4096,
            };
            let text = OpenPeer::open(&nic, &access, config).unwrap_err().to_string();
            assert!(text.contains("queue 0: queue: the NIC's doorbell register"), "{text}");
            assert!(text.contains("PeerMappingOverride"), "{text}");
            assert_eq!(mock.get().num_live, num_live, "{path:?} {place:?}");
            // Memory and mappings alike: a mapping that stayed would count.
            assert_eq!(gpu.free_bytes().unwrap(), free_bytes, "{path:?} {place:?}");
            drop(nic);
            mock.settle();
        }
    }
}

/// Kernels count in their GPU's memory, and report an error in the host's memory, too.
#[test]
fn counts_beside_the_kernels_tell_the_host_and_are_reset_with_their_queue() {
    const ERROR: u64 = 0x0000_1234_0000_0503;
    let _turn = turn();
    let Some(mock) = Mock::open() else { return };
    for path in [QueuePath::Plain, QueuePath::Devx] {
        mock.change(|state| *state = CLEAN);
        let nic = mock.nic();
        let gpu = gpu(4);
        let free_bytes = gpu.free_bytes().unwrap();
        let access = GpuAccess::new(gpu.clone(), Place::Host).with_software_nic();
        let access: Arc<dyn Access> = Arc::new(access);
        let queue = QueueConfig { path, depth: 128, ..QueueConfig::default() };
        let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
        let config = PeerConfig { peer: 1, num_queues: 2, queue, own_slot_bytes, peer_slot_bytes };
        let open = || OpenPeer::open(&nic, &access, config).unwrap();
        let [one, other] = [open(), open()];
        let (from_one, from_other) = (one.description(), other.description());
        let [one, other] = [one.join(&from_other).unwrap(), other.join(&from_one).unwrap()];
        let handle = one.queues()[1].handle();
        let is_on_gpu = |address| gpu.is_registered(DevicePtr(address));
        let is_elsewhere = |address| self::gpu(5).is_registered(DevicePtr(address));
        for (address, is_near) in
            [(handle.state, true), (handle.host_error, false), (handle.sq, false)]
        {
            assert!(is_on_gpu(address) && is_elsewhere(address) != is_near, "{handle:x?}");
        }
        let word = |address: u64| {
            let at = ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap());
            // SAFETY: an aligned word of the peer's memory, which this process reaches as GPUs in software do, and
            // which is accessed atomically while the peer is in use.
            unsafe { AtomicU64::from_ptr(at) }
        };
        let errors = || one.queues().iter().map(|queue| queue.error().unwrap()).collect::<Vec<_>>();
        assert_eq!(errors(), [0, 0]);
        // As `fail_queue` does.
        let counted = handle.state + offset_of!(QueueState, error) as u64;
        let reserved = handle.state + offset_of!(QueueState, reserved) as u64;
        word(reserved).store(70_000, Ordering::Relaxed);
        word(counted).store(ERROR, Ordering::Relaxed);
        assert_eq!(errors(), [0, 0], "the host asks no GPU");
        word(handle.host_error).store(ERROR, Ordering::Release);
        assert_eq!(errors(), [0, ERROR]);
        let reset = one.reset().unwrap();
        for address in [reserved, counted, handle.host_error] {
            assert_eq!(word(address).load(Ordering::Relaxed), 0, "{path:?} {address:x}");
        }
        drop((reset, other, nic));
        mock.settle();
        assert_eq!(gpu.free_bytes().unwrap(), free_bytes, "{path:?}");
    }
}

/// Such a GPU has its slots with the host.
#[test]
fn a_gpu_without_room_for_counts_has_them_with_the_queues() {
    let _turn = turn();
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let beside = Some(Box::new(Crowded { beside: None }));
    let access: Arc<dyn Access> = Arc::new(Crowded { beside });
    let queue = QueueConfig { depth: 128, ..QueueConfig::default() };
    let (own_slot_bytes, peer_slot_bytes) = (4096, 4096);
    let config = PeerConfig { peer: 1, num_queues: 1, queue, own_slot_bytes, peer_slot_bytes };
    let open = || OpenPeer::open(&nic, &access, config).unwrap();
    let [one, other] = [open(), open()];
    let one = one.join(&other.description()).unwrap();
    let handle = one.queues()[0].handle();
    assert_eq!(handle.host_error, 0);
    assert!(handle.state != 0 && handle.state + 1024 == handle.scratch, "one piece: {handle:x?}");
    assert_eq!(one.queues()[0].error().unwrap(), 0);
    drop((one, other, nic));
    mock.settle();
}

/// Memory of the host, with counts from an allocator that has none left.
#[derive(Debug)]
struct Crowded {
    beside: Option<Box<Self>>,
}

impl Access for Crowded {
    fn space(&self) -> Space {
        HostAccess.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        if self.beside.is_some() {
            return HostAccess.alloc(bytes);
        }
        let (what, detail) = ("memory of a GPU".to_owned(), "it is full".to_owned());
        Err(AccessError::Other { what, bytes, detail })
    }

    fn counts(&self) -> Option<&dyn Access> {
        self.beside.as_deref().map(|counts| counts as &dyn Access)
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        // SAFETY: the caller keeps the pages.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

/// A GPU's memory, and doorbells that threads of this process reach.
#[derive(Debug)]
struct MixedAccess(GpuAccess);

impl Access for MixedAccess {
    fn space(&self) -> Space {
        HostAccess.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        self.0.alloc(bytes)
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        // SAFETY: the caller keeps the pages.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

/// Slots, mirror, states, queues and their table share the driver's smallest allocation.
#[test]
fn a_peer_takes_no_more_pieces_of_a_gpus_memory_than_its_bytes_need() {
    const PIECE_BYTES: u64 = 2 << 20;
    let _turn = turn();
    let Some(mock) = Mock::open() else { return };
    let gpu = gpu(6);
    let access: Arc<dyn Access> = Arc::new(MixedAccess(GpuAccess::new(gpu.clone(), Place::Gpu)));
    for (path, num_queues, depth, slot_bytes, num_pieces) in [
        (QueuePath::Devx, 1, 128, 4096, 1),
        (QueuePath::Devx, 8, 1024, 4096, 1),
        (QueuePath::Devx, 8, 1024, 1 << 20, 2),
        (QueuePath::Devx, 32, 1024, 4096, 4),
        (QueuePath::Plain, 32, 128, 4096, 1),
    ] {
        mock.change(|state| *state = CLEAN);
        let nic = mock.nic();
        let free_bytes = gpu.free_bytes().unwrap();
        let config = PeerConfig {
            peer: 1,
            num_queues,
            queue: QueueConfig { path, depth, ..QueueConfig::default() },
            own_slot_bytes: slot_bytes,
            peer_slot_bytes: slot_bytes,
        };
        let open = || OpenPeer::open(&nic, &access, config).unwrap();
        let [one, other] = [open(), open()];
        let taken = free_bytes - gpu.free_bytes().unwrap();
        assert_eq!(taken, 2 * num_pieces * PIECE_BYTES, "{path:?} {num_queues} {slot_bytes}");
        let (from_one, from_other) = (one.description(), other.description());
        let peers = [one.join(&from_other).unwrap(), other.join(&from_one).unwrap()];
        assert_eq!(free_bytes - gpu.free_bytes().unwrap(), taken);

        // No piece overlaps another.
        let peer = &peers[0];
        let mut parts = vec![
            (peer.slot().address(), slot_bytes as u64),
            (peer.mirror().address(), slot_bytes as u64),
            (
                peer.handle(std::ptr::null_mut(), std::ptr::null(), 0).qps,
                (num_queues * size_of::<QueueHandle>()) as u64,
            ),
        ];
        for handle in peer.queues().iter().map(switchyard_ibgda::queue::Queue::handle) {
            parts.push((handle.state, handle.scratch + 8 - handle.state));
            assert!(handle.state.is_multiple_of(4096));
            if path == QueuePath::Devx {
                let ring_bytes = u64::from(depth) * 64;
                assert!(handle.sq.is_multiple_of(ALIGN_BYTES));
                parts.extend([(handle.sq, ring_bytes), (handle.cq, ring_bytes)]);
                parts.extend([(handle.dbrec, 8), (handle.cq_dbrec, 8)]);
            }
        }
        parts.sort_unstable();
        for pair in parts.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?} overlap");
        }
        let (first, last) = (parts[0], parts[parts.len() - 1]);
        assert!(last.0 + last.1 - first.0 <= num_pieces * PIECE_BYTES);
        for part in [peer.slot(), peer.mirror()] {
            part.write(slot_bytes - 1, &[1]).unwrap();
            let text = part.write(slot_bytes, &[1]).unwrap_err().to_string();
            assert!(text.contains(&format!("it leaves the {slot_bytes} bytes")), "{text}");
            assert!(part.read(slot_bytes - 1, &mut [0; 2]).is_err());
        }
        drop((peers, nic));
        mock.settle();
        assert_eq!(gpu.free_bytes().unwrap(), free_bytes);
    }
}
