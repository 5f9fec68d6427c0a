//! The experts that a server holds in its GPU's memory. Experts are added while batches run.
//!
//! The matrices of a layer lie in one block of memory, which has room for a number of experts. Each expert
//! has a local index in the block; a table maps experts to local indices. A new expert takes a free index, or
//! the layer moves to a larger block. Batches in flight go on with the old table until the data thread puts
//! the new one into service between two batches. Only then is the old block freed.

mod bulk;
mod tables;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytemuck::Zeroable;
use checkpoint::Checkpoint;
use kernels::abi::{DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, LayerWeights};
use kernels::gpu::{Gpu, GpuError, LayerMatrices, LayerShape};

use self::bulk::{Job, load_all};
pub(super) use self::tables::ExpertTables;
use self::tables::LayerTable;
use self::weights::{LayerMemory, WeightShape, fill_randomly, put, refused};
use super::plan::DevicePlan;
use super::upload::Uploader;
use crate::compute::{ExpertWeights, LoadError, LoadProgress};
use crate::experts::Experts;

/// The loaded experts of all layers.
pub(crate) struct DeviceStore {
    gpu: Gpu,
    plan: DevicePlan,
    checkpoint: Arc<Checkpoint>,
    shape: WeightShape,
    /// Locked during a load, so that loads run one after the other.
    loader: Mutex<Uploader>,
    /// The newest tables.
    tables: ArcSwap<ExpertTables>,
    /// The tables that batches use.
    served: ArcSwap<ExpertTables>,
    /// Version of the tables that batches use.
    in_service: Mutex<u64>,
    changed: Condvar,
    /// Wakes the data thread for new tables.
    announce: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl DeviceStore {
    /// Loads experts (layer → expert ids) and calls `progress` after each. Blocks until all are in GPU memory.
    ///
    /// # Errors
    /// [`LoadError`]. With too little memory it loads no expert at all.
    pub(crate) fn load(
        gpu: &Gpu,
        plan: DevicePlan,
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let shape = WeightShape::of(&checkpoint, experts)?;
        let num_experts: usize = experts.values().map(Vec::len).sum();
        let needed_bytes = num_experts as u64 * shape.expert_bytes() + plan.workspace_bytes();
        plan.check_memory(gpu, "the experts and the batches", needed_bytes)?;
        let mut uploader = Uploader::new(gpu).map_err(refused)?;
        let mut layers = vec![LayerTable::default(); plan.num_layers as usize];
        for (&layer, ids) in experts {
            let Some(table) = layers.get_mut(layer as usize) else { continue };
            let memory = LayerMemory::new(gpu, &shape, ids.len()).map_err(refused)?;
            table.experts.extend_from_slice(ids);
            table.memory = Some(Arc::new(memory));
        }
        let mut state = LoadProgress { num_loaded: 0, num_experts, loaded_bytes: 0 };
        let mut progress = || {
            state.num_loaded += 1;
            state.loaded_bytes += shape.expert_bytes();
            progress(state);
        };
        if plan.options.random_weights {
            for table in &layers {
                let Some(memory) = &table.memory else { continue };
                if let Err(error) = fill_randomly(&mut uploader, &shape, memory) {
                    drop_after_copies(&uploader, layers);
                    return Err(refused(error));
                }
                table.experts.iter().for_each(|_| progress());
            }
        } else {
            let jobs: Vec<Job<'_>> = jobs_of(&layers).collect();
            if let Err(error) = load_all(gpu, &checkpoint, &shape, &jobs, &mut progress) {
                if error.is_copying {
                    tracing::error!("copies of weights did not end: their memory is not freed");
                    std::mem::forget(layers);
                }
                return Err(error.source);
            }
        }
        // In service from the start, because there is no older version.
        let tables = Arc::new(ExpertTables { version: 1, layers });
        Ok(Self {
            gpu: gpu.clone(),
            plan,
            checkpoint,
            shape,
            loader: Mutex::new(uploader),
            served: ArcSwap::new(Arc::clone(&tables)),
            tables: ArcSwap::new(tables),
            in_service: Mutex::new(0),
            changed: Condvar::new(),
            announce: OnceLock::new(),
        })
    }

    /// The newest tables.
    pub(crate) fn tables(&self) -> Arc<ExpertTables> {
        self.tables.load_full()
    }

    /// The kernels' view of every layer's weights.
    pub(crate) fn layer_weights(
        &self,
        tables: &ExpertTables,
    ) -> Result<Vec<LayerWeights>, GpuError> {
        let of = |table: &LayerTable| {
            table.memory.as_deref().map(|memory| self.describe(memory)).transpose()
        };
        let made: Vec<Option<LayerWeights>> =
            tables.layers.iter().map(of).collect::<Result<_, _>>()?;
        // No kernel computes in a layer without experts, but kernels may read its entry early.
        let any = made.iter().flatten().next().copied().unwrap_or_else(LayerWeights::zeroed);
        Ok(made.into_iter().map(|weights| weights.unwrap_or(any)).collect())
    }

    fn describe(&self, memory: &LayerMemory) -> Result<LayerWeights, GpuError> {
        let scale = |idx: usize| memory.scales.as_ref().map_or(DevicePtr::NULL, |s| s[idx].ptr());
        let shape = LayerShape {
            hidden: self.shape.hidden as u32,
            inter: self.shape.inter as u32,
            num_local_experts: memory.capacity as u32,
            dtype: self.weights_dtype(),
        };
        let matrices = LayerMatrices {
            gate_up: memory.gate_up.ptr(),
            down: memory.down.ptr(),
            gate_up_scale: scale(0),
            down_scale: scale(1),
        };
        self.gpu.layer_weights(&shape, &matrices)
    }

    /// Type of the weights in GPU memory: `DTYPE_*` of the kernels' header.
    pub(crate) const fn weights_dtype(&self) -> u32 {
        if self.shape.is_fp8 { DTYPE_F8_E4M3 } else { DTYPE_BF16 }
    }

    /// Sets the function that wakes the data thread for new tables. The owner of the data thread calls this once.
    pub(crate) fn on_change(&self, announce: Box<dyn Fn() + Send + Sync>) {
        // There is one data thread only.
        let _ = self.announce.set(announce);
    }

    /// Records that the data thread uses `tables`, and wakes loaders that wait for it.
    pub(crate) fn set_in_service(&self, tables: &Arc<ExpertTables>) {
        self.served.store(Arc::clone(tables));
        *lock(&self.in_service) = tables.version;
        self.changed.notify_all();
    }

    fn add(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        let mut uploader = lock(&self.loader);
        let old = self.tables();
        // Returns an error for an expert that the model does not have.
        self.checkpoint.expert(layer, expert).map_err(|source| LoadError::Tensor {
            layer,
            expert,
            source,
        })?;
        let Some(table) = old.layers.get(layer as usize) else { return Ok(0) };
        if table.experts.contains(&expert) {
            // An earlier call may have reached its deadline before the expert was in service.
            self.announce(old.version)?;
            return Ok(0);
        }
        let local_idx = table.experts.len();
        let memory = match &table.memory {
            Some(memory) if local_idx < memory.capacity => Arc::clone(memory),
            memory => Arc::new(self.grow(&mut uploader, memory.as_ref(), local_idx)?),
        };
        let what = (layer, expert);
        let put = put(&mut uploader, &self.checkpoint, &self.shape, &memory, local_idx, what)
            .and_then(|()| uploader.wait().map_err(refused));
        if let Err(error) = put {
            drop_after_copies(&uploader, memory);
            return Err(error);
        }
        let mut new = ExpertTables::clone(&old);
        new.version += 1;
        let version = new.version;
        if let Some(table) = new.layers.get_mut(layer as usize) {
            table.experts.push(expert);
            table.memory = Some(memory);
        }
        self.tables.store(Arc::new(new));
        self.announce(version)?;
        // Frees the old block here, if this was its last use, because freeing waits for the GPU.
        drop(old);
        Ok(self.shape.expert_bytes())
    }

    /// A larger block for a layer, with the experts of the old one.
    fn grow(
        &self,
        uploader: &mut Uploader,
        old: Option<&Arc<LayerMemory>>,
        num_used: usize,
    ) -> Result<LayerMemory, LoadError> {
        let capacity = (num_used + num_used.div_ceil(8).max(1)).min(self.plan.num_experts as usize);
        let capacity = capacity.max(num_used + 1);
        let needed_bytes = capacity as u64 * self.shape.expert_bytes();
        self.plan.check_memory(&self.gpu, "a layer's experts with one more", needed_bytes)?;
        let new = LayerMemory::new(&self.gpu, &self.shape, capacity).map_err(refused)?;
        let Some(old) = old else { return Ok(new) };
        let mut copy = || {
            for (to, from) in new.parts().zip(old.parts()) {
                let bytes = from.len() / old.capacity.max(1) as u64 * num_used as u64;
                // SAFETY: both blocks have so many bytes. Weights in use are never written again, and no
                // other code knows the new block. Neither block is freed before the copy has ended.
                unsafe { uploader.copy_within_gpu(to.ptr(), from.ptr(), bytes)? };
            }
            uploader.wait()
        };
        let copied = copy();
        if let Err(error) = copied {
            drop_after_copies(uploader, (new, Arc::clone(old)));
            return Err(refused(error));
        }
        Ok(new)
    }

    /// Wakes the data thread and waits until it uses `version`, up to [`SERVICE_LIMIT`]. Without a data
    /// thread the new tables are in service at once.
    fn announce(&self, version: u64) -> Result<(), LoadError> {
        if let Some(announce) = self.announce.get() {
            announce();
            self.await_service(version)?;
        } else {
            self.served.store(self.tables());
        }
        Ok(())
    }

    /// Waits until the data thread uses `version`.
    fn await_service(&self, version: u64) -> Result<(), LoadError> {
        let in_service = lock(&self.in_service);
        let is_old = |found: &mut u64| *found < version;
        let waited = self.changed.wait_timeout_while(in_service, SERVICE_LIMIT, is_old);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            let what = "an expert is loaded, but not yet in service: the tables";
            return Err(refused(GpuError::Deadline { what }));
        }
        Ok(())
    }
}

