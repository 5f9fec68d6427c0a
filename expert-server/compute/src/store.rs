//! The experts of a server by layer. Experts are added and removed while batches run.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use arc_swap::ArcSwap;
use checkpoint::{Checkpoint, TensorError, WeightView};

use super::memory::{HUGE_PAGE_BYTES, WeightMemory};
use super::weights::{ExpertWeights, LayerExperts, Weight, WeightBytes, WeightError, WeightScales};

/// The memory of weights. Formats that the checkpoint does not store row by row, such as GPTQ's, are always copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// The mapped files: shared with other processes, reclaimable by the system. In huge pages if the file system has
    /// them and loading read the files from the disk, otherwise in pages of 4 KiB.
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
    /// Loads experts (layer → expert ids) on `num_threads` threads, the caller included; 0 takes as many as the
    /// process has CPUs. Calls `progress` on the calling thread after each expert. Maps every page, so that the first
    /// batch does not wait for the disk. Blocks until all are loaded. Besides the result, each thread holds one expert
    /// at most.
    ///
    /// # Errors
    /// [`LoadError`] of the first expert that cannot be loaded, by layer and expert.
    pub fn load(
        checkpoint: Arc<Checkpoint>,
        experts: &BTreeMap<u32, Vec<u32>>,
        residency: Residency,
        num_threads: usize,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        let empty = LayerExperts::new(config.hidden, config.moe_intermediate)
            .map_err(LoadError::Model)?
            .with_arithmetic(config.arithmetic);
        let mut layers = vec![empty; config.num_layers as usize];
        if residency == Residency::Mapped {
            checkpoint.prefer_huge_pages();
        }
        let list = experts.iter().flat_map(|(&layer, ids)| ids.iter().map(move |&id| (layer, id)));
        let list: Vec<(u32, u32)> = list.collect();
        let mut state = LoadProgress { num_loaded: 0, num_experts: list.len(), loaded_bytes: 0 };
        let load = |idx: usize| {
            let &(layer, expert) = list.get(idx)?;
            Some(load_expert(&checkpoint, residency, layer, expert))
        };
        in_parallel(threads_of(num_threads).min(list.len()), load, &mut |idx, weights| {
            let (layer, expert) = list[idx];
            state.num_loaded += 1;
            state.loaded_bytes += weights.size_bytes() as u64;
            if let Some(loaded) = layers.get_mut(layer as usize) {
                loaded.insert(expert, Arc::new(weights)).map_err(|source| LoadError::Weight {
                    layer,
                    expert,
                    source,
                })?;
            }
            progress(state);
            Ok(())
        })?;
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
        self.insert(layer, expert, load_expert(&self.checkpoint, self.residency, layer, expert)?)
    }

    /// Puts an expert with weights from elsewhere into service and returns the bytes of its weights. Replaces a loaded
    /// one.
    ///
    /// # Errors
    /// [`LoadError::Weight`] if the weights do not have the shape of the layer. The store is then unchanged.
    pub fn insert(
        &self,
        layer: u32,
        expert: u32,
        weights: ExpertWeights,
    ) -> Result<u64, LoadError> {
        let weights = Arc::new(weights);
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

    /// The weights of an expert, if it is loaded. They stay in memory as long as the caller holds them.
    #[must_use]
    pub fn weights(&self, layer: u32, expert: u32) -> Option<Arc<ExpertWeights>> {
        self.layers.get(layer as usize)?.load().get(expert).cloned()
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

fn threads_of(num_threads: usize) -> usize {
    match num_threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        num => num,
    }
}

/// Makes items 0, 1, … until `make` returns `None`, on `num_threads` threads, the caller included. Hands each to `take`
/// on the calling thread, in any order.
///
/// After an error no thread begins another item. The result is the error with the lowest index: threads begin items in
/// order, so every lower one has been made.
fn in_parallel<T: Send, E: Send>(
    num_threads: usize,
    make: impl Fn(usize) -> Option<Result<T, E>> + Sync,
    take: &mut dyn FnMut(usize, T) -> Result<(), E>,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let has_failed = AtomicBool::new(false);
    let make_next = || {
        if has_failed.load(Ordering::Relaxed) {
            return None;
        }
        let idx = next.fetch_add(1, Ordering::Relaxed);
        let made = make(idx)?;
        has_failed.fetch_or(made.is_err(), Ordering::Relaxed);
        Some((idx, made))
    };
    let mut first_error: Option<(usize, E)> = None;
    let mut collect = |(idx, made): (usize, Result<T, E>)| {
        if let Err(error) = made.and_then(|item| take(idx, item)) {
            has_failed.store(true, Ordering::Relaxed);
            if first_error.as_ref().is_none_or(|(first, _)| idx < *first) {
                first_error = Some((idx, error));
            }
        }
    };
    std::thread::scope(|scope| {
        let (sender, made) = mpsc::channel();
        for _ in 1..num_threads {
            let sender = sender.clone();
            let work = || {
                let sender = sender;
                // The receiver outlives this thread.
                while make_next().is_some_and(|item| sender.send(item).is_ok()) {}
            };
            // Without a further thread the others do its share.
            let name = "switchyard-load".to_owned();
            if std::thread::Builder::new().name(name).spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        drop(sender);
        while let Some(item) = make_next() {
            collect(item);
            made.try_iter().for_each(&mut collect);
        }
        made.iter().for_each(&mut collect);
    });
    first_error.map_or(Ok(()), |(_, error)| Err(error))
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

/// Borrows parts from the mapping, after mapping each page, or copies them. An error has the bytes that a copy
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
                map_pages(part);
                // SAFETY: the view borrows these bytes from the checkpoint's mapping, which is only read.
                placed.push(unsafe { WeightBytes::borrowed(checkpoint, part) });
            }
            _ => placed.extend(copies.next()),
        }
    }
    Ok(placed)
}

