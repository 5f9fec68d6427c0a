//! The experts that a server holds in its GPU's memory. Experts are added while batches run.
//!
//! The matrices of a layer lie in one block of memory, which has room for a number of experts. Each expert
//! has a local index in the block; a table maps experts to local indices. A new expert takes a free index, or
//! the layer moves to a larger block. Batches in flight go on with the old table until the data thread puts
//! the new one into service between two batches. Only then is the old block freed.

mod block;
mod bulk;
mod exchange;
mod landing;
mod reservation;
mod shape;
mod tables;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytemuck::Zeroable;
use checkpoint::Checkpoint;
use kernels::abi::{DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, LayerWeights};
use kernels::gpu::{Gpu, GpuError, LayerMatrices, LayerShape};

use self::block::{LayerMemory, Part};
use self::bulk::{Job, load_all};
use self::exchange::Summer;
use self::landing::DeviceLanding;
use self::reservation::Place;
use self::shape::WeightShape;
pub(super) use self::tables::ExpertTables;
use self::tables::LayerTable;
use self::weights::{fill_randomly, put, put_matrices, refused};
use super::DeviceError;
use super::plan::DevicePlan;
use super::upload::Uploader;
use crate::compute::{ExpertWeights, LoadError, LoadProgress, WeightError};
use crate::experts::{DeviceExperts, Experts, Landing, MatrixForm, Room};

