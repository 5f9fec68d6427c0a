//! A GPU as the backend of a server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use checkpoint::Checkpoint;
use kernels::gpu::{DeviceName, Gpu, GpuError};
use p2p_core::SlotConfig;
use p2p_core::bootstrap::ListenerConfig;
use proxy::DeviceTransports;

use super::slots::offer;
use super::{DeviceConfig, DeviceError, DeviceOptions, DevicePlan, DevicePlane, DeviceStore};
use crate::backend::{Backend, LoadedBackend};
use crate::clients::FrameLimits;
use crate::compute::{LoadError, LoadProgress};
use crate::config::ServerConfig;
use crate::error::{DataError, StartError};
use crate::experts::Experts;
use crate::metrics::ServerMetrics;
use crate::plane::{DataPlane, ThreadEnd};

/// A GPU that is being opened, which takes the driver a second, while the model's files are.
#[derive(Debug)]
pub(crate) struct OpeningGpu(tokio::task::JoinHandle<Result<Gpu, GpuError>>);

impl OpeningGpu {
    /// Begins to open the GPU of this name. Called within a runtime.
    pub(crate) fn begin(name: DeviceName) -> Self {
        Self(tokio::task::spawn_blocking(move || {
            let begin = Instant::now();
            let opened = Gpu::open_named(name);
            tracing::debug!(device = %name, seconds = begin.elapsed().as_secs_f64(), "opened the GPU");
            opened
        }))
    }
}

pub(crate) struct DeviceBackend {
    gpu: Gpu,
    plan: DevicePlan,
    transports: DeviceTransports,
}

impl DeviceBackend {
    /// Waits for the GPU and checks that the model fits its kernels and a batch fits its memory.
    pub(crate) async fn open(
        options: DeviceOptions,
        opening: OpeningGpu,
        config: &ServerConfig,
        checkpoint: &Checkpoint,
    ) -> Result<Self, StartError> {
        // Before the GPU's errors, so that an unsupported model is reported on any host.
        let mut plan = DevicePlan::new(&options, config.slot, &config.limits, checkpoint.config())?;
        plan.has_networks = !config.transports.networks.is_empty();
        let gpu = opening
            .0
            .await
            .map_err(|_| StartError::LoadPanicked)?
            .map_err(|source| DeviceError::Open { device: options.name, source })?;
        plan.check_memory(&gpu, "batches and a client's slot", plan.workspace_bytes())?;
        Ok(Self { gpu, plan, transports: DeviceTransports::default() })
    }
}

impl Backend for DeviceBackend {
    fn device_name(&self) -> String {
        self.plan.device.to_string()
    }

    fn frame_limits(&self) -> FrameLimits {
        FrameLimits::OneType {
            dtype: self.plan.options.dtype,
            max_tokens: self.plan.geometry.max_tokens as usize,
        }
    }

    fn listener_config(
        &mut self,
        config: &ServerConfig,
        common: ListenerConfig,
    ) -> Result<ListenerConfig, StartError> {
        self.transports = DeviceTransports::new(&self.gpu, self.plan.options.proxy_threads);
        let transports = self.transports.wrap(&config.transports).map_err(DeviceError::from)?;
        Ok(ListenerConfig {
            slot: HOST_SLOT,
            transports: transports.kinds,
            networks: transports.networks,
            device: Some(offer(&self.gpu, &self.plan.geometry)),
            max_peers: self.plan.max_clients,
            // The kernels have few places, and all clients of an engine may have one identity.
            max_peers_of_holder: Some(self.plan.max_clients),
            ..common
        })
    }

    fn load(
        self: Box<Self>,
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        rooms: &BTreeMap<u32, usize>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn LoadedBackend>, LoadError> {
        let Self { gpu, plan, transports } = *self;
        let store = Arc::new(DeviceStore::load(&gpu, plan, checkpoint, experts, rooms, progress)?);
        Ok(Box::new(LoadedDevice { gpu, plan, transports, store }))
    }
}

struct LoadedDevice {
    gpu: Gpu,
    plan: DevicePlan,
    transports: DeviceTransports,
    store: Arc<DeviceStore>,
}

impl LoadedBackend for LoadedDevice {
    fn experts(&self) -> Arc<dyn Experts> {
        Arc::clone(&self.store) as Arc<dyn Experts>
    }

    fn start(
        self: Box<Self>,
        config: &ServerConfig,
        metrics: &ServerMetrics,
    ) -> Result<(Arc<dyn DataPlane>, ThreadEnd), DataError> {
        let Self { gpu, plan, transports, store } = *self;
        let config = DeviceConfig {
            limits: config.limits,
            spin: config.spin,
            metrics_by_layer: config.metrics_by_layer,
            transports,
            observer: config.batch_observer.clone(),
            recorder: config.recorder.as_ref().map(|recorder| recorder.for_server(&config.name)),
        };
        let (data, end) = DevicePlane::start(&gpu, plan, config, store, metrics.clone())?;
        Ok((Arc::new(data), end))
    }
}

/// Host slots beside the device slots. They carry no frames.
const HOST_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
