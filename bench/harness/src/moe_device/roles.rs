//! The roles of the benchmark's processes or threads: server and client.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use attention_client::{ClientModel, DeviceClient, DeviceOptions, LayerTiming};
use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::device::{
    BatchObserver, BatchReport, BatchTimeline, DeviceOptions as ServerDevice,
};
use expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};
use kernels::gpu::{DeviceName, Gpu, Graph, Stream};
use p2p_core::{SlotConfig, Transports};
use protocol::WireDtype;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::OpenTransports;
use super::tensors::Tensors;
use super::timeline::{self, CallTimes, ClockPair, NUM_KEPT};
use super::wire::Wire;
use crate::clock::{monotonic_us, us};
use crate::stats::{median, percentile};

/// A role, as a child process reads it from its environment.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Role {
    Server(Server),
    Client(Client),
}

/// Settings of both roles.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Part {
    pub dir: PathBuf,
    pub device: String,
    pub dtype: String,
    pub slot_bytes: usize,
    pub transport: String,
    /// Settings of the transport.
    pub settings: Value,
    /// Thread blocks of the long kernels; 0 takes their default.
    pub num_blocks: u32,
    /// Whether times of steps are noted.
    pub timeline: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Server {
    pub part: Part,
    pub experts: Vec<u32>,
    /// Longest wait of a batch for further clients; `None` takes the default.
    pub gather_us: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Client {
    pub part: Part,
    pub addrs: Vec<String>,
    /// Indices of the servers that hold each expert.
    pub replicas: Vec<Vec<u32>>,
    pub tokens: usize,
    pub seconds: f64,
    pub seed: u64,
    /// Whether each output is compared with the first.
    pub checks: bool,
}

/// Counts of a server between two requests for them.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct ServerCounts {
    /// Median time until the last expert's output is complete, over batches that are timed up to there.
    pub compute_us: f64,
    /// Median time until the last answer, over the other batches.
    pub server_us: f64,
    pub batches: f64,
    pub batch_clients: f64,
    pub gather_seconds: f64,
}

/// Times of batches since the last request for counts, in microseconds.
#[derive(Debug, Default)]
struct BatchTimes {
    compute: Vec<f64>,
    server: Vec<f64>,
    /// The last [`NUM_KEPT`] batches, if their steps are noted.
    last: VecDeque<BatchTimeline>,
}

/// Figures of one client. Times are in microseconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct ClientFigures {
    pub calls: usize,
    /// Layers of those calls.
    pub layers: usize,
    pub layer_us_p50: f64,
    pub layer_us_p99: f64,
    /// The longest call.
    pub layer_us_max: f64,
    pub calls_per_s: f64,
    /// Rate in the last third of the time, as the percentiles that follow.
    pub late_calls_per_s: f64,
    pub late_us_p50: f64,
    pub late_us_p99: f64,
    pub failovers: u32,
    pub resent_pairs: u64,
    pub stall_us_max: f64,
    /// Calls that failed over. Empty if calls replay a recorded graph.
    #[serde(rename = "met")]
    pub failed_calls: Vec<FailedCall>,
    /// Outputs that lack an expert's part or have it twice.
    pub wrong: usize,
    /// The last calls, if their steps are noted, and the uncertainty of their times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) calls_traced: Option<(Vec<CallTimes>, f64)>,
}

/// A call that failed over, in microseconds of [`monotonic_us`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct FailedCall {
    pub began_us: f64,
    /// The last time at which unanswered pairs were sent to another server.
    pub sent_again_us: f64,
    pub ended_us: f64,
}

impl ClientFigures {
    /// Returns the longest call less the median.
    pub(super) fn stall_us(&self) -> f64 {
        self.layer_us_max - self.layer_us_p50
    }
}

