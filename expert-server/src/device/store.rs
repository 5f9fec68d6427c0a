//! The experts that a server holds in its GPU's memory, by layer, changeable while batches run.
//!
//! The matrices of a layer lie in one block of memory with room for so many experts, each in a place of
//! its own; a table says which. A further expert goes into a free place, or the layer moves to a larger
//! block; either way running batches see the old table until the data thread puts the new one into
//! service between two of them, and only then is the old block freed.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytemuck::Zeroable;
use checkpoint::{Checkpoint, DType, ExpertTensors, WeightView};
use kernels::abi::{DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr, LayerWeights};
use kernels::gpu::{Gpu, GpuBuffer, GpuError, LayerMatrices, LayerShape};

use super::error::DeviceError;
use super::plan::DevicePlan;
use super::upload::Uploader;
use crate::compute::{LoadError, LoadProgress, WeightError};
use crate::experts::Experts;

/// The loaded experts of all layers.
pub(crate) struct DeviceStore {
    gpu: Gpu,
    plan: DevicePlan,
    checkpoint: Arc<Checkpoint>,
    shape: WeightShape,
    /// One load at a time.
    loader: Mutex<Uploader>,
    /// The newest, and those that batches are computed by.
    tables: ArcSwap<Tables>,
    served: ArcSwap<Tables>,
    /// Version of the latter.
    in_service: Mutex<u64>,
    changed: Condvar,
    /// Tells the data thread of new tables.
    announce: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Which expert lies where, in one version.
#[derive(Debug, Clone)]
pub(crate) struct Tables {
    pub(crate) version: u64,
    pub(crate) layers: Vec<LayerTable>,
}

/// Experts of one layer.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerTable {
    /// Expert in each place.
    pub(crate) experts: Vec<u32>,
    pub(crate) memory: Option<Arc<LayerMemory>>,
}

/// Weights of one layer.
#[derive(Debug)]
pub(crate) struct LayerMemory {
    /// `[capacity, 2, inter, hidden]`: gate, then up.
    pub(crate) gate_up: GpuBuffer,
    /// `[capacity, hidden, inter]`.
    pub(crate) down: GpuBuffer,
    /// Scales of fp8 weights, of gate and up, then of down.
    pub(crate) scales: Option<[GpuBuffer; 2]>,
    capacity: usize,
}

/// Sizes of an expert in GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WeightShape {
    pub(crate) hidden: usize,
    pub(crate) inter: usize,
    /// fp8-e4m3 with a scale per 128 x 128 values; bf16 otherwise.
    pub(crate) is_fp8: bool,
}

impl DeviceStore {
    /// Loads the listed experts (layer → expert ids). `progress` is called after each.
    ///
    /// # Errors
    /// [`LoadError`]; with too little memory nothing is loaded at all.
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
        let mut state = LoadProgress { num_loaded: 0, num_experts, loaded_bytes: 0 };
        for (&layer, ids) in experts {
            let Some(table) = layers.get_mut(layer as usize) else { continue };
            let memory = LayerMemory::new(gpu, &shape, ids.len()).map_err(refused)?;
            let mut fill = || {
                if plan.random_weights {
                    fill_randomly(&mut uploader, &shape, &memory).map_err(refused)?;
                }
                for (place, &expert) in ids.iter().enumerate() {
                    if !plan.random_weights {
                        let what = (layer, expert);
                        put(&mut uploader, &checkpoint, &shape, &memory, place, what)?;
                    }
                    state.num_loaded += 1;
                    state.loaded_bytes += shape.expert_bytes();
                    progress(state);
                }
                uploader.settle().map_err(refused)
            };
            let filled = fill();
            if let Err(error) = filled {
                settle_before_drop(&uploader, memory);
                return Err(error);
            }
            table.experts.extend_from_slice(ids);
            table.memory = Some(Arc::new(memory));
        }
        // Nobody is served by anything older.
        let tables = Arc::new(Tables { version: 1, layers });
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
    pub(crate) fn tables(&self) -> Arc<Tables> {
        self.tables.load_full()
    }

