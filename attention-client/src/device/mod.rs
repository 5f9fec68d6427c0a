//! The attention side of a MoE layer on a GPU: tensors stay in its memory, kernels write tokens straight
//! into the GPU memory of expert servers and sum what comes back, and the processor is not on the path.
//!
//! ```text
//!   caller's stream ── dispatch kernel ═══ NVLink ═══▶ request slots of servers
//!                   ◀─ combine kernel  ◀══ NVLink ════ response slots here
//!   control task ── placement, connecting, liveness ── word that ends kernels' waits
//! ```
//!
//! Servers on other hosts are reached over the networks among the client's transports: kernels then give
//! commands to a thread of this process (`switchyard-proxy`) that posts for them.
//!
//! Placement, discovery, connecting, what counts as a failure and what is done about it are those of
//! [`MoeClient`](crate::MoeClient). What differs: a client serves one call after the other in the order
//! of a stream, and kernels cannot send tokens again by themselves. So a call ends with
//! [`finish`](DeviceClient::finish), which waits for the stream and, after a failure, sends the tokens
//! that lack a part to replicas; [`forward`](DeviceClient::forward) is all three. A caller who records
//! calls into a graph brackets each replay, see [`replay`](DeviceClient::replay), and replays it again
//! when parts are missing: experts keep no state.
//!
//! A server that dies sets a bit in a word that waiting kernels look at, so a death costs what it takes
//! to learn of it. A server that is silent for the deadline is given up by the kernels themselves. In
//! both cases, and when the host ends the waits for a server that works but does not answer, its slots
//! leave the tables before the next launch, its memory is unmapped as soon as no kernel can use it, and
//! what it still writes lands in memory that nobody reads.

mod error;
mod lane;
mod launch;
mod memory;
mod options;
mod overdue;
mod repair;
mod replay;
mod slots;
mod split;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{CombineParams, DevicePtr, DispatchParams, FrameGeometry, TAG_NONE};
use kernels::gpu::{DeviceName, Gpu, Prepared, Stream};
use p2p_core::bootstrap::DeviceSide;
use prometheus::Registry;
use proxy::DeviceTransports;

pub use error::{DeviceBuildError, DeviceError};
pub use options::DeviceOptions;
pub use replay::{ReplayOutcome, ReplayReport};
pub use slots::{DeviceHandle, DevicePending};

use crate::client::builder::{MoeClientBuilder, Started};
use crate::client::control::Control;
use crate::client::link::AbortBit;
use crate::client::shared::Shared;
use crate::client::{ClientError, ClientModel, LayerReport, LayerTiming};
use lane::{Lane, Tables};
use launch::{CombineKey, DispatchKey};
use memory::Memory;
use options::geometry_of;
use slots::{Phase, Slots};

/// Tensors of a call, in memory that the GPU reaches. All stay as they are until the call is finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceInput {
    /// bf16 `[capacity, hidden]`, aligned to 16 bytes.
    pub hidden_states: DevicePtr,
    /// i32 `[capacity, top_k]`, -1 = masked, aligned to 16 bytes.
    pub topk_idx: DevicePtr,
    /// f32 `[capacity, top_k]`, aligned to 16 bytes.
    pub topk_weights: DevicePtr,
    /// One u32: how many rows count, `capacity` at most. Read by the kernels when they run.
    pub num_tokens: DevicePtr,
    /// Rows of the tensors; at most [`DeviceClient::max_tokens`], except in [`DeviceClient::forward`].
    pub capacity: u32,
}

/// A client of GPU servers, with tensors in the memory of one GPU. See the [module](self).
///
/// Calls of one client are ordered: use one stream, or streams that wait for one another.
pub struct DeviceClient {
    lane: Lane,
    memory: ManuallyDrop<Memory>,
    slots: Slots,
    tables: Arc<Tables>,
    dispatches: HashMap<DispatchKey, Prepared<DispatchParams>>,
    combines: HashMap<CombineKey, Prepared<CombineParams>>,
    geometry: FrameGeometry,
    options: DeviceOptions,
    /// How servers may be reached.
    reached: DeviceTransports,
    /// For looking at the error word while the caller's stream is busy.
    side: Stream,
    /// Whether a graph may be running, and what it may use.
    replaying: Option<replay::Running>,
    /// Uploads so far, and the call before which the last two were.
    num_uploads: usize,
    upload_serials: [u64; 2],
    /// News at which a call waited for a replica in vain.
    vain_wait_at: Option<u64>,
    /// Parts of a call that is larger than a frame, empty between calls.
    parts: VecDeque<DevicePending>,
    /// Links that failed in the call finished last, see [`slots::Call::failed`].
    last_failed: Vec<(usize, u64)>,
    /// The last such call's tensors, whose pointers are known to be good.
    checked_input: Option<DeviceInput>,
    /// For the servers that the next replay uses, empty between replays.
    spare_used: Vec<lane::Used>,
    // The control side goes after the lane: connectors see that links are gone.
    _control: Control,
    shared: Arc<Shared>,
    registry: Registry,
}