impl Role {
    pub(super) fn run(self, wire: &mut dyn Wire, open: OpenTransports) -> Result<()> {
        match self {
            Self::Server(server) => server.run(wire, open),
            Self::Client(client) => client.run(wire, open),
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

    fn transports(&self, open: OpenTransports) -> Result<Transports> {
        open(&self.transport, &self.settings)
    }
}

impl Server {
    fn run(self, wire: &mut dyn Wire, open: OpenTransports) -> Result<()> {
        let device: DeviceName = self.part.device.parse()?;
        let selection = ExpertSelection::EveryLayer(self.experts);
        let name = format!("bench-{}", std::process::id());
        let mut config = ServerConfig::new(&self.part.dir, name, Placement::Static(selection));
        let mut options = ServerDevice {
            dtype: self.part.dtype(),
            random_weights: true,
            num_blocks: self.part.num_blocks,
            experts_timed_every: EXPERTS_TIMED_EVERY,
            timeline: self.part.timeline,
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
        config.transports = self.part.transports(open)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        let server = runtime.block_on(ExpertServer::start(config, |_| {}))?;
        wire.send(&json!({ "addr": server.data_addr().to_string() }));
        let mut before = ServerCounts::default();
        let gpu = match self.part.timeline {
            true => Some(Gpu::open_named(device)?),
            false => None,
        };
        let mut clocks: Option<ClockPair> = None;
        while let Some(line) = wire.receive()?.filter(|line| line == "stats" || line == "steps") {
            if line == "steps" {
                let last: Vec<_> = lock(&times).last.iter().copied().collect();
                let (to_us, uncertainty_us) = clocks.as_ref().context("no timeline")?.end()?;
                let of = |batch| timeline::BatchTimes::of(batch, &to_us);
                let batches: Vec<_> = last.iter().map(of).collect();
                wire.send(&serde_json::to_value((batches, uncertainty_us))?);
                continue;
            }
            // Before each measurement, since the clocks do not drift evenly.
            clocks = gpu.as_ref().map(ClockPair::begin).transpose()?;
            let now = ServerCounts::of(&server.render_metrics()?);
            let times = std::mem::take(&mut *lock(&times));
            wire.send(&serde_json::to_value(now.since(&before, times))?);
            before = now;
        }
        runtime.block_on(server.shutdown());
        Ok(())
    }
}

impl ServerCounts {
    /// Parses a server's metrics.
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
            compute_us: median(&mut times.compute),
            server_us: median(&mut times.server),
            batches: self.batches - before.batches,
            batch_clients: self.batch_clients - before.batch_clients,
            gather_seconds: self.gather_seconds - before.gather_seconds,
        }
    }
}

impl BatchTimes {
    fn add(&mut self, report: &BatchReport) {
        if let Some(timeline) = report.timeline {
            self.last.push_back(timeline);
            if self.last.len() > NUM_KEPT {
                self.last.pop_front();
            }
        }
        match report.experts_time {
            // Its answers begin only after all experts, so its whole time is longer than that of other batches.
            Some(time) => self.compute.push(us(time)),
            None => self.server.push(us(report.server_time)),
        }
    }
}

fn lock(times: &Mutex<BatchTimes>) -> std::sync::MutexGuard<'_, BatchTimes> {
    times.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Client {
    fn run(self, wire: &mut dyn Wire, open: OpenTransports) -> Result<()> {
        let checkpoint = Checkpoint::open(&self.part.dir)?;
        let model = ClientModel::of(&checkpoint);
        let gpu = Gpu::open_named(self.part.device.parse()?)?;
        let mut options = DeviceOptions::default();
        options.dtype = self.part.dtype();
        options.num_blocks = self.part.num_blocks;
        options.timeline = if self.part.timeline { NUM_KEPT as u32 } else { 0 };
        let mut client = DeviceClient::builder(model.clone())
            .placement(self.table(&model))
            .slot(self.part.slot())
            .transports(self.part.transports(open)?)
            .build(gpu.clone(), options)?;
        client.wait_ready(Duration::from_secs(60))?;
        let layer = *model.moe_layers.first().context("no layer with experts")?;
        let tensors = Tensors::random(&gpu, &model, self.tokens, self.seed)?;
        let stream = gpu.stream()?;
        // A run with a kill needs single calls. Otherwise a graph has several layers, as an engine's has, so that
        // the time of a layer has no work of the host.
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
                return Ok((us(start.elapsed()) / f64::from(GRAPH_LAYERS), timing));
            }
            // SAFETY: the tensors have these sizes and outlive the call.
            let timing = unsafe { client.forward(&stream, layer, &tensors.input, tensors.out()) };
            timing.map(|timing| (us(start.elapsed()), timing)).map_err(Error::from)
        };
        for _ in 0..WARM_UP {
            call(&mut client)?;
        }
        let expected = tensors.read(&gpu)?;
        wire.send(&json!({ "event": "ready" }));
        wire.receive()?;
        let span = Span {
            seconds: self.seconds,
            least_calls: match gpu.name() {
                DeviceName::Cuda(_) => LEAST_CALLS,
                // Its time is of no interest.
                DeviceName::Emulated(_) => LEAST_CALLS_IN_SOFTWARE,
            },
            limit: self.seconds + LEAST_CALLS_LIMIT.as_secs_f64(),
        };
        let clocks = match self.part.timeline {
            true => Some(ClockPair::begin(&gpu)?),
            false => None,
        };
        let is_right = || Ok(!self.checks || tensors.is_like(&gpu, &expected)?);
        let mut measured = span.measure(|| call(&mut client), is_right)?;
        if let Some(clocks) = clocks {
            let stamps = client.call_stamps()?;
            let (to_us, uncertainty_us) = clocks.end()?;
            measured.calls_traced = Some((timeline::calls_of(&stamps, &to_us), uncertainty_us));
        }
        if graph.is_some() {
            // The time is that of a layer, but a failover is that of a replay.
            measured.failed_calls.clear();
        }
        measured.layers = measured.calls * graph.as_ref().map_or(1, |_| GRAPH_LAYERS as usize);
        wire.send(&serde_json::to_value(&measured)?);
        Ok(())
    }

    fn table(&self, model: &ClientModel) -> PlacementTable {
        let servers = self.addrs.iter().enumerate().filter_map(|(idx, addr)| {
            Some(ServerEntry {
                member_id: MemberId::parse(&format!("m-{idx}")).ok()?,
                name: format!("server-{idx}"),
                incarnation: 1,
                data_addr: addr.clone(),
                needs_tickets: false,
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

/// How long a client calls: until the time is over and there are enough calls for a median, within a limit.
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

    /// Calls until the time is over.
    fn measure(
        &self,
        mut call: impl FnMut() -> Result<(f64, LayerTiming)>,
        is_right: impl Fn() -> Result<bool>,
    ) -> Result<ClientFigures> {
        let mut measured = ClientFigures::default();
        let (mut times, mut late_times) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while self.goes_on(start.elapsed().as_secs_f64(), times.len()) {
            let began_us = monotonic_us();
            let (us, timing) = call()?;
            times.push(us);
            let failed = FailedCall {
                began_us,
                sent_again_us: began_us + timing.stall_ns as f64 * 1e-3,
                ended_us: began_us + us,
            };
            if timing.failovers > 0 {
                measured.failed_calls.push(failed);
            }
            // Checks of outputs take time of their own, so rates are from the times of the calls.
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
        measured.layer_us_p50 = median(&mut times);
        measured.layer_us_p99 = percentile(&mut times, 0.99);
        measured.late_us_p50 = median(&mut late_times);
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
/// Calls that a median needs at least.
const LEAST_CALLS: usize = 200;
const LEAST_CALLS_IN_SOFTWARE: usize = 21;
/// Longest time for them beyond the configured time.
const LEAST_CALLS_LIMIT: Duration = Duration::from_secs(60);
/// One in this many of a server's batches is timed up to the end of its experts. Such a batch is answered a little
/// later, so they are rare. The number shares no factor with the layers of a graph.
const EXPERTS_TIMED_EVERY: u32 = 31;

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(span: Span, each: Duration) -> ClientFigures {
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
    fn calls_that_failed_over_are_recorded_with_their_times() {
        let span = Span { seconds: 0.0, least_calls: 5, limit: 1e9 };
        let mut calls = [(9e6, 0), (50.0, 1), (400.0, 2), (70.0, 1), (9e6, 0)].into_iter();
        let call = || {
            let (us, failovers) = calls.next().expect("five calls");
            Ok((us, LayerTiming { failovers, stall_ns: 30_000, ..LayerTiming::default() }))
        };
        let before = monotonic_us();
        let failed = span.measure(call, || Ok(true)).expect("measured").failed_calls;
        let took = |from: f64, to: f64| (to - from).round();
        let times = failed.iter().map(|call| took(call.began_us, call.ended_us));
        assert_eq!(times.collect::<Vec<_>>(), [50.0, 400.0, 70.0]);
        for call in &failed {
            assert_eq!(took(call.began_us, call.sent_again_us), 30.0);
            assert!(
                before <= call.began_us && call.began_us <= monotonic_us(),
                "{before} {call:?}"
            );
        }
    }

    #[test]
    fn experts_and_whole_batches_are_medians_of_different_batches() {
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
                timeline: None,
            });
        }
        let counted = ServerCounts::default().since(&ServerCounts::default(), times);
        assert_eq!((counted.compute_us.round(), counted.server_us.round()), (70.0, 84.0));
    }
}
