//! The experts of a server by layer. Experts are added and removed while batches run.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use checkpoint::{Checkpoint, TensorError, WeightView};
use memmap2::MmapMut;

use super::weights::{ExpertWeights, LayerExperts, Weight, WeightBytes, WeightError, WeightScales};

/// The memory of weights. Formats that the checkpoint does not store row by row, such as GPTQ's, are always copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// The mapped files: shared with other processes, reclaimable by the system, 4 KiB pages.
    #[default]
    Mapped,
    /// Memory of this process, in huge pages if the system has them.
    Copied,
}

/// Progress of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Experts loaded so far.
    pub num_loaded: usize,
    /// Experts to load.
    pub num_experts: usize,
    /// Bytes of weights loaded so far.
    pub loaded_bytes: u64,
}

/// Why experts cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant says what its fields are")]
pub enum LoadError {
    /// The checkpoint lacks the expert, or has it in another shape.
    #[error("cannot load expert {expert} of layer {layer}: {source}")]
    Tensor { layer: u32, expert: u32, source: TensorError },
    /// The weights are invalid.
    #[error("cannot use expert {expert} of layer {layer}: {source}")]
    Weight { layer: u32, expert: u32, source: WeightError },
    /// The system has no memory for a copy.
    #[error(
        "cannot get {bytes} bytes for expert {expert} of layer {layer}: {source}; \
         hold fewer experts or leave the weights in the mapped files"
    )]
    Memory { layer: u32, expert: u32, bytes: usize, source: io::Error },
    /// The sizes of the model are invalid.
    #[error(transparent)]
    Model(WeightError),
    /// Another device than the CPUs cannot hold the experts.
    #[error(transparent)]
    Device(Box<dyn Error + Send + Sync>),
}

/// The loaded experts of all layers. A reader takes the current set of a layer and keeps it for a batch.
/// Adding or removing an expert swaps in a changed set; readers of the old set are not affected.
pub struct ExpertStore {
    checkpoint: Arc<Checkpoint>,
    residency: Residency,
    layers: Vec<ArcSwap<LayerExperts>>,
}

impl ExpertStore {
    /// Loads experts (layer → expert ids) and calls `progress` after each. Reads every page once, so that the
    /// first batch does not wait for the disk. Blocks until all are loaded.
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
        let empty = LayerExperts::new(config.hidden, config.moe_intermediate)
            .map_err(LoadError::Model)?
            .with_arithmetic(config.arithmetic);
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

    /// The current experts of a layer, or `None` for a layer that the model does not have.
    #[must_use]
    pub fn layer(&self, layer: u32) -> Option<Arc<LayerExperts>> {
        self.layers.get(layer as usize).map(ArcSwap::load_full)
    }

    /// Loads one more expert, puts it into service and returns the bytes of its weights. Blocks while it
    /// reads the weights, so call it on a thread that may block.
    ///
    /// # Errors
    /// [`LoadError`] that names the layer and expert. The store is then unchanged.
    pub fn add(&self, layer: u32, expert: u32) -> Result<u64, LoadError> {
        let weights = Arc::new(load_expert(&self.checkpoint, self.residency, layer, expert)?);
        let size_bytes = weights.size_bytes() as u64;
        let mut result = Ok(());
        if let Some(experts_of_layer) = self.layers.get(layer as usize) {
            experts_of_layer.rcu(|experts| {
                let mut changed = LayerExperts::clone(experts);
                result = changed.insert(expert, Arc::clone(&weights));
                changed
            });
        }
        result.map_err(|source| LoadError::Weight { layer, expert, source })?;
        Ok(size_bytes)
    }

