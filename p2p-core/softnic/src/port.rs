//! What a NIC shows to the NICs of its peers: who it is, what is registered, which queue pairs exist.
//! It lies in shared memory, and a peer may write anything into it; whoever reads it checks.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use p2p_core::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::format::Syndrome;
use crate::memory::{self, Segment, SegmentError};

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
    /// Writes may pass each other on their way into memory; atomics never do.
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

/// Where a NIC's port is found: process, descriptor, and a number that tells it from later ones.
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

/// A peer's port, mapped here.
#[derive(Debug)]
pub(crate) struct Peer {
    address: PortAddress,
    tables: Region,
    segments: Vec<Option<(u32, Region)>>,
    process: Option<OwnedFd>,
    checked: Option<Instant>,
    is_dead: bool,
    refusals: Refusals,
}

/// Failures to map memory of a peer, which any request may meet again.
#[derive(Debug, Default)]
struct Refusals {
    told_at: Option<Instant>,
    num_untold: u64,
}

impl Refusals {
    /// Whether a failure at `now` is to be told, and then how many were not since the last one.
    fn note(&mut self, now: Instant) -> Option<u64> {
        if self
            .told_at
            .is_some_and(|told_at| now.saturating_duration_since(told_at) < TELL_INTERVAL)
        {
            self.num_untold += 1;
            return None;
        }
        self.told_at = Some(now);
        Some(std::mem::take(&mut self.num_untold))
    }
}

/// A peer's memory, pinned while it is accessed: deregistration waits for that.
pub(crate) struct Pinned<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) is_relaxed: bool,
    entry: &'a MemoryEntry,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.entry.num_users.fetch_sub(1, Ordering::Release);
    }
}

impl Peer {
    pub(crate) fn open(address: PortAddress) -> Result<Self, SegmentError> {
        let expected = size_of::<Tables>().next_multiple_of(4096) as u64;
        let tables = memory::open(address.pid, address.fd, expected)?;
        let found = tables_of(&tables);
        let is_ours = found.magic.load(Ordering::Acquire) == MAGIC
            && found.nonce.load(Ordering::Relaxed) == address.nonce;
        if !is_ours {
            return Err(SegmentError::System {
                call: "look",
                what: format!(
                    "descriptor {} of process {} is not the NIC that the peer described",
                    address.fd, address.pid
                ),
                source: std::io::ErrorKind::NotFound.into(),
            });
        }
        let own = address.pid == std::process::id();
        let process = i32::try_from(address.pid).ok().filter(|_| !own).and_then(Pid::from_raw);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let is_dead = !own && process.is_none();
        let (segments, refusals) = (Vec::new(), Refusals::default());
        Ok(Self { address, tables, segments, process, checked: None, is_dead, refusals })
    }

    pub(crate) const fn address(&self) -> PortAddress {
        self.address
    }

    pub(crate) fn tables(&self) -> &Tables {
        tables_of(&self.tables)
    }

    /// Whether anybody answers. The process is looked at once per millisecond at most.
    pub(crate) fn is_alive(&mut self) -> bool {
        if self.is_dead || self.tables().is_up.load(Ordering::Acquire) != 1 {
            self.is_dead = true;
            return false;
        }
        let Some(process) = &self.process else { return true };
        let now = Instant::now();
        if self.checked.is_some_and(|checked| now - checked < CHECK_INTERVAL) {
            return true;
        }
        self.checked = Some(now);
        let mut fds = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
        let ended = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        self.is_dead = ended.is_ok_and(|num_ready| num_ready > 0);
        !self.is_dead
    }

    /// Maps the segment behind `rkey` if it is not yet. Called before [`pin`](Self::pin).
    pub(crate) fn prepare(&mut self, rkey: u32) {
        let Some(entry) = self.tables().memory.get(key_index(rkey)) else { return };
        let index = entry.segment.load(Ordering::Relaxed) as usize;
        let Some(segment) = self.tables().segments.get(index) else { return };
        let (bytes, fd) =
            (segment.bytes.load(Ordering::Acquire), segment.fd.load(Ordering::Relaxed));
        let generation = segment.generation.load(Ordering::Relaxed);
        let is_known = self
            .segments
            .get(index)
            .is_some_and(|known| known.as_ref().is_some_and(|(of, _)| *of == generation));
        if is_known || bytes == 0 {
            return;
        }
        match memory::open(self.address.pid, fd, bytes) {
            Ok(region) => {
                if self.segments.len() <= index {
                    self.segments.resize_with(index + 1, || None);
                }
                self.segments[index] = Some((generation, region));
            }
            Err(error) => {
                if let Some(num_untold) = self.refusals.note(Instant::now()) {
                    tracing::warn!(%error, num_untold, "cannot map a peer's registered memory");
                }
            }
        }
    }

