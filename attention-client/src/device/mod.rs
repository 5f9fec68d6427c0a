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

mod calls;
mod error;
mod lane;
mod launch;
mod memory;
mod options;
mod overdue;
mod repair;
mod replay;
mod room;
mod slots;
mod split;
mod tensor;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{CombineParams, DispatchParams, FrameGeometry};
use kernels::gpu::{Gpu, Prepared, Stream};
use kernels::slots::DeviceSide;
use prometheus::Registry;
use proxy::DeviceTransports;

pub use error::{DeviceBuildError, DeviceError};
pub use options::DeviceOptions;
pub use replay::{ReplayOutcome, ReplayReport};
pub use slots::{DeviceHandle, DevicePending};
pub use tensor::{DeviceInput, DeviceTensor, TensorType};

use crate::client::builder::{MoeClientBuilder, Started};
use crate::client::control::Control;
use crate::client::link::AbortBit;
use crate::client::shared::Shared;
use crate::client::{ClientModel, LayerTiming};
use lane::{Lane, Tables};
use launch::{CombineKey, DispatchKey};
use memory::Memory;
use options::geometry_of;
use slots::{Phase, Slots};
use tensor::check_out;

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
    /// News at which a call waited for a replica in vain.
    vain_wait_at: Option<u64>,
    /// Parts of a call that is larger than a frame, empty between calls.
    parts: VecDeque<DevicePending>,
    /// Links that failed in the call finished last, see [`slots::Call::failed`].
    last_failed: Vec<(usize, u64)>,
    /// The last such call's tensors, whose numbers are known to be good.
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
    /// It waits for the GPU only where an earlier call was given up, whose kernels must end first, where one whose
    /// rows nobody has asked for lies in the way of this one's, or where experts are left out: as long as what
    /// the stream has takes, and for an answer within the limits of [`finish`](Self::finish).
    ///
    /// # Safety
    /// The tensors are as large as [`DeviceInput`] says and stay as they are until the call is
    /// [finished](Self::finish), or as long as a graph with it may run. This stream and those of earlier
    /// calls are ordered, and it lives until the call is finished. One that is given up is finished in this sense
    /// when the next dispatch, or `begin_replay`, has returned without an error. A graph with the call runs between
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
        out: DeviceTensor,
    ) -> Result<DevicePending, DeviceError> {
        self.check_device(stream)?;
        check_out(out)?;
        let out = out.ptr;
        let is_recording = stream.is_capturing()?;
        let slot = self.slots.redeem(&handle, is_recording)?;
        if !is_recording {
            self.wait_for_sums()?;
        }
        let call = self.slots.call(slot);
        let (capacity, layer, is_summed) = (call.input.capacity, call.layer, call.ahead.is_some());
        if is_summed {
            self.hand_out(stream, slot, out)?;
        } else {
            self.check_rows(out, capacity)?;
            // SAFETY: the caller's promise.
            unsafe { self.launch_combine(stream, slot, out, capacity, false)? };
        }
        if is_recording {
            self.slots.release(slot);
        } else {
            let call = self.slots.call_mut(slot);
            (call.phase, call.out, call.stream) = (Phase::Combined, out, stream.raw());
            if !is_summed {
                self.memory.report(stream, slot)?;
            }
        }
        Ok(handle.into_pending(layer))
    }

    /// Waits until the call's output is complete, re-sending what a failed server did not answer. `stream` is
    /// that of its [`combine`](Self::combine). Before anything is sent again the streams of other outstanding
    /// calls are waited for, too.
    ///
    /// The wait ends: a server that is silent for the deadline counts as failed, one that shows life but does
    /// not answer within the work limit and twice the deadline as well, and a call in which nothing is
    /// answered waits for a usable replica as long as was set.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of the output is then unspecified, and the call is given up. So it is with
    /// [`DeviceError::Replaying`], when parts must be sent again while a graph may run: finish the replay first.
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
        out: DeviceTensor,
    ) -> Result<LayerTiming, DeviceError> {
        // Before the first of the kernels, not the last.
        check_out(out)?;
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
    /// [`ClientError::NoReplica`](crate::ClientError::NoReplica) that names the first expert without: at `timeout`, or at once when all
    /// its replicas have turned the client away for a reason that waiting does not change. At once, too,
    /// [`DeviceError::Seats`] when there is one, but outstanding calls use the place that it would take.
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            self.sync();
            let Some((layer_idx, expert)) = self.first_unreachable() else { return Ok(()) };
            let waited = start.elapsed();
            if waited >= timeout || self.lane.routing.is_hopeless(layer_idx, expert) {
                return Err(self.no_replica(layer_idx, expert, waited).into());
            }
            // Nobody can finish them meanwhile.
            if self.lane.is_cramped(layer_idx, expert, self.finished()) {
                let layer = self.shared.model.moe_layers[layer_idx];
                let (max_servers, num_calls) =
                    (self.options.max_servers, self.slots.num_outstanding());
                return Err(DeviceError::Seats { layer, expert, max_servers, num_calls });
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
}

impl Drop for DeviceClient {
    fn drop(&mut self) {
        // Kernels of calls that nobody finished may run at any time later, when the caller's stream gets
        // to them: what they use stays for good, and their waits end at once.
        let is_idle = self.slots.num_outstanding() == 0 && self.replaying.is_none();
        if !is_idle {
            for bit in 0..self.options.max_servers as u32 {
                AbortBit { word: Arc::clone(&self.memory.abort), bit }.set();
            }
        }
        self.lane.close();
        if is_idle {
            // SAFETY: not used after this.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
            return;
        }
        tracing::warn!(
            "a device client is dropped with calls outstanding: their memory is not freed"
        );
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

const _: () = {
    const fn sent_between_threads<T: Send>() {}
    sent_between_threads::<DeviceClient>();
    sent_between_threads::<DeviceHandle>();
    sent_between_threads::<DevicePending>();
};
