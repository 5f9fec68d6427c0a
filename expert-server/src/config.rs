//! What an expert server is told at its start.

pub(crate) mod device;
pub(crate) mod observer;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use checkpoint::ModelConfig;
use control_api::{Assignment, LayerAssignment};
use p2p_core::{SlotConfig, SpinPolicy, TransportKind, Transports};

use crate::device::{BatchObserver, DeviceOptions};

/// Settings of one server. [`ServerConfig::new`] fills in the defaults.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Directory of the checkpoint.
    pub model_dir: PathBuf,
    /// Name of the server, unique in the fleet and stable over restarts: 1 to 128 printable ASCII
    /// characters without spaces.
    pub name: String,
    /// Where clients connect. Port 0 takes a free one.
    pub data_addr: SocketAddr,
    /// `host:port` that clients are told, where it differs from `data_addr`.
    pub advertise_addr: Option<String>,
    /// Where `/metrics`, `/healthz` and `/readyz` are served; `None` serves nothing.
    pub metrics_addr: Option<SocketAddr>,
    /// Who says which experts to hold.
    pub placement: Placement,
    /// Serves from a GPU; `None` from CPUs. Slots are then in its memory, with the size and frames of
    /// `slot`. Clients come within the host, and over the networks of `transports`, if it has any: slots
    /// of such clients are in page-locked memory, and a proxy posts for the kernels.
    pub device: Option<DeviceOptions>,
    /// Compute threads, the data thread included; 0 takes as many as the process has CPUs.
    pub num_threads: usize,
    /// CPUs of the compute threads; empty leaves them to the system.
    pub cpus: Vec<usize>,
    /// Size of a slot and frames in it. Clients must have the same.
    pub slot: SlotConfig,
    /// Transports to offer.
    pub transports: Transports,
    /// Secret that clients must show; `None` admits everybody who reaches the port.
    pub ticket: Option<Ticket>,
    /// Bounds on what clients can take.
    pub limits: Limits,
    /// How long the data thread polls before it sleeps.
    pub spin: SpinPolicy,
    /// Longest time that a drain may take.
    pub drain_timeout: Duration,
    /// Without a frame for this long, a draining server is idle and may go.
    pub drain_idle: Duration,
    /// Longest wait for the control plane's answer to the first registration.
    pub register_timeout: Duration,
    /// Most (layer, expert) pairs that the control plane may assign; `None` for no limit.
    pub capacity_experts: Option<u32>,
    /// Counts tokens by layer and expert in the metrics, not by expert alone: as many time series
    /// as experts are held.
    pub metrics_by_layer: bool,
    /// Told of every batch of a GPU, for measurements.
    pub batch_observer: Option<BatchObserver>,
}

impl ServerConfig {
    /// Defaults, on a free port of the loopback interface.
    #[must_use]
    pub fn new(
        model_dir: impl Into<PathBuf>,
        name: impl Into<String>,
        placement: Placement,
    ) -> Self {
        Self {
            model_dir: model_dir.into(),
            name: name.into(),
            data_addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise_addr: None,
            metrics_addr: None,
            placement,
            device: None,
            num_threads: 0,
            cpus: Vec::new(),
            slot: SlotConfig::default(),
            transports: vec![TransportKind::Local, TransportKind::Shm].into(),
            ticket: None,
            limits: Limits::default(),
            spin: SpinPolicy::default(),
            drain_timeout: Duration::from_secs(30),
            drain_idle: Duration::from_secs(1),
            register_timeout: Duration::from_secs(30),
            capacity_experts: None,
            metrics_by_layer: false,
            batch_observer: None,
        }
    }
}

/// A shared secret, which no debug print shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Ticket(String);

impl Ticket {
    /// Wraps a secret.
    #[must_use]
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    /// The secret.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket(…)")
    }
}

/// Who says which experts a server holds.
#[derive(Clone)]
pub enum Placement {
    /// A control plane, which the server joins.
    ControlPlane {
        /// `http://HOST:PORT`.
        url: String,
        /// Bearer token.
        token: Option<String>,
    },
    /// The configuration; there is no control plane.
    Static(ExpertSelection),
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Not the token: configurations end up in logs.
            Self::ControlPlane { url, .. } => {
                f.debug_struct("ControlPlane").field("url", url).finish_non_exhaustive()
            }
            Self::Static(selection) => f.debug_tuple("Static").field(selection).finish(),
        }
    }
}

/// Bounds on what clients can take from a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most clients at a time.
    pub max_links: usize,
    /// Most tokens merged into one batch. A single frame may exceed it alone.
    pub max_batch_tokens: usize,
    /// Most (token, expert) pairs merged into one batch. A single frame may exceed it alone.
    pub max_batch_entries: usize,
    /// Finished answers kept for a client that gives no credit, but at least as many as a slot has
    /// frames; further frames of it wait.
    pub max_backlog_frames: usize,
    /// A client that takes no answer for this long is dropped.
    pub credit_timeout: Duration,
    /// A client that sends more malformed frames than this is dropped.
    pub max_bad_frames: u32,
    /// Longest handshake.
    pub handshake_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_links: 4096,
            max_batch_tokens: 4096,
            max_batch_entries: 32768,
            max_backlog_frames: 2,
            credit_timeout: Duration::from_secs(10),
            max_bad_frames: 100,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

