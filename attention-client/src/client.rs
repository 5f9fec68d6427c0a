//! The CPU client: tokens out to the servers that hold their experts, weighted sums back, retries on failure.
//!
//! ```text
//!   caller ── dispatch ──▶ lane ── link ═══ slot pair ═══▶ server 0
//!          ◀── combine ──       └─ link ═══ slot pair ═══▶ server 1
//!                                    ▲
//!   control task ── placement, connecting, liveness ───────┘
//! ```
//!
//! A *lane* has a link to every server and serves one call at a time. So a call takes no lock and allocates nothing
//! once its buffers have grown. Calls that overlap use different lanes. The *control task* follows the placement,
//! connects lanes with servers, watches the connections and reports failures.
//!
//! A link fails when its connection closes or its transport reports an error. It also fails when the peer's flags or
//! answers are impossible, or when the peer is silent for the deadline with answers outstanding. The client never reads
//! its slots again, resends its unanswered tokens to replicas, and finishes the layer. Experts keep no state, so a
//! retry is always safe. Answers count only if they match an open frame, so none counts twice.
//!
//! Partial sums are added in the order of the placement's servers, and a caller that is alone gets the same grouping
//! every time. Its results are reproducible to the bit as long as the placement stays the same and the client is
//! connected with all of its servers. [`MoeClient::wait_ready`] waits for that. Four events change bits. A server
//! comes, goes or is silent. A server is slow, so that it gets less or a frame is hedged. Calls overlap, because
//! replicas are chosen by load. Replicas have different kinds of processors or GPUs. Sums then have the same terms in
//! other groups. They differ by the rounding of f32, and of the wire format of partial sums if that is not f32.
//!
//! Slow servers get less, and late frames are sent to other replicas too: `fleet::pace` and `client::hedge` say how.
//! [`MoeClientBuilder::hedge_budget`] turns that off, and with it the second of these events.
//!
//! This module does not know how experts are computed, who decides about placements, or what a token means.

mod builder;
mod call;
mod exchange;
mod hedge;
mod lane;
mod plan;
mod pool;
#[cfg(feature = "failpoints")]
mod sabotage;
#[cfg(test)]
mod stragglers;
mod trace;
mod warm_up;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p_core::WaitSet;
use prometheus::Registry;
use telemetry::{Recorder, TraceContext};

pub use builder::MoeClientBuilder;

use crate::backend::{BackendError, ExpertBackend};
use crate::error::ClientError;
use crate::fleet::Fleet;
use crate::fleet::command::Command;
use crate::fleet::control::Control;
use crate::fleet::lane_port::{Gate, LaneEvents, LanePort};
use crate::fleet::shared::Shared;
use crate::model::ClientModel;
use crate::timing::{LayerReport, LayerTiming, ServerTiming, elapsed_ns};
use lane::Lane;
use plan::Pair;
use pool::{Pool, PoolEntry};

/// A client of the expert service, with tensors in host memory.
///
/// Clones share everything and are cheap. Any thread may call, and a call may end on another thread than it began
/// on.
#[derive(Debug, Clone)]
pub struct MoeClient {
    inner: Arc<Inner>,
}

/// Function that a blocked call asks whether to end: between sleeps, from every few milliseconds on, and never while it
/// polls. It runs on the caller's thread.
pub type Cancel<'f> = &'f dyn Fn() -> bool;

/// A dispatched layer. Pass it to [`MoeClient::combine`]. Dropping it abandons the call.
#[must_use = "dropping a handle abandons the call"]
pub struct Handle<'x> {
    client: MoeClient,
    /// `None` when every entry of the call is masked.
    lane: Option<Box<Lane>>,
    x: &'x [f32],
    layer: u32,
    num_tokens: usize,
    began: Instant,
}

#[derive(Debug)]
struct Inner {
    // Dropped in this order: lanes first, so that connectors see the end of their links.
    lanes: Pool<Box<Lane>>,
    _control: Control,
    shared: Arc<Shared>,
    first_client_id: u64,
    registry: Registry,
}

