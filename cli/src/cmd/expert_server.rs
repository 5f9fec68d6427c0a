//! `switchyard expert-server`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::builder::NonEmptyStringValueParser;
#[cfg(feature = "device")]
use expert_server::device::DeviceOptions;
use expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig, Ticket};

use kernels::gpu::DeviceName;
use protocol::WireDtype;

use crate::{Global, ui};

/// Flags of `expert-server`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder, in Hugging Face layout.
    #[arg(long, env = "SWITCHYARD_MODEL")]
    model: PathBuf,
    /// Name, unique in the fleet and stable over restarts.
    #[arg(long, env = "SWITCHYARD_NAME", value_parser = NonEmptyStringValueParser::new())]
    name: String,
    /// Where clients connect; port 0 takes a free one.
    #[arg(long, env = "SWITCHYARD_LISTEN", default_value = "127.0.0.1:7171")]
    listen: SocketAddr,
    /// host:port that clients are told, where it differs from --listen.
    #[arg(long, env = "SWITCHYARD_ADVERTISE")]
    advertise: Option<String>,
    /// Where /metrics, /healthz and /readyz are served.
    #[arg(long, env = "SWITCHYARD_METRICS_LISTEN")]
    metrics_listen: Option<SocketAddr>,
    #[command(flatten)]
    control: super::ControlArgs,
    /// Experts to hold where there is no control plane: `all`, `0-3,8`, or by layer `0:0-3;1:4-7`.
    #[arg(long, env = "SWITCHYARD_EXPERTS", conflicts_with = "control_plane")]
    experts: Option<ExpertSelection>,
    /// Where slots, weights and arithmetic are: `cpu`, or a GPU as `cuda:0`, for clients on GPUs: of
    /// the same host, and of others with a network among --transport.
    #[arg(long, env = "SWITCHYARD_DEVICE", default_value = "cpu", value_name = "cpu|cuda:N")]
    device: Device,
    /// With a GPU: element type of requests, bf16 or fp8, the same for all clients.
    #[arg(long, env = "SWITCHYARD_DEVICE_DTYPE", default_value_t = WireDtype::Bf16)]
    device_dtype: WireDtype,
    /// With a GPU: batches under way at a time.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_BATCHES",
        default_value_t = 2,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=2)
    )]
    device_batches: usize,
    /// With a GPU: longest time that a batch waits for clients that were in the one before, at most half of
    /// that one's length; 0 waits for nobody.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_GATHER_US",
        default_value_t = 2000,
        value_parser = clap::value_parser!(u64).range(..=2000)
    )]
    device_gather_us: u64,
    /// With a GPU: multiprocessors that the experts use, and the kernel that answers, 0 for all. Fewer leave
    /// the others to whoever shares the GPU.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_BLOCKS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=1024)
    )]
    device_blocks: u32,
    /// With a GPU and clients over networks: threads that post for its kernels; 0 takes a quarter of the
    /// processors next to GPU and NIC, one to four.
    #[arg(
        long,
        env = "SWITCHYARD_PROXY_THREADS",
        default_value_t = 0,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(..=64)
    )]
    proxy_threads: usize,
    /// Compute threads; 0 takes as many as there are CPUs.
    #[arg(long, env = "SWITCHYARD_THREADS", default_value_t = 0)]
    threads: usize,
    /// CPUs of the compute threads, as in 0,1,2.
    #[arg(long, env = "SWITCHYARD_CPUS", value_delimiter = ',')]
    cpus: Vec<usize>,
    #[command(flatten)]
    slot: super::SlotArgs,
    #[command(flatten)]
    transport: super::TransportArgs,
    /// Most clients at a time.
    #[arg(
        long,
        env = "SWITCHYARD_MAX_LINKS",
        default_value_t = 4096,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..)
    )]
    max_links: usize,
    /// Most (layer, expert) pairs that the control plane may assign.
    #[arg(long, env = "SWITCHYARD_CAPACITY_EXPERTS")]
    capacity_experts: Option<u32>,
    /// Longest time that a drain (SIGTERM) may take.
    #[arg(long, env = "SWITCHYARD_DRAIN_TIMEOUT_MS", default_value_t = 30_000)]
    drain_timeout_ms: u64,
    /// Counts tokens per layer and expert in the metrics, not per expert alone.
    #[arg(long, env = "SWITCHYARD_METRICS_BY_LAYER", value_parser = clap::builder::FalseyValueParser::new())]
    metrics_by_layer: bool,
}

