//! The slots: their layout, and checks of this side's own.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ibgda::access::{Access, AccessError, HostRange, Mapping, SharedMemory, Space};
use ibgda::{GpuAccess, HostAccess, Place};
use kernels::gpu::Gpu;

/// Words that count or flag, a line of the cache for each queue.
pub(crate) const FLAGS: usize = 0;
/// The counter of `add`, 8 bytes.
pub(crate) const COUNTER: usize = 4096;
/// The counter of `masked`, 4 bytes, and 4 that must stay as they are.
pub(crate) const COUNTER4: usize = 4096 + 64;
/// The word of two fields of `masked`.
pub(crate) const FIELDS: usize = 4096 + 128;
/// The ring of words of `wrap`.
pub(crate) const RING: usize = 8192;
/// Words of it.
pub(crate) const RING_WORDS: u64 = 4096;
/// Content of the description for the peer.
pub(crate) const SOURCE: usize = 48 << 10;
/// Bytes of it.
pub(crate) const SOURCE_BYTES: usize = 16 << 10;
/// Bytes that a queue puts into an area of its own.
pub(crate) const AREA_BYTES: usize = 16 << 10;
/// Seed of a side.
pub(crate) const SLOT_BYTES: usize = area(64);

const _: () = assert!(RING + RING_WORDS as usize * 8 <= SOURCE && SOURCE + SOURCE_BYTES <= area(0));

/// Target area of a queue's puts.
pub(crate) const fn area(queue_idx: usize) -> usize {
    (64 << 10) + queue_idx * AREA_BYTES
}

/// A queue's flag.
pub(crate) const fn flag(queue_idx: usize) -> usize {
    FLAGS + queue_idx * 64
}

/// The processor posts, and so queues are in its memory; slots are the host's or a GPU's.
#[derive(Debug)]
pub(crate) struct SlotAccess {
    slots: Option<GpuAccess>,
}

impl SlotAccess {
    /// Slots of this GPU, or of the host.
    pub(crate) fn new(gpu: Option<Gpu>) -> Self {
        Self { slots: gpu.map(|gpu| GpuAccess::new(gpu, Place::Gpu)) }
    }
}

impl Access for SlotAccess {
    fn space(&self) -> Space {
        HostAccess.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        HostAccess.alloc(bytes)
    }

    fn slots(&self) -> Option<&dyn Access> {
        self.slots.as_ref().map(|gpu| gpu as &dyn Access)
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        // SAFETY: the caller keeps the pages mapped.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

/// A word of a slot, as it is now.
pub(crate) fn load(slot: &dyn SharedMemory, offset: usize) -> Result<u64> {
    ensure!(offset.is_multiple_of(8) && offset + 8 <= slot.bytes(), "no word at {offset}");
    if slot.is_on_gpu() {
        let mut bytes = [0; 8];
        slot.read(offset, &mut bytes)?;
        return Ok(u64::from_le_bytes(bytes));
    }
    let address = usize::try_from(slot.address())? + offset;
    // SAFETY: aligned and within the slot, which is this process's memory; NICs write whole words.
    let word = unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address)) };
    Ok(word.load(Ordering::Acquire))
}

/// Waits until the peer has made a word `expected`.
pub(crate) fn wait_for(
    slot: &dyn SharedMemory,
    offset: usize,
    expected: u64,
    timeout: Duration,
) -> Result<()> {
    let deadline = Instant::now() + timeout;
    loop {
        let found = load(slot, offset)?;
        if found == expected {
            return Ok(());
        }
        if Instant::now() >= deadline {
            bail!(
                "the peer's flag at offset {offset} is {found} after {} s, expected {expected}",
                timeout.as_secs_f64()
            );
        }
        std::thread::yield_now();
    }
}

/// Fails at the first byte that is not that of the pattern.
pub(crate) fn expect(
    memory: &dyn SharedMemory,
    offset: usize,
    expected: &[u8],
    what: &str,
) -> Result<()> {
    let mut found = vec![0; expected.len()];
    memory.read(offset, &mut found)?;
    let differs = found.iter().zip(expected).position(|(found, expected)| found != expected);
    if let Some(at) = differs {
        bail!(
            "{what}: byte {at} of {} (offset {}) is {:#04x}, expected {:#04x}",
            expected.len(),
            offset + at,
            found[at],
            expected[at]
        );
    }
    Ok(())
}

/// Fails when a word is not `expected`.
pub(crate) fn expect_word(
    memory: &dyn SharedMemory,
    offset: usize,
    expected: u64,
    what: &str,
) -> Result<()> {
    let found = load(memory, offset)?;
    ensure!(
        found == expected,
        "{what} (offset {offset}) is {found:#018x}, expected {expected:#018x}"
    );
    Ok(())
}

/// Bytes that `seed` and `salt` determine (splitmix64).
pub(crate) fn pattern(seed: u64, salt: u64, len: usize) -> Vec<u8> {
    let mut state = seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend((word ^ word >> 31).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_do_not_overlap() {
        assert!(flag(63) + 8 <= COUNTER && FIELDS + 8 <= RING);
        assert!(area(63) + AREA_BYTES <= SLOT_BYTES && SLOT_BYTES.is_multiple_of(64));
    }

    #[test]
    fn patterns_differ_by_seed_and_salt() {
        assert_eq!(pattern(1, 2, 100), pattern(1, 2, 100));
        assert_ne!(pattern(1, 2, 100), pattern(1, 3, 100));
        assert_ne!(pattern(1, 2, 100), pattern(2, 2, 100));
        assert_eq!(pattern(7, 7, 13).len(), 13);
    }

    #[test]
    fn what_is_wrong_is_said_by_place() {
        let slot = HostAccess.alloc(SLOT_BYTES).unwrap();
        slot.write(64, &[1, 2, 3]).unwrap();
        let text = expect(slot.as_ref(), 64, &[1, 2, 4], "a put").unwrap_err().to_string();
        assert_eq!(text, "a put: byte 2 of 3 (offset 66) is 0x03, expected 0x04");
        let text = expect_word(slot.as_ref(), 128, 9, "a sum").unwrap_err().to_string();
        assert!(text.contains("0x0000000000000000, expected 0x0000000000000009"), "{text}");
        let wait = wait_for(slot.as_ref(), 0, 1, Duration::from_millis(1));
        assert!(wait.unwrap_err().to_string().contains("is 0 after 0.001 s, expected 1"));
    }
}
