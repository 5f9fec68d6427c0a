//! The experts that a server holds, wherever their weights lie.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use checkpoint::Checkpoint;

use crate::compute::{ExpertStore, LoadError};

/// What membership and status know of a store.
pub(crate) trait Experts: Send + Sync + fmt::Debug {
    /// Where the experts come from.
    fn checkpoint(&self) -> &Arc<Checkpoint>;

    /// Loaded experts (layer → expert ids, increasing), without layers that hold none.
    fn loaded(&self) -> BTreeMap<u32, Vec<u32>>;

    /// Whether an expert is loaded.
    fn has(&self, layer: u32, expert: u32) -> bool;

    /// Bytes of all loaded weights.
    fn loaded_bytes(&self) -> u64;

    /// Loads one more expert and puts it into service; returns its bytes. Takes as long as it takes,
    /// and nobody who is served waits for it.
    fn load_one(&self, layer: u32, expert: u32) -> Result<u64, LoadError>;
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
}
