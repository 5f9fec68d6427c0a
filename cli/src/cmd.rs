//! One module per command, and the options that commands share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use attention_client::{ClientModel, MoeClient, MoeClientBuilder};
use checkpoint::{Checkpoint, OpenError};
use control_api::{
    ClientOptions, ControlClient, ControlError, EditionInfo, EditionState, ModelDescriptor,
    Security, TensorDigest, code,
};
#[cfg(feature = "ibgda")]
use p2p_core::transports::NetworkOpener;
use p2p_core::{OpenNetworks, TransportKind, TransportSpec, Transports};
use protocol::WireDtype;

use crate::cluster::{ClusterOptions, LocalCluster};
use crate::{Global, ui};

pub mod bench;
pub mod certs;
pub mod control_plane;
pub mod demo;
pub mod doctor;
pub mod drain;
pub mod expert_server;
pub mod generate;
pub mod inspect;
pub mod layer;
pub mod make_checkpoint;
pub mod model;
pub mod plan;
pub mod rollout;
pub mod scale;
pub mod status;
#[cfg(test)]
mod tests;
pub mod tls;
pub mod token;
pub mod top;
pub mod trace;

/// Options for reaching a control plane.
#[derive(Debug, Clone, clap::Args)]
pub struct ControlArgs {
    /// URL of the control plane, such as https://10.0.0.5:7070, or http:// on this host. Give each of several control
    /// planes of one fleet, with commas between them or by repeating the option: requests go to the next one if one does
    /// not answer.
    /// The form dns://HOST:PORT means every address of a name. The form k8s://NAMESPACE/SERVICE[:PORT] means every ready
    /// endpoint of a Service of Kubernetes; PORT is a name or a number of a port of its pods.
    #[arg(long, env = "SWITCHYARD_CONTROL_PLANE", value_name = "URL", value_delimiter = ',')]
    pub control_plane: Vec<String>,
    /// Bearer token of this process. Prefer the environment variable or --token-file: other users of the host can see
    /// arguments.
    #[arg(long, env = "SWITCHYARD_TOKEN", hide_env_values = true)]
    pub(crate) token: Option<String>,
    /// File with the bearer token in one line, if --token is not given. It is read again when the control plane refuses
    /// the token, so that a token can be replaced while the process runs.
    #[arg(long, env = "SWITCHYARD_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    #[command(flatten)]
    pub tls: tls::TlsArgs,
}

impl ControlArgs {
    /// The URLs with commas between them, as clients take them.
    pub fn url(&self) -> Option<String> {
        (!self.control_plane.is_empty()).then(|| self.control_plane.join(","))
    }

    /// The URLs, or an error that explains how to set them.
    pub fn required_url(&self) -> Result<String> {
        self.url()
            .context("no control plane given: use --control-plane URL or SWITCHYARD_CONTROL_PLANE")
    }

    /// The token, given or read from its file.
    pub fn token(&self) -> Result<Option<String>> {
        given_or_read(self.token.as_ref(), self.token_file())
    }

    /// The file of the token, unless the token itself is given.
    pub fn token_file(&self) -> Option<&Path> {
        self.token_file.as_deref().filter(|_| self.token.is_none())
    }

    /// A client of the control planes at `url`.
    pub fn client(&self, url: &str) -> Result<ControlClient> {
        let mut options = ClientOptions::default();
        options.security = self.tls.security()?;
        Ok(match self.token_file() {
            Some(path) => ControlClient::with_options(url, None, options)?.with_token_file(path)?,
            None => ControlClient::with_options(url, self.token.clone(), options)?,
        })
    }
}

/// A secret, or else the text of its file without line breaks at the end.
pub fn given_or_read(given: Option<&String>, file: Option<&Path>) -> Result<Option<String>> {
    let (None, Some(file)) = (given, file) else { return Ok(given.cloned()) };
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read {}", file.display()))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        bail!("{} is empty: expected one line with the secret", file.display());
    }
    Ok(Some(text.to_owned()))
}

