//! The experts that this server holds, by layer, changeable while batches run.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use checkpoint::{Checkpoint, DType, ExpertTensors, TensorError, WeightView};
use memmap2::MmapMut;

use super::weights::{ExpertWeights, LayerExperts, Weight, WeightBytes, WeightDtype, WeightError};

/// Where weights live while they are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// In the mapped files: shared with other processes, reclaimable by the system, 4 KiB pages.
    #[default]
    Mapped,
    /// Copied into memory of this process, in huge pages where the system has them.
    Copied,
}

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Experts loaded so far.
    pub num_loaded: usize,
    /// Experts to load.
    pub num_experts: usize,
    /// Bytes of weights loaded so far.
    pub loaded_bytes: u64,
}

/// Why experts could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The checkpoint does not have the expert, or has it in another shape.
    #[error("cannot load expert {expert} of layer {layer}: {source}")]
    Tensor {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// The cause.
        source: TensorError,
    },
    /// The weights cannot be computed with.
    #[error("cannot use expert {expert} of layer {layer}: {source}")]
    Weight {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// The cause.
        source: WeightError,
    },
    /// Weights in a dtype that the engine does not compute with.
    #[error("tensor '{tensor}' is {dtype}; expected BF16, F16, F32 or F8_E4M3")]
    Dtype {
        /// Name of the tensor.
        tensor: String,
        /// Its dtype.
        dtype: DType,
    },
    /// No memory for a copy.
    #[error(
        "cannot get {bytes} bytes for expert {expert} of layer {layer}: {source}; \
         hold fewer experts or leave the weights in the mapped files"
    )]
    Memory {
        /// The layer.
        layer: u32,
        /// The expert.
        expert: u32,
        /// Bytes asked for.
        bytes: usize,
        /// The cause.
        source: io::Error,
    },
    /// The model's sizes are unusable.
    #[error(transparent)]
    Model(WeightError),
    /// The experts cannot be served from another device than the processor.
    #[error(transparent)]
    Device(Box<dyn Error + Send + Sync>),
}

/// The loaded experts of all layers. Readers take a layer's set as it is at that moment and keep
/// it for a batch; adding or dropping an expert swaps in a changed set and disturbs nobody.
pub struct ExpertStore {
    checkpoint: Arc<Checkpoint>,
    residency: Residency,
    layers: Vec<ArcSwap<LayerExperts>>,
}

impl ExpertStore {
    /// Loads the listed experts (layer → expert ids), reading every page once, so that the first
    /// batch does not wait for the disk. `progress` is called after each expert.
    ///
    /// # Errors
    /// [`LoadError`] that names the layer and expert.
    pub fn load(
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        residency: Residency,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        let empty =
            LayerExperts::new(config.hidden, config.moe_intermediate).map_err(LoadError::Model)?;
        let mut layers = vec![empty; config.num_layers as usize];
        let num_experts = experts.values().map(Vec::len).sum();
        let mut state = LoadProgress { num_loaded: 0, num_experts, loaded_bytes: 0 };
        for (&layer, ids) in experts {
            for &expert in ids {
                let weights = load_expert(&checkpoint, residency, layer, expert)?;
                state.num_loaded += 1;
                state.loaded_bytes += weights.size_bytes() as u64;
                if let Some(loaded) = layers.get_mut(layer as usize) {
                    loaded
                        .insert(expert, Arc::new(weights))
                        .map_err(|source| LoadError::Weight { layer, expert, source })?;
                }
                progress(state);
            }
        }
        let layers = layers.into_iter().map(ArcSwap::from_pointee).collect();
        Ok(Self { checkpoint, residency, layers })
    }

    /// The experts of a layer as they are now; `None` for a layer that the model does not have.
    #[must_use]
    pub fn layer(&self, layer: u32) -> Option<Arc<LayerExperts>> {
        self.layers.get(layer as usize).map(ArcSwap::load_full)
    }

    /// Loads one more expert and puts it into service. Takes as long as reading its weights; run
    /// it on a thread that nobody waits for. Returns the bytes of weights loaded.
    ///
    /// # Errors
    /// [`LoadError`] that names the layer and expert; the store is then as before.
    pub fn add(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        let weights = Arc::new(load_expert(&self.checkpoint, self.residency, layer, expert)?);
        let size_bytes = weights.size_bytes() as u64;
        let mut result = Ok(());
        if let Some(slot) = self.layers.get(layer as usize) {
            slot.rcu(|experts| {
                let mut changed = LayerExperts::clone(experts);
                result = changed.insert(expert, Arc::clone(&weights));
                changed
            });
        }
        result.map_err(|source| LoadError::Weight { layer, expert, source })?;
        Ok(size_bytes)
    }

    /// Takes an expert out of service; false if it was not loaded. Its memory is released when
    /// the last batch that uses it is done.
    pub fn remove(&self, layer: u32, expert: u32) -> bool {
        let mut removed = false;
        if let Some(slot) = self.layers.get(layer as usize) {
            slot.rcu(|experts| {
                let mut changed = LayerExperts::clone(experts);
                removed = changed.remove(expert).is_some();
                changed
            });
        }
        removed
    }

