//! The structures of `kernels/include/switchyard/comm/proxy_layout.h`, field by field.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

/// `SY_PROXY_VERSION`
pub const VERSION: u32 = 3;
/// `SY_PROXY_MIN_DEPTH`: cells of a lane.
pub const MIN_DEPTH: u32 = 16;
/// `SY_PROXY_MAX_DEPTH`
pub const MAX_DEPTH: u32 = 65_536;
/// `SY_PROXY_MAX_LANES`: of a peer.
pub const MAX_LANES: u32 = 256;
/// `SY_PROXY_MAX_SOURCES`: registered regions of a peer, the mirror among them.
pub const MAX_SOURCES: usize = 2048;
/// `SY_PROXY_MAX_WINDOWS`: of a peer.
pub const MAX_WINDOWS: usize = 256;
/// `SY_PROXY_MAX_BYTES`: of one put or get.
pub const MAX_BYTES: u32 = 0x7fff_ffff;
/// `SY_PROXY_MAX_SLOT_BYTES`
pub const MAX_SLOT_BYTES: u64 = 1 << 32;

/// `SY_PROXY_OPCODE_SHIFT`
pub const OPCODE_SHIFT: u32 = 8;
/// `SY_PROXY_VALUE_SHIFT`
pub const VALUE_SHIFT: u32 = 12;
/// `SY_PROXY_SOURCE_SHIFT`
pub const SOURCE_SHIFT: u32 = 13;
/// `SY_PROXY_WINDOW_SHIFT`
pub const WINDOW_SHIFT: u32 = 24;
/// `SY_PROXY_OFFSET_SHIFT`
pub const OFFSET_SHIFT: u32 = 32;

/// `sy_proxy_command`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(16))]
pub struct RawCommand {
    /// Lap, opcode, source, window, offset at the peer.
    pub first: u64,
    /// Lap bit; length and offset in the source, or value.
    pub second: u64,
}

/// `sy_proxy_lane_words`: the thread's report to the posters.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct LaneWords {
    /// Commands that are over.
    pub completed: u64,
    /// 0, or the reason why the lane is out of service.
    pub error: u64,
    pad: [u64; 14],
}

/// `sy_proxy_lane_state`: the shared state of posters.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct LaneState {
    /// Commands given to a poster.
    pub reserved: u64,
    /// Number behind the last quiet that was posted without waiting for it.
    pub asked: u64,
    pad0: [u64; 14],
    /// `completed` as the last poster read it.
    pub seen: u64,
    pad1: [u64; 15],
    /// 0, or the status that took the lane out of service at this end.
    pub error: u64,
    /// Time of the last read of the words by a poster that waits for something else.
    pub polled_at: u64,
    pad2: [u64; 14],
}

/// `sy_proxy_lane`
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LaneHandle {
    /// Address of the ring.
    pub commands: u64,
    /// Address of a [`LaneWords`].
    pub words: u64,
    /// Address of a [`LaneState`].
    pub state: u64,
    /// The ring has `1 << depth_shift` cells.
    pub depth_shift: u32,
    /// Limit of commands in flight.
    pub budget: u32,
}

/// `sy_proxy_peer`: a peer's slot and the lanes to it, as kernels see it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PeerHandle {
    /// Address of [`LaneHandle`]s.
    pub lanes: u64,
    /// Local copy of the slot, where kernels store data before they put it.
    pub mirror: u64,
    /// Bytes of the slot and of the mirror.
    pub slot_bytes: u64,
    /// 0, or address of an error word.
    pub error: u64,
    /// 0, or address of a word in mapped memory: bit `peer` ends every wait.
    pub abort_mask: u64,
    /// Bound of a single wait.
    pub timeout_ns: u64,
    /// Lanes.
    pub num_lanes: u32,
    /// Window that the commands name.
    pub window: u32,
    /// Identifies the peer in error words and the abort mask.
    pub peer: u32,
    /// [`VERSION`]
    pub version: u32,
}

impl PeerHandle {
    /// Finds an error in a peer, in the words of `sy_proxy_check_peer`; `tests/it/lanes.rs` compares both. Kernels
    /// divide by its number of lanes, and commands have 32 bits for an offset.
    #[must_use]
    pub fn check(&self) -> Option<&'static str> {
        let is_at = |address: u64, multiple: u64| address != 0 && address.is_multiple_of(multiple);
        let checks = [
            (self.version == VERSION, "version is not SY_PROXY_VERSION"),
            ((1..=MAX_LANES).contains(&self.num_lanes), "num_lanes is not from 1 to 256"),
            (is_at(self.lanes, 8), "lanes is null or not aligned to 8 bytes"),
            (is_at(self.mirror, 16), "mirror is null or not aligned to 16 bytes"),
            ((1..=MAX_SLOT_BYTES).contains(&self.slot_bytes), "slot_bytes is 0 or beyond 4 GiB"),
            ((self.window as usize) < MAX_WINDOWS, "window is not below 256"),
            (
                self.error.is_multiple_of(8) && self.abort_mask.is_multiple_of(4),
                "error is not aligned to 8 bytes, or abort_mask not to 4",
            ),
        ];
        checks.iter().find(|(is_good, _)| !is_good).map(|(_, what)| *what)
    }
}

/// `SY_PROXY_*`: results of device functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs, reason = "described in the header, under these names")]
pub enum Status {
    Ok = 0,
    Timeout = 1,
    Aborted = 2,
    Refused = 3,
    Desync = 4,
    Argument = 5,
}

const _: () = assert!(size_of::<RawCommand>() == 16 && align_of::<RawCommand>() == 16);
const _: () = assert!(size_of::<LaneWords>() == 128 && offset_of!(LaneWords, error) == 8);
const _: () = assert!(size_of::<LaneState>() == 384 && offset_of!(LaneState, polled_at) == 264);
const _: () = assert!(offset_of!(LaneState, seen) == 128 && offset_of!(LaneState, error) == 256);
const _: () = assert!(size_of::<LaneHandle>() == 32 && offset_of!(LaneHandle, budget) == 28);
const _: () = assert!(size_of::<PeerHandle>() == 64 && offset_of!(PeerHandle, num_lanes) == 48);
