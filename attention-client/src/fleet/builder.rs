//! The common part of both clients' builders, and the start of a fleet.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use control_api::{ClientOptions, ControlClient, ModelDescriptor, PlacementTable, Security};
use p2p_core::{SlotConfig, SlotLayout, SpinPolicy, TransportKind};
use prometheus::Registry;
use protocol::{FrameGeometry, ModelShape, WireDtype};
use telemetry::Recorder;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::Fleet;
use super::control::{Control, TableSource};
use super::pace::Pacing;
use super::placement::Routing;
use super::settings::{OnMissingExpert, Settings};
use super::shared::{LayerObserver, Shared};
use super::tickets::Tickets;
use crate::error::BuildError;
use crate::metrics::ClientMetrics;
use crate::model::{ClientModel, difference};

/// The source of the placement.
enum Source {
    None,
    Table(Box<PlacementTable>),
    Watch(watch::Receiver<Arc<PlacementTable>>),
    ControlPlane,
}

/// Settings of a [`Fleet`]. The builders of both clients wrap one.
pub(crate) struct FleetBuilder {
    pub model: ClientModel,
    pub settings: Settings,
    pub dtype: WireDtype,
    pub response_dtype: WireDtype,
    pub max_lanes: NonZeroUsize,
    pub registry: Registry,
    pub observer: Option<LayerObserver>,
    pub recorder: Option<Recorder>,
    pub runtime: Option<Handle>,
    source: Source,
    control: Option<(String, Option<String>)>,
    token_file: Option<std::path::PathBuf>,
}

impl FleetBuilder {
    pub fn new(model: ClientModel) -> Self {
        Self {
            model,
            settings: Settings {
                name: format!("client-{}", std::process::id()),
                slot: SlotConfig::default(),
                transports: vec![TransportKind::Local, TransportKind::Shm].into(),
                peer_transports: Vec::new(),
                secret: None,
                security: Security::default(),
                device: None,
                deadline: DEFAULT_DEADLINE,
                work_limit: DEFAULT_WORK_LIMIT,
                replica_wait: DEFAULT_REPLICA_WAIT,
                connect_timeout: DEFAULT_CONNECT_TIMEOUT,
                on_missing: OnMissingExpert::Fail,
                spin: SpinPolicy::default(),
                payload_checksum: false,
                hedge_budget: DEFAULT_HEDGE_BUDGET,
            },
            dtype: WireDtype::F32,
            response_dtype: WireDtype::F32,
            max_lanes: DEFAULT_MAX_LANES,
            registry: Registry::new(),
            observer: None,
            recorder: None,
            runtime: None,
            source: Source::None,
            control: None,
            token_file: None,
        }
    }

    pub fn token_file(&mut self, path: Option<std::path::PathBuf>) {
        self.token_file = path;
    }

    pub fn control_plane(&mut self, url: String, token: Option<String>) {
        self.control = Some((url, token));
        if !matches!(self.source, Source::Watch(_)) {
            self.source = Source::ControlPlane;
        }
    }

    pub fn placement(&mut self, table: PlacementTable) {
        self.source = Source::Table(Box::new(table));
    }

    pub fn placement_watch(&mut self, tables: watch::Receiver<Arc<PlacementTable>>) {
        self.source = Source::Watch(tables);
    }

