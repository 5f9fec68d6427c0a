//! `switchyard bench moe`: one layer through the service against the same experts in process, or through
//! servers on GPUs.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use attention_client::ClientModel;
use bench_harness::moe::{self, MoeBenchConfig};
use bench_harness::moe_device::{self, MoeDeviceConfig, OpenTransports};
use checkpoint::{Checkpoint, MakeOptions, Preset, make_checkpoint, planned_bytes};
use clap::parser::ValueSource;
use kernels::gpu::DeviceName;
use p2p_core::Transports;
use protocol::WireDtype;
use serde::{Deserialize, Serialize};

use crate::cluster::ClusterOptions;
use crate::cmd::TransportArgs;
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
    /// Compute threads in process, and of all servers together, up to 1024; 0 takes as many as there are CPUs.
    #[arg(long, env = "SWITCHYARD_THREADS", default_value_t = 0, value_parser = crate::cmd::threads())]
    threads: usize,
    /// Expert servers that share the layer.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 1)]
    servers: usize,
    /// GPUs to measure instead of CPUs, `cuda` or from `cuda:N` on. Clients and servers are processes of their own.
    /// Servers take the first GPUs, and clients the next ones. With too few GPUs they are threads of one process, and
    /// some share a GPU. Weights are random.
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
    /// Notes the steps of layers and prints when each begins and ends, with --device. Layers take a little longer.
    #[arg(long, env = "SWITCHYARD_TIMELINE", conflicts_with = "kill", value_parser = clap::builder::FalseyValueParser::new())]
    timeline: bool,
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
    /// Returns an error text if a flag on the command line would have no effect. Environment variables are not
    /// checked, since they may be meant for other commands.
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

/// Runs this process's part where it is a child of `bench moe --device`.
pub fn child() -> Option<ExitCode> {
    let done = moe_device::child_main(OPEN)?;
    Some(if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    if let Some(tokens) = args.tokens.iter().find(|tokens| !(1..=MAX_TOKENS).contains(*tokens)) {
        bail!("--tokens {tokens}: expected 1 to {MAX_TOKENS}");
    }
    if !(0.0..=MAX_SECONDS).contains(&args.seconds) {
        bail!("--seconds {}: expected 0 to {MAX_SECONDS}", args.seconds);
    }
    if let Device::Gpu(device) = args.device {
        return on_device(global, &args, device);
    }
    let dir = match &args.model {
        Some(dir) => dir.clone(),
        None => preset_dir(global, args.preset)?,
    };
    let checkpoint = super::super::open_checkpoint(&dir)?;
    let layer = moe::first_layer(&checkpoint)?;
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
    options.tls = true;
    let cluster = super::super::start_cluster(global, options)?;
    let token = Some(cluster.token().to_owned());
    let client = args
        .client
        .builder(ClientModel::of(&checkpoint))?
        .control_plane(cluster.control_url(), token.clone())
        .secret(token)
        .security(cluster.security())
        .build()?;
    client.wait_ready(super::super::READY_TIMEOUT)?;

    let num_experts = u64::from(checkpoint.config().num_experts);
    let bar = ui::steps_bar(global.json, num_experts, "loading experts");
    let experts =
        moe::load_layer(&checkpoint, layer, |num_loaded| bar.set_position(num_loaded as u64))?;
    bar.finish_and_clear();
    let config = MoeBenchConfig {
        model: args
            .model
            .as_ref()
            .map_or_else(|| args.preset.name().to_owned(), |_| dir.display().to_string()),
        tokens: args.tokens.clone(),
        threads,
        servers: args.servers,
        wire_dtype: args.client.wire_dtype,
        seconds: args.seconds,
        seed: args.seed,
    };
    let bar = ui::steps_bar(global.json, args.tokens.len() as u64, "measuring");
    let report = moe::run(&config, &checkpoint, layer, &experts, &client, || bar.inc(1))?;
    bar.finish_and_clear();
    print(global, &report)
}

fn print(global: &Global, report: &(impl Serialize + std::fmt::Display)) -> Result<ExitCode> {
    if global.json {
        ui::print_json(report)?;
    } else {
        out!("{report}");
    }
    Ok(ExitCode::SUCCESS)
}

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
    // The default is fp8, the format that servers on GPUs are made for.
    let dtype = match args.client.wire_dtype {
        dtype @ (WireDtype::Bf16 | WireDtype::F8E4m3) => dtype,
        _ => WireDtype::F8E4m3,
    };
    let transport = &args.client.transport;
    let settings = TransportSettings {
        #[cfg(feature = "verbs")]
        verbs_config: transport.verbs_config.clone(),
        #[cfg(feature = "ibgda")]
        ibgda: transport.ibgda,
    };
    let report = moe_device::run(&MoeDeviceConfig {
        device,
        preset: args.preset,
        tokens: args.tokens.clone(),
        clients,
        servers,
        seconds: args.seconds,
        seed: args.seed,
        dtype,
        kills: if args.kill { args.kills as usize } else { 0 },
        transport: transport.transport.to_string(),
        settings: serde_json::to_value(settings)?,
        open: OPEN,
        gather_us: args.device_gather_us,
        timeline: args.timeline,
    })?;
    print(global, &report)
}

/// Settings of transports beside their names, as children get them.
#[derive(Debug, Default, Serialize, Deserialize)]
struct TransportSettings {
    #[cfg(feature = "verbs")]
    verbs_config: Option<verbs_transport::VerbsConfig>,
    #[cfg(feature = "ibgda")]
    ibgda: crate::cmd::IbgdaArgs,
}

/// The same for the parent and its children.
const OPEN: OpenTransports = open;

/// Opens the transports of a client or a server.
#[allow(unused_variables, reason = "depends on the features")]
fn open(transport: &str, settings: &serde_json::Value) -> Result<Transports> {
    let settings = TransportSettings::deserialize(settings)?;
    let args = TransportArgs {
        transport: transport.parse()?,
        #[cfg(feature = "verbs")]
        verbs_config: settings.verbs_config,
        #[cfg(feature = "ibgda")]
        ibgda: settings.ibgda,
    };
    args.open_for_device()
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

/// Most clients, and most servers, of a measurement on GPUs.
const MAX_PEERS: usize = 8;
/// More than any batch of one layer, and within the memory of a host with 16 GiB.
const MAX_TOKENS: usize = 1 << 14;
const MAX_SECONDS: f64 = 3600.0;
/// Identifiers of flags that have an effect with --device only, or without it only.
const ONLY_ON_GPUS: [&str; 5] = ["clients", "kill", "kills", "device_gather_us", "timeline"];
const NOT_ON_GPUS: [&str; 7] = [
    "threads",
    "model",
    "response_dtype",
    "deadline_ms",
    "slot_bytes",
    "slot_frames",
    "peer_transport",
];
