//! Batches larger than a frame: one call for each frame's worth of rows, with as many calls outstanding as slots have
//! frames.

use std::collections::VecDeque;
use std::time::Instant;

use kernels::gpu::Stream;

use super::calls::{DevicePending, Layer};
use super::executor::Executor;
use super::memory::WORDS_BYTES;
use super::{DeviceClient, DeviceError, DeviceInput, DeviceTensor, TensorType};
use crate::timing::LayerTiming;

/// Sends a batch in parts. Its buffers are kept from batch to batch.
#[derive(Debug, Default)]
pub(super) struct Parts {
    /// Outstanding parts, empty between batches.
    open: VecDeque<DevicePending>,
    /// Links that failed during the batch.
    failed_links: Vec<(usize, u64)>,
    total: LayerTiming,
    /// Tensors of the last batch. Their numbers have been checked.
    checked_input: Option<DeviceInput>,
}

impl Parts {
    /// [`DeviceClient::forward`] for more rows than a frame has.
    ///
    /// # Safety
    /// As for `forward`.
    pub unsafe fn forward(
        &mut self,
        client: &mut DeviceClient,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        out: DeviceTensor,
    ) -> Result<LayerTiming, DeviceError> {
        let executor = &mut client.executor;
        executor.check_device(stream)?;
        input.check()?;
        let geometry = executor.launcher.geometry;
        let (capacity, max_tokens) = (input.capacity, geometry.max_tokens);
        // Kernels need the tables of each part aligned.
        let is_aligned = |rows: &u32| (rows * geometry.top_k).is_multiple_of(4);
        let part_tokens = (1..=max_tokens).rev().find(is_aligned);
        let Some(part_tokens) = part_tokens.filter(|_| !stream.is_capturing().unwrap_or(true))
        else {
            // The number of parts is known only when the batch runs, so it cannot be recorded.
            return Err(DeviceError::Capacity { capacity, max_tokens });
        };
        let layer_idx = executor.shared.layer_idx_of(layer)?;
        if self.checked_input != Some(*input) {
            let part = DeviceInput { capacity: part_tokens, ..*input };
            let number = layer;
            let params =
                executor.launcher.dispatch_params(0, Layer { number, idx: layer_idx }, &part);
            // SAFETY: the caller's promise. This only checks the pointers, before any of them is read.
            drop(unsafe { executor.launcher.gpu().prepare(params)? });
            self.checked_input = Some(*input);
        }
        executor.launcher.check_input(input)?;
        // SAFETY: the caller's promise.
        let num_tokens = unsafe { executor.read_num_tokens(stream, input)? };
        executor.write_counts(stream, [part_tokens, num_tokens % part_tokens])?;
        self.total = LayerTiming::default();
        self.failed_links.clear();
        // SAFETY: the caller's promise.
        let result =
            unsafe { self.send_all(client, stream, layer, input, out, num_tokens, part_tokens) };
        // After a failure this abandons the open parts. The next call finishes them.
        self.open.clear();
        result.map(|()| self.total)
    }

    /// # Safety
    /// As for `forward`.
    #[allow(clippy::too_many_arguments, reason = "one caller")]
    unsafe fn send_all(
        &mut self,
        client: &mut DeviceClient,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        out: DeviceTensor,
        num_tokens: u32,
        part_tokens: u32,
    ) -> Result<(), DeviceError> {
        let geometry = client.executor.launcher.geometry;
        for first in (0..num_tokens).step_by(part_tokens as usize) {
            // The caller's own calls may be outstanding too.
            if client.executor.calls.num_outstanding() >= geometry.num_frames as usize {
                self.finish_one(client, stream)?;
            }
            let part = client.executor.part_of(input, first, num_tokens, part_tokens);
            let part_out = out.skip(u64::from(first) * u64::from(geometry.hidden) * 2);
            // SAFETY: a part of the caller's tensors, and counts of the client's own.
            let pending = unsafe {
                let handle = client.dispatch(stream, layer, &part)?;
                client.combine(stream, handle, part_out)?
            };
            self.open.push_back(pending);
        }
        while !self.open.is_empty() {
            self.finish_one(client, stream)?;
        }
        Ok(())
    }

