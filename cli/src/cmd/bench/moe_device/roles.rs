//! What processes, or threads, of the benchmark do: serve, or call.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use attention_client::{ClientModel, DeviceClient, DeviceOptions, LayerTiming, MoeClient};
use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::device::{BatchObserver, BatchReport, DeviceOptions as ServerDevice};
use expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};
use kernels::gpu::{DeviceName, Gpu, Graph, Stream};
use p2p_core::{SlotConfig, Transports};
use protocol::WireDtype;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::percentile;
use super::tensors::Tensors;
use super::worker::Wire;
use crate::cmd::TransportArgs;

/// A part of the benchmark, as a child gets it by environment.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Role {
    Server(Server),
    Client(Client),
}

/// What both parts are told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Part {
    pub dir: PathBuf,
    pub device: String,
    pub dtype: String,
    pub slot_bytes: usize,
    pub transport: String,
    #[cfg(feature = "verbs")]
    pub verbs_config: Option<verbs_transport::VerbsConfig>,
    #[cfg(feature = "ibgda")]
    pub ibgda: crate::cmd::IbgdaArgs,
    /// Thread blocks of the long kernels; 0 leaves it to them.
    pub num_blocks: u32,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Server {
    pub part: Part,
    pub experts: Vec<u32>,
    /// Longest wait for further clients; the default without.
    pub gather_us: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Client {
    pub part: Part,
    pub addrs: Vec<String>,
    /// Servers of each expert.
    pub replicas: Vec<Vec<u32>>,
    pub tokens: usize,
    pub seconds: f64,
    pub seed: u64,
    /// Whether every output is compared with the first.
    pub checks: bool,
}

/// What a server counted between two questions.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Counted {
    /// Median of the time until the last expert's output is there, of batches that are timed so far.
    pub compute_us: f64,
    /// Median of the time until the last answer, of the others.
    pub server_us: f64,
    pub batches: f64,
    pub batch_clients: f64,
    pub gather_seconds: f64,
}

/// Times of batches since the last question, in microseconds.
#[derive(Debug, Default)]
struct BatchTimes {
    compute: Vec<f64>,
    server: Vec<f64>,
}

/// What a client measured. Times are microseconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Measured {
    pub calls: usize,
    /// Layers of those calls.
    pub layers: usize,
    pub layer_us_p50: f64,
    pub layer_us_p99: f64,
    /// Longest call.
    pub layer_us_max: f64,
    pub calls_per_s: f64,
    /// Of the last third of the time.
    pub late_calls_per_s: f64,
    pub late_us_p50: f64,
    pub late_us_p99: f64,
    pub failovers: u32,
    pub resent_pairs: u64,
    pub stall_us_max: f64,
    /// Calls that met a failure, of those that are not recorded.
    pub met: Vec<Met>,
    /// Outputs that lack or double something, or calls that failed.
    pub wrong: usize,
}

/// A call that met a failure, in microseconds of [`monotonic_us`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Met {
    pub began_us: f64,
    /// When what nobody had answered was sent elsewhere, for the last time.
    pub sent_again_us: f64,
    pub ended_us: f64,
}

/// Microseconds of the clock that all processes of a host share.
pub(super) fn monotonic_us() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 * 1e-3
}

impl Measured {
    /// The longest call beyond the median.
    pub(super) fn stall_us(&self) -> f64 {
        self.layer_us_max - self.layer_us_p50
    }
}

impl Role {
    pub(super) fn play(self, wire: &mut dyn Wire) -> Result<()> {
        match self {
            Self::Server(server) => server.run(wire),
            Self::Client(client) => client.run(wire),
        }
    }
}

impl Part {
    fn slot(&self) -> SlotConfig {
        SlotConfig { slot_bytes: self.slot_bytes, num_frames: NUM_FRAMES }
    }

    fn dtype(&self) -> WireDtype {
        if self.dtype == WireDtype::F8E4m3.name() { WireDtype::F8E4m3 } else { WireDtype::Bf16 }
    }

    fn transports(&self) -> Result<Transports> {
        let transport = self.transport.parse()?;
        let args = TransportArgs {
            transport,
            #[cfg(feature = "verbs")]
            verbs_config: self.verbs_config.clone(),
            #[cfg(feature = "ibgda")]
            ibgda: self.ibgda,
        };
        args.open_for_device()
    }
}

