//! State that the calls and the control task of one client share.

use std::fmt;
use std::sync::Arc;

use arc_swap::ArcSwap;
use protocol::FrameGeometry;
use telemetry::Recorder;
use tokio::sync::{mpsc, watch};

use super::command::Command;
use super::pace::Pacing;
use super::placement::Routing;
use super::settings::Settings;
use super::tickets::Tickets;
use crate::error::ClientError;
use crate::metrics::ClientMetrics;
use crate::model::ClientModel;
use crate::timing::LayerReport;

/// Function that every successful call runs at its end, on the caller's thread.
pub type LayerObserver = Arc<dyn Fn(&LayerReport) + Send + Sync>;

/// State of one client that its calls and its control task share.
pub(crate) struct Shared {
    pub model: ClientModel,
    /// Index among the MoE layers, by layer number; `u32::MAX` for a dense layer.
    pub layer_idx: Vec<u32>,
    pub geometry: FrameGeometry,
    pub settings: Settings,
    pub routing: ArcSwap<Routing>,
    pub metrics: ClientMetrics,
    pub pacing: Pacing,
    pub observer: Option<LayerObserver>,
    /// Takes the times of traced calls.
    pub recorder: Option<Recorder>,
    pub commands: mpsc::UnboundedSender<Command>,
    /// `None` without a control plane.
    pub tickets: Option<Tickets>,
    /// How many places for servers have become free so far, in a client that has a limit on servers.
    pub places_freed: watch::Sender<u64>,
}

impl Shared {
    /// Index of `layer` among the MoE layers.
    pub fn layer_idx_of(&self, layer: u32) -> Result<usize, ClientError> {
        match self.layer_idx.get(layer as usize) {
            Some(&idx) if idx != u32::MAX => Ok(idx as usize),
            _ => Err(ClientError::UnknownLayer {
                layer,
                expected: describe_layers(&self.model.moe_layers),
            }),
        }
    }

    /// Names of the servers that hold an expert, by the placement in force. Empty if there is no such layer or expert.
    pub fn replicas(&self, layer: u32, expert: u32) -> Vec<String> {
        let routing = self.routing.load();
        match (self.layer_idx_of(layer), expert < self.model.shape.num_experts) {
            (Ok(layer_idx), true) => routing
                .replicas(layer_idx, expert)
                .iter()
                .map(|&rank| routing.servers[rank as usize].name().to_owned())
                .collect(),
            _ => Vec::new(),
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Lists up to eight layers; describes more by their number and range.
fn describe_layers(layers: &[u32]) -> String {
    match layers {
        [first, .., last] if layers.len() > 8 => {
            format!("the {} MoE layers from {first} to {last}", layers.len())
        }
        few => few.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
    }
}
