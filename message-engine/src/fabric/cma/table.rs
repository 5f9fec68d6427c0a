//! The table that a side shares with its peers: its registrations, and its copies under way.
//!
//! One memory file per fabric, sealed against resizing, mapped by every peer:
//!
//! ```text
//! 0        header: magic, instance
//! 4096     per peer, 64 bytes: gate (the owner lets it in), busy (key that the owner's engine uses at it),
//!          busy (key that another thread of the owner uses at it)
//! 266240   per registration, 32 bytes: key, address, bytes, rights
//! ```
//!
//! SYNC POINT: cma-revoke. The initiator stores `busy` in its own table and then loads the gate and the key from the
//! target's. The target stores the gate or the key and then loads `busy` from the initiator's. Both have a full fence
//! between, so at least one of them sees the other: the initiator does not copy, or the target knows that the memory
//! must stay.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::fabric::Access;
use crate::fabric::memory::{Entry, MAX_REGIONS};
use p2p_core::host::HostIdentity;
use p2p_core::region::Region;

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
    /// Holds `instance`. Peers read it to find out whether the system lets them copy.
    probe: Box<[u8; 8]>,
}

/// A peer's table.
#[derive(Debug)]
pub(super) struct PeerTable {
    map: Region,
}

/// Details that a peer needs to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Detail {
    pub(super) pid: i32,
    descriptor: i32,
    pub(super) instance: u64,
    pub(super) probe_address: u64,
    /// The peer's index in the table.
    pub(super) place: u32,
    boot_id: [u8; 16],
    pid_namespace: u64,
}

/// Range and rights of a key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grant {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) access: Access,
}

/// A thread of this side that copies. Each has an announcement of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copier {
    /// The engine's thread.
    Engine,
    /// A user's thread: one at a time.
    User,
}

/// Announces a copy of this side until it is dropped.
pub(super) struct CopyAnnouncement<'a> {
    word: &'a AtomicU64,
}

impl Drop for CopyAnnouncement<'_> {
    fn drop(&mut self) {
        // Release: a thread that sees the 0 also sees the copied bytes.
        self.word.store(0, Ordering::Release);
    }
}

impl OwnTable {
    pub(super) fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("switchyard-cma", flags)?;
        ftruncate(&file, TABLE_BYTES as u64)?;
        fcntl_add_seals(&file, SEALS)?;
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

    /// The details for the peer with index `place`.
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

    /// Checks that process numbers of the peer are valid here. The error is the reason.
    pub(super) fn check_host(&self, peer: &Detail) -> Result<(), String> {
        if peer.boot_id != self.host.boot_id {
            return Err("the peers run on different hosts".to_owned());
        }
        if peer.pid_namespace != self.pid_namespace {
            return Err("the peers run in different process namespaces".to_owned());
        }
        Ok(())
    }