impl DeviceClient {
    pub(crate) fn build(
        mut builder: MoeClientBuilder,
        gpu: Gpu,
        options: DeviceOptions,
    ) -> Result<Self, DeviceBuildError> {
        let mut made = None;
        let mut reached = DeviceTransports::new(&gpu, options.proxy_threads);
        builder.for_device(options.dtype, &mut reached, |model, slot| {
            let geometry = geometry_of(model, slot, &options)?;
            made = Some(geometry);
            Ok(DeviceSide {
                gpu: gpu.clone(),
                own_slot_bytes: geometry.response_slot_bytes,
                peer_slot_bytes: geometry.slot_bytes,
                shape: geometry.describe().into_bytes(),
            })
        })?;
        let Some(geometry) = made else {
            return Err(DeviceBuildError::Setting {
                setting: "the geometry",
                found: "none".into(),
                expected: "one".into(),
            });
        };
        let Started { shared, control, registry } = builder.start()?;
        let num_layers = shared.model.moe_layers.len();
        let num_frames = geometry.num_frames as usize;
        // Recorded calls have slots of their own: graphs point to them for good.
        let memory = Memory::new(&gpu, &geometry, num_layers, 2 * num_frames)?;
        let side = gpu.stream()?;
        let lane = Lane::connect(&shared, options.max_servers)
            .map_err(|source| DeviceBuildError::System { op: "make a lane", source })?;
        shared.metrics.lanes.set(1);
        Ok(Self {
            lane,
            memory: ManuallyDrop::new(memory),
            slots: Slots::new(num_frames),
            tables: Arc::new(Tables::empty(num_layers)),
            dispatches: HashMap::new(),
            combines: HashMap::new(),
            geometry,
            options,
            reached,
            side,
            replaying: None,
            num_uploads: 0,
            upload_serials: [0; 2],
            vain_wait_at: None,
            parts: VecDeque::new(),
            last_failed: Vec::new(),
            checked_input: None,
            spare_used: Vec::new(),
            _control: control,
            shared,
            registry,
        })
    }

