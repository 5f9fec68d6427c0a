//! Batches larger than a frame: one call after the other for as many rows as a frame has, as many of them
//! outstanding as slots have frames.

use std::time::Instant;

use kernels::gpu::Stream;

use super::memory::WORDS_BYTES;
use super::slots::DevicePending;
use super::{DeviceClient, DeviceError, DeviceInput, DeviceTensor, TensorType};
use crate::client::LayerTiming;

impl DeviceClient {
    /// [`forward`](Self::forward) of more rows than a frame has.
    ///
    /// # Safety
    /// As for `forward`.
    pub(super) unsafe fn forward_in_parts(
        &mut self,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        out: DeviceTensor,
    ) -> Result<LayerTiming, DeviceError> {
        self.check_device(stream)?;
        input.check()?;
        let (capacity, max_tokens) = (input.capacity, self.geometry.max_tokens);
        // Where a part begins, tables are aligned as the kernels want them.
        let is_aligned = |rows: &u32| (rows * self.geometry.top_k).is_multiple_of(4);
        let part_tokens = (1..=max_tokens).rev().find(is_aligned);
        let Some(part_tokens) = part_tokens.filter(|_| !stream.is_capturing().unwrap_or(true))
        else {
            // How many parts there are is known only when it runs.
            return Err(DeviceError::Capacity { capacity, max_tokens });
        };
        let layer_idx = self.shared.layer_idx_of(layer)?;
        if self.checked_input != Some(*input) {
            let part = DeviceInput { capacity: part_tokens, ..*input };
            let params = self.dispatch_params(0, (layer, layer_idx), &part);
            // SAFETY: the caller's promise. Not launched: pointers are looked at before one is read.
            drop(unsafe { self.memory.gpu.prepare(params)? });
            self.checked_input = Some(*input);
        }
        self.check_input(input)?;
        // SAFETY: the caller's promise.
        let num_tokens = unsafe { self.read_num_tokens(stream, input)? };
        self.write_counts(stream, [part_tokens, num_tokens % part_tokens])?;
        let mut total = LayerTiming::default();
        let mut open = std::mem::take(&mut self.parts);
        // Frames of several parts may be with a server that fails: that is one failure.
        let mut failed_links = Vec::new();
        let mut failed = None;
        for first in (0..num_tokens).step_by(part_tokens as usize) {
            // Calls of the caller's own may be outstanding, too.
            if self.slots.num_outstanding() >= self.geometry.num_frames as usize
                && let Err(error) =
                    self.finish_part(stream, open.pop_front(), &mut total, &mut failed_links)
            {
                failed = Some(error);
                break;
            }
            let part = self.part_of(input, first, num_tokens, part_tokens);
            let part_out = out.skip(u64::from(first) * u64::from(self.geometry.hidden) * 2);
            // SAFETY: a part of the caller's tensors, and counts of the client's own.
            let begun = unsafe {
                self.dispatch(stream, layer, &part)
                    .and_then(|handle| self.combine(stream, handle, part_out))
            };
            match begun {
                Ok(pending) => open.push_back(pending),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        while failed.is_none() && !open.is_empty() {
            let next = open.pop_front();
            failed = self.finish_part(stream, next, &mut total, &mut failed_links).err();
        }
        // What is left after a failure is given up: the next call takes care of its frames.
        open.clear();
        self.parts = open;
        failed.map_or(Ok(total), Err)
    }

    fn finish_part(
        &mut self,
        stream: &Stream,
        pending: Option<DevicePending>,
        total: &mut LayerTiming,
        failed_links: &mut Vec<(usize, u64)>,
    ) -> Result<(), DeviceError> {
        let Some(pending) = pending else { return Ok(()) };
        let timing = self.finish(stream, pending)?;
        total.dispatch_ns += timing.dispatch_ns;
        total.wait_ns += timing.wait_ns;
        total.combine_ns += timing.combine_ns;
        total.stall_ns += timing.stall_ns;
        total.num_frames += timing.num_frames;
        total.num_servers = total.num_servers.max(timing.num_servers);
        for link in &self.last_failed {
            if !failed_links.contains(link) {
                failed_links.push(*link);
                total.failovers += 1;
            }
        }
        total.resent_pairs += timing.resent_pairs;
        total.missing_pairs += timing.missing_pairs;
        Ok(())
    }

    /// Rows from `first` on, as many as a part has.
    fn part_of(
        &self,
        input: &DeviceInput,
        first: u32,
        num_tokens: u32,
        part_tokens: u32,
    ) -> DeviceInput {
        let is_full = num_tokens - first >= part_tokens;
        let skip = |row_bytes: u64| u64::from(first) * row_bytes;
        let choices = skip(u64::from(self.geometry.top_k) * 4);
        DeviceInput {
            hidden_states: input.hidden_states.skip(skip(u64::from(self.geometry.hidden) * 2)),
            topk_idx: input.topk_idx.skip(choices),
            topk_weights: input.topk_weights.skip(choices),
            num_tokens: DeviceTensor::new(
                self.memory.counts.ptr().add(if is_full { 0 } else { 4 }),
                TensorType::U32,
            ),
            capacity: part_tokens.min(input.capacity - first),
        }
    }

    /// The word on the device, which what `stream` has may still be about to write.
    ///
    /// # Safety
    /// As for `forward`.
    unsafe fn read_num_tokens(
        &mut self,
        stream: &Stream,
        input: &DeviceInput,
    ) -> Result<u32, DeviceError> {
        let words = &self.memory.words;
        // SAFETY: one word each; the caller vouches for one of them.
        let copied = unsafe { stream.copy(words.at(0, 4)?, input.num_tokens.ptr, 4) };
        if let Err(error) = copied.and_then(|()| stream.wait(Instant::now() + self.bound())) {
            // The copy may still come.
            let fresh = self.memory.gpu.alloc_host(WORDS_BYTES)?;
            std::mem::forget(std::mem::replace(&mut self.memory.words, fresh));
            return Err(error.into());
        }
        // SAFETY: page-locked memory of this size; the copy has ended.
        let found = words.host().map_or(0, |host| unsafe { host.cast::<u32>().read_volatile() });
        if found > input.capacity {
            return Err(DeviceError::Tokens { found: found.into(), capacity: input.capacity });
        }
        Ok(found)
    }

    /// Rows of a full part and of the last one, to the device in the order of `stream`.
    fn write_counts(&self, stream: &Stream, counts: [u32; 2]) -> Result<(), DeviceError> {
        let memory = &self.memory;
        if let Some(host) = memory.words.host() {
            // SAFETY: within the words; the last call's copy of them has ended, as that call has.
            unsafe { host.cast::<u32>().add(1).cast::<[u32; 2]>().write_volatile(counts) };
        }
        // SAFETY: both ranges are checked; nothing that runs reads the counts.
        unsafe { stream.copy(memory.counts.at(0, 8)?, memory.words.at(4, 8)?, 8)? };
        Ok(())
    }
}
