//! Parameters of the kernels around the proxy: producers of commands for measurements, and the copy that
//! a relay forwards with. `include/switchyard/comm/proxy_layout.h` says the same in C.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use crate::abi::DevicePtr;
use crate::check::{Check, CheckError};
use crate::entries::{PEER_COPY, PROXY_PRODUCE};
use crate::plan::{KernelParams, LaunchPlan};

/// `SY_PROXY_VERSION`
pub const PROXY_VERSION: u32 = 3;
/// Every object is filled anew, for checks.
pub const PRODUCE_FILLS: u32 = 1;
/// Each batch is over before the next.
pub const PRODUCE_ROUND_TRIP: u32 = 2;
/// Samples are reads of the lane's words; nothing is posted.
pub const PRODUCE_READS: u32 = 4;
/// Samples are of when batches began to be pushed, by the GPU's clock.
pub const PRODUCE_STAMPS: u32 = 8;
/// Nothing is put, and each change of a lane's count is answered with the time.
pub const PRODUCE_CLOCK: u32 = 16;
/// Most entries of one copy.
pub const MAX_COPY_ENTRIES: u32 = 4096;

/// `sy_proxy_produce_params`
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct ProduceParams {
    /// [`PROXY_VERSION`]
    pub version: u32,
    /// Blocks, one warp each.
    pub num_blocks: u32,
    /// Peers' handles.
    pub peers: DevicePtr,
    /// u64 `[num_blocks][num_samples]`; null if there are to be none.
    pub latency_ns: DevicePtr,
    /// u64 `[num_blocks]`.
    pub elapsed_ns: DevicePtr,
    /// u32 `[num_blocks]`.
    pub status: DevicePtr,
    /// Objects of each block, a multiple of `batch`.
    pub num_commands: u64,
    /// Objects posted together: 1 to 32, with a counter 1 to 16.
    pub batch: u32,
    /// `SY_PROXY_PUT` or `SY_PROXY_NOP`.
    pub opcode: u32,
    /// Bytes of a put, a multiple of 16.
    pub object_bytes: u32,
    /// Objects of each lane in mirror and slot, a multiple of `batch`.
    pub num_objects: u32,
    /// [`PRODUCE_FILLS`], [`PRODUCE_ROUND_TRIP`], [`PRODUCE_READS`], [`PRODUCE_STAMPS`], [`PRODUCE_CLOCK`]
    pub flags: u32,
    /// Latencies kept of each block.
    pub num_samples: u32,
    /// 0, or where the lanes' counters are in the slot.
    pub counter_offset: u64,
}

/// `sy_peer_copy_entry`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct CopyEntry {
    /// From.
    pub source: u64,
    /// To.
    pub target: u64,
    /// Bytes.
    pub num_bytes: u64,
}

/// `sy_peer_copy_params`
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct PeerCopyParams {
    version: u32,
    num_entries: u32,
    entries: DevicePtr,
    blocks_per_entry: u32,
    reserved: u32,
}

impl PeerCopyParams {
    /// A copy of `num_entries` [`CopyEntry`]s at `entries`, which the kernel reads when it runs.
    #[must_use]
    pub fn new(entries: DevicePtr, num_entries: u32) -> Self {
        // As many blocks as keep the links busy, and few enough to leave room for others.
        let blocks_per_entry = (32 / num_entries.max(1)).clamp(1, 16);
        Self { version: PROXY_VERSION, num_entries, entries, blocks_per_entry, reserved: 0 }
    }
}

/// Word `word_idx` of object `number` of a lane, as producers fill it: `SY_PROXY_PATTERN`.
#[must_use]
pub const fn pattern(lane: u64, number: u64, word_idx: u64) -> u64 {
    number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ (lane << 40 | word_idx).wrapping_mul(0xd134_2543_de82_ef95)
}

impl Check for ProduceParams {
    fn check(&self) -> Result<(), CheckError> {
        if self.version != PROXY_VERSION {
            return Err(CheckError::Version);
        }
        if self.peers.is_null() || self.elapsed_ns.is_null() || self.status.is_null() {
            return Err(CheckError::Null);
        }
        if self.latency_ns.is_null() != (self.num_samples == 0) {
            return Err(CheckError::Null);
        }
        let most = if self.counter_offset == 0 { 32 } else { 16 };
        let is_batch = (1..=most).contains(&self.batch)
            && self.num_commands.is_multiple_of(self.batch.into())
            && self.num_objects.is_multiple_of(self.batch)
            && self.num_objects > 0;
        if self.num_blocks == 0 || !is_batch {
            return Err(CheckError::Tokens);
        }
        if !self.object_bytes.is_multiple_of(16) {
            return Err(CheckError::Alignment);
        }
        Ok(())
    }
}

impl KernelParams for ProduceParams {
    const NAME: &'static str = "proxy_produce";

    fn plan(&self) -> LaunchPlan {
        plan(PROXY_PRODUCE, self.num_blocks, 32)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![
            ("peers", self.peers),
            ("latency_ns", self.latency_ns),
            ("elapsed_ns", self.elapsed_ns),
            ("status", self.status),
        ]
    }
}

impl Check for PeerCopyParams {
    fn check(&self) -> Result<(), CheckError> {
        if self.version != PROXY_VERSION {
            return Err(CheckError::Version);
        }
        if self.entries.is_null() {
            return Err(CheckError::Null);
        }
        if self.num_entries == 0
            || self.num_entries > MAX_COPY_ENTRIES
            || self.blocks_per_entry == 0
        {
            return Err(CheckError::Tokens);
        }
        Ok(())
    }
}

impl KernelParams for PeerCopyParams {
    const NAME: &'static str = "peer_copy";

    fn plan(&self) -> LaunchPlan {
        plan(PEER_COPY, self.num_entries * self.blocks_per_entry, 512)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        vec![("entries", self.entries)]
    }
}

const fn plan(entry: &'static str, num_blocks: u32, num_threads: u32) -> LaunchPlan {
    LaunchPlan {
        num_blocks,
        num_threads,
        is_tuned: false,
        is_few: false,
        entry,
        shared_bytes: 0,
        overlaps: false,
    }
}

const _: () = assert!(size_of::<ProduceParams>() == 80);
const _: () = assert!(offset_of!(ProduceParams, batch) == 48);
const _: () = assert!(size_of::<PeerCopyParams>() == 24 && size_of::<CopyEntry>() == 24);