    /// Sends the tokens of one layer to the servers that hold their experts: one kernel behind whatever
    /// `stream` has. What is launched while the stream captures becomes part of the caller's graph.
    ///
    /// # Safety
    /// The tensors are as large as [`DeviceInput`] says and stay as they are until the call is
    /// [finished](Self::finish), or as long as a graph with it may run. This stream and those of earlier
    /// calls are ordered, and it lives until the call is finished. A graph with the call runs between
    /// [`begin_replay`](Self::begin_replay) and [`finish_replay`](Self::finish_replay) only, on their stream,
    /// and never after the client is dropped.
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
        let result = unsafe { self.dispatch_inner(stream, layer, input, start) };
        if result.is_err() {
            self.shared.metrics.requests_failed.inc();
        }
        result
    }

    /// Sums the servers' rows into `out`, bf16 `[capacity, hidden]`: one kernel. Rows beyond the number
    /// of tokens keep what they hold. Parts of servers that fail meanwhile are missing until
    /// [`finish`](Self::finish).
    ///
    /// # Safety
    /// As for [`dispatch`](Self::dispatch), and `out` is that large.
    ///
    /// # Errors
    /// [`DeviceError`]; the call is given up then.
    pub unsafe fn combine(
        &mut self,
        stream: &Stream,
        handle: DeviceHandle,
        out: DevicePtr,
    ) -> Result<DevicePending, DeviceError> {
        self.check_device(stream)?;
        let is_recording = stream.is_capturing()?;
        let slot = self.slots.redeem(&handle, is_recording)?;
        let call = self.slots.call(slot);
        let (capacity, layer) = (call.input.capacity, call.layer);
        // SAFETY: the caller's promise.
        unsafe { self.launch_combine(stream, slot, out, capacity, false)? };
        if is_recording {
            self.slots.release(slot);
        } else {
            self.slots.call_mut(slot).stream = stream.raw();
            self.memory.report(stream, slot)?;
            let call = self.slots.call_mut(slot);
            call.phase = Phase::Combined;
            call.out = out;
        }
        Ok(handle.into_pending(layer))
    }

    /// Waits until the call's output is complete, re-sending what a failed server did not answer. `stream` is
    /// that of its [`combine`](Self::combine).
    ///
    /// The wait ends: a server that is silent for the deadline counts as failed, one that shows life but does
    /// not answer within the work limit and twice the deadline as well, and a call in which nothing is
    /// answered waits for a usable replica as long as was set.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of the output is then unspecified.
    pub fn finish(
        &mut self,
        stream: &Stream,
        pending: DevicePending,
    ) -> Result<LayerTiming, DeviceError> {
        let result = self.finish_inner(stream, pending);
        if result.is_err() {
            self.shared.metrics.requests_failed.inc();
        }
        result
    }

    /// [`dispatch`](Self::dispatch), [`combine`](Self::combine) and [`finish`](Self::finish) in one. A batch
    /// that does not fit a frame goes in parts, each of which metrics and the observer see as a call.
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
        out: DevicePtr,
    ) -> Result<LayerTiming, DeviceError> {
        if input.capacity > self.geometry.max_tokens {
            // SAFETY: the caller's promise.
            return unsafe { self.forward_in_parts(stream, layer, input, out) };
        }
        // SAFETY: the caller's promise.
        unsafe {
            let handle = self.dispatch(stream, layer, input)?;
            let pending = self.combine(stream, handle, out)?;
            self.finish(stream, pending)
        }
    }

    /// Waits until there is a live replica of every expert.
    ///
    /// # Errors
    /// [`ClientError::NoReplica`] that names the first expert without: at `timeout`, or at once when all
    /// its replicas have turned the client away for a reason that waiting does not change.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            self.sync();
            let Some((layer_idx, expert)) = self.first_unreachable() else { return Ok(()) };
            let waited = start.elapsed();
            if waited >= timeout || self.lane.routing.is_hopeless(layer_idx, expert) {
                return Err(self.no_replica(layer_idx, expert, waited).into());
            }
            self.wait_for_news(timeout - waited)?;
        }
    }

    /// Most tokens of a call that is not in parts: rows of a frame.
    #[must_use]
    pub const fn max_tokens(&self) -> u32 {
        self.geometry.max_tokens
    }

    /// The GPU whose memory the tensors lie in.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.memory.gpu
    }

    /// Whose experts this client asks for.
    #[must_use]
    pub fn model(&self) -> &ClientModel {
        &self.shared.model
    }

    /// Epoch of the placement in force; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.routing.load().epoch
    }

    /// The registry that holds the client's metrics.
    #[must_use]
    pub const fn registry(&self) -> &Registry {
        &self.registry
    }

    unsafe fn dispatch_inner(
        &mut self,
        stream: &Stream,
        layer: u32,
        input: &DeviceInput,
        start: Instant,
    ) -> Result<DeviceHandle, DeviceError> {
        self.check_device(stream)?;
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
            let launched = unsafe { self.launch_dispatch(stream, slot, input) };
            return match launched {
                Ok(()) => Ok(self.slots.handle(slot)),
                Err(error) => {
                    self.slots.release(slot);
                    Err(error)
                }
            };
        }
        self.settle_abandoned(stream)?;
        let slot = self.slots.claim(*input, layer, layer_idx)?;
        self.slots.call_mut(slot).stream = stream.raw();
        let begun = self.begin(stream, slot).and_then(|()| {
            let input = self.without_orphans(stream, slot)?;
            // SAFETY: the caller's promise.
            unsafe { self.launch_dispatch(stream, slot, &input) }
        });
        if let Err(error) = begun {
            self.end(slot);
            return Err(error);
        }
        let call = self.slots.call_mut(slot);
        call.started = Some(start);
        call.timing.dispatch_ns = elapsed_ns(start);
        Ok(self.slots.handle(slot))
    }

    /// Takes in the news, counts the call in at the servers, and brings the tables up to date.
    fn begin(&mut self, stream: &Stream, slot: usize) -> Result<(), DeviceError> {
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
    fn end(&mut self, slot: usize) {
        self.slots.call_mut(slot).used.drain(..).for_each(lane::Used::exit);
        self.slots.release(slot);
    }

    fn sync(&mut self) {
        let (finished, last) = (self.slots.finished(), self.slots.last());
        // A graph may use what it began with as long as it runs.
        let finished = self.replaying.as_ref().map_or(finished, |run| finished.min(run.serial - 1));
        self.lane.sync(&self.shared, finished, last, &self.memory.abort);
    }

    fn finish_inner(
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
        let is_good = status.error.tag == TAG_NONE && status.handle.missing == 0;
        self.lane.note_carried(status.handle.contacted & !status.handle.missing);
        let repaired = if is_good { Ok(()) } else { self.repair(stream, slot, &status, start) };
        let repaired = match repaired {
            // As above: what was launched anew may still run.
            Err(error @ DeviceError::Gpu(_)) => return Err(error),
            ended => ended,
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
    fn settle_abandoned(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        while let Some((slot, phase)) = self.slots.next_abandoned() {
            self.shared.metrics.abandoned.inc();
            if phase == Phase::Dispatched {
                let capacity = self.slots.call(slot).input.capacity;
                let scratch = self.memory.scratch.ptr();
                // SAFETY: the client's own memory.
                unsafe { self.launch_combine(stream, slot, scratch, capacity, false)? };
                self.memory.report(stream, slot)?;
                let call = self.slots.call_mut(slot);
                (call.phase, call.stream) = (Phase::Combined, stream.raw());
            }
            self.wait_for_call_again(stream, slot)?;
            let status = self.memory.status(slot);
            self.give_up_servers(slot, &status);
            self.clear_error(stream, &status)?;
            self.end(slot);
        }
        Ok(())
    }

    /// Kernels are launched where the client's memory is.
    fn check_device(&self, stream: &Stream) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.memory.gpu.name());
        if found == expected { Ok(()) } else { Err(DeviceError::Device { found, expected }) }
    }

    /// When `stream` is done, so is what was launched on the stream with handle `expected`.
    fn check_stream(&self, stream: &Stream, expected: u64) -> Result<(), DeviceError> {
        self.check_device(stream)?;
        let found = stream.raw();
        if found == expected { Ok(()) } else { Err(DeviceError::Stream { found, expected }) }
    }

    fn first_unreachable(&self) -> Option<(usize, u32)> {
        let model = &self.shared.model;
        let routing = &self.lane.routing;
        let live = |&rank: &u32| self.lane.has(&routing.servers[rank as usize]);
        (0..model.moe_layers.len())
            .flat_map(|layer_idx| (0..model.shape.num_experts).map(move |e| (layer_idx, e)))
            .find(|&(layer_idx, e)| !routing.replicas(layer_idx, e).iter().any(live))
    }

    fn no_replica(&self, layer_idx: usize, expert: u32, waited: Duration) -> ClientError {
        ClientError::NoReplica {
            layer: self.shared.model.moe_layers[layer_idx],
            expert,
            waited,
            detail: self.lane.routing.describe_replicas(layer_idx, expert),
        }
    }

    fn wait_for_news(&self, limit: Duration) -> Result<(), DeviceError> {
        self.lane
            .wait_for_news(limit)
            .map_err(|source| ClientError::System { op: "wait for servers", source }.into())
    }

    /// Looks whether a stream is done for as long as a layer usually takes: a sleep would add its own length
    /// to it. A GPU in software needs the processor itself.
    fn poll(&self, stream: &Stream) -> Result<(), DeviceError> {
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
    fn bound(&self) -> Duration {
        self.shared.settings.work_limit + self.shared.settings.deadline * 2 + MARGIN
    }
}

impl Drop for DeviceClient {
    fn drop(&mut self) {
        // Kernels of calls that nobody finished may run at any time later, when the caller's stream gets
        // to them: what they use stays for good, and their waits end at once.
        let is_idle = self.slots.num_outstanding() == 0 && self.replaying.is_none();
        self.lane.close();
        if is_idle {
            // SAFETY: not used after this.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
            return;
        }
        tracing::warn!(
            "a device client is dropped with calls outstanding: their memory is not freed"
        );
        for bit in 0..self.options.max_servers as u32 {
            AbortBit { word: Arc::clone(&self.memory.abort), bit }.set();
        }
        self.slots.keep_used();
        std::mem::forget(self.replaying.take());
    }
}

impl fmt::Debug for DeviceClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceClient")
            .field("gpu", &self.memory.gpu.name())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

fn elapsed_ns(start: Instant) -> u64 {
    start.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
}

const MARGIN: Duration = Duration::from_secs(5);
const SPIN: Duration = Duration::from_millis(10);

const _: () = {
    const fn sent_between_threads<T: Send>() {}
    sent_between_threads::<DeviceClient>();
    sent_between_threads::<DeviceHandle>();
    sent_between_threads::<DevicePending>();
};