/// Slot geometry. Client and server must use the same.
#[derive(Debug, Clone, clap::Args)]
pub struct SlotArgs {
    /// Size of a slot in bytes. A slot is the memory of a process that one peer may write. Clients and
    /// servers need the same value.
    #[arg(long, env = "SWITCHYARD_SLOT_BYTES", default_value_t = p2p_core::slot::DEFAULT_SLOT_BYTES)]
    pub slot_bytes: usize,
    /// Number of frames per slot. A client can fill the other frames while the server computes one. Clients
    /// and servers need the same value.
    #[arg(long, env = "SWITCHYARD_SLOT_FRAMES", default_value_t = p2p_core::slot::DEFAULT_NUM_FRAMES)]
    pub slot_frames: usize,
}

impl SlotArgs {
    /// The validated configuration.
    pub fn config(&self) -> Result<p2p_core::SlotConfig> {
        let config =
            p2p_core::SlotConfig { slot_bytes: self.slot_bytes, num_frames: self.slot_frames };
        p2p_core::SlotLayout::new(config).context("--slot-bytes and --slot-frames")?;
        Ok(config)
    }

    /// The same as arguments of a child process.
    pub fn to_args(&self) -> Vec<String> {
        [
            "--slot-bytes",
            &self.slot_bytes.to_string(),
            "--slot-frames",
            &self.slot_frames.to_string(),
        ]
        .map(str::to_owned)
        .to_vec()
    }
}

/// Transports to offer.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TransportArgs {
    /// Transports in order of preference: auto, or a comma-separated list of shm, staged, verbs[:PORTS],
    /// libfabric[:PROVIDER] and, between GPUs, ibgda[:PORT]. PORTS is a list such as mlx5_0:1+mlx5_1,
    /// near=0000:3b:00.0 (ports near a PCI device) or node=1 (ports of a NUMA node). PORT is one port, such
    /// as mlx5_0:1.
    #[arg(long, env = "SWITCHYARD_TRANSPORT", value_name = "LIST", default_value_t)]
    pub transport: TransportSpec,
    /// Settings of RDMA devices as JSON, such as {"gid_index": 3, "traffic_class": 106}.
    #[cfg(feature = "verbs")]
    #[arg(long, env = "SWITCHYARD_VERBS_CONFIG", value_name = "JSON", value_parser = verbs_config)]
    pub verbs_config: Option<verbs_transport::VerbsConfig>,
    #[cfg(feature = "ibgda")]
    #[command(flatten)]
    pub ibgda: IbgdaArgs,
}

/// Settings of the transport ibgda.
#[cfg(feature = "ibgda")]
#[derive(Debug, Clone, Copy, clap::Args, serde::Serialize, serde::Deserialize)]
pub struct IbgdaArgs {
    /// ibgda: memory of the slots, `gpu` or `host` (page-locked). With `auto` it is the GPU's if the NIC can access
    /// it, otherwise the host's.
    #[arg(long, env = "SWITCHYARD_IBGDA_SLOTS", default_value_t, value_name = "auto|gpu|host")]
    #[serde(with = "by_name")]
    pub ibgda_slots: ibgda_network::SlotPlace,
    /// ibgda: method of creating queues. plain: libibverbs. devx: commands to the NIC's firmware.
    #[arg(long, env = "SWITCHYARD_IBGDA_PATH", default_value_t = Self::default().ibgda_path, value_name = "plain|devx")]
    #[serde(with = "by_name")]
    pub ibgda_path: ibgda::QueuePath,
    /// ibgda: doorbell of the queues. record: with a doorbell record in memory. register: by register only,
    /// which needs devx and a NIC that supports it.
    #[arg(long, env = "SWITCHYARD_IBGDA_DOORBELL", default_value_t = Self::default().ibgda_doorbell, value_name = "record|register")]
    #[serde(with = "by_name")]
    pub ibgda_doorbell: ibgda::Doorbell,
    /// ibgda: queues per peer on which kernels post requests, 1 to 64. Clients and servers need the same
    /// value.
    #[arg(
        long,
        env = "SWITCHYARD_IBGDA_QUEUES",
        default_value_t = Self::default().ibgda_queues,
        value_parser = clap::value_parser!(u8).range(1..=64)
    )]
    pub ibgda_queues: u8,
    /// ibgda: longest single wait of a kernel for a queue, in milliseconds, 1 to 9000. After it, the peer
    /// counts as failed.
    #[arg(
        long,
        env = "SWITCHYARD_IBGDA_WAIT_LIMIT_MS",
        default_value_t = Self::default().ibgda_wait_limit_ms,
        // A server drops all clients over networks when a batch does not end within 15 s. A shorter wait
        // reports the failed peer before that.
        value_parser = clap::value_parser!(u64).range(1..=9_000)
    )]
    pub ibgda_wait_limit_ms: u64,
}

