//! Tables that a NIC publishes to the NICs of its peers: its identity, registered memory and queue pairs. They lie
//! in shared memory. A peer may write anything into them, so every reader checks them.

mod peer;

pub(crate) use self::peer::{MemoryPin, Peer};

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use p2p_core::Region;

use crate::memory::{Segment, SegmentError};

/// Rights to registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(u32);

impl Access {
    /// The NIC may write it on behalf of this side: the target of gets.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may write.
    pub const REMOTE_WRITE: Self = Self(2);
    /// Peers may read.
    pub const REMOTE_READ: Self = Self(4);
    /// Peers may do atomics.
    pub const REMOTE_ATOMIC: Self = Self(8);
    /// Writes may overtake each other on their path into memory; atomics never do.
    pub const RELAXED_ORDERING: Self = Self(16);
    /// Everything but relaxed ordering.
    pub const ALL: Self = Self(15);

    /// Both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` is granted.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Address of a NIC's port: process, descriptor, and a number that distinguishes it from later ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortAddress {
    /// Process.
    pub pid: u32,
    /// Descriptor in that process.
    pub fd: u32,
    /// Drawn at random when the port was made.
    pub nonce: u64,
}

impl PortAddress {
    /// Bytes of [`encode`](Self::encode).
    pub const BYTES: usize = 16;

    /// For a handshake.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.fd.to_le_bytes());
        bytes[8..].copy_from_slice(&self.nonce.to_le_bytes());
        bytes
    }

    /// Counterpart of [`encode`](Self::encode). `None` for another length.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; Self::BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let nonce = u64::from(word(8)) | u64::from(word(12)) << 32;
        Some(Self { pid: word(0), fd: word(4), nonce })
    }
}

/// A NIC's own port.
#[derive(Debug)]
pub(crate) struct Port {
    segment: Segment,
    address: PortAddress,
}

impl Port {
    pub(crate) fn create() -> Result<Self, SegmentError> {
        let segment = Segment::create(size_of::<Tables>())?;
        let pid = std::process::id();
        let address = PortAddress { pid, fd: segment.descriptor(), nonce: rand::random() };
        let port = Self { segment, address };
        let tables = port.tables();
        tables.nonce.store(address.nonce, Ordering::Relaxed);
        tables.is_up.store(1, Ordering::Relaxed);
        tables.magic.store(MAGIC, Ordering::Release);
        Ok(port)
    }

    pub(crate) const fn address(&self) -> PortAddress {
        self.address
    }

    pub(crate) fn tables(&self) -> &Tables {
        tables_of(self.segment.region())
    }

    /// Shows a segment; its index in the table. `None` when the table is full.
    pub(crate) fn show_segment(&self, segment: &Segment) -> Option<u32> {
        let table = &self.tables().segments;
        let descriptor = segment.descriptor();
        let free = table.iter().position(|entry| entry.bytes.load(Ordering::Relaxed) == 0)?;
        table[free].fd.store(descriptor, Ordering::Relaxed);
        table[free].generation.fetch_add(1, Ordering::Relaxed);
        table[free].bytes.store(segment.region().len() as u64, Ordering::Release);
        Some(free as u32)
    }

    pub(crate) fn hide_segment(&self, index: u32) {
        self.tables().segments[index as usize].bytes.store(0, Ordering::Release);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.tables().is_up.store(0, Ordering::Release);
    }
}

/// Index in the table of registered memory that a key stands for.
pub(crate) const fn key_index(key: u32) -> usize {
    (key >> 8 & 0xffff) as usize
}

/// Index in the table of queue pairs. `None` for a number that none can have.
pub(crate) fn qp_index(qpn: u32) -> Option<usize> {
    qpn.checked_sub(FIRST_QPN).map(|index| index as usize).filter(|index| *index < NUM_QPS)
}

/// Number of the queue pair at an index.
pub(crate) const fn qpn_of(index: usize) -> u32 {
    FIRST_QPN + index as u32
}

/// A port's memory. Only atomics, since both sides may write.
#[repr(C)]
pub(crate) struct Tables {
    magic: AtomicU64,
    nonce: AtomicU64,
    pub(crate) is_up: AtomicU32,
    reserved: AtomicU32,
    segments: [SegmentEntry; NUM_SEGMENTS],
    pub(crate) memory: [MemoryEntry; NUM_KEYS],
    pub(crate) qps: [QpEntry; NUM_QPS],
}