    /// Loaded experts (layer → expert ids, increasing), without layers that hold none.
    #[must_use]
    pub fn experts(&self) -> BTreeMap<u32, Vec<u32>> {
        let layers = (0u32..).zip(&self.layers);
        layers
            .map(|(layer, experts)| (layer, experts.load().ids().collect::<Vec<_>>()))
            .filter(|(_, ids)| !ids.is_empty())
            .collect()
    }

    /// Bytes of all loaded weights.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        let sum_layer = |layer: &ArcSwap<LayerExperts>| {
            let experts = layer.load();
            experts
                .ids()
                .filter_map(|id| experts.get(id))
                .map(|e| e.size_bytes() as u64)
                .sum::<u64>()
        };
        self.layers.iter().map(sum_layer).sum()
    }

    /// The checkpoint that the experts come from.
    #[must_use]
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }
}

impl std::fmt::Debug for ExpertStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertStore")
            .field("dir", &self.checkpoint.dir())
            .field("residency", &self.residency)
            .field("experts", &self.experts())
            .finish()
    }
}

fn load_expert(
    checkpoint: &Arc<Checkpoint>,
    residency: Residency,
    layer: u32,
    expert: u32,
) -> Result<ExpertWeights, LoadError> {
    let tensors = checkpoint.expert(layer, expert).map_err(|source| LoadError::Tensor {
        layer,
        expert,
        source,
    })?;
    let mut data = match residency {
        Residency::Mapped => map_expert(checkpoint, &tensors),
        Residency::Copied => {
            let bytes = copy_bytes(views(&tensors).map(|view| view.tensor.data));
            copy_expert(&tensors).map_err(|source| LoadError::Memory {
                layer,
                expert,
                bytes,
                source,
            })?
        }
    }
    .into_iter();
    let mut weight = |view: WeightView<'_>| {
        let dtype = match view.dtype() {
            DType::Bf16 => WeightDtype::Bf16,
            DType::F16 => WeightDtype::F16,
            DType::F32 => WeightDtype::F32,
            DType::F8E4m3 => WeightDtype::F8E4m3,
            dtype => {
                return Err(LoadError::Dtype { tensor: view.tensor.name.to_owned(), dtype });
            }
        };
        let scales = view.scales.map_or_else(Vec::new, |scales| scales.to_f32());
        let data = data.next().unwrap_or_else(|| WeightBytes::from(Vec::new()));
        Weight::new(dtype, view.rows(), view.cols(), data, scales.into())
            .map_err(|source| LoadError::Weight { layer, expert, source })
    };
    Ok(ExpertWeights {
        gate: weight(tensors.gate)?,
        up: weight(tensors.up)?,
        down: weight(tensors.down)?,
    })
}

fn views<'a>(tensors: &ExpertTensors<'a>) -> [WeightView<'a>; 3] {
    [tensors.gate, tensors.up, tensors.down]
}

/// Borrows the matrices from the mapping, after touching each page.
fn map_expert(checkpoint: &Arc<Checkpoint>, tensors: &ExpertTensors<'_>) -> [WeightBytes; 3] {
    views(tensors).map(|view| {
        let data = view.tensor.data;
        std::hint::black_box(data.iter().step_by(PAGE_BYTES).fold(0u8, |acc, &byte| acc ^ byte));
        let name = view.tensor.name;
        WeightBytes::new(Arc::clone(checkpoint), |checkpoint| {
            // The name comes from this very checkpoint; a miss would be caught by the size check.
            checkpoint.tensor(name).map_or(&[], |tensor| tensor.data)
        })
    })
}

/// Copies the matrices into one anonymous mapping.
fn copy_expert(tensors: &ExpertTensors<'_>) -> io::Result<[WeightBytes; 3]> {
    let matrices = views(tensors).map(|view| view.tensor.data);
    let mut memory = MmapMut::map_anon(copy_bytes(matrices) + HUGE_PAGE_BYTES)?;
    // Best effort: without huge pages the copy is as good as the mapping.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    // From the first huge page boundary on; what lies before is never touched.
    let mut offset = memory.as_ptr().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
    let mut ranges = matrices.map(|data| {
        let range = offset..offset + data.len();
        memory[range.clone()].copy_from_slice(data);
        offset += data.len().next_multiple_of(ALIGN_BYTES);
        range
    });
    let memory = Arc::new(memory.make_read_only()?);
    Ok(ranges.each_mut().map(|range| {
        let range = std::mem::take(range);
        WeightBytes::new(Arc::clone(&memory), |memory| &memory[range])
    }))
}

fn copy_bytes(matrices: [&[u8]; 3]) -> usize {
    matrices.iter().map(|data| data.len().next_multiple_of(ALIGN_BYTES)).sum()
}

/// Distance at which a loader touches mapped files: the smallest page of any target.
const PAGE_BYTES: usize = 4096;
/// Copies start on the boundary of a huge page, of the usual size, to consist of whole ones.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Matrices in a copy start on cache lines.
const ALIGN_BYTES: usize = 64;
