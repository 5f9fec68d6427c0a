//! The attention side of a MoE layer on a GPU.
//!
//! Tensors stay in GPU memory. Kernels write tokens straight into the GPU memory of expert servers and sum the
//! answers. The processor is not on the data path.
//!
//! ```text
//!   caller's stream ── dispatch kernel ═══ NVLink ═══▶ request slots of servers
//!                   ◀─ combine kernel  ◀══ NVLink ════ response slots here
//!   control task ── placement, connecting, liveness ── word that ends kernels' waits
//! ```
//!
//! Kernels reach servers on other hosts over the networks among the client's transports: they give commands to a
//! thread of this process (`switchyard-proxy`), which posts for them.
//!
//! Placement, discovery, connections and the rules for failures are those of [`MoeClient`](crate::MoeClient). Two
//! things differ. A client serves one call after the other, in the order of a stream. And kernels cannot resend
//! tokens by themselves. So a call ends with [`finish`](DeviceClient::finish), which waits for the stream and, after
//! a failure, sends the tokens that lack a part to replicas. [`forward`](DeviceClient::forward) is dispatch, combine
//! and finish in one. A caller who records calls into a graph brackets each replay, see
//! [`replay`](DeviceClient::replay), and replays the graph again when parts are missing: experts keep no state.
//!
//! A server that dies sets a bit in a word that waiting kernels read, so its death costs only the time to learn of
//! it. Kernels themselves give up a server that is silent for the deadline. The host ends their waits for a server
//! that works but does not answer. In each case the server's slots leave the tables before the next launch, and its
//! memory is unmapped as soon as no kernel can use it. A late write of the server lands in memory that is not read.
//!
//! A client is composed of these objects. Each uses only the ones before it:
//!
//! | object | task |
//! |---|---|
//! | `Peers` | connections to servers, and the tables by which kernels choose among them |
//! | `Calls` | records of outstanding calls, in the order of their dispatch |
//! | `Launcher` | the client's memory, and kernels with prepared parameters |
//! | `Executor` | counts calls at servers, uploads tables, waits for kernels (with a `Watch`) |
//! | `Repair`, `Replays`, `Parts` | calls with missing parts, graphs, batches larger than a frame |

mod builder;
mod calls;
mod choices;
mod error;
mod executor;
mod lateness;
mod launcher;
mod link;
mod memory;
mod options;
mod parts;
mod peers;
mod polling;
mod repair;
mod replay;
mod tensor;
mod tensor_type;
mod trace;
mod watch;

use std::fmt;
use std::time::{Duration, Instant};

use kernels::abi::{CALL_STAMPS, TAG_NONE};
use prometheus::Registry;
use telemetry::TraceContext;

// Types of other crates that occur in this module's signatures.
pub use kernels::abi::DevicePtr;
pub use kernels::check::CheckError;
pub use kernels::gpu::{
    Conversion, ConvertType, DeviceName, Event, Gpu, GpuBuffer, GpuError, Graph, Stream,
};
pub use proxy::ProxyError;

pub use builder::DeviceClientBuilder;
pub use calls::{DeviceHandle, DevicePending};
pub use error::{DeviceBuildError, DeviceError};
pub use options::DeviceOptions;
pub use replay::{ReplayOutcome, ReplayReport};
pub use tensor::{DeviceInput, DeviceTensor};
pub use tensor_type::TensorType;

use crate::fleet::control::Control;
use crate::model::ClientModel;
use crate::timing::{LayerReport, LayerTiming, elapsed_ns};
use calls::{Layer, Phase};
use executor::Executor;
use parts::Parts;
use polling::Running;
use repair::Repair;
use replay::Replays;
use tensor::check_out;

/// A client of GPU servers, with tensors in the memory of one GPU. See the [module](self).
///
/// Calls of one client are ordered: use one stream, or streams that wait for one another.
pub struct DeviceClient {
    executor: Executor,
    repair: Repair,
    replays: Replays,
    parts: Parts,
    /// Links that failed in the last finished call: place, and number of the link there.
    last_failed: Vec<(usize, u64)>,
    // Dropped after the executor: connectors see the end of their links.
    _control: Control,
    registry: Registry,
}

