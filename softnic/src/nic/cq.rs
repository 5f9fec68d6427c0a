//! Completion queues.

use std::sync::atomic::Ordering;

use p2p_core::Region;

use super::{ControlError, check_depth, place};
use crate::format::{CQE_BYTES, Cqe};
use crate::memory::Part;

/// Memory layout of a completion queue. Offsets are within `region`.
#[derive(Debug, Clone)]
pub struct CqConfig {
    /// Memory.
    pub region: Region,
    /// Completions.
    pub cq_offset: usize,
    /// How many, a power of two; 1 if collapsed.
    pub depth: u32,
    /// Doorbell record, 8 bytes: how many were consumed.
    pub dbrec_offset: usize,
    /// Every completion goes to entry 0, over the one before.
    pub is_collapsed: bool,
    /// Completions may overwrite others that the host has not consumed.
    pub ignores_overrun: bool,
}

#[derive(Debug)]
pub(crate) struct Cq {
    entries: Part,
    dbrec: Part,
    depth: u32,
    is_collapsed: bool,
    ignores_overrun: bool,
    index: u64,
}

impl Cq {
    pub(crate) fn new(config: &CqConfig) -> Result<Self, ControlError> {
        let max = if config.is_collapsed { 1 } else { MAX_DEPTH };
        check_depth("a completion queue", config.depth, 1, max)?;
        let bytes = config.depth as usize * CQE_BYTES;
        Ok(Self {
            entries: place("completions", &config.region, config.cq_offset, bytes, 64)?,
            dbrec: place("doorbell record", &config.region, config.dbrec_offset, 8, 8)?,
            depth: config.depth,
            is_collapsed: config.is_collapsed,
            ignores_overrun: config.ignores_overrun,
            index: 0,
        })
    }

    pub(crate) fn reset(&mut self) {
        self.index = 0;
    }

    pub(crate) const fn depth(&self) -> u32 {
        self.depth
    }

    /// Writes a completion. `false` when there is no room.
    ///
    /// SYNC POINT `completion`: pairs with `poll_collapsed` and `poll_ring` of the device functions.
    pub(crate) fn store(&mut self, cqe: &Cqe) -> bool {
        if !self.is_collapsed && !self.ignores_overrun {
            // 24 bits of the consumer index are in the record.
            let consumed =
                self.dbrec.word32(0).map_or(0, |w| u32::from_be(w.load(Ordering::Acquire)));
            let outstanding = (self.index as u32).wrapping_sub(consumed) & 0xff_ffff;
            if outstanding >= self.depth {
                return false;
            }
        }
        let entry = (self.index & u64::from(self.depth - 1)) as usize * CQE_BYTES;
        let bytes = cqe.encode(self.index & u64::from(self.depth) != 0);
        self.index += 1;
        for at in (0..CQE_BYTES).step_by(8) {
            let value = u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]));
            // Counter and owner come last, in one store that releases the rest and all payload.
            let order = if at == CQE_BYTES - 8 { Ordering::Release } else { Ordering::Relaxed };
            if let Some(word) = self.entries.word64(entry + at) {
                word.store(value, order);
            }
        }
        true
    }
}

const MAX_DEPTH: u32 = 1 << 22;
