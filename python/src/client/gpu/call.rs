//! Calls without the interpreter: conversions, dispatch, combine and the wait for both.

use std::sync::Arc;
use std::time::Instant;

use attention_client::device::{Conversion, ConvertType, DeviceHandle, DevicePending, GpuError};
use attention_client::{
    ClientError, DeviceError, DeviceInput, DeviceTensor, LayerTiming, TensorType,
};
use pyo3::prelude::*;

use super::staging::Part;
use super::{GpuClient, Kept, State};
use crate::client::Copies;
use crate::client::arguments::{RawRequest, RawTarget};
use crate::client::call::{Failure, LayerCall};
use crate::dlpack::{Owner, Place};
use crate::interrupt::Interrupt;

/// A call that was dispatched, and the memory that its kernels use. Dropping it abandons the call.
pub struct GpuCall {
    client: Arc<GpuClient>,
    phase: Phase,
    /// Stream of its kernels.
    stream: u64,
    /// Brings the result into the caller's tensor.
    conversion: Option<Conversion>,
    kept: Option<Kept>,
}

enum Phase {
    /// A call without tokens.
    Empty,
    Dispatched(DeviceHandle),
    Combined(DevicePending),
    Over,
}

impl GpuCall {
    /// Launches the dispatch of a layer on `stream`, behind the work of `others`. Does not wait for the GPU, but for
    /// another call's end if as many are outstanding as slots have frames.
    ///
    /// # Safety
    /// The matrices stay valid and unwritten until the call has finished, or as long as `owners` and `objects` live.
    /// The streams are alive, and `stream` stays so until the call has finished.
    #[allow(clippy::too_many_arguments, reason = "the parts of a call")]
    pub unsafe fn dispatch(
        client: &Arc<GpuClient>,
        interrupt: &Interrupt,
        layer: LayerCall,
        request: RawRequest,
        stream: u64,
        others: &[u64],
        copies: &Copies,
        owners: Vec<Owner>,
        objects: Vec<Py<PyAny>>,
    ) -> Result<Self, Failure> {
        // SAFETY: The caller's promise.
        unsafe {
            let state = &mut *client.turn(interrupt)?;
            Self::start(client, state, layer, request, stream, others, copies, owners, objects)
        }
    }

    /// As [`dispatch`](Self::dispatch) and [`combine`](Self::combine) in one, so that no other thread's call comes
    /// between.
    ///
    /// # Safety
    /// As for the two.
    pub unsafe fn launch(
        client: &Arc<GpuClient>,
        interrupt: &Interrupt,
        layer: LayerCall,
        (request, target): (RawRequest, RawTarget),
        stream: u64,
        others: &[u64],
        copies: &Copies,
    ) -> Result<Self, Failure> {
        let state = &mut *client.turn(interrupt)?;
        let nothing = (Vec::new(), Vec::new());
        // SAFETY: The caller's promise.
        unsafe {
            let (owners, objects) = nothing;
            let mut call = Self::start(
                client, state, layer, request, stream, others, copies, owners, objects,
            )?;
            match call.sum(state, target, None, copies) {
                Ok(()) => Ok(call),
                Err(failure) => {
                    // Dropping the call takes the lock that this function holds.
                    call.abandon(state);
                    Err(failure)
                }
            }
        }
    }

    /// Launches the combine into `target`, behind the work of `other`. `owner` and `object` keep its memory valid.
    ///
    /// # Safety
    /// The target stays valid, and nothing else uses it, until the call has finished. The streams are alive.
    pub unsafe fn combine(
        &mut self,
        target: RawTarget,
        other: Option<u64>,
        copies: &Copies,
        (object, owner): (Py<PyAny>, Owner),
    ) -> Result<(), Failure> {
        let client = Arc::clone(&self.client);
        if let Some(kept) = &mut self.kept {
            kept.owners.push(owner);
            kept.objects.push(object);
        }
        // SAFETY: The caller's promise.
        unsafe { self.sum(&mut client.lock(), target, other, copies) }
    }

