//! `switchyard bench moe`: one layer through the service against the same experts in process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use attention_client::LayerTiming;
use checkpoint::{Checkpoint, MakeOptions, Preset, make_checkpoint, planned_bytes};
use clap::parser::ValueSource;
use expert_server::compute::{
    ComputePool, ExpertGroup, ExpertStore, LayerBatch, LayerExperts, Residency,
};
#[cfg(feature = "device")]
use kernels::gpu::DeviceName;
use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::seq::index::sample;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

#[cfg(feature = "device")]
use super::moe_device;
use crate::cluster::ClusterOptions;
use crate::cmd::expert_server::Device;
use crate::{Global, ui};

/// Flags of `bench moe`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model whose layer is used, with seeded weights.
    #[arg(long, env = "SWITCHYARD_PRESET", default_value = "qwen3-30b-a3b", value_parser = super::super::make_checkpoint::parse_preset)]
    preset: Preset,
    /// Checkpoint to use instead of a preset.
    #[arg(long, env = "SWITCHYARD_MODEL")]
    model: Option<PathBuf>,
    /// Token counts.
    #[arg(
        long,
        env = "SWITCHYARD_TOKENS",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64,128,256,512"
    )]
    tokens: Vec<usize>,
    /// Compute threads in process, and of all servers together; 0 takes as many as there are CPUs.
    #[arg(long, env = "SWITCHYARD_THREADS", default_value_t = 0)]
    threads: usize,
    /// Expert servers that share the layer.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 1)]
    servers: usize,
    /// GPUs to measure instead of CPUs, `cuda` or from `cuda:N` on. Clients and servers are processes of
    /// their own, servers on the first GPUs and clients on those behind; where there are fewer GPUs, they are
    /// threads of one process, and some share one. Weights are random.
    #[arg(long, env = "SWITCHYARD_DEVICE", default_value = "cpu", value_name = "cpu|cuda:N")]
    device: Device,
    /// Clients of the service, with --device.
    #[arg(long, env = "SWITCHYARD_CLIENTS", default_value_t = 1)]
    clients: usize,
    /// Lets all servers hold every expert and kills one of them under the load of one client, with --device.
    #[arg(long, env = "SWITCHYARD_KILL", value_parser = clap::builder::FalseyValueParser::new())]
    kill: bool,
    /// Times that a server is killed, each in a run of its own, with --kill: stalls are their median and the
    /// longest.
    #[arg(
        long,
        env = "SWITCHYARD_KILLS",
        default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=100)
    )]
    kills: u64,
    /// Longest time that a batch waits for further clients, with --device; the servers' default without.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_GATHER_US",
        value_parser = clap::value_parser!(u64).range(..=2000)
    )]
    device_gather_us: Option<u64>,
    /// Time to spend on each token count, in process and through the service each.
    #[arg(long, env = "SWITCHYARD_SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Seed of tokens and routing.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    client: super::super::ClientArgs,
}

impl Args {
    /// What is wrong with the flags that were written on the command line, beside those that take effect.
    /// Environment variables may be meant for other commands.
    pub fn useless(matches: &clap::ArgMatches) -> Option<String> {
        let is_written = |flag: &str| matches.value_source(flag) == Some(ValueSource::CommandLine);
        let named =
            |flags: &'static [&'static str]| flags.iter().copied().find(|flag| is_written(flag));
        let on_gpus = matches!(matches.get_one::<Device>("device"), Some(Device::Gpu(_)));
        let is_kill = matches.get_flag("kill");
        let dtype = matches.get_one::<WireDtype>("wire_dtype").copied();
        let is_default = matches.value_source("wire_dtype") == Some(ValueSource::DefaultValue);
        if let Some(dtype @ (WireDtype::F32 | WireDtype::F16)) = dtype
            && on_gpus
            && !is_default
        {
            return Some(format!("--wire-dtype {dtype}: expected bf16 or fp8 with --device"));
        }
        let (flag, how) = if !on_gpus {
            (named(&ONLY_ON_GPUS)?, "without --device cuda")
        } else if let Some(flag) = named(&NOT_ON_GPUS) {
            (flag, "with --device")
        } else if !is_kill && is_written("kills") {
            ("kills", "without --kill")
        } else if is_kill && is_written("clients") {
            ("clients", "with --kill, which has one client")
        } else {
            let num_tokens = matches.get_many::<usize>("tokens").map_or(0, Iterator::count);
            let is_list = is_kill && is_written("tokens") && num_tokens > 1;
            return is_list
                .then(|| "--kill measures one number of --tokens: leave the others out".into());
        };
        Some(format!("--{} would do nothing {how}: leave it out", flag.replace('_', "-")))
    }
}

