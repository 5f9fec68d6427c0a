//! The memory of a layer's experts: one block, which processes of this host can map.

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, GpuError};

use super::shape::WeightShape;

/// GPU memory for the weights of one layer. Experts have local indices below `capacity`.
#[derive(Debug)]
pub(crate) struct LayerMemory {
    block: GpuBuffer,
    layout: BlockLayout,
    /// Identifies the block in this process.
    id: u64,
}

/// A part of an expert in GPU memory. The parts of all experts of a layer lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// `[capacity, 2, inter, hidden]`: gate, then up.
    GateUp,
    /// `[capacity, hidden, inter]`.
    Down,
    /// Scales of fp8 weights, of gate and up.
    GateUpScales,
    DownScales,
}

/// Sizes of a block. A peer with the same model computes the same ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BlockLayout {
    pub(super) shape: WeightShape,
    pub(super) capacity: usize,
}

impl BlockLayout {
    /// Bytes of one expert's part.
    pub(super) const fn part_bytes(&self, part: Part) -> u64 {
        let (matrix, scales) = (self.shape.matrix_bytes(), self.shape.num_scales() * 4);
        match part {
            Part::GateUp => 2 * matrix,
            Part::Down => matrix,
            Part::GateUpScales => 2 * scales,
            Part::DownScales => scales,
        }
    }

    /// Offset of an expert's part in the block.
    pub(super) fn offset(&self, part: Part, local_idx: usize) -> u64 {
        let before = Part::ALL.into_iter().take_while(|other| *other != part);
        let begin: u64 = before.map(|other| self.room_bytes(other)).sum();
        begin + local_idx as u64 * self.part_bytes(part)
    }

    /// Bytes of the block.
    pub(super) fn bytes(&self) -> u64 {
        Part::ALL.into_iter().map(|part| self.room_bytes(part)).sum()
    }

    fn room_bytes(&self, part: Part) -> u64 {
        (self.capacity as u64 * self.part_bytes(part)).next_multiple_of(ALIGN_BYTES)
    }
}

impl Part {
    pub(super) const ALL: [Self; 4] =
        [Self::GateUp, Self::Down, Self::GateUpScales, Self::DownScales];
}

impl LayerMemory {
    pub(super) fn new(
        gpu: &Gpu,
        shape: &WeightShape,
        capacity: usize,
        id: u64,
    ) -> Result<Self, GpuError> {
        let layout = BlockLayout { shape: *shape, capacity: capacity.max(1) };
        // Some drivers cannot share memory. Peers then get copies through the host.
        let block = gpu.alloc_shared(layout.bytes()).or_else(|_| gpu.alloc(layout.bytes()))?;
        Ok(Self { block, layout, id })
    }

    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    pub(super) const fn capacity(&self) -> usize {
        self.layout.capacity
    }

    pub(super) const fn layout(&self) -> &BlockLayout {
        &self.layout
    }

    pub(super) const fn block(&self) -> &GpuBuffer {
        &self.block
    }

    /// The first expert's part. Null for scales of weights without.
    pub(super) fn first(&self, part: Part) -> DevicePtr {
        match self.layout.part_bytes(part) {
            0 => DevicePtr::NULL,
            _ => self.block.ptr().add(self.layout.offset(part, 0)),
        }
    }

    /// The part of the expert at a local index.
    pub(super) fn at(&self, part: Part, local_idx: usize) -> Result<DevicePtr, GpuError> {
        self.block.at(self.layout.offset(part, local_idx), self.layout.part_bytes(part))
    }
}

/// Alignment of the parts of a block: more than any kernel asks for.
const ALIGN_BYTES: u64 = 1024;