impl Server {
    fn run(self, wire: &mut dyn Wire) -> Result<()> {
        let device: DeviceName = self.part.device.parse()?;
        let selection = ExpertSelection::EveryLayer(self.experts);
        let name = format!("bench-{}", std::process::id());
        let mut config = ServerConfig::new(&self.part.dir, name, Placement::Static(selection));
        let mut options = ServerDevice {
            dtype: self.part.dtype(),
            random_weights: true,
            num_blocks: self.part.num_blocks,
            experts_timed_every: EXPERTS_TIMED_EVERY,
            ..ServerDevice::new(device)
        };
        if let Some(gather_us) = self.gather_us {
            options.gather = Duration::from_micros(gather_us);
        }
        config.device = Some(options);
        let times = Arc::new(Mutex::new(BatchTimes::default()));
        let kept = Arc::clone(&times);
        config.batch_observer = Some(BatchObserver::new(move |report| lock(&kept).add(report)));
        config.slot = self.part.slot();
        config.transports = self.part.transports()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        let server = runtime.block_on(ExpertServer::start(config, |_| {}))?;
        wire.tell(&json!({ "addr": server.data_addr().to_string() }));
        let mut before = Counted::default();
        while wire.next_line()?.is_some_and(|line| line == "stats") {
            let now = Counted::of(&server.render_metrics()?);
            let times = std::mem::take(&mut *lock(&times));
            wire.tell(&serde_json::to_value(now.since(&before, times))?);
            before = now;
        }
        runtime.block_on(server.shutdown());
        Ok(())
    }
}

impl Counted {
    /// Reads a server's metrics.
    fn of(text: &str) -> Self {
        let value = |name: &str| -> f64 {
            let lines = text.lines().filter(|line| line.starts_with(name));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        Self {
            compute_us: 0.0,
            server_us: 0.0,
            batches: value("switchyard_server_phase_seconds_count{phase=\"compute\"}"),
            batch_clients: value("switchyard_server_batch_clients_sum"),
            gather_seconds: value("switchyard_server_phase_seconds_sum{phase=\"gather\"}"),
        }
    }

    fn since(&self, before: &Self, mut times: BatchTimes) -> Self {
        Self {
            compute_us: percentile(&mut times.compute, 0.5),
            server_us: percentile(&mut times.server, 0.5),
            batches: self.batches - before.batches,
            batch_clients: self.batch_clients - before.batch_clients,
            gather_seconds: self.gather_seconds - before.gather_seconds,
        }
    }
}

impl BatchTimes {
    fn add(&mut self, report: &BatchReport) {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        match report.experts_time {
            // Its answers did not begin while the experts ended: the whole is not what it is otherwise.
            Some(time) => self.compute.push(us(time)),
            None => self.server.push(us(report.server_time)),
        }
    }
}

fn lock(times: &Mutex<BatchTimes>) -> std::sync::MutexGuard<'_, BatchTimes> {
    times.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    fn run(self, wire: &mut dyn Wire) -> Result<()> {
        let checkpoint = Checkpoint::open(&self.part.dir)?;
        let model = ClientModel::of(&checkpoint);
        let gpu = Gpu::open_named(self.part.device.parse()?)?;
        let mut options = DeviceOptions::default();
        options.dtype = self.part.dtype();
        options.num_blocks = self.part.num_blocks;
        let mut client = MoeClient::builder(model.clone())
            .placement(self.table(&model))
            .slot(self.part.slot())
            .transports(self.part.transports()?)
            .build_device(gpu.clone(), options)?;
        client.wait_ready(Duration::from_secs(60))?;
        let layer = *model.moe_layers.first().context("no layer with experts")?;
        let tensors = Tensors::random(&gpu, &model, self.tokens, self.seed)?;
        let stream = gpu.stream()?;
        // A death is looked for call by call; otherwise a graph has some layers, as an engine's has, so that
        // the host's part of a call is not a part of the layer.
        let graph = match self.checks {
            true => None,
            false => Some(record(&mut client, &stream, layer, &tensors)?),
        };
        let call = |client: &mut DeviceClient| {
            let start = Instant::now();
            if let Some(graph) = &graph {
                let report = client.replay(&stream, graph)?;
                let timing = LayerTiming {
                    failovers: report.attempts - 1,
                    stall_ns: report.stall_ns,
                    ..LayerTiming::default()
                };
                return Ok((start.elapsed().as_secs_f64() * 1e6 / f64::from(GRAPH_LAYERS), timing));
            }
            // SAFETY: the tensors have these sizes and outlive the call.
            let timing = unsafe { client.forward(&stream, layer, &tensors.input, tensors.out()) };
            timing.map(|timing| (start.elapsed().as_secs_f64() * 1e6, timing)).map_err(Error::from)
        };
        for _ in 0..WARM_UP {
            call(&mut client)?;
        }
        let expected = tensors.read(&gpu)?;
        wire.tell(&json!({ "event": "ready" }));
        wire.next_line()?;
        let span = Span {
            seconds: self.seconds,
            least_calls: match gpu.name() {
                DeviceName::Cuda(_) => LEAST_CALLS,
                // Of which nobody wants the time.
                DeviceName::Emulated(_) => LEAST_CALLS_IN_SOFTWARE,
            },
            limit: self.seconds + LEAST_CALLS_LIMIT.as_secs_f64(),
        };
        let is_right = || Ok(!self.checks || tensors.is_like(&gpu, &expected)?);
        let mut measured = span.measure(|| call(&mut client), is_right)?;
        if graph.is_some() {
            // Times are of a layer there, and failures of a replay.
            measured.met.clear();
        }
        measured.layers = measured.calls * graph.as_ref().map_or(1, |_| GRAPH_LAYERS as usize);
        wire.tell(&serde_json::to_value(&measured)?);
        Ok(())
    }

