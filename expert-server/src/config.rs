//! Settings of an expert server.

#[cfg(feature = "device")]
pub(crate) mod device;
#[cfg(feature = "device")]
pub(crate) mod observer;
pub(crate) mod selection;
pub(crate) mod weights;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use checkpoint::Coverage;
use control_api::Security;
use p2p_core::{SlotConfig, SpinPolicy, TransportKind, Transports};
use telemetry::Recorder;

#[cfg(feature = "device")]
use self::device::DeviceOptions;
#[cfg(feature = "device")]
use self::observer::BatchObserver;
pub use self::selection::{ExpertSelection, SelectionError};
pub use self::weights::{DEFAULT_READ_LIMIT, WeightsConfig, WeightsFrom};

/// Settings of one server. [`ServerConfig::new`] fills in the defaults.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Directory of the checkpoint.
    pub model_dir: PathBuf,
    /// Name of the server, unique in the fleet and stable over restarts: 1 to 128 letters, digits, `.`, `_` and `-`, the
    /// first a letter or digit.
    pub name: String,
    /// Address to listen on for clients. Port 0 takes a free port.
    pub data_addr: SocketAddr,
    /// `host:port` that clients connect to, if it differs from `data_addr`.
    pub advertise_addr: Option<String>,
    /// Address of `/metrics`, `/healthz` and `/readyz`; `None` serves none of them.
    pub metrics_addr: Option<SocketAddr>,
    /// Source of the assignment of experts.
    pub placement: Placement,
    /// Bytes of the weights to verify. [`Coverage::Full`] reads all bytes of all experts of the checkpoint before the
    /// server joins. Of two servers of a fleet that do so with different bytes, the control plane refuses the second.
    /// The fingerprint that peers compare covers sampled bytes in any case.
    pub verify: Coverage,
    /// Serves from a GPU; `None` serves from CPUs. Slots are then in the GPU's memory, with the size and frames
    /// of `slot`. Clients connect from within the host and over the networks of `transports`. Slots of a client
    /// over a network are in page-locked memory, and a proxy posts for the kernels.
    #[cfg(feature = "device")]
    pub device: Option<DeviceOptions>,
    /// Compute threads, the data thread included; 0 takes as many as the process has CPUs.
    pub num_threads: usize,
    /// CPUs of the compute threads; with an empty list the system chooses.
    pub cpus: Vec<usize>,
    /// Size of a slot and number of its frames. Clients need the same.
    pub slot: SlotConfig,
    /// Transports to offer.
    pub transports: Transports,
    /// File with the bearer token. When the control plane refuses the token, the server reads the file again.
    pub token_file: Option<PathBuf>,
    /// Tickets of clients.
    pub tickets: TicketMode,
    /// Secret that clients must present if they need no ticket; `None` admits every client that reaches the port. Other
    /// servers that read weights need it in any case.
    pub secret: Option<Secret>,
    /// TLS of the listeners, and of the connection to the control plane.
    pub security: Security,
    /// Bounds on the resources that clients can use.
    pub limits: Limits,
    /// Time for which the data thread polls before it sleeps.
    pub spin: SpinPolicy,
    /// Longest duration of a drain.
    pub drain_timeout: Duration,
    /// A draining server ends once it has received no frame for this long.
    pub drain_idle: Duration,
    /// Longest wait for the control plane's answer to the first registration.
    pub register_timeout: Duration,
    /// Failure domain, such as a rack. `None` if there are no zones.
    pub zone: Option<String>,
    /// Most (layer, expert) pairs that the control plane may assign; `None` for no limit.
    pub capacity_experts: Option<u32>,
    /// Source of the weights, and what other servers may read of them.
    pub weights: WeightsConfig,
    /// Counts tokens by layer and expert in the metrics, instead of by expert alone. That makes one time series
    /// per held expert.
    pub metrics_by_layer: bool,
    /// Records the times of sampled calls for traces. A server on a GPU samples frames instead of calls.
    pub recorder: Option<Recorder>,
    /// Receives a report of every batch of a GPU, for measurements.
    #[cfg(feature = "device")]
    pub batch_observer: Option<BatchObserver>,
}

impl ServerConfig {
    /// Whether peers need a ticket of the control plane.
    pub(crate) fn wants_tickets(&self) -> bool {
        let is_member = matches!(self.placement, Placement::ControlPlane { .. });
        is_member && self.tickets == TicketMode::Required
    }

    /// The defaults, on a free port of the loopback interface.
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
            token_file: None,
            tickets: TicketMode::Required,
            placement,
            verify: Coverage::Sampled,
            #[cfg(feature = "device")]
            device: None,
            num_threads: 0,
            cpus: Vec::new(),
            slot: SlotConfig::default(),
            transports: vec![TransportKind::Local, TransportKind::Shm].into(),
            secret: None,
            security: Security::default(),
            limits: Limits::default(),
            spin: SpinPolicy::default(),
            drain_timeout: Duration::from_secs(30),
            drain_idle: Duration::from_secs(1),
            register_timeout: Duration::from_secs(30),
            zone: None,
            capacity_experts: None,
            weights: WeightsConfig::default(),
            metrics_by_layer: false,
            recorder: None,
            #[cfg(feature = "device")]
            batch_observer: None,
        }
    }
}

/// A shared secret. Its debug output does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
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

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Tickets of a server's clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TicketMode {
    /// A server with a control plane admits clients with a ticket of it only. There are no tickets without one.
    #[default]
    Required,
    /// Clients show the shared secret, if there is one.
    Off,
}

/// Source of a server's assignment of experts.
#[derive(Clone)]
pub enum Placement {
    /// A control plane that the server joins.
    ControlPlane {
        /// `http://HOST:PORT`.
        url: String,
        /// Bearer token.
        token: Option<String>,
    },
    /// A fixed selection, without a control plane.
    Static(ExpertSelection),
}

impl fmt::Debug for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Without the token, because configurations are logged.
            Self::ControlPlane { url, .. } => {
                f.debug_struct("ControlPlane").field("url", url).finish_non_exhaustive()
            }
            Self::Static(selection) => f.debug_tuple("Static").field(selection).finish(),
        }
    }
}

/// Bounds on the resources that clients can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most clients at a time.
    pub max_links: usize,
    /// Most tokens merged into one batch. A single frame may exceed it.
    pub max_batch_tokens: usize,
    /// Most (token, expert) pairs merged into one batch. A single frame may exceed it.
    pub max_batch_entries: usize,
    /// Finished answers that the server keeps for a client that gives no credit, but at least as many as a slot
    /// has frames. Further frames of the client wait.
    pub max_backlog_frames: usize,
    /// The server drops a client that gives no credit for an answer for this long.
    pub credit_timeout: Duration,
    /// The server drops a client that sends more malformed frames than this.
    pub max_bad_frames: u32,
    /// Longest duration of a handshake.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_never_show_in_a_debug_print() {
        let placement =
            Placement::ControlPlane { url: "http://c".into(), token: Some("sesame".into()) };
        let mut config = ServerConfig::new("m", "n", placement);
        config.secret = Some(Secret::new("sesame"));
        assert!(!format!("{config:?}").contains("sesame"));
    }
}