/// Reads the pages of bytes of a mapped file that are not in memory, and maps all of them together.
pub fn map_pages(bytes: &[u8]) {
    #[cfg(target_os = "linux")]
    if !bytes.is_empty() {
        let in_page = bytes.as_ptr().addr() % rustix::param::page_size();
        let first = bytes.as_ptr().wrapping_sub(in_page).cast_mut();
        let advice = rustix::mm::Advice::LinuxPopulateRead;
        // SAFETY: reads pages in and changes none. Those at both ends belong to the mapping that `bytes` lies in.
        if unsafe { rustix::mm::madvise(first.cast(), in_page + bytes.len(), advice) }.is_ok() {
            return;
        }
        // An older kernel, or a file that became unreadable, which the handler of SIGBUS reports.
    }
    let pages = bytes.iter().step_by(PAGE_BYTES);
    std::hint::black_box(pages.fold(0u8, |acc, &byte| acc ^ byte));
}

/// Copies parts into one anonymous mapping of `bytes`, or each into its own memory if all fit into one huge page.
fn copy<'a>(parts: impl Iterator<Item = &'a [u8]>, bytes: usize) -> io::Result<Vec<WeightBytes>> {
    if bytes < HUGE_PAGE_BYTES {
        return Ok(parts.map(|part| part.to_vec().into()).collect());
    }
    let mut memory = WeightMemory::new(bytes)?;
    let mut offset = 0;
    let mut ranges = Vec::new();
    for part in parts {
        let range = offset..offset + part.len();
        memory.as_mut_slice()[range.clone()].copy_from_slice(part);
        offset += part.len().next_multiple_of(ALIGN_BYTES);
        ranges.push(range);
    }
    let memory = Arc::new(memory);
    let part = |range| WeightBytes::new(Arc::clone(&memory), |memory| &memory.as_slice()[range]);
    Ok(ranges.into_iter().map(part).collect())
}

/// Stride at which a load touches mapped files: the smallest page of all targets.
const PAGE_BYTES: usize = 4096;
/// Alignment of matrices in a copy: a cache line.
const ALIGN_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_error_with_the_lowest_index_is_returned_after_all_lower_items() {
        // Every set of faults among ten items, in the maker or in the taker.
        for faults in 0..1024usize {
            for (num_threads, in_taker) in [(1, false), (3, false), (3, true), (16, true)] {
                let is_faulty = |idx: usize| faults >> idx & 1 == 1;
                let check = |idx| if is_faulty(idx) { Err(idx) } else { Ok(idx) };
                let make = |idx| (idx < 10).then(|| if in_taker { Ok(idx) } else { check(idx) });
                let mut taken = BTreeSet::new();
                let made = in_parallel(num_threads, make, &mut |idx, item| {
                    assert_eq!(idx, item);
                    assert!(taken.insert(idx), "item {idx} twice");
                    if in_taker { check(idx).map(drop) } else { Ok(()) }
                });
                let first = (0..10).find(|&idx| is_faulty(idx));
                assert_eq!(made.err(), first, "faults {faults:b}, {num_threads} threads");
                assert!((0..first.unwrap_or(10)).all(|idx| taken.contains(&idx)));
            }
        }
    }
}
