//! Settings of a client.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use checkpoint::Checkpoint;
use control_api::{ControlClient, ModelDescriptor, PlacementTable};
use kernels::gpu::Gpu;
use kernels::slots::DeviceSide;
use p2p_core::{SlotConfig, SlotLayout, SpinPolicy, TransportKind, Transports};
use prometheus::Registry;
use protocol::{FrameGeometry, ModelShape, WireDtype};
use proxy::DeviceTransports;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::control::{Control, Tables};
use super::error::BuildError;
use super::shared::{LayerObserver, Settings, Shared};
use super::timing::LayerReport;
use super::{Inner, MoeClient};
use crate::device::{DeviceBuildError, DeviceClient, DeviceOptions};
use crate::metrics::ClientMetrics;
use crate::placement::Routing;

/// Whose experts a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientModel {
    /// What servers must agree with.
    pub shape: ModelShape,
    /// Architecture name, such as `qwen3_moe`.
    pub architecture: String,
    /// Layers that have experts, strictly ascending.
    pub moe_layers: Vec<u32>,
}

impl ClientModel {
    /// The model of a checkpoint.
    #[must_use]
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let config = checkpoint.config();
        Self {
            shape: ModelShape {
                fingerprint: checkpoint.fingerprint().0,
                hidden: config.hidden as u32,
                num_layers: config.num_layers,
                num_experts: config.num_experts,
                top_k: config.top_k as u32,
            },
            architecture: config.architecture.model_type().to_owned(),
            moe_layers: config.moe_layers(),
        }
    }

    /// The same as the control plane writes it.
    #[must_use]
    pub fn descriptor(&self) -> ModelDescriptor {
        let hex = |byte: &u8| format!("{byte:02x}");
        ModelDescriptor {
            fingerprint: self.shape.fingerprint.iter().map(hex).collect(),
            architecture: self.architecture.clone(),
            hidden: self.shape.hidden,
            moe_layers: self.moe_layers.clone(),
            num_experts: self.shape.num_experts,
            top_k: self.shape.top_k,
        }
    }
}

/// What a call does about an expert that no live server holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnMissingExpert {
    /// It fails and names layer and expert.
    #[default]
    Fail,
    /// It leaves the expert out, scales the token's other experts so that the weights keep their
    /// sum, and counts it. A token without any expert left gets zeros. Once a wait was in vain, the
    /// next calls do not wait again until a server comes or the placement changes.
    DropAndRenormalise,
}

/// A client but for its calls.
pub(crate) struct Started {
    pub shared: Arc<Shared>,
    pub control: Control,
    pub registry: Registry,
}

enum Source {
    None,
    Table(Box<PlacementTable>),
    Watch(watch::Receiver<Arc<PlacementTable>>),
    ControlPlane,
}

/// Makes a [`MoeClient`]. See [`MoeClient::builder`].
#[must_use = "a builder does nothing until `build`"]
pub struct MoeClientBuilder {
    model: ClientModel,
    source: Source,
    control: Option<(String, Option<String>)>,
    dtype: WireDtype,
    response_dtype: WireDtype,
    settings: Settings,
    max_lanes: NonZeroUsize,
    registry: Registry,
    observer: Option<LayerObserver>,
    runtime: Option<Handle>,
}

impl MoeClientBuilder {
    pub(super) fn new(model: ClientModel) -> Self {
        Self {
            model,
            source: Source::None,
            control: None,
            dtype: WireDtype::F32,
            response_dtype: WireDtype::F32,
            settings: Settings {
                name: format!("client-{}", std::process::id()),
                slot: SlotConfig::default(),
                transports: vec![TransportKind::Local, TransportKind::Shm].into(),
                peer_transports: Vec::new(),
                ticket: None,
                device: None,
                deadline: DEFAULT_DEADLINE,
                work_limit: DEFAULT_WORK_LIMIT,
                replica_wait: DEFAULT_REPLICA_WAIT,
                connect_timeout: DEFAULT_CONNECT_TIMEOUT,
                on_missing: OnMissingExpert::Fail,
                spin: SpinPolicy::default(),
                payload_checksum: false,
            },
            max_lanes: DEFAULT_MAX_LANES,
            registry: Registry::new(),
            observer: None,
            runtime: None,
        }
    }

    /// Follows the placement of the control plane at `url` (`http://HOST:PORT`), and reports servers
    /// that fail to it.
    pub fn control_plane(mut self, url: impl Into<String>, token: Option<String>) -> Self {
        self.control = Some((url.into(), token));
        if !matches!(self.source, Source::Watch(_)) {
            self.source = Source::ControlPlane;
        }
        self
    }