impl Experts for DeviceStore {
    fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    fn loaded(&self) -> BTreeMap<u32, Vec<u32>> {
        let tables = self.served.load();
        let layers = (0u32..).zip(&tables.layers);
        layers
            .filter(|(_, table)| !table.experts.is_empty())
            .map(|(layer, table)| {
                let mut experts = table.experts.clone();
                experts.sort_unstable();
                (layer, experts)
            })
            .collect()
    }

    fn has(&self, layer: u32, expert: u32) -> bool {
        let tables = self.served.load();
        tables.layers.get(layer as usize).is_some_and(|table| table.experts.contains(&expert))
    }

    fn loaded_bytes(&self) -> u64 {
        let num_experts: usize =
            self.served.load().layers.iter().map(|table| table.experts.len()).sum();
        num_experts as u64 * self.shape.expert_bytes()
    }

    fn load_one(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        self.add(layer, expert)
    }

    fn insert(&self, _: u32, _: u32, _: ExpertWeights) -> Result<u64, LoadError> {
        let what = "a server on a GPU reads its experts from files, not from other servers";
        Err(LoadError::Device(what.into()))
    }

    fn weights(&self, _: u32, _: u32) -> Option<Arc<ExpertWeights>> {
        None
    }
}

impl fmt::Debug for DeviceStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceStore")
            .field("dir", &self.checkpoint.dir())
            .field("device", &self.plan.device)
            .field("shape", &self.shape)
            .field("experts", &self.loaded())
            .finish_non_exhaustive()
    }
}

/// Every expert of the layers, in their order.
fn jobs_of(layers: &[LayerTable]) -> impl Iterator<Item = Job<'_>> {
    (0u32..).zip(layers).flat_map(|(layer, table)| {
        let memory = table.memory.as_deref().into_iter();
        memory.flat_map(move |memory| {
            let experts = table.experts.iter().enumerate();
            experts.map(move |(local_idx, &expert)| Job { layer, expert, memory, local_idx })
        })
    })
}

/// Drops memory after all copies into and out of it have ended. Leaks it if they do not end.
fn drop_after_copies<M>(uploader: &Uploader, memory: M) {
    if let Err(error) = uploader.wait() {
        tracing::error!(%error, "copies of weights did not end: their memory is not freed");
        std::mem::forget(memory);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of these locks can leave their data half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Longest wait for new tables to be in service. The data thread puts them into service between two batches.
const SERVICE_LIMIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
