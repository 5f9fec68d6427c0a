//! A call from its begin to its end: what the public functions of the client do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::TAG_NONE;
use kernels::gpu::{DeviceName, Stream};

use super::slots::{DeviceHandle, DevicePending, Phase};
use super::{DeviceClient, DeviceError, DeviceInput, MARGIN, elapsed_ns, lane};
use crate::client::{ClientError, LayerReport, LayerTiming};

impl DeviceClient {
    pub(super) unsafe fn dispatch_inner(
        &mut self,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        start: Instant,
    ) -> Result<DeviceHandle, DeviceError> {
        self.check_device(stream)?;
        input.check()?;
        let layer_idx = self.shared.layer_idx_of(layer)?;
        if input.capacity > self.geometry.max_tokens {
            let (capacity, max_tokens) = (input.capacity, self.geometry.max_tokens);
            return Err(DeviceError::Capacity { capacity, max_tokens });
        }
        if self.replaying.is_some() {
            return Err(DeviceError::Replaying);
        }
        if stream.is_capturing()? {
            let slot = self.slots.claim_recorded(*input, layer, layer_idx)?;
            // SAFETY: the caller's promise.
            let launched = unsafe {
                self.check_dispatch(slot, (layer, layer_idx), input)
                    .and_then(|()| self.launch_dispatch(stream, slot, input))
            };
            return match launched {
                Ok(()) => Ok(self.slots.handle(slot)),
                Err(error) => {
                    self.slots.take_back_recorded(slot);
                    Err(error)
                }
            };
        }
        self.settle_abandoned(stream)?;
        let slot = self.slots.free_slot()?;
        // What is wrong with the tensors shows before anything is launched.
        // SAFETY: the caller's promise.
        unsafe { self.check_dispatch(slot, (layer, layer_idx), input)? };
        self.make_room(stream)?;
        let slot = self.slots.claim(*input, layer, layer_idx)?;
        self.slots.call_mut(slot).stream = stream.raw();
        self.memory.forget_missing(slot);
        self.slots.call_mut(slot).reported_before = self.memory.reported(slot);
        let begun = self.begin(stream, slot).and_then(|()| {
            let input = self.without_orphans(stream, slot)?;
            // SAFETY: the caller's promise.
            unsafe { self.launch_dispatch(stream, slot, &input) }
        });
        if let Err(error) = begun {
            // Tables may be on their way. If they do not arrive, whoever comes next waits for them.
            match self.wait_until(stream, Instant::now() + self.bound()) {
                Ok(()) => self.end(slot),
                Err(_) => {
                    self.slots.call_mut(slot).phase = Phase::Combined;
                    self.slots.abandon(slot);
                }
            }
            return Err(error);
        }
        let call = self.slots.call_mut(slot);
        call.started = Some(start);
        call.timing.dispatch_ns = elapsed_ns(start);
        Ok(self.slots.handle(slot))
    }

    /// Takes in the news, counts the call in at the servers, and brings the tables up to date.
    pub(super) fn begin(&mut self, stream: &Stream, slot: usize) -> Result<(), DeviceError> {
        let mut used = std::mem::take(&mut self.slots.call_mut(slot).used);
        loop {
            self.sync();
            if self.lane.enter(&mut used) {
                break;
            }
            std::thread::yield_now();
        }
        self.slots.call_mut(slot).used = used;
        self.refresh(stream)?;
        self.slots.call_mut(slot).tables = Arc::clone(&self.tables);
        Ok(())
    }

    /// The call's kernels have ended, or were never launched.
    pub(super) fn end(&mut self, slot: usize) {
        self.slots.call_mut(slot).used.drain(..).for_each(lane::Used::exit);
        self.slots.release(slot);
    }

    pub(super) fn sync(&mut self) {
        let (finished, last) = (self.finished(), self.slots.last());
        self.lane.sync(&self.shared, finished, last, &self.memory.abort);
    }

    /// As [`Slots::finished`](super::slots::Slots::finished), of graphs, too.
    pub(super) fn finished(&self) -> u64 {
        let finished = self.slots.finished();
        // A graph may use what it began with as long as it runs.
        self.replaying.as_ref().map_or(finished, |run| finished.min(run.serial - 1))
    }

