//! The two steps by which a server gets its experts and its data thread, on CPUs or on a GPU.

use std::collections::BTreeMap;
use std::sync::Arc;

use checkpoint::Checkpoint;
use p2p_core::bootstrap::ListenerConfig;

use crate::clients::FrameLimits;
use crate::compute::{LoadError, LoadProgress};
use crate::config::ServerConfig;
use crate::error::{DataError, StartError};
use crate::experts::Experts;
use crate::metrics::ServerMetrics;
use crate::plane::{DataPlane, ThreadEnd};

/// The memory and processors that a server will use. Nothing is loaded yet.
pub(crate) trait Backend: Send {
    /// Name of the device in logs: `cpu`, or a GPU such as `cuda:0`.
    fn device_name(&self) -> String;

    /// Limits of clients' frames.
    fn frame_limits(&self) -> FrameLimits;

    /// Settings of the listener: `common`, with what slots in this backend's memory need.
    fn listener_config(
        &mut self,
        config: &ServerConfig,
        common: ListenerConfig,
    ) -> Result<ListenerConfig, StartError>;

    /// Loads experts (layer → expert ids) and calls `progress` after each. Blocks while it reads the weights. Keeps
    /// room for `rooms` experts (by layer) in all, these included, for experts that follow.
    fn load(
        self: Box<Self>,
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        rooms: &BTreeMap<u32, usize>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn LoadedBackend>, LoadError>;
}

/// A backend with experts in its memory.
pub(crate) trait LoadedBackend: Send {
    fn experts(&self) -> Arc<dyn Experts>;

    /// Starts the data thread. The receiver gets the thread's end.
    fn start(
        self: Box<Self>,
        config: &ServerConfig,
        metrics: &ServerMetrics,
    ) -> Result<(Arc<dyn DataPlane>, ThreadEnd), DataError>;
}
