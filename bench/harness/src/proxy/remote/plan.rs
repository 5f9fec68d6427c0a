//! Settings of `benchmark_remote`, as the sender sends them to the receiver.

use anyhow::{Result, ensure};
use p2p_core::{SlotConfig, SlotLayout};

use super::Check;
use proxy::lane::LaneConfig;

/// Settings of both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Plan {
    /// Threads of the proxy, with a pair of slots and one lane each.
    pub threads: usize,
    /// Bytes of an object, a multiple of 8.
    pub object_bytes: u32,
    /// Most objects of each thread in flight.
    pub budget: u32,
    /// Objects posted together.
    pub batch: u32,
    /// Timed objects of each thread.
    pub commands: u64,
    /// Rounds of `budget` objects. Each round is compared before the next.
    pub checks: u32,
    /// Whether a GPU produces. Then all threads use the same lane number in the pattern.
    #[serde(default)]
    pub is_gpu: bool,
}

impl Plan {
    pub(super) fn layout(&self) -> Result<SlotLayout> {
        let objects = u64::from(self.object_bytes) * u64::from(self.budget);
        let slot_bytes = (objects as usize).next_multiple_of(4096).max(4096) + 4096;
        Ok(SlotLayout::new(SlotConfig { slot_bytes, num_frames: 1 })?)
    }

    pub(super) fn check(&self) -> Result<()> {
        ensure!((1..=64).contains(&self.threads), "threads: expected 1 to 64");
        ensure!(
            self.object_bytes.is_multiple_of(8) && self.object_bytes > 0,
            "object bytes: expected a multiple of 8"
        );
        ensure!((1..=self.budget).contains(&self.batch), "batch: expected 1 to the budget");
        ensure!((2..=16_384).contains(&self.budget), "budget: expected 2 to 16384");
        ensure!(
            (1..=MAX_COMMANDS).contains(&self.commands),
            "commands: expected 1 to {MAX_COMMANDS}, found {}",
            self.commands
        );
        // The memory of this side must not depend on an unchecked value of the other side.
        let slots = u64::from(self.object_bytes) * u64::from(self.budget) * self.threads as u64;
        ensure!(
            slots <= MAX_SLOTS_BYTES,
            "slots of {} x {} x {} bytes (threads, budget, object): expected at most {MAX_SLOTS_BYTES} in all",
            self.threads,
            self.budget,
            self.object_bytes
        );
        ensure!(
            !self.is_gpu
                || (self.object_bytes.is_multiple_of(16)
                    && self.batch <= 32
                    && self.budget.is_multiple_of(self.batch)
                    && self.commands.is_multiple_of(self.batch.into())),
            "from a GPU: expected objects of a multiple of 16 bytes, batches up to 32, and a budget and a number of objects that are multiples of the batch"
        );
        Ok(())
    }

    pub(super) fn counter(layout: &SlotLayout) -> usize {
        layout.control_offset(2048)
    }

    /// Returns the number in the pattern of object `idx` of a round.
    pub(super) const fn number(&self, round: u64, idx: u32) -> u64 {
        round.wrapping_mul(self.budget as u64).wrapping_add(idx as u64)
    }

    /// Returns the number of objects that are timed one by one.
    pub(super) fn num_one_by_one(&self) -> u64 {
        self.commands.min(2000)
    }

    /// Returns the check of all objects of all threads.
    pub(super) const fn whole_round(&self, round: u64, counter: u64) -> Check {
        let (threads, objects) = (self.threads, self.budget);
        Check { round, threads, objects, counter, is_timed: false }
    }

    /// Returns the check of the objects left in the slots of `threads` threads after each has put `num` objects.
    pub(super) fn left_of(&self, num: u64, threads: usize, round: u64, counter: u64) -> Check {
        let objects = num.min(self.budget.into()) as u32;
        Check { objects, threads, is_timed: true, ..self.whole_round(round, counter) }
    }

    /// Returns the lane number in the pattern of thread `thread`'s objects.
    pub(super) const fn pattern_lane(&self, thread: usize) -> u64 {
        if self.is_gpu { 0 } else { thread as u64 }
    }

    pub(super) fn lanes(&self) -> LaneConfig {
        // A producer on this host posts its quiet in addition to a full budget.
        let budget = if self.is_gpu { self.budget } else { self.budget + 1 };
        LaneConfig { num_lanes: 1, depth: budget.next_power_of_two().max(16), budget }
    }
}

/// Most timed objects: each batch keeps a sample.
const MAX_COMMANDS: u64 = 100_000_000;
/// Most bytes of all threads' slots together.
const MAX_SLOTS_BYTES: u64 = 4 << 30;
