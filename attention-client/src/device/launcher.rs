//! The launcher: the client's memory, and kernels with parameters that are prepared once.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::time::Duration;

use kernels::abi::{
    CombineParams, DEVICE_ABI_VERSION, DevicePtr, DispatchParams, FLAG_ADD, FLAG_ANY_PATH,
    FLAG_EARLY, FLAG_PDL, FrameGeometry,
};
use kernels::gpu::{Gpu, PreparedKernel, Stream};
use kernels::starts::{LayerSize, Starts};
use proxy::DeviceTransports;

use super::calls::Layer;
use super::memory::Memory;
use super::{DeviceError, DeviceInput, DeviceOptions};

/// Prepared parameters of a dispatch depend on MoE layer, call index and tensors.
type DispatchKey = (usize, usize, DeviceInput);
/// Prepared parameters of a combine depend on call index, output, rows, and whether it adds.
type CombineKey = (usize, DevicePtr, u32, bool);

/// Launches kernels. See the [module](self).
pub(super) struct Launcher {
    /// Leaked, not dropped, while a kernel may still use it.
    pub memory: ManuallyDrop<Memory>,
    pub geometry: FrameGeometry,
    pub options: DeviceOptions,
    transports: DeviceTransports,
    dispatches: HashMap<DispatchKey, PreparedKernel<DispatchParams>>,
    combines: HashMap<CombineKey, PreparedKernel<CombineParams>>,
    client_id: u64,
    num_experts: u32,
    /// Longest silence of a server that a combine accepts.
    deadline: Duration,
}

impl Launcher {
    pub fn new(
        memory: Memory,
        geometry: FrameGeometry,
        options: DeviceOptions,
        transports: DeviceTransports,
        client_id: u64,
        num_experts: u32,
        deadline: Duration,
    ) -> Self {
        Self {
            memory: ManuallyDrop::new(memory),
            geometry,
            options,
            transports,
            dispatches: HashMap::new(),
            combines: HashMap::new(),
            client_id,
            num_experts,
            deadline,
        }
    }

    pub fn gpu(&self) -> &Gpu {
        &self.memory.gpu
    }