#[cfg(feature = "ibgda")]
impl Default for IbgdaArgs {
    fn default() -> Self {
        let ibgda_network::DeviceConfig { num_queues, queue, wait_limit, slots } =
            Default::default();
        Self {
            ibgda_slots: slots,
            ibgda_path: queue.path,
            ibgda_doorbell: queue.doorbell,
            ibgda_queues: u8::try_from(num_queues).unwrap_or(u8::MAX),
            ibgda_wait_limit_ms: wait_limit.as_millis() as u64,
        }
    }
}

#[cfg(feature = "ibgda")]
impl IbgdaArgs {
    fn config(self) -> ibgda_network::DeviceConfig {
        ibgda_network::DeviceConfig {
            slots: self.ibgda_slots,
            num_queues: self.ibgda_queues.into(),
            queue: ibgda::QueueConfig {
                path: self.ibgda_path,
                doorbell: self.ibgda_doorbell,
                ..Default::default()
            },
            wait_limit: std::time::Duration::from_millis(self.ibgda_wait_limit_ms),
        }
    }

    /// The same as arguments of a child process.
    fn to_args(self) -> Vec<String> {
        [
            "--ibgda-slots",
            self.ibgda_slots.name(),
            "--ibgda-path",
            self.ibgda_path.name(),
            "--ibgda-doorbell",
            self.ibgda_doorbell.name(),
            "--ibgda-queues",
            &self.ibgda_queues.to_string(),
            "--ibgda-wait-limit-ms",
            &self.ibgda_wait_limit_ms.to_string(),
        ]
        .map(str::to_owned)
        .to_vec()
    }
}

/// Serialises a value by its name.
#[cfg(feature = "ibgda")]
mod by_name {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'a, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'a>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(feature = "verbs")]
pub fn verbs_config(text: &str) -> Result<verbs_transport::VerbsConfig, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

impl TransportArgs {
    /// The networks with these settings. None is open yet.
    pub fn networks(&self) -> OpenNetworks {
        #[cfg(feature = "verbs")]
        let verbs = self.verbs_config.clone().unwrap_or_default();
        let networks = OpenNetworks::default();
        #[cfg(feature = "verbs")]
        let networks = networks.with(verbs_transport::opener(verbs.clone()));
        #[cfg(feature = "libfabric")]
        let networks = networks.with(libfabric_transport::opener());
        #[cfg(feature = "ibgda")]
        let networks = {
            let config = self.ibgda.config();
            #[cfg(feature = "verbs")]
            let port = ibgda::NicConfig {
                gid_idx: verbs.gid_index,
                traffic_class: verbs.traffic_class,
                service_level: verbs.service_level,
                ..ibgda::NicConfig::default()
            };
            #[cfg(not(feature = "verbs"))]
            let port = ibgda::NicConfig::default();
            networks.with(NetworkOpener::new(TransportKind::Ibgda, move |name, networks| {
                ibgda_network::open(name, networks, &port, config)
            }))
        };
        networks
    }

    /// Opens the transports for slots in host memory.
    pub fn open(&self, networks: &mut OpenNetworks) -> Result<Transports> {
        for_hosts(&self.transport).context("--transport")?;
        self.open_any(networks)
    }

