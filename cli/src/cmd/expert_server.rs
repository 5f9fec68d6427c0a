//! `switchyard expert-server`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result};
use control_api::placement::is_host_port;
use control_api::trust::tls::is_valid_name;
use expert_server::device::DeviceOptions;
use expert_server::{
    DEFAULT_READ_LIMIT, ExpertSelection, ExpertServer, Placement, Secret, ServerConfig,
    ServerError, StartError, TicketMode, WeightsConfig, WeightsFrom,
};
use kernels::gpu::DeviceName;
use protocol::WireDtype;

use super::inspect::Verify;
use crate::{Global, host, ui};

/// Options of `expert-server`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder in the layout of the Hugging Face Hub.
    #[arg(long, env = "SWITCHYARD_MODEL", value_name = "DIR")]
    model: PathBuf,
    /// Name of the server. It must be unique in the fleet and stay the same over restarts.
    #[arg(long, env = "SWITCHYARD_NAME", value_parser = parse_name)]
    name: String,
    /// Address on which clients connect. Port 0 takes a free port.
    #[arg(
        long,
        env = "SWITCHYARD_LISTEN",
        value_name = "HOST:PORT",
        default_value = "127.0.0.1:7171"
    )]
    listen: SocketAddr,
    /// HOST:PORT that clients use to connect, if it differs from --listen. An IPv6 address stands in brackets:
    /// [HOST]:PORT.
    #[arg(
        long,
        env = "SWITCHYARD_ADVERTISE",
        value_name = "HOST:PORT",
        value_parser = parse_advertise
    )]
    advertise: Option<String>,
    /// Address that serves /metrics, /healthz and /readyz over HTTP. Without it, they are not served.
    #[arg(long, env = "SWITCHYARD_METRICS_LISTEN", value_name = "HOST:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// Bytes of the weights to verify. sampled: the fingerprint that peers compare, at least 64 KiB of every matrix.
    /// full: also all bytes of all experts of the folder. Of two servers of a fleet with `full` and different bytes,
    /// the second does not start. `inspect --verify full` prints the same digest.
    #[arg(long, env = "SWITCHYARD_VERIFY", default_value = "sampled", value_name = "sampled|full")]
    verify: Verify,
    #[command(flatten)]
    control: super::ControlArgs,
    /// Tickets of clients, for a server with a control plane. `required` admits clients with a ticket of the control
    /// plane only. `off` admits clients that have the same token as this server; it serves clients of a version without
    /// tickets while a fleet is updated.
    #[arg(long, env = "SWITCHYARD_TICKETS", default_value = "required")]
    tickets: Tickets,
    /// Experts to hold, for use without a control plane: `all`, `0-3,8`, or by layer `0:0-3;1:4-7`.
    #[arg(long, env = "SWITCHYARD_EXPERTS", value_name = "LIST", conflicts_with = "control_plane")]
    experts: Option<ExpertSelection>,
    /// Device that holds the weights and computes: `cpu`, or a GPU such as `cuda:0`. A server on a GPU serves
    /// clients on GPUs of the same host, and of other hosts if --transport includes a network.
    #[arg(long, env = "SWITCHYARD_DEVICE", default_value = "cpu", value_name = "cpu|cuda:N")]
    device: Device,
    /// GPU: number format of requests, bf16 or fp8. All clients must use it.
    #[arg(long, env = "SWITCHYARD_DEVICE_DTYPE", default_value_t = WireDtype::Bf16)]
    device_dtype: WireDtype,
    /// GPU: number of recorded graphs in progress at a time, 1 or 2. A graph has four batches.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_BATCHES",
        default_value_t = 2,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=2)
    )]
    device_batches: usize,
    /// GPU: longest time in microseconds that a batch waits for the clients of the previous batch, 0 to 2000.
    /// The wait is at most half of the previous batch's time and 15 µs. 0 does not wait.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_GATHER_US",
        default_value_t = 2000,
        value_parser = clap::value_parser!(u64).range(..=2000)
    )]
    device_gather_us: u64,
    /// GPU: number of multiprocessors for the experts and for sending results, up to 1024. 0 uses all. A
    /// smaller number leaves the others to other programs on the GPU.
    #[arg(
        long,
        env = "SWITCHYARD_DEVICE_BLOCKS",
        default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=1024)
    )]
    device_blocks: u32,
    /// GPU with clients over a network: number of threads that post requests for its kernels, up to 64. 0
    /// uses a quarter of the CPUs near GPU and NIC, at least 1 and at most 4.
    #[arg(
        long,
        env = "SWITCHYARD_PROXY_THREADS",
        default_value_t = 0,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(..=64)
    )]
    proxy_threads: usize,
    /// Number of compute threads, up to 1024. 0 uses one per CPU.
    #[arg(long, env = "SWITCHYARD_THREADS", default_value_t = 0, value_parser = super::threads())]
    threads: usize,
    /// CPUs to pin the compute threads to, such as 0,1,2. Default: no pinning.
    #[arg(long, env = "SWITCHYARD_CPUS", value_name = "LIST", value_delimiter = ',')]
    cpus: Vec<usize>,
    #[command(flatten)]
    slot: super::SlotArgs,
    #[command(flatten)]
    transport: super::TransportArgs,
    /// Largest number of connected clients.
    #[arg(
        long,
        env = "SWITCHYARD_MAX_LINKS",
        default_value_t = 4096,
        value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..)
    )]
    max_links: usize,
    /// Failure domain of this host, such as a rack. With `--placement load` the control plane spreads replicas of an
    /// expert over zones.
    #[arg(long, env = "SWITCHYARD_ZONE", value_parser = parse_zone)]
    zone: Option<String>,
    /// Largest number of experts that the control plane may assign, counted per layer, at least 1. Default: no limit.
    #[arg(long, env = "SWITCHYARD_CAPACITY_EXPERTS", value_parser = clap::value_parser!(u32).range(1..))]
    capacity_experts: Option<u32>,
    /// Source of the experts. auto: the model's files if the system has them in memory. If not, servers that hold them,
    /// then the disk. peers: servers that hold them. The folder needs only config.json. disk: the model's files.
    #[arg(
        long,
        env = "SWITCHYARD_WEIGHTS_FROM",
        default_value_t = WeightsFrom::Auto,
        value_name = "auto|peers|disk"
    )]
    weights_from: WeightsFrom,
    /// Address on which other servers connect to read the weights of this one. Default: a free port of the host of
    /// --listen.
    #[arg(long, env = "SWITCHYARD_WEIGHTS_LISTEN", value_name = "HOST:PORT")]
    weights_listen: Option<SocketAddr>,
    /// Bytes per second that all other servers together may read of this server's weights. 0 lets them read nothing.
    #[arg(
        long,
        env = "SWITCHYARD_PEER_READ_LIMIT",
        default_value_t = DEFAULT_READ_LIMIT,
        value_name = "BYTES"
    )]
    peer_read_limit: u64,
    /// Longest wait in milliseconds for the next expert of another server, for a server that needs them.
    #[arg(long, env = "SWITCHYARD_PEER_TIMEOUT_MS", default_value_t = 30_000)]
    peer_timeout_ms: u64,
    /// Longest time for a drain after SIGTERM, in milliseconds.
    #[arg(long, env = "SWITCHYARD_DRAIN_TIMEOUT_MS", default_value_t = 30_000)]
    drain_timeout_ms: u64,
    /// End after a drain by `drain` or `rollout`, as after SIGTERM. Use it where a supervisor starts the server again.
    #[arg(
        long,
        env = "SWITCHYARD_EXIT_WHEN_DRAINED",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    exit_when_drained: bool,
    /// Count tokens in the metrics per layer and expert, not only per expert.
    #[arg(long, env = "SWITCHYARD_METRICS_BY_LAYER", value_parser = clap::builder::FalseyValueParser::new())]
    metrics_by_layer: bool,
    #[command(flatten)]
    listener_tls: super::tls::ListenerTlsArgs,
    #[command(flatten)]
    trace: super::trace::TraceArgs,
}