/// The loaded experts of all layers.
pub(crate) struct DeviceStore {
    gpu: Gpu,
    plan: DevicePlan,
    checkpoint: Arc<Checkpoint>,
    shape: WeightShape,
    /// For loads of one expert. A load takes one and gives it back.
    uploaders: Mutex<Vec<Uploader>>,
    /// The places of all layers. Locked for every change of the tables.
    places: Mutex<Vec<Vec<Place>>>,
    /// Blocks by their numbers, for peers that map them.
    blocks: Mutex<BTreeMap<u64, Weak<LayerMemory>>>,
    next_block: AtomicU64,
    summer: Mutex<Option<Summer>>,
    /// Experts that were widened to bf16 from another form, here or on the GPU that they were copied from: (layer,
    /// expert).
    widened: Mutex<BTreeSet<(u32, u32)>>,
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
    /// Loads experts (layer → expert ids) and calls `progress` after each. Blocks until all are in GPU memory. Keeps
    /// room for `rooms` experts (by layer) in all, these included, for experts that follow.
    ///
    /// # Errors
    /// [`LoadError`]. With too little memory it loads no expert at all.
    pub(crate) fn load(
        gpu: &Gpu,
        plan: DevicePlan,
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        rooms: &BTreeMap<u32, usize>,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let shape = WeightShape::of(&checkpoint, experts)?;
        let mut rooms = rooms.clone();
        for (layer, ids) in experts {
            let room = rooms.entry(*layer).or_default();
            *room = ids.len().max(*room);
        }
        let (num_experts, num_rooms): (usize, usize) =
            (experts.values().map(Vec::len).sum(), rooms.values().sum());
        let needed_bytes = num_rooms as u64 * shape.expert_bytes() + plan.workspace_bytes();
        plan.check_memory(gpu, "the experts and the batches", needed_bytes)?;
        let mut uploader = Uploader::new(gpu).map_err(refused)?;
        let mut layers = vec![LayerTable::default(); plan.num_layers as usize];
        let mut blocks = BTreeMap::new();
        for (id, (&layer, &room)) in (0u64..).zip(&rooms) {
            let Some(table) = layers.get_mut(layer as usize) else { continue };
            let memory = LayerMemory::new(gpu, &shape, room, id).map_err(refused)?;
            let memory = Arc::new(memory);
            blocks.insert(id, Arc::downgrade(&memory));
            table.places.extend(experts.get(&layer).into_iter().flatten().copied().map(Some));
            table.memory = Some(memory);
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
                table.experts().for_each(|_| progress());
            }
        } else {
            let jobs: Vec<Job<'_>> = jobs_of(&layers).collect();
            if let Err(error) = load_all(gpu, &checkpoint, &jobs, &mut progress) {
                if error.is_copying {
                    tracing::error!("copies of weights did not end: their memory is not freed");
                    std::mem::forget(layers);
                }
                return Err(error.source);
            }
        }
        // In service from the start, because there is no older version.
        let held = |table: &LayerTable| table.experts().map(Place::Held).collect();
        let places = layers.iter().map(held).collect();
        let tables = Arc::new(ExpertTables { version: 1, layers });
        Ok(Self {
            gpu: gpu.clone(),
            plan,
            checkpoint,
            shape,
            uploaders: Mutex::new(vec![uploader]),
            places: Mutex::new(places),
            next_block: AtomicU64::new(blocks.len() as u64),
            blocks: Mutex::new(blocks),
            summer: Mutex::default(),
            widened: Mutex::default(),
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
        let shape = LayerShape {
            hidden: self.shape.hidden as u32,
            inter: self.shape.inter as u32,
            num_local_experts: memory.capacity() as u32,
            dtype: self.weights_dtype(),
        };
        let matrices = LayerMatrices {
            gate_up: memory.first(Part::GateUp),
            down: memory.first(Part::Down),
            gate_up_scale: memory.first(Part::GateUpScales),
            down_scale: memory.first(Part::DownScales),
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
            .map(|(layer, table)| {
                let mut experts: Vec<u32> = table.experts().collect();
                experts.sort_unstable();
                (layer, experts)
            })
            .filter(|(_, experts)| !experts.is_empty())
            .collect()
    }

    fn has(&self, layer: u32, expert: u32) -> bool {
        self.served.load().find(layer, expert).is_some()
    }

    fn loaded_bytes(&self) -> u64 {
        let num_experts: usize =
            self.served.load().layers.iter().map(|table| table.experts().count()).sum();
        num_experts as u64 * self.shape.expert_bytes()
    }

    fn load_one(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        // Returns an error for an expert that the model does not have.
        self.checkpoint.expert(layer, expert).map_err(|source| LoadError::Tensor {
            layer,
            expert,
            source,
        })?;
        let Some(mut reservation) = self.reserve(layer, expert)? else { return Ok(0) };
        let (uploader, memory, local_idx) = reservation.parts();
        put(uploader, &self.checkpoint, memory, local_idx, (layer, expert))?;
        reservation.publish()
    }

    fn insert(&self, layer: u32, expert: u32, weights: ExpertWeights) -> Result<u64, LoadError> {
        let refused = |what: &str| DeviceError::Arithmetic { what: what.to_owned() };
        let ExpertWeights { gate, up, down, biases } = weights;
        if let Some(biases) = biases {
            // No expert of a model that this device serves has some: the source made them up.
            let (matrix, found) = ("down", biases.down.len());
            let source = WeightError::Bias { matrix, expert, found, expected: 0 };
            return Err(LoadError::Weight { layer, expert, source });
        }
        let gate = gate.ok_or_else(|| refused("experts without a gate"))?;
        let matrices = [gate, up, down];
        let Some(mut reservation) = self.reserve(layer, expert)? else { return Ok(0) };
        reservation.is_widened = matrices.iter().any(|matrix| matrix.format() != self.format());
        let (uploader, memory, local_idx) = reservation.parts();
        put_matrices(uploader, &matrices, memory, local_idx, (layer, expert))?;
        reservation.publish()
    }

    fn weights(&self, _: u32, _: u32) -> Option<Arc<ExpertWeights>> {
        None
    }

    fn landing(
        &self,
        layer: u32,
        expert: u32,
        forms: &[MatrixForm],
    ) -> Result<Room<'_>, LoadError> {
        DeviceLanding::open(self, layer, expert, forms)
    }

    fn device(self: Arc<Self>) -> Option<Arc<dyn DeviceExperts>> {
        Some(self)
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
            let experts = table.experts().enumerate();
            experts.map(move |(local_idx, expert)| Job { layer, expert, memory, local_idx })
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