    fn open_any(&self, networks: &mut OpenNetworks) -> Result<Transports> {
        let transports = networks.open(&self.transport).context("--transport")?;
        for line in &transports.missing {
            tracing::debug!("{line}");
        }
        Ok(transports)
    }

    /// As [`open`](Self::open), for slots in GPU memory. `auto` is only the transports within a host: with a
    /// network, kernels would have to check the path of each peer.
    pub fn open_for_device(&self) -> Result<Transports> {
        match &self.transport {
            TransportSpec::Auto => Ok(vec![TransportKind::Local, TransportKind::Shm].into()),
            TransportSpec::List(_) => self.open_any(&mut self.networks()),
        }
    }

    /// The same as arguments of a child process, with `spec` for the transports.
    fn to_args(&self, spec: &TransportSpec) -> Vec<String> {
        #[allow(unused_mut, reason = "depends on the features")]
        let mut args = vec!["--transport".to_owned(), spec.to_string()];
        #[cfg(feature = "verbs")]
        if let Some(config) = &self.verbs_config
            && let Ok(text) = serde_json::to_string(config)
        {
            args.extend(["--verbs-config".to_owned(), text]);
        }
        #[cfg(feature = "ibgda")]
        args.extend(self.ibgda.to_args());
        args
    }
}

/// Refuses transports that cannot carry slots in host memory.
fn for_hosts(spec: &TransportSpec) -> Result<()> {
    let TransportSpec::List(wishes) = spec else { return Ok(()) };
    let only_gpus = wishes.iter().find(|wish| wish.kind == TransportKind::Ibgda);
    only_gpus.map_or(Ok(()), |wish| {
        bail!("{wish} is for slots of GPUs: give --device cuda:N, or use verbs")
    })
}

/// Transports to one server.
#[derive(Debug, Clone)]
pub struct PeerTransport {
    server: String,
    spec: TransportSpec,
}

impl std::str::FromStr for PeerTransport {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let (server, spec) = text.split_once('=').with_context(|| {
            format!("`{text}` is not NAME=TRANSPORTS, such as server-1=libfabric")
        })?;
        Ok(Self { server: server.to_owned(), spec: spec.parse()? })
    }
}

/// A local cluster for one command, for use without --control-plane.
#[derive(Debug, Clone, clap::Args)]
pub struct LocalArgs {
    /// Number of expert servers to start on this host for this command. Ignored with --control-plane.
    #[arg(long, env = "SWITCHYARD_SERVERS", default_value_t = 4)]
    pub servers: usize,
    /// Replicas of each expert, on distinct servers. Ignored with --control-plane.
    #[arg(long, env = "SWITCHYARD_REPLICAS", default_value_t = 2)]
    pub replicas: usize,
}

/// The given checkpoint, or else the small model of this repository.
pub fn model_or_tiny(model: Option<PathBuf>) -> Result<PathBuf> {
    if let Some(model) = model {
        return Ok(model);
    }
    let here = PathBuf::from("data/tiny-moe");
    // The model in the checkout that this binary was built from.
    let built_from = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"));
    // The model in the container image.
    let installed = PathBuf::from("/usr/share/switchyard/tiny-moe");
    [here, built_from, installed]
        .into_iter()
        .find(|dir| dir.join("config.json").is_file())
        .context("no --model given, and there is no folder data/tiny-moe: give a checkpoint folder")
}

/// Opens a checkpoint and writes its warnings to standard error.
pub fn open_checkpoint(dir: &Path) -> Result<Arc<Checkpoint>> {
    warn_about(Checkpoint::open(dir), dir)
}

/// As [`open_checkpoint`], for a client: with servers elsewhere, the folder needs no experts.
pub fn open_client_checkpoint(dir: &Path, control: &ControlArgs) -> Result<Arc<Checkpoint>> {
    match control.url() {
        Some(_) => warn_about(Checkpoint::open_without_experts(dir), dir),
        None => open_checkpoint(dir),
    }
}

