//! A queue as a poster of raw bytes sees it.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use switchyard_softnic::Segment;
use switchyard_softnic::abi::QueueHandle;
use switchyard_softnic::format::{BLOCK_BYTES, CQE_BYTES, Cqe, doorbell_word};

pub fn word32(address: u64) -> &'static AtomicU32 {
    assert!(address.is_multiple_of(4));
    // SAFETY: aligned; callers name words of segments that outlive every use of the reference.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }
}

pub fn word64(address: u64) -> &'static AtomicU64 {
    assert!(address.is_multiple_of(8));
    // SAFETY: as for `word32`.
    unsafe { AtomicU64::from_ptr(address as *mut u64) }
}

fn store_bytes(address: u64, bytes: &[u8]) {
    for (i, chunk) in bytes.chunks_exact(8).enumerate() {
        let value = u64::from_ne_bytes(chunk.try_into().unwrap());
        word64(address + i as u64 * 8).store(value, Ordering::Relaxed);
    }
}

/// The bytes of a segment, as far as they are there.
pub fn bytes_of(segment: &Segment, offset: usize, num_bytes: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(num_bytes);
    for at in (offset..offset + num_bytes).step_by(8) {
        bytes.extend(word64(segment.address(at)).load(Ordering::Relaxed).to_ne_bytes());
    }
    bytes
}

/// A queue, and how far it is.
#[derive(Debug)]
pub struct Raw {
    pub handle: QueueHandle,
    posted: u64,
    taken: u64,
}

impl Raw {
    pub const fn new(handle: QueueHandle) -> Self {
        Self { handle, posted: 0, taken: 0 }
    }

    pub const fn posted(&self) -> u64 {
        self.posted
    }

    pub const fn forget(&mut self) {
        (self.posted, self.taken) = (0, 0);
    }

    /// Writes a block without a word to the NIC.
    pub fn write(&mut self, block: &[u8; BLOCK_BYTES]) {
        let slot = self.posted % u64::from(self.handle.sq_depth);
        store_bytes(self.handle.sq + slot * BLOCK_BYTES as u64, block);
        self.posted += 1;
    }

    /// Announces all written requests.
    pub fn ring(&self) {
        self.ring_as(self.handle.qpn, self.posted, self.posted);
    }

    /// Announces blocks of a queue pair up to `end`, and in the record up to `record`.
    pub fn ring_as(&self, qpn: u32, end: u64, record: u64) {
        let record = (record & 0xffff) as u32;
        word32(self.handle.dbrec + 4).store(record.to_be(), Ordering::Release);
        word64(self.handle.doorbell).store(doorbell_word(qpn, end), Ordering::Release);
    }

    /// The next completion of a ring, if it is there.
    pub fn take(&mut self) -> Option<Cqe> {
        let depth = u64::from(self.handle.cq_depth);
        let at = self.handle.cq + self.taken % depth * CQE_BYTES as u64;
        let cqe = cqe_at(at, Some(self.taken & depth != 0))?;
        self.taken += 1;
        let consumed = (self.taken & 0xff_ffff) as u32;
        word32(self.handle.cq_dbrec).store(consumed.to_be(), Ordering::Release);
        Some(cqe)
    }

    /// The one completion of a collapsed queue, if there was any. Its owner bit is not checked.
    pub fn last(&self) -> Option<Cqe> {
        cqe_at(self.handle.cq, None)
    }
}

/// The completion at an address; with an owner only one of its round.
pub fn cqe_at(address: u64, owner: Option<bool>) -> Option<Cqe> {
    // The last word is stored last.
    let tail = word64(address + 56).load(Ordering::Acquire).to_ne_bytes();
    if tail[7] >> 4 == 0xf || owner.is_some_and(|owner| (tail[7] & 1 != 0) != owner) {
        return None;
    }
    let mut bytes = [0; CQE_BYTES];
    for at in 0..8 {
        let value = word64(address + at * 8).load(Ordering::Relaxed);
        bytes[at as usize * 8..][..8].copy_from_slice(&value.to_ne_bytes());
    }
    bytes[56..].copy_from_slice(&tail);
    let (cqe, _) = Cqe::decode(&bytes).expect("a completion of a known kind");
    Some(cqe)
}
