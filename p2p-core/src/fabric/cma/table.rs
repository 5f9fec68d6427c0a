//! The table that two sides share: what the owner allows, and what it is doing.
//!
//! One memory file per fabric, mapped by every peer:
//!
//! ```text
//! 0        header: magic, instance
//! 4096     per peer, 64 bytes: gate (the owner lets it in), busy (key that the owner uses at it)
//! 266240   per registration, 32 bytes: key, address, bytes, rights
//! ```
//!
//! SYNC POINT: cma-revoke. The initiator stores `busy` in its own table and then loads the gate and the
//! key from the target's; the target stores the gate or the key and then loads `busy` from the
//! initiator's. Both have a full fence between, so at least one of them sees the other: the initiator
//! does not copy, or the target waits for it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::fabric::Access;
use crate::fabric::memory::{Entry, MAX_REGIONS};
use crate::host::HostIdentity;
use crate::region::Region;

/// Most peers of a fabric.
pub(super) const MAX_PEERS: usize = 4096;

/// This side's table.
#[derive(Debug)]
pub(super) struct OwnTable {
    map: Region,
    file: OwnedFd,
    host: HostIdentity,
    pid_namespace: u64,
    instance: u64,
    /// Holds `instance`, where peers read it to see whether they can.
    probe: Box<[u8; 8]>,
}

/// A peer's table.
#[derive(Debug)]
pub(super) struct PeerTable {
    map: Region,
}

/// What a peer has to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Detail {
    pub(super) pid: i32,
    descriptor: i32,
    pub(super) instance: u64,
    pub(super) probe_address: u64,
    /// The peer's place in the table.
    pub(super) place: u32,
    boot_id: [u8; 16],
    pid_namespace: u64,
}

/// What a key opens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grant {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) access: Access,
}

/// Up while this side copies.
pub(super) struct Busy<'a> {
    word: &'a AtomicU64,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        // Release: what was copied is in place for whoever sees this.
        self.word.store(0, Ordering::Release);
    }
}

impl OwnTable {
    pub(super) fn new() -> io::Result<Self> {
        let file = memfd_create("switchyard-cma", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, TABLE_BYTES as u64)?;
        let map = map_table(&file)?;
        let instance: u64 = rand::random();
        let pid_namespace = std::fs::metadata("/proc/self/ns/pid")
            .map_or_else(|_| rand::random(), |meta| std::os::unix::fs::MetadataExt::ino(&meta));
        let table = Self {
            map,
            file,
            host: HostIdentity::of_this_process(),
            pid_namespace,
            instance,
            probe: Box::new(instance.to_le_bytes()),
        };
        word(&table.map, 8).store(instance, Ordering::Relaxed);
        word(&table.map, 0).store(MAGIC, Ordering::Release);
        Ok(table)
    }

    /// What the peer in `place` has to know.
    pub(super) fn detail(&self, place: usize) -> Detail {
        Detail {
            pid: std::process::id().cast_signed(),
            descriptor: self.file.as_raw_fd(),
            instance: self.instance,
            probe_address: self.probe.as_ptr() as u64,
            place: place as u32,
            boot_id: self.host.boot_id,
            pid_namespace: self.pid_namespace,
        }
    }

    /// Why the peer's numbers mean nothing here, if so.
    pub(super) fn check_host(&self, peer: &Detail) -> Result<(), String> {
        if peer.boot_id != self.host.boot_id {
            return Err("the peers run on different hosts".to_owned());
        }
        if peer.pid_namespace != self.pid_namespace {
            return Err("the peers run in different process namespaces".to_owned());
        }
        Ok(())
    }