impl MoeClient {
    /// Settings for a client of the experts of `model`.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use switchyard_attention_client::{ClientModel, MoeClient, WireDtype};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (url, token) = ("http://127.0.0.1:7070", Some("secret".to_owned()));
    /// let model = ClientModel::fetch(url, token.clone(), 24, Duration::from_secs(5))?;
    /// let client = MoeClient::builder(model)
    ///     .control_plane(url, token.clone())
    ///     .secret(token)
    ///     .wire_dtype(WireDtype::Bf16)
    ///     .build()?;
    /// client.wait_ready(Duration::from_secs(30))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(model: ClientModel) -> MoeClientBuilder {
        MoeClientBuilder::new(model)
    }

    /// Sends the tokens of one layer to the servers that hold their experts, and returns without waiting for
    /// answers. [`combine`](Self::combine) sends tokens that do not fit into the slots yet.
    ///
    /// `x` is `[num_tokens, hidden]`. `topk_idx` and `topk_weights` are `[num_tokens, k]`, where `k` is at most the
    /// model's top-k. An index of -1 masks its entry. An expert that occurs twice in a row counts with both weights.
    /// Zero tokens are no error and cause no traffic.
    ///
    /// Each outstanding handle takes a lane. Without a free lane the call blocks for `replica_wait` at most. A new
    /// lane blocks until every server was tried once, for as long at most.
    ///
    /// ```no_run
    /// # use switchyard_attention_client::{ClientError, MoeClient};
    /// # fn shared_expert(_: &[f32]) {}
    /// fn moe_layer(client: &MoeClient, layer: u32, x: &[f32]) -> Result<Vec<f32>, ClientError> {
    ///     let num_tokens = x.len() / client.hidden();
    ///     let (topk_idx, topk_weights) = (vec![5; num_tokens], vec![1.0; num_tokens]); // top-1
    ///     let handle = client.dispatch(layer, x, &topk_idx, &topk_weights)?;
    ///     shared_expert(x); // while servers compute
    ///     let mut out = vec![0.0; x.len()];
    ///     client.combine(handle, &mut out)?;
    ///     Ok(out)
    /// }
    /// ```
    ///
    /// # Errors
    /// [`ClientError`]; nothing is outstanding then.
    pub fn dispatch<'x>(
        &self,
        layer: u32,
        x: &'x [f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
    ) -> Result<Handle<'x>, ClientError> {
        self.dispatch_unless(layer, x, topk_idx, topk_weights, &never)
    }

    /// As [`dispatch`](Self::dispatch), until `cancelled` returns true.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch), or [`ClientError::Cancelled`].
    pub fn dispatch_unless<'x>(
        &self,
        layer: u32,
        x: &'x [f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        cancelled: Cancel<'_>,
    ) -> Result<Handle<'x>, ClientError> {
        let start = Instant::now();
        let result = self.dispatch_inner(start, layer, x, topk_idx, topk_weights, cancelled);
        if result.is_err() {
            self.inner.shared.metrics.requests_failed.inc();
        }
        result
    }

    /// Waits for the answers to `handle` and writes the sums to `out` `[num_tokens, hidden]`.
    ///
    /// The wait is bounded. A server that is silent for the deadline counts as failed. So does a server that neither
    /// takes nor answers a frame within the work limit. A server that fails or refuses repeatedly gets a growing
    /// backoff. A call without any answer waits for a usable replica for `replica_wait`.
    ///
    /// ```no_run
    /// # use switchyard_attention_client::{ClientError, Handle, MoeClient};
    /// fn finish(client: &MoeClient, handle: Handle<'_>) -> Result<Vec<f32>, ClientError> {
    ///     let mut out = vec![0.0; handle.num_tokens() * client.hidden()];
    ///     let timing = client.combine(handle, &mut out)?;
    ///     if timing.failovers > 0 {
    ///         eprintln!("failed servers cost {} us", timing.stall_ns / 1000);
    ///     }
    ///     Ok(out)
    /// }
    /// ```
    ///
    /// # Errors
    /// [`ClientError`]; the content of `out` is then unspecified.
    pub fn combine(&self, handle: Handle<'_>, out: &mut [f32]) -> Result<LayerTiming, ClientError> {
        self.combine_unless(handle, out, &never)
    }

    /// As [`combine`](Self::combine), until `cancelled` returns true. The call is then abandoned.
    ///
    /// # Errors
    /// As [`combine`](Self::combine), or [`ClientError::Cancelled`].
    pub fn combine_unless(
        &self,
        handle: Handle<'_>,
        out: &mut [f32],
        cancelled: Cancel<'_>,
    ) -> Result<LayerTiming, ClientError> {
        self.combine_reported(handle, out, None, cancelled)
    }

    /// As [`combine_unless`](Self::combine_unless). Replaces the content of `servers` by the part of each server that
    /// the call contacted, in the order of their first frames.
    ///
    /// # Errors
    /// As [`combine_unless`](Self::combine_unless); `servers` is then unchanged.
    pub fn combine_reported(
        &self,
        mut handle: Handle<'_>,
        out: &mut [f32],
        servers: Option<&mut Vec<ServerTiming>>,
        cancelled: Cancel<'_>,
    ) -> Result<LayerTiming, ClientError> {
        let shared = &self.inner.shared;
        let result = handle.finish(out, servers, cancelled);
        match &result {
            Ok((timing, num_pairs, epoch)) => {
                shared.metrics.observe(handle.num_tokens, *num_pairs, timing);
                if let Some(observer) = &shared.observer {
                    observer(&LayerReport {
                        layer: handle.layer,
                        num_tokens: handle.num_tokens,
                        epoch: *epoch,
                        timing: *timing,
                    });
                }
            }
            Err(_) => shared.metrics.requests_failed.inc(),
        }
        result.map(|(timing, ..)| timing)
    }

    /// [`dispatch`](Self::dispatch) and [`combine`](Self::combine) in one.
    ///
    /// ```no_run
    /// # use switchyard_attention_client::{ClientError, MoeClient};
    /// fn one_token(client: &MoeClient, layer: u32, x: &[f32]) -> Result<Vec<f32>, ClientError> {
    ///     let mut out = vec![0.0; client.hidden()];
    ///     // Experts 3 and 7; the third entry is masked.
    ///     client.forward(layer, x, &[3, 7, -1], &[0.6, 0.4, 0.0], &mut out)?;
    ///     Ok(out)
    /// }
    /// ```
    ///
    /// # Errors
    /// [`ClientError`]; the content of `out` is then unspecified.
    pub fn forward(
        &self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<LayerTiming, ClientError> {
        let handle = self.dispatch(layer, x, topk_idx, topk_weights)?;
        self.combine(handle, out)
    }

    /// Waits until a lane is connected with a live replica of every expert, for `timeout` at most. Waits up to one
    /// second more for servers of the placement that were not tried yet, so that the first call chooses among all
    /// replicas. A server of this host that was killed before this call does not count as live. The client learns of
    /// the death of another host's server as soon as the connection ends.
    ///
    /// # Errors
    /// [`ClientError::NoReplica`] names the first expert without a replica: at `timeout`, or at once when all its
    /// replicas refuse this client until a setting changes. Its text says what is known about each replica.
    pub fn wait_ready(&self, timeout: Duration) -> Result<(), ClientError> {
        self.wait_ready_unless(timeout, &never)
    }

    /// As [`wait_ready`](Self::wait_ready), until `cancelled` returns true.
    ///
    /// # Errors
    /// As [`wait_ready`](Self::wait_ready), or [`ClientError::Cancelled`].
    pub fn wait_ready_unless(
        &self,
        timeout: Duration,
        cancelled: Cancel<'_>,
    ) -> Result<(), ClientError> {
        let start = Instant::now();
        let shared = &self.inner.shared;
        let mut lane = self.take_lane(start, cancelled)?;
        let mut reachable_at = None;
        let result = loop {
            if cancelled() {
                break Err(ClientError::Cancelled);
            }
            // Before the lane takes new links, so that a server that was tried has its link afterwards.
            let tried = (lane.has_tried_all(), lane.routing.epoch);
            lane.sync(shared);
            let has_tried_all = tried == (true, lane.routing.epoch);
            let waited = start.elapsed();
            let Some((layer_idx, expert)) = self.first_unreachable(&lane) else {
                let reachable_at = *reachable_at.get_or_insert(waited);
                let limit = timeout.min(reachable_at + MAX_SETTLE);
                if has_tried_all || waited >= limit {
                    // A server that was killed before this call must not count.
                    if lane.fail_closed_now(shared, POLL) {
                        continue;
                    }
                    break Ok(());
                }
                if let Err(source) = lane.wait.block((limit - waited).min(POLL)) {
                    break Err(ClientError::System { op: "wait for servers", source });
                }
                continue;
            };
            if waited >= timeout || lane.routing.is_hopeless(layer_idx, expert) {
                break Err(ClientError::NoReplica {
                    layer: shared.model.moe_layers[layer_idx],
                    expert,
                    waited,
                    detail: lane.routing.describe_replicas(layer_idx, expert),
                });
            }
            if let Err(source) = lane.wait.block((timeout - waited).min(POLL)) {
                break Err(ClientError::System { op: "wait for servers", source });
            }
        };
        self.inner.return_lane(lane);
        result
    }

    /// The model that this client asks experts of.
    #[must_use]
    pub fn model(&self) -> &ClientModel {
        &self.inner.shared.model
    }

    /// Values per token.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.inner.shared.geometry.hidden()
    }

    /// Epoch of the placement in force; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.inner.shared.routing.load().epoch
    }

    /// Names of the servers that hold an expert, by the placement in force. Empty if there is no such layer or expert.
    #[must_use]
    pub fn replicas(&self, layer: u32, expert: u32) -> Vec<String> {
        self.inner.shared.replicas(layer, expert)
    }

    /// The registry with the client's metrics. The client binds no port: the engine exports them.
    ///
    /// ```no_run
    /// # use switchyard_attention_client::MoeClient;
    /// use switchyard_attention_client::prometheus::TextEncoder;
    ///
    /// fn metrics_page(client: &MoeClient) -> Result<String, Box<dyn std::error::Error>> {
    ///     Ok(TextEncoder::new().encode_to_string(&client.registry().gather())?)
    /// }
    /// ```
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.inner.registry
    }

    /// The metrics as OpenMetrics text, with the trace ids of sampled calls as exemplars. Serve it with the content type
    /// [`telemetry::openmetrics::CONTENT_TYPE`].
    #[must_use]
    pub fn openmetrics(&self) -> String {
        let exemplars = self.inner.shared.recorder.as_ref().map(Recorder::exemplars);
        telemetry::openmetrics::encode(&self.inner.registry.gather(), exemplars)
    }

    fn new(inner: Inner) -> Self {
        Self { inner: Arc::new(inner) }
    }

    fn dispatch_inner<'x>(
        &self,
        start: Instant,
        layer: u32,
        x: &'x [f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        cancelled: Cancel<'_>,
    ) -> Result<Handle<'x>, ClientError> {
        let shared = &self.inner.shared;
        let num_tokens = self.check(x, topk_idx, topk_weights)?;
        let layer_idx = self.layer_idx(layer)?;
        let mut handle =
            Handle { client: self.clone(), lane: None, x, layer, num_tokens, began: start };
        if topk_idx.iter().all(|&expert| expert == -1) {
            return Ok(handle);
        }
        let lane = handle.lane.insert(self.take_lane(start, cancelled)?);
        let num_experts = shared.model.shape.num_experts as usize;
        lane.call.begin(layer, layer_idx, num_tokens, num_experts);
        lane.call.is_traced = lane.begin_sequences(shared.recorder.as_ref());
        let k = topk_idx.len() / num_tokens;
        for (position, (&expert, &weight)) in topk_idx.iter().zip(topk_weights).enumerate() {
            if let Ok(expert) = u32::try_from(expert) {
                lane.call.pairs.push(Pair { token: (position / k) as u32, expert, weight });
            }
        }
        lane.begin_call(shared, x)?;
        lane.call.timing.dispatch_ns = elapsed_ns(start);
        Ok(handle)
    }

    /// Checks the shapes and values of a call. Returns the number of tokens.
    fn check(
        &self,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
    ) -> Result<usize, ClientError> {
        let shape = &self.inner.shared.model.shape;
        let hidden = self.hidden();
        let length = |what, found, expected: String| ClientError::Length { what, found, expected };
        let num_tokens = x.len() / hidden;
        if !x.len().is_multiple_of(hidden) || u32::try_from(x.len()).is_err() {
            let expected = format!("a multiple of the hidden size {hidden}, below 2^32");
            return Err(length("x", x.len(), expected));
        }
        if topk_weights.len() != topk_idx.len() {
            let expected = format!("as many as topk_idx, {}", topk_idx.len());
            return Err(length("topk_weights", topk_weights.len(), expected));
        }
        let k = topk_idx.len().checked_div(num_tokens).unwrap_or(0);
        if k * num_tokens != topk_idx.len() || k > shape.top_k as usize {
            let expected = format!(
                "a multiple of the {num_tokens} tokens, with at most {} for each",
                shape.top_k
            );
            return Err(length("topk_idx", topk_idx.len(), expected));
        }
        for (position, (&found, &weight)) in topk_idx.iter().zip(topk_weights).enumerate() {
            if found == -1 {
                continue;
            }
            let token = position / k;
            if u32::try_from(found).map_or(true, |expert| expert >= shape.num_experts) {
                let num_experts = shape.num_experts;
                return Err(ClientError::ExpertIndex { token, found, num_experts });
            }
            if !weight.is_finite() {
                return Err(ClientError::Weight { token, found: weight });
            }
        }
        Ok(num_tokens)
    }

    fn layer_idx(&self, layer: u32) -> Result<usize, ClientError> {
        self.inner.shared.layer_idx_of(layer)
    }

    fn take_lane(&self, start: Instant, cancelled: Cancel<'_>) -> Result<Box<Lane>, ClientError> {
        let shared = &self.inner.shared;
        let lanes = &self.inner.lanes;
        let lane = match lanes.take(start + shared.settings.replica_wait, cancelled) {
            PoolEntry::Free(lane) => lane,
            PoolEntry::Cancelled => return Err(ClientError::Cancelled),
            PoolEntry::MayCreate(id) => match self.make_lane(id, cancelled) {
                Ok(lane) => lane,
                Err(source) => {
                    lanes.not_created(id);
                    return Err(ClientError::System { op: "make a lane", source });
                }
            },
            PoolEntry::TimedOut => {
                return Err(ClientError::LanesExhausted {
                    max_lanes: lanes.capacity(),
                    waited: start.elapsed(),
                });
            }
        };
        shared.metrics.lanes_busy.inc();
        Ok(lane)
    }

    /// Makes a lane and waits until every server was tried once, so that the first call can choose among all
    /// replicas.
    fn make_lane(&self, id: usize, cancelled: Cancel<'_>) -> std::io::Result<Box<Lane>> {
        let shared = &self.inner.shared;
        let wait = WaitSet::new()?;
        let events = Arc::new(LaneEvents::new(wait.kicker()));
        let gate = Arc::new(Gate::closed());
        let client_id = self.inner.first_client_id.wrapping_add(id as u64);
        let port = LanePort { id, client_id, events: Arc::clone(&events), gate: Arc::clone(&gate) };
        let lane = Box::new(Lane::new(id, client_id, wait, events, shared.routing.load_full()));
        // Fails only when the control task is gone. Then no server is ever live.
        let _ = shared.commands.send(Command::AddLane(port));
        if let Err(error) = gate.wait_open(&lane.wait, shared.settings.replica_wait, cancelled) {
            // No harm: the first call waits for its servers itself.
            tracing::warn!(%error, "cannot wait for the servers of a new lane");
        }
        shared.metrics.lanes.set(self.inner.lanes.created() as i64);
        Ok(lane)
    }

    /// The first (MoE layer, expert) without a replica that `lane` can reach.
    fn first_unreachable(&self, lane: &Lane) -> Option<(usize, u32)> {
        let model = &self.inner.shared.model;
        let live = |&rank: &u32| lane.live_link(&lane.routing.servers[rank as usize]).is_some();
        (0..model.moe_layers.len())
            .flat_map(|layer_idx| (0..model.shape.num_experts).map(move |e| (layer_idx, e)))
            .find(|&(layer_idx, e)| !lane.routing.replicas(layer_idx, e).iter().any(live))
    }
}

