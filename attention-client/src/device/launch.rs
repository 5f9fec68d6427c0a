//! Launches of the kernels: parameters that are prepared once, and the tables that they read.

use std::sync::Arc;
use std::time::Instant;

use kernels::abi::{
    CombineParams, DEVICE_ABI_VERSION, DevicePtr, DispatchParams, FLAG_ANY_PATH, FLAG_PDL,
};
use kernels::gpu::{GpuError, Stream};

use super::{DeviceClient, DeviceError, DeviceInput};

/// What the parameters of a dispatch depend on.
pub(super) type DispatchKey = (usize, usize, DeviceInput);
/// What the parameters of a combine depend on: slot, output, rows, and whether it adds.
pub(super) type CombineKey = (usize, DevicePtr, u32, bool);

impl DeviceClient {
    /// Uploads tables in the order of `stream`, if something has changed. There is a buffer for each call that may
    /// be outstanding and one more, so only a repair that sees change after change while its stream stands still
    /// waits for one.
    pub(super) fn refresh(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        let num_experts = self.shared.model.shape.num_experts;
        if !self.lane.has_changed() {
            return Ok(());
        }
        let staging = match self.memory.free_staging()? {
            Some(staging) => staging,
            None => {
                self.wait_until(stream, Instant::now() + self.bound())?;
                let found = self.memory.free_staging()?;
                found.ok_or(GpuError::Deadline { what: "upload of tables" })?
            }
        };
        let Some((tables, fresh)) = self.lane.take_tables(num_experts) else { return Ok(()) };
        let (placements, servers) = (&tables.placements, &tables.servers);
        if let Err(error) =
            self.memory.upload(stream, staging, &self.geometry, placements, servers, fresh)
        {
            self.lane.put_back(fresh);
            return Err(error.into());
        }
        self.tables = Arc::new(tables);
        Ok(())
    }

    pub(super) unsafe fn launch_dispatch(
        &mut self,
        stream: &Stream,
        slot: usize,
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        let call = self.slots.call(slot);
        let (layer, layer_idx) = (call.layer, call.layer_idx);
        // SAFETY: the caller's promise.
        unsafe { self.prepare_dispatch(slot, (layer, layer_idx), input)? };
        self.reached.expect_work();
        Ok(stream.launch(&self.dispatches[&(layer_idx, slot, *input)])?)
    }

    /// Checks what a caller gives to a dispatch. Parameters are kept, and so is what was found about their
    /// numbers; where tensors lie is looked at again, as they may have been freed since.
    ///
    /// # Safety
    /// As for [`dispatch`](Self::dispatch).
    pub(super) unsafe fn check_dispatch(
        &mut self,
        slot: usize,
        layer: (u32, usize),
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.prepare_dispatch(slot, layer, input)? };
        self.check_input(input)
    }

    /// Makes the parameters of a dispatch where there are none yet.
    unsafe fn prepare_dispatch(
        &mut self,
        slot: usize,
        layer: (u32, usize),
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        let key = (layer.1, slot, *input);
        if self.dispatches.contains_key(&key) {
            return Ok(());
        }
        let params = self.dispatch_params(slot, layer, input);
        // SAFETY: the caller's promise about its tensors; the rest is the client's own memory.
        let prepared = unsafe { self.memory.gpu.prepare(params)? };
        if self.dispatches.len() >= MAX_PREPARED {
            self.dispatches.clear();
        }
        self.dispatches.insert(key, prepared);
        Ok(())
    }

    /// Looks whether kernels reach a call's tensors from their first byte to their last.
    pub(super) fn check_input(&self, input: &DeviceInput) -> Result<(), DeviceError> {
        let rows = u64::from(input.capacity);
        let choices = rows * u64::from(self.geometry.top_k) * 4;
        let tensors = [
            ("hidden_states", input.hidden_states.ptr, rows * u64::from(self.geometry.hidden) * 2),
            ("topk_idx", input.topk_idx.ptr, choices),
            ("topk_weights", input.topk_weights.ptr, choices),
            ("num_tokens", input.num_tokens.ptr, 4),
        ];
        for (name, at, num_bytes) in tensors {
            self.memory.gpu.check_range("dispatch", name, at, num_bytes)?;
        }
        Ok(())
    }

    pub(super) fn dispatch_params(
        &self,
        slot: usize,
        (layer, layer_idx): (u32, usize),
        input: &DeviceInput,
    ) -> DispatchParams {
        DispatchParams {
            version: DEVICE_ABI_VERSION,
            flags: self.flags(),
            geometry: self.geometry,
            hidden_states: input.hidden_states.ptr,
            topk_idx: input.topk_idx.ptr,
            topk_weights: input.topk_weights.ptr,
            num_tokens: input.num_tokens.ptr,
            placement: self.memory.placement(layer_idx),
            state: self.memory.state.ptr(),
            handle: self.memory.slots[slot].handle.ptr(),
            trace: DevicePtr::NULL,
            client_id: self.lane.client_id,
            trace_len: 0,
            capacity: input.capacity,
            layer,
            num_experts: self.shared.model.shape.num_experts,
            num_servers: self.options.max_servers as u32,
            num_blocks: self.options.num_blocks,
            servers: self.memory.servers(),
        }
    }

    /// Looks whether kernels reach all rows of an output.
    pub(super) fn check_rows(&self, out: DevicePtr, capacity: u32) -> Result<(), DeviceError> {
        let num_bytes = self.bytes_of_rows(capacity);
        self.memory.gpu.check_range("combine", "out", out, num_bytes)?;
        Ok(())
    }

    pub(super) unsafe fn launch_combine(
        &mut self,
        stream: &Stream,
        slot: usize,
        out: DevicePtr,
        capacity: u32,
        adds: bool,
    ) -> Result<(), DeviceError> {
        let key = (slot, out, capacity, adds);
        if !self.combines.contains_key(&key) {
            let memory = &self.memory.slots[slot];
            let timeout = self.shared.settings.deadline.as_nanos();
            let params = CombineParams {
                version: DEVICE_ABI_VERSION,
                flags: if adds { FLAG_ADD | (self.flags() & !FLAG_PDL) } else { self.flags() },
                geometry: self.geometry,
                handle: memory.handle.ptr(),
                state: self.memory.state.ptr(),
                out,
                token_missing: memory.token_missing.ptr(),
                abort_mask: self.memory.abort.ptr(),
                timeout_ns: u64::try_from(timeout).unwrap_or(u64::MAX),
                capacity,
                num_servers: self.options.max_servers as u32,
                num_blocks: self.options.num_blocks,
                reserved: 0,
                servers: self.memory.servers(),
            };
            // SAFETY: as for `launch_dispatch`.
            let prepared = unsafe { self.memory.gpu.prepare(params)? };
            if self.combines.len() >= MAX_PREPARED {
                self.combines.clear();
            }
            self.combines.insert(key, prepared);
        }
        Ok(stream.launch(&self.combines[&key])?)
    }

    const fn flags(&self) -> u32 {
        let overlap = if self.options.overlap { FLAG_PDL } else { 0 };
        let ways = if self.reached.has_networks() { FLAG_ANY_PATH } else { 0 };
        overlap | ways
    }
}

/// [`CombineParams::flags`]: add to what `out` holds.
const FLAG_ADD: u32 = kernels::abi::FLAG_ADD;
/// Parameters kept; engines use few tensors, so more means that they are new every time.
const MAX_PREPARED: usize = 4096;