    /// Uses a placement that never changes.
    pub fn placement(mut self, table: PlacementTable) -> Self {
        self.source = Source::Table(Box::new(table));
        self
    }

    /// Follows a placement that somebody else keeps. Its tables must be valid.
    pub fn placement_watch(mut self, tables: watch::Receiver<Arc<PlacementTable>>) -> Self {
        self.source = Source::Watch(tables);
        self
    }

    /// Element type of requests on the wire. Default f32.
    pub fn wire_dtype(mut self, dtype: WireDtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Element type of answers on the wire. Default f32.
    pub fn response_dtype(mut self, dtype: WireDtype) -> Self {
        self.response_dtype = dtype;
        self
    }

    /// Slots to use; servers must have the same.
    pub fn slot(mut self, slot: SlotConfig) -> Self {
        self.settings.slot = slot;
        self
    }

    /// Transports to offer, the best first. Default: within a process, then shared memory.
    pub fn transports(mut self, transports: impl Into<Transports>) -> Self {
        self.settings.transports = transports.into();
        self
    }

    /// Transports to offer to the server called `name`, instead of those for all.
    pub fn peer_transports(
        mut self,
        name: impl Into<String>,
        transports: impl Into<Transports>,
    ) -> Self {
        self.settings.peer_transports.push((name.into(), transports.into()));
        self
    }

    /// Secret that servers want to see.
    pub fn ticket(mut self, ticket: Option<String>) -> Self {
        self.settings.ticket = ticket;
        self
    }

    /// Silence after which a server with outstanding tokens counts as failed. Default 100 ms. Work
    /// is not silence: servers show progress while they compute.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.settings.deadline = deadline;
        self
    }

    /// Time after which a server that shows life but neither takes nor answers a frame counts as
    /// failed all the same. Default 60 s.
    pub fn work_limit(mut self, limit: Duration) -> Self {
        self.settings.work_limit = limit;
        self
    }

    /// How long a call waits for a live replica to appear, or for a lane, before it fails. Default
    /// 1 s.
    pub fn replica_wait(mut self, wait: Duration) -> Self {
        self.settings.replica_wait = wait;
        self
    }