impl Handle<'_> {
    /// Tokens of the call.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Puts the call into a trace of the caller. If that trace is sampled, the client records the call in it, whether
    /// or not the call is in the client's own sample. Has no effect without [`MoeClientBuilder::recorder`].
    pub fn set_trace_context(&mut self, context: TraceContext) {
        let has_recorder = self.client.inner.shared.recorder.is_some();
        if let Some(lane) = self.lane.as_mut().filter(|_| has_recorder) {
            lane.call.context = Some(context);
            lane.call.is_traced |= context.is_sampled;
        }
    }

    /// Returns the call's timing, number of pairs and epoch.
    fn finish(
        &mut self,
        out: &mut [f32],
        servers: Option<&mut Vec<ServerTiming>>,
        cancelled: Cancel<'_>,
    ) -> Result<(LayerTiming, u64, u64), ClientError> {
        let shared = Arc::clone(&self.client.inner.shared);
        let expected = self.num_tokens * shared.geometry.hidden();
        if out.len() != expected {
            return Err(ClientError::Length {
                what: "out",
                found: out.len(),
                expected: format!("{expected}, as many as x"),
            });
        }
        let Some(lane) = &mut self.lane else {
            out.fill(0.0);
            if let Some(servers) = servers {
                servers.clear();
            }
            return Ok((LayerTiming::default(), 0, self.client.epoch()));
        };
        let combining = lane.call.is_traced.then(Instant::now);
        let result = lane.finish_call(&shared, self.x, out, cancelled);
        if let Some(combining) = combining {
            let is_ok = result.is_ok();
            trace::record_call(&shared, &lane.call, lane.client_id, self.began, combining, is_ok);
        }
        shared.metrics.resent_pairs.inc_by(lane.call.timing.resent_pairs);
        result?;
        if let Some(servers) = servers {
            servers.clear();
            servers.extend(lane.call.servers.iter().map(|part| part.timing.clone()));
        }
        let finished = (lane.call.timing, lane.call.pairs.len() as u64, lane.routing.epoch);
        if let Some(lane) = self.lane.take() {
            self.client.inner.return_lane(lane);
        }
        Ok(finished)
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if let Some(mut lane) = self.lane.take() {
            lane.abandon_call(&self.client.inner.shared);
            self.client.inner.return_lane(lane);
        }
    }
}