    pub(super) fn finish_inner(
        &mut self,
        stream: &Stream,
        pending: DevicePending,
    ) -> Result<LayerTiming, DeviceError> {
        let start = Instant::now();
        let slot = self.slots.redeem_pending(&pending)?;
        self.check_stream(stream, self.slots.call(slot).stream)?;
        // After an error the slot stays taken: its kernels may still run. Whatever comes next waits for it.
        self.poll(stream)?;
        self.wait_for_call(stream, slot)?;
        let status = self.memory.status(slot);
        let is_good = status.error.tag == TAG_NONE
            && status.handle.missing == 0
            && !self.slots.call(slot).is_suspect;
        let answered = status.handle.contacted & !status.handle.missing;
        self.lane.note_carried(answered, &self.slots.call(slot).tables);
        if !is_good && self.replaying.is_some() {
            return Err(DeviceError::Replaying);
        }
        let repaired = if is_good { Ok(()) } else { self.repair(stream, slot, &status, start) };
        let repaired = match repaired {
            // As above: what was launched anew may still run.
            Err(error @ DeviceError::Gpu(_)) => return Err(error),
            Err(error) => {
                // What the kernels complained about, a refusal perhaps, is no later call's. Tables may be on
                // their way.
                self.slots.suspect_unsummed();
                self.memory.clear_error(stream)?;
                self.wait_until(stream, Instant::now() + self.bound())?;
                Err(error)
            }
            Ok(()) => Ok(()),
        };
        let call = self.slots.call_mut(slot);
        let mut timing = call.timing;
        timing.wait_ns = elapsed_ns(start);
        timing.num_servers = status.handle.contacted.count_ones();
        timing.num_frames += timing.num_servers;
        self.last_failed.clone_from(&call.failed);
        let (layer, epoch) = (call.layer, call.tables.epoch);
        self.end(slot);
        pending.disarm();
        repaired?;
        let num_tokens = status.handle.num_tokens as usize;
        let metrics = &self.shared.metrics;
        metrics.frames_out.inc_by(timing.num_frames.into());
        metrics.frames_in.inc_by(timing.num_frames.into());
        metrics.resent_pairs.inc_by(timing.resent_pairs);
        metrics.observe(num_tokens, num_tokens as u64 * u64::from(self.geometry.top_k), &timing);
        if let Some(observer) = &self.shared.observer {
            observer(&LayerReport { layer, num_tokens, epoch, timing });
        }
        Ok(timing)
    }

    /// Takes up what callers dropped: the ring places of its frames must be answered before they are used
    /// again.
    pub(super) fn settle_abandoned(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.wait_for_sums()?;
        while let Some((slot, phase)) = self.slots.next_abandoned() {
            if phase == Phase::Dispatched && self.slots.call(slot).ahead.is_none() {
                let capacity = self.slots.call(slot).input.capacity;
                let rows = self.memory.rows[slot].ptr();
                // SAFETY: the client's own memory, as large as any call's rows.
                unsafe { self.launch_combine(stream, slot, rows, capacity, false)? };
                let call = self.slots.call_mut(slot);
                (call.phase, call.stream) = (Phase::Combined, stream.raw());
                self.memory.report(stream, slot)?;
            }
            self.wait_for_call_again(stream, slot)?;
            let status = self.memory.status(slot);
            self.give_up_servers(slot, &status);
            self.clear_error(stream, &status)?;
            self.shared.metrics.abandoned.inc();
            self.end(slot);
        }
        Ok(())
    }

    /// Kernels are launched where the client's memory is.
    pub(super) fn check_device(&self, stream: &Stream) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.memory.gpu.name());
        if found == expected { Ok(()) } else { Err(DeviceError::Device { found, expected }) }
    }

    /// When `stream` is done, so is what was launched on the stream with handle `expected`.
    pub(super) fn check_stream(&self, stream: &Stream, expected: u64) -> Result<(), DeviceError> {
        self.check_device(stream)?;
        let found = stream.raw();
        if found == expected { Ok(()) } else { Err(DeviceError::Stream { found, expected }) }
    }

    pub(super) fn first_unreachable(&self) -> Option<(usize, u32)> {
        let model = &self.shared.model;
        let routing = &self.lane.routing;
        let live = |&rank: &u32| self.lane.has(&routing.servers[rank as usize]);
        (0..model.moe_layers.len())
            .flat_map(|layer_idx| (0..model.shape.num_experts).map(move |e| (layer_idx, e)))
            .find(|&(layer_idx, e)| !routing.replicas(layer_idx, e).iter().any(live))
    }

    pub(super) fn no_replica(
        &self,
        layer_idx: usize,
        expert: u32,
        waited: Duration,
    ) -> ClientError {
        ClientError::NoReplica {
            layer: self.shared.model.moe_layers[layer_idx],
            expert,
            waited,
            detail: self.lane.routing.describe_replicas(layer_idx, expert),
        }
    }

    pub(super) fn wait_for_news(&self, limit: Duration) -> Result<(), DeviceError> {
        self.lane
            .wait_for_news(limit)
            .map_err(|source| ClientError::System { op: "wait for servers", source }.into())
    }

    /// Looks whether a stream is done for as long as a layer usually takes: a sleep would add its own length
    /// to it. A GPU in software needs the processor itself.
    pub(super) fn poll(&self, stream: &Stream) -> Result<(), DeviceError> {
        if matches!(self.memory.gpu.name(), DeviceName::Emulated(_)) {
            return Ok(());
        }
        let until = Instant::now() + SPIN;
        while !stream.is_done()? && Instant::now() < until {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// How long kernels may take at most: their waits have bounds, but work is no silence.
    pub(super) fn bound(&self) -> Duration {
        self.shared.settings.work_limit + self.shared.settings.deadline * 2 + MARGIN
    }
}

const SPIN: Duration = Duration::from_millis(10);