#[repr(C)]
struct SegmentEntry {
    bytes: AtomicU64, // 0: free
    fd: AtomicU32,
    generation: AtomicU32,
}

/// Content of a [`MemoryEntry`].
pub(crate) struct Grant {
    pub(crate) key: u32,
    pub(crate) access: Access,
    pub(crate) domain: u32,
    pub(crate) segment: u32,
    pub(crate) address: u64,
    pub(crate) num_bytes: u64,
    /// Offset of the first byte within the segment.
    pub(crate) offset: usize,
}

/// Registered memory.
#[repr(C, align(64))]
pub(crate) struct MemoryEntry {
    key: AtomicU32, // 0: none
    num_users: AtomicU32,
    access: AtomicU32,
    domain: AtomicU32,
    segment: AtomicU32,
    reserved: AtomicU32,
    address: AtomicU64,
    bytes: AtomicU64,
    offset: AtomicU64,
}

impl MemoryEntry {
    pub(crate) fn grant(&self, grant: &Grant) {
        self.access.store(grant.access.0, Ordering::Relaxed);
        self.domain.store(grant.domain, Ordering::Relaxed);
        self.segment.store(grant.segment, Ordering::Relaxed);
        self.address.store(grant.address, Ordering::Relaxed);
        self.bytes.store(grant.num_bytes, Ordering::Relaxed);
        self.offset.store(grant.offset as u64, Ordering::Relaxed);
        self.key.store(grant.key, Ordering::Release);
    }

    /// Revokes the key and waits for accesses under way. Returns `false` when a peer does not end its access
    /// within `limit`, for example because it died.
    pub(crate) fn revoke(&self, limit: Duration) -> bool {
        self.key.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let start = Instant::now();
        while self.num_users.load(Ordering::Acquire) != 0 {
            if start.elapsed() > limit {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Makes a retired entry usable again.
    pub(crate) fn is_free(&self) -> bool {
        self.key.load(Ordering::Relaxed) == 0 && self.num_users.load(Ordering::Acquire) == 0
    }
}

/// States of a queue pair, as peers see them.
pub(crate) mod state {
    pub(crate) const NONE: u32 = 0;
    pub(crate) const RESET: u32 = 1;
    pub(crate) const READY: u32 = 2;
    pub(crate) const ERROR: u32 = 3;
}

/// A queue pair, as its peer sees it.
#[repr(C, align(64))]
pub(crate) struct QpEntry {
    pub(crate) state: AtomicU32,
    pub(crate) peer_qpn: AtomicU32,
    pub(crate) domain: AtomicU32,
    /// Receives that its owner has posted, and that writes with immediate data have used up.
    pub(crate) num_receives: AtomicU32,
    pub(crate) num_used: AtomicU32,
    reserved: AtomicU32,
    pub(crate) inbox_head: AtomicU64,
    pub(crate) inbox: [InboxEntry; NUM_INBOX],
}

/// A write with immediate data that arrived and is to become a completion.
#[repr(C)]
pub(crate) struct InboxEntry {
    pub(crate) imm: AtomicU32,
    pub(crate) num_bytes: AtomicU32,
}

fn tables_of(region: &Region) -> &Tables {
    debug_assert!(region.len() >= size_of::<Tables>());
    // SAFETY: the region is at least that large (checked when made or opened) and page-aligned. It stays mapped as
    // long as the reference lives. It consists of atomics, for which every bit pattern is valid.
    unsafe { region.as_ptr().cast::<Tables>().as_ref() }
}

const MAGIC: u64 = u64::from_le_bytes(*b"SYSOFTN1");
pub(crate) const FIRST_QPN: u32 = 0x40;
pub(crate) const NUM_SEGMENTS: usize = 1024;
pub(crate) const NUM_KEYS: usize = 2048;
pub(crate) const NUM_QPS: usize = 512;
pub(crate) const NUM_INBOX: usize = 64;
const _: () = assert!(size_of::<MemoryEntry>() == 64);
