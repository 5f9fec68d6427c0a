//! The part of a link that lies in GPU memory, as far as a fleet must know it.
//!
//! The handshake brings a pair of slots in GPU memory where both sides ask for one. A fleet only keeps the pair,
//! tells when its link is down, and frees it. All else about it is the GPU client's, below `device`.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use p2p_core::device::{DeviceMemory, DeviceSlots as JoinedSlots};

use super::link::LinkState;

/// The GPU client's part in the handshakes of its fleet.
#[derive(Debug, Clone)]
pub(crate) struct DeviceSupport {
    /// This side's offer.
    pub memory: Arc<dyn DeviceMemory>,
    /// Takes the slots of a new connection over. `None` for slots of another kind than this side offers, which
    /// the handshake excludes. Called on the connector's task.
    pub slots_of: fn(JoinedSlots) -> Option<Arc<dyn DeviceSlots>>,
}

/// The slots of one link in GPU memory.
pub(crate) trait DeviceSlots: Any + Debug + Send + Sync {
    /// The link is down: ends what kernels wait for. Any thread may call, more than once.
    fn link_down(&self);

    /// Takes the memory out if the link is down and no call uses it. Dropping the result frees the memory and may
    /// take milliseconds.
    fn take_if_unused(&self, state: &LinkState) -> Option<Box<dyn Send>>;
}
