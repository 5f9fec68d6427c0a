//! The host's own queue to a peer: adds of 8 bytes to words of the slot that the kernels' queues lead to.
//!
//! Kernels and the host never post on the same queue: their atomics on its counts would not be atomic to one
//! another over every bus. The peer's NIC adds both kinds of signals to one word.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use ibgda::{
    Access, Doorbell, HostAccess, Nic, OpenPeer, Peer, PeerConfig, PeerError, Posters, QueueConfig,
    QueuePath,
};
use kernels::mlx5::QueueHandle;
use p2p_core::PostError;
use p2p_core::endpoint::checks::check_flag;

/// The queue before the peer's is known.
#[derive(Debug)]
pub struct OpenHeartbeatQueue(OpenPeer);

impl OpenHeartbeatQueue {
    /// Makes the queue, by libibverbs, in memory of the process. `like` has its timeouts for acknowledgements.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn open(nic: &Arc<Nic>, like: &QueueConfig) -> Result<Self, PeerError> {
        let queue = QueueConfig {
            path: QueuePath::Plain,
            depth: DEPTH,
            posters: Posters::OneBlock,
            doorbell: Doorbell::WithRecord,
            max_message_bytes: 8,
            num_receives: 0,
            ..*like
        };
        let access: Arc<dyn Access> = Arc::new(HostAccess);
        // No data uses this slot: the queue accesses that of the kernels.
        let (own_slot_bytes, peer_slot_bytes) = (SLOT_BYTES, SLOT_BYTES);
        let config = PeerConfig { peer: 0, num_queues: 1, queue, own_slot_bytes, peer_slot_bytes };
        OpenPeer::open(nic, &access, config).map(Self)
    }

    /// As [`OpenPeer::description`].
    #[must_use]
    pub fn description(&self) -> Vec<u8> {
        self.0.description()
    }

    /// Connects the queue. Adds go to the slot of `target`.
    ///
    /// # Errors
    /// [`PeerError`], also for invalid bytes of the peer.
    pub fn join(self, description: &[u8], target: Target) -> Result<HeartbeatQueue, PeerError> {
        let peer = self.0.join(description)?;
        let missing = PeerError::Handle("the host's queue is not there");
        let queue = peer.queues().first().ok_or(missing)?.handle();
        let poster = Poster { queue, posted: 0, completed: 0, cq_index: 0 };
        Ok(HeartbeatQueue { poster, target, error: None, _peer: peer })
    }
}

/// The slot at the peer that adds go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its address.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Its remote key.
    pub rkey: u32,
}

/// The connected queue. One thread at a time posts.
#[derive(Debug)]
pub struct HeartbeatQueue {
    poster: Poster,
    target: Target,
    error: Option<Failure>,
    /// Owner of the memory that the poster names.
    _peer: Peer,
}

/// The NIC completed an add with an error, or a request that was never posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Failure {
    qpn: u32,
    syndrome: u8,
    vendor: u8,
    counter: u16,
}

impl HeartbeatQueue {
    /// Adds 1 to the word at `offset`, unless many adds are under way: those suffice as a sign of life.
    ///
    /// # Errors
    /// [`PostError`]; after the first failure every call fails.
    pub fn add(&mut self, offset: u64) -> Result<(), PostError> {
        const OP: &str = "show_life";
        let Target { address, bytes, rkey } = self.target;
        check_flag(OP, offset as usize, bytes as usize)?;
        self.health(OP)?;
        if self.poster.posted - self.poster.completed < MOST_UNDER_WAY {
            self.poster.post(address + offset, rkey, 1);
        }
        Ok(())
    }

    /// Polls for completions.
    ///
    /// # Errors
    /// [`PostError::Transport`]; after the first failure every call fails.
    pub fn health(&mut self, op: &'static str) -> Result<(), PostError> {
        if self.error.is_none() {
            self.error = self.poster.poll().err();
        }
        match self.error {
            None => Ok(()),
            Some(Failure { qpn, syndrome, vendor, counter }) => {
                let detail = format!(
                    "the host's queue pair {qpn:#x} is out of service: syndrome {syndrome:#04x}, vendor \
                     {vendor:#04x}, index {counter:#06x}"
                );
                Err(PostError::Transport { op, code: i64::from(syndrome), detail })
            }
        }
    }

    /// Adds that the NIC has completed.
    #[must_use]
    pub const fn completed(&self) -> u64 {
        self.poster.completed
    }
}

/// Requests of one block each on a queue without other posters, with a ring of completions.
#[derive(Debug)]
struct Poster {
    queue: QueueHandle,
    posted: u64,
    completed: u64,
    cq_index: u64,
}