/// Experts chosen by hand.
///
/// As text: `all`; expert ranges for every layer, such as `0-3,8`; or ranges by layer, such as
/// `0:0-3;1:4-7`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpertSelection {
    /// Every expert of every layer.
    All,
    /// These experts of every layer, strictly ascending.
    EveryLayer(Vec<u32>),
    /// Experts by layer.
    ByLayer(Assignment),
}

/// A selection that makes no sense, by itself or for the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectionError {
    /// The text is not a selection.
    #[error(
        "'{found}' is not a selection of experts: expected `all`, `0-3,8` or `LAYER:0-3,8;LAYER:…`"
    )]
    Syntax {
        /// The text.
        found: String,
    },
    /// Nothing is selected.
    #[error("the selection holds no expert: a server needs at least one")]
    Empty,
    /// The layer has no routed experts.
    #[error(
        "layer {layer} of the selection has no routed experts; the model's are {first} to {last}"
    )]
    Layer {
        /// The layer.
        layer: u32,
        /// The first that has some.
        first: u32,
        /// The last that has some.
        last: u32,
    },
    /// The model has no such expert.
    #[error(
        "expert {expert} of the selection does not exist: the model has {num_experts} per layer"
    )]
    Expert {
        /// The expert.
        expert: u32,
        /// Experts per layer.
        num_experts: u32,
    },
}

impl ExpertSelection {
    /// The selected experts of a model.
    ///
    /// # Errors
    /// [`SelectionError`] when a layer or an expert does not exist, or nothing is selected.
    pub fn resolve(&self, model: &ModelConfig) -> Result<Assignment, SelectionError> {
        let moe_layers = model.moe_layers();
        let everywhere = |experts: Vec<u32>| {
            let layers = moe_layers.iter();
            let layers = layers.map(|&layer| LayerAssignment { layer, experts: experts.clone() });
            Assignment { layers: layers.collect() }
        };
        let assignment = match self {
            Self::All => everywhere((0..model.num_experts).collect()),
            Self::EveryLayer(experts) => everywhere(experts.clone()),
            Self::ByLayer(assignment) => assignment.clone(),
        };
        check_assignment(&assignment, model)?;
        Ok(assignment)
    }
}

/// Whether a model has the layers and experts of an assignment.
pub(crate) fn check_assignment(
    assignment: &Assignment,
    model: &ModelConfig,
) -> Result<(), SelectionError> {
    if assignment.is_empty() {
        return Err(SelectionError::Empty);
    }
    let moe_layers = model.moe_layers();
    for LayerAssignment { layer, experts } in &assignment.layers {
        if !model.is_moe_layer(*layer) {
            let (first, last) = (moe_layers.first(), moe_layers.last());
            return Err(SelectionError::Layer {
                layer: *layer,
                first: first.copied().unwrap_or(0),
                last: last.copied().unwrap_or(0),
            });
        }
        if let Some(&expert) = experts.iter().find(|&&expert| expert >= model.num_experts) {
            return Err(SelectionError::Expert { expert, num_experts: model.num_experts });
        }
    }
    Ok(())
}

impl FromStr for ExpertSelection {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Self, SelectionError> {
        let syntax = || SelectionError::Syntax { found: text.chars().take(80).collect() };
        let text = text.trim();
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self::All);
        }
        if !text.contains(':') {
            return Ok(Self::EveryLayer(parse_ranges(text).ok_or_else(syntax)?));
        }
        let mut layers = Vec::new();
        for part in text.split(';').filter(|part| !part.trim().is_empty()) {
            let (layer, experts) = part.split_once(':').ok_or_else(syntax)?;
            let layer = layer.trim().parse().map_err(|_| syntax())?;
            layers.push(LayerAssignment {
                layer,
                experts: parse_ranges(experts).ok_or_else(syntax)?,
            });
        }
        layers.sort_by_key(|entry| entry.layer);
        if layers.windows(2).any(|pair| pair[0].layer == pair[1].layer) {
            return Err(syntax());
        }
        Ok(Self::ByLayer(Assignment { layers }))
    }
}

/// `0-3,8` as a sorted list without repetitions.
fn parse_ranges(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // The largest model knows a few hundred experts; the bound keeps a typo from taking memory.
        if last < first || last >= MAX_EXPERTS {
            return None;
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Some(numbers)
}

const MAX_EXPERTS: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_read_in_every_spelling_and_nonsense_is_refused() {
        assert_eq!("all".parse(), Ok(ExpertSelection::All));
        assert_eq!("3,0-1".parse(), Ok(ExpertSelection::EveryLayer(vec![0, 1, 3])));
        let by_layer: ExpertSelection = "4:2;1:0-1".parse().unwrap();
        let ExpertSelection::ByLayer(assignment) = by_layer else { panic!("by layer") };
        assert_eq!(assignment.experts(1), [0, 1]);
        assert_eq!(assignment.experts(4), [2]);
        for bad in ["", "a", "3-1", "0-4294967295", "1:0;1:2", "1:", ":", "0-", "-3"] {
            let error = bad.parse::<ExpertSelection>();
            assert!(matches!(error, Err(SelectionError::Syntax { .. })), "{bad}: {error:?}");
        }
    }

    #[test]
    fn secrets_never_show_in_a_debug_print() {
        let placement =
            Placement::ControlPlane { url: "http://c".into(), token: Some("sesame".into()) };
        let mut config = ServerConfig::new("m", "n", placement);
        config.ticket = Some(Ticket::new("sesame"));
        assert!(!format!("{config:?}").contains("sesame"));
    }
}