    /// The kernels' view of every layer's weights.
    pub(crate) fn layer_weights(&self, tables: &Tables) -> Result<Vec<LayerWeights>, GpuError> {
        let of = |table: &LayerTable| {
            table.memory.as_deref().map(|memory| self.describe(memory)).transpose()
        };
        let made: Vec<Option<LayerWeights>> =
            tables.layers.iter().map(of).collect::<Result<_, _>>()?;
        // Nothing is computed in a layer without experts, but kernels may look at its entry early.
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

    /// Type of the weights in GPU memory, as the kernels number types.
    pub(crate) const fn weights_dtype(&self) -> u32 {
        if self.shape.is_fp8 { DTYPE_F8_E4M3 } else { DTYPE_BF16 }
    }

    /// Calls `announce` whenever there are new tables. Once, by the data thread's owner.
    pub(crate) fn on_change(&self, announce: Box<dyn Fn() + Send + Sync>) {
        // A second data thread would not be told, and does not exist.
        let _ = self.announce.set(announce);
    }

    /// The data thread says that it works with these.
    pub(crate) fn set_in_service(&self, tables: &Arc<Tables>) {
        self.served.store(Arc::clone(tables));
        *lock(&self.in_service) = tables.version;
        self.changed.notify_all();
    }

    fn add(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        let mut uploader = lock(&self.loader);
        let old = self.tables();
        // Fails for what the model does not have.
        self.checkpoint.expert(layer, expert).map_err(|source| LoadError::Tensor {
            layer,
            expert,
            source,
        })?;
        let Some(table) = old.layers.get(layer as usize) else { return Ok(0) };
        if table.experts.contains(&expert) {
            // An earlier call may not have lived to see it in service.
            self.announce(old.version)?;
            return Ok(0);
        }
        let place = table.experts.len();
        let memory = match &table.memory {
            Some(memory) if place < memory.capacity => Arc::clone(memory),
            memory => Arc::new(self.grow(&mut uploader, memory.as_ref(), place)?),
        };
        let what = (layer, expert);
        let put = put(&mut uploader, &self.checkpoint, &self.shape, &memory, place, what)
            .and_then(|()| uploader.settle().map_err(refused));
        if let Err(error) = put {
            settle_before_drop(&uploader, memory);
            return Err(error);
        }
        let mut new = Tables::clone(&old);
        new.version += 1;
        let version = new.version;
        if let Some(table) = new.layers.get_mut(layer as usize) {
            table.experts.push(expert);
            table.memory = Some(memory);
        }
        self.tables.store(Arc::new(new));
        self.announce(version)?;
        // Freed here, by the loader, if this was the last use: freeing waits for the GPU.
        drop(old);
        Ok(self.shape.expert_bytes())
    }

    /// A larger block for a layer, with what the old one holds.
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
                // SAFETY: both blocks have so many bytes; places in use are never written again, and
                // nobody else knows the new block. Neither is freed before the copy has ended.
                unsafe { uploader.within(to.ptr(), from.ptr(), bytes)? };
            }
            uploader.settle()
        };
        let copied = copy();
        if let Err(error) = copied {
            settle_before_drop(uploader, (new, Arc::clone(old)));
            return Err(refused(error));
        }
        Ok(new)
    }

    /// Has the data thread work with `version`, if there is one.
    fn announce(&self, version: u64) -> Result<(), LoadError> {
        if let Some(announce) = self.announce.get() {
            announce();
            self.await_service(version)?;
        } else {
            self.served.store(self.tables());
        }
        Ok(())
    }

    /// Waits until the data thread works with `version`.
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

impl Tables {
    /// Places that experts of any layer have.
    pub(crate) fn num_places(&self) -> usize {
        self.layers.iter().map(|table| table.experts.len()).max().unwrap_or(0)
    }

    /// Place of every expert, `[num_layers, num_experts]`, -1 where it is not here.
    pub(crate) fn places(&self, num_experts: usize) -> Vec<i16> {
        let mut places = vec![-1; self.layers.len() * num_experts];
        for (row, table) in places.chunks_exact_mut(num_experts.max(1)).zip(&self.layers) {
            for (place, expert) in (0i16..).zip(&table.experts) {
                if let Some(entry) = row.get_mut(*expert as usize) {
                    *entry = place;
                }
            }
        }
        places
    }
}

