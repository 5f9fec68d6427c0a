//! Memory that a NIC reaches, and the keys to it.

use std::time::Duration;

use p2p_core::Region;

use super::{ControlError, Nic, place};
use crate::memory::{Part, Segment};
use crate::port::{self, Access, Grant};

/// Protection domain: queue pairs reach only memory of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Domain(pub(crate) u32);

/// Registered memory. The local key never leaves the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// For requests of this side.
    pub lkey: u32,
    /// For requests of peers; 0 if none may.
    pub rkey: u32,
    /// Address of the first byte, for both.
    pub address: u64,
    /// Bytes.
    pub num_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) lkey: u32,
    pub(crate) domain: u32,
    pub(crate) access: Access,
    pub(crate) address: u64,
    pub(crate) part: Part,
    segment: Option<u32>,
}

#[derive(Debug)]
pub(super) struct ShownSegment {
    segment: Segment,
    index: u32,
    num_uses: usize,
}

impl Nic {
    /// A fresh protection domain.
    pub fn alloc_domain(&mut self) -> Domain {
        self.num_domains += 1;
        Domain(self.num_domains)
    }

    /// Registers memory that peers may reach.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn register(
        &mut self,
        domain: Domain,
        segment: &Segment,
        offset: usize,
        num_bytes: usize,
        access: Access,
    ) -> Result<Keys, ControlError> {
        let region = segment.region();
        let part = place("memory", region, offset, num_bytes, 1)?;
        let shown = self.show(segment)?;
        match self.add_memory(domain, part, offset, access, Some(shown)) {
            Ok(keys) => Ok(keys),
            Err(error) => {
                self.hide(shown);
                Err(error)
            }
        }
    }

    /// Registers memory that peers may reach, under the addresses of `view`. The view is another mapping of the
    /// whole segment, which programs of this side use.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn register_view(
        &mut self,
        domain: Domain,
        segment: &Segment,
        view: &Region,
        access: Access,
    ) -> Result<Keys, ControlError> {
        place("memory", segment.region(), 0, view.len(), 1)?;
        let part = place("memory", view, 0, view.len(), 1)?;
        let shown = self.show(segment)?;
        self.add_memory(domain, part, 0, access, Some(shown)).inspect_err(|_| self.hide(shown))
    }

    /// Registers memory for requests of this side only.
    ///
    /// # Errors
    /// [`ControlError`].
    pub fn register_local(
        &mut self,
        domain: Domain,
        region: &Region,
        access: Access,
    ) -> Result<Keys, ControlError> {
        let part = place("memory", region, 0, region.len(), 1)?;
        self.add_memory(domain, part, 0, access, None)
    }

    /// Revokes both keys. Waits until no access is under way; later accesses are refused.
    ///
    /// # Errors
    /// [`ControlError`]; after `InUse` the memory must stay mapped and unused.
    pub fn deregister(&mut self, lkey: u32) -> Result<(), ControlError> {
        let index = port::key_index(lkey);
        let entry = self.memory.get_mut(index);
        let found = entry.filter(|memory| memory.as_ref().is_some_and(|m| m.lkey == lkey));
        let Some(memory) = found.and_then(Option::take) else {
            return Err(ControlError::Unknown { what: "local key", number: lkey });
        };
        let is_quiet = self.port.tables().memory[index].revoke(REVOKE_TIMEOUT);
        if let Some(shown) = memory.segment {
            self.hide(shown);
        }
        if is_quiet { Ok(()) } else { Err(ControlError::InUse { lkey }) }
    }

    fn add_memory(
        &mut self,
        domain: Domain,
        part: Part,
        offset: usize,
        access: Access,
        segment: Option<u32>,
    ) -> Result<Keys, ControlError> {
        let tables = self.port.tables();
        let free = (0..port::NUM_KEYS).find(|index| {
            self.memory.get(*index).is_none_or(Option::is_none) && tables.memory[*index].is_free()
        });
        let Some(index) = free else {
            return Err(ControlError::Full { what: "keys", max: port::NUM_KEYS });
        };
        // The low byte changes with every registration, so that an old key never fits a new one.
        self.num_keys = self.num_keys.wrapping_add(1);
        let key = (index as u32) << 8 | (self.num_keys & 0xff);
        let (rkey, lkey) = (key | RKEY_BIT, key | LKEY_BIT);
        let address = part.as_ptr().as_ptr() as u64;
        let num_bytes = part.len() as u64;
        if let Some(segment) = segment {
            tables.memory[index].grant(&Grant {
                key: rkey,
                access,
                domain: domain.0,
                segment,
                address,
                num_bytes,
                offset,
            });
        }
        let memory = Memory { lkey, domain: domain.0, access, address, part, segment };
        if self.memory.len() <= index {
            self.memory.resize_with(index + 1, || None);
        }
        self.memory[index] = Some(memory);
        Ok(Keys { lkey, rkey: if segment.is_some() { rkey } else { 0 }, address, num_bytes })
    }

    fn show(&mut self, segment: &Segment) -> Result<u32, ControlError> {
        let descriptor = segment.descriptor();
        let known = self.segments.iter_mut().find(|s| s.segment.descriptor() == descriptor);
        if let Some(shown) = known {
            shown.num_uses += 1;
            return Ok(shown.index);
        }
        let index = self
            .port
            .show_segment(segment)
            .ok_or(ControlError::Full { what: "segments", max: port::NUM_SEGMENTS })?;
        self.segments.push(ShownSegment { segment: segment.clone(), index, num_uses: 1 });
        Ok(index)
    }

    fn hide(&mut self, index: u32) {
        let Some(at) = self.segments.iter().position(|s| s.index == index) else { return };
        self.segments[at].num_uses -= 1;
        if self.segments[at].num_uses == 0 {
            self.port.hide_segment(index);
            self.segments.swap_remove(at);
        }
    }
}

/// Local and remote keys differ by bits above their index.
const RKEY_BIT: u32 = 1 << 24;
const LKEY_BIT: u32 = 1 << 25;
const REVOKE_TIMEOUT: Duration = Duration::from_millis(200);
