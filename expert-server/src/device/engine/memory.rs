//! Tables and state in GPU memory, written and read between batches.

use std::time::Instant;

use bytemuck::Zeroable;
use kernels::abi::{ClientPeer, ErrorWord, LayerWeights, MAX_FRAMES, MAX_PEERS, ServerState};
use kernels::gpu::{Gpu, GpuBuffer, GpuError, Stream};

use super::BATCH_LIMIT;
use crate::device::context::Shared;
use crate::device::plan::DevicePlan;
use crate::device::seats::SeatBoard;
use crate::device::store::{DeviceStore, Tables};

/// Tables and state in GPU memory, with their copies in host memory.
#[derive(Debug)]
pub(super) struct Memory {
    state: GpuBuffer,
    clients: GpuBuffer,
    local_expert: GpuBuffer,
    layers: GpuBuffer,
    /// Where tables are put together, and where the state is read.
    staging: GpuBuffer,
    /// Batches that have begun, read while others are under way.
    num_begun: GpuBuffer,
}

impl Memory {
    pub(super) fn new(gpu: &Gpu, plan: &DevicePlan) -> Result<Self, GpuError> {
        let places = u64::from(plan.num_layers) * u64::from(plan.num_experts) * 2;
        let layers = u64::from(plan.num_layers) * size_of::<LayerWeights>() as u64;
        let clients = (MAX_PEERS * size_of::<ClientPeer>()) as u64;
        Ok(Self {
            state: gpu.alloc(size_of::<ServerState>() as u64)?,
            clients: gpu.alloc(clients)?,
            local_expert: gpu.alloc(places)?,
            layers: gpu.alloc(layers)?,
            staging: gpu.alloc_host(places.max(layers).max(clients).max(4096))?,
            num_begun: gpu.alloc_host(size_of::<u64>() as u64)?,
        })
    }

    pub(super) fn shared(&self, board: &SeatBoard, weights_dtype: u32) -> Shared {
        Shared {
            state: self.state.ptr(),
            clients: self.clients.ptr(),
            local_expert: self.local_expert.ptr(),
            layers: self.layers.ptr(),
            abort_mask: board.mask_ptr(),
            weights_dtype,
        }
    }

    pub(super) fn write_clients(
        &self,
        control: &Stream,
        table: &[ClientPeer],
    ) -> Result<(), GpuError> {
        self.write(control, &self.clients, bytemuck::cast_slice(table))
    }

    pub(super) fn write_tables(
        &self,
        control: &Stream,
        plan: &DevicePlan,
        store: &DeviceStore,
        tables: &Tables,
    ) -> Result<(), GpuError> {
        let places = tables.places(plan.num_experts as usize);
        self.write(control, &self.local_expert, bytemuck::cast_slice(&places))?;
        let weights = store.layer_weights(tables)?;
        self.write(control, &self.layers, bytemuck::cast_slice(&weights))
    }

    /// A seat's next frame is number 1, and none was refused.
    pub(super) fn forget_client(&self, control: &Stream, seat: usize) -> Result<(), GpuError> {
        let told_bytes = size_of::<[u64; MAX_FRAMES as usize]>() as u64;
        let taken = std::mem::offset_of!(ServerState, taken) + seat * 8;
        let told = std::mem::offset_of!(ServerState, refusals) + seat * told_bytes as usize;
        for (offset, bytes) in [(taken, 8), (told, told_bytes)] {
            let words = self.state.at(offset as u64, bytes)?;
            // SAFETY: within the state, which no kernel uses now.
            unsafe { control.fill(words, 0, bytes)? };
        }
        control.wait(Instant::now() + BATCH_LIMIT)
    }

    /// Has the number of batches that have begun copied to the host, behind what `control` has.
    pub(super) fn ask_num_begun(&self, control: &Stream) -> Result<(), GpuError> {
        let offset = std::mem::offset_of!(ServerState, num_batches) as u64;
        let bytes = self.num_begun.len().min(size_of::<u64>() as u64);
        // SAFETY: both have these bytes, and the host looks at its own only when `control` is done. A kernel
        // may count meanwhile: a word is copied whole.
        unsafe { control.copy(self.num_begun.ptr(), self.state.at(offset, bytes)?, bytes) }
    }

    /// What was copied last. Nothing is being copied.
    pub(super) fn num_begun(&self) -> u64 {
        let host = self.num_begun.host();
        // SAFETY: page-locked memory of this size, aligned; the copy into it has ended.
        host.map_or(0, |host| unsafe { host.cast::<u64>().read_volatile() })
    }

    /// The first error since the last call.
    pub(super) fn take_fault(&self, control: &Stream) -> Result<ErrorWord, GpuError> {
        let bytes = size_of::<ErrorWord>() as u64;
        let offset = std::mem::offset_of!(ServerState, error) as u64;
        let error = self.state.at(offset, bytes)?;
        // SAFETY: both have these bytes; no kernel uses the state now, and nobody the staging memory.
        unsafe {
            control.copy(self.staging.ptr(), error, bytes)?;
            control.fill(error, 0, bytes)?;
        }
        control.wait(Instant::now() + BATCH_LIMIT)?;
        let Some(host) = self.staging.host() else { return Ok(ErrorWord::zeroed()) };
        // SAFETY: the copy has ended.
        Ok(unsafe { host.as_ptr().cast::<ErrorWord>().read_unaligned() })
    }

    /// Writes a table, and waits for it.
    fn write(&self, control: &Stream, to: &GpuBuffer, bytes: &[u8]) -> Result<(), GpuError> {
        let len = bytes.len() as u64;
        let (to, from) = (to.at(0, len)?, self.staging.at(0, len)?);
        if let Some(host) = self.staging.host() {
            // SAFETY: as many bytes, as checked; no copy uses them, as each is waited for.
            unsafe { host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        // SAFETY: both ranges were checked, and nobody uses them now.
        unsafe { control.copy(to, from, len)? };
        control.wait(Instant::now() + BATCH_LIMIT)
    }
}
