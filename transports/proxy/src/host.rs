//! Peers whose posters run on this host: device functions that a host compiler has compiled.

use p2p_core::Region;

use crate::abi::{LaneHandle, LaneState, PeerHandle, VERSION};
use crate::lane::{LaneError, Lanes};
use crate::memory;

/// The shared state of a peer's posters, and their handle.
#[derive(Debug)]
pub struct HostPoster {
    handle: PeerHandle,
    /// Handles of the lanes, then their states.
    memory: Region,
    _lanes: Lanes,
}

/// Settings of a peer's posters besides its lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PosterConfig {
    /// Address of the mirror, as posters reach it.
    pub mirror: u64,
    /// Bytes of the window that commands name, and of the mirror.
    pub slot_bytes: u64,
    /// Window that commands name.
    pub window: u32,
    /// Identifies the peer in error words and the abort mask.
    pub peer: u32,
    /// Bound of a single wait.
    pub timeout_ns: u64,
    /// 0, or address of an error word.
    pub error: u64,
    /// 0, or address of the abort mask.
    pub abort_mask: u64,
}

impl HostPoster {
    /// Posters on `lanes`.
    ///
    /// # Errors
    /// [`LaneError`]: no memory, or a configuration that the device functions do not support.
    pub fn new(lanes: &Lanes, config: PosterConfig) -> Result<Self, LaneError> {
        let num_lanes = lanes.config().num_lanes;
        let (handles, states) = sizes(num_lanes);
        let memory = Region::anonymous(handles + states)?;
        let base = memory.as_ptr().as_ptr() as u64;
        let bytes = handle_bytes(lanes, num_lanes, base + handles as u64);
        if let Err(error) = memory::write(&memory, 0, &bytes) {
            tracing::error!(%error, "handles of lanes do not fit");
        }
        let handle = peer_handle(config, num_lanes, base)?;
        Ok(Self { handle, memory, _lanes: lanes.clone() })
    }

    /// Argument of the device functions, valid as long as `self`.
    #[must_use]
    pub const fn handle(&self) -> &PeerHandle {
        &self.handle
    }

    /// Addresses of the lanes' handles and states.
    #[must_use]
    pub const fn memory(&self) -> &Region {
        &self.memory
    }
}

/// Bytes of the handles (rounded up) and of the states of lanes.
pub(crate) const fn sizes(num_lanes: u32) -> (usize, usize) {
    let num = num_lanes as usize;
    ((num * size_of::<LaneHandle>()).next_multiple_of(128), num * size_of::<LaneState>())
}

/// Handles of the first lanes, with states from address `states` on.
pub(crate) fn handle_bytes(lanes: &Lanes, num_lanes: u32, states: u64) -> Vec<u8> {
    let state = |lane: u32| states + u64::from(lane) * size_of::<LaneState>() as u64;
    let handles = (0..num_lanes).map(|lane| lanes.handle(lane, state(lane)));
    handles.flat_map(|handle| bytemuck::bytes_of(&handle).to_vec()).collect()
}

/// The handle, if posters can work with it.
pub(crate) fn peer_handle(
    config: PosterConfig,
    num_lanes: u32,
    lanes: u64,
) -> Result<PeerHandle, LaneError> {
    let handle = PeerHandle {
        lanes,
        mirror: config.mirror,
        slot_bytes: config.slot_bytes,
        error: config.error,
        abort_mask: config.abort_mask,
        timeout_ns: config.timeout_ns,
        num_lanes,
        window: config.window,
        peer: config.peer,
        version: VERSION,
    };
    match handle.check() {
        Some(what) => Err(LaneError::Handle(what)),
        None => Ok(handle),
    }
}
