//! Memory that holds for any GPU: in software, or with `SWITCHYARD_TEST_DEVICE=cuda` and the feature `cuda` of
//! switchyard-kernels the first real one.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::ptr::NonNull;

use kernels::gpu::{DeviceName, Gpu};
use switchyard_ibgda::access::{Access, HostRange, SharedMemory as _};
use switchyard_ibgda::{GpuAccess, Place};

use crate::{ALIGN_BYTES, turn};

/// The pieces in which the driver gives memory.
const PIECE_BYTES: u64 = 2 << 20;

fn is_real() -> bool {
    match std::env::var("SWITCHYARD_TEST_DEVICE").as_deref() {
        Ok("cuda") => true,
        Ok("emulated") | Err(_) => false,
        Ok(other) => panic!("SWITCHYARD_TEST_DEVICE is {other}, not cuda or emulated"),
    }
}

/// One in software is the test's own.
fn gpu(ordinal: u32) -> Gpu {
    let name = if is_real() { DeviceName::Cuda(0) } else { DeviceName::Emulated(ordinal) };
    let gpu = Gpu::open_named(name).unwrap();
    // Memory that the driver keeps from the first copy on does not belong to a test.
    GpuAccess::new(gpu.clone(), Place::Gpu).alloc(1).unwrap().write(0, &[0]).unwrap();
    gpu
}

/// Whether the driver says that it describes the GPU's memory to NICs.
fn gives_descriptors() -> bool {
    let report = kernels::probe();
    let access = report.gpus.first().and_then(|gpu| gpu.nic_access);
    is_real() && access.expect("what the driver says of NICs").by_dma_buf
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
            // Threads of this process have no address of the GPU's memory.
            assert_eq!(memory.host().is_none(), is_on_gpu);
            let shared = memory.gpu().unwrap().clone();
            assert_eq!((shared.place(), shared.buffer().ptr().0), (place, memory.address()));
            assert!(shared.buffer().len() >= bytes as u64);
            // There is no descriptor of host memory, nor of a GPU's without a driver.
            let is_described = memory.dma_buf().is_ok();
            assert_eq!(is_described, is_on_gpu && gives_descriptors(), "{:?}", memory.dma_buf());
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
            // It stays as long as it has an owner.
            drop(memory);
            shared.read(bytes - 1, &mut found[..1]).unwrap();
            assert_eq!(found[0], 7);
        }
    }
    assert_eq!(gpu(0).free_bytes().unwrap(), free_bytes);
}

/// Memory for a NIC: whole pieces, from the first byte on, and none of them beyond the memory.
#[test]
fn a_descriptor_is_of_the_whole_memory() {
    let _turn = turn();
    let gpu = gpu(3);
    let free_bytes = gpu.free_bytes().unwrap();
    let access = GpuAccess::new(gpu.clone(), Place::Gpu);
    for bytes in [4096, 10 << 20, (2 << 20) + 64] {
        let memory = access.alloc(bytes).unwrap();
        match memory.dma_buf() {
            Ok((descriptor, begin)) => {
                let copy = descriptor.try_clone_to_owned().unwrap();
                let len = File::from(copy).seek(SeekFrom::End(0)).unwrap();
                assert_eq!((begin, len), (0, (bytes as u64).next_multiple_of(PIECE_BYTES)));
                println!("{bytes} bytes: a descriptor of {len}");
            }
            Err(reason) => {
                assert!(!gives_descriptors(), "{reason}");
                // Of one in software there never is any.
                if is_real() {
                    test_support::skip("dma-buf", &reason.to_string());
                }
            }
        }
    }
    assert_eq!(gpu.free_bytes().unwrap(), free_bytes);
}

#[test]
fn ranges_beyond_the_end_are_refused_though_the_drivers_memory_goes_on() {
    let _turn = turn();
    for place in [Place::Gpu, Place::Host] {
        let gpu = gpu(2);
        let name = format!("GPU {}", gpu.ordinal());
        let memory = GpuAccess::new(gpu, place).alloc(4096).unwrap();
        memory.write(4096, &[]).unwrap();
        memory.read(0, &mut [0; 4096]).unwrap();
        for (offset, len) in [(4096, 1), (4095, 2), (0, 4097), (usize::MAX, 1), (usize::MAX, 0)] {
            let write = memory.write(offset, &vec![1; len]).unwrap_err().to_string();
            let read = memory.read(offset, &mut vec![0; len]).unwrap_err().to_string();
            assert!(write.contains(&format!("a write to memory of {name}")), "{write}");
            assert!(read.contains(&format!("a read from memory of {name}")), "{read}");
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
    let gpu = gpu(1);
    let name = format!("memory of GPU {}", gpu.ordinal());
    let text = GpuAccess::new(gpu, Place::Gpu).alloc(1 << 62).unwrap_err().to_string();
    assert!(text.contains(&name) && text.contains(&(1_u64 << 62).to_string()), "{text}");
}

/// Whole pages, as libmlx5 uses for queues.
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
        println!("{text}");
        assert!(text.contains("the NIC's doorbell register for the GPU (8192 bytes)"), "{text}");
        assert_eq!(options.map(|option| text.contains(option)), is_named, "{text}");
        assert_eq!(text.contains("switchyard doctor"), is_named != [false; 2], "{text}");
    }
}