    /// Announces a copy with `key` at the peer in `place`.
    pub(super) fn announce(&self, place: usize, key: u64) -> Busy<'_> {
        let word = word(&self.map, peer_at(place) + 8);
        word.store(key, Ordering::SeqCst);
        // SYNC POINT: cma-revoke.
        fence(Ordering::SeqCst);
        Busy { word }
    }

    pub(super) fn open_gate(&self, place: usize) {
        word(&self.map, peer_at(place)).store(1, Ordering::Release);
    }

    pub(super) fn close_gate(&self, place: usize) {
        word(&self.map, peer_at(place)).store(0, Ordering::SeqCst);
        // SYNC POINT: cma-revoke.
        fence(Ordering::SeqCst);
    }

    pub(super) fn publish(&self, idx: usize, entry: &Entry) {
        let at = region_at(idx);
        let access = match entry.access {
            Access::Local => return,
            Access::RemoteRead => 1,
            Access::RemoteReadWrite => 2,
        };
        word(&self.map, at + 8).store(entry.ptr.as_ptr() as u64, Ordering::Relaxed);
        word(&self.map, at + 16).store(entry.bytes, Ordering::Relaxed);
        word(&self.map, at + 24).store(access, Ordering::Relaxed);
        word(&self.map, at).store(entry.key, Ordering::Release);
    }

    pub(super) fn revoke(&self, idx: usize) {
        word(&self.map, region_at(idx)).store(0, Ordering::SeqCst);
        // SYNC POINT: cma-revoke.
        fence(Ordering::SeqCst);
    }
}

impl PeerTable {
    /// Maps the table that the peer describes.
    pub(super) fn open(detail: &Detail) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{}", detail.pid, detail.descriptor);
        let file = File::options().read(true).open(path)?;
        let mut head = [0; 16];
        file.read_exact_at(&mut head, 0)?;
        let expected = [MAGIC.to_le_bytes(), detail.instance.to_le_bytes()].concat();
        if head[..] != expected || file.metadata()?.len() != TABLE_BYTES as u64 {
            let what = "the peer's descriptor is not its table";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let file = OwnedFd::from(file);
        Ok(Self { map: map_peer(&file)? })
    }

    /// Whether the peer lets in whoever has `place` in its table.
    pub(super) fn admits(&self, place: usize) -> bool {
        word(&self.map, peer_at(place)).load(Ordering::SeqCst) == 1
    }

    /// The key that the peer uses at whoever has `place` in its table; 0 for none.
    pub(super) fn announced(&self, place: usize) -> u64 {
        word(&self.map, peer_at(place) + 8).load(Ordering::SeqCst)
    }

    /// What `key` opens, if it is in force.
    pub(super) fn grant(&self, key: u64) -> Option<Grant> {
        let idx = crate::fabric::memory::index_of(crate::fabric::RegionId(key as u32));
        if idx >= MAX_REGIONS || key == 0 {
            return None;
        }
        let at = region_at(idx);
        if word(&self.map, at).load(Ordering::SeqCst) != key {
            return None;
        }
        let access = match word(&self.map, at + 24).load(Ordering::Relaxed) {
            1 => Access::RemoteRead,
            2 => Access::RemoteReadWrite,
            _ => return None,
        };
        let address = word(&self.map, at + 8).load(Ordering::Relaxed);
        let bytes = word(&self.map, at + 16).load(Ordering::Relaxed);
        // A table that wraps around is not one of ours.
        address.checked_add(bytes)?;
        Some(Grant { address, bytes, access })
    }
}

impl Detail {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(DETAIL_BYTES);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.pid.to_le_bytes());
        out.extend(self.descriptor.to_le_bytes());
        out.extend(self.place.to_le_bytes());
        out.extend(self.instance.to_le_bytes());
        out.extend(self.probe_address.to_le_bytes());
        out.extend(self.pid_namespace.to_le_bytes());
        out.extend(self.boot_id);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let found: &[u8; DETAIL_BYTES] = bytes.try_into().map_err(|_| {
            format!("the peer describes itself in {} bytes, expected {DETAIL_BYTES}", bytes.len())
        })?;
        let half = |at: usize| {
            let mut half = [0; 4];
            half.copy_from_slice(&found[at..at + 4]);
            u32::from_le_bytes(half)
        };
        let word = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
        if half(0) != VERSION {
            return Err(format!("the peer speaks version {}, this side {VERSION}", half(0)));
        }
        let (pid, descriptor) = (half(4).cast_signed(), half(8).cast_signed());
        if pid <= 0 || descriptor < 0 {
            return Err("the peer names no process or no descriptor".to_owned());
        }
        let mut boot_id = [0; 16];
        boot_id.copy_from_slice(&found[40..]);
        Ok(Self {
            pid,
            descriptor,
            place: half(12),
            instance: word(16),
            probe_address: word(24),
            pid_namespace: word(32),
            boot_id,
        })
    }
}