    /// Takes an expert out of service. Returns false if it was not loaded. Its memory is freed after the last
    /// batch that uses it.
    pub fn remove(&self, layer: u32, expert: u32) -> bool {
        let mut removed = false;
        if let Some(experts_of_layer) = self.layers.get(layer as usize) {
            experts_of_layer.rcu(|experts| {
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
    let mut parts = Vec::new();
    for view in tensors.matrices() {
        parts.push(view.codes());
        if let Some(scales) = view.scales() {
            parts.push(scales.data.clone());
        }
    }
    let mut parts = place(checkpoint, residency, &parts)
        .map_err(|(bytes, source)| LoadError::Memory { layer, expert, bytes, source })?
        .into_iter();
    let mut next = || parts.next().unwrap_or_else(|| Vec::new().into());
    let mut weight = |view: &WeightView<'_>| {
        let codes = next();
        let scales = view.scales().map(|scales| WeightScales {
            dtype: scales.dtype,
            data: next(),
            factor: scales.factor,
            minima: view.minima().unwrap_or_default().into(),
        });
        Weight::new(view.format(), view.rows(), view.cols(), codes, scales)
            .map_err(|source| LoadError::Weight { layer, expert, source })
    };
    let gate = tensors.gate.as_ref().map(&mut weight).transpose()?;
    let (up, down) = (weight(&tensors.up)?, weight(&tensors.down)?);
    Ok(ExpertWeights { gate, up, down, biases: tensors.biases })
}

/// Borrows parts from the mapping, after touching each page, or copies them. An error has the bytes that a copy
/// takes.
fn place(
    checkpoint: &Arc<Checkpoint>,
    residency: Residency,
    parts: &[Cow<'_, [u8]>],
) -> Result<Vec<WeightBytes>, (usize, io::Error)> {
    let is_borrowed =
        |part: &Cow<'_, [u8]>| residency == Residency::Mapped && matches!(part, Cow::Borrowed(_));
    let copied = parts.iter().filter(|part| !is_borrowed(part)).map(|part| &**part);
    let bytes = copied.clone().map(|part| part.len().next_multiple_of(ALIGN_BYTES)).sum();
    let mut copies = copy(copied, bytes).map_err(|source| (bytes, source))?.into_iter();
    let mut placed = Vec::new();
    for part in parts {
        match part {
            Cow::Borrowed(part) if residency == Residency::Mapped => {
                let pages = part.iter().step_by(PAGE_BYTES);
                std::hint::black_box(pages.fold(0u8, |acc, &byte| acc ^ byte));
                // SAFETY: the view borrows these bytes from the checkpoint's mapping, which is only read.
                placed.push(unsafe { WeightBytes::borrowed(checkpoint, part) });
            }
            _ => placed.extend(copies.next()),
        }
    }
    Ok(placed)
}

/// Copies parts into one anonymous mapping of `bytes`, or each into its own memory if all fit into one huge page.
fn copy<'a>(parts: impl Iterator<Item = &'a [u8]>, bytes: usize) -> io::Result<Vec<WeightBytes>> {
    if bytes < HUGE_PAGE_BYTES {
        return Ok(parts.map(|part| part.to_vec().into()).collect());
    }
    let mut memory = MmapMut::map_anon(bytes + HUGE_PAGE_BYTES)?;
    // Best effort: without huge pages the copy is no worse than the mapping.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    // Data starts at the first boundary of a huge page. The memory before it is never touched.
    let mut offset = memory.as_ptr().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
    let mut ranges = Vec::new();
    for part in parts {
        let range = offset..offset + part.len();
        memory[range.clone()].copy_from_slice(part);
        offset += part.len().next_multiple_of(ALIGN_BYTES);
        ranges.push(range);
    }
    let memory = Arc::new(memory.make_read_only()?);
    let part = |range| WeightBytes::new(Arc::clone(&memory), |memory| &memory[range]);
    Ok(ranges.into_iter().map(part).collect())
}

/// Stride at which a load touches mapped files: the smallest page of all targets.
const PAGE_BYTES: usize = 4096;
/// Usual size of huge pages. Copies start at their boundaries, so that they consist of whole pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Alignment of matrices in a copy: a cache line.
const ALIGN_BYTES: usize = 64;