impl WeightShape {
    /// Sizes of the model's experts: fp8 when all that it has are fp8 with blocks that the kernels know,
    /// else bf16, to which everything can be rounded. Whatever is assigned first, any other may come later.
    ///
    /// Fails when `experts`, which are to be loaded, are not all there.
    fn of(checkpoint: &Checkpoint, experts: &BTreeMap<u32, Vec<u32>>) -> Result<Self, LoadError> {
        let model = checkpoint.config();
        let wanted =
            experts.iter().flat_map(|(layer, ids)| ids.iter().map(move |id| (*layer, *id)));
        for (layer, expert) in wanted {
            let missing = |source| LoadError::Tensor { layer, expert, source };
            checkpoint.expert(layer, expert).map_err(missing)?;
        }
        let layers = model.moe_layers().into_iter();
        let mut all = layers.flat_map(|layer| (0..model.num_experts).map(move |id| (layer, id)));
        let is_fp8 = all.all(|(layer, expert)| {
            // What is not there cannot be loaded later either.
            checkpoint.expert(layer, expert).map_or(true, |tensors| {
                [tensors.gate, tensors.up, tensors.down].iter().all(is_block_fp8)
            })
        });
        Ok(Self { hidden: model.hidden, inter: model.moe_intermediate, is_fp8 })
    }

    /// Bytes of gate or up, which down has, too.
    fn matrix_bytes(&self) -> u64 {
        self.hidden as u64 * self.inter as u64 * if self.is_fp8 { 1 } else { 2 }
    }

    /// Scales of gate or up, as many as of down.
    pub(crate) const fn num_scales(&self) -> u64 {
        if !self.is_fp8 {
            return 0;
        }
        self.hidden.div_ceil(SCALE_BLOCK) as u64 * self.inter.div_ceil(SCALE_BLOCK) as u64
    }

    /// Bytes of one expert.
    pub(crate) fn expert_bytes(&self) -> u64 {
        3 * (self.matrix_bytes() + self.num_scales() * 4)
    }
}

impl LayerMemory {
    fn new(gpu: &Gpu, shape: &WeightShape, capacity: usize) -> Result<Self, GpuError> {
        let places = capacity.max(1) as u64;
        let scales = match shape.num_scales() * 4 {
            0 => None,
            bytes => Some([gpu.alloc(places * 2 * bytes)?, gpu.alloc(places * bytes)?]),
        };
        Ok(Self {
            gate_up: gpu.alloc(places * 2 * shape.matrix_bytes())?,
            down: gpu.alloc(places * shape.matrix_bytes())?,
            scales,
            capacity: capacity.max(1),
        })
    }

    fn parts(&self) -> impl Iterator<Item = &GpuBuffer> {
        [&self.gate_up, &self.down].into_iter().chain(self.scales.iter().flatten())
    }
}