fn warn_about(opened: Result<Checkpoint, OpenError>, dir: &Path) -> Result<Arc<Checkpoint>> {
    let checkpoint = opened.with_context(|| format!("cannot open {}", dir.display()))?;
    for warning in checkpoint.warnings() {
        ui::write_err(format_args!("warning: {warning}\n"));
    }
    Ok(Arc::new(checkpoint))
}

/// Completes on the first SIGTERM or SIGINT.
pub fn shutdown_signal() -> Result<impl Future<Output = ()> + Send + 'static> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Parses a whole fingerprint of a model. Tables show its first digits only, which servers do not have.
pub fn fingerprint(text: &str) -> Result<String, String> {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if text.len() == FINGERPRINT_DIGITS && text.bytes().all(is_digit) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "found {} characters, expected {FINGERPRINT_DIGITS} lowercase hex digits, as `switchyard inspect MODEL --verify \
         sampled` prints them; tables show the first ones only",
        text.chars().count()
    ))
}

const FINGERPRINT_DIGITS: usize = 64;

/// Parser of a number of compute threads. Far more than CPUs would end in a panic where the system starts no more.
pub fn threads() -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(..=1024)
}

/// Options of a client.
#[derive(Debug, Clone, clap::Args)]
pub struct ClientArgs {
    /// Number format of tokens sent to servers: f32, f16, bf16 or fp8.
    #[arg(long, env = "SWITCHYARD_WIRE_DTYPE", default_value = "f32")]
    pub wire_dtype: WireDtype,
    /// Number format of results sent back: f32, f16, bf16 or fp8. Default: the format of tokens, or bf16 if
    /// that is fp8.
    #[arg(long, env = "SWITCHYARD_RESPONSE_DTYPE")]
    pub response_dtype: Option<WireDtype>,
    /// Timeout in milliseconds: a server that sends neither results nor progress for this time counts as
    /// failed, and its tokens are resent to another replica.
    #[arg(long, env = "SWITCHYARD_DEADLINE_MS", default_value_t = 100)]
    pub deadline_ms: u64,
    /// Most hedges per frame of tokens, 0 to 1. A frame whose results are late is sent to another replica too, and
    /// the first results count. Slow servers also get less. 0 turns both off.
    #[arg(long, env = "SWITCHYARD_HEDGE_BUDGET", default_value_t = 0.05)]
    pub hedge_budget: f64,
    #[command(flatten)]
    pub slot: SlotArgs,
    #[command(flatten)]
    pub transport: TransportArgs,
    #[command(flatten)]
    pub trace: trace::TraceArgs,
    /// Transports to the server NAME, instead of --transport. May be given several times.
    #[arg(
        long,
        env = "SWITCHYARD_PEER_TRANSPORT",
        value_delimiter = ' ',
        value_name = "NAME=TRANSPORTS"
    )]
    pub peer_transport: Vec<PeerTransport>,
}

impl ClientArgs {
    /// Arguments of an expert server that this client can talk to.
    pub fn server_args(&self) -> Vec<String> {
        let mut args = self.slot.to_args();
        let mut spec = self.transport.transport.clone();
        if let TransportSpec::List(wishes) = &mut spec {
            for peer in &self.peer_transport {
                match &peer.spec {
                    TransportSpec::Auto => {}
                    TransportSpec::List(more) => wishes.extend(more.iter().cloned()),
                }
            }
        }
        args.extend(self.transport.to_args(&spec));
        args.extend(self.trace.to_args());
        args
    }

    /// A builder with these settings.
    pub fn builder(&self, model: ClientModel) -> Result<MoeClientBuilder> {
        let response = self.response_dtype.unwrap_or(match self.wire_dtype {
            WireDtype::F8E4m3 => WireDtype::Bf16,
            other => other,
        });
        let mut networks = self.transport.networks();
        let mut builder = MoeClient::builder(model);
        for peer in &self.peer_transport {
            for_hosts(&peer.spec).context("--peer-transport")?;
            let transports = networks.open(&peer.spec).context("--peer-transport")?;
            builder = builder.peer_transports(&peer.server, transports);
        }
        let instance = format!("client-{}", std::process::id());
        if let Some(recorder) = self.trace.start("switchyard-client", &instance)? {
            builder = builder.recorder(recorder);
        }
        Ok(builder
            .transports(self.transport.open(&mut networks)?)
            .wire_dtype(self.wire_dtype)
            .response_dtype(response)
            .deadline(Duration::from_millis(self.deadline_ms))
            .hedge_budget(self.hedge_budget)
            .slot(self.slot.config()?))
    }
}