    /// Checks an access of `num_bytes` at `address` as the peer's NIC does.
    pub(crate) fn pin(
        &self,
        domain: u32,
        rkey: u32,
        address: u64,
        num_bytes: u64,
        access: Access,
    ) -> Result<Pinned<'_>, Syndrome> {
        const DENIED: Syndrome = Syndrome::RemoteAccess;
        let entry = self.tables().memory.get(key_index(rkey)).ok_or(DENIED)?;
        if rkey == 0 || entry.key.load(Ordering::Acquire) != rkey {
            return Err(DENIED);
        }
        // Pairs with `MemoryEntry::revoke`: either it sees this user, or the second look at the key
        // sees that it is revoked.
        entry.num_users.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut pinned = Pinned { ptr: std::ptr::null_mut(), is_relaxed: false, entry };
        if entry.key.load(Ordering::SeqCst) != rkey
            || entry.domain.load(Ordering::Relaxed) != domain
        {
            return Err(DENIED);
        }
        let granted = Access(entry.access.load(Ordering::Relaxed));
        let start = address.checked_sub(entry.address.load(Ordering::Relaxed)).ok_or(DENIED)?;
        let end = start.checked_add(num_bytes).ok_or(DENIED)?;
        if !granted.contains(access) || end > entry.bytes.load(Ordering::Relaxed) {
            return Err(DENIED);
        }
        // The table is the peer's to write, so what it leads to is checked against our mapping.
        let index = entry.segment.load(Ordering::Relaxed) as usize;
        let (_, region) =
            self.segments.get(index).and_then(Option::as_ref).ok_or(Syndrome::RemoteOp)?;
        let offset = start
            .checked_add(entry.offset.load(Ordering::Relaxed))
            .filter(|offset| {
                offset.checked_add(num_bytes).is_some_and(|end| end <= region.len() as u64)
            })
            .ok_or(Syndrome::RemoteOp)?;
        // SAFETY: offset + num_bytes <= the mapping's length.
        pinned.ptr = unsafe { region.as_ptr().as_ptr().add(offset as usize) };
        pinned.is_relaxed = granted.contains(Access::RELAXED_ORDERING);
        Ok(pinned)
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

/// What a [`MemoryEntry`] is made of.
pub(crate) struct Grant {
    pub(crate) key: u32,
    pub(crate) access: Access,
    pub(crate) domain: u32,
    pub(crate) segment: u32,
    pub(crate) address: u64,
    pub(crate) num_bytes: u64,
    /// Of the first byte within the segment.
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

    /// Takes the key back and waits until nobody is in the middle of an access. `false` when a peer
    /// does not come to an end within `limit`, as one that died in it.
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
    // SAFETY: the region is at least that large (checked when made or opened), page-aligned, mapped as
    // long as the reference lives, and consists of atomics, for which every bit pattern is valid.
    unsafe { region.as_ptr().cast::<Tables>().as_ref() }
}

const MAGIC: u64 = u64::from_le_bytes(*b"SYSOFTN1");
pub(crate) const FIRST_QPN: u32 = 0x40;
pub(crate) const NUM_SEGMENTS: usize = 1024;
pub(crate) const NUM_KEYS: usize = 2048;
pub(crate) const NUM_QPS: usize = 512;
pub(crate) const NUM_INBOX: usize = 64;
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Between two reports about one peer's memory.
const TELL_INTERVAL: Duration = Duration::from_secs(60);
const _: () = assert!(size_of::<MemoryEntry>() == 64);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Counts what is told.
    #[derive(Default, Clone)]
    struct Told(Arc<AtomicUsize>);

    impl Subscriber for Told {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target().starts_with("softnic")
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn memory_that_cannot_be_mapped_is_told_once_for_many_requests() {
        let port = Port::create().unwrap();
        // A segment under a descriptor that nobody has.
        let segment = &port.tables().segments[0];
        segment.fd.store(u32::MAX, Ordering::Relaxed);
        segment.bytes.store(4096, Ordering::Release);
        let mut peer = Peer::open(port.address()).unwrap();
        let told = Told::default();
        tracing::subscriber::with_default(told.clone(), || {
            for _ in 0..1000 {
                peer.prepare(1 << 8);
            }
        });
        assert_eq!(told.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn failures_that_were_not_told_are_counted_in_the_next_report() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.note(start), Some(0));
        for _ in 0..7 {
            assert_eq!(refusals.note(start + TELL_INTERVAL / 2), None);
        }
        assert_eq!(refusals.note(start + TELL_INTERVAL), Some(7));
        assert_eq!(refusals.note(start + TELL_INTERVAL), None);
        assert_eq!(refusals.note(start + 2 * TELL_INTERVAL), Some(1));
    }
}