#[derive(Debug, Serialize)]
struct Report {
    preset: String,
    layer: u32,
    hidden: usize,
    num_experts: u32,
    top_k: usize,
    threads: usize,
    servers: usize,
    wire_dtype: String,
    rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    tokens: usize,
    iterations: usize,
    in_process_us_p50: f64,
    service_us_p50: f64,
    service_us_p99: f64,
    /// Median of the ratios of neighbouring pairs, so that drift of the host cancels.
    ratio_p50: f64,
    dispatch_us_p50: f64,
    server_queue_us_p50: f64,
    server_compute_us_p50: f64,
    combine_us_p50: f64,
    /// Weight bytes of the experts touched, per second of in-process time.
    in_process_gb_per_s: f64,
    /// Largest difference between the two outputs, relative to the largest output.
    max_rel_diff: f64,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    if let Some(tokens) = args.tokens.iter().find(|tokens| !(1..=MAX_TOKENS).contains(*tokens)) {
        bail!("--tokens {tokens}: expected 1 to {MAX_TOKENS}");
    }
    if !(0.0..=MAX_SECONDS).contains(&args.seconds) {
        bail!("--seconds {}: expected 0 to {MAX_SECONDS}", args.seconds);
    }
    if let Device::Gpu(device) = args.device {
        #[cfg(feature = "device")]
        return on_device(global, &args, device);
        #[cfg(not(feature = "device"))]
        return Err(crate::cmd::no_device(device));
    }
    let dir = match &args.model {
        Some(dir) => dir.clone(),
        None => preset_dir(global, args.preset)?,
    };
    let checkpoint =
        Arc::new(Checkpoint::open(&dir).with_context(|| format!("cannot open {}", dir.display()))?);
    let config = checkpoint.config();
    let layer = *config.moe_layers().first().context("this model has no layer with experts")?;
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if args.threads == 0 { cpus } else { args.threads };
    if args.servers == 0 || args.servers > threads {
        bail!("--servers {}: expected 1 to {threads}, one thread each at least", args.servers);
    }

    let mut options = ClusterOptions::new(&dir)?;
    options.num_servers = args.servers;
    options.replicas = 1;
    options.threads = Some(threads / args.servers);
    options.server_args = args.client.server_args();
    let cluster = super::super::start_cluster(global, options)?;
    let token = Some(cluster.token().to_owned());
    let client = args
        .client
        .builder(&checkpoint)?
        .control_plane(cluster.control_url(), token.clone())
        .ticket(token)
        .build()?;
    client.wait_ready(super::super::READY_TIMEOUT)?;

    let all = BTreeMap::from([(layer, (0..config.num_experts).collect())]);
    let bar = ui::steps_bar(global.json, u64::from(config.num_experts), "loading experts");
    let store = ExpertStore::load(Arc::clone(&checkpoint), &all, Residency::default(), &mut |p| {
        bar.set_position(p.num_loaded as u64);
    })?;
    bar.finish_and_clear();
    let experts = store.layer(layer).context("the layer was not loaded")?;
    let mut pool = ComputePool::new(threads, None)?;

