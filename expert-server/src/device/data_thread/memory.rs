//! Tables and state in GPU memory. The host writes and reads them between batches.

use std::time::Instant;

use bytemuck::Zeroable;
use kernels::abi::{ClientPeer, ErrorWord, LayerWeights, MAX_FRAMES, MAX_PEERS, ServerState};
use kernels::gpu::{Gpu, GpuBuffer, GpuError, Stream};

use super::BATCH_LIMIT;
use crate::device::abort::AbortMask;
use crate::device::context::SharedTables;
use crate::device::plan::DevicePlan;
use crate::device::store::{DeviceStore, ExpertTables};

/// Tables and state in GPU memory, with buffers for copies in host memory.
#[derive(Debug)]
pub(super) struct Memory {
    state: GpuBuffer,
    clients: GpuBuffer,
    local_expert: GpuBuffer,
    layers: GpuBuffer,
    /// Holds tables on their way to the GPU, and the state on its way from it.
    staging: GpuBuffer,
    /// The number of batches that have begun. It is copied while batches are in flight.
    num_begun: GpuBuffer,
}

impl Memory {
    pub(super) fn new(gpu: &Gpu, plan: &DevicePlan) -> Result<Self, GpuError> {
        let local_expert = u64::from(plan.num_layers) * u64::from(plan.num_experts) * 2;
        let layers = u64::from(plan.num_layers) * size_of::<LayerWeights>() as u64;
        let clients = (MAX_PEERS * size_of::<ClientPeer>()) as u64;
        Ok(Self {
            state: gpu.alloc(size_of::<ServerState>() as u64)?,
            clients: gpu.alloc(clients)?,
            local_expert: gpu.alloc(local_expert)?,
            layers: gpu.alloc(layers)?,
            staging: gpu.alloc_host(local_expert.max(layers).max(clients).max(4096))?,
            num_begun: gpu.alloc_host(size_of::<u64>() as u64)?,
        })
    }

    pub(super) fn shared_tables(&self, aborts: &AbortMask, weights_dtype: u32) -> SharedTables {
        SharedTables {
            state: self.state.ptr(),
            clients: self.clients.ptr(),
            local_expert: self.local_expert.ptr(),
            layers: self.layers.ptr(),
            abort_mask: aborts.ptr(),
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
        tables: &ExpertTables,
    ) -> Result<(), GpuError> {
        let indices = tables.local_indices(plan.num_experts as usize);
        self.write(control, &self.local_expert, bytemuck::cast_slice(&indices))?;
        let weights = store.layer_weights(tables)?;
        self.write(control, &self.layers, bytemuck::cast_slice(&weights))
    }

    /// Resets the state of the client at an index: its next frame has number 1, and none was refused.
    pub(super) fn reset_client(&self, control: &Stream, idx: usize) -> Result<(), GpuError> {
        let status_bytes = size_of::<[u64; MAX_FRAMES as usize]>() as u64;
        let taken_offset = std::mem::offset_of!(ServerState, taken) + idx * 8;
        let status_offset =
            std::mem::offset_of!(ServerState, refusals) + idx * status_bytes as usize;
        for (offset, bytes) in [(taken_offset, 8), (status_offset, status_bytes)] {
            let words = self.state.at(offset as u64, bytes)?;
            // SAFETY: within the state, which no kernel uses between batches.
            unsafe { control.fill(words, 0, bytes)? };
        }
        control.wait(Instant::now() + BATCH_LIMIT)
    }

    /// Queues a copy of the number of batches that have begun on `control`.
    pub(super) fn request_num_begun(&self, control: &Stream) -> Result<(), GpuError> {
        let offset = std::mem::offset_of!(ServerState, num_batches) as u64;
        let bytes = self.num_begun.len().min(size_of::<u64>() as u64);
        // SAFETY: both buffers have these bytes, and the host reads its own only when `control` is done. A
        // kernel may count meanwhile: a word is copied whole.
        unsafe { control.copy(self.num_begun.ptr(), self.state.at(offset, bytes)?, bytes) }
    }

    /// The last copy of that number. No copy is in flight.
    pub(super) fn num_begun(&self) -> u64 {
        let host = self.num_begun.host();
        // SAFETY: page-locked memory of this size, aligned; the copy into it has ended.
        host.map_or(0, |host| unsafe { host.cast::<u64>().read_volatile() })
    }

    /// Reads and clears the first error since the last call.
    pub(super) fn take_fault(&self, control: &Stream) -> Result<ErrorWord, GpuError> {
        let bytes = size_of::<ErrorWord>() as u64;
        let offset = std::mem::offset_of!(ServerState, error) as u64;
        let error = self.state.at(offset, bytes)?;
        // SAFETY: both buffers have these bytes. No kernel uses the state between batches, and no copy the
        // staging memory.
        unsafe {
            control.copy(self.staging.ptr(), error, bytes)?;
            control.fill(error, 0, bytes)?;
        }
        control.wait(Instant::now() + BATCH_LIMIT)?;
        let Some(host) = self.staging.host() else { return Ok(ErrorWord::zeroed()) };
        // SAFETY: the copy has ended.
        Ok(unsafe { host.as_ptr().cast::<ErrorWord>().read_unaligned() })
    }

    /// Writes a table and waits for the copy.
    fn write(&self, control: &Stream, to: &GpuBuffer, bytes: &[u8]) -> Result<(), GpuError> {
        let len = bytes.len() as u64;
        let (to, from) = (to.at(0, len)?, self.staging.at(0, len)?);
        if let Some(host) = self.staging.host() {
            // SAFETY: the range was checked. No copy uses it, because each copy is waited for.
            unsafe { host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        // SAFETY: both ranges were checked, and no kernel or copy uses them now.
        unsafe { control.copy(to, from, len)? };
        control.wait(Instant::now() + BATCH_LIMIT)
    }
}