impl fmt::Debug for Handle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle")
            .field("layer", &self.layer)
            .field("num_tokens", &self.num_tokens)
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn new(fleet: Fleet, max_lanes: usize) -> Self {
        let Fleet { shared, control, registry } = fleet;
        // Servers know each lane by an identity of its own. The low 16 bits number the lanes.
        let first_client_id = rand::random::<u64>() & !0xffff;
        Self { lanes: Pool::new(max_lanes), _control: control, shared, first_client_id, registry }
    }

    fn return_lane(&self, lane: Box<Lane>) {
        self.shared.metrics.lanes_busy.dec();
        self.lanes.put(lane);
    }
}

impl ExpertBackend for MoeClient {
    fn forward(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        Self::forward(self, layer, x, topk_idx, topk_weights, out)
            .map(|_| ())
            .map_err(|error| BackendError::new(layer, error))
    }
}

/// The [`Cancel`] of calls that only time ends.
fn never() -> bool {
    false
}

/// How long [`MoeClient::wait_ready`] waits for the rest of the servers once every expert has a replica.
const MAX_SETTLE: Duration = Duration::from_secs(1);
/// How often a waiter checks on its own, in case a wake-up is lost.
const POLL: Duration = Duration::from_millis(20);

const _: () = {
    const fn shared_between_threads<T: Send + Sync>() {}
    const fn sent_between_threads<T: Send>() {}
    shared_between_threads::<MoeClient>();
    sent_between_threads::<Handle<'static>>();
};
