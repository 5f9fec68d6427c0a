//! CPUs as the backend of a server.

use std::collections::BTreeMap;
use std::sync::Arc;

use checkpoint::Checkpoint;
use p2p_core::bootstrap::{BindError, ListenerConfig};
use protocol::{ModelShape, WireDtype};

use super::{CpuConfig, CpuPlane};
use crate::backend::{Backend, LoadedBackend};
use crate::clients::{FrameLimits, geometry};
use crate::compute::{ExpertStore, ExpertWeights, LoadError, LoadProgress, Residency};
use crate::config::ServerConfig;
use crate::error::{DataError, StartError};
use crate::experts::Experts;
use crate::metrics::ServerMetrics;
use crate::plane::{DataPlane, ThreadEnd};

pub(crate) struct CpuBackend {
    frame_bytes: usize,
    num_threads: usize,
}

impl CpuBackend {
    /// Checks that a frame has room for a token of the model. Without this check every client would find out
    /// by itself.
    pub(crate) fn new(config: &ServerConfig, shape: &ModelShape) -> Result<Self, StartError> {
        let layout = p2p_core::SlotLayout::new(config.slot).map_err(BindError::Slot)?;
        let frame_bytes = layout.frame_bytes();
        geometry(shape, frame_bytes, WireDtype::Bf16, WireDtype::Bf16)?;
        Ok(Self { frame_bytes, num_threads: config.num_threads })
    }
}

impl Backend for CpuBackend {
    fn device_name(&self) -> String {
        "cpu".to_owned()
    }

    fn frame_limits(&self) -> FrameLimits {
        FrameLimits::AnyType { frame_bytes: self.frame_bytes }
    }

    fn listener_config(
        &mut self,
        _: &ServerConfig,
        common: ListenerConfig,
    ) -> Result<ListenerConfig, StartError> {
        Ok(common)
    }

    fn load(
        self: Box<Self>,
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        _rooms: &BTreeMap<u32, usize>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Box<dyn LoadedBackend>, LoadError> {
        let store = ExpertStore::load(
            checkpoint,
            experts,
            Residency::default(),
            self.num_threads,
            progress,
        )?;
        Ok(Box::new(LoadedCpu { store: Arc::new(store) }))
    }
}

struct LoadedCpu {
    store: Arc<ExpertStore>,
}

impl LoadedBackend for LoadedCpu {
    fn experts(&self) -> Arc<dyn Experts> {
        Arc::clone(&self.store) as Arc<dyn Experts>
    }

    fn start(
        self: Box<Self>,
        config: &ServerConfig,
        metrics: &ServerMetrics,
    ) -> Result<(Arc<dyn DataPlane>, ThreadEnd), DataError> {
        let config = CpuConfig {
            num_threads: config.num_threads,
            cpus: config.cpus.clone(),
            limits: config.limits,
            spin: config.spin,
            metrics_by_layer: config.metrics_by_layer,
            recorder: config.recorder.as_ref().map(|recorder| recorder.for_server(&config.name)),
        };
        let (data, end) = CpuPlane::start(self.store, config, metrics.clone())?;
        Ok((Arc::new(data), end))
    }
}

impl Experts for ExpertStore {
    fn checkpoint(&self) -> &Arc<Checkpoint> {
        Self::checkpoint(self)
    }

    fn loaded(&self) -> BTreeMap<u32, Vec<u32>> {
        self.experts()
    }

    fn has(&self, layer: u32, expert: u32) -> bool {
        self.layer(layer).is_some_and(|experts| experts.get(expert).is_some())
    }

    fn loaded_bytes(&self) -> u64 {
        self.size_bytes()
    }

    fn load_one(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        self.add(layer, expert)
    }

    fn insert(&self, layer: u32, expert: u32, weights: ExpertWeights) -> Result<u64, LoadError> {
        Self::insert(self, layer, expert, weights)
    }

    fn weights(&self, layer: u32, expert: u32) -> Option<Arc<ExpertWeights>> {
        Self::weights(self, layer, expert)
    }

    fn unload(&self, layer: u32, expert: u32) -> bool {
        self.remove(layer, expert)
    }
}