    /// Starts the control task. Connections are made in the background.
    pub fn start(self) -> Result<Fleet, BuildError> {
        let descriptor = self.model.descriptor();
        control_api::placement::validate_model(&descriptor).map_err(BuildError::Model)?;
        if let Some(&last) = self.model.moe_layers.last()
            && last >= self.num_layers()
        {
            return Err(BuildError::Setting {
                setting: "the last MoE layer",
                found: last.to_string(),
                expected: "less than the model's number of layers",
            });
        }
        self.check_times()?;
        self.check_hedge_budget()?;
        // With device slots the host slots carry no frames, so they need not hold one.
        let host_frames = match &self.settings.device {
            Some(_) => SlotConfig::default(),
            None => self.settings.slot,
        };
        let layout = SlotLayout::new(host_frames)?;
        let geometry = FrameGeometry::new(
            layout.frame_bytes(),
            self.model.shape.hidden as usize,
            self.dtype,
            self.response_dtype,
            self.model.shape.top_k as usize,
        )?;
        let control = match &self.control {
            Some((url, token)) => {
                let mut options = ClientOptions::default();
                options.security = self.settings.security.clone();
                let token = token.clone().filter(|_| self.token_file.is_none());
                let client = ControlClient::with_options(url, token, options)?;
                Some(match &self.token_file {
                    Some(path) => client.with_token_file(path)?,
                    None => client,
                })
            }
            None => None,
        };
        let num_layers = self.num_layers();
        let tables = match (self.source, &control) {
            (Source::None, _) | (Source::ControlPlane, None) => {
                return Err(BuildError::NoPlacement);
            }
            (Source::ControlPlane, Some(_)) => TableSource::ControlPlane,
            (Source::Watch(tables), _) => TableSource::Watch(tables),
            (Source::Table(table), _) => {
                check_table(&table, &descriptor)?;
                TableSource::Watch(watch::channel(Arc::new(*table)).1)
            }
        };
        let mut layer_idx = vec![u32::MAX; num_layers as usize];
        for (idx, &layer) in self.model.moe_layers.iter().enumerate() {
            layer_idx[layer as usize] = idx as u32;
        }
        let (commands_tx, commands) = mpsc::unbounded_channel();
        let max_lanes = self.max_lanes.get();
        let shared = Arc::new(Shared {
            layer_idx,
            geometry,
            pacing: Pacing::new(self.settings.hedge_budget),
            settings: self.settings,
            routing: ArcSwap::from_pointee(Routing::empty(&descriptor)),
            metrics: ClientMetrics::new(&self.registry)?,
            observer: self.observer,
            recorder: self.recorder,
            commands: commands_tx,
            tickets: control.is_some().then(Tickets::new).transpose()?,
            places_freed: watch::Sender::new(0),
            model: self.model,
        });
        let control =
            Control::start(&shared, commands, tables, control, max_lanes, self.runtime.as_ref())?;
        Ok(Fleet { shared, control, registry: self.registry })
    }

    /// Layers of the model, or those up to the last one with experts if their number is unknown.
    fn num_layers(&self) -> u32 {
        match self.model.shape.num_layers {
            ModelShape::UNKNOWN_LAYERS => self.model.moe_layers.last().map_or(0, |last| last + 1),
            known => known,
        }
    }

    fn check_hedge_budget(&self) -> Result<(), BuildError> {
        let budget = self.settings.hedge_budget;
        if (0.0..=1.0).contains(&budget) {
            return Ok(());
        }
        Err(BuildError::Setting {
            setting: "hedge_budget",
            found: budget.to_string(),
            expected: "0 to 1 hedges per frame",
        })
    }

    fn check_times(&self) -> Result<(), BuildError> {
        let Settings { deadline, work_limit, replica_wait, connect_timeout, .. } = self.settings;
        let times = [
            ("the deadline", deadline, Duration::from_millis(1)),
            ("the limit on work", work_limit, deadline),
            ("the wait for a replica", replica_wait, Duration::ZERO),
            ("the limit on a handshake", connect_timeout, Duration::from_millis(1)),
        ];
        for (setting, found, least) in times {
            if found < least || found > MAX_TIME {
                return Err(BuildError::Setting {
                    setting,
                    found: format!("{found:?}"),
                    expected: "1 ms to 1 h, and the limit on work not below the deadline",
                });
            }
        }
        if self.max_lanes.get() > MAX_LANES {
            return Err(BuildError::Setting {
                setting: "max_lanes",
                found: self.max_lanes.to_string(),
                expected: "1 to 1024",
            });
        }
        Ok(())
    }
}

fn check_table(table: &PlacementTable, descriptor: &ModelDescriptor) -> Result<(), BuildError> {
    table.validate().map_err(BuildError::Placement)?;
    match &table.model {
        Some(model) => match difference(model, descriptor) {
            Some(difference) => Err(BuildError::ModelMismatch { difference }),
            None => Ok(()),
        },
        None => Err(BuildError::ModelMismatch { difference: "it names no model".to_owned() }),
    }
}

