//! The port of a peer, mapped here, and accesses to its memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use p2p_core::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Access, MAGIC, MemoryEntry, PortAddress, Tables, key_index, tables_of};
use crate::format::Syndrome;
use crate::memory::{self, SegmentError};

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

impl Peer {
    pub(crate) fn open(address: PortAddress) -> Result<Self, SegmentError> {
        let expected = size_of::<Tables>().next_multiple_of(4096) as u64;
        let tables = memory::open(address.pid, address.fd, expected)?;
        let found = tables_of(&tables);
        let is_ours = found.magic.load(Ordering::Acquire) == MAGIC
            && found.nonce.load(Ordering::Relaxed) == address.nonce;
        if !is_ours {
            return Err(SegmentError::System {
                call: "identification",
                what: format!(
                    "descriptor {} of process {}, which is not the NIC that the peer described,",
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

    /// Whether the peer answers. Checks the process at most once per millisecond.
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
                if let Some(num_suppressed) = self.refusals.note(Instant::now()) {
                    tracing::warn!(%error, num_suppressed, "cannot map a peer's registered memory");
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
    ) -> Result<MemoryPin<'_>, Syndrome> {
        const DENIED: Syndrome = Syndrome::RemoteAccess;
        let entry = self.tables().memory.get(key_index(rkey)).ok_or(DENIED)?;
        if rkey == 0 || entry.key.load(Ordering::Acquire) != rkey {
            return Err(DENIED);
        }
        // Pairs with `MemoryEntry::revoke`: either it sees this user, or the second read of the key sees that it
        // is revoked.
        entry.num_users.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut pinned = MemoryPin { ptr: std::ptr::null_mut(), is_relaxed: false, entry };
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
        // The peer can write the table, so its values are checked against our mapping.
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

/// A peer's memory, pinned while it is accessed: deregistration waits for that.
pub(crate) struct MemoryPin<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) is_relaxed: bool,
    entry: &'a MemoryEntry,
}

impl Drop for MemoryPin<'_> {
    fn drop(&mut self) {
        self.entry.num_users.fetch_sub(1, Ordering::Release);
    }
}

/// Failures to map memory of a peer. Any later request may cause one again.
#[derive(Debug, Default)]
struct Refusals {
    logged_at: Option<Instant>,
    num_suppressed: u64,
}

impl Refusals {
    /// Decides whether to log a failure at `now`. If so, returns the number of failures not logged since the last
    /// one.
    fn note(&mut self, now: Instant) -> Option<u64> {
        if self
            .logged_at
            .is_some_and(|logged_at| now.saturating_duration_since(logged_at) < LOG_INTERVAL)
        {
            self.num_suppressed += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.num_suppressed))
    }
}

const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Between two reports about one peer's memory.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::port::Port;

    /// Counts logged failures.
    #[derive(Default, Clone)]
    struct LogCounter(Arc<AtomicUsize>);

    impl Subscriber for LogCounter {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target().starts_with("switchyard_softnic")
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
    fn unmappable_memory_is_logged_once_for_many_requests() {
        let port = Port::create().unwrap();
        // A segment whose descriptor does not exist.
        let segment = &port.tables().segments[0];
        segment.fd.store(u32::MAX, Ordering::Relaxed);
        segment.bytes.store(4096, Ordering::Release);
        let mut peer = Peer::open(port.address()).unwrap();
        let counter = LogCounter::default();
        tracing::subscriber::with_default(counter.clone(), || {
            for _ in 0..1000 {
                peer.prepare(1 << 8);
            }
        });
        assert_eq!(counter.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn suppressed_failures_are_counted_in_the_next_report() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.note(start), Some(0));
        for _ in 0..7 {
            assert_eq!(refusals.note(start + LOG_INTERVAL / 2), None);
        }
        assert_eq!(refusals.note(start + LOG_INTERVAL), Some(7));
        assert_eq!(refusals.note(start + LOG_INTERVAL), None);
        assert_eq!(refusals.note(start + 2 * LOG_INTERVAL), Some(1));
    }
}