/// Device of a server.
#[derive(Debug, Clone, Copy)]
pub enum Device {
    /// The CPUs.
    Cpu,
    /// A GPU.
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

/// Exit code of a server whose name another live process has. A restart does not help: a supervisor should not
/// repeat it.
pub const NAME_CONFLICT_EXIT_CODE: u8 = 78;

/// True if `error` says that another live process has the server's name.
pub fn is_name_conflict(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<StartError>().is_some_and(StartError::is_name_conflict)
            || matches!(
                cause.downcast_ref(),
                Some(ServerError::Membership { is_name_conflict: true, .. })
            )
    })
}

fn parse_advertise(text: &str) -> Result<String, String> {
    if is_host_port(text) {
        return Ok(text.to_owned());
    }
    let form = "host:port with a port above 0, or [host]:port for an IPv6 address";
    Err(match text.contains('%') {
        // A zone is the name of an interface of this host.
        true => format!("expected {form} without a zone, which means nothing on other hosts"),
        false => format!("expected {form}"),
    })
}

fn parse_name(text: &str) -> Result<String, String> {
    match is_valid_name(text) {
        true => Ok(text.to_owned()),
        false => {
            Err("expected 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit"
                .to_owned())
        }
    }
}

fn parse_zone(text: &str) -> Result<String, String> {
    let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic());
    match (1..=128).contains(&text.len()) && is_visible {
        true => Ok(text.to_owned()),
        false => Err("expected 1 to 128 visible ASCII characters".to_owned()),
    }
}

