//! The experts that a server holds, in host memory or in a GPU's.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use checkpoint::{Checkpoint, DType, WeightFormat};
use serde::{Deserialize, Serialize};

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
    /// have the shape of the layer. Blocks while weights are copied to a device.
    fn insert(&self, layer: u32, expert: u32, weights: ExpertWeights) -> Result<u64, LoadError>;

    /// The weights of a loaded expert in host memory. They stay there as long as the caller holds them.
    fn weights(&self, layer: u32, expert: u32) -> Option<Arc<ExpertWeights>>;

    /// Takes an expert out of service. Its memory is free after the last batch that uses it. Returns false if it is
    /// not loaded, or if the store keeps its experts, as a GPU's does.
    fn unload(&self, _layer: u32, _expert: u32) -> bool {
        false
    }

    /// Room for an expert with matrices of these forms: gate, up and down.
    fn landing(
        &self,
        _layer: u32,
        _expert: u32,
        _forms: &[MatrixForm],
    ) -> Result<Room<'_>, LoadError> {
        Ok(Room::Whole)
    }

    /// The experts as peers get them from a device's memory, if they are there.
    fn device(self: Arc<Self>) -> Option<Arc<dyn DeviceExperts>> {
        None
    }
}

/// The form of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MatrixForm {
    pub(crate) format: WeightFormat,
    /// Type of the scales, and the factor of all scales.
    pub(crate) scales: Option<(DType, f32)>,
}

/// Room for an expert that arrives.
pub(crate) enum Room<'a> {
    /// It must arrive as a whole, see [`Experts::insert`].
    Whole,
    /// It is loaded, and in service.
    Loaded,
    Pieces(Box<dyn Landing + 'a>),
}

/// An expert that arrives in pieces. Dropping it gives its room back.
pub(crate) trait Landing {
    /// Memory for pieces. It stays valid as long as this object, and is filled and taken in turn.
    fn buffers(&mut self) -> Result<Vec<NonNull<[u8]>>, LoadError>;

    /// The index of the buffer to fill next. Waits, for a bounded time, until nothing reads it.
    fn free_buffer(&mut self) -> Result<usize, LoadError>;

    /// Takes the bytes of part `part` from `offset` on. They begin at the start of the buffer that is next, and come in
    /// order. Parts are as servers exchange them: codes of a matrix, then its scales and minima if its format has
    /// scales. The bytes may be unverified.
    fn take(&mut self, part: usize, offset: usize, bytes: &[u8]) -> Result<(), LoadError>;

    /// Gives the room of the expert back, and keeps the buffers for ever, because a transfer may still fill them.
    fn abandon(self: Box<Self>);

    /// Puts the expert into service, and returns its bytes. All parts were taken and verified.
    fn finish(self: Box<Self>) -> Result<u64, LoadError>;
}

/// Experts in the memory of a device, for peers.
pub(crate) trait DeviceExperts: Send + Sync {
    /// Bytes of a loaded expert.
    fn size_bytes(&self, layer: u32, expert: u32) -> Option<u64>;

    /// A copy of a loaded expert in host memory. Blocks for the copy.
    ///
    /// # Errors
    /// The device holds it in another form than the checkpoint, or the copy fails.
    fn copy_to_host(&self, layer: u32, expert: u32) -> Result<ExpertWeights, LoadError>;

    /// The form of experts in device memory, and the host. Only peers with an equal text can copy from it.
    fn form(&self) -> String;

    /// The place of a loaded expert. The memory stays as it is while the caller holds the second value.
    fn place(&self, layer: u32, expert: u32) -> Option<(DevicePlace, Arc<dyn Any + Send + Sync>)>;

    /// The checksum of a loaded expert. Blocks while the device computes it.
    fn checksum(&self, layer: u32, expert: u32) -> Result<[u64; 2], LoadError>;

    /// Opens a socket at which processes of this host and user map the memory. Returns the text by which they find it,
    /// and the future that serves them.
    fn share(self: Arc<Self>) -> Result<Share, LoadError>;

    /// Finds the memory of a peer by such a text.
    fn reach(self: Arc<Self>, share: &str) -> Result<Box<dyn PeerMemory>, LoadError>;
}

/// The text by which peers find memory, and the future that serves them.
pub(crate) type Share = (String, Pin<Box<dyn Future<Output = ()> + Send>>);

/// Memory of a peer's device, which this server's device reaches.
pub(crate) trait PeerMemory: Send + Sync {
    /// Copies an expert from its place, compares the checksum, and puts the expert into service. Returns its bytes.
    /// Blocks for the copy. The peer keeps the expert there until `deadline` at least; a copy that ends later is not
    /// used.
    ///
    /// # Errors
    /// [`CopyError`].
    fn take(
        &self,
        layer: u32,
        expert: u32,
        place: &DevicePlace,
        checksum: [u64; 2],
        deadline: Instant,
    ) -> Result<u64, CopyError>;
}

/// Why an expert could not be copied from a peer's device.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error("checksum {}, expected {}", sum_text(*.found), sum_text(*.expected))]
    Damaged { found: [u64; 2], expected: [u64; 2] },
    /// The memory cannot be reached, or the copy failed. The peer may still give the expert from its host's memory.
    #[error("{0}")]
    Unreachable(String),
    /// This server's device does not take the expert.
    #[error(transparent)]
    Load(#[from] LoadError),
}

/// The place of an expert in a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DevicePlace {
    /// Number of the block of memory.
    pub(crate) block: u64,
    /// Experts for which the block has room. It determines the offsets.
    pub(crate) capacity: u32,
    pub(crate) local_idx: u32,
    /// The weights there are rounded from another form, which the model's files have.
    #[serde(default)]
    pub(crate) is_widened: bool,
}

/// The text of a device's checksum.
pub(crate) fn sum_text([first, second]: [u64; 2]) -> String {
    format!("{first:016x}{second:016x}")
}