/// Setters for a builder with a field `fleet: FleetBuilder`. Written once, so that both clients offer the same.
macro_rules! fleet_setters {
    () => {
        /// Follows the placement of the control plane at `url` (`http://HOST:PORT`), and reports failed servers
        /// to it. `token` is the cluster's bearer token, if it has one.
        pub fn control_plane(mut self, url: impl Into<String>, token: Option<String>) -> Self {
            self.fleet.control_plane(url.into(), token);
            self
        }

        /// Uses a placement that never changes.
        pub fn placement(mut self, table: control_api::PlacementTable) -> Self {
            self.fleet.placement(table);
            self
        }

        /// Follows a placement that the caller keeps up to date. Its tables must be valid.
        pub fn placement_watch(
            mut self,
            tables: tokio::sync::watch::Receiver<std::sync::Arc<control_api::PlacementTable>>,
        ) -> Self {
            self.fleet.placement_watch(tables);
            self
        }

        /// Size of a slot and its number of frames. Servers must have the same.
        pub fn slot(mut self, slot: p2p_core::SlotConfig) -> Self {
            self.fleet.settings.slot = slot;
            self
        }

        /// Transports to offer, the best first. Default: memory of the same process, then shared memory.
        pub fn transports(mut self, transports: impl Into<p2p_core::Transports>) -> Self {
            self.fleet.settings.transports = transports.into();
            self
        }

        /// Transports to offer to the server called `name`, instead of those for all servers.
        pub fn peer_transports(
            mut self,
            name: impl Into<String>,
            transports: impl Into<p2p_core::Transports>,
        ) -> Self {
            self.fleet.settings.peer_transports.push((name.into(), transports.into()));
            self
        }

        /// File with the bearer token, instead of a token. When the control plane refuses the token, the client reads
        /// the file again, so that a token can be replaced while the client runs.
        pub fn token_file(mut self, path: Option<std::path::PathBuf>) -> Self {
            self.fleet.token_file(path);
            self
        }

        /// Secret for servers without tickets that ask for one in the handshake. Default: none. Servers with
        /// tickets never get it.
        pub fn secret(mut self, secret: Option<String>) -> Self {
            self.fleet.settings.secret = secret;
            self
        }

        /// Certificates for the connections to the control plane and to servers, and whether secrets may travel
        /// unencrypted to other hosts. Default: no certificates, and no. Tokens and results never travel over TLS.
        pub fn security(mut self, security: control_api::Security) -> Self {
            self.fleet.settings.security = security;
            self
        }

        /// A server with outstanding tokens counts as failed after this long without a sign of life.
        /// Default 100 ms. A server that computes shows progress, so work is no silence.
        pub fn deadline(mut self, deadline: std::time::Duration) -> Self {
            self.fleet.settings.deadline = deadline;
            self
        }

        /// A server that shows life counts as failed after this long without taking or answering a frame.
        /// Default 60 s.
        pub fn work_limit(mut self, limit: std::time::Duration) -> Self {
            self.fleet.settings.work_limit = limit;
            self
        }

        /// A call waits this long for a live replica, or for a lane, before it fails. Default 1 s.
        pub fn replica_wait(mut self, wait: std::time::Duration) -> Self {
            self.fleet.settings.replica_wait = wait;
            self
        }

        /// Longest handshake with a server. Default 2 s.
        pub fn connect_timeout(mut self, timeout: std::time::Duration) -> Self {
            self.fleet.settings.connect_timeout = timeout;
            self
        }

        /// Policy of a call for an expert that no live server holds. Default: the call fails.
        pub fn on_missing_expert(mut self, policy: $crate::OnMissingExpert) -> Self {
            self.fleet.settings.on_missing = policy;
            self
        }

        /// Name in the logs of servers and control plane. Default `client-PID`.
        pub fn name(mut self, name: impl Into<String>) -> Self {
            self.fleet.settings.name = name.into();
            self
        }

        /// Registry for the client's metrics. Default: a registry of the client's own. A registry takes one
        /// client only.
        pub fn registry(mut self, registry: prometheus::Registry) -> Self {
            self.fleet.registry = registry;
            self
        }

        /// Function that every successful call runs at its end, on the caller's thread. Keep it short.
        pub fn observer(
            mut self,
            observer: impl Fn(&$crate::LayerReport) + Send + Sync + 'static,
        ) -> Self {
            self.fleet.observer = Some(std::sync::Arc::new(observer));
            self
        }

        /// Records the times of sampled calls for traces. Off by default.
        pub fn recorder(mut self, recorder: telemetry::Recorder) -> Self {
            self.fleet.recorder = Some(recorder);
            self
        }

        /// Runs connections on this runtime. It needs time and I/O enabled, and other threads than the callers'
        /// must drive it. Default: a thread of the client's own.
        pub fn runtime(mut self, handle: tokio::runtime::Handle) -> Self {
            self.fleet.runtime = Some(handle);
            self
        }
    };
}

pub(crate) use fleet_setters;

const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
const DEFAULT_WORK_LIMIT: Duration = Duration::from_secs(60);
const DEFAULT_REPLICA_WAIT: Duration = Duration::from_secs(1);
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Default of [`hedge_budget`](crate::MoeClientBuilder::hedge_budget).
pub(crate) const DEFAULT_HEDGE_BUDGET: f64 = 0.05;
const DEFAULT_MAX_LANES: NonZeroUsize = NonZeroUsize::new(16).unwrap();
const MAX_LANES: usize = 1024;
const MAX_TIME: Duration = Duration::from_secs(3600);