    let mut rows = Vec::new();
    let bar = ui::steps_bar(global.json, args.tokens.len() as u64, "measuring");
    let mut rng = StdRng::seed_from_u64(args.seed);
    for &tokens in &args.tokens {
        let mut inputs: Vec<Input> = (0..4)
            .map(|_| {
                Input::random(&mut rng, tokens, config.hidden, config.num_experts, config.top_k)
            })
            .collect();
        let (mut local, mut remote) = (vec![f32::NAN; tokens * config.hidden], Vec::new());
        remote.resize(local.len(), f32::NAN);
        let mut measured = Measured::default();
        let budget = Duration::from_secs_f64(args.seconds * 2.0);
        let (start, mut iteration) = (Instant::now(), 0usize);
        while iteration < MIN_ITERATIONS || start.elapsed() < budget {
            let num_inputs = inputs.len();
            let input = &mut inputs[iteration % num_inputs];
            local.fill(f32::NAN);
            remote.fill(f32::NAN);
            // Which goes first alternates, so that neither always finds the other's caches.
            let (in_process, service, timing);
            if iteration % 2 == 0 {
                in_process = input.in_process(&mut pool, &experts, &mut local)?;
                (service, timing) = input.through(&client, layer, &mut remote)?;
            } else {
                (service, timing) = input.through(&client, layer, &mut remote)?;
                in_process = input.in_process(&mut pool, &experts, &mut local)?;
            }
            measured.max_rel_diff = measured.max_rel_diff.max(max_rel_diff(&local, &remote));
            if iteration >= WARM_UP {
                measured.push(in_process, service, timing, input.weight_bytes(&experts));
            }
            iteration += 1;
        }
        rows.push(measured.row(tokens));
        bar.inc(1);
    }
    bar.finish_and_clear();

    let report = Report {
        preset: args
            .model
            .map_or_else(|| args.preset.name().to_owned(), |_| dir.display().to_string()),
        layer,
        hidden: config.hidden,
        num_experts: config.num_experts,
        top_k: config.top_k,
        threads,
        servers: args.servers,
        wire_dtype: args.client.wire_dtype.to_string(),
        rows,
    };
    if global.json {
        ui::print_json(&report)?;
    } else {
        print_report(&report);
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "device")]
fn on_device(global: &Global, args: &Args, device: DeviceName) -> Result<ExitCode> {
    let (clients, servers) = (args.clients, args.servers);
    if !(1..=MAX_PEERS).contains(&clients) || !(1..=MAX_PEERS).contains(&servers) {
        bail!("--clients {clients} --servers {servers}: expected 1 to {MAX_PEERS} of each");
    }
    if args.kill && servers < 2 {
        bail!("--kill --servers {servers}: expected 2 at least, so that one is left");
    }
    if args.model.is_some() {
        bail!("--device measures presets with random weights: leave --model out");
    }
    // What is not set is fp8: what servers on GPUs are for.
    let dtype = match args.client.wire_dtype {
        dtype @ (WireDtype::Bf16 | WireDtype::F8E4m3) => dtype,
        _ => WireDtype::F8E4m3,
    };
    moe_device::run(
        global,
        &moe_device::Wish {
            device,
            preset: args.preset,
            tokens: args.tokens.clone(),
            clients,
            servers,
            seconds: args.seconds,
            seed: args.seed,
            dtype,
            kills: if args.kill { args.kills as usize } else { 0 },
            transport: args.client.transport.clone(),
            gather_us: args.device_gather_us,
        },
    )
}

/// One batch with its routing, and the scratch that grouping it needs.
struct Input {
    x: Vec<f32>,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
    top_k: usize,
    order: Vec<u32>,
    groups: Vec<ExpertGroup>,
    entry_token: Vec<u32>,
    entry_weight: Vec<f32>,
}