    /// Finishes the oldest open part, if there is one.
    fn finish_one(
        &mut self,
        client: &mut DeviceClient,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let Some(pending) = self.open.pop_front() else { return Ok(()) };
        let timing = client.finish(stream, pending)?;
        let total = &mut self.total;
        total.dispatch_ns += timing.dispatch_ns;
        total.wait_ns += timing.wait_ns;
        total.combine_ns += timing.combine_ns;
        total.stall_ns += timing.stall_ns;
        total.num_frames += timing.num_frames;
        total.num_servers = total.num_servers.max(timing.num_servers);
        // A server that fails may have frames of several parts. That is one failure.
        for link in &client.last_failed {
            if !self.failed_links.contains(link) {
                self.failed_links.push(*link);
                total.failovers += 1;
            }
        }
        total.resent_pairs += timing.resent_pairs;
        total.missing_pairs += timing.missing_pairs;
        Ok(())
    }
}

/// Memory for batches in parts.
impl Executor {
    /// The rows of one part, from `first` on.
    fn part_of(
        &self,
        input: &DeviceInput,
        first: u32,
        num_tokens: u32,
        part_tokens: u32,
    ) -> DeviceInput {
        let geometry = &self.launcher.geometry;
        let is_full = num_tokens - first >= part_tokens;
        let skip = |row_bytes: u64| u64::from(first) * row_bytes;
        let choices = skip(u64::from(geometry.top_k) * 4);
        DeviceInput {
            hidden_states: input.hidden_states.skip(skip(u64::from(geometry.hidden) * 2)),
            topk_idx: input.topk_idx.skip(choices),
            topk_weights: input.topk_weights.skip(choices),
            num_tokens: DeviceTensor::new(
                self.launcher.memory.counts.ptr().add(if is_full { 0 } else { 4 }),
                TensorType::U32,
            ),
            capacity: part_tokens.min(input.capacity - first),
        }
    }

    /// Reads the number of tokens from the device, in the order of `stream`: earlier work may still write it.
    ///
    /// # Safety
    /// As for `forward`.
    unsafe fn read_num_tokens(
        &mut self,
        stream: &Stream,
        input: &DeviceInput,
    ) -> Result<u32, DeviceError> {
        let until = Instant::now() + self.bound();
        let memory = &mut self.launcher.memory;
        // SAFETY: one word each. The caller vouches for its own.
        let copied = unsafe { stream.copy(memory.words.at(0, 4)?, input.num_tokens.ptr, 4) };
        if let Err(error) = copied.and_then(|()| stream.wait(until)) {
            // The copy may still run, so its target is leaked.
            let fresh = memory.gpu.alloc_host(WORDS_BYTES)?;
            std::mem::forget(std::mem::replace(&mut memory.words, fresh));
            return Err(error.into());
        }
        let host = memory.words.host();
        // SAFETY: page-locked memory of this size, and the copy has ended.
        let found = host.map_or(0, |host| unsafe { host.cast::<u32>().read_volatile() });
        if found > input.capacity {
            return Err(DeviceError::Tokens { found: found.into(), capacity: input.capacity });
        }
        Ok(found)
    }

    /// Writes the rows of a full part and of the last part to the device, in the order of `stream`.
    fn write_counts(&self, stream: &Stream, counts: [u32; 2]) -> Result<(), DeviceError> {
        let memory = &self.launcher.memory;
        if let Some(host) = memory.words.host() {
            // SAFETY: within the words. The last batch has ended, and so has its copy of them.
            unsafe { host.cast::<u32>().add(1).cast::<[u32; 2]>().write_volatile(counts) };
        }
        // SAFETY: both ranges are checked, and no running kernel reads the counts.
        unsafe { stream.copy(memory.counts.at(0, 8)?, memory.words.at(4, 8)?, 8)? };
        Ok(())
    }
}
