//! The two halves of a client's call: the dispatch, and its end with metrics and traces.

use std::time::Instant;

use kernels::abi::TAG_NONE;
use kernels::gpu::Stream;

use super::calls::{DeviceHandle, DevicePending, Layer, Phase};
use super::polling::Running;
use super::tensor::DeviceInput;
use super::{DeviceClient, DeviceError, trace};
use crate::timing::{LayerReport, LayerTiming, elapsed_ns};

impl DeviceClient {
    /// # Safety
    /// As for [`dispatch`](Self::dispatch).
    pub(super) unsafe fn try_dispatch(
        &mut self,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        start: Instant,
    ) -> Result<DeviceHandle, DeviceError> {
        let executor = &mut self.executor;
        executor.check_device(stream)?;
        input.check()?;
        let layer = Layer { number: layer, idx: executor.shared.layer_idx_of(layer)? };
        let (capacity, max_tokens) = (input.capacity, executor.launcher.geometry.max_tokens);
        if capacity > max_tokens {
            return Err(DeviceError::Capacity { capacity, max_tokens });
        }
        if executor.replay.is_some() {
            return Err(DeviceError::Replaying);
        }
        if stream.is_capturing()? {
            let idx = executor.calls.claim_recorded(*input, layer)?;
            // SAFETY: the caller's promise.
            let launched = unsafe {
                let checked = executor.launcher.check_dispatch(idx, layer, input);
                checked.and_then(|()| executor.launch_dispatch(stream, idx, input))
            };
            return match launched {
                Ok(()) => Ok(executor.calls.handle(idx)),
                Err(error) => {
                    executor.calls.unclaim_recorded(idx);
                    Err(error)
                }
            };
        }
        executor.finish_abandoned(stream)?;
        let idx = executor.calls.free_idx()?;
        // Errors of the tensors show before anything is launched.
        // SAFETY: the caller's promise.
        unsafe { executor.launcher.check_dispatch(idx, layer, input)? };
        executor.make_room(stream)?;
        let idx = executor.calls.claim(*input, layer)?;
        executor.launcher.memory.clear_missing(idx);
        let call = executor.calls.get_mut(idx);
        call.stream = stream.raw();
        call.reported_before = executor.launcher.memory.reported(idx);
        let begun = executor.begin(stream, idx).and_then(|()| {
            let input = self.repair.without_orphans(executor, stream, idx)?;
            // SAFETY: the caller's promise.
            unsafe { executor.launch_dispatch(stream, idx, &input) }
        });
        if let Err(error) = begun {
            // An upload of tables may still run. If it does not end in time, the next call waits for it.
            match executor.wait_until(stream, Instant::now() + executor.bound()) {
                Ok(()) => executor.end(idx),
                Err(_) => {
                    executor.calls.get_mut(idx).phase = Phase::Combined;
                    executor.calls.abandon(idx);
                }
            }
            return Err(error);
        }
        let call = executor.calls.get_mut(idx);
        call.started = Some(start);
        call.timing.dispatch_ns = elapsed_ns(start);
        Ok(executor.calls.handle(idx))
    }

    pub(super) fn try_finish(
        &mut self,
        stream: &Stream,
        pending: DevicePending,
        start: Instant,
    ) -> Result<LayerTiming, DeviceError> {
        let executor = &mut self.executor;
        let idx = executor.calls.redeem_pending(&pending)?;
        executor.check_stream(stream, executor.calls.get(idx).stream)?;
        // After an error the record stays taken: its kernels may still run. The next call waits for them.
        let started = executor.calls.get(idx).started.unwrap_or(start);
        let seen = executor.poll(stream, Running::Call(idx), started)?;
        executor.wait_for_call(stream, idx)?;
        let status = executor.launcher.memory.status(idx);
        let is_good = status.error.tag == TAG_NONE
            && status.handle.missing == 0
            && !executor.calls.get(idx).is_suspect;
        if is_good {
            executor.note_latency(Running::Call(idx), started, seen)?;
        }
        let answered = status.handle.contacted & !status.handle.missing;
        executor.peers.note_carried(answered, &executor.calls.get(idx).tables);
        if !is_good && executor.replay.is_some() {
            return Err(DeviceError::Replaying);
        }
        let repaired = match is_good {
            true => Ok(()),
            false => self.repair.complete(executor, stream, idx, &status, start),
        };
        let repaired = match repaired {
            // As above: kernels of the retry may still run.
            Err(error @ DeviceError::Gpu(_)) => return Err(error),
            Err(error) => {
                // The error word may hold this call's error, a refusal perhaps; later calls must not see it. An
                // upload of tables may still run.
                executor.calls.suspect_unsummed();
                executor.launcher.memory.clear_error(stream)?;
                executor.wait_until(stream, Instant::now() + executor.bound())?;
                Err(error)
            }
            Ok(()) => Ok(()),
        };
        let call = executor.calls.get_mut(idx);
        let mut timing = call.timing;
        timing.wait_ns = elapsed_ns(start);
        timing.num_servers = status.handle.contacted.count_ones();
        timing.num_frames += timing.num_servers;
        self.last_failed.clone_from(&call.failed);
        let (layer, epoch) = (call.layer.number, call.tables.epoch);
        if repaired.is_ok()
            && let Some(recorder) = &executor.shared.recorder
        {
            let (call, handle) = (executor.calls.get(idx), &status.handle);
            trace::record_call(recorder, &executor.peers, call, handle, &timing, start);
        }
        executor.end(idx);
        pending.disarm();
        repaired?;
        let num_tokens = status.handle.num_tokens as usize;
        let num_pairs = num_tokens as u64 * u64::from(executor.launcher.geometry.top_k);
        let metrics = &executor.shared.metrics;
        metrics.frames_out.inc_by(timing.num_frames.into());
        metrics.frames_in.inc_by(timing.num_frames.into());
        metrics.resent_pairs.inc_by(timing.resent_pairs);
        metrics.observe(num_tokens, num_pairs, &timing);
        if let Some(observer) = &executor.shared.observer {
            observer(&LayerReport { layer, num_tokens, epoch, timing });
        }
        Ok(timing)
    }

    pub(super) fn count_failure<T>(&self, result: &Result<T, DeviceError>) {
        if result.is_err() {
            self.executor.shared.metrics.requests_failed.inc();
        }
    }
}