impl Input {
    fn random(
        rng: &mut StdRng,
        tokens: usize,
        hidden: usize,
        num_experts: u32,
        top_k: usize,
    ) -> Self {
        let x = (0..tokens * hidden).map(|_| rng.random_range(-1.0f32..1.0)).collect();
        let (mut topk_idx, mut topk_weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let weights: Vec<f32> = (0..top_k).map(|_| rng.random_range(0.1f32..1.0)).collect();
            let sum: f32 = weights.iter().sum();
            topk_weights.extend(weights.iter().map(|weight| weight / sum));
            topk_idx.extend(sample(rng, num_experts as usize, top_k).iter().map(|idx| idx as i32));
        }
        Self {
            x,
            topk_idx,
            topk_weights,
            top_k,
            order: Vec::new(),
            groups: Vec::new(),
            entry_token: Vec::new(),
            entry_weight: Vec::new(),
        }
    }

    /// Sorts the pairs by expert and computes them, as an engine would that has its own experts.
    fn in_process(
        &mut self,
        pool: &mut ComputePool,
        experts: &LayerExperts,
        out: &mut [f32],
    ) -> Result<Duration> {
        let start = Instant::now();
        self.order.clear();
        self.order.extend(0..self.topk_idx.len() as u32);
        self.order.sort_by_key(|&pair| self.topk_idx[pair as usize]);
        self.groups.clear();
        self.entry_token.clear();
        self.entry_weight.clear();
        for (position, &pair) in self.order.iter().enumerate() {
            let expert = self.topk_idx[pair as usize] as u32;
            match self.groups.last_mut() {
                Some(group) if group.expert == expert => group.end += 1,
                _ => self.groups.push(ExpertGroup {
                    expert,
                    begin: position as u32,
                    end: position as u32 + 1,
                }),
            }
            self.entry_token.push(pair / self.top_k as u32);
            self.entry_weight.push(self.topk_weights[pair as usize]);
        }
        let batch = LayerBatch {
            x: &self.x,
            groups: &self.groups,
            entry_token: &self.entry_token,
            entry_weight: &self.entry_weight,
        };
        pool.run(experts, &batch, out, &mut || {})?;
        Ok(start.elapsed())
    }

    fn through(
        &self,
        client: &attention_client::MoeClient,
        layer: u32,
        out: &mut [f32],
    ) -> Result<(Duration, LayerTiming)> {
        let start = Instant::now();
        let timing = client.forward(layer, &self.x, &self.topk_idx, &self.topk_weights, out)?;
        Ok((start.elapsed(), timing))
    }

    fn weight_bytes(&self, experts: &LayerExperts) -> usize {
        let weights = self.groups.iter().filter_map(|group| experts.get(group.expert));
        weights.map(|weights| weights.size_bytes()).sum()
    }
}

#[derive(Default)]
struct Measured {
    in_process_us: Vec<f64>,
    service_us: Vec<f64>,
    ratios: Vec<f64>,
    gb_per_s: Vec<f64>,
    timings: Vec<LayerTiming>,
    max_rel_diff: f64,
}

impl Measured {
    fn push(&mut self, in_process: Duration, service: Duration, timing: LayerTiming, bytes: usize) {
        self.in_process_us.push(in_process.as_secs_f64() * 1e6);
        self.service_us.push(service.as_secs_f64() * 1e6);
        self.ratios.push(service.as_secs_f64() / in_process.as_secs_f64());
        self.gb_per_s.push(bytes as f64 / in_process.as_secs_f64() / 1e9);
        self.timings.push(timing);
    }