/// A client, and the local cluster that was started for it, if any.
#[derive(Debug)]
pub struct Service {
    /// The client; dropped before the cluster.
    pub client: MoeClient,
    /// The local cluster; `None` with `--control-plane`.
    _cluster: Option<LocalCluster>,
}

impl Service {
    /// Connects to the given control plane, or starts a local cluster.
    pub fn open(
        global: &Global,
        checkpoint: &Checkpoint,
        control: &ControlArgs,
        local: &LocalArgs,
        client: &ClientArgs,
    ) -> Result<Self> {
        let mut model = ClientModel::of(checkpoint);
        let mut security = Security::default();
        if let Some(url) = control.url() {
            let asked = control.client(&url)?;
            security = asked.options().security.clone();
            model = check_cluster(&model, checkpoint, &url, &asked)?;
        }
        let builder = client.builder(model)?;
        let builder =
            builder.token_file(control.url().and(control.token_file().map(Path::to_owned)));
        let (cluster, url, token) = match control.url() {
            Some(url) => (None, url, control.token()?),
            None => {
                let mut options = ClusterOptions::new(checkpoint.dir())?;
                options.num_servers = local.servers;
                options.replicas = local.replicas;
                options.server_args = client.server_args();
                options.tls = true;
                let cluster = start_cluster(global, options)?;
                let (url, token) = (cluster.control_url(), cluster.token().to_owned());
                security = cluster.security();
                (Some(cluster), url, Some(token))
            }
        };
        let builder = builder.control_plane(url, token.clone()).secret(token);
        let client = builder.security(security).build()?;
        client.wait_ready(READY_TIMEOUT)?;
        Ok(Self { client, _cluster: cluster })
    }
}

/// The client's counters of errors that must never happen.
#[derive(Debug, Clone, Copy)]
pub struct Counters {
    /// Calls that returned without the results of some (token, expert) pairs.
    pub lost: u64,
    /// Calls that counted some (token, expert) pairs twice.
    pub duplicated: u64,
}

impl Counters {
    /// The current values.
    pub fn read(client: &MoeClient) -> Self {
        let families = client.registry().gather();
        let value = |name: &str| {
            families
                .iter()
                .find(|family| family.name() == name)
                .and_then(|family| family.get_metric().first())
                .map_or(0, |metric| metric.get_counter().get_value() as u64)
        };
        Self {
            lost: value("switchyard_client_lost_requests_total"),
            duplicated: value("switchyard_client_duplicated_requests_total"),
        }
    }
}

/// Checks, before connecting to servers, that the control plane is reachable, accepts the token, and serves
/// the model of the checkpoint. Returns that model with its fingerprint: of two models during an update, it is the one
/// with the checkpoint's weights.
fn check_cluster(
    model: &ClientModel,
    checkpoint: &Checkpoint,
    url: &str,
    control: &ControlClient,
) -> Result<ClientModel> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let Some(served) = runtime.block_on(wait_for_model(control, url))? else {
        bail!("no expert server has joined the control plane at {url} yet");
    };
    let mut candidates = vec![served];
    match runtime.block_on(control.models()) {
        Ok(list) => {
            let usable = |edition: &EditionInfo| {
                matches!(edition.state, EditionState::Next | EditionState::Retiring)
            };
            let others = list.editions.into_iter().filter(usable);
            candidates.extend(others.filter_map(|edition| edition.model));
        }
        // A control plane of an earlier version has one model.
        Err(error) if error.code() == Some(code::NOT_FOUND) => {}
        Err(error) => return Err(error).context("cannot ask for the fleet's models"),
    }
    let mut refusal = None;
    for served in candidates {
        match runtime.block_on(mismatch(model, checkpoint, control, &served))? {
            None => {
                let pinned = ClientModel::from_descriptor(&served, model.shape.num_layers);
                return Ok(pinned.unwrap_or_else(|_| model.clone()));
            }
            Some((what, difference)) => {
                refusal.get_or_insert_with(|| {
                    let dir = checkpoint.dir().display();
                    anyhow!("the servers at {url} serve {what} than {dir}: {difference}")
                });
            }
        }
    }
    Err(refusal.unwrap_or_else(|| anyhow!("the control plane at {url} has no model")))
}

