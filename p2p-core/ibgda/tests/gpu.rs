//! Memory of GPUs, as NICs and posters are given it. What only a driver can do (a descriptor of its pages, a
//! NIC's register mapped into the GPU) GPUs in software refuse, which is what errors are tested by.

#[path = "gpu/memory.rs"]
mod memory;
mod mock;

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibgda::access::{Access, AccessError, HostRange, Mapped, SharedMemory, Space};
use ibgda::nic::{RegisteredBy, Rights};
use ibgda::{GpuAccess, HostAccess, OpenPeer, PeerConfig, Place, QueueConfig, QueuePath};
use kernels::gpu::{DeviceName, Gpu};
use kernels::mlx5::QueueHandle;
use mock::{CLEAN, Mock, MockState};

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
    assert_eq!(register().unwrap().by(), RegisteredBy::PeerMemory);
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
    ) -> Result<Mapped, AccessError> {
        // SAFETY: the caller keeps the pages.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

/// Slots, mirror, states, queues and their table share what the driver gives at least.
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

        // Nobody has a byte of somebody else's.
        let peer = &peers[0];
        let mut parts = vec![
            (peer.slot().address(), slot_bytes as u64),
            (peer.mirror().address(), slot_bytes as u64),
            (
                peer.handle(std::ptr::null_mut(), std::ptr::null(), 0).qps,
                (num_queues * size_of::<QueueHandle>()) as u64,
            ),
        ];
        for handle in peer.queues().iter().map(ibgda::queue::Queue::handle) {
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
