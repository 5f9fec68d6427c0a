//! Transfers and ranges beyond 4 GiB.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rand::Rng;
use switchyard_message_engine::engine::Access;

use crate::common::{TestTransport, contents, pair, random_bytes, rng, soon};

const FOUR_GIB: u64 = 4 << 30;

/// A mapping of `len` bytes. All bytes below 4 GiB share the same `page_bytes` of memory. Bytes from 4 GiB on have
/// memory of their own.
struct FoldedMapping {
    ptr: *mut u8,
    len: usize,
}

impl FoldedMapping {
    fn new(len: usize, page_bytes: usize) -> Self {
        use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
        let memory = |bytes: usize| {
            let file = rustix::fs::memfd_create("folded", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, bytes as u64).unwrap();
            file
        };
        let len = len.next_multiple_of(4096);
        let (fold, tail) = (memory(page_bytes), memory(len - FOUR_GIB as usize));
        let none = ProtFlags::empty();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the reserved range is ours, and every part of it is replaced whole.
        unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let ptr: *mut u8 =
                mmap_anonymous(std::ptr::null_mut(), len, none, flags).unwrap().cast();
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            for at in (0..FOUR_GIB as usize).step_by(page_bytes) {
                let bytes = page_bytes.min(FOUR_GIB as usize - at);
                mmap(ptr.add(at).cast(), bytes, access, flags, &fold, 0).unwrap();
            }
            let at = FOUR_GIB as usize;
            mmap(ptr.add(at).cast(), len - at, access, flags, &tail, 0).unwrap();
            Self { ptr, len }
        }
    }
}

impl Drop for FoldedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped above, and nothing uses it any more.
        unsafe { rustix::mm::munmap(self.ptr.cast(), self.len).unwrap() };
    }
}

/// One message of more than 4 GiB. Source and target are many windows on a few MiB of memory each, so the test costs
/// only time. The bytes beyond 4 GiB occur nowhere else. Offsets without their upper half would reach other bytes,
/// because 4 GiB is no multiple of the window.
#[test]
fn a_message_beyond_4_gib_arrives_whole() {
    for by in [TestTransport::Cma, TestTransport::Tcp] {
        a_message_beyond_4_gib_arrives_whole_by(by);
    }
}

fn a_message_beyond_4_gib_arrives_whole_by(by: TestTransport) {
    let fold = 67 << 20;
    let len = FOUR_GIB + (3 << 20) + 12_345;
    let (from, to) =
        (FoldedMapping::new(len as usize, fold), FoldedMapping::new(len as usize, fold));
    let pair = pair(by);
    let mut rng = rng();
    // SAFETY: both mappings live until the engines are gone; see the drops below.
    let (source, target) = unsafe {
        let source = NonNull::new(from.ptr).unwrap();
        let target = NonNull::new(to.ptr).unwrap();
        (
            pair.here.reg(source, len as usize, Access::RemoteReadWrite).unwrap(),
            pair.there.reg(target, len as usize, Access::RemoteReadWrite).unwrap(),
        )
    };
    let mut bytes = vec![0; fold];
    rng.fill_bytes(&mut bytes);
    source.copy_in(0, &bytes).unwrap();
    let tail = random_bytes(&mut rng, (len - FOUR_GIB) as usize);
    source.copy_in(FOUR_GIB, &tail).unwrap();
    // Takes seconds. The limit allows for a busy host.
    let patience = Instant::now() + Duration::from_secs(300);
    let got = pair.back.start_recv(&target.whole(), patience).unwrap();
    assert_eq!(pair.out.send(&source.whole(), patience), Ok(len));
    assert_eq!(got.wait(), Ok(len));
    assert!(contents(&target, 0, fold) == bytes, "{by:?}");
    assert!(contents(&target, FOUR_GIB, tail.len()) == tail, "{by:?}");
    drop((source, target, pair));
    drop((from, to));
}

/// Ranges that begin beyond 4 GiB. Only little of the memory is touched.
#[test]
fn offsets_beyond_4_gib_are_exact() {
    for by in TestTransport::all() {
        let (pair, mut rng) = (pair(by), rng());
        let len = (5u64 << 30) as usize;
        let source = pair.here.alloc(len, Access::RemoteReadWrite).unwrap();
        let target = pair.there.alloc(len, Access::RemoteReadWrite).unwrap();
        let (here, there, size) = ((4u64 << 30) + 777, (4u64 << 30) + 99, 300_000u64);
        let bytes = random_bytes(&mut rng, size as usize);
        source.copy_in(here, &bytes).unwrap();
        let span = source.span(here, size).unwrap();
        let remote = pair.back.advertise(&target.span(there, size).unwrap()).unwrap();
        pair.out.write(&span, &remote, soon()).unwrap();
        assert!(contents(&target, there, size as usize) == bytes, "{by:?}");
        // The same offset modulo 2^32 is untouched.
        assert!(contents(&target, 99, size as usize).iter().all(|byte| *byte == 0), "{by:?}");
        let back = source.span(here + size, size).unwrap();
        pair.out.read(&back, &remote, soon()).unwrap();
        assert!(contents(&source, here + size, size as usize) == bytes, "{by:?}");
    }
}
