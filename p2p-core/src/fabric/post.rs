//! Checks that every fabric makes before it posts, and the ids of its peers.

use super::{LocalSegment, PeerId, RemoteSegment};
use crate::endpoint::PostError;

/// A registration, as far as posting needs to know it.
pub trait Registration {
    /// Address of its first byte.
    fn first(&self) -> u64;
    /// Its length in bytes.
    fn bytes(&self) -> u64;
}

impl LocalSegment {
    /// Checks the segment against the registration that it names, if there is one.
    pub fn checked<'r, R: Registration>(
        self,
        op: &'static str,
        found: Option<&'r R>,
    ) -> Result<&'r R, PostError> {
        let end = self.offset.checked_add(self.bytes);
        match (found, end) {
            (Some(found), Some(end)) if end <= found.bytes() => Ok(found),
            _ => Err(PostError::Unregistered {
                op,
                address: found.map_or(0, R::first).saturating_add(self.offset) as usize,
                len: self.bytes as usize,
            }),
        }
    }
}

impl RemoteSegment {
    /// Checks `bytes` of the segment against the peer's description of its registration. Returns
    /// the address of the first byte.
    pub fn checked(self, op: &'static str, bytes: u64) -> Result<u64, PostError> {
        let inside = self.offset.checked_add(bytes).is_some_and(|end| end <= self.region.bytes);
        let address = self.region.address.checked_add(self.offset);
        match address.filter(|address| inside && address.checked_add(bytes).is_some()) {
            Some(address) => Ok(address),
            None => Err(PostError::RemoteRange {
                op,
                offset: self.offset as usize,
                len: bytes as usize,
                region_bytes: self.region.bytes as usize,
            }),
        }
    }
}

/// Error of a grant for memory that does not exist or is not open to peers.
pub fn not_granted() -> PostError {
    let detail = "the buffer is not registered for writing by peers".to_owned();
    PostError::Transport { op: "grant", code: 0, detail }
}

/// Name of an operation.
pub const fn op_name(is_write: bool) -> &'static str {
    if is_write { "write" } else { "read" }
}

/// One entry of a fabric's table of peers: whether it is in use, and how many peers used it before.
/// So the id of an earlier peer never names the present one.
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerEntry {
    generation: u32,
    is_open: bool,
}

impl PeerEntry {
    /// Takes entry `idx`.
    pub fn open(&mut self, idx: usize) -> PeerId {
        self.is_open = true;
        self.id(idx)
    }

    /// Id of the peer that uses entry `idx`, or used it last.
    pub const fn id(self, idx: usize) -> PeerId {
        PeerId(idx as u32 | self.generation << PLACE_BITS)
    }

    /// Frees the entry.
    pub fn close(&mut self) {
        self.is_open = false;
        self.generation = (self.generation + 1) & (u32::MAX >> PLACE_BITS);
    }
}

/// Returns the index of an open peer's entry.
pub fn find<'a>(
    op: &'static str,
    peer: PeerId,
    entry: impl FnOnce(usize) -> Option<&'a PeerEntry>,
) -> Result<usize, PostError> {
    let idx = (peer.0 & (MAX_PLACES as u32)) as usize;
    match entry(idx) {
        Some(found) if found.is_open && found.generation == peer.0 >> PLACE_BITS => Ok(idx),
        _ => Err(PostError::Disconnected { op }),
    }
}

const PLACE_BITS: u32 = 16;
/// Largest number of peers: the number of entries that a [`PeerId`] can address.
pub const MAX_PLACES: usize = (1 << PLACE_BITS) - 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::{RegionId, WireRegion};

    struct Memory(u64, u64);

    impl Registration for Memory {
        fn first(&self) -> u64 {
            self.0
        }

        fn bytes(&self) -> u64 {
            self.1
        }
    }

    #[test]
    fn local_ranges_lie_within_their_registration() {
        let memory = Memory(4096, 100);
        let at = |offset, bytes| {
            LocalSegment { region: RegionId(1), offset, bytes }.checked("write", Some(&memory))
        };
        assert!(at(0, 100).is_ok() && at(100, 0).is_ok());
        for (offset, bytes) in [(0, 101), (100, 1), (u64::MAX, 2)] {
            assert!(matches!(at(offset, bytes), Err(PostError::Unregistered { op: "write", .. })));
        }
        let nothing = LocalSegment { region: RegionId(1), offset: 0, bytes: 0 };
        assert!(nothing.checked::<Memory>("read", None).is_err());
    }

    #[test]
    fn remote_ranges_lie_within_what_was_described() {
        let at = |address, offset, bytes| {
            let region = WireRegion { address, bytes: 100, key: 0 };
            RemoteSegment { region, offset }.checked("read", bytes)
        };
        assert_eq!((at(7, 0, 100).ok(), at(7, 100, 0).ok()), (Some(7), Some(107)));
        for (address, offset, bytes) in
            [(7, 0, 101), (7, 100, 1), (7, u64::MAX, 2), (u64::MAX - 50, 60, 1), (u64::MAX, 0, 100)]
        {
            assert!(matches!(at(address, offset, bytes), Err(PostError::RemoteRange { .. })));
        }
    }

    #[test]
    fn an_id_is_not_taken_for_its_successor() {
        let mut places = [PeerEntry::default(); 2];
        let first = places[1].open(1);
        assert_eq!(find("read", first, |idx| places.get(idx)).ok(), Some(1));
        places[1].close();
        assert!(find("read", first, |idx| places.get(idx)).is_err());
        let second = places[1].open(1);
        assert!(find("read", first, |idx| places.get(idx)).is_err());
        assert_eq!(find("read", second, |idx| places.get(idx)).ok(), Some(1));
        assert!(find("read", PeerId(7), |idx| places.get(idx)).is_err());
    }
}