/// The differences between the model that servers serve and the checkpoint. `None` if there are none.
async fn mismatch(
    model: &ClientModel,
    checkpoint: &Checkpoint,
    control: &ControlClient,
    served: &ModelDescriptor,
) -> Result<Option<(&'static str, String)>> {
    if let Some(difference) = model.difference(served) {
        return Ok(Some(("another model", difference)));
    }
    if !checkpoint.has_experts() {
        return Ok(None);
    }
    let difference = match control.model_digests_of(&served.fingerprint).await {
        Ok(fleet) => differing_tensor(checkpoint, &fleet.tensors)
            .map(|tensor| format!("the weights differ, first in tensor '{tensor}'")),
        // No member has sent digests since the control plane started. A folder with some of the experts has no
        // fingerprint.
        Err(error) if error.code() == Some(code::NOT_FOUND) => {
            ClientModel::with_weights_of(checkpoint).ok().and_then(|m| m.difference(served))
        }
        Err(error) => return Err(error).context("cannot compare the weights with the fleet's"),
    };
    Ok(difference.map(|difference| ("other weights", difference)))
}

/// The first of a few of the fleet's tensors that the checkpoint has with other values. Other weights of the same model
/// differ in nearly all tensors, so a few show it, and a large checkpoint is not read as a whole.
fn differing_tensor<'a>(checkpoint: &Checkpoint, fleet: &'a [TensorDigest]) -> Option<&'a str> {
    let differs = |tensor: &&TensorDigest| {
        let digest = checkpoint.sampled_digest(&tensor.name);
        digest
            .is_some_and(|d| u128::from_str_radix(&tensor.digest, 16) != Ok(u128::from_be_bytes(d)))
    };
    let step = fleet.len().div_ceil(COMPARED_TENSORS).max(1);
    fleet.iter().step_by(step).find(differs).map(|tensor| tensor.name.as_str())
}

/// The fleet's model. A control plane that has just started may have lost its state: its servers register again
/// within a lease, so the call waits until then.
async fn wait_for_model(
    control: &ControlClient,
    url: &str,
) -> Result<Option<ModelDescriptor>, ControlError> {
    let mut has_message = false;
    loop {
        let status = control.status().await?;
        let until = Duration::from_millis(status.lease_ttl_ms) + Duration::from_secs(1);
        let left = until.saturating_sub(Duration::from_millis(status.uptime_ms));
        if status.model.is_some() || left.is_zero() {
            return Ok(status.model);
        }
        if !std::mem::replace(&mut has_message, true) {
            ui::write_err(format_args!(
                "the control plane at {url} started {:.1} s ago and has no server yet; waiting {:.1} s\n",
                status.uptime_ms as f64 / 1e3,
                left.as_secs_f64()
            ));
        }
        tokio::time::sleep(left.min(Duration::from_millis(100))).await;
    }
}

/// Starts a cluster with a progress bar.
pub fn start_cluster(global: &Global, options: ClusterOptions) -> Result<LocalCluster> {
    let total = options.num_servers;
    let bar = ui::steps_bar(global.json, total as u64, "starting servers");
    let cluster = LocalCluster::start(options, &mut |serving| bar.set_position(serving as u64))?;
    bar.finish_and_clear();
    Ok(cluster)
}

/// Most tensors that a client compares with those of the fleet.
const COMPARED_TENSORS: usize = 256;
/// Running servers connect within milliseconds. The rest is for hosts under load.
pub const READY_TIMEOUT: Duration = Duration::from_secs(30);