    fn table(&self, model: &ClientModel) -> PlacementTable {
        let servers = self.addrs.iter().enumerate().filter_map(|(idx, addr)| {
            Some(ServerEntry {
                member_id: MemberId::parse(&format!("m-{idx}")).ok()?,
                name: format!("server-{idx}"),
                incarnation: 1,
                data_addr: addr.clone(),
            })
        });
        let layers = model
            .moe_layers
            .iter()
            .map(|&layer| LayerPlacement { layer, replicas: self.replicas.clone() });
        PlacementTable {
            cluster_id: "bench".to_owned(),
            epoch: 1,
            model: Some(model.descriptor()),
            servers: servers.collect(),
            layers: layers.collect(),
        }
    }
}

/// How long a client calls: until the time is over and the calls are enough for a median, but not beyond a
/// limit.
#[derive(Debug, Clone, Copy)]
struct Span {
    seconds: f64,
    least_calls: usize,
    /// Seconds.
    limit: f64,
}

impl Span {
    fn goes_on(&self, elapsed: f64, calls: usize) -> bool {
        elapsed < self.seconds || calls == 0 || (calls < self.least_calls && elapsed < self.limit)
    }

    /// Calls until both are over.
    fn measure(
        &self,
        mut call: impl FnMut() -> Result<(f64, LayerTiming)>,
        is_right: impl Fn() -> Result<bool>,
    ) -> Result<Measured> {
        let mut measured = Measured::default();
        let (mut times, mut late_times) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while self.goes_on(start.elapsed().as_secs_f64(), times.len()) {
            let began_us = monotonic_us();
            let (us, timing) = call()?;
            times.push(us);
            let met = Met {
                began_us,
                sent_again_us: began_us + timing.stall_ns as f64 * 1e-3,
                ended_us: began_us + us,
            };
            if timing.failovers > 0 {
                measured.met.push(met);
            }
            // Looking at outputs costs time of its own, so rates are of the calls.
            if start.elapsed().as_secs_f64() > self.seconds * 2.0 / 3.0 {
                late_times.push(us);
            }
            measured.failovers += timing.failovers;
            measured.resent_pairs += timing.resent_pairs;
            measured.stall_us_max = measured.stall_us_max.max(timing.stall_ns as f64 * 1e-3);
            if !is_right()? {
                measured.wrong += 1;
            }
        }
        let rate =
            |times: &[f64]| times.len() as f64 / (times.iter().sum::<f64>() * 1e-6).max(1e-9);
        measured.calls = times.len();
        measured.calls_per_s = rate(&times);
        measured.late_calls_per_s = rate(&late_times);
        measured.layer_us_max = times.iter().copied().fold(0.0, f64::max);
        measured.layer_us_p50 = percentile(&mut times, 0.5);
        measured.layer_us_p99 = percentile(&mut times, 0.99);
        measured.late_us_p50 = percentile(&mut late_times, 0.5);
        measured.late_us_p99 = percentile(&mut late_times, 0.99);
        Ok(measured)
    }
}

