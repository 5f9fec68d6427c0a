//! What calls and control tasks of one client share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use kernels::slots::DeviceSide;
use p2p_core::{SlotConfig, SpinPolicy, Transports};
use protocol::FrameGeometry;
use tokio::sync::{mpsc, watch};

use super::builder::{ClientModel, OnMissingExpert};
use super::control::Command;
use super::error::ClientError;
use super::timing::LayerReport;
use crate::metrics::ClientMetrics;
use crate::placement::Routing;

/// Called at the end of every successful call, on the thread of the call.
pub type LayerObserver = Arc<dyn Fn(&LayerReport) + Send + Sync>;

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub name: String,
    pub slot: SlotConfig,
    pub transports: Transports,
    /// Transports towards servers of these names, instead.
    pub peer_transports: Vec<(String, Transports)>,
    pub ticket: Option<String>,
    /// Slots in the memory of GPUs, which kernels use; those of `slot` only stand beside them then.
    pub device: Option<DeviceSide>,
    pub deadline: Duration,
    pub work_limit: Duration,
    pub replica_wait: Duration,
    pub connect_timeout: Duration,
    pub on_missing: OnMissingExpert,
    pub spin: SpinPolicy,
    pub payload_checksum: bool,
}

impl Settings {
    /// What to offer to the server called `name`.
    pub fn transports_for(&self, name: &str) -> &Transports {
        let own = self.peer_transports.iter().find(|(peer, _)| peer == name);
        own.map_or(&self.transports, |(_, transports)| transports)
    }

    /// Longest sleep while answers are outstanding. Signs of life wake nobody, so they have to be
    /// looked at often enough for a silence to be measured.
    pub fn tick(&self) -> Duration {
        (self.deadline / 32).clamp(Duration::from_millis(1), Duration::from_millis(3))
    }
}

pub(crate) struct Shared {
    pub model: ClientModel,
    /// MoE layers counted, by layer number; `u32::MAX` for a dense one.
    pub layer_idx: Vec<u32>,
    pub geometry: FrameGeometry,
    pub settings: Settings,
    pub routing: ArcSwap<Routing>,
    pub metrics: ClientMetrics,
    pub observer: Option<LayerObserver>,
    pub commands: mpsc::UnboundedSender<Command>,
    /// How often a place for a server became free, where there is a limit on them.
    pub places_freed: watch::Sender<u64>,
}

impl Shared {
    /// Which of the MoE layers a layer is.
    pub fn layer_idx_of(&self, layer: u32) -> Result<usize, ClientError> {
        match self.layer_idx.get(layer as usize) {
            Some(&idx) if idx != u32::MAX => Ok(idx as usize),
            _ => Err(ClientError::UnknownLayer {
                layer,
                expected: describe_layers(&self.model.moe_layers),
            }),
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// A few layers are listed, many are counted.
fn describe_layers(layers: &[u32]) -> String {
    match layers {
        [first, .., last] if layers.len() > 8 => {
            format!("the {} MoE layers from {first} to {last}", layers.len())
        }
        few => few.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    }
}
