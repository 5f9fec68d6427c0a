//! Tables of the experts in GPU memory.

use std::sync::Arc;

use super::weights::LayerMemory;

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
    /// Expert at each local index.
    pub(crate) experts: Vec<u32>,
    pub(crate) memory: Option<Arc<LayerMemory>>,
}

impl ExpertTables {
    /// Local indices in use, in the layer with the most experts.
    pub(crate) fn num_local_experts(&self) -> usize {
        self.layers.iter().map(|table| table.experts.len()).max().unwrap_or(0)
    }

    /// Local index of every expert, `[num_layers, num_experts]`; -1 for an expert that is not loaded.
    pub(crate) fn local_indices(&self, num_experts: usize) -> Vec<i16> {
        let mut indices = vec![-1; self.layers.len() * num_experts];
        for (row, table) in indices.chunks_exact_mut(num_experts.max(1)).zip(&self.layers) {
            for (local_idx, expert) in (0i16..).zip(&table.experts) {
                if let Some(entry) = row.get_mut(*expert as usize) {
                    *entry = local_idx;
                }
            }
        }
        indices
    }
}