    fn row(mut self, tokens: usize) -> Row {
        let timings = self.timings;
        let of = |pick: fn(&LayerTiming) -> u64| {
            let mut values: Vec<f64> = timings.iter().map(|t| pick(t) as f64 / 1e3).collect();
            percentile(&mut values, 50)
        };
        Row {
            tokens,
            iterations: self.ratios.len(),
            in_process_us_p50: percentile(&mut self.in_process_us, 50),
            service_us_p50: percentile(&mut self.service_us, 50),
            service_us_p99: percentile(&mut self.service_us, 99),
            ratio_p50: percentile(&mut self.ratios, 50),
            dispatch_us_p50: of(|t| t.dispatch_ns),
            server_queue_us_p50: of(|t| t.server_queue_ns),
            server_compute_us_p50: of(|t| t.server_compute_ns),
            combine_us_p50: of(|t| t.combine_ns),
            in_process_gb_per_s: percentile(&mut self.gb_per_s, 50),
            max_rel_diff: self.max_rel_diff,
        }
    }
}

fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let idx = (values.len() * percent / 100).min(values.len().saturating_sub(1));
    values.get(idx).copied().unwrap_or(0.0)
}

/// Infinite when either output holds anything that is not a number: nothing may stay poisoned.
fn max_rel_diff(a: &[f32], b: &[f32]) -> f64 {
    if a.iter().chain(b).any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let scale = a.iter().fold(f32::MIN_POSITIVE, |max, value| max.max(value.abs()));
    let diff = a.iter().zip(b).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
    f64::from(diff / scale)
}

/// A checkpoint with one MoE layer of the preset, made once and kept in the user's cache.
fn preset_dir(global: &Global, preset: Preset) -> Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .unwrap_or_else(std::env::temp_dir);
    let dir = cache.join("switchyard").join("bench").join(format!("{}-1", preset.name()));
    if Checkpoint::open(&dir).is_ok() {
        return Ok(dir);
    }
    let bar = ui::bytes_bar(global.json, planned_bytes(preset, 1)?, "making the layer's weights");
    let mut options = MakeOptions::new(preset, 1);
    options.overwrite = true;
    make_checkpoint(&dir, &options, &mut |done, _| bar.set_position(done))
        .with_context(|| format!("cannot make a checkpoint in {}", dir.display()))?;
    bar.finish_and_clear();
    Ok(dir)
}

fn print_report(report: &Report) {
    outln!(
        "{}: hidden {}, top-{} of {} experts, {} threads, {} server(s), {} on the wire; µs, medians",
        report.preset,
        report.hidden,
        report.top_k,
        report.num_experts,
        report.threads,
        report.servers,
        report.wire_dtype
    );
    outln!(
        "{:>6} {:>11} {:>11} {:>7} {:>9} {:>8} {:>11} {:>9} {:>7} {:>9}",
        "tokens",
        "in process",
        "service",
        "ratio",
        "dispatch",
        "queue",
        "compute",
        "combine",
        "GB/s",
        "max diff"
    );
    for row in &report.rows {
        outln!(
            "{:>6} {:>11.1} {:>11.1} {:>7.4} {:>9.1} {:>8.1} {:>11.1} {:>9.1} {:>7.2} {:>9.1e}",
            row.tokens,
            row.in_process_us_p50,
            row.service_us_p50,
            row.ratio_p50,
            row.dispatch_us_p50,
            row.server_queue_us_p50,
            row.server_compute_us_p50,
            row.combine_us_p50,
            row.in_process_gb_per_s,
            row.max_rel_diff
        );
    }
}

/// Processes of a measurement on GPUs, of each kind.
#[cfg(feature = "device")]
const MAX_PEERS: usize = 8;
/// More than any batch of one layer, and what a host of 16 GiB has room for.
const MAX_TOKENS: usize = 1 << 14;
const MAX_SECONDS: f64 = 3600.0;
/// Identifiers of flags.
const ONLY_ON_GPUS: [&str; 4] = ["clients", "kill", "kills", "device_gather_us"];
const NOT_ON_GPUS: [&str; 7] = [
    "threads",
    "model",
    "response_dtype",
    "deadline_ms",
    "slot_bytes",
    "slot_frames",
    "peer_transport",
];
const WARM_UP: usize = 4;
const MIN_ITERATIONS: usize = WARM_UP + 21;