impl Poster {
    fn poll(&mut self) -> Result<(), Failure> {
        let begin = self.cq_index;
        let queue = self.queue;
        let depth = u64::from(queue.cq_depth);
        while self.completed < self.posted {
            let entry = queue.cq + (self.cq_index & (depth - 1)) * BLOCK_BYTES;
            // SYNC POINT `completion`: pairs with the NIC's store of its last bytes.
            let tail = self.word32(entry + 60).load(Ordering::Acquire).to_ne_bytes();
            let (opcode, owner) = (tail[3] >> 4, tail[3] & 1);
            let expected = u8::from(self.cq_index & depth != 0);
            if opcode == CQE_INVALID || owner != expected {
                break;
            }
            let counter = u16::from_be_bytes([tail[0], tail[1]]);
            let end = counter.wrapping_add(1);
            let completed = self.completed + u64::from(end.wrapping_sub(self.completed as u16));
            if opcode != CQE_REQUEST || completed > self.posted {
                let [_, _, vendor, syndrome] =
                    self.word32(entry + 52).load(Ordering::Relaxed).to_ne_bytes();
                return Err(Failure { qpn: queue.qpn, syndrome, vendor, counter });
            }
            self.completed = completed;
            self.cq_index += 1;
        }
        if self.cq_index != begin {
            let consumed = (self.cq_index & 0xff_ffff) as u32;
            // Behind the reads of the entries.
            self.word32(queue.cq_dbrec).store(consumed.to_be(), Ordering::Release);
        }
        Ok(())
    }

    /// A word of the queue.
    fn word32(&self, address: u64) -> &AtomicU32 {
        // SAFETY: aligned addresses of pieces of a queue, which the owner of the poster keeps as long. NIC and
        // poster use them by whole words.
        unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(address as usize)) }
    }

    /// As [`word32`](Self::word32).
    fn word64(&self, address: u64) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(address as usize)) }
    }

    /// There is room.
    fn post(&mut self, address: u64, rkey: u32, value: u64) {
        let queue = self.queue;
        let local = (queue.scratch, queue.scratch_lkey);
        let words = add_request(queue.qpn, self.posted as u16, (address, rkey), local, value);
        let depth = u64::from(queue.sq_depth);
        let block = queue.sq + (self.posted & (depth - 1)) * BLOCK_BYTES;
        for (word, at) in words.into_iter().zip((block..).step_by(8)) {
            self.word64(at).store(word, Ordering::Relaxed);
        }
        self.posted += 1;
        let end = (self.posted & 0xffff) as u32;
        // SYNC POINT `doorbell`: block, record, register.
        self.word32(queue.dbrec + 4).store(end.to_be(), Ordering::Release);
        let doorbell = [(end << 8).to_be_bytes(), (queue.qpn << 8).to_be_bytes()];
        let doorbell = u64::from_ne_bytes(doorbell.as_flattened().try_into().unwrap_or_default());
        // NOTES: the register may be mapped write-combined.
        flush_write_combining();
        self.word64(queue.doorbell).store(doorbell, Ordering::Release);
        flush_write_combining();
    }
}

/// A fetch-and-add of 8 bytes with a completion, as `make_fetch_add` of `comm/mlx5/wqe.h`.
fn add_request(
    qpn: u32,
    index: u16,
    (remote, rkey): (u64, u32),
    (local, lkey): (u64, u32),
    value: u64,
) -> [u64; 8] {
    let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let head = u32::from(index) << 8 | OPCODE_FETCH_ADD;
    let words = [
        pair(head, qpn << 8 | NUM_SEGMENTS),
        pair(CE_ALWAYS, 0),
        remote,
        pair(rkey, 0),
        value,
        0,
        pair(8, lkey),
        local,
    ];
    words.map(u64::to_be)
}

fn flush_write_combining() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier.
    unsafe {
        std::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    fence(Ordering::SeqCst);
}

/// Blocks of the queue.
const DEPTH: u32 = 128;
/// Adds under way that suffice as a sign of life.
const MOST_UNDER_WAY: u64 = 16;
const SLOT_BYTES: usize = 64;
/// Bytes of a block and of a completion.
const BLOCK_BYTES: u64 = 64;
/// `SY_MLX5_OPCODE_ATOMIC_FA`
const OPCODE_FETCH_ADD: u32 = 0x12;
const NUM_SEGMENTS: u32 = 4;
/// `SY_MLX5_CE_ALWAYS`, in the word of the flags.
const CE_ALWAYS: u32 = 0x08;
/// `SY_MLX5_CQE_REQ`
const CQE_REQUEST: u8 = 0x0;
/// `SY_MLX5_CQE_INVALID`
const CQE_INVALID: u8 = 0xf;

#[cfg(test)]
mod tests {
    use softnic::format::{Atomic, CE_ALWAYS, Local, Operation, Remote, Wqe};

    use super::*;

    #[test]
    fn an_add_is_what_the_format_says() {
        let (address, rkey) = (0x1234_5678_9abc_def0, 0x4242_0001);
        let (scratch, lkey) = (0x7f00_1234_5000, 0xbeef_0002);
        for (qpn, index, value) in [(0x40, 0, 1), (0xff_ffff, 0xfffe, u64::MAX - 2)] {
            let words = add_request(qpn, index, (address, rkey), (scratch, lkey), value);
            let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
            let remote = Remote { address, rkey };
            let local = Local { address: scratch, lkey, num_bytes: 8 };
            let operation = Operation::Atomic(remote, Atomic::Add8(value), local);
            assert_eq!(bytes, Wqe { qpn, index, flags: CE_ALWAYS, operation }.encode());
        }
    }
}