/// A word of a table. The offset is inside by construction.
fn word(map: &Region, at: usize) -> &AtomicU64 {
    debug_assert!(at.is_multiple_of(8) && at + 8 <= TABLE_BYTES);
    // SAFETY: inside the mapping, aligned, and only ever reached by atomics.
    unsafe { AtomicU64::from_ptr(map.as_ptr().as_ptr().add(at).cast()) }
}

const fn peer_at(place: usize) -> usize {
    PEERS_AT + place * 64
}

const fn region_at(idx: usize) -> usize {
    REGIONS_AT + idx * 32
}

fn map_table(file: &OwnedFd) -> io::Result<Region> {
    map(file, ProtFlags::READ | ProtFlags::WRITE)
}

fn map_peer(file: &OwnedFd) -> io::Result<Region> {
    map(file, ProtFlags::READ)
}

fn map(file: &OwnedFd, protection: ProtFlags) -> io::Result<Region> {
    // SAFETY: a fresh mapping at an address that the kernel chooses aliases nothing.
    let ptr =
        unsafe { mmap(std::ptr::null_mut(), TABLE_BYTES, protection, MapFlags::SHARED, file, 0) }?;
    // SAFETY: just mapped whole, and nobody else unmaps it. A peer's table is only read.
    unsafe { Region::from_raw(ptr.cast(), TABLE_BYTES) }
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

const MAGIC: u64 = u64::from_le_bytes(*b"SYCMATAB");
const VERSION: u32 = 1;
const DETAIL_BYTES: usize = 56;
const PEERS_AT: usize = 4096;
const REGIONS_AT: usize = PEERS_AT + MAX_PEERS * 64;
const TABLE_BYTES: usize = REGIONS_AT + MAX_REGIONS * 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_peer_sees_what_the_owner_publishes_and_revokes() {
        let own = OwnTable::new().unwrap();
        let detail = own.detail(3);
        assert_eq!(Detail::decode(&detail.encode()), Ok(detail));
        let peer = PeerTable::open(&detail).unwrap();
        assert!(!peer.admits(3));
        own.open_gate(3);
        assert!(peer.admits(3) && !peer.admits(4));
        own.close_gate(3);
        assert!(!peer.admits(3));
        let busy = own.announce(5, 77);
        assert_eq!(peer.announced(5), 77);
        drop(busy);
        assert_eq!(peer.announced(5), 0);
        let mut regions = crate::fabric::memory::Regions::default();
        let mut byte = 0u8;
        let ptr = std::ptr::NonNull::from(&mut byte);
        let id = regions.insert(ptr, 1, Access::RemoteRead).unwrap();
        let entry = *regions.get(id).unwrap();
        let idx = crate::fabric::memory::index_of(id);
        assert!(peer.grant(entry.key).is_none());
        own.publish(idx, &entry);
        let grant = peer.grant(entry.key).unwrap();
        assert_eq!((grant.bytes, grant.access), (1, Access::RemoteRead));
        assert!(peer.grant(entry.key ^ 1 << 40).is_none());
        own.revoke(idx);
        assert!(peer.grant(entry.key).is_none());
    }

    #[test]
    fn another_file_is_not_taken_for_a_table() {
        let own = OwnTable::new().unwrap();
        let other = Detail { instance: own.instance ^ 1, ..own.detail(0) };
        assert!(PeerTable::open(&other).is_err());
        let null = File::open("/dev/null").unwrap();
        let foreign = Detail { descriptor: null.as_raw_fd(), ..own.detail(0) };
        assert!(PeerTable::open(&foreign).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 50..60)) {
            let _ = Detail::decode(&bytes);
        }
    }
}
