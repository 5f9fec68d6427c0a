//! Settings of a fleet.

use std::sync::Arc;
use std::time::Duration;

use control_api::Security;
use p2p_core::device::{DeviceMemory, DeviceSlots};
use p2p_core::{SlotConfig, SpinPolicy, Transports};

use super::link::DeviceLink;

/// Policy of a call for an expert that no live server holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingExpert {
    /// The call fails with [`ClientError::NoReplica`](crate::ClientError::NoReplica), which names layer and
    /// expert.
    #[default]
    Fail,
    /// The call leaves the expert out, scales the token's other experts so that the weights keep their sum, and
    /// counts it. A token without any expert left gets zeros.
    ///
    /// The first such call waits for a replica as long as `replica_wait` says. Later calls do not wait again
    /// until a server joins or the placement changes.
    DropAndRenormalise,
}

/// Limits and names that every part of a client reads.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub name: String,
    pub slot: SlotConfig,
    pub transports: Transports,
    /// Transports for servers of these names, instead of `transports`.
    pub peer_transports: Vec<(String, Transports)>,
    pub secret: Option<String>,
    pub security: Security,
    /// Slots in GPU memory. The slots of `slot` then carry credits and progress only.
    pub device: Option<DeviceSupport>,
    pub deadline: Duration,
    pub work_limit: Duration,
    pub replica_wait: Duration,
    pub connect_timeout: Duration,
    pub on_missing: OnMissingExpert,
    pub spin: SpinPolicy,
    pub payload_checksum: bool,
    /// Hedges per published frame; 0 turns them off.
    pub hedge_budget: f64,
}

impl Settings {
    /// Transports to offer to the server called `name`.
    pub fn transports_for(&self, name: &str) -> &Transports {
        let own = self.peer_transports.iter().find(|(peer, _)| peer == name);
        own.map_or(&self.transports, |(_, transports)| transports)
    }

    /// Longest sleep while answers are outstanding. A sign of life wakes no thread, so a waiter must look often
    /// enough to measure a silence.
    pub fn tick(&self) -> Duration {
        (self.deadline / 32).clamp(Duration::from_millis(1), Duration::from_millis(3))
    }
}

/// The GPU client's part in the handshakes of its fleet.
#[derive(Debug, Clone)]
pub(crate) struct DeviceSupport {
    /// Memory that this side offers for slots.
    pub memory: Arc<dyn DeviceMemory>,
    /// Makes the GPU part of a new link of its slots; `None` for slots of another kind than those offered. Called on
    /// the connector's task.
    pub link_of: fn(DeviceSlots) -> Option<Arc<dyn DeviceLink>>,
}