    /// Announces a copy with `key` at the peer with index `place`.
    pub(super) fn announce(&self, place: usize, copier: Copier, key: u64) -> CopyAnnouncement<'_> {
        let word = word(&self.map, busy_at(place, copier));
        word.store(key, Ordering::SeqCst);
        // SYNC POINT: cma-revoke.
        fence(Ordering::SeqCst);
        CopyAnnouncement { word }
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
        let file = open_memory(detail.pid, detail.descriptor)?;
        // Only a sealed size cannot change. A load beyond the end of a file would kill this process.
        let seals = fcntl_get_seals(&file)?;
        if !seals.contains(SEALS) {
            let (found, expected) = (seals.bits(), SEALS.bits());
            let what = format!(
                "the peer's table is not sealed against resizing (seals {found:#x}, expected {expected:#x})"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let mut head = [0; 16];
        file.read_exact_at(&mut head, 0)?;
        let expected = [MAGIC.to_le_bytes(), detail.instance.to_le_bytes()].concat();
        if head[..] != expected || file.metadata()?.len() != TABLE_BYTES as u64 {
            return Err(foreign());
        }
        let file = OwnedFd::from(file);
        Ok(Self { map: map_peer(&file)? })
    }

    /// Whether the peer's gate for index `place` is open.
    pub(super) fn admits(&self, place: usize) -> bool {
        word(&self.map, peer_at(place)).load(Ordering::SeqCst) == 1
    }

    /// The keys that the peer's threads announce to the side with index `place` in its table; 0 for none.
    pub(super) fn announced(&self, place: usize) -> [u64; 2] {
        [Copier::Engine, Copier::User]
            .map(|copier| word(&self.map, busy_at(place, copier)).load(Ordering::SeqCst))
    }

    /// Range and rights of `key`, if it is in force.
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
        // A correct peer has no range that wraps around.
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

/// An encoded detail of this process.
#[cfg(fuzzing)]
pub(in crate::fabric) fn detail_samples() -> Vec<Vec<u8>> {
    vec![OwnTable::new().expect("a table").detail(3).encode()]
}

/// Decodes bytes of a peer. A decoded detail must stay the same when it is encoded and decoded again.
#[cfg(fuzzing)]
pub(in crate::fabric) fn check_detail(bytes: &[u8]) {
    if let Ok(detail) = Detail::decode(bytes) {
        assert_eq!(detail.encode(), bytes);
        assert_eq!(Detail::decode(bytes), Ok(detail));
    }
}

/// Reads bytes as a key and as its entry in a peer's table.
#[cfg(fuzzing)]
pub(in crate::fabric) fn check_table(bytes: &[u8]) {
    thread_local! {
        static TABLE: PeerTable =
            PeerTable { map: Region::anonymous(TABLE_BYTES).expect("memory") };
    }
    let (words, _) = bytes.as_chunks::<8>();
    let Some((key, entry)) = words.split_first() else { return };
    let key = u64::from_le_bytes(*key);
    TABLE.with(|table| {
        let idx = crate::fabric::memory::index_of(crate::fabric::RegionId(key as u32));
        for (nth, value) in entry.iter().take(4).enumerate().filter(|_| idx < MAX_REGIONS) {
            let value = u64::from_le_bytes(*value);
            word(&table.map, region_at(idx) + nth * 8).store(value, Ordering::Relaxed);
        }
        if let Some(grant) = table.grant(key) {
            assert!(grant.address.checked_add(grant.bytes).is_some());
            assert_ne!(grant.access, Access::Local);
        }
        let place = key as usize % MAX_PEERS;
        let _ = (table.admits(place), table.announced(place));
    });
}

/// Opens a descriptor of another process for reading, if it is a file in memory. A first open with `O_PATH` checks that
/// without effects. Opening a pipe, a terminal or a user's own file system has effects, and may block forever.
fn open_memory(pid: i32, descriptor: i32) -> io::Result<File> {
    let path = format!("/proc/{pid}/fd/{descriptor}");
    let named = File::options().read(true).custom_flags(libc::O_PATH).open(path)?;
    if !named.metadata()?.is_file() || fstatfs(&named)?.f_type != libc::TMPFS_MAGIC {
        return Err(foreign());
    }
    let path = format!("/proc/self/fd/{}", named.as_raw_fd());
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer's descriptor is not its table")
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

const fn busy_at(place: usize, copier: Copier) -> usize {
    match copier {
        Copier::Engine => peer_at(place) + 8,
        Copier::User => peer_at(place) + 16,
    }
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
    // SAFETY: just mapped whole, and nothing else unmaps it. A peer's table is only read.
    unsafe { Region::from_raw(ptr.cast(), TABLE_BYTES) }
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Seals that forbid resizing a table.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const MAGIC: u64 = u64::from_le_bytes(*b"SYCMATAB");
const VERSION: u32 = 2;
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
        let busy = own.announce(5, Copier::Engine, 77);
        let other = own.announce(5, Copier::User, 78);
        assert_eq!(peer.announced(5), [77, 78]);
        drop(busy);
        assert_eq!(peer.announced(5), [0, 78]);
        drop(other);
        assert_eq!(peer.announced(5), [0, 0]);
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

    /// Opening a pipe for reading would block until a process opens it for writing.
    #[test]
    fn a_pipe_that_is_named_as_a_table_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let flags = libc::O_NONBLOCK;
        let held = File::options().read(true).custom_flags(flags).open(&path).unwrap();
        let own = OwnTable::new().unwrap();
        let named = Detail { descriptor: held.as_raw_fd(), ..own.detail(0) };
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            sender.send(PeerTable::open(&named).err().map(|e| e.to_string()))
        });
        let error = receiver.recv_timeout(std::time::Duration::from_secs(20)).expect("it waits");
        assert_eq!(error.as_deref(), Some("the peer's descriptor is not its table"));
    }

    #[test]
    fn a_table_whose_size_may_change_is_refused() {
        let own = OwnTable::new().unwrap();
        for bytes in [0, 4096, TABLE_BYTES as u64 + 4096] {
            assert_eq!(ftruncate(&own.file, bytes), Err(rustix::io::Errno::PERM));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("test", flags).unwrap();
        ftruncate(&file, TABLE_BYTES as u64).unwrap();
        let file = File::from(file);
        let head = [MAGIC.to_le_bytes(), own.instance.to_le_bytes()].concat();
        file.write_all_at(&head, 0).unwrap();
        let unsealed = Detail { descriptor: file.as_raw_fd(), ..own.detail(0) };
        let error = PeerTable::open(&unsealed).unwrap_err().to_string();
        assert!(error.contains("not sealed"), "{error}");
        fcntl_add_seals(&file, SEALS).unwrap();
        PeerTable::open(&unsealed).unwrap();
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 50..60)) {
            let _ = Detail::decode(&bytes);
        }
    }
}