/// Fills a layer's memory with random weights: a block from the host, repeated within the GPU.
fn fill_randomly(
    uploader: &mut Uploader,
    shape: &WeightShape,
    memory: &LayerMemory,
) -> Result<(), GpuError> {
    // Any generator will do; this one is a few instructions.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    // Outputs of about the size of inputs.
    let scale = (shape.hidden as f32).sqrt().recip();
    let mut value = move || (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    for buffer in [&memory.gate_up, &memory.down] {
        let block_bytes = buffer.len().min(RANDOM_BYTES);
        if shape.is_fp8 {
            // Every code but those of NaN.
            let code = |value: f32| ((value * 126.0).abs() as u8) | (u8::from(value < 0.0) << 7);
            let block: Vec<u8> = (0..block_bytes).map(|_| code(value())).collect();
            uploader.bytes(buffer.ptr(), &block)?;
        } else {
            let block: Vec<f32> = (0..block_bytes / 2).map(|_| value() * scale).collect();
            uploader.as_bf16(buffer.ptr(), &block)?;
        }
        uploader.settle()?;
        let mut filled = block_bytes;
        while filled < buffer.len() {
            let bytes = filled.min(buffer.len() - filled);
            // SAFETY: both ranges lie in the buffer and do not overlap; nobody else knows it yet.
            unsafe { uploader.within(buffer.at(filled, bytes)?, buffer.ptr(), bytes)? };
            uploader.settle()?;
            filled += bytes;
        }
    }
    for scales in memory.scales.iter().flatten() {
        // The largest code stands for 448.
        let factors = vec![scale / 64.0; (scales.len() / 4) as usize];
        let bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        uploader.bytes(scales.ptr(), &bytes)?;
    }
    uploader.settle()
}

/// Starts copying an expert to its place.
fn put(
    uploader: &mut Uploader,
    checkpoint: &Checkpoint,
    shape: &WeightShape,
    memory: &LayerMemory,
    place: usize,
    (layer, expert): (u32, u32),
) -> Result<(), LoadError> {
    let ExpertTensors { gate, up, down, .. } = checkpoint
        .expert(layer, expert)
        .map_err(|source| LoadError::Tensor { layer, expert, source })?;
    let place = place as u64;
    let (bytes, scales) = (shape.matrix_bytes(), shape.num_scales() * 4);
    let at = |buffer: &GpuBuffer, idx: u64, len: u64| buffer.at(idx * len, len);
    for (view, buffer, scale_idx, idx) in [
        (gate, &memory.gate_up, 0, place * 2),
        (up, &memory.gate_up, 0, place * 2 + 1),
        (down, &memory.down, 1, place),
    ] {
        let to = at(buffer, idx, bytes).map_err(refused)?;
        if shape.is_fp8 {
            check_fp8(&view).map_err(|source| LoadError::Weight { layer, expert, source })?;
        } else if !matches!(view.dtype(), DType::Bf16 | DType::F16 | DType::F32 | DType::F8E4m3) {
            let tensor = view.tensor.name.to_owned();
            return Err(LoadError::Dtype { tensor, dtype: view.dtype() });
        }
        let copied = copy(uploader, to, &view, shape.is_fp8).and_then(|()| {
            let Some((pair, factors)) = memory.scales.as_ref().zip(view.scales) else {
                return Ok(());
            };
            let factors: Vec<u8> = factors.to_f32().iter().flat_map(|f| f.to_le_bytes()).collect();
            uploader.bytes(at(&pair[scale_idx], idx, scales)?, &factors)
        });
        copied.map_err(|source| DeviceError::Weights {
            what: format!("layer {layer} expert {expert}"),
            source,
        })?;
    }
    Ok(())
}

fn refused(source: GpuError) -> LoadError {
    DeviceError::Weights { what: "experts".to_owned(), source }.into()
}

/// Lets weights go that were not loaded to the end: only when no copy into or out of them is under way.
fn settle_before_drop<M>(uploader: &Uploader, memory: M) {
    if let Err(error) = uploader.settle() {
        tracing::error!(%error, "memory of weights is kept: copies of it did not end");
        std::mem::forget(memory);
    }
}

fn copy(
    uploader: &mut Uploader,
    to: DevicePtr,
    view: &WeightView<'_>,
    keeps_fp8: bool,
) -> Result<(), GpuError> {
    match view.dtype() {
        DType::Bf16 => uploader.bytes(to, view.tensor.data),
        DType::F8E4m3 if keeps_fp8 => uploader.bytes(to, view.tensor.data),
        _ => uploader.as_bf16(to, &view.to_f32()),
    }
}

fn is_block_fp8(view: &WeightView<'_>) -> bool {
    let has_blocks = view.scales.is_some_and(|scales| scales.block == [SCALE_BLOCK; 2]);
    view.dtype() == DType::F8E4m3 && has_blocks
}

/// Whether an fp8 matrix is what the kernels take.
fn check_fp8(view: &WeightView<'_>) -> Result<(), WeightError> {
    let (rows, cols) = (view.rows(), view.cols());
    let dtype = crate::compute::WeightDtype::F8E4m3;
    if !is_block_fp8(view) {
        let expected = rows.div_ceil(SCALE_BLOCK) * cols.div_ceil(SCALE_BLOCK);
        let found = view.scales.map_or(0, |scales| scales.tensor.num_elements());
        return Err(WeightError::ScaleSize { rows, cols, dtype, expected, found });
    }
    match view.tensor.data.iter().position(|byte| byte & 0x7f == 0x7f) {
        Some(offset) => Err(WeightError::NotFinite { rows, cols, offset }),
        None => Ok(()),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half changed under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Side of the blocks that share a scale in the kernels' fp8 weights.
const SCALE_BLOCK: usize = 128;
/// Block of random weights that is repeated.
const RANDOM_BYTES: u64 = 64 << 20;
/// Tables go into service between two batches.
const SERVICE_LIMIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
