//! What calls and control tasks of one client share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use p2p_core::{SlotConfig, SpinPolicy, Transports};
use protocol::FrameGeometry;
use tokio::sync::mpsc;

use super::builder::{ClientModel, OnMissingExpert};
use super::control::Command;
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
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}