impl DeviceClient {
    /// Settings for a GPU client of the experts of `model`.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use switchyard_attention_client::device::Gpu;
    /// use switchyard_attention_client::{ClientModel, DeviceClient, DeviceOptions};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (url, token) = ("http://127.0.0.1:7070", None);
    /// let model = ClientModel::fetch(url, token.clone(), 24, Duration::from_secs(5))?;
    /// let gpu = Gpu::open_named("cuda:0".parse()?)?;
    /// let mut client = DeviceClient::builder(model)
    ///     .control_plane(url, token)
    ///     .build(gpu, DeviceOptions::default())?;
    /// client.wait_ready(Duration::from_secs(30))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(model: ClientModel) -> DeviceClientBuilder {
        DeviceClientBuilder::new(model)
    }

    fn new(executor: Executor, control: Control, registry: Registry) -> Self {
        Self {
            executor,
            repair: Repair::default(),
            replays: Replays::default(),
            parts: Parts::default(),
            last_failed: Vec::new(),
            _control: control,
            registry,
        }
    }

    /// Sends the tokens of one layer to the servers that hold their experts: one kernel behind the earlier work of
    /// `stream`. A launch while the stream captures becomes part of the caller's graph.
    ///
    /// Returns without waiting for the GPU, except in three cases:
    ///
    /// * an earlier call was abandoned, and its kernels must end first;
    /// * an uncombined call occupies the ring frame of this one;
    /// * experts are left out.
    ///
    /// Each wait lasts as long as the earlier work of the stream, plus the limits of [`finish`](Self::finish) for an
    /// answer.
    ///
    /// # Safety
    /// The tensors are as large as [`DeviceInput`] says. They do not change until the call is
    /// [finished](Self::finish), or as long as a graph with it may run.
    ///
    /// `stream` is ordered with the streams of earlier calls, and lives until the call is finished. An abandoned call
    /// counts as finished when the next dispatch, or `begin_replay`, has returned without an error.
    ///
    /// A graph with the call runs only between [`begin_replay`](Self::begin_replay) and
    /// [`finish_replay`](Self::finish_replay), on their stream, and never after the client is dropped.
    ///
    /// # Errors
    /// [`DeviceError`]; nothing was launched then.
    pub unsafe fn dispatch(
        &mut self,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
    ) -> Result<DeviceHandle, DeviceError> {
        let start = Instant::now();
        // SAFETY: the caller's promise.
        let result = unsafe { self.try_dispatch(stream, layer, input, start) };
        self.count_failure(&result);
        result
    }

    /// Puts a call into a trace of the caller. If that trace is sampled, the client records the call in it when it is
    /// [finished](Self::finish). Has no effect without [`DeviceClientBuilder::recorder`], and on recorded calls, whose
    /// replays are not traced.
    pub fn set_trace_context(&mut self, handle: &DeviceHandle, context: TraceContext) {
        self.executor.calls.set_context(handle, context);
    }

    /// Sums the servers' rows into `out`, bf16 `[capacity, hidden]`: one kernel. Rows beyond the number of tokens
    /// keep their content. Parts of servers that fail meanwhile are missing until [`finish`](Self::finish).
    ///
    /// # Safety
    /// As for [`dispatch`](Self::dispatch), and `out` is that large.
    ///
    /// # Errors
    /// [`DeviceError`]; the call is abandoned then.
    pub unsafe fn combine(
        &mut self,
        stream: &Stream,
        handle: DeviceHandle,
        out: DeviceTensor,
    ) -> Result<DevicePending, DeviceError> {
        let executor = &mut self.executor;
        executor.check_device(stream)?;
        check_out(out)?;
        let out = out.ptr;
        let is_recording = stream.is_capturing()?;
        let idx = executor.calls.redeem(&handle, is_recording)?;
        if !is_recording {
            executor.wait_for_early_sums()?;
        }
        let call = executor.calls.get(idx);
        let (capacity, layer) = (call.input.capacity, call.layer.number);
        let is_summed = call.early_sum.is_some();
        if is_summed {
            executor.copy_early_sum(stream, idx, out)?;
        } else {
            executor.launcher.check_rows(out, capacity)?;
            // SAFETY: the caller's promise.
            unsafe { executor.launcher.combine(stream, idx, out, capacity, false)? };
        }
        if is_recording {
            executor.calls.release(idx);
        } else {
            let call = executor.calls.get_mut(idx);
            (call.phase, call.out, call.stream) = (Phase::Combined, out, stream.raw());
            if !is_summed {
                executor.launcher.memory.report(stream, idx)?;
            }
        }
        Ok(handle.into_pending(layer))
    }

    /// Waits until the call's output is complete, and resends tokens that a failed server did not answer. `stream` is
    /// that of the call's [`combine`](Self::combine). Before a resend it also waits for the streams of other
    /// outstanding calls.
    ///
    /// The wait is bounded. A server that is silent for the deadline counts as failed. So does a server that shows
    /// life but does not answer within the work limit plus twice the deadline. A call without any answer waits for a
    /// usable replica for `replica_wait`.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of the output is then unspecified, and the call is abandoned.
    /// [`DeviceError::Replaying`] if parts must be resent while a graph may run: finish the replay first.
    pub fn finish(
        &mut self,
        stream: &Stream,
        pending: DevicePending,
    ) -> Result<LayerTiming, DeviceError> {
        self.finish_since(stream, pending, Instant::now())
    }

    /// As [`finish`](Self::finish), for a caller that has waited for the stream by itself since `start`: timing and
    /// metrics count this wait as the call's.
    ///
    /// # Errors
    /// As for [`finish`](Self::finish).
    pub fn finish_since(
        &mut self,
        stream: &Stream,
        pending: DevicePending,
        start: Instant,
    ) -> Result<LayerTiming, DeviceError> {
        let result = self.try_finish(stream, pending, start);
        self.count_failure(&result);
        result
    }

    /// [`dispatch`](Self::dispatch), [`combine`](Self::combine) and [`finish`](Self::finish) in one. A batch that
    /// does not fit a frame goes in parts. Metrics and the observer see each part as a call.
    ///
    /// ```no_run
    /// # use switchyard_attention_client::device::{DevicePtr, Stream};
    /// # use switchyard_attention_client::{DeviceClient, DeviceError, DeviceInput, DeviceTensor, TensorType};
    /// /// Sends 32 tokens. The pointers are addresses of the engine's tensors in GPU memory.
    /// ///
    /// /// # Safety
    /// /// As for `DeviceClient::forward`.
    /// unsafe fn moe_layer(
    ///     client: &mut DeviceClient,
    ///     stream: &Stream,
    ///     layer: u32,
    ///     [x, topk_idx, topk_weights, num_tokens, out]: [u64; 5],
    /// ) -> Result<(), DeviceError> {
    ///     let input = DeviceInput::new(
    ///         DevicePtr(x),
    ///         DevicePtr(topk_idx),
    ///         DevicePtr(topk_weights),
    ///         DevicePtr(num_tokens),
    ///         32,
    ///     );
    ///     let out = DeviceTensor::new(DevicePtr(out), TensorType::Bf16);
    ///     // SAFETY: the caller's promise.
    ///     unsafe { client.forward(stream, layer, &input, out)? };
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Safety
    /// As for the three.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of `out` is then unspecified.
    pub unsafe fn forward(
        &mut self,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        out: DeviceTensor,
    ) -> Result<LayerTiming, DeviceError> {
        // Checked before the first kernel of the batch, not before the last.
        check_out(out)?;
        if input.capacity > self.max_tokens() {
            let mut parts = std::mem::take(&mut self.parts);
            // SAFETY: the caller's promise.
            let result = unsafe { parts.forward(self, stream, layer, input, out) };
            self.parts = parts;
            return result;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let handle = self.dispatch(stream, layer, input)?;
            let pending = self.combine(stream, handle, out)?;
            self.finish(stream, pending)
        }
    }

    /// Replays a graph until its outputs are complete: [`begin_replay`](Self::begin_replay), the replay,
    /// [`finish_replay`](Self::finish_replay), and all three again if parts are missing.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of the outputs is then unspecified. An expert without a live replica is an error
    /// in either mode of [`OnMissingExpert`](crate::OnMissingExpert): kernels alone cannot renormalise.
    pub fn replay(&mut self, stream: &Stream, graph: &Graph) -> Result<ReplayReport, DeviceError> {
        let start = Instant::now();
        let mut report = ReplayReport::default();
        loop {
            self.begin_replay(stream)?;
            report.attempts += 1;
            report.stall_ns = if report.attempts == 1 { 0 } else { elapsed_ns(start) };
            let replayed = stream.replay(graph);
            // Finished in any case: the replay is counted at the servers.
            let outcome = self.finish_replay(stream);
            replayed?;
            match outcome? {
                ReplayOutcome::Complete => return Ok(report),
                ReplayOutcome::Incomplete { reason } if report.attempts >= MAX_REPLAYS => {
                    let (attempts, waited) = (report.attempts, start.elapsed());
                    return Err(DeviceError::Replays { attempts, waited, last: reason });
                }
                ReplayOutcome::Incomplete { reason } => {
                    tracing::warn!(reason, attempts = report.attempts, "a graph is replayed again");
                }
            }
        }
    }

    /// Applies changes among the servers. Call it before launching a graph with recorded calls on `stream`. While the
    /// graph runs, launch nothing else of this client.
    ///
    /// # Errors
    /// [`DeviceError`]; do not launch the graph then. If earlier work of the stream does not end in time, launch
    /// nothing else until [`finish_replay`](Self::finish_replay) has ended.
    pub fn begin_replay(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.replays.begin(&mut self.executor, stream)
    }

    /// Waits for `stream`, that of [`begin_replay`](Self::begin_replay), and says whether every output is complete.
    /// Call it after launching the graph.
    ///
    /// # Errors
    /// [`DeviceError`] where another replay would not help. After an error of the GPU or of the stream the graph may
    /// still run: launch nothing else until another call of this function has ended.
    pub fn finish_replay(&mut self, stream: &Stream) -> Result<ReplayOutcome, DeviceError> {
        self.replays.finish(&mut self.executor, stream)
    }

    /// Waits until there is a live replica of every expert, for `timeout` at most.
    ///
    /// # Errors
    /// [`ClientError::NoReplica`](crate::ClientError::NoReplica) names the first expert without a replica: at
    /// `timeout`, or at once when all its replicas refuse this client until a setting changes.
    /// [`DeviceError::NoPlace`], at once, when there is a replica but outstanding calls use the place that it needs.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            self.executor.sync();
            let Executor { peers, calls, shared, launcher, .. } = &self.executor;
            let Some((layer_idx, expert)) = peers.first_unreachable() else { return Ok(()) };
            let waited = start.elapsed();
            if waited >= timeout || peers.routing.is_hopeless(layer_idx, expert) {
                return Err(peers.no_replica(layer_idx, expert, waited).into());
            }
            // Waiting is futile: the caller cannot finish its calls during this call.
            if peers.is_rejected(layer_idx, expert, self.executor.finished()) {
                let layer = shared.model.moe_layers[layer_idx];
                let max_servers = launcher.options.max_servers;
                let num_calls = calls.num_outstanding();
                return Err(DeviceError::NoPlace { layer, expert, max_servers, num_calls });
            }
            peers.wait_for_events(timeout - waited)?;
        }
    }

    /// Most tokens of a call that is not sent in parts: rows of a frame.
    #[must_use]
    pub const fn max_tokens(&self) -> u32 {
        self.executor.launcher.geometry.max_tokens
    }

    /// The GPU with the client's memory. Tensors must be in its memory too.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        self.executor.launcher.gpu()
    }

    /// The model that this client asks experts of.
    #[must_use]
    pub fn model(&self) -> &ClientModel {
        &self.executor.shared.model
    }

    /// Times of the last calls' kernels, nanoseconds of the GPU's global timer, by sequence modulo
    /// [`timeline`](DeviceOptions::timeline) and `kernels::abi::CallStamp`; zeros for calls that were not made. Waits
    /// for the copy, for 10 s at most. No call may be outstanding.
    ///
    /// # Errors
    /// [`GpuError`].
    pub fn call_stamps(&self) -> Result<Vec<[u64; CALL_STAMPS]>, GpuError> {
        let memory = &self.executor.launcher.memory;
        let Some(trace) = &memory.trace else { return Ok(Vec::new()) };
        let mut stamps = vec![[0u64; CALL_STAMPS]; trace.len() as usize / (CALL_STAMPS * 8)];
        let bytes = bytemuck::cast_slice_mut(stamps.as_flattened_mut());
        memory.gpu.read(trace, 0, bytes, Instant::now() + Duration::from_secs(10))?;
        Ok(stamps)
    }

    /// Epoch of the placement in force; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.executor.shared.routing.load().epoch
    }

    /// Names of the servers that hold an expert, by the placement in force. Empty if there is no such layer or expert.
    #[must_use]
    pub fn replicas(&self, layer: u32, expert: u32) -> Vec<String> {
        self.executor.shared.replicas(layer, expert)
    }

    /// The registry with the client's metrics.
    #[must_use]
    pub const fn registry(&self) -> &Registry {
        &self.registry
    }

    /// # Safety
    /// As for [`dispatch`](Self::dispatch).
    unsafe fn try_dispatch(
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

    fn try_finish(
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

    fn count_failure<T>(&self, result: &Result<T, DeviceError>) {
        if result.is_err() {
            self.executor.shared.metrics.requests_failed.inc();
        }
    }
}

impl fmt::Debug for DeviceClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceClient")
            .field("gpu", &self.gpu().name())
            .field("options", &self.executor.launcher.options)
            .finish_non_exhaustive()
    }
}

/// Replays of one graph before [`DeviceClient::replay`] fails.
const MAX_REPLAYS: u32 = 100;

const _: () = {
    const fn sent_between_threads<T: Send>() {}
    sent_between_threads::<DeviceClient>();
    sent_between_threads::<DeviceHandle>();
    sent_between_threads::<DevicePending>();
};