    /// Limit on the time of one handshake with a server. Default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.settings.connect_timeout = timeout;
        self
    }

    /// What a call does about an expert that no live server holds. Default: it fails.
    pub fn on_missing_expert(mut self, policy: OnMissingExpert) -> Self {
        self.settings.on_missing = policy;
        self
    }

    /// Most lanes: calls that can be outstanding at the same time. Each lane has a slot pair with
    /// every server, whose memory is committed as it is touched. Default 16.
    pub fn max_lanes(mut self, max_lanes: NonZeroUsize) -> Self {
        self.max_lanes = max_lanes;
        self
    }

    /// How long a call polls for answers before it sleeps. Default 20 µs.
    pub fn spin(mut self, spin: SpinPolicy) -> Self {
        self.settings.spin = spin;
        self
    }

    /// Whether request rows carry a checksum. Headers and tables always do. Default off: shared
    /// memory does not flip bits.
    pub fn payload_checksum(mut self, on: bool) -> Self {
        self.settings.payload_checksum = on;
        self
    }

    /// Name for the logs of servers and control plane. Default `client-PID`.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = name.into();
        self
    }

    /// Where to register the metrics. Default a registry of the client's own, see
    /// [`MoeClient::registry`].
    pub fn registry(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
    }

    /// Called at the end of every successful call, on its thread. Should be quick.
    pub fn observer(mut self, observer: impl Fn(&LayerReport) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Runs connections on this runtime, which needs time and I/O enabled and must be driven by
    /// other threads than those that call the client. Default a thread of the client's own.
    pub fn runtime(mut self, handle: Handle) -> Self {
        self.runtime = Some(handle);
        self
    }

    /// Starts the client. Connections are made in the background: see [`MoeClient::wait_ready`].
    ///
    /// # Errors
    /// [`BuildError`].
    pub fn build(self) -> Result<MoeClient, BuildError> {
        let max_lanes = self.max_lanes.get();
        let Started { shared, control, registry } = self.start()?;
        Ok(MoeClient::new(Inner::new(shared, control, max_lanes, registry)))
    }

    /// A client whose tensors lie in the memory of `gpu`, and whose servers are GPUs, too.
    ///
    /// Of this builder's settings, the slots give the size of the device slots, which servers must have
    /// alike; what a slot must hold is the largest batch of a call. Servers are reached within a host, and
    /// over the networks among the transports, if there are any, through a proxy. Element types, lanes,
    /// spinning and checksums have no meaning there. [`DeviceOptions`] has the others.
    ///
    /// # Errors
    /// [`DeviceBuildError`].
    pub fn build_device(
        self,
        gpu: Gpu,
        options: DeviceOptions,
    ) -> Result<DeviceClient, DeviceBuildError> {
        DeviceClient::build(self, gpu, options)
    }

    /// What `build_device` replaces; `reached` knows afterwards how servers are reached.
    pub(crate) fn for_device(
        &mut self,
        dtype: WireDtype,
        reached: &mut DeviceTransports,
        device: impl FnOnce(&ClientModel, SlotConfig) -> Result<DeviceSide, DeviceBuildError>,
    ) -> Result<(), DeviceBuildError> {
        self.settings.device = Some(device(&self.model, self.settings.slot)?);
        self.settings.slot = DEVICE_HOST_SLOT;
        self.settings.transports = reached.wrap(&self.settings.transports)?;
        for (_, transports) in &mut self.settings.peer_transports {
            *transports = reached.wrap(transports)?;
        }
        self.dtype = dtype;
        self.response_dtype = WireDtype::Bf16;
        self.max_lanes = NonZeroUsize::MIN;
        Ok(())
    }

    /// Starts everything but the calls.
    pub(crate) fn start(self) -> Result<Started, BuildError> {
        let descriptor = self.model.descriptor();
        control_api::placement::validate_model(&descriptor).map_err(BuildError::Model)?;
        if let Some(&last) = self.model.moe_layers.last()
            && last >= self.model.shape.num_layers
        {
            return Err(BuildError::Setting {
                setting: "the last MoE layer",
                found: last.to_string(),
                expected: "less than the model's number of layers",
            });
        }
        self.check_times()?;
        // With device slots the host's carry no frames, and need not hold one.
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
            Some((url, token)) => Some(ControlClient::new(url, token.clone())?),
            None => None,
        };
        let tables = match (self.source, &control) {
            (Source::None, _) | (Source::ControlPlane, None) => {
                return Err(BuildError::NoPlacement);
            }
            (Source::ControlPlane, Some(_)) => Tables::ControlPlane,
            (Source::Watch(tables), _) => Tables::Watch(tables),
            (Source::Table(table), _) => {
                check_table(&table, &descriptor)?;
                Tables::Watch(watch::channel(Arc::new(*table)).1)
            }
        };
        let num_layers = self.model.shape.num_layers as usize;
        let mut layer_idx = vec![u32::MAX; num_layers];
        for (idx, &layer) in self.model.moe_layers.iter().enumerate() {
            layer_idx[layer as usize] = idx as u32;
        }
        let (commands_tx, commands) = mpsc::unbounded_channel();
        let max_lanes = self.max_lanes.get();
        let shared = Arc::new(Shared {
            layer_idx,
            geometry,
            settings: self.settings,
            routing: ArcSwap::from_pointee(Routing::empty(&descriptor)),
            metrics: ClientMetrics::new(&self.registry)?,
            observer: self.observer,
            commands: commands_tx,
            places_freed: watch::Sender::new(0),
            model: self.model,
        });
        let control =
            Control::start(&shared, commands, tables, control, max_lanes, self.runtime.as_ref())?;
        Ok(Started { shared, control, registry: self.registry })
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

impl fmt::Debug for MoeClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the tokens.
        f.debug_struct("MoeClientBuilder").field("model", &self.model).finish_non_exhaustive()
    }
}

fn check_table(table: &PlacementTable, descriptor: &ModelDescriptor) -> Result<(), BuildError> {
    table.validate().map_err(BuildError::Placement)?;
    match &table.model {
        Some(model) if model.fingerprint == descriptor.fingerprint => Ok(()),
        found => Err(BuildError::ModelMismatch {
            found: found.as_ref().map_or_else(|| "none".to_owned(), |m| m.fingerprint.clone()),
            expected: descriptor.fingerprint.clone(),
        }),
    }
}

const DEFAULT_DEADLINE: Duration = Duration::from_millis(100);
const DEFAULT_WORK_LIMIT: Duration = Duration::from_secs(60);
const DEFAULT_REPLICA_WAIT: Duration = Duration::from_secs(1);
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const DEFAULT_MAX_LANES: NonZeroUsize = NonZeroUsize::new(16).unwrap();
const MAX_LANES: usize = 1024;
/// Slots of the host beside those of a device: for credits and the progress of the connection only.
const DEVICE_HOST_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const MAX_TIME: Duration = Duration::from_secs(3600);
