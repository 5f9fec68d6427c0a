//! Memory of GPUs in software, as NICs and posters are given it. What only a driver can do (a descriptor of
//! its pages, a NIC's register mapped into the GPU) is refused there, which is what errors are tested by.

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
fn memory_is_aligned_zeroed_and_told_apart_by_place() {
    let _turn = turn();
    let free_bytes = gpu(0).free_bytes().unwrap();
    for (place, is_on_gpu) in [(Place::Gpu, true), (Place::Host, false)] {
        let access = GpuAccess::new(gpu(0), place);
        for bytes in [1, 64, 4096, 65_536, (2 << 20) - 64, (2 << 20) + 64] {
            let memory = access.alloc(bytes).unwrap();
            assert_eq!((memory.bytes(), memory.is_on_gpu()), (bytes, is_on_gpu));
            assert!(memory.address() != 0 && memory.address().is_multiple_of(ALIGN_BYTES));
            // Threads of this process have no address of what is the GPU's.
            assert_eq!(memory.host().is_none(), is_on_gpu);
            let shared = memory.gpu().unwrap().clone();
            assert_eq!((shared.place(), shared.buffer().ptr().0), (place, memory.address()));
            assert!(shared.buffer().len() >= bytes as u64);
            // There is no descriptor of host memory, nor of a GPU's without a driver.
            assert!(memory.dma_buf().is_err());
            let mut found = vec![0xff; bytes];
            memory.read(0, &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == 0), "{place:?}, {bytes} bytes");
            // The first byte and the last one are there, and are this memory's own.
            memory.write(bytes - 1, &[7]).unwrap();
            let other = access.alloc(bytes).unwrap();
            other.write(0, &vec![9; bytes]).unwrap();
            memory.read(0, &mut found).unwrap();
            assert_eq!(found[bytes - 1], 7);
            assert!(found[..bytes - 1].iter().all(|byte| *byte == 0));
            // It stays as long as anybody has it.
            drop(memory);
            shared.read(bytes - 1, &mut found[..1]).unwrap();
            assert_eq!(found[0], 7);
        }
    }
    assert_eq!(gpu(0).free_bytes().unwrap(), free_bytes);
}

#[test]
fn ranges_beyond_the_end_are_refused_though_the_drivers_memory_goes_on() {
    let _turn = turn();
    for place in [Place::Gpu, Place::Host] {
        let memory = GpuAccess::new(gpu(2), place).alloc(4096).unwrap();
        memory.write(4096, &[]).unwrap();
        memory.read(0, &mut [0; 4096]).unwrap();
        for (offset, len) in [(4096, 1), (4095, 2), (0, 4097), (usize::MAX, 1), (usize::MAX, 0)] {
            let write = memory.write(offset, &vec![1; len]).unwrap_err().to_string();
            let read = memory.read(offset, &mut vec![0; len]).unwrap_err().to_string();
            assert!(write.contains("a write to memory of GPU 2"), "{write}");
            assert!(read.contains("a read from memory of GPU 2"), "{read}");
            for text in [write, read] {
                assert!(
                    text.contains(&format!("at offset {offset} it leaves the 4096 bytes")),
                    "{text}"
                );
                assert!(text.contains(&format!("({len} bytes)")), "{text}");
            }
        }
    }
}

#[test]
fn a_gpu_without_room_says_which_and_how_much() {
    let _turn = turn();
    let access = GpuAccess::new(gpu(1), Place::Gpu);
    let text = access.alloc(1 << 62).unwrap_err().to_string();
    assert!(
        text.contains("memory of GPU 1") && text.contains(&(1_u64 << 62).to_string()),
        "{text}"
    );
}

/// Whole pages, as libmlx5 keeps queues in.
struct Pages(NonNull<u8>);

impl Pages {
    const BYTES: usize = 8192;

    fn new() -> Self {
        // SAFETY: a size above 0, a power of two.
        let start = unsafe { std::alloc::alloc_zeroed(Self::layout()) };
        Self(NonNull::new(start).unwrap())
    }

    fn layout() -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(Self::BYTES, 4096).unwrap()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), Self::layout()) };
    }
}

#[test]
fn pages_of_a_queue_are_mapped_until_the_guard_goes() {
    let _turn = turn();
    let access = GpuAccess::new(gpu(0), Place::Host);
    let pages = Pages::new();
    let map = || {
        // SAFETY: the pages outlive the mappings.
        unsafe { access.map(pages.0, Pages::BYTES, HostRange::Memory) }
    };
    let mapped = map().unwrap();
    assert_eq!(mapped.address, pages.0.as_ptr().expose_provenance() as u64);
    assert!(mapped.guard.is_some());
    let text = map().unwrap_err().to_string();
    assert!(text.contains("a queue's host memory for the GPU (8192 bytes)"), "{text}");
    assert!(!text.contains("PeerMappingOverride"), "no matter of driver options: {text}");
    drop(mapped);
    drop(map().unwrap());
}

#[test]
fn a_doorbell_that_cannot_be_mapped_names_the_driver_option_that_is_missing() {
    let _turn = turn();
    let root = tempfile::tempdir().unwrap();
    let params = root.path().join("proc/driver/nvidia/params");
    std::fs::create_dir_all(params.parent().unwrap()).unwrap();
    let access = GpuAccess::new(gpu(0), Place::Gpu).with_root(root.path().to_owned());
    let pages = Pages::new();
    let options = ["NVreg_EnableStreamMemOPs=1", "NVreg_RegistryDwords=\"PeerMappingOverride=1;\""];
    for (text, is_named) in [
        ("EnableStreamMemOPs: 0\nRegistryDwords: \"\"\n", [true, true]),
        ("EnableStreamMemOPs: 1\nRegistryDwords: \"\"\n", [false, true]),
        ("EnableStreamMemOPs: 0\nRegistryDwords: \"PeerMappingOverride=1;\"\n", [true, false]),
        ("EnableStreamMemOPs: 1\nRegistryDwords: \"PeerMappingOverride=1;\"\n", [false, false]),
    ] {
        std::fs::write(&params, text).unwrap();
        // SAFETY: the pages outlive the mapping.
        let mapped = unsafe { access.map(pages.0, Pages::BYTES, HostRange::Register) };
        let text = mapped.unwrap_err().to_string();
        assert!(text.contains("the NIC's doorbell register for the GPU (8192 bytes)"), "{text}");
        assert_eq!(options.map(|option| text.contains(option)), is_named, "{text}");
        assert_eq!(text.contains("switchyard doctor"), is_named != [false; 2], "{text}");
    }
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
