//! Pages that peers reach without replacement, for users that must keep the pages that they have already used.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ibgda::access::{AccessError, HostPages, HostRange, Mapping, SharedMemory, Space};
use ibgda::{Access, HostAccess};
use softnic::Segment;

/// Memory of the process on pages of shared segments from its beginning. Registration does not replace these
/// pages, which a GPU's driver that has locked them would not notice.
#[derive(Debug, Clone, Copy)]
pub struct SharedPages;

impl Access for SharedPages {
    fn space(&self) -> Space {
        HostAccess.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let whole = bytes.checked_next_multiple_of(ALIGN_BYTES);
        let whole = whole.and_then(|whole| whole.checked_add(ALIGN_BYTES)).ok_or(
            AccessError::TooLarge { what: "shared memory", bytes, most: usize::MAX - ALIGN_BYTES },
        )?;
        let segment = Segment::create(whole).map_err(|error| AccessError::Host {
            bytes,
            call: "shared memory of the software NIC",
            source: std::io::Error::other(error),
        })?;
        let begin = segment.region().as_ptr();
        // SAFETY: the segment has `ALIGN_BYTES` more than the bytes asked for.
        let start = unsafe { begin.add(begin.align_offset(ALIGN_BYTES)) };
        known().push(segment.clone());
        let owner = KnownSegment(segment);
        // SAFETY: these bytes lie in the segment, which stays mapped as long as its owner lives.
        Ok(Box::new(unsafe { HostPages::new("shared memory", start, bytes, owner) }))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        // SAFETY: the caller's promise.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

/// Memory range of the process.
#[derive(Debug)]
pub(crate) enum MemoryRange {
    /// In this segment, from this offset on.
    Within(Segment, usize),
    /// The range begins in memory of [`SharedPages`] and continues behind its end.
    Beyond,
    Elsewhere,
}

pub(crate) fn find(address: usize, bytes: usize) -> MemoryRange {
    for segment in known().iter() {
        let region = segment.region();
        let offset = address.wrapping_sub(region.as_ptr().addr().get());
        if offset < region.len() {
            let is_within = bytes <= region.len() - offset;
            return if is_within {
                MemoryRange::Within(segment.clone(), offset)
            } else {
                MemoryRange::Beyond
            };
        }
    }
    MemoryRange::Elsewhere
}

/// A segment that [`find`] knows until it is dropped.
#[derive(Debug)]
struct KnownSegment(Segment);

impl Drop for KnownSegment {
    fn drop(&mut self) {
        known().retain(|segment| segment.descriptor() != self.0.descriptor());
    }
}

fn known() -> MutexGuard<'static, Vec<Segment>> {
    static KNOWN: Mutex<Vec<Segment>> = Mutex::new(Vec::new());
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`Access::alloc`] promises.
const ALIGN_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use ibgda::{Nic, NicConfig, OpenPeer, PeerConfig, QueueConfig};

    use super::*;

    /// The list belongs to the process, so tests run one at a time.
    static TURN: Mutex<()> = Mutex::new(());

    fn turn() -> MutexGuard<'static, ()> {
        TURN.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn registration_leaves_the_pages_where_they_are() {
        let _turn = turn();
        let libraries = crate::libraries().unwrap();
        let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
        let nic = Nic::open(&libraries, &config).unwrap();
        let queue = QueueConfig { depth: 128, ..QueueConfig::default() };
        let (own_slot_bytes, peer_slot_bytes) = (3 << 12, 5 << 12);
        let config = PeerConfig { peer: 0, num_queues: 2, queue, own_slot_bytes, peer_slot_bytes };
        let access: Arc<dyn Access> = Arc::new(SharedPages);
        let peer = OpenPeer::open(&nic, &access, config).unwrap();
        let segments = known().clone();
        assert!(!segments.is_empty());
        // A peer finds, by the descriptor, the values stored at an address of this process.
        for segment in &segments {
            let file = File::open(format!("/proc/self/fd/{}", segment.descriptor())).unwrap();
            for offset in (0..segment.region().len()).step_by(4096) {
                let place = segment.region().range(offset, 8).unwrap().as_ptr().cast::<u64>();
                let value = 0x5357_0000 + offset as u64;
                // SAFETY: eight aligned bytes of the mapping; no queue of this pair is in use.
                let former = unsafe { place.replace(value) };
                let mut found = [0; 8];
                file.read_exact_at(&mut found, offset as u64).unwrap();
                assert_eq!(u64::from_ne_bytes(found), value, "at {offset:#x}");
                // SAFETY: as above.
                unsafe { place.write(former) };
            }
        }
        drop(peer);
        assert!(known().is_empty());
    }

    #[test]
    fn memory_is_found_whole_or_not_at_all() {
        let _turn = turn();
        let pages = SharedPages.alloc(8192).unwrap();
        let start = pages.host().unwrap().addr().get();
        let len = known()[0].region().len();
        let first = known()[0].region().as_ptr().addr().get();
        assert!(
            matches!(find(start + 4096, 4096), MemoryRange::Within(_, at) if at == start - first + 4096)
        );
        assert!(matches!(find(first, len), MemoryRange::Within(_, 0)));
        assert!(matches!(find(first, len + 1), MemoryRange::Beyond));
        assert!(matches!(find(first + len - 1, 2), MemoryRange::Beyond));
        assert!(matches!(find(first - 1, 1), MemoryRange::Elsewhere));
        assert!(matches!(find(first + len, 1), MemoryRange::Elsewhere));
        drop(pages);
        assert!(matches!(find(start, 1), MemoryRange::Elsewhere));
    }

    #[test]
    fn ranges_beyond_the_end_are_refused() {
        let _turn = turn();
        let pages = SharedPages.alloc(4097).unwrap();
        assert!(pages.address().is_multiple_of(ALIGN_BYTES as u64) && pages.bytes() == 4097);
        pages.write(4090, &[7; 7]).unwrap();
        let mut found = [0; 8];
        pages.read(4089, &mut found).unwrap();
        assert_eq!(found, [0, 7, 7, 7, 7, 7, 7, 7]);
        for (offset, len) in [(4098, 0), (4097, 1), (4096, 2), (usize::MAX, 1)] {
            assert!(pages.write(offset, &vec![1; len]).is_err(), "{offset}, {len}");
            assert!(pages.read(offset, &mut vec![1; len]).is_err(), "{offset}, {len}");
        }
        assert!(SharedPages.alloc(usize::MAX).is_err());
    }
}