/// Where a server computes.
#[derive(Debug, Clone, Copy)]
pub enum Device {
    /// On processors.
    Cpu,
    /// On this GPU.
    Gpu(DeviceName),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        text.parse().map(Self::Gpu).map_err(|error| format!("{error}, or `cpu`"))
    }
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let placement = match (&args.control.control_plane, args.experts) {
        (Some(url), _) => {
            Placement::ControlPlane { url: url.clone(), token: args.control.token.clone() }
        }
        (None, Some(selection)) => Placement::Static(selection),
        (None, None) => anyhow::bail!(
            "nobody says which experts to hold: give --control-plane URL, or --experts all"
        ),
    };
    let mut config = ServerConfig::new(&args.model, args.name, placement);
    config.data_addr = args.listen;
    config.advertise_addr = args.advertise;
    config.metrics_addr = args.metrics_listen;
    config.num_threads = args.threads;
    config.cpus = args.cpus;
    config.slot = args.slot.config()?;
    let device = match args.device {
        Device::Cpu => {
            config.transports = args.transport.open(&mut args.transport.networks())?;
            "cpu".to_owned()
        }
        #[cfg(feature = "device")]
        Device::Gpu(name) => {
            config.device = Some(DeviceOptions {
                dtype: args.device_dtype,
                batches_in_flight: args.device_batches,
                gather: Duration::from_micros(args.device_gather_us),
                num_blocks: args.device_blocks,
                proxy_threads: args.proxy_threads,
                ..DeviceOptions::new(name)
            });
            config.transports = args.transport.open_for_device()?;
            name.to_string()
        }
        #[cfg(not(feature = "device"))]
        Device::Gpu(name) => return Err(super::no_device(name)),
    };
    config.ticket = args.control.token.map(Ticket::new);
    config.limits.max_links = args.max_links;
    config.capacity_experts = args.capacity_experts;
    config.drain_timeout = Duration::from_millis(args.drain_timeout_ms);
    config.metrics_by_layer = args.metrics_by_layer;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let json = global.json;
    runtime.block_on(async move {
        let shutdown = super::shutdown_signal()?;
        let bar = ui::steps_bar(json, 0, "loading experts");
        let loading = bar.clone();
        let server = ExpertServer::start(config, move |progress| {
            loading.set_length(progress.num_experts as u64);
            loading.set_position(progress.num_loaded as u64);
        })
        .await?;
        bar.finish_and_clear();
        let held = server.holds().num_experts();
        if json {
            ui::print_json_line(&serde_json::json!({
                "event": "listening",
                "name": server.name(),
                "addr": server.data_addr().to_string(),
                "metrics_addr": server.metrics_addr().map(|addr| addr.to_string()),
                "device": device,
                "experts": held,
                "expert_bytes": server.expert_bytes(),
            }))?;
        } else {
            outln!(
                "{} on {} with {held} experts on {device}, {:.2} GB",
                server.name(),
                server.data_addr(),
                server.expert_bytes() as f64 / 1e9
            );
            if let Some(addr) = server.metrics_addr() {
                outln!("metrics on http://{addr}/metrics");
            }
        }
        server.serving(SERVING_TIMEOUT).await?;
        if json {
            ui::print_json_line(&serde_json::json!({ "event": "serving", "name": server.name() }))?;
        }
        tokio::select! {
            () = shutdown => server.drain().await,
            ended = server.wait() => {
                ended?;
                anyhow::bail!("the server ended without being asked to");
            }
        }
        server.wait().await?;
        if json {
            ui::print_json_line(&serde_json::json!({ "event": "drained", "name": server.name() }))?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// A registered server that the control plane does not place within this time is misconfigured.
const SERVING_TIMEOUT: Duration = Duration::from_secs(60);