    /// Waits until the result is complete. Tokens of failed servers are resent to replicas. Begins at `since`: a
    /// combine that was launched earlier may have been waiting.
    pub fn finish(mut self, interrupt: &Interrupt, since: Instant) -> Result<LayerTiming, Failure> {
        let pending = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Combined(pending) => pending,
            Phase::Empty => return Ok(LayerTiming::default()),
            _ => {
                let (found, expected) = ("a call that is not combined", "one that is");
                return Err(DeviceError::Handle { found, expected }.into());
            }
        };
        let client = Arc::clone(&self.client);
        // SAFETY: The stream is alive until the call has finished: a promise of `dispatch`.
        let stream = unsafe { client.stream(self.stream)? };
        if !client.watch(&stream, interrupt)? {
            // Abandons the call, and the rest of it with its memory.
            drop(pending);
            return Err(Failure::Client(ClientError::Cancelled));
        }
        let mut state = client.lock();
        let finished = state.client.finish_since(&stream, pending, since);
        let finished = match (finished, self.conversion) {
            (Ok(timing), Some(conversion)) => {
                // SAFETY: The promises of `dispatch` and `combine`. The kernels have ended.
                let converted = unsafe { stream.convert(&[conversion]) };
                let limit = Instant::now() + client.limits.work;
                converted.and_then(|()| stream.wait(limit)).map(|()| timing).map_err(Into::into)
            }
            (finished, _) => finished,
        };
        state.num_open -= 1;
        client.ended.notify_one();
        match (finished, self.kept.take()) {
            (Ok(timing), Some(kept)) => {
                state.recycle(kept);
                Ok(timing)
            }
            (finished, kept) => {
                state.abandoned.extend(kept);
                Ok(finished?)
            }
        }
    }

    /// Whether the combine was launched.
    pub fn is_combined(&self) -> bool {
        matches!(self.phase, Phase::Combined(_))
    }

    /// Memory of the call's arrays, and the stream of its kernels.
    pub fn place(&self) -> Place {
        Place::Gpu { ordinal: self.client.ordinal(), stream: self.stream }
    }

    /// # Safety
    /// As for [`dispatch`](Self::dispatch).
    #[allow(clippy::too_many_arguments, reason = "the parts of a call")]
    unsafe fn start(
        client: &Arc<GpuClient>,
        state: &mut State,
        layer: LayerCall,
        RawRequest { x, topk_idx, topk_weights }: RawRequest,
        stream: u64,
        others: &[u64],
        copies: &Copies,
        owners: Vec<Owner>,
        objects: Vec<Py<PyAny>>,
    ) -> Result<Self, Failure> {
        let this = |phase, kept| Self {
            client: Arc::clone(client),
            phase,
            stream,
            conversion: None,
            kept,
        };
        let shape = &client.model.shape;
        let Ok(num_tokens) = u32::try_from(x.rows) else {
            let (found, capacity) = (x.rows as u64, u32::MAX);
            return Err(DeviceError::Tokens { found, capacity }.into());
        };
        if num_tokens == 0 {
            return Ok(this(Phase::Empty, None));
        }
        let gpu = &client.gpu;
        // SAFETY: The caller's promise.
        let queue = unsafe { client.stream(stream)? };
        // The default stream cannot be captured.
        if stream != 0 && queue.is_capturing()? {
            // A replay of the caller's graph would not wait for the service.
            return Err(Failure::Capturing);
        }
        let mut kept = Kept { staging: state.spare.pop().unwrap_or_default(), owners, objects };
        let mut conversions = Vec::new();
        let staging = &mut kept.staging;
        let mut input =
            |part, matrix, wanted, counter: &attention_client::prometheus::IntCounter| {
                let before = conversions.len();
                let at = staging.input(gpu, part, matrix, wanted, &mut conversions)?;
                counter.inc_by((conversions.len() - before) as u64);
                Ok::<_, GpuError>(at)
            };
        let input = DeviceInput::new(
            input(Part::X, &x, (ConvertType::Bf16, shape.hidden), &copies.x)?,
            input(Part::TopkIdx, &topk_idx, (ConvertType::I32, shape.top_k), &copies.topk_idx)?,
            input(
                Part::TopkWeights,
                &topk_weights,
                (ConvertType::F32, shape.top_k),
                &copies.topk_weights,
            )?,
            state.counts.at(gpu, num_tokens)?,
            num_tokens,
        );
        // SAFETY: The caller's promise.
        let dispatched = unsafe {
            let ordered = state.order(client, &queue, others);
            let converted = ordered.and_then(|()| queue.convert(&conversions));
            match converted {
                Ok(()) => state.client.dispatch(&queue, layer.number, &input),
                Err(failure) => Err(DeviceError::from(failure)),
            }
        };
        match dispatched {
            Ok(handle) => {
                state.num_open += 1;
                if let Some(context) = layer.context {
                    state.client.set_trace_context(&handle, context);
                }
                // Calls that were abandoned before have ended.
                for ended in std::mem::take(&mut state.abandoned) {
                    state.recycle(ended);
                }
                Ok(this(Phase::Dispatched(handle), Some(kept)))
            }
            Err(failure) => {
                state.abandoned.push(kept);
                Err(failure.into())
            }
        }
    }

    /// # Safety
    /// As for [`combine`](Self::combine).
    unsafe fn sum(
        &mut self,
        state: &mut State,
        RawTarget { out }: RawTarget,
        other: Option<u64>,
        copies: &Copies,
    ) -> Result<(), Failure> {
        let handle = match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Dispatched(handle) => handle,
            phase => {
                self.phase = phase;
                return Ok(());
            }
        };
        let Some(kept) = &mut self.kept else { return Ok(()) };
        let (at, conversion) = kept.staging.output(&self.client.gpu, &out)?;
        copies.out.inc_by(conversion.is_some().into());
        self.conversion = conversion;
        let out = DeviceTensor::new(at, TensorType::Bf16);
        // SAFETY: The caller's promise.
        let pending = unsafe {
            let stream = self.client.stream(self.stream)?;
            state.order(&self.client, &stream, other.as_slice())?;
            state.client.combine(&stream, handle, out)?
        };
        self.phase = Phase::Combined(pending);
        Ok(())
    }

    /// Gives the call up, with its memory.
    fn abandon(&mut self, state: &mut State) {
        // The handle goes first: the client then knows that the call is over.
        self.phase = Phase::Over;
        if let Some(kept) = self.kept.take() {
            state.num_open -= 1;
            state.abandoned.push(kept);
            self.client.ended.notify_one();
        }
    }
}

impl Drop for GpuCall {
    fn drop(&mut self) {
        if self.kept.is_some() {
            let client = Arc::clone(&self.client);
            self.abandon(&mut client.lock());
        }
    }
}
