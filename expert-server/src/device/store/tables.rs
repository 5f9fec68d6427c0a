//! Tables of the experts in GPU memory.

use std::sync::Arc;

use super::block::LayerMemory;

/// The local index of every expert, in one version.
#[derive(Debug, Clone)]
pub(crate) struct ExpertTables {
    /// Greater in every newer version.
    pub(crate) version: u64,
    pub(crate) layers: Vec<LayerTable>,
}

/// Experts of one layer.
#[derive(Debug, Clone, Default)]
pub(crate) struct LayerTable {
    /// The expert at each local index. `None` while an expert is being loaded there, or after its load has failed.
    pub(crate) places: Vec<Option<u32>>,
    pub(crate) memory: Option<Arc<LayerMemory>>,
}

impl LayerTable {
    /// The experts, in the order of their local indices.
    pub(crate) fn experts(&self) -> impl Iterator<Item = u32> + '_ {
        self.places.iter().flatten().copied()
    }

    /// Local index of an expert.
    pub(crate) fn local_idx(&self, expert: u32) -> Option<usize> {
        self.places.iter().position(|found| *found == Some(expert))
    }
}

impl ExpertTables {
    /// The table of a layer that holds an expert, and the expert's local index.
    pub(crate) fn find(&self, layer: u32, expert: u32) -> Option<(&LayerTable, usize)> {
        let table = self.layers.get(layer as usize)?;
        Some((table, table.local_idx(expert)?))
    }

    /// Local indices in use, in the layer with the most experts.
    pub(crate) fn num_local_experts(&self) -> usize {
        self.layers.iter().map(|table| table.places.len()).max().unwrap_or(0)
    }

    /// Local index of every expert, `[num_layers, num_experts]`; -1 for an expert that is not loaded.
    pub(crate) fn local_indices(&self, num_experts: usize) -> Vec<i16> {
        let mut indices = vec![-1; self.layers.len() * num_experts];
        for (row, table) in indices.chunks_exact_mut(num_experts.max(1)).zip(&self.layers) {
            for (local_idx, expert) in (0i16..).zip(&table.places) {
                if let Some(entry) = expert.and_then(|expert| row.get_mut(expert as usize)) {
                    *entry = local_idx;
                }
            }
        }
        indices
    }
}