/// Tickets of clients.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Tickets {
    /// Clients need one.
    Required,
    /// Clients need the token.
    Off,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    // Weights stay in mapped files.
    checkpoint::report_unreadable_files().context("cannot install a handler of SIGBUS")?;
    let token = args.control.token()?;
    let placement = match (args.control.url(), args.experts) {
        (Some(url), _) => Placement::ControlPlane { url, token: token.clone() },
        (None, Some(selection)) => Placement::Static(selection),
        (None, None) => {
            anyhow::bail!("no experts to hold: give --control-plane URL, or --experts all")
        }
    };
    let mut config = ServerConfig::new(&args.model, args.name, placement);
    config.verify = args.verify.coverage();
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
    };
    config.security = args.control.tls.listener_security(args.listener_tls)?;
    let scheme = if config.security.for_listener().is_some() { "https" } else { "http" };
    config.secret = token.map(Secret::new);
    config.token_file = args.control.token_file().map(Path::to_owned);
    config.tickets = match args.tickets {
        Tickets::Required => TicketMode::Required,
        Tickets::Off => TicketMode::Off,
    };
    config.limits.max_links = args.max_links;
    config.capacity_experts = args.capacity_experts;
    config.zone = args.zone;
    config.weights = WeightsConfig {
        from: args.weights_from,
        listen: args.weights_listen,
        read_limit: args.peer_read_limit,
        peer_timeout: Duration::from_millis(args.peer_timeout_ms),
        ..WeightsConfig::default()
    };
    config.drain_timeout = Duration::from_millis(args.drain_timeout_ms);
    config.metrics_by_layer = args.metrics_by_layer;
    config.recorder = args.trace.start("switchyard-server", &config.name)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let json = global.json;
    let ended = runtime.block_on(async move {
        let mut shutdown = Box::pin(super::shutdown_signal()?);
        let name = config.name.clone();
        let bar = ui::bytes_bar(json, 0, "loading experts");
        let loading = bar.clone();
        let memory = host::memory(std::path::Path::new("/"));
        let mut has_warned = false;
        let starting = ExpertServer::start(config, move |progress| {
            // Experts of one layer shape: the bytes of the rest follow from the bytes so far.
            let done = progress.num_loaded.max(1) as u64;
            let expected = progress.loaded_bytes / done * progress.num_experts as u64;
            if let Some(memory) = memory.as_ref().filter(|memory| memory.total < expected)
                && !std::mem::replace(&mut has_warned, true)
            {
                tracing::warn!(
                    expected_bytes = expected,
                    memory_bytes = memory.total,
                    limit = ?memory.limit,
                    "the experts are larger than the memory that this process may use: every batch will read files again; \
                     raise the limit, or let more servers share the experts"
                );
            }
            loading.set_length(expected);
            loading.set_position(progress.loaded_bytes);
        });
        // Nothing is served yet, so nothing has to be finished.
        let server = tokio::select! {
            server = starting => server?,
            () = &mut shutdown => {
                bar.finish_and_clear();
                return stopped_early(json, &name);
            }
        };
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
                "full_digest": server.full_digest().map(|digest| digest.to_string()),
            }))?;
        } else {
            outln!(
                "{} on {} with {held} experts on {device}, {:.2} GB",
                server.name(),
                server.data_addr(),
                server.expert_bytes() as f64 / 1e9
            );
            if let Some(digest) = server.full_digest() {
                outln!("all bytes {digest}");
            }
            if let Some(addr) = server.metrics_addr() {
                outln!("metrics on {scheme}://{addr}/metrics");
            }
        }
        let is_serving = tokio::select! {
            serving = server.serving(SERVING_TIMEOUT) => serving.map(|()| true)?,
            () = &mut shutdown => false,
        };
        if json && is_serving {
            ui::print_json_line(&serde_json::json!({ "event": "serving", "name": server.name() }))?;
        }
        let asked_to_end = async {
            if is_serving {
                shutdown.await;
            }
        };
        tokio::select! {
            () = asked_to_end => {
                // A second signal ends the process at once.
                let impatient = super::shutdown_signal()?;
                tokio::select! {
                    () = server.drain() => {}
                    () = impatient => return stopped_early(json, &name),
                }
            }
            () = drained(&server), if args.exit_when_drained => server.drain().await,
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
    });
    // Threads that load experts would otherwise be waited for.
    runtime.shutdown_background();
    ended
}

/// The end of a server by a signal, without a drain.
fn stopped_early(json: bool, name: &str) -> Result<ExitCode> {
    match json {
        true => ui::print_json_line(&serde_json::json!({ "event": "stopped", "name": name }))?,
        false => outln!("{name} ends without a drain"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Completes once the server is drained. A drain that is taken back at once may pass unnoticed.
async fn drained(server: &expert_server::RunningServer) {
    while !server.is_draining() {
        tokio::time::sleep(DRAIN_POLL).await;
    }
}

const DRAIN_POLL: Duration = Duration::from_millis(100);
/// Timeout for the control plane to place a registered server.
const SERVING_TIMEOUT: Duration = Duration::from_secs(60);
