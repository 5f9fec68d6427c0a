//! Registrations of a fabric that checks every access itself.

use std::ptr::NonNull;

use rand::RngExt;

use super::post::Registration;
use super::regions::{GENERATIONS, INDEX_BITS, INDEX_MASK};
use super::{Access, LocalSegment, RegionId, WireRegion};
use p2p_core::endpoint::PostError;

/// Registrations by id and by key.
#[derive(Debug, Default)]
pub(super) struct Regions {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

/// One registration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) ptr: NonNull<u8>,
    pub(super) bytes: u64,
    pub(super) access: Access,
    /// A peer with this key has the rights of `access`. 0 if the entry is free.
    pub(super) key: u64,
    generation: u32,
}

impl Registration for Entry {
    fn first(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

// SAFETY: a registration is an address and numbers; the memory behind it is plain memory that the
// caller of `register` keeps mapped, whichever thread looks.
unsafe impl Send for Entry {}

/// Reason for which a peer's access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    Key,
    Range,
    Access,
    Revoked,
}

impl Refusal {
    pub(super) const fn code(self) -> u8 {
        match self {
            Self::Key => 1,
            Self::Range => 2,
            Self::Access => 3,
            Self::Revoked => 4,
        }
    }

    pub(super) const fn of(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Key),
            2 => Some(Self::Range),
            3 => Some(Self::Access),
            4 => Some(Self::Revoked),
            _ => None,
        }
    }

    /// The error of a refused operation.
    pub(super) fn error(self, op: &'static str) -> PostError {
        let detail = match self {
            Self::Key => "the peer knows no registration of this key; it was revoked or never made",
            Self::Range => "the range leaves the peer's registration",
            Self::Access => "the peer's registration does not allow it; register it for writing",
            Self::Revoked => "the peer revoked the registration during the operation",
        };
        PostError::Transport { op, code: self.code().into(), detail: detail.to_owned() }
    }
}

impl Regions {
    pub(super) fn insert(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        let idx = match self.free.pop() {
            Some(idx) => idx,
            None if self.entries.len() < MAX_REGIONS => {
                self.entries.push(Entry {
                    ptr,
                    bytes: 0,
                    access: Access::Local,
                    key: 0,
                    generation: 0,
                });
                self.entries.len() as u32 - 1
            }
            None => {
                return Err(PostError::Register {
                    bytes,
                    detail: format!("there are {MAX_REGIONS} registrations, which is the limit"),
                });
            }
        };
        let entry = &mut self.entries[idx as usize];
        let generation = (entry.generation + 1) % GENERATIONS;
        let id = RegionId(idx | generation << INDEX_BITS);
        // The key is never 0, because its upper half is not.
        let secret: u32 = rand::rng().random_range(1..=u32::MAX);
        let key = u64::from(secret) << 32 | u64::from(id.0);
        *entry = Entry { ptr, bytes: bytes as u64, access, key, generation };
        Ok(id)
    }

    pub(super) fn remove(&mut self, id: RegionId) -> Result<Entry, PostError> {
        let entry = self.get(id).copied().ok_or_else(|| unknown(id))?;
        let idx = id.0 & INDEX_MASK;
        self.entries[idx as usize].key = 0;
        self.free.push(idx);
        Ok(entry)
    }

    pub(super) fn get(&self, id: RegionId) -> Option<&Entry> {
        let entry = self.entries.get((id.0 & INDEX_MASK) as usize)?;
        (entry.key != 0 && entry.key as u32 == id.0).then_some(entry)
    }

    /// Address of a part of this side's memory.
    pub(super) fn local(
        &self,
        op: &'static str,
        segment: LocalSegment,
    ) -> Result<*mut u8, PostError> {
        let entry = segment.checked(op, self.get(segment.region))?;
        // SAFETY: the offset is inside the registered memory.
        Ok(unsafe { entry.ptr.as_ptr().add(segment.offset as usize) })
    }

    /// Returns id and address of a peer's range, if `key` and its rights allow the access.
    pub(super) fn remote(
        &self,
        key: u64,
        offset: u64,
        bytes: u64,
        wants_write: bool,
    ) -> Result<(RegionId, *mut u8), Refusal> {
        let id = RegionId(key as u32);
        let entry = self.get(id).filter(|entry| entry.key == key).ok_or(Refusal::Key)?;
        match entry.access {
            Access::RemoteReadWrite => {}
            Access::RemoteRead if !wants_write => {}
            _ => return Err(Refusal::Access),
        }
        match offset.checked_add(bytes) {
            // SAFETY: the offset is inside the registered memory.
            Some(end) if end <= entry.bytes => unsafe {
                Ok((id, entry.ptr.as_ptr().add(offset as usize)))
            },
            _ => Err(Refusal::Range),
        }
    }

    /// The wire form, with `address` as the first byte.
    pub(super) fn describe(
        &self,
        id: RegionId,
        address: impl Fn(&Entry) -> u64,
    ) -> Option<WireRegion> {
        let entry = self.get(id)?;
        (entry.access != Access::Local).then(|| WireRegion {
            address: address(entry),
            bytes: entry.bytes,
            key: entry.key,
        })
    }
}

pub(super) fn unknown(id: RegionId) -> PostError {
    PostError::Register { bytes: 0, detail: format!("there is no registration {}", id.0) }
}

/// Index into a table: the lower bits of an id, below its generation.
pub(super) const fn index_of(id: RegionId) -> usize {
    (id.0 & INDEX_MASK) as usize
}

/// Most registrations of a fabric.
pub(super) const MAX_REGIONS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_ranges_and_rights_are_checked() {
        let mut memory = [0u8; 64];
        let ptr = NonNull::from(&mut memory).cast();
        let mut regions = Regions::default();
        let writable = regions.insert(ptr, 64, Access::RemoteReadWrite).unwrap();
        let readable = regions.insert(ptr, 32, Access::RemoteRead).unwrap();
        let private = regions.insert(ptr, 16, Access::Local).unwrap();
        let key = |id| regions.get(id).unwrap().key;
        let (w, r, p) = (key(writable), key(readable), key(private));
        assert_eq!(regions.remote(w, 60, 4, true).unwrap().0, writable);
        assert_eq!(regions.remote(w, 60, 5, true), Err(Refusal::Range));
        assert_eq!(regions.remote(w, u64::MAX, 2, true), Err(Refusal::Range));
        assert_eq!(regions.remote(w ^ 1 << 40, 0, 1, true), Err(Refusal::Key));
        assert!(regions.remote(r, 0, 32, false).is_ok());
        assert_eq!(regions.remote(r, 0, 1, true), Err(Refusal::Access));
        assert_eq!(regions.remote(p, 0, 1, false), Err(Refusal::Access));
        assert!(regions.describe(private, |_| 0).is_none());
        regions.remove(writable).unwrap();
        assert_eq!(regions.remote(w, 0, 1, true), Err(Refusal::Key));
        let again = regions.insert(ptr, 64, Access::RemoteReadWrite).unwrap();
        assert_ne!(again, writable, "an old id must not name the new registration");
        assert!(regions.remove(writable).is_err());
    }
}
