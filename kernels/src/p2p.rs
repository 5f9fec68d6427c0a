//! Parameters of the transport measurements between GPUs: puts with a flag there and back, and puts in one
//! direction. `sy_p2p_params` of `device_abi.h` says the same in C.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use crate::abi::{DEVICE_ABI_VERSION, DevicePtr, Link, MAX_PEERS, PATH_DIRECT};
use crate::check::{Check, CheckError};
use crate::entries::{P2P_PINGPONG, P2P_STREAM};
use crate::plan::{KernelParams, LaunchPlan};

/// `flags`: messages of 16 bytes and more leave shared memory by bulk copies, instead of by stores.
pub const FLAG_BULK: u32 = 64;

/// `sy_p2p_params`
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct P2pParams {
    /// [`DEVICE_ABI_VERSION`]
    pub version: u32,
    /// `FLAG_*`, among them [`FLAG_BULK`].
    pub flags: u32,
    /// Peers, at most [`MAX_PEERS`].
    pub num_peers: u32,
    /// Thread blocks that work for each peer; as many at the peer.
    pub blocks_per_peer: u32,
    /// Messages to each peer.
    pub num_turns: u32,
    /// 1: sends first; 0: answers.
    pub begins: u32,
    /// Bytes of a message: 4, 8, or a multiple of 16.
    pub num_bytes: u64,
    /// Bound of every wait.
    pub timeout_ns: u64,
    /// u64 `[num_peers]`: nanoseconds of all turns with the peer, 0 where it did not come to an end.
    pub elapsed_ns: DevicePtr,
    /// `sy_error_word`.
    pub error: DevicePtr,
    /// This side's counter for each peer, 0 at the start.
    pub counters: [DevicePtr; MAX_PEERS],
    /// Offset of the peer's counter for this side in the peer's window.
    pub counter_offset: [u64; MAX_PEERS],
    /// Destination of messages to each peer.
    pub links: [Link; MAX_PEERS],
}

/// A message there and one back, turn after turn. One turn more than asked is made, before the clock starts.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub struct PingPongParams(pub P2pParams);

/// Messages in one direction, with one acknowledgement at the end.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub struct StreamParams(pub P2pParams);

impl Check for P2pParams {
    fn check(&self) -> Result<(), CheckError> {
        if self.version != DEVICE_ABI_VERSION {
            return Err(CheckError::Version);
        }
        let num_peers = self.num_peers as usize;
        if num_peers == 0 || num_peers > MAX_PEERS || self.blocks_per_peer == 0 {
            return Err(CheckError::Peers);
        }
        if self.timeout_ns == 0 {
            return Err(CheckError::Bound);
        }
        if self.elapsed_ns.is_null() || self.error.is_null() {
            return Err(CheckError::Null);
        }
        let unit = if self.num_bytes < 16 { 4 } else { 16 };
        if self.num_bytes == 0 || !self.num_bytes.is_multiple_of(unit) {
            return Err(CheckError::Alignment);
        }
        for (link, counter) in self.links[..num_peers].iter().zip(&self.counters) {
            if counter.is_null() || link.window.is_null() {
                return Err(CheckError::Null);
            }
            if link.path != PATH_DIRECT {
                return Err(CheckError::Path);
            }
            if !link.window.0.is_multiple_of(16) {
                return Err(CheckError::Alignment);
            }
        }
        Ok(())
    }
}

impl P2pParams {
    fn plan(&self, entry: &'static str) -> LaunchPlan {
        LaunchPlan {
            num_blocks: self.num_peers * self.blocks_per_peer,
            num_threads: P2P_THREADS,
            is_tuned: false,
            is_few: false,
            entry,
            shared_bytes: 0,
            overlaps: false,
        }
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        let num_peers = (self.num_peers as usize).min(MAX_PEERS);
        let mut pointers = vec![("elapsed_ns", self.elapsed_ns), ("error", self.error)];
        pointers.extend(self.counters[..num_peers].iter().map(|counter| ("counters", *counter)));
        pointers.extend(self.links[..num_peers].iter().map(|link| ("links", link.window)));
        pointers
    }
}

impl Check for PingPongParams {
    fn check(&self) -> Result<(), CheckError> {
        self.0.check()
    }
}

impl KernelParams for PingPongParams {
    const NAME: &'static str = "pingpong";

    fn plan(&self) -> LaunchPlan {
        self.0.plan(P2P_PINGPONG)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        self.0.pointers()
    }
}

impl Check for StreamParams {
    fn check(&self) -> Result<(), CheckError> {
        self.0.check()
    }
}

impl KernelParams for StreamParams {
    const NAME: &'static str = "stream";

    fn plan(&self) -> LaunchPlan {
        self.0.plan(P2P_STREAM)
    }

    fn pointers(&self) -> Vec<(&'static str, DevicePtr)> {
        self.0.pointers()
    }
}

/// `SY_P2P_THREADS`
const P2P_THREADS: u32 = 512;

const _: () = assert!(size_of::<P2pParams>() == 1336);
const _: () = assert!(offset_of!(P2pParams, num_bytes) == 24);
const _: () = assert!(offset_of!(P2pParams, counters) == 56);
const _: () = assert!(offset_of!(P2pParams, links) == 568);
