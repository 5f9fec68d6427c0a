//! The experts that a server holds, in host memory or in a GPU's.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use checkpoint::Checkpoint;

use crate::compute::{ExpertWeights, LoadError};

/// The operations of a store of experts that membership and status use.
pub(crate) trait Experts: Send + Sync + fmt::Debug {
    /// The checkpoint that the experts come from.
    fn checkpoint(&self) -> &Arc<Checkpoint>;

    /// Loaded experts (layer → expert ids, increasing), without layers that hold none.
    fn loaded(&self) -> BTreeMap<u32, Vec<u32>>;

    /// Returns true if the expert is loaded.
    fn has(&self, layer: u32, expert: u32) -> bool;

    /// Bytes of all loaded weights.
    fn loaded_bytes(&self) -> u64;

    /// Loads one more expert, puts it into service and returns its bytes. Blocks while it reads the weights;
    /// the data thread goes on meanwhile.
    fn load_one(&self, layer: u32, expert: u32) -> Result<u64, LoadError>;

    /// Puts an expert with weights from elsewhere into service and returns its bytes. An error if the weights do not
    /// have the shape of the layer, or if the store takes its experts from files only, as a GPU's does.
    fn insert(&self, layer: u32, expert: u32, weights: ExpertWeights) -> Result<u64, LoadError>;

    /// The weights of a loaded expert in host memory. They stay there as long as the caller holds them.
    fn weights(&self, layer: u32, expert: u32) -> Option<Arc<ExpertWeights>>;

    /// Takes an expert out of service. Its memory is free after the last batch that uses it. Returns false if it is
    /// not loaded, or if the store keeps its experts, as a GPU's does.
    fn unload(&self, _layer: u32, _expert: u32) -> bool {
        false
    }
}
