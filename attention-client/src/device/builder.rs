//! Settings of a GPU client, and its start.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use cuda_ipc::GpuMemory;
use kernels::gpu::Gpu;
use kernels::slots::DeviceSide;
use p2p_core::SlotConfig;
use proxy::DeviceTransports;

use super::calls::Calls;
use super::executor::Executor;
use super::launcher::Launcher;
use super::link::LinkSlots;
use super::memory::Memory;
use super::options::geometry_of;
use super::peers::{Peers, Tables};
use super::{DeviceBuildError, DeviceClient, DeviceOptions};
use crate::fleet::Fleet;
use crate::fleet::builder::{FleetBuilder, fleet_setters};
use crate::fleet::settings::DeviceSupport;
use crate::model::ClientModel;

/// Makes a [`DeviceClient`]. See [`DeviceClient::builder`].
///
/// [`slot`](Self::slot) gives the size of the slots in GPU memory; servers must have the same. A slot must hold the
/// largest batch of a call that is not sent in parts. Servers of the same host are reached through its memory.
/// Servers of other hosts are reached over the networks among [`transports`](Self::transports), through a proxy.
#[must_use = "a builder does nothing until `build`"]
pub struct DeviceClientBuilder {
    fleet: FleetBuilder,
}

impl DeviceClientBuilder {
    pub(super) fn new(model: ClientModel) -> Self {
        Self { fleet: FleetBuilder::new(model) }
    }

    fleet_setters!();

    /// Most looks for late servers per call or replay, 0 to 1. Default 0.05. With 0 servers are not weighed, so that the
    /// choice of replicas depends on no time.
    pub fn hedge_budget(mut self, budget: f64) -> Self {
        self.fleet.settings.hedge_budget = budget;
        self
    }

    /// Starts a client whose tensors are in the memory of `gpu`. Its servers must be GPU servers. Blocks until every
    /// server was tried once, for `replica_wait` at most.
    ///
    /// # Errors
    /// [`DeviceBuildError`]: a setting out of range, a model that the kernels cannot serve, or no GPU memory.
    pub fn build(self, gpu: Gpu, options: DeviceOptions) -> Result<DeviceClient, DeviceBuildError> {
        let mut fleet = self.fleet;
        let mut transports = DeviceTransports::new(&gpu, options.proxy_threads);
        let geometry = geometry_of(&fleet.model, fleet.settings.slot, &options)?;
        let side = DeviceSide {
            gpu: gpu.clone(),
            own_slot_bytes: geometry.response_slot_bytes,
            peer_slot_bytes: geometry.slot_bytes,
            shape: geometry.describe().into_bytes(),
        };
        let settings = &mut fleet.settings;
        let memory = GpuMemory::offer(side);
        settings.device = Some(DeviceSupport { memory, link_of: LinkSlots::boxed });
        settings.slot = HOST_SLOT;
        settings.transports = transports.wrap(&settings.transports)?;
        for (_, peer_transports) in &mut settings.peer_transports {
            *peer_transports = transports.wrap(peer_transports)?;
        }
        fleet.dtype = options.dtype;
        fleet.response_dtype = protocol::WireDtype::Bf16;
        fleet.max_lanes = NonZeroUsize::MIN;
        let Fleet { shared, control, registry } = fleet.start()?;
        let num_layers = shared.model.moe_layers.len();
        let num_frames = geometry.num_frames as usize;
        // Recorded calls have memory of their own: graphs point to it for good.
        let memory = Memory::new(&gpu, &geometry, num_layers, 2 * num_frames, options.timeline)?;
        let side = gpu.stream()?;
        let peers = Peers::connect(&shared, options.max_servers, Arc::clone(&memory.abort))
            .map_err(|source| DeviceBuildError::System { op: "make a lane", source })?;
        shared.metrics.lanes.set(1);
        let num_experts = shared.model.shape.num_experts;
        let deadline = shared.settings.deadline;
        let client_id = peers.client_id;
        let launcher =
            Launcher::new(memory, geometry, options, transports, client_id, num_experts, deadline);
        let executor = Executor {
            peers,
            launcher,
            calls: Calls::new(num_frames),
            tables: Arc::new(Tables::empty(num_layers)),
            replay: None,
            side,
            shared,
        };
        Ok(DeviceClient::new(executor, control, registry))
    }
}

impl fmt::Debug for DeviceClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays out of logs.
        let mut debug = f.debug_struct("DeviceClientBuilder");
        debug.field("model", &self.fleet.model).finish_non_exhaustive()
    }
}

/// Host slots beside the device slots. They carry credits and the progress of the connection only.
const HOST_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