    /// Launches the dispatch of the call with index `call`.
    ///
    /// # Safety
    /// As for [`DeviceClient::dispatch`](super::DeviceClient::dispatch).
    pub unsafe fn dispatch(
        &mut self,
        stream: &Stream,
        call: usize,
        layer: Layer,
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.prepare_dispatch(call, layer, input)? };
        self.expect_work();
        Ok(stream.launch(&self.dispatches[&(layer.idx, call, *input)])?)
    }

    /// Wakes the threads that post for kernels: kernels will need them soon.
    pub fn expect_work(&self) {
        self.transports.expect_work();
    }

    /// Checks the tensors of a dispatch before it is launched. Parameters are kept, together with the result for
    /// their numbers. Each call checks again where the tensors are: they may have been freed since.
    ///
    /// # Safety
    /// As for [`DeviceClient::dispatch`](super::DeviceClient::dispatch).
    pub unsafe fn check_dispatch(
        &mut self,
        call: usize,
        layer: Layer,
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { self.prepare_dispatch(call, layer, input)? };
        self.check_input(input)
    }

    /// Prepares the parameters of a dispatch, unless they are there.
    unsafe fn prepare_dispatch(
        &mut self,
        call: usize,
        layer: Layer,
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        let key = (layer.idx, call, *input);
        if self.dispatches.contains_key(&key) {
            return Ok(());
        }
        let params = self.dispatch_params(call, layer, input);
        // SAFETY: the caller's promise about its tensors. All else is the client's own memory.
        let prepared = unsafe { self.memory.gpu.prepare(params)? };
        if self.dispatches.len() >= MAX_PREPARED {
            self.dispatches.clear();
        }
        self.dispatches.insert(key, prepared);
        Ok(())
    }

    /// Checks that kernels reach a call's tensors from their first byte to their last.
    pub fn check_input(&self, input: &DeviceInput) -> Result<(), DeviceError> {
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

    pub fn dispatch_params(
        &self,
        call: usize,
        layer: Layer,
        input: &DeviceInput,
    ) -> DispatchParams {
        DispatchParams {
            version: DEVICE_ABI_VERSION,
            flags: self.flags(input.capacity),
            geometry: self.geometry,
            hidden_states: input.hidden_states.ptr,
            topk_idx: input.topk_idx.ptr,
            topk_weights: input.topk_weights.ptr,
            num_tokens: input.num_tokens.ptr,
            placement: self.memory.placement(layer.idx),
            state: self.memory.state.ptr(),
            handle: self.memory.calls[call].handle.ptr(),
            trace: self.memory.trace_ptr(),
            client_id: self.client_id,
            trace_len: self.options.timeline,
            capacity: input.capacity,
            layer: layer.number,
            num_experts: self.num_experts,
            num_servers: self.options.max_servers as u32,
            num_blocks: self.blocks(self.starts(input.capacity).dispatch_blocks),
            servers: self.memory.servers(),
        }
    }

    /// The table's choice for calls of up to `num_tokens` tokens.
    fn starts(&self, num_tokens: u32) -> Starts {
        LayerSize::of_client(num_tokens, self.options.max_servers as u32).starts()
    }

    /// The blocks that the options ask for, else the table's.
    const fn blocks(&self, chosen: u32) -> u32 {
        if self.options.num_blocks == 0 { chosen } else { self.options.num_blocks }
    }

    /// Checks that kernels reach all rows of an output.
    pub fn check_rows(&self, out: DevicePtr, capacity: u32) -> Result<(), DeviceError> {
        self.memory.gpu.check_range("combine", "out", out, self.bytes_of_rows(capacity))?;
        Ok(())
    }

    /// Launches the combine of the call with index `call`. With `adds` it adds to what `out` holds.
    ///
    /// # Safety
    /// As for [`DeviceClient::combine`](super::DeviceClient::combine).
    pub unsafe fn combine(
        &mut self,
        stream: &Stream,
        call: usize,
        out: DevicePtr,
        capacity: u32,
        adds: bool,
    ) -> Result<(), DeviceError> {
        let key = (call, out, capacity, adds);
        if !self.combines.contains_key(&key) {
            let memory = &self.memory.calls[call];
            let params = CombineParams {
                version: DEVICE_ABI_VERSION,
                flags: if adds {
                    FLAG_ADD | (self.flags(capacity) & !(FLAG_PDL | FLAG_EARLY))
                } else {
                    self.flags(capacity)
                },
                geometry: self.geometry,
                handle: memory.handle.ptr(),
                state: self.memory.state.ptr(),
                out,
                token_missing: memory.token_missing.ptr(),
                abort_mask: self.memory.abort.ptr(),
                timeout_ns: u64::try_from(self.deadline.as_nanos()).unwrap_or(u64::MAX),
                capacity,
                num_servers: self.options.max_servers as u32,
                num_blocks: self.blocks(self.starts(capacity).combine_blocks),
                trace_len: self.options.timeline,
                servers: self.memory.servers(),
                trace: self.memory.trace_ptr(),
            };
            // SAFETY: the caller's promise about `out`. All else is the client's own memory.
            let prepared = unsafe { self.memory.gpu.prepare(params)? };
            if self.combines.len() >= MAX_PREPARED {
                self.combines.clear();
            }
            self.combines.insert(key, prepared);
        }
        Ok(stream.launch(&self.combines[&key])?)
    }

    pub fn bytes_of_rows(&self, num_rows: u32) -> u64 {
        u64::from(num_rows) * u64::from(self.geometry.hidden) * 2
    }

    fn flags(&self, num_tokens: u32) -> u32 {
        let overlap = if self.options.overlap { self.starts(num_tokens).flags() } else { 0 };
        let paths = if self.transports.has_networks() { FLAG_ANY_PATH } else { 0 };
        overlap | paths
    }
}

/// Most prepared parameters of either kind. Engines use few tensors; more means that they are new every time.
const MAX_PREPARED: usize = 4096;
