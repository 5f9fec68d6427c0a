//! Helpers for tests with expert servers in this process. [`start_server`] starts a whole server over the small
//! checkpoint of the repository.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, DType, f32_from_e4m3};
use p2p_core::backend::local;
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::wait::wait_until;
use p2p_core::{Channel, Endpoint, SlotConfig, SpinPolicy, TxFrame, WaitSet};
use protocol::{
    CombineExpect, DispatchExpect, DispatchMeta, Entry, ErrorCode, FrameGeometry, FrameId,
    ModelShape, Response, ResponseScratch, ServerTimes, TokenRef, WireDtype, decode_response,
    encode_dispatch,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_expert_server::compute::{ExpertStore, Residency};
use switchyard_expert_server::cpu::{CpuConfig, CpuPlane};
use switchyard_expert_server::{
    ClosedLink, ExpertSelection, ExpertServer, Limits, LinkId, Placement, RunningServer,
    ServerConfig, ServerMetrics, ThreadEnd,
};
use tokio::sync::oneshot;

/// Longest wait in a test. It is generous, because it ends only failures.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The trained checkpoint of the repository, or the one at `SWITCHYARD_TEST_MODEL`.
pub fn tiny_moe() -> PathBuf {
    let elsewhere = std::env::var_os("SWITCHYARD_TEST_MODEL").map(PathBuf::from);
    elsewhere.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe").into())
}

/// A random generator. Prints its seed; `SWITCHYARD_SEED` sets it.
pub fn seeded() -> StdRng {
    let given = std::env::var("SWITCHYARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random::<u64>);
    println!("SWITCHYARD_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// A whole server on a free port of the loopback interface, holding `selection` of the tiny
/// checkpoint, without a control plane unless `tweak` names one.
pub async fn start_server(
    name: &str,
    selection: ExpertSelection,
    tweak: impl FnOnce(&mut ServerConfig),
) -> RunningServer {
    let mut config = ServerConfig::new(tiny_moe(), name, Placement::Static(selection));
    config.num_threads = 1;
    tweak(&mut config);
    ExpertServer::start(config, |_| {}).await.expect("the server starts")
}

/// Sizes and identity of a model.
pub fn shape_of(checkpoint: &Checkpoint) -> ModelShape {
    let model = checkpoint.config();
    ModelShape {
        fingerprint: checkpoint.fingerprint().0,
        hidden: model.hidden as u32,
        num_layers: model.num_layers,
        num_experts: model.num_experts,
        top_k: model.top_k as u32,
    }
}

/// Routed tokens of one layer.
#[derive(Debug, Clone)]
pub struct Request {
    pub layer: u32,
    /// `[num_tokens, hidden]`.
    pub x: Vec<f32>,
    /// Experts and weights of each token.
    pub routes: Vec<Vec<(u32, f32)>>,
}

impl Request {
    /// Tokens with 1 to `top_k` distinct experts each, in random order.
    pub fn random(rng: &mut StdRng, shape: &ModelShape, num_tokens: usize) -> Self {
        let x = (0..num_tokens * shape.hidden as usize).map(|_| rng.random_range(-2.0..2.0));
        let x = x.collect();
        let routes = (0..num_tokens).map(|_| {
            let mut experts: Vec<u32> = (0..shape.num_experts).collect();
            (0..rng.random_range(1..=shape.top_k))
                .map(|_| {
                    let expert = experts.swap_remove(rng.random_range(0..experts.len()));
                    (expert, rng.random_range(-1.0..1.0))
                })
                .collect()
        });
        let routes = routes.collect();
        Self { layer: rng.random_range(0..shape.num_layers), x, routes }
    }
}

/// The correct answers, computed one token at a time in f64 from the checkpoint.
pub struct Reference {
    pub checkpoint: Arc<Checkpoint>,
    pub shape: ModelShape,
    /// True if all experts are fp8.
    pub is_fp8: bool,
    pub experts: HashMap<(u32, u32), [Vec<f32>; 3]>,
}

impl Reference {
    pub fn open() -> Self {
        Self::of(&tiny_moe())
    }

    /// The reference of another checkpoint.
    pub fn of(dir: &Path) -> Self {
        let checkpoint = Arc::new(Checkpoint::open(dir).expect("the checkpoint opens"));
        let shape = shape_of(&checkpoint);
        let mut is_fp8 = true;
        let mut experts = HashMap::new();
        for layer in checkpoint.config().moe_layers() {
            for expert in 0..shape.num_experts {
                let tensors = checkpoint.expert(layer, expert).expect("the expert is there");
                let views = [tensors.gate, tensors.up, tensors.down];
                is_fp8 &= views.iter().all(|view| view.dtype() == DType::F8E4m3);
                experts.insert((layer, expert), views.map(|view| view.to_f32()));
            }
        }
        Self { checkpoint, shape, is_fp8, experts }
    }

    /// Rows `[num_tokens, hidden]` for `request` after its conversion to `dtype`.
    pub fn forward(&self, request: &Request, dtype: WireDtype) -> Vec<f64> {
        let hidden = self.shape.hidden as usize;
        let mut out = Vec::with_capacity(request.x.len());
        for (x, routes) in request.x.chunks_exact(hidden).zip(&request.routes) {
            let x = after_trip(x, dtype);
            let mut row = vec![0f64; hidden];
            for &(expert, weight) in routes {
                let [gate, up, down] = &self.experts[&(request.layer, expert)];
                let inner: Vec<f64> = gate
                    .chunks_exact(hidden)
                    .zip(up.chunks_exact(hidden))
                    .map(|(gate, up)| {
                        let (g, u) = (dot(gate, &x), dot(up, &x));
                        g / (1.0 + (-g).exp()) * u
                    })
                    .collect();
                for (out, down) in row.iter_mut().zip(down.chunks_exact(inner.len())) {
                    *out += f64::from(weight) * dot(down, &inner);
                }
            }
            out.extend(row);
        }
        out
    }

    /// Asserts that `rows` are the answer to `request` within the precision of the wire types.
    pub fn check(
        &self,
        request: &Request,
        dtype: WireDtype,
        response_dtype: WireDtype,
        rows: &[f32],
    ) {
        let expected = self.forward(request, dtype);
        assert_eq!(rows.len(), expected.len(), "rows of another size");
        let tolerance = match response_dtype {
            WireDtype::F32 => 2e-5,
            WireDtype::F16 => 1e-3,
            WireDtype::Bf16 => 5e-3,
            WireDtype::F8E4m3 => 0.04,
        };
        // Rounding may choose the code next to the exact one.
        let tolerance = tolerance + if dtype == WireDtype::F8E4m3 { 0.01 } else { 0.0 };
        let hidden = self.shape.hidden as usize;
        for (token, (row, expected)) in
            rows.chunks_exact(hidden).zip(expected.chunks_exact(hidden)).enumerate()
        {
            let largest = expected.iter().fold(1e-30f64, |max, v| max.max(v.abs()));
            for (at, (found, expected)) in row.iter().zip(expected).enumerate() {
                let error = (f64::from(*found) - expected).abs() / largest;
                assert!(
                    error <= tolerance,
                    "layer {} token {token} value {at}: found {found}, expected {expected}, {dtype} to {response_dtype}",
                    request.layer
                );
            }
        }
    }
}

pub fn dot<V: Copy + Into<f64>>(a: &[f32], b: &[V]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * (*b).into()).sum()
}

/// A row after its conversion to `dtype`, by independent arithmetic.
fn after_trip(row: &[f32], dtype: WireDtype) -> Vec<f64> {
    match dtype {
        WireDtype::F32 => row.iter().map(|&v| f64::from(v)).collect(),
        WireDtype::F16 => row.iter().map(|&v| half::f16::from_f32(v).to_f64()).collect(),
        WireDtype::Bf16 => row.iter().map(|&v| half::bf16::from_f32(v).to_f64()).collect(),
        WireDtype::F8E4m3 => row
            .chunks(128)
            .flat_map(|block| {
                let largest = block.iter().fold(0f32, |max, v| max.max(v.abs()));
                let scale = f64::from(largest / 448.0);
                block.iter().map(move |&v| nearest_e4m3(f64::from(v) / scale) * scale)
            })
            .collect(),
    }
}

fn nearest_e4m3(value: f64) -> f64 {
    let codes = (0..=255u8).map(|code| f64::from(f32_from_e4m3(code))).filter(|v| !v.is_nan());
    codes.min_by(|a, b| (a - value).abs().total_cmp(&(b - value).abs())).unwrap_or(0.0)
}

/// A data thread over the tiny checkpoint, for links within this process.
pub struct Rig {
    pub data: CpuPlane<MappedEndpoint>,
    pub end: ThreadEnd,
    pub metrics: ServerMetrics,
    pub shape: ModelShape,
    pub slot: SlotConfig,
}

impl Rig {
    /// Loads the experts for which `is_held` returns true.
    pub fn start(
        reference: &Reference,
        slot: SlotConfig,
        limits: Limits,
        is_held: impl Fn(u32, u32) -> bool,
    ) -> Self {
        let layers = reference.checkpoint.config().moe_layers().into_iter();
        let experts = layers.map(|layer| {
            let experts = (0..reference.shape.num_experts).filter(|&expert| is_held(layer, expert));
            (layer, experts.collect())
        });
        let store = ExpertStore::load(
            Arc::clone(&reference.checkpoint),
            &experts.collect(),
            Residency::Mapped,
            &mut |_| {},
        )
        .expect("the experts load");
        let config = CpuConfig {
            num_threads: 2,
            cpus: Vec::new(),
            limits,
            spin: SpinPolicy { spin: Duration::from_micros(20) },
            metrics_by_layer: true,
        };
        let metrics = ServerMetrics::new(prometheus::Registry::new()).expect("metrics register");
        let (data, end) = CpuPlane::start(Arc::new(store), config, metrics.clone())
            .expect("the data thread starts");
        Self { data, end, metrics, shape: reference.shape, slot }
    }

    /// A client whose channel is not attached to the data thread, and the server's side of the channel.
    pub fn unattached(
        &self,
        client_id: u64,
        dtype: WireDtype,
        response_dtype: WireDtype,
    ) -> (TestClient<MappedEndpoint>, Channel<MappedEndpoint>) {
        let (near, far) = local::pair(self.slot).expect("a pair of channels");
        (TestClient::new(near, self.shape, client_id, 1, dtype, response_dtype), far)
    }

    /// A connected client, with the end of its link.
    pub fn client(
        &self,
        client_id: u64,
        dtype: WireDtype,
        response_dtype: WireDtype,
    ) -> (TestClient<MappedEndpoint>, LinkId, oneshot::Receiver<ClosedLink<Channel<MappedEndpoint>>>)
    {
        let (client, channel) = self.unattached(client_id, dtype, response_dtype);
        let (id, end) = self.data.attach(channel, client.expected_by_server());
        (client, id, end)
    }

    /// The value of a metric by its name with labels, as `/metrics` prints it.
    pub fn metric(&self, name: &str) -> f64 {
        metric(&self.metrics, name)
    }

    /// Stops the thread and asserts that it ended well.
    pub fn stop(self) {
        self.data.stop();
        let mut end = self.end;
        let mut ended = None;
        eventually("the thread reports its end", || {
            ended = end.try_recv().ok();
            ended.is_some()
        });
        ended.expect("an end").expect("a stop without an error");
    }
}

/// The value of a metric by its name with labels, as `/metrics` prints it.
pub fn metric(metrics: &ServerMetrics, name: &str) -> f64 {
    let text = metrics.render().expect("metrics render");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no metric {name} in\n{text}")).parse().expect("a number")
}

/// Polls `condition` until it holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for the end of a link.
pub fn closed<S>(mut end: oneshot::Receiver<ClosedLink<S>>) -> ClosedLink<S> {
    let mut ended = None;
    eventually("the link's end", || {
        ended = end.try_recv().ok();
        ended.is_some()
    });
    ended.expect("the link's end")
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    pub rows: Result<Vec<f32>, (ErrorCode, String)>,
    pub times: ServerTimes,
}

/// A plain client of one server: frames out, frames in, in order.
pub struct TestClient<E: Endpoint> {
    pub channel: Channel<E>,
    pub geometry: FrameGeometry,
    shape: ModelShape,
    client_id: u64,
    generation: u32,
    sequence: u64,
    scratch: ResponseScratch,
    wait: WaitSet,
}

impl<E: Endpoint> TestClient<E> {
    pub fn new(
        channel: Channel<E>,
        shape: ModelShape,
        client_id: u64,
        generation: u32,
        dtype: WireDtype,
        response_dtype: WireDtype,
    ) -> Self {
        let geometry = FrameGeometry::new(
            channel.layout().frame_bytes(),
            shape.hidden as usize,
            dtype,
            response_dtype,
            shape.top_k as usize,
        )
        .expect("a token fits");
        let wait = WaitSet::new().expect("a wait set");
        wait.attach(channel.endpoint()).expect("the channel can be waited for");
        Self {
            channel,
            geometry,
            shape,
            client_id,
            generation,
            sequence: 0,
            scratch: ResponseScratch::default(),
            wait,
        }
    }

    /// The properties that a server must require of this client's frames.
    pub fn expected_by_server(&self) -> DispatchExpect {
        DispatchExpect {
            client_id: self.client_id,
            generation: self.generation,
            hidden: self.geometry.hidden(),
            num_layers: self.shape.num_layers,
            num_experts: self.shape.num_experts,
            max_tokens: self.geometry.max_tokens(),
            top_k: self.geometry.top_k(),
            dtype: self.geometry.dtype(),
            response_dtype: self.geometry.response_dtype(),
        }
    }

    pub fn dtypes(&self) -> (WireDtype, WireDtype) {
        (self.geometry.dtype(), self.geometry.response_dtype())
    }

    /// Writes `request` into `frame` without publishing it. Returns its sequence and its bytes.
    pub fn write(&mut self, frame: &TxFrame, request: &Request) -> (u64, usize) {
        let sequence = self.sequence;
        self.sequence += 1;
        let meta = DispatchMeta {
            id: FrameId {
                epoch: 1,
                client_id: self.client_id,
                generation: self.generation,
                sequence,
                layer: request.layer,
                frame_idx: 0,
                num_frames: 1,
            },
            hidden: self.geometry.hidden(),
            dtype: self.geometry.dtype(),
            response_dtype: self.geometry.response_dtype(),
            payload_checksum: sequence.is_multiple_of(2),
        };
        let (mut tokens, mut entries) = (Vec::new(), Vec::new());
        for (token, routes) in request.routes.iter().enumerate() {
            let (entry_begin, entry_count) = (entries.len() as u32, routes.len() as u32);
            tokens.push(TokenRef { token: token as u32, entry_begin, entry_count });
            entries.extend(routes.iter().map(|&(expert, weight)| Entry { expert, weight }));
        }
        let mut view = self.channel.write_view(frame);
        let used_bytes =
            encode_dispatch(&mut view, &meta, &request.x, &tokens, &entries).expect("it fits");
        (sequence, used_bytes)
    }

    /// Publishes `request` if there is credit. Returns its sequence.
    pub fn try_send(&mut self, request: &Request) -> Option<u64> {
        let frame = self.channel.try_reserve().expect("sound counters")?;
        let (sequence, used_bytes) = self.write(&frame, request);
        self.channel.publish(frame, used_bytes).expect("published");
        Some(sequence)
    }

    /// Publishes `request` once there is credit.
    pub fn send(&mut self, request: &Request) -> u64 {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(sequence) = self.try_send(request) {
                return sequence;
            }
            let Self { channel, wait, .. } = self;
            let news = wait_until(
                wait,
                SpinPolicy::default(),
                deadline,
                || channel.has_news().then_some(()),
                |on| if on { channel.arm() } else { channel.disarm() },
            );
            assert!(news.expect("waiting works").is_some(), "no credit in time");
            if self.channel.has_frame() {
                // The wait cannot tell credit from an answer. The sleep avoids spinning on the answer.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Waits for the answer to the request with `sequence` and checks that it is the next one.
    pub fn receive(&mut self, sequence: u64, request: &Request) -> Reply {
        self.receive_within(sequence, request, PATIENCE).expect("an answer in time")
    }

    /// Like [`receive`](Self::receive), or `None` without an answer within `bound`.
    pub fn receive_within(
        &mut self,
        sequence: u64,
        request: &Request,
        bound: Duration,
    ) -> Option<Reply> {
        let Self { channel, wait, .. } = self;
        let arrived = wait_until(
            wait,
            SpinPolicy::default(),
            Instant::now() + bound,
            || channel.has_frame().then_some(()),
            |on| if on { channel.arm() } else { channel.disarm() },
        );
        arrived.expect("waiting works")?;
        let frame = self.channel.try_next().expect("sound counters").expect("a frame");
        let expect = CombineExpect {
            client_id: self.client_id,
            generation: self.generation,
            sequence,
            layer: request.layer,
            frame_idx: 0,
            num_tokens: request.routes.len(),
            hidden: self.geometry.hidden(),
            dtype: self.geometry.response_dtype(),
        };
        let view = self.channel.view(&frame);
        let reply = match decode_response(view, &expect, &mut self.scratch) {
            Ok(Response::Rows(mut rows)) => {
                let num_rows = rows.num_rows();
                // Poison shows values that are not written.
                let mut out = vec![f32::NAN; num_rows * rows.hidden()];
                rows.read_rows_f32(0..num_rows, &mut out).expect("rows are sound");
                Reply { times: rows.server_times(), rows: Ok(out) }
            }
            Ok(Response::Error(error)) => Reply {
                rows: Err((error.code, error.message.to_owned())),
                times: ServerTimes::default(),
            },
            Err(error) => panic!("a response that is not sound: {error}"),
        };
        self.channel.release().expect("released");
        Some(reply)
    }

    /// Sends `request`, waits for its answer and checks it.
    pub fn round_trip(&mut self, request: &Request, reference: &Reference) -> ServerTimes {
        let sequence = self.send(request);
        let reply = self.receive(sequence, request);
        let (dtype, response_dtype) = self.dtypes();
        reference.check(request, dtype, response_dtype, &reply.rows.expect("rows"));
        reply.times
    }
}