fn record(
    client: &mut DeviceClient,
    stream: &Stream,
    layer: u32,
    tensors: &Tensors,
) -> Result<Graph> {
    let mut failed = None;
    let graph = stream.capture(|stream| {
        for _ in 0..GRAPH_LAYERS {
            // SAFETY: the tensors have these sizes and outlive the graph.
            let recorded = unsafe {
                client
                    .dispatch(stream, layer, &tensors.input)
                    .and_then(|handle| client.combine(stream, handle, tensors.out()))
            };
            failed = failed.take().or(recorded.err());
        }
        Ok(())
    })?;
    match failed {
        Some(error) => Err(error).context("a layer cannot be recorded"),
        None => Ok(graph),
    }
}

const NUM_FRAMES: usize = 2;
/// Layers of a recorded graph.
const GRAPH_LAYERS: u32 = 8;
const WARM_UP: usize = 10;
/// What the medians that are to be reached are of.
const LEAST_CALLS: usize = 200;
const LEAST_CALLS_IN_SOFTWARE: usize = 21;
/// Longest time for them beyond the one that was asked for.
const LEAST_CALLS_LIMIT: Duration = Duration::from_secs(60);
/// Of a server's batches, one in so many is timed as far as its experts. No more, as its answers come a little
/// later; not in step with the layers of a graph.
const EXPERTS_TIMED_EVERY: u32 = 31;

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(span: Span, each: Duration) -> Measured {
        let call = || {
            std::thread::sleep(each);
            Ok((1.0, LayerTiming::default()))
        };
        span.measure(call, || Ok(true)).expect("measured")
    }

    #[test]
    fn calls_are_enough_for_a_median_whatever_the_time_and_within_a_limit() {
        let enough = Span { seconds: 0.0, least_calls: LEAST_CALLS, limit: 1e9 };
        assert_eq!(measured(enough, Duration::ZERO).calls, 200);
        let limited = Span { limit: 0.02, ..enough };
        let calls = measured(limited, Duration::from_millis(5)).calls;
        assert!((1..=4).contains(&calls), "{calls}");
        let none = Span { seconds: 0.0, least_calls: 0, limit: 0.0 };
        assert_eq!(measured(none, Duration::ZERO).calls, 1);
        let longer = Span { seconds: 0.02, least_calls: 1, limit: 0.0 };
        assert!(measured(longer, Duration::from_micros(100)).calls > 1);
    }

    #[test]
    fn calls_that_met_a_failure_are_kept_by_the_clock() {
        let span = Span { seconds: 0.0, least_calls: 5, limit: 1e9 };
        let mut calls = [(9e6, 0), (50.0, 1), (400.0, 2), (70.0, 1), (9e6, 0)].into_iter();
        let call = || {
            let (us, failovers) = calls.next().expect("five calls");
            Ok((us, LayerTiming { failovers, stall_ns: 30_000, ..LayerTiming::default() }))
        };
        let before = monotonic_us();
        let met = span.measure(call, || Ok(true)).expect("measured").met;
        let took = |from: f64, to: f64| (to - from).round();
        let times = met.iter().map(|met| took(met.began_us, met.ended_us));
        assert_eq!(times.collect::<Vec<_>>(), [50.0, 400.0, 70.0]);
        for met in &met {
            assert_eq!(took(met.began_us, met.sent_again_us), 30.0);
            assert!(before <= met.began_us && met.began_us <= monotonic_us(), "{before} {met:?}");
        }
    }

    #[test]
    fn experts_and_the_whole_are_medians_of_different_batches() {
        let mut times = BatchTimes::default();
        let us = Duration::from_micros;
        for (server, experts) in
            [(90, Some(70)), (80, None), (84, None), (500, None), (93, Some(71))]
        {
            times.add(&BatchReport {
                layer: 0,
                num_clients: 1,
                num_rows: 8,
                server_time: us(server),
                experts_time: experts.map(us),
            });
        }
        let counted = Counted::default().since(&Counted::default(), times);
        assert_eq!((counted.compute_us.round(), counted.server_us.round()), (71.0, 84.0));
    }
}
